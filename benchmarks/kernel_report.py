"""What the kernel costs: ``python -m benchmarks.kernel_report``.

From code object and simulator, for every specialisation or given code objects. Counts are exact;
every time is an ESTIMATE of the simulator's cost model (tests/gfx950_sim/COSTS.md): nobody measured
it on hardware.
"""

import argparse
import json
from pathlib import Path

from gfx950_sim import counts
from gfx950_sim.costs import Parameters
from gfx950_sim.decode import UnknownInstruction
from gfx950_sim.estimates import chrome_trace
from gfx950_sim.recording import conflicts_by_instruction

from benchmarks.kernel_measure import LONG, SHORT, TILE, Measured
from benchmarks.kernel_run import SparseMla, executed
from benchmarks.kernel_targets import BASELINE, BASELINE_CLOCKS, Row, target_rows
from jax_sparse_mla.kernel.specialisation import ALL


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
    for fault in measured.faults[:5]:
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
