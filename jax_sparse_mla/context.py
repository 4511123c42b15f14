"""Context parallel: which device of a mesh axis owns a slot, and what each of them does.

The records of a cache are spread over the devices of one mesh axis. Each attends all rows over the
records it owns, and the partial results are merged. This is for a ``shard_map`` of one's own;
:func:`jax_sparse_mla.sparse_mla_context` is the recipe that brings one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_sparse_mla.arguments import as_int32
from jax_sparse_mla.attention import Queries, sparse_mla_partial
from jax_sparse_mla.csr import compact_csr, compact_rows
from jax_sparse_mla.kernel.contract import TILE
from jax_sparse_mla.lse import apply_sink, merge_weights, weigh


def attend_context_shard(
    q: Queries,
    kv_shard: ArrayLike,
    kv_indptr: ArrayLike | None,
    kv_indices: ArrayLike,
    softmax_scale: float,
    *,
    axis_name: str = "context",
    interleave: int | None = None,
    row_lengths: ArrayLike | None = None,
    attn_sink: ArrayLike | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """What one device of a context axis does; for use inside a ``shard_map``.

    Keeps of each row the entries this device owns, moved together so that the op's work is only
    their number, attends them, and merges with the other devices of the axis.

    Args:
      q: [n, H, 576] bfloat16 or the pair, the same on every device of the axis.
      kv_shard: [..., 656], this device's records.
      kv_indptr: as in the op, the same on every device of the axis.
      kv_indices: likewise; slots of the whole cache.
      softmax_scale: as in the op, static.
      axis_name: the mesh axis of the cache's records.
      interleave: which device owns a slot, see :func:`localise_slots`.
      row_lengths: as in the op.
      attn_sink: [H]; applied once, after the merge.
      options: the op's other options.

    Returns:
      out [n, H, 512] bfloat16 and lse [n, H] float32 over all devices' records, the same on every
      device of the axis.

    Raises:
      ValueError, TypeError: as the op and :func:`localise_slots`.
    """
    kv_shard = jnp.asarray(kv_shard)
    shard = lax.axis_index(axis_name)
    local = localise_slots(
        kv_indices,
        shard,
        num_shards=lax.axis_size(axis_name),
        rows_per_shard=kv_shard.size // kv_shard.shape[-1] if kv_shard.size else 0,
        interleave=interleave,
    )
    if kv_indptr is None:
        local, row_lengths = compact_rows(local, row_lengths)
    else:
        kv_indptr, local = compact_csr(kv_indptr, local)
    out, lse = sparse_mla_partial(
        q, kv_shard, kv_indptr, local, softmax_scale, row_lengths=row_lengths, **options
    )
    weights, lse = merge_weights(lax.all_gather(lse, axis_name))
    out = lax.psum(weigh(out, weights[shard]), axis_name)
    if attn_sink is not None:
        out = apply_sink(out, lse, attn_sink)
    return out.astype(jnp.bfloat16), lse


def localise_slots(
    slots: ArrayLike,
    shard: ArrayLike,
    *,
    num_shards: int,
    rows_per_shard: int,
    interleave: int | None = None,
) -> jax.Array:
    """Turn slots of a cache sharded over a context axis into slots of one shard.

    Contiguous ownership (``interleave`` None): slot t belongs to shard ``t // rows_per_shard``, as
    an array sharded over its rows lies. Interleaved: runs of ``interleave`` slots go round the
    shards, slot t belongs to shard ``(t // interleave) % num_shards`` and is there row
    ``t // (interleave * num_shards) * interleave + t % interleave``; a long request's tokens then
    spread evenly. Use it for reading and, in a sharded write, for the slots of
    :func:`jax_sparse_mla.write_records`.

    Args:
      slots: [...] integer, slots of the whole cache.
      shard: scalar integer, ``lax.axis_index`` of the context axis inside ``shard_map``.
      num_shards: shards of the cache.
      rows_per_shard: records of one shard; a multiple of interleave.
      interleave: consecutive slots on one shard, or None for contiguous ownership.

    Returns:
      [...] int32: the row within the shard, -1 for a slot that is another shard's or no slot of the
      cache.

    Raises:
      TypeError: slots or shard is not integer.
      ValueError: interleave is not positive or does not divide rows_per_shard.
    """
    slots, shard = as_int32("slots", slots), as_int32("shard", shard)
    if interleave is None:
        interleave = max(rows_per_shard, 1)
    if interleave < 1 or rows_per_shard % interleave:
        raise ValueError(
            f"interleave must divide the {rows_per_shard} rows of a shard, not be {interleave}"
        )
    run, offset = slots // interleave, slots % interleave
    row = run // num_shards * interleave + offset
    own = (slots >= 0) & (run % num_shards == shard) & (row < rows_per_shard)
    return jnp.where(own, row, -1)


def context_tiles(
    kv_indptr: ArrayLike | None,
    kv_indices: ArrayLike,
    *,
    num_shards: int,
    rows_per_shard: int,
    interleave: int | None = None,
    row_lengths: ArrayLike | None = None,
) -> jax.Array:
    """How many tiles of 128 entries each shard of a context axis attends: its share of the work.

    Args:
      kv_indptr: as in :func:`sparse_mla_context`.
      kv_indices: likewise.
      num_shards: shards of the cache.
      rows_per_shard: records of one shard.
      interleave: see :func:`localise_slots`.
      row_lengths: as in the op.

    Returns:
      [num_shards] int32, the sum over rows; the devices wait for the largest.

    Raises:
      TypeError, ValueError: as :func:`localise_slots`.
    """

    def tiles(shard: jax.Array) -> jax.Array:
        local = localise_slots(
            kv_indices,
            shard,
            num_shards=num_shards,
            rows_per_shard=rows_per_shard,
            interleave=interleave,
        )
        if kv_indptr is None:
            _, lengths = compact_rows(local, row_lengths)
        else:
            indptr, _ = compact_csr(kv_indptr, local)
            lengths = jnp.maximum(indptr[1:] - indptr[:-1], 0)
        return jnp.sum(-(-lengths // TILE), dtype=jnp.int32)

    return lax.map(tiles, jnp.arange(num_shards, dtype=jnp.int32))
