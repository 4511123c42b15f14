"""Closures of atomic instructions."""

from typing import Any

import numpy as np

from gfx950_sim import bind_memory
from gfx950_sim.decode import Instruction, UnknownInstruction
from gfx950_sim.isa import lds
from gfx950_sim.isa.records import Atomic
from gfx950_sim.operands import DTYPES, rows_view
from gfx950_sim.operation import Operation
from gfx950_sim.program import bits_of
from gfx950_sim.wave import Closure, Wave

Array = np.ndarray[Any, Any]


class _Update:
    """One lane's turn: reads its data, gives the new value and keeps the old one."""

    def __init__(self, record: Atomic, data: list[Array]) -> None:
        self.function, self.dtype = record.function, DTYPES[record.dtype]
        # Items of one operand follow one another (cmpswap); else each has an operand of its own.
        words = self.dtype.itemsize // 4
        rows = data[0] if len(data) == 1 else np.concatenate(data)
        self.items = [
            np.ascontiguousarray(rows[words * i : words * (i + 1)].T).view(self.dtype)[:, 0]
            for i in range(record.items)
        ]
        self.old = np.zeros((64, words), np.uint32)

    def __call__(self, lane: int, cell: Array) -> None:
        """Update ``cell`` (uint8 [size], in place) for a lane."""
        value = cell.view(self.dtype)
        self.old[lane] = cell.view(np.uint32)
        value[0] = self.function(value[0], *[item[lane] for item in self.items])


def bind_atomic(wave: Wave, instruction: Instruction, record: Atomic) -> Closure:
    """LDS, global and buffer atomics; the old value is returned where the instruction says so."""
    operands = instruction.operands
    is_lds = instruction.encoding == "DS"
    returns = "_rtn_" in instruction.name or bool(instruction.modifiers.get("sc0"))
    names = ("data0", "data1") if is_lds else ("data", "vdata")
    data = [rows_view(wave, operands[n]) for n in names if n in operands]
    target, mask = None, 0
    size = DTYPES[record.dtype].itemsize
    if returns:
        operand = operands.get("vdst") or operands["vdata"]
        target = rows_view(wave, operand)[: size // 4]
        mask = bits_of(operand)
    act = (_lds if is_lds else _vmem)(wave, instruction, size)
    counter = "lgkmcnt" if is_lds else "vmcnt"

    def execute() -> None:
        wave.current = instruction.index
        update = _Update(record, data)
        lanes = wave.active_lanes()
        operation = Operation(instruction.index, counter, wave.number, mask, target, None, lanes)
        operation.atomic = True
        act(update, lanes, operation)
        operation.data = update.old.T
        wave.issue(operation)

    return execute


def _lds(wave: Wave, instruction: Instruction, size: int) -> Any:
    modifiers, memory = instruction.modifiers, wave.lds
    if set(modifiers) - {"offset0", "offset1"}:
        raise UnknownInstruction(f"modifiers of {instruction.text} are not modelled")
    vaddr = wave.vgpr[instruction.operands["addr"].index]

    def act(update: _Update, lanes: Array | None, operation: Operation) -> None:
        where = lds.one_address(vaddr, modifiers.get("offset0", 0), modifiers.get("offset1", 0))
        plan = memory.plan(where, size, lanes, wave, size)
        memory.note_atomic(plan, wave, operation)
        bind_memory.tell(wave, instruction, "lds", "store", where, size, lanes)
        for lane in range(64) if plan.lanes is None else np.flatnonzero(plan.lanes):
            first = int(where[0, lane])
            update(int(lane), memory.bytes[first : first + size])

    return act


def _vmem(wave: Wave, instruction: Instruction, size: int) -> Any:
    locate = bind_memory.locator(wave, instruction, size)

    def act(update: _Update, lanes: Array | None, operation: Operation) -> None:
        address, in_range = locate()
        chosen = np.ones(64, bool) if lanes is None else lanes
        if in_range is not None:
            chosen = chosen & in_range.all(axis=0)
        bind_memory.tell(wave, instruction, "global", "store", address, size, lanes)
        for lane in np.flatnonzero(chosen):
            cell = wave.launch.memory.cell(int(address[lane]), size, wave, int(lane))
            if cell is not None:
                update(int(lane), cell)

    return act
