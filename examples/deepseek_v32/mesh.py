"""The model on a mesh of devices: data-parallel requests, tensor-parallel heads and experts.

Over ``"tensor"`` each device has a share of the heads, of the MLPs' widths, of the routed experts
(whole ones) and of the vocabulary; partial sums meet in one psum behind attention and one behind
the MLP. The cache and the indexer are the same on all of them, so all select the same tokens. Over
``"data"`` each group of devices has requests, blocks and a cache of its own.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from examples.deepseek_v32.cache import Cache
from examples.deepseek_v32.config import Config
from examples.deepseek_v32.params import Leaf, Params, param_leaves

DATA, TENSOR = "data", "tensor"

_TENSOR_AXIS = {
    "q_b": 0,
    "w_uk": 0,
    "w_uv": 0,
    "o": 1,
    "gate": 0,
    "up": 0,
    "down": 1,
    "lm_head": 0,
}
"""The axis of a parameter that is split over the tensor axis; parameters not named are whole."""


def make_mesh(data: int, tensor: int, config: Config) -> Mesh:
    """A mesh of data x tensor devices.

    Raises:
      ValueError: there are too few devices, or tensor does not divide what is split over it.
    """
    available = len(jax.devices())
    if data < 1 or tensor < 1 or data * tensor > available:
        raise ValueError(f"mesh {data},{tensor} needs {data * tensor} devices, not {available}")
    for name in (
        "num_attention_heads",
        "n_routed_experts",
        "intermediate_size",
        "moe_intermediate_size",
        "vocab_size",
    ):
        if getattr(config, name) % tensor:
            raise ValueError(f"mesh: {tensor} does not divide {name} {getattr(config, name)}")
    devices = jax.devices()[: data * tensor]
    automatic = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, tensor), (DATA, TENSOR), axis_types=automatic, devices=devices)


def param_specs(config: Config, *, stacked: bool) -> Params:
    """A `PartitionSpec` for each parameter."""
    leaves = param_leaves(config, stacked=stacked)

    def spec(path: tuple[Any, ...], leaf: Leaf) -> PartitionSpec:
        names = [entry.name for entry in path if hasattr(entry, "name")]
        if names[-1] not in _TENSOR_AXIS:
            return PartitionSpec()
        leading = int(stacked and names[0] in ("dense", "sparse"))
        # Experts are split whole, by their own axis.
        axis = leading if "experts" in names else leading + _TENSOR_AXIS[names[-1]]
        return PartitionSpec(*[None] * axis, TENSOR)

    return jax.tree_util.tree_map_with_path(
        spec, leaves, is_leaf=lambda node: isinstance(node, Leaf)
    )


def param_shardings(config: Config, mesh: Mesh, *, stacked: bool) -> Params:
    """A `NamedSharding` for each parameter, for `load_params`."""
    specs = param_specs(config, stacked=stacked)
    is_spec = functools.partial(_is, PartitionSpec)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def _is(kind: type, node: Any) -> bool:
    return isinstance(node, kind)


def on_mesh(step: Any, mesh: Mesh, specs: Params) -> Any:
    """A step for the whole mesh from the step of one data group.

    Args:
      step: ``(params, cache, rows, output_rows, output_requests) -> (tokens, logits, cache)`` with
        ``tensor_axis`` set in its options.
      mesh: from `make_mesh`.
      specs: from `param_specs`.

    Returns:
      A function of the same arguments, all but the parameters with a leading axis of data groups.
    """

    def one_group(params: Params, *grouped: Any) -> Any:
        cache, *rest = jax.tree.map(lambda array: array.reshape(array.shape[1:]), grouped)
        out = step(params, cache, *rest)
        return jax.tree.map(lambda array: array[None], out)

    split = PartitionSpec(DATA)
    return jax.shard_map(
        one_group,
        mesh=mesh,
        in_specs=(specs, split, split, split, split),
        out_specs=(split, split, split),
        # The gathered logits are the same on all tensor ranks, which JAX cannot tell.
        check_vma=False,
    )


def empty_cache(shapes: Cache, mesh: Mesh) -> Cache:
    """A cache of zeros for each data group."""
    groups = mesh.shape[DATA]
    sharding = NamedSharding(mesh, PartitionSpec(DATA))

    def zeros(shape: Any) -> jax.Array:
        make = functools.partial(jax.numpy.zeros, (groups, *shape.shape), shape.dtype)
        return jax.jit(make, out_shardings=sharding)()

    return jax.tree.map(zeros, shapes)


def to_host(array: jax.Array) -> np.ndarray:
    """The whole of an array, also where its shards lie on several processes."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
