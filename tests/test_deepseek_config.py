"""config.json: what is read, and the error for what is not supported."""

import json
import math

import pytest

from examples.deepseek_v32.config import Config, ConfigError, Yarn
from examples.deepseek_v32.random_checkpoint import tiny_config

RELEASED = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v32",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""The keys of the released model's config.json that bear on inference."""


def test_released_model():
    config = Config.from_dict(RELEASED)
    assert config == Config()
    assert math.isclose(config.softmax_scale, 192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert math.isclose(config.softmax_scale * 192**0.5, 1.8739, abs_tol=5e-5)


def test_newer_rope_form_means_the_same():
    values = dict(RELEASED)
    del values["rope_theta"]
    rope = dict(values.pop("rope_scaling"))
    rope["rope_type"] = rope.pop("type")
    values["rope_parameters"] = rope | {"rope_theta": 10000.0}
    assert Config.from_dict(values) == Config.from_dict(RELEASED)


def test_round_trip():
    for config in (tiny_config(), tiny_config(yarn=None, eos_token_ids=(1, 5)), Config()):
        assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_default_rope_has_no_temperature():
    config = Config.from_dict(RELEASED | {"rope_scaling": None})
    assert config.yarn is None
    assert config.softmax_scale == 192**-0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v3"}, "model_type"),
        ({"kv_lora_rank": 256}, "kv_lora_rank 256 .* only 512"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim"),
        ({"index_head_dim": 64}, "index_head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
        ({"q_lora_rank": None}, "q_lora_rank must be int"),
        ({"hidden_size": "7168"}, "hidden_size must be int"),
        ({"hidden_size": True}, "hidden_size must be int"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be bool"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive"),
        ({"n_group": 7}, "n_group 7 does not divide"),
        ({"topk_group": 9}, "topk_group 9"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok 129"),
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": "x"}}, "yarn factor"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn factor"),
        ({"mlp_layer_types": ["sparse"] * 61}, "mlp_layer_types"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config 'awq'"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "weight_block_size",
        ),
    ],
)
def test_unsupported_values_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        Config.from_dict(RELEASED | changes)


@pytest.mark.parametrize("key", ["hidden_size", "kv_lora_rank", "index_topk", "model_type"])
def test_missing_keys_are_named(key):
    with pytest.raises(ConfigError, match=key):
        Config.from_dict({name: value for name, value in RELEASED.items() if name != key})


def test_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        Config.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        Config.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(RELEASED))
    assert Config.load(tmp_path).yarn == Yarn(40.0, 4096)
