"""The jnp lowering: sparse multi-head latent attention on any platform, written to be read.

What it computes, for row r with the entries ``indices[row_begin[r] : row_end[r]]`` that lie in ``0
.. rows - 1``::

    logits[h, t] = softmax_scale * (q_latent[r, h] . latent[t] + q_rope[r, h] . rope[t])
    lse[r, h]    = log(sum_t exp(logits[h, t]))
    out[r, h]    = sum_t exp(logits[h, t] - lse[r, h]) * latent[t]

How: a block of rows at a time, and for each block one tile of entries after the other, with the
running maximum, sum and output of the online softmax (Milakov and Gimelshein, arXiv:1805.02867).
Nothing of the size of (rows, entries) is ever held, and a block stops at its longest row.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jax_sparse_mla.kernel.specialisation import ScaleFormat

LATENT_DIM = 512
ROPE_DIM = 64
SCALE_BLOCK = 128


class Tiling(NamedTuple):
    """How the work is cut, and the type of the two matrix products' operands; the result is always
    float32 inside."""

    rows: int
    entries: int
    dtype: jnp.dtype


CPU_TILING = Tiling(rows=8, entries=128, dtype=jnp.dtype(jnp.float32))
GPU_TILING = Tiling(rows=64, entries=512, dtype=jnp.dtype(jnp.bfloat16))


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
      scale_format: ``"pow2"`` or ``"float32"``.
      partial: float32 out, to be merged with other parts, instead of bfloat16.
      tiling: how to cut the work.

    Returns:
      out [n, H, 512] bfloat16 or float32, lse [n, H] float32.
    """
    n, num_heads, _ = q_latent.shape
    out, lse = nothing(q_latent, partial)
    if 0 in (n, num_heads, kv.shape[0], indices.shape[0]):
        return out, lse

    # Rows of similar length share a block, so that no short row waits for a long one. Rows past n
    # repeat the last one's number plus one: they read an arbitrary row and write nothing.
    num_blocks = -(-n // tiling.rows)
    length = jnp.maximum(row_end - row_begin, 0)
    order = jnp.argsort(length).astype(jnp.int32)
    order = jnp.pad(order, (0, num_blocks * tiling.rows - n), constant_values=n)

    def block(i: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = lax.dynamic_slice(order, (i * tiling.rows,), (tiling.rows,))
        q = jnp.concatenate(
            [_rows(q_latent, rows)[..., :LATENT_DIM], _rows(q_rope, rows)[..., -ROPE_DIM:]], -1
        )
        block_out, block_lse = _attend(
            q,
            kv,
            indices,
            _rows(row_begin, rows),
            jnp.where(rows < n, _rows(length, rows), 0),
            softmax_scale,
            scale_format,
            tiling,
        )
        out, lse = results
        return (
            out.at[rows].set(block_out.astype(out.dtype), mode="drop", unique_indices=True),
            lse.at[rows].set(block_lse, mode="drop", unique_indices=True),
        )

    return lax.fori_loop(jnp.int32(0), jnp.int32(num_blocks), block, (out, lse))


def nothing(q_latent: Array, partial: bool) -> tuple[Array, Array]:
    """The result for q_latent [n, H, ...] without a valid entry: out 0 [n, H, 512], lse -inf [n,
    H].

    Made from q_latent and not from its shape, so that in ``shard_map`` it varies over the same
    axes.
    """
    out_dtype = jnp.float32 if partial else jnp.bfloat16
    shape = q_latent.shape[:2]
    return (
        jnp.zeros_like(q_latent, out_dtype, (*shape, LATENT_DIM)),
        jnp.full_like(q_latent, -jnp.inf, jnp.float32, shape),
    )


def _rows(x: Array, rows: Array) -> Array:
    return x.at[rows].get(mode="clip")


def _attend(
    q: Array,
    kv: Array,
    indices: Array,
    begin: Array,
    length: Array,
    softmax_scale: float,
    scale_format: ScaleFormat,
    tiling: Tiling,
) -> tuple[Array, Array]:
    """One block of rows: q [R, H, 576], begin and length [R] -> float32 out [R, H, 512], lse [R,
    H]."""
    # A query that is not finite has no meaningful answer, whatever its inner products come to.
    q = jnp.where(jnp.isfinite(q).all(-1, keepdims=True), q, jnp.nan).astype(tiling.dtype)
    longest = length.max()

    def tile(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        first, top, total, out = carry
        entry = first + jnp.arange(tiling.entries, dtype=jnp.int32)
        inside = entry < length[:, None]
        slot = indices.at[jnp.where(inside, begin[:, None] + entry, 0)].get(
            mode="promise_in_bounds"
        )
        valid = inside & (slot >= 0) & (slot < kv.shape[0])
        record = kv.at[jnp.where(valid, slot, 0)].get(mode="promise_in_bounds")
        # Masked entries read record 0, whatever it holds: its values must go as well as its logits,
        # for 0 * NaN is NaN.
        values = jnp.where(valid[..., None], decode(record, scale_format), 0).astype(tiling.dtype)
        logits = _dot("rhd,rtd->rht", q, values) * jnp.float32(softmax_scale)
        logits = jnp.where(valid[:, None, :], logits, -jnp.inf)

        new_top = jnp.maximum(top, logits.max(-1))
        # While a row has met no valid entry its maximum is -inf, and -inf - -inf is NaN.
        base = jnp.where(new_top == -jnp.inf, 0, new_top)
        shrink = jnp.exp(top - base)
        p = jnp.exp(logits - base[..., None])
        weighted = _dot("rht,rtd->rhd", p.astype(tiling.dtype), values[..., :LATENT_DIM])
        return (
            first + tiling.entries,
            new_top,
            total * shrink + p.sum(-1),
            out * shrink[..., None] + weighted,
        )

    rows, num_heads, _ = q.shape
    carry = (
        jnp.int32(0),
        jnp.full_like(q, -jnp.inf, jnp.float32, (rows, num_heads)),
        jnp.zeros_like(q, jnp.float32, (rows, num_heads)),
        jnp.zeros_like(q, jnp.float32, (rows, num_heads, LATENT_DIM)),
    )
    _, top, total, out = lax.while_loop(lambda carry: carry[0] < longest, tile, carry)
    out = jnp.where(total[..., None] == 0, 0, out / total[..., None])
    return out, top + jnp.log(total)


def _dot(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(
        subscripts, x, y, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
    )


def decode(record: Array, scale_format: ScaleFormat) -> Array:
    """Float32 [..., 576] of records [..., 656] of one-byte dtype: 512 e4m3fn, 4 float32 scales, 64
    bfloat16.

    A [..., 576] bfloat16 record is an unquantised one and only changes its dtype.
    """
    if record.dtype == jnp.bfloat16:
        return record.astype(jnp.float32)
    record = lax.bitcast_convert_type(record, jnp.uint8)
    leading = record.shape[:-1]
    scale = lax.bitcast_convert_type(record[..., 512:528].reshape(*leading, 4, 4), jnp.float32)
    scale = jnp.where(_allowed(scale, scale_format), scale, jnp.nan)
    code = record[..., :512].reshape(*leading, 4, SCALE_BLOCK)
    latent = (decode_e4m3fn(code) * scale[..., None]).reshape(*leading, LATENT_DIM)
    rope = lax.bitcast_convert_type(
        record[..., 528:].reshape(*leading, ROPE_DIM, 2), jnp.bfloat16
    ).astype(jnp.float32)
    return jnp.concatenate([latent, rope], -1)


def _allowed(scale: Array, scale_format: ScaleFormat) -> Array:
    if scale_format == "float32":
        return jnp.isfinite(scale)
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    return ((exponent >= 1) & (exponent <= 254) & (mantissa == 0)) | (bits << 1 == 0)


def decode_e4m3fn(code: Array) -> Array:
    """Float32 values of e4m3fn codes (uint8), by moving their bits: 4 bits of exponent (bias 7), 3
    of mantissa."""
    bits = code.astype(jnp.uint32)
    magnitude = bits & 0x7F
    normal = (magnitude << 20) + jnp.uint32((127 - 7) << 23)
    value = jnp.where(
        magnitude < 8,
        magnitude.astype(jnp.float32) * jnp.float32(2**-9),
        lax.bitcast_convert_type(normal, jnp.float32),
    )
    value = jnp.where(magnitude == 0x7F, jnp.nan, value)
    return jnp.where(bits >= 0x80, -value, value)
