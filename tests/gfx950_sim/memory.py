"""Global memory: a set of allocations with bounds, 64-bit addresses, and what was ever written.

Arrays are used in place. A sparse allocation keeps only the pages somebody touched, so that a
cache of many gigabytes costs nothing.
"""

import bisect
import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gfx950_sim.allocation import POISON, Allocation, SparseAllocation, describe

Array = npt.NDArray[Any]
_GUARD = 1 << 20


class Watcher(Protocol):
    """Who is told of faults; a wave."""

    workgroup: int

    def report(
        self, kind: str, detail: str, lane: int | None = None, address: int | None = None
    ) -> None:
        """Record a fault at the instruction being executed."""


class Memory:
    """The address space of a device."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._allocations: list[Allocation] = []
        self._next = 0x7F00_0000_0000
        self._host: dict[int, Any] = {}
        self._last: Allocation | None = None

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """In the order of their addresses."""
        return tuple(self._allocations)

    def map(
        self,
        content: Array | int,
        name: str = "",
        writable: bool = False,
        address: int | None = None,
    ) -> int:
        """Make an array, or a number of bytes without values, addressable.

        Args:
            content: a C-contiguous array, used in place (stores change it), or a size in bytes.
            name: for reports.
            writable: whether kernels may store to it.
            address: where; by default some free place, 256-byte aligned, far from the others.

        Returns:
            The address.
        """
        written = None
        if isinstance(content, (int, np.integer)):
            data = np.full(int(content), 0xFF, np.uint8)
            written = np.zeros(int(content), np.uint8)
        else:
            if not content.flags.c_contiguous:
                raise ValueError(f"{name or 'array'} is not C-contiguous")
            if writable and not content.flags.writeable:
                raise ValueError(f"{name or 'array'} is a read-only array, mapped writable")
            data = content.reshape(-1).view(np.uint8)
        base = self._place(data.size) if address is None else address
        return self._add(Allocation(base, data, name, writable, written))

    def map_sparse(
        self,
        size: int,
        name: str = "",
        writable: bool = False,
        fill: Callable[[int], Array] | None = None,
        page_bytes: int = 1 << 16,
    ) -> int:
        """Make ``size`` bytes addressable of which only touched pages exist.

        Args:
            size: in bytes, of any magnitude below 2^47.
            fill: gives a page's bytes (uint8 [page_bytes]) by its number; None: bytes are never
                written at first.
            page_bytes: a multiple of 16; with a multiple of the record size, ``fill`` can think in
                whole records.
        """
        if page_bytes <= 0 or page_bytes % 16:
            raise ValueError(f"page_bytes must be a multiple of 16, got {page_bytes}")
        return self._add(
            SparseAllocation(self._place(size), size, name, writable, fill, page_bytes)
        )

    def map_host(self, pointer: int, size: int, name: str = "", writable: bool = False) -> int:
        """Make ``size`` bytes of this process's memory addressable at their own address, in
        place."""
        buffer = (ctypes.c_uint8 * size).from_address(pointer)
        data = np.ctypeslib.as_array(buffer)
        return self._add(Allocation(pointer, data, name, writable, None))

    def unmap(self, address: int) -> None:
        """Remove the allocation that starts at ``address``."""
        at = bisect.bisect_left(self._bases, address)
        if at == len(self._bases) or self._bases[at] != address:
            raise KeyError(f"no allocation starts at {address:#x}")
        del self._bases[at], self._allocations[at]
        self._last = None

    def bytes(self, address: int, count: int) -> Array:
        """Bytes at an address, uint8 [count], for the host."""
        allocation = self.find(address, count)
        if allocation is None:
            raise KeyError(f"{count} bytes at {address:#x} are not in one allocation")
        return allocation.bytes(address - allocation.base, count)

    def _place(self, size: int) -> int:
        base = self._next
        self._next += (size + _GUARD + 255) & ~255
        return base

    def _add(self, allocation: Allocation) -> int:
        at = bisect.bisect_left(self._bases, allocation.base)
        end = allocation.base + allocation.size
        after = self._allocations[at] if at < len(self._bases) else None
        before = self._allocations[at - 1] if at else None
        for other in (before, after):
            if other and other.base < end and allocation.base < other.base + other.size:
                raise ValueError(f"{allocation.name} overlaps {describe(other)}")
        self._bases.insert(at, allocation.base)
        self._allocations.insert(at, allocation)
        return allocation.base

    def start_launch(self) -> None:
        """Forget what earlier launches stored where (two workgroups, one address)."""
        for allocation in self._allocations:
            allocation.start_launch()

    def find(self, address: int, size: int = 1) -> Allocation | None:
        """The allocation that holds [address, address + size)."""
        at = bisect.bisect_right(self._bases, address) - 1
        if at < 0:
            return None
        allocation = self._allocations[at]
        return allocation if address + size <= allocation.base + allocation.size else None

    def nearest(self, address: int) -> str:
        """The nearest allocation and the distance to it, in words."""
        if not self._allocations:
            return "there are no allocations"
        at = bisect.bisect_right(self._bases, address)
        candidates = self._allocations[max(at - 1, 0) : at + 1]

        def distance(a: Allocation) -> int:
            return a.base - address if address < a.base else max(address - (a.base + a.size), 0)

        best = min(candidates, key=distance)
        if address < best.base:
            return f"{best.base - address} bytes before {describe(best)}"
        if address >= best.base + best.size:
            return f"{address - best.base - best.size} bytes past the end of {describe(best)}"
        return f"at byte {address - best.base} of {describe(best)}"

    def load(self, address: Array, size: int, lanes: Array | None, watcher: Watcher) -> Array:
        """What each lane loads.

        Args:
            address: uint64 [64].
            size: bytes a lane.
            lanes: bool [64], the lanes that access; None: all.
            watcher: told of accesses outside allocations and of bytes never written; those lanes
                get `POISON`.

        Returns:
            uint32 [max(size // 4, 1), 64]; lanes that do not access get anything.
        """
        allocation = self._last
        if allocation is not None and allocation.size >= size:
            offsets = address - np.uint64(allocation.base)
            if lanes is not None:
                offsets *= lanes
            if int(np.maximum.reduce(offsets)) <= allocation.size - size:
                rows, unwritten = allocation.load(offsets.view(np.int64), size)
                if unwritten is not None:
                    self._report_unwritten(allocation, address, unwritten, lanes, rows, watcher)
                return rows
        rows = np.full((max(size // 4, 1), 64), POISON, np.uint32)
        for allocation, chosen in self._split(address, size, lanes, watcher):
            offsets = (address[chosen] - np.uint64(allocation.base)).view(np.int64)
            part, unwritten = allocation.load(offsets, size)
            if unwritten is not None:
                full = np.zeros(64, bool)
                full[chosen] = unwritten
                self._report_unwritten(allocation, address, full, lanes, part, watcher, chosen)
            rows[:, chosen] = part
        return rows

    def store(
        self, address: Array, rows: Array, size: int, lanes: Array | None, watcher: Watcher
    ) -> None:
        """Store ``size`` bytes a lane; arguments as for `load`, rows uint32 [max(size // 4, 1),
        64]."""
        for allocation, chosen in self._split(address, size, lanes, watcher):
            if not allocation.writable:
                lane = int(chosen[0])
                detail = f"{describe(allocation)} is read-only"
                watcher.report("read_only", detail, lane, int(address[lane]))
                continue
            offsets = (address[chosen] - np.uint64(allocation.base)).view(np.int64)
            clash = allocation.store(offsets, rows[:, chosen], size, watcher.workgroup)
            if clash is not None:
                lane = int(chosen[int(clash.argmax())])
                where = f"byte {int(address[lane]) - allocation.base} of {describe(allocation)}"
                detail = f"another workgroup stored a different value at {where}"
                watcher.report("conflicting_stores", detail, lane, int(address[lane]))

    def cell(self, address: int, size: int, watcher: Watcher, lane: int) -> Array | None:
        """The bytes of an atomic's item, uint8 [size], for update in place; None after a fault."""
        allocation = self.find(address, size)
        if address % size:
            watcher.report("misaligned", f"atomic of {size} bytes", lane, address)
        elif allocation is None:
            watcher.report("out_of_bounds", f"atomic at {self.nearest(address)}", lane, address)
        elif not allocation.writable:
            watcher.report("read_only", f"{describe(allocation)} is read-only", lane, address)
        else:
            data, written = allocation.cell(address - allocation.base, size)
            if written is not None and not written.all():
                watcher.report("uninitialized_memory", describe(allocation), lane, address)
            return data
        return None

    def load_scalar(self, address: int, count: int, watcher: Watcher) -> list[int]:
        """``count`` dwords at an address (SMEM)."""
        allocation = self.find(address, 4 * count)
        if allocation is None:
            watcher.report("out_of_bounds", self.nearest(address), None, address)
            return [POISON] * count
        offsets = address - allocation.base + np.zeros(1, np.int64)
        rows, unwritten = allocation.load(offsets, 4 * count)
        if unwritten is not None:
            watcher.report("uninitialized_memory", describe(allocation), None, address)
        return [int(v) for v in rows[:, 0]]

    def _split(self, address: Array, size: int, lanes: Array | None, watcher: Watcher) -> Any:
        """(allocation, lane numbers) for the lanes inside allocations; the others are reported."""
        left = np.arange(64) if lanes is None else np.flatnonzero(lanes)
        outside: list[int] = []
        while left.size:
            first = int(address[left[0]])
            allocation = self.find(first, size)
            if allocation is None:
                outside.append(int(left[0]))
                left = left[1:]
                continue
            self._last = allocation
            inside = address[left] - np.uint64(allocation.base) <= np.uint64(allocation.size - size)
            yield allocation, left[inside]
            left = left[~inside]
        if outside:
            lane = min(outside)
            at = int(address[lane])
            detail = f"{len(outside)} lanes; {size} bytes at {self.nearest(at)}"
            watcher.report("out_of_bounds", detail, lane, at)

    def _report_unwritten(
        self,
        allocation: Allocation,
        address: Array,
        unwritten: Array,
        lanes: Array | None,
        rows: Array,
        watcher: Watcher,
        chosen: Array | None = None,
    ) -> None:
        if lanes is not None:
            unwritten = unwritten & lanes
        if not unwritten.any():
            return
        lane = int(unwritten.argmax())
        where = f"byte {int(address[lane]) - allocation.base} of {describe(allocation)}"
        watcher.report("uninitialized_memory", where, lane, int(address[lane]))
        rows[:, unwritten if chosen is None else unwritten[chosen]] = POISON
