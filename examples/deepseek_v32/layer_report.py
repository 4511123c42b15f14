"""Compile time and temporaries of a step with scanned and with unrolled layers.

    python -m examples.deepseek_v32.layer_report --layers 8

Only shapes are needed, so the model's real dimensions cost no memory.
"""

import argparse
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.deepseek_v32.attention import Rows
from examples.deepseek_v32.cache import cache_shapes
from examples.deepseek_v32.config import Config
from examples.deepseek_v32.generate import step
from examples.deepseek_v32.options import Options
from examples.deepseek_v32.params import param_shapes
from examples.deepseek_v32.random_checkpoint import tiny_config
from examples.deepseek_v32.sampling import Sampling

MIB = 1 << 20


def report(config: Config, rows: int, tokens: int, stacked: bool) -> str:
    """Compile one step; a line about it."""
    options = Options(implementation="reference")
    block_size = 64
    blocks = tokens // block_size
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    step_rows = Rows(i32((rows,)), i32((rows,)), i32((rows,)), i32((8, blocks // 8)))
    cache = cache_shapes(config, blocks, block_size, options)
    params = param_shapes(config, jnp.bfloat16, stacked=stacked)
    start = time.perf_counter()
    compiled = step.lower(
        params,
        cache,
        step_rows,
        i32((8,)),
        i32((8,)),
        config=config,
        options=options,
        sampling=Sampling(),
    ).compile()
    seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    layer = sum(np.prod(s.shape) * s.dtype.itemsize for s in cache) / config.num_hidden_layers
    return (
        f"{'scanned' if stacked else 'unrolled':9} {rows:5} rows: compiled in {seconds:5.1f} s, "
        f"temporaries {memory.temp_size_in_bytes / MIB:6.0f} MiB "
        f"(one layer's cache: {layer / MIB:.0f} MiB)"
    )


def main() -> None:
    """Print a line for each kind of layers and each number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6, help="the first 3 dense (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="the tiny model's dimensions")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[32, 256], help="rows of a step (32 256)"
    )
    parser.add_argument("--tokens", type=int, default=65536, help="in the cache (%(default)s)")
    arguments = parser.parse_args()
    config = tiny_config() if arguments.tiny else Config()
    config = dataclasses.replace(config, num_hidden_layers=arguments.layers)
    print(f"{arguments.layers} layers, {jax.devices()[0].device_kind}, jax {jax.__version__}")
    for rows in arguments.rows:
        for stacked in (False, True):
            print(report(config, rows, arguments.tokens, stacked), flush=True)


if __name__ == "__main__":
    main()
