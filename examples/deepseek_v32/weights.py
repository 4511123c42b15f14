"""Reading a Hugging Face checkpoint into parameters: bfloat16, float32, or DeepSeek's fp8 blocks.

Everything is checked against the configuration before any data is read. Tensors are then streamed
from memory-mapped files into the parameter arrays, large ones in pieces: no tensor is in memory
twice.
"""

import functools
import json
import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from tqdm import tqdm

from examples.deepseek_v32.config import FP8_BLOCK, Config
from examples.deepseek_v32.params import Leaf, Params, Tensor, checkpoint_tensors, param_leaves

SCALE_SUFFIX = "_scale_inv"
"""A weight W in fp8 has float32 factors W_scale_inv, one for each block of 128 x 128."""

PIECE_BYTES = 64 << 20
"""Larger tensors are read in runs of rows of about this size."""

_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}


class CheckpointError(ValueError):
    """A checkpoint that does not hold what its configuration says."""


class Checkpoint:
    """The tensors of a folder of safetensors files, memory-mapped.

    safetensors' own NumPy reader has no fp8; the format is a JSON header and raw bytes.
    """

    def __init__(self, folder: str | Path):
        """Read the headers.

        Args:
          folder: holds ``model.safetensors.index.json`` and its shards, or ``model.safetensors``.

        Raises:
          FileNotFoundError: it holds neither, or a shard is missing.
          CheckpointError: a header is damaged.
        """
        folder = Path(folder)
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif single.is_file():
            names = [single.name]
        else:
            raise FileNotFoundError(f"no {index.name} and no {single.name} in {folder}")
        self._tensors: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for name in names:
            self._read_header(folder / name)

    def _read_header(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"{path.name}, named by the index, is not in {path.parent}")
        size = path.stat().st_size
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length)) if length <= size else {}
        except (struct.error, ValueError) as error:
            raise CheckpointError(f"{path}: not a safetensors header ({error})") from None
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            dtype = _DTYPES.get(entry["dtype"])
            if 8 + length + end > size:
                raise CheckpointError(f"{path}: cut short, {name} ends behind the file's end")
            if dtype is not None and math.prod(entry["shape"]) * dtype.itemsize != end - begin:
                raise CheckpointError(f"{path}: size of {name} does not fit its shape")
            self._tensors[name] = (path, 8 + length + begin, entry)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._tensors[name][2]["shape"])

    def dtype(self, name: str) -> str:
        """Dtype of a tensor, as safetensors calls it."""
        return self._tensors[name][2]["dtype"]

    def read(self, name: str) -> np.ndarray:
        """A tensor, its bytes still in the file."""
        path, offset, entry = self._tensors[name]
        return np.memmap(path, _DTYPES[entry["dtype"]], "r", offset, tuple(entry["shape"]))


def check_checkpoint(checkpoint: Checkpoint, tensors: Iterable[Tensor]) -> None:
    """Compare a checkpoint with what the model needs, reading no data.

    Args:
      checkpoint: the headers.
      tensors: what is needed, from `checkpoint_tensors`.

    Raises:
      CheckpointError: tensors are missing, or have another shape or an unknown dtype; the first
        few are named.
    """
    faults = []
    for tensor in {t.name: t for t in tensors}.values():
        name = tensor.name
        if name not in checkpoint:
            faults.append(f"{name} is missing")
            continue
        shape, dtype = checkpoint.shape(name), checkpoint.dtype(name)
        if shape != tensor.checkpoint_shape:
            faults.append(f"{name} is {list(shape)}, not {list(tensor.checkpoint_shape)}")
        if dtype not in _DTYPES:
            faults.append(f"{name} is {dtype}, not one of {', '.join(_DTYPES)}")
        if dtype == "F8_E4M3":
            scale = name + SCALE_SUFFIX
            blocks = tuple(-(-size // FP8_BLOCK) for size in shape)
            if scale not in checkpoint:
                faults.append(f"{name} is fp8 and {scale} is missing")
            elif checkpoint.shape(scale) != blocks or checkpoint.dtype(scale) != "F32":
                faults.append(
                    f"{scale} is {checkpoint.dtype(scale)} {list(checkpoint.shape(scale))}, "
                    f"not F32 {list(blocks)}"
                )
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CheckpointError(
            "checkpoint does not fit config.json: " + "; ".join(faults[:5]) + more
        )


def load_params(
    folder: str | Path,
    config: Config,
    *,
    dtype: Any = jnp.bfloat16,
    stacked: bool = False,
    shardings: Params | None = None,
    progress: bool = False,
) -> Params:
    """Load a checkpoint's parameters.

    Args:
      folder: the checkpoint's.
      config: the model's.
      dtype: of the parameters; the router, its bias and the indexer's head weights stay float32.
      stacked: layers in arrays with a leading layer axis, for scanned layers.
      shardings: a tree like the parameters with a `jax.sharding.Sharding` in each place; default:
        the default device.
      progress: show a progress bar.

    Returns:
      The parameters.

    Raises:
      FileNotFoundError: a file is missing.
      CheckpointError: the checkpoint does not fit the configuration.
    """
    checkpoint = Checkpoint(folder)
    tensors = list(checkpoint_tensors(config))
    check_checkpoint(checkpoint, tensors)

    leaves = param_leaves(config, stacked=stacked)
    arrays, tree = jax.tree.flatten(leaves, is_leaf=lambda node: isinstance(node, Leaf))
    places = [None] * len(arrays) if shardings is None else jax.tree.leaves(shardings)
    # Where each array stands in the flat list: the leaves' own indices, looked up by path.
    numbers = jax.tree.unflatten(tree, range(len(arrays)))
    buffers: list[jax.Array | None] = [None] * len(arrays)

    for tensor in tqdm(tensors, "loading", unit="tensor", disable=not progress):
        number = _lookup(numbers, tensor, stacked)
        leaf, place = arrays[number], places[number]
        buffer = buffers[number]
        if buffer is None:
            leaf_dtype = jnp.dtype(jnp.float32 if leaf.float32 else dtype)
            buffer = _empty(leaf.shape, leaf_dtype, place)
        index = (tensor.layer,) * (stacked and tensor.group is not None)
        if tensor.expert is not None:
            index += (tensor.expert,)
        store = _store(len(leaf.shape), tensor.rows, tensor.is_transposed, place)
        for begin, data, scale in _pieces(checkpoint, tensor):
            starts = (*index, begin, *[0] * (len(tensor.shape) - 1))
            buffer = store(buffer, data, scale, np.array(starts, np.int32))
        buffers[number] = buffer
    return jax.tree.unflatten(tree, buffers)


def _pieces(
    checkpoint: Checkpoint, tensor: Tensor
) -> Iterator[tuple[int, np.ndarray, np.ndarray | None]]:
    """A tensor's data and fp8 factors by runs of rows, each with its first row."""
    data = checkpoint.read(tensor.name)
    scale = None
    if checkpoint.dtype(tensor.name) == "F8_E4M3":
        scale = checkpoint.read(tensor.name + SCALE_SUFFIX)
    if tensor.rows is not None:
        yield 0, data, scale
        return
    step = PIECE_BYTES * len(data) // max(data.nbytes, 1) // FP8_BLOCK * FP8_BLOCK
    step = max(step, FP8_BLOCK)
    for begin in range(0, len(data), step):
        blocks = slice(begin // FP8_BLOCK, -(-(begin + step) // FP8_BLOCK))
        yield begin, data[begin : begin + step], None if scale is None else scale[blocks]


def _lookup(tree: Any, tensor: Tensor, stacked: bool) -> Any:
    node = tree
    if tensor.group is not None:
        node = getattr(node, tensor.group)
        node = node if stacked else node[tensor.layer]
    for field in tensor.path:
        node = getattr(node, field)
    return node


def _empty(shape: tuple[int, ...], dtype: Any, place: Any) -> jax.Array:
    return jnp.zeros(shape, dtype, device=place)


@functools.lru_cache(maxsize=256)
def _store(ndim: int, rows: tuple[int, int, int] | None, is_transposed: bool, place: Any) -> Any:
    """A jitted function that converts a piece of a tensor into its place in a donated buffer."""

    def store(
        buffer: jax.Array, data: jax.Array, scale: jax.Array | None, starts: jax.Array
    ) -> jax.Array:
        if scale is not None:
            data = dequantise(data, scale)
        if rows is not None:
            heads, begin, end = rows
            data = data.reshape(heads, -1, data.shape[-1])[:, begin:end]
        if is_transposed:
            data = jnp.swapaxes(data, -1, -2)
        data = data.reshape((1,) * (ndim - data.ndim) + data.shape).astype(buffer.dtype)
        return lax.dynamic_update_slice(buffer, data, list(starts))

    return jax.jit(store, donate_argnums=0, out_shardings=place)


def dequantise(weight: jax.Array, scale_inv: jax.Array) -> jax.Array:
    """A weight from DeepSeek's fp8 blocks.

    Args:
      weight: ``[o, i]`` float8_e4m3fn.
      scale_inv: ``[ceil(o / 128), ceil(i / 128)]`` float32, each block's factor.

    Returns:
      ``[o, i]`` float32.
    """
    for axis, size in enumerate(weight.shape):
        repeated = jnp.repeat(scale_inv, FP8_BLOCK, axis=axis)
        scale_inv = lax.slice_in_dim(repeated, 0, size, axis=axis)
    return weight.astype(jnp.float32) * scale_inv
