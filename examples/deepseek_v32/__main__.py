"""Command line: generate text with a DeepSeek-V3.2 checkpoint.

python -m examples.deepseek_v32 CHECKPOINT "Once upon a time" "The capital of France is"
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from examples.deepseek_v32.config import Config
from examples.deepseek_v32.generate import Engine, Statistics, check_limits, make_requests
from examples.deepseek_v32.mesh import make_mesh, param_shardings
from examples.deepseek_v32.options import Options
from examples.deepseek_v32.params import checkpoint_tensors
from examples.deepseek_v32.sampling import Sampling
from examples.deepseek_v32.scheduler import Limits, Plan
from examples.deepseek_v32.weights import Checkpoint, check_checkpoint, load_params

EPILOG = """\
examples:
  a text prompt, greedy:
    python -m examples.deepseek_v32 /models/DeepSeek-V3.2 "The capital of France is"
  two prompts as token ids, sampled:
    python -m examples.deepseek_v32 DIR --ids 0,51,72 --ids 0,9 --temperature 0.6 --top-p 0.95
  the kernel on an AMD gfx950 GPU, or an error if it cannot run:
    python -m examples.deepseek_v32 DIR "Hello" --implementation kernel

Prompts are completed as they stand; a chat template is yours to apply. They run in one batch.
"""


def parser() -> argparse.ArgumentParser:
    """The command line's arguments."""
    p = argparse.ArgumentParser(
        prog="python -m examples.deepseek_v32",
        description="Generate text with a DeepSeek-V3.2 checkpoint in Hugging Face's format.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="folder with config.json, safetensors (bfloat16 or fp8 blocks) and tokenizer.json",
    )

    prompts = p.add_argument_group("prompts")
    prompts.add_argument("prompts", metavar="TEXT", nargs="*", help="a prompt; any number")
    prompts.add_argument(
        "--ids",
        metavar="N,N,...",
        action="append",
        default=[],
        help="a prompt as token ids, taken as it is; may be given again",
    )
    prompts.add_argument(
        "--prompt-file", metavar="FILE", type=Path, help="a text prompt from a file"
    )
    prompts.add_argument(
        "--no-bos", action="store_true", help="do not put bos_token_id before text prompts"
    )

    text = p.add_argument_group("sampling")
    text.add_argument(
        "--max-new-tokens", metavar="N", type=int, default=32, help="for each prompt (%(default)s)"
    )
    text.add_argument(
        "--temperature", metavar="T", type=float, default=0.0, help="0 is greedy (%(default)s)"
    )
    text.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens that sum to P (%(default)s)",
    )
    text.add_argument("--seed", metavar="N", type=int, default=0, help="of sampling (%(default)s)")
    text.add_argument(
        "--draft-tokens",
        metavar="N",
        type=int,
        default=0,
        help="guess N tokens a step from the text so far and check them in one step; the text "
        "stays the same (%(default)s)",
    )

    compute = p.add_argument_group("computation")
    compute.add_argument(
        "--implementation",
        choices=("auto", "kernel", "reference"),
        default="auto",
        help="of sparse attention; auto: the kernel on gfx950, else the reference (%(default)s)",
    )
    compute.add_argument(
        "--mesh",
        metavar="DATA,TENSOR",
        help="spread over DATA groups of TENSOR devices: each group has requests and a cache of "
        "its own, each device of a group a share of the heads and experts (default: one device)",
    )
    compute.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of weights and activations (%(default)s)",
    )
    compute.add_argument(
        "--index-format",
        choices=("bf16", "fp8"),
        default="bf16",
        help="of the indexer's cached keys (%(default)s)",
    )
    compute.add_argument(
        "--scan-layers",
        action="store_true",
        help="compile one layer of each kind and loop, rather than every layer; on the CPU only "
        "with --dtype float32 or a small model, since XLA copies bfloat16 stacks there",
    )

    sizes = p.add_argument_group("sizes")
    sizes.add_argument(
        "--max-batch", metavar="N", type=int, default=8, help="requests at a time (%(default)s)"
    )
    sizes.add_argument(
        "--prefill-rows",
        metavar="N",
        type=int,
        default=256,
        help="tokens of a step that holds prompt tokens (%(default)s)",
    )
    sizes.add_argument(
        "--block-size", metavar="N", type=int, default=64, help="tokens a block (%(default)s)"
    )
    sizes.add_argument(
        "--cache-tokens",
        metavar="N",
        type=int,
        help="tokens that the cache holds (default: the longest --max-batch requests)",
    )
    p.add_argument("--quiet", action="store_true", help="print nothing but the generated text")
    return p


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt and how to show it."""

    label: str
    ids: list[int]


def read_prompts(
    arguments: argparse.Namespace, config: Config, tokenizer: Tokenizer | None
) -> list[Prompt]:
    """Collect the prompts of a command line.

    Raises:
      ValueError: there is none, ids are not numbers, or text has no tokenizer.
      OSError: the prompt file cannot be read.
    """
    texts = list(arguments.prompts)
    if arguments.prompt_file is not None:
        texts.append(arguments.prompt_file.read_text())
    if texts and tokenizer is None:
        raise ValueError("no tokenizer.json beside the checkpoint: give prompts with --ids")
    prompts = []
    for text in texts:
        assert tokenizer is not None
        ids = tokenizer.encode(text).ids
        bos = config.bos_token_id
        if bos is not None and not arguments.no_bos and ids[:1] != [bos]:
            ids = [bos, *ids]
        prompts.append(Prompt(text, ids))
    for written in arguments.ids:
        try:
            ids = [int(word) for word in written.replace(",", " ").split()]
        except ValueError:
            raise ValueError(f"--ids takes numbers, got {written!r}") from None
        prompts.append(Prompt(written, ids))
    if not prompts:
        raise ValueError("no prompt: give TEXT, --ids or --prompt-file")
    return prompts


def make_limits(
    arguments: argparse.Namespace, prompts: Sequence[Prompt], groups: int = 1
) -> Limits:
    """Sizes of each group's cache and steps that fit the prompts."""
    size = arguments.block_size
    lengths = sorted((len(p.ids) + arguments.max_new_tokens for p in prompts), reverse=True)
    lines = max(1, -(-min(arguments.max_batch, len(prompts)) // groups))
    if arguments.cache_tokens is None:
        num_blocks = sum(-(-length // max(size, 1)) for length in lengths[:lines])
    else:
        num_blocks = -(-arguments.cache_tokens // max(size, 1))
    return Limits(
        num_blocks=num_blocks,
        block_size=size,
        max_length=lengths[0],
        lines=lines,
        prefill_rows=max(arguments.prefill_rows, lines * (1 + arguments.draft_tokens)),
        draft_tokens=arguments.draft_tokens,
    )


def parse_mesh(written: str) -> tuple[int, int]:
    """(data, tensor) of ``--mesh``.

    Raises:
      ValueError: it is not two numbers.
    """
    try:
        data, tensor = map(int, written.split(","))
        if min(data, tensor) < 1:
            raise ValueError
    except ValueError:
        raise ValueError(f"--mesh takes DATA,TENSOR, for instance 1,8; got {written!r}") from None
    return data, tensor


def run(arguments: argparse.Namespace) -> list[list[int]]:
    """Check everything, then load and generate; returns the generated ids.

    Raises:
      ValueError: an argument, the configuration or the checkpoint does not fit.
      OSError: a file is missing.
    """
    say = (lambda *_: None) if arguments.quiet else print
    config = Config.load(arguments.checkpoint)
    path = Path(arguments.checkpoint) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None
    prompts = read_prompts(arguments, config, tokenizer)
    data, tensor = parse_mesh(arguments.mesh or "1,1")
    limits = make_limits(arguments, prompts, data)
    check_limits(config, limits)
    ids = [prompt.ids for prompt in prompts]
    make_requests(ids, arguments.max_new_tokens, config, limits)
    sampling = Sampling(arguments.temperature, arguments.top_p, arguments.seed)
    implementation = None if arguments.implementation == "auto" else arguments.implementation
    options = Options(
        dtype=jnp.dtype(arguments.dtype),
        implementation=implementation,
        index_format=arguments.index_format,
    )
    mesh = None
    if arguments.mesh is not None:
        mesh = make_mesh(data, tensor, config)
    check_checkpoint(Checkpoint(arguments.checkpoint), checkpoint_tensors(config))

    device = jax.devices()[0]
    say(f"device {device.platform} {device.device_kind}, attention {arguments.implementation}")
    shardings = None
    if mesh is not None:
        shardings = param_shardings(config, mesh, stacked=arguments.scan_layers)
    params = load_params(
        arguments.checkpoint,
        config,
        dtype=options.dtype,
        stacked=arguments.scan_layers,
        shardings=shardings,
        progress=not arguments.quiet,
    )
    engine = Engine(params, config, limits, options, sampling, mesh)
    total = sum(map(len, ids)) + len(ids) * arguments.max_new_tokens
    with tqdm(total=total, desc="generating", unit="tok", disable=arguments.quiet) as bar:

        def on_step(plans: list[Plan], _logits: np.ndarray) -> None:
            bar.update(sum(plan.num_rows for plan in plans))

        generated = engine.generate(ids, arguments.max_new_tokens, on_step)
    for prompt, new in zip(prompts, generated, strict=True):
        text = tokenizer.decode(new) if tokenizer is not None else ""
        say(f"\n> {prompt.label}")
        print(text if text else ",".join(map(str, new)))
    say("\n" + report(engine.statistics))
    return generated


def report(statistics: Statistics) -> str:
    """Speed in a few lines."""
    lines = [
        f"{statistics.generated} tokens generated in {statistics.steps} steps; the first step of "
        f"each size, which compiles: {statistics.first_seconds:.1f} s"
    ]
    if statistics.prefill_seconds:
        rate = statistics.prompt_rows / statistics.prefill_seconds
        lines.append(f"prefill {rate:.0f} tokens/s")
    if statistics.decode_seconds:
        rate = statistics.decoded / statistics.decode_seconds
        lines.append(f"decode {rate:.1f} tokens/s")
    if statistics.drafted:
        share = statistics.accepted / statistics.drafted
        lines.append(f"{statistics.drafted} tokens drafted, {share:.0%} of them accepted")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0, or 2 after an error that the user can mend."""
    arguments = parser().parse_args(argv)
    try:
        run(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
