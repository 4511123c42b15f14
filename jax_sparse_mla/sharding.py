"""The op on a mesh of devices, by hand: ``shard_map`` recipes for serving.

Under jit with sharded arrays the op stays local by itself (primitive.py). These recipes say where
everything lies instead of leaving it to the partitioner, so that programs over several devices can
be exported and are found in the persistent compilation cache by other processes:

- :func:`sparse_mla_heads`: heads over ``"tensor"``, the cache on every device;
- :func:`sparse_mla_rows`: rows over ``"data"``, with one cache for all or one cache each;
- :func:`sparse_mla_context`: the cache's records over ``"context"``.

The later ones take the axes of the earlier ones too. Inside a ``shard_map`` of one's own, heads and
rows need no more than :func:`jax_sparse_mla.sparse_mla_fwd`, and context parallel is
:func:`attend_context_shard`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from jax_sparse_mla.arguments import as_indptr, as_int32
from jax_sparse_mla.attention import Queries, sparse_mla_fwd
from jax_sparse_mla.context import attend_context_shard

Axis = str | tuple[str, ...]
"""A mesh axis, or several, the first one outermost."""


def sparse_mla_heads(
    q: Queries,
    kv_buffer: ArrayLike,
    kv_indptr: ArrayLike | None,
    kv_indices: ArrayLike,
    softmax_scale: float,
    *,
    mesh: Mesh | None = None,
    heads: Axis = "tensor",
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Tensor parallel: each device attends its heads, on the whole cache. No communication.

    Args:
      q: [n, H, 576] bfloat16 or the pair, sharded over H; the mesh axis must divide H.
      kv_buffer: [..., 656], on every device.
      kv_indptr: as in :func:`jax_sparse_mla.sparse_mla_fwd`, on every device.
      kv_indices: likewise.
      softmax_scale: likewise, static.
      mesh: the mesh; default the one set by ``jax.set_mesh``.
      heads: mesh axis of the heads.
      options: the op's options; row_lengths [n] on every device, attn_sink [H] sharded as the heads
        are.

    Returns:
      out [n, H, 512] bfloat16, and with return_lse lse [n, H] float32, sharded over H.

    Raises:
      ValueError, TypeError: as the op; and where a mesh axis does not divide its array axis.
    """
    return sparse_mla_rows(
        q,
        kv_buffer,
        kv_indptr,
        kv_indices,
        softmax_scale,
        mesh=mesh,
        rows=None,
        heads=heads,
        **options,
    )


def sparse_mla_rows(
    q: Queries,
    kv_buffer: ArrayLike,
    kv_indptr: ArrayLike | None,
    kv_indices: ArrayLike,
    softmax_scale: float,
    *,
    mesh: Mesh | None = None,
    rows: Axis | None = "data",
    heads: Axis | None = None,
    own_caches: bool = False,
    row_lengths: ArrayLike | None = None,
    attn_sink: ArrayLike | None = None,
    return_lse: bool = False,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Data parallel: each device attends its rows. No communication.

    Args:
      q: [n, H, 576] bfloat16 or the pair, sharded over n (and over H); the mesh axes must divide
        them.
      kv_buffer: [..., 656]; on every device, or with ``own_caches`` sharded over its first axis.
      kv_indptr: None, or [n + 1] on every device.
      kv_indices: [n, w] without kv_indptr, sharded over n; or [nnz] on every device.
      softmax_scale: as in the op, static.
      mesh: the mesh; default the one set by ``jax.set_mesh``.
      rows: mesh axis of the rows.
      heads: mesh axis of the heads, if they are sharded too.
      own_caches: each shard of rows has a cache of its own, its part of kv_buffer's first axis, and
        its slots count within that: a data-parallel rank's view.
      row_lengths: [n] with padded rows, sharded over n.
      attn_sink: [H], sharded as the heads are.
      return_lse: static; also return the lse.
      options: the op's other options.

    Returns:
      out [n, H, 512] bfloat16, and with return_lse lse [n, H] float32, sharded over n and H.

    Raises:
      ValueError, TypeError: as the op; and where a mesh axis does not divide its array axis.
    """
    specs = _Specs(rows, heads, rows if own_caches else None)

    def attend(operands: _Operands) -> Any:
        indptr = _own_indptr(operands.kv_indptr, rows)
        return sparse_mla_fwd(
            operands.q,
            operands.kv_buffer,
            indptr,
            operands.kv_indices,
            softmax_scale,
            row_lengths=operands.row_lengths,
            attn_sink=operands.attn_sink,
            return_lse=return_lse,
            **options,
        )

    operands = _Operands(q, kv_buffer, kv_indptr, kv_indices, row_lengths, attn_sink)
    return _on_mesh(attend, operands, specs, mesh, return_lse)


def sparse_mla_context(
    q: Queries,
    kv_buffer: ArrayLike,
    kv_indptr: ArrayLike | None,
    kv_indices: ArrayLike,
    softmax_scale: float,
    *,
    mesh: Mesh | None = None,
    context: str = "context",
    interleave: int | None = None,
    rows: Axis | None = None,
    heads: Axis | None = None,
    row_lengths: ArrayLike | None = None,
    attn_sink: ArrayLike | None = None,
    return_lse: bool = False,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Context parallel: each device attends the records it holds, and the results are merged.

    The devices of the context axis each attend all rows over their own records, exchange lse (one
    float32 a row and head and device) and sum their weighted float32 outs. The cache never moves.

    Args:
      q: [n, H, 576] bfloat16 or the pair, the same on every device of the context axis.
      kv_buffer: [..., 656], sharded over its first axis. Shard i holds the records of the slots
        that i owns, see :func:`localise_slots`.
      kv_indptr: None, or [n + 1] on every device.
      kv_indices: [n, w] without kv_indptr, else [nnz]; slots of the whole cache.
      softmax_scale: as in the op, static.
      mesh: the mesh; default the one set by ``jax.set_mesh``.
      context: mesh axis of the cache's records.
      interleave: which device owns a slot, see :func:`localise_slots`.
      rows: mesh axis of the rows, if they are sharded too (all of them read one cache).
      heads: mesh axis of the heads, if they are sharded too.
      row_lengths: [n] with padded rows.
      attn_sink: [H]; applied once, after the merge.
      return_lse: static; also return the lse.
      options: the op's other options.

    Returns:
      out [n, H, 512] bfloat16, and with return_lse lse [n, H] float32, the same on every device of
      the context axis.

    Raises:
      ValueError, TypeError: as the op; and where a mesh axis does not divide its array axis.
    """
    specs = _Specs(rows, heads, context)

    def attend(operands: _Operands) -> Any:
        out, lse = attend_context_shard(
            operands.q,
            operands.kv_buffer,
            _own_indptr(operands.kv_indptr, rows),
            operands.kv_indices,
            softmax_scale,
            axis_name=context,
            interleave=interleave,
            row_lengths=operands.row_lengths,
            attn_sink=operands.attn_sink,
            **options,
        )
        return (out, lse) if return_lse else out

    operands = _Operands(q, kv_buffer, kv_indptr, kv_indices, row_lengths, attn_sink)
    return _on_mesh(attend, operands, specs, mesh, return_lse)


class _Operands(NamedTuple):
    q: Any
    kv_buffer: Any
    kv_indptr: Any
    kv_indices: Any
    row_lengths: Any
    attn_sink: Any


class _Specs(NamedTuple):
    """The mesh axes of rows, of heads, and of the cache's first axis."""

    rows: Axis | None
    heads: Axis | None
    cache: Axis | None

    def operands(self, operands: _Operands) -> _Operands:
        """The operands' partition specs; none for an operand that is not there."""
        query = PartitionSpec(self.rows, self.heads)
        padded = operands.kv_indptr is None
        specs = _Operands(
            q=(query, query) if isinstance(operands.q, tuple | list) else query,
            kv_buffer=PartitionSpec(self.cache),
            kv_indptr=PartitionSpec(),
            kv_indices=PartitionSpec(self.rows) if padded else PartitionSpec(),
            row_lengths=PartitionSpec(self.rows),
            attn_sink=PartitionSpec(self.heads),
        )
        present = (
            spec if value is not None else None for value, spec in zip(operands, specs, strict=True)
        )
        return _Operands(*present)


def _on_mesh(
    attend: Callable[[_Operands], Any],
    operands: _Operands,
    specs: _Specs,
    mesh: Mesh | None,
    return_lse: bool,
) -> Any:
    operands = _checked(operands)
    result = PartitionSpec(specs.rows, specs.heads)
    mapped = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(specs.operands(operands),),
        out_specs=(result, result) if return_lse else result,
        check_vma=False,
    )
    return mapped(operands)


def _checked(operands: _Operands) -> _Operands:
    """The operands with integer arrays as int32, and an indptr that fits the rows of q.

    The op in the shard_map sees one device's part of them, whose indptr fits by construction.
    """
    q = tuple(operands.q) if isinstance(operands.q, list) else operands.q
    integers = {
        name: as_int32(name, value)
        for name in ("kv_indices", "row_lengths")
        if (value := getattr(operands, name)) is not None
    }
    if operands.kv_indptr is not None:
        num_rows = np.shape(q[0] if isinstance(q, tuple) else q)[0]
        integers["kv_indptr"] = as_indptr(operands.kv_indptr, num_rows)
    return operands._replace(q=q, **integers)


def _own_indptr(kv_indptr: Any, rows: Axis | None) -> Any:
    """This device's part of an indptr that every device has: its rows' begins and the last end."""
    if kv_indptr is None or rows is None:
        return kv_indptr
    own = (kv_indptr.shape[0] - 1) // lax.axis_size(rows)
    return lax.dynamic_slice_in_dim(kv_indptr, lax.axis_index(rows) * own, own + 1)
