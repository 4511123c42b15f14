"""Finding and mending records that the op would read as NaN."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_sparse_mla.arguments import check_choice
from jax_sparse_mla.kernel.contract import RECORD_BYTES
from jax_sparse_mla.kernel.specialisation import ScaleFormat
from jax_sparse_mla.records import (
    GROUP,
    as_record_array,
    check_record_array,
    join_record,
    split_record,
)
from jax_sparse_mla.scales import (
    E4M3_MAX,
    EXPONENT_BITS,
    MANTISSA_BITS,
    MANTISSA_WIDTH,
    scale_is_usable,
)

_CHUNK_RECORDS = 1 << 16
"""Records judged at a time (43 MB): bounds what a check needs beside the cache."""


class RecordFault(enum.IntFlag):
    """What is wrong with a record; a record can have several faults."""

    LATENT_NAN = 1
    """A latent code is NaN (0x7F or 0xFF)."""
    ROPE_NOT_FINITE = 2
    """A rope value is inf or NaN."""
    SCALE_NOT_FINITE = 4
    """A scale is inf or NaN."""
    SCALE_NEGATIVE = 8
    """A scale is below zero; a fault for ``scale_format="pow2"`` only."""
    SCALE_SUBNORMAL = 16
    """A scale lies between 0 and 2**-126; a fault for ``scale_format="pow2"`` only."""
    SCALE_NOT_POWER_OF_TWO = 32
    """A scale is no power of two; a fault for ``scale_format="pow2"`` only."""


@dataclass(frozen=True)
class RecordReport:
    """What :func:`check_records` found."""

    num_records: int
    """Records looked at."""
    scale_format: ScaleFormat
    slots: np.ndarray
    """[k] int64, ascending: the slots whose records have a fault."""
    faults: np.ndarray
    """[k] uint8: for each of these slots, its :class:`RecordFault` bits."""

    @property
    def ok(self) -> bool:
        """Whether no record has a fault."""
        return self.slots.size == 0

    def counts(self) -> dict[RecordFault, int]:
        """How many records have each fault, for the faults that occur."""
        counts = {fault: int(np.count_nonzero(self.faults & fault)) for fault in RecordFault}
        return {fault: count for fault, count in counts.items() if count}

    def __str__(self) -> str:
        if self.ok:
            return f'all {self.num_records} records are good for scale_format="{self.scale_format}"'
        lines = [
            f"{self.slots.size} of {self.num_records} records read as NaN with "
            f'scale_format="{self.scale_format}"'
        ]
        lines += [f"  {fault.name}: {count} records" for fault, count in self.counts().items()]
        for slot, bits in zip(self.slots[:10], self.faults[:10], strict=True):
            names = ", ".join(fault.name or "" for fault in RecordFault if fault & bits)
            lines.append(f"  slot {slot}: {names}")
        if self.slots.size > 10:
            lines.append(f"  and {self.slots.size - 10} more slots")
        return "\n".join(lines)


def check_records(kv_buffer: ArrayLike, *, scale_format: ScaleFormat = "pow2") -> RecordReport:
    """Find the records of a cache that the op reads as NaN, and say why.

    Runs eagerly, a chunk of records at a time: beside the cache it needs about a hundred MB, and
    only the findings come to the host. Each shard of a sharded cache is judged where it lies; of a
    cache that spans processes, each process reports the slots it holds. Slots never written count
    too: start from a zeroed cache, whose records are good.

    Args:
      kv_buffer: [..., 656] uint8, int8 or float8_e4m3fn; a jax.Array, or a NumPy array (a memory
        map too).
      scale_format: the format the op will read it with.

    Returns:
      A :class:`RecordReport`; print it, or use its ``ok``, ``slots`` and ``faults``.

    Raises:
      TypeError: kv_buffer has another dtype, or is traced (call it outside of jit).
      ValueError: kv_buffer has another last axis or is sharded over it, or the format is unknown.
    """
    check_choice("scale_format", scale_format, ScaleFormat)
    if isinstance(kv_buffer, jax.core.Tracer):
        raise TypeError("kv_buffer must not be traced: check_records runs outside of jit")
    array = kv_buffer if isinstance(kv_buffer, jax.Array) else np.asarray(kv_buffer)
    check_record_array("kv_buffer", array.shape, array.dtype)
    leading = array.shape[:-1]
    slots, faults = [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)]
    num_records = 0
    for shard, start in _shards(array):
        num_records += shard.size // RECORD_BYTES
        for first, chunk in _chunk_faults(shard, scale_format):
            within = first + np.flatnonzero(chunk)
            place = np.unravel_index(within, shard.shape[:-1]) if leading else (within,)
            place = tuple(axis + offset for axis, offset in zip(place, start, strict=True))
            slots.append(np.ravel_multi_index(place, leading) if leading else within)
            faults.append(chunk[chunk != 0])
    all_slots, all_faults = np.concatenate(slots), np.concatenate(faults)
    order = np.argsort(all_slots)
    return RecordReport(num_records, scale_format, all_slots[order], all_faults[order])


def repack_records(records: ArrayLike) -> jax.Array:
    """Requantise the groups of records whose scale ``scale_format="pow2"`` cannot read.

    A group with a usable scale is kept bit for bit, and so are ropes. Another group gets the
    smallest power of two with which its largest magnitude still fits, and its codes are rounded to
    nearest even once more: an error of at most 2**-4 of each value, or 2**-10 of the scale for the
    smallest. What has no value stays NaN: NaN codes, scales that are inf or NaN, and groups past
    448 * 2**127. A subnormal scale becomes a zero latent (an error below 2**-117).

    Can be jitted; with the cache donated, a uint8 or int8 cache is mended in place.

    Args:
      records: [..., 656] uint8, int8 or float8_e4m3fn; records, or a whole cache.

    Returns:
      The records, shape and dtype unchanged.

    Raises:
      TypeError: records has another dtype.
      ValueError: records has another last axis.
    """
    records = as_record_array("records", records)
    is_float8 = records.dtype == jnp.float8_e4m3fn
    buffer = lax.bitcast_convert_type(records, jnp.uint8) if is_float8 else records
    rows = buffer.reshape(-1, RECORD_BYTES)
    num_records = rows.shape[0]
    if not isinstance(num_records, int):  # a symbolic number, which min() cannot compare
        mended = _repack(lax.bitcast_convert_type(rows, jnp.uint8))
        return lax.bitcast_convert_type(mended, records.dtype).reshape(records.shape)
    size = min(_CHUNK_RECORDS, num_records)

    def repack_chunk(i: jax.Array, rows: jax.Array) -> jax.Array:
        # The last chunk is moved back to fit, over records already mended; those stay as they are.
        chunk = lax.dynamic_slice_in_dim(rows, i * size, size)
        mended = lax.bitcast_convert_type(
            _repack(lax.bitcast_convert_type(chunk, jnp.uint8)), rows.dtype
        )
        return lax.dynamic_update_slice_in_dim(rows, mended, i * size, 0)

    if size:
        rows = lax.fori_loop(0, -(-num_records // size), repack_chunk, rows)
    return lax.bitcast_convert_type(rows, records.dtype).reshape(records.shape)


def _repack(record_bytes: jax.Array) -> jax.Array:
    codes, scale_bits, rope = split_record(record_bytes)
    groups = codes.reshape(*scale_bits.shape, GROUP)
    values = groups.astype(jnp.float32)
    largest = jnp.max(jnp.where(jnp.isnan(values), 0.0, jnp.abs(values)), axis=-1)
    # Everything in bits of normal float32 numbers, so that no step over- or underflows: |scale| =
    # m * 2**e with m in [1, 2). The codes are multiplied by m first, then by a power of two.
    exponent = (scale_bits & EXPONENT_BITS) >> MANTISSA_WIDTH
    mantissa = lax.bitcast_convert_type(
        (scale_bits & MANTISSA_BITS) | _exponent_field(127), jnp.float32
    )
    mantissa = jnp.where(scale_bits < 0, -mantissa, mantissa)
    needed = lax.bitcast_convert_type(largest * jnp.abs(mantissa), jnp.int32)
    fit = (needed + (MANTISSA_BITS - _MANTISSA_OF_448)) >> MANTISSA_WIDTH
    # In units of the biased exponent; code 448 is 1.75 * 2**8.
    new_exponent = jnp.maximum(exponent + fit - (127 + 8), 1)
    shift = lax.bitcast_convert_type(_exponent_field(127 + exponent - new_exponent), jnp.float32)
    new_groups = (values * mantissa[..., None] * shift[..., None]).astype(jnp.float8_e4m3fn)
    new_scale = _exponent_field(new_exponent)
    is_zero = (exponent == 0) | (largest == 0)
    new_groups = jnp.where(is_zero[..., None] & ~jnp.isnan(values), 0, _as_bytes(new_groups))
    keep = scale_is_usable(scale_bits, "pow2") | (exponent == 255) | (new_exponent > 254)
    new_codes = jnp.where(keep[..., None], _as_bytes(groups), new_groups)
    new_scale = jnp.where(keep, scale_bits, jnp.where(is_zero, 0, new_scale))
    return join_record(new_codes.reshape(codes.shape), new_scale, rope)


_MANTISSA_OF_448 = int(np.float32(E4M3_MAX).view(np.int32)) & MANTISSA_BITS


def _exponent_field(biased: ArrayLike) -> jax.Array:
    return jnp.asarray(biased, jnp.int32) << MANTISSA_WIDTH


def _as_bytes(codes: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(codes, jnp.uint8)


def _shards(
    array: jax.Array | np.ndarray,
) -> Iterator[tuple[jax.Array | np.ndarray, tuple[int, ...]]]:
    """The array's distinct shards on this process, each with its start on every leading axis."""
    if isinstance(array, np.ndarray):
        yield array, (0,) * (array.ndim - 1)
        return
    for shard in array.addressable_shards:
        if shard.data.shape[-1] != RECORD_BYTES:
            raise ValueError("kv_buffer must not be sharded over its last axis, the record's bytes")
        if shard.replica_id == 0:
            yield shard.data, tuple(axis.start or 0 for axis in shard.index[:-1])


def _chunk_faults(
    shard: jax.Array | np.ndarray, scale_format: ScaleFormat
) -> Iterator[tuple[int, np.ndarray]]:
    """Fault bits of each chunk of a shard's records, with the chunk's first record."""
    num_records = shard.size // RECORD_BYTES
    for first in range(0, num_records, _CHUNK_RECORDS):
        if isinstance(shard, np.ndarray):
            rows = shard.reshape(-1, RECORD_BYTES)[first : first + _CHUNK_RECORDS]
            bits = _faults_in_chunk(jnp.asarray(rows), 0, len(rows), scale_format)
        else:
            # A chunk must not pass the end: the slice would silently move back.
            size = min(_CHUNK_RECORDS, num_records - first)
            bits = _faults_in_chunk(shard, first, size, scale_format)
        yield first, np.asarray(bits)


@partial(jax.jit, static_argnames=("size", "scale_format"))
def _faults_in_chunk(
    records: jax.Array, first: ArrayLike, size: int, scale_format: ScaleFormat
) -> jax.Array:
    rows = lax.dynamic_slice_in_dim(records.reshape(-1, RECORD_BYTES), first, size)
    return record_faults(rows, scale_format)


def record_faults(records: jax.Array, scale_format: ScaleFormat) -> jax.Array:
    """The :class:`RecordFault` bits, [...] uint8, of records [..., 656]; can be jitted."""
    record_bytes = lax.bitcast_convert_type(records, jnp.uint8)
    codes, scale_bits, rope = split_record(record_bytes)
    exponent, mantissa = scale_bits & EXPONENT_BITS, scale_bits & MANTISSA_BITS
    not_finite = exponent == EXPONENT_BITS
    rope_exponent = lax.bitcast_convert_type(rope, jnp.uint16) & 0x7F80
    found = {
        RecordFault.LATENT_NAN: (_as_bytes(codes) & 0x7F) == 0x7F,
        RecordFault.ROPE_NOT_FINITE: rope_exponent == 0x7F80,
        RecordFault.SCALE_NOT_FINITE: not_finite,
    }
    if scale_format == "pow2":
        subnormal = (exponent == 0) & (mantissa != 0)
        # -0.0 is a zero, and NaN has no sign that matters.
        found[RecordFault.SCALE_NEGATIVE] = (
            (scale_bits < 0) & ((exponent | mantissa) != 0) & ~(not_finite & (mantissa != 0))
        )
        found[RecordFault.SCALE_SUBNORMAL] = subnormal
        found[RecordFault.SCALE_NOT_POWER_OF_TWO] = (mantissa != 0) & ~subnormal & ~not_finite
    bits = jnp.zeros(records.shape[:-1], jnp.uint8)
    for fault, where in found.items():
        bits |= jnp.where(jnp.any(where, axis=-1), jnp.uint8(fault), jnp.uint8(0))
    return bits
