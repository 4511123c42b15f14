"""The lightning indexer of DeepSeek sparse attention: index logits, and the tokens they select.

A query row is a pair (request, position). It scores every cached token of its request up to and
including its own position, ``logit[t] = sum_h weight[h] * relu(q[h] . key[t])``, and attends only
the ``k`` best. Rows are independent: chunked prefill at any start, one-token decode and several
draft tokens a request mix freely in one call.

Keys and their cache: index_keys.py; the selection: topk.py.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_sparse_mla.arguments import as_floating, as_int32
from jax_sparse_mla.index_keys import INDEX_DIM, PACKED_KEY_BYTES, is_packed, split_packed
from jax_sparse_mla.topk import select_topk

_TILE_TOKENS = 1024
_MAX_BLOCK_ROWS = 64
_LOGIT_BYTES = 32 << 20


def index_logits(
    q: ArrayLike,
    weights: ArrayLike,
    key_cache: ArrayLike,
    block_table: ArrayLike,
    requests: ArrayLike,
    positions: ArrayLike,
) -> jax.Array:
    """Score every visible token of each row: ``sum_h weights[h] * relu(q[h] . key[t])``.

    Work grows with the longest row, not with the width of the block table. Rows of one request that
    stand together read its keys once; a mixed block of rows reads them row by row. Where all logits
    are more than memory holds, use :func:`index_topk`.

    Args:
      q: [n, H, 128] floating, RoPE applied. bfloat16 and float32 keep their dtype in the products,
        which are summed in float32.
      weights: [n, H] floating, the heads' weights times ``H ** -0.5 * 128 ** -0.5``.
      key_cache: [num_blocks, block_size, 128 or 132], in a format of index_keys.py.
      block_table: [num_requests, w] integer, each request's blocks in the order of its tokens. A
        negative entry or one past the cache is no block: its tokens are invisible.
      requests: [n] integer, each row's line of the block table.
      positions: [n] integer, each row's position; the row sees tokens 0 .. position. Negative for a
        padding row, which sees nothing.

    Returns:
      [n, w * block_size] float32, -inf at tokens that are not visible.

    Raises:
      TypeError: q or weights is not floating, an index is not integer, or the cache has neither
        format.
      ValueError: a shape does not fit.
    """
    rows, cache = _checked(q, weights, key_cache, block_table, requests, positions)
    return _map_row_blocks(lambda logits: logits, rows, cache)


def index_topk(
    q: ArrayLike,
    weights: ArrayLike,
    key_cache: ArrayLike,
    block_table: ArrayLike,
    requests: ArrayLike,
    positions: ArrayLike,
    k: int,
) -> jax.Array:
    """Select the k best-scored visible tokens of each row.

    :func:`index_logits` and :func:`select_topk` by blocks of rows: temporaries stay under 256 MB at
    2,048 rows by 131,072 tokens. The result is a function of the arguments alone, ties included, so
    that tensor-parallel ranks which hold the same indexer select the same tokens.

    Args:
      q, weights, key_cache, block_table, requests, positions: as in :func:`index_logits`.
      k: how many tokens to select, at least 1.

    Returns:
      [n, min(k, w * block_size)] int32 positions within the row's request, in no particular order.
      A row that sees fewer tokens selects them all and ends in -1.

    Raises:
      TypeError: as :func:`index_logits`.
      ValueError: a shape does not fit, or k < 1.
    """
    rows, cache = _checked(q, weights, key_cache, block_table, requests, positions)
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    return _map_row_blocks(lambda logits: select_topk(logits, min(k, cache.width)), rows, cache)


class _Rows(NamedTuple):
    q: jax.Array
    weights: jax.Array
    requests: jax.Array
    positions: jax.Array


class _Cache(NamedTuple):
    keys: jax.Array
    block_table: jax.Array

    @property
    def width(self) -> int:
        """Tokens a request can have."""
        return self.block_table.shape[1] * self.keys.shape[1]


def _checked(
    q: ArrayLike,
    weights: ArrayLike,
    key_cache: ArrayLike,
    block_table: ArrayLike,
    requests: ArrayLike,
    positions: ArrayLike,
) -> tuple[_Rows, _Cache]:
    rows = _Rows(
        as_floating("q", q),
        as_floating("weights", weights),
        as_int32("requests", requests),
        as_int32("positions", positions),
    )
    cache = _Cache(jnp.asarray(key_cache), as_int32("block_table", block_table))
    if rows.q.ndim != 3 or rows.q.shape[2] != INDEX_DIM:
        raise ValueError(f"q must be [n, H, {INDEX_DIM}], not {list(rows.q.shape)}")
    n, heads, _ = rows.q.shape
    if cache.keys.ndim != 3:
        raise ValueError(
            f"key_cache must be [num_blocks, block_size, width], not {list(cache.keys.shape)}"
        )
    is_packed(cache.keys)
    if cache.block_table.ndim != 2 or 0 in cache.block_table.shape:
        raise ValueError(
            "block_table must be [num_requests, w], none of them 0, "
            f"not {list(cache.block_table.shape)}"
        )
    for name, shape in (("weights", (n, heads)), ("requests", (n,)), ("positions", (n,))):
        given = getattr(rows, name).shape
        if given != shape:
            raise ValueError(f"{name} must be {list(shape)} as q has rows, not {list(given)}")
    return rows, cache


def _rows_per_block(width: int) -> int:
    rows = max(1, min(_MAX_BLOCK_ROWS, _LOGIT_BYTES // (4 * width)))
    return 1 << (rows.bit_length() - 1)


def _map_row_blocks(
    function: Callable[[jax.Array], jax.Array], rows: _Rows, cache: _Cache
) -> jax.Array:
    """A function of the logits of a block of rows, for all rows; padding fills the last block."""
    n, block_rows = rows.q.shape[0], _rows_per_block(cache.width)

    def block(rows: _Rows) -> jax.Array:
        return function(_block_logits(rows, cache)[:, : cache.width])

    if 0 < n <= block_rows:
        return block(rows)
    blocks = max(1, -(-n // block_rows))
    pad = blocks * block_rows - n

    def split(array: jax.Array, fill: int = 0) -> jax.Array:
        padding = [(0, pad)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, padding, constant_values=fill).reshape(
            blocks, block_rows, *array.shape[1:]
        )

    # A row at position -1 sees nothing.
    padded = _Rows(*map(split, rows))._replace(positions=split(rows.positions, -1))
    out = lax.map(block, padded)
    return out.reshape(blocks * block_rows, *out.shape[2:])[:n]


def _block_logits(rows: _Rows, cache: _Cache) -> jax.Array:
    """Logits of one block of rows, [rows, tiles * tile], tile by tile as far as a row sees."""
    q, weights, requests, positions = rows
    key_cache, block_table = cache
    num_blocks, block_size, _ = key_cache.shape
    tile_blocks = max(1, min(_TILE_TOKENS // block_size, block_table.shape[1]))
    tile = tile_blocks * block_size
    tiles = -(-block_table.shape[1] // tile_blocks)
    table = jnp.pad(
        block_table, ((0, 0), (0, tiles * tile_blocks - block_table.shape[1])), constant_values=-1
    )
    table = jnp.where((table >= 0) & (table < num_blocks), table, -1)

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
    start = jnp.full((q.shape[0], tiles * tile), -jnp.inf, jnp.float32)
    return lax.fori_loop(0, used, step, start)


def _tile_logits(q: jax.Array, weights: jax.Array, keys: jax.Array, pattern: str) -> jax.Array:
    scale = None
    if keys.shape[-1] == PACKED_KEY_BYTES:
        keys, scale = split_packed(keys)
    dtype = jnp.promote_types(q.dtype, jnp.bfloat16)
    # Without HIGHEST a GPU would round float32 operands to 11 bits, and select other tokens.
    product = functools.partial(
        jnp.einsum, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
    )
    products = product(pattern, q.astype(dtype), keys.astype(dtype))
    logits = product("nh,nht->nt", weights.astype(jnp.float32), jax.nn.relu(products))
    # A key's scale is positive, so it passes through the relu and is applied once a token, not once
    # a head.
    return logits if scale is None else logits * scale
