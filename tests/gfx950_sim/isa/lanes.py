"""Data between lanes: row swaps, lane reads and writes, and the source lanes of DPP.

Sources: the CDNA4 ISA's pseudocode (v_permlane*_swap, v_readlane, v_readfirstlane, v_writelane);
for DPP the CDNA4 ISA, table "DPP_CTRL enumerations", and ROCm/rocm-systems emulation/rocjitsu,
dpp_sdwa_ops.h. The exchanges through the LDS crossbar (ds_bpermute ...) are in `lds`.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from .formats import Words
from .records import Lanes

Mask = npt.NDArray[np.bool_]
LaneIndex = npt.NDArray[np.intp]

_LANE = np.arange(64)


def _swap(
    dst_lanes: LaneIndex, src_lanes: LaneIndex, dst: Words, src: Words, lanes: Mask, op_sel: int
) -> tuple[Words, Words]:
    """Lanes that are off give their value, as the pseudocode reads them, but are not written.

    Raises:
        NotImplementedError: lanes are off and bound_ctrl (op_sel[1]) is set without fi (op_sel[0]);
            what is read then is not documented.
    """
    new_dst, new_src = dst.copy(), src.copy()
    new_dst[dst_lanes], new_src[src_lanes] = src[src_lanes], dst[dst_lanes]
    if lanes.all():
        return new_dst, new_src
    if op_sel & 3 == 2:
        raise NotImplementedError("v_permlane*_swap_b32 with bound_ctrl and lanes off")
    return np.where(lanes, new_dst, dst), np.where(lanes, new_src, src)


_ODD_ROWS, _EVEN_ROWS = _LANE[_LANE & 16 != 0], _LANE[_LANE & 16 == 0]


def permlane16_swap(dst: Words, src: Words, lanes: Mask, op_sel: int = 0) -> tuple[Words, Words]:
    """v_permlane16_swap_b32: rows 1 and 3 of vdst change places with rows 0 and 2 of vsrc (a row is
    16 lanes)."""
    return _swap(_ODD_ROWS, _EVEN_ROWS, dst, src, lanes, op_sel)


def permlane32_swap(dst: Words, src: Words, lanes: Mask, op_sel: int = 0) -> tuple[Words, Words]:
    """v_permlane32_swap_b32: vdst's upper half changes places with vsrc's lower half."""
    return _swap(_LANE[32:], _LANE[:32], dst, src, lanes, op_sel)


def readlane(src: Words, lane: int | None, lanes: Mask) -> int:
    """v_readlane_b32: the lane named by the low 6 bits of the second source, whether it is on or
    off."""
    return int(src[(lane or 0) & 63])


def readfirstlane(src: Words, lane: int | None, lanes: Mask) -> int:
    """v_readfirstlane_b32: the lowest active lane; lane 0 when none is on."""
    return int(src[np.argmax(lanes)])


def writelane(old: Words, value: int, lane: int) -> Words:
    """v_writelane_b32: one lane changes, whether it is on or off."""
    new = old.copy()
    new[lane & 63] = value
    return new


# DPP ---------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def dpp_source(control: int) -> tuple[LaneIndex, Mask]:
    """For each lane, the lane that DPP control `control` lets it read, and whether there is one.

    Where there is none, or the source lane is off, the instruction writes nothing, or reads 0 when
    bound_ctrl is set.

    Raises:
        NotImplementedError: a control that CDNA4 does not define.
    """
    t, row = _LANE % 16, _LANE & ~15
    shift = control & 15
    everywhere = np.ones(64, bool)
    if control <= 0xFF:  # quad_perm: two bits for each of the four lanes
        return (_LANE & ~3) | ((control >> 2 * (_LANE & 3)) & 3), everywhere
    if 0x101 <= control <= 0x10F:  # row_shl: data moves to lower lanes
        return row + np.minimum(t + shift, 15), t + shift <= 15
    if 0x111 <= control <= 0x11F:  # row_shr
        return row + np.maximum(t - shift, 0), t - shift >= 0
    if 0x121 <= control <= 0x12F:  # row_ror
        return row + (t - shift) % 16, everywhere
    if control == 0x130:  # wave_shl:1
        return np.minimum(_LANE + 1, 63), _LANE < 63
    if control == 0x134:  # wave_rol:1
        return (_LANE + 1) % 64, everywhere
    if control == 0x138:  # wave_shr:1
        return np.maximum(_LANE - 1, 0), _LANE > 0
    if control == 0x13C:  # wave_ror:1
        return (_LANE - 1) % 64, everywhere
    if control == 0x140:  # row_mirror
        return row + 15 - t, everywhere
    if control == 0x141:  # row_half_mirror
        return _LANE ^ 7, everywhere
    if control == 0x142:  # row_bcast:15: lane 15 of each row to the next row
        return np.maximum(row - 1, 0), row > 0
    if control == 0x143:  # row_bcast:31: lane 31 to rows 2 and 3
        return np.full(64, 31), _LANE >= 32
    if 0x150 <= control <= 0x15F:  # row_newbcast: one lane of each row to that row
        return row + shift, everywhere
    raise NotImplementedError(f"DPP control {control:#x}")


INSTRUCTIONS: dict[str, Lanes] = {
    "v_permlane16_swap_b32": Lanes(permlane16_swap, "swap"),
    "v_permlane32_swap_b32": Lanes(permlane32_swap, "swap"),
    "v_readlane_b32": Lanes(readlane, "read"),
    "v_readfirstlane_b32": Lanes(readfirstlane, "read"),
    "v_writelane_b32": Lanes(writelane, "write"),
}
