"""Partial attention results: merging them, converting their LSE, applying the attention sink.

A partial result is ``out`` (the softmax-weighted mean over some of a row's entries) with ``lse``
(the natural log of the sum of exp(softmax_scale * q . k) over those entries). An empty part has out
0 and lse -inf. lse is float32 everywhere.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_sparse_mla.arguments import as_floating

_LN_2 = math.log(2.0)


def merge_attention(
    outs: ArrayLike | Sequence[ArrayLike],
    lses: ArrayLike | Sequence[ArrayLike],
    axis: int = 0,
    *,
    out_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Merge partial results over disjoint sets of entries into the result over their union.

    ``lse = log sum_i exp(lse_i)`` and ``out = sum_i exp(lse_i - lse) * out_i``, in float32. An
    empty part (lse -inf) adds nothing whatever its out holds, NaN included; where all parts are
    empty, or there is none, the result is (0, -inf). The order of the parts changes only rounding.
    A part whose lse is NaN or +inf makes out and lse NaN for that row and head: +inf is never a
    valid sum here, and systems that mark an empty part with it (FlashMLA) need
    :func:`lse_from_flashmla` first.

    Args:
      outs: [..., parts, ..., D] floating with the parts on ``axis``; or a sequence of arrays, one
        a part, each [..., D].
      lses: floating, outs' shape without the last axis, natural log; or a sequence of arrays [...].
      axis: where the parts stand in lses (a negative axis counts from lses' end). For sequences, 0.
      out_dtype: dtype of the merged out; default outs' own.

    Returns:
      out [..., D] and lse [...] float32, without the parts axis.

    Raises:
      TypeError: outs or lses is not floating.
      ValueError: the shapes do not match, or axis is not one of lses'.
    """
    outs = _stacked("outs", outs, axis)
    lses = _stacked("lses", lses, axis)
    if outs.shape[:-1] != lses.shape:
        raise ValueError(
            f"lses must have the shape of outs without its last axis, {list(outs.shape[:-1])}, "
            f"not {list(lses.shape)}"
        )
    if not -lses.ndim <= axis < lses.ndim:
        raise ValueError(f"axis must be an axis of lses {list(lses.shape)}, not {axis}")
    axis %= lses.ndim
    weights, lse = merge_weights(lses, axis)
    out = jnp.sum(weigh(outs, weights), axis=axis)
    return out.astype(out_dtype or outs.dtype), lse


def merge_weights(lses: ArrayLike, axis: int = 0) -> tuple[jax.Array, jax.Array]:
    """Each part's share of the merged result, and the merged LSE.

    Args:
      lses: [..., parts, ...] floating, natural log, -inf for an empty part.
      axis: where the parts stand.

    Returns:
      weights, the shape of lses, float32: exp(lses - lse), which sum to 1 over the parts, 0 for an
      empty part and NaN for all parts where one is NaN or +inf; and lse without the axis, float32.
    """
    lses = jnp.asarray(lses).astype(jnp.float32)
    lses = jnp.where(lses == jnp.inf, jnp.nan, lses)
    largest = jnp.max(lses, axis=axis, keepdims=True, initial=-jnp.inf)
    # All parts empty: any finite reference will do, where -inf would give -inf - -inf.
    reference = jnp.where(largest == -jnp.inf, 0.0, largest)
    terms = jnp.exp(lses - reference)
    total = jnp.sum(terms, axis=axis, keepdims=True)
    weights = terms / jnp.where(total == 0, 1.0, total)
    return weights, jnp.squeeze(reference + jnp.log(total), axis)


def weigh(outs: jax.Array, weights: jax.Array) -> jax.Array:
    """Outs [..., D] times weights [...], float32; a weight of 0 gives 0 even where out is NaN."""
    weights = weights[..., None]
    return jnp.where(weights == 0, 0.0, outs.astype(jnp.float32) * weights)


def apply_sink(out: ArrayLike, lse: ArrayLike, attn_sink: ArrayLike) -> jax.Array:
    """Let an attention sink take its share of the softmax: out * sigmoid(lse - attn_sink).

    The sink is one more logit with a zero value. With partial results it is applied once, after the
    merge. lse is not changed by it. (Formula: FlashMLA's attn_sink.)

    Args:
      out: [..., H, D] floating.
      lse: [..., H] floating, natural log; where it is -inf the result is 0.
      attn_sink: [H] floating, a natural logit (softmax_scale applied). -inf is no sink, +inf takes
        everything.

    Returns:
      [..., H, D], out's dtype.

    Raises:
      TypeError: an argument is not floating.
      ValueError: the shapes do not match.
    """
    out, lse = as_floating("out", out), as_floating("lse", lse)
    sink = as_floating("attn_sink", attn_sink)
    if out.shape[:-1] != lse.shape:
        raise ValueError(f"lse must be {list(out.shape[:-1])} as out, not {list(lse.shape)}")
    if lse.ndim == 0 or sink.shape != lse.shape[-1:]:
        raise ValueError(
            f"attn_sink must be [H] with lse's last axis {list(lse.shape[-1:])}, "
            f"not {list(sink.shape)}"
        )
    lse, sink = lse.astype(jnp.float32), sink.astype(jnp.float32)
    share = jnp.where(lse == -jnp.inf, 0.0, jax.nn.sigmoid(lse - sink))
    return weigh(out, share).astype(out.dtype)


def lse_to_base2(lse: ArrayLike) -> jax.Array:
    """Convert natural-log LSEs, ours, to log2 as FlashInfer and TileLang have it.

    Args:
      lse: [...] floating; -inf stays -inf.

    Returns:
      [...] float32.

    Raises:
      TypeError: lse is not floating.
    """
    return as_floating("lse", lse).astype(jnp.float32) / _LN_2


def lse_from_base2(lse: ArrayLike) -> jax.Array:
    """Convert log2 LSEs, as FlashInfer and TileLang have it, to natural log, ours.

    Args:
      lse: [...] floating; -inf stays -inf.

    Returns:
      [...] float32.

    Raises:
      TypeError: lse is not floating.
    """
    return as_floating("lse", lse).astype(jnp.float32) * _LN_2


def lse_from_flashmla(lse: ArrayLike) -> jax.Array:
    """Convert FlashMLA's LSEs, natural log and +inf where a row is empty, to ours, -inf there.

    Args:
      lse: [...] floating.

    Returns:
      [...] float32.

    Raises:
      TypeError: lse is not floating.
    """
    lse = as_floating("lse", lse).astype(jnp.float32)
    return jnp.where(lse == jnp.inf, -jnp.inf, lse)


def _stacked(name: str, parts: ArrayLike | Sequence[ArrayLike], axis: int) -> jax.Array:
    if not isinstance(parts, Sequence):
        return as_floating(name, parts)
    if axis != 0:
        raise ValueError(f"axis must be 0 where {name} is a sequence of parts, not {axis}")
    arrays = [as_floating(f"{name}[{i}]", part) for i, part in enumerate(parts)]
    if not arrays or any(array.shape != arrays[0].shape for array in arrays):
        shapes = [list(array.shape) for array in arrays]
        raise ValueError(f"{name} must hold at least one part, all of one shape, not {shapes}")
    return jnp.stack(arrays)
