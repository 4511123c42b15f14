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

Array = npt.NDArray[Any]
POISON = 0xFFBAD0FF
"""What a faulty load gives: a NaN as f32, bf16 and two f16."""
_WRITTEN_DWORD = np.uint32(0x01010101)
_GUARD = 1 << 20


class Watcher(Protocol):
    """Who is told of faults; a wave."""

    workgroup: int

    def report(
        self, kind: str, detail: str, lane: int | None = None, address: int | None = None
    ) -> None:
        """Record a fault at the instruction being executed."""


class Allocation:
    """Bytes [base, base + size) backed by one array.

    Args:
        data: uint8 [size], used in place.
        written: uint8 [size], 1 where a byte has a value; None when all have.
    """

    def __init__(
        self, base: int, data: Array, name: str, writable: bool, written: Array | None
    ) -> None:
        self.base, self.size, self.name, self.writable = base, data.size, name, writable
        self._data, self._written = data, written
        self._dwords = data[: data.size & ~3].view(np.uint32)
        self._written_dwords = (
            None if written is None else written[: data.size & ~3].view(np.uint32)
        )
        self._owner: Array | None = None

    def start_launch(self) -> None:
        """Forget which workgroup stored where."""
        self._owner = None

    def load(self, offsets: Array, size: int) -> tuple[Array, Array | None]:
        """Dwords at byte offsets.

        Args:
            offsets: int64 [64], inside the allocation.
            size: bytes a lane; 1 or 2 give one zero-extended dword.

        Returns: uint32 [max(size // 4, 1), 64], and the lanes (bool [64]) that read a byte never
            written, or None.
        """
        if size >= 4 and not (int(np.bitwise_or.reduce(offsets)) & 3):
            index = (offsets >> 2) + _STEPS[: size // 4]
            unwritten = None
            if self._written_dwords is not None:
                ok = self._written_dwords.take(index) == _WRITTEN_DWORD
                unwritten = None if ok.all() else np.logical_not(ok.all(axis=0))
            return self._dwords.take(index), unwritten
        index = offsets[:, np.newaxis] + np.arange(size)
        unwritten = None
        if self._written is not None:
            ok = self._written.take(index)
            unwritten = None if ok.all() else np.logical_not(ok.all(axis=1))
        return _to_rows(self._data.take(index)), unwritten

    def store(self, offsets: Array, rows: Array, size: int, workgroup: int) -> Array | None:
        """Write ``size`` bytes a lane; lanes write in order, so the last one wins.

        Args:
            offsets: int64 [k], inside the allocation.
            rows: uint32 [max(size // 4, 1), k].
            workgroup: who stores.

        Returns: bool [k], the lanes that replace another workgroup's different value; None if
            there is none.
        """
        index = offsets[:, np.newaxis] + np.arange(size)
        values = np.ascontiguousarray(rows.T).view(np.uint8)[:, :size]
        if self._owner is None:
            self._owner = np.zeros(self.size, np.int32)
        owner = self._owner.take(index)
        foreign = (owner != 0) & (owner != workgroup + 1)
        clash = None
        if foreign.any():
            foreign &= self._data.take(index) != values
            if foreign.any():
                clash = foreign.any(axis=1)
        self._owner[index] = workgroup + 1
        self._data[index] = values
        if self._written is not None:
            self._written[index] = 1
        return clash

    def cell(self, offset: int, size: int) -> tuple[Array, Array | None]:
        """The bytes of an aligned item, uint8 [size], and whether each was written; for update in
        place."""
        written = None if self._written is None else self._written[offset : offset + size]
        return self._data[offset : offset + size], written

    def bytes(self, offset: int, count: int) -> Array:
        """The bytes from ``offset``: uint8 [count]."""
        return self._data[offset : offset + count]


class SparseAllocation(Allocation):
    """An allocation whose pages come into being when first touched.

    Args:
        fill: ``fill(page) -> uint8 [page_bytes]``, the content of a page at first touch; None:
            never written.
        page_bytes: a multiple of 16.
    """

    def __init__(
        self,
        base: int,
        size: int,
        name: str,
        writable: bool,
        fill: Callable[[int], Array] | None,
        page_bytes: int,
    ) -> None:
        self.base, self.size, self.name, self.writable = base, size, name, writable
        self._fill, self._page_bytes = fill, page_bytes
        self._pages: dict[int, Allocation] = {}

    def start_launch(self) -> None:
        for page in self._pages.values():
            page.start_launch()

    def _page(self, number: int) -> Allocation:
        page = self._pages.get(number)
        if page is None:
            if self._fill is None:
                data = np.full(self._page_bytes, 0xFF, np.uint8)
                written: Array | None = np.zeros(self._page_bytes, np.uint8)
            else:
                data, written = np.array(self._fill(number), np.uint8), None
                if data.shape != (self._page_bytes,):
                    raise ValueError(
                        f"fill({number}) gave shape {data.shape}, not ({self._page_bytes},)"
                    )
            page = Allocation(0, data, self.name, self.writable, written)
            self._pages[number] = page
        return page

    def _pieces(self, offsets: Array, size: int) -> Any:
        """(page, lanes bool, first byte, bytes) for every page the lanes' accesses touch."""
        first, last = offsets // self._page_bytes, (offsets + size - 1) // self._page_bytes
        for number in np.unique(np.concatenate([first, last])):
            yield self._page(int(number)), int(number) * self._page_bytes

    def cell(self, offset: int, size: int) -> tuple[Array, Array | None]:
        return self._page(offset // self._page_bytes).cell(offset % self._page_bytes, size)

    def load(self, offsets: Array, size: int) -> tuple[Array, Array | None]:
        values = np.zeros((offsets.size, size), np.uint8)
        missing = np.zeros(offsets.size, bool)
        at = offsets[:, np.newaxis] + np.arange(size)
        for page, start in self._pieces(offsets, size):
            inside = (at >= start) & (at < start + self._page_bytes)
            values[inside] = page._data.take(at[inside] - start)
            if page._written is not None:
                missing |= (inside & (page._written.take((at - start) * inside) == 0)).any(axis=1)
        return _to_rows(values), missing if missing.any() else None

    def store(self, offsets: Array, rows: Array, size: int, workgroup: int) -> Array | None:
        values = np.ascontiguousarray(rows.T).view(np.uint8)[:, :size]
        clash = np.zeros(offsets.size, bool)
        at = offsets[:, np.newaxis] + np.arange(size)
        for page, start in self._pieces(offsets, size):
            lane, byte = np.nonzero((at >= start) & (at < start + self._page_bytes))
            piece = values[lane, byte].astype(np.uint32)[np.newaxis]
            bad = Allocation.store(page, at[lane, byte] - start, piece, 1, workgroup)
            if bad is not None:
                clash[lane[bad]] = True
        return clash if clash.any() else None

    def bytes(self, offset: int, count: int) -> Array:
        parts, end = [], offset + count
        while offset < end:
            number, inside = divmod(offset, self._page_bytes)
            take = min(self._page_bytes - inside, end - offset)
            parts.append(self._page(number).bytes(inside, take))
            offset += take
        return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


_STEPS = np.arange(16, dtype=np.int64)[:, np.newaxis]


def _to_rows(values: Array) -> Array:
    """uint8 [64, size] to uint32 rows [max(size // 4, 1), 64]."""
    if values.shape[1] < 4:
        padded = np.zeros((values.shape[0], 4), np.uint8)
        padded[:, : values.shape[1]] = values
        values = padded
    return np.ascontiguousarray(np.ascontiguousarray(values).view(np.uint32).T)


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


def describe(allocation: Allocation) -> str:
    """Name, place and size of an allocation."""
    name = allocation.name or "allocation"
    return f"{name} [{allocation.base:#x}, +{allocation.size}]"
