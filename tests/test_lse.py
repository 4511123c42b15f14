"""Merging partial results, LSE conversions, the attention sink."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_sparse_mla as jsm
from jax_sparse_mla.lse import merge_weights

merge = jax.jit(jsm.merge_attention, static_argnames=("axis", "out_dtype"))


def expected_merge(outs, lses):
    """Float64 merge over axis 0 by the definition, one element after the other."""
    outs, lses = np.asarray(outs, np.float64), np.asarray(lses, np.float64)
    out = np.zeros(outs.shape[1:])
    lse = np.full(lses.shape[1:], -np.inf)
    for i in np.ndindex(lse.shape):
        parts = [(outs[p][i], lses[p][i]) for p in range(len(lses)) if lses[p][i] != -np.inf]
        if not parts:
            continue
        if any(np.isnan(value) or value == np.inf for _, value in parts):
            out[i] = lse[i] = np.nan
            continue
        top = max(value for _, value in parts)
        weights = [np.exp(value - top) for _, value in parts]
        lse[i] = top + np.log(sum(weights))
        out[i] = sum(w * o for w, (o, _) in zip(weights, parts, strict=True)) / sum(weights)
    return out, lse


def parts_of(rng, parts, shape, dim=8, empty=0.3):
    outs = rng.standard_normal((parts, *shape, dim)).astype(np.float32)
    lses = (rng.standard_normal((parts, *shape)) * 20).astype(np.float32)
    lses[rng.random(lses.shape) < empty] = -np.inf
    outs[lses == -np.inf] = 0
    return outs, lses


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), parts=st.integers(1, 9), empty=st.sampled_from([0, 0.5, 1]))
def test_merge_equals_the_definition(seed, parts, empty):
    outs, lses = parts_of(np.random.default_rng(seed), parts, (3, 4), empty=empty)
    out, lse = merge(outs, lses)
    want_out, want_lse = expected_merge(outs, lses)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, want_out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-6)


def test_the_sum_over_parts_is_in_base_e():
    # exp(2) + exp(8): base 2 would give 8.022, adding base-2 parts in base e 7.23.
    _, lse = jsm.merge_attention(np.zeros((2, 1, 4), np.float32), np.array([[2.0], [8.0]]))
    np.testing.assert_allclose(lse, [np.log(np.exp(2) + np.exp(8))], rtol=1e-6)


def test_empty_parts():
    out, lse = parts_of(np.random.default_rng(0), 1, (2, 3), empty=0)
    empty_out, empty_lse = np.zeros_like(out[0]), np.full_like(lse[0], -np.inf)
    for outs, lses in [
        ([out[0], empty_out], [lse[0], empty_lse]),
        ([empty_out, empty_out, out[0]], [empty_lse, empty_lse, lse[0]]),
    ]:
        got_out, got_lse = merge(outs, lses)
        np.testing.assert_array_equal(got_out, out[0])
        np.testing.assert_array_equal(got_lse, lse[0])
    got_out, got_lse = merge([empty_out, empty_out], [empty_lse, empty_lse])
    np.testing.assert_array_equal(got_out, 0)
    np.testing.assert_array_equal(got_lse, -np.inf)
    no_part_out, no_part_lse = merge(np.zeros((0, 2, 3, 8), np.float32), np.zeros((0, 2, 3)))
    np.testing.assert_array_equal(no_part_out, np.zeros((2, 3, 8)))
    np.testing.assert_array_equal(no_part_lse, np.full((2, 3), -np.inf))


def test_an_empty_parts_out_never_counts():
    outs = np.array([[[np.nan] * 4], [[1.0, 2, 3, 4]]], np.float32)
    out, lse = merge(outs, np.array([[-np.inf], [0.5]], np.float32))
    np.testing.assert_array_equal(out, outs[1])
    np.testing.assert_array_equal(lse, [0.5])


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_part_that_is_no_number_spoils_its_row_and_head_only(bad):
    outs, lses = parts_of(np.random.default_rng(1), 3, (2, 3), empty=0)
    lses[1, 0, 2] = bad
    lses[0, 0, 2] = -np.inf
    out, lse = merge(outs, lses)
    want_out, want_lse = expected_merge(outs, lses)
    assert np.isnan(want_lse[0, 2])
    np.testing.assert_allclose(out, want_out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    # An out of NaN with a number for its lse goes through as well.
    outs[2, 1, 1] = np.nan
    assert np.isnan(np.asarray(merge(outs, lses)[0])[1, 1]).all()


def test_order_and_grouping_do_not_matter():
    outs, lses = parts_of(np.random.default_rng(2), 4, (2, 3))
    want = merge(outs, lses)
    for order in itertools.permutations(range(4)):
        got = merge(outs[list(order)], lses[list(order)])
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    left = merge(outs[:2], lses[:2])
    right = merge(outs[2:], lses[2:])
    got = merge([left[0], right[0]], [left[1], right[1]])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_any_axis(axis):
    outs, lses = parts_of(np.random.default_rng(3), 5, (2, 3))
    want_out, want_lse = expected_merge(outs, lses)
    place = axis % 3
    got = merge(np.moveaxis(outs, 0, place), np.moveaxis(lses, 0, place), axis=axis)
    np.testing.assert_allclose(got[0], want_out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], want_lse, rtol=1e-6)


def test_dtypes():
    outs, lses = parts_of(np.random.default_rng(4), 3, (2, 2))
    assert merge(outs.astype(jnp.bfloat16), lses)[0].dtype == jnp.bfloat16
    out, lse = merge(outs, lses, out_dtype=jnp.bfloat16)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    want = expected_merge(outs, lses)[0].astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_allclose(np.asarray(out, np.float32), want, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("offset", [-3e38, -1e4, 1e4, 3e38])
def test_large_lses_neither_overflow_nor_vanish(offset):
    outs = np.array([[[2.0]], [[4.0]]], np.float32)
    out, lse = merge(outs, np.full((2, 1), offset, np.float32))
    np.testing.assert_allclose(out, [[3.0]])
    np.testing.assert_allclose(lse, [offset + np.log(2)], rtol=1e-6)


def test_split_attention_merges_to_the_whole():
    """The oracle's partial attention over any partition of a row's entries merges to the whole."""
    rng = np.random.default_rng(5)
    records = oracle.random_records(rng, 64)
    q = rng.standard_normal((1, 2, 576))
    entries = rng.permutation(64)[:50]
    want = oracle.attention(q, records, [entries], 0.05)
    cuts = [entries[:0], entries[:7], entries[7:7], entries[7:40], entries[40:]]
    parts = [oracle.attention(q, records, [cut], 0.05) for cut in cuts]
    out, lse = merge(
        np.float32([part.out for part in parts]), np.float32([part.lse for part in parts])
    )
    oracle.check(out, lse, want)


def test_weights_sum_to_one_or_are_zero():
    _, lses = parts_of(np.random.default_rng(6), 4, (50,), empty=0.6)
    weights, lse = merge_weights(lses)
    total = np.asarray(weights).sum(0)
    np.testing.assert_allclose(total, np.where(np.isneginf(lse), 0, 1), rtol=1e-6)
    assert np.isneginf(lse).any()


# -- the sink


def test_sink_equals_the_oracle():
    rng = np.random.default_rng(7)
    out = rng.standard_normal((5, 4, 16)).astype(np.float32)
    lse = (rng.standard_normal((5, 4)) * 5).astype(np.float32)
    lse[2] = -np.inf
    out[2] = np.nan
    sink = np.array([0.3, -np.inf, np.inf, -40.0], np.float32)
    got = jax.jit(jsm.apply_sink)(out, lse, sink)
    assert got.dtype == jnp.float32
    want = oracle.apply_sink(oracle.Expected(np.nan_to_num(out), lse, out), sink).out
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(got)[:, 2], 0)
    np.testing.assert_array_equal(np.asarray(got)[[0, 1, 3, 4], 1], out[[0, 1, 3, 4], 1])


def test_sink_is_one_more_logit_with_a_zero_value():
    rng = np.random.default_rng(8)
    outs, lses = parts_of(rng, 2, (3, 4), empty=0)
    sink = rng.standard_normal(4).astype(np.float32)
    out, lse = merge(outs, lses)
    sinks = np.broadcast_to(sink, (3, 4))
    as_part, _ = merge([out, np.zeros_like(out)], [lse, sinks])
    np.testing.assert_allclose(jsm.apply_sink(out, lse, sink), as_part, rtol=1e-5, atol=1e-6)


def test_sink_keeps_nan_and_dtype():
    out = np.ones((1, 2, 4), jnp.bfloat16)
    got = jsm.apply_sink(out, np.array([[np.nan, 0.0]], np.float32), np.zeros(2, np.float32))
    assert got.dtype == jnp.bfloat16
    assert np.isnan(np.asarray(got, np.float32)[0, 0]).all()
    np.testing.assert_array_equal(np.asarray(got, np.float32)[0, 1], 0.5)


# -- conversions


@given(
    natural=st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=8
    ),
    empty=st.booleans(),
)
@settings(deadline=None, max_examples=50)
def test_base_two_round_trip(natural, empty):
    lse = np.array([*natural, -np.inf] if empty else natural, np.float32)
    base2 = jsm.lse_to_base2(lse)
    np.testing.assert_allclose(base2, lse.astype(np.float64) / np.log(2), rtol=3e-7, atol=1e-37)
    np.testing.assert_allclose(jsm.lse_from_base2(base2), lse, rtol=3e-7, atol=1e-37)


def test_flashmla_marks_empty_rows_with_plus_inf():
    lse = np.array([1.5, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(jsm.lse_from_flashmla(lse), [1.5, -np.inf, -np.inf, np.nan])


# -- bad arguments


def test_arguments_are_named_in_errors():
    outs, lses = parts_of(np.random.default_rng(9), 2, (3, 4))
    for error, message, args in [
        (
            ValueError,
            r"lses must have the shape of outs .*\[2, 3, 4\], not \[3, 4\]",
            (outs, lses[0]),
        ),
        (ValueError, "axis must be an axis of lses", (outs, lses, 3)),
        (ValueError, "axis must be 0 where outs is a sequence", (list(outs), list(lses), 1)),
        (ValueError, "lses must hold at least one part", (outs, [])),
        (ValueError, "lses must hold at least one part, all of one", (outs, [lses[0], lses[1, 0]])),
        (TypeError, "outs must be a floating array, not int32", (outs.astype(np.int32), lses)),
        (TypeError, r"lses\[1\] must be a floating", (outs, [lses[0], np.zeros((3, 4), np.int32)])),
    ]:
        with pytest.raises(error, match=message):
            jsm.merge_attention(*args)
    out, lse = outs[0], lses[0]
    for error, message, args in [
        (ValueError, r"lse must be \[3, 4\] as out, not \[3\]", (out, lse[:, 0], lse[0])),
        (ValueError, r"attn_sink must be \[H\] .* \[4\], not \[3\]", (out, lse, lse[:, 0])),
        (TypeError, "attn_sink must be a floating", (out, lse, np.zeros(4, np.int32))),
    ]:
        with pytest.raises(error, match=message):
            jsm.apply_sink(*args)
    with pytest.raises(TypeError, match="lse must be a floating"):
        jsm.lse_to_base2(np.zeros(3, np.int32))
