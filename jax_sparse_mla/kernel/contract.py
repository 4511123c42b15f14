"""The launch contract: what the kernel, the lowering, the shim and the simulator agree on.

One launch computes ``m`` rows (a row is one query, or one split of a query's entries) for ``H``
heads. A workgroup computes one (row, head group); head groups hold 16 heads.
"""

from typing import NamedTuple

VERSION = 1
"""Part of the custom call's target name.

Raised whenever a call made under the contract as it was would no longer be right.
"""

ARCH = "gfx950"
HEADS_PER_GROUP = 16
LATENT_DIM = 512
ROPE_DIM = 64
RECORD_BYTES = 656
TILE = 128
"""Entries of a row that the kernel takes at a time."""
NUM_XCD = 8


class Argument(NamedTuple):
    """One kernel argument: its name and its type in the AMDGPU kernel argument segment."""

    name: str
    kind: str
    """``"pointer"`` (8 bytes, global memory), ``"i32"`` or ``"f32"``."""


ARGUMENTS = (
    # q_latent[query, head, 0:512] and q_rope[query, head, 0:64], bfloat16, with strides below.
    Argument("q_latent", "pointer"),
    Argument("q_rope", "pointer"),
    # kv_rows records of 656 bytes.
    Argument("kv", "pointer"),
    # num_indices int32 slots; an entry outside 0 .. kv_rows - 1 (as unsigned) is masked.
    Argument("indices", "pointer"),
    # m int32 each, held within 0 .. num_indices by the kernel; begin >= end is an empty row. A row
    # has fewer than 2^29 entries.
    Argument("row_begin", "pointer"),
    Argument("row_end", "pointer"),
    # [m, H, 512] bfloat16, or float32 for partial results, as the kernel's symbol says (OUT_KINDS);
    # [m, H] float32, natural log.
    Argument("out", "pointer"),
    Argument("lse", "pointer"),
    # In bfloat16 elements; the product with the query number is taken in 64 bits.
    Argument("q_latent_row_stride", "i32"),
    Argument("q_latent_head_stride", "i32"),
    Argument("q_rope_row_stride", "i32"),
    Argument("q_rope_head_stride", "i32"),
    Argument("scale_log2e", "f32"),
    Argument("num_rows", "i32"),
    Argument("num_heads", "i32"),
    # Row r reads query r // num_splits.
    Argument("num_splits", "i32"),
    Argument("kv_rows", "i32"),
    Argument("num_indices", "i32"),
    # Bit 0: rows may end in masked entries, whose tiles are worth skipping. The kernel skips them
    # always: it looks for a row's last valid entry anyway.
    Argument("flags", "i32"),
)

OUT_KINDS = {"_whole": "bf16", "_partial": "f32"}
"""How a kernel's symbol ends, and what such a kernel writes to ``out``.

A code object finds its kernel by the symbol, which so ties a call's ``out`` to the code it runs:
the shim refuses a call whose ``out`` is of another dtype.
"""


def num_workgroups(num_rows: int, num_heads: int) -> int:
    """Workgroups of a launch: one a (row, head group), a row's groups on one XCD.

    Hardware deals workgroup ``i`` to XCD ``i % 8``. With more than one head group, rows are padded
    to a multiple of 8 and workgroup ``i`` computes row ``i // (8 * groups) * 8 + i % 8``, group
    ``i // 8 % groups``.
    """
    groups = -(-num_heads // HEADS_PER_GROUP)
    if groups == 1:
        return num_rows
    return -(-num_rows // NUM_XCD) * NUM_XCD * groups
