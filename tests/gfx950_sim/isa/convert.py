"""Conversions between number formats (v_cvt_*).

Sources: the pseudocode of the CDNA4 ISA; its table 31, "Small Float Data Format Conversion ops",
for rounding and modifiers; "Converts with Scale" for scales (E8M0, the exponent field of a
float: 2^(field - 127), 255 is NaN); "CVT_*FP8_F32 and CVT*_BF8_F32 FP16_OVFL rule" for
overflow. A scale multiplies when a small format is widened and divides when one is produced. The
bytes and nibbles of fp4: LLVM's assembler (op_sel) and AMD's fpsan tests, which run on gfx950.

`old` is the destination before the instruction, where only a part of it is written. `fp16_ovfl` is
MODE.FP16_OVFL.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from . import formats
from .formats import Array, Bytes, Floats, Halves, Words
from .records import Valu

_16 = np.uint32(16)
_LOW = np.uint32(0xFFFF)


def to_integer(values: Array, low: int, high: int) -> npt.NDArray[np.int64]:
    """Truncated toward zero and saturated to low .. high; NaN is 0."""
    whole = np.clip(np.trunc(values.astype(np.float64)), low, high)
    return np.where(np.isnan(whole), 0.0, whole).astype(np.int64)


def to_i32(values: Array) -> npt.NDArray[np.int64]:
    return to_integer(values, -(2**31), 2**31 - 1)


def to_u32(values: Array) -> npt.NDArray[np.int64]:
    return to_integer(values, 0, 2**32 - 1)


def to_f16(values: Floats, fp16_ovfl: int = 0) -> npt.NDArray[np.float16]:
    """Rounded to nearest even. With FP16_OVFL an overflow is +-65504; true infinities stay."""
    result = values.astype(np.float16)
    if fp16_ovfl:
        overflow = np.isinf(result) & np.isfinite(values)
        result[overflow] = np.copysign(np.float16(65504), values[overflow])
    return result


def pairs(a: Array, b: Array) -> Array:
    """[64, 2]: the values of two sources side by side, so that both are converted in one pass."""
    both = np.empty((64, 2), a.dtype)
    both[:, 0], both[:, 1] = a, b
    return both


def dwords(halves: Array) -> Words:
    """uint32 [64] of two 16-bit items a lane, [64, 2]."""
    return halves.view(np.uint32)[:, 0]


def cvt_pk_i16_i32(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> Words:
    return dwords(np.clip(pairs(a, b), -(2**15), 2**15 - 1).astype(np.int16))


def cvt_pk_u16_u32(a: Words, b: Words) -> Words:
    return dwords(np.minimum(pairs(a, b), _LOW).astype(np.uint16))


def cvt_f32_ubyte(byte: int) -> Callable[[Words], Floats]:
    def function(a: Words) -> Floats:
        return ((a >> np.uint32(8 * byte)) & np.uint32(0xFF)).astype(np.float32)

    return function


def cvt_pk_f16_f32(a: Floats, b: Floats, fp16_ovfl: int = 0) -> Words:
    return dwords(to_f16(pairs(a, b), fp16_ovfl))


def cvt_pkrtz_f16_f32(a: Floats, b: Floats) -> Words:
    return dwords(formats.encode_f16_toward_zero(pairs(a, b)))


def cvt_pk_bf16_f32(a: Floats, b: Floats) -> Words:
    return dwords(formats.encode_bf16(pairs(a, b)))


# fp8 (e4m3) and bf8 (e5m2) -----------------------------------------------------------------------


def replace_half(old: Words, value: Array, half: int) -> Words:
    """`old` with bits 15:0 (half 0) or 31:16 (half 1) replaced by a value below 2^16."""
    new = value.astype(np.uint32)
    return (old & _LOW) | (new << _16) if half else (old & ~_LOW) | new


def selected_half(a: Words, half: int) -> Halves:
    return (a >> _16 if half else a).astype(np.uint16)


def widen_pair(pair: Halves, table: Floats) -> Floats:
    """float32 [64, 2] of the two small floats in each half."""
    return table.take(np.ascontiguousarray(pair).view(np.uint8).reshape(-1, 2))


def _factors(scale: Words, table: Floats) -> Floats:
    """The power of two that a scale stands for, or its inverse, from its exponent field."""
    return table.take((scale >> np.uint32(23)) & np.uint32(0xFF))


def _small_format(
    name: str, table: Floats, encode: Callable[[Floats, bool], Bytes]
) -> dict[str, Valu]:
    """The conversions from and to one 8-bit format; the products of the widening ones are exact in
    float32."""

    def cvt_f32(a: Bytes) -> Floats:
        return table.take(a)

    def cvt_pk_f32(a: Halves) -> Floats:
        return widen_pair(a, table).T

    def write_pair(values: Array, old: Words, op_sel: int, fp16_ovfl: int) -> Words:
        codes = encode(values, bool(fp16_ovfl))
        return replace_half(old, codes.view(np.uint16)[:, 0], op_sel >> 3)

    def cvt_pk_small(a: Floats, b: Floats, old: Words, op_sel: int, fp16_ovfl: int) -> Words:
        return write_pair(pairs(a, b), old, op_sel, fp16_ovfl)

    def scaled_f32(a: Words, scale: Words, op_sel: int) -> Floats:
        return table.take((a >> np.uint32(8 * (op_sel & 3))) & np.uint32(0xFF)) * _factors(
            scale, formats.E8M0_F32
        )

    def scaled_f16(a: Words, scale: Words, old: Words, op_sel: int, fp16_ovfl: int) -> Words:
        code = to_f16(scaled_f32(a, scale, op_sel), fp16_ovfl).view(np.uint16)
        return replace_half(old, code, op_sel >> 3)

    def scaled_pairs(a: Words, scale: Words, op_sel: int) -> Floats:
        return (
            widen_pair(selected_half(a, op_sel & 1), table)
            * _factors(scale, formats.E8M0_F32)[:, np.newaxis]
        )

    def scaled_pk_f32(a: Words, scale: Words, op_sel: int) -> Floats:
        return scaled_pairs(a, scale, op_sel).T

    # Every pair of codes as two f16: kernels widen with a constant scale of 1 all the time.
    codes = np.arange(1 << 16, dtype=np.uint16)
    unscaled_f16 = to_f16(widen_pair(codes, table), 0).view(np.uint32)[:, 0]

    def scaled_pk_f16(a: Words, scale: Words, op_sel: int, fp16_ovfl: int) -> Words:
        if scale.size == 1 and scale.item() >> 23 & 0xFF == 127:
            return unscaled_f16.take((a >> _16 if op_sel & 1 else a & _LOW).astype(np.intp))
        return to_f16(scaled_pairs(a, scale, op_sel), fp16_ovfl).view(np.uint32)[:, 0]

    def scaled_pk_bf16(a: Words, scale: Words, op_sel: int) -> Words:
        return formats.encode_bf16(scaled_pairs(a, scale, op_sel)).view(np.uint32)[:, 0]

    # Dividing in float32 is exact wherever the result is not beyond 448 or rounded to zero.
    def scaled_pk_small(values: Array, scale: Words, old: Words, op_sel: int, ovfl: int) -> Words:
        inverse = _factors(scale, formats.E8M0_INVERSE_F32)
        return write_pair(values * inverse[:, np.newaxis], old, op_sel, ovfl)

    def scaled_pk_small_f32(
        a: Floats, b: Floats, scale: Words, old: Words, op_sel: int, fp16_ovfl: int
    ) -> Words:
        return scaled_pk_small(pairs(a, b), scale, old, op_sel, fp16_ovfl)

    def scaled_pk_small_f16(
        a: Words, scale: Words, old: Words, op_sel: int, fp16_ovfl: int
    ) -> Words:
        values = np.ascontiguousarray(a).view(np.float16).reshape(-1, 2).astype(np.float32)
        return scaled_pk_small(values, scale, old, op_sel, fp16_ovfl)

    def scaled_pk_small_bf16(
        a: Words, scale: Words, old: Words, op_sel: int, fp16_ovfl: int
    ) -> Words:
        values = formats.decode_bf16(np.ascontiguousarray(a).view(np.uint16).reshape(-1, 2))
        return scaled_pk_small(values, scale, old, op_sel, fp16_ovfl)

    word, sel, both = ("u32", "u32"), ("op_sel",), ("op_sel", "fp16_ovfl")
    scaled = "v_cvt_scalef32"
    return {
        # SDWA's src0_sel picks the byte, or the half of a pair.
        f"v_cvt_f32_{name}": Valu(cvt_f32, "f32", ("u8",)),
        f"v_cvt_pk_f32_{name}": Valu(cvt_pk_f32, "f32x2", ("u16",)),
        # op_sel[3] picks the half written; the other is kept.
        f"v_cvt_pk_{name}_f32": Valu(cvt_pk_small, "u32", ("f32", "f32"), both, reads_dst=True),
        # op_sel[1:0] picks the byte read, op_sel[3] the half written.
        f"{scaled}_f32_{name}": Valu(scaled_f32, "f32", word, sel),
        f"{scaled}_f16_{name}": Valu(scaled_f16, "u32", word, both, reads_dst=True),
        # op_sel[0] picks the half read.
        f"{scaled}_pk_f32_{name}": Valu(scaled_pk_f32, "f32x2", word, sel),
        f"{scaled}_pk_f16_{name}": Valu(scaled_pk_f16, "u32", word, both),
        f"{scaled}_pk_bf16_{name}": Valu(scaled_pk_bf16, "u32", word, sel),
        # op_sel[3] picks the half written; the other is kept.
        f"{scaled}_pk_{name}_f32": Valu(
            scaled_pk_small_f32, "u32", ("f32", "f32", "u32"), both, reads_dst=True
        ),
        f"{scaled}_pk_{name}_f16": Valu(scaled_pk_small_f16, "u32", word, both, reads_dst=True),
        f"{scaled}_pk_{name}_bf16": Valu(scaled_pk_small_bf16, "u32", word, both, reads_dst=True),
    }


# fp4 (e2m1) ---------------------------------------------------------------------------------------


def scaled_pk_f32_fp4(a: Words, scale: Words, op_sel: int) -> Floats:
    """Two nibbles of the byte that op_sel[1:0] picks, the lower first, as float32 [2, 64]."""
    byte = (a >> np.uint32(8 * (op_sel & 3))) & np.uint32(0xFF)
    nibbles = np.stack([byte & np.uint32(0xF), byte >> np.uint32(4)])
    return formats.FP4_F32.take(nibbles) * _factors(scale, formats.E8M0_F32)


def scaled_pk_fp4_f32(a: Floats, b: Floats, scale: Words, old: Words, op_sel: int) -> Words:
    """`old` with the byte that op_sel[3:2] picks replaced by the codes of a (lower nibble) and b.

    The quotients are exact in float32 wherever they are not rounded to zero or beyond 6.
    """
    inverse = _factors(scale, formats.E8M0_INVERSE_F32)
    # The sign is the source's, also where the scale is NaN.
    low, high = (formats.encode_fp4(np.copysign(x * inverse, x)) for x in (a, b))
    shift = np.uint32(8 * (op_sel >> 2 & 3))
    byte = (low | high << np.uint8(4)).astype(np.uint32)
    return (old & ~(np.uint32(0xFF) << shift)) | byte << shift


INSTRUCTIONS: dict[str, Valu] = {
    "v_cvt_f32_i32": Valu(lambda a: a.astype(np.float32), "f32", ("i32",)),
    "v_cvt_f32_u32": Valu(lambda a: a.astype(np.float32), "f32", ("u32",)),
    "v_cvt_i32_f32": Valu(to_i32, "i32", ("f32",)),
    "v_cvt_u32_f32": Valu(to_u32, "u32", ("f32",)),
    "v_cvt_flr_i32_f32": Valu(lambda a: to_i32(np.floor(a)), "i32", ("f32",)),
    "v_cvt_rpi_i32_f32": Valu(
        lambda a: to_i32(np.floor(a.astype(np.float64) + 0.5)), "i32", ("f32",)
    ),
    "v_cvt_f64_i32": Valu(lambda a: a.astype(np.float64), "f64", ("i32",)),
    "v_cvt_f64_u32": Valu(lambda a: a.astype(np.float64), "f64", ("u32",)),
    "v_cvt_f64_f32": Valu(lambda a: a.astype(np.float64), "f64", ("f32",)),
    "v_cvt_f32_f64": Valu(lambda a: a.astype(np.float32), "f32", ("f64",)),
    "v_cvt_i32_f64": Valu(to_i32, "i32", ("f64",)),
    "v_cvt_u32_f64": Valu(to_u32, "u32", ("f64",)),
    **{f"v_cvt_f32_ubyte{i}": Valu(cvt_f32_ubyte(i), "f32", ("u32",)) for i in range(4)},
    "v_cvt_f16_u16": Valu(lambda a: a.astype(np.float16), "f16", ("u16",)),
    "v_cvt_f16_i16": Valu(lambda a: a.astype(np.float16), "f16", ("i16",)),
    "v_cvt_u16_f16": Valu(lambda a: to_integer(a, 0, 2**16 - 1), "u16", ("f16",)),
    "v_cvt_i16_f16": Valu(lambda a: to_integer(a, -(2**15), 2**15 - 1), "i16", ("f16",)),
    "v_cvt_pk_u16_u32": Valu(cvt_pk_u16_u32, "u32", ("u32", "u32")),
    "v_cvt_pk_i16_i32": Valu(cvt_pk_i16_i32, "u32", ("i32", "i32")),
    "v_cvt_f16_f32": Valu(to_f16, "f16", ("f32",), ("fp16_ovfl",)),
    "v_cvt_f32_f16": Valu(lambda a: a.astype(np.float32), "f32", ("f16",)),
    "v_cvt_f32_bf16": Valu(formats.decode_bf16, "f32", ("u16",)),
    "v_cvt_pk_f16_f32": Valu(cvt_pk_f16_f32, "u32", ("f32", "f32"), ("fp16_ovfl",)),
    "v_cvt_pkrtz_f16_f32": Valu(cvt_pkrtz_f16_f32, "u32", ("f32", "f32")),
    "v_cvt_pk_bf16_f32": Valu(cvt_pk_bf16_f32, "u32", ("f32", "f32")),
    **_small_format("fp8", formats.FP8_F32, formats.encode_fp8),
    **_small_format("bf8", formats.BF8_F32, formats.encode_bf8),
    "v_cvt_scalef32_pk_f32_fp4": Valu(scaled_pk_f32_fp4, "f32x2", ("u32", "u32"), ("op_sel",)),
    "v_cvt_scalef32_pk_fp4_f32": Valu(
        scaled_pk_fp4_f32, "u32", ("f32", "f32", "u32"), ("op_sel",), reads_dst=True
    ),
}
