"""One layer's attention: absorbed MLA over the tokens that its indexer selects."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from examples.deepseek_v32 import params, rope
from examples.deepseek_v32.cache import Cache, write_tokens
from examples.deepseek_v32.config import INDEX_DIM, LATENT_DIM, ROPE_DIM, Config
from examples.deepseek_v32.options import Options
from jax_sparse_mla import block_table_to_slots, layer_slots, sparse_mla_fwd
from jax_sparse_mla.indexer import hadamard, index_topk

LAYER_NORM_EPS = 1e-6
"""Of the index keys; like `LATENT_NORM_EPS` no part of config.json."""
LATENT_NORM_EPS = 1e-6
"""Of the two low-rank projections."""


class Rows(NamedTuple):
    """A step's query rows, of any requests and any positions, and where their tokens stand."""

    tokens: jax.Array
    """``[n]`` int32."""
    requests: jax.Array
    """``[n]`` int32, each row's line of the block table."""
    positions: jax.Array
    """``[n]`` int32; negative for a padding row, which writes nothing and attends nothing."""
    block_table: jax.Array
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


def contract(pattern: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """einsum summed in float32, result in x's dtype."""
    return jnp.einsum(pattern, x, weight, preferred_element_type=jnp.float32).astype(x.dtype)


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
    q_residual = rms_norm(contract("nd,rd->nr", x, p.q_a), p.q_a_norm, LATENT_NORM_EPS)
    q = contract("nr,hdr->nhd", q_residual, p.q_b)
    q_nope, q_rope = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
    q_rope = rope.rotate_interleaved(q_rope, shared.cos, shared.sin)

    latent, k_rope = jnp.split(contract("nd,cd->nc", x, p.kv_a), [LATENT_DIM], axis=-1)
    latent = rms_norm(latent, p.kv_a_norm, LATENT_NORM_EPS)
    k_rope = rope.rotate_interleaved(k_rope, shared.cos, shared.sin)
    index_keys = _index_keys(p.indexer, x, shared, options)

    num_blocks = cache.records.shape[0] // config.num_hidden_layers
    block_size = cache.records.shape[1]
    slots_per_layer = num_blocks * block_size
    slots = layer_slots(shared.slots, layer, slots_per_layer)
    cache = write_tokens(cache, slots, latent, k_rope, index_keys)

    if selected is None:
        table = jnp.where(rows.block_table < 0, -1, rows.block_table + layer * num_blocks)
        index_q, weights = _index_queries(p.indexer, x, q_residual, shared, config, options)
        selected = index_topk(
            index_q,
            weights,
            cache.index_keys,
            table,
            rows.requests,
            rows.positions,
            config.index_topk,
        )
    attended = block_table_to_slots(
        rows.block_table, selected, rows.requests, block_size=block_size
    )
    out = sparse_mla_fwd(
        (
            contract("nhd,hdc->nhc", q_nope, p.w_uk).astype(jnp.bfloat16),
            q_rope.astype(jnp.bfloat16),
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
    y = contract("nhv,dhv->nd", values, p.o)
    if options.tensor_axis is not None:
        y = jax.lax.psum(y, options.tensor_axis)
    return y, cache, selected


def _index_keys(p: params.Indexer, x: jax.Array, shared: Geometry, options: Options) -> jax.Array:
    keys = layer_norm(contract("nd,kd->nk", x, p.wk), p.k_norm_scale, p.k_norm_bias)
    return _rotate_index(keys, shared, options)


def _index_queries(
    p: params.Indexer,
    x: jax.Array,
    q_residual: jax.Array,
    shared: Geometry,
    config: Config,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    q = _rotate_index(contract("nr,hkr->nhk", q_residual, p.wq_b), shared, options)
    weights = jnp.einsum("nd,hd->nh", x.astype(jnp.float32), p.weights_proj)
    return q, weights * (config.index_n_heads**-0.5 * INDEX_DIM**-0.5)


def _rotate_index(values: jax.Array, shared: Geometry, options: Options) -> jax.Array:
    """RoPE on the leading 64 values, and the Hadamard rotation where keys are stored in fp8."""
    turned, plain = jnp.split(values, [ROPE_DIM], axis=-1)
    turned = rope.rotate_halves(turned, shared.cos, shared.sin)
    values = jnp.concatenate([turned, plain], axis=-1)
    return hadamard(values) if options.index_format == "fp8" else values
