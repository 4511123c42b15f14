"""The indexer: index keys and their cache, logits of mixed rows, exact top-k."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_sparse_mla import index_keys, indexer, topk

HEADS = 4


def rng(seed=0):
    return np.random.default_rng(seed)


# --- Oracles in NumPy -----------------------------------------------------------------------------


def packed_key(key):
    """One fp8 key, value by value: the layout's text, not the code's way."""
    amax = max(float(np.max(np.abs(key))), 1e-4)
    scale = 2.0 ** np.ceil(np.log2(amax / 448.0))
    values = (key / scale).astype(ml_dtypes.float8_e4m3fn)
    return np.concatenate([values.view(np.uint8), np.array([scale], "<f4").view(np.uint8)])


def dense_logits(q, weights, keys, position):
    """One row against its request's keys [length, 128], float64."""
    scores = np.maximum(q.astype(np.float64) @ keys.astype(np.float64).T, 0)
    logits = weights.astype(np.float64) @ scores
    logits[position + 1 :] = -np.inf
    return logits


def topk_set(logits, k):
    """The exact selection: best first, the lowest position first among equals, -inf never."""
    logits = np.where(np.isnan(logits), -np.finfo(np.float32).max, logits)
    order = np.argsort(-logits, kind="stable")
    return {int(t) for t in order[:k] if logits[t] != -np.inf}


class Pages:
    """Requests of given lengths, keys in shuffled pages, NaN wherever no token stands."""

    def __init__(self, lengths, block_size=16, table_width=None, fp8=False, seed=0):
        r = rng(seed)
        needed = [-(-length // block_size) for length in lengths]
        width = table_width or max(needed)
        blocks = r.permutation(sum(needed) + 3)
        self.table = np.full((len(lengths), width), -1, np.int32)
        shape = (len(blocks), block_size, index_keys.INDEX_DIM)
        pages = np.full(shape, np.nan, ml_dtypes.bfloat16)
        packed = np.full((*shape[:2], index_keys.PACKED_KEY_BYTES), 0xFF, np.uint8)
        self.keys = []
        for request, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            mine, blocks = blocks[:count], blocks[count:]
            self.table[request, :count] = mine
            keys = r.standard_normal((length, index_keys.INDEX_DIM)).astype(ml_dtypes.bfloat16)
            if fp8:
                stored = [packed_key(key.astype(np.float32)) for key in keys]
                for position, key in enumerate(stored):
                    packed[mine[position // block_size], position % block_size] = key
                keys = np.asarray(index_keys.unpack_index_keys(jnp.asarray(np.stack(stored))))
            else:
                for position, key in enumerate(keys):
                    pages[mine[position // block_size], position % block_size] = key
            self.keys.append(keys)
        self.cache = packed if fp8 else pages

    def rows(self, rows, seed=1):
        r = rng(seed)
        q = r.standard_normal((len(rows), HEADS, index_keys.INDEX_DIM)).astype(ml_dtypes.bfloat16)
        weights = r.standard_normal((len(rows), HEADS)).astype(np.float32)
        requests, positions = np.array(rows, np.int32).T
        return q, weights, self.cache, self.table, requests, positions


logits_of = jax.jit(indexer.index_logits)
topk_of = jax.jit(indexer.index_topk, static_argnames="k")

MIXED_ROWS = (
    [(1, p) for p in range(37, 90)]  # a prefill chunk that starts in the middle
    + [(0, 99), (2, 4)]  # decode
    + [(3, 60), (3, 61), (3, 62), (3, 63)]  # draft tokens
    + [(0, -1), (0, -1)]  # padding
    + [(2, p) for p in range(5)]  # a whole short prompt
)
MIXED_LENGTHS = [100, 90, 5, 64]


# --- Index keys -----------------------------------------------------------------------------------


def test_pack_matches_layout():
    keys = rng().standard_normal((50, 128)).astype(np.float32) * np.logspace(-8, 5, 50)[:, None]
    keys = np.concatenate(
        [keys, np.zeros((1, 128)), np.full((1, 128), 448.0), np.full((1, 128), 449)]
    )
    keys = keys.astype(np.float32)
    packed = np.asarray(jax.jit(index_keys.pack_index_keys)(keys))
    np.testing.assert_array_equal(packed, np.stack([packed_key(key) for key in keys]))
    back = np.asarray(index_keys.unpack_index_keys(jnp.asarray(packed)))
    scale = packed[:, 128:].copy().view("<f4")
    assert np.all(np.abs(back - keys) <= np.abs(keys) * 2.0**-4 + scale * 2.0**-10)


@pytest.mark.parametrize("fp8", [False, True])
def test_write_skips_bad_slots_and_is_in_place(fp8):
    keys = rng().standard_normal((6, 128)).astype(np.float32)
    width, dtype = (132, jnp.uint8) if fp8 else (128, jnp.bfloat16)
    cache = jnp.full((4, 4, width), 7, dtype)
    slots = np.array([-1, 3, 15, 16, 2**31 - 1, -(2**31)], np.int32)
    before = np.asarray(cache.astype(jnp.float32)).reshape(16, width)
    write = jax.jit(index_keys.write_index_keys, donate_argnums=0)
    compiled = write.lower(cache, slots, keys).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == cache.nbytes
    large = jax.ShapeDtypeStruct((1 << 16, 4, width), dtype)
    memory = write.lower(large, slots, keys).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1 << 16
    after = np.asarray(write(cache, slots, keys)).reshape(16, width)
    expected = before.copy()
    rows = np.asarray(index_keys.pack_index_keys(keys)) if fp8 else keys.astype(ml_dtypes.bfloat16)
    expected[3], expected[15] = rows[1], rows[2]
    np.testing.assert_array_equal(after.astype(np.float32), expected)


@pytest.mark.parametrize("fp8", [False, True])
def test_slots_of_64_bits_do_not_wrap(fp8):
    """As int32, both 2^32 + 3 and -2^32 + 3 are 3, a slot: they must write nothing."""
    width, dtype = (132, jnp.uint8) if fp8 else (128, jnp.bfloat16)
    cache, keys = jnp.zeros((2, 4, width), dtype), np.ones((3, 128), np.float32)
    got = index_keys.write_index_keys(cache, np.array([2**32 + 3, 1, -(2**32) + 3]), keys)
    written = np.asarray(got.astype(jnp.float32)).reshape(8, width).any(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(written), [1])


def test_hadamard_keeps_dot_products():
    a, b = rng().standard_normal((2, 10, 128)).astype(np.float32)
    rotated = np.sum(np.asarray(index_keys.hadamard(a)) * np.asarray(index_keys.hadamard(b)), -1)
    np.testing.assert_allclose(rotated, np.sum(a * b, -1), atol=1e-4)
    spike = np.zeros((1, 128), np.float32)
    spike[0, 3] = 1
    np.testing.assert_allclose(np.abs(index_keys.hadamard(spike)), 128**-0.5, rtol=1e-6)


# --- Logits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_logits_of_mixed_rows(fp8, block_size):
    pages = Pages(MIXED_LENGTHS, block_size, table_width=-(-128 // block_size), fp8=fp8)
    args = pages.rows(MIXED_ROWS)
    logits = np.asarray(logits_of(*args))
    assert logits.shape == (len(MIXED_ROWS), 128)
    for row, (request, position) in enumerate(MIXED_ROWS):
        expected = dense_logits(args[0][row], args[1][row], pages.keys[request], position)
        assert np.all(logits[row, position + 1 :] == -np.inf)
        np.testing.assert_allclose(
            logits[row, : position + 1], expected[: position + 1], atol=2e-4, rtol=1e-4
        )


def test_rows_do_not_depend_on_their_neighbours(monkeypatch):
    pages = Pages(MIXED_LENGTHS)
    q, weights, cache, table, requests, positions = pages.rows(MIXED_ROWS)
    together = np.asarray(logits_of(q, weights, cache, table, requests, positions))
    order = rng(5).permutation(len(MIXED_ROWS))
    shuffled = logits_of(q[order], weights[order], cache, table, requests[order], positions[order])
    np.testing.assert_allclose(np.asarray(shuffled), together[order], atol=1e-5)
    # Small blocks and tiles: row blocks of one request take the shared path, mixed ones the other.
    monkeypatch.setattr(indexer, "_MAX_BLOCK_ROWS", 8)
    monkeypatch.setattr(indexer, "_TILE_TOKENS", 32)
    blocked = jax.jit(lambda *a: indexer.index_logits(*a))
    np.testing.assert_allclose(
        np.asarray(blocked(q, weights, cache, table, requests, positions)), together, atol=1e-5
    )


def test_missing_blocks_are_invisible():
    pages = Pages([64])
    args = list(pages.rows([(0, 63)]))
    args[3] = args[3].copy()
    args[3][0, 1], args[3][0, 2] = -1, 1 << 20
    logits = np.asarray(logits_of(*args))[0]
    assert np.all(logits[16:48] == -np.inf)
    assert np.all(np.isfinite(np.delete(logits, np.s_[16:48])))
    chosen = np.asarray(topk_of(*args, k=50))[0]
    assert set(chosen[:32]) == set(range(16)) | set(range(48, 64))
    assert np.all(chosen[32:] == -1)


# --- Selection ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("k", [1, 16, 100])
def test_topk_selects_the_best_visible(fp8, k):
    pages = Pages(MIXED_LENGTHS, fp8=fp8)
    args = pages.rows(MIXED_ROWS)
    logits = np.asarray(logits_of(*args))
    chosen = np.asarray(topk_of(*args, k=k))
    assert chosen.shape == (len(MIXED_ROWS), k)
    for row, (_, position) in enumerate(MIXED_ROWS):
        count = min(k, position + 1)
        assert np.all(chosen[row, count:] == -1)
        assert np.all(chosen[row, :count] <= position)
        assert {int(t) for t in chosen[row, :count]} == topk_set(logits[row], k)


def test_first_length_beyond_topk():
    """Rows that see 2,047, 2,048 and 2,049 tokens: the last is the first to leave one out."""
    pages = Pages([2049], block_size=64)
    args = pages.rows([(0, 2046), (0, 2047), (0, 2048)])
    chosen = np.asarray(topk_of(*args, k=2048))
    assert chosen[0, -1] == -1
    assert set(chosen[0, :-1]) == set(range(2047))
    assert set(chosen[1]) == set(range(2048))
    logits = np.asarray(logits_of(*args))[2]
    assert set(range(2049)) - set(chosen[2].tolist()) == {int(np.argmin(logits[:2049]))}


@functools.partial(jax.jit, static_argnames="k")
def by_sorting(logits, k):
    """What the CPU does."""
    return topk.select_topk(logits, k)


@functools.partial(jax.jit, static_argnames="k")
def by_radix(logits, k):
    """What other platforms do."""
    return topk._select_by_radix(topk._sortable(logits), k=k)


both_ways = pytest.mark.parametrize("select", [by_sorting, by_radix])


@both_ways
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_select_is_exact(select, data):
    width = data.draw(st.sampled_from([1, 31, 32, 33, 200]))
    k = data.draw(st.sampled_from(sorted({1, (width + 1) // 2, width})))
    tiny = np.float32(1e-45)
    values = [-np.inf, np.nan, np.inf, 0.0, -0.0, 1.0, -1.0, float(tiny), -float(tiny), 3e38, -3e38]
    few = data.draw(st.lists(st.sampled_from(values), min_size=1, max_size=4))
    r = rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = r.choice(
        np.array([*few, *r.standard_normal(data.draw(st.sampled_from([0, 1, 50])))]), (3, width)
    )
    logits = logits.astype(np.float32)
    chosen = np.asarray(select(logits, k))
    for row, expected in zip(chosen, (topk_set(line, k) for line in logits), strict=True):
        count = len(expected)
        assert set(row[:count].tolist()) == expected
        assert np.all(row[count:] == -1)


@both_ways
def test_select_breaks_ties_by_position(select):
    logits = np.array([[1, 5, 1, 1, 5, 1, 0, 1]], np.float32)
    assert set(np.asarray(select(logits, 4))[0].tolist()) == {1, 4, 0, 2}


def test_platforms_select_the_same():
    logits = rng(3).standard_normal((5, 3000)).astype(np.float32).round(2)
    a, b = (np.sort(np.asarray(select(logits, 700)), axis=1) for select in (by_sorting, by_radix))
    np.testing.assert_array_equal(a, b)


def test_topk_temporaries():
    """2,048 rows by 131,072 tokens, 64 heads, both formats: at most 256 MB."""
    n, heads, block = 2048, 64, 64
    blocks = 131072 // block
    for width, dtype in ((128, jnp.bfloat16), (132, jnp.uint8)):
        shapes = (
            jax.ShapeDtypeStruct((n, heads, 128), jnp.bfloat16),
            jax.ShapeDtypeStruct((n, heads), jnp.float32),
            jax.ShapeDtypeStruct((blocks + 1, block, width), dtype),
            jax.ShapeDtypeStruct((4, blocks), jnp.int32),
            jax.ShapeDtypeStruct((n,), jnp.int32),
            jax.ShapeDtypeStruct((n,), jnp.int32),
        )
        compiled = topk_of.lower(*shapes, k=2048).compile()
        assert compiled.memory_analysis().temp_size_in_bytes <= 256 << 20


# --- Errors and edges -----------------------------------------------------------------------------


def test_no_rows():
    pages = Pages([20])
    q, weights, cache, table, requests, positions = pages.rows([(0, 3)])
    args = (q[:0], weights[:0], cache, table, requests[:0], positions[:0])
    assert logits_of(*args).shape == (0, 32)
    assert topk_of(*args, k=8).shape == (0, 8)


@pytest.mark.parametrize(
    ("index", "value", "error", "name"),
    [
        (0, np.zeros((2, HEADS, 64), ml_dtypes.bfloat16), ValueError, "q "),
        (1, np.zeros((2, HEADS + 1), np.float32), ValueError, "weights"),
        (2, np.zeros((4, 16, 128), np.float32), TypeError, "key_cache"),
        (2, np.zeros((4, 128), ml_dtypes.bfloat16), ValueError, "key_cache"),
        (3, np.zeros((4,), np.int32), ValueError, "block_table"),
        (4, np.zeros((2,), np.float32), TypeError, "requests"),
        (5, np.zeros((3,), np.int32), ValueError, "positions"),
    ],
)
def test_errors_name_the_argument(index, value, error, name):
    args = list(Pages([20]).rows([(0, 3), (0, 4)]))
    args[index] = value
    with pytest.raises(error, match=name):
        indexer.index_topk(*map(jnp.asarray, args), k=4)


def test_k_out_of_range():
    with pytest.raises(ValueError, match="k must be in"):
        topk.select_topk(jnp.zeros((1, 4)), 5)
    with pytest.raises(ValueError, match="k must be at least"):
        indexer.index_topk(*map(jnp.asarray, Pages([20]).rows([(0, 3)])), k=0)
