"""Sparse multi-head latent attention for JAX."""

from .attention import sparse_mla_fwd
from .csr import (
    block_table_to_slots,
    compact_rows,
    csr_to_padded,
    layer_slots,
    padded_to_csr,
    split_rows,
)
from .lse import (
    apply_sink,
    lse_from_base2,
    lse_from_flashmla,
    lse_to_base2,
    merge_attention,
)
from .record_check import RecordFault, RecordReport, check_records, repack_records
from .records import pack_records, unpack_records, write_records

__all__ = [
    "RecordFault",
    "RecordReport",
    "apply_sink",
    "block_table_to_slots",
    "check_records",
    "compact_rows",
    "csr_to_padded",
    "layer_slots",
    "lse_from_base2",
    "lse_from_flashmla",
    "lse_to_base2",
    "merge_attention",
    "pack_records",
    "padded_to_csr",
    "repack_records",
    "sparse_mla_fwd",
    "split_rows",
    "unpack_records",
    "write_records",
]

__version__ = "0.1.0"
