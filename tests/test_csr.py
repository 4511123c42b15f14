"""Index rows: top-k lists and streams, block tables and slots, splitting rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_sparse_mla as jsm

INT32 = np.iinfo(np.int32)

to_csr = jax.jit(jsm.padded_to_csr)
to_padded = jax.jit(jsm.csr_to_padded, static_argnames="width")
compact = jax.jit(jsm.compact_rows)
split = jax.jit(jsm.split_rows, static_argnums=2)

# Few shapes, so that jit compiles few programs; the values are what varies.
entries = st.one_of(
    st.integers(-3, 9), st.sampled_from([int(INT32.min), int(INT32.max), -1, -1, -1])
)
SHAPES = [(0, 4), (3, 0), (1, 1), (4, 6)]


@st.composite
def padded(draw):
    n, w = draw(st.sampled_from(SHAPES))
    indices = draw(st.lists(entries, min_size=n * w, max_size=n * w))
    lengths = draw(st.lists(st.integers(-2, w + 2), min_size=n, max_size=n))
    return np.array(indices, np.int32).reshape(n, w), np.array(lengths, np.int32)


@settings(deadline=None, max_examples=80)
@given(case=padded(), use_lengths=st.booleans())
def test_padded_to_csr_keeps_unmasked_entries_in_order(case, use_lengths):
    indices, lengths = case
    lengths = lengths if use_lengths else None
    rows = [row[row >= 0] for row in oracle.padded_rows(indices, lengths)]
    indptr, stream = to_csr(indices, lengths)
    assert indptr.dtype == stream.dtype == jnp.int32
    assert stream.shape == (indices.size,)
    np.testing.assert_array_equal(indptr, np.cumsum([0, *map(len, rows)]))
    kept = np.concatenate([np.zeros(0, np.int32), *rows])
    np.testing.assert_array_equal(stream[: len(kept)], kept)
    np.testing.assert_array_equal(stream[len(kept) :], -1)

    compacted, kept_lengths = compact(indices, lengths)
    np.testing.assert_array_equal(kept_lengths, [len(row) for row in rows])
    assert compacted.shape == indices.shape
    for got, want in zip(np.asarray(compacted), rows, strict=True):
        np.testing.assert_array_equal(got, [*want, *[-1] * (len(got) - len(want))])


@settings(deadline=None, max_examples=80)
@given(
    indptr=st.lists(
        st.one_of(st.integers(-3, 14), st.sampled_from([int(INT32.min), int(INT32.max)])),
        min_size=5,
        max_size=5,
    ),
    width=st.sampled_from([0, 3, 11]),
)
def test_csr_to_padded_follows_the_ops_rule_for_any_indptr(indptr, width):
    indices = np.arange(100, 111, dtype=np.int32)
    got, lengths = to_padded(np.array(indptr, np.int32), indices, width=width)
    rows = [row[:width] for row in oracle.csr_rows(indptr, indices)]
    np.testing.assert_array_equal(lengths, [len(row) for row in rows])
    assert got.shape == (4, width)
    for row, want in zip(np.asarray(got), rows, strict=True):
        np.testing.assert_array_equal(row, [*want, *[-1] * (width - len(want))])


def test_csr_to_padded_of_an_empty_stream():
    got, lengths = to_padded(np.zeros(4, np.int32), np.zeros(0, np.int32), width=2)
    np.testing.assert_array_equal(got, np.full((3, 2), -1))
    np.testing.assert_array_equal(lengths, 0)


@settings(deadline=None, max_examples=40)
@given(case=padded())
def test_csr_and_padded_round_trip(case):
    indices, lengths = case
    want = compact(indices, lengths)
    got = to_padded(*to_csr(indices, lengths), width=indices.shape[1])
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


# -- slots


def expected_slot(table, request, position, size, stride):
    if position < 0 or position >= table.shape[1] * size:
        return -1
    if not 0 <= request < len(table):
        return -1
    block = int(table[request, position // size])
    slot = block * stride + position % size
    return slot if block >= 0 and slot <= INT32.max else -1


@pytest.mark.parametrize(("block_size", "block_stride"), [(1, 1), (1, 3), (16, 16), (64, 80)])
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_slots_of_positions(block_size, block_stride, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    table = rng.integers(-1, 9, (3, 4))
    table[rng.random(table.shape) < 0.1] = INT32.max // block_stride
    table[rng.random(table.shape) < 0.1] = INT32.max
    table[rng.random(table.shape) < 0.1] = INT32.min
    positions = rng.integers(-2, 4 * block_size + 3, (5, 7))
    positions[0, :2] = INT32.min, INT32.max
    requests = rng.integers(-1, 5, 5)
    got = slots_of(block_size, block_stride)(
        table.astype(np.int32), positions.astype(np.int32), requests.astype(np.int32)
    )
    assert got.dtype == jnp.int32
    want = [
        [expected_slot(table, r, int(p), block_size, block_stride) for p in row]
        for r, row in zip(requests, positions, strict=True)
    ]
    np.testing.assert_array_equal(got, want)


@functools.cache
def slots_of(block_size, block_stride):
    return jax.jit(
        functools.partial(
            jsm.block_table_to_slots, block_size=block_size, block_stride=block_stride
        )
    )


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_any_block_size_gives_the_same_slots_for_the_same_tokens(block_size):
    """A contiguous cache cut into blocks of any size has token p of request r in the same row."""
    tokens = 128
    blocks = tokens // block_size
    table = np.arange(2 * blocks).reshape(2, blocks)
    positions = np.broadcast_to(np.arange(tokens), (2, tokens))
    got = jsm.block_table_to_slots(table, positions, block_size=block_size)
    np.testing.assert_array_equal(got, np.arange(2 * tokens).reshape(2, tokens))


def test_stride_finds_the_rows_of_a_padded_block():
    cache = np.zeros((4, 24, 656), np.uint8)  # 24 rows a block, 16 of them tokens
    table = np.array([[2, 0]])
    slots = slots_of(16, 24)(table, np.arange(32)[None])
    written = jax.jit(jsm.write_records)(
        cache, slots, np.ones((1, 32, 512), np.float32), np.ones((1, 32, 64), np.float32)
    )
    used = np.asarray(written).any(-1)
    want = np.zeros((4, 24), bool)
    want[[2, 0], :16] = True
    np.testing.assert_array_equal(used, want)


def test_a_request_a_token_and_a_request_a_row():
    table = np.array([[5], [7]])
    slots = slots_of(4, 4)
    by_token = slots(table, np.array([0, 1, 2]), np.array([1, 0, 1]))
    np.testing.assert_array_equal(by_token, [28, 21, 30])
    aligned = slots(table, np.array([[0, 1], [2, 3]]), np.array([[1, 0], [0, 1]]))
    np.testing.assert_array_equal(aligned, [[28, 21], [22, 31]])
    default = slots(table, np.array([3, 4]))
    np.testing.assert_array_equal(default, [23, -1])


def test_tables_without_blocks_or_requests():
    none = jsm.block_table_to_slots(np.zeros((2, 0), int), np.array([0, 1]), block_size=4)
    np.testing.assert_array_equal(none, [-1, -1])
    nobody = jsm.block_table_to_slots(
        np.zeros((0, 3), int), np.array([0, 1]), np.array([0, 0]), block_size=4
    )
    np.testing.assert_array_equal(nobody, [-1, -1])


@pytest.mark.parametrize("x64", [False, True])
def test_wide_integers_do_not_wrap(x64):
    with jax.enable_x64(x64):
        slots = jsm.block_table_to_slots(
            np.array([[1, 2**32 + 1]]), np.array([[0, 4, 2**32]]), block_size=4
        )
        np.testing.assert_array_equal(slots, [[4, -1, -1]])
        np.testing.assert_array_equal(
            jsm.layer_slots(np.array([2**32, 1, -(2**40)]), 1, 4), [-1, 5, -1]
        )
        indptr, stream = jsm.padded_to_csr(np.array([[-(2**33), 2**32 + 1, 3]]))
        np.testing.assert_array_equal(indptr, [0, 2])
        np.testing.assert_array_equal(stream, [INT32.max, 3, -1])


def test_layer_slots_never_reach_another_layer():
    slots = np.array([-(2**31), -1, 0, 9, 10, 2**31 - 1], np.int32)
    for layer in range(3):
        got = jax.jit(jsm.layer_slots, static_argnums=2)(slots, layer, 10)
        np.testing.assert_array_equal(got, [-1, -1, 10 * layer, 10 * layer + 9, -1, -1])


# -- splitting


@settings(deadline=None, max_examples=80)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 5000),
            st.one_of(
                st.integers(-10, 5000),
                st.sampled_from([0, 1, 127, 128, 129, 2047, 2048, 2049, 2**31 - 1 - 5000]),
            ),
        ),
        min_size=6,
        max_size=6,
    ),
    num_splits=st.sampled_from([1, 2, 3, 8, 300]),
)
def test_splits_partition_each_row_in_near_equal_whole_tiles(rows, num_splits):
    begin = np.array([row[0] for row in rows], np.int32)
    end = begin + np.array([row[1] for row in rows], np.int32)
    got_begin, got_end = (np.asarray(x) for x in split(begin, end, num_splits))
    assert got_begin.shape == got_end.shape == (6 * num_splits,)
    for i in range(6):
        b = got_begin[i * num_splits : (i + 1) * num_splits].astype(int)
        e = got_end[i * num_splits : (i + 1) * num_splits].astype(int)
        stop = max(begin[i], end[i])
        assert (b[0], e[-1]) == (begin[i], stop)
        np.testing.assert_array_equal(b[1:], e[:-1])
        assert (b <= e).all()
        tiles = -(-(e - b) // 128)
        assert tiles.sum() == -(-(stop - begin[i]) // 128)  # no tile is begun twice
        assert tiles.max() - tiles.min() <= 1
        assert (np.diff(tiles) <= 0).all()


def test_splits_need_no_implicit_promotion():
    with jax.numpy_dtype_promotion("strict"):
        begin, end = jsm.split_rows(np.array([0, 7], np.int32), np.array([2**31 - 1, 7]), 2)
    np.testing.assert_array_equal(begin, [0, 2**30, 7, 7])
    np.testing.assert_array_equal(end, [2**30, 2**31 - 1, 7, 7])


def test_one_split_changes_nothing_and_no_rows_work():
    begin, end = split(np.array([3, 9], np.int32), np.array([7, 5], np.int32), 1)
    np.testing.assert_array_equal(begin, [3, 9])
    np.testing.assert_array_equal(end, [7, 9])
    begin, end = split(np.zeros(0, np.int32), np.zeros(0, np.int32), 4)
    assert begin.shape == end.shape == (0,)


# -- bad arguments


def test_arguments_are_named_in_errors():
    rows, table = np.zeros((3, 4), np.int32), np.zeros((2, 5), np.int32)
    slots = functools.partial(jsm.block_table_to_slots, block_size=4)
    for error, message, call in [
        (TypeError, "kv_indices must be an integer", lambda: jsm.padded_to_csr(rows * 1.0)),
        (ValueError, r"kv_indices must be \[n, w\], not", lambda: jsm.padded_to_csr(rows[0])),
        (ValueError, r"row_lengths must be \[3\]", lambda: jsm.padded_to_csr(rows, rows[0])),
        (TypeError, "row_lengths must be an", lambda: jsm.compact_rows(rows, rows[:, 0] * 1.0)),
        (
            ValueError,
            r"kv_indptr must be \[n \+ 1\]",
            lambda: jsm.csr_to_padded(rows, rows[0], 2),
        ),
        (ValueError, r"kv_indptr must be \[n", lambda: jsm.csr_to_padded(rows[0, :0], rows[0], 2)),
        (ValueError, "width must not be neg", lambda: jsm.csr_to_padded(rows[0], rows[0], -1)),
        (ValueError, "positions must have one row for each of 2", lambda: slots(table, rows)),
        (ValueError, "request_ids must have leading", lambda: slots(table, rows, rows[0])),
        (
            ValueError,
            r"block_table must be \[requests, max_",
            lambda: slots(table[0], rows),
        ),
        (TypeError, "positions must be an integer", lambda: slots(table, table * 1.0)),
        (ValueError, "block_size must be at least 1", lambda: slots(table, table, block_size=0)),
        (
            ValueError,
            "block_stride must be at least block_size 4, not 3",
            lambda: slots(table, table, block_stride=3),
        ),
        (TypeError, "slots must be an integer", lambda: jsm.layer_slots(rows * 1.0, 0, 4)),
        (TypeError, "layer must be an integer", lambda: jsm.layer_slots(rows, 0.5, 4)),
        (ValueError, "num_splits must be at least", lambda: jsm.split_rows(rows[0], rows[0], 0)),
        (ValueError, r"row_end must be \[4\]", lambda: jsm.split_rows(rows[0], rows[0, :2], 2)),
    ]:
        with pytest.raises(error, match=message):
            call()
