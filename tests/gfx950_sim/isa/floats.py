"""Float arithmetic as hardware does it, where NumPy alone does not: FMA, minimum and maximum,
transcendental functions.

f32 and f16 denormals are kept, except by the transcendental functions (see `flushed`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_QUIET = np.uint32(0x00400000)
_SIGN = np.uint32(0x80000000)
_SMALLEST_NORMAL = np.float32(2.0**-126)


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once.

    The product of two f32 is exact in f64. Their sum with c is first rounded to odd in f64 (the
    error of the f64 sum decides the last bit), so that rounding it to f32 is the only rounding
    that counts (Boldo and Melquiond, 2008).
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    if error.any():
        inexact = (error != 0) & np.isfinite(total)
        bits = total.view(np.int64)
        even = inexact & (bits & 1 == 0)
        # Move an even last bit toward the exact value: away from zero if the error has total's
        # sign.
        step = np.where((error > 0) == (total > 0), 1, -1)
        total = (bits + np.where(even, step, 0)).view(np.float64)
    return total.astype(np.float32)


def fma_f16(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in f16, rounded once: the product is exact in f32, and the sum with odd rounding
    as in `fma_f32` in f64."""
    exact = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = (
        exact + addend
    )  # at most 22 + 40 bits apart: f64 holds all but ties far below f16's half
    back = total - exact
    error = (exact - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    even = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + np.where(even, step, 0)).view(np.float64).astype(np.float16)


def quiet(x: Array) -> Array:
    """A NaN with its quiet bit set, everything else as it is."""
    return np.where(np.isnan(x), (x.view(np.uint32) | _QUIET).view(np.float32), x)


def is_signaling(x: Array) -> Array:
    """NaNs whose quiet bit is clear."""
    return np.isnan(x) & (x.view(np.uint32) & _QUIET == 0)


def _exact_extreme(a: Array, b: Array, largest: bool) -> Array:
    a, b = np.broadcast_arrays(a, b)
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    chosen = np.fmax(a, b) if largest else np.fmin(a, b)
    both_zero = (a == 0) & (b == 0)
    if both_zero.any():
        x, y = a.view(np.uint32), b.view(np.uint32)
        chosen = np.where(both_zero, (x & y if largest else x | y).view(np.float32), chosen)
    nan = np.isnan(a) | np.isnan(b)
    if nan.any():
        chosen = np.where(np.isnan(a) & np.isnan(b), quiet(b), chosen)
        chosen = np.where(is_signaling(b), quiet(b), chosen)
        chosen = np.where(is_signaling(a), quiet(a), chosen)
    return chosen


_ONES = np.ones(64, np.float32)


def _is_plain(a: Array, b: Array, chosen: Array) -> bool:
    """No NaN (a NaN, or infinities, spoil the sum) and no zero result."""
    if chosen.shape[-1] != 64 or np.count_nonzero(chosen) != chosen.size:
        return False
    total = float(np.add(a, b).reshape(-1, 64).dot(_ONES).sum())
    return total == total


def max_f32(a: Array, b: Array) -> Array:
    """The larger; a quiet NaN loses to a number, a signaling one wins, quieted (MODE.IEEE is set);
    +0 > -0."""
    chosen = np.fmax(a, b)
    return chosen if _is_plain(a, b, chosen) else _exact_extreme(a, b, True)


def min_f32(a: Array, b: Array) -> Array:
    """The smaller; NaN and zeros as in `max_f32`."""
    chosen = np.fmin(a, b)
    return chosen if _is_plain(a, b, chosen) else _exact_extreme(a, b, False)


def max3_f32(a: Array, b: Array, c: Array) -> Array:
    """max(max(a, b), c)."""
    return max_f32(max_f32(a, b), c)


def min3_f32(a: Array, b: Array, c: Array) -> Array:
    """min(min(a, b), c)."""
    return min_f32(min_f32(a, b), c)


def med3_f32(a: Array, b: Array, c: Array) -> Array:
    """The middle one; the minimum of the others if one is NaN."""
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    largest = max3_f32(a, b, c)
    others = np.where(
        largest == a, max_f32(b, c), np.where(largest == b, max_f32(a, c), max_f32(a, b))
    )
    return np.where(nan, min3_f32(a, b, c), others)


def maximum_f32(a: Array, b: Array) -> Array:
    """IEEE 754-2019 maximum: NaN wins, +0 > -0."""
    chosen = np.maximum(a, b)
    if np.count_nonzero(chosen) == chosen.size:
        return chosen
    return np.where(np.isnan(chosen), chosen, _exact_extreme(a, b, True))


def minimum_f32(a: Array, b: Array) -> Array:
    """IEEE 754-2019 minimum: NaN wins, -0 < +0."""
    chosen = np.minimum(a, b)
    if np.count_nonzero(chosen) == chosen.size:
        return chosen
    return np.where(np.isnan(chosen), chosen, _exact_extreme(a, b, False))


def flushed(x: Array) -> Array:
    """Denormals become zeros of their sign."""
    return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def transcendental(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A one-argument function rounded from f64, with denormal inputs and results flushed.

    Hardware is within 1 ulp and flushes f32 denormals whatever MODE says: LLVM scales arguments
    around v_exp_f32, v_log_f32, v_sqrt_f32 and v_rcp_f32 for that reason (AMDGPULegalizerInfo.cpp,
    needsDenormHandlingF32).
    """

    def wrapped(x: Array) -> Array:
        result = function(flushed(x).astype(np.float64)).astype(np.float32)
        return flushed(result)

    return wrapped


def _exponent(x: Array) -> Array:
    """The exponent field, int32."""
    return (x.view(np.uint32) >> np.uint32(23) & np.uint32(0xFF)).astype(np.int32)


def _scaled(x: Array, power: int) -> Array:
    return (x.astype(np.float64) * 2.0**power).astype(np.float32)


def div_scale_f32(s0: Array, s1: Array, s2: Array) -> tuple[Array, Array]:
    """Scale numerator (s0 = s2) or denominator (s0 = s1) of s2 / s1 so that Newton steps stay in
    range.

    The mask says where v_div_fmas has to undo it. CDNA4 ISA, V_DIV_SCALE_F32, read so that the
    division that LLVM builds on it is right: its comparisons with DENORM are of f32 values, and a
    denominator whose inverse is denormal is scaled down in both cases.
    """
    s0, s1, s2 = (np.ascontiguousarray(x) for x in np.broadcast_arrays(s0, s1, s2))
    denormal = lambda x: (x != 0) & (np.abs(x) < _SMALLEST_NORMAL)  # noqa: E731
    quotient = (s2.astype(np.float64) / s1.astype(np.float64)).astype(np.float32)
    tiny_inverse = np.abs(1.0 / s1.astype(np.float64)) < 2.0**-126
    is_denominator, is_numerator = (
        s0.view(np.uint32) == s1.view(np.uint32),
        s0.view(np.uint32) == s2.view(np.uint32),
    )
    up, down = _scaled(s0, 64), _scaled(s0, -64)
    conditions = [
        (s2 == 0) | (s1 == 0),
        _exponent(s2) - _exponent(s1) >= 96,
        denormal(s1),
        tiny_inverse & denormal(quotient),
        tiny_inverse,
        denormal(quotient),
        _exponent(s2) <= 23,
    ]
    results = [
        np.full_like(s0, np.nan),
        np.where(is_denominator, up, s0),
        up,
        np.where(is_denominator, down, s0),
        down,
        np.where(is_numerator, up, s0),
        up,
    ]
    chosen = np.select(conditions, [np.full(s0.shape, i) for i in range(7)], 7)
    return np.select(conditions, results, s0), np.isin(chosen, (1, 3, 5))


def div_fmas_f32(a: Array, b: Array, c: Array, scale: Array) -> Array:
    """fma, and where the mask is set times 2^64 or, for a quotient below 1, 2^-64.

    CDNA4 ISA, V_DIV_FMAS_F32, says 2^32, which cannot undo the 2^64 of V_DIV_SCALE_F32 in either
    direction; a division is right only with this rule.
    """
    result = fma_f32(a, b, c)
    unscaled = np.where(
        _exponent(np.ascontiguousarray(c)) > 127, _scaled(result, 64), _scaled(result, -64)
    )
    return np.where(scale, unscaled, result)


def div_fixup_f32(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """The quotient with the special cases of IEEE division put right (CDNA4 ISA,
    V_DIV_FIXUP_F32)."""
    q, d, n = (
        np.ascontiguousarray(x) for x in np.broadcast_arrays(quotient, denominator, numerator)
    )
    sign = (d.view(np.uint32) ^ n.view(np.uint32)) & _SIGN

    def signed(magnitude: Array | float) -> Array:
        bits = np.broadcast_to(np.asarray(magnitude, np.float32), q.shape).copy().view(np.uint32)
        return (bits & ~_SIGN | sign).view(np.float32)

    invalid = np.full(q.shape, 0xFFC00000, np.uint32).view(np.float32)
    inf_d, inf_n = np.isinf(d), np.isinf(n)
    conditions = [
        np.isnan(n),
        np.isnan(d),
        (d == 0) & (n == 0) | inf_d & inf_n,
        (d == 0) | inf_n,
        inf_d | (n == 0),
        _exponent(n) - _exponent(d) < -150,
    ]
    results = [quiet(n), quiet(d), invalid, signed(np.inf), signed(0.0), signed(2.0**-149)]
    return np.select(conditions, results, signed(q))


def ldexp_f32(x: Array, power: Array) -> Array:
    """x * 2^power, rounded once (power is int32)."""
    clipped = np.clip(power, -400, 400)
    return np.ldexp(x.astype(np.float64), clipped).astype(np.float32)


def frexp_exp_f32(x: Array) -> Array:
    """Exponent of x as a fraction in [0.5, 1) times a power of two; 0 for 0, infinities and NaN."""
    finite = np.isfinite(x)
    return np.where(finite, np.frexp(np.where(finite, x, 0))[1], 0).astype(np.int32)


def frexp_mant_f32(x: Array) -> Array:
    """Fraction of x, in [0.5, 1); 0, infinities and NaN as they are."""
    return np.where(np.isfinite(x), np.frexp(x)[0], x)


def class_f32(x: Array, wanted: Array) -> Array:
    """Whether x is in one of the classes whose bits are set: 0 sNaN, 1 qNaN, 2 -inf, 3 -normal, 4
    -denormal, 5 -0, 6 +0, 7 +denormal, 8 +normal, 9 +inf."""
    bits = x.view(np.uint32)
    negative = bits & _SIGN != 0
    exponent = _exponent(x)
    zero = x == 0
    number = np.select(
        [is_signaling(x), np.isnan(x), exponent == 255, exponent > 0, ~zero],
        [
            np.zeros(x.shape, np.uint32),
            np.ones(x.shape, np.uint32),
            np.where(negative, 2, 9),
            np.where(negative, 3, 8),
            np.where(negative, 4, 7),
        ],
        np.where(negative, 5, 6),
    )
    return (wanted >> number.astype(np.uint32)) & np.uint32(1) != 0
