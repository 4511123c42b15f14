"""Every vector ALU instruction from machine code, against formulas over Python's integers and
fractions."""

import math
import re
import struct
from fractions import Fraction

import numpy as np
import pytest
from gfx950_sim.isa import vector
from sim_snippets import ALL_LANES, SOME_LANES, Runner, Snippet, lanes_of

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
rng = np.random.default_rng(3)
EDGES = [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFF, 0x800000]
EDGES += [0x0000FFFF, 0xFFFF0000, 0x00010000, 0x12345678, 0x8000FFFF, 0x55555555]


def integers(shift: int) -> np.ndarray:
    """Edge values in a rotated order, then random ones."""
    mixed = np.array(EDGES + EDGES[::-1], np.uint64)
    noise = rng.integers(0, 1 << 32, 64 - len(mixed), np.uint64)
    return np.roll(np.concatenate([mixed, noise]), shift).astype(np.uint32)


FLOAT_EDGES = [0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000]
FLOAT_EDGES += [0x7F800001, 0xFFC12345, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF]
FLOAT_EDGES += [0x3F000000, 0x40200000, 0xC0600000, 0x4B800001, 0x3FC00000, 0x34000000]


def floats(shift: int) -> np.ndarray:
    """f32 bits: edge values (signed zeros, infinities, both kinds of NaN, denormals, extremes),
    then normal ones."""
    values = rng.standard_normal(64 - 2 * len(FLOAT_EDGES)) * np.exp2(rng.integers(-20, 20, 24))
    edges = np.array(FLOAT_EDGES + FLOAT_EDGES, np.uint32)
    return np.roll(np.concatenate([edges, values.astype(np.float32).view(np.uint32)]), shift)


OLD = 0xDEAD0000 + np.arange(64, dtype=np.uint32)
INT_INPUTS = {0: integers(0), 1: integers(7), 2: integers(19), 4: integers(3), 5: integers(11)}
INT_INPUTS |= {6: integers(23), 7: integers(41), 8: OLD, 9: OLD + np.uint32(64)}
FLOAT_INPUTS = {
    **INT_INPUTS,
    0: floats(0),
    1: floats(11),
    2: floats(29),
    4: floats(5),
    5: floats(9),
}
FLOAT_INPUTS |= {6: floats(21), 7: floats(33)}
MASK = 0x0123_4567_89AB_CDEF


def s32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


def s64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def s16(x: int) -> int:
    return (x & 0xFFFF) - (x >> 15 & 1) * 0x10000


def s24(x: int) -> int:
    return (x & 0xFFFFFF) - (x >> 23 & 1) * 0x1000000


def u24(x: int) -> int:
    return x & 0xFFFFFF


def clamp(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


def halves(x: int) -> tuple[int, int]:
    return x & 0xFFFF, x >> 16


def by_halves(f):
    """f of the low and of the high 16 bits."""
    return lambda *v: sum((f(*(halves(x)[i] for x in v)) & 0xFFFF) << 16 * i for i in (0, 1))


def signed_field(x: int, bits: int) -> int:
    return x if bits == 0 or not x >> (bits - 1) else x - (1 << bits)


def perm(a: int, b: int, sel: int) -> int:
    data, out = (a << 32 | b).to_bytes(8, "little"), []
    for code in sel.to_bytes(4, "little"):
        if code >= 13:
            out.append(0xFF)
        elif code == 12:
            out.append(0)
        elif code >= 8:
            out.append(0xFF if data[1 + 2 * (code - 8)] & 0x80 else 0)
        else:
            out.append(data[code])
    return int.from_bytes(bytes(out), "little")


def truth_table(table: int):
    def f(a: int, b: int, c: int) -> int:
        bits = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32))
        return sum((table >> index & 1) << i for i, index in enumerate(bits))

    return f


def highest_differing(x: int) -> int:
    """Position from the top of the first bit unlike the sign; -1 if there is none."""
    return next((i for i in range(1, 32) if x >> (31 - i) & 1 != x >> 31), -1)


# Each entry: the mnemonic, its operands (d is the destination v8 or v[8:9], a..c are v0..v2, p and
# q v[4:5] and v[6:7]), and a formula over the sources' unsigned bits.
INTEGER_CASES = {
    "v_mov_b32 d, a": lambda a: a,
    "v_mov_b32 d, 0xbeef1234": lambda: 0xBEEF1234,
    "v_mov_b32 d, -3": lambda: M32 - 2,
    "v_mov_b32 d, 0.5": lambda: 0x3F000000,
    "v_mov_b64 D, p": lambda p: p,
    "v_mov_b64 D, -2": lambda: M64 - 1,
    "v_not_b32 d, a": lambda a: ~a,
    "v_and_b32 d, a, b": lambda a, b: a & b,
    "v_or_b32 d, a, b": lambda a, b: a | b,
    "v_xor_b32 d, a, b": lambda a, b: a ^ b,
    "v_xor_b32 d, 0x12345, b": lambda b: 0x12345 ^ b,
    "v_xnor_b32 d, a, b": lambda a, b: ~(a ^ b),
    "v_or3_b32 d, a, b, c": lambda a, b, c: a | b | c,
    "v_and_or_b32 d, a, b, c": lambda a, b, c: (a & b) | c,
    "v_xad_u32 d, a, b, c": lambda a, b, c: (a ^ b) + c,
    "v_add_u32 d, a, b": lambda a, b: a + b,
    "v_add_u32 d, a, b clamp": lambda a, b: min(a + b, M32),
    "v_sub_u32 d, a, b": lambda a, b: a - b,
    "v_sub_u32 d, a, b clamp": lambda a, b: max(a - b, 0),
    "v_subrev_u32 d, a, b": lambda a, b: b - a,
    "v_subrev_u32 d, a, b clamp": lambda a, b: max(b - a, 0),
    "v_add_i32 d, a, b": lambda a, b: a + b,
    "v_add_i32 d, a, b clamp": lambda a, b: clamp(s32(a) + s32(b), -(1 << 31), (1 << 31) - 1),
    "v_sub_i32 d, a, b": lambda a, b: a - b,
    "v_sub_i32 d, a, b clamp": lambda a, b: clamp(s32(a) - s32(b), -(1 << 31), (1 << 31) - 1),
    "v_add3_u32 d, a, b, c": lambda a, b, c: a + b + c,
    "v_mul_lo_u32 d, a, b": lambda a, b: a * b,
    "v_mul_hi_u32 d, a, b": lambda a, b: a * b >> 32,
    "v_mul_hi_i32 d, a, b": lambda a, b: s32(a) * s32(b) >> 32,
    "v_mul_u32_u24 d, a, b": lambda a, b: u24(a) * u24(b),
    "v_mul_i32_i24 d, a, b": lambda a, b: s24(a) * s24(b),
    "v_mul_hi_u32_u24 d, a, b": lambda a, b: u24(a) * u24(b) >> 32,
    "v_mad_u32_u24 d, a, b, c": lambda a, b, c: u24(a) * u24(b) + c,
    "v_mad_i32_i24 d, a, b, c": lambda a, b, c: s24(a) * s24(b) + c,
    "v_min_u32 d, a, b": min,
    "v_max_u32 d, a, b": max,
    "v_min_i32 d, a, b": lambda a, b: min(s32(a), s32(b)),
    "v_max_i32 d, a, b": lambda a, b: max(s32(a), s32(b)),
    "v_min3_u32 d, a, b, c": min,
    "v_max3_u32 d, a, b, c": max,
    "v_min3_i32 d, a, b, c": lambda *v: min(map(s32, v)),
    "v_max3_i32 d, a, b, c": lambda *v: max(map(s32, v)),
    "v_med3_u32 d, a, b, c": lambda *v: sorted(v)[1],
    "v_med3_i32 d, a, b, c": lambda *v: sorted(map(s32, v))[1],
    "v_lshlrev_b32 d, a, b": lambda a, b: b << (a & 31),
    "v_lshlrev_b32 d, 4, b": lambda b: b << 4,
    "v_lshrrev_b32 d, a, b": lambda a, b: b >> (a & 31),
    "v_ashrrev_i32 d, a, b": lambda a, b: s32(b) >> (a & 31),
    "v_lshlrev_b64 D, a, p": lambda a, p: p << (a & 63),
    "v_lshrrev_b64 D, a, p": lambda a, p: p >> (a & 63),
    "v_ashrrev_i64 D, a, p": lambda a, p: s64(p) >> (a & 63),
    "v_lshl_add_u32 d, a, b, c": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32 d, a, b, c": lambda a, b, c: ((a + b) & M32) << (c & 31),
    "v_lshl_or_b32 d, a, b, c": lambda a, b, c: (a << (b & 31)) | c,
    "v_lshl_add_u64 D, p, b, q": lambda p, b, q: (p << (b & 7)) + q,
    "v_lshl_add_u64 D, p, 3, s[24:25]": lambda p: (p << 3) + 0xAAAA_BBBB_CCCC_DDDD,
    "v_bfe_u32 d, a, b, c": lambda a, b, c: (a >> (b & 31)) & ((1 << (c & 31)) - 1),
    "v_bfe_i32 d, a, b, c": lambda a, b, c: signed_field(
        (s32(a) >> (b & 31)) & ((1 << (c & 31)) - 1), c & 31
    ),
    "v_bfi_b32 d, a, b, c": lambda a, b, c: (a & b) | (~a & c),
    "v_bfm_b32 d, a, b": lambda a, b: ((1 << (a & 31)) - 1) << (b & 31),
    "v_alignbit_b32 d, a, b, c": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "v_alignbyte_b32 d, a, b, c": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
    "v_perm_b32 d, a, b, c": perm,
    "v_perm_b32 d, a, b, s26": lambda a, b: perm(a, b, 0x0C0D0908),
    "v_perm_b32 d, a, b, s27": lambda a, b: perm(a, b, 0x0A0B0007),
    **{
        f"v_bitop3_b32 d, a, b, c bitop3:{t:#x}": truth_table(t)
        for t in (
            0,
            1,
            0x36,
            0x78,
            0x96,
            0xCA,
            0x6C,
            0x6A,
            0x28,
            0x48,
            0x60,
            0x1E,
            0x56,
            0x80,
            0xFE,
            0xFF,
        )
    },
    "v_bcnt_u32_b32 d, a, b": lambda a, b: a.bit_count() + b,
    "v_bfrev_b32 d, a": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_ffbh_u32 d, a": lambda a: 32 - a.bit_length() if a else -1,
    "v_ffbl_b32 d, a": lambda a: (a & -a).bit_length() - 1 if a else -1,
    "v_ffbh_i32 d, a": highest_differing,
    "v_ashr_pk_i8_i32 d, a, b, c": lambda a, b, c: (
        (clamp(s32(a) >> (c & 31), -128, 127) & 0xFF)
        | (clamp(s32(b) >> (c & 31), -128, 127) & 0xFF) << 8
    ),
    "v_ashr_pk_u8_i32 d, a, b, c": lambda a, b, c: (
        clamp(s32(a) >> (c & 31), 0, 255) | clamp(s32(b) >> (c & 31), 0, 255) << 8
    ),
    "v_prng_b32 d, a": lambda a: (a << 1) ^ (197 if a >> 31 else 0),
    "v_pk_mov_b32 D, p, q op_sel:[0,1]": lambda p, q: (p & M32) | (q >> 32) << 32,
    "v_pk_mov_b32 D, p, q op_sel:[1,0]": lambda p, q: p >> 32 | (q & M32) << 32,
    "v_add_u16 d, a, b": lambda a, b: (a + b) & 0xFFFF,
    "v_add_i16 d, a, b": lambda a, b: (a + b) & 0xFFFF,
    "v_add_i16 d, a, b op_sel:[1,0,0]": lambda a, b: ((a >> 16) + b) & 0xFFFF,
    "v_add_i16 d, a, b clamp": lambda a, b: clamp(s16(a) + s16(b), -0x8000, 0x7FFF) & 0xFFFF,
    "v_sub_i16 d, a, b": lambda a, b: (a - b) & 0xFFFF,
    "v_sub_u16 d, a, b": lambda a, b: (a - b) & 0xFFFF,
    "v_mul_lo_u16 d, a, b": lambda a, b: a * b & 0xFFFF,
    "v_max_u16 d, a, b": lambda a, b: max(a & 0xFFFF, b & 0xFFFF),
    "v_min_u16 d, a, b": lambda a, b: min(a & 0xFFFF, b & 0xFFFF),
    "v_max_i16 d, a, b": lambda a, b: max(s16(a), s16(b)) & 0xFFFF,
    "v_min_i16 d, a, b": lambda a, b: min(s16(a), s16(b)) & 0xFFFF,
    "v_lshlrev_b16 d, a, b": lambda a, b: b << (a & 15) & 0xFFFF,
    "v_lshrrev_b16 d, a, b": lambda a, b: (b & 0xFFFF) >> (a & 15),
    "v_ashrrev_i16 d, a, b": lambda a, b: s16(b) >> (a & 15) & 0xFFFF,
    "v_pk_add_u16 d, a, b": by_halves(lambda a, b: a + b),
    "v_pk_add_u16 d, a, b op_sel:[1,0] op_sel_hi:[0,1]": lambda a, b: (
        ((a >> 16) + b & 0xFFFF) | ((a + (b >> 16)) & 0xFFFF) << 16
    ),
    "v_pk_add_i16 d, a, b": by_halves(lambda a, b: a + b),
    "v_pk_sub_i16 d, a, b": by_halves(lambda a, b: a - b),
    "v_pk_sub_u16 d, a, b": by_halves(lambda a, b: a - b),
    "v_pk_mul_lo_u16 d, a, b": by_halves(lambda a, b: a * b),
    "v_pk_max_i16 d, a, b": by_halves(lambda a, b: max(s16(a), s16(b))),
    "v_pk_min_i16 d, a, b": by_halves(lambda a, b: min(s16(a), s16(b))),
    "v_pk_max_u16 d, a, b": by_halves(max),
    "v_pk_min_u16 d, a, b": by_halves(min),
    "v_pk_lshlrev_b16 d, a, b": by_halves(lambda a, b: b << (a & 15)),
    "v_pk_lshrrev_b16 d, a, b": by_halves(lambda a, b: b >> (a & 15)),
}
BY_LANE = {
    "v_mbcnt_lo_u32_b32 d, a, b": lambda lane, a, b: (a & ((1 << int(lane)) - 1)).bit_count() + b,
    "v_mbcnt_hi_u32_b32 d, a, b": lambda lane, a, b: (
        (a & ((1 << max(int(lane) - 32, 0)) - 1)).bit_count() + b
    ),
    "v_cndmask_b32 d, a, b, vcc": lambda lane, a, b: b if MASK >> lane & 1 else a,
    "v_cndmask_b32 d, a, b, s[22:23]": lambda lane, a, b: b if ~MASK >> lane & 1 else a,
}


# With a carry: the formula gives (result, carry); the carry in is MASK.
def carry_in(lane: int) -> int:
    return MASK >> lane & 1


CARRY_CASES = {
    "v_add_co_u32 d, S, a, b": lambda lane, a, b: (a + b, a + b > M32),
    "v_sub_co_u32 d, S, a, b": lambda lane, a, b: (a - b, a < b),
    "v_subrev_co_u32 d, S, a, b": lambda lane, a, b: (b - a, b < a),
    "v_addc_co_u32 d, S, a, b, vcc": lambda lane, a, b: (
        a + b + carry_in(lane),
        a + b + carry_in(lane) > M32,
    ),
    "v_subb_co_u32 d, S, a, b, vcc": lambda lane, a, b: (
        a - b - carry_in(lane),
        a < b + carry_in(lane),
    ),
    "v_subbrev_co_u32 d, S, a, b, vcc": lambda lane, a, b: (
        b - a - carry_in(lane),
        b < a + carry_in(lane),
    ),
    "v_mad_u64_u32 D, S, a, b, p": lambda lane, a, b, p: (a * b + p, a * b + p > M64),
    "v_mad_i64_i32 D, S, a, b, p": lambda lane, a, b, p: (
        s32(a) * s32(b) + s64(p),
        s32(a) * s32(b) + s64(p) < 0,
    ),
}

COMPARE_INT = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
    "f": lambda a, b: False,
    "t": lambda a, b: True,
}
COMPARE_FLOAT = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: a < b or a > b,
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: not (math.isnan(a) or math.isnan(b)),
    "u": lambda a, b: math.isnan(a) or math.isnan(b),
    "nge": lambda a, b: not a >= b,
    "nlg": lambda a, b: not (a < b or a > b),
    "ngt": lambda a, b: not a > b,
    "nle": lambda a, b: not a <= b,
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: not a < b,
    "f": lambda a, b: False,
    "tru": lambda a, b: True,
}


def as_float(bits: int, size: int = 4) -> float:
    form = {2: ("<H", "<e"), 4: ("<I", "<f"), 8: ("<Q", "<d")}[size]
    value: float = struct.unpack(form[1], struct.pack(form[0], bits & ((1 << 8 * size) - 1)))[0]
    return value


COMPARE_KINDS = {
    "i16": ("a", "b", s16),
    "u16": ("a", "b", lambda x: x & 0xFFFF),
    "i32": ("a", "b", s32),
    "u32": ("a", "b", lambda x: x),
    "i64": ("p", "q", s64),
    "u64": ("p", "q", lambda x: x),
    "f16": ("a", "b", lambda x: as_float(x, 2)),
    "f32": ("a", "b", as_float),
    "f64": ("p", "q", lambda x: as_float(x, 8)),
}


def class_bit(bits: int) -> int:
    sign, exponent, fraction = bits >> 31, bits >> 23 & 0xFF, bits & 0x7FFFFF
    if exponent == 255 and fraction:
        return 1 if fraction >> 22 else 0
    if exponent == 255:
        return 2 if sign else 9
    if exponent:
        return 3 if sign else 8
    if fraction:
        return 4 if sign else 7
    return 5 if sign else 6


COMPARE_CASES = {
    f"v_cmp_{name}_{kind} S, {x}, {y}": (lambda f, c: lambda a, b: f(c(a), c(b)))(function, convert)
    for kind, (x, y, convert) in COMPARE_KINDS.items()
    for name, function in (COMPARE_FLOAT if kind[0] == "f" else COMPARE_INT).items()
}
COMPARE_CASES["v_cmp_class_f32 S, a, s28"] = lambda a: bool(0b0110100101 >> class_bit(a) & 1)
COMPARE_CASES["v_cmp_class_f32 S, a, s29"] = lambda a: bool(0b1001011010 >> class_bit(a) & 1)


# Floats: exact values as fractions, rounded once ------------------------------------------------


def round_f32(x: Fraction, zero_sign: int = 0) -> int:
    """Bits of the nearest f32, ties to even."""
    if x == 0:
        return zero_sign << 31
    sign, x = (0x80000000, -x) if x < 0 else (0, x)
    exponent = max(x.numerator.bit_length() - x.denominator.bit_length(), -126)
    while x >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while exponent > -126 and x < Fraction(2) ** exponent:
        exponent -= 1
    units = x / Fraction(2) ** (exponent - 23)
    whole = round(units)  # Python rounds halves to even
    bits = whole + ((exponent + 126) << 23)
    return sign | min(bits, 0x7F800000)


def is_nan(bits: int) -> bool:
    return bits & 0x7FFFFFFF > 0x7F800000


def is_inf(bits: int) -> bool:
    return bits & 0x7FFFFFFF == 0x7F800000


NAN = 0x7FC00000


def fma(a: int, b: int, c: int) -> int:
    if any(map(is_nan, (a, b, c))):
        return NAN
    sign = (a ^ b) >> 31
    if is_inf(a) or is_inf(b):
        if as_float(a) == 0 or as_float(b) == 0 or (is_inf(c) and c >> 31 != sign):
            return NAN
        return sign << 31 | 0x7F800000
    if is_inf(c):
        return c
    product = Fraction(as_float(a)) * Fraction(as_float(b))
    both_negative = sign if product == 0 and sign == c >> 31 else 0
    if as_float(c) == 0 and product != 0:
        return round_f32(product)
    return round_f32(product + Fraction(as_float(c)), both_negative)


def add(a: int, b: int) -> int:
    return fma(a, 0x3F800000, b)


def mul(a: int, b: int) -> int:
    if is_nan(a) or is_nan(b):
        return NAN
    sign = ((a ^ b) >> 31) << 31
    if is_inf(a) or is_inf(b):
        return NAN if as_float(a) == 0 or as_float(b) == 0 else sign | 0x7F800000
    return round_f32(Fraction(as_float(a)) * Fraction(as_float(b)), sign >> 31)


def neg(a: int) -> int:
    return a ^ 0x80000000


def quiet(a: int) -> int:
    return a | 0x400000


def order(a: int) -> int:
    """f32 bits as integers in numeric order, -0 below +0."""
    return -(a & 0x7FFFFFFF) - 1 if a >> 31 else a


def extreme(pick):
    """v_max_f32 and v_min_f32 in IEEE mode."""

    def f(a: int, b: int) -> int:
        for x in (a, b):
            if is_nan(x) and not x >> 22 & 1:
                return quiet(x)
        if is_nan(a) or is_nan(b):
            return b if is_nan(a) else a
        return pick(a, b, key=order)

    return f


maximum, minimum = extreme(max), extreme(min)


def med3(a: int, b: int, c: int) -> int:
    if any(map(is_nan, (a, b, c))):
        return minimum(minimum(a, b), c)
    return sorted((a, b, c), key=order)[1]


def to_integral(rule):
    def f(a: int) -> int:
        x = as_float(a)
        if not math.isfinite(x) or abs(x) >= 2**24:
            return a
        return a & 0x80000000 | round_f32(abs(Fraction(rule(Fraction(x)))))

    return f


def ldexp(a: int, n: int) -> int:
    if not math.isfinite(as_float(a)):
        return a
    return round_f32(Fraction(as_float(a)) * Fraction(2) ** clamp(s32(n), -400, 400), a >> 31)


def fract(a: int) -> int:
    x = as_float(a)
    if not math.isfinite(x):
        return NAN
    return round_f32(Fraction(x) - math.floor(Fraction(x)))


def frexp_exp(a: int) -> int:
    x = as_float(a)
    return math.frexp(x)[1] if math.isfinite(x) else 0


def frexp_mant(a: int) -> int:
    x = as_float(a)
    if not math.isfinite(x) or x == 0:
        return a
    return round_f32(Fraction(math.frexp(x)[0]))


def legacy(a: int, b: int) -> int:
    return 0 if 0 in (as_float(a), as_float(b)) else mul(a, b)


def both(f):
    """f on the low and the high dwords of 64-bit values."""
    return lambda *v: f(*(x & M32 for x in v)) | f(*(x >> 32 for x in v)) << 32


FLOAT_CASES = {
    "v_add_f32 d, a, b": add,
    "v_add_f32 d, -a, |b|": lambda a, b: add(neg(a), b & 0x7FFFFFFF),
    "v_sub_f32 d, a, b": lambda a, b: add(a, neg(b)),
    "v_subrev_f32 d, a, b": lambda a, b: add(b, neg(a)),
    "v_mul_f32 d, a, b": mul,
    "v_mul_f32 d, a, -|b|": lambda a, b: mul(a, b | 0x80000000),
    "v_mul_f32 d, 0x3fc00000, b": lambda b: mul(0x3FC00000, b),
    "v_mul_legacy_f32 d, a, b": legacy,
    "v_fma_f32 d, a, b, c": fma,
    "v_fma_f32 d, -a, b, |c|": lambda a, b, c: fma(neg(a), b, c & 0x7FFFFFFF),
    "v_fmaak_f32 d, a, b, 0x40490fdb": lambda a, b: fma(a, b, 0x40490FDB),
    "v_fmamk_f32 d, a, 0x40490fdb, b": lambda a, b: fma(a, 0x40490FDB, b),
    "v_max_f32 d, a, b": maximum,
    "v_min_f32 d, a, b": minimum,
    "v_max3_f32 d, a, b, c": lambda a, b, c: maximum(maximum(a, b), c),
    "v_max3_f32 d, |a|, b, |c|": lambda a, b, c: maximum(maximum(a & M32 >> 1, b), c & M32 >> 1),
    "v_min3_f32 d, a, b, c": lambda a, b, c: minimum(minimum(a, b), c),
    "v_med3_f32 d, a, b, c": med3,
    "v_maximum3_f32 d, a, b, c": lambda *v: NAN if any(map(is_nan, v)) else max(v, key=order),
    "v_minimum3_f32 d, a, b, c": lambda *v: NAN if any(map(is_nan, v)) else min(v, key=order),
    "v_ldexp_f32 d, a, 5": lambda a: ldexp(a, 5),
    "v_ldexp_f32 d, a, s26": lambda a: ldexp(a, 0x0C0D0908),
    "v_ldexp_f32 d, a, s30": lambda a: ldexp(a, -150 & M32),
    "v_frexp_exp_i32_f32 d, a": frexp_exp,
    "v_frexp_mant_f32 d, a": frexp_mant,
    "v_fract_f32 d, a": fract,
    "v_trunc_f32 d, a": to_integral(math.trunc),
    "v_ceil_f32 d, a": to_integral(math.ceil),
    "v_floor_f32 d, a": to_integral(math.floor),
    "v_rndne_f32 d, a": to_integral(round),
    "v_pk_add_f32 D, p, q": both(add),
    "v_pk_add_f32 D, p, 0 op_sel_hi:[1,0] neg_lo:[1,0] neg_hi:[1,0]": lambda p: both(add)(
        p ^ 0x8000000080000000, 0
    ),
    "v_pk_mul_f32 D, p, q": both(mul),
    "v_pk_mul_f32 D, p, q op_sel_hi:[1,0]": lambda p, q: both(mul)(p, (q & M32) * ((1 << 32) + 1)),
    "v_pk_mul_f32 D, p, q op_sel:[0,1]": lambda p, q: both(mul)(p, (q >> 32) * ((1 << 32) + 1)),
    "v_pk_mul_f32 D, p, s[24:25] op_sel:[1,0] op_sel_hi:[0,1]": lambda p: both(mul)(
        p >> 32 | (p & M32) << 32, 0xAAAABBBBCCCCDDDD
    ),
    "v_pk_fma_f32 D, p, q, s[24:25]": lambda p, q: both(fma)(p, q, 0xAAAABBBBCCCCDDDD),
    "v_pk_fma_f32 D, p, q, s[24:25] neg_lo:[0,1,0] neg_hi:[0,0,1]": lambda p, q: (
        fma(p & M32, neg(q & M32), 0xCCCCDDDD) | fma(p >> 32, q >> 32, neg(0xAAAABBBB)) << 32
    ),
}
ACCUMULATING = {"v_fmac_f32 d, a, b": fma, "v_fmac_f32 d, -a, b": lambda a, b, o: fma(neg(a), b, o)}

# Compared with a tolerance in units of the last place; denormals are flushed.
TURN = 2 * math.pi
NEAR_CASES = {
    "v_exp_f32 d, a": lambda x: math.inf if x > 200 else 2.0**x,
    "v_log_f32 d, a": lambda x: -math.inf if x == 0 else math.nan if x < 0 else math.log2(x),
    "v_rcp_f32 d, a": lambda x: math.copysign(math.inf, x) if x == 0 else 1 / x,
    "v_rcp_iflag_f32 d, a": lambda x: math.copysign(math.inf, x) if x == 0 else 1 / x,
    "v_sqrt_f32 d, a": lambda x: x if x == 0 else math.nan if x < 0 else math.sqrt(x),
    "v_rsq_f32 d, a": lambda x: (
        math.copysign(math.inf, x) if x == 0 else (math.nan if x < 0 else 1 / math.sqrt(x))
    ),
}
SMALL = {
    "v_sin_f32 d, a": lambda x: math.sin(TURN * x),
    "v_cos_f32 d, a": lambda x: math.cos(TURN * x),
}

NAMES = {"a": "v0", "b": "v1", "c": "v2", "p": "v[4:5]", "q": "v[6:7]", "d": "v8", "D": "v[8:9]"}
NAMES["S"] = "s[20:21]"
SETUP = f"""
s_mov_b32 vcc_lo, {MASK & M32:#x}
s_mov_b32 vcc_hi, {MASK >> 32:#x}
s_not_b64 s[22:23], vcc
s_mov_b32 s24, 0xccccdddd
s_mov_b32 s25, 0xaaaabbbb
s_mov_b32 s26, 0x0c0d0908
s_mov_b32 s27, 0x0a0b0007
s_mov_b32 s30, 0xffffff6a
s_movk_i32 s28, {0b0110100101}
s_movk_i32 s29, {0b1001011010}
"""


def assembly(case: str) -> str:
    mnemonic, _, operands = case.partition(" ")
    operands, *modifiers = re.split(r" (?=clamp|op_sel|neg_|bitop3)", operands, maxsplit=1)
    named = re.sub(r"(?<![\w\[])([abcpqdDS])(?!\w)", lambda m: NAMES[m[1]], operands)
    return " ".join([mnemonic, named, *modifiers])


def sources(case: str) -> list[str]:
    operands = re.split(r" clamp| op_sel| neg_| bitop3", case.partition(" ")[2])[0]
    return re.findall(r"(?<![\w\[])([abcpq])(?!\w)", operands)


def value(inputs: dict, name: str, lane: int) -> int:
    row = {"a": 0, "b": 1, "c": 2, "p": 4, "q": 6}[name]
    low = int(inputs[row][lane])
    return low | int(inputs[row + 1][lane]) << 32 if name in "pq" else low


def _snippets() -> dict[str, Snippet]:
    snippets = {}
    for cases in (
        INTEGER_CASES,
        BY_LANE,
        CARRY_CASES,
        FLOAT_CASES,
        ACCUMULATING,
        NEAR_CASES,
        SMALL,
    ):
        inputs = INT_INPUTS if cases in (INTEGER_CASES, BY_LANE, CARRY_CASES) else FLOAT_INPUTS
        if cases is SMALL:
            inputs = {**FLOAT_INPUTS, 0: np.linspace(-3, 3, 64).astype(np.float32).view(np.uint32)}
        for case in cases:
            end = "\ns_mov_b64 exec, -1\nv_mov_b32 v10, s20\nv_mov_b32 v11, s21"
            code = SETUP + assembly(case) + (end if cases is CARRY_CASES else "")
            outputs = (8, 9, 10, 11) if cases is CARRY_CASES else (8, 9)
            for mask in (ALL_LANES, SOME_LANES):
                snippets[f"{case} {mask:#x}"] = Snippet(code, inputs, outputs, mask)
    for case in COMPARE_CASES:
        inputs = FLOAT_INPUTS if "_f" in case else INT_INPUTS
        text = assembly(case)
        wide = f"{text}\ns_mov_b64 exec, -1\nv_mov_b32 v8, s20\nv_mov_b32 v9, s21"
        short = text.replace("s[20:21]", "vcc").replace(", s2", ", v2")
        # The 32-bit encoding (second source a vector register), and the form that writes EXEC.
        exec_too = (
            text.replace("v_cmp_", "v_cmpx_")
            + "\n"
            + ("s_mov_b64 s[22:23], exec\ns_mov_b64 exec, -1\nv_mov_b32 v8, s22\nv_mov_b32 v9, s23")
        )
        vcc = f"{short}\ns_mov_b64 exec, -1\nv_mov_b32 v8, vcc_lo\nv_mov_b32 v9, vcc_hi"
        for form, code in (("e64", wide), ("cmpx", exec_too), ("vcc", vcc)):
            if form == "vcc" and "class" in case:
                continue
            snippets[f"{case} {form}"] = Snippet(SETUP + code, inputs, (8, 9), SOME_LANES)
    return snippets


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(_snippets())


def expected_pairs(
    case: str, formula, inputs: dict, mask: int, by_lane: bool = False
) -> np.ndarray:
    """v8 and v9 of each lane, uint32 [2, 64]."""
    rows = np.stack([inputs[8], inputs[9]])
    for lane in np.flatnonzero(lanes_of(mask)):
        values = [value(inputs, name, lane) for name in sources(case)]
        result = formula(lane, *values) if by_lane else formula(*values)
        rows[0, lane] = result & M32
        if re.search(r"(?<!\w)D\b", case):
            rows[1, lane] = result >> 32 & M32
    return rows


def same_bits_or_nan(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    nan = (actual & 0x7FFFFFFF > 0x7F800000) & (expected & 0x7FFFFFFF > 0x7F800000)
    return (actual == expected) | nan


@pytest.mark.parametrize("mask", [ALL_LANES, SOME_LANES], ids=["all", "some"])
@pytest.mark.parametrize("case", [*INTEGER_CASES, *BY_LANE])
def test_integers_and_bits(runner, case, mask):
    formula = INTEGER_CASES.get(case) or BY_LANE[case]
    expected = expected_pairs(case, formula, INT_INPUTS, mask, case in BY_LANE)
    np.testing.assert_array_equal(runner.run(f"{case} {mask:#x}"), expected)


@pytest.mark.parametrize("mask", [ALL_LANES, SOME_LANES], ids=["all", "some"])
@pytest.mark.parametrize("case", CARRY_CASES)
def test_carries(runner, case, mask):
    out = runner.run(f"{case} {mask:#x}")
    formula = CARRY_CASES[case]
    result = expected_pairs(case, lambda *v: formula(*v)[0], INT_INPUTS, mask, True)
    np.testing.assert_array_equal(out[:2], result)
    carries = 0
    for lane in np.flatnonzero(lanes_of(mask)):
        values = [value(INT_INPUTS, name, lane) for name in sources(case)]
        carries |= bool(formula(int(lane), *values)[1]) << int(lane)
    assert int(out[2, 0]) | int(out[3, 0]) << 32 == carries


@pytest.mark.parametrize(
    ("case", "form"),
    [
        (case, form)
        for case in COMPARE_CASES
        for form in ("e64", "cmpx", "vcc")
        # The class is a scalar register here, which the 32-bit encoding cannot name.
        if not (form == "vcc" and "class" in case)
    ],
)
def test_compares(runner, case, form):
    inputs = FLOAT_INPUTS if "_f" in case else INT_INPUTS
    out = runner.run(f"{case} {form}")
    expected = 0
    for lane in np.flatnonzero(lanes_of(SOME_LANES)):
        values = [value(inputs, name, lane) for name in sources(case)]
        expected |= bool(COMPARE_CASES[case](*values)) << int(lane)
    assert int(out[0, 0]) | int(out[1, 0]) << 32 == expected


@pytest.mark.parametrize("mask", [ALL_LANES, SOME_LANES], ids=["all", "some"])
@pytest.mark.parametrize("case", [*FLOAT_CASES, *ACCUMULATING])
def test_floats(runner, case, mask):
    formula = FLOAT_CASES.get(case)
    if formula is None:
        old = iter(int(FLOAT_INPUTS[8][lane]) for lane in np.flatnonzero(lanes_of(mask)))
        formula = lambda a, b: ACCUMULATING[case](a, b, next(old))  # noqa: E731
    expected = expected_pairs(case, formula, FLOAT_INPUTS, mask)
    actual = runner.run(f"{case} {mask:#x}")
    bad = ~same_bits_or_nan(actual, expected)
    lane = int(bad.any(axis=0).argmax())
    shown = [hex(value(FLOAT_INPUTS, name, lane)) for name in sources(case)]
    assert not bad.any(), f"lane {lane} {shown}: {actual[:, lane]} not {expected[:, lane]}"


def flush(x: float) -> float:
    return math.copysign(0, x) if abs(x) < 2.0**-126 else x


@pytest.mark.parametrize("mask", [ALL_LANES, SOME_LANES], ids=["all", "some"])
@pytest.mark.parametrize("case", [*NEAR_CASES, *SMALL])
def test_transcendental_functions_to_one_ulp(runner, case, mask):
    formula = NEAR_CASES.get(case) or SMALL[case]
    snippet = runner.snippets[f"{case} {mask:#x}"]
    actual = runner.run(f"{case} {mask:#x}")[0]
    for lane in range(64):
        if not mask >> lane & 1:
            assert actual[lane] == OLD[lane]
            continue
        x = flush(as_float(int(snippet.inputs[0][lane])))
        wanted = flush(formula(x)) if not math.isnan(x) else math.nan
        got = as_float(int(actual[lane]))
        if math.isnan(wanted) or math.isinf(wanted) or abs(wanted) >= 2.0**128:
            limit = math.copysign(math.inf, wanted)
            assert math.isnan(got) if math.isnan(wanted) else got == limit, (x, got, wanted)
        else:
            ulp = 2.0 ** (max(math.frexp(wanted)[1], -125) - 24)
            assert abs(got - wanted) <= max(ulp, 1e-6 if case in SMALL else 0), (x, got)


# Instructions with their own tests below, or that move registers only
# -------------------------------


def f16_bits(x: float) -> int:
    try:
        return int.from_bytes(struct.pack("<e", x), "little")
    except OverflowError:
        return 0x7C00 | (0x8000 if x < 0 else 0)


PAIRS = rng.standard_normal((3, 64, 2)).astype(np.float16)
PAIRS[0, :4] = [[np.inf, 1], [65504, 65504], [6e-8, -0.0], [2048, 3e-5]]
HALF_INPUTS = {i: np.ascontiguousarray(PAIRS[i]).view(np.uint32)[:, 0] for i in range(3)} | {8: OLD}
BF_INPUTS = {**HALF_INPUTS, 2: rng.standard_normal(64).astype(np.float32).view(np.uint32)}
HALF_CASES = {
    "v_add_f16": ("v_add_f16 v8, v0, v1", lambda a, b, c: a + b, False),
    "v_sub_f16": ("v_sub_f16 v8, v0, v1", lambda a, b, c: a - b, False),
    "v_mul_f16": ("v_mul_f16 v8, v0, v1", lambda a, b, c: a * b, False),
    "v_fma_f16": ("v_fma_f16 v8, v0, v1, v2", lambda a, b, c: a * b + c, False),
    "v_pk_add_f16": ("v_pk_add_f16 v8, v0, v1", lambda a, b, c: a + b, True),
    "v_pk_mul_f16": ("v_pk_mul_f16 v8, v0, v1", lambda a, b, c: a * b, True),
    "v_pk_fma_f16": ("v_pk_fma_f16 v8, v0, v1, v2", lambda a, b, c: a * b + c, True),
}
DOT_CASES = {
    "v_dot2_f32_f16": "v_dot2_f32_f16 v8, v0, v1, v2",
    "v_dot2_f32_bf16": "v_dot2_f32_bf16 v8, v0, v1, v2",
    "v_dot2c_f32_f16": "v_mov_b32 v8, v2\nv_dot2c_f32_f16 v8, v0, v1",
    "v_dot2c_f32_bf16": "v_mov_b32 v8, v2\nv_dot2c_f32_bf16 v8, v0, v1",
}
MIX_CASES = [
    "v_fma_mix_f32 v8, v0, v1, v2",
    "v_fma_mix_f32 v8, v0, v1, v2 op_sel_hi:[1,0,0]",
    "v_fma_mix_f32 v8, v0, v1, v2 op_sel:[1,0,1] op_sel_hi:[1,0,1]",
    "v_fma_mix_f32 v8, -v0, |v1|, v2 op_sel_hi:[0,0,0]",
    "v_fma_mixlo_f16 v8, v0, v1, v2 op_sel_hi:[1,1,1]",
    "v_fma_mixhi_f16 v8, v0, v1, v2 op_sel:[0,1,0] op_sel_hi:[1,1,0]",
]
DIVISIONS = """
v_div_scale_f32 v10, s[20:21], v1, v1, v0
v_div_scale_f32 v11, vcc, v0, v1, v0
v_rcp_f32 v12, v10
v_fma_f32 v13, -v10, v12, 1.0
v_fma_f32 v12, v13, v12, v12
v_mul_f32 v13, v11, v12
v_fma_f32 v14, -v10, v13, v11
v_fma_f32 v13, v14, v12, v13
v_fma_f32 v14, -v10, v13, v11
v_div_fmas_f32 v14, v14, v12, v13
v_div_fixup_f32 v8, v14, v1, v0
"""
F64 = rng.standard_normal((2, 64)) * np.exp2(rng.integers(-200, 200, (2, 64)))
F64[0, :3], F64[1, :3] = [np.inf, np.nan, 0.0], [-np.inf, 1.0, -0.0]
F64_INPUTS = {
    0: F64[0].view(np.uint32)[::2], 1: F64[0].view(np.uint32)[1::2],
    2: F64[1].view(np.uint32)[::2], 3: F64[1].view(np.uint32)[1::2],
}  # fmt: skip
OTHERS = {
    **{k: Snippet(v[0], HALF_INPUTS, (8,)) for k, v in HALF_CASES.items()},
    **{k: Snippet(v, BF_INPUTS, (8,)) for k, v in DOT_CASES.items()},
    **{k: Snippet(k, BF_INPUTS, (8,)) for k in MIX_CASES},
    "division": Snippet(DIVISIONS, FLOAT_INPUTS, (8,)),
    "v_add_f64": Snippet("v_add_f64 v[8:9], v[0:1], v[2:3]", F64_INPUTS, (8, 9)),
    "v_mul_f64": Snippet("v_mul_f64 v[8:9], v[0:1], -v[2:3]", F64_INPUTS, (8, 9)),
    "accumulators": Snippet(
        "v_accvgpr_write_b32 a3, v0\nv_accvgpr_mov_b32 a7, a3\nv_accvgpr_read_b32 v8, a7",
        INT_INPUTS,
        (8, 259, 263),
    ),
    "high half": Snippet("v_add_i16 v8, v0, v1 op_sel:[0,1,1]", INT_INPUTS, (8,), SOME_LANES),
    "clamp": Snippet("v_add_f32 v8, v0, v1 clamp", FLOAT_INPUTS, (8,)),
    "sdwa": Snippet(
        "v_add_u32_sdwa v8, v0, v1 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE "
        "src0_sel:BYTE_2 src1_sel:WORD_1",
        INT_INPUTS,
        (8,),
    ),
    "sdwa pad": Snippet(
        "v_add_u32_sdwa v8, sext(v0), v1 dst_sel:BYTE_1 dst_unused:UNUSED_PAD "
        "src0_sel:BYTE_3 src1_sel:DWORD",
        INT_INPUTS,
        (8,),
        SOME_LANES,
    ),
}


@pytest.fixture(scope="module")
def others() -> Runner:
    return Runner(OTHERS)


@pytest.mark.parametrize("name", HALF_CASES)
def test_halves(others, name):
    """Products and sums of f16 are exact in double."""
    _, formula, packed = HALF_CASES[name]
    actual = others.run(name)[0]
    for lane in range(64):
        wanted = 0
        for i in range(2 if packed else 1):
            values = [float(PAIRS[k, lane, i]) for k in range(3)]
            wanted |= f16_bits(formula(*values)) << 16 * i
        assert int(actual[lane]) == wanted, lane


@pytest.mark.parametrize("name", DOT_CASES)
def test_dot_products(others, name):
    actual = others.run(name)[0].view(np.float32)
    kind = np.float16 if name.endswith("_f16") else None
    for lane in range(64):
        a, b = (int(HALF_INPUTS[i][lane]) for i in (0, 1))
        if kind:
            x, y = ([as_float(h, 2) for h in halves(v)] for v in (a, b))
        else:
            x, y = ([as_float(h << 16) for h in halves(v)] for v in (a, b))
        wanted = x[0] * y[0] + x[1] * y[1] + as_float(int(BF_INPUTS[2][lane]))
        np.testing.assert_allclose(float(actual[lane]), wanted, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("case", MIX_CASES)
def test_mixed_fma(others, case):
    fields = {"op_sel": [0, 0, 0], "op_sel_hi": [0, 0, 0]}
    for key, bits in re.findall(r"(op_sel|op_sel_hi):\[([\d,]+)\]", case):
        fields[key] = [int(b) for b in bits.split(",")]
    actual = others.run(case)[0]
    for lane in range(64):
        values = []
        for i in range(3):
            bits = int(BF_INPUTS[i][lane])
            if fields["op_sel_hi"][i]:
                half = halves(bits)[fields["op_sel"][i]]
                bits = int.from_bytes(struct.pack("<f", as_float(half, 2)), "little")
            values.append(bits)
        if "-v0" in case:
            values = [neg(values[0]), values[1] & 0x7FFFFFFF, values[2]]
        wanted = fma(*values)
        if "f16" in case:
            if is_nan(wanted):
                continue
            half, old = f16_bits(as_float(wanted)), int(OLD[lane])
            wanted = half << 16 | old & 0xFFFF if "hi_f16" in case else half | old & 0xFFFF0000
        assert int(actual[lane]) == wanted or (is_nan(int(actual[lane])) and is_nan(wanted)), lane


def test_division_is_correctly_rounded(others):
    """LLVM's expansion of an IEEE division through div_scale, div_fmas and div_fixup, edge values
    included."""
    actual = others.run("division")[0]
    for lane in range(64):
        n, d = int(FLOAT_INPUTS[0][lane]), int(FLOAT_INPUTS[1][lane])
        sign = ((n ^ d) >> 31) << 31
        x, y = as_float(n), as_float(d)
        if math.isnan(x) or math.isnan(y) or (x == 0 and y == 0) or (is_inf(n) and is_inf(d)):
            wanted = NAN
        elif is_inf(n) or y == 0:
            wanted = sign | 0x7F800000
        elif is_inf(d) or x == 0:
            wanted = sign
        else:
            wanted = round_f32(Fraction(x) / Fraction(y), sign >> 31) | sign
        got = int(actual[lane])
        assert got == wanted or (is_nan(got) and is_nan(wanted)), (x, y, hex(got), hex(wanted))


def test_doubles(others):
    with np.errstate(all="ignore"):
        wanted = {"v_add_f64": F64[0] + F64[1], "v_mul_f64": F64[0] * -F64[1]}
    for name, values in wanted.items():
        actual = np.ascontiguousarray(others.run(name).T).view(np.float64)[:, 0]
        np.testing.assert_array_equal(actual, values)


def test_accumulation_registers(others):
    np.testing.assert_array_equal(others.run("accumulators"), np.stack([INT_INPUTS[0]] * 3))


def test_op_sel_writes_the_high_half(others):
    actual = others.run("high half")[0]
    for lane in range(64):
        a, b = int(INT_INPUTS[0][lane]), int(INT_INPUTS[1][lane])
        total = (a + (b >> 16)) & 0xFFFF
        old = int(OLD[lane])
        wanted = total << 16 | old & 0xFFFF if SOME_LANES >> lane & 1 else old
        assert int(actual[lane]) == wanted


def test_clamp(others):
    actual = others.run("clamp")[0].view(np.float32)
    for lane in range(64):
        total = as_float(add(int(FLOAT_INPUTS[0][lane]), int(FLOAT_INPUTS[1][lane])))
        wanted = 0.0 if math.isnan(total) else min(max(total, 0.0), 1.0)
        assert float(actual[lane]) == wanted


def test_sdwa_selects(others):
    kept, padded = others.run("sdwa")[0], others.run("sdwa pad")[0]
    for lane in range(64):
        a, b = int(INT_INPUTS[0][lane]), int(INT_INPUTS[1][lane])
        total = (a >> 16 & 0xFF) + (b >> 16)
        assert int(kept[lane]) == (total & 0xFFFF) << 16 | int(OLD[lane]) & 0xFFFF
        total = signed_field(a >> 24, 8) + b
        wanted = (total & 0xFF) << 8 if SOME_LANES >> lane & 1 else int(OLD[lane])
        assert int(padded[lane]) == wanted


def test_every_instruction_of_the_table_is_here():
    tested = {case.split()[0] for case in _all_cases()} | set(HALF_CASES) | set(DOT_CASES)
    tested |= {c.split()[0] for c in MIX_CASES} | {c.replace("v_cmp_", "v_cmpx_") for c in tested}
    tested |= {"v_accvgpr_write_b32", "v_accvgpr_mov_b32", "v_accvgpr_read_b32"}
    tested |= {"v_add_f64", "v_mul_f64", "v_div_scale_f32", "v_div_fmas_f32", "v_div_fixup_f32"}
    assert set(vector.INSTRUCTIONS) - tested == set()


def _all_cases() -> list[str]:
    tables = (INTEGER_CASES, BY_LANE, CARRY_CASES, COMPARE_CASES, FLOAT_CASES, ACCUMULATING)
    return [case for table in (*tables, NEAR_CASES, SMALL) for case in table]
