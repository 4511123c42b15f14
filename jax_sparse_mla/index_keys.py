"""Index keys of the lightning indexer: their two formats, and writing them into a paged cache.

Index keys live in pages beside the records, ``key_cache`` [num_blocks, block_size, width]:

- bfloat16, width 128: the key as it is;
- uint8, width 132: bytes 0-127 the key's codes, float8_e4m3fn, bytes 128-131 its scale as a
  little-endian float32, a power of two, ``2 ** ceil(log2(max(amax, 1e-4) / 448))``. The key is code
  times scale.

Token p of request r stands in block ``block_table[r, p // block_size]``, at offset
``p % block_size``.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_sparse_mla.arguments import as_floating, as_int32
from jax_sparse_mla.scales import scale_of_group

INDEX_DIM = 128
"""Values of one index key."""
PACKED_KEY_BYTES = INDEX_DIM + 4
"""Bytes of one fp8 index key: its codes, then a float32 scale."""


def pack_index_keys(keys: ArrayLike) -> jax.Array:
    """Quantise index keys to e4m3fn with one power-of-two scale a key.

    Args:
      keys: [..., 128] floating.

    Returns:
      [..., 132] uint8, the layout in the module's docstring. Relative error at most 2^-4 a value,
      plus half of the smallest e4m3fn step at the key's scale. A key with an inf or NaN reads as
      NaN.

    Raises:
      TypeError: keys are not floating.
      ValueError: the last axis is not 128.
    """
    keys = as_floating("keys", keys)
    if keys.ndim < 1 or keys.shape[-1] != INDEX_DIM:
        raise ValueError(f"keys must be [..., {INDEX_DIM}], not {list(keys.shape)}")
    keys = keys.astype(jnp.float32)
    scale = scale_of_group(jnp.max(jnp.abs(keys), axis=-1, keepdims=True), "pow2_fine")
    codes = (keys / scale).astype(jnp.float8_e4m3fn)
    code_bytes = lax.bitcast_convert_type(codes, jnp.uint8)
    scale_bytes = lax.bitcast_convert_type(scale, jnp.uint8).reshape(*keys.shape[:-1], 4)
    return jnp.concatenate([code_bytes, scale_bytes], axis=-1)


def unpack_index_keys(packed: ArrayLike) -> jax.Array:
    """Read fp8 index keys back.

    Args:
      packed: [..., 132] uint8, from :func:`pack_index_keys`.

    Returns:
      [..., 128] float32.

    Raises:
      TypeError: packed is not uint8.
      ValueError: the last axis is not 132.
    """
    packed = jnp.asarray(packed)
    if packed.dtype != jnp.uint8:
        raise TypeError(f"packed must be uint8, not {packed.dtype}")
    if packed.ndim < 1 or packed.shape[-1] != PACKED_KEY_BYTES:
        raise ValueError(f"packed must be [..., {PACKED_KEY_BYTES}], not {list(packed.shape)}")
    codes, scale = split_packed(packed)
    return codes.astype(jnp.float32) * scale[..., None]


def write_index_keys(key_cache: ArrayLike, slots: ArrayLike, keys: ArrayLike) -> jax.Array:
    """Write index keys into their slots; in place when the caller donates the cache.

    Args:
      key_cache: [..., 128] bfloat16 or [..., 132] uint8; the leading axes are read as one axis of
        slots.
      slots: [n] integer. A slot that is negative or past the end writes nothing. Of equal slots one
        of the keys is kept, which one is not specified.
      keys: [n, 128] floating; converted to the cache's format.

    Returns:
      The cache with the keys written, shape and dtype of key_cache.

    Raises:
      TypeError: the cache has neither of the two formats, slots are not integer or keys not
        floating.
      ValueError: a shape does not fit.
    """
    key_cache = jnp.asarray(key_cache)
    slots, keys = as_int32("slots", slots), as_floating("keys", keys)
    packed = is_packed(key_cache)
    if keys.ndim != 2 or keys.shape[1] != INDEX_DIM:
        raise ValueError(f"keys must be [n, {INDEX_DIM}], not {list(keys.shape)}")
    if slots.shape != keys.shape[:1]:
        raise ValueError(
            f"slots must be [{keys.shape[0]}], one for each of keys, not {list(slots.shape)}"
        )
    rows = pack_index_keys(keys) if packed else keys.astype(jnp.bfloat16)
    flat = key_cache.reshape(-1, key_cache.shape[-1])
    slots = jnp.where(slots < flat.shape[0], slots, -1)
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


def hadamard(x: ArrayLike) -> jax.Array:
    """Rotate the last axis by the orthonormal Walsh-Hadamard matrix.

    Applied to queries and to keys it leaves their dot products as they are and spreads outliers
    over all values, so that fp8 keys lose less. Never apply it to one side alone.

    Args:
      x: [..., d] floating, d a power of two.

    Returns:
      [..., d], x's dtype; the sum is in float32.

    Raises:
      TypeError: x is not floating.
      ValueError: d is not a power of two.
    """
    x = as_floating("x", x)
    size = x.shape[-1] if x.ndim else 0
    if size & (size - 1) or size == 0:
        raise ValueError(f"x must be [..., d], d a power of two, not {list(x.shape)}")
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rotated = jnp.einsum(
        "...d,de->...e",
        x,
        jnp.asarray(matrix, x.dtype),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,  # else a GPU rounds float32 operands to 11 bits
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
        f"not {key_cache.dtype} {list(key_cache.shape)}"
    )


def split_packed(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes [..., 128] float8_e4m3fn and scales [...] float32 of fp8 keys [..., 132] uint8."""
    codes = lax.bitcast_convert_type(packed[..., :INDEX_DIM], jnp.float8_e4m3fn)
    scale = lax.bitcast_convert_type(packed[..., INDEX_DIM:], jnp.float32)
    return codes, scale
