"""The JAX primitive of the op, and the transformations around it.

A call passes through three layers, outermost first:

* ``custom_jvp`` answers differentiation with an error that says what to do;
* ``custom_vmap`` adds one leading batch axis to every operand, of the mapped size or 1, so that any
  subset of operands can be mapped, any number of times, and no cache is ever broadcast, gathered or
  reshaped across devices;
* ``custom_partitioning`` keeps the op local on a mesh of several devices: rows, heads and batch
  axes may be sharded. JAX itself drops this layer where there is nothing to partition: on a single
  device and inside ``shard_map``. Such programs export and hit the persistent compilation cache
  like any other.

Then the primitive is lowered for one device's share: the batch axes are folded (lowering.py), and
either the reference or the kernel runs.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import ShapedArray
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_sparse_mla import platform
from jax_sparse_mla.kernel import shim
from jax_sparse_mla.kernel.contract import LATENT_DIM
from jax_sparse_mla.kernel.specialisation import ScaleFormat
from jax_sparse_mla.lowering import run_kernel, run_reference


@dataclasses.dataclass(frozen=True)
class Params:
    """What is static in a call; also the primitive's parameters."""

    softmax_scale: float
    scale_format: ScaleFormat
    num_splits: int | None
    has_invalid: bool
    partial: bool
    implementation: str | None


def sparse_mla(
    q_latent: Array,
    q_rope: Array,
    kv: Array,
    indices: Array,
    row_begin: Array,
    row_end: Array,
    *,
    params: Params,
) -> tuple[Array, Array]:
    """Call the primitive; operands are taken as right (attention.py checks them).

    Args:
      q_latent: [n, H, 512 or more] bfloat16, of which the leading 512 count.
      q_rope: [n, H, 64 or more] bfloat16, of which the trailing 64 count; a whole q is passed as
        both.
      kv: [rows, 656] of one-byte dtype, or [rows, 576] bfloat16 for the reference.
      indices: [nnz] int32, or [n, w] int32 of rows with a stream of their own each.
      row_begin: [n] int32, positions in the row's stream, clamped to it.
      row_end: [n] int32, likewise; a row with begin >= end is empty.
      params: the static rest.

    Returns:
      out [n, H, 512] bfloat16, or float32 if ``params.partial``; lse [n, H] float32, natural log.
    """
    operands = _varying_alike(q_latent, q_rope, kv, indices, row_begin, row_end)
    return _forward_only(params, *operands)


def _varying_alike(*operands: Array) -> list[Array]:
    """Inside ``shard_map``, make all operands vary over the axes that any of them varies over."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    everywhere = frozenset[str]().union(*varying)
    return [
        jax.lax.pcast(x, tuple(sorted(everywhere - own)), to="varying")
        for x, own in zip(operands, varying, strict=True)
    ]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forward_only(params: Params, *operands: Array) -> tuple[Array, Array]:
    return _mappable(params)(*operands)


@_forward_only.defjvp
def _forward_only_jvp(params: Params, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "sparse_mla_fwd is forward-only: it has no derivative. Stop the gradient of what goes in "
        "(jax.lax.stop_gradient), or differentiate a dense attention instead."
    )


@functools.lru_cache(maxsize=256)
def _mappable(params: Params) -> Any:
    """The op with its vmap rule; all operands have the same number of leading batch axes."""

    @custom_vmap
    def call(
        q_latent: Array, q_rope: Array, kv: Array, indices: Array, row_begin: Array, row_end: Array
    ) -> tuple[Array, Array]:
        return _partitioned(q_latent, q_rope, kv, indices, row_begin, row_end, params)

    @call.def_vmap
    def rule(axis_size: int, in_batched: list[bool], *operands: Array) -> Any:
        mapped = [x if b else x[None] for x, b in zip(operands, in_batched, strict=True)]
        return _mappable(params)(*mapped), (True, True)

    return call


# -- partitioning


@functools.partial(custom_partitioning, static_argnums=(6,))
def _partitioned(
    q_latent: Array,
    q_rope: Array,
    kv: Array,
    indices: Array,
    row_begin: Array,
    row_end: Array,
    params: Params,
) -> tuple[Array, Array]:
    return _bind(params, q_latent, q_rope, kv, indices, row_begin, row_end)


def _partition(params: Params, mesh: Any, operands: Any, results: Any) -> Any:
    """Shard the operands as the results are, by batch axes, rows and heads, each device its own.

    What XLA proposes is not taken as it stands, for it may differ from one operand to the next.
    """
    run = functools.partial(_bind_local, params, mesh)
    proposed = [x.sharding for x in (*results, *operands)]
    if not all(isinstance(sharding, NamedSharding) for sharding in proposed):
        _check_alike(operands, results)
        return mesh, run, tuple(proposed[:2]), tuple(proposed[2:])

    axes = len(results[0].shape) - 3
    spec = [*results[0].sharding.spec, *[None] * 3]
    batch, n, h = spec[:axes], spec[axes], spec[axes + 1]
    padded = len(operands[3].shape) == axes + 2
    inner = ((n, h), (n, h), (), (n,) if padded else (), (n,), (n,))

    def sharding(x: Any, rest: tuple[Any, ...]) -> NamedSharding:
        leading = [s if size > 1 else None for s, size in zip(batch, x.shape, strict=False)]
        return NamedSharding(mesh, PartitionSpec(*leading, *rest))

    out = NamedSharding(mesh, PartitionSpec(*batch, n, h))
    return mesh, run, (out, out), tuple(map(sharding, operands, inner))


def _check_alike(operands: Any, results: Any) -> None:
    """Where JAX has no names for the shardings, see at least that the shards fit together."""
    shards = [x.sharding.shard_shape(x.shape) for x in (*results, *operands)]
    out, lse, q_latent, q_rope, kv, indices, row_begin, row_end = shards
    axes = len(out) - 3
    padded = len(indices) == axes + 2
    rows = [lse, q_latent, q_rope, row_begin, row_end, *([indices] if padded else [])]
    fits = (
        all(shard[axes] == out[axes] for shard in rows)
        and all(shard[axes + 1] == out[axes + 1] for shard in (lse, q_latent, q_rope))
        and all(a == 1 or a == b for x in shards for a, b in zip(x[:axes], out, strict=False))
        and kv[axes:] == operands[2].shape[axes:]
        and indices[-1] == operands[3].shape[-1]
    )
    if not fits:
        raise ValueError(
            "sparse_mla_fwd: these operands' shards do not belong together; call it where all mesh "
            "axes are automatic or all are manual (shard_map over all of them)"
        )


def _bind_local(params: Params, mesh: Any, *operands: Array) -> tuple[Array, Array]:
    """The primitive on one device's shards: to it, every mesh axis is manual."""
    manual = (AxisType.Manual,) * len(mesh.axis_names)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update(axis_types=manual)):
        return _bind(params, *operands)


def _sharding_rule(params: Params, mesh: Any, operands: Any, results: Any) -> Any:
    """Rows n, heads h and batch axes b0, b1 ... may be sharded, everything else may not.

    An operand that is the same for the whole of a batch axis has size 1 there, which gets a name
    of its own: it can't be sharded like the others' axis.
    """
    shapes = [tuple(x.shape) for x in operands]
    axes = len(shapes[0]) - 3
    batch = [max(shape[i] for shape in shapes) for i in range(axes)]
    padded = len(shapes[3]) == axes + 2
    inner = ["n h latent", "n h rope", "row byte", "n entry" if padded else "entry", "n", "n"]
    terms = []
    for number, (shape, rest) in enumerate(zip(shapes, inner, strict=True)):
        leading = [f"b{i}" if shape[i] == batch[i] else f"one{number}_{i}" for i in range(axes)]
        terms.append(" ".join([*leading, rest]))
    sharded = [*(f"b{i}" for i in range(axes)), "n", "h"]
    outs = [" ".join([*sharded, "value"]), " ".join(sharded)]
    names = dict.fromkeys(" ".join([*terms, *outs]).split())  # Shardy wants them in this order.
    whole = tuple(name for name in names if name not in sharded)
    rule = f"{', '.join(terms)} -> {', '.join(outs)}"
    return rule, {"need_replication_factors": whole}


_partitioned.def_partition(partition=_partition, sharding_rule=_sharding_rule)


# -- the primitive

sparse_mla_p = Primitive("sparse_mla")
sparse_mla_p.multiple_results = True


def _bind(params: Params, *operands: Array) -> tuple[Array, Array]:
    out, lse = sparse_mla_p.bind(*operands, **dataclasses.asdict(params))
    return out, lse


@sparse_mla_p.def_impl
def _impl(*operands: Array, **params: Any) -> Any:
    with jax.disable_jit(False):
        return _compiled(Params(**params), *operands)


_compiled = jax.jit(_bind, static_argnums=0)


@sparse_mla_p.def_abstract_eval
def _abstract_eval(*operands: ShapedArray, partial: bool, **params: Any) -> Any:
    q = operands[0]
    axes = q.ndim - 3
    batch = jnp.broadcast_shapes(*(x.shape[:axes] for x in operands))
    spec = _result_spec(operands, axes)
    shape = (*batch, *q.shape[axes : axes + 2])
    mesh = q.sharding.mesh
    out = q.update(
        shape=(*shape, LATENT_DIM),
        dtype=jnp.dtype(jnp.float32 if partial else jnp.bfloat16),
        weak_type=False,
        sharding=NamedSharding(mesh, PartitionSpec(*spec, None)),
    )
    lse = q.update(
        shape=shape,
        dtype=jnp.dtype(jnp.float32),
        weak_type=False,
        sharding=NamedSharding(mesh, PartitionSpec(*spec)),
    )
    return out, lse


def _result_spec(operands: tuple[ShapedArray, ...], axes: int) -> list[Any]:
    """How batch axes, rows and heads of the results are sharded on an explicit mesh.

    As the first operand's that shards the axis; a mesh axis serves once.
    """
    q_latent, q_rope, _, indices, row_begin, row_end = operands
    by_row = [q_latent, q_rope, row_begin, row_end]
    by_row += [indices] if indices.ndim == axes + 2 else []
    sources: list[tuple[tuple[ShapedArray, ...], int]] = [(operands, i) for i in range(axes)]
    sources += [((q_latent, q_rope), axes + 1), (tuple(by_row), axes)]
    used: set[str] = set()
    spec = []
    for candidates, axis in sources:
        names = [x.sharding.spec[axis] for x in candidates]
        found = next((s for s in names if s is not None and used.isdisjoint(_names(s))), None)
        used.update(_names(found))
        spec.append(found)
    *batch, h, n = spec
    return [*batch, n, h]


def _names(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _lower(run: Any, ctx: Any, *operands: Any, **params: Any) -> Any:
    return mlir.lower_fun(functools.partial(run, **params), multiple_results=True)(ctx, *operands)


def _lower_rule(lowered_for: str, ctx: Any, *operands: Any, **params: Any) -> Any:
    implementation = params["implementation"]
    if implementation is None:
        records = ctx.avals_in[2].dtype != jnp.bfloat16
        kernel = lowered_for == "rocm" and records and platform.use_kernel_on_rocm()
        implementation = "kernel" if kernel else "reference"
    if implementation == "kernel":
        _check_kernel_runs_on(lowered_for)
        return _lower(run_kernel, ctx, *operands, **params)
    reference = functools.partial(run_reference, on_gpu=lowered_for in ("cuda", "rocm"))
    return _lower(reference, ctx, *operands, **params)


def _check_kernel_runs_on(lowered_for: str) -> None:
    if lowered_for == "rocm" or (lowered_for == "default" and shim.host_platform_enabled()):
        return
    raise ValueError(
        'implementation="kernel" needs an AMD gfx950 GPU, but the op is lowered for another'
        " platform; leave implementation None to run the reference there. On the CPU the kernel"
        f" runs where {shim.HIP_LIBRARY_VARIABLE} names a HIP library, a simulator's"
    )


mlir.register_lowering(sparse_mla_p, functools.partial(_lower_rule, "default"))
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(
        sparse_mla_p, functools.partial(_lower_rule, _platform), platform=_platform
    )
