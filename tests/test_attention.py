"""The op against the float64 oracle: index forms, options, masking, sizes, heads."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

from jax_sparse_mla import sparse_mla_fwd

SCALE = 0.07


def queries(rng, n, heads):
    return rng.standard_normal((n, heads, 576)).astype(ml_dtypes.bfloat16)


def lengths_to_indptr(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def assert_same(a, b):
    """Equal bit for bit, NaN included."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def check_rows(q, kv, rows, *, softmax_scale=SCALE, **options):
    """The op over the given entries a row, in both index forms, against the oracle."""
    expected = oracle.attention(
        q, kv, rows, softmax_scale, scale_format=options.get("scale_format", "pow2")
    )
    lengths = np.array([len(row) for row in rows], np.int32)
    stream = np.concatenate([*rows, []]).astype(np.int32)
    csr = sparse_mla_fwd(
        q, kv, lengths_to_indptr(lengths), stream, softmax_scale, return_lse=True, **options
    )
    oracle.check(*csr, expected)
    # Past a row's length stand entries that must not count.
    width = max([0, *lengths]) + 3
    padded = np.full((len(rows), width), 1, np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    out, lse = sparse_mla_fwd(
        q, kv, None, padded, softmax_scale, row_lengths=lengths, return_lse=True, **options
    )
    assert_same(out, csr[0])
    assert_same(lse, csr[1])
    return csr


class TestIndexForms:
    def test_csr_and_padded_agree_with_the_oracle(self, rng):
        rows = [rng.integers(0, 300, length) for length in (200, 1, 0, 129)]
        check_rows(queries(rng, 4, 16), oracle.random_records(rng, 300), rows)

    def test_padded_rows_without_lengths_count_whole(self, rng):
        q, kv = queries(rng, 3, 2), oracle.random_records(rng, 50)
        indices = rng.integers(-1, 50, (3, 40)).astype(np.int32)
        expected = oracle.attention(q, kv, oracle.padded_rows(indices), SCALE)
        oracle.check(*sparse_mla_fwd(q, kv, None, indices, SCALE, return_lse=True), expected)

    def test_the_pair_equals_the_whole(self, rng):
        q, kv = queries(rng, 3, 5), oracle.random_records(rng, 50)
        indices = rng.integers(0, 50, (3, 40)).astype(np.int32)
        whole = sparse_mla_fwd(q, kv, None, indices, SCALE, return_lse=True)
        pair = (q[..., :512], q[..., 512:])
        for a, b in zip(
            sparse_mla_fwd(pair, kv, None, indices, SCALE, return_lse=True), whole, strict=True
        ):
            assert_same(a, b)

    def test_duplicates_count_as_often_as_they_stand(self, rng):
        q, kv = queries(rng, 1, 2), oracle.random_records(rng, 3)
        rows = [np.array([0, 1, 1, 1, 2, 0])]
        _, lse = check_rows(q, kv, rows)
        _, once = check_rows(q, kv, [np.array([0, 1, 2])])
        assert (np.asarray(lse) > np.asarray(once)).all()

    @pytest.mark.parametrize(
        "indptr",
        [[0, 5, 3, 9, 12], [-7, 4, 2**31 - 1, -(2**31), 10], [12, 0, 12, 0, 12], [3, 3, 3, 3, 3]],
    )
    def test_wild_indptr_is_clamped(self, rng, indptr):
        q, kv = queries(rng, 4, 2), oracle.random_records(rng, 9)
        indices = rng.integers(0, 9, 12).astype(np.int32)
        expected = oracle.attention(q, kv, oracle.csr_rows(indptr, indices), SCALE)
        indptr = np.array(indptr, np.int32)
        oracle.check(*sparse_mla_fwd(q, kv, indptr, indices, SCALE, return_lse=True), expected)

    def test_wild_lengths_are_clamped(self, rng):
        q, kv = queries(rng, 4, 2), oracle.random_records(rng, 9)
        indices = rng.integers(0, 9, (4, 12)).astype(np.int32)
        lengths = np.array([-(2**31), 2**31 - 1, -1, 13], np.int32)
        expected = oracle.attention(q, kv, oracle.padded_rows(indices, lengths), SCALE)
        oracle.check(
            *sparse_mla_fwd(q, kv, None, indices, SCALE, row_lengths=lengths, return_lse=True),
            expected,
        )


class TestMasking:
    @pytest.mark.parametrize("masked", [1, 15, 16, 127, 128, 129])
    @pytest.mark.parametrize("entry", [-1, -(2**31), 2**31 - 1, 300])
    def test_a_masked_run_at_the_front(self, rng, masked, entry):
        rows = [np.concatenate([np.full(masked, entry), rng.integers(0, 300, 140)])]
        check_rows(queries(rng, 1, 3), oracle.random_records(rng, 300), rows)

    def test_a_masked_tile_in_the_middle(self, rng):
        row = rng.integers(0, 300, 400)
        row[128:256] = -1
        check_rows(queries(rng, 1, 3), oracle.random_records(rng, 300), [row])

    @pytest.mark.parametrize("empty", [[0], [1], [3], [0, 1], [0, 1, 2, 3]])
    def test_empty_rows(self, rng, empty):
        rows = [
            np.array([], int) if i in empty else rng.integers(0, 60, 20 + 60 * i) for i in range(4)
        ]
        out, lse = check_rows(queries(rng, 4, 3), oracle.random_records(rng, 60), rows)
        for i in empty:
            assert (np.asarray(out[i]) == 0).all()
            assert np.isneginf(lse[i]).all()

    def test_rows_of_masked_entries_only_are_empty(self, rng):
        rows = [np.full(200, -1), rng.integers(0, 60, 20), np.array([60, -5, 2**31 - 1])]
        out, lse = check_rows(queries(rng, 3, 3), oracle.random_records(rng, 60), rows)
        for i in (0, 2):
            assert (np.asarray(out[i]) == 0).all()
            assert np.isneginf(lse[i]).all()

    @pytest.mark.parametrize("length", [1, 31, 32, 33, 127, 128, 129, 130, 2047, 2048, 2049])
    def test_stale_entries_past_the_end_never_count(self, rng, length):
        kv = oracle.random_records(rng, 300)
        kv[1, :512] = oracle.E4M3_NAN  # check_rows fills the places past a row's end with 1.
        entries = rng.integers(2, 300, length)
        check_rows(queries(rng, 1, 2), kv, [entries])

    def test_unselected_records_may_be_nan(self, rng):
        kv = oracle.random_records(rng, 300)
        selected = rng.choice(np.arange(1, 300), 150, replace=False)
        kv[np.setdiff1d(np.arange(300), selected)] = 0xFF
        row = np.concatenate([selected, np.full(80, -1)])
        rng.shuffle(row)
        out, lse = check_rows(queries(rng, 1, 4), kv, [row])
        assert np.isfinite(np.asarray(out, np.float32)).all()
        assert np.isfinite(lse).all()

    def test_has_invalid_never_changes_the_result(self, rng):
        q, kv = queries(rng, 3, 4), oracle.random_records(rng, 60)
        indices = rng.integers(-30, 60, (3, 300)).astype(np.int32)
        indices[:, 200:] = -1
        a = sparse_mla_fwd(q, kv, None, indices, SCALE, return_lse=True, has_invalid=True)
        b = sparse_mla_fwd(q, kv, None, indices, SCALE, return_lse=True, has_invalid=False)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)


class TestSizes:
    @pytest.mark.parametrize("heads", [1, 2, 4, 8, 12, 15, 16, 17, 32, 64, 96, 128, 130])
    def test_any_number_of_heads(self, rng, heads):
        rows = [rng.integers(0, 90, 140), rng.integers(0, 90, 3)]
        check_rows(queries(rng, 2, heads), oracle.random_records(rng, 90), rows)

    @pytest.mark.parametrize("n", [1, 7, 8, 9, 17])
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
        q, kv = queries(rng, 2, 3), oracle.random_records(rng, 6 * 16)
        indices = rng.integers(0, 96, (2, 40)).astype(np.int32)
        flat = sparse_mla_fwd(q, kv, None, indices, SCALE)
        paged = sparse_mla_fwd(q, kv.reshape(6, 16, 1, 656), None, indices, SCALE)
        assert_same(flat, paged)


class TestOptions:
    def test_softmax_scale(self, rng):
        rows = [rng.integers(0, 90, 140)]
        q, kv = queries(rng, 1, 3), oracle.random_records(rng, 90)
        for scale in (0, 1, -0.05, np.float32(0.1), 192**-0.5 * 1.8739):
            check_rows(q, kv, rows, softmax_scale=scale)

    def test_attn_sink(self, rng):
        q, kv = queries(rng, 3, 4), oracle.random_records(rng, 60)
        rows = [rng.integers(0, 60, 100), np.array([], int), rng.integers(0, 60, 10)]
        sink = np.array([-np.inf, 5.0, 0.0, np.inf], np.float32)
        lengths = np.array([100, 0, 10])
        indptr, stream = lengths_to_indptr(lengths), np.concatenate(rows).astype(np.int32)
        expected = oracle.apply_sink(oracle.attention(q, kv, rows, SCALE), sink)
        out, lse = sparse_mla_fwd(q, kv, indptr, stream, SCALE, attn_sink=sink, return_lse=True)
        oracle.check(out, lse, expected)

    def test_float32_scales(self, rng):
        kv = oracle.random_records(rng, 90, pow2=False)
        rows = [rng.integers(0, 90, 140), rng.integers(0, 90, 10)]
        check_rows(queries(rng, 2, 3), kv, rows, scale_format="float32")

    def test_unquantised_cache(self, rng):
        kv = rng.standard_normal((90, 576)).astype(ml_dtypes.bfloat16)
        rows = [rng.integers(0, 90, 140), rng.integers(0, 90, 10)]
        check_rows(queries(rng, 2, 3), kv, rows)

    @pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
    def test_one_byte_dtypes(self, rng, dtype):
        q, kv = queries(rng, 2, 3), oracle.random_records(rng, 90)
        kv[:, :512] = rng.integers(0, 256, (90, 512))
        kv[:80, :512][kv[:80, :512] & 0x7F == oracle.E4M3_NAN] = 0  # NaN in ten records only
        indices = rng.integers(0, 90, (2, 40)).astype(np.int32)
        a = sparse_mla_fwd(q, kv, None, indices, SCALE)
        b = sparse_mla_fwd(q, kv.view(dtype), None, indices, SCALE)
        assert_same(a, b)

    def test_the_reference_ignores_num_splits(self, rng):
        q, kv = queries(rng, 2, 3), oracle.random_records(rng, 90)
        indices = rng.integers(0, 90, (2, 400)).astype(np.int32)
        a = sparse_mla_fwd(q, kv, None, indices, SCALE, implementation="reference")
        b = sparse_mla_fwd(q, kv, None, indices, SCALE, num_splits=3, implementation="reference")
        assert_same(a, b)

    def test_jit_never_returns_the_result_of_other_options(self, rng):
        q, kv = queries(rng, 2, 3), oracle.random_records(rng, 90, pow2=False)
        indices = rng.integers(0, 90, (2, 40)).astype(np.int32)
        call = jax.jit(
            sparse_mla_fwd, static_argnums=4, static_argnames=("scale_format", "return_lse")
        )
        pow2 = call(q, kv, None, indices, SCALE)
        exact = call(q, kv, None, indices, SCALE, scale_format="float32")
        flat = call(q, kv, None, indices, 0.0, scale_format="float32")
        short = call(q[:1], kv, None, indices[:1], SCALE, scale_format="float32")
        assert np.isnan(np.asarray(pow2, np.float32)).all()
        assert np.isfinite(np.asarray(exact, np.float32)).all()
        assert (np.asarray(flat) != np.asarray(exact)).any()
        assert_same(short, exact[:1])
