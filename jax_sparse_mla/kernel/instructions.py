"""The gfx950 instructions and control flow that FlyDSL's stable interface does not offer.

One function an instruction, so that a FlyDSL release that moves one of these breaks this file
alone. Everything here takes and gives FlyDSL values (``fx.Int32``, ``fx.Float32``, ``fx.Vector``);
MLIR values stay inside. Lane layouts are stated beside the instruction that fixes them, with lane
``l`` written as ``t = l % 16`` and ``g = l // 16``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import arith, llvm, rocdl, scf
from flydsl.expr.typing import Vector

Value = Any
"""A FlyDSL value; FlyDSL's classes are not typed."""


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _vector(count: int, element: ir.Type) -> ir.Type:
    return ir.VectorType.get([count], element)


def raw(value: Value) -> ir.Value:
    """The MLIR value behind a FlyDSL value."""
    return value.ir_value() if hasattr(value, "ir_value") else value


def _struct_member(struct: ir.Value, index: int) -> ir.Value:
    return llvm.extractvalue(_i32(), struct, [index])


# Control flow -------------------------------------------------------------------------------------


def when(
    condition: Value, then: Callable[[], Sequence[Value]], otherwise: Sequence[Value] | None
) -> list[Value]:
    """``then()`` where the wave-uniform ``condition`` holds, else ``otherwise``.

    ``otherwise`` None leaves the results undefined, so that no instruction is spent on them.
    """
    template: list[Value] = []
    # The result types are known only once the body is traced: trace it in a detached block first.
    probe = scf.IfOp(raw(condition), [], has_else=False)
    with ir.InsertionPoint(probe.then_block):
        template = list(then())
        types = [raw(value).type for value in template]
        scf.YieldOp([])
    branch = scf.IfOp(raw(condition), types, has_else=True)
    for operation in list(probe.then_block.operations)[:-1]:
        operation.detach_from_parent()
        branch.then_block.append(operation)
    with ir.InsertionPoint(branch.then_block):
        scf.YieldOp([raw(value) for value in template])
    with ir.InsertionPoint(branch.else_block):
        if otherwise is None:
            scf.YieldOp([llvm.mlir_poison(kind) for kind in types])
        else:
            scf.YieldOp([raw(value) for value in otherwise])
    probe.operation.erase()
    return [_like(new, old) for new, old in zip(branch.results, template, strict=True)]


def loop(
    count: Value, initial: Sequence[Value], body: Callable[[Value, list[Value]], Sequence[Value]]
) -> list[Value]:
    """``state = body(i, state)`` for i in 0 .. count - 1, count wave-uniform."""
    zero, one = (raw(fx.Int32(constant)) for constant in (0, 1))
    operation = scf.ForOp(zero, raw(count), one, [raw(value) for value in initial])
    with ir.InsertionPoint(operation.body):
        state = [
            _like(new, old)
            for new, old in zip(list(operation.inner_iter_args), initial, strict=True)
        ]
        result = body(fx.Int32(operation.induction_variable), state)
        scf.YieldOp([raw(value) for value in result])
    return [_like(new, old) for new, old in zip(operation.results, initial, strict=True)]


def repeat_while(
    initial: Sequence[Value],
    condition: Callable[[list[Value]], Value],
    body: Callable[[list[Value]], Sequence[Value]],
) -> list[Value]:
    """``while condition(state): state = body(state)``, the condition wave-uniform."""
    types = [raw(value).type for value in initial]
    operation = scf.WhileOp(types, [raw(value) for value in initial])
    before = operation.before.blocks.append(*types)
    after = operation.after.blocks.append(*types)
    with ir.InsertionPoint(before):
        state = [_like(new, old) for new, old in zip(before.arguments, initial, strict=True)]
        scf.ConditionOp(raw(condition(state)), list(before.arguments))
    with ir.InsertionPoint(after):
        state = [_like(new, old) for new, old in zip(after.arguments, initial, strict=True)]
        scf.YieldOp([raw(value) for value in body(state)])
    return [_like(new, old) for new, old in zip(operation.results, initial, strict=True)]


def _like(value: ir.Value, template: Value) -> Value:
    if isinstance(template, Vector):
        return Vector(value, template.shape, template.dtype)
    return type(template)(value)


def poison(template: Value) -> Value:
    """An undefined value of ``template``'s type."""
    return _like(llvm.mlir_poison(raw(template).type), template)


def opaque(value: Value) -> Value:
    """``value``, but the compiler can't see through it: keeps a cheap sum from being hoisted."""
    kind = raw(value).type
    return _like(llvm.inline_asm(kind, [raw(value)], "", "=v,0", has_side_effects=True), value)


def opaque_scalar(value: Value) -> Value:
    """The same of a wave-uniform value, in scalar registers."""
    kind = raw(value).type
    return _like(llvm.inline_asm(kind, [raw(value)], "", "=s,0", has_side_effects=True), value)


# Order --------------------------------------------------------------------------------------------


def _compiler_fence() -> None:
    llvm.inline_asm(None, [], "", "~{memory}", has_side_effects=True)


def barrier() -> None:
    """Wait for this wave's LDS accesses, then for the other waves of the workgroup.

    Loads from global memory stay in flight across it, which ``gpu.barrier`` does not allow.
    """
    _compiler_fence()
    fx.rocdl.s_waitcnt(lgkmcnt=0)
    rocdl.s_barrier()
    _compiler_fence()


def schedule_fence() -> None:
    """No instruction is moved across this point."""
    fx.rocdl.sched_barrier(0)


# Memory -------------------------------------------------------------------------------------------


def _pointer(address: Value, space: int, offset: int) -> ir.Value:
    kind = ir.Type.parse(f"!llvm.ptr<{space}>")
    pointer = llvm.inttoptr(kind, raw(address))
    if offset == 0:
        return pointer
    byte = ir.IntegerType.get_signless(8)
    flags = llvm.GEPNoWrapFlags.none
    return llvm.getelementptr(kind, pointer, [], [offset], byte, flags)


def _load(address: Value, space: int, words: int, offset: int, align: int, **kw: Any) -> Value:
    kind = _i32() if words == 1 else _vector(words, _i32())
    value = llvm.load(kind, _pointer(address, space, offset), alignment=align, **kw)
    return fx.Int32(value) if words == 1 else Vector(value, (words,), fx.Int32)


def global_load(address: Value, words: int, offset: int = 0) -> Value:
    """``words`` (1 or 4) dwords at the 64-bit ``address`` + ``offset``."""
    return _load(address, 1, words, offset, 4 * words)


def global_load_constant(address: Value) -> Value:
    """One dword at a wave-uniform 64-bit ``address`` that nothing writes meanwhile."""
    return _load(address, 1, 1, 0, 4, invariant=True)


def global_store(address: Value, value: Value, offset: int = 0, align: int = 4) -> None:
    """Store ``value`` at the 64-bit ``address`` + ``offset``."""
    llvm.store(raw(value), _pointer(address, 1, offset), alignment=align)


def lds_load(address: Value, words: int, offset: int = 0) -> Value:
    """``words`` (1, 2 or 4) dwords of LDS."""
    return _load(address, 3, words, offset, 4 * words)


def lds_store(address: Value, value: Value, words: int, offset: int = 0) -> None:
    """Store ``words`` (1, 2 or 4) dwords to LDS."""
    llvm.store(raw(value), _pointer(address, 3, offset), alignment=4 * words)


def lds_store_byte(address: Value, value: Value) -> None:
    """Store the lowest byte of an int32 to LDS."""
    byte = llvm.trunc(ir.IntegerType.get_signless(8), raw(value), llvm.IntegerOverflowFlags.none)
    llvm.store(byte, _pointer(address, 3, 0), alignment=1)


def lds_read_transposed(address: Value, offset: int = 0) -> Value:
    """``ds_read_b64_tr_b8``: two dwords, bytes exchanged inside each 16 lanes.

    Lane i of a group of 16 fetches 8 bytes at its own address; result byte j of lane t is byte
    ``t % 8`` of what lane ``2j + t // 8`` fetched. Lanes 2j and 2j + 1 therefore fetch the two
    halves of entry j's 16 columns, and lane t receives column t of eight entries.
    """
    kind = _vector(2, _i32())
    value = rocdl.ds_read_tr8_b64_(kind, _pointer(address, 3, offset))
    return Vector(value, (2,), fx.Int32)


class BoundedWords:
    """int32 words in global memory behind a bounds-checked descriptor: reads past it give 0."""

    def __init__(self, address: Value, num_bytes: Value) -> None:
        pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), raw(address))
        stride = arith.constant(ir.IntegerType.get_signless(16), 0)
        # Word 3 of a gfx9 descriptor: 32-bit untyped data.
        flags = arith.constant(_i32(), 0x27000)
        self._resource = rocdl.make_buffer_rsrc(
            ir.Type.parse("!llvm.ptr<8>"), pointer, stride, raw(num_bytes), flags
        )

    def load(self, offset: Value, uniform_offset: Value, words: int = 1) -> Value:
        """1 or 4 words at byte ``offset`` + ``uniform_offset``; both at least 0."""
        kind = _i32() if words == 1 else _vector(words, _i32())
        value = fx.rocdl.raw_ptr_buffer_load(
            kind, self._resource, raw(offset), raw(uniform_offset), aux=0
        )
        return fx.Int32(value) if words == 1 else Vector(value, (words,), fx.Int32)


# Lanes --------------------------------------------------------------------------------------------


def first_lane(value: Value) -> Value:
    """``value`` as a wave-uniform scalar, taken from the first lane."""
    return type(value)(fx.rocdl.readfirstlane(raw(value).type, raw(value)))


def read_lane(value: Value, lane: Value) -> Value:
    """``value`` of one lane as a wave-uniform scalar."""
    return type(value)(rocdl.readlane(raw(value).type, raw(value), raw(lane)))


def ballot(condition: Value) -> Value:
    """Bit l of the result is lane l's ``condition``."""
    return fx.Uint64(rocdl.ballot(ir.IntegerType.get_signless(64), raw(condition)))


def lane_condition(mask: Value) -> Value:
    """What ``ballot`` was given, back from its result."""
    kind, name = ir.IntegerType.get_signless(1), "llvm.amdgcn.inverse.ballot.i64"
    return fx.Boolean(llvm.call_intrinsic(kind, name, [raw(mask)], [], []))


def highest_bit(mask: Value) -> Value:
    """The position of the highest set bit of a 64-bit mask that is not 0."""
    kind = ir.IntegerType.get_signless(64)
    never_zero = raw(fx.Boolean(True))
    zeros = llvm.call_intrinsic(kind, "llvm.ctlz.i64", [raw(mask), never_zero], [], [])
    return fx.Int32(63) - fx.Int32(fx.Uint64(zeros))


def lane_number() -> Value:
    """0 .. 63, from ``v_mbcnt``: worked out anew, so that no register keeps it across a loop."""
    code = "v_mbcnt_lo_u32_b32 $0, -1, 0\n\tv_mbcnt_hi_u32_b32 $0, -1, $0"
    return fx.Int32(llvm.inline_asm(_i32(), [], code, "=&v", has_side_effects=True))


def broadcast_in_row(value: Value, lane: int) -> Value:
    """DPP row_newbcast: every lane of a group of 16 gets ``value`` of the group's lane ``lane``."""
    row_newbcast = 0x150
    source = raw(value)
    result = rocdl.update_dpp(
        source.type, llvm.mlir_poison(source.type), source, row_newbcast + lane, 15, 15, True
    )
    return type(value)(result)


def broadcast_in_quad(value: Value, lane: int) -> Value:
    """DPP quad_perm: every lane of a group of four gets ``value`` of the group's lane ``lane``.

    With one user, a multiplication or fma of floats, it becomes part of that instruction.
    """
    source = raw(value)
    result = rocdl.update_dpp(
        source.type, llvm.mlir_poison(source.type), source, 0x55 * lane, 15, 15, True
    )
    return type(value)(result)


def row_maximum(value: Value) -> Value:
    """The largest of a group of 16 lanes' int32, unsigned, in all of them; by DPP."""
    quad_1032, quad_2301, row_half_mirror, row_mirror = 0xB1, 0x4E, 0x141, 0x140
    result = raw(value)
    for control in (quad_1032, quad_2301, row_half_mirror, row_mirror):
        poison_value = llvm.mlir_poison(result.type)
        other = rocdl.update_dpp(result.type, poison_value, result, control, 15, 15, True)
        result = arith.maxui(other, result)
    return fx.Int32(result)


def _swap(kind: Callable[..., ir.Value], first: Value, second: Value) -> tuple[Value, Value]:
    pair = ir.Type.parse("!llvm.struct<(i32, i32)>")
    words = [raw(value.bitcast(fx.Int32)) for value in (first, second)]
    result = kind(pair, words[0], words[1], False, False)
    swapped = [fx.Int32(_struct_member(result, index)) for index in (0, 1)]
    return swapped[0].bitcast(type(first)), swapped[1].bitcast(type(second))


def swap_rows_16(first: Value, second: Value) -> tuple[Value, Value]:
    """``v_permlane16_swap``: lanes g = 1, 3 of ``first`` change places with g = 0, 2 of ``second``.

    Seen by lane group, (a0 a1 a2 a3), (b0 b1 b2 b3) become (a0 b0 a2 b2), (a1 b1 a3 b3).
    """
    return _swap(rocdl.permlane16_swap, first, second)


def swap_rows_32(first: Value, second: Value) -> tuple[Value, Value]:
    """``v_permlane32_swap``: lanes g = 2, 3 of ``first`` change places with g = 0, 1 of ``second``.

    Seen by lane group, (a0 a1 a2 a3), (b0 b1 b2 b3) become (a0 a1 b0 b1), (a2 a3 b2 b3).
    """
    return _swap(rocdl.permlane32_swap, first, second)


# Arithmetic ---------------------------------------------------------------------------------------


def _unary(name: str, value: Value) -> Value:
    return fx.Float32(llvm.call_intrinsic(ir.F32Type.get(), name, [raw(value)], [], []))


def exp2(value: Value) -> Value:
    """``v_exp_f32``, about 1 ulp."""
    return _unary("llvm.amdgcn.exp2.f32", value)


def log2(value: Value) -> Value:
    """``v_log_f32``, about 1 ulp."""
    return _unary("llvm.amdgcn.log.f32", value)


def reciprocal(value: Value) -> Value:
    """``v_rcp_f32``, about 1 ulp."""
    return _unary("llvm.amdgcn.rcp.f32", value)


def ceiling(value: Value) -> Value:
    """``v_ceil_f32``."""
    return _unary("llvm.ceil.f32", value)


def to_integer(value: Value) -> Value:
    """``v_cvt_i32_f32`` of a value in range; NaN gives 0."""
    result = llvm.call_intrinsic(_i32(), "llvm.fptosi.sat.i32.f32", [raw(value)], [], [])
    return fx.Int32(result)


def ldexp(value: Value, exponent: Value) -> Value:
    """``value * 2**exponent``."""
    kind = ir.F32Type.get()
    operands = [raw(value), raw(exponent)]
    return fx.Float32(llvm.call_intrinsic(kind, "llvm.ldexp.f32.i32", operands, [], []))


def clamp(value: Value, low: float, high: float) -> Value:
    """``v_med3_f32``: the value held within ``low`` .. ``high``; NaN gives ``low``."""
    operands = [raw(value), raw(fx.Float32(low)), raw(fx.Float32(high))]
    kind = ir.F32Type.get()
    return fx.Float32(llvm.call_intrinsic(kind, "llvm.amdgcn.fmed3.f32", operands, [], []))


def maximum(*values: Value) -> Value:
    """The largest, NaN where one is NaN; the compiler joins two into ``v_maximum3_f32``."""
    result = values[0]
    for value in values[1:]:
        result = fx.Float32(arith.maximumf(raw(result), raw(value)))
    return result


def shift_right(value: Value, bits: Value | int) -> Value:
    """Logical shift of an int32."""
    return fx.Int32(fx.Uint32(value) >> fx.Uint32(bits))


def minimum_unsigned(first: Value, second: Value) -> Value:
    """``v_min_u32`` of int32 bits."""
    return fx.Int32(arith.minui(raw(first), raw(second)))


def rotate_right(value: Value, bits: Value | int) -> Value:
    """``v_alignbit_b32`` of a number with itself."""
    operands = [raw(value), raw(value), raw(fx.Int32(bits))]
    return fx.Int32(llvm.call_intrinsic(_i32(), "llvm.fshr.i32", operands, [], []))


def fma(a: Value, b: Value, c: Value) -> Value:
    """``a * b + c`` rounded once, of floats or vectors of floats."""
    name = f"llvm.fma.v{a.numel}f32" if isinstance(a, Vector) else "llvm.fma.f32"
    return _like(llvm.call_intrinsic(raw(a).type, name, [raw(a), raw(b), raw(c)], [], []), a)


# Conversion ---------------------------------------------------------------------------------------


def to_fp8(pairs: Sequence[Value], scale: Value) -> Value:
    """``v_cvt_scalef32_pk_fp8_f32``: two pairs of floats as the e4m3 bytes of one dword.

    They are divided by the power of two in ``scale``, to at most 448, and rounded to nearest even.
    """
    kind = _pair_of_int16()
    word = llvm.mlir_poison(kind)
    for half, pair in zip((False, True), pairs, strict=True):
        word = rocdl.cvt_scalef32_pk_fp8_f32(
            kind, word, raw(pair[0]), raw(pair[1]), raw(scale), half
        )
    return fx.Int32(llvm.bitcast(_i32(), word))


def from_fp8(word: Value, scale: Value) -> list[Value]:
    """``v_cvt_scalef32_pk_f32_fp8``: the e4m3 bytes of a dword as two pairs of floats.

    They are multiplied by the power of two in ``scale``."""
    kind = _vector(2, ir.F32Type.get())
    return [
        Vector(rocdl.cvt_scalef32_pk_f32_fp8(kind, raw(word), raw(scale), half), (2,), fx.Float32)
        for half in (False, True)
    ]


def to_fp4(pairs: Sequence[Value], scale: Value) -> Value:
    """``v_cvt_scalef32_pk_fp4_f32``: four pairs of floats as the e2m1 nibbles of one dword.

    They are divided by the power of two in ``scale``, to at most 6, and rounded to nearest even.
    """
    word = llvm.mlir_poison(_i32())
    for byte, pair in enumerate(pairs):
        word = rocdl.cvt_scalef32_pk_fp4_f32(
            _i32(), word, raw(pair[0]), raw(pair[1]), raw(scale), byte
        )
    return fx.Int32(word)


def to_bf16(values: Sequence[Value]) -> Value:
    """``v_cvt_pk_bf16_f32``: floats as dwords of two bfloat16, rounded to nearest even."""
    narrow = Vector.from_elements(list(values), fx.Float32).to(fx.BFloat16)
    words = len(values) // 2
    return Vector(llvm.bitcast(_vector(words, _i32()), raw(narrow)), (words,), fx.Int32)


def _pair_of_int16() -> ir.Type:
    return _vector(2, ir.IntegerType.get_signless(16))


# Matrices -----------------------------------------------------------------------------------------


def mfma_fp8(
    a: Value,
    b: Value,
    c: Value,
    scale_a: Value,
    scale_b: Value,
    *,
    byte_a: int = 0,
    byte_b: int = 0,
) -> Value:
    """``v_mfma_scale_f32_16x16x128_f8f6f4``: D = sum A B 2^(scale_a + scale_b - 254) + C.

    A is e4m3, 8 dwords a lane, row m = t; bytes 0..15 are K = 16g + j, the others K = 64 + 16g + j.
    B of 8 dwords is the same with column n = t; of 4 dwords it is e2m1, nibble j is K = 32g + j.
    Lane (t, g) supplies, in bytes ``byte_a`` and ``byte_b`` of the two scales, the E8M0 scale of
    row (or column) t for K = 32g .. 32g + 31: an e4m3 lane's bytes 0..15 are scaled by lane group
    g // 2, bytes 16..31 by group 2 + g // 2. C and D: register r of lane (t, g) is row 4g + r,
    column t.
    """
    kind = _vector(4, ir.F32Type.get())
    format_a, format_b = (
        ir.Attribute.parse(f"#rocdl<matrix_format {name}>")
        for name in ("fp8_e4m3", "fp8_e4m3" if b.numel == 8 else "fp4_e2m1")
    )
    result = rocdl.mfma_scale_f32_16x16x128_f8f6f4_(
        kind,
        raw(a),
        raw(b),
        raw(c),
        format_a,
        format_b,
        byte_a,
        raw(scale_a),
        byte_b,
        raw(scale_b),
    )
    return Vector(result, (4,), fx.Float32)


def _no_permutation() -> ir.Attribute:
    return ir.Attribute.parse("#rocdl<mfma_perm_b none>")


def mfma_bf16(a: Value, b: Value, c: Value) -> Value:
    """``v_mfma_f32_16x16x32_bf16``: A and B are 4 dwords a lane, row (column) t, K = 8g + j."""
    kind = _vector(4, ir.F32Type.get())
    bf16 = _vector(8, ir.BF16Type.get())
    operands = [llvm.bitcast(bf16, raw(value)) for value in (a, b)]
    result = rocdl.mfma_f32_16x16x32_bf16_(kind, *operands, raw(c), 0, 0, _no_permutation())
    return Vector(result, (4,), fx.Float32)


def mfma_f32(a: Value, b: Value, c: Value) -> Value:
    """``v_mfma_f32_16x16x4_f32``: A and B are one float a lane, row (column) t, K = g."""
    kind = _vector(4, ir.F32Type.get())
    result = rocdl.mfma_f32_16x16x4f32_(kind, raw(a), raw(b), raw(c), 0, 0, _no_permutation())
    return Vector(result, (4,), fx.Float32)
