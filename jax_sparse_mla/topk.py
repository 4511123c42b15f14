"""Exact top-k of long rows, the same on every platform."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

_RADIX_BITS = 2
_WORD = 32


def select_topk(logits: jax.Array, k: int) -> jax.Array:
    """Find the k largest entries of each row, exactly.

    A radix search finds the k-th largest value, bit masks of what lies above it and at it are
    compacted by counting bits: on a GPU faster than a sort (benchmarks/indexer.py). The CPU, where
    `lax.top_k` is faster, uses that. Of equal entries at the boundary those at the lowest positions
    are selected on every platform.

    Args:
      logits: [n, T] float32. -inf is never selected; NaN ranks below every number.
      k: entries to select, 1 .. T.

    Returns:
      [n, k] int32 positions in no particular order, -1 behind them where fewer than k entries
      are selectable.

    Raises:
      TypeError: logits are not float32.
      ValueError: logits have no two axes, or k is outside 1 .. T.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits must be [n, T], not {list(logits.shape)}")
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k must be in 1 .. {logits.shape[1]}, not {k}")
    if logits.dtype != jnp.float32:
        raise TypeError(f"logits must be float32, not {logits.dtype}")
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
    """The largest value that at least k entries of a row reach, [n] uint32, or 0."""
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
    """[n, T] bool to [n, T / 32] uint32, the lowest bit first."""
    lanes = mask.reshape(mask.shape[0], -1, _WORD).astype(jnp.uint32)
    return jnp.sum(lanes << jnp.arange(_WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def _first_set_bits(words: jax.Array, k: int) -> jax.Array:
    """Positions of the first k set bits of each row, [n, k]; -1 past the last.

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
