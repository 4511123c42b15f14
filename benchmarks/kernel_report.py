"""What the kernel costs, from its code object and the simulator: ``python -m
benchmarks.kernel_report``.

Counts are exact for the machine code. Every time is an ESTIMATE of the simulator's cost model
(tests/gfx950_sim/COSTS.md): nobody measured it on hardware. Figures are for 16 heads and tiles of
128 entries.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from gfx950_sim import counts
from gfx950_sim.costs import Parameters
from gfx950_sim.decode import UnknownInstruction
from gfx950_sim.recording import MemoryTotals, conflicts_by_instruction, memory_totals
from gfx950_sim.timeline import LDS_PORTS, SIMDS, Estimate, Workgroup, chrome_trace, estimate

from benchmarks.kernel_run import HEADS, Run, SparseMla, executed, make_inputs
from jax_sparse_mla.kernel import contract
from jax_sparse_mla.kernel.specialisation import ALL

TILE = 128
SHORT, LONG = 1024, 2048
"""Row lengths whose difference gives what one more tile costs."""
STAGGERS = (1, 4, 7)
"""Starts of the second workgroup, in multiples of the parameter."""
ROW_BYTES = contract.RECORD_BYTES
LDS_BYTES = 160 * 1024
VGPRS = 512
DECODE_ROWS = 256
PEAK_BYTES_PER_US = 8.0e6


@dataclass(frozen=True)
class Decode:
    """A decode step's estimate."""

    splits: int
    microseconds: float


class Measured:
    """A kernel's counts and estimates.

    Args:
      kernel: what to measure.
      parameters: the cost model's setting.
    """

    def __init__(self, kernel: SparseMla, parameters: Parameters | None = None) -> None:
        self.kernel = kernel
        self.parameters = parameters or Parameters()
        self._runs: dict[int, Run] = {}
        self._played: dict[tuple[int, int, float, float, float], Estimate] = {}

    def with_parameters(self, parameters: Parameters) -> "Measured":
        """The same runs under another setting."""
        other = Measured(self.kernel, parameters)
        other._runs = self._runs
        return other

    def run(self, entries: int) -> Run:
        """Two rows of a length, simulated once."""
        if entries not in self._runs:
            self._runs[entries] = self.kernel.run(make_inputs(2, entries))
        return self._runs[entries]

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
        """Instructions a wave executes whatever the row's length."""
        each = self.tile.total + self.beside_loop
        return self._executed(LONG).total - each * LONG / TILE

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
        """Bytes, in whole sectors, that L1 fetches for one more entry (a record of 656, an index)."""
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
            clocks = self.play(
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
            clocks = self.play(entries, 1, latency=p.idle_latency).clocks
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


class Row(NamedTuple):
    """A line of the target table."""

    label: str
    value: Callable[[Measured], float]
    form: str
    target: float | None
    """At most this; for `at_least`, at least."""
    at_least: bool = False
    float32_more: float = 0
    """What the float32 scale format may take above the target."""

    def met(self, name: str, value: float | None) -> bool:
        """Whether a kernel of that name meets the target."""
        if self.target is None:
            return True
        if value is None:
            return False
        target = self.target + (self.float32_more if "float32" in name else 0)
        return value >= target if self.at_least else value <= target + 1e-9


def target_rows(baseline_clocks: float) -> list[Row]:
    """The table of targets; estimated clocks are compared with the baseline's."""
    floor = DECODE_ROWS * LONG * ROW_BYTES / PEAK_BYTES_PER_US
    return [
        Row("VGPRs (all kinds)", lambda m: m.vgprs, "{:.0f}", 256),
        Row("spills", lambda m: m.spills, "{:.0f}", 0),
        Row("simulator's faults", lambda m: len(m.run(LONG).faults), "{:.0f}", 0),
        Row("LDS bytes", lambda m: m.kernel.kernel.lds_bytes, "{:,.0f}", None),
        Row("waves a SIMD", lambda m: m.waves_per_simd, "{:.0f}", 2, at_least=True),
        Row(
            "VALU a tile a wave",
            lambda m: m.tile.group(counts.VALU),
            "{:.1f}",
            230,
            float32_more=40,
        ),
        Row("MFMA a tile a wave", lambda m: m.tile.group(counts.MFMA), "{:.1f}", None),
        Row("LDS instructions a tile a wave", lambda m: m.tile.group(counts.LDS), "{:.1f}", 75),
        Row("LDS KB a tile", lambda m: m.tile_memory.lds_bytes / 1000, "{:.1f}", 230),
        Row("LDS conflict phases a tile", lambda m: m.tile_memory.lds_conflicts, "{:.1f}", 0),
        Row("LDS phases a tile", lambda m: m.tile_memory.lds_phases, "{:.0f}", None),
        Row("bytes from L2 an entry, estimate", lambda m: m.fetched_bytes, "{:.0f}", None),
        Row("barriers a tile", lambda m: m.tile.group(counts.BARRIER), "{:.1f}", 2),
        Row("waits a tile", lambda m: m.tile.group(counts.WAIT), "{:.1f}", None),
        Row("memory stall at 500 clocks, estimate", lambda m: m.memory_stall(500), "{:.1%}", 0.15),
        Row(
            "memory stall at 2,000 clocks, estimate",
            lambda m: m.memory_stall(2000),
            "{:.1%}",
            0.15,
        ),
        Row(
            "KB in flight a CU at 2,000 clocks, estimate",
            lambda m: m.play(LONG, m.residents, latency=2000).bytes_in_flight / 1000,
            "{:.1f}",
            32,
            at_least=True,
        ),
        Row(
            "clocks a tile a CU, estimate",
            lambda m: m.clocks_per_tile(m.residents),
            "{:,.0f}",
            None,
        ),
        Row(
            "  against the baseline's",
            lambda m: m.clocks_per_tile(m.residents) / baseline_clocks,
            "{:.2f}",
            0.6,
        ),
        Row("instructions a tile beside the loop", lambda m: m.beside_loop, "{:.1f}", None),
        Row("instructions outside the loop", lambda m: m.outside, "{:,.0f}", 1000),
        Row(
            "decode n = 256, us, estimate",
            lambda m: m.decode_many().microseconds,
            "{:.1f}",
            1.25 * floor,
        ),
        Row("  splits", lambda m: m.decode_many().splits, "{:.0f}", None),
        Row("decode n = 1, us, estimate", lambda m: m.decode_one().microseconds, "{:.1f}", 6),
        Row("  parts", lambda m: m.decode_one().splits, "{:.0f}", None),
    ]


BASELINE = {
    "VGPRs (all kinds)": 260.0,
    "spills": 0.0,
    "simulator's faults": 0.0,
    "LDS bytes": 84240.0,
    "waves a SIMD": 1.0,
    "VALU a tile a wave": 312.0,
    "MFMA a tile a wave": 52.0,
    "LDS instructions a tile a wave": 84.0,
    "LDS KB a tile": 269.3,
    "LDS conflict phases a tile": 24.0,
    "LDS phases a tile": 1408.0,
    "bytes from L2 an entry, estimate": 727.0,
    "barriers a tile": 3.0,
    "waits a tile": 45.0,
    "memory stall at 500 clocks, estimate": 0.114,
    "memory stall at 2,000 clocks, estimate": 0.414,
    "KB in flight a CU at 2,000 clocks, estimate": 20.2,
    "clocks a tile a CU, estimate": 5825.0,
    "  against the baseline's": 1.0,
    "instructions a tile beside the loop": 12.1,
    "instructions outside the loop": 1503.0,
    "decode n = 256, us, estimate": 97.9,
    "  splits": 1.0,
    "decode n = 1, us, estimate": 11.1,
    "  parts": 16.0,
}
"""The comparison kernel's figures by row label: what this report says of vLLM's FlyDSL sparse MLA
kernel for gfx950 (its text compiled by FlyDSL 0.5.0 for 16 heads, invalid entries and LSE). Give
its code object as --baseline to see them computed."""
BASELINE_CLOCKS = BASELINE["clocks a tile a CU, estimate"]


def evaluate(row: Row, measured: Measured) -> float | None:
    """A row's value; None where the simulator cannot run the kernel."""
    try:
        return row.value(measured)
    except UnknownInstruction:
        return None


def print_table(kernels: dict[str, Measured], baseline: Measured | None) -> bool:
    """Prints the target table; returns whether every target is met."""
    clocks = BASELINE_CLOCKS if baseline is None else baseline.clocks_per_tile(baseline.residents)
    width = 18
    names = [name.removeprefix("sparse_mla_") for name in kernels]
    head = "".join(f"{name[: width - 1]:>{width}}" for name in names)
    print(f"{'':45}{'baseline':>10}{'target':>12}{head}")
    met = True
    for row in target_rows(clocks):
        known = row.value(baseline) if baseline is not None else BASELINE.get(row.label)
        line = f"{row.label:45}{'' if known is None else row.form.format(known):>10}"
        bound = "" if row.target is None else row.form.format(row.target)
        sign = "" if row.target is None else (">= " if row.at_least else "<= ")
        line += f"{sign + bound:>12}"
        for name, measured in kernels.items():
            value = evaluate(row, measured)
            good = row.met(name, value)
            met = met and good
            text = "not run" if value is None else row.form.format(value)
            line += f"{text + ('' if good else ' *'):>{width}}"
        print(line, flush=True)
    print("float32 scales may take 40 VALU a tile more.")
    print("* misses its target; every time is an estimate of tests/gfx950_sim/COSTS.md's model")
    return met


def print_classes(name: str, measured: Measured) -> None:
    """Prints a wave's instructions for one tile by class, and what binds."""
    try:
        measured.kernel.program  # noqa: B018
    except UnknownInstruction as error:
        print(f"\n{name} was not run: {error}")
        return
    for fault in measured.run(LONG).faults[:5]:
        print(f"\n{name}: FAULT {fault}")
    print(f"\n{name}: instructions a wave executes for a tile (in the loop's machine code)")
    for group in counts.GROUPS:
        tile, static = measured.tile.group(group), measured.static_loop.group(group)
        if tile or static:
            kinds = ", ".join(
                f"{kind} {number:g}"
                for kind, number in measured.tile.kinds(group).items()
                if number
            )
            print(f"  {group:14}{tile:8.1f} ({static:.0f})  {kinds}")
    conflicts = conflicts_by_instruction(
        measured.kernel.program.instructions, executed(measured.run(LONG))
    )
    for instruction, times, repeated in conflicts[:8]:
        each = repeated / times
        print(
            f"  bank conflicts: pc {instruction.pc:#x} {instruction.text}: {each:.1f} more phases"
        )
    floors = ", ".join(f"{unit} {clocks:,.0f}" for unit, clocks in measured.floors.items())
    print(f"  clocks of a tile if one unit alone worked, estimate: {floors}")
    steady = measured.steady
    shares = ", ".join(f"{unit} {share:.0%}" for unit, share in steady.utilisation().items())
    print(f"  units at work, estimate: {shares}")
    waiting = sorted(steady.stalls.items(), key=lambda kv: -kv[1])
    shares = ", ".join(f"{why} {clocks / steady.wave_clocks:.0%}" for why, clocks in waiting[:8])
    print(f"  a wave's time goes to, estimate: {shares}")


def print_stalls(name: str, measured: Measured, count: int) -> None:
    """Prints the instructions at which waves wait longest."""
    steady = measured.steady
    tiles = LONG / TILE * len(steady.marks)
    print(f"\n{name}: clocks a wave waits a tile, by instruction and reason, estimate")
    longest = sorted(steady.stalls_at.items(), key=lambda kv: -kv[1])[:count]
    for (index, reason), clocks in longest:
        instruction = measured.kernel.program.instructions[index]
        place = "loop" if index in measured.loop.body else "    "
        print(
            f"  {clocks / tiles:7.1f} {place} {instruction.pc:#07x} {reason:12} {instruction.text}"
        )


def print_sensitivity(measured: Measured, baseline: Measured | None) -> None:
    """Prints the estimates with each parameter 30% lower and higher."""
    print("\nestimates with one parameter at -30% and at +30%; in brackets: against the baseline")
    print(f"{'parameter':18}{'value':>8}{'clocks a tile':>34}{'us, n = 256':>16}{'us, n = 1':>14}")
    for name, value, unit, _ in Parameters.rows():
        clocks, many, one = "", [], []
        for factor in (0.7, 1.3):
            setting = measured.parameters.scaled(name, factor)
            changed = measured.with_parameters(setting)
            tile = changed.clocks_per_tile(changed.residents)
            clocks += f"{tile:9,.0f}"
            if baseline is not None:
                other = baseline.with_parameters(setting)
                clocks += f" ({tile / other.clocks_per_tile(other.residents):.2f})"
            many.append(f"{changed.decode_many().microseconds:.1f}")
            one.append(f"{changed.decode_one().microseconds:.1f}")
        figures = f"{clocks:>34}{' '.join(many):>16}{' '.join(one):>14}"
        print(f"{name:18}{value:>8g}{figures}  {unit}", flush=True)


def specialisations(first_only: bool) -> dict[str, bytes]:
    """The code objects of the project's kernel, by specialisation."""
    from jax_sparse_mla.kernel.compiler import code_object

    return {s.name: code_object(s).code for s in (ALL[:1] if first_only else ALL)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--code-object", type=Path, action="append", help="a .hsaco instead of ours"
    )
    parser.add_argument("--baseline", type=Path, help="the comparison kernel's .hsaco")
    parser.add_argument("--sensitivity", action="store_true", help="each parameter at +-30%%")
    parser.add_argument("--chrome-trace", type=Path, help="write the waves' timeline there")
    parser.add_argument("--stalls", type=int, default=0, metavar="N", help="the N longest waits")
    parser.add_argument("--quick", action="store_true", help="the first specialisation alone")
    options = parser.parse_args()
    if options.code_object:
        codes = {path.stem: path.read_bytes() for path in options.code_object}
    else:
        codes = specialisations(options.quick)
    kernels = {name: Measured(SparseMla(code)) for name, code in codes.items()}
    baseline = None
    if options.baseline:
        baseline = Measured(SparseMla(options.baseline.read_bytes()))
    print_table(kernels, baseline)
    for name, measured in kernels.items():
        print_classes(name, measured)
        if options.stalls:
            print_stalls(name, measured, options.stalls)
    first = next(iter(kernels.values()))
    if options.sensitivity:
        print_sensitivity(first, baseline)
    if options.chrome_trace:
        played = first.timeline(SHORT)
        options.chrome_trace.write_text(json.dumps(chrome_trace(played, first.parameters)))


if __name__ == "__main__":
    main()
