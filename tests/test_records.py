"""Records: packing, unpacking, writing into a cache, checking and mending."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jax_sparse_mla as jsm
from jax_sparse_mla import record_check
from jax_sparse_mla.records import check_record_array

RULES = ("pow2", "pow2_fine", "float32")
BYTE_DTYPES = (jnp.uint8, jnp.int8, jnp.float8_e4m3fn)


def expected_scale(amax: float, rule: str) -> float:
    """The rules of the writers in exact arithmetic."""
    if rule == "float32":
        return max(amax / 448, 2.0**-126)
    x = max(amax / 448, 1e-4) if rule == "pow2" else max(amax, 1e-4) / 448
    mantissa, exponent = math.frexp(x)  # x = mantissa * 2**exponent, mantissa in [0.5, 1)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


@functools.cache
def packer(rule: str):
    return jax.jit(functools.partial(jsm.pack_records, scale_rule=rule))


write = jax.jit(jsm.write_records, static_argnames="scale_rule")
repack = jax.jit(jsm.repack_records)


def scales_of(records) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(records)[..., 512:528]).view(np.float32)


def tokens(rng, shape, *, size=1.0):
    latent = (rng.standard_normal((*shape, 512)) * size).astype(np.float32)
    rope = rng.standard_normal((*shape, 64)).astype(ml_dtypes.bfloat16)
    return latent, rope


# -- packing


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None, max_examples=60)
@given(
    amaxes=st.lists(
        st.floats(0, np.float64(np.finfo(np.float32).max), width=32), min_size=4, max_size=4
    ),
    nudges=st.lists(st.integers(-2, 2), min_size=4, max_size=4),
    on_boundary=st.booleans(),
    exponent=st.integers(-126, 118),
)
def test_scale_follows_the_rule_exactly(rule, amaxes, nudges, on_boundary, exponent):
    amax = np.array(amaxes, np.float32)
    if on_boundary:  # 448 * 2**k and its neighbours, where rounding up turns over
        amax = np.float32(448 * 2.0**exponent) * np.ones(4, np.float32)
        amax = (amax.view(np.int32) + np.array(nudges, np.int32)).view(np.float32)
    latent = np.zeros((4, 128), np.float32)
    latent[:, 17] = -amax
    got = scales_of(packer(rule)(latent.reshape(512), np.zeros(64, np.float32)))
    # Devices flush subnormal float32 to zero.
    want = [expected_scale(float(a) if a >= 2.0**-126 else 0.0, rule) for a in amax]
    if rule == "float32":
        np.testing.assert_allclose(got, np.float32(want), rtol=2.0**-22)
    else:
        np.testing.assert_array_equal(got, np.float32(want))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 57344.0, 1e30])
def test_codes_are_nearest_and_layout_is_the_documented(rule, size):
    rng = np.random.default_rng(0)
    latent, rope = tokens(rng, (3, 2), size=size)
    latent[0, 0, 128:256] = 0
    latent[1, 1, 300] = size * 1000  # one huge value among small ones
    records = np.asarray(packer(rule)(latent, rope))
    assert records.shape == (3, 2, 656)
    assert records.dtype == np.uint8
    scale = np.repeat(scales_of(records), 128, axis=-1).astype(np.float64)
    codes = (latent / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    difference = oracle.E4M3FN[records[..., :512]] - codes.astype(np.float64)
    if rule == "float32":  # the quotient may be off in its last place, which can turn a tie
        assert np.count_nonzero(difference) <= 2
    else:
        np.testing.assert_array_equal(difference, 0)
    np.testing.assert_array_equal(records[..., 528:], rope.view(np.uint8))
    flat = records.reshape(-1, 656)
    assert np.isfinite(oracle.unpack_records(flat, "float32")).all()
    if rule != "float32":
        assert np.isfinite(oracle.unpack_records(flat, "pow2")).all()


@pytest.mark.parametrize(("rule", "floor"), [("pow2", -13), ("pow2_fine", -22), ("float32", -126)])
def test_zero_latent_gets_the_smallest_scale(rule, floor):
    records = jsm.pack_records(np.zeros(512, np.float32), np.zeros(64, np.float32), scale_rule=rule)
    np.testing.assert_array_equal(scales_of(records), np.float32(2.0**floor))
    np.testing.assert_array_equal(np.asarray(records)[:512], 0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_latent_that_is_not_finite_reads_as_nan(rule, value):
    latent, rope = tokens(np.random.default_rng(1), (2,))
    latent[0, 200] = value
    records = packer(rule)(latent, rope)
    for scale_format in ("pow2", "float32"):
        got = np.asarray(jsm.unpack_records(records, scale_format=scale_format)[0])
        assert np.isnan(got[0, 128:256]).all()
    assert np.isfinite(np.asarray(jsm.unpack_records(records, scale_format="float32")[0])[1]).all()


def test_rope_is_stored_verbatim():
    bits = np.arange(64, dtype=np.uint16) * 1021 + 0x7F70  # NaN payloads and infinities among them
    records = jsm.pack_records(np.zeros(512, np.float32), bits.view(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(np.asarray(records)[528:].view(np.uint16), bits)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_latents_pack_as_their_float32_values(dtype):
    latent, rope = tokens(np.random.default_rng(2), (5,))
    latent = latent.astype(dtype)
    np.testing.assert_array_equal(
        jsm.pack_records(latent, rope), jsm.pack_records(latent.astype(np.float32), rope)
    )


# -- unpacking


@pytest.mark.parametrize("dtype", BYTE_DTYPES)
@pytest.mark.parametrize("scale_format", ["pow2", "float32"])
def test_unpack_equals_the_oracle(dtype, scale_format):
    rng = np.random.default_rng(3)
    records = oracle.random_records(rng, 64, pow2=False)
    records[:, :512] = rng.integers(0, 256, (64, 512))  # all codes, NaN too
    hostile = [0.0, -0.0, 1.0, 2.0**-126, 2.0**127, 2.0**9, 3.0, -2.0, np.inf, -np.inf, np.nan]
    for row, scale in enumerate(hostile):
        oracle.set_scale(records, row, row % 4, scale)
    latent, rope = jax.jit(functools.partial(jsm.unpack_records, scale_format=scale_format))(
        records.view(dtype)
    )
    with np.errstate(over="ignore"):
        want = oracle.unpack_records(records, scale_format).astype(np.float32)
    # Whether a device keeps numbers below float32's normal ones is its own affair.
    latent = np.where(np.abs(latent) < 2.0**-126, 0, latent)
    want[np.abs(want) < 2.0**-126] = 0
    np.testing.assert_array_equal(latent, want[:, :512])
    np.testing.assert_array_equal(np.asarray(rope).astype(np.float32), want[:, 512:])


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), rule=st.sampled_from(RULES), size=st.floats(1e-3, 1e4))
def test_unpack_inverts_pack_within_e4m3s_half_step(seed, rule, size):
    latent, rope = tokens(np.random.default_rng(seed), (2,), size=size)
    records = packer(rule)(latent, rope)
    got, got_rope = jsm.unpack_records(records, scale_format="float32")
    scale = np.repeat(scales_of(records), 128, axis=-1)
    np.testing.assert_array_less(
        np.abs(got - latent), np.abs(latent) * 2.0**-4 * 1.001 + scale * 2.0**-10 * 1.001
    )
    np.testing.assert_array_equal(np.asarray(got_rope), rope)


# -- writing


def expected_write(cache: np.ndarray, slots, records: np.ndarray) -> np.ndarray:
    rows = cache.reshape(-1, 656).copy()
    for slot, record in zip(np.ravel(slots), records.reshape(-1, 656), strict=True):
        if 0 <= slot < len(rows):
            rows[slot] = record
    return rows.reshape(cache.shape)


@settings(deadline=None, max_examples=40)
@given(
    slots=st.lists(
        st.one_of(st.integers(-3, 26), st.sampled_from([-(2**31), 2**31 - 1, 24, 23, 0, -1])),
        min_size=12,
        max_size=12,
    )
)
def test_write_is_a_loop_over_the_tokens(slots):
    rng = np.random.default_rng(4)
    cache = rng.integers(0, 256, (4, 6, 656), dtype=np.uint8)
    latent, rope = tokens(rng, (12,))
    got = write(cache, np.array(slots, np.int32), latent, rope)
    want = expected_write(cache, slots, np.asarray(packer("pow2")(latent, rope)))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", BYTE_DTYPES)
@pytest.mark.parametrize("shape", [(24,), (2, 3, 4)])
def test_write_into_any_shape_and_dtype_leaves_other_bytes(dtype, shape):
    rng = np.random.default_rng(5)
    cache = rng.integers(0, 256, (*shape, 656), dtype=np.uint8)
    slots = np.array([[5, -1, 23], [24, 0, 5]])
    latent, rope = tokens(rng, (2, 3))
    got = write(cache.view(dtype), slots, latent, rope, scale_rule="float32")
    assert got.dtype == dtype
    records = np.asarray(packer("float32")(latent, rope))
    want = expected_write(cache, slots, records)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want)


@pytest.mark.parametrize("num_tokens", [512, 513, 3000])
def test_the_last_of_duplicate_slots_stays_for_any_number_of_tokens(num_tokens):
    rng = np.random.default_rng(6)
    slots = rng.integers(-5, 45, num_tokens)
    latent, rope = tokens(rng, (num_tokens,))
    cache = np.zeros((40, 656), np.uint8)
    got = write(cache, slots, latent, rope)
    want = expected_write(cache, slots, np.asarray(packer("pow2")(latent, rope)))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("dtype", "x64"), [(np.int8, False), (np.uint32, False), (np.int64, False), (np.int64, True)]
)
def test_slots_of_any_integer_type(dtype, x64):
    latent, rope = tokens(np.random.default_rng(7), (3,))
    slots = np.array([1, 2, 120], dtype)
    if dtype == np.int64:
        slots[2] = 2**32 + 1  # not slot 1
    if dtype == np.uint32:
        slots[2] = 2**32 - 1
    with jax.enable_x64(x64):
        # Not under jit, which wraps a 64-bit argument before the function sees it.
        got = np.asarray(jsm.write_records(np.zeros((4, 656), np.uint8), slots, latent, rope))
    np.testing.assert_array_equal(got[1:3], packer("pow2")(latent, rope)[:2])
    assert not got[[0, 3]].any()


def test_write_of_nothing_and_into_nothing():
    latent, rope = tokens(np.random.default_rng(8), (2,))
    cache = np.full((3, 656), 7, np.uint8)
    same = write(cache, np.zeros(0, np.int32), latent[:0], rope[:0])
    np.testing.assert_array_equal(same, cache)
    none = write(cache[:0], np.array([0, -1]), latent, rope)
    assert none.shape == (0, 656)


LAYERS, TOKENS = 4, 8


def _rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Interleaved RoPE over 64 dimensions, as the caller's jit has it before the write."""
    frequency = 10000.0 ** (-jnp.arange(32) / 32)
    angle = positions[:, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    even, odd = x[:, 0::2], x[:, 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


def _layer(carry, layer, slots, rope, rows):
    cache, hidden = carry
    where = jsm.layer_slots(slots, layer, rows)
    latent = hidden * lax.rsqrt(jnp.mean(hidden * hidden, -1, keepdims=True) + 1e-6)
    cache = jsm.write_records(cache, where, latent, _rope(rope, slots))
    # Stands for attention: reads what was written, and the next layer depends on it.
    read = cache.reshape(-1, 656).at[jnp.maximum(where, 0)].get(mode="clip")
    return cache, hidden + jsm.unpack_records(read)[0]


def _unrolled(cache, slots, hidden, rope, rows):
    for layer in range(LAYERS):
        cache, hidden = _layer((cache, hidden), layer, slots, rope, rows)
    return cache, hidden


def _scanned(cache, slots, hidden, rope, rows):
    def body(carry, layer):
        return _layer(carry, layer, slots, rope, rows), None

    return lax.scan(body, (cache, hidden), jnp.arange(LAYERS))[0]


@pytest.mark.parametrize("step", [_unrolled, _scanned])
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int8])
def test_temporaries_of_a_decode_step_do_not_grow_with_the_cache(step, dtype):
    def temporaries(rows):
        compiled = (
            jax.jit(functools.partial(step, rows=rows), donate_argnums=0)
            .lower(
                jax.ShapeDtypeStruct((LAYERS, rows // 16, 16, 656), dtype),
                jax.ShapeDtypeStruct((TOKENS,), jnp.int32),
                jax.ShapeDtypeStruct((TOKENS, 512), jnp.float32),
                jax.ShapeDtypeStruct((TOKENS, 64), jnp.float32),
            )
            .compile()
        )
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= LAYERS * rows * 656  # the cache is updated in place
        return memory.temp_size_in_bytes

    small, large = temporaries(64), temporaries(64 * 1024)
    assert small == large
    assert large < LAYERS * TOKENS * 16 * 1024


def test_a_scanned_step_writes_what_the_unrolled_one_writes():
    rng = np.random.default_rng(9)
    rows = 32
    latent, rope = tokens(rng, (TOKENS,))
    slots = np.array([0, 31, -1, 32, 5, 6, 5, -32], np.int32)
    cache = np.zeros((LAYERS, 2, 16, 656), np.uint8)
    args = (slots, latent, rope.astype(np.float32))
    unrolled, _ = jax.jit(functools.partial(_unrolled, rows=rows))(cache, *args)
    scanned, _ = jax.jit(functools.partial(_scanned, rows=rows))(cache, *args)
    # The two programs may round the norm differently, which moves few codes, by one step.
    assert np.count_nonzero(np.asarray(unrolled) != scanned) < 20
    np.testing.assert_allclose(
        jsm.unpack_records(unrolled)[0], jsm.unpack_records(scanned)[0], atol=0.26
    )
    written = np.asarray(unrolled).reshape(LAYERS, rows, 656).any(-1)
    np.testing.assert_array_equal(
        written, np.isin(np.arange(rows), [0, 31, 5, 6])[None].repeat(LAYERS, 0)
    )


def test_write_maps_over_data_parallel_caches():
    rng = np.random.default_rng(10)
    cache = np.zeros((3, 8, 656), np.uint8)
    latent, rope = tokens(rng, (3, 2))
    slots = np.array([[0, 7], [-1, 3], [2, 2]])
    got = jax.jit(jax.vmap(jsm.write_records))(cache, slots, latent, rope)
    for i in range(3):
        np.testing.assert_array_equal(got[i], write(cache[i], slots[i], latent[i], rope[i]))


# -- checking and mending


def test_check_names_each_fault_and_slot(monkeypatch):
    monkeypatch.setattr(record_check, "_CHUNK_RECORDS", 7)  # several chunks, the last one short
    fault = jsm.RecordFault
    records = oracle.random_records(np.random.default_rng(11), 40)
    scales = {
        0: (np.inf, fault.SCALE_NOT_FINITE),
        3: (np.nan, fault.SCALE_NOT_FINITE),
        4: (-2.0, fault.SCALE_NEGATIVE),
        6: (-3.0, fault.SCALE_NEGATIVE | fault.SCALE_NOT_POWER_OF_TWO),
        7: (2.0**-127, fault.SCALE_SUBNORMAL),
        13: (1.5, fault.SCALE_NOT_POWER_OF_TWO),
        14: (-np.inf, fault.SCALE_NOT_FINITE | fault.SCALE_NEGATIVE),
    }
    want = {}
    for row, (scale, bits) in scales.items():
        oracle.set_scale(records, row, row % 4, scale)
        want[row] = bits
    for row, good in ((20, 0.0), (21, -0.0), (22, 2.0**-126), (23, 2.0**127), (24, 256.0)):
        oracle.set_scale(records, row, 1, good)
    records[30, 511] = 0xFF
    want[30] = fault.LATENT_NAN
    records[39, 654:656] = 0x80, 0x7F
    want[39] = fault.ROPE_NOT_FINITE
    oracle.set_scale(records, 39, 3, np.nan)
    want[39] |= fault.SCALE_NOT_FINITE

    for buffer in (records.reshape(5, 8, 656), jnp.asarray(records.reshape(2, 4, 5, 656))):
        report = jsm.check_records(buffer)
        assert not report.ok
        assert dict(zip(report.slots.tolist(), report.faults.tolist(), strict=True)) == want
        assert report.num_records == 40
    assert report.counts()[fault.SCALE_NOT_FINITE] == 4
    assert "slot 13: SCALE_NOT_POWER_OF_TWO" in str(report)

    tolerant = jsm.check_records(records, scale_format="float32")
    assert tolerant.slots.tolist() == [0, 3, 14, 30, 39]


@pytest.mark.parametrize("dtype", BYTE_DTYPES)
@pytest.mark.parametrize("scale_format", ["pow2", "float32"])
def test_check_finds_exactly_the_records_that_read_as_nan(dtype, scale_format):
    rng = np.random.default_rng(12)
    records = oracle.random_records(rng, 300, pow2=False)
    # Random bits in a third of the scales and codes: every class of float32 occurs.
    records[::3, 512:516] = rng.integers(0, 256, (100, 4))
    records[1::9, 100] = rng.integers(0, 256, 34)[: len(records[1::9])]
    report = jsm.check_records(jnp.asarray(records).view(dtype), scale_format=scale_format)
    reads_nan = ~np.isfinite(oracle.unpack_records(records, scale_format)).all(-1)
    np.testing.assert_array_equal(report.slots, np.flatnonzero(reads_nan))


def test_check_of_good_and_empty_caches():
    assert jsm.check_records(np.zeros((0, 656), np.uint8)).ok
    report = jsm.check_records(jnp.zeros((3, 4, 656), jnp.uint8))
    assert report.ok
    assert str(report) == 'all 12 records are good for scale_format="pow2"'
    with pytest.raises(TypeError, match="kv_buffer must not be traced"):
        jax.jit(lambda x: jsm.check_records(x).num_records)(jnp.zeros((3, 656), jnp.uint8))


@pytest.mark.parametrize("dtype", BYTE_DTYPES)
def test_repack_makes_scales_powers_of_two_and_keeps_good_groups(dtype, monkeypatch):
    monkeypatch.setattr(record_check, "_CHUNK_RECORDS", 48)  # the last chunk overlaps
    rng = np.random.default_rng(13)
    records = oracle.random_records(rng, 100, pow2=False)
    for row in range(100):
        oracle.set_scale(records, row, 2, 2.0 ** (row % 9 - 4))
    got = jax.jit(jsm.repack_records)(records.reshape(5, 20, 656).view(dtype))
    assert got.dtype == dtype
    got = np.asarray(got).view(np.uint8).reshape(100, 656)
    assert jsm.check_records(got).ok
    np.testing.assert_array_equal(got[:, 256:384], records[:, 256:384])
    np.testing.assert_array_equal(got[:, 528:], records[:, 528:])
    before = oracle.unpack_records(records, "float32")[:, :512]
    after = oracle.unpack_records(got, "pow2")[:, :512]
    scale = np.repeat(scales_of(got), 128, axis=-1)
    assert (np.abs(after - before) <= np.abs(before) * 2.0**-4 + scale * 2.0**-10).all()


@settings(deadline=None, max_examples=150)
@given(
    scale=st.one_of(
        st.floats(width=32),
        st.sampled_from([2.0**-126 * 1.5, 3.4e38, -3.4e38, 1.75, -1.75, 2.0**-149, 1e-38]),
    ),
    codes=st.lists(st.integers(0, 255), min_size=1, max_size=6),
)
def test_repack_of_any_scale_keeps_the_value_or_stays_nan(scale, codes):
    record = np.zeros((1, 656), np.uint8)
    record[0, : len(codes)] = codes
    oracle.set_scale(record, 0, 0, scale)
    got = np.asarray(repack(record))
    with np.errstate(over="ignore"):
        before = oracle.unpack_records(record, "float32")[0, : len(codes)]
    after = oracle.unpack_records(got, "pow2")[0, : len(codes)]
    top = np.nanmax(np.abs(before), initial=0)
    if np.isfinite(scale) and top <= 448 * 2.0**127:
        np.testing.assert_array_equal(np.isnan(after), np.isnan(before))
        new_scale = float(scales_of(got)[0, 0])
        bound = np.abs(before) * (2.0**-4 + 1e-6) + new_scale * 2.0**-10 + 2.0**-117
        good = ~np.isnan(before)
        assert (np.abs(after - before)[good] <= bound[good]).all()
        if top > 2.0**-100 and abs(np.log2(abs(scale))) % 1:
            assert new_scale / 2 * 448 < top * (1 + 1e-6)  # the smallest power of two that fits
    else:
        np.testing.assert_array_equal(got, record)


def test_repack_in_place_needs_no_second_cache():
    rows = 4 * record_check._CHUNK_RECORDS
    compiled = (
        jax.jit(jsm.repack_records, donate_argnums=0)
        .lower(jax.ShapeDtypeStruct((rows, 656), jnp.uint8))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= rows * 656
    assert memory.temp_size_in_bytes < 5 * record_check._CHUNK_RECORDS * 656


# -- bad arguments


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "message"),
    [
        ((4, 576), np.uint8, ValueError, r"kv_buffer must be \[..., 656\].*SGLang"),
        ((4, 584), np.int8, ValueError, r"kv_buffer must be \[..., 656\].*MODEL1"),
        ((4, 640), np.uint8, ValueError, r"kv_buffer must be \[..., 656\], not \[4, 640\]"),
        ((), np.uint8, ValueError, r"kv_buffer must be \[..., 656\], not \[\]"),
        ((4, 656), np.float32, TypeError, "kv_buffer must be uint8, int8 or float8_e4m3fn"),
        ((4, 656), ml_dtypes.float8_e4m3fnuz, TypeError, "not float8_e4m3fnuz"),
        ((4, 656), np.uint16, TypeError, "not uint16"),
    ],
)
def test_caches_that_are_not_caches(shape, dtype, error, message):
    with pytest.raises(error, match=message):
        check_record_array("kv_buffer", shape, np.dtype(dtype))
    with pytest.raises(error, match=message.split(".*")[0].replace("kv_buffer", "")):
        jsm.check_records(np.zeros(shape, dtype))


def test_arguments_are_named_in_errors():
    latent, rope = tokens(np.random.default_rng(14), (2,))
    cache, slots = np.zeros((4, 656), np.uint8), np.array([0, 1])
    cases = [
        (TypeError, "latent must be a floating", (cache, slots, latent.astype(int), rope)),
        (ValueError, r"latent must be \[..., 512\]", (cache, slots, latent[:, :511], rope)),
        (TypeError, "rope must be a floating", (cache, slots, latent, np.zeros((2, 64), int))),
        (ValueError, r"rope must be \[..., 64\]", (cache, slots, latent, rope[:, :32])),
        (ValueError, "rope must have latent's leading axes", (cache, slots, latent, rope[:1])),
        (TypeError, "slots must be an integer", (cache, slots.astype(float), latent, rope)),
        (ValueError, "slots must have latent's leading", (cache, slots[:1], latent, rope)),
        (TypeError, "kv_buffer must be uint8", (cache.astype(float), slots, latent, rope)),
    ]
    for error, message, args in cases:
        with pytest.raises(error, match=message):
            jax.eval_shape(jsm.write_records, *args)
    with pytest.raises(ValueError, match=r"scale_rule must be one of 'pow2', .* not 'log'"):
        jsm.pack_records(latent, rope, scale_rule="log")
    for function in (jsm.unpack_records, jsm.check_records):
        with pytest.raises(ValueError, match="scale_format must be one of"):
            function(cache, scale_format="e8m0")
    with pytest.raises(TypeError, match="records must be uint8"):
        jsm.repack_records(cache.astype(np.float32))
