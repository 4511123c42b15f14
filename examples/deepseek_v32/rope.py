"""Rotary position embedding with YaRN, in the two layouts that DeepSeek-V3.2 mixes.

MLA rotates interleaved pairs ``(x0, x1), (x2, x3), ...``; the indexer rotates halves,
``(x0, x32), (x1, x33), ...``. Both use the same angles.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from examples.deepseek_v32.config import ROPE_DIM, Config, yarn_mscale


def inverse_frequencies(config: Config) -> np.ndarray:
    """Angle a position of each of the 32 pairs, float32.

    YaRN keeps the pairs that turn often within the original context, divides the angle of those
    that turn seldom by the extension factor, and blends linearly in between (arXiv 2309.00071,
    section 3.2).
    """
    pairs = np.arange(0, ROPE_DIM, 2, dtype=np.float64) / ROPE_DIM
    plain = config.rope_theta**-pairs
    yarn = config.yarn
    if yarn is None:
        return plain.astype(np.float32)

    def pair_that_turns(times: float) -> float:
        wavelength = yarn.original_max_position_embeddings / (times * 2 * math.pi)
        return ROPE_DIM * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), ROPE_DIM - 1)
    blend = np.clip((np.arange(ROPE_DIM // 2) - low) / max(high - low, 1e-3), 0, 1)
    return (plain / yarn.factor * blend + plain * (1 - blend)).astype(np.float32)


def rotation(config: Config, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of each position's angles.

    Args:
      config: the model's.
      positions: ``[n]`` int32.

    Returns:
      Two of ``[n, 32]`` float32.
    """
    angles = positions[:, None].astype(jnp.float32) * inverse_frequencies(config)
    scale = 1.0
    if config.yarn is not None:
        # 1 for the released model, whose mscale and mscale_all_dim agree.
        factor = config.yarn.factor
        scale = yarn_mscale(factor, config.yarn.mscale)
        scale /= yarn_mscale(factor, config.yarn.mscale_all_dim)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate_interleaved(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate pairs of neighbours, in place: MLA's layout, and the record's.

    Args:
      x: ``[n, ..., 64]``.
      cos, sin: ``[n, 32]``, from `rotation`.

    Returns:
      As x; computed in float32.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], ROPE_DIM // 2, 2)
    even, odd = _turn(pairs[..., 0], pairs[..., 1], cos, sin)
    return jnp.stack([even, odd], axis=-1).reshape(x.shape).astype(x.dtype)


def rotate_halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate value i with value i + 32: the indexer's layout. Arguments as `rotate_interleaved`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(_turn(first, second, cos, sin), axis=-1).astype(x.dtype)


def _turn(
    a: jax.Array, b: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    shape = (cos.shape[0],) + (1,) * (a.ndim - 2) + cos.shape[1:]
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    return a * cos - b * sin, b * cos + a * sin
