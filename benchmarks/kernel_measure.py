"""A kernel's counts and estimates, from its code object and the simulator.

Counts are exact for the machine code. Every time is an ESTIMATE of the simulator's cost model
(tests/gfx950_sim/COSTS.md): nobody measured it on hardware. Figures are for 16 heads and tiles of
128 entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gfx950_sim import counts
from gfx950_sim.costs import Parameters
from gfx950_sim.estimates import LDS_PORTS, SIMDS, Estimate
from gfx950_sim.recording import MemoryTotals, memory_totals
from gfx950_sim.timeline import Workgroup, estimate

from benchmarks.kernel_run import HEADS, Run, SparseMla, Weights, executed, make_inputs
from jax_sparse_mla.kernel.contract import TILE

SHORT, LONG = 1024, 2048
"""Row lengths whose difference gives what one more tile costs."""
STAGGERS = (1, 4, 7)
"""Starts of the second workgroup, in multiples of the parameter."""
LDS_BYTES = 160 * 1024
VGPRS = 512
DECODE_ROWS = 256


@dataclass(frozen=True)
class Decode:
    """A decode step's estimate."""

    splits: int
    microseconds: float


class Measured:
    """A kernel's counts and estimates.

    A tile may cost more if its entries matter more than those before (softmax.py in the kernel:
    it is refined). What is said of a tile is for even weights, none refined; ``refined`` has the
    same for rows with every tile refined; decode steps are of random weights.

    Args:
      kernel: what to measure.
      parameters: the cost model's setting.
      weights: of the rows measured.
    """

    def __init__(
        self, kernel: SparseMla, parameters: Parameters | None = None, weights: Weights = "even"
    ) -> None:
        self.kernel = kernel
        self.parameters = parameters or Parameters()
        self.weights: Weights = weights
        self._runs: dict[tuple[Weights, int], Run] = {}
        self._played: dict[tuple[int, int, float, float, float], Estimate] = {}

    def with_parameters(self, parameters: Parameters) -> "Measured":
        """The same runs under another setting."""
        return self._other(parameters, self.weights)

    @cached_property
    def refined(self) -> "Measured":
        """The same of rows with every tile refined."""
        return self._other(self.parameters, "rising")

    @cached_property
    def random(self) -> "Measured":
        """The same of rows with random weights."""
        return self._other(self.parameters, "random")

    def _other(self, parameters: Parameters, weights: Weights) -> "Measured":
        other = Measured(self.kernel, parameters, weights)
        other._runs = self._runs
        return other

    def run(self, entries: int) -> Run:
        """Two rows of a length, simulated once."""
        key = self.weights, entries
        if key not in self._runs:
            self._runs[key] = self.kernel.run(make_inputs(2, entries, self.weights))
        return self._runs[key]

    @property
    def faults(self) -> list[str]:
        """What the simulator found wrong in all runs so far."""
        return [fault for run in self._runs.values() for fault in run.faults]

    # From the code object ------------------------------------------------------------------------

    @property
    def vgprs(self) -> int:
        """Vector registers, accumulators included."""
        return int(self.kernel.kernel.metadata[".vgpr_count"])

    @property
    def spills(self) -> int:
        """Spilled vector and scalar registers."""
        metadata = self.kernel.kernel.metadata
        return int(metadata[".vgpr_spill_count"]) + int(metadata[".sgpr_spill_count"])

    @property
    def resident(self) -> int:
        """Workgroups that fit on a compute unit at once."""
        allocated = -(-self.vgprs // 8) * 8
        waves_a_simd = -(-self.kernel.waves // 4)
        return min(LDS_BYTES // self.kernel.kernel.lds_bytes, VGPRS // allocated // waves_a_simd)

    @property
    def waves_per_simd(self) -> int:
        """Waves of all resident workgroups on one SIMD."""
        return self.resident * -(-self.kernel.waves // 4)

    @cached_property
    def loop(self) -> counts.Loop:
        """The hot loop."""
        traces = [trace.instructions for trace in executed(self.run(LONG))]
        found = counts.hot_loop(self.kernel.program.instructions, traces)
        if found is None:
            raise ValueError(f"{self.kernel.kernel.symbol} has no loop")
        return found

    @cached_property
    def static_loop(self) -> counts.Counts:
        """The hot loop's machine code."""
        return counts.Counts.of(self.loop.instructions(self.kernel.program.instructions))

    # From the traces -----------------------------------------------------------------------------

    def _executed(self, entries: int, *, loop_only: bool = False) -> counts.Counts:
        """Instructions of an average wave."""
        waves = executed(self.run(entries))
        body = self.loop.body
        by_class: dict[counts.Class, float] = {}
        for trace in waves:
            for index in trace.instructions:
                if loop_only and index not in body:
                    continue
                found = self._classes[index]
                by_class[found] = by_class.get(found, 0.0) + 1 / len(waves)
        return counts.Counts(by_class)

    @cached_property
    def _classes(self) -> list[counts.Class]:
        return [counts.classify(i) for i in self.kernel.program.instructions]

    def _more(self, *, loop_only: bool) -> counts.Counts:
        less = self._executed(SHORT, loop_only=loop_only).by_class
        more = self._executed(LONG, loop_only=loop_only).by_class
        tiles = (LONG - SHORT) / TILE
        return counts.Counts({c: (n - less.get(c, 0.0)) / tiles for c, n in more.items()})

    @cached_property
    def tile(self) -> counts.Counts:
        """Instructions a wave executes in the hot loop for one more tile."""
        return self._more(loop_only=True)

    @cached_property
    def beside_loop(self) -> float:
        """Instructions a wave executes for one more tile outside the hot loop."""
        return self._more(loop_only=False).total - self.tile.total

    @cached_property
    def outside(self) -> float:
        """Instructions a wave executes whatever the row's length, if all its tiles cost the same:
        that even the first does is so of rising weights."""
        each = self.tile.total + self.beside_loop
        return self._executed(LONG).total - each * LONG / TILE

    @property
    def refined_share(self) -> float:
        """Share of the tiles of a long row of random weights that are refined: they take more
        matrix instructions."""
        plain, refined = (m.tile.group(counts.MFMA) for m in (self, self.refined))
        tiles = LONG / TILE
        more = self.random._executed(LONG).group(counts.MFMA) / tiles - plain
        return more / (refined - plain) if refined > plain else 0.0

    @cached_property
    def tile_memory(self) -> MemoryTotals:
        """Traffic of a workgroup for one more tile."""
        less = memory_totals(executed(self.run(SHORT)))
        more = memory_totals(executed(self.run(LONG)))
        count = (LONG - SHORT) / TILE * len(self.run(LONG).workgroups)
        return more.less(less, count)

    @cached_property
    def floors(self) -> dict[str, float]:
        """Clocks a compute unit needs for one more tile of one workgroup if one unit alone were
        busy."""
        more, less = self.play(LONG, 1), self.play(SHORT, 1)
        tiles = (LONG - SHORT) / TILE
        shares = {"VALU": SIMDS, "MFMA": SIMDS, "LDS": LDS_PORTS, "L1": 1, "memory": 1}
        floors = {
            unit: (more.busy[unit] - less.busy[unit]) / tiles / count
            for unit, count in shares.items()
        }
        return floors | {"issue of a wave": self.tile.total * self.parameters.issue}

    @property
    def fetched_bytes(self) -> float:
        """Bytes, in whole sectors, that L1 fetches for one more entry (a record of 656, an
        index)."""
        return self.floors["memory"] * self.parameters.l2_bytes / TILE

    # Estimates -----------------------------------------------------------------------------------

    def play(
        self,
        entries: int,
        residents: int,
        *,
        latency: float | None = None,
        bandwidth: float | None = None,
        stagger: float | None = None,
    ) -> Estimate:
        """One row on each of some resident workgroups; without a latency or bandwidth, L2's."""
        stagger = self.parameters.stagger if stagger is None else stagger
        latency = self.parameters.l2_latency if latency is None else latency
        bandwidth = self.parameters.l2_bytes if bandwidth is None else bandwidth
        key = (entries, residents, latency, bandwidth, stagger)
        if key not in self._played:
            rows: Sequence[Workgroup] = self.run(entries).workgroups
            self._played[key] = estimate(
                self.kernel.program,
                [[rows[slot % len(rows)]] for slot in range(residents)],
                replace(self.parameters, stagger=stagger),
                latency=latency,
                bandwidth=bandwidth,
            )
        return self._played[key]

    def timeline(self, entries: int) -> Estimate:
        """The resident workgroups' waves at L2's latency, with what each did when."""
        rows: Sequence[Workgroup] = self.run(entries).workgroups[: self.residents]
        slots = [[row] for row in rows]
        return estimate(self.kernel.program, slots, self.parameters, spans=True)

    def clocks_per_tile(self, residents: int, latency: float | None = None) -> float:
        """Clocks a compute unit takes for one more tile, with that many workgroups on it.

        Workgroups side by side can fall into step or not: the mean over some distances of their
        starts.
        """
        starts = STAGGERS if residents > 1 else STAGGERS[:1]
        clocks = 0.0
        for factor in starts:
            stagger = factor * self.parameters.stagger
            more = self.play(LONG, residents, latency=latency, stagger=stagger).clocks
            clocks += more - self.play(SHORT, residents, latency=latency, stagger=stagger).clocks
        return clocks / len(starts) / ((LONG - SHORT) / TILE * residents)

    @property
    def residents(self) -> int:
        """Workgroups the estimates put on a compute unit: two where they fit."""
        return min(2, self.resident)

    def memory_stall(self, latency: float) -> float:
        """Share of a tile's time that memory latency adds, against memory that answers at once."""
        ideal = self.clocks_per_tile(self.residents, 0.0)
        return 1 - ideal / self.clocks_per_tile(self.residents, latency)

    @cached_property
    def steady(self) -> Estimate:
        """Two long rows side by side at L2's latency."""
        return self.play(LONG, self.residents)

    def decode_many(self) -> Decode:
        """256 rows of 2,048 entries, without the launch: HBM's bandwidth is shared by all compute
        units."""
        p = self.parameters
        options = []
        for splits in range(1, self.residents + 1):
            clocks = self.random.play(
                LONG // splits, splits, latency=p.hbm_latency, bandwidth=p.hbm_bytes
            ).clocks
            microseconds = (p.workgroup_start + clocks) / (p.clock_ghz * 1000)
            options.append(Decode(splits, microseconds + self._merge(DECODE_ROWS, splits)))
        return min(options, key=lambda option: option.microseconds)

    def decode_one(self) -> Decode:
        """One row of 2,048 entries, split over compute units; with the launches."""
        p = self.parameters
        options = []
        for entries in (128, 256):
            splits = LONG // entries
            clocks = self.random.play(entries, 1, latency=p.idle_latency).clocks
            microseconds = p.launch_us + (p.workgroup_start + clocks) / (p.clock_ghz * 1000)
            options.append(Decode(splits, microseconds + self._merge(1, splits)))
        return min(options, key=lambda option: option.microseconds)

    def _merge(self, rows: int, splits: int) -> float:
        """Microseconds for merging: one more launch, the partial results written before and read
        from L2 or HBM."""
        if splits == 1:
            return 0.0
        p = self.parameters
        moved = rows * splits * HEADS * 512 * 4
        units = min(p.compute_units, rows * HEADS)
        clocks = p.workgroup_start + 2 * p.l2_latency + moved / (p.l2_bytes * units)
        return p.launch_us + clocks / (p.clock_ghz * 1000)
