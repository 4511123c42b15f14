"""Matrix multiply-accumulate (MFMA): D[m, n] = C[m, n] + sum over k of A[m, k] * B[k, n], over the
whole wave.

Lane layouts (CDNA4 ISA 7.1.4 and 7.1.5). Lane l = M * g + t, so that t is the row of A, or the
column of B, that the lane holds, and g = l // M counts its group of lanes:

- A and B: a lane holds consecutive k in its registers, groups follow one another: k = K_L * g +
  item, K_L items a lane.
- A and B of *_f8f6f4, each by its own format, whatever the other's is. In an 8-bit format: two runs
  of 16 bytes, each laid out like that: k = 16 * G * run + 16 * g + byte, G groups. In the 4-bit
  format: one run of 32 nibbles, the low nibble of a byte first, in four registers (LLVM's
  assembler takes no other number): k = 32 * g + nibble. The ISA shows equal formats; that mixed
  ones change nothing agrees with AMD's rocjitsu (mma/layout.h) and with the FP8 by FP4 kernels of
  ROCm/aiter, which load A in two halves 64 apart and B in one.
- C and D: register r of lane l is row 4 * G * (r // 4) + 4 * g + r % 4, column t.
- Scales of *_scale_*: the E8M0 byte for row (column) t and the 32 values k // 32 = kb comes from
  lane M * kb + t of the scale register, in every format; op_sel picks the byte. An inline float
  constant stands for its exponent field.

All 64 lanes take part whatever EXEC says, and denormals are kept. The order in which the hardware
adds is not documented; here products and sums are formed in float64 and rounded to float32 once (a
choice: compare with a tolerance).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from . import formats
from .formats import Doubles, Words
from .records import Matrix

Decoder = Callable[[Words], Doubles]


def _values_f16(words: Words) -> Doubles:
    return words.view(np.float16).astype(np.float64)


def _values_bf16(words: Words) -> Doubles:
    return formats.decode_bf16(words.view(np.uint16)).astype(np.float64)


def _values_f32(words: Words) -> Doubles:
    return words.view(np.float32).astype(np.float64)


def _values_fp8(words: Words) -> Doubles:
    return formats.FP8_F64.take(words.view(np.uint8))


def _values_bf8(words: Words) -> Doubles:
    return formats.BF8_F64.take(words.view(np.uint8))


_NIBBLE_SHIFTS = np.array([0, 4], np.uint8)


def _values_fp4(words: Words) -> Doubles:
    nibbles = (words.view(np.uint8)[..., np.newaxis] >> _NIBBLE_SHIFTS) & np.uint8(0xF)
    return formats.FP4_F64.take(nibbles).reshape(words.shape[0], -1)


DECODERS: dict[str, Decoder] = {
    "f32": _values_f32,
    "f16": _values_f16,
    "bf16": _values_bf16,
    "fp8": _values_fp8,
    "bf8": _values_bf8,
    "fp4": _values_fp4,
}
"""Element formats of A and B: a function from words [rows, n] to values [rows, n * elements a
word]."""

F8F6F4_FORMATS = {0: "fp8", 1: "bf8", 4: "fp4"}
"""CBSZ (for A) and BLGP (for B) of *_f8f6f4; 2 and 3 are the 6-bit formats, which are not
modelled."""
F8F6F4_RUNS = {"fp8": 2, "bf8": 2, "fp4": 1}
"""Runs of consecutive k that a lane holds."""


@functools.cache
def _operand_order(registers: int, rows: int, runs: int) -> npt.NDArray[np.intp]:
    """Where the words of `operand_rows` are among those of the registers."""
    split = np.arange(registers * 64).reshape(runs, -1, 64 // rows, rows)
    return np.ascontiguousarray(split.transpose(3, 0, 2, 1)).reshape(rows, -1)


def operand_rows(registers: Words, rows: int, runs: int = 1) -> Words:
    """Words of A (or B transposed) in order of k, uint32 [rows, words], from registers [k, 64]."""
    return registers.reshape(-1).take(_operand_order(registers.shape[0], rows, runs))


@functools.cache
def _result_order(elements: int, columns: int) -> npt.NDArray[np.intp]:
    """Where what D's registers [k, 64] hold is in the matrix D."""
    tiles = np.arange(elements).reshape(-1, 64 // columns, 4, columns)
    return np.ascontiguousarray(tiles.transpose(0, 2, 1, 3)).reshape(-1, 64)


def accumulate(product: Doubles, c: Words) -> Words:
    """product + C as registers [k, 64]; C is registers [k, 64] or one constant for all elements."""
    placed = product.reshape(-1).take(_result_order(product.size, product.shape[1]))
    addend = c.view(np.float32)
    total = placed + (addend if addend.size > 1 else float(addend.item()))
    return total.astype(np.float32).view(np.uint32)


def multiply(size: int, a: Words, b: Words, c: Words, a_format: str, b_format: str) -> Words:
    """D of an MFMA on one format's layout with M = N = `size`, as registers [k, 64]."""
    left = DECODERS[a_format](operand_rows(a, size))
    right = DECODERS[b_format](operand_rows(b, size))
    return accumulate(left @ right.T, c)


def f8f6f4_values(size: int, registers: Words, name: str) -> Doubles:
    """A (or B transposed) of *_f8f6f4, [size, k], from registers in the format `name`."""
    return DECODERS[name](operand_rows(registers, size, F8F6F4_RUNS[name]))


def scale_codes(register: Words, op_sel: int, op_sel_hi: int, bit: int) -> formats.Bytes:
    """The E8M0 codes [64] that a scale operand gives: byte op_sel[bit] + 2 * op_sel_hi[bit] of each
    lane.

    An operand of one element is an inline constant. Integers -16 .. 64 count as their 32 bits;
    floats give their exponent field whatever op_sel says ("floats, using only the exponent
    portion", CDNA4 ISA 7.2.1).
    """
    byte = (op_sel >> bit & 1) + 2 * (op_sel_hi >> bit & 1)
    if register.size == 1:
        bits = int(register.item())
        is_integer = bits <= 64 or bits >= 2**32 - 16
        code = bits >> 8 * byte & 0xFF if is_integer else bits >> 23 & 0xFF
        return np.full(64, code, np.uint8)
    return np.ascontiguousarray(register).view(np.uint8).ravel()[byte::4]


def _scaled(values: Doubles, codes: formats.Bytes) -> Doubles:
    rows = values.shape[0]
    factors = formats.E8M0_F64.take(codes).reshape(-1, rows).T
    return (values.reshape(rows, -1, 32) * factors[:, :, np.newaxis]).reshape(rows, -1)


def _f8f6f4_format(field: str, code: int) -> str:
    if code not in F8F6F4_FORMATS:
        known = ", ".join(f"{name} ({c})" for c, name in F8F6F4_FORMATS.items())
        raise NotImplementedError(f"{field} {code}: only {known} matrices are modelled")
    return F8F6F4_FORMATS[code]


# The table ---------------------------------------------------------------------------------------


def _dense(size: int, a_format: str, b_format: str) -> Matrix:
    def function(a: Words, b: Words, c: Words) -> Words:
        return multiply(size, a, b, c, a_format, b_format)

    return Matrix(function)


def _f8f6f4(size: int) -> Matrix:
    def function(a: Words, b: Words, c: Words, cbsz: int = 0, blgp: int = 0) -> Words:
        left = f8f6f4_values(size, a, _f8f6f4_format("cbsz", cbsz))
        right = f8f6f4_values(size, b, _f8f6f4_format("blgp", blgp))
        return accumulate(left @ right.T, c)

    return Matrix(function, modifiers=("cbsz", "blgp"))


def _scaled_f8f6f4(size: int) -> Matrix:
    def function(
        a: Words,
        b: Words,
        c: Words,
        scale_a: Words,
        scale_b: Words,
        op_sel: int = 0,
        op_sel_hi: int = 0,
        cbsz: int = 0,
        blgp: int = 0,
    ) -> Words:
        left = f8f6f4_values(size, a, _f8f6f4_format("cbsz", cbsz))
        right = f8f6f4_values(size, b, _f8f6f4_format("blgp", blgp))
        left = _scaled(left, scale_codes(scale_a, op_sel, op_sel_hi, 0))
        right = _scaled(right, scale_codes(scale_b, op_sel, op_sel_hi, 1))
        return accumulate(left @ right.T, c)

    return Matrix(function, modifiers=("op_sel", "op_sel_hi", "cbsz", "blgp"), scaled=True)


INSTRUCTIONS: dict[str, Matrix] = {
    "v_mfma_f32_16x16x4_f32": _dense(16, "f32", "f32"),
    "v_mfma_f32_32x32x2_f32": _dense(32, "f32", "f32"),
    **{
        f"v_mfma_f32_{shape}_{kind}": _dense(size, kind, kind)
        for size, shapes in ((16, ("16x16x16", "16x16x32")), (32, ("32x32x8", "32x32x16")))
        for shape in shapes
        for kind in ("f16", "bf16")
    },
    **{
        f"v_mfma_f32_{shape}_{a}_{b}": _dense(size, a, b)
        for size, shape in ((16, "16x16x32"), (32, "32x32x16"))
        for a in ("fp8", "bf8")
        for b in ("fp8", "bf8")
    },
    "v_mfma_f32_16x16x128_f8f6f4": _f8f6f4(16),
    "v_mfma_f32_32x32x64_f8f6f4": _f8f6f4(32),
    "v_mfma_scale_f32_16x16x128_f8f6f4": _scaled_f8f6f4(16),
    "v_mfma_scale_f32_32x32x64_f8f6f4": _scaled_f8f6f4(32),
}
