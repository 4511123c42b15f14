"""Vector memory: global and buffer loads and stores, and loads that go to LDS (DMA).

Widths and extensions are in `INSTRUCTIONS`; addresses follow from the encoding, by the three
functions below.
Sources: CDNA4 ISA, "Flat, global and scratch" and "Buffer addressing"; ROCm/rocm-systems
emulation/rocjitsu (addr_calc_flat.h, addr_calc_buffer.h), whose range check per dword is said
there to follow gfx950 hardware.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .formats import Words
from .records import VmemAccess

Addresses = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

_LANE = np.arange(64, dtype=np.uint32)


def global_address(vaddr: Words, saddr: int | None, offset: int) -> Addresses:
    """Byte address of each lane of a global access, uint64 [64].

    Args:
        vaddr: uint32 [2, 64], a 64-bit address a lane, without `saddr`; uint32 [1, 64], an unsigned
            offset, with it.
        saddr: 64-bit base from a scalar register pair, or None ("off").
        offset: the instruction's signed 13-bit offset, in bytes.
    """
    address = vaddr[0].astype(np.uint64)
    if saddr is None:
        address |= vaddr[1].astype(np.uint64) << np.uint64(32)
    return address + np.uint64(((saddr or 0) + offset) & 0xFFFF_FFFF_FFFF_FFFF)


def buffer_address(
    resource: tuple[int, int, int, int],
    index: Words | None,
    voffset: Words | None,
    soffset: int,
    offset: int,
    size: int,
) -> tuple[Addresses, Mask]:
    """Byte address of each lane of a buffer access, uint64 [64], and which of its dwords are in
    range, bool [k, 64].

    The address is base + index * stride + voffset + offset + soffset; voffset + offset wraps at 32
    bits, the rest does not. With IDXEN and a stride, a lane is in range when index < num_records.
    Otherwise dword i is in range when voffset + offset + soffset + 4 * (i + 1) <= num_records (a
    byte or half: its own size). What is out of range loads as 0 and is not stored.

    Args:
        resource: the four dwords of the buffer descriptor: base 47:0, stride 61:48, num_records
            95:64, flags.
        index: uint32 [64] (IDXEN) or None.
        voffset: uint32 [64] (OFFEN) or None.
        soffset: the scalar offset in bytes.
        offset: the instruction's unsigned 12-bit offset in bytes.
        size: bytes a lane.

    Raises:
        NotImplementedError: a descriptor with swizzled or thread-indexed addressing.
    """
    if resource[1] >> 31 or (resource[3] >> 23) & 1:
        raise NotImplementedError(
            f"buffer descriptor {resource} with SWIZZLE_ENABLE or ADD_TID_ENABLE"
        )
    base = resource[0] | (resource[1] & 0xFFFF) << 32
    stride = (resource[1] >> 16) & 0x3FFF
    records = np.uint64(resource[2])
    lane_offset = np.full(64, offset, np.uint32) if voffset is None else voffset + np.uint32(offset)
    reach = lane_offset.astype(np.uint64) + np.uint64(soffset)
    address = reach + np.uint64(base)
    element = min(size, 4)
    if index is not None and stride:
        address = address + index.astype(np.uint64) * np.uint64(stride)
        return address, np.broadcast_to(index < records, (max(size // 4, 1), 64))
    ends = np.arange(element, size + 1, element, dtype=np.uint64)
    return address, reach + ends[:, np.newaxis] <= records


def dma_lds_address(m0: int, offset: int, size: int, buffer: bool) -> Words:
    """Byte offset in the workgroup's LDS to which each lane's DMA load goes, uint32 [64]:
    consecutive in lane order.

    Args:
        m0: register M0: bits 17:2 count dwords for global_load_lds, bits 17:0 bytes for buffer_load
            ... lds.
        offset: the instruction's offset in bytes (it counts on the global side too).
        size: bytes a lane.
        buffer: whether the load is a buffer load.
    """
    start = (m0 & (0x3FFFF if buffer else 0x3FFFC)) + offset
    return np.uint32(start & 0xFFFF_FFFF) + np.uint32(size) * _LANE


# What the destination receives -------------------------------------------------------------------

_16 = np.uint32(16)
_LOW = np.uint32(0xFFFF)


def sign_extend_byte(rows: Words, lanes: Mask) -> Words:
    return rows.astype(np.int8).astype(np.int32).view(np.uint32)


def sign_extend_half(rows: Words, lanes: Mask) -> Words:
    return rows.astype(np.int16).astype(np.int32).view(np.uint32)


def into_low_half(
    extend: Callable[[Words, Mask], Words] | None,
) -> Callable[[Words, Mask, Words], Words]:
    """The d16 rule: bits 15:0 of the destination are replaced, the others kept."""

    def result(rows: Words, lanes: Mask, old: Words) -> Words:
        value = extend(rows, lanes) if extend else rows
        return (old & ~_LOW) | (value & _LOW)

    return result


def into_high_half(
    extend: Callable[[Words, Mask], Words] | None,
) -> Callable[[Words, Mask, Words], Words]:
    """The d16_hi rule: bits 31:16 of the destination are replaced, the others kept."""

    def result(rows: Words, lanes: Mask, old: Words) -> Words:
        value = extend(rows, lanes) if extend else rows
        return (old & _LOW) | (value << _16)

    return result


_DWORDS = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


def _accesses(family: str) -> dict[str, VmemAccess]:
    table = {
        "load_ubyte": VmemAccess("load", 1),
        "load_sbyte": VmemAccess("load", 1, sign_extend_byte),
        "load_ushort": VmemAccess("load", 2),
        "load_sshort": VmemAccess("load", 2, sign_extend_half),
        "load_ubyte_d16": VmemAccess("load", 1, into_low_half(None), reads_dst=True),
        "load_ubyte_d16_hi": VmemAccess("load", 1, into_high_half(None), reads_dst=True),
        "load_sbyte_d16": VmemAccess("load", 1, into_low_half(sign_extend_byte), reads_dst=True),
        "load_sbyte_d16_hi": VmemAccess(
            "load", 1, into_high_half(sign_extend_byte), reads_dst=True
        ),
        "load_short_d16": VmemAccess("load", 2, into_low_half(None), reads_dst=True),
        "load_short_d16_hi": VmemAccess("load", 2, into_high_half(None), reads_dst=True),
        "store_byte": VmemAccess("store", 1),
        "store_byte_d16_hi": VmemAccess("store", 1, store_shift=16),
        "store_short": VmemAccess("store", 2),
        "store_short_d16_hi": VmemAccess("store", 2, store_shift=16),
    }
    return {f"{family}_{name}": access for name, access in table.items()} | _dwords(family)


def _dwords(family: str) -> dict[str, VmemAccess]:
    return {
        f"{family}_{kind}_{width}": VmemAccess(kind, size)
        for width, size in _DWORDS.items()
        for kind in ("load", "store")
    }


DMA = {
    "dword": VmemAccess("dma", 4),
    "dwordx3": VmemAccess("dma", 12),
    "dwordx4": VmemAccess("dma", 16),
}
"""Loads to LDS by width: global_load_lds_<width>, and buffer_load_<width> with the `lds` modifier.
"""

INSTRUCTIONS: dict[str, VmemAccess] = {
    **_accesses("global"),
    **_accesses("buffer"),
    **_dwords("scratch"),
    **{f"global_load_lds_{width}": access for width, access in DMA.items()},
}
