"""The model's configuration, read from a Hugging Face ``config.json`` and checked."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

LATENT_DIM = 512
ROPE_DIM = 64
INDEX_DIM = 128
FP8_BLOCK = 128


class ConfigError(ValueError):
    """A configuration that this model does not support, or that contradicts itself."""


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN context extension.

    Source: the YaRN paper (arXiv 2309.00071), with DeepSeek's mscale.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclasses.dataclass(frozen=True)
class Config:
    """Dimensions and constants of one model. The defaults are DeepSeek-V3.2's.

    Field names are config.json's. What the op's record fixes (latent 512, rope 64, index keys 128)
    is checked, not configured.
    """

    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 61
    first_k_dense_replace: int = 3
    num_attention_heads: int = 128
    q_lora_rank: int = 1536
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    index_n_heads: int = 64
    index_topk: int = 2048
    n_routed_experts: int = 256
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 163840
    rope_theta: float = 10000.0
    yarn: Yarn | None = Yarn(factor=40.0, original_max_position_embeddings=4096)
    bos_token_id: int | None = 0
    eos_token_ids: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or value < 1):
                # A model may be all dense or all sparse.
                if field.name == "first_k_dense_replace" and value == 0:
                    continue
                raise ConfigError(f"{field.name} must be a positive integer, got {value!r}")
        experts, groups = self.n_routed_experts, self.n_group
        if experts % groups:
            raise ConfigError(f"n_group {groups} does not divide n_routed_experts {experts}")
        if experts // groups < 2:
            raise ConfigError(
                f"a group is scored by its two best experts, got {experts} experts in {groups}"
            )
        if self.topk_group > groups:
            raise ConfigError(f"topk_group {self.topk_group} is more than n_group {groups}")
        if self.num_experts_per_tok > self.topk_group * experts // groups:
            raise ConfigError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than the "
                f"{self.topk_group * experts // groups} experts of topk_group groups"
            )

    @property
    def num_dense_layers(self) -> int:
        """Leading layers with a dense MLP; the others have experts."""
        return min(self.first_k_dense_replace, self.num_hidden_layers)

    @property
    def softmax_scale(self) -> float:
        """Factor of the attention scores, YaRN's temperature included."""
        scale = (self.qk_nope_head_dim + ROPE_DIM) ** -0.5
        if self.yarn is not None and self.yarn.mscale_all_dim:
            scale *= yarn_mscale(self.yarn.factor, self.yarn.mscale_all_dim) ** 2
        return scale

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Config":
        """Check a config.json's contents and take what the model needs.

        Args:
          values: the parsed JSON; rotary parameters in the older form (``rope_theta`` and
            ``rope_scaling``) or the newer (``rope_parameters``).

        Raises:
          ConfigError: a value is missing, of the wrong kind, or not supported; it names the key.
        """
        _check_supported(values)
        theta, yarn = _rope(values)
        known: dict[str, Any] = {"rope_theta": theta, "yarn": yarn}
        for field in dataclasses.fields(cls):
            if field.name in ("rope_theta", "yarn", "bos_token_id", "eos_token_ids"):
                continue
            if field.name not in values:
                raise ConfigError(f"config.json has no {field.name!r}")
            value = values[field.name]
            # In Python a bool is an int, and JSON writes whole floats as integers.
            accepted: tuple[type, ...] = (int, float) if field.type is float else (int,)
            if isinstance(value, bool) != (field.type is bool) or not isinstance(value, accepted):
                kind = getattr(field.type, "__name__", field.type)
                raise ConfigError(f"{field.name} must be {kind}, got {value!r}")
            known[field.name] = value
        known["bos_token_id"] = values.get("bos_token_id")
        eos = values.get("eos_token_id")
        known["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else (eos,) * (eos is not None)
        return cls(**known)

    @classmethod
    def load(cls, checkpoint: str | Path) -> "Config":
        """Read ``config.json`` of a checkpoint folder.

        Raises:
          FileNotFoundError: there is none.
          ConfigError: as `from_dict`, or it is not JSON.
        """
        path = Path(checkpoint) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"no config.json in {checkpoint}")
        try:
            values = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from None
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds for this model; `from_dict` reads it back."""
        values = dataclasses.asdict(self)
        yarn = values.pop("yarn")
        values["rope_scaling"] = {"type": "yarn", **yarn} if yarn else None
        values["eos_token_id"] = list(values.pop("eos_token_ids"))
        return values | {
            "model_type": "deepseek_v32",
            "architectures": ["DeepseekV32ForCausalLM"],
            "kv_lora_rank": LATENT_DIM,
            "qk_rope_head_dim": ROPE_DIM,
            "index_head_dim": INDEX_DIM,
            "num_key_value_heads": self.num_attention_heads,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "torch_dtype": "bfloat16",
        }


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature for one extension factor."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


_SUPPORTED = {
    "model_type": "deepseek_v32",
    "kv_lora_rank": LATENT_DIM,
    "qk_rope_head_dim": ROPE_DIM,
    "index_head_dim": INDEX_DIM,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
"""Keys of config.json with the one value this model has; the first four must be there."""
_REQUIRED = ("model_type", "kv_lora_rank", "qk_rope_head_dim", "index_head_dim")


def _check_supported(values: dict[str, Any]) -> None:
    for key, supported in _SUPPORTED.items():
        if key not in values:
            if key in _REQUIRED:
                raise ConfigError(f"config.json has no {key!r}")
            continue
        if values[key] != supported:
            raise ConfigError(f"{key} {values[key]!r} is not supported, only {supported!r}")
    heads = values.get("num_attention_heads")
    if values.get("num_key_value_heads", heads) != heads:
        raise ConfigError(
            f"num_key_value_heads {values['num_key_value_heads']!r} is not supported, only "
            f"num_attention_heads, {heads!r}"
        )
    layers, dense = values.get("num_hidden_layers", 0), values.get("first_k_dense_replace", 0)
    kinds = values.get("mlp_layer_types")
    if kinds is not None and kinds != ["dense" if i < dense else "sparse" for i in range(layers)]:
        raise ConfigError("mlp_layer_types must be first_k_dense_replace dense layers, then sparse")
    _check_quantization(values.get("quantization_config"))


def _check_quantization(quantization: dict[str, Any] | None) -> None:
    if quantization is None:
        return
    method = quantization.get("quant_method")
    block = quantization.get("weight_block_size")
    if method != "fp8" or quantization.get("fmt", "e4m3") != "e4m3":
        raise ConfigError(f"quantization_config {method!r} is not supported, only fp8 e4m3")
    if block is not None and list(block) != [FP8_BLOCK, FP8_BLOCK]:
        raise ConfigError(
            f"weight_block_size {block!r} is not supported, only {[FP8_BLOCK, FP8_BLOCK]}"
        )


def _rope(values: dict[str, Any]) -> tuple[float, Yarn | None]:
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = rope.get("rope_theta", values.get("rope_theta"))
    if not isinstance(theta, int | float) or theta <= 1:
        raise ConfigError(f"rope_theta must be a number above 1, got {theta!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind != "yarn":
        raise ConfigError(f"rope type {kind!r} is not supported, only 'yarn' and 'default'")
    if rope.get("attention_factor") is not None or not rope.get("truncate", True):
        raise ConfigError("rope parameters attention_factor and truncate=false are not supported")
    known: dict[str, Any] = {}
    for field in dataclasses.fields(Yarn):
        value = rope.get(field.name, field.default)
        if not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"yarn {field.name} must be a number, got {rope.get(field.name)!r}")
        known[field.name] = value
    if known["factor"] < 1 or known["original_max_position_embeddings"] < 1:
        raise ConfigError("yarn factor and original_max_position_embeddings must be at least 1")
    if not known["mscale"] or not known["mscale_all_dim"]:
        raise ConfigError("yarn mscale and mscale_all_dim of 0 are not supported")
    return float(theta), Yarn(**known)
