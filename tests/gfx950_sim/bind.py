"""From an instruction to a closure over one wave's registers.

A closure executes the instruction once. It returns nothing, except for instructions that
Program.special marks: those return the next instruction's index, or a negative signal.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gfx950_sim import bind_memory
from gfx950_sim.bind_atomics import bind_atomic
from gfx950_sim.bind_valu import bind_valu
from gfx950_sim.decode import Instruction, UnknownInstruction, Waitcnt
from gfx950_sim.isa import scalar
from gfx950_sim.isa.records import Atomic, Lanes, LdsAccess, Matrix, Salu, Valu, VmemAccess
from gfx950_sim.operands import rows_view, scalar_reader
from gfx950_sim.program import (
    BARRIER,
    CONTROL,
    END,
    NOTHING,
    SMEM_DWORDS,
    WAIT,
    check_modifiers,
    sources_of,
)
from gfx950_sim.scratch import bind_scratch
from gfx950_sim.wave import EXEC_CHANGED, Closure, Wave

Array = np.ndarray[Any, Any]
WAITED, AT_BARRIER, ENDED = -1, -2, -3
"""Signals of special instructions, like `wave.EXEC_CHANGED`; other values are the next index."""


def bind(wave: Wave, index: int) -> tuple[Closure, Closure]:
    """The closures of an instruction for a wave: with all lanes on, and with some off.

    Raises:
        UnknownInstruction: a modifier or operand that is not modelled.
    """
    instruction, record = wave.program.instructions[index], wave.program.records[index]
    if isinstance(record, Valu):
        return bind_valu(wave, instruction, record)
    if isinstance(record, Matrix):
        return _both(bind_matrix(wave, instruction, record))
    if isinstance(record, Lanes):
        return _both(bind_lanes(wave, instruction, record))
    if isinstance(record, Salu):
        return _both(bind_salu(wave, instruction, record))
    if isinstance(record, LdsAccess):
        return _both(bind_memory.bind_lds(wave, instruction, record))
    if isinstance(record, Atomic):
        return _both(bind_atomic(wave, instruction, record))
    if isinstance(record, VmemAccess) and instruction.encoding == "SCRATCH":
        return _both(bind_scratch(wave, instruction, record, wave.private))
    if isinstance(record, VmemAccess):
        return _both(bind_memory.bind_vmem(wave, instruction, record))
    if instruction.name in SMEM_DWORDS:
        count = SMEM_DWORDS[instruction.name]
        return _both(bind_memory.bind_smem(wave, instruction, count))
    return _both(bind_control(wave, instruction))


def _both(closure: Closure) -> tuple[Closure, Closure]:
    return closure, closure


# Control flow ------------------------------------------------------------------------------------


def bind_control(wave: Wave, instruction: Instruction) -> Closure:
    """Waits, barriers, branches and the end."""
    kind = CONTROL[instruction.name]
    index = instruction.index
    if kind == WAIT:
        counts = Waitcnt.of(instruction.modifiers["simm16"])

        def wait() -> int:
            wave.wait(index, counts.vmcnt, counts.lgkmcnt)
            return WAITED

        return wait
    if kind == NOTHING:
        return (lambda: None) if instruction.name in ("s_nop", "v_nop") else lambda: index + 1
    if kind == BARRIER:
        return lambda: AT_BARRIER
    if kind == END:
        return lambda: ENDED
    offset = instruction.modifiers["simm16"]
    pc = instruction.pc + 4 + 4 * scalar.signed(offset, 16)
    if pc not in wave.program.index_at:
        raise UnknownInstruction(f"{instruction.text} at pc {instruction.pc:#x} leaves the kernel")
    target, taken = wave.program.index_at[pc], scalar.BRANCHES[instruction.name]
    return lambda: target if taken(wave.scc, wave.vcc, wave.exec_mask) else index + 1


# Scalar ALU --------------------------------------------------------------------------------------


def bind_salu(wave: Wave, instruction: Instruction, record: Salu) -> Closure:
    """A scalar instruction over Python ints."""
    check_modifiers(instruction, {"simm16"})
    name, function = instruction.name, record.function
    sdst = instruction.operands.get("sdst")
    readers = [
        scalar_reader(wave, operand, bits)
        for operand, bits in zip(sources_of(instruction), record.src, strict=False)
    ]
    if instruction.encoding == "SOPK":
        value = instruction.modifiers["simm16"]
        if not (name.startswith("s_cmpk") and name.endswith("u32")):
            value = scalar.signed(value, 16) & scalar.M32
        if name.startswith("s_cmpk"):
            assert sdst is not None
            readers = [scalar_reader(wave, sdst, 32), lambda: value]
        else:
            readers = [lambda: value]
    if len(readers) != len(record.src):
        raise UnknownInstruction(f"{instruction.text}: {len(readers)} sources")
    if "saveexec" in name:
        assert sdst is not None
        return _bind_saveexec(wave, readers[0], record, sdst.index)
    if record.dst == 0:

        def compare() -> None:
            wave.scc = function(*[read() for read in readers])

        return compare
    assert sdst is not None
    registers, index = wave.scalars, sdst.index
    wide, writes_scc = record.dst == 64, record.writes_scc
    keywords: list[tuple[str, Callable[[], int]]] = []
    if record.reads_scc:
        keywords.append(("scc", lambda: wave.scc))
    if record.reads_dst:
        keywords.append(("old", scalar_reader(wave, sdst, record.dst)))

    def execute() -> Any:
        result = function(*[read() for read in readers], **{k: read() for k, read in keywords})
        if writes_scc:
            result, wave.scc = result
        registers[index] = result & 0xFFFFFFFF
        if wide:
            registers[index + 1] = result >> 32

    if index in (126, 127):  # EXEC

        def change_exec() -> int:
            execute()
            wave.set_exec(registers[126] | registers[127] << 32)
            return EXEC_CHANGED

        return change_exec
    return execute


def _bind_saveexec(wave: Wave, read: Callable[[], int], record: Salu, index: int) -> Closure:
    registers = wave.scalars

    def execute() -> int:
        before, source = wave.exec_mask, read()
        registers[index], registers[index + 1] = before & 0xFFFFFFFF, before >> 32
        after = record.function(source, before)
        wave.scc = int(after != 0)
        wave.set_exec(after)
        return EXEC_CHANGED

    return execute


# Matrix and lanes --------------------------------------------------------------------------------


def bind_matrix(wave: Wave, instruction: Instruction, record: Matrix) -> Closure:
    """A matrix instruction; EXEC does not matter."""
    if wave.launch.fp16_ovfl:
        raise UnknownInstruction(f"{instruction.text} with MODE.FP16_OVFL, which clamps overflow")
    check_modifiers(instruction, set(record.modifiers))
    operands = instruction.operands
    c_operand = operands["src2"]
    a, b = rows_view(wave, operands["src0"]), rows_view(wave, operands["src1"])
    c = rows_view(wave, c_operand)
    if c_operand.kind != "vgpr":
        c = c[:1]
    target = rows_view(wave, operands["vdst"])
    keywords: dict[str, Any] = {m: instruction.modifiers.get(m, 0) for m in record.modifiers}
    if record.scaled:
        keywords["scale_a"] = rows_view(wave, operands["scale_src0"])[0]
        keywords["scale_b"] = rows_view(wave, operands["scale_src1"])[0]
    function = partial(record.function, **keywords)

    def execute() -> None:
        target[...] = function(a, b, c).view(np.uint32)

    return execute


def bind_lanes(wave: Wave, instruction: Instruction, record: Lanes) -> Closure:
    """Swaps between lanes, and lanes to and from scalar registers."""
    check_modifiers(instruction, {"op_sel"} if record.kind == "swap" else set())
    operands, function = instruction.operands, record.function
    vdst, source = operands["vdst"], operands["src0"]
    if record.kind == "swap":
        function = partial(function, op_sel=instruction.modifiers.get("op_sel", 0))
        first, second = wave.vgpr[vdst.index], wave.vgpr[source.index]

        def swap() -> None:
            first[...], second[...] = function(first, second, wave.lanes)

        return swap
    lane = scalar_reader(wave, operands["src1"], 32) if "src1" in operands else None
    if record.kind == "read":
        row = wave.vgpr[source.index]
        registers = wave.scalars

        def read() -> None:
            registers[vdst.index] = function(row, None if lane is None else lane(), wave.lanes)

        return read
    assert lane is not None
    value, target = scalar_reader(wave, source, 32), wave.vgpr[vdst.index]

    def write() -> None:
        target[...] = function(target, value(), lane())

    return write
