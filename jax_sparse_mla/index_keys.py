"""Index keys of the lightning indexer: their two formats, and writing them into a paged cache.

Index keys live in pages beside the records, ``key_cache [num_blocks, block_size, width]``:

* ``bfloat16``, width 128: the key as it is.
* uint8, width 132: bytes 0-127 the key in e4m3fn, bytes 128-131 its scale as a
  little-endian float32, a power of two, ``2 ** ceil(log2(max(amax, 1e-4) / 448))``; the key is
  value times scale.

Token ``p`` of request ``r`` stands in block ``block_table[r, p // block_size]`` at offset ``p %
block_size``.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

INDEX_DIM = 128
"""Values of one index key."""
PACKED_KEY_BYTES = INDEX_DIM + 4
"""Bytes of one fp8 index key: its values, then a float32 scale."""

_E4M3_MAX = 448.0
_MIN_AMAX = 1e-4


def pack_index_keys(keys: jax.Array) -> jax.Array:
    """Quantise index keys to e4m3fn with one power-of-two scale a key.

    Args:
      keys: ``[..., 128]``, any float dtype.

    Returns:
      ``[..., 132]`` uint8, the layout in the module's docstring. Relative error at most 2^-4 a
      value, plus half of the smallest e4m3fn step at the key's scale.

    Raises:
      ValueError: the last axis is not 128.
    """
    if keys.ndim < 1 or keys.shape[-1] != INDEX_DIM:
        raise ValueError(f"keys must have shape [..., {INDEX_DIM}], got {list(keys.shape)}")
    keys = keys.astype(jnp.float32)
    amax = jnp.maximum(jnp.max(jnp.abs(keys), axis=-1, keepdims=True), _MIN_AMAX)
    # frexp gives amax / 448 = m * 2^e with 0.5 <= m < 1: the ceiling of the logarithm without a
    # rounding log2.
    mantissa, exponent = jnp.frexp(amax / _E4M3_MAX)
    exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
    scale = jnp.ldexp(jnp.float32(1), exponent)
    values = (keys / scale).astype(jnp.float8_e4m3fn)
    value_bytes = lax.bitcast_convert_type(values, jnp.uint8)
    scale_bytes = lax.bitcast_convert_type(scale, jnp.uint8).reshape(*keys.shape[:-1], 4)
    return jnp.concatenate([value_bytes, scale_bytes], axis=-1)


def unpack_index_keys(packed: jax.Array) -> jax.Array:
    """Read fp8 index keys back.

    Args:
      packed: ``[..., 132]`` uint8, from `pack_index_keys`.

    Returns:
      ``[..., 128]`` float32.

    Raises:
      ValueError: the last axis is not 132.
    """
    if packed.ndim < 1 or packed.shape[-1] != PACKED_KEY_BYTES:
        raise ValueError(
            f"packed must have shape [..., {PACKED_KEY_BYTES}], got {list(packed.shape)}"
        )
    values, scale = split_packed(packed)
    return values.astype(jnp.float32) * scale[..., None]


def write_index_keys(key_cache: jax.Array, slots: jax.Array, keys: jax.Array) -> jax.Array:
    """Write index keys into their slots; in place when the caller donates the cache.

    Args:
      key_cache: ``[..., 128]`` bfloat16 or ``[..., 132]`` uint8; the leading axes are read as
        slots.
      slots: ``[n]`` int32. A slot that is negative or past the end writes nothing. Of equal slots
        one of the keys is kept, which one is not specified.
      keys: ``[n, 128]``, any float dtype; converted to the cache's format.

    Returns:
      The cache with the keys written, same shape and dtype.

    Raises:
      ValueError: a shape does not fit.
      TypeError: the cache has neither of the two formats, or slots are not integers.
    """
    packed = is_packed(key_cache)
    if keys.ndim != 2 or keys.shape[1] != INDEX_DIM:
        raise ValueError(f"keys must have shape [n, {INDEX_DIM}], got {list(keys.shape)}")
    if slots.shape != keys.shape[:1]:
        raise ValueError(f"slots must have shape [{keys.shape[0]}], got {list(slots.shape)}")
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise TypeError(f"slots must be integers, got {slots.dtype}")
    rows = pack_index_keys(keys) if packed else keys.astype(jnp.bfloat16)
    flat = key_cache.reshape(-1, key_cache.shape[-1])
    slots = jnp.where(slots < flat.shape[0], slots, -1).astype(jnp.int32)
    # XLA's CPU backend widens all of a bfloat16 operand of a scatter to float32.
    if packed:
        flat = _scatter(flat, slots, rows)
    else:
        flat = lax.platform_dependent(flat, slots, rows, cpu=_write_one_by_one, default=_scatter)
    return flat.reshape(key_cache.shape)


def _scatter(flat: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    # A scatter wraps -1 to the last slot even when it drops what is out of bounds.
    slots = jnp.where(slots < 0, flat.shape[0], slots)
    return flat.at[slots].set(rows, mode="drop")


def _write_one_by_one(flat: jax.Array, slots: jax.Array, rows: jax.Array) -> jax.Array:
    # The rows to write come first, and the loop ends behind them: XLA would copy the buffer if a
    # skipped row read its old contents, or were skipped by a condition.
    order = jnp.argsort(slots < 0, stable=True)

    def write(i: jax.Array, flat: jax.Array) -> jax.Array:
        row = lax.dynamic_index_in_dim(rows, order[i])
        return lax.dynamic_update_index_in_dim(flat, row, slots[order[i]], 0)

    return lax.fori_loop(0, jnp.sum(slots >= 0), write, flat) if flat.size else flat


def hadamard(x: jax.Array) -> jax.Array:
    """Rotate the last axis by the orthonormal Walsh-Hadamard matrix.

    Applied to queries and to keys it leaves their dot products as they are and spreads outliers
    over all values, so that fp8 keys lose less. Never apply it to one side alone.

    Args:
      x: ``[..., d]``, any float dtype, ``d`` a power of two.

    Returns:
      ``[..., d]`` in x's dtype; the sum is in float32.

    Raises:
      ValueError: ``d`` is not a power of two.
    """
    size = x.shape[-1]
    if size & (size - 1) or size == 0:
        raise ValueError(f"the last axis must be a power of two, got {size}")
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rotated = jnp.einsum(
        "...d,de->...e", x, jnp.asarray(matrix, x.dtype), preferred_element_type=jnp.float32
    )
    return (rotated * size**-0.5).astype(x.dtype)


def is_packed(key_cache: jax.Array) -> bool:
    """Whether a cache holds fp8 keys; TypeError if it has neither format."""
    width = key_cache.shape[-1] if key_cache.ndim else 0
    if key_cache.dtype == jnp.bfloat16 and width == INDEX_DIM:
        return False
    if key_cache.dtype == jnp.uint8 and width == PACKED_KEY_BYTES:
        return True
    raise TypeError(
        f"key_cache must be bfloat16 [..., {INDEX_DIM}] or uint8 [..., {PACKED_KEY_BYTES}], "
        f"got {key_cache.dtype} {list(key_cache.shape)}"
    )


def split_packed(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Values ``[..., 128]`` float8_e4m3fn and scales ``[...]`` float32 of fp8 keys."""
    values = lax.bitcast_convert_type(packed[..., :INDEX_DIM], jnp.float8_e4m3fn)
    scale = lax.bitcast_convert_type(packed[..., INDEX_DIM:], jnp.float32)
    return values, scale
