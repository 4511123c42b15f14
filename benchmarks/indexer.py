"""Times the indexer: exact top-k beside `lax.top_k`, and the whole selection with its memory.

python -m benchmarks.indexer                 top 2,048 of [256, 131072], then 2,048 rows
python -m benchmarks.indexer --rows 8 ...    other sizes

Seen on an NVIDIA H200 with jax 0.11.2, November 2026:

  top 2048 of [256, 131072]: lax.top_k 2.545 ms, select_topk 1.105 ms, ratio 2.3
  index_topk of a chunk of 2048 rows x 131072 tokens, 64 heads, temporaries 97 MiB:
    bf16 keys 218.3 ms, fp8 keys 274.4 ms
  the radix search alone by 1, 2 and 4 bits a pass: 1.46, 0.85 and 1.24 ms
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_sparse_mla import index_topk, select_topk


def median_ms(function: Callable[..., Any], *arguments: Any, repeat: int) -> float:
    """Median milliseconds of a compiled call behind a warm-up."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def temporaries(compiled: Any) -> str:
    """Scratch memory of a compiled function, beside arguments and results."""
    return f"temporaries {compiled.memory_analysis().temp_size_in_bytes / 2**20:.0f} MiB"


def time_selection(rows: int, tokens: int, k: int, repeat: int) -> None:
    """Selection alone: `select_topk` beside `lax.top_k` on the same random logits."""
    logits = jax.random.normal(jax.random.key(0), (rows, tokens), jnp.float32)
    exact = jax.jit(functools.partial(select_topk, k=k))
    sorting = jax.jit(lambda x: lax.top_k(x, k)[1])
    np.testing.assert_array_equal(
        np.sort(np.asarray(exact(logits)), axis=1), np.sort(np.asarray(sorting(logits)), axis=1)
    )
    ours = median_ms(exact, logits, repeat=repeat)
    theirs = median_ms(sorting, logits, repeat=repeat)
    print(
        f"top {k} of [{rows}, {tokens}]: lax.top_k {theirs:.3f} ms, select_topk {ours:.3f} ms, "
        f"ratio {theirs / ours:.1f}, {temporaries(exact.lower(logits).compile())}"
    )


def time_indexer(rows: int, tokens: int, k: int, heads: int, fp8: bool, repeat: int) -> None:
    """Logits and selection of a prefill chunk that ends a sequence, and of one-token decode."""
    block = 64
    blocks = tokens // block
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (rows, heads, 128), jnp.bfloat16)
    weights = jax.random.normal(keys[1], (rows, heads), jnp.float32)
    shape = (blocks, block, 132 if fp8 else 128)
    if fp8:
        cache = jnp.tile(jnp.asarray([0x38] * 128 + [0, 0, 0x80, 0x3F], jnp.uint8), (*shape[:2], 1))
    else:
        cache = jax.random.normal(keys[2], shape, jnp.bfloat16)
    function = jax.jit(functools.partial(index_topk, k=k))
    kind = "fp8" if fp8 else "bf16"
    table = np.arange(blocks, dtype=np.int32)[None]
    for name, count in (("chunk of one request", rows), ("rows of 8 requests", min(rows, 64))):
        requests = np.zeros(count, np.int32)
        lines = table
        if name == "rows of 8 requests":
            requests, lines = np.arange(count, dtype=np.int32) % 8, np.repeat(table, 8, axis=0)
        positions = np.arange(tokens - count, tokens, dtype=np.int32)
        arguments = (q[:count], weights[:count], cache, lines, requests, positions)
        compiled = function.lower(*arguments).compile()
        took = median_ms(compiled, *map(jnp.asarray, arguments), repeat=repeat)
        print(
            f"index_topk, {kind} keys, {name}, {count} rows x {tokens} tokens, {heads} heads: "
            f"{took:.1f} ms, {temporaries(compiled)}"
        )


def main() -> None:
    """Print one line a measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256, help="of the selection (%(default)s)")
    parser.add_argument("--tokens", type=int, default=131072, help="a row sees (%(default)s)")
    parser.add_argument("--k", type=int, default=2048, help="to select (%(default)s)")
    parser.add_argument("--heads", type=int, default=64, help="of the indexer (%(default)s)")
    parser.add_argument("--chunk", type=int, default=2048, help="rows of a chunk (%(default)s)")
    parser.add_argument("--repeat", type=int, default=15, help="timed calls (%(default)s)")
    parser.add_argument("--selection-only", action="store_true", help="skip the indexer")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.platform} {device.device_kind}")
    time_selection(arguments.rows, arguments.tokens, arguments.k, arguments.repeat)
    if not arguments.selection_only:
        for fp8 in (False, True):
            time_indexer(
                arguments.chunk,
                arguments.tokens,
                arguments.k,
                arguments.heads,
                fp8,
                max(3, arguments.repeat // 5),
            )


if __name__ == "__main__":
    main()
