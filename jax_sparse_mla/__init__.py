"""Sparse multi-head latent attention for JAX."""

__version__ = "0.1.0"
