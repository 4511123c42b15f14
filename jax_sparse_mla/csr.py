"""Index rows: top-k lists and index streams, block tables and slots, splitting rows.

A row lists the slots a query attends. Two forms: a CSR stream (``kv_indptr`` [n + 1],
``kv_indices`` [nnz]; row q is ``kv_indices[kv_indptr[q] : kv_indptr[q + 1]]``) and a padded list
(``kv_indices`` [n, w] with optional ``row_lengths`` [n]). A negative entry is masked in both. Slots
and counts are int32.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_sparse_mla.arguments import INT32_MAX, as_int32
from jax_sparse_mla.kernel.contract import TILE


def padded_to_csr(
    kv_indices: ArrayLike, row_lengths: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """Join padded rows to a CSR stream without their masked entries.

    Shapes are static: the stream keeps n * w places; those after the last row's end hold -1.

    Args:
      kv_indices: [n, w] integer slots, as top-k gives them; a negative entry is left out.
      row_lengths: [n] integer; entries of row i from row_lengths[i] on are left out. Clamped to
        0 .. w; default w.

    Returns:
      kv_indptr [n + 1] int32 and kv_indices [n * w] int32; a row's entries keep their order.

    Raises:
      TypeError: an argument is not an integer array.
      ValueError: kv_indices is not [n, w] or row_lengths not [n].
    """
    kv_indices, valid = _rows_and_validity(kv_indices, row_lengths)
    num_rows, width = kv_indices.shape
    kv_indptr = jnp.append(0, jnp.cumsum(jnp.sum(valid, axis=1, dtype=jnp.int32), dtype=jnp.int32))
    flat, flat_valid = kv_indices.reshape(-1), valid.reshape(-1)
    place = jnp.cumsum(flat_valid, dtype=jnp.int32) - 1
    place = jnp.where(flat_valid, place, num_rows * width)
    stream = jnp.full(num_rows * width, -1, jnp.int32).at[place].set(flat, mode="drop")
    return kv_indptr, stream


def csr_to_padded(
    kv_indptr: ArrayLike, kv_indices: ArrayLike, width: int
) -> tuple[jax.Array, jax.Array]:
    """Lay a CSR stream out as padded rows.

    Args:
      kv_indptr: [n + 1] integer, clamped to 0 .. nnz; a decreasing pair is an empty row (the op's
        rule).
      kv_indices: [nnz] integer.
      width: entries a row; entries of a longer row from ``width`` on are cut off, so give the
        longest row's length.

    Returns:
      kv_indices [n, width] int32, -1 after a row's end, and row_lengths [n] int32, at most width.

    Raises:
      TypeError: an array is not integer.
      ValueError: a shape is not as above or width is negative.
    """
    kv_indptr = _int32("kv_indptr", kv_indptr, "n + 1")
    kv_indices = _int32("kv_indices", kv_indices, "nnz")
    if kv_indptr.shape[0] == 0:
        raise ValueError("kv_indptr must be [n + 1], not [0]")
    if width < 0:
        raise ValueError(f"width must not be negative, not {width}")
    nnz = kv_indices.shape[0]
    kv_indptr = jnp.clip(kv_indptr, 0, nnz)
    row_lengths = jnp.clip(kv_indptr[1:] - kv_indptr[:-1], 0, width)
    if nnz == 0:  # JAX does not gather from nothing
        return jnp.full((row_lengths.shape[0], width), -1, jnp.int32), row_lengths
    column = lax.iota(jnp.int32, width)[None, :]
    inside = column < row_lengths[:, None]
    # A place past the stream is only ever reached outside a row; fill mode leaves it -1.
    place = jnp.where(inside, kv_indptr[:-1, None] + column, nnz)
    return kv_indices.at[place].get(mode="fill", fill_value=-1), row_lengths


def compact_rows(
    kv_indices: ArrayLike, row_lengths: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """Move each padded row's unmasked entries to its front, in their order.

    Args:
      kv_indices: [n, w] integer; a negative entry is masked.
      row_lengths: [n] integer, clamped to 0 .. w; default w.

    Returns:
      kv_indices [n, w] int32, -1 behind the entries kept, and row_lengths [n] int32, their number.

    Raises:
      TypeError: an argument is not an integer array.
      ValueError: kv_indices is not [n, w] or row_lengths not [n].
    """
    kv_indices, valid = _rows_and_validity(kv_indices, row_lengths)
    width = kv_indices.shape[1]
    place = jnp.where(valid, jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, width)

    # Mapped, so that the scatter is seen to stay within its row where rows are sharded.
    @jax.vmap
    def move(entries: jax.Array, place: jax.Array) -> jax.Array:
        return jnp.full_like(entries, -1).at[place].set(entries, mode="drop")

    return move(kv_indices, place), jnp.sum(valid, axis=1, dtype=jnp.int32)


def compact_csr(kv_indptr: ArrayLike, kv_indices: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Take the masked entries out of a CSR stream.

    Args:
      kv_indptr: [n + 1] integer, clamped to 0 .. nnz; a decreasing pair is and stays an empty row.
      kv_indices: [nnz] integer; a negative entry is masked.

    Returns:
      kv_indptr [n + 1] int32 and kv_indices [nnz] int32, -1 behind the entries kept.

    Raises:
      TypeError: an argument is not an integer array.
      ValueError: a shape is not as above.
    """
    kv_indptr = _int32("kv_indptr", kv_indptr, "n + 1")
    kv_indices = _int32("kv_indices", kv_indices, "nnz")
    nnz = kv_indices.shape[0]
    kept = kv_indices >= 0
    kept_before = jnp.append(0, jnp.cumsum(kept, dtype=jnp.int32))
    place = jnp.where(kept, kept_before[:-1], nnz)
    stream = jnp.full(nnz, -1, jnp.int32).at[place].set(kv_indices, mode="drop")
    return kept_before[jnp.clip(kv_indptr, 0, nnz)], stream


def block_table_to_slots(
    block_table: ArrayLike,
    positions: ArrayLike,
    request_ids: ArrayLike | None = None,
    *,
    block_size: int,
    block_stride: int | None = None,
) -> jax.Array:
    """Slots of token positions in a paged cache.

    ``slot = block_table[request, position // block_size] * block_stride + position % block_size``.
    Serves both sides: the slots to write a step's tokens to, and the rows of top-k positions to
    read.

    Args:
      block_table: [requests, max_blocks] integer; a request's cache blocks in order, negative where
        there is none.
      positions: [...] integer token positions within their request, for instance [n] or [n, w].
      request_ids: integer, aligned with positions' leading axes (for [n, w] positions, [n] gives
        one request a row). Default: row i belongs to request i, and positions' first axis must be
        the number of requests.
      block_size: tokens a block holds.
      block_stride: rows from one block's start to the next; default block_size.

    Returns:
      Slots, positions' shape, int32; -1 for a negative position, one past the table, a request
      outside the table, a negative block, or a slot that int32 cannot hold.

    Raises:
      TypeError: an array is not integer.
      ValueError: shapes do not match, block_size is not positive or block_stride is less than
        block_size.
    """
    block_table = _int32("block_table", block_table, "requests", "max_blocks")
    positions = as_int32("positions", positions)
    num_requests, max_blocks = block_table.shape
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    if block_stride is None:
        block_stride = block_size
    if block_stride < block_size:
        raise ValueError(
            f"block_stride must be at least block_size {block_size}, not {block_stride}"
        )
    if request_ids is None:
        if positions.shape[:1] != (num_requests,):
            raise ValueError(
                f"positions must have one row for each of {num_requests} requests when "
                f"request_ids is None, not shape {list(positions.shape)}"
            )
        request_ids = lax.iota(jnp.int32, num_requests)
    request_ids = as_int32("request_ids", request_ids)
    if request_ids.shape != positions.shape[: request_ids.ndim]:
        raise ValueError(
            f"request_ids must have leading axes of positions {list(positions.shape)}, "
            f"not {list(request_ids.shape)}"
        )
    request = request_ids.reshape(request_ids.shape + (1,) * (positions.ndim - request_ids.ndim))
    inside = (positions >= 0) & (positions < max_blocks * block_size)
    inside &= (request >= 0) & (request < num_requests)
    request = jnp.where(inside, request, 0)
    position = jnp.where(inside, positions, 0)
    if num_requests == 0 or max_blocks == 0:
        return jnp.full(positions.shape, -1, jnp.int32)
    block = block_table[request, position // block_size]
    offset = position % block_size
    inside &= (block >= 0) & (block <= (INT32_MAX - offset) // block_stride)
    return jnp.where(inside, jnp.where(inside, block, 0) * block_stride + offset, -1)


def layer_slots(slots: ArrayLike, layer: ArrayLike, rows_per_layer: int) -> jax.Array:
    """Slots in a buffer that holds all layers' caches one after another.

    With one buffer [layers * rows_per_layer, 656] as a scan carry, the write and the read of layer
    ``layer`` use these slots, and no layer's cache is copied. A slot outside the layer becomes -1:
    plain ``slots + layer * rows_per_layer`` would turn -1 into the last row of the layer before.

    Args:
      slots: [...] integer slots within a layer.
      layer: scalar integer, may be traced.
      rows_per_layer: rows of one layer's cache.

    Returns:
      [...] int32.

    Raises:
      TypeError: slots or layer is not integer.
    """
    slots = as_int32("slots", slots)
    inside = (slots >= 0) & (slots < rows_per_layer)
    start = as_int32("layer", layer) * rows_per_layer
    return jnp.where(inside, jnp.where(inside, slots, 0) + start, -1)


def split_rows(
    row_begin: ArrayLike, row_end: ArrayLike, num_splits: int
) -> tuple[jax.Array, jax.Array]:
    """Cut each row into ``num_splits`` parts that can run side by side.

    The unit is a tile of 128 entries counted from the row's begin: a part is a whole number of
    tiles but for the row's last, since the kernel spends a whole tile on any rest of one, and parts
    differ by at most one tile, longer ones first. A row of fewer tiles than parts leaves its last
    parts empty (begin = end).

    Args:
      row_begin: [n] integer, the position of each row's first entry.
      row_end: [n] integer, one past its last; at or below row_begin the row is empty.
      num_splits: parts of a row, at least 1.

    Returns:
      row_begin and row_end [n * num_splits] int32; part s of row i is at i * num_splits + s.

    Raises:
      TypeError: an array is not integer.
      ValueError: the shapes differ or num_splits is below 1.
    """
    row_begin = _int32("row_begin", row_begin, "n")
    row_end = _int32("row_end", row_end, "n")
    if row_begin.shape != row_end.shape:
        raise ValueError(f"row_end must be {list(row_begin.shape)}, not {list(row_end.shape)}")
    if num_splits < 1:
        raise ValueError(f"num_splits must be at least 1, not {num_splits}")
    length = jnp.maximum(row_end - row_begin, 0)[:, None]
    tiles = -(-length // TILE)
    # Not part * tiles // num_splits, whose product can pass int32.
    each, rest = tiles // num_splits, tiles % num_splits
    part = lax.iota(jnp.int32, num_splits + 1)[None, :]
    first_tile = part * each + jnp.minimum(part, rest)
    # The last bound is the row's end, up to one tile below a multiple of a tile.
    bound = row_begin[:, None] + jnp.where(first_tile < tiles, first_tile * TILE, length)
    return bound[:, :-1].reshape(-1), bound[:, 1:].reshape(-1)


def _rows_and_validity(
    kv_indices: ArrayLike, row_lengths: ArrayLike | None
) -> tuple[jax.Array, jax.Array]:
    kv_indices = _int32("kv_indices", kv_indices, "n", "w")
    valid = kv_indices >= 0
    if row_lengths is not None:
        row_lengths = as_int32("row_lengths", row_lengths)
        if row_lengths.shape != kv_indices.shape[:1]:
            raise ValueError(
                f"row_lengths must be [{kv_indices.shape[0]}] as kv_indices "
                f"{list(kv_indices.shape)}, not {list(row_lengths.shape)}"
            )
        valid &= lax.broadcasted_iota(jnp.int32, kv_indices.shape, 1) < row_lengths[:, None]
    return kv_indices, valid


def _int32(name: str, value: ArrayLike, *axes: str) -> jax.Array:
    array = as_int32(name, value)
    if array.ndim != len(axes):
        raise ValueError(f"{name} must be [{', '.join(axes)}], not {list(array.shape)}")
    return array
