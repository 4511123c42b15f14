"""A workgroup's LDS: its bytes, and the history that finds races.

The history keeps, for each granule, the last access that wrote it and the last access of each wave
that read it. A granule is a dword, or a byte in kernels with LDS instructions narrower than a
dword. An access is finished in an epoch (the number of barriers its wave has passed) when an
s_waitcnt has covered it. Accesses of two waves to one granule, of which at least one writes, are
ordered only if the first is finished in an earlier epoch than that of the second. LDS instructions
of one wave run in order; DMA loads are not part of that order, so their bytes may be touched by no
wave until the issuing one has waited.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gfx950_sim.analysis import Analysis
from gfx950_sim.operation import UNFINISHED, Operation

Array = np.ndarray[Any, Any]
_NEVER_WRITTEN, _NOBODY = 0, 1


class LdsWave(Protocol):
    """What the LDS needs of the wave that accesses it."""

    number: int
    epoch: int
    barriers: list[int]
    """Index of the barrier instruction that ended each epoch."""
    current: int

    def report(
        self, kind: str, detail: str, lane: int | None = None, address: int | None = None
    ) -> None:
        """Record a fault at the instruction being executed."""

    def name_of(self, index: int) -> str:
        """An instruction's text and pc."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an LDS instruction touches: for each of its accesses a lane, indexes of dwords (bytes,
    if narrower) and of granules."""

    addresses: Array
    size: int
    lanes: Array | None
    """Lanes that access; None: all."""
    index: list[Array]
    """int64 [max(size // 4, 1), 64] (narrower than a dword: [size, 64])."""
    granules: list[Array]
    """Of the lanes that access."""


def _largest(values: Array) -> int:
    return int(np.maximum.reduce(values, axis=None))


class LdsMemory:
    """LDS of one workgroup at a time.

    Args:
        size: bytes of the workgroup (group segment).
        waves: waves of the workgroup.
        granule: 4, or 1 when the kernel has LDS instructions narrower than a dword.
    """

    def __init__(self, size: int, waves: int, granule: int) -> None:
        self.size, self.analysis = size, Analysis()
        padded = size + 15 & ~15
        self.bytes = np.zeros(padded, np.uint8)
        self._dwords = self.bytes.view(np.uint32)
        self._shift = 2 if granule == 4 else 0
        self._granule = granule
        self._writer = np.zeros(padded // granule, np.int64)
        self._readers = np.zeros((waves, padded // granule), np.int64)
        self._others = [[w for w in range(waves) if w != wave] for wave in range(waves)]
        # By access number: the epoch in which it was finished, and in which it would have been
        # finished without the wait that covered it first.
        self.done = np.zeros(1 << 12, np.int32)
        self.alternative = np.zeros(1 << 12, np.int32)
        self._owner = np.full(1 << 12, -1, np.int32)
        self._is_dma = np.zeros(1 << 12, bool)
        self._operations: list[Operation | None] = []
        self.start_workgroup()

    def start_workgroup(self) -> None:
        """Forget everything: LDS holds nothing a workgroup may rely on."""
        self.bytes.fill(0xFF)
        self._writer.fill(_NEVER_WRITTEN)
        self._readers.fill(_NOBODY)
        self.done[:2] = self.alternative[:2] = (UNFINISHED, -1)
        self._operations = [None, None]

    def plan(
        self, addresses: Array, size: int, lanes: Array | None, wave: LdsWave, align: int = 4
    ) -> "Plan":
        """Check byte addresses (uint32 [k, 64], size bytes each) and find what they touch.

        Lanes outside the LDS or misaligned are reported and left out.
        """
        chosen = self._check_bounds(addresses, size, lanes, wave, min(size, align))
        index: list[Array] = []
        granules: list[Array] = []
        steps = _STEPS_OF[4 if size >= 4 else 1, size]
        shift = np.uint32(2 if size >= 4 else 0)
        for access in addresses:
            if chosen is not None:
                access = access * chosen  # lanes that are off fetch byte 0, which nobody sees
            index.append((access >> shift) + steps)
            if chosen is None and size >= self._granule == 4:
                granules.append(index[-1])
            else:
                granules.append(self._granules(access, size, chosen))
        return Plan(addresses, size, chosen, index, granules)

    def load(self, plan: "Plan", wave: LdsWave, operation: Operation) -> Array:
        """Rows uint32 [k * max(size // 4, 1), 64]."""
        parts: list[Array] = []
        for index, granules in zip(plan.index, plan.granules, strict=True):
            if plan.size >= 4:
                parts.append(self._dwords.take(index))
            else:
                octets = self.bytes.take(index).astype(np.uint32)
                value: Array = octets[:1] if plan.size == 1 else octets[:1] | octets[1:] << 8
                parts.append(value)
            self._note_read(granules, wave, operation)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def store(self, plan: "Plan", rows: list[Array], wave: LdsWave, operation: Operation) -> None:
        """Store ``rows[i]`` (uint32 [max(size // 4, 1), 64]) at access i."""
        for index, granules, data in zip(plan.index, plan.granules, rows, strict=True):
            self._note_write(granules, wave, operation)
            self._put(index, data, plan.size, plan.lanes)

    def note_atomic(self, plan: "Plan", wave: LdsWave, operation: Operation) -> None:
        """Note an atomic access; the caller updates `bytes` itself."""
        for granules in plan.granules:
            self._note_read(granules, wave, operation)
            self._note_write(granules, wave, operation)

    def start_dma(self, plan: "Plan", wave: LdsWave, operation: Operation) -> None:
        """Note a DMA load's bytes as in flight."""
        self._note_write(plan.granules[0], wave, operation)

    def finish_dma(self, operation: Operation) -> None:
        """Store what a DMA load fetched."""
        plan, rows = operation.dma
        self._put(plan.index[0], rows, plan.size, plan.lanes)

    def finish(self, operation: Operation, epoch: int, watched: bool) -> None:
        """The operation is covered by a wait in ``epoch``; ``watched``: it matters which wait that
        was."""
        self.done[operation.lds_id] = epoch
        if not watched:
            self.alternative[operation.lds_id] = epoch

    def _put(self, index: Array, rows: Array, size: int, lanes: Array | None) -> None:
        if lanes is not None:
            index, rows = index[:, lanes], rows[:, lanes]
        if size >= 4:
            self._dwords[index] = rows
        else:
            for i in range(size):
                self.bytes[index[i]] = rows[0] >> np.uint32(8 * i) & np.uint32(0xFF)

    def _granules(self, address: Array, size: int, lanes: Array | None) -> Array:
        if lanes is not None:
            address = address[lanes]
        index: Array = (address >> np.uint32(self._shift)) + _STEPS_OF[self._granule, size]
        return index

    def _check_bounds(
        self, addresses: Array, size: int, lanes: Array | None, wave: LdsWave, align: int
    ) -> Array | None:
        """Lanes that are on and inside the LDS; None: all 64."""
        active = addresses if lanes is None else addresses[:, lanes]
        if active.size == 0:
            return lanes
        if int(np.maximum.reduce(active, axis=None)) > self.size - size:
            inside: Array = np.all(addresses.astype(np.int64) + size <= self.size, axis=0)
            outside = ~inside if lanes is None else ~inside & lanes
            lane = int(outside.argmax())
            address = int(addresses[:, lane].max())
            detail = f"{size} bytes, the workgroup has {self.size}"
            wave.report("lds_bounds", detail, lane, address)
            lanes = inside if lanes is None else inside & lanes
        if align > 1 and int(np.bitwise_or.reduce(active, axis=None)) & align - 1:
            bad: Array = (addresses & np.uint32(align - 1) != 0).any(axis=0)
            bad = bad if lanes is None else bad & lanes
            if bad.any():
                lane = int(bad.argmax())
                wave.report(
                    "misaligned",
                    f"{size} bytes, not a multiple of {align}",
                    lane,
                    int(addresses[:, lane].max()),
                )
                lanes = np.logical_not(bad) if lanes is None else lanes & ~bad
        return lanes

    # The history ---------------------------------------------------------------------------------

    def _register(self, operation: Operation, wave: LdsWave) -> None:
        """Give the operation its number in the history."""
        if operation.lds_id:
            return
        number = len(self._operations)
        if number == self.done.size:
            for name in ("done", "alternative", "_owner", "_is_dma"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, old]))
        self._operations.append(operation)
        self.done[number] = self.alternative[number] = UNFINISHED
        self._owner[number], self._is_dma[number] = wave.number, operation.dma is not None
        operation.lds_id, operation.epoch = number, wave.epoch

    def _newest_unremarkable(self, wave: LdsWave) -> int:
        """Accesses finished in this epoch or before can neither race nor teach anything."""
        epoch = wave.epoch
        if epoch and wave.barriers[epoch - 1] not in self.analysis.barriers:
            return epoch - 2
        return epoch - 1

    def _note_read(self, granules: Array, wave: LdsWave, operation: Operation) -> None:
        if granules.size == 0:
            return
        self._register(operation, wave)
        writers = self._writer.take(granules)
        if _largest(self.alternative.take(writers)) > self._newest_unremarkable(wave):
            self._examine(writers, granules, wave, operation, "read", "written")
        self._readers[wave.number][granules] = operation.lds_id

    def _note_write(self, granules: Array, wave: LdsWave, operation: Operation) -> None:
        if granules.size == 0:
            return
        self._register(operation, wave)
        newest = self._newest_unremarkable(wave)
        writers = self._writer.take(granules)
        if _largest(self.alternative.take(writers)) > newest:
            self._examine(writers, granules, wave, operation, "written", "written")
        for other in self._others[wave.number]:
            readers = self._readers[other].take(granules)
            if _largest(self.alternative.take(readers)) > newest:
                self._examine(readers, granules, wave, operation, "written", "read")
        if operation.dma is not None:
            readers = self._readers[wave.number].take(granules)
            if _largest(self.done.take(readers)) == UNFINISHED:
                self._examine(readers, granules, wave, operation, "written", "read")
        self._writer[granules] = operation.lds_id

    def _examine(
        self,
        earlier: Array,
        granules: Array,
        wave: LdsWave,
        operation: Operation,
        now: str,
        before: str,
    ) -> None:
        """Judge each earlier access that meets this one."""
        # The own wave's accesses are in order, but for DMA loads.
        dma = self._is_dma.take(earlier) if operation.dma is None else True
        foreign = self._owner.take(earlier) != wave.number
        recent = self.alternative.take(earlier)
        keep = foreign & (recent > self._newest_unremarkable(wave))
        keep |= (recent == UNFINISHED) & dma
        if not keep.any():
            return
        lanes = np.arange(64) if operation.lanes is None else np.flatnonzero(operation.lanes)
        lanes = np.broadcast_to(lanes[: granules.shape[1]], granules.shape)[keep]
        earlier, granules = earlier[keep], granules[keep]
        for number in np.unique(earlier):
            other = self._operations[number]
            if other is operation or number == _NOBODY:
                continue
            if other is None:
                if now == "read":
                    self._report("uninitialized_lds", "", earlier == number, granules, lanes, wave)
                continue
            if other.atomic and operation.atomic:
                continue
            done = int(self.done[number])
            # Two DMA loads of a wave return in order, as its LDS instructions do.
            mixed = (other.dma is None) != (operation.dma is None)
            if other.wave == wave.number and not (mixed and done == UNFINISHED):
                if other.dma is not None:
                    self._learn_wait(other, wave, UNFINISHED)
                continue
            story = f"{now} here, {before} by {wave.name_of(other.index)} (wave {other.wave})"
            if other.wave == wave.number:
                story += ", a DMA load not yet waited for" if other.dma else ", not waited for"
                self._report("lds_dma", story, earlier == number, granules, lanes, wave)
            elif other.epoch == wave.epoch:
                story += ", with no barrier between"
                self._report("lds_race", story, earlier == number, granules, lanes, wave)
            elif done >= wave.epoch:
                kind = "lds_unfinished" if other.dma is None else "lds_dma"
                story += ", and not waited for before the barrier"
                self._report(kind, story, earlier == number, granules, lanes, wave)
            else:
                if done == wave.epoch - 1:
                    self.analysis.barriers.add(wave.barriers[done])
                self._learn_wait(other, wave, wave.epoch)

    def _learn_wait(self, other: Operation, wave: LdsWave, covered_before: int) -> None:
        number = other.lds_id
        if other.wait >= 0 and int(self.alternative[number]) >= covered_before:
            counter = "vmcnt" if other.counter == "vmcnt" else "lgkmcnt"
            self.analysis.need(other.wait, counter, other.younger)
            self.alternative[number] = self.done[number]

    def _report(
        self,
        kind: str,
        detail: str,
        where: Array,
        granules: Array,
        lanes: Array,
        wave: LdsWave,
    ) -> None:
        first = int(granules[where].argmin())
        address = int(granules[where][first]) * self._granule
        wave.report(kind, detail, int(lanes[where][first]), address)


_STEPS_OF = {
    (granule, size): np.arange(max(size // granule, 1), dtype=np.int64)[:, np.newaxis]
    for granule in (1, 4)
    for size in (1, 2, 4, 8, 12, 16)
}
