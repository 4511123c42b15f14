"""What a run leaves for the cost model: each wave's instructions and what its memory accesses
demanded.

The record is all the timeline needs, so a parameter can change without running the kernel again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gfx950_sim import banks
from gfx950_sim.decode import Instruction
from gfx950_sim.hooks import MemoryEvent

SECTOR_BYTES = 64
"""What L1 delivers in a clock, and the least that L2 reads from memory (half a line of 128
bytes)."""


@dataclass(slots=True)
class Demand:
    """What one executed memory instruction asked of the LDS and the memory."""

    lds_phases: int = 0
    lds_least: int = 0
    """Phases without bank conflicts."""
    lds_bytes: int = 0
    lds_write: bool = False
    sectors: tuple[int, ...] = ()
    """Sectors of 64 bytes touched in global memory: their addresses divided by 64."""
    bytes: int = 0
    """Bytes the lanes asked for in global memory."""
    scalar_bytes: int = 0
    """Bytes of scalar loads."""
    store: bool = False


@dataclass(frozen=True)
class WaveTrace:
    """What one wave executed."""

    instructions: Sequence[int]
    """Indexes into the program."""
    demands: Mapping[int, Demand]
    """By position in ``instructions``."""


@dataclass
class Recorder:
    """An observer of a run (`hooks.Observer`)."""

    demands: dict[tuple[int, int], dict[int, Demand]] = field(default_factory=dict)

    def memory(self, event: MemoryEvent) -> None:
        """Notes what a memory instruction demands."""
        wave = self.demands.setdefault((event.workgroup, event.wave), {})
        demand = wave.setdefault(event.position, Demand())
        if event.space == "scalar":
            demand.scalar_bytes += event.size
            return
        active = np.broadcast_to(event.lanes, event.addresses.shape)
        moved = int(active.sum()) * event.size
        if event.space == "lds":
            write = event.kind in ("store", "dma")
            taken = banks.phases(event.addresses, event.size, event.lanes, write=write)
            demand.lds_phases += taken.taken
            demand.lds_least += taken.least
            demand.lds_bytes += moved
            demand.lds_write = write
        else:
            first = event.addresses[active].astype(np.int64)
            last = (first + event.size - 1) // SECTOR_BYTES
            demand.sectors += tuple(np.union1d(first // SECTOR_BYTES, last).tolist())
            demand.bytes += moved
            demand.store = event.kind == "store"

    def traces(
        self, executed: Mapping[tuple[int, int], Sequence[int]]
    ) -> dict[tuple[int, int], WaveTrace]:
        """One trace for each (workgroup, wave) of a run's ``result.traces``."""
        return {key: WaveTrace(order, self.demands.get(key, {})) for key, order in executed.items()}


class MemoryTotals(NamedTuple):
    """Memory traffic over some instructions."""

    lds_bytes: float
    lds_conflicts: float
    """Phases repeated because of bank conflicts."""
    lds_phases: float
    global_read: float
    """Bytes, DMA included."""
    global_written: float
    scalar_read: float

    def less(self, other: "MemoryTotals", count: float) -> "MemoryTotals":
        """The difference to another, divided by a number such as that of tiles."""
        return MemoryTotals(*((a - b) / count for a, b in zip(self, other, strict=True)))


def memory_totals(
    traces: Sequence[WaveTrace], within: frozenset[int] | None = None
) -> MemoryTotals:
    """Traffic of the instructions whose index is in ``within`` (None: all)."""
    chosen = [
        demand
        for trace in traces
        for position, demand in trace.demands.items()
        if within is None or trace.instructions[position] in within
    ]
    return MemoryTotals(
        lds_bytes=sum(d.lds_bytes for d in chosen),
        lds_conflicts=sum(d.lds_phases - d.lds_least for d in chosen),
        lds_phases=sum(d.lds_phases for d in chosen),
        global_read=sum(d.bytes for d in chosen if not d.store),
        global_written=sum(d.bytes for d in chosen if d.store),
        scalar_read=sum(d.scalar_bytes for d in chosen),
    )


def conflicts_by_instruction(
    program: Sequence[Instruction], traces: Sequence[WaveTrace]
) -> list[tuple[Instruction, int, int]]:
    """LDS instructions with bank conflicts: (instruction, times executed, phases repeated), worst
    first."""
    found: dict[int, list[int]] = {}
    for trace in traces:
        for position, demand in trace.demands.items():
            if demand.lds_phases > demand.lds_least:
                entry = found.setdefault(trace.instructions[position], [0, 0])
                entry[0] += 1
                entry[1] += demand.lds_phases - demand.lds_least
    rows = [(program[index], times, repeated) for index, (times, repeated) in found.items()]
    return sorted(rows, key=lambda row: -row[2])
