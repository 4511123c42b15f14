"""Allocations of global memory: one array, or pages that come into being when first touched."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
POISON = 0xFFBAD0FF
"""What a faulty load gives: a NaN as f32, bf16 and two f16."""
_WRITTEN_DWORD = np.uint32(0x01010101)


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


def describe(allocation: Allocation) -> str:
    """Name, place and size of an allocation."""
    name = allocation.name or "allocation"
    return f"{name} [{allocation.base:#x}, +{allocation.size}]"
