"""Choosing tokens from logits: greedy, or temperature and top-p from a seed."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the same for all requests of a batch."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample from the fewest tokens whose probabilities sum to this."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")


def sample(
    logits: jax.Array, request_ids: jax.Array, positions: jax.Array, sampling: Sampling
) -> jax.Array:
    """Choose a token for each row.

    The random number of a token depends on the seed, its request and its position alone: the text
    is the same however requests are batched, chunked or drafted.

    Args:
      logits: ``[m, V]`` float32.
      request_ids: ``[m]`` int32.
      positions: ``[m]`` int32, of the row, one before the chosen token's.
      sampling: static.

    Returns:
      ``[m]`` int32.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_p < 1:
        logits = jnp.where(is_in_nucleus(logits, sampling.top_p), logits, -jnp.inf)
    key = jax.random.key(sampling.seed)

    def draw(row: jax.Array, request: jax.Array, position: jax.Array) -> jax.Array:
        own = jax.random.fold_in(jax.random.fold_in(key, request), position)
        return jax.random.categorical(own, row)

    return jax.vmap(draw)(logits, request_ids, positions).astype(jnp.int32)


def is_in_nucleus(logits: jax.Array, top_p: float) -> jax.Array:
    """Which tokens are among the fewest whose probabilities sum to ``top_p``, ``[m, V]`` bool.

    Equally likely tokens are in or out together.
    """
    ordered = -jnp.sort(-logits, axis=-1)
    probabilities = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    smallest = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
    return logits >= smallest
