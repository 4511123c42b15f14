"""Vector ALU on integers and bits: moves, arithmetic (it wraps), shifts, fields.

Source: the pseudocode of the CDNA4 ISA, chapter 12 (VOP1, VOP2, VOP3, VOP3P). Arrays have the dtype
that the table gives and one element a lane. "rev" forms swap the sources.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from gfx950_sim.isa.records import Valu

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]

_1, _5BITS, _6BITS = np.uint32(1), np.uint32(31), np.uint32(63)
_LANE = np.arange(64)
_M24 = np.uint32(0xFFFFFF)


def same(a: Array) -> Array:
    return a


def swapped(function: Function) -> Function:
    """The same function with its first two sources exchanged."""
    return lambda a, b, *rest, **modifiers: function(b, a, *rest, **modifiers)


# Integers ----------------------------------------------------------------------------------------


def wide(a: Array) -> Array:
    """As 64 bits of the same signedness."""
    return a.astype(np.int64 if a.dtype.kind == "i" else np.uint64)


def saturated(total: Array, like: Array) -> Array:
    """A 64-bit signed value clamped to the range of ``like``'s dtype."""
    limits = np.iinfo(like.dtype)
    return np.clip(total, limits.min, limits.max).astype(like.dtype)


def add(a: Array, b: Array, clamp: int = 0) -> Array:
    return saturated(a.astype(np.int64) + b.astype(np.int64), a) if clamp else a + b


def sub(a: Array, b: Array, clamp: int = 0) -> Array:
    return saturated(a.astype(np.int64) - b.astype(np.int64), a) if clamp else a - b


def add_carry(a: Array, b: Array, carry: Array | int = 0) -> tuple[Array, Array]:
    total = a.astype(np.uint64) + b.astype(np.uint64) + np.asarray(carry, np.uint64)
    return total.astype(np.uint32), total >> np.uint64(32) != 0


def sub_borrow(a: Array, b: Array, borrow: Array | int = 0) -> tuple[Array, Array]:
    total = a.astype(np.int64) - b.astype(np.int64) - np.asarray(borrow, np.int64)
    return total.astype(np.uint32), total < 0


def mul_hi(a: Array, b: Array) -> Array:
    return (wide(a) * wide(b) >> wide(a).dtype.type(32)).astype(a.dtype)


def low24_u(a: Array) -> Array:
    return a & _M24


def low24_i(a: Array) -> Array:
    return (a << np.int32(8)) >> np.int32(8)


def mad_u64_u32(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    total = np.multiply(a, b, dtype=np.uint64) + c
    return total, total < c


def mad_i64_i32(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    product = np.multiply(a, b, dtype=np.int64)
    total = product + c
    overflow = (product ^ total) & (c ^ total)
    return total, (total ^ overflow) < 0  # bit 64 of the 65-bit sum


def med3(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


# Bits --------------------------------------------------------------------------------------------


def shift_left(count: Array, a: Array) -> Array:
    return a << (count & _5BITS)


def shift_right(count: Array, a: Array) -> Array:
    return a >> (count & _5BITS).astype(a.dtype)


def shift_left64(count: Array, a: Array) -> Array:
    return a << (count & _6BITS).astype(a.dtype)


def shift_right64(count: Array, a: Array) -> Array:
    return a >> (count & _6BITS).astype(a.dtype)


def shift16(function: Function) -> Function:
    """A 16-bit shift by count[3:0], count first."""
    return lambda count, a: function(a, (count & count.dtype.type(15)).astype(a.dtype))


def field_mask(width: Array) -> Array:
    return (_1 << (width & _5BITS)) - _1


def bfe_u32(a: Array, offset: Array, width: Array) -> Array:
    return (a >> (offset & _5BITS)) & field_mask(width)


def bfe_i32(a: Array, offset: Array, width: Array) -> Array:
    bits = (width & _5BITS).astype(np.int64)
    field = (a.astype(np.int64) >> (offset & _5BITS).astype(np.int64)) & ((1 << bits) - 1)
    sign = (1 << bits) >> 1
    return ((field ^ sign) - sign).astype(np.int32)


def concat(high: Array, low: Array) -> Array:
    return high.astype(np.uint64) << np.uint64(32) | low


def align(high: Array, low: Array, bits: Array) -> Array:
    return (concat(high, low) >> bits.astype(np.uint64)).astype(np.uint32)


def perm_b32(a: Array, b: Array, select: Array) -> Array:
    """Each byte of ``select`` picks a byte of {a, b} (b is bytes 0..3), a sign (8..11), 0 (12) or
    0xff."""
    data = concat(a, b)
    result = np.zeros(64, np.uint32)
    for i in range(4):
        code = np.broadcast_to(select >> np.uint32(8 * i) & np.uint32(0xFF), (64,))
        byte = data >> (np.minimum(code, 7) * np.uint32(8)).astype(np.uint64) & np.uint64(0xFF)
        sign_at = ((np.clip(code, 8, 11) - 8) * np.uint32(16) + np.uint32(15)).astype(np.uint64)
        sign = (data >> sign_at & np.uint64(1)) * np.uint64(0xFF)
        value = np.where(code < 8, byte, np.where(code < 12, sign, np.where(code == 12, 0, 0xFF)))
        result |= value.astype(np.uint32) << np.uint32(8 * i)
    return result


def bitop3(a: Array, b: Array, c: Array, bitop3: int) -> Array:
    """Any function of three bits: bit 4 a + 2 b + c of the truth table ``bitop3``."""
    if bitop3 in _BITOP3:
        result: Array = _BITOP3[bitop3](a, b, c)
        return result
    result = np.zeros(64, np.uint32)
    for term in range(8):
        if bitop3 >> term & 1:
            x, y, z = (v if term >> s & 1 else ~v for v, s in ((a, 2), (b, 1), (c, 0)))
            result = result | (x & y & z)
    return result


# The tables a compiler makes most of: a ^ b ^ c, a ^ (b & c), (a ^ b) & c, ...
_BITOP3: dict[int, Function] = {
    0x96: lambda a, b, c: a ^ b ^ c,
    0x78: lambda a, b, c: a ^ (b & c),
    0x6C: lambda a, b, c: b ^ (a & c),
    0x6A: lambda a, b, c: c ^ (a & b),
    0x28: lambda a, b, c: (a ^ b) & c,
    0x48: lambda a, b, c: (a ^ c) & b,
    0x60: lambda a, b, c: (b ^ c) & a,
    0x36: lambda a, b, c: b ^ (a | c),
    0x1E: lambda a, b, c: a ^ (b | c),
    0x56: lambda a, b, c: c ^ (a | b),
    0x80: lambda a, b, c: a & b & c,
    0xFE: lambda a, b, c: a | b | c,
}


def mbcnt(first: int) -> Function:
    """Set bits of a mask's half below the own lane, plus the second source."""

    def function(mask: Array, b: Array) -> Array:
        below = np.clip(_LANE - first, 0, 32)
        keep = ((np.uint64(1) << below.astype(np.uint64)) - np.uint64(1)).astype(np.uint32)
        return np.bitwise_count(mask & keep).astype(np.uint32) + b

    return function


def reverse_bits(a: Array) -> Array:
    octets = np.ascontiguousarray(a).view(np.uint8).reshape(-1, 4)
    bits = np.unpackbits(octets, axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(np.uint32)[:, 0]


def leading_zeros(a: Array) -> Array:
    _, exponent = np.frexp(a.astype(np.float64))
    return np.where(a == 0, -1, 32 - exponent).astype(np.int32)


def trailing_zeros(a: Array) -> Array:
    lowest = a & (~a + _1)
    return np.where(a == 0, -1, 31 - leading_zeros(lowest)).astype(np.int32)


def leading_sign_bits(a: Array) -> Array:
    flipped = np.where(a < 0, ~a, a).astype(np.uint32)
    return np.where(flipped == 0, -1, leading_zeros(flipped)).astype(np.int32)


def pk_mov_b32(a: Array, b: Array, op_sel: int, op_sel_hi: int) -> Array:
    first, second = a[op_sel & 1], b[op_sel >> 1 & 1]
    return np.stack(np.broadcast_arrays(first, second))


def ashr_pk(low: int, high: int) -> Function:
    """Two values shifted and saturated to bytes."""

    def function(a: Array, b: Array, count: Array) -> Array:
        by = (count & _5BITS).astype(np.int32)
        x, y = (np.clip(v >> by, low, high).astype(np.uint32) & np.uint32(0xFF) for v in (a, b))
        return x | y << np.uint32(8)

    return function


# Tables ------------------------------------------------------------------------------------------

_U2, _I2 = ("u32", "u32"), ("i32", "i32")
_U3, _I3 = ("u32",) * 3, ("i32",) * 3

MOVES: dict[str, Valu] = {
    "v_mov_b32": Valu(same, "u32", ("u32",)),
    "v_mov_b64": Valu(same, "u64", ("u64",)),
    "v_accvgpr_read_b32": Valu(same, "u32", ("u32",)),
    "v_accvgpr_write_b32": Valu(same, "u32", ("u32",)),
    "v_accvgpr_mov_b32": Valu(same, "u32", ("u32",)),
    "v_cndmask_b32": Valu(lambda a, b, mask: np.where(mask, b, a), "u32", ("u32", "u32", "mask")),
    "v_pk_mov_b32": Valu(pk_mov_b32, "u32x2", ("u32x2", "u32x2"), ("op_sel", "op_sel_hi")),
}

INTEGERS: dict[str, Valu] = {
    "v_add_u32": Valu(add, "u32", _U2, ("clamp",)),
    "v_sub_u32": Valu(sub, "u32", _U2, ("clamp",)),
    "v_subrev_u32": Valu(swapped(sub), "u32", _U2, ("clamp",)),
    "v_add_i32": Valu(add, "i32", _I2, ("clamp",)),
    "v_sub_i32": Valu(sub, "i32", _I2, ("clamp",)),
    "v_add_co_u32": Valu(add_carry, "u32", _U2, extra="mask"),
    "v_sub_co_u32": Valu(sub_borrow, "u32", _U2, extra="mask"),
    "v_subrev_co_u32": Valu(swapped(sub_borrow), "u32", _U2, extra="mask"),
    "v_addc_co_u32": Valu(add_carry, "u32", (*_U2, "mask"), extra="mask"),
    "v_subb_co_u32": Valu(sub_borrow, "u32", (*_U2, "mask"), extra="mask"),
    "v_subbrev_co_u32": Valu(swapped(sub_borrow), "u32", (*_U2, "mask"), extra="mask"),
    "v_add3_u32": Valu(lambda a, b, c: a + b + c, "u32", _U3),
    "v_mul_lo_u32": Valu(np.multiply, "u32", _U2),
    "v_mul_hi_u32": Valu(mul_hi, "u32", _U2),
    "v_mul_hi_i32": Valu(mul_hi, "i32", _I2),
    "v_mul_u32_u24": Valu(lambda a, b: low24_u(a) * low24_u(b), "u32", _U2),
    "v_mul_i32_i24": Valu(lambda a, b: low24_i(a) * low24_i(b), "i32", _I2),
    "v_mul_hi_u32_u24": Valu(lambda a, b: mul_hi(low24_u(a), low24_u(b)), "u32", _U2),
    "v_mad_u32_u24": Valu(lambda a, b, c: low24_u(a) * low24_u(b) + c, "u32", _U3),
    "v_mad_i32_i24": Valu(lambda a, b, c: low24_i(a) * low24_i(b) + c, "i32", _I3),
    "v_mad_u64_u32": Valu(mad_u64_u32, "u64", ("u32", "u32", "u64"), extra="mask"),
    "v_mad_i64_i32": Valu(mad_i64_i32, "i64", ("i32", "i32", "i64"), extra="mask"),
    "v_min_u32": Valu(np.minimum, "u32", _U2),
    "v_max_u32": Valu(np.maximum, "u32", _U2),
    "v_min_i32": Valu(np.minimum, "i32", _I2),
    "v_max_i32": Valu(np.maximum, "i32", _I2),
    "v_min3_u32": Valu(lambda a, b, c: np.minimum(np.minimum(a, b), c), "u32", _U3),
    "v_max3_u32": Valu(lambda a, b, c: np.maximum(np.maximum(a, b), c), "u32", _U3),
    "v_min3_i32": Valu(lambda a, b, c: np.minimum(np.minimum(a, b), c), "i32", _I3),
    "v_max3_i32": Valu(lambda a, b, c: np.maximum(np.maximum(a, b), c), "i32", _I3),
    "v_med3_u32": Valu(med3, "u32", _U3),
    "v_med3_i32": Valu(med3, "i32", _I3),
    "v_add_u16": Valu(np.add, "u16", ("u16", "u16")),
    "v_sub_u16": Valu(np.subtract, "u16", ("u16", "u16")),
    "v_add_i16": Valu(add, "i16", ("i16", "i16"), ("clamp",)),
    "v_sub_i16": Valu(sub, "i16", ("i16", "i16"), ("clamp",)),
    "v_mul_lo_u16": Valu(np.multiply, "u16", ("u16", "u16")),
    "v_max_u16": Valu(np.maximum, "u16", ("u16", "u16")),
    "v_min_u16": Valu(np.minimum, "u16", ("u16", "u16")),
    "v_max_i16": Valu(np.maximum, "i16", ("i16", "i16")),
    "v_min_i16": Valu(np.minimum, "i16", ("i16", "i16")),
    "v_lshlrev_b16": Valu(shift16(np.left_shift), "u16", ("u16", "u16")),
    "v_lshrrev_b16": Valu(shift16(np.right_shift), "u16", ("u16", "u16")),
    "v_ashrrev_i16": Valu(shift16(np.right_shift), "i16", ("u16", "i16")),
    **{
        f"v_pk_{name}": Valu(function, f"{kind}x2", (f"{kind}x2",) * 2, packed=True)
        for name, function, kind in (
            ("add_u16", np.add, "u16"),
            ("sub_i16", np.subtract, "i16"),
            ("sub_u16", np.subtract, "u16"),
            ("add_i16", np.add, "i16"),
            ("mul_lo_u16", np.multiply, "u16"),
            ("max_i16", np.maximum, "i16"),
            ("min_i16", np.minimum, "i16"),
            ("max_u16", np.maximum, "u16"),
            ("min_u16", np.minimum, "u16"),
            ("lshlrev_b16", shift16(np.left_shift), "u16"),
            ("lshrrev_b16", shift16(np.right_shift), "u16"),
        )
    },
}

BITS: dict[str, Valu] = {
    "v_and_b32": Valu(np.bitwise_and, "u32", _U2),
    "v_or_b32": Valu(np.bitwise_or, "u32", _U2),
    "v_xor_b32": Valu(np.bitwise_xor, "u32", _U2),
    "v_xnor_b32": Valu(lambda a, b: ~(a ^ b), "u32", _U2),
    "v_not_b32": Valu(np.invert, "u32", ("u32",)),
    "v_or3_b32": Valu(lambda a, b, c: a | b | c, "u32", _U3),
    "v_and_or_b32": Valu(lambda a, b, c: a & b | c, "u32", _U3),
    "v_xad_u32": Valu(lambda a, b, c: (a ^ b) + c, "u32", _U3),
    "v_bitop3_b32": Valu(bitop3, "u32", _U3, ("bitop3",)),
    "v_lshlrev_b32": Valu(shift_left, "u32", _U2),
    "v_lshrrev_b32": Valu(shift_right, "u32", _U2),
    "v_ashrrev_i32": Valu(shift_right, "i32", ("u32", "i32")),
    "v_lshlrev_b64": Valu(shift_left64, "u64", ("u32", "u64")),
    "v_lshrrev_b64": Valu(shift_right64, "u64", ("u32", "u64")),
    "v_ashrrev_i64": Valu(shift_right64, "i64", ("u32", "i64")),
    "v_lshl_add_u32": Valu(lambda a, b, c: shift_left(b, a) + c, "u32", _U3),
    "v_add_lshl_u32": Valu(lambda a, b, c: shift_left(c, a + b), "u32", _U3),
    "v_lshl_or_b32": Valu(lambda a, b, c: shift_left(b, a) | c, "u32", _U3),
    # Only the low three bits of the count are used.
    "v_lshl_add_u64": Valu(
        lambda a, b, c: (a << (b & np.uint32(7)).astype(np.uint64)) + c,
        "u64",
        ("u64", "u32", "u64"),
    ),
    "v_bfe_u32": Valu(bfe_u32, "u32", _U3),
    "v_bfe_i32": Valu(bfe_i32, "i32", ("i32", "u32", "u32")),
    "v_bfi_b32": Valu(lambda a, b, c: a & b | ~a & c, "u32", _U3),
    "v_bfm_b32": Valu(lambda a, b: field_mask(a) << (b & _5BITS), "u32", _U2),
    "v_alignbit_b32": Valu(lambda a, b, c: align(a, b, c & _5BITS), "u32", _U3),
    "v_alignbyte_b32": Valu(lambda a, b, c: align(a, b, (c & np.uint32(3)) * 8), "u32", _U3),
    "v_perm_b32": Valu(perm_b32, "u32", _U3),
    "v_bcnt_u32_b32": Valu(lambda a, b: np.bitwise_count(a).astype(np.uint32) + b, "u32", _U2),
    "v_mbcnt_lo_u32_b32": Valu(mbcnt(0), "u32", _U2),
    "v_mbcnt_hi_u32_b32": Valu(mbcnt(32), "u32", _U2),
    "v_bfrev_b32": Valu(reverse_bits, "u32", ("u32",)),
    "v_ffbh_u32": Valu(leading_zeros, "i32", ("u32",)),
    "v_ffbl_b32": Valu(trailing_zeros, "i32", ("u32",)),
    "v_ffbh_i32": Valu(leading_sign_bits, "i32", ("i32",)),
    "v_ashr_pk_i8_i32": Valu(ashr_pk(-128, 127), "u32", ("i32", "i32", "u32")),
    "v_ashr_pk_u8_i32": Valu(ashr_pk(0, 255), "u32", ("i32", "i32", "u32")),
    "v_prng_b32": Valu(lambda a: (a << _1) ^ ((a >> _5BITS) * np.uint32(197)), "u32", ("u32",)),
}

INSTRUCTIONS: dict[str, Valu] = {**MOVES, **INTEGERS, **BITS}
