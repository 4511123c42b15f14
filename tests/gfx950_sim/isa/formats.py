"""Number formats of the CDNA4 vector and matrix instructions, as decode tables and encoders.

Small formats are sign, exponent, mantissa with a bias (CDNA4 ISA, table 30, "Small Float Data
Formats"; OCP 8-bit floating point specification 1.0; OCP microscaling specification 1.0 for E8M0
and E2M1):

========  =====  ====  =========  ==============  ==========  =============
format    bits   bias  infinity   NaN             largest     smallest
========  =====  ====  =========  ==============  ==========  =============
fp8 e4m3  1-4-3     7  none       0x7f, 0xff      448         2^-9
bf8 e5m2  1-5-2    15  0x7c 0xfc  0x7d-7f, fd-ff  57344       2^-16
fp4 e2m1  1-2-1     1  none       none            6           2^-1
f16       1-5-10   15  0x7c00     as IEEE 754     65504       2^-24
bf16      1-8-7   127  0x7f80     as IEEE 754     3.39e38     2^-133
e8m0      0-8-0   127  none       255             2^127       2^-127 (code 0)
========  =====  ====  =========  ==============  ==========  =============

Every format keeps its denormals: the simulator refuses a kernel whose MODE flushes them.
Encoders round to nearest even unless their name says otherwise, from a wider value that is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint32]
Halves = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]


def _decode_small(exponent_bits: int, mantissa_bits: int) -> Doubles:
    """Values of all codes of a format, read as if it had neither infinities nor NaN."""
    sign_bit = 1 << (exponent_bits + mantissa_bits)
    code = np.arange(2 * sign_bit)
    bias = (1 << (exponent_bits - 1)) - 1
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    significand = np.where(exponent == 0, mantissa, mantissa + (1 << mantissa_bits))
    value = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    return np.where(code & sign_bit, -value, value)


def _frozen(table: Array) -> Array:
    table.setflags(write=False)
    return table


def _fp8_values() -> Doubles:
    values = _decode_small(4, 3)
    values[[0x7F, 0xFF]] = np.nan
    return values


def _bf8_values() -> Doubles:
    values = _decode_small(5, 2)
    values[0x7C], values[0xFC] = np.inf, -np.inf
    values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return values


def _e8m0_values() -> Doubles:
    values = np.ldexp(1.0, np.arange(256) - 127)
    values[255] = np.nan
    return values


FP8_F64: Doubles = _frozen(_fp8_values())
"""Values of the 256 OCP e4m3 codes."""
BF8_F64: Doubles = _frozen(_bf8_values())
"""Values of the 256 OCP e5m2 codes."""
FP4_F64: Doubles = _frozen(_decode_small(2, 1))
"""Values of the 16 OCP e2m1 codes."""
E8M0_F64: Doubles = _frozen(_e8m0_values())
"""Values of the 256 E8M0 scale codes."""
FP8_F32: Floats = _frozen(FP8_F64.astype(np.float32))
BF8_F32: Floats = _frozen(BF8_F64.astype(np.float32))
FP4_F32: Floats = _frozen(FP4_F64.astype(np.float32))
E8M0_F32: Floats = _frozen(E8M0_F64.astype(np.float32))
E8M0_INVERSE_F32: Floats = _frozen((1 / E8M0_F64).astype(np.float32))
"""2^(127 - code); NaN for code 255."""


def _rounding_thresholds(values: Doubles) -> Doubles:
    """Upper ends of the intervals that round to each of the ascending `values`, ties going to the
    even code."""
    middle = (values[:-1] + values[1:]) / 2
    odd = np.arange(middle.size) % 2 == 1
    return np.where(odd, np.nextafter(middle, 0), middle)


# The codes 0 .. largest finite are in ascending order of value. One more step, the first value that
# the exponent range would hold beyond the largest, marks where rounding leaves the format.
_FP8_MAX, _BF8_MAX, _FP4_MAX = 0x7E, 0x7B, 0x7
_FP8_THRESHOLDS = _rounding_thresholds(np.append(FP8_F64[: _FP8_MAX + 1], 480.0))
_BF8_THRESHOLDS = _rounding_thresholds(np.append(BF8_F64[: _BF8_MAX + 1], 65536.0))
_FP4_THRESHOLDS = _rounding_thresholds(np.append(FP4_F64[: _FP4_MAX + 1], 8.0))


def _encode_small(
    value: Floats, thresholds: Doubles, overflow: int, nan: int, sign_shift: int = 7
) -> Bytes:
    """Codes by the definition: the nearest value, ties to the even code."""
    magnitude = np.abs(value)
    with np.errstate(invalid="ignore"):  # signalling NaNs among the values
        code = np.searchsorted(thresholds, magnitude, side="left")
    # searchsorted places NaN after every number, where it would look like an overflow.
    code = np.where(code >= thresholds.size, overflow, code)
    code = np.where(np.isnan(magnitude), nan, code)
    return (code | (np.signbit(value) << sign_shift)).astype(np.uint8)


def _upper_halves() -> Floats:
    """The 65536 float32 values whose lower halves are zero."""
    return (np.arange(2**16, dtype=np.uint32) << np.uint32(16)).view(np.float32)


# A code depends on a float32 only through its upper half and on whether anything is below it: at
# most four bits of the mantissa decide, and what is below them only breaks ties, so that it can be
# kept as one "sticky" lowest bit.
_FP8_CODES = [
    _encode_small(_upper_halves(), _FP8_THRESHOLDS, overflow, 0x7F) for overflow in (0x7F, _FP8_MAX)
]
_BF8_CODES = [
    _encode_small(_upper_halves(), _BF8_THRESHOLDS, overflow, 0x7F) for overflow in (0x7C, _BF8_MAX)
]
_FP4_CODES = _encode_small(_upper_halves(), _FP4_THRESHOLDS, _FP4_MAX, _FP4_MAX, sign_shift=3)


def _upper_half_with_sticky(value: Floats) -> Words:
    bits = value.view(np.uint32)
    return (bits >> np.uint32(16)) | ((bits & np.uint32(0xFFFF)) != 0)


def encode_fp8(value: Floats, clamp: bool = False) -> Bytes:
    """OCP e4m3 codes of float32 values.

    Args:
        value: float32 of any shape.
        clamp: MODE.FP16_OVFL. Off: what rounds beyond 448, and infinity, is NaN. On: both are
            +-448. NaN stays NaN. (CDNA4 ISA, "CVT_*FP8_F32 and CVT*_BF8_F32 FP16_OVFL rule".)
    """
    return _FP8_CODES[clamp].take(_upper_half_with_sticky(value))


def encode_bf8(value: Floats, clamp: bool = False) -> Bytes:
    """OCP e5m2 codes of float32 values; as `encode_fp8`, but overflow is infinity and the clamp is
    +-57344."""
    return _BF8_CODES[clamp].take(_upper_half_with_sticky(value))


def encode_fp4(value: Floats) -> Bytes:
    """OCP e2m1 codes (0 .. 15) of float32 values: what rounds beyond 6, and infinity, is +-6.

    NaN has no code; it is +-6 as well in AMD's host models of the conversion (HIP's
    amd_hip_ocp_host.hpp; composable_kernel's mxf4_utils.hpp).
    """
    return _FP4_CODES.take(_upper_half_with_sticky(value))


def decode_f16(code: Halves) -> Floats:
    """float32 values of f16 codes."""
    return code.view(np.float16).astype(np.float32)


def encode_f16(value: Array) -> Halves:
    """f16 codes of float values, rounded to nearest even (beyond 65519.99 is infinity)."""
    return value.astype(np.float16).view(np.uint16)


def encode_f16_toward_zero(value: Array) -> Halves:
    """f16 codes of float values, rounded toward zero (a finite value never becomes infinity)."""
    nearest = value.astype(np.float16)
    too_far = np.abs(nearest).astype(value.dtype) > np.abs(value)
    return nearest.view(np.uint16) - too_far.astype(np.uint16)


def decode_bf16(code: Halves) -> Floats:
    """float32 values of bf16 codes."""
    return (code.astype(np.uint32) << np.uint32(16)).view(np.float32)


def encode_bf16(value: Floats) -> Halves:
    """bf16 codes of float32 values, rounded to nearest even; NaN keeps its sign and leading
    payload, made quiet."""
    bits = value.view(np.uint32)
    upper = bits >> np.uint32(16)
    code = (bits + ((upper & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
    nan = np.isnan(value)
    if nan.any():
        code = np.where(nan, upper | np.uint32(0x40), code)
    return code.astype(np.uint16)
