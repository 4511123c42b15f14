"""The op against the float64 oracle: index forms, masking, sizes, heads, options."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_sparse_mla import sparse_mla_fwd

SCALE = 0.07

# The op is compiled once for each set of shapes and options: tests pad to few shapes.
WIDTHS = (256, 2304)


def queries(rng, n, heads):
    return rng.standard_normal((n, heads, 576)).astype(ml_dtypes.bfloat16)


def lengths_to_indptr(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def padded_form(rows, stale=1):
    """Rows as [n, w] and lengths; behind each row's end stand entries that must not count."""
    lengths = np.array([len(row) for row in rows], np.int32)
    width = next(w for w in WIDTHS if w >= max([0, *lengths]))
    padded = np.full((len(rows), width), stale, np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded, lengths


def assert_same(a, b):
    """Equal bit for bit, NaN included."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))


def available_memory():
    """Bytes that can be had without swapping, as Linux counts them."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable"))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def check_rows(q, kv, rows, *, softmax_scale=SCALE, stale=1, **options):
    """The op over the given entries a row against the oracle."""
    expected = oracle.attention(
        q, kv, rows, softmax_scale, scale_format=options.get("scale_format", "pow2")
    )
    padded, lengths = padded_form(rows, stale)
    out, lse = sparse_mla_fwd(
        q, kv, None, padded, softmax_scale, row_lengths=lengths, return_lse=True, **options
    )
    oracle.check(out, lse, expected)
    return out, lse


class TestIndexForms:
    def test_csr_and_padded_agree(self, rng):
        q, kv = queries(rng, 4, 16), oracle.random_records(rng, 300)
        rows = [rng.integers(-9, 309, length) for length in (200, 1, 0, 129)]
        out, lse = check_rows(q, kv, rows)
        indptr = lengths_to_indptr([len(row) for row in rows])
        stream = np.concatenate(rows).astype(np.int32)
        csr = sparse_mla_fwd(q, kv, indptr, stream, SCALE, return_lse=True)
        oracle.check(*csr, oracle.attention(q, kv, rows, SCALE))
        if jax.default_backend() == "cpu":
            assert_same(csr[0], out)
            assert_same(csr[1], lse)

    def test_padded_rows_without_lengths_count_whole(self, rng):
        q, kv = queries(rng, 3, 2), oracle.random_records(rng, 50)
        indices = rng.integers(-1, 50, (3, 256)).astype(np.int32)
        expected = oracle.attention(q, kv, oracle.padded_rows(indices), SCALE)
        oracle.check(*sparse_mla_fwd(q, kv, None, indices, SCALE, return_lse=True), expected)

    def test_the_pair_equals_the_whole(self, rng):
        q, kv = queries(rng, 3, 5), oracle.random_records(rng, 50)
        indices = rng.integers(0, 50, (3, 256)).astype(np.int32)
        whole = sparse_mla_fwd(q, kv, None, indices, SCALE, return_lse=True)
        pair = (q[..., :512], q[..., 512:])
        parts = sparse_mla_fwd(pair, kv, None, indices, SCALE, return_lse=True)
        for a, b in zip(parts, whole, strict=True):
            assert_same(a, b)

    def test_duplicates_count_as_often_as_they_stand(self, rng):
        q, kv = queries(rng, 2, 2), oracle.random_records(rng, 50)
        _, lse = check_rows(q, kv, [np.array([0, 1, 1, 1, 2, 0]), np.array([0, 1, 2])])
        assert (np.asarray(lse[0]) != np.asarray(lse[1])).all()

    def test_wild_indptr_is_clamped(self, rng):
        q, kv = queries(rng, 4, 2), oracle.random_records(rng, 50)
        indices = rng.integers(0, 50, 12).astype(np.int32)
        for indptr in (
            [0, 5, 3, 9, 12],
            [-7, 4, 2**31 - 1, -(2**31), 10],
            [12, 0, 12, 0, 12],
            [3, 3, 3, 3, 3],
        ):
            expected = oracle.attention(q, kv, oracle.csr_rows(indptr, indices), SCALE)
            indptr = np.array(indptr, np.int32)
            oracle.check(*sparse_mla_fwd(q, kv, indptr, indices, SCALE, return_lse=True), expected)

    def test_wild_lengths_are_clamped(self, rng):
        q, kv = queries(rng, 4, 2), oracle.random_records(rng, 50)
        indices = rng.integers(0, 50, (4, 256)).astype(np.int32)
        lengths = np.array([-(2**31), 2**31 - 1, -1, 257], np.int32)
        expected = oracle.attention(q, kv, oracle.padded_rows(indices, lengths), SCALE)
        call = sparse_mla_fwd(q, kv, None, indices, SCALE, row_lengths=lengths, return_lse=True)
        oracle.check(*call, expected)


class TestMasking:
    @pytest.mark.parametrize("entry", [-1, -(2**31), 2**31 - 1, 300])
    def test_masked_runs_at_the_front(self, rng, entry):
        rows = [
            np.concatenate([np.full(masked, entry), rng.integers(0, 300, 120)])
            for masked in (1, 15, 16, 127, 128, 129)
        ]
        check_rows(queries(rng, 6, 3), oracle.random_records(rng, 300), rows)

    def test_a_masked_tile_in_the_middle(self, rng):
        row = rng.integers(0, 300, 400)
        row[128:256] = -1
        check_rows(queries(rng, 1, 3), oracle.random_records(rng, 300), [row])

    @pytest.mark.parametrize("empty", [[0], [1], [3], [0, 1], [0, 1, 2, 3]])
    def test_empty_rows(self, rng, empty):
        lengths = [0 if i in empty else 20 + 60 * i for i in range(4)]
        rows = [rng.integers(0, 60, length) for length in lengths]
        out, lse = check_rows(queries(rng, 4, 3), oracle.random_records(rng, 60), rows)
        for i in empty:
            assert (np.asarray(out[i]) == 0).all()
            assert np.isneginf(lse[i]).all()

    def test_rows_of_masked_entries_only_are_empty(self, rng):
        rows = [np.full(200, -1), rng.integers(0, 60, 20), np.array([60, -5, 2**31 - 1]), []]
        rows = [np.asarray(row, int) for row in rows]
        out, lse = check_rows(queries(rng, 4, 3), oracle.random_records(rng, 60), rows)
        for i in (0, 2, 3):
            assert (np.asarray(out[i]) == 0).all()
            assert np.isneginf(lse[i]).all()

    def test_stale_entries_past_the_end_never_count(self, rng):
        kv = oracle.random_records(rng, 300)
        kv[1] = oracle.E4M3_NAN
        lengths = (1, 31, 32, 33, 127, 128, 129, 130, 2047, 2048, 2049)
        rows = [rng.integers(2, 300, length) for length in lengths]
        check_rows(queries(rng, len(rows), 2), kv, rows, stale=1)

    @pytest.mark.parametrize("byte", [0x7F, 0xFF])
    def test_unselected_records_may_be_nan(self, rng, byte):
        kv = oracle.random_records(rng, 300)
        selected = rng.choice(np.arange(1, 300), 150, replace=False)
        kv[np.setdiff1d(np.arange(300), selected)] = byte  # record 0 among them
        row = np.concatenate([selected, np.full(80, -1)])
        rng.shuffle(row)
        out, lse = check_rows(queries(rng, 1, 4), kv, [row])
        assert np.isfinite(np.asarray(out, np.float32)).all()
        assert np.isfinite(lse).all()

    def test_has_invalid_never_changes_the_result(self, rng):
        q, kv = queries(rng, 3, 4), oracle.random_records(rng, 60)
        indices = rng.integers(-30, 60, (3, 256)).astype(np.int32)
        indices[:, 100:] = -1
        a = sparse_mla_fwd(q, kv, None, indices, SCALE, return_lse=True, has_invalid=True)
        b = sparse_mla_fwd(q, kv, None, indices, SCALE, return_lse=True, has_invalid=False)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_no_stream_can_make_it_read_elsewhere(self, data):
        """Any int32 anywhere: in indptr, in the entries."""
        wild = st.one_of(
            st.integers(-(2**31), 2**31 - 1),
            st.integers(-3, 40),
            st.sampled_from([-(2**31), -1, 0, 29, 30, 31, 127, 128, 255, 256, 2**31 - 1]),
        )
        indptr = np.array(data.draw(st.lists(wild, min_size=5, max_size=5)), np.int32)
        few = data.draw(st.lists(wild, min_size=1, max_size=20))
        indices = np.resize(np.array(few, np.int32), 256)
        rng = np.random.default_rng(data.draw(st.integers(0, 9)))
        q, kv = queries(rng, 4, 2), oracle.random_records(rng, 30)
        expected = oracle.attention(q, kv, oracle.csr_rows(indptr, indices), SCALE)
        oracle.check(*sparse_mla_fwd(q, kv, indptr, indices, SCALE, return_lse=True), expected)


class TestSizes:
    @pytest.mark.parametrize("heads", [1, 2, 4, 8, 12, 15, 16, 17, 32, 64, 96, 128, 130])
    def test_any_number_of_heads(self, rng, heads):
        rows = [rng.integers(0, 90, 140), rng.integers(0, 90, 3)]
        check_rows(queries(rng, 2, heads), oracle.random_records(rng, 90), rows)

    @pytest.mark.parametrize("n", [1, 9, 17])
    def test_any_number_of_rows(self, rng, n):
        rows = [rng.integers(0, 90, rng.integers(0, 200)) for _ in range(n)]
        check_rows(queries(rng, n, 2), oracle.random_records(rng, 90), rows)

    def test_nothing_at_all(self, rng):
        kv = oracle.random_records(rng, 4)
        for n, heads, rows in (0, 4, 4), (3, 4, 0), (3, 0, 4), (0, 0, 0):
            q = queries(rng, n, heads)
            for indices in np.zeros((n, 5), np.int32), np.zeros((n, 0), np.int32):
                out, lse = sparse_mla_fwd(q, kv[:rows], None, indices, SCALE, return_lse=True)
                assert out.shape == (n, heads, 512)
                assert out.dtype == jnp.bfloat16
                assert lse.shape == (n, heads)
                assert lse.dtype == jnp.float32
                if rows == 0 or indices.size == 0:
                    assert (np.asarray(out) == 0).all()
                    assert np.isneginf(lse).all()

    def test_cache_of_pages(self, rng):
        q, kv = queries(rng, 3, 2), oracle.random_records(rng, 48)
        indices = rng.integers(0, 48, (3, 256)).astype(np.int32)
        flat = sparse_mla_fwd(q, kv, None, indices, SCALE)
        assert_same(flat, sparse_mla_fwd(q, kv.reshape(3, 16, 1, 656), None, indices, SCALE))

    @pytest.mark.slow
    @pytest.mark.parametrize("edge", [2**31, 2**32])
    def test_cache_beyond_32_bit_addresses(self, rng, edge):
        """Records just below and above the byte addresses where 32 bits end."""
        last = -(-edge // 656) + 200
        kv = np.zeros((last + 1, 656), np.uint8)  # pages are real only where written
        near = np.r_[0:100, edge // 656 - 100 : last + 1]
        kv[near] = oracle.random_records(rng, len(near))
        rows = [rng.permutation(near), near[-3:], np.array([last, last + 1, edge // 656])]
        check_rows(queries(rng, 3, 2), kv, rows)

    @pytest.mark.slow
    @pytest.mark.parametrize("n", [14_564, 29_128])
    def test_queries_and_results_beyond_32_bit_sizes(self, rng, n):
        """2^31 bytes and 2^31 elements of q; each row is one of two, so that all can be checked."""
        heads = 128
        need = 6 * n * heads * 576 * 2
        if jax.default_backend() == "cpu" and available_memory() < need:
            pytest.skip(f"needs {need >> 30} GiB of free memory")
        few = queries(rng, 2, heads)
        kv = oracle.random_records(rng, 8)
        q = jnp.tile(jnp.asarray(few), (n // 2, 1, 1))
        indices = jnp.tile(jnp.array([[3, -1], [5, 7]], jnp.int32), (n // 2, 1))
        out, lse = sparse_mla_fwd(q, kv, None, indices, SCALE, return_lse=True)
        rows = oracle.padded_rows(np.asarray(indices[:2]))
        oracle.check(out[:2], lse[:2], oracle.attention(few, kv, rows, SCALE))
        bits = jax.lax.bitcast_convert_type(out, jnp.uint16).reshape(n // 2, 2, heads, 512)
        assert bool((bits == bits[:1]).all())
        assert bool((lse.reshape(n // 2, 2, heads) == lse[:2]).all())


class TestOptions:
    def test_softmax_scale(self, rng):
        rows = [rng.integers(0, 90, 140), rng.integers(0, 90, 9)]
        q, kv = queries(rng, 2, 2), oracle.random_records(rng, 90)
        for scale in (0, 1, -0.05, np.float32(0.1), 192**-0.5 * 1.8739):
            check_rows(q, kv, rows, softmax_scale=scale)

    def test_attn_sink(self, rng):
        q, kv = queries(rng, 3, 4), oracle.random_records(rng, 60)
        rows = [rng.integers(0, 60, 100), np.array([], int), rng.integers(0, 60, 10)]
        sink = np.array([-np.inf, 5.0, 0.0, np.inf], np.float32)
        indices, lengths = padded_form(rows)
        expected = oracle.apply_sink(oracle.attention(q, kv, rows, SCALE), sink)
        out, lse = sparse_mla_fwd(
            q, kv, None, indices, SCALE, row_lengths=lengths, attn_sink=sink, return_lse=True
        )
        oracle.check(out, lse, expected)

    def test_float32_scales(self, rng):
        kv = oracle.random_records(rng, 90, pow2=False)
        kv[:, 512:528:4] |= 1  # the last bit of every scale's mantissa
        rows = [rng.integers(0, 90, 140), rng.integers(0, 90, 10)]
        check_rows(queries(rng, 2, 2), kv, rows, scale_format="float32")

    def test_unquantised_cache(self, rng):
        kv = rng.standard_normal((90, 576)).astype(ml_dtypes.bfloat16)
        rows = [rng.integers(0, 90, 140), rng.integers(0, 90, 10)]
        check_rows(queries(rng, 2, 2), kv, rows)

    @pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
    def test_one_byte_dtypes(self, rng, dtype):
        q, kv = queries(rng, 2, 2), oracle.random_records(rng, 90)
        kv[:, :512] = rng.integers(0, 256, (90, 512))
        kv[:80, :512][kv[:80, :512] & 0x7F == oracle.E4M3_NAN] = 0  # NaN in ten records only
        indices = rng.integers(0, 90, (2, 256)).astype(np.int32)
        indices[0] %= 80
        a = sparse_mla_fwd(q, kv, None, indices, SCALE)
        assert_same(a, sparse_mla_fwd(q, kv.view(dtype), None, indices, SCALE))
        assert np.isfinite(np.asarray(a[0], np.float32)).all()
        assert np.isnan(np.asarray(a[1], np.float32)).all()

    def test_the_reference_ignores_num_splits(self, rng):
        q, kv = queries(rng, 2, 2), oracle.random_records(rng, 90)
        indices = rng.integers(0, 90, (2, 256)).astype(np.int32)
        a = sparse_mla_fwd(q, kv, None, indices, SCALE, implementation="reference")
        b = sparse_mla_fwd(q, kv, None, indices, SCALE, num_splits=3, implementation="reference")
        assert_same(a, b)

    def test_jit_never_returns_the_result_of_other_options(self, rng):
        q, kv = queries(rng, 2, 2), oracle.random_records(rng, 90, pow2=False)
        indices = rng.integers(0, 90, (2, 256)).astype(np.int32)
        static = ("scale_format", "return_lse")
        call = jax.jit(sparse_mla_fwd, static_argnums=4, static_argnames=static)
        pow2 = call(q, kv, None, indices, SCALE)
        exact = call(q, kv, None, indices, SCALE, scale_format="float32")
        flat = call(q, kv, None, indices, 0.0, scale_format="float32")
        short = call(q[:1], kv, None, indices[:1], SCALE, scale_format="float32")
        assert np.isnan(np.asarray(pow2, np.float32)).all()
        assert np.isfinite(np.asarray(exact, np.float32)).all()
        assert (np.asarray(flat) != np.asarray(exact)).any()
        assert_same(short, exact[:1])
