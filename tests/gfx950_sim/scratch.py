"""Private memory of the lanes: where LLVM spills registers.

A lane's bytes are its own, so no wave sees another's, and nothing but bounds and "written before
read" is checked. Accesses count on vmcnt. (CDNA4 ISA, "Scratch"; the base that hardware adds to
each address is not visible.)
"""

from typing import Any

import numpy as np

from gfx950_sim.decode import Instruction, UnknownInstruction
from gfx950_sim.isa.records import VmemAccess
from gfx950_sim.operands import rows_view, scalar_reader
from gfx950_sim.operation import Operation
from gfx950_sim.program import bits_of
from gfx950_sim.wave import Closure, Wave

Array = np.ndarray[Any, Any]
_LANES = np.arange(64)


class PrivateMemory:
    """Dwords [n, 64] of one wave, and which of them were written."""

    def __init__(self, size: int) -> None:
        self.words = np.zeros((size // 4, 64), np.uint32)
        self.written = np.zeros((size // 4, 64), bool)

    def rows(self, place: Array, count: int, lanes: Array, wave: Wave) -> tuple[Array, Array]:
        """Indexes [count, 64] of the dwords from byte offsets [64] on, and the lanes inside.

        Lanes outside the wave's private memory are reported and left out.
        """
        first = place >> 2
        inside = (place & 3 == 0) & (first >= 0) & (first + count <= len(self.words))
        if (lanes & ~inside).any():
            lane = int((lanes & ~inside).argmax())
            detail = f"{4 * count} bytes of scratch, a lane has {4 * len(self.words)}"
            wave.report("out_of_bounds", detail, lane, int(place[lane]))
        chosen = lanes & inside
        return np.where(chosen, first, 0) + np.arange(count)[:, np.newaxis], chosen


def bind_scratch(
    wave: Wave, instruction: Instruction, record: VmemAccess, memory: PrivateMemory
) -> Closure:
    """scratch_load and scratch_store of whole dwords."""
    operands, index, count = instruction.operands, instruction.index, record.size // 4
    if not count or set(instruction.modifiers) - {"offset"}:
        raise UnknownInstruction(f"{instruction.text} is not modelled")
    offset = instruction.modifiers.get("offset", 0)
    saddr = scalar_reader(wave, operands["saddr"], 32) if "saddr" in operands else None
    vaddr = rows_view(wave, operands["addr"])[0] if "addr" in operands else None
    operand = operands["data" if record.kind == "store" else "vdst"]
    registers, mask = rows_view(wave, operand), bits_of(operand)

    def locate() -> tuple[Array, Array]:
        wave.current = index
        place = np.full(64, offset + (saddr() if saddr else 0), np.int64)
        if vaddr is not None:
            place += vaddr
        return memory.rows(place, count, wave.lanes, wave)

    def store() -> None:
        rows, lanes = locate()
        memory.words[rows[:, lanes], _LANES[lanes]] = registers[:, lanes]
        memory.written[rows[:, lanes], _LANES[lanes]] = True
        wave.issue(Operation(index, "vmcnt", wave.number))

    def load() -> None:
        rows, lanes = locate()
        unwritten = ~memory.written[rows, _LANES].all(axis=0) & lanes
        if unwritten.any():
            wave.report("uninitialized_memory", "scratch", int(unwritten.argmax()))
        values, active = memory.words[rows, _LANES], wave.active_lanes()
        wave.issue(Operation(index, "vmcnt", wave.number, mask, registers, values, active))

    return store if record.kind == "store" else load
