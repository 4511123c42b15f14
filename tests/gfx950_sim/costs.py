"""The cost model's parameters, each with its source, and what they make of one instruction.

COSTS.md explains the model; timeline.py plays it.

Settled before the kernel was tuned; a later change needs a source.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from typing import Any

from gfx950_sim import counts
from gfx950_sim.decode import NO_WAIT, Instruction, Waitcnt


def _parameter(value: float, unit: str, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "source": source})


_ISSUE = "CDNA4 ISA, 'Kernel overview': 16 lanes a SIMD, a wave64 instruction takes 4 clocks"
_LLVM = "LLVM SISchedule.td, gfx950 model (llvm-mca -mcpu=gfx950)"
_FLOPS = "8192 fp8, 4096 f16 FLOP a clock a CU (AMD CDNA 4 white paper), 4 SIMDs"
_PYHIP = "pyhip docs/mem_latency.md, measured on MI308X (CDNA3)"
_KERNEL = "the kernel's targets name the two latencies to report at"


@dataclass(frozen=True)
class Parameters:
    """One setting of the model. Times are in clocks of a compute unit unless the unit says
    otherwise."""

    clock_ghz: float = _parameter(2.4, "GHz", "AMD MI355X data sheet, peak engine clock")
    compute_units: float = _parameter(256, "", "AMD MI355X data sheet")
    issue: float = _parameter(4, "clocks", _ISSUE + "; a wave issues one instruction in them")
    valu: float = _parameter(4, "clocks", _ISSUE)
    transcendental: float = _parameter(
        16,
        "clocks",
        "a quarter of the rate: AMD OpenCL optimisation guide, GCN; " + _LLVM + " has latency 16",
    )
    lane_swap: float = _parameter(
        8, "clocks", "v_permlane16/32_swap write two registers; " + _LLVM + ": 2 micro-ops"
    )
    mfma_pass: float = _parameter(
        4, "clocks", _LLVM + "; passes by shape below agree with " + _FLOPS
    )
    mfma_result: float = _parameter(
        16,
        "clocks",
        _LLVM + ": latency is 4 passes more than occupancy; a chain on C alone does not pay it",
    )
    salu: float = _parameter(4, "clocks", _LLVM)
    taken_branch: float = _parameter(
        16, "clocks", "AMD OpenCL optimisation guide, GCN: a jump costs 16 clocks"
    )
    scalar_latency: float = _parameter(
        200,
        "clocks",
        "assumed: a hit in the scalar cache's L2 line; loops here have no scalar load",
    )
    lds_latency: float = _parameter(
        56, "clocks", _PYHIP + ": 64 for b128 and 52 for b32, with the data's own clocks"
    )
    lds_phase: float = _parameter(
        1.25,
        "clocks",
        "64 banks, 256 bytes a clock read (AMD ROCm blog on FP8 GEMM for CDNA4); 180 to 210"
        " measured on MI355X: 205 here",
    )
    lds_write_phase: float = _parameter(
        1, "clocks", "128 bytes a phase (ds_write_b64, measured by HipKittens), one a clock"
    )
    barrier: float = _parameter(
        16, "clocks", "assumed: message to the scheduler and back, 4 issue slots"
    )
    address: float = _parameter(4, "clocks", "AMD GCN white paper: addresses of 16 lanes a clock")
    l1_sector: float = _parameter(
        1, "clocks", "AMD CDNA 3 white paper: 64 bytes a clock from L1; 64-byte reads behind L2"
    )
    l2_bytes: float = _parameter(
        64, "bytes a clock a CU", "AMD CDNA 3 white paper: 2 KB a clock an XCD, here for 32 CUs"
    )
    hbm_bytes: float = _parameter(
        11.7, "bytes a clock a CU", "7.2 of 8 TB/s reached (facts of the machine), over 256 CUs"
    )
    l2_latency: float = _parameter(500, "clocks", _KERNEL + "; L2 or Infinity Cache, with queues")
    hbm_latency: float = _parameter(2000, "clocks", _KERNEL + "; HBM under load")
    idle_latency: float = _parameter(
        800, "clocks", "HBM with nothing else running: " + _PYHIP + ", 500 to 800"
    )
    stagger: float = _parameter(
        300, "clocks", "assumed: two workgroups of a CU do not start at once"
    )
    workgroup_start: float = _parameter(
        500, "clocks", "assumed: dispatch and first instruction fetch"
    )
    launch_us: float = _parameter(
        1.5,
        "microseconds",
        "a whole small kernel takes 2.2 in a graph on MI355X (ROCm/aiter pull request 5332)",
    )

    def scaled(self, name: str, factor: float) -> "Parameters":
        """The same with one parameter multiplied."""
        return replace(self, **{name: getattr(self, name) * factor})

    @classmethod
    def rows(cls) -> Iterator[tuple[str, float, str, str]]:
        """Name, value, unit and source of each."""
        for entry in fields(cls):
            assert isinstance(entry.default, int | float)  # each is made by _parameter
            yield entry.name, entry.default, entry.metadata["unit"], entry.metadata["source"]

    @classmethod
    def table(cls) -> str:
        """The parameters as COSTS.md has them."""
        head = "| parameter | value | unit | source |\n|---|---|---|---|\n"
        return head + "".join(f"| {n} | {v:g} | {u} | {s} |\n" for n, v, u, s in cls.rows())


MFMA_PASSES = {
    # FLOP of the shape / (FLOP a clock a SIMD * 4 clocks a pass): 1024 for f16 and bf16, 2048 for
    # fp8, 64 for f32.
    "f32_16x16x32_f16": 4,
    "f32_16x16x32_bf16": 4,
    "f32_32x32x16_f16": 8,
    "f32_32x32x16_bf16": 8,
    # CDNA3's smaller shapes run at half of gfx950's rate.
    "f32_16x16x16_f16": 4,
    "f32_16x16x16_bf16": 4,
    "f32_32x32x8_f16": 8,
    "f32_32x32x8_bf16": 8,
    "f32_16x16x32_fp8_fp8": 4,
    "f32_32x32x16_fp8_fp8": 8,
    "f32_16x16x128_f8f6f4": 8,
    "f32_32x32x64_f8f6f4": 16,
    "i32_16x16x64_i8": 4,
    "i32_32x32x32_i8": 8,
    "i32_16x16x32_i8": 4,
    "i32_32x32x16_i8": 8,
    "f32_16x16x4_f32": 8,
    "f32_32x32x2_f32": 16,
}
"""Passes by shape; an f8f6f4 shape with two 4- or 6-bit operands takes half."""


class Unit(Enum):
    """What executes an instruction."""

    VALU = auto()
    MFMA = auto()
    SALU = auto()
    LDS = auto()
    VMEM = auto()
    SMEM = auto()
    WAIT = auto()
    BARRIER = auto()
    BRANCH = auto()
    NOP = auto()
    END = auto()


_UNITS = {
    counts.MFMA: Unit.MFMA,
    counts.VALU: Unit.VALU,
    counts.SALU: Unit.SALU,
    counts.LDS: Unit.LDS,
    counts.LOAD: Unit.VMEM,
    counts.DMA: Unit.VMEM,
    counts.STORE: Unit.VMEM,
    counts.SMEM: Unit.SMEM,
    counts.WAIT: Unit.WAIT,
    counts.BARRIER: Unit.BARRIER,
    counts.BRANCH: Unit.BRANCH,
    counts.OTHER: Unit.NOP,
}
_NARROW = 2
"""cbsz and blgp from here on are 6- and 4-bit formats."""


def unit_of(instruction: Instruction) -> Unit:
    """What executes an instruction."""
    if instruction.name == "s_endpgm":
        return Unit.END
    return _UNITS[counts.classify(instruction).group]


def mfma_passes(instruction: Instruction) -> int:
    """Passes of a matrix instruction.

    Raises:
      KeyError: a shape that `MFMA_PASSES` lacks.
    """
    shape = instruction.name.removeprefix("v_mfma_").removeprefix("scale_").replace("bf8", "fp8")
    if shape not in MFMA_PASSES:
        raise KeyError(f"{instruction.name}: its passes are not in costs.MFMA_PASSES")
    passes = MFMA_PASSES[shape]
    if shape.endswith("f8f6f4"):
        formats = (instruction.modifiers.get("cbsz", 0), instruction.modifiers.get("blgp", 0))
        if min(formats) >= _NARROW:
            return passes // 2
    return passes


@dataclass(frozen=True)
class Cost:
    """What an instruction costs its wave and its SIMD."""

    unit: Unit
    issue: float
    """Clocks until the wave may issue its next instruction."""
    busy: float
    """Clocks the executing unit is taken."""
    latency: float
    """Clocks from issue until another instruction may use the result."""
    chain_latency: float
    """The same for a matrix instruction that adds to this one's result."""
    wait: Waitcnt = NO_WAIT


def cost_of(instruction: Instruction, p: Parameters) -> Cost:
    """The cost of an instruction under a setting of the parameters; memory costs come with its
    addresses."""
    unit = unit_of(instruction)
    if unit is Unit.MFMA:
        busy = mfma_passes(instruction) * p.mfma_pass
        return Cost(unit, p.issue, busy, busy + p.mfma_result, busy)
    if unit is Unit.VALU:
        kind = counts.classify(instruction).kind
        busy = p.valu
        if kind == "transcendental":
            busy = p.transcendental
        elif instruction.name.startswith("v_permlane") and "swap" in instruction.name:
            busy = p.lane_swap
        return Cost(unit, p.issue, busy, busy, busy)
    if unit is Unit.WAIT:
        wait = Waitcnt.of(instruction.modifiers["simm16"])
        return Cost(unit, p.issue, 0, 0, 0, wait)
    if unit is Unit.NOP and instruction.name == "s_nop":
        idle = p.issue * (1 + instruction.modifiers.get("simm16", 0))
        return Cost(unit, idle, 0, 0, 0)
    if unit is Unit.SMEM:
        return Cost(unit, p.issue, p.salu, p.scalar_latency, p.scalar_latency)
    return Cost(unit, p.issue, p.salu, p.salu, p.salu)
