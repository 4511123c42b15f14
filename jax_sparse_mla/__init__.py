"""Sparse multi-head latent attention for JAX."""

from jax_sparse_mla.attention import sparse_mla_fwd, sparse_mla_partial
from jax_sparse_mla.context import attend_context_shard, context_tiles, localise_slots
from jax_sparse_mla.csr import (
    block_table_to_slots,
    compact_csr,
    compact_rows,
    csr_to_padded,
    layer_slots,
    padded_to_csr,
    split_rows,
)
from jax_sparse_mla.index_keys import hadamard, pack_index_keys, unpack_index_keys, write_index_keys
from jax_sparse_mla.indexer import index_logits, index_topk
from jax_sparse_mla.kernel.shim import KERNEL_TARGET, register_kernel
from jax_sparse_mla.lse import (
    apply_sink,
    lse_from_base2,
    lse_from_flashmla,
    lse_to_base2,
    merge_attention,
)
from jax_sparse_mla.record_check import RecordFault, RecordReport, check_records, repack_records
from jax_sparse_mla.records import pack_records, unpack_records, write_records
from jax_sparse_mla.sharding import sparse_mla_context, sparse_mla_heads, sparse_mla_rows
from jax_sparse_mla.topk import select_topk

__all__ = [
    "KERNEL_TARGET",
    "RecordFault",
    "RecordReport",
    "apply_sink",
    "attend_context_shard",
    "block_table_to_slots",
    "check_records",
    "compact_csr",
    "compact_rows",
    "context_tiles",
    "csr_to_padded",
    "hadamard",
    "index_logits",
    "index_topk",
    "layer_slots",
    "localise_slots",
    "lse_from_base2",
    "lse_from_flashmla",
    "lse_to_base2",
    "merge_attention",
    "pack_index_keys",
    "pack_records",
    "padded_to_csr",
    "register_kernel",
    "repack_records",
    "select_topk",
    "sparse_mla_context",
    "sparse_mla_fwd",
    "sparse_mla_heads",
    "sparse_mla_partial",
    "sparse_mla_rows",
    "split_rows",
    "unpack_index_keys",
    "unpack_records",
    "write_index_keys",
    "write_records",
]

__version__ = "0.1.0"
