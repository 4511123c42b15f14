"""Comparison with Hugging Face transformers' DeepseekV32ForCausalLM on a tiny random checkpoint.

    python -m examples.deepseek_v32.oracle              compare now (the `oracle` extra)
    python -m examples.deepseek_v32.oracle --record F   write the fixture that the fast tests read

transformers runs in float32 with its cached latents rounded as ours are: to bfloat16, or through a
record. Everything is compared layer by layer, each fed with transformers' own input and selection,
and end to end in logits with the selections forced; the selections are compared on their own. (With
sparse selection two right models part where index scores nearly tie.)
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples.deepseek_v32.attention import Rows, geometry, rms_norm
from examples.deepseek_v32.cache import Cache, cache_shapes
from examples.deepseek_v32.config import Config
from examples.deepseek_v32.model import decoder_layer
from examples.deepseek_v32.options import Options
from examples.deepseek_v32.random_checkpoint import tiny_config, write_random_checkpoint
from examples.deepseek_v32.weights import load_params
from jax_sparse_mla import pack_records, unpack_records

SEED = 11
"""One of whose rows no two experts nearly tie: rounding would send such a row to the other."""
NUM_TOKENS = 48
LAYER_TOLERANCE = 6e-3
"""Relative 2-norm of a layer's update; the op takes queries and gives results in bfloat16."""
LOGITS_TOLERANCE = 2e-2
"""Relative 2-norm of the logits, after all layers."""


class Recording(NamedTuple):
    """What transformers computed for one sequence."""

    tokens: np.ndarray  # [n] int32
    hidden: np.ndarray  # [layers + 1, n, D] float32: each layer's input, then the last's output
    selected: np.ndarray  # [layers, n, k] int32, -1 where a row sees fewer tokens
    logits: np.ndarray  # [n, V] float32


class Difference(NamedTuple):
    """How far the two models are apart."""

    layers: list[float]  # relative 2-norm of each layer's output, fed with the other's input
    logits: float  # relative 2-norm, end to end, selections forced
    selection: float  # share of selected tokens that the indexers agree on, same inputs


def oracle_config() -> Config:
    """A tiny model whose rows see more tokens than they may select."""
    return tiny_config(vocab_size=300, index_topk=16)


def page_table(num_tokens: int, block_size: int) -> np.ndarray:
    """Blocks of one request in an order that is not their own."""
    blocks = -(-num_tokens // block_size)
    return np.random.default_rng(1).permutation(blocks).astype(np.int32)[None]


def compare(
    folder: str | Path, config: Config, recording: Recording, record_format: str
) -> Difference:
    """Run this model beside a recording of transformers'.

    Args:
      folder: the checkpoint's.
      config: the model's.
      recording: transformers' results, its latents rounded in the same format.
      record_format: as in `Options`.
    """
    options = Options(dtype=jnp.float32, record_format=record_format)
    params = load_params(folder, config, dtype=jnp.float32)
    layers = (*params.dense, *params.sparse)
    n = len(recording.tokens)
    block_size = 8
    table = page_table(n, block_size)
    rows = Rows(
        jnp.asarray(recording.tokens),
        jnp.zeros(n, jnp.int32),
        jnp.arange(n, dtype=jnp.int32),
        jnp.asarray(table),
    )
    empty = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype),
        cache_shapes(config, table.shape[1], block_size, options),
    )

    @jax.jit
    def step(p: Any, x: jax.Array, cache: Cache, number: jax.Array, selected: Any) -> Any:
        shared = geometry(config, rows, block_size)
        return decoder_layer(p, x, cache, number, rows, shared, config, options, selected)

    x = params.embed[rows.tokens]
    errors, agreed = [], 0
    cache = empty
    for number, layer in enumerate(layers):
        theirs = jnp.asarray(recording.hidden[number])
        forced = jnp.asarray(recording.selected[number])
        expected = recording.hidden[number + 1]
        out, _, _ = step(layer, theirs, empty, number, forced)
        update = expected - recording.hidden[number]
        errors.append(relative(np.asarray(out) - recording.hidden[number], update))
        _, _, chosen = step(layer, theirs, empty, number, None)
        agreed += sum(
            len(set(a[a >= 0]) & set(b[b >= 0]))
            for a, b in zip(np.asarray(chosen), recording.selected[number], strict=True)
        )
        x, cache, _ = step(layer, x, cache, number, forced)
    logits = rms_norm(x, params.norm, config.rms_norm_eps) @ params.lm_head.T
    return Difference(
        errors,
        relative(np.asarray(logits), recording.logits),
        agreed / np.sum(recording.selected >= 0),
    )


def relative(value: np.ndarray, expected: np.ndarray) -> float:
    """Distance in the 2-norm, relative to what is expected."""
    return float(np.linalg.norm(value - expected) / np.linalg.norm(expected))


def record(folder: str | Path, config: Config, record_format: str) -> Recording:
    """Run transformers' model on random tokens.

    Args:
      folder: the checkpoint's.
      config: the model's.
      record_format: how its cached latents are rounded.
    """
    import torch
    from transformers import DeepseekV32ForCausalLM

    model = DeepseekV32ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    n = NUM_TOKENS
    tokens = np.random.default_rng(SEED).integers(2, config.vocab_size, n).astype(np.int32)
    hidden: list[np.ndarray] = []
    selected: list[np.ndarray] = []

    def round_latent(_module: Any, _args: Any, out: Any) -> Any:
        latent = out.detach().numpy()
        if record_format == "fp8":
            rope = np.zeros((*latent.shape[:-1], 64), np.float32)
            rounded = np.asarray(unpack_records(pack_records(latent, rope))[0])
        else:
            rounded = latent.astype(jnp.bfloat16).astype(np.float32)
        return torch.from_numpy(rounded.copy())

    def keep_selection(_module: Any, _args: Any, out: Any) -> None:
        chosen = out[0].numpy().astype(np.int32)
        # A row that sees fewer than k tokens names future ones, which the causal mask removes.
        selected.append(np.where(chosen <= np.arange(n)[:, None], chosen, -1))

    def keep_input(_module: Any, args: Any) -> None:
        hidden.append(args[0][0].detach().numpy())

    for layer in model.model.layers:
        layer.register_forward_pre_hook(keep_input)
        layer.self_attn.kv_a_layernorm.register_forward_hook(round_latent)
        layer.self_attn.indexer.register_forward_hook(keep_selection)
    model.model.norm.register_forward_pre_hook(keep_input)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits
    return Recording(tokens, np.stack(hidden), np.stack(selected), logits[0].numpy())


def load_fixture(path: str | Path) -> dict[str, Recording]:
    """Read what `--record` wrote: a recording for each record format."""
    with np.load(path) as file:
        return {
            kind: Recording(**{field: file[f"{kind}.{field}"] for field in Recording._fields})
            for kind in ("bf16", "fp8")
        }


def main() -> None:
    """Compare with transformers now, or write the fixture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--record", metavar="FILE", help="write the tests' fixture (.npz)")
    arguments = parser.parse_args()
    config = oracle_config()
    recordings = {}
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(folder, config, seed=SEED)
        for kind in ("bf16", "fp8"):
            recordings[kind] = record(folder, config, kind)
            difference = compare(folder, config, recordings[kind], kind)
            layers = " ".join(f"{error:.1e}" for error in difference.layers)
            print(
                f"{kind}: layers {layers}, logits {difference.logits:.1e}, "
                f"selection {difference.selection:.4f}"
            )
            if max(difference.layers) > LAYER_TOLERANCE or difference.logits > LOGITS_TOLERANCE:
                raise SystemExit("the models disagree")
    if arguments.record:
        arrays = {
            f"{kind}.{field}": value
            for kind, recording in recordings.items()
            for field, value in recording._asdict().items()
        }
        np.savez_compressed(arguments.record, **arrays)


if __name__ == "__main__":
    main()
