"""One attention layer of DeepSeek-V3.2 at its real size, then text from a tiny model.

    python -m examples.deepseek_v32.demo        (or: make demo)

Part 1 writes and loads a layer's weights under their Hugging Face names, prefills prompts of
different lengths in chunks into a paged cache, decodes them in one batch, and measures the error
against dense attention over unquantised latents. Part 2 writes a tiny random checkpoint and runs
the command line on it. Where there is no gfx950 GPU, the kernel's machine code runs beside the
reference on the simulator of tests/gfx950_sim.
"""

import argparse
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from examples.deepseek_v32 import __main__ as command_line
from examples.deepseek_v32.attention import (
    Projected,
    Rows,
    attention,
    contract,
    geometry,
    project,
)
from examples.deepseek_v32.cache import Cache, cache_shapes
from examples.deepseek_v32.config import Config
from examples.deepseek_v32.kernel_check import OpInputs
from examples.deepseek_v32.options import Options
from examples.deepseek_v32.params import Attention
from examples.deepseek_v32.random_checkpoint import tiny_config, write_random_checkpoint
from examples.deepseek_v32.scheduler import Limits, Request, Scheduler
from examples.deepseek_v32.weights import load_params
from jax_sparse_mla import block_table_to_slots, unpack_records
from jax_sparse_mla.platform import use_kernel_on_rocm

REPOSITORY = Path(__file__).parents[2]
PROMPT_LENGTHS = (2200, 300, 100, 20)
NEW_TOKENS = 10
KERNEL_HEADS = 32
"""Heads that the simulator computes: two of the kernel's groups."""
CHECKED_ROWS = 1
"""Rows of each step that are compared with dense attention: those that see most."""


def layer_config(hidden_size: int) -> Config:
    """The real attention layer; vocabulary and MLP, which play no part, cut to nothing much."""
    return Config(
        num_hidden_layers=1,
        hidden_size=hidden_size,
        vocab_size=258,
        intermediate_size=128,
        first_k_dense_replace=1,
    )


class Step(NamedTuple):
    """What one step of the layer gives back, beside the cache."""

    out: jax.Array  # [n, D]
    selected: jax.Array  # [n, k] int32
    view: Projected


@functools.partial(jax.jit, static_argnums=(4, 5), donate_argnums=2)
def layer_step(
    p: Attention, x: jax.Array, cache: Cache, rows: Rows, config: Config, options: Options
) -> tuple[Step, Cache]:
    """One attention layer: project, write records and index keys, select, attend."""
    shared = geometry(config, rows, cache.records.shape[1])
    out, cache, selected = attention(p, x, cache, 0, rows, shared, config, options)
    return Step(out, selected, project(p, x, shared, config, options)), cache


@jax.jit
def dense(
    p: Attention, view: Projected, latent: jax.Array, rope: jax.Array, mask: jax.Array, scale: float
) -> jax.Array:
    """Attention of some rows over all tokens that a mask admits, latents as projected, float32.

    Args:
      p: the layer's parameters.
      view: the rows' queries.
      latent, rope: ``[T, 512]`` and ``[T, 64]``, the request's tokens.
      mask: ``[n, T]`` bool.
      scale: of the logits.
    """
    wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    q_latent = contract("nhd,hcd->nhc", view.q_nope, p.w_uk).astype(jnp.float32)
    logits = wide("nhc,tc->nht", q_latent, latent)
    logits += wide("nhr,tr->nht", view.q_rope.astype(jnp.float32), rope)
    weights = jax.nn.softmax(jnp.where(mask[:, None], logits * scale, -jnp.inf), axis=-1)
    out = wide("nht,tc->nhc", weights, latent)
    values = wide("nhc,hvc->nhv", out, p.w_uv.astype(jnp.float32))
    return wide("nv,dv->nd", values.reshape(values.shape[0], -1).astype(p.o.dtype), p.o)


class Latents:
    """Every request's latents, unquantised and as its records hold them, as the layer runs."""

    def __init__(self, count: int, length: int):
        """Make room for some requests of some length."""
        self.plain = np.zeros((count, length, 512), np.float32)
        self.stored = np.zeros((count, length, 512), np.float32)
        self.rope = np.zeros((count, length, 64), np.float32)

    def add(self, step: Step, rows: Rows, cache: Cache) -> None:
        """Keep a step's."""
        real = rows.positions >= 0
        places = rows.requests[real], rows.positions[real]
        self.plain[places] = np.asarray(step.view.latent, np.float32)[real]
        self.rope[places] = np.asarray(step.view.k_rope, np.float32)[real]
        slots = block_table_to_slots(
            rows.block_table, rows.positions, rows.requests, block_size=cache.records.shape[1]
        )
        records = cache.records.reshape(-1, cache.records.shape[-1])[slots[real]]
        self.stored[places] = np.asarray(unpack_records(records)[0])


class Errors:
    """Squared distances to dense attention, summed over checked rows."""

    def __init__(self) -> None:
        """Start with no rows."""
        self.rows = 0
        self.distance = np.zeros(3)
        self.size = np.zeros(3)

    def check(self, p: Attention, step: Step, rows: Rows, seen: Latents, scale: float) -> None:
        """Compare the rows of a step that see most."""
        order = np.argsort(-rows.positions, kind="stable")[:CHECKED_ROWS]
        for row in order[rows.positions[order] >= 0]:
            request, position = rows.requests[row], rows.positions[row]
            selected = np.asarray(step.selected[row])
            masks = np.zeros((2, 1, seen.plain.shape[1]), bool)
            masks[0, 0, selected[selected >= 0]] = True
            masks[1, 0, : position + 1] = True
            view = jax.tree.map(lambda array, row=row: array[row][None], step.view)
            got = np.asarray(step.out[row], np.float32)
            for case, (latent, mask) in enumerate(
                ((seen.stored, masks[0]), (seen.plain, masks[0]), (seen.plain, masks[1]))
            ):
                expected = dense(p, view, latent[request], seen.rope[request], mask, scale)
                self.distance[case] += np.sum(np.square(got - expected[0]))
                self.size[case] += np.sum(np.square(expected[0]))
            self.rows += 1

    def report(self) -> str:
        """The relative errors in words."""
        stored, plain, everything = np.sqrt(self.distance / self.size)
        return (
            f"error against dense attention, {self.rows} rows (2-norm, relative):\n"
            f"  over the selected tokens, latents as the records hold them  {stored:.1e}\n"
            f"  over the selected tokens, unquantised latents               {plain:.1e}\n"
            f"  over all visible tokens, unquantised (random weights)       {everything:.1e}"
        )


def run_layer(folder: Path, hidden_size: int, lengths: Sequence[int]) -> OpInputs:
    """Part 1; returns the inputs of the op in the decode step of most rows."""
    config = layer_config(hidden_size)
    options = Options()
    write_random_checkpoint(folder, config, shards=2, progress=True)
    p: Attention = load_params(folder, config, progress=True).dense[0].attention
    size = sum(array.nbytes for array in jax.tree.leaves(p))
    print(f"weights of the layer: {size / 2**20:.0f} MiB")

    block_size = 64
    longest = max(lengths) + NEW_TOKENS
    blocks = sum(-(-(n + NEW_TOKENS) // block_size) for n in lengths)
    limits = Limits(blocks, block_size, longest, lines=len(lengths), prefill_rows=256)
    scheduler = Scheduler(limits)
    rng = np.random.default_rng(0)
    for number, length in enumerate(lengths):
        tokens = rng.integers(2, config.vocab_size, length).tolist()
        # The first prompts decode in the steps in which others still prefill.
        scheduler.add(Request(number, tokens, NEW_TOKENS))
    shapes = cache_shapes(config, blocks, block_size, options)
    cache: Cache = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    seen, errors = Latents(len(lengths), longest), Errors()
    seconds: dict[str, list[float]] = {"prefill": [], "decode": []}
    first: set[int] = set()
    most = 0
    total = sum(lengths)
    print(f"prompts of {', '.join(map(str, lengths))} tokens, chunks of 256 rows")
    with tqdm(total=total, desc="prefill", unit="row") as bar:
        while scheduler.is_busy:
            choice = scheduler.choose()
            plan = scheduler.plan(choice, choice.has_prompt)
            rows = Rows(plan.tokens, plan.requests, plan.positions, plan.block_table)
            # Random hidden states stand for those of a model: a normalised vector a token.
            x = rng.standard_normal((len(plan.tokens), hidden_size), np.float32)
            start = time.perf_counter()
            step, cache = layer_step(p, jnp.asarray(x, jnp.bfloat16), cache, rows, config, options)
            jax.block_until_ready(cache)
            if len(plan.tokens) in first:
                kind = "prefill" if plan.has_prompt else "decode"
                seconds[kind].append(time.perf_counter() - start)
            first.add(len(plan.tokens))
            seen.add(step, rows, cache)
            errors.check(p, step, rows, seen, config.softmax_scale)
            bar.update(plan.num_rows if plan.has_prompt else 0)
            if not plan.has_prompt and plan.num_rows > most:
                most = plan.num_rows
                inputs = op_inputs(p, step, rows, cache, config)
            scheduler.finish(plan, np.full(len(plan.output_rows), 2), ())
    for kind, rows_a_step in (("prefill", 256), ("decode", len(lengths))):
        if seconds[kind]:
            middle = 1e3 * float(np.median(seconds[kind]))
            print(f"{kind}: {middle:.0f} ms a step of {rows_a_step} rows (median, compiled)")
    print(errors.report())
    return inputs


def op_inputs(p: Attention, step: Step, rows: Rows, cache: Cache, config: Config) -> OpInputs:
    """What a step gave to the op, for some of the heads: the simulator takes its time."""
    slots = block_table_to_slots(
        rows.block_table, step.selected, rows.requests, block_size=cache.records.shape[1]
    )
    return OpInputs(
        q_latent=np.asarray(contract("nhd,hcd->nhc", step.view.q_nope, p.w_uk))[:, :KERNEL_HEADS],
        q_rope=np.asarray(step.view.q_rope)[:, :KERNEL_HEADS],
        records=np.asarray(cache.records).reshape(-1, cache.records.shape[-1]),
        slots=np.asarray(slots),
        softmax_scale=config.softmax_scale,
    )


def simulator_environment() -> dict[str, str] | None:
    """Environment of a child process that runs the kernel on the simulator; None without one."""
    tests = REPOSITORY / "tests"
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), str(REPOSITORY)])
    if "JAX_SPARSE_MLA_HIP_LIBRARY" in environment:
        return environment
    if not (tests / "gfx950_sim").is_dir():
        print("no simulator beside this example: the kernel is not run")
        return None
    build = [sys.executable, "-m", "gfx950_sim.hip"]
    built = subprocess.run(build, env=environment, capture_output=True, text=True, check=False)
    if built.returncode:
        print(f"the simulator could not be built, so the kernel is not run:\n{built.stderr}")
        return None
    environment["JAX_SPARSE_MLA_HIP_LIBRARY"] = built.stdout.split()[-1]
    return environment


def run_child(environment: dict[str, str], *arguments: Any) -> str:
    """Run a module of this example in a child process; returns what it printed.

    Raises:
      RuntimeError: it failed.
    """
    command = [sys.executable, "-m", *map(str, arguments)]
    child = subprocess.run(
        command, env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=False
    )
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with code {child.returncode}")
    return child.stdout


def run_text(folder: Path, environment: dict[str, str] | None) -> None:
    """Part 2: the command line on a tiny checkpoint, also through the kernel if it can run."""
    write_random_checkpoint(folder, tiny_config(num_hidden_layers=2))
    prompt = ["--ids", "0,8,15,16,23,42,8,15", "--max-new-tokens", "6"]
    sizes = ["--prefill-rows", "8", "--block-size", "16"]
    texts = ["Once upon a time", "The quick brown fox jumps over the quick brown"]
    arguments = [str(folder), *texts, "--max-new-tokens", "24", "--temperature", "0.7"]
    print("$ python -m examples.deepseek_v32 " + " ".join(map(repr, arguments)))
    command_line.run(command_line.parser().parse_args([*arguments, "--draft-tokens", "2"]))
    if environment is None:
        return
    print("\nthe same model through the kernel's machine code, greedy, one prompt of ids:")
    shared = ["examples.deepseek_v32", folder, *prompt, *sizes, "--quiet", "--implementation"]
    start = time.perf_counter()
    outputs = [run_child(environment, *shared, kind) for kind in ("kernel", "reference")]
    same = "the same text" if outputs[0] == outputs[1] else f"not the same: {outputs}"
    print(f"kernel and reference give {same} ({time.perf_counter() - start:.0f} s)")


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hidden-size", type=int, default=7168, help="less saves memory (%(default)s: the model's)"
    )
    parser.add_argument(
        "--prompts",
        metavar="N",
        type=int,
        nargs="+",
        default=PROMPT_LENGTHS,
        help=f"lengths of the prompts of part 1 ({' '.join(map(str, PROMPT_LENGTHS))})",
    )
    parser.add_argument("--no-kernel", action="store_true", help="never run the simulator")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    on_gpu = device.platform == "rocm" and use_kernel_on_rocm()
    lowering = "gfx950 kernel" if on_gpu else "jnp reference"
    print(f"device: {device.platform} {device.device_kind}; sparse attention: {lowering}\n")
    environment = None
    if not on_gpu and not arguments.no_kernel:
        environment = simulator_environment()

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        print("1. One attention layer at its real size")
        inputs = run_layer(folder / "layer", arguments.hidden_size, arguments.prompts)
        if environment is not None:
            inputs.save(folder / "op.npz")
            check = run_child(environment, "examples.deepseek_v32.kernel_check", folder / "op.npz")
            print(check, end="")
        print("\n2. Text from a tiny random model")
        run_text(folder / "tiny", environment)


if __name__ == "__main__":
    main()
