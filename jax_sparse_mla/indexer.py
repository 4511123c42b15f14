"""The lightning indexer of DeepSeek sparse attention: index keys, index logits, exact top-k.

A query row is a pair (request, position). It scores every cached token of its request up to and
including its own position, ``logit[t] = sum_h weight[h] * relu(q[h] . key[t])``, and attends only
the ``k`` best. Rows are independent: chunked prefill at any start, one-token decode and several
draft tokens a request mix freely in one call.

Index keys live in pages beside the records, ``key_cache [num_blocks, block_size, width]``:

* ``bfloat16``, width 128: the key as it is.
* one-byte dtype, width 132: bytes 0-127 the key in e4m3fn, bytes 128-131 its scale as a
  little-endian float32, a power of two, ``2 ** ceil(log2(max(amax, 1e-4) / 448))``; the key is
  value times scale.

Token ``p`` of request ``r`` stands in block ``block_table[r, p // block_size]`` at offset ``p %
block_size``.
"""

import functools
from collections.abc import Callable

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
_TILE_TOKENS = 1024
_MAX_BLOCK_ROWS = 64
_LOGIT_BYTES = 32 << 20
_RADIX_BITS = 2
_WORD = 32


# --- Index keys -----------------------------------------------------------------------------------


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
    values, scale = _split_packed(packed)
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
    packed = _is_packed(key_cache)
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


def _is_packed(key_cache: jax.Array) -> bool:
    width = key_cache.shape[-1] if key_cache.ndim else 0
    if key_cache.dtype == jnp.bfloat16 and width == INDEX_DIM:
        return False
    if key_cache.dtype == jnp.uint8 and width == PACKED_KEY_BYTES:
        return True
    raise TypeError(
        f"key_cache must be bfloat16 [..., {INDEX_DIM}] or uint8 [..., {PACKED_KEY_BYTES}], "
        f"got {key_cache.dtype} {list(key_cache.shape)}"
    )


def _split_packed(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    values = lax.bitcast_convert_type(packed[..., :INDEX_DIM], jnp.float8_e4m3fn)
    scale = lax.bitcast_convert_type(packed[..., INDEX_DIM:], jnp.float32)
    return values, scale


# --- Logits ---------------------------------------------------------------------------------------


def index_logits(
    q: jax.Array,
    weights: jax.Array,
    key_cache: jax.Array,
    block_table: jax.Array,
    requests: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """Score every visible token of each row: ``sum_h weights[h] * relu(q[h] . key[t])``.

    Work grows with the longest row, not with the width of the block table. Rows of one request that
    stand together read its keys once; a mixed block of rows reads them row by row. Memory:
    `index_topk` is the same followed by `select_topk`, block by block of rows, and never holds all
    logits.

    Args:
      q: ``[n, H, 128]`` float, RoPE applied. bfloat16 and float32 keep their dtype in the products,
        which are summed in float32.
      weights: ``[n, H]`` float32, the heads' weights times ``H ** -0.5 * 128 ** -0.5``.
      key_cache: ``[num_blocks, block_size, 128 | 132]``, the formats in the module's docstring.
      block_table: ``[num_requests, w]`` int32, each request's blocks in the order of its tokens. A
        negative entry or one past the cache is no block: its tokens are invisible.
      requests: ``[n]`` int32, each row's line of the block table.
      positions: ``[n]`` int32, each row's position; the row sees tokens 0 .. position. Negative for
        a padding row, which sees nothing.

    Returns:
      ``[n, w * block_size]`` float32, -inf at tokens that are not visible.

    Raises:
      ValueError: a shape does not fit.
      TypeError: the cache has neither format, or an index is not an integer.
    """
    _check_rows(q, weights, key_cache, block_table, requests, positions)
    width = block_table.shape[1] * key_cache.shape[1]

    if not positions.size:
        return jnp.zeros((0, width), jnp.float32)

    def block(rows: tuple[jax.Array, ...]) -> jax.Array:
        return _block_logits(*rows, key_cache=key_cache, block_table=block_table)[:, :width]

    return _map_row_blocks(block, (q, weights, requests, positions), _rows_per_block(width))


def index_topk(
    q: jax.Array,
    weights: jax.Array,
    key_cache: jax.Array,
    block_table: jax.Array,
    requests: jax.Array,
    positions: jax.Array,
    k: int,
) -> jax.Array:
    """Select the ``k`` best-scored visible tokens of each row.

    `index_logits` and `select_topk` by blocks of rows: temporaries stay under 256 MB at 2,048 rows
    by 131,072 tokens. The result is a function of the arguments alone, ties included, so that
    tensor-parallel ranks which hold the same indexer select the same tokens.

    Args:
      q, weights, key_cache, block_table, requests, positions: as in `index_logits`.
      k: how many tokens to select, at least 1.

    Returns:
      ``[n, min(k, w * block_size)]`` int32 positions within the row's request, in no particular
      order. A row that sees fewer tokens selects them all and ends in -1.

    Raises:
      ValueError: a shape does not fit, or k < 1.
      TypeError: the cache has neither format, or an index is not an integer.
    """
    _check_rows(q, weights, key_cache, block_table, requests, positions)
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    width = block_table.shape[1] * key_cache.shape[1]

    if not positions.size:
        return jnp.zeros((0, min(k, width)), jnp.int32)

    def block(rows: tuple[jax.Array, ...]) -> jax.Array:
        logits = _block_logits(*rows, key_cache=key_cache, block_table=block_table)
        return select_topk(logits[:, :width], min(k, width))

    return _map_row_blocks(block, (q, weights, requests, positions), _rows_per_block(width))


def _check_rows(
    q: jax.Array,
    weights: jax.Array,
    key_cache: jax.Array,
    block_table: jax.Array,
    requests: jax.Array,
    positions: jax.Array,
) -> None:
    if q.ndim != 3 or q.shape[2] != INDEX_DIM:
        raise ValueError(f"q must have shape [n, H, {INDEX_DIM}], got {list(q.shape)}")
    n, heads, _ = q.shape
    if key_cache.ndim != 3:
        raise ValueError(
            "key_cache must have shape [num_blocks, block_size, width], "
            f"got {list(key_cache.shape)}"
        )
    _is_packed(key_cache)
    if block_table.ndim != 2 or 0 in block_table.shape:
        raise ValueError(
            "block_table must have shape [num_requests, w], none of them 0, "
            f"got {list(block_table.shape)}"
        )
    for name, array, shape in (
        ("weights", weights, (n, heads)),
        ("requests", requests, (n,)),
        ("positions", positions, (n,)),
    ):
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(array.shape)}")
    for name, array in (
        ("block_table", block_table),
        ("requests", requests),
        ("positions", positions),
    ):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{name} must be integers, got {array.dtype}")


def _rows_per_block(width: int) -> int:
    rows = max(1, min(_MAX_BLOCK_ROWS, _LOGIT_BYTES // (4 * width)))
    return 1 << (rows.bit_length() - 1)


def _map_row_blocks(
    function: Callable[[tuple[jax.Array, ...]], jax.Array],
    rows: tuple[jax.Array, ...],
    block_rows: int,
) -> jax.Array:
    """Apply a function of a block of rows to all rows; padding rows fill the last block."""
    n = rows[0].shape[0]
    if n <= block_rows:
        return function(rows)
    blocks = -(-n // block_rows)
    *others, positions = rows
    pad = blocks * block_rows - n

    def split(array: jax.Array, fill: int) -> jax.Array:
        padding = [(0, pad)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding, constant_values=fill).reshape(
            blocks, block_rows, *array.shape[1:]
        )

    out = lax.map(function, (*(split(array, 0) for array in others), split(positions, -1)))
    return out.reshape(blocks * block_rows, *out.shape[2:])[:n]


def _block_logits(
    q: jax.Array,
    weights: jax.Array,
    requests: jax.Array,
    positions: jax.Array,
    *,
    key_cache: jax.Array,
    block_table: jax.Array,
) -> jax.Array:
    """Logits of one block of rows, ``[rows, tiles * tile]``, tile by tile as far as a row sees."""
    rows = q.shape[0]
    num_blocks, block_size, _ = key_cache.shape
    tile_blocks = max(1, min(_TILE_TOKENS // block_size, block_table.shape[1]))
    tile = tile_blocks * block_size
    tiles = -(-block_table.shape[1] // tile_blocks)
    table = jnp.pad(
        block_table, ((0, 0), (0, tiles * tile_blocks - block_table.shape[1])), constant_values=-1
    )
    table = jnp.where((table >= 0) & (table < num_blocks), table, -1).astype(jnp.int32)

    is_row = positions >= 0
    requests = jnp.clip(requests, 0, block_table.shape[0] - 1)
    shared_request = requests[jnp.argmax(is_row)]
    is_shared = jnp.all(~is_row | (requests == shared_request))
    requests = jnp.where(is_row, requests, shared_request)

    def score(request: jax.Array, first_block: jax.Array, pattern: str) -> jax.Array:
        blocks = lax.dynamic_slice_in_dim(table, first_block, tile_blocks, axis=1)[request]
        keys = key_cache[jnp.maximum(blocks, 0)]
        keys = keys.reshape(*request.shape, tile, keys.shape[-1])
        logits = _tile_logits(q, weights, keys, pattern)
        return jnp.where(jnp.repeat(blocks >= 0, block_size, axis=-1), logits, -jnp.inf)

    def step(i: jax.Array, logits: jax.Array) -> jax.Array:
        first_block = i * tile_blocks
        tile_logits = lax.cond(
            is_shared,
            lambda: score(shared_request, first_block, "nhd,td->nht"),
            lambda: score(requests, first_block, "nhd,ntd->nht"),
        )
        token = i * tile + jnp.arange(tile, dtype=jnp.int32)
        tile_logits = jnp.where(token <= positions[:, None], tile_logits, -jnp.inf)
        return lax.dynamic_update_slice_in_dim(logits, tile_logits, i * tile, axis=1)

    used = jnp.minimum(jnp.max(positions) // tile + 1, tiles)
    start = jnp.full((rows, tiles * tile), -jnp.inf, jnp.float32)
    return lax.fori_loop(0, used, step, start)


def _tile_logits(q: jax.Array, weights: jax.Array, keys: jax.Array, pattern: str) -> jax.Array:
    scale = None
    if keys.shape[-1] == PACKED_KEY_BYTES:
        keys, scale = _split_packed(keys)
    dtype = jnp.promote_types(q.dtype, jnp.bfloat16)
    products = jnp.einsum(
        pattern, q.astype(dtype), keys.astype(dtype), preferred_element_type=jnp.float32
    )
    logits = jnp.einsum("nh,nht->nt", weights.astype(jnp.float32), jax.nn.relu(products))
    # A key's scale is positive, so it passes through the relu and is applied once a token, not once
    # a head.
    return logits if scale is None else logits * scale


# --- Selection ------------------------------------------------------------------------------------


def select_topk(logits: jax.Array, k: int) -> jax.Array:
    """Find the ``k`` largest entries of each row, exactly.

    A radix search finds the k-th largest value, bit masks of what lies above it and at it are
    compacted by counting bits: on a GPU faster than a sort (benchmarks/indexer.py). The CPU, where
    `lax.top_k` is faster, uses that. Of equal entries at the boundary those at the lowest positions
    are selected on every platform.

    Args:
      logits: ``[n, T]`` float32. -inf is never selected; NaN ranks below every number.
      k: entries to select, 1 .. T.

    Returns:
      ``[n, k]`` int32 positions in no particular order, -1 behind them where fewer than k entries
      are selectable.

    Raises:
      ValueError: logits have no two axes, or k is outside 1 .. T.
      TypeError: logits are not float32.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits must have shape [n, T], got {list(logits.shape)}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be in 1 .. {logits.shape[1]}, got {k}")
    if logits.dtype != jnp.float32:
        raise TypeError(f"logits must be float32, got {logits.dtype}")
    return lax.platform_dependent(
        _sortable(logits),
        cpu=functools.partial(_select_by_sorting, k=k),
        default=functools.partial(_select_by_radix, k=k),
    )


def _select_by_sorting(keys: jax.Array, *, k: int) -> jax.Array:
    """`select_topk` of sortable keys; of equal ones `lax.top_k` takes the lowest positions."""
    values, positions = lax.top_k(keys, k)
    return jnp.where(values == 0, -1, positions.astype(jnp.int32))


def _select_by_radix(keys: jax.Array, *, k: int) -> jax.Array:
    """`select_topk` of sortable keys: what is above the k-th largest by position, then ties."""
    width = keys.shape[1]
    keys = jnp.pad(keys, ((0, 0), (0, -width % _WORD)))
    # Threshold 0 would admit what is never selected; at 1 the row simply has fewer than k.
    threshold = jnp.maximum(_kth_largest(keys, k), 1)[:, None]
    words = jnp.concatenate([_pack_bits(keys > threshold), _pack_bits(keys == threshold)], axis=1)
    return _first_set_bits(words, k)


def _sortable(logits: jax.Array) -> jax.Array:
    """uint32 keys in the order of the logits: 0 for -inf, 1 for NaN; both zeros are one value."""
    bits = lax.bitcast_convert_type(logits, jnp.uint32)
    bits = jnp.where(bits == jnp.uint32(1 << 31), 0, bits)
    keys = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
    keys = jnp.where(jnp.isnan(logits), jnp.uint32(1), keys)
    return jnp.where(logits == -jnp.inf, jnp.uint32(0), keys)


def _kth_largest(keys: jax.Array, k: int) -> jax.Array:
    """The largest value that at least k entries of a row reach, ``[n]`` uint32, or 0."""
    steps = jnp.arange(1, 1 << _RADIX_BITS, dtype=jnp.uint32)

    def refine(i: jax.Array, threshold: jax.Array) -> jax.Array:
        shift = (32 - _RADIX_BITS * (i + 1)).astype(jnp.uint32)
        reached = [
            jnp.sum(keys >= (threshold | (step << shift))[:, None], axis=1, dtype=jnp.int32) >= k
            for step in steps
        ]
        digit = functools.reduce(jnp.add, [flag.astype(jnp.uint32) for flag in reached])
        return threshold | (digit << shift)

    start = jnp.zeros(keys.shape[0], jnp.uint32)
    return lax.fori_loop(0, 32 // _RADIX_BITS, refine, start)


def _pack_bits(mask: jax.Array) -> jax.Array:
    """``[n, T]`` bool to ``[n, T / 32]`` uint32, the lowest bit first."""
    lanes = mask.reshape(mask.shape[0], -1, _WORD).astype(jnp.uint32)
    return jnp.sum(lanes << jnp.arange(_WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def _first_set_bits(words: jax.Array, k: int) -> jax.Array:
    """Positions of the first k set bits of each row, ``[n, k]``; -1 past the last.

    The words hold two masks of one row, one behind the other: bit positions count within each.
    """
    n, num_words = words.shape
    ends = jnp.cumsum(lax.population_count(words).astype(jnp.int32), axis=1)
    rank = jnp.arange(k, dtype=jnp.int32)[None, :]

    # The first word whose running count passes the rank, by bisection.
    word = jnp.zeros((n, k), jnp.int32)
    for power in reversed(range((num_words - 1).bit_length())):
        probe = word + (1 << power)
        before = jnp.take_along_axis(ends, jnp.minimum(probe, num_words) - 1, axis=1)
        word = jnp.where((probe < num_words) & (before <= rank), probe, word)
    value = jnp.take_along_axis(words, word, axis=1)
    left = rank - (
        jnp.take_along_axis(ends, word, axis=1) - lax.population_count(value).astype(jnp.int32)
    )

    # The bit of that rank within the word, by halves.
    bit = jnp.zeros((n, k), jnp.int32)
    for half in (16, 8, 4, 2, 1):
        low = (value >> bit.astype(jnp.uint32)) & jnp.uint32((1 << half) - 1)
        count = lax.population_count(low).astype(jnp.int32)
        skip = left >= count
        bit = jnp.where(skip, bit + half, bit)
        left = jnp.where(skip, left - count, left)
    position = word % (num_words // 2) * _WORD + bit
    return jnp.where(rank < ends[:, -1:], position, -1)
