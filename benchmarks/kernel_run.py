"""Runs a sparse MLA code object on the simulator for the kernel report: one launch, all that the
cost model needs."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import gfx950_sim
import ml_dtypes
import numpy as np
from gfx950_sim.elf import CodeObject, Kernel
from gfx950_sim.program import Program, load_program
from gfx950_sim.recording import Recorder, WaveTrace

from jax_sparse_mla.kernel import contract

Array = np.ndarray[Any, Any]

HEADS = 16
CACHE_ROWS = 65536
"""Records the rows select from: far more than a row takes, so that few share a cache line."""
WAVE = 64


@dataclass(frozen=True)
class Run:
    """What a launch left for the cost model."""

    entries: int
    """Entries of each row."""
    workgroups: tuple[tuple[WaveTrace, ...], ...]
    """The waves' traces, a row at a time."""
    faults: tuple[str, ...]
    """What the simulator found wrong."""


@dataclass(frozen=True)
class Inputs:
    """Arrays of one launch: `rows` queries of 16 heads, each selecting `entries` records."""

    q: Array
    records: Array
    indices: Array

    @property
    def rows(self) -> int:
        """Rows of the launch."""
        return int(self.q.shape[0])


Weights = Literal["random", "even", "rising"]
"""What the softmax of a row gives: weights as random scores have them, the same for all entries, or
ever larger ones."""


def make_inputs(rows: int, entries: int, weights: Weights = "random", seed: int = 0) -> Inputs:
    """Random queries and records with power-of-two scales, and distinct indices.

    Even weights come from queries of 0 and equal scales: past the first few tiles none matters more
    than those before. Rising ones come from one rope column and indices in order: every tile does.
    """
    rng = np.random.default_rng(seed)
    q = (rng.standard_normal((rows, HEADS, 576)) * 0.5).astype(ml_dtypes.bfloat16)
    latent = rng.standard_normal((CACHE_ROWS, 512), np.float32).astype(ml_dtypes.float8_e4m3fn)
    scales = np.exp2(rng.integers(-3, 2, (CACHE_ROWS, 4))).astype(np.float32)
    rope = rng.standard_normal((CACHE_ROWS, 64), np.float32).astype(ml_dtypes.bfloat16)
    picks = [rng.choice(CACHE_ROWS, entries, replace=False) for _ in range(rows)]
    if weights != "random":
        q[:] = 0
        scales[:] = 1
    if weights == "rising":
        q[..., 512] = 1
        rope[:, 0] = np.linspace(0, 256, CACHE_ROWS)
        picks = [np.sort(pick) for pick in picks]
    records = np.zeros((CACHE_ROWS, contract.RECORD_BYTES), np.uint8)
    records[:, :512] = latent.view(np.uint8)
    records[:, 512:528] = scales.view(np.uint8)
    records[:, 528:] = rope.view(np.uint8)
    return Inputs(q, records, np.concatenate(picks).astype(np.int32))


class SparseMla:
    """A sparse MLA kernel of a code object: the project's, or the one it is compared with.

    Args:
      data: the ELF file.

    Raises:
      ValueError: the kernel's arguments are neither the launch contract's nor the comparison's.
    """

    def __init__(self, data: bytes) -> None:
        self.kernel: Kernel = CodeObject(data).kernel()
        sizes = [a.size for a in self.kernel.arguments if "hidden" not in a.value_kind]
        ours = [8 if a.kind == "pointer" else 4 for a in contract.ARGUMENTS]
        if sizes != ours and sizes != [8] * 6 + [4] * 7:
            raise ValueError(
                f"{self.kernel.symbol} takes arguments of {sizes} bytes: unknown launch"
            )
        self._ours = sizes == ours

    @cached_property
    def program(self) -> Program:
        """The decoded machine code.

        Raises:
          UnknownInstruction: it holds something the simulator does not know, such as a spill to
            scratch memory.
        """
        return load_program(self.kernel.code)

    @property
    def waves(self) -> int:
        """Waves of a workgroup."""
        required = self.kernel.metadata.get(".reqd_workgroup_size")
        items = required[0] if required else self.kernel.metadata[".max_flat_workgroup_size"]
        return int(items) // WAVE

    def run(self, inputs: Inputs) -> Run:
        """Simulates a launch; faults are kept, not raised."""
        memory = gfx950_sim.Memory()
        entries = len(inputs.indices) // inputs.rows
        out_itemsize = 4 if "partial" in self.kernel.symbol else 2
        out = memory.map(inputs.rows * HEADS * 512 * out_itemsize, name="out", writable=True)
        lse = memory.map(inputs.rows * HEADS * 4, name="lse", writable=True)
        q = memory.map(inputs.q.view(np.uint8), name="q")
        records = memory.map(inputs.records, name="kv")
        indices = memory.map(inputs.indices, name="indices")
        begin = np.arange(inputs.rows + 1, dtype=np.int32) * entries
        if self._ours:
            row_begin = memory.map(begin[:-1].copy(), name="row_begin")
            row_end = memory.map(begin[1:].copy(), name="row_end")
            arguments = _contract_arguments(
                q_latent=q,
                q_rope=q + 2 * 512,
                kv=records,
                indices=indices,
                row_begin=row_begin,
                row_end=row_end,
                out=out,
                lse=lse,
                q_latent_row_stride=HEADS * 576,
                q_latent_head_stride=576,
                q_rope_row_stride=HEADS * 576,
                q_rope_head_stride=576,
                scale_log2e=0.1,
                num_rows=inputs.rows,
                num_heads=HEADS,
                num_splits=1,
                kv_rows=CACHE_ROWS,
                num_indices=len(inputs.indices),
                flags=0,
            )
        else:
            indptr = memory.map(begin, name="indptr")
            pointers = struct.pack("<6Q", q, records, indices, indptr, out, lse)
            strides = struct.pack("<4i", HEADS * 576, 576, HEADS * 512, 512)
            tail = struct.pack("<f2i", 0.1, inputs.rows, inputs.indices.nbytes)
            arguments = pointers + strides + tail
        recorder = Recorder()
        result = gfx950_sim.run(
            self.kernel,
            (inputs.rows, 1, 1),
            (self.waves * WAVE, 1, 1),
            arguments,
            memory,
            strict=False,
            observer=recorder,
        )
        traces = recorder.traces(result.traces)
        workgroups = tuple(
            tuple(traces[row, wave] for wave in range(self.waves)) for row in range(inputs.rows)
        )
        return Run(entries, workgroups, tuple(str(report) for report in result.reports))


def _contract_arguments(**values: float) -> bytes:
    parts = []
    for argument in contract.ARGUMENTS:
        form = {"pointer": "<Q", "i32": "<i", "f32": "<f"}[argument.kind]
        parts.append(struct.pack(form, values[argument.name]))
    return b"".join(parts)


def executed(run: Run) -> Sequence[WaveTrace]:
    """All waves of a run."""
    return [trace for workgroup in run.workgroups for trace in workgroup]
