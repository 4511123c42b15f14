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
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples.deepseek_v32.attention import Rows, attention, geometry, project, rms_norm
from examples.deepseek_v32.cache import cache_shapes
from examples.deepseek_v32.config import Config
from examples.deepseek_v32.mlp import feed_forward
from examples.deepseek_v32.options import Options
from examples.deepseek_v32.random_checkpoint import tiny_config, write_random_checkpoint
from examples.deepseek_v32.weights import load_params
from jax_sparse_mla import index_topk, pack_records, unpack_records, write_index_keys

SEED = 11
"""One of whose rows no two experts nearly tie: rounding would send such a row to the other."""
NUM_TOKENS = 48
BLOCK_SIZE = 8
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


def oracle_config() -> Config:
    """A tiny model whose rows see more tokens than they may select."""
    return tiny_config(vocab_size=300, index_topk=16)


def page_table(num_tokens: int, block_size: int) -> np.ndarray:
    """Blocks of one request in an order that is not their own."""
    blocks = -(-num_tokens // block_size)
    return np.random.default_rng(1).permutation(blocks).astype(np.int32)[None]


class Subject:
    """This model, set up for one sequence, its parts compiled apart to be compared apart."""

    def __init__(self, folder: str | Path, config: Config, tokens: np.ndarray, **formats: str):
        """Load the checkpoint.

        Args:
          folder: the checkpoint's.
          config: the model's.
          tokens: ``[n]``.
          formats: ``record_format`` and ``index_format`` of `Options`.
        """
        self.config = config
        self.options = Options(dtype=jnp.float32, **formats)
        self.params = load_params(folder, config, dtype=jnp.float32)
        self.layers = (*self.params.dense, *self.params.sparse)
        n = len(tokens)
        table = jnp.asarray(page_table(n, BLOCK_SIZE))
        numbers = jnp.arange(n, dtype=jnp.int32)
        self.rows = Rows(jnp.asarray(tokens), jnp.zeros(n, jnp.int32), numbers, table)
        shapes = cache_shapes(config, table.shape[1], BLOCK_SIZE, self.options)
        self.cache = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        self._attention = jax.jit(self._attend)
        self._feed_forward = jax.jit(lambda p, x: feed_forward(p, x, config, self.options))
        self._selection = jax.jit(self._select)

    def _attend(self, p: Any, x: jax.Array, number: jax.Array, selected: jax.Array) -> jax.Array:
        shared = geometry(self.config, self.rows, BLOCK_SIZE)
        args = (p, x, self.cache, number, self.rows, shared, self.config, self.options, selected)
        return attention(*args)[0]

    def _select(self, p: Any, x: jax.Array) -> jax.Array:
        shared = geometry(self.config, self.rows, BLOCK_SIZE)
        view = project(p, x, shared, self.config, self.options)
        keys = write_index_keys(self.cache.index_keys, shared.slots, view.index_key)
        return index_topk(
            view.index_q,
            view.index_weights,
            keys,
            self.rows.block_table,
            self.rows.requests,
            self.rows.positions,
            self.config.index_topk,
        )

    def layer(self, number: int, x: jax.Array, selected: jax.Array) -> jax.Array:
        """One layer's output, attending what is selected."""
        p, eps = self.layers[number], self.config.rms_norm_eps
        y = self._attention(p.attention, rms_norm(x, p.input_norm, eps), number, selected)
        return x + y + self._feed_forward(p.mlp, rms_norm(x + y, p.post_norm, eps))

    def selection(self, number: int, x: jax.Array) -> np.ndarray:
        """What one layer's indexer selects."""
        p = self.layers[number]
        normed = rms_norm(x, p.input_norm, self.config.rms_norm_eps)
        return np.asarray(self._selection(p.attention, normed))

    def logits(self, x: jax.Array) -> jax.Array:
        """Logits from the last layer's output."""
        x = rms_norm(x, self.params.norm, self.config.rms_norm_eps)
        return x @ self.params.lm_head.T


def compare_layers(subject: Subject, recording: Recording) -> list[float]:
    """Each layer's error, fed with transformers' input and selection; relative, of the update."""
    errors = []
    for number, (x, expected) in enumerate(pairwise(recording.hidden)):
        out = subject.layer(number, jnp.asarray(x), jnp.asarray(recording.selected[number]))
        errors.append(relative(np.asarray(out) - x, expected - x))
    return errors


def compare_logits(subject: Subject, recording: Recording) -> float:
    """The logits' error, end to end, with transformers' selections."""
    x = subject.params.embed[subject.rows.tokens]
    for number, selected in enumerate(recording.selected):
        x = subject.layer(number, x, jnp.asarray(selected))
    return relative(np.asarray(subject.logits(x)), recording.logits)


def compare_selections(subject: Subject, recording: Recording) -> float:
    """Share of transformers' selected tokens that our indexer selects from the same inputs."""
    agreed = 0
    for number, expected in enumerate(recording.selected):
        chosen = subject.selection(number, jnp.asarray(recording.hidden[number]))
        for ours, theirs in zip(chosen, expected, strict=True):
            agreed += len(set(ours[ours >= 0]) & set(theirs[theirs >= 0]))
    return agreed / int(np.sum(recording.selected >= 0))


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
            subject = Subject(folder, config, recordings[kind].tokens, record_format=kind)
            layers = compare_layers(subject, recordings[kind])
            logits = compare_logits(subject, recordings[kind])
            selection = compare_selections(subject, recordings[kind])
            numbers = " ".join(f"{error:.1e}" for error in layers)
            print(f"{kind}: layers {numbers}, logits {logits:.1e}, same selection {selection:.4f}")
            if max(layers) > LAYER_TOLERANCE or logits > LOGITS_TOLERANCE:
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
