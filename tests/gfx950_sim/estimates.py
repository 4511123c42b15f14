"""What the timeline says of a compute unit, and its drawing as a Chrome trace."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gfx950_sim.costs import Parameters

SIMDS = 4
LDS_PORTS = 2
"""Two SIMDs share a port to the LDS, each port with half of its bandwidth (rocprofiler-compute,
'LDS')."""


class Span(NamedTuple):
    """A stretch of a wave's time, for a drawing."""

    slot: int
    wave: int
    name: str
    kind: str
    """"issue" or the reason of a stall."""
    start: float
    end: float


@dataclass
class Estimate:
    """What the model says of one compute unit. Times in clocks."""

    clocks: float = 0.0
    """Until the last wave ended."""
    stalls: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Clocks in which waves waited, by reason, summed over waves."""
    stalls_at: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    """The same by index of the instruction that waited, and reason."""
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Clocks in which units worked: "VALU" and "MFMA" summed over SIMDs, "LDS" over ports,
    "memory"."""
    wave_clocks: float = 0.0
    """Sum over waves of their time from start to end."""
    byte_clocks: float = 0.0
    """Bytes of loads in flight, integrated over time."""
    marks: dict[tuple[int, int, int], list[float]] = field(default_factory=dict)
    """By (slot, workgroup in the slot, wave): when each loop iteration began."""
    spans: list[Span] = field(default_factory=list)

    @property
    def bytes_in_flight(self) -> float:
        """Bytes of loads in flight, averaged over the time."""
        return self.byte_clocks / self.clocks if self.clocks else 0.0

    def utilisation(self) -> dict[str, float]:
        """Share of the time in which each unit worked."""
        units = {"VALU": SIMDS, "MFMA": SIMDS, "LDS": LDS_PORTS, "L1": 1, "memory": 1}
        return {name: self.busy[name] / (self.clocks * n) for name, n in units.items()}

    def clocks_per_iteration(self, skip: int = 1) -> float:
        """Clocks in which the compute unit completes one loop iteration of one workgroup, in the
        steady state.

        Args:
          skip: iterations at each end of a workgroup that do not count.

        Raises:
          ValueError: no workgroup has enough iterations.
        """
        rates: dict[int, list[float]] = {}
        for (slot, _, wave), times in self.marks.items():
            if wave == 0 and len(times) > 2 * skip + 1:
                middle = times[skip : len(times) - skip]
                rates.setdefault(slot, []).append((middle[-1] - middle[0]) / (len(middle) - 1))
        if not rates:
            raise ValueError(f"no workgroup has more than {2 * skip + 1} loop iterations")
        return 1 / sum(len(r) / sum(r) for r in rates.values())


def chrome_trace(result: Estimate, parameters: Parameters) -> Mapping[str, object]:
    """The spans as a Chrome trace (Perfetto opens it): a process a slot, a thread a wave;
    microseconds.

    Format: "Trace Event Format", complete events.
    """
    clocks_per_us = parameters.clock_ghz * 1000
    events: list[dict[str, object]] = [
        {
            "name": span.name,
            "cat": span.kind,
            "ph": "X",
            "ts": span.start / clocks_per_us,
            "dur": (span.end - span.start) / clocks_per_us,
            "pid": span.slot,
            "tid": span.wave,
        }
        for span in result.spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ns"}
