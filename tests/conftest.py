"""Attaches the simulator: tests that ask for the kernel run its machine code on the CPU."""

import os

from gfx950_sim.hip import build

# Before anything imports jax_sparse_mla: the shim registers for "cpu" only if this is set.
os.environ.setdefault("JAX_SPARSE_MLA_HIP_LIBRARY", str(build()))
