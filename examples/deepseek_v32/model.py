"""The whole model as one function of a step: rows in, logits and the updated cache out."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from examples.deepseek_v32.attention import (
    Geometry,
    Rows,
    attention,
    geometry,
    product,
    rms_norm,
)
from examples.deepseek_v32.cache import Cache
from examples.deepseek_v32.config import Config
from examples.deepseek_v32.mlp import feed_forward
from examples.deepseek_v32.options import Options
from examples.deepseek_v32.params import Layer, Params


def forward(
    params: Params,
    cache: Cache,
    rows: Rows,
    output_rows: jax.Array,
    config: Config,
    options: Options,
) -> tuple[jax.Array, Cache]:
    """Compute one step.

    Prefill in chunks, decode and draft rows are all the same here: rows of (request, position). A
    step writes all its rows' tokens before it attends, so rows of one request may stand in one step
    as long as no earlier position of it is missing.

    Args:
      params: the model's, layers stacked or not.
      cache: donate it.
      rows: the step's.
      output_rows: ``[m]`` int32, rows whose logits are wanted.
      config: the model's; static.
      options: how to compute; static.

    Returns:
      Logits ``[m, V]`` float32 and the cache.
    """
    x = params.embed[jnp.maximum(rows.tokens, 0)].astype(options.dtype)
    shared = geometry(config, rows, cache.records.shape[1])
    layers = (params.dense, 0), (params.sparse, config.num_dense_layers)
    for group, first in layers:
        x, cache = _layers(group, first, x, cache, rows, shared, config, options)
    x = rms_norm(x[output_rows], params.norm, config.rms_norm_eps)
    logits = product("nd,vd->nv", x, params.lm_head)
    if options.tensor_axis is not None:
        logits = lax.all_gather(logits, options.tensor_axis, axis=1, tiled=True)
    return logits, cache


def decoder_layer(
    p: Layer,
    x: jax.Array,
    cache: Cache,
    layer: jax.Array | int,
    rows: Rows,
    shared: Geometry,
    config: Config,
    options: Options,
    selected: jax.Array | None = None,
) -> tuple[jax.Array, Cache, jax.Array]:
    """Compute one layer; arguments and results as `attention`'s, x not normalised."""
    eps = config.rms_norm_eps
    normed = rms_norm(x, p.input_norm, eps)
    y, cache, selected = attention(
        p.attention, normed, cache, layer, rows, shared, config, options, selected
    )
    x = x + y
    x = x + feed_forward(p.mlp, rms_norm(x, p.post_norm, eps), config, options)
    return x, cache, selected


def _layers(
    group: Any,
    first: int,
    x: jax.Array,
    cache: Cache,
    rows: Rows,
    shared: Geometry,
    config: Config,
    options: Options,
) -> tuple[jax.Array, Cache]:
    """Apply a run of layers of one kind: scanned if they are stacked, else unrolled."""
    if not isinstance(group, Layer):
        for number, p in enumerate(group, first):
            x, cache, _ = decoder_layer(p, x, cache, number, rows, shared, config, options)
        return x, cache

    def step(
        carry: tuple[jax.Array, Cache], xs: tuple[Layer, jax.Array]
    ) -> tuple[tuple[jax.Array, Cache], None]:
        x, cache, _ = decoder_layer(xs[0], *carry, xs[1], rows, shared, config, options)
        return (x, cache), None

    count = group.input_norm.shape[0]
    numbers = jnp.arange(first, first + count, dtype=jnp.int32)
    carry, _ = lax.scan(step, (x, cache), (group, numbers))
    return carry
