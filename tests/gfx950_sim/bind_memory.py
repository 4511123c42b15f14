"""Closures of memory instructions: they compute addresses, access, and leave results in flight."""

from typing import Any

import numpy as np

from gfx950_sim.decode import M0, Instruction
from gfx950_sim.hooks import MemoryEvent
from gfx950_sim.isa import vmem
from gfx950_sim.isa.records import LdsAccess, VmemAccess
from gfx950_sim.lds_memory import Plan
from gfx950_sim.operands import rows_view, scalar_reader
from gfx950_sim.operation import Operation
from gfx950_sim.program import bits_of, check_modifiers
from gfx950_sim.wave import Closure, Wave

Array = np.ndarray[Any, Any]
_EVERY_LANE = np.ones(64, bool)
_PLANS = 8


def tell(
    wave: Wave,
    instruction: Instruction,
    space: str,
    kind: str,
    addresses: Array,
    size: int,
    lanes: Array | None,
) -> None:
    """Tell the run's observer of an access."""
    observer = wave.launch.observer
    if observer is not None:
        event = MemoryEvent(
            wave.workgroup,
            wave.number,
            len(wave.trace) - 1,
            instruction,
            space,
            kind,
            np.atleast_2d(addresses).astype(np.uint64),
            size,
            _EVERY_LANE if lanes is None else lanes,
        )
        observer.memory(event)


# Scalar loads ------------------------------------------------------------------------------------


def bind_smem(wave: Wave, instruction: Instruction, count: int) -> Closure:
    """s_load_dword*: base + offset (+ soffset), the two low bits ignored (CDNA4 ISA, "Scalar
    memory")."""
    check_modifiers(instruction, {"offset"})
    operands = instruction.operands
    base = scalar_reader(wave, operands["sbase"], 64)
    soffset = scalar_reader(wave, operands["soffset"], 32) if "soffset" in operands else None
    offset = instruction.modifiers.get("offset", 0)
    first, mask, index = operands["sdata"].index, bits_of(operands["sdata"]), instruction.index

    def execute() -> None:
        wave.current = index
        address = base() + offset + (soffset() if soffset else 0)
        address &= 0xFFFF_FFFF_FFFF_FFFC
        values = wave.launch.memory.load_scalar(address, count, wave)
        wave.issue(Operation(index, "smem", wave.number, mask, data=(first, values)))
        if wave.launch.observer is not None:
            where = np.array([[address]], np.uint64)
            tell(wave, instruction, "scalar", "load", where, 4 * count, None)

    return execute


# LDS ---------------------------------------------------------------------------------------------


def bind_lds(wave: Wave, instruction: Instruction, record: LdsAccess) -> Closure:
    """LDS loads, stores and exchanges."""
    check_modifiers(instruction, {"offset0", "offset1"})
    operands, index, number = instruction.operands, instruction.index, wave.number
    offset0 = instruction.modifiers.get("offset0", 0)
    offset1 = instruction.modifiers.get("offset1", 0)
    vaddr = wave.vgpr[operands["addr"].index]
    if record.kind == "exchange":
        return _bind_exchange(wave, instruction, record, vaddr, offset0 | offset1 << 8)
    size, rule, lds = record.size, record.result, wave.lds
    assert record.addresses is not None
    locate = record.addresses
    plans: dict[bytes, Plan] = {}

    def plan() -> Plan:
        """LDS addresses seldom change from one iteration of a loop to the next: the last few plans
        are kept."""
        if not wave.all_lanes:
            lanes = wave.lanes.copy()
            return lds.plan(locate(vaddr, offset0, offset1), size, lanes, wave, record.align)
        key = vaddr.tobytes()
        known = plans.get(key)
        if known is None:
            known = lds.plan(locate(vaddr, offset0, offset1), size, None, wave, record.align)
            if known.lanes is not None:  # faulty: to be reported each time
                return known
            if len(plans) >= _PLANS:
                plans.clear()
            plans[key] = known
        return known

    if record.kind == "store":
        data = [rows_view(wave, operands[k]) for k in ("data0", "data1") if k in operands]
        shift = np.uint32(record.store_shift)

        def store() -> None:
            wave.current = index
            operation = Operation(index, "lgkmcnt", number)
            what = plan()
            rows = [d >> shift for d in data] if shift else data
            lds.store(what, rows, wave, operation)
            wave.issue(operation)
            if wave.launch.observer is not None:
                tell(wave, instruction, "lds", "store", what.addresses, size, what.lanes)

        return store
    target, mask = rows_view(wave, operands["vdst"]), bits_of(operands["vdst"])

    def load() -> None:
        wave.current = index
        lanes = wave.active_lanes()
        if record.full_exec and lanes is not None:
            wave.report("exec", "a transposed read needs all 64 lanes", int(lanes.argmin()))
        operation = Operation(index, "lgkmcnt", number, mask, target, None, lanes)
        what = plan()
        rows = lds.load(what, wave, operation)
        if rule is not None:
            old = {"old": target} if record.reads_dst else {}
            rows = rule(rows, _EVERY_LANE if lanes is None else lanes, **old)
        operation.data = rows
        wave.issue(operation)
        if wave.launch.observer is not None:
            tell(wave, instruction, "lds", "load", what.addresses, size, what.lanes)

    return load


def _bind_exchange(
    wave: Wave, instruction: Instruction, record: LdsAccess, vaddr: Array, offset: int
) -> Closure:
    operands, index = instruction.operands, instruction.index
    data = wave.vgpr[operands["data0"].index] if "data0" in operands else vaddr
    target, mask = rows_view(wave, operands["vdst"]), bits_of(operands["vdst"])
    rule = record.result
    assert rule is not None

    def execute() -> None:
        lanes = wave.active_lanes()
        values = rule(vaddr, data, _EVERY_LANE if lanes is None else lanes, offset)
        wave.issue(Operation(index, "lgkmcnt", wave.number, mask, target, values, lanes))

    return execute


# Vector memory -----------------------------------------------------------------------------------


def bind_vmem(wave: Wave, instruction: Instruction, record: VmemAccess) -> Closure:
    """Global and buffer loads and stores, and loads to LDS."""
    locate = locator(wave, instruction, record.size)
    if record.kind == "dma":
        return _bind_dma(wave, instruction, record, locate)
    if record.kind == "store":
        return _bind_store(wave, instruction, record, locate)
    return _bind_load(wave, instruction, record, locate)


def locator(wave: Wave, instruction: Instruction, size: int) -> Any:
    """A function that gives addresses, uint64 [64], and the dwords in range, bool [k, 64] or None
    for all."""
    if instruction.encoding == "GLOBAL":
        check_modifiers(instruction, {"offset", "sc0"})
        return _global_locator(wave, instruction)
    check_modifiers(instruction, {"offset", "offen", "idxen", "lds", "sc0"})
    return _buffer_locator(wave, instruction, size)


def _global_locator(wave: Wave, instruction: Instruction) -> Any:
    """A function that gives (addresses uint64 [64], None)."""
    operands = instruction.operands
    rows = rows_view(wave, operands["addr"])
    saddr = scalar_reader(wave, operands["saddr"], 64) if "saddr" in operands else None
    offset = instruction.modifiers.get("offset", 0)

    def locate() -> tuple[Array, None]:
        return vmem.global_address(rows, None if saddr is None else saddr(), offset), None

    return locate


def _buffer_locator(wave: Wave, instruction: Instruction, size: int) -> Any:
    """A function that gives (addresses uint64 [64], in range bool [k, 64] or None for all)."""
    operands, modifiers = instruction.operands, instruction.modifiers
    first = operands["srsrc"].index
    words = wave.scalars
    soffset = scalar_reader(wave, operands["soffset"], 32)
    offset = modifiers.get("offset", 0)
    rows = iter(rows_view(wave, operands["vaddr"]) if "vaddr" in operands else ())
    index = next(rows) if modifiers.get("idxen") else None
    voffset = next(rows) if modifiers.get("offen") else None

    def locate() -> tuple[Array, Array | None]:
        resource = (words[first], words[first + 1], words[first + 2], words[first + 3])
        address, in_range = vmem.buffer_address(resource, index, voffset, soffset(), offset, size)
        return address, None if in_range.all() else in_range

    return locate


def _fetch(
    wave: Wave, address: Array, in_range: Array | None, size: int, lanes: Array | None
) -> Array:
    """Rows that a load fetches; dwords out of a buffer's range are 0."""
    memory = wave.launch.memory
    if in_range is None:
        return memory.load(address, size, lanes, wave)
    rows = np.zeros((max(size // 4, 1), 64), np.uint32)
    for i in range(rows.shape[0]):
        chosen = in_range[i] if lanes is None else in_range[i] & lanes
        if chosen.any():
            part = memory.load(address + np.uint64(4 * i), min(size, 4), chosen, wave)[0]
            rows[i] = np.where(chosen, part, np.uint32(0))
    return rows


def _bind_load(wave: Wave, instruction: Instruction, record: VmemAccess, locate: Any) -> Closure:
    operands, index, size = instruction.operands, instruction.index, record.size
    operand = operands.get("vdst") or operands["vdata"]
    target, mask, rule = rows_view(wave, operand), bits_of(operand), record.result

    def load() -> None:
        wave.current = index
        lanes = wave.active_lanes()
        address, in_range = locate()
        rows = _fetch(wave, address, in_range, size, lanes)
        if rule is not None:
            old = {"old": target} if record.reads_dst else {}
            rows = rule(rows, _EVERY_LANE if lanes is None else lanes, **old)
        wave.issue(Operation(index, "vmcnt", wave.number, mask, target, rows, lanes))
        if wave.launch.observer is not None:
            tell(wave, instruction, "global", "load", address, size, lanes)

    return load


def _bind_store(wave: Wave, instruction: Instruction, record: VmemAccess, locate: Any) -> Closure:
    operands, index, size = instruction.operands, instruction.index, record.size
    rows = rows_view(wave, operands.get("data") or operands["vdata"])
    shift = np.uint32(record.store_shift)

    def store() -> None:
        wave.current = index
        lanes = wave.active_lanes()
        address, in_range = locate()
        data = rows >> shift if shift else rows
        memory = wave.launch.memory
        if in_range is None:
            memory.store(address, data, size, lanes, wave)
        else:
            for i in range(max(size // 4, 1)):
                chosen = in_range[i] if lanes is None else in_range[i] & lanes
                part = address + np.uint64(4 * i)
                memory.store(part, data[i : i + 1], min(size, 4), chosen, wave)
        wave.issue(Operation(index, "vmcnt", wave.number))
        if wave.launch.observer is not None:
            tell(wave, instruction, "global", "store", address, size, lanes)

    return store


def _bind_dma(wave: Wave, instruction: Instruction, record: VmemAccess, locate: Any) -> Closure:
    """Loads that go to LDS at M0 + 16 (4) bytes a lane; they count on vmcnt."""
    index, size, lds = instruction.index, record.size, wave.lds
    offset = instruction.modifiers.get("offset", 0)
    is_buffer = instruction.encoding == "MUBUF"
    registers = wave.scalars
    plans: dict[int, Plan] = {}

    def plan_for(m0: int, lanes: Array | None) -> Plan:
        known = plans.get(m0) if lanes is None else None
        if known is None:
            where = vmem.dma_lds_address(m0, offset, size, is_buffer)[np.newaxis]
            known = lds.plan(where, size, lanes, wave)
            if lanes is None and known.lanes is None:
                plans[m0] = known
        return known

    def load() -> None:
        wave.current = index
        lanes = wave.active_lanes()
        address, in_range = locate()
        rows = _fetch(wave, address, in_range, size, lanes)
        plan = plan_for(registers[M0], lanes)
        operation = Operation(index, "vmcnt", wave.number, lanes=plan.lanes, dma=(plan, rows))
        lds.start_dma(plan, wave, operation)
        wave.issue(operation)
        if wave.launch.observer is not None:
            tell(wave, instruction, "global", "dma", address, size, lanes)
            tell(wave, instruction, "lds", "dma", plan.addresses, size, plan.lanes)

    return load
