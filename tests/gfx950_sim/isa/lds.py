"""LDS: reads, writes, transposed reads, and the exchanges that use the LDS crossbar without its
memory.

Addresses are byte offsets in the workgroup's LDS: vaddr + offset, where the plain forms have one
16-bit offset (offset0 is its low byte) and the two-address forms have two 8-bit offsets in units of
the element, or of 64 elements (st64).

Sources: the CDNA4 ISA's pseudocode; for transposed reads CDNA4 ISA 11.4, ROCm/rocm-systems
emulation/rocjitsu ds_transpose.h (B64_TR_B8, B64_TR_B16) and LLVM's ds_read_tr intrinsics; for
ds_swizzle LLVM's SIDefines.h, namespace Swizzle.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .formats import Words
from .records import LdsAccess
from .vmem import into_high_half, into_low_half, sign_extend_byte, sign_extend_half

Mask = npt.NDArray[np.bool_]
AddressRule = Callable[[Words, int, int], Words]

_LANE = np.arange(64)
_ROW = _LANE & ~15
_T = _LANE % 16


# Addresses ---------------------------------------------------------------------------------------


def one_address(vaddr: Words, offset0: int, offset1: int) -> Words:
    return (vaddr + np.uint32(offset0 | offset1 << 8))[np.newaxis]


def two_addresses(unit: int) -> AddressRule:
    """Two accesses a lane, their offsets in multiples of `unit` bytes."""

    def addresses(vaddr: Words, offset0: int, offset1: int) -> Words:
        return np.stack([vaddr + np.uint32(offset0 * unit), vaddr + np.uint32(offset1 * unit)])

    return addresses


# Transposed reads --------------------------------------------------------------------------------


def _transpose(
    dtype: npt.DTypeLike, source_lane: npt.NDArray[np.int64], item: npt.NDArray[np.int64]
) -> Callable[[Words, Mask], Words]:
    """Result item j of lane l is item `item[l]` of what lane `source_lane[l, j]` fetched."""
    count = source_lane.shape[1]
    flat = source_lane * count + item[:, np.newaxis]

    def result(rows: Words, lanes: Mask) -> Words:
        fetched = np.ascontiguousarray(rows.T).view(dtype).ravel()
        return fetched.take(flat).view(np.uint32).T

    return result


transpose_b8 = _transpose(
    np.uint8, _ROW[:, np.newaxis] + 2 * np.arange(8) + (_T // 8)[:, np.newaxis], _T % 8
)
"""ds_read_b64_tr_b8: in each row of 16 lanes, byte j of lane t is byte t % 8 of what lane 2 j + t
// 8 fetched."""

transpose_b16 = _transpose(
    np.uint16, _ROW[:, np.newaxis] + 4 * np.arange(4) + (_T // 4)[:, np.newaxis], _T % 4
)
"""ds_read_b64_tr_b16: in each row of 16 lanes, half j of lane t is half t % 4 of what lane 4 j + t
// 4 fetched."""


# Exchanges ---------------------------------------------------------------------------------------


def bpermute(vaddr: Words, data: Words, lanes: Mask, offset: int) -> Words:
    """ds_bpermute_b32: each lane reads the data of lane ((vaddr + offset) / 4) % 64; 0 when that
    lane is off."""
    source = ((vaddr + np.uint32(offset)) >> np.uint32(2)) & np.uint32(63)
    return np.where(lanes, data, np.uint32(0)).take(source)


def permute(vaddr: Words, data: Words, lanes: Mask, offset: int) -> Words:
    """ds_permute_b32: each active lane sends to lane ((vaddr + offset) / 4) % 64; the highest
    sender wins, 0 if none."""
    target = ((vaddr + np.uint32(offset)) >> np.uint32(2)) & np.uint32(63)
    received = np.zeros(64, np.uint32)
    received[np.broadcast_to(target, 64)[lanes]] = np.broadcast_to(data, 64)[lanes]
    return received


def swizzle_source(offset: int) -> npt.NDArray[np.int64]:
    """Source lane of each lane for ds_swizzle_b32.

    offset 0x0000-0x7fff: within 32 lanes, ((l & offset[4:0]) | offset[9:5]) ^ offset[14:10].
    0x8000-0x80ff: within 4 lanes, lane i reads lane offset[2 i + 1 : 2 i].

    Raises:
        NotImplementedError: the rotate (0xc000) and FFT (0xe000) modes.
    """
    if offset < 0x8000:
        inside = ((_LANE & offset & 31) | (offset >> 5 & 31)) ^ (offset >> 10 & 31)
        return (_LANE & 32) | (inside & 31)
    if offset & 0xFF00 == 0x8000:
        return (_LANE & ~3) | ((offset >> 2 * (_LANE & 3)) & 3)
    raise NotImplementedError(f"ds_swizzle_b32 mode of offset {offset:#06x}")


def swizzle(vaddr: Words, data: Words, lanes: Mask, offset: int) -> Words:
    """ds_swizzle_b32: a lane that is off supplies 0."""
    return np.where(lanes, vaddr, np.uint32(0)).take(swizzle_source(offset))


# The table ---------------------------------------------------------------------------------------

_BYTE_LOADS = {
    "u8": (1, None),
    "i8": (1, sign_extend_byte),
    "u16": (2, None),
    "i16": (2, sign_extend_half),
}
_WIDTHS = {"b32": 4, "b64": 8, "b96": 12, "b128": 16}


def _table() -> dict[str, LdsAccess]:
    table = {
        "ds_write_b8": LdsAccess("store", 1, one_address),
        "ds_write_b16": LdsAccess("store", 2, one_address),
        "ds_write_b8_d16_hi": LdsAccess("store", 1, one_address, store_shift=16),
        "ds_write_b16_d16_hi": LdsAccess("store", 2, one_address, store_shift=16),
        "ds_read_b64_tr_b8": LdsAccess("load", 8, one_address, transpose_b8, 8, True),
        "ds_read_b64_tr_b16": LdsAccess("load", 8, one_address, transpose_b16, 8, True),
        "ds_bpermute_b32": LdsAccess("exchange", result=bpermute),
        "ds_permute_b32": LdsAccess("exchange", result=permute),
        "ds_swizzle_b32": LdsAccess("exchange", result=swizzle),
    }
    for kind, (size, extend) in _BYTE_LOADS.items():
        table[f"ds_read_{kind}"] = LdsAccess("load", size, one_address, extend)
    for kind, (size, extend) in _BYTE_LOADS.items():
        if kind == "i16":
            continue  # a half into a half needs no extension: there is only ds_read_u16_d16
        for suffix, rule in (("d16", into_low_half), ("d16_hi", into_high_half)):
            table[f"ds_read_{kind}_{suffix}"] = LdsAccess(
                "load", size, one_address, rule(extend), reads_dst=True
            )
    for width, size in _WIDTHS.items():
        table[f"ds_read_{width}"] = LdsAccess("load", size, one_address)
        table[f"ds_write_{width}"] = LdsAccess("store", size, one_address)
    for width in ("b32", "b64"):
        size = _WIDTHS[width]
        for form, unit in (("2", size), ("2st64", 64 * size)):
            table[f"ds_read{form}_{width}"] = LdsAccess("load", size, two_addresses(unit))
            table[f"ds_write{form}_{width}"] = LdsAccess("store", size, two_addresses(unit))
    return table


INSTRUCTIONS: dict[str, LdsAccess] = _table()
