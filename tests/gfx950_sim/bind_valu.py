"""Closures of vector ALU instructions: operands, source and result modifiers, SDWA, DPP, EXEC."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gfx950_sim.decode import VCC, Instruction, Operand, UnknownInstruction
from gfx950_sim.isa.records import Valu
from gfx950_sim.operands import (
    DTYPES,
    Fetch,
    Store,
    as_rows,
    destination,
    dpp_source,
    dpp_writes,
    fetcher,
    mask_fetcher,
    mask_store,
    packed_view,
    rows_view,
    sdwa_source,
    split_type,
    view,
    wide_store,
    with_sign,
)
from gfx950_sim.program import check_modifiers, sources_of
from gfx950_sim.wave import EXEC_CHANGED, Closure, Wave

Array = np.ndarray[Any, Any]

_SDWA = {"src0_sel", "src1_sel", "dst_sel", "dst_unused", "src0_sext", "src1_sext"}
_SDWA_DPP_SIGNS = {"src0_neg", "src1_neg", "src0_abs", "src1_abs"}
_DPP = {"dpp", "row_mask", "bank_mask", "bc"}


def bind_valu(wave: Wave, instruction: Instruction, record: Valu) -> tuple[Closure, Closure]:
    """A vector ALU instruction: fetch sources, call the function, store what EXEC lets through."""
    is_dpp, is_sdwa = "DPP" in instruction.encoding, "SDWA" in instruction.encoding
    own = set(record.modifiers)
    allowed = own | {"abs", "neg", "clamp", "omod"}
    if is_sdwa:
        allowed |= _SDWA | _SDWA_DPP_SIGNS | {"sd"}
    if is_dpp:
        allowed |= _DPP | _SDWA_DPP_SIGNS
    if record.packed:
        allowed |= {"op_sel", "op_sel_hi", "neg_hi"}
    sixteen = any(t in ("f16", "u16", "i16") for t in (*record.src, record.dst))
    if sixteen and "op_sel" not in own:
        allowed.add("op_sel")
    if instruction.encoding == "VOP3P" and not record.packed:
        own_default = 7
        if "op_sel_hi" not in own:
            allowed.add("op_sel_hi")
    else:
        own_default = 0
    check_modifiers(instruction, allowed)
    if instruction.modifiers.get("omod"):
        raise UnknownInstruction(f"{instruction.text}: output multiplier (it needs denormals off)")

    fetches, views = _bind_sources(wave, instruction, record)
    defaults = {"op_sel_hi": own_default, "fp16_ovfl": wave.launch.fp16_ovfl}
    keywords = {m: instruction.modifiers.get(m, defaults.get(m, 0)) for m in record.modifiers}
    function: Callable[..., Any] = record.function
    if any(keywords.values()) or not isinstance(function, np.ufunc):
        function = partial(function, **keywords) if keywords else function
    if "clamp" in instruction.modifiers and "clamp" not in own:
        function = _clamped(function, record.dst, instruction)

    if record.dst == "mask":
        return _bind_compare(wave, instruction, function, fetches, views)
    vdst = instruction.operands["vdst"]
    rows = destination(wave, vdst, record.dst)
    typed = _typed(rows, record.dst)
    if is_sdwa and instruction.modifiers.get("dst_sel", 6) != 6:
        return _both(_bind_sdwa_store(wave, instruction, function, fetches, rows, record))
    if record.reads_dst:
        old = rows if split_type(record.dst)[1] > 1 else rows[0]
        old = old if typed is None else typed if "f" in record.dst else old
        inner = function
        function = lambda *sources: inner(*sources, old=old)  # noqa: E731
        views = views if views is not None else None
    if is_dpp:
        writable = dpp_writes(wave, instruction)

        def execute_dpp() -> None:
            result = as_rows(function(*[f() for f in fetches]), record.dst)
            lanes = writable()
            if lanes is None:
                rows[...] = result
            else:
                np.copyto(rows, result, where=lanes)

        return _both(execute_dpp)
    if record.extra is not None:
        return _bind_with_mask(wave, instruction, function, fetches, rows, record)
    if sixteen and "op_sel" not in own and instruction.modifiers.get("op_sel", 0) & 8:
        return _both(_bind_high_half(wave, function, fetches, rows, record))
    if typed is None:
        if rows.shape[0] == 2 and split_type(record.dst)[1] == 1:
            store = wide_store(rows, record.dst)
            full = partial(_give, function, fetches, store)
        else:
            full = partial(_store_rows, function, fetches, rows, record.dst)
        return (
            full,
            partial(_store_rows_where, function, fetches, rows, record.dst, wave.lanes),
        )
    if views is None:
        return (
            partial(_store_fetched, function, fetches, typed),
            partial(_store_fetched_where, function, fetches, typed, wave.lanes),
        )
    if isinstance(function, np.ufunc):
        return (
            partial(function, *views, out=typed),
            partial(function, *views, out=typed, where=wave.lanes),
        )
    return (
        partial(_store, function, views, typed),
        partial(_store_where, function, views, typed, wave.lanes),
    )


def _store(function: Callable[..., Any], views: list[Array], target: Array) -> None:
    target[...] = function(*views)


def _store_where(
    function: Callable[..., Any], views: list[Array], target: Array, lanes: Array
) -> None:
    np.copyto(target, function(*views), where=lanes, casting="unsafe")


def _store_fetched(function: Callable[..., Any], fetches: list[Fetch], target: Array) -> None:
    target[...] = function(*[f() for f in fetches])


def _store_fetched_where(
    function: Callable[..., Any], fetches: list[Fetch], target: Array, lanes: Array
) -> None:
    np.copyto(target, function(*[f() for f in fetches]), where=lanes, casting="unsafe")


def _give(function: Callable[..., Any], fetches: list[Fetch], store: Store) -> None:
    store(function(*[f() for f in fetches]))


def _store_rows(function: Callable[..., Any], fetches: list[Fetch], rows: Array, name: str) -> None:
    rows[...] = as_rows(function(*[f() for f in fetches]), name)


def _store_rows_where(
    function: Callable[..., Any], fetches: list[Fetch], rows: Array, name: str, lanes: Array
) -> None:
    np.copyto(rows, as_rows(function(*[f() for f in fetches]), name), where=lanes)


def _typed(rows: Array, name: str) -> Array | None:
    """A view of the destination with the result's own dtype and shape; None for 16- and 64-bit
    ones."""
    base, count = split_type(name)
    if DTYPES[base].itemsize != 4:
        return None
    typed: Array = rows.view(DTYPES[base])
    return typed if count > 1 else typed[0]


def _bind_sources(
    wave: Wave, instruction: Instruction, record: Valu
) -> tuple[list[Fetch], list[Array] | None]:
    """A fetch for each source; and views of all of them if none needs fetching."""
    modifiers = instruction.modifiers
    operands = sources_of(instruction)
    types = list(record.src)
    implicit_mask = len(types) == len(operands) + 1 and types[-1] == "mask"
    if len(types) != len(operands) + implicit_mask:
        raise UnknownInstruction(f"{instruction.text}: {len(operands)} sources, not {len(types)}")
    passed = set(record.modifiers)
    absolute = 0 if "abs" in passed else modifiers.get("abs", 0)
    negate = 0 if "neg" in passed else modifiers.get("neg", 0)
    for i in (0, 1):
        absolute |= modifiers.get(f"src{i}_abs", 0) << i
        negate |= modifiers.get(f"src{i}_neg", 0) << i
    fetches: list[Fetch] = []
    views: list[Array | None] = []
    for i, (operand, name) in enumerate(zip(operands, types, strict=False)):
        direct: Array | None = None
        if record.packed:
            direct = _packed_source(wave, operand, name, instruction, i)
            fetch = (lambda d: lambda: d)(direct)
            signs = [negate >> i & 1, modifiers.get("neg_hi", 0) >> i & 1]
            if any(signs):
                fetch, direct = _packed_sign(direct, signs), None
        elif "SDWA" in instruction.encoding and i < 2:
            select = modifiers.get(f"src{i}_sel", 6)
            fetch = sdwa_source(wave, operand, name, select, modifiers.get(f"src{i}_sext", 0))
        elif "DPP" in instruction.encoding and i == 0:
            bound = modifiers.get("bc", 0)
            fetch = dpp_source(wave, operand, name, modifiers.get("dpp", 0), bound)
        elif name == "mask":
            fetch = mask_fetcher(wave, operand.index)
        else:
            direct = view(wave, operand, name)
            high = name in ("f16", "u16", "i16") and "op_sel" not in passed
            if high and modifiers.get("op_sel", 0) >> i & 1:
                if operand.kind not in ("vgpr", "sgpr"):
                    raise UnknownInstruction(f"{instruction.text}: op_sel of a constant")
                whole = rows_view(wave, operand)[0].view(DTYPES[name])
                direct = whole[1::2]
            fetch = (
                fetcher(wave, operand, name) if direct is None else (lambda d: lambda: d)(direct)
            )
        if not record.packed and (absolute >> i & 1 or negate >> i & 1):
            fetch = with_sign(fetch, direct, absolute >> i & 1, negate >> i & 1)
            direct = None
        fetches.append(fetch)
        views.append(direct)
    if implicit_mask:
        fetches.append(mask_fetcher(wave, VCC))
        views.append(None)
    if any(v is None for v in views):
        return fetches, None
    return fetches, [v for v in views if v is not None]


def _packed_source(
    wave: Wave, operand: Operand, name: str, instruction: Instruction, i: int
) -> Array:
    low = instruction.modifiers.get("op_sel", 0) >> i & 1
    high = instruction.modifiers.get("op_sel_hi", 7) >> i & 1
    return packed_view(wave, operand, name, low, high)


def _packed_sign(direct: Array, signs: list[int]) -> Fetch:
    kind = np.dtype(f"u{direct.itemsize}")
    flip = np.array(signs, kind)[:, np.newaxis] << kind.type(8 * direct.itemsize - 1)
    bits, dtype = direct.view(kind), direct.dtype
    return lambda: (bits ^ flip).view(dtype)


def _clamped(
    function: Callable[..., Any], name: str, instruction: Instruction
) -> Callable[..., Any]:
    """CLAMP of a float result: to [0, 1], NaN to 0 (DX10_CLAMP)."""
    if split_type(name)[0] not in ("f16", "f32"):
        raise UnknownInstruction(f"clamp of {instruction.text} is not modelled")

    def clamped(*sources: Array) -> Array:
        return np.fmin(np.fmax(function(*sources), 0), 1)

    return clamped


def _bind_compare(
    wave: Wave,
    instruction: Instruction,
    function: Callable[..., Any],
    fetches: list[Fetch],
    views: list[Array] | None,
) -> tuple[Closure, Closure]:
    """v_cmp: a lane mask to VCC or a scalar pair; v_cmpx: to EXEC as well."""
    target = instruction.operands.get("vdst") or instruction.operands.get("sdst")
    if "SDWA" in instruction.encoding and not instruction.modifiers.get("sd"):
        target = None
    store = mask_store(wave, VCC if target is None else target.index)
    is_cmpx = instruction.name.startswith("v_cmpx")

    def execute() -> Any:
        store(function(*[f() for f in fetches]))

    def execute_cmpx() -> int:
        result = np.broadcast_to(function(*[f() for f in fetches]), (64,))
        store(result)
        bits = np.packbits(result & wave.lanes, bitorder="little").view(np.uint64)
        wave.set_exec(int(bits[0]))
        return EXEC_CHANGED

    return _both(execute_cmpx if is_cmpx else execute)


def _bind_with_mask(
    wave: Wave,
    instruction: Instruction,
    function: Callable[..., Any],
    fetches: list[Fetch],
    rows: Array,
    record: Valu,
) -> tuple[Closure, Closure]:
    """An instruction with a second result, a lane mask (a carry)."""
    sdst = instruction.operands.get("sdst")
    store_mask = mask_store(wave, VCC if sdst is None else sdst.index)
    store = wide_store(rows, record.dst) if rows.shape[0] == 2 else None

    def execute() -> None:
        result, mask = function(*[f() for f in fetches])
        if store is not None and wave.all_lanes:
            store(result)
        else:
            np.copyto(rows, as_rows(result, record.dst), where=wave.lanes)
        store_mask(mask)

    return _both(execute)


def _bind_high_half(
    wave: Wave, function: Callable[..., Any], fetches: list[Fetch], rows: Array, record: Valu
) -> Closure:
    """op_sel[3] of a 16-bit instruction: the result goes to the upper half, the lower is kept."""

    def execute() -> None:
        value = as_rows(function(*[f() for f in fetches]), record.dst)
        joined = rows & np.uint32(0xFFFF) | value << np.uint32(16)
        np.copyto(rows, joined, where=wave.lanes)

    return execute


def _bind_sdwa_store(
    wave: Wave,
    instruction: Instruction,
    function: Callable[..., Any],
    fetches: list[Fetch],
    rows: Array,
    record: Valu,
) -> Closure:
    """SDWA's dst_sel: the result's low byte or half goes there; the rest is 0, its sign, or kept
    (dst_unused)."""
    select = instruction.modifiers["dst_sel"]
    unused = instruction.modifiers.get("dst_unused", 0)
    shift, width = (8 * select, 8) if select < 4 else (16 * (select - 4), 16)
    field = np.uint32((1 << width) - 1)
    if unused == 1:
        raise UnknownInstruction(f"{instruction.text}: dst_unused UNUSED_SEXT")

    def execute() -> None:
        value = (as_rows(function(*[f() for f in fetches]), record.dst) & field) << np.uint32(shift)
        if unused == 2:
            value = value | rows & ~(field << np.uint32(shift))
        np.copyto(rows, value, where=wave.lanes)

    return execute


def _both(closure: Closure) -> tuple[Closure, Closure]:
    return closure, closure
