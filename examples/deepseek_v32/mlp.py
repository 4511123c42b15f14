"""The feed-forward part of a layer: a gated MLP, or routed experts with a shared one."""

import jax
import jax.numpy as jnp
from jax import lax

from examples.deepseek_v32.attention import contract, product
from examples.deepseek_v32.config import Config
from examples.deepseek_v32.options import Options
from examples.deepseek_v32.params import Mlp, Moe

TILE_ROWS = 16
"""Rows that go through one expert together."""


def feed_forward(p: Mlp | Moe, x: jax.Array, config: Config, options: Options) -> jax.Array:
    """Apply a layer's MLP, dense or sparse.

    Args:
      p: the layer's; with a tensor axis, this device's share of the widths and of the experts.
      x: ``[n, D]``, normalised.
      config: the model's.
      options: how to compute.

    Returns:
      ``[n, D]``, summed over the tensor axis.
    """
    if isinstance(p, Moe):
        experts, weights = route(p, x, config)
        y = routed(p.experts, x, experts - _first_expert(p, options), weights)
        y += gated(p.shared, x)
    else:
        y = gated(p, x)
    if options.tensor_axis is not None:
        y = lax.psum(y, options.tensor_axis)
    return y


def gated(p: Mlp, x: jax.Array) -> jax.Array:
    """``down(silu(gate(x)) * up(x))``."""
    hidden = jax.nn.silu(contract("nd,id->ni", x, p.gate)) * contract("nd,id->ni", x, p.up)
    return contract("ni,di->nd", hidden, p.down)


def route(p: Moe, x: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Choose each row's experts: the best of the best groups.

    Scores are sigmoids. The correction bias counts for the choice only, not for the weights. A
    group's score is the sum of its two best.

    Args:
      p: the layer's.
      x: ``[n, D]``.
      config: the model's.

    Returns:
      Experts ``[n, K]`` int32 and their weights ``[n, K]`` float32.
    """
    n = x.shape[0]
    scores = jax.nn.sigmoid(product("nd,ed->ne", x.astype(jnp.float32), p.router))
    choice = scores + p.bias
    groups = choice.reshape(n, config.n_group, -1)
    group_scores = jnp.sum(lax.top_k(groups, 2)[0], axis=-1)
    kept = lax.top_k(group_scores, config.topk_group)[1]
    is_kept = jnp.any(kept[:, :, None] == jnp.arange(config.n_group), axis=1)
    choice = jnp.where(is_kept[:, :, None], groups, -jnp.inf).reshape(n, -1)
    experts = lax.top_k(choice, config.num_experts_per_tok)[1]
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if config.norm_topk_prob:
        weights /= jnp.sum(weights, axis=1, keepdims=True) + 1e-20
    return experts, weights * config.routed_scaling_factor


def routed(p: Mlp, x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
    """Sum each row's experts.

    The (row, expert) pairs are sorted by expert and cut into tiles of 16 rows of one expert; a loop
    takes tile by tile. So an expert without rows costs nothing, weights are read where they stand,
    and no copy of them or of x grows with the number of experts.

    Args:
      p: the experts' weights, ``[E, ...]``.
      x: ``[n, D]``.
      experts: ``[n, K]`` int32; one outside 0 .. E - 1 is another device's and adds nothing.
      weights: ``[n, K]`` float32.

    Returns:
      ``[n, D]`` in x's dtype, summed in float32 in the order of the experts.
    """
    n, per_row = experts.shape
    count = p.gate.shape[0]
    pairs = jnp.where((experts < 0) | (experts >= count), count, experts).reshape(-1)
    order = jnp.argsort(pairs, stable=True)
    sizes = jnp.sum(pairs[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    ends = jnp.cumsum(sizes)
    tile_ends = jnp.cumsum(-(-sizes // TILE_ROWS))

    def step(tile: jax.Array, total: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(tile_ends, tile, side="right")
        end = ends[expert]
        tiles_before = tile_ends[expert] - -(-sizes[expert] // TILE_ROWS)
        first = end - sizes[expert] + (tile - tiles_before) * TILE_ROWS
        places = first + jnp.arange(TILE_ROWS)
        pair = order[jnp.minimum(places, order.shape[0] - 1)]
        row = jnp.where(places < end, pair // per_row, n)
        y = _one_expert(p, x[jnp.minimum(row, n - 1)], expert).astype(jnp.float32)
        y *= weights.reshape(-1)[pair][:, None]
        return total.at[row].add(y, mode="drop")

    total = jnp.zeros(x.shape, jnp.float32)
    return lax.fori_loop(0, tile_ends[-1], step, total).astype(x.dtype)


def _one_expert(p: Mlp, x: jax.Array, expert: jax.Array) -> jax.Array:
    """Apply one of the experts to some rows."""

    def apply(x: jax.Array) -> jax.Array:
        mine = Mlp(*(lax.dynamic_index_in_dim(w, expert, keepdims=False) for w in p))
        return gated(mine, x)

    # XLA's CPU backend slices bfloat16 through a float32 copy of the whole array, here of all
    # experts, and takes that copy out of the loop; out of a condition it takes nothing.
    return lax.platform_dependent(
        x,
        cpu=lambda x: lax.cond(expert >= 0, apply, jnp.zeros_like, x),
        default=apply,
    )


def _first_expert(p: Moe, options: Options) -> jax.Array | int:
    if options.tensor_axis is None:
        return 0
    return lax.axis_index(options.tensor_axis) * p.experts.gate.shape[0]
