"""How far each pointer of a launch reaches: HIP passes bare addresses, the simulator checks bounds.

The project's kernel is recognised by its argument layout, and the extents follow from its launch
contract. Any other kernel's pointers must lie in memory that hipMalloc gave or that was registered.
"""

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gfx950_sim.elf import KernelArgument
from jax_sparse_mla.kernel import contract


class Region(NamedTuple):
    """Bytes that a launch may touch."""

    name: str
    address: int
    size: int
    """Bytes."""
    writable: bool


_FORMATS = {"pointer": "Q", "i32": "i", "f32": "f"}


def is_pointer(slot: KernelArgument) -> bool:
    """Whether an argument is an address of global memory."""
    return slot.value_kind == "global_buffer"


def is_contract_layout(slots: Sequence[KernelArgument]) -> bool:
    """Whether a kernel takes exactly the arguments of the project's launch contract."""
    pointers = [argument.kind == "pointer" for argument in contract.ARGUMENTS]
    sizes = [8 if pointer else 4 for pointer in pointers]
    return [s.size for s in slots] == sizes and [is_pointer(s) for s in slots] == pointers


def contract_regions(
    symbol: str, slots: Sequence[KernelArgument], arguments: bytes
) -> list[Region]:
    """The regions of a launch of the project's kernel.

    Args:
      symbol: the kernel's name, which says whether ``out`` is partial (float32).
      slots: the arguments in order.
      arguments: the kernel argument segment.

    Returns:
      One region for each array that is not empty; arrays that overlap (q passed twice) are one.
    """
    values = {
        argument.name: struct.unpack_from(_FORMATS[argument.kind], arguments, slot.offset)[0]
        for argument, slot in zip(contract.ARGUMENTS, slots, strict=True)
    }
    rows, heads = values["num_rows"], values["num_heads"]
    queries = -(-rows // max(values["num_splits"], 1))

    def q_bytes(part: str, width: int) -> int:
        if queries == 0 or heads == 0:
            return 0
        row_stride, head_stride = values[f"{part}_row_stride"], values[f"{part}_head_stride"]
        return 2 * ((queries - 1) * row_stride + (heads - 1) * head_stride + width)

    out_itemsize = 4 if "partial" in symbol else 2
    sizes = {
        "q_latent": q_bytes("q_latent", contract.LATENT_DIM),
        "q_rope": q_bytes("q_rope", contract.ROPE_DIM),
        "kv": values["kv_rows"] * contract.RECORD_BYTES,
        "indices": 4 * values["num_indices"],
        "row_begin": 4 * rows,
        "row_end": 4 * rows,
        "out": rows * heads * contract.LATENT_DIM * out_itemsize,
        "lse": 4 * rows * heads,
    }
    return _merge(
        [
            Region(name, values[name], size, writable=name in ("out", "lse"))
            for name, size in sizes.items()
            if size > 0
        ]
    )


def registered_regions(
    symbol: str,
    slots: Sequence[KernelArgument],
    arguments: bytes,
    find: Callable[[int], tuple[int, int] | None],
) -> list[Region]:
    """The regions of a launch of any other kernel.

    Args:
      symbol: the kernel's name, for messages.
      slots: the arguments in order.
      arguments: the kernel argument segment.
      find: from an address to the start and size in bytes of the allocation around it.

    Returns:
      One writable region for each allocation that a pointer argument lies in; null pointers have
      none.

    Raises:
      ValueError: a pointer lies in no known allocation.
    """
    regions = []
    for number, slot in enumerate(slots):
        if not is_pointer(slot):
            continue
        (address,) = struct.unpack_from("Q", arguments, slot.offset)
        if address == 0:
            continue
        found = find(address)
        if found is None:
            raise ValueError(
                f"argument {number} of {symbol} is {address:#x}, which lies in no allocation:"
                " use hipMalloc or simhip_register_memory"
            )
        regions.append(Region(f"argument {number}", *found, writable=True))
    return _merge(regions)


def _merge(regions: list[Region]) -> list[Region]:
    """Joins regions that overlap, so that each byte belongs to one allocation."""
    merged: list[Region] = []
    for region in sorted(regions, key=lambda r: r.address):
        last = merged[-1] if merged else None
        if last is None or region.address >= last.address + last.size:
            merged.append(region)
            continue
        end = max(last.address + last.size, region.address + region.size)
        name = last.name if region.name in last.name else f"{last.name} and {region.name}"
        writable = last.writable or region.writable
        merged[-1] = Region(name, last.address, end - last.address, writable)
    return merged
