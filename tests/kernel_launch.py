"""Launches the kernel's code objects on the simulator, through the launch contract alone."""

import functools
import struct
from typing import Any

import ml_dtypes
import numpy as np
import oracle
from gfx950_sim import CodeObject, Memory, RunResult, run

from jax_sparse_mla.kernel import compiler, contract
from jax_sparse_mla.kernel.specialisation import Specialisation

LOG2E = 1.4426950408889634
SCALE = 0.02
"""A softmax scale that lets many entries of random records carry weight."""


@functools.cache
def kernel(specialisation: Specialisation) -> Any:
    """The specialisation's kernel, compiled or from the cache."""
    found = compiler.code_object(specialisation)
    return CodeObject(found.code).kernel(found.symbol)


def pack(**values: float) -> bytes:
    """The argument segment."""
    forms = {"pointer": "<Q", "i32": "<i", "f32": "<f"}
    return b"".join(struct.pack(forms[a.kind], values[a.name]) for a in contract.ARGUMENTS)


def launch(
    q: np.ndarray | tuple[np.ndarray, np.ndarray],
    kv: np.ndarray,
    indices: np.ndarray,
    row_begin: np.ndarray,
    row_end: np.ndarray,
    softmax_scale: float,
    *,
    num_splits: int = 1,
    scale_format: str = "pow2",
    partial: bool = False,
    has_invalid: bool = False,
    order: Any = "round_robin",
    switch: Any = "barrier",
    strict: bool = True,
    workgroups: Any = None,
) -> tuple[np.ndarray, np.ndarray, RunResult]:
    """Run the kernel: (out, lse, what the simulator says).

    q is [n, H, 576] bfloat16 or the pair (latent, rope); row bounds are int32 [n * num_splits].
    """
    memory = Memory()
    latent, rope = q if isinstance(q, tuple) else (q, q)
    n, heads = latent.shape[:2]
    bits = [np.ascontiguousarray(part).view(np.uint16) for part in (latent, rope)]
    addresses = [memory.map(bits[0], name="q_latent")]
    addresses.append(addresses[0] if latent is rope else memory.map(bits[1], name="q_rope"))
    rope_offset = 2 * (rope.shape[2] - 64)
    m = n * num_splits
    out = np.full((m, heads, 512), np.nan, np.float32 if partial else ml_dtypes.bfloat16)
    lse = np.full((m, heads), np.nan, np.float32)
    raw_out = out.view(np.uint32 if partial else np.uint16)
    assert row_begin.shape == row_end.shape == (m,)
    arguments = pack(
        q_latent=addresses[0],
        q_rope=addresses[1] + rope_offset,
        kv=memory.map(kv, name="kv"),
        indices=memory.map(np.ascontiguousarray(indices, np.int32), name="indices"),
        row_begin=memory.map(np.ascontiguousarray(row_begin, np.int32), name="row_begin"),
        row_end=memory.map(np.ascontiguousarray(row_end, np.int32), name="row_end"),
        out=memory.map(raw_out, name="out", writable=True),
        lse=memory.map(lse, name="lse", writable=True),
        q_latent_row_stride=heads * latent.shape[2],
        q_latent_head_stride=latent.shape[2],
        q_rope_row_stride=heads * rope.shape[2],
        q_rope_head_stride=rope.shape[2],
        scale_log2e=softmax_scale * LOG2E,
        num_rows=m,
        num_heads=heads,
        num_splits=num_splits,
        kv_rows=kv.size // contract.RECORD_BYTES,
        num_indices=indices.size,
        flags=int(has_invalid),
    )
    specialisation = Specialisation(scale_format, partial)  # type: ignore[arg-type]
    code = kernel(specialisation)
    result = run(
        code,
        grid=(contract.num_workgroups(m, heads), 1, 1),
        block=(code.metadata.get(".max_flat_workgroup_size", 256), 1, 1),
        args=arguments,
        memory=memory,
        order=order,
        switch=switch,
        strict=strict,
        workgroups=workgroups,
        keep_traces=False,
    )
    return out, lse, result


def random_query(rng: np.random.Generator, n: int, heads: int, size: float = 1.0) -> np.ndarray:
    """q [n, H, 576] bfloat16."""
    return (rng.standard_normal((n, heads, 576)) * size).astype(ml_dtypes.bfloat16)


def rows_of(entries: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices, row_begin and row_end of a CSR stream."""
    bounds = np.concatenate([[0], np.cumsum([len(e) for e in entries])]).astype(np.int32)
    flat = np.concatenate([*entries, np.zeros(0, np.int64)]).astype(np.int32)
    return flat, bounds[:-1], bounds[1:]


def check(
    q: np.ndarray,
    kv: np.ndarray,
    entries: list[np.ndarray],
    scale: float = SCALE,
    *,
    scale_format: str = "pow2",
    **options: Any,
) -> None:
    """Launch and compare with the oracle; q is [n, H, 576]."""
    out, lse, _ = launch(q, kv, *rows_of(entries), scale, scale_format=scale_format, **options)
    expected = oracle.attention(q, kv, entries, scale, scale_format=scale_format)
    oracle.check(out, lse, expected)
