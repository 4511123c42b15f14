"""Writing a random checkpoint in Hugging Face's format, for demos and tests."""

import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from examples.deepseek_v32.config import FP8_BLOCK, Config, Yarn
from examples.deepseek_v32.params import Tensor, checkpoint_tensors
from examples.deepseek_v32.weights import SCALE_SUFFIX

NUM_SPECIAL_TOKENS = 2
"""Begin and end of text, before the 256 bytes."""


def tiny_config(**changes: object) -> Config:
    """A model of a few million parameters with every part of the real one.

    Args:
      changes: fields of `Config` to set otherwise.
    """
    values: dict[str, object] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_attention_heads": 16,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "index_n_heads": 4,
        "index_topk": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "max_position_embeddings": 8192,
        "yarn": Yarn(factor=8.0, original_max_position_embeddings=1024),
    }
    return Config(**(values | changes))  # type: ignore[arg-type]


def write_random_checkpoint(
    folder: str | Path,
    config: Config,
    *,
    seed: int = 0,
    fp8: bool = False,
    shards: int = 2,
    progress: bool = False,
) -> None:
    """Write config.json, sharded safetensors with their index, and a byte-level tokenizer.json.

    Weights are normal with standard deviation ``fan_in ** -0.5``, so that activations keep their
    size and every part of the model has a say in the result.

    Args:
      folder: made if it is not there.
      config: the model's.
      seed: of the weights.
      fp8: matrices of the layers in DeepSeek's fp8 block format, everything else bfloat16 or
        float32.
      shards: number of safetensors files.
      progress: show a progress bar.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    values = config.to_dict()
    if fp8:
        values["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")

    tensors = list({t.name: t for t in checkpoint_tensors(config)}.values())
    bar = tqdm(total=len(tensors), desc="writing", unit="tensor", disable=not progress)
    per_shard = -(-len(tensors) // shards)
    weight_map, total = {}, 0
    rng = np.random.default_rng(seed)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        arrays: dict[str, np.ndarray] = {}
        for tensor in tensors[shard * per_shard : (shard + 1) * per_shard]:
            arrays.update(_random(tensor, rng, fp8))
            bar.update()
        save_file(arrays, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(arrays, file))
        total += sum(array.nbytes for array in arrays.values())
    bar.close()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    if config.vocab_size >= NUM_SPECIAL_TOKENS + 256:
        byte_tokenizer().save(str(folder / "tokenizer.json"))


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of one token a byte, after the two special ones."""
    vocab = {"<bos>": 0, "<eos>": 1}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    return tokenizer


def _random(
    tensor: Tensor, rng: np.random.Generator, fp8: bool
) -> Iterator[tuple[str, np.ndarray]]:
    shape = tensor.checkpoint_shape
    data = rng.standard_normal(shape, np.float32)
    if len(shape) == 1:
        # Norm weights around 1; biases around 0.
        is_scale = tensor.name.endswith("norm.weight")
        data = 1 + 0.1 * data if is_scale else 0.02 * data
    elif tensor.path != ("embed",):
        data *= shape[-1] ** -0.5
    if tensor.float32:
        yield tensor.name, data
    elif fp8 and len(shape) == 2 and tensor.group is not None:
        values, scale = quantise(data)
        yield tensor.name, values
        yield tensor.name + SCALE_SUFFIX, scale
    else:
        yield tensor.name, data.astype(ml_dtypes.bfloat16)


def quantise(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """DeepSeek's fp8 blocks of a weight; `weights.dequantise` undoes it.

    Args:
      weight: ``[o, i]`` float32.

    Returns:
      ``[o, i]`` float8_e4m3fn and ``[ceil(o / 128), ceil(i / 128)]`` float32.
    """
    padding = [(0, -size % FP8_BLOCK) for size in weight.shape]
    padded = np.pad(weight, padding)
    rows, columns = (size // FP8_BLOCK for size in padded.shape)
    blocks = padded.reshape(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scale = np.maximum(np.abs(blocks).max(axis=(1, 3)), 1e-12) / 448.0
    values = (blocks / scale[:, None, :, None]).reshape(padded.shape)
    values = values[: weight.shape[0], : weight.shape[1]].astype(ml_dtypes.float8_e4m3fn)
    return values, scale.astype(np.float32)
