"""Checkpoints: written, read in each format and layout, and refused with a clear error."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from examples.deepseek_v32 import weights
from examples.deepseek_v32.params import Layer, checkpoint_tensors, param_shapes
from examples.deepseek_v32.random_checkpoint import (
    byte_tokenizer,
    quantise,
    tiny_config,
    write_random_checkpoint,
)
from examples.deepseek_v32.weights import Checkpoint, CheckpointError, dequantise, load_params

CONFIG = tiny_config()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bf16")
    write_random_checkpoint(path, CONFIG)
    return path


def tensor(folder, name):
    """A tensor by the format's own library."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return load_file(folder / index["weight_map"][name])[name]


@pytest.fixture(scope="module")
def params(folder):
    return load_params(folder, CONFIG)


def test_tensors_reach_their_places(folder, params):
    def same(value, name, *shape):
        expected = tensor(folder, name)
        np.testing.assert_array_equal(np.asarray(value), expected.reshape(shape or expected.shape))

    same(params.embed, "model.embed_tokens.weight")
    same(params.norm, "model.norm.weight")
    same(params.lm_head, "lm_head.weight")
    same(params.dense[0].mlp.down, "model.layers.0.mlp.down_proj.weight")
    layer = params.sparse[1]
    at = "model.layers.2"
    same(layer.input_norm, f"{at}.input_layernorm.weight")
    same(layer.post_norm, f"{at}.post_attention_layernorm.weight")
    same(layer.attention.q_b, f"{at}.self_attn.q_b_proj.weight")
    same(layer.attention.o, f"{at}.self_attn.o_proj.weight")
    same(layer.attention.indexer.wq_b, f"{at}.self_attn.indexer.wq_b.weight")
    same(layer.attention.indexer.k_norm_bias, f"{at}.self_attn.indexer.k_norm.bias")
    same(layer.mlp.router, f"{at}.mlp.gate.weight")
    same(layer.mlp.bias, f"{at}.mlp.gate.e_score_correction_bias")
    same(layer.mlp.experts.up[5], f"{at}.mlp.experts.5.up_proj.weight")
    same(layer.mlp.shared.gate, f"{at}.mlp.shared_experts.gate_proj.weight")
    kv_b = tensor(folder, f"{at}.self_attn.kv_b_proj.weight").reshape(16, 64, 512)
    w_uk = np.swapaxes(np.asarray(layer.attention.w_uk), 1, 2)
    np.testing.assert_array_equal(w_uk, kv_b[:, :32])
    np.testing.assert_array_equal(np.asarray(layer.attention.w_uv), kv_b[:, 32:])


def test_stacked_is_the_same_with_a_layer_axis(folder, params):
    stacked = load_params(folder, CONFIG, stacked=True)
    assert isinstance(stacked.sparse, Layer)
    for group in ("dense", "sparse"):
        joined = jax.tree.map(lambda *layers: jnp.stack(layers), *getattr(params, group))
        jax.tree.map(np.testing.assert_array_equal, joined, getattr(stacked, group))


@pytest.mark.parametrize("stacked", [False, True])
def test_shapes_and_dtypes(folder, stacked):
    params = load_params(folder, CONFIG, stacked=stacked)
    expected = param_shapes(CONFIG, jnp.bfloat16, stacked=stacked)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), expected
    )


def test_released_model_has_all_tensors():
    """Names and shapes of the 671-billion-parameter model, from its defaults."""
    from examples.deepseek_v32.config import Config

    tensors = {t.name: t.checkpoint_shape for t in checkpoint_tensors(Config())}
    assert len(tensors) == 3 + 61 * 14 + 3 * 3 + 58 * (2 + 3 + 256 * 3)
    assert tensors["model.layers.60.mlp.experts.255.down_proj.weight"] == (7168, 2048)
    assert tensors["model.layers.0.self_attn.kv_b_proj.weight"] == (32768, 512)
    assert tensors["model.layers.0.self_attn.indexer.wq_b.weight"] == (8192, 1536)
    assert tensors["model.layers.2.mlp.up_proj.weight"] == (18432, 7168)
    parameters = sum(np.prod(shape, dtype=np.int64) for shape in tensors.values())
    assert 6.7e11 < parameters < 6.8e11


def test_dequantise_by_hand():
    """Blocks of 128 x 128, a partial one last: the factor of each value is that of its block."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((200, 130)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.1, 2, (2, 2)).astype(np.float32)
    got = np.asarray(dequantise(jnp.asarray(weight), jnp.asarray(scale)))
    for o, i in [(0, 0), (127, 127), (128, 0), (127, 128), (199, 129)]:
        assert got[o, i] == np.float32(weight[o, i]) * scale[o // 128, i // 128]


def test_fp8_checkpoint(tmp_path, params):
    write_random_checkpoint(tmp_path, CONFIG, fp8=True)
    loaded = load_params(tmp_path, CONFIG)
    exact = {"embed", "lm_head", "norm"}
    for name in exact:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(params, name))
    # e4m3 keeps 3 mantissa bits of values within 2^-8 of the block's largest.
    got = np.asarray(loaded.sparse[0].attention.q_b, np.float32)
    expected = np.asarray(params.sparse[0].attention.q_b, np.float32)
    assert 0 < np.max(np.abs(got - expected)) < 0.07 * np.max(np.abs(expected))
    np.testing.assert_array_equal(loaded.sparse[0].mlp.router, params.sparse[0].mlp.router)


@pytest.mark.parametrize("fp8", [False, True])
def test_pieces_make_the_same_parameters(tmp_path, monkeypatch, fp8):
    write_random_checkpoint(tmp_path, CONFIG, fp8=fp8)
    whole = load_params(tmp_path, CONFIG, stacked=True)
    monkeypatch.setattr(weights, "PIECE_BYTES", 1)
    pieces = load_params(tmp_path, CONFIG, stacked=True)
    jax.tree.map(np.testing.assert_array_equal, pieces, whole)


def test_quantise_round_trip():
    weight = np.random.default_rng(0).standard_normal((130, 260)).astype(np.float32)
    values, scale = quantise(weight)
    assert scale.shape == (2, 3)
    np.testing.assert_allclose(dequantise(values, scale), weight, atol=0.07 * 4, rtol=2**-4)


def test_single_file_checkpoint(tmp_path, folder, params):
    everything = {}
    for shard in folder.glob("*.safetensors"):
        everything.update(load_file(shard))
    save_file(everything, tmp_path / "model.safetensors")
    loaded = load_params(tmp_path, CONFIG)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def damaged(folder, tmp_path, change):
    """A copy of the checkpoint in one file, its tensors changed."""
    everything = {}
    for shard in folder.glob("*.safetensors"):
        everything.update(load_file(shard))
    change(everything)
    save_file(everything, tmp_path / "model.safetensors")
    return tmp_path


def test_missing_tensors_are_named(folder, tmp_path):
    name = "model.layers.1.self_attn.indexer.wk.weight"
    path = damaged(folder, tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load_params(path, CONFIG)


def test_wrong_shapes_are_named(folder, tmp_path):
    name = "model.layers.0.self_attn.o_proj.weight"

    def transpose(tensors):
        tensors[name] = np.ascontiguousarray(tensors[name].T)

    path = damaged(folder, tmp_path, transpose)
    with pytest.raises(CheckpointError, match=r"o_proj\.weight is \[512, 128\], not \[128, 512\]"):
        load_params(path, CONFIG)


def test_fp8_without_scales_is_refused(folder, tmp_path):
    name = "model.layers.0.self_attn.o_proj.weight"

    def convert(tensors):
        tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)

    path = damaged(folder, tmp_path, convert)
    with pytest.raises(CheckpointError, match=r"o_proj\.weight_scale_inv is missing"):
        load_params(path, CONFIG)


def test_unknown_dtypes_are_refused(folder, tmp_path):
    def convert(tensors):
        tensors["model.norm.weight"] = np.zeros(128, np.int8)

    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is I8"):
        load_params(damaged(folder, tmp_path, convert), CONFIG)


def test_many_faults_are_counted(folder):
    with pytest.raises(CheckpointError, match=r"and \d+ more"):
        load_params(folder, tiny_config(hidden_size=64))


def test_missing_files(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        Checkpoint(tmp_path)
    index = folder / "model.safetensors.index.json"
    (tmp_path / index.name).write_text(index.read_text())
    with pytest.raises(FileNotFoundError, match="named by the index"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [4, 100, -10])
def test_truncated_files(tmp_path, keep):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(1000, np.float32)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"header|cut short"):
        Checkpoint(tmp_path)


def test_tokenizer(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "Grüße, 世界!\n"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert max(ids) < CONFIG.vocab_size
    assert tokenizer.decode(ids) == text
    assert byte_tokenizer().encode(text).ids == ids
