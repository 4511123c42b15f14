"""Running a kernel: argument segment, workgroups, waves, barriers and the order in which waves get
on."""

import random
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gfx950_sim.analysis import Analysis
from gfx950_sim.bind import AT_BARRIER, ENDED, WAITED, bind
from gfx950_sim.decode import Instruction, UnknownInstruction
from gfx950_sim.elf import Descriptor, Kernel
from gfx950_sim.hooks import Observer
from gfx950_sim.lds_memory import LdsMemory
from gfx950_sim.memory import Memory
from gfx950_sim.program import Program, load_program
from gfx950_sim.reports import Report, Reporter
from gfx950_sim.scratch import PrivateMemory
from gfx950_sim.wave import EXEC_CHANGED, Launch, Wave

Array = np.ndarray[Any, Any]
MAX_LDS_BYTES = 160 * 1024
_LAST = 1 << 62
_KEEP_DENORMALS = 0xF0
Order = str | int


@dataclass
class RunResult:
    """What a launch did."""

    program: tuple[Instruction, ...]
    reports: list[Report]
    """Faults; empty in strict mode, which raises the first one."""
    analysis: Analysis
    """Which waits and barriers were needed."""
    traces: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(workgroup, wave) -> indexes of the instructions it executed, in order."""


def run(
    kernel: Kernel,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[int | float] | bytes,
    memory: Memory,
    order: Order = "round_robin",
    *,
    switch: str | int = "barrier",
    strict: bool = True,
    observer: Observer | None = None,
    workgroups: Iterable[int] | None = None,
    keep_traces: bool = True,
    max_instructions: int = 1 << 40,
) -> RunResult:
    """Run a kernel over a grid.

    Args:
        kernel: from `CodeObject.kernel`.
        grid: workgroups in x, y, z.
        block: work items of a workgroup in x, y, z.
        args: the explicit arguments in order (addresses and ints, floats), or the packed argument
            segment.
        memory: what the kernel can reach.
        order: which wave runs next at a switch point: "round_robin", "reversed" or the seed of a
            random choice. It also orders the workgroups.
        switch: where a wave gives way: "barrier", "wait" (each s_waitcnt and barrier) or after so
            many instructions. A random order takes a random number of instructions each time.
        strict: raise the first fault; otherwise collect them in ``reports`` and go on.
        observer: told of each memory access.
        workgroups: linear numbers of those to run; all by default.
        keep_traces: fill ``traces``.
        max_instructions: of one wave; more is taken for an endless loop.

    Raises:
        SimulationFault: in strict mode, at the first fault.
        UnknownInstruction: the kernel needs something that is not modelled.
        ValueError: arguments, grid or LDS size that the hardware or the kernel does not take.
    """
    grid3, block3 = _three(grid, "grid"), _three(block, "block")
    items = block3[0] * block3[1] * block3[2]
    if not 1 <= items <= min(1024, kernel.metadata.get(".max_flat_workgroup_size", 1024)):
        raise ValueError(
            f"block {block3} has {items} work items, the kernel takes at most "
            f"{kernel.metadata.get('.max_flat_workgroup_size', 1024)}"
        )
    if kernel.lds_bytes > MAX_LDS_BYTES:
        raise ValueError(f"{kernel.lds_bytes} bytes of LDS, a workgroup can have {MAX_LDS_BYTES}")
    if kernel.descriptor.float_mode != _KEEP_DENORMALS or not kernel.descriptor.ieee_mode:
        raise UnknownInstruction(
            f"{kernel.symbol} runs with MODE bits {kernel.descriptor.float_mode:#04x} (IEEE "
            f"{kernel.descriptor.ieee_mode}); modelled: round to nearest, keep denormals, IEEE"
        )
    program = load_program(kernel.code)
    reporter, analysis = Reporter(strict), Analysis()
    launch = Launch(memory, reporter, analysis, observer)
    launch.fp16_ovfl = int(kernel.descriptor.fp16_overflow)
    result = RunResult(program.instructions, reporter.reports, analysis)
    segment = args if isinstance(args, bytes) else pack_arguments(kernel, args, grid3, block3)
    # The runtime's segments are padded; LLVM widens scalar loads up to the next 64 bytes.
    kernarg = np.frombuffer(segment.ljust(-len(segment) % 64 + len(segment) or 64, b"\0"), np.uint8)
    kernarg_address = memory.map(kernarg, name="kernel arguments")
    memory.start_launch()
    group = _GROUPS.take(program, kernel, -(-items // 64))
    group.attach(launch)
    numbers = list(range(grid3[0] * grid3[1] * grid3[2]) if workgroups is None else workgroups)
    if order == "reversed":
        numbers.reverse()
    elif isinstance(order, int):
        random.Random(order).shuffle(numbers)
    try:
        with np.errstate(all="ignore"):
            for number in numbers:
                group.start(number, grid3, block3, kernarg_address)
                group.execute(order, switch, max_instructions)
                if keep_traces:
                    for wave in group.waves:
                        result.traces[number, wave.number] = wave.trace
        _GROUPS.give_back(group)
    finally:
        memory.unmap(kernarg_address)
    return result


def _three(sizes: Sequence[int], name: str) -> tuple[int, int, int]:
    padded = (*sizes, 1, 1)[:3]
    if len(sizes) > 3 or any(int(n) < 1 for n in padded):
        raise ValueError(f"{name} must be one to three positive numbers, got {tuple(sizes)}")
    return int(padded[0]), int(padded[1]), int(padded[2])


def pack_arguments(
    kernel: Kernel,
    args: Sequence[int | float],
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
) -> bytes:
    """The argument segment: explicit values where the metadata says, hidden ones filled as the
    runtime does."""
    segment = bytearray(max(kernel.descriptor.kernarg_bytes, 0))
    values = list(args)
    hidden: dict[str, tuple[str, int]] = {"hidden_grid_dims": ("<H", 3)}
    for i, axis in enumerate("xyz"):
        hidden[f"hidden_block_count_{axis}"] = ("<I", grid[i])
        hidden[f"hidden_group_size_{axis}"] = ("<H", block[i])
        hidden[f"hidden_remainder_{axis}"] = ("<H", 0)
        hidden[f"hidden_global_offset_{axis}"] = ("<Q", 0)
    for argument in kernel.arguments:
        if argument.value_kind.startswith("hidden_"):
            if argument.value_kind in hidden:
                struct.pack_into(*_form(hidden[argument.value_kind], argument.offset, segment))
            continue
        if not values:
            raise ValueError(f"{kernel.symbol} takes more than {len(args)} arguments")
        value = values.pop(0)
        size = argument.size
        if isinstance(value, float):
            data = struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)
        else:
            data = (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        segment[argument.offset : argument.offset + size] = data
    if values:
        raise ValueError(
            f"{kernel.symbol} takes {len(args) - len(values)} arguments, got {len(args)}"
        )
    return bytes(segment)


def _form(entry: tuple[str, int], offset: int, segment: bytearray) -> tuple[Any, ...]:
    return entry[0], segment, offset, entry[1]


class Workgroup:
    """The waves of one workgroup at a time and their LDS."""

    def __init__(self, program: Program, kernel: Kernel, waves: int) -> None:
        self.program, self.kernel = program, kernel
        self.lds = LdsMemory(kernel.lds_bytes, waves, program.lds_granule)
        self.waves = [Wave(program, number, self.lds) for number in range(waves)]
        for wave in self.waves:
            wave.private = PrivateMemory(kernel.descriptor.private_segment_bytes)

    def attach(self, launch: Launch) -> None:
        """Work for this launch from now on."""
        self.lds.analysis = launch.analysis
        for wave in self.waves:
            wave.launch = launch

    def start(
        self,
        number: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        kernarg_address: int,
    ) -> None:
        """Registers as at kernel entry (LLVM AMDGPU guide, "Initial Kernel Execution State")."""
        self.lds.start_workgroup()
        items = block[0] * block[1] * block[2]
        for wave in self.waves:
            wave.reset(number)
            wave.private.written.fill(False)
            item = np.arange(64) + 64 * wave.number
            x, y = item % block[0], item // block[0] % block[1]
            z = item // (block[0] * block[1])
            wave.vgpr[0] = x | y << 10 | z << 20
            wave.define_vgpr(0)
            on = min(items - 64 * wave.number, 64)
            wave.set_exec((1 << on) - 1)
            for at, value in enumerate(self._entry_sgprs(number, grid, kernarg_address)):
                wave.scalars[at] = value
                wave.define_sgprs(at, 1)

    def _entry_sgprs(
        self, number: int, grid: tuple[int, int, int], kernarg_address: int
    ) -> list[int]:
        descriptor = self.kernel.descriptor
        # User registers in the order of the descriptor's enable bits, as (bit, dwords).
        values: list[int] = []
        for bit, name in enumerate(
            (
                "private segment buffer",
                "dispatch pointer",
                "queue pointer",
                "kernarg",
                "dispatch id",
                "flat scratch",
                "private segment size",
            )
        ):
            if not descriptor.properties >> bit & 1:
                continue
            if name != "kernarg":
                raise UnknownInstruction(f"kernel entry with the {name} is not modelled")
            values += [kernarg_address & 0xFFFFFFFF, kernarg_address >> 32]
        if descriptor.preload & 0x7F:
            raise UnknownInstruction("kernel argument preloading is not modelled")
        user = descriptor.rsrc2 >> 1 & 31
        values += [0] * (user - len(values))
        x, rest = number % grid[0], number // grid[0]
        y, z = rest % grid[1], rest // grid[1]
        for bit, value in ((7, x), (8, y), (9, z)):
            if descriptor.rsrc2 >> bit & 1:
                values.append(value)
        return values

    def execute(self, order: Order, switch: str | int, max_instructions: int) -> None:
        """Run all waves to their ends."""
        chance = random.Random(order) if isinstance(order, int) else None
        waiting: set[int] = set()
        running = [w.number for w in self.waves]
        if order == "reversed":
            running.reverse()
        at_wait = switch == "wait" or chance is not None
        while running or waiting:
            if not running:  # everybody who is left has reached the barrier
                running = sorted(waiting, reverse=order == "reversed")
                waiting.clear()
                if len(running) < len(self.waves):  # hardware lets them pass; no kernel means it
                    wave = self.waves[running[0]]
                    wave.current = wave.barriers[-1]
                    ended = {w.number for w in self.waves} - set(running)
                    wave.report("barrier", f"without waves {sorted(ended)}, which have ended")
                for number in running:
                    self.waves[number].epoch += 1
            number = chance.choice(running) if chance else running[0]
            wave = self.waves[number]
            budget = switch if isinstance(switch, int) else _LAST
            if chance:
                budget = chance.choice((7, 50, 400, _LAST))
            left = max_instructions - len(wave.trace)
            signal = advance(wave, min(budget, left), at_wait)
            if len(wave.trace) >= max_instructions and signal != ENDED:
                raise RuntimeError(
                    f"wave {number} ran {len(wave.trace)} instructions: endless loop?"
                )
            running.remove(number)
            if signal == AT_BARRIER:
                waiting.add(number)
            elif signal != ENDED:
                running.append(number)


class WorkgroupCache:
    """Idle workgroups by kernel: their closures are bound already, so that a later launch starts
    at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._idle: list[tuple[tuple[bytes, Descriptor, int], Workgroup]] = []
        self._lock = threading.Lock()

    def take(self, program: Program, kernel: Kernel, waves: int) -> Workgroup:
        """An idle workgroup of this kernel, or a new one."""
        key = (kernel.code, kernel.descriptor, waves)
        with self._lock:
            for at, (known, group) in enumerate(self._idle):
                if known == key:
                    del self._idle[at]
                    return group
        return Workgroup(program, kernel, waves)

    def give_back(self, group: Workgroup) -> None:
        """Keep a workgroup that has ended without an exception; the oldest one is dropped."""
        key = (group.kernel.code, group.kernel.descriptor, len(group.waves))
        for wave in group.waves:  # let go of the launch's memory
            del wave.launch
            wave.reset(0)
        with self._lock:
            self._idle.append((key, group))
            del self._idle[: -self._most]


_GROUPS = WorkgroupCache(most=8)


def advance(wave: Wave, budget: int, at_wait: bool) -> int:
    """Run a wave to its next barrier or end, or (signal WAITED) to a wait if ``at_wait``, or for
    ``budget`` instructions."""
    program = wave.program
    touches, special = program.touches, program.special
    append = wave.trace.append
    pc = wave.pc
    operations = wave.full if wave.all_lanes else wave.masked
    while budget > 0:
        budget -= 1
        if touches[pc] & wave.suspect:
            wave.inspect(pc)
        append(pc)
        operation = operations[pc]
        if operation is None:
            wave.full[pc], wave.masked[pc] = bind(wave, pc)
            operation = operations[pc]
            assert operation is not None
        if not special[pc]:
            operation()
            pc += 1
            continue
        signal: int = operation()
        if signal >= 0:
            pc = signal
            continue
        if signal == AT_BARRIER:
            wave.launch.analysis.executed.add(pc)
            wave.barriers.append(pc)
        pc += 1
        if signal == EXEC_CHANGED:
            operations = wave.full if wave.all_lanes else wave.masked
        elif signal != WAITED or at_wait:
            wave.pc = pc
            return signal
    wave.pc = pc
    return WAITED
