"""Vector ALU on floats: the table; what NumPy alone does not do is in `floats`.

Source: the pseudocode of the CDNA4 ISA, chapter 12 (VOP1, VOP2, VOP3, VOP3P).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from gfx950_sim.isa import floats
from gfx950_sim.isa.integer import swapped
from gfx950_sim.isa.records import Valu

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]


def mul_legacy(a: Array, b: Array) -> Array:
    """0 times anything is 0."""
    return np.where((a == 0) | (b == 0), np.float32(0), a * b)


def bf16_halves(a: Array) -> tuple[Array, Array]:
    return (a << np.uint32(16)).view(np.float32), (a & np.uint32(0xFFFF0000)).view(np.float32)


def f16_halves(a: Array) -> tuple[Array, Array]:
    return tuple(
        (a >> np.uint32(s)).astype(np.uint16).view(np.float16).astype(np.float32) for s in (0, 16)
    )  # type: ignore[return-value]


def dot2(halves: Function) -> Function:
    def function(a: Array, b: Array, c: Array) -> Array:
        (a0, a1), (b0, b1) = halves(a), halves(b)
        return a0 * b0 + a1 * b1 + c

    return function


def dot2_accumulate(halves: Function) -> Function:
    return lambda a, b, old: dot2(halves)(a, b, old.view(np.float32))


def fma_mix(
    a: Array, b: Array, c: Array, op_sel: int, op_sel_hi: int, neg: int, neg_hi: int
) -> Array:
    """fma of f32, or of the f16 half op_sel where op_sel_hi is set; neg_hi takes the absolute
    value."""

    def source(x: Array, i: int) -> Array:
        if op_sel_hi >> i & 1:
            half = (x >> np.uint32(16 * (op_sel >> i & 1))).astype(np.uint16)
            value = half.view(np.float16).astype(np.float32)
        else:
            value = x.view(np.float32)
        value = np.abs(value) if neg_hi >> i & 1 else value
        return -value if neg >> i & 1 else value

    return floats.fma_f32(source(a, 0), source(b, 1), source(c, 2))


def fma_mix_half(shift: int) -> Function:
    """`fma_mix` rounded to f16, in one half of the destination; the other is kept."""

    def function(a: Array, b: Array, c: Array, old: Array, **modifiers: int) -> Array:
        value = fma_mix(a, b, c, **modifiers).astype(np.float16).view(np.uint16)
        keep = np.uint32(0xFFFF << (16 - shift))
        return old & keep | value.astype(np.uint32) << np.uint32(shift)

    return function


# Tables ------------------------------------------------------------------------------------------

_U2, _U3 = ("u32",) * 2, ("u32",) * 3
_F2, _F3 = ("f32",) * 2, ("f32",) * 3

INSTRUCTIONS: dict[str, Valu] = {
    "v_add_f32": Valu(np.add, "f32", _F2),
    "v_sub_f32": Valu(np.subtract, "f32", _F2),
    "v_subrev_f32": Valu(swapped(np.subtract), "f32", _F2),
    "v_mul_f32": Valu(np.multiply, "f32", _F2),
    "v_mul_legacy_f32": Valu(mul_legacy, "f32", _F2),
    "v_fma_f32": Valu(floats.fma_f32, "f32", _F3),
    "v_fmac_f32": Valu(lambda a, b, old: floats.fma_f32(a, b, old), "f32", _F2, reads_dst=True),
    "v_fmaak_f32": Valu(floats.fma_f32, "f32", _F3),
    "v_fmamk_f32": Valu(lambda a, b, k: floats.fma_f32(a, k, b), "f32", _F3),
    "v_max_f32": Valu(floats.max_f32, "f32", _F2),
    "v_min_f32": Valu(floats.min_f32, "f32", _F2),
    "v_max3_f32": Valu(floats.max3_f32, "f32", _F3),
    "v_min3_f32": Valu(floats.min3_f32, "f32", _F3),
    "v_med3_f32": Valu(floats.med3_f32, "f32", _F3),
    "v_maximum3_f32": Valu(
        lambda a, b, c: floats.maximum_f32(floats.maximum_f32(a, b), c), "f32", _F3
    ),
    "v_minimum3_f32": Valu(
        lambda a, b, c: floats.minimum_f32(floats.minimum_f32(a, b), c), "f32", _F3
    ),
    "v_ldexp_f32": Valu(floats.ldexp_f32, "f32", ("f32", "i32")),
    "v_frexp_exp_i32_f32": Valu(floats.frexp_exp_f32, "i32", ("f32",)),
    "v_frexp_mant_f32": Valu(floats.frexp_mant_f32, "f32", ("f32",)),
    "v_fract_f32": Valu(lambda a: a - np.floor(a), "f32", ("f32",)),
    "v_trunc_f32": Valu(np.trunc, "f32", ("f32",)),
    "v_ceil_f32": Valu(np.ceil, "f32", ("f32",)),
    "v_floor_f32": Valu(np.floor, "f32", ("f32",)),
    "v_rndne_f32": Valu(np.rint, "f32", ("f32",)),
    "v_exp_f32": Valu(floats.transcendental(np.exp2), "f32", ("f32",)),
    "v_log_f32": Valu(floats.transcendental(np.log2), "f32", ("f32",)),
    "v_rcp_f32": Valu(floats.transcendental(np.reciprocal), "f32", ("f32",)),
    "v_rcp_iflag_f32": Valu(floats.transcendental(np.reciprocal), "f32", ("f32",)),
    "v_sqrt_f32": Valu(floats.transcendental(np.sqrt), "f32", ("f32",)),
    "v_rsq_f32": Valu(floats.transcendental(lambda a: 1.0 / np.sqrt(a)), "f32", ("f32",)),
    # The argument counts turns.
    "v_sin_f32": Valu(floats.transcendental(lambda a: np.sin(2 * np.pi * a)), "f32", ("f32",)),
    "v_cos_f32": Valu(floats.transcendental(lambda a: np.cos(2 * np.pi * a)), "f32", ("f32",)),
    "v_div_scale_f32": Valu(floats.div_scale_f32, "f32", _F3, extra="mask"),
    "v_div_fmas_f32": Valu(floats.div_fmas_f32, "f32", (*_F3, "mask")),
    "v_div_fixup_f32": Valu(floats.div_fixup_f32, "f32", _F3),
    "v_pk_add_f32": Valu(np.add, "f32x2", ("f32x2", "f32x2"), packed=True),
    "v_pk_mul_f32": Valu(np.multiply, "f32x2", ("f32x2", "f32x2"), packed=True),
    "v_pk_fma_f32": Valu(floats.fma_f32, "f32x2", ("f32x2",) * 3, packed=True),
    "v_add_f16": Valu(np.add, "f16", ("f16", "f16")),
    "v_sub_f16": Valu(np.subtract, "f16", ("f16", "f16")),
    "v_mul_f16": Valu(np.multiply, "f16", ("f16", "f16")),
    "v_fma_f16": Valu(floats.fma_f16, "f16", ("f16",) * 3),
    "v_pk_add_f16": Valu(np.add, "f16x2", ("f16x2",) * 2, packed=True),
    "v_pk_mul_f16": Valu(np.multiply, "f16x2", ("f16x2",) * 2, packed=True),
    "v_pk_fma_f16": Valu(floats.fma_f16, "f16x2", ("f16x2",) * 3, packed=True),
    "v_fma_mix_f32": Valu(fma_mix, "f32", _U3, ("op_sel", "op_sel_hi", "neg", "neg_hi")),
    **{
        f"v_fma_mix{half}_f16": Valu(
            fma_mix_half(shift),
            "u32",
            _U3,
            ("op_sel", "op_sel_hi", "neg", "neg_hi"),
            reads_dst=True,
        )
        for half, shift in (("lo", 0), ("hi", 16))
    },
    "v_dot2_f32_f16": Valu(dot2(f16_halves), "f32", ("u32", "u32", "f32")),
    "v_dot2_f32_bf16": Valu(dot2(bf16_halves), "f32", ("u32", "u32", "f32")),
    "v_dot2c_f32_f16": Valu(dot2_accumulate(f16_halves), "f32", _U2, reads_dst=True),
    "v_dot2c_f32_bf16": Valu(dot2_accumulate(bf16_halves), "f32", _U2, reads_dst=True),
    "v_add_f64": Valu(np.add, "f64", ("f64", "f64")),
    "v_mul_f64": Valu(np.multiply, "f64", ("f64", "f64")),
}
