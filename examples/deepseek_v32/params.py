"""The model's parameters: their structure, shapes and names in a Hugging Face checkpoint."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples.deepseek_v32.config import INDEX_DIM, LATENT_DIM, ROPE_DIM, Config


class Mlp(NamedTuple):
    """A gated MLP; an expert axis leads where it belongs to the routed experts."""

    gate: Any  # [I, D]
    up: Any  # [I, D]
    down: Any  # [D, I]


class Moe(NamedTuple):
    """Routed and shared experts."""

    router: Any  # [E, D] float32
    bias: Any  # [E] float32, added to the scores for the selection only
    experts: Mlp  # [E, ...]
    shared: Mlp


class Indexer(NamedTuple):
    """The lightning indexer of one layer."""

    wq_b: Any  # [Hi * 128, R]
    wk: Any  # [128, D]
    k_norm_scale: Any  # [128]
    k_norm_bias: Any  # [128]
    weights_proj: Any  # [Hi, D] float32


class Attention(NamedTuple):
    """Multi-head latent attention of one layer; kv_b_proj stands split, ready to be absorbed."""

    q_a: Any  # [R, D]
    q_a_norm: Any  # [R]
    q_b: Any  # [H * (nope + 64), R]
    kv_a: Any  # [512 + 64, D]
    kv_a_norm: Any  # [512]
    w_uk: Any  # [H, 512, nope]: XLA's CPU backend has no bfloat16 product with the other order
    w_uv: Any  # [H, v, 512]
    o: Any  # [D, H * v]
    indexer: Indexer


class Layer(NamedTuple):
    """One decoder layer."""

    input_norm: Any  # [D]
    attention: Attention
    post_norm: Any  # [D]
    mlp: Mlp | Moe


class Params(NamedTuple):
    """The whole model.

    ``dense`` and ``sparse`` each are one `Layer` whose arrays lead with a layer axis (for scanned
    layers), or a tuple of layers (for unrolled ones).
    """

    embed: Any  # [V, D]
    dense: Any
    sparse: Any
    norm: Any  # [D]
    lm_head: Any  # [V, D]


class Tensor(NamedTuple):
    """Where a part of a checkpoint's tensor goes."""

    name: str
    """Its name in the checkpoint."""
    checkpoint_shape: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the parameter (of one layer, one expert)."""
    path: tuple[str, ...]
    """Fields from `Layer` or `Params` to the parameter."""
    group: str | None = None
    """``"dense"`` or ``"sparse"`` for a layer's parameter."""
    layer: int = 0
    """Number within the group."""
    expert: int | None = None
    float32: bool = False
    rows: tuple[int, int, int] | None = None
    """(heads, begin, end): which rows of each head's share of the tensor are the parameter."""
    is_transposed: bool = False
    """Whether the parameter has the last two axes the other way round."""


def checkpoint_tensors(config: Config) -> Iterator[Tensor]:
    """Every tensor that the model reads from a checkpoint, in the order of its layers.

    Args:
      config: the model's.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    yield Tensor("model.embed_tokens.weight", (vocab, hidden), (vocab, hidden), ("embed",))
    for number in range(config.num_hidden_layers):
        sparse = number >= config.num_dense_layers
        group = "sparse" if sparse else "dense"
        layer = number - config.num_dense_layers * sparse
        parts = (*_attention(config), *(_moe(config) if sparse else _dense_mlp(config)))
        for part in parts:
            name = f"model.layers.{number}.{part.name}"
            yield part._replace(name=name, group=group, layer=layer)
    yield Tensor("model.norm.weight", (hidden,), (hidden,), ("norm",))
    yield Tensor("lm_head.weight", (vocab, hidden), (vocab, hidden), ("lm_head",))


def _matrix(name: str, shape: tuple[int, ...], *path: str, **options: Any) -> Tensor:
    return Tensor(f"{name}.weight", shape, shape, path, **options)


def _attention(c: Config) -> Iterator[Tensor]:
    hidden, heads, nope, v = c.hidden_size, c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim
    attn, index = "self_attn", "self_attn.indexer"
    yield _matrix("input_layernorm", (hidden,), "input_norm")
    yield _matrix("post_attention_layernorm", (hidden,), "post_norm")
    yield _matrix(f"{attn}.q_a_proj", (c.q_lora_rank, hidden), "attention", "q_a")
    yield _matrix(f"{attn}.q_a_layernorm", (c.q_lora_rank,), "attention", "q_a_norm")
    q_b = (heads * (nope + ROPE_DIM), c.q_lora_rank)
    yield _matrix(f"{attn}.q_b_proj", q_b, "attention", "q_b")
    kv_a = (LATENT_DIM + ROPE_DIM, hidden)
    yield _matrix(f"{attn}.kv_a_proj_with_mqa", kv_a, "attention", "kv_a")
    yield _matrix(f"{attn}.kv_a_layernorm", (LATENT_DIM,), "attention", "kv_a_norm")
    kv_b = Tensor(f"{attn}.kv_b_proj.weight", (heads * (nope + v), LATENT_DIM), (), ())
    w_uk, up_k = (heads, LATENT_DIM, nope), ("attention", "w_uk")
    yield kv_b._replace(shape=w_uk, path=up_k, rows=(heads, 0, nope), is_transposed=True)
    w_uv = (heads, v, LATENT_DIM)
    yield kv_b._replace(shape=w_uv, path=("attention", "w_uv"), rows=(heads, nope, nope + v))
    yield _matrix(f"{attn}.o_proj", (hidden, heads * v), "attention", "o")
    at = ("attention", "indexer")
    yield _matrix(f"{index}.wq_b", (c.index_n_heads * INDEX_DIM, c.q_lora_rank), *at, "wq_b")
    yield _matrix(f"{index}.wk", (INDEX_DIM, hidden), *at, "wk")
    yield _matrix(f"{index}.k_norm", (INDEX_DIM,), *at, "k_norm_scale")
    yield Tensor(f"{index}.k_norm.bias", (INDEX_DIM,), (INDEX_DIM,), (*at, "k_norm_bias"))
    weights = (c.index_n_heads, hidden)
    yield _matrix(f"{index}.weights_proj", weights, *at, "weights_proj", float32=True)


def _mlp(name: str, width: int, hidden: int, *path: str, **options: Any) -> Iterator[Tensor]:
    yield _matrix(f"{name}.gate_proj", (width, hidden), *path, "gate", **options)
    yield _matrix(f"{name}.up_proj", (width, hidden), *path, "up", **options)
    yield _matrix(f"{name}.down_proj", (hidden, width), *path, "down", **options)


def _dense_mlp(c: Config) -> Iterator[Tensor]:
    yield from _mlp("mlp", c.intermediate_size, c.hidden_size, "mlp")


def _moe(c: Config) -> Iterator[Tensor]:
    experts, hidden, width = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
    yield _matrix("mlp.gate", (experts, hidden), "mlp", "router", float32=True)
    bias = ("mlp", "bias")
    yield Tensor("mlp.gate.e_score_correction_bias", (experts,), (experts,), bias, float32=True)
    for e in range(experts):
        yield from _mlp(f"mlp.experts.{e}", width, hidden, "mlp", "experts", expert=e)
    shared = width * c.n_shared_experts
    yield from _mlp("mlp.shared_experts", shared, hidden, "mlp", "shared")


class Leaf(NamedTuple):
    """Shape and dtype of one parameter array, layer and expert axes included."""

    shape: tuple[int, ...]
    float32: bool


def param_leaves(config: Config, *, stacked: bool) -> Params:
    """The parameters' tree with a `Leaf` in the place of each array.

    Args:
      config: the model's.
      stacked: layers as one `Layer` with leading layer axes, rather than a tuple of layers.
    """
    counts = {"dense": config.num_dense_layers}
    counts["sparse"] = config.num_hidden_layers - counts["dense"]
    trees: dict[Any, dict[tuple[str, ...], Leaf]] = {None: {}}
    for tensor in checkpoint_tensors(config):
        shape = tensor.shape
        if tensor.expert is not None:
            shape = (config.n_routed_experts, *shape)
        key: Any = tensor.group
        if tensor.group is not None:
            if stacked:
                shape = (counts[tensor.group], *shape)
            else:
                key = (tensor.group, tensor.layer)
        trees.setdefault(key, {})[tensor.path] = Leaf(shape, tensor.float32)
    groups: dict[str, Any] = {}
    for group, count in counts.items():
        if stacked:
            groups[group] = _layer(trees[group]) if count else ()
        else:
            groups[group] = tuple(_layer(trees[group, i]) for i in range(count))
    top = {path[0]: leaf for path, leaf in trees[None].items()}
    return Params(dense=groups["dense"], sparse=groups["sparse"], **top)


def _layer(leaves: dict[tuple[str, ...], Any]) -> Layer:
    def build(kind: Any, path: tuple[str, ...]) -> Any:
        values = {}
        for name in kind._fields:
            here = (*path, name)
            values[name] = leaves[here] if here in leaves else build(child(here), here)
        return kind(**values)

    def child(path: tuple[str, ...]) -> Any:
        if path == ("mlp",):
            return Moe if ("mlp", "router") in leaves else Mlp
        return {"attention": Attention, "indexer": Indexer, "experts": Mlp, "shared": Mlp}[path[-1]]

    return build(Layer, ())


def param_shapes(config: Config, dtype: Any, *, stacked: bool) -> Params:
    """The parameters' tree of `jax.ShapeDtypeStruct`, for lowering without weights.

    Args:
      config: the model's.
      dtype: of all parameters but the float32 ones.
      stacked: as in `param_leaves`.
    """
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if leaf.float32 else dtype),
        param_leaves(config, stacked=stacked),
        is_leaf=lambda leaf: isinstance(leaf, Leaf),
    )
