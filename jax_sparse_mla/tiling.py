"""How the reference cuts its work, for a CPU and for a GPU."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_sparse_mla.kernel.contract import LATENT_DIM, ROPE_DIM


class Tiling(NamedTuple):
    """How the work is cut."""

    rows: int
    """Rows a block."""
    entries: int
    """Entries a tile."""
    dtype: DTypeLike
    """Operands of the matrix products; everything else is float32."""
    logits: Literal["rth", "rht"]
    """Order of the axes of the logits: row, entry and head."""
    joint: bool
    """One product over latent and rope together, or one over each and their sum."""
    decode_first: int | None
    """Decode the whole cache first where the entries are at least so many times its records."""


# On a CPU one row's matrix products keep a core busy, and their operands fit its cache.
CPU_TILING = Tiling(1, 128, jnp.float32, "rth", joint=False, decode_first=None)


def gpu_tiling(num_heads: int, width: int, exact_in_bfloat16: bool) -> Tiling:
    """Blocks large enough to fill a GPU, within 256 MiB of values and logits.

    Args:
      num_heads: H.
      width: the longest row there can be.
      exact_in_bfloat16: whether values are, as an e4m3 code times a power of two is.
    """
    entries = min(2048, max(1, -(-width // 128)) * 128)
    bytes_an_entry = (2 if exact_in_bfloat16 else 4) * (LATENT_DIM + ROPE_DIM) + 11 * num_heads
    rows = max(8, (1 << 28) // (entries * bytes_an_entry) // 8 * 8)
    if exact_in_bfloat16:
        return Tiling(rows, entries, jnp.bfloat16, "rht", joint=True, decode_first=8)
    return Tiling(rows, entries, jnp.float32, "rht", joint=True, decode_first=None)
