"""The reference lowering: formats to the bit, what is not finite, and independence of rows."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import SCALE, assert_same, check_rows, queries

from jax_sparse_mla import sparse_mla_fwd
from jax_sparse_mla.decode import decode, decode_e4m3fn
from jax_sparse_mla.reference import sparse_mla_reference
from jax_sparse_mla.tiling import CPU_TILING, gpu_tiling


@pytest.fixture
def rng():
    return np.random.default_rng(0)


class TestDecoding:
    def test_every_code(self):
        codes = np.arange(256, dtype=np.uint8)
        got = np.asarray(decode_e4m3fn(jnp.asarray(codes)))
        np.testing.assert_array_equal(got, oracle.E4M3FN.astype(np.float32))
        np.testing.assert_array_equal(np.signbit(got[[0, 0x80]]), [False, True])
        known = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        np.testing.assert_array_equal(got, known)

    def test_records(self, rng):
        records = oracle.random_records(rng, 40, exponents=range(-110, 100))
        records[:, :512] = rng.integers(0, 256, (40, 512))
        got = decode(jnp.asarray(records), "pow2")
        np.testing.assert_array_equal(got, oracle.unpack_records(records).astype(np.float32))

    def test_float32_scales_are_exact(self, rng):
        records = oracle.random_records(rng, 40, pow2=False)
        got = decode(jnp.asarray(records), "float32")
        expected = oracle.unpack_records(records, "float32").astype(np.float32)
        np.testing.assert_array_equal(got, expected)


# Every kind of scale: how each format takes it.
SCALES = {
    "2^-126": (2.0**-126, True, True),
    "2^-13": (2.0**-13, True, True),
    "1": (1.0, True, True),
    "2^8": (2.0**8, True, True),
    "2^120": (2.0**120, True, True),
    "zero": (0.0, True, True),
    "negative zero": (-0.0, True, True),
    "3": (3.0, False, True),
    "one bit off": (np.nextafter(np.float32(1), np.float32(2)), False, True),
    "just below": (np.nextafter(np.float32(1), np.float32(0)), False, True),
    "448th": (np.float32(1 / 448), False, True),
    "negative": (-1.0, False, True),
    "inf": (np.inf, False, False),
    "-inf": (-np.inf, False, False),
    "NaN": (np.nan, False, False),
    "subnormal 2^-127": (2.0**-127, False, None),
    "least": (2.0**-149, False, None),
}


class TestScales:
    @pytest.mark.parametrize("scale_format", ["pow2", "float32"])
    def test_every_kind_of_scale(self, rng, scale_format):
        """A kind each in a record of its own, a row for each; one more row that selects none."""
        kv = oracle.random_records(rng, 60)
        q = queries(rng, len(SCALES) + 1, 2)
        q[:, :, 128:256] *= 0.001  # the block that gets the scale, so that large ones compare
        rows = []
        for i, (scale, pow2, float32) in enumerate(SCALES.values()):
            allowed = pow2 if scale_format == "pow2" else float32
            oracle.set_scale(kv, i, 1, scale)
            if allowed is None:  # oracle and XLA may differ on subnormals: see the test below
                oracle.set_scale(kv, i, 1, 1.0)
            if abs(scale) > 1e6 and allowed:
                kv[i, 128:256] &= 0x80  # zeros: 2^120 may stand, its products overflow
            rows.append(np.concatenate([rng.integers(20, 60, 30), [i]]))
        rows.append(rng.integers(20, 60, 31))
        out, lse = check_rows(q, kv, rows, scale_format=scale_format)
        for i, (_, pow2, float32) in enumerate(SCALES.values()):
            allowed = pow2 if scale_format == "pow2" else float32
            nan = np.isnan(np.asarray(out[i], np.float32))
            assert nan.all() == (allowed is False)
            assert np.isnan(lse[i]).all() == (allowed is False)

    @pytest.mark.parametrize("scale", [2.0**-127, 2.0**-149])
    def test_subnormal_scales(self, rng, scale):
        """NaN under pow2; under float32 so small that whether they flush to zero cannot matter."""
        kv = oracle.random_records(rng, 60)
        for block in range(4):
            oracle.set_scale(kv, 7, block, scale)
        q, rows = queries(rng, 1, 2), [np.r_[7, 20:50]]
        out, lse = check_rows(q, kv, rows, scale_format="pow2")
        assert np.isnan(np.asarray(out, np.float32)).all()
        assert np.isnan(lse).all()
        check_rows(q, kv, rows, scale_format="float32")


class TestNotFinite:
    @pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
    @pytest.mark.parametrize("place", [0, 511, 512, 575])
    def test_q_makes_its_row_and_head_nan(self, rng, value, place):
        q, kv = queries(rng, 3, 4), oracle.random_records(rng, 60)
        q[1, 2, place] = value
        rows = [rng.integers(0, 60, 50), rng.integers(0, 60, 130), rng.integers(0, 60, 1)]
        out, lse = check_rows(q, kv, rows)
        nan = np.isnan(np.asarray(out, np.float32))
        assert nan[1, 2].all()
        assert np.isnan(lse[1, 2])
        assert nan.sum() == 512

    def test_q_that_only_makes_logits_minus_infinity_is_still_nan(self, rng):
        """-inf times a positive latent is a weight of zero everywhere, were it not for the rule."""
        kv = oracle.random_records(rng, 60)
        kv[:, :512] &= 0x7F
        kv[:, 0] |= 1
        q = queries(rng, 1, 2)
        q[0, 1, 0] = -np.inf
        check_rows(q, kv, [np.arange(60)])

    def test_an_empty_row_stays_empty(self, rng):
        q, kv = queries(rng, 2, 2), oracle.random_records(rng, 60)
        q[:] = np.nan
        out, lse = check_rows(q, kv, [np.array([-1, 60]), np.array([3])])
        assert (np.asarray(out[0]) == 0).all()
        assert np.isneginf(lse[0]).all()

    @pytest.mark.parametrize("part", ["latent", "rope"])
    def test_a_selected_record_makes_its_rows_nan_in_all_heads(self, rng, part):
        q, kv = queries(rng, 4, 3), oracle.random_records(rng, 60)
        if part == "latent":
            kv[5, 300] = oracle.E4M3_NAN
        else:
            kv[5, 528:530] = np.array([np.nan], ml_dtypes.bfloat16).view(np.uint8)
        others = np.r_[0:5, 6:60]
        rows = [others, np.r_[others, 5], np.r_[5, others], others[:3]]
        out, lse = check_rows(q, kv, rows)
        nan = np.isnan(np.asarray(out, np.float32)).all(axis=(1, 2))
        np.testing.assert_array_equal(nan, [False, True, True, False])
        np.testing.assert_array_equal(np.isnan(lse).all(axis=1), nan)

    def test_huge_values(self, rng):
        """amax of 57344 and one huge value a block, others tiny."""
        kv = oracle.random_records(rng, 60)
        kv[:, :512] = 1
        kv[:, ::128][:, :4] = oracle.E4M3_MAX
        for row in range(60):
            for block in range(4):
                oracle.set_scale(kv, row, block, 128.0)
        q = queries(rng, 2, 2)
        q[..., :512] *= 1e-4
        check_rows(q, kv, [np.arange(60), rng.integers(0, 60, 200)])

    def test_all_zero_latents(self, rng):
        kv = oracle.random_records(rng, 60)
        kv[:, :512] = 0x80
        check_rows(queries(rng, 2, 2), kv, [np.arange(60), np.arange(3)])


class TestRowsAreIndependent:
    """A row's bits are the same wherever it stands and whatever stands beside it."""

    def test_alone_and_among_many(self, rng):
        kv = oracle.random_records(rng, 90)
        q = queries(rng, 40, 16)
        indices = rng.integers(-5, 95, (40, 256)).astype(np.int32)
        lengths = rng.integers(1, 257, 40).astype(np.int32)

        def attend(rows):
            return sparse_mla_fwd(
                q[rows], kv, None, indices[rows], SCALE, row_lengths=lengths[rows], return_lse=True
            )

        whole = attend(np.arange(40))
        order = rng.permutation(40)
        for a, b in zip(whole, attend(order), strict=True):
            assert_same(a[order], b)
        if jax.default_backend() != "cpu":
            return  # of another shape: the library of matrix products may pick another kernel
        for rows in ([7], [39], [3, 7, 39]):
            for a, b in zip(whole, attend(np.array(rows)), strict=True):
                assert_same(a[np.array(rows)], b)

    def test_many_rows_of_the_same_data(self, rng):
        kv = oracle.random_records(rng, 200)
        q = np.repeat(queries(rng, 1, 4), 8192, 0)
        indices = np.repeat(rng.integers(0, 200, (1, 100)).astype(np.int32), 8192, 0)
        out, lse = sparse_mla_fwd(q, kv, None, indices, SCALE, return_lse=True)
        assert_same(out, np.repeat(np.asarray(out[:1]), 8192, 0))
        assert_same(lse, np.repeat(np.asarray(lse[:1]), 8192, 0))
        if jax.default_backend() != "cpu":
            return
        one, one_lse = sparse_mla_fwd(q[:1], kv, None, indices[:1], SCALE, return_lse=True)
        assert_same(out[-1:], one)
        assert_same(lse[-1:], one_lse)

    @settings(max_examples=20, deadline=None)
    @given(st.integers(0, 2**31), st.integers(0, 255), st.integers(0, 7))
    def test_masked_entries_around_change_nothing(self, seed, gap, at):
        """Tiles of masked entries may come before a row's own: bits of the rest stay."""
        rng = np.random.default_rng(seed)
        kv = oracle.random_records(rng, 50)
        q = queries(rng, 8, 2)
        stream = rng.integers(0, 50, 100).astype(np.int32)
        other = rng.integers(-60, 60, 8 * 256).astype(np.int32)
        other[at * 256 : at * 256 + 100] = stream
        lengths = np.full(8, 100, np.int32)
        lengths[(at + 1) % 8] = gap
        indices = other.reshape(8, 256)
        q[at] = q[0]
        out, lse = sparse_mla_fwd(q, kv, None, indices, SCALE, row_lengths=lengths, return_lse=True)
        alone = np.zeros((8, 256), np.int32)
        alone[0, :100] = stream
        out0, lse0 = sparse_mla_fwd(
            q,
            kv,
            None,
            alone,
            SCALE,
            row_lengths=np.r_[100, [0] * 7].astype(np.int32),
            return_lse=True,
        )
        assert_same(out[at], out0[0])
        assert_same(lse[at], lse0[0])


TILINGS = {
    "cpu": CPU_TILING,
    "gpu, one tile": gpu_tiling(4, 600, True),
    "gpu, tiles": gpu_tiling(4, 10**6, True)._replace(entries=128),
    "gpu, blocks": gpu_tiling(4, 600, True)._replace(rows=2),
    "gpu, cache decoded first": gpu_tiling(4, 600, True)._replace(decode_first=1),
    "gpu, float32": gpu_tiling(4, 600, False),
    "gpu, float32 tiles of blocks": gpu_tiling(4, 10**6, False)._replace(rows=2, entries=256),
}


@pytest.mark.parametrize("tiling", TILINGS)
def test_every_way_to_cut_the_work(rng, tiling):
    """What runs on GPUs, on this machine: blocks, tiles, bfloat16 products, decoding first."""
    kv = oracle.random_records(rng, 100)
    kv[11] = 0xFF
    q = queries(rng, 7, 4)
    q[2, 1, 3] = np.inf
    lengths = np.array([600, 0, 17, 128, 129, 256, 500])
    rows = [rng.choice(np.r_[-1, 0:11, 12:105], length) for length in lengths]
    rows[5][40] = 11
    end = np.cumsum(lengths).astype(np.int32)
    operands = (q, q, kv, np.concatenate(rows).astype(np.int32), end - lengths, end)
    out, lse = jax.jit(
        lambda *operands: sparse_mla_reference(
            *operands,
            softmax_scale=SCALE,
            scale_format="pow2",
            partial=False,
            width=600,
            tiling=TILINGS[tiling],
        )
    )(*(jnp.asarray(x) for x in operands))
    oracle.check(out, lse, oracle.attention(q, kv, rows, SCALE))


def test_partial_results_are_float32_and_closer(rng):
    kv, q = oracle.random_records(rng, 100), queries(rng, 2, 4)
    rows = [rng.integers(0, 100, 200), np.array([], int)]
    operands = (q, q, kv, rows[0].astype(np.int32), np.array([0, 5]), np.array([200, 5]))
    out, lse = sparse_mla_reference(
        *(jnp.asarray(x) for x in operands),
        softmax_scale=SCALE,
        scale_format="pow2",
        partial=True,
        width=200,
    )
    expected = oracle.attention(q, kv, rows, SCALE)
    assert out.dtype == jnp.float32
    oracle.check(out, lse, expected)
    np.testing.assert_allclose(out, expected.out, rtol=0, atol=2e-5)
