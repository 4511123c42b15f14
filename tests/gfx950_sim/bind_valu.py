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

_SDWA = {"src0_sel", "src1_sel", "dst_sel", "dst_unused", "src0_sext", "src1_sext", "sd"}
_DWORD, _UNUSED_PAD, _UNUSED_PRESERVE = 6, 0, 2
_SDWA_DPP_SIGNS = {"src0_neg", "src1_neg", "src0_abs", "src1_abs"}
_DPP = {"dpp", "row_mask", "bank_mask", "bc"}


def bind_valu(wave: Wave, instruction: Instruction, record: Valu) -> tuple[Closure, Closure]:
    """A vector ALU instruction: fetch sources, call the function, store what EXEC lets through.

    Raises:
        UnknownInstruction: a modifier or operand that is not modelled.
    """
    check_modifiers(instruction, _allowed_modifiers(instruction, record))
    modifiers = instruction.modifiers
    if modifiers.get("omod"):
        raise UnknownInstruction(f"{instruction.text}: output multiplier (it needs denormals off)")
    is_dpp = "DPP" in instruction.encoding
    rows = None
    if record.dst != "mask":
        rows = destination(wave, instruction.operands["vdst"], record.dst)
    function = _with_modifiers(wave, instruction, record, rows)
    fetches, views = _bind_sources(wave, instruction, record)
    evaluate = _evaluation(function, fetches, views)
    if is_dpp and (rows is None or record.extra is not None):
        raise UnknownInstruction(f"{instruction.text}: a lane mask as result of a DPP instruction")
    if rows is None:
        return _both(_bind_compare(wave, instruction, evaluate))
    if record.extra is not None:
        return _both(_bind_with_mask(wave, instruction, evaluate, rows, record.dst))
    if modifiers.get("dst_sel", _DWORD) != _DWORD:
        return _both(_bind_sdwa_store(wave, instruction, evaluate, rows, record.dst))
    if is_dpp:
        return _both(_bind_dpp_store(wave, instruction, evaluate, rows, record.dst))
    if _selects_halves(record) and modifiers.get("op_sel", 0) & 8:
        return _both(_bind_high_half(wave, evaluate, rows, record.dst))
    typed = _typed(rows, record.dst)
    if typed is None:
        masked = partial(_store_rows_where, evaluate, rows, record.dst, wave.lanes)
        if rows.shape[0] == 2 and split_type(record.dst)[1] == 1:
            return partial(_give, evaluate, wide_store(rows, record.dst)), masked
        return partial(_store_rows, evaluate, rows, record.dst), masked
    if isinstance(function, np.ufunc) and views is not None:  # NumPy can do all of it
        return (
            partial(function, *views, out=typed),
            partial(function, *views, out=typed, where=wave.lanes),
        )
    return partial(_store, evaluate, typed), partial(_store_where, evaluate, typed, wave.lanes)


def _selects_halves(record: Valu) -> bool:
    """Whether op_sel picks halves of 16-bit operands, as the function does not take it itself."""
    types = (*record.src, record.dst)
    return "op_sel" not in record.modifiers and bool({"f16", "u16", "i16"} & set(types))


def _allowed_modifiers(instruction: Instruction, record: Valu) -> set[str]:
    allowed = {"abs", "neg", "clamp", "omod", *record.modifiers}
    if "SDWA" in instruction.encoding:
        allowed |= _SDWA | _SDWA_DPP_SIGNS
    if "DPP" in instruction.encoding:
        allowed |= _DPP | _SDWA_DPP_SIGNS
    if record.packed:
        allowed |= {"op_sel", "op_sel_hi", "neg_hi"}
    elif instruction.encoding == "VOP3P":
        allowed.add("op_sel_hi")  # its default is all ones; without packed operands it says nothing
    if _selects_halves(record):
        allowed.add("op_sel")
    return allowed


def _with_modifiers(
    wave: Wave, instruction: Instruction, record: Valu, rows: Array | None
) -> Callable[..., Any]:
    """The record's function with the modifiers it takes, the old destination and the clamp."""
    defaults = {"fp16_ovfl": wave.launch.fp16_ovfl}
    if instruction.encoding == "VOP3P":
        defaults["op_sel_hi"] = 7
    keywords: dict[str, Any] = {
        name: instruction.modifiers.get(name, defaults.get(name, 0)) for name in record.modifiers
    }
    if record.reads_dst:
        assert rows is not None
        typed = _typed(rows, record.dst)
        keywords["old"] = rows[0] if typed is None else typed
    function = partial(record.function, **keywords) if keywords else record.function
    if "clamp" in instruction.modifiers and "clamp" not in record.modifiers:
        return _clamped(function, record.dst, instruction)
    return function


def _evaluation(
    function: Callable[..., Any], fetches: list[Fetch], views: list[Array] | None
) -> Callable[[], Any]:
    """A function that computes the result from the sources as they are now."""
    if views is not None:
        return partial(function, *views)
    return lambda: function(*[fetch() for fetch in fetches])


def _store(evaluate: Callable[[], Any], target: Array) -> None:
    target[...] = evaluate()


def _store_where(evaluate: Callable[[], Any], target: Array, lanes: Array) -> None:
    np.copyto(target, evaluate(), where=lanes, casting="unsafe")


def _give(evaluate: Callable[[], Any], store: Store) -> None:
    store(evaluate())


def _store_rows(evaluate: Callable[[], Any], rows: Array, name: str) -> None:
    rows[...] = as_rows(evaluate(), name)


def _store_rows_where(evaluate: Callable[[], Any], rows: Array, name: str, lanes: Array) -> None:
    np.copyto(rows, as_rows(evaluate(), name), where=lanes)


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
            fetch = _always(direct)
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
            fetch = fetcher(wave, operand, name) if direct is None else _always(direct)
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


def _always(values: Array) -> Fetch:
    return lambda: values


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


def _bind_compare(wave: Wave, instruction: Instruction, evaluate: Callable[[], Any]) -> Closure:
    """v_cmp: a lane mask to VCC or a scalar pair; v_cmpx: to EXEC as well."""
    target = instruction.operands.get("vdst") or instruction.operands.get("sdst")
    if "SDWA" in instruction.encoding and not instruction.modifiers.get("sd"):
        target = None
    store = mask_store(wave, VCC if target is None else target.index)

    def compare() -> None:
        store(evaluate())

    def compare_to_exec() -> int:
        result = np.broadcast_to(evaluate(), (64,))
        store(result)
        bits = np.packbits(result & wave.lanes, bitorder="little").view(np.uint64)
        wave.set_exec(int(bits[0]))
        return EXEC_CHANGED

    return compare_to_exec if instruction.name.startswith("v_cmpx") else compare


def _bind_with_mask(
    wave: Wave, instruction: Instruction, evaluate: Callable[[], Any], rows: Array, name: str
) -> Closure:
    """An instruction with a second result, a lane mask (a carry)."""
    sdst = instruction.operands.get("sdst")
    store_mask = mask_store(wave, VCC if sdst is None else sdst.index)
    store = wide_store(rows, name) if rows.shape[0] == 2 else None

    def execute() -> None:
        result, mask = evaluate()
        if store is not None and wave.all_lanes:
            store(result)
        else:
            np.copyto(rows, as_rows(result, name), where=wave.lanes)
        store_mask(mask)

    return execute


def _bind_dpp_store(
    wave: Wave, instruction: Instruction, evaluate: Callable[[], Any], rows: Array, name: str
) -> Closure:
    """DPP's row_mask and bank_mask, and lanes without a source, leave the destination as it is."""
    writable = dpp_writes(wave, instruction)

    def execute() -> None:
        result, lanes = as_rows(evaluate(), name), writable()
        if lanes is None:
            rows[...] = result
        else:
            np.copyto(rows, result, where=lanes)

    return execute


def _bind_high_half(wave: Wave, evaluate: Callable[[], Any], rows: Array, name: str) -> Closure:
    """op_sel[3] of a 16-bit instruction: the result goes to the upper half, the lower is kept."""

    def execute() -> None:
        value = as_rows(evaluate(), name)
        joined = rows & np.uint32(0xFFFF) | value << np.uint32(16)
        np.copyto(rows, joined, where=wave.lanes)

    return execute


def _bind_sdwa_store(
    wave: Wave, instruction: Instruction, evaluate: Callable[[], Any], rows: Array, name: str
) -> Closure:
    """SDWA's dst_sel: the result's low byte or half goes there; the rest becomes 0 or is kept."""
    select = instruction.modifiers["dst_sel"]
    unused = instruction.modifiers.get("dst_unused", _UNUSED_PAD)
    if unused not in (_UNUSED_PAD, _UNUSED_PRESERVE):
        raise UnknownInstruction(f"{instruction.text}: dst_unused UNUSED_SEXT")
    shift, width = (8 * select, 8) if select < 4 else (16 * (select - 4), 16)
    field = np.uint32((1 << width) - 1)

    def execute() -> None:
        value = (as_rows(evaluate(), name) & field) << np.uint32(shift)
        if unused == _UNUSED_PRESERVE:
            value = value | rows & ~(field << np.uint32(shift))
        np.copyto(rows, value, where=wave.lanes)

    return execute


def _both(closure: Closure) -> tuple[Closure, Closure]:
    return closure, closure
