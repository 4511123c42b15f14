"""What one device runs: the reference, or the kernel with its splits and merge.

Either takes operands without batch axes: these are folded into the rows first.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array

from jax_sparse_mla import platform
from jax_sparse_mla.arguments import INT32_MAX
from jax_sparse_mla.csr import split_rows
from jax_sparse_mla.kernel.contract import HEADS_PER_GROUP, TILE
from jax_sparse_mla.kernel.specialisation import ScaleFormat
from jax_sparse_mla.lse import merge_attention
from jax_sparse_mla.reference import nothing, sparse_mla_reference
from jax_sparse_mla.tiling import CPU_TILING, gpu_tiling

MAX_INDICES = 2**31 - 1024
"""Positions in the folded index stream are int32, and the last tile may look past the end."""

MAX_KERNEL_STREAM = 2**29 - 1
"""The most entries a row may have for the kernel, which counts their bytes in int32."""

MAX_SPLITS = 64
"""The most parts that `choose_num_splits` cuts a row in."""


def fold(
    q_latent: Array, q_rope: Array, kv: Array, indices: Array, row_begin: Array, row_end: Array
) -> tuple[tuple[int, ...], tuple[Array, Array, Array, Array, Array, Array]]:
    """Make one problem of a batch of them; the caches are only reshaped, never copied.

    Args:
      q_latent, q_rope, kv, indices, row_begin, row_end: the primitive's operands, all with the same
        number of leading batch axes, each axis of the batch's size or 1.

    Returns:
      The batch's shape with n behind it, and the operands without batch axes: q_latent [n, H, ...],
      q_rope [n, H, ...], kv [rows, ...], indices [nnz], row_begin [n], row_end [n], with positions
      and slots moved to where they now stand and positions clamped to the stream they belong to.

    Raises:
      ValueError: the batch's caches together have more rows, or its streams more entries, than
        int32 counts.
    """
    axes = q_latent.ndim - 3
    batch = jnp.broadcast_shapes(
        *(x.shape[:axes] for x in (q_latent, q_rope, kv, indices, row_begin, row_end))
    )
    n = q_latent.shape[axes]
    kv_batch, kv_rows = kv.shape[:axes], kv.shape[axes]
    padded = indices.ndim == axes + 2

    num_caches = math.prod(kv_batch)
    if num_caches > 1:
        if isinstance(kv_rows, int) and num_caches * kv_rows > INT32_MAX:
            raise ValueError(
                f"kv_buffer: {num_caches} caches of {kv_rows} records under vmap are more than "
                "2**31 - 1 records"
            )
        cache = jnp.arange(num_caches, dtype=jnp.int32).reshape(
            kv_batch + (1,) * (indices.ndim - axes)
        )
        known = (indices >= 0) & (indices < kv_rows)
        indices = jnp.where(known, indices + cache * kv_rows, -1)

    # A stream is what positions count in: the whole CSR stream, or one padded row.
    width = indices.shape[-1]
    if isinstance(indices.size, int) and indices.size > MAX_INDICES:
        raise ValueError(
            f"kv_indices: {indices.size} entries are more than {MAX_INDICES}; call the op on fewer "
            "rows at a time"
        )
    streams = indices.shape[:-1]
    offset = jnp.arange(math.prod(streams), dtype=jnp.int32).reshape(streams) * width
    offset = offset if padded else offset[..., None]
    begin = jnp.clip(row_begin, 0, width) + offset
    end = jnp.clip(row_end, 0, width) + offset

    def rows(x: Array) -> Array:
        shape = batch + x.shape[axes:]
        return jnp.broadcast_to(x, shape).reshape(math.prod(batch) * n, *x.shape[axes + 1 :])

    def flat_rows(x: Array) -> Array:
        return jnp.broadcast_to(x, (*batch, n)).reshape(math.prod(batch) * n)

    return (*batch, n), (
        rows(q_latent),
        rows(q_rope),
        kv.reshape(num_caches * kv_rows, kv.shape[-1]),
        indices.reshape(indices.size),
        flat_rows(begin),
        flat_rows(end),
    )


def unfold(rows: tuple[int, ...], out: Array, lse: Array) -> tuple[Array, Array]:
    """Give out [B * n, H, 512] and lse [B * n, H] their batch axes back; rows is (*batch, n)."""
    return out.reshape(*rows, *out.shape[1:]), lse.reshape(*rows, *lse.shape[1:])


def run_reference(
    *operands: Array,
    on_gpu: bool,
    num_splits: int | None,
    has_invalid: bool,
    implementation: str | None,
    **params: Any,
) -> tuple[Array, Array]:
    """The op through the reference; it has no use for splits nor for the hint on masked entries."""
    shape, folded = fold(*operands)
    width = operands[3].shape[-1]
    if not isinstance(width, int):  # symbolic: as long as a row can be
        width = MAX_INDICES
    tiling = CPU_TILING
    if on_gpu:
        exact = params["scale_format"] == "pow2" or operands[2].dtype == jnp.bfloat16
        tiling = gpu_tiling(operands[0].shape[-2], width, exact)
    results = sparse_mla_reference(*folded, tiling=tiling, width=width, **params)
    return unfold(shape, *results)


def run_kernel(
    *operands: Array,
    num_splits: int | None,
    partial: bool,
    has_invalid: bool,
    implementation: str | None,
    softmax_scale: float,
    scale_format: ScaleFormat,
) -> tuple[Array, Array]:
    """The op through the gfx950 kernel: one launch, and a merge where rows are split."""
    # What compiles and launches is imported only where the kernel is lowered.
    from jax_sparse_mla.kernel.launch import sparse_mla_call

    stream = operands[3].shape[-1]
    if isinstance(stream, int) and stream > MAX_KERNEL_STREAM:
        raise ValueError(
            f"kv_indices: a stream of {stream} entries is longer than the kernel's "
            f'{MAX_KERNEL_STREAM}; pass padded rows, fewer rows, or implementation="reference"'
        )
    shape, (q_latent, q_rope, kv, indices, begin, end) = fold(*operands)
    n, num_heads, _ = q_latent.shape
    if 0 in (n, num_heads, kv.shape[0], indices.shape[0]):
        return unfold(shape, *nothing(q_latent, partial))
    k = num_splits or choose_num_splits(n, num_heads, indices.shape[0], platform.core_count())
    if k > 1:
        begin, end = split_rows(begin, end, k)
    out, lse = sparse_mla_call(
        q_latent,
        q_rope,
        kv,
        indices,
        begin,
        end,
        softmax_scale=softmax_scale,
        num_splits=k,
        scale_format=scale_format,
        partial=partial or k > 1,
        has_invalid=has_invalid,
    )
    if k > 1:
        out, lse = merge_attention(
            out.reshape(n, k, num_heads, out.shape[-1]), lse.reshape(n, k, num_heads), axis=1
        )
        out = out if partial else out.astype(jnp.bfloat16)
    return unfold(shape, out, lse)


def choose_num_splits(num_rows: int, num_heads: int, num_indices: int, cores: int) -> int:
    """Into how many parts the kernel cuts each row when ``num_splits`` is None.

    A workgroup computes one row (or one split of it) for one group of 16 heads. Rows are cut while
    there are fewer workgroups than ``cores``, into no more parts than the average row has tiles of
    128 entries: the largest power of two that keeps workgroups within ``cores``, at most 64. Sizes
    that are not known when lowering (symbolic ones) give 1.
    """
    if not all(isinstance(x, int) for x in (num_rows, num_indices)) or 0 in (num_rows, num_heads):
        return 1
    workgroups = num_rows * -(-num_heads // HEADS_PER_GROUP)
    tiles = -(-num_indices // (num_rows * TILE))
    most = min(cores // workgroups, tiles, MAX_SPLITS)
    return 1 << max(most, 1).bit_length() - 1
