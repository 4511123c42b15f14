"""The op: checks and conversions around the primitive, and the attention sink."""

import functools
import math
import numbers
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_sparse_mla.arguments import INT32_MAX, as_array, as_indptr, as_int32, check_choice
from jax_sparse_mla.kernel.contract import LATENT_DIM, ROPE_DIM
from jax_sparse_mla.kernel.specialisation import ScaleFormat
from jax_sparse_mla.lse import apply_sink
from jax_sparse_mla.primitive import Params, sparse_mla
from jax_sparse_mla.records import check_record_array

Queries = ArrayLike | tuple[ArrayLike, ArrayLike]
"""q [n, H, 576], or the pair q_latent [n, H, 512] and q_rope [n, H, 64]."""

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_SMALLEST_SCALE = 2.0**-99
"""The kernel's smallest factor on a product is 2^-100."""
_MOST_SPLITS = 4096
"""Far beyond use; what follows counts rows times splits in int32."""


def sparse_mla_fwd(
    q: Queries,
    kv_buffer: ArrayLike,
    kv_indptr: ArrayLike | None,
    kv_indices: ArrayLike,
    softmax_scale: float,
    *,
    row_lengths: ArrayLike | None = None,
    has_invalid: bool = True,
    return_lse: bool = False,
    attn_sink: ArrayLike | None = None,
    num_splits: int | None = None,
    scale_format: ScaleFormat = "pow2",
    implementation: str | None = None,
) -> Array | tuple[Array, Array]:
    """Sparse multi-head latent attention over a cache of fp8_ds_mla records, forward only.

    Row i of q attends the records that row i of the index entries selects::

        logits[h, t] = softmax_scale * q[i, h] . [latent[t] | rope[t]]
        lse[i, h]    = log(sum_t exp(logits[h, t]))
        out[i, h]    = sum_t exp(logits[h, t] - lse[i, h]) * latent[t]

    On an AMD gfx950 GPU this is one call of a kernel, elsewhere jnp. Argument names and order are
    those of aiter's ``sparse_mla_fwd``. Everything may be traced, mapped with vmap and sharded, but
    what is said to be static.

    A q with inf or NaN gives NaN in out and lse of that row and head, if the row has an entry. A
    record with NaN gives NaN in all heads of the rows that select it, and in no other row.

    Args:
      q: [n, H, 576] bfloat16, latent 512 then rope 64; or the pair (q_latent [n, H, 512], q_rope
        [n, H, 64]) bfloat16, which saves joining them. Any n and H.
      kv_buffer: [..., 656] uint8, int8 or float8_e4m3fn; its leading axes are read as one axis of
        rows. A record is 512 e4m3fn latents, 4 float32 scales (one per 128 latents) and 64 bfloat16
        of rope: vLLM's fp8_ds_mla. It is never converted nor copied. The reference also reads an
        unquantised cache, [..., 576] bfloat16.
      kv_indptr: [n + 1] integer; the entries of row i are those from kv_indptr[i] up to, not with,
        kv_indptr[i + 1]. Clamped to 0 .. nnz; a decreasing pair is an empty row. None for padded
        rows.
      kv_indices: [nnz] integer with kv_indptr, [n, w] integer without: rows of kv_buffer. An entry
        outside 0 .. rows - 1 is masked, wherever it stands; an entry counts as often as it stands.
      softmax_scale: finite number, static; natural units. 0, or at least 2^-99 in size.
      row_lengths: [n] integer, only with padded rows: entries of row i from row_lengths[i] on do
        not count. Clamped to 0 .. w; default w.
      has_invalid: static. aiter's hint that rows may end in masked entries. Reference and kernel
        find that out by themselves: it changes neither the result nor the time.
      return_lse: static. Also return the lse.
      attn_sink: [H] float32, bfloat16 or float16, natural units: one more logit a head, with no
        value, so that out is multiplied by ``sigmoid(lse - attn_sink)``. lse is not changed by it.
      num_splits: static. The kernel cuts each row in so many parts (1 to 4096), which run side
        by side, and merges them; None lets it choose from the sizes and the device
        (:func:`jax_sparse_mla.lowering.choose_num_splits`). The reference ignores it.
      scale_format: static. ``"pow2"``: scales are +2^-126 .. 2^127 or 0, any other gives NaN in the
        rows that select it. ``"float32"``: any finite scale, exactly, and slower.
      implementation: static. None: the kernel on gfx950, else the reference. ``"kernel"`` or
        ``"reference"``: that one.

    Returns:
      out [n, H, 512] bfloat16; with return_lse also lse [n, H] float32, natural log. A row without
      a valid entry has out 0 and lse -inf.

    Raises:
      TypeError: an argument has a dtype that cannot be converted without loss, or softmax_scale is
        no Python number.
      ValueError: shapes do not fit, or an option is unknown. Both name the argument.
      NotImplementedError: the op is differentiated.
    """
    operands = _operands(q, kv_buffer, kv_indptr, kv_indices, row_lengths)
    # Rounding before the sink and after it would be once too often.
    partial = attn_sink is not None
    params = _params(
        softmax_scale, scale_format, num_splits, has_invalid, implementation, operands, partial
    )
    out, lse = _call(*operands, params=params)
    if attn_sink is not None:
        out = apply_sink(out, lse, _sink(attn_sink, out.shape[1])).astype(jnp.bfloat16)
    return (out, lse) if return_lse else out


def sparse_mla_partial(
    q: Queries,
    kv_buffer: ArrayLike,
    kv_indptr: ArrayLike | None,
    kv_indices: ArrayLike,
    softmax_scale: float,
    *,
    row_lengths: ArrayLike | None = None,
    has_invalid: bool = True,
    num_splits: int | None = None,
    scale_format: ScaleFormat = "pow2",
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Attend one part of the records, for a result that is merged with those of other parts.

    The parts may be records on several devices, or of several calls. Arguments and errors are those
    of :func:`sparse_mla_fwd`.

    Returns:
      out [n, H, 512] float32 and lse [n, H] float32, natural log, for
      :func:`jax_sparse_mla.merge_attention`; an attention sink is applied after the merge
      (:func:`jax_sparse_mla.apply_sink`).
    """
    operands = _operands(q, kv_buffer, kv_indptr, kv_indices, row_lengths)
    params = _params(
        softmax_scale,
        scale_format,
        num_splits,
        has_invalid,
        implementation,
        operands,
        partial=True,
    )
    return _call(*operands, params=params)


# Compiled also where the caller does not jit, so that a call with sharded arrays stays local;
# inlined where he does.
_call = functools.partial(jax.jit, static_argnames="params", inline=True)(sparse_mla)


def _operands(
    q: Any, kv_buffer: Any, kv_indptr: Any, kv_indices: Any, row_lengths: Any
) -> tuple[Array, Array, Array, Array, Array, Array]:
    q_latent, q_rope = _queries(q)
    n = q_latent.shape[0]
    kv = _records(kv_buffer)
    indices = as_int32("kv_indices", kv_indices)
    if kv_indptr is None:
        if indices.ndim != 2 or indices.shape[0] != n:
            raise ValueError(
                f"kv_indices must be [{n}, w], one row for each of q, where kv_indptr is None, "
                f"not {list(indices.shape)}"
            )
        width = indices.shape[1]
        row_begin = jnp.zeros((n,), jnp.int32)
        if row_lengths is None:
            return q_latent, q_rope, kv, indices, row_begin, jnp.full((n,), width, jnp.int32)
        row_end = as_int32("row_lengths", row_lengths)
        if row_end.shape != (n,):
            raise ValueError(
                f"row_lengths must be [{n}], one for each row of q, not {list(row_end.shape)}"
            )
        return q_latent, q_rope, kv, indices, row_begin, row_end
    if row_lengths is not None:
        raise ValueError(
            "row_lengths must be None where kv_indptr is given: that holds the lengths"
        )
    indptr = as_indptr(kv_indptr, n)
    if indices.ndim != 1:
        raise ValueError(
            f"kv_indices must be [nnz] where kv_indptr is given, not {list(indices.shape)}"
        )
    return q_latent, q_rope, kv, indices, indptr[:-1], indptr[1:]


def _queries(q: Any) -> tuple[Array, Array]:
    """The operands q_latent and q_rope; a whole q serves as both, so that nothing is copied."""
    if not isinstance(q, tuple | list):
        whole = _query("q", q, LATENT_DIM + ROPE_DIM)
        return whole, whole
    if len(q) != 2:
        raise ValueError(f"q must be an array or the pair (q_latent, q_rope), not {len(q)} arrays")
    latent, rope = _query("q[0]", q[0], LATENT_DIM), _query("q[1]", q[1], ROPE_DIM)
    if latent.shape[:2] != rope.shape[:2]:
        raise ValueError(
            f"q[0] and q[1] must have the same rows and heads, not {list(latent.shape)} "
            f"and {list(rope.shape)}"
        )
    return latent, rope


def _query(name: str, value: Any, dim: int) -> Array:
    array = as_array(name, value)
    if array.dtype != jnp.bfloat16:
        raise TypeError(
            f"{name} must be bfloat16, not {array.dtype}; rounding it is the caller's decision: "
            f"{name}.astype(jnp.bfloat16)"
        )
    if array.ndim != 3 or array.shape[2] != dim:
        raise ValueError(f"{name} must be [n, H, {dim}], not {list(array.shape)}")
    return array


def _records(kv_buffer: Any) -> Array:
    array = as_array("kv_buffer", kv_buffer)
    check_record_array("kv_buffer", array.shape, array.dtype, or_unquantised=True)
    if array.ndim < 2:
        raise ValueError(f"kv_buffer must be rows of records, not {list(array.shape)}")
    kv = array.reshape(-1, array.shape[-1]) if array.size else array.reshape(0, array.shape[-1])
    if isinstance(kv.shape[0], int) and kv.shape[0] > INT32_MAX:
        raise ValueError(f"kv_buffer must hold at most 2**31 - 1 records, not {kv.shape[0]}")
    return kv


def _sink(attn_sink: Any, num_heads: int) -> Array:
    array = as_array("attn_sink", attn_sink)
    if array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"attn_sink must be float32, bfloat16 or float16, not {array.dtype}")
    if array.shape != (num_heads,):
        raise ValueError(
            f"attn_sink must be [{num_heads}], one for each head of q, not {list(array.shape)}"
        )
    return array.astype(jnp.float32)


def _params(
    softmax_scale: Any,
    scale_format: Any,
    num_splits: Any,
    has_invalid: Any,
    implementation: Any,
    operands: tuple[Array, ...],
    partial: bool,
) -> Params:
    if not isinstance(softmax_scale, numbers.Real) or isinstance(softmax_scale, bool):
        raise TypeError(
            "softmax_scale must be a Python number, known when the op is traced, not "
            f"{type(softmax_scale).__name__}; scale q where it has to be traced"
        )
    try:
        scale = float(softmax_scale)
    except OverflowError:  # a Python int has no bounds
        scale = math.inf
    if not abs(scale) <= _LARGEST_FLOAT32:
        raise ValueError(f"softmax_scale must be finite in float32, not {softmax_scale}")
    if 0 < abs(scale) < _SMALLEST_SCALE:
        raise ValueError(f"softmax_scale must be 0 or at least 2**-99 in size, not {softmax_scale}")
    check_choice("scale_format", scale_format, ScaleFormat)
    check_choice("implementation", implementation, Literal[None, "kernel", "reference"])
    if implementation == "kernel" and operands[2].dtype == jnp.bfloat16:
        raise ValueError(
            'implementation must not be "kernel" with a bfloat16 kv_buffer: that reads records'
        )
    if num_splits is not None:
        if not isinstance(num_splits, numbers.Integral) or isinstance(num_splits, bool):
            raise TypeError(
                f"num_splits must be None or a Python int, not {type(num_splits).__name__}"
            )
        num_splits = int(num_splits)
        if not 1 <= num_splits <= _MOST_SPLITS:
            raise ValueError(f"num_splits must be within 1 .. {_MOST_SPLITS}, not {num_splits}")
    if not isinstance(has_invalid, bool | np.bool_):
        raise TypeError(f"has_invalid must be a Python bool, not {type(has_invalid).__name__}")
    return Params(scale, scale_format, num_splits, bool(has_invalid), partial, implementation)
