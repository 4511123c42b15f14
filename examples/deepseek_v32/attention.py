"""One layer's attention: absorbed MLA over the tokens that its indexer selects."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from examples.deepseek_v32 import params, rope
from examples.deepseek_v32.cache import Cache, write_tokens
from examples.deepseek_v32.config import INDEX_DIM, LATENT_DIM, ROPE_DIM, Config
from examples.deepseek_v32.options import Options
from jax_sparse_mla import (
    block_table_to_slots,
    hadamard,
    index_topk,
    layer_slots,
    sparse_mla_fwd,
)

LAYER_NORM_EPS = 1e-6
"""Of the index keys; like `LATENT_NORM_EPS` no part of config.json."""
LATENT_NORM_EPS = 1e-6
"""Of the two low-rank projections."""


class Rows(NamedTuple):
    """A step's query rows, of any requests and any positions, and where their tokens stand."""

    tokens: Any
    """``[n]`` int32."""
    requests: Any
    """``[n]`` int32, each row's line of the block table."""
    positions: Any
    """``[n]`` int32; negative for a padding row, which writes nothing and attends nothing."""
    block_table: Any
    """``[lines, w]`` int32, a request's blocks in the order of its tokens, -1 behind them."""


class Geometry(NamedTuple):
    """What all layers of a step share: angles, and the slots that the step writes."""

    cos: jax.Array
    sin: jax.Array
    slots: jax.Array


def geometry(config: Config, rows: Rows, block_size: int) -> Geometry:
    """Compute what all layers of a step share."""
    cos, sin = rope.rotation(config, rows.positions)
    slots = block_table_to_slots(
        rows.block_table, rows.positions, rows.requests, block_size=block_size
    )
    return Geometry(cos, sin, slots)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm of the last axis, in float32."""
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * wide.astype(x.dtype)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """Mean-and-variance norm of the last axis, in float32."""
    wide = x.astype(jnp.float32)
    wide -= jnp.mean(wide, axis=-1, keepdims=True)
    wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + LAYER_NORM_EPS)
    return (wide * weight + bias).astype(x.dtype)


product = functools.partial(
    jnp.einsum, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
)
"""einsum in float32: without HIGHEST a GPU would round float32 operands to 11 bits."""


def contract(pattern: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """einsum summed in float32, result in x's dtype."""
    return product(pattern, x, weight).astype(x.dtype)


class Projected(NamedTuple):
    """One layer's view of the step's rows."""

    q_nope: jax.Array  # [n, H, nope]
    q_rope: jax.Array  # [n, H, 64], rotated
    latent: jax.Array  # [n, 512], normalised
    k_rope: jax.Array  # [n, 64], rotated
    index_q: jax.Array  # [n, Hi, 128], rotated
    index_key: jax.Array  # [n, 128], rotated
    index_weights: jax.Array  # [n, Hi] float32


def project(
    p: params.Attention, x: jax.Array, shared: Geometry, config: Config, options: Options
) -> Projected:
    """Compute a layer's queries, and the latents and keys that go into the cache.

    Args:
      p: the layer's parameters; with a tensor axis, this device's share of the heads.
      x: ``[n, D]``, normalised.
      shared: from `geometry`.
      config: the model's.
      options: how to compute.
    """
    q_residual = rms_norm(contract("nd,rd->nr", x, p.q_a), p.q_a_norm, LATENT_NORM_EPS)
    q = contract("nr,or->no", q_residual, p.q_b)
    q = q.reshape(q.shape[0], -1, config.qk_nope_head_dim + ROPE_DIM)
    q_nope, q_rope = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
    latent, k_rope = jnp.split(contract("nd,cd->nc", x, p.kv_a), [LATENT_DIM], axis=-1)

    index = p.indexer
    index_q = contract("nr,or->no", q_residual, index.wq_b)
    index_q = index_q.reshape(index_q.shape[0], -1, INDEX_DIM)
    index_key = contract("nd,kd->nk", x, index.wk)
    index_key = layer_norm(index_key, index.k_norm_scale, index.k_norm_bias)
    index_weights = product("nd,hd->nh", x.astype(jnp.float32), index.weights_proj)
    return Projected(
        q_nope=q_nope,
        q_rope=rope.rotate_interleaved(q_rope, shared.cos, shared.sin),
        latent=rms_norm(latent, p.kv_a_norm, LATENT_NORM_EPS),
        k_rope=rope.rotate_interleaved(k_rope, shared.cos, shared.sin),
        index_q=_rotate_index(index_q, shared, options),
        index_key=_rotate_index(index_key, shared, options),
        index_weights=index_weights * (config.index_n_heads**-0.5 * INDEX_DIM**-0.5),
    )


def _rotate_index(values: jax.Array, shared: Geometry, options: Options) -> jax.Array:
    """RoPE on the leading 64 values, and the Hadamard rotation where keys are stored in fp8."""
    turned, plain = jnp.split(values, [ROPE_DIM], axis=-1)
    turned = rope.rotate_halves(turned, shared.cos, shared.sin)
    values = jnp.concatenate([turned, plain], axis=-1)
    return hadamard(values) if options.index_format == "fp8" else values


def attention(
    p: params.Attention,
    x: jax.Array,
    cache: Cache,
    layer: jax.Array | int,
    rows: Rows,
    shared: Geometry,
    config: Config,
    options: Options,
    selected: jax.Array | None = None,
) -> tuple[jax.Array, Cache, jax.Array]:
    """Write the step's tokens into the cache, select what each row attends, and attend.

    Args:
      p: the layer's parameters; with a tensor axis, this device's share of the heads.
      x: ``[n, D]``, normalised.
      cache: of all layers.
      layer: the layer's number.
      rows: the step's.
      shared: from `geometry`.
      config: the model's.
      options: how to compute.
      selected: ``[n, k]`` int32 positions to attend, -1 for none, in place of the indexer's.

    Returns:
      ``[n, D]``, summed over the tensor axis; the cache; the selected positions ``[n, k]`` int32.
    """
    projected = project(p, x, shared, config, options)
    blocks_per_layer = cache.records.shape[0] // config.num_hidden_layers
    block_size = cache.records.shape[1]
    slots_per_layer = blocks_per_layer * block_size
    cache = write_tokens(
        cache,
        layer_slots(shared.slots, layer, slots_per_layer),
        projected.latent,
        projected.k_rope,
        projected.index_key,
    )
    if selected is None:
        offset = layer * blocks_per_layer
        selected = index_topk(
            projected.index_q,
            projected.index_weights,
            cache.index_keys,
            jnp.where(rows.block_table < 0, -1, rows.block_table + offset),
            rows.requests,
            rows.positions,
            config.index_topk,
        )
    attended = block_table_to_slots(
        rows.block_table, selected, rows.requests, block_size=block_size
    )
    out = sparse_mla_fwd(
        (
            contract("nhd,hcd->nhc", projected.q_nope, p.w_uk).astype(jnp.bfloat16),
            projected.q_rope.astype(jnp.bfloat16),
        ),
        cache.records,
        None,
        layer_slots(attended, layer, slots_per_layer),
        config.softmax_scale,
        row_lengths=jnp.sum(selected >= 0, axis=-1, dtype=jnp.int32),
        has_invalid=False,
        implementation=options.implementation,
    )
    assert isinstance(out, jax.Array)  # not (out, lse)
    values = contract("nhc,hvc->nhv", out.astype(x.dtype), p.w_uv)
    y = contract("nv,dv->nd", values.reshape(values.shape[0], -1), p.o)
    if options.tensor_axis is not None:
        y = jax.lax.psum(y, options.tensor_axis)
    return y, cache, selected
