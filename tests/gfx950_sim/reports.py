"""What the simulator found wrong: reports, and the exception of strict mode."""

from dataclasses import dataclass, field

FAULTS = {
    "out_of_bounds": "an access outside every allocation",
    "read_only": "a store to an allocation mapped read-only",
    "uninitialized_memory": "a load of global bytes never written",
    "uninitialized_lds": "a read of LDS bytes this workgroup never wrote",
    "uninitialized_register": "a read of a register never written",
    "pending_register": "a use of a register whose load has not been waited for",
    "pending_overwrite": "a write to a register that an outstanding load will overwrite",
    "lds_bounds": "an LDS access past the workgroup's size",
    "lds_race": "LDS bytes used by two waves with no barrier between",
    "lds_unfinished": "LDS bytes used after a barrier before which the other wave had not waited",
    "lds_dma": "LDS bytes used while a DMA load to them is outstanding",
    "misaligned": "an address that is not a multiple of what the instruction needs",
    "exec": "an instruction that needs every lane, run with lanes off",
    "conflicting_stores": "two workgroups store different values to one address",
    "barrier": "waves of a workgroup that do not all reach the barrier",
}


class SimulationFault(AssertionError):
    """Strict mode's exception; ``report`` says what happened."""

    def __init__(self, report: "Report") -> None:
        super().__init__(str(report))
        self.report = report


@dataclass
class Report:
    """One fault; repeats of the same kind at the same instruction are only counted."""

    kind: str
    """A key of `FAULTS`."""
    detail: str
    instruction: str
    index: int
    pc: int
    workgroup: int
    wave: int
    lane: int | None = None
    address: int | None = None
    repeats: int = 0

    def __str__(self) -> str:
        where = f"workgroup {self.workgroup}, wave {self.wave}"
        if self.lane is not None:
            where += f", lane {self.lane}"
        if self.address is not None:
            where += f", address {self.address:#x}"
        again = f" (and {self.repeats} times more)" if self.repeats else ""
        return f"{self.kind}: {self.instruction} at pc {self.pc:#x}, {where}: {self.detail}{again}"


@dataclass
class Reporter:
    """Collects reports, or raises the first one when ``strict``."""

    strict: bool = True
    reports: list[Report] = field(default_factory=list)
    _seen: dict[tuple[str, int], Report] = field(default_factory=dict)

    def add(self, report: Report) -> None:
        """Record a fault.

        Raises:
            SimulationFault: in strict mode.
        """
        earlier = self._seen.get((report.kind, report.index))
        if earlier is not None:
            earlier.repeats += 1
            return
        self._seen[report.kind, report.index] = report
        self.reports.append(report)
        if self.strict:
            raise SimulationFault(report)
