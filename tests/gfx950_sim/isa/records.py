"""The shapes of the instruction tables: a pure function and what the engine must give it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Valu:
    """A vector ALU instruction: ``function(*sources, **modifiers) -> result`` over all 64 lanes.

    Types: u8 .. u64, i16 .. i64, f16, f32, f64, "mask" (bool [64]); "u32x4" is four dwords as rows
    [4, 64], "f32x2" two floats. A type narrower than a dword reads the low bits and, as result,
    clears the others.
    """

    function: Callable[..., Any]
    dst: str
    src: tuple[str, ...]
    modifiers: tuple[str, ...] = ()
    """Modifiers passed by keyword (op_sel, op_sel_hi, bitop3 ...), as ints, at their default when
    absent."""
    reads_dst: bool = False
    """The old destination is passed by keyword ``old`` (fmac, partial writes)."""
    extra: str | None = None
    """Type of a second result that goes to the scalar destination (carry): the function returns a
    pair."""
    packed: bool = False
    """A packed 32-bit instruction: op_sel and op_sel_hi pick each source's row for the two
    results."""


@dataclass(frozen=True)
class Matrix:
    """A matrix instruction: ``function(a, b, c, **modifiers) -> d``; uint32 rows [k, 64] in, rows
    [n, 64] out.

    It ignores EXEC. A scaled one also gets ``scale_a`` and ``scale_b`` (uint32 [64] or [1]) by
    keyword. a and b have as many rows as the encoding's operand (for f8f6f4: as cbsz and blgp
    say).
    """

    function: Callable[..., Any]
    modifiers: tuple[str, ...] = ()
    scaled: bool = False


@dataclass(frozen=True)
class Lanes:
    """A VALU instruction that moves data between lanes.

    kind "swap": ``function(dst, src, lanes, op_sel) -> (new dst, new src)``, uint32 [64] each;
    lanes are the active ones.
    kind "read": ``function(src, lane or None, lanes) -> int`` to a scalar register (readlane,
    readfirstlane).
    kind "write": ``function(old dst, value int, lane int) -> new dst`` (writelane).
    """

    function: Callable[..., Any]
    kind: str


@dataclass(frozen=True)
class LdsAccess:
    """An LDS instruction.

    kind "load" or "store": ``addresses(vaddr uint32 [64], offset0, offset1) -> uint32 [k, 64]``,
    byte addresses of k accesses of ``size`` bytes a lane. For a load, ``result(rows, lanes)`` maps
    the fetched uint32 rows [k * size / 4 (at least 1 an access), 64] (bytes and halves
    zero-extended in their dword) to the destination's rows; None stores them as they are. For a
    store the data operands are data0 (and data1 for the second access).
    kind "exchange": no memory is touched: ``result(vaddr, data uint32 [64], lanes, offset int) ->
    uint32 [64]`` (ds_bpermute, ds_permute, ds_swizzle; vaddr is the data of ds_swizzle).
    """

    kind: str
    size: int = 4
    addresses: Callable[..., Any] | None = None
    result: Callable[..., Any] | None = None
    align: int = 4
    """Address alignment that a wide access needs (a narrow one: its size)."""
    full_exec: bool = False
    """With a lane off the hardware's result is not defined: reported (transposed reads)."""
    reads_dst: bool = False
    """``result`` also gets ``old``, the destination's rows (d16 forms)."""
    store_shift: int = 0
    """Bits to shift the data down before a sub-dword store (d16_hi forms)."""


@dataclass(frozen=True)
class VmemAccess:
    """A vector memory instruction of ``size`` bytes a lane, kind "load", "store" or "dma" (to LDS).

    ``result(rows, ...)`` as for `LdsAccess` (sub-dword loads sign- or zero-extend). Addresses come
    from the encoding (isa/vmem.py functions `global_address`, `buffer_address`,
    `dma_lds_address`), not from this record.
    """

    kind: str
    size: int
    result: Callable[..., Any] | None = None
    reads_dst: bool = False
    store_shift: int = 0
    """Bits to shift the data down before a sub-dword store (d16_hi forms)."""


@dataclass(frozen=True)
class Atomic:
    """An atomic read-modify-write: ``function(old, *data) -> new`` on NumPy scalars of type
    ``dtype``."""

    function: Callable[..., Any]
    dtype: str
    items: int = 1
    """Data items a lane; 2 for compare and swap."""


@dataclass(frozen=True)
class Salu:
    """A scalar ALU instruction over Python ints (unsigned, as stored).

    ``function(*sources) -> value`` or ``(value, scc)`` when ``writes_scc``; only scc (int) when
    ``dst`` is 0. ``src`` and ``dst`` are in bits (32 or 64).
    """

    function: Callable[..., Any]
    dst: int
    src: tuple[int, ...]
    writes_scc: bool = False
    reads_scc: bool = False
    """scc is passed by keyword ``scc``."""
    reads_dst: bool = False
    """The old destination is passed by keyword ``old``."""
