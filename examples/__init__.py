"""Models that use jax_sparse_mla."""
