"""From operands to arrays over a wave's registers: views where possible, else functions that
fetch."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gfx950_sim.decode import ACC_BASE, Instruction, Operand, UnknownInstruction
from gfx950_sim.isa import lanes as lanes_isa
from gfx950_sim.wave import Wave

Array = np.ndarray[Any, Any]
Fetch = Callable[[], Array]
Store = Callable[[Any], None]

DTYPES: dict[str, Any] = {
    f"{kind}{bits}": np.dtype(f"{kind}{bits // 8}")
    for kind, sizes in (("u", (8, 16, 32, 64)), ("i", (8, 16, 32, 64)), ("f", (16, 32, 64)))
    for bits in sizes
}
_SIGN_BIT = {2: 0x8000, 4: 0x80000000, 8: 0x8000000000000000}


@functools.cache
def split_type(name: str) -> tuple[str, int]:
    """("f32", 2) from "f32x2"; the count is 1 without an x."""
    base, _, count = name.partition("x")
    return base, int(count or 1)


def rows_view(wave: Wave, operand: Operand) -> Array:
    """uint32 rows [n, 64] of a vector operand, [n, 1] of a scalar one or a constant."""
    if operand.kind == "vgpr":
        return wave.vgpr[operand.index : operand.index + operand.count]
    if operand.kind == "sgpr":
        return wave.sgpr[operand.index : operand.index + operand.count, np.newaxis]
    return constant_rows(operand, operand.count)


def constant_rows(operand: Operand, count: int) -> Array:
    rows = np.zeros((count, 1), np.uint32)
    rows[:, 0] = operand.bits("u32")
    return rows


def view(wave: Wave, operand: Operand, name: str) -> Array | None:
    """A view of a source of type ``name`` with shape [64] or [1] (rows for "xN"); None if it must
    be fetched."""
    base, count = split_type(name)
    dtype = DTYPES[base]
    if operand.kind == "special":
        return None
    if operand.kind in ("inline", "literal"):
        if dtype.itemsize == 8:
            value = np.array([operand.bits(base)], np.uint64).view(dtype)
        elif dtype.itemsize == 2:
            value = np.array([operand.bits(base) & 0xFFFF], np.uint16).view(dtype)
        else:
            value = np.array([operand.bits("u32")], np.uint32).view(dtype)[:1]
        return value if count == 1 else np.repeat(value[:, np.newaxis], count, axis=0)
    registers = wave.vgpr if operand.kind == "vgpr" else wave.sgpr[:, np.newaxis]
    if dtype.itemsize == 8:
        if operand.kind == "vgpr":
            return None
        return wave.sgpr[operand.index : operand.index + 2].view(dtype)
    if count > 1:
        rows: Array = registers[operand.index : operand.index + count]
        return rows.view(dtype) if dtype.itemsize == 4 else None
    row: Array = registers[operand.index].view(dtype)
    return row if dtype.itemsize == 4 else row[:: 4 // dtype.itemsize]


def packed_view(wave: Wave, operand: Operand, name: str, low: int, high: int) -> Array:
    """Rows [2, 64] of a packed source: element ``low`` for the first result, ``high`` for the
    second."""
    base, _ = split_type(name)
    dtype = DTYPES[base]
    if operand.kind in ("inline", "literal"):
        if dtype.itemsize == 4:
            # Which bits the second half of a 32-bit constant holds is not documented.
            if (low or high) and operand.bits("u32"):
                raise UnknownInstruction(f"op_sel of the constant {operand}'s upper half")
            one = np.array([operand.bits("u32")], np.uint32).view(dtype)
            return np.broadcast_to(one[:, np.newaxis], (2, 1))
        bits = operand.bits(base) if operand.kind == "inline" else operand.value
        both = np.array([bits & 0xFFFF, bits >> 16 & 0xFFFF], np.uint16).view(dtype)
        return both[[low, high], np.newaxis]
    registers = wave.vgpr if operand.kind == "vgpr" else wave.sgpr[:, np.newaxis]
    if dtype.itemsize == 4:
        pair: Array = registers[operand.index : operand.index + 2].view(dtype)
    else:
        halves: Array = registers[operand.index].view(dtype)
        pair = halves.reshape(-1, 2).T
    if low == high:
        return pair[low : low + 1]
    return pair if low == 0 else pair[::-1]


def fetcher(wave: Wave, operand: Operand, name: str) -> Fetch:
    """A function that gives a source of type ``name`` now."""
    if name == "mask":
        return mask_fetcher(wave, operand.index)
    if operand.kind == "special":
        return special_fetcher(wave, operand, DTYPES[split_type(name)[0]])
    direct = view(wave, operand, name)
    if direct is not None:
        return lambda: direct
    base, count = split_type(name)
    dtype = DTYPES[base]
    if count == 1:  # a 64-bit value in two registers
        low, high = wave.vgpr[operand.index], wave.vgpr[operand.index + 1]
        buffer = np.empty((64, 2), np.uint32)
        lower, upper, joined = buffer[:, 0], buffer[:, 1], buffer.view(dtype)[:, 0]

        def fetch() -> Array:
            lower[...], upper[...] = low, high
            return joined

        return fetch
    raise UnknownInstruction(f"a source of type {name} in {operand} is not modelled")


def mask_fetcher(wave: Wave, first: int) -> Fetch:
    """A lane mask in a scalar register pair, as bool [64]."""
    octets = wave.sgpr[first : first + 2].view(np.uint8)
    return lambda: np.unpackbits(octets, bitorder="little").view(bool)


def special_fetcher(wave: Wave, operand: Operand, dtype: Any) -> Fetch:
    def fetch() -> Array:
        return np.array([special_value(wave, operand)], np.uint32).view(dtype)

    return fetch


def special_value(wave: Wave, operand: Operand) -> int:
    """vccz, execz or scc."""
    if operand.index == 253:
        return wave.scc
    return int((wave.vcc if operand.index == 251 else wave.exec_mask) == 0)


def with_sign(fetch: Fetch, direct: Array | None, absolute: int, negate: int) -> Fetch:
    """The source modifiers |x| and -x, which act on the sign bit alone, NaN included.

    Args:
        fetch: gives the source.
        direct: a view that always holds what ``fetch`` would give, or None.
        absolute: whether to clear the sign.
        negate: whether to flip it (after ``absolute``).
    """
    dtype = (fetch() if direct is None else direct).dtype
    if dtype.kind != "f":
        raise UnknownInstruction("abs or neg of an integer source")
    unsigned = np.dtype(f"u{dtype.itemsize}")
    sign = unsigned.type(_SIGN_BIT[dtype.itemsize])
    magnitude = ~sign
    bits = None if direct is None else direct.view(unsigned)

    def changed() -> Array:
        now = np.ascontiguousarray(fetch()).view(unsigned) if bits is None else bits
        if absolute:
            now = now & magnitude
        if negate:
            now = now ^ sign
        return now.view(dtype)

    return changed


def sdwa_source(wave: Wave, operand: Operand, name: str, select: int, signed: int) -> Fetch:
    """An SDWA source: byte 0..3 (0..3), half 0..1 (4, 5) or the dword (6), zero- or
    sign-extended."""
    if select == 6:
        return fetcher(wave, operand, name)
    words = fetcher(wave, operand, "u32")
    shift, kind = (8 * select, 1) if select < 4 else (16 * (select - 4), 2)
    part = np.dtype(f"{'i' if signed else 'u'}{kind}")
    extended = np.int32 if signed else np.uint32
    dtype = DTYPES[split_type(name)[0]]

    def fetch() -> Array:
        value = (words() >> np.uint32(shift)).astype(part)
        if dtype.itemsize == kind:
            return value.view(dtype)
        if dtype.itemsize < kind:
            return value.astype(dtype)
        return value.astype(extended).view(dtype)

    return fetch


def dpp_source(wave: Wave, operand: Operand, name: str, control: int, bound_ctrl: int) -> Fetch:
    """A DPP source: another lane's value; 0 where there is none or it is off (bound_ctrl)."""
    source, valid = lanes_isa.dpp_source(control)
    words = wave.vgpr[operand.index]
    dtype = DTYPES[split_type(name)[0]]
    step = 4 // dtype.itemsize
    everywhere = bool(valid.all())

    def fetch() -> Array:
        moved = words.take(source)
        if not (everywhere and wave.all_lanes):
            moved = np.where(valid & wave.lanes.take(source), moved, np.uint32(0))
        return moved.view(dtype)[::step]

    return fetch


def dpp_writes(wave: Wave, instruction: Instruction) -> Callable[[], Array | None]:
    """The lanes a DPP instruction may write: row_mask, bank_mask, and a source there unless
    bound_ctrl; None: all."""
    modifiers = instruction.modifiers
    source, valid = lanes_isa.dpp_source(modifiers.get("dpp", 0))
    lane = np.arange(64)
    rows = modifiers.get("row_mask", 0) >> (lane // 16) & 1
    banks = modifiers.get("bank_mask", 0) >> (lane % 16 // 4) & 1
    static = (rows & banks).astype(bool)
    bound_ctrl = bool(modifiers.get("bc", 0))
    if not bound_ctrl:
        static &= valid
    everywhere = bool(static.all())

    def writes() -> Array | None:
        if wave.all_lanes:
            return None if everywhere else static
        lanes: Array = wave.lanes & static
        return lanes if bound_ctrl else lanes & wave.lanes.take(source)

    return writes


# Destinations ------------------------------------------------------------------------------------


def destination(wave: Wave, operand: Operand, name: str) -> Array:
    """Rows uint32 [n, 64] that a result of type ``name`` fills."""
    base, count = split_type(name)
    rows = max(DTYPES[base].itemsize * count // 4, 1)
    if operand.kind != "vgpr":
        raise UnknownInstruction(f"vector result in {operand}")
    if operand.index < ACC_BASE < operand.index + rows:
        raise UnknownInstruction(f"{operand} crosses from v to a registers")
    return wave.vgpr[operand.index : operand.index + rows]


def as_rows(result: Any, name: str) -> Array:
    """A result of type ``name`` as uint32 rows [n, 64] or [n, 1]."""
    base, count = split_type(name)
    dtype = DTYPES[base]
    values = np.asarray(result, dtype)
    if dtype.itemsize == 8:
        pairs = np.ascontiguousarray(np.atleast_1d(values)).view(np.uint32).reshape(-1, 2)
        return pairs.T
    if dtype.itemsize == 4:
        words = np.ascontiguousarray(values).view(np.uint32)
        return words if count > 1 else np.atleast_1d(words)[np.newaxis]
    if count == 2 and dtype.itemsize == 2:
        low, high = values.view(np.uint16).astype(np.uint32)
        return np.atleast_1d(low | high << np.uint32(16))[np.newaxis]
    narrow = np.atleast_1d(np.ascontiguousarray(values)).view(f"u{dtype.itemsize}")
    return narrow.astype(np.uint32)[np.newaxis]


def wide_store(rows: Array, name: str) -> Store:
    """Writes a 64-bit result to two rows, in every lane."""
    buffer = np.empty((64, 2), np.uint32)
    joined, halves = buffer.view(DTYPES[name])[:, 0], buffer.T

    def store(result: Any) -> None:
        joined[...] = result
        rows[...] = halves

    return store


def mask_store(wave: Wave, first: int) -> Store:
    """Writes a lane mask (bool [64]) to a scalar register pair; lanes that are off give 0."""
    octets = wave.sgpr[first : first + 2].view(np.uint8)
    full = wave.lanes

    def store(result: Any) -> None:
        bits = result if wave.all_lanes else result & full
        if bits.shape != (64,):
            bits = np.broadcast_to(bits, (64,))
        octets[...] = np.packbits(bits, bitorder="little")

    return store


def scalar_reader(wave: Wave, operand: Operand, bits: int) -> Callable[[], int]:
    """A function that gives a scalar source as a Python int of 32 or 64 bits."""
    if operand.kind == "special":
        return lambda: special_value(wave, operand)
    if operand.kind != "sgpr":
        value = operand.bits("i64" if bits == 64 else "u32")
        return lambda: value
    registers, index = wave.scalars, operand.index
    if bits == 32:
        return lambda: registers[index]
    return lambda: registers[index] | registers[index + 1] << 32
