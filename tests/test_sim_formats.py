"""Number formats: every code of the small ones, and rounding at each boundary between codes."""

import ml_dtypes
import numpy as np
import pytest
from gfx950_sim.isa import formats

CODES = np.arange(256, dtype=np.uint8)
SMALL = [
    pytest.param(
        formats.FP8_F32, formats.encode_fp8, ml_dtypes.float8_e4m3fn, 0x7E, 480.0, id="fp8"
    ),
    pytest.param(
        formats.BF8_F32, formats.encode_bf8, ml_dtypes.float8_e5m2, 0x7B, 65536.0, id="bf8"
    ),
]


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


def random_floats(count: int = 200_000) -> np.ndarray:
    """float32 of all exponents and signs, NaN and infinities among them."""
    bits = np.random.default_rng(1).integers(0, 2**32, count, dtype=np.uint32)
    return bits.view(np.float32)


def test_fp8_values_worked_by_hand():
    values = {
        0x00: 0.0,
        0x01: 2**-9,
        0x07: 7 * 2**-9,
        0x08: 2**-6,
        0x38: 1.0,
        0x39: 1.125,
        0x7E: 448,
    }
    for code, value in values.items():
        assert formats.FP8_F32[code] == value
        assert formats.FP8_F32[code | 0x80] == -value
    assert np.signbit(formats.FP8_F32[0x80])
    assert np.flatnonzero(np.isnan(formats.FP8_F32)).tolist() == [0x7F, 0xFF]
    assert not np.isinf(formats.FP8_F32).any()


def test_bf8_values_worked_by_hand():
    values = {0x01: 2**-16, 0x03: 3 * 2**-16, 0x04: 2**-14, 0x3C: 1.0, 0x3D: 1.25, 0x7B: 57344}
    for code, value in values.items():
        assert formats.BF8_F32[code] == value
        assert formats.BF8_F32[code | 0x80] == -value
    assert formats.BF8_F32[0x7C] == np.inf
    assert formats.BF8_F32[0xFC] == -np.inf
    nans = np.flatnonzero(np.isnan(formats.BF8_F32)).tolist()
    assert nans == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]


def test_fp4_every_code():
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    np.testing.assert_array_equal(formats.FP4_F32, [*values, *(-v for v in values)])
    assert np.signbit(formats.FP4_F32[8])
    np.testing.assert_array_equal(formats.FP4_F64.astype(np.float32), formats.FP4_F32)
    np.testing.assert_array_equal(formats.encode_fp4(formats.FP4_F32), np.arange(16))


def test_fp4_every_boundary():
    """A tie goes to the even code; beyond 6 there is nothing but 6, NaN included."""
    steps = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, 8])
    codes = np.arange(8)
    for sign, offset in ((1, 0), (-1, 8)):
        middle = np.float32(sign) * (steps[:-1] + steps[1:]) / 2
        below = np.nextafter(middle, np.float32(0))
        above = np.nextafter(middle, np.float32(sign * np.inf))
        np.testing.assert_array_equal(formats.encode_fp4(below), codes + offset)
        np.testing.assert_array_equal(
            formats.encode_fp4(middle), np.minimum(codes + codes % 2, 7) + offset
        )
        np.testing.assert_array_equal(formats.encode_fp4(above), np.minimum(codes + 1, 7) + offset)
        beyond = np.copysign(np.float32([6.5, 8, 3e38, np.inf, np.nan]), np.float32(sign))
        assert set(formats.encode_fp4(beyond).tolist()) == {7 + offset}


def test_fp4_agrees_with_an_independent_library():
    values = random_floats()
    values = np.concatenate([values, np.random.default_rng(2).uniform(-8, 8, 100_000)])
    numbers = values[~np.isnan(values)].astype(np.float32)
    expected = numbers.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
    np.testing.assert_array_equal(formats.encode_fp4(numbers), expected)


def test_e8m0_values():
    assert formats.E8M0_F64[0] == 2.0**-127
    assert formats.E8M0_F64[254] == 2.0**127
    assert formats.E8M0_F64[127] == 1
    assert np.isnan(formats.E8M0_F64[255])
    np.testing.assert_array_equal(np.diff(np.log2(formats.E8M0_F64[:255])), 1)
    np.testing.assert_array_equal(formats.E8M0_F32.astype(np.float64), formats.E8M0_F64)
    products = formats.E8M0_F32.astype(np.float64) * formats.E8M0_INVERSE_F32
    np.testing.assert_array_equal(products[:255], 1)
    assert np.isnan(formats.E8M0_INVERSE_F32[255])


@pytest.mark.parametrize(("table", "encode", "dtype", "largest", "beyond"), SMALL)
def test_small_formats_agree_with_an_independent_library(table, encode, dtype, largest, beyond):
    np.testing.assert_array_equal(table, CODES.view(dtype).astype(np.float32))
    values = random_floats()
    numbers = values[~np.isnan(values)]
    np.testing.assert_array_equal(encode(numbers), numbers.astype(dtype).view(np.uint8))


@pytest.mark.parametrize(("table", "encode", "dtype", "largest", "beyond"), SMALL)
def test_every_code_and_every_boundary(table, encode, dtype, largest, beyond):
    finite = np.isfinite(table)
    np.testing.assert_array_equal(encode(table[finite]), CODES[finite])
    steps = np.append(table[: largest + 1], np.float32(beyond))
    codes = np.arange(largest + 1)
    for sign in (1, -1):
        middle = np.float32(sign) * (steps[:-1] + steps[1:]) / 2
        below = np.nextafter(middle, np.float32(0))
        above = np.nextafter(middle, np.float32(sign * np.inf))
        offset = 0x80 if sign < 0 else 0
        np.testing.assert_array_equal(encode(below), codes + offset)
        # A tie goes to the even code; beyond the largest, to no code.
        inside = codes < largest
        np.testing.assert_array_equal(encode(middle)[inside], (codes + codes % 2 + offset)[inside])
        np.testing.assert_array_equal(encode(above)[inside], (codes + 1 + offset)[inside])
        saturated = encode(above[~inside], True)
        assert saturated.tolist() == [largest + offset]


def test_overflow_of_small_formats():
    # CDNA4 ISA, "CVT_*FP8_F32 and CVT*_BF8_F32 FP16_OVFL rule".
    values = np.float32([np.nan, np.inf, -np.inf, 464, 464.00003, -1e30, 61439, 61440])
    assert formats.encode_fp8(values[1:3]).tolist() == [0x7F, 0xFF]
    assert formats.encode_fp8(values[3:6]).tolist() == [0x7E, 0x7F, 0xFF]
    assert formats.encode_fp8(values[1:6], True).tolist() == [0x7E, 0xFE, 0x7E, 0x7E, 0xFE]
    assert formats.encode_bf8(values[1:3]).tolist() == [0x7C, 0xFC]
    assert formats.encode_bf8(values[6:]).tolist() == [0x7B, 0x7C]
    assert formats.encode_bf8(values[1:3], True).tolist() == [0x7B, 0xFB]
    for encode, table in (
        (formats.encode_fp8, formats.FP8_F32),
        (formats.encode_bf8, formats.BF8_F32),
    ):
        for clamp in (False, True):
            assert np.isnan(table[encode(values[:1], clamp)]).all()


def test_f16_every_code_both_ways():
    codes = np.arange(2**16, dtype=np.uint16)
    values = formats.decode_f16(codes)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(formats.encode_f16(values)[numbers], codes[numbers])
    assert values[0x0001] == 2**-24
    assert values[0x7BFF] == 65504
    assert values[0xFC00] == -np.inf
    np.testing.assert_array_equal(formats.encode_f16_toward_zero(values)[numbers], codes[numbers])


def test_f16_toward_zero_is_the_largest_not_beyond():
    values = random_floats()
    values = np.concatenate(
        [values[~np.isnan(values)], np.float32([65519.99, 65520, 1e30, 2**-25])]
    )
    codes = formats.encode_f16_toward_zero(values)
    result = formats.decode_f16(codes)
    assert (np.abs(result) <= np.abs(values)).all()
    assert (np.signbit(result) == np.signbit(values)).all()
    finite = np.isfinite(values)
    next_up = formats.decode_f16(codes + np.uint16(1))
    assert (np.abs(next_up[finite]) > np.abs(values[finite])).all()
    np.testing.assert_array_equal(result[~finite], values[~finite])


def test_bf16_agrees_with_an_independent_library():
    values = random_floats()
    edges = np.uint32(
        [0, 1, 0x7FFF, 0x8000, 0x18000, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, 0xFF800000]
    )
    values = np.concatenate([values, edges.view(np.float32)])
    numbers = values[~np.isnan(values)]
    expected = numbers.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(formats.encode_bf16(numbers), expected)
    codes = np.arange(2**16, dtype=np.uint16)
    np.testing.assert_array_equal(
        formats.decode_bf16(codes), codes.view(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_bf16_nan_stays_nan_with_its_sign():
    nans = np.uint32([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFC12345]).view(np.float32)
    decoded = formats.decode_bf16(formats.encode_bf16(nans))
    assert np.isnan(decoded).all()
    np.testing.assert_array_equal(np.signbit(decoded), [False, True, False, True])
