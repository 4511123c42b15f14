"""The jnp lowering: sparse multi-head latent attention on any platform, written to be read.

What it computes, for row r with the entries ``indices[row_begin[r] : row_end[r]]`` that lie in
``0 .. rows - 1``::

    logits[h, t] = softmax_scale * (q_latent[r, h] . latent[t] + q_rope[r, h] . rope[t])
    lse[r, h]    = log(sum_t exp(logits[h, t]))
    out[r, h]    = sum_t exp(logits[h, t] - lse[r, h]) * latent[t]

How: one block of rows after the other, and within it one tile of entries after the other, with the
running maximum, sum and output of the online softmax (Milakov and Gimelshein, arXiv:1805.02867).
Nothing of the size of (rows, entries) is ever held, and a block stops at its longest row.

On the CPU a row's result is the same bits whatever its position and neighbours. On a GPU it is so
among calls of the same shapes: by the shapes the work is cut, and the library of matrix products
picks its kernel.
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array, lax

from jax_sparse_mla.decode import decode
from jax_sparse_mla.kernel.contract import LATENT_DIM, ROPE_DIM
from jax_sparse_mla.kernel.specialisation import ScaleFormat
from jax_sparse_mla.tiling import CPU_TILING, Tiling


def sparse_mla_reference(
    q_latent: Array,
    q_rope: Array,
    kv: Array,
    indices: Array,
    row_begin: Array,
    row_end: Array,
    *,
    softmax_scale: float,
    scale_format: ScaleFormat,
    partial: bool,
    width: int,
    tiling: Tiling = CPU_TILING,
) -> tuple[Array, Array]:
    """Attention of n rows over the records their entries select.

    Args:
      q_latent: [n, H, 512 or more] bfloat16; the leading 512 count.
      q_rope: [n, H, 64 or more] bfloat16; the trailing 64 count.
      kv: [rows, 656] of one-byte dtype, or [rows, 576] bfloat16.
      indices: [nnz] int32.
      row_begin: [n] int32, within 0 .. nnz.
      row_end: [n] int32, within 0 .. nnz; a row with begin >= end is empty.
      softmax_scale: factor of the logits.
      scale_format: which scales a record may have, ``"pow2"`` or ``"float32"``.
      partial: float32 out, to be merged with other parts, instead of bfloat16.
      width: the longest row there can be.
      tiling: how to cut the work.

    Returns:
      out [n, H, 512] bfloat16 or float32, lse [n, H] float32.
    """
    n, num_heads, _ = q_latent.shape
    out, lse = nothing(q_latent, partial)
    if 0 in (n, num_heads, kv.shape[0], indices.shape[0]):
        return out, lse

    # Rows of similar length share a block, so that no short row waits for a long one. What fills
    # the last block up has number n: it reads some row, with no entry, and writes nothing.
    length = jnp.maximum(row_end - row_begin, 0)
    num_blocks = -(-n // tiling.rows)
    block_rows = -(-n // num_blocks) if isinstance(n, int) else tiling.rows
    one_tile = width <= tiling.entries
    order = jnp.arange(n, dtype=jnp.int32)
    if block_rows > 1 and not one_tile:
        order = jnp.argsort(length).astype(jnp.int32)
    order = jnp.pad(order, (0, num_blocks * block_rows - n), constant_values=n)

    num_records = kv.shape[0]
    cache = kv
    sizes = (indices.shape[0], num_records)
    known = all(isinstance(size, int) for size in sizes)  # not symbolic, as in an export
    often = known and tiling.decode_first and sizes[0] >= tiling.decode_first * num_records
    if often and kv.dtype != jnp.bfloat16:
        cache = decode(kv, scale_format).astype(tiling.dtype)

    t = tiling.logits.index("t")

    def attend(rows: Array) -> tuple[Array, Array]:
        """One block: rows [R] -> float32 out [R, H, 512] and lse [R, H]."""
        begin = row_begin.at[rows].get(mode="clip")[:, None]
        end = jnp.where(rows < n, length.at[rows].get(mode="clip"), 0)[:, None]
        q_nope = _bfloat16(q_bits[0].at[rows].get(mode="clip")[..., :LATENT_DIM])
        q_pe = _bfloat16(q_bits[1].at[rows].get(mode="clip")[..., -ROPE_DIM:])
        # A query that is not finite has no meaningful answer, whatever its products come to.
        finite = jnp.isfinite(q_nope).all(-1) & jnp.isfinite(q_pe).all(-1)
        q_nope = jnp.where(finite[..., None], q_nope, jnp.nan).astype(tiling.dtype)
        q_pe = q_pe.astype(tiling.dtype)
        q = [jnp.concatenate([q_nope, q_pe], -1)] if tiling.joint else [q_nope, q_pe]

        def tile(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            first, top, total, out = carry
            entry = first + jnp.arange(tiling.entries, dtype=jnp.int32)
            inside = entry < end
            slot = _take(indices, jnp.where(inside, begin + entry, 0))
            valid = inside & (slot >= 0) & (slot < num_records)
            record = decode(_take(cache, jnp.where(valid, slot, 0)), scale_format)
            parts = [record] if tiling.joint else jnp.split(record, [LATENT_DIM], -1)
            # A masked entry reads record 0, whatever that holds; its values must go as its logits
            # must, for 0 * NaN is NaN.
            values = [jnp.where(valid[..., None], x, 0).astype(tiling.dtype) for x in parts]

            product = f"rhd,rtd->{tiling.logits}"
            logits = sum(_dot(product, x, y) for x, y in zip(q, values, strict=True))
            counts = jnp.expand_dims(valid, 3 - t)
            logits = jnp.where(counts, logits * jnp.float32(softmax_scale), -jnp.inf)
            new_top = jnp.maximum(top, logits.max(t))
            # Until a row has met a valid entry its maximum is -inf, and -inf - -inf is NaN.
            base = jnp.where(new_top == -jnp.inf, 0, new_top)
            shrink = jnp.exp(top - base)
            p = jnp.exp(logits - jnp.expand_dims(base, t))
            weighted = _weigh(p, values[0], tiling.logits)[..., :LATENT_DIM]
            total = total * shrink + p.sum(t)
            return first + tiling.entries, new_top, total, out * shrink[..., None] + weighted

        zero, minus_infinity = nothing(q_nope, partial=True)
        start = jnp.int32(0), minus_infinity, jnp.zeros_like(minus_infinity), zero
        if one_tile:  # A GPU program waits for the host at every condition of a loop.
            _, top, total, out = tile(start)
        else:
            longest = end.max()
            _, top, total, out = lax.while_loop(lambda carry: carry[0] < longest, tile, start)
        return jnp.where(total[..., None] == 0, 0, out / total[..., None]), top + jnp.log(total)

    # XLA on the CPU makes a float32 copy of a whole bfloat16 array that a loop reads from or writes
    # to, in every iteration. It leaves uint16 alone.
    q_bits = [lax.bitcast_convert_type(q, jnp.uint16) for q in (q_latent, q_rope)]
    bits = out if partial else lax.bitcast_convert_type(out, jnp.uint16)

    def block(i: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = lax.dynamic_slice(order, (i * block_rows,), (block_rows,))
        out, lse = attend(rows)
        if not partial:
            out = lax.bitcast_convert_type(out.astype(jnp.bfloat16), jnp.uint16)
        return (
            results[0].at[rows].set(out, mode="drop", unique_indices=True),
            results[1].at[rows].set(lse, mode="drop", unique_indices=True),
        )

    bits, lse = lax.fori_loop(jnp.int32(0), jnp.int32(num_blocks), block, (bits, lse))
    return bits if partial else _bfloat16(bits), lse


def nothing(q: Array, partial: bool) -> tuple[Array, Array]:
    """The result for q [n, H, ...] without a valid entry: out 0 [n, H, 512], lse -inf [n, H].

    Made from q and not from its shape, so that in ``shard_map`` it varies over the same axes.
    """
    out_dtype = jnp.float32 if partial else jnp.bfloat16
    return (
        jnp.zeros_like(q, out_dtype, (*q.shape[:2], LATENT_DIM)),
        jnp.full_like(q, -jnp.inf, jnp.float32, q.shape[:2]),
    )


def _dot(subscripts: str, x: Array, y: Array) -> Array:
    # Without HIGHEST a GPU would round float32 operands to 11 bits.
    return jnp.einsum(
        subscripts, x, y, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
    )


def _weigh(p: Array, latent: Array, axes: Literal["rth", "rht"]) -> Array:
    """Sum over entries of p times latent [R, T, 512]: [R, H, 512], with p in float32's accuracy."""
    product = f"{axes},rtd->rhd"
    if latent.dtype == jnp.float32:
        return _dot(product, p, latent)
    # bfloat16 would round p by 2^-9, too much where the sum cancels: its rest goes as more heads.
    high = lax.reduce_precision(p, exponent_bits=8, mantissa_bits=7)
    parts = jnp.concatenate([high, p - high], axes.index("h")).astype(latent.dtype)
    high, low = jnp.split(_dot(product, parts, latent), 2, axis=1)
    return high + low


def _take(x: Array, rows: Array) -> Array:
    if x.dtype == jnp.float8_e4m3fn:
        # To gather float8, XLA on the CPU makes a float16 copy of the cache; and a bitcast of the
        # cache it makes ahead of the loop, as a copy too. The barrier keeps it in the gather.
        x, rows = lax.optimization_barrier((x, rows))
        x = lax.bitcast_convert_type(x, jnp.uint8)
    return x.at[rows].get(mode="promise_in_bounds")


def _bfloat16(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.bfloat16)
