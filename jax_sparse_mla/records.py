"""The 656-byte fp8_ds_mla record: pack, unpack and write.

One record holds one token's latent and rope, little-endian:

========  =====================================================================
bytes     content
========  =====================================================================
0-511     512 latent codes, float8_e4m3fn
512-527   4 float32 scales, one for each group of 128 latent codes
528-655   64 rope values, bfloat16, stored verbatim
========  =====================================================================

A latent value is its code times its group's scale. The format is vLLM's and FlashMLA's
(``fp8_ds_mla``). Checking and mending records that other writers left behind is in
:mod:`jax_sparse_mla.record_check`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jax_sparse_mla.arguments import as_floating, as_int32, check_choice
from jax_sparse_mla.kernel.contract import LATENT_DIM, RECORD_BYTES, ROPE_DIM
from jax_sparse_mla.kernel.specialisation import ScaleFormat
from jax_sparse_mla.scales import ScaleRule, scale_is_usable, scale_of_group

GROUP = 128
"""Latent values that share one scale."""
NUM_GROUPS = LATENT_DIM // GROUP
SCALES_END = LATENT_DIM + 4 * NUM_GROUPS
"""Where a record's scales end and its rope begins, in bytes."""
UNQUANTISED_DIM = LATENT_DIM + ROPE_DIM
"""Values of an unquantised bfloat16 record, which only the reference reads."""

# Below this many tokens a comparison of all pairs beats a sort (one fused kernel, no launch chain).
_PAIRWISE_TOKENS = 512

# Records of other systems, by their size in bytes: what to say to whoever passes them.
_FOREIGN_RECORDS = {
    576: "576-byte records hold one fp8 scale per tensor (SGLang on ROCm) and cannot be read",
    584: "584-byte records (FlashMLA's MODEL1: 448 fp8 latents, e8m0 scales) cannot be read",
}


def pack_records(
    latent: ArrayLike, rope: ArrayLike, *, scale_rule: ScaleRule = "pow2"
) -> jax.Array:
    """Quantise latents and join them with their ropes to records.

    With ``amax`` the largest magnitude of a group of 128 latent values, the group's scale is

    - ``"pow2"``: ``2 ** ceil(log2(max(amax / 448, 1e-4)))``; FlashMLA, and vLLM since #49435.
    - ``"pow2_fine"``: ``2 ** ceil(log2(max(amax, 1e-4) / 448))``; vLLM's FlyDSL kernel. Differs
      from ``"pow2"`` only where ``amax < 0.0448``, and keeps more of such a group.
    - ``"float32"``: ``max(amax / 448, 2 ** -126)``, to a unit in the last place; older vLLM, aiter.
      Records written so are read with ``scale_format="float32"``.

    A group that is all zero gets 2**-13, 2**-22 and 2**-126. A group with an inf or NaN gets a
    scale that is inf or NaN: the record then reads as NaN.

    Args:
      latent: [..., 512] floating; the compressed key/value after its norm. Rounded to nearest even.
      rope: [..., 64] floating; the key's rotary part, RoPE applied. Rounded to bfloat16 if it is
        not.
      scale_rule: the writer's rule, see above.

    Returns:
      [..., 656] uint8 records.

    Raises:
      TypeError: latent or rope is not floating.
      ValueError: a last axis is not 512 or 64, the leading axes differ, or the rule is unknown.
    """
    latent, rope = _latent_and_rope(latent, rope)
    check_choice("scale_rule", scale_rule, ScaleRule)
    leading = latent.shape[:-1]
    groups = latent.astype(jnp.float32).reshape(*leading, NUM_GROUPS, GROUP)
    scale = scale_of_group(jnp.max(jnp.abs(groups), axis=-1), scale_rule)
    codes = (groups / scale[..., None]).astype(jnp.float8_e4m3fn)
    return join_record(codes.reshape(latent.shape), scale, rope.astype(jnp.bfloat16))


def unpack_records(
    records: ArrayLike, *, scale_format: ScaleFormat = "pow2"
) -> tuple[jax.Array, jax.Array]:
    """Give back the latents and ropes of records.

    Args:
      records: [..., 656] uint8, int8 or float8_e4m3fn.
      scale_format: ``"pow2"``: a group whose scale is neither zero nor +2**-126 .. +2**127 reads as
        NaN, as in the op. ``"float32"``: any finite scale; one that is not finite reads as NaN.

    Returns:
      latent [..., 512] float32 and rope [..., 64] bfloat16. Magnitudes below 2**-126 may become 0,
      as float32 arithmetic does on most devices.

    Raises:
      TypeError: records has another dtype.
      ValueError: records has another last axis, or the format is unknown.
    """
    records = as_record_array("records", records)
    check_choice("scale_format", scale_format, ScaleFormat)
    codes, scale_bits, rope = split_record(lax.bitcast_convert_type(records, jnp.uint8))
    usable = scale_is_usable(scale_bits, scale_format)
    scale = jnp.where(usable, lax.bitcast_convert_type(scale_bits, jnp.float32), jnp.nan)
    groups = codes.astype(jnp.float32).reshape(*scale.shape, GROUP) * scale[..., None]
    return groups.reshape(codes.shape), rope


def write_records(
    kv_buffer: ArrayLike,
    slots: ArrayLike,
    latent: ArrayLike,
    rope: ArrayLike,
    *,
    scale_rule: ScaleRule = "pow2",
) -> jax.Array:
    """Pack tokens and write their records into a cache.

    Call it inside the jitted step that owns the cache, with the cache donated: quantisation fuses
    with whatever made latent and rope, and the write is in place, its temporaries independent of
    the cache's size. That holds for uint8 and int8 caches; a float8_e4m3fn cache costs a temporary
    copy of itself on every write, because XLA does not scatter that type in place. Under
    ``lax.scan`` over layers keep one buffer for all layers in the carry and move the slots with
    :func:`jax_sparse_mla.layer_slots`; a cache passed through scan's xs and ys is copied. A read
    must not be left unordered against a later write: XLA then copies the cache. In a model each
    layer's write depends on the attention of the layer before, which orders them.

    Where several tokens name one slot, the last of them in row-major order stays, on every
    platform.

    Args:
      kv_buffer: [..., 656] uint8, int8 or float8_e4m3fn; its leading axes are read as one axis of
        slots.
      slots: [...] integer; each token's slot. A slot below 0 or past the end writes nothing.
      latent: [..., 512] floating, leading axes as slots.
      rope: [..., 64] floating, leading axes as slots.
      scale_rule: see :func:`pack_records`.

    Returns:
      The cache with the records written, shape and dtype of kv_buffer.

    Raises:
      TypeError: a dtype is not as above.
      ValueError: a shape is not as above, or the rule is unknown.
    """
    kv_buffer = as_record_array("kv_buffer", kv_buffer)
    slots = as_int32("slots", slots)
    latent, rope = _latent_and_rope(latent, rope)
    if slots.shape != latent.shape[:-1]:
        raise ValueError(
            f"slots must have latent's leading axes {list(latent.shape[:-1])}, "
            f"not {list(slots.shape)}"
        )
    records = pack_records(latent, rope, scale_rule=scale_rule).reshape(-1, RECORD_BYTES)
    # XLA on the CPU widens float8 to float16 around a scatter (two copies); as bytes it costs one.
    is_float8 = kv_buffer.dtype == jnp.float8_e4m3fn
    buffer = lax.bitcast_convert_type(kv_buffer, jnp.uint8) if is_float8 else kv_buffer
    rows = buffer.reshape(-1, RECORD_BYTES)
    targets = _scatter_targets(slots.reshape(-1), rows.shape[0])
    rows = rows.at[targets].set(
        lax.bitcast_convert_type(records, rows.dtype), mode="drop", unique_indices=True
    )
    return lax.bitcast_convert_type(rows, kv_buffer.dtype).reshape(kv_buffer.shape)


def _scatter_targets(slots: jax.Array, num_rows: int) -> jax.Array:
    """The row each of [t] tokens writes; for none, one past the end, no two of them alike."""
    tokens = slots.shape[0]
    position = lax.iota(jnp.int32, tokens)
    inside = (slots >= 0) & (slots < num_rows)
    row = jnp.where(inside, slots, num_rows)
    if isinstance(tokens, int) and tokens <= _PAIRWISE_TOKENS:
        overwritten = jnp.any(
            (row[:, None] == row[None, :]) & (position[:, None] < position[None, :]), axis=1
        )
    else:  # also a symbolic number of tokens
        row_sorted, order = lax.sort((row, position), num_keys=2)
        same_as_next = jnp.append(row_sorted[1:] == row_sorted[:-1], False)
        overwritten = jnp.zeros(tokens, bool).at[order].set(same_as_next, unique_indices=True)
    return jnp.where(inside & ~overwritten, row, num_rows + position)


def join_record(codes: jax.Array, scale: jax.Array, rope: jax.Array) -> jax.Array:
    """Join codes [..., 512], scale [..., 4] and rope [..., 64], of 1, 4 and 2 bytes, to uint8."""
    return jnp.concatenate([_to_bytes(part) for part in (codes, scale, rope)], axis=-1)


def split_record(record_bytes: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split [..., 656] uint8 into float8_e4m3fn codes, int32 bits of the scales, bfloat16 rope."""
    return (
        lax.bitcast_convert_type(record_bytes[..., :LATENT_DIM], jnp.float8_e4m3fn),
        _from_bytes(record_bytes[..., LATENT_DIM:SCALES_END], jnp.int32),
        _from_bytes(record_bytes[..., SCALES_END:], jnp.bfloat16),
    )


# Shifts, not a bitcast to another width: JAX cannot export that with a symbolic number of records.
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def _to_bytes(values: jax.Array) -> jax.Array:
    size = values.dtype.itemsize
    bits = lax.bitcast_convert_type(values, _UNSIGNED[size])
    parts = [(bits >> (8 * i)).astype(jnp.uint8) for i in range(size)]
    return jnp.stack(parts, axis=-1).reshape(*values.shape[:-1], values.shape[-1] * size)


def _from_bytes(record_bytes: jax.Array, dtype: DTypeLike) -> jax.Array:
    size = jnp.dtype(dtype).itemsize
    parts = [record_bytes[..., i::size].astype(_UNSIGNED[size]) << (8 * i) for i in range(size)]
    return lax.bitcast_convert_type(functools.reduce(jnp.bitwise_or, parts), dtype)


def as_record_array(name: str, records: ArrayLike) -> jax.Array:
    """The argument ``name`` as an array of records; errors as `check_record_array`."""
    records = jnp.asarray(records)
    check_record_array(name, records.shape, records.dtype)
    return records


def check_record_array(
    name: str, shape: tuple[int, ...], dtype: np.dtype, *, or_unquantised: bool = False
) -> None:
    """Raise unless the argument ``name`` is an array of records.

    Args:
      name: the argument's name.
      shape: its shape, which must be [..., 656].
      dtype: its dtype, which must be uint8, int8 or float8_e4m3fn.
      or_unquantised: [..., 576] bfloat16 will do too.

    Raises:
      TypeError: the dtype is another.
      ValueError: the last axis is another; records of other systems are named.
    """
    size = shape[-1] if shape else None
    if or_unquantised and dtype == jnp.bfloat16:
        if size != UNQUANTISED_DIM:
            raise ValueError(
                f"{name} of bfloat16 must be [..., {UNQUANTISED_DIM}], not {list(shape)}"
            )
        return
    if dtype not in (jnp.uint8, jnp.int8, jnp.float8_e4m3fn):
        other = f" [..., {RECORD_BYTES}], or bfloat16 [..., {UNQUANTISED_DIM}]"
        raise TypeError(
            f"{name} must be uint8, int8 or float8_e4m3fn{other if or_unquantised else ''}, "
            f"not {dtype}"
        )
    if size != RECORD_BYTES:
        known = f"an fp8_ds_mla record has {RECORD_BYTES} bytes"
        raise ValueError(
            f"{name} must be [..., {RECORD_BYTES}], not {list(shape)}: "
            f"{_FOREIGN_RECORDS.get(size or 0, known)}"
        )


def _latent_and_rope(latent: ArrayLike, rope: ArrayLike) -> tuple[jax.Array, jax.Array]:
    latent, rope = as_floating("latent", latent), as_floating("rope", rope)
    for name, part, width in (("latent", latent, LATENT_DIM), ("rope", rope, ROPE_DIM)):
        if not part.shape or part.shape[-1] != width:
            raise ValueError(f"{name} must be [..., {width}], not {list(part.shape)}")
    if latent.shape[:-1] != rope.shape[:-1]:
        raise ValueError(
            f"rope must have latent's leading axes {list(latent.shape[:-1])}, "
            f"not {list(rope.shape[:-1])}"
        )
    return latent, rope
