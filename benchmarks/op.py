"""Times sparse_mla_fwd at serving shapes, beside eager PyTorch where that is installed.

    python -m benchmarks.op [--torch] [--shapes A B C] [--repetitions 5] [--implementation
    reference]

Both run in the same process on the same device, taking turns, so that the ratio means something on
a busy machine too; the table shows the medians. Column ``torch`` is the eager version that
dequantises what it gathers, ``whole`` the one that dequantises the whole cache first; both compute
in bfloat16 on a GPU and float32 on the CPU. On the CPU pin the process to one core
(``taskset -c 1``).
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from jax_sparse_mla import pack_records, sparse_mla_fwd

SOFTMAX_SCALE = 192**-0.5


class Shape(NamedTuple):
    """A workload; ``causal`` rows see only what stands before them, up to ``entries``."""

    rows: int
    heads: int
    entries: int
    records: int
    causal: bool = False


SHAPES = {
    "A": Shape(1, 16, 2048, 65536),
    "B": Shape(8, 16, 2048, 65536),
    "C": Shape(64, 16, 2048, 65536),
    "D": Shape(256, 128, 512, 65536),
    "E": Shape(512, 16, 512, 8192, causal=True),
    "F": Shape(8192, 16, 2048, 8192, causal=True),
    "G": Shape(8192, 128, 2048, 8192, causal=True),
    "H": Shape(256, 16, 2048, 1 << 20),
}
CPU_SHAPES = "ABCDE"


def problem(shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Random q, records, padded indices and row lengths."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((shape.rows, shape.heads, 576), np.float32).astype(ml_dtypes.bfloat16)
    few = rng.standard_normal((4096, 576), np.float32)
    packed = np.asarray(jax.jit(pack_records)(few[:, :512], few[:, 512:]))
    kv = packed[rng.integers(0, len(few), shape.records)]
    if not shape.causal:
        indices = rng.integers(0, shape.records, (shape.rows, shape.entries), np.int32)
        return q, kv, indices, np.full(shape.rows, shape.entries, np.int32)
    visible = np.arange(1, shape.rows + 1, dtype=np.int32)
    indices = (rng.random((shape.rows, shape.entries), np.float32) * visible[:, None]).astype(
        np.int32
    )
    return q, kv, indices, np.minimum(visible, shape.entries).astype(np.int32)


def time_in_turns(runs: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, float]:
    """Median seconds of each of ``runs``, which end when their work is done.

    Each turn is a burst of calls, five where they are short, as in serving: after a pause and
    another's work, the first one is slower.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repetitions + 1):
        for name, run in runs.items():
            burst = 5 if turn and statistics.median(seconds[name]) < 0.02 else 1
            for _ in range(burst):
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def jax_run(
    shape: Shape, arrays: tuple[np.ndarray, ...], implementation: str | None
) -> tuple[Callable[[], Any], int]:
    """The jitted op on the default device, and the bytes of its temporaries."""
    q, kv, indices, lengths = (jax.device_put(x) for x in arrays)

    @jax.jit
    def op(q: jax.Array, kv: jax.Array, indices: jax.Array, lengths: jax.Array) -> Any:
        return sparse_mla_fwd(
            q,
            kv,
            None,
            indices,
            SOFTMAX_SCALE,
            row_lengths=lengths,
            return_lse=True,
            implementation=implementation,
        )

    compiled = op.lower(q, kv, indices, lengths).compile()
    analysis = compiled.memory_analysis()
    temporaries = analysis.temp_size_in_bytes if analysis else 0
    return lambda: jax.block_until_ready(compiled(q, kv, indices, lengths)), temporaries


def torch_runs(shape: Shape, arrays: tuple[np.ndarray, ...]) -> dict[str, Callable[[], Any]]:
    """The two eager versions, by the name the table has for them."""
    import torch

    from benchmarks.torch_eager import sparse_mla

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    q, kv, indices, lengths = arrays
    arrays = (q.view(np.int16), kv, indices, lengths)
    bits, records, slots, counts = (torch.from_numpy(x).to(device) for x in arrays)
    queries = bits.view(torch.bfloat16)

    def run(dtype: torch.dtype, predequantise: bool) -> Callable[[], Any]:
        def call() -> Any:
            result = sparse_mla(
                queries, records, slots, counts, SOFTMAX_SCALE, dtype, predequantise
            )
            if cuda:
                torch.cuda.synchronize()
            return result

        return call

    dtype = torch.bfloat16 if cuda else torch.float32
    return {"torch": run(dtype, False), "whole": run(dtype, True)}


def gigaflops(shape: Shape, lengths: np.ndarray) -> float:
    """10^9 floating-point operations of the two products."""
    return 2e-9 * int(lengths.sum(dtype=np.int64)) * shape.heads * (576 + 512)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: all that fit")
    parser.add_argument("--torch", action="store_true", help="compare with eager PyTorch")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--implementation", choices=["kernel", "reference"])
    args = parser.parse_args()

    device = jax.devices()[0]
    names = args.shapes or (CPU_SHAPES if device.platform == "cpu" else SHAPES)
    print(f"jax {jax.__version__} on {device.device_kind}; medians of {args.repetitions}, ms")
    print(f"{'':2}{'n':>6}{'H':>5}{'entries':>9}{'records':>9}", end="")
    print(f"{'op':>10}{'GFLOP/s':>9}{'temp MiB':>10}", end="")
    print(f"{'torch':>10}{'ratio':>7}{'whole':>10}{'ratio':>7}" if args.torch else "")
    for name in names:
        shape = SHAPES[name]
        arrays = problem(shape)
        run, temporaries = jax_run(shape, arrays, args.implementation)
        runs = {"op": run} | (torch_runs(shape, arrays) if args.torch else {})
        seconds = time_in_turns(runs, args.repetitions)
        ours = seconds.pop("op")
        rate = gigaflops(shape, arrays[3]) / ours
        print(f"{name:2}{shape.rows:6}{shape.heads:5}{shape.entries:9}{shape.records:9}", end="")
        print(f"{ours * 1e3:10.2f}{rate:9.1f}{temporaries / 2**20:10.1f}", end="")
        for theirs in seconds.values():
            print(f"{theirs * 1e3:10.2f}{theirs / ours:7.1f}", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
