"""The targets of the kernel and the figures of the kernel it is compared with."""

from collections.abc import Callable
from typing import NamedTuple

from gfx950_sim import counts

from benchmarks.kernel_measure import DECODE_ROWS, LONG, Measured
from jax_sparse_mla.kernel import contract

PEAK_BYTES_PER_US = 8.0e6
"""HBM's bandwidth (AMD MI355X data sheet)."""


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
    floor = DECODE_ROWS * LONG * contract.RECORD_BYTES / PEAK_BYTES_PER_US
    return [
        Row("VGPRs (all kinds)", lambda m: m.vgprs, "{:.0f}", 256),
        Row("spills", lambda m: m.spills, "{:.0f}", 0),
        Row("LDS bytes", lambda m: m.kernel.kernel.lds_bytes, "{:,.0f}", None),
        Row("waves a SIMD", lambda m: m.waves_per_simd, "{:.0f}", 2, at_least=True),
        *_per_tile("VALU a tile a wave", _group(counts.VALU), "{:.1f}", 230, float32_more=40),
        *_per_tile("MFMA a tile a wave", _group(counts.MFMA), "{:.1f}", None),
        *_per_tile("LDS instructions a tile a wave", _group(counts.LDS), "{:.1f}", 75),
        *_per_tile("LDS KB a tile", lambda m: m.tile_memory.lds_bytes / 1000, "{:.1f}", 230),
        *_per_tile(
            "LDS conflict phases a tile", lambda m: m.tile_memory.lds_conflicts, "{:.1f}", 0
        ),
        Row("bytes from L2 an entry, estimate", lambda m: m.fetched_bytes, "{:.0f}", None),
        *_per_tile("barriers a tile", _group(counts.BARRIER), "{:.1f}", 2),
        Row("waits a tile", _group(counts.WAIT), "{:.1f}", None),
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
        *_per_tile(
            "clocks a tile a CU, estimate",
            lambda m: m.clocks_per_tile(m.residents),
            "{:,.0f}",
            None,
        ),
        *_per_tile(
            "  against the baseline's",
            lambda m: m.clocks_per_tile(m.residents) / baseline_clocks,
            "{:.2f}",
            0.6,
        ),
        Row("instructions a tile beside the loop", lambda m: m.beside_loop, "{:.1f}", None),
        Row("instructions outside the loop", lambda m: m.refined.outside, "{:,.0f}", 1000),
        Row("tiles refined, random weights", lambda m: m.refined_share, "{:.0%}", None),
        Row(
            "decode n = 256, us, estimate",
            lambda m: m.decode_many().microseconds,
            "{:.1f}",
            1.25 * floor,
        ),
        Row("  splits", lambda m: m.decode_many().splits, "{:.0f}", None),
        Row("decode n = 1, us, estimate", lambda m: m.decode_one().microseconds, "{:.1f}", 6),
        Row("  parts", lambda m: m.decode_one().splits, "{:.0f}", None),
        Row("simulator's faults", lambda m: len(m.faults), "{:.0f}", 0),
    ]


def _group(group: str) -> Callable[[Measured], float]:
    return lambda m: m.tile.group(group)


def _per_tile(
    label: str,
    value: Callable[[Measured], float],
    form: str,
    target: float | None,
    float32_more: float = 0,
) -> list[Row]:
    """A line for a plain tile, which has the target, and one for a refined tile."""
    return [
        Row(label, value, form, target, float32_more=float32_more),
        Row(f"{label}, refined", lambda m: value(m.refined), form, None),
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
