"""One wave: its registers, its outstanding memory operations, and what is known of both."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from gfx950_sim.allocation import POISON
from gfx950_sim.analysis import Analysis
from gfx950_sim.decode import EXEC, VCC
from gfx950_sim.hooks import Observer
from gfx950_sim.isa.records import LdsAccess, Matrix, VmemAccess
from gfx950_sim.lds_memory import LdsMemory
from gfx950_sim.memory import Memory
from gfx950_sim.operation import Operation
from gfx950_sim.program import (
    ALL_REGISTERS,
    SGPR_BIT,
    Program,
    is_partial_write,
    register_name,
    rows_of,
    upper_addends,
)
from gfx950_sim.reports import Report, Reporter

Array = np.ndarray[Any, Any]
ALL_LANES = (1 << 64) - 1
Closure = Callable[[], Any]
EXEC_CHANGED = -4
"""What the closure of an instruction that wrote EXEC returns."""


class Launch:
    """What the waves of one launch share."""

    def __init__(
        self, memory: Memory, reporter: Reporter, analysis: Analysis, observer: Observer | None
    ) -> None:
        self.memory, self.reporter, self.analysis = memory, reporter, analysis
        self.observer = observer
        self.fp16_ovfl = 0


class Wave:
    """Registers and state of one wave slot of a workgroup; later workgroups reuse it.

    Args:
        program: the kernel.
        number: wave number in the workgroup.
        lds: the workgroup's LDS.
    """

    def __init__(self, program: Program, number: int, lds: LdsMemory) -> None:
        self.program, self.number, self.lds = program, number, lds
        self.launch: Launch
        self.workgroup = 0
        self.vgpr = np.zeros((512, 64), np.uint32)
        self.sgpr = np.zeros(128, np.uint32)
        # The same registers as Python ints: fast single access.
        self.scalars = self.sgpr.data
        self.lanes = np.ones(64, bool)
        self.private: Any = None  # scratch.PrivateMemory, from the workgroup
        count = len(program.instructions)
        # Bound closures by instruction, for all lanes on and for some off.
        self.full: list[Closure | None] = [None] * count
        self.masked: list[Closure | None] = [None] * count
        self.reset(0)

    def reset(self, workgroup: int) -> None:
        """A new wave in this slot: nothing defined, nothing outstanding."""
        self.workgroup = workgroup
        self.vgpr.fill(POISON)
        self.sgpr.fill(POISON)
        self.scc = 0
        self.pc = 0
        self.current = 0
        self.epoch = 0
        self.barriers: list[int] = []
        self.trace: list[int] = []
        self.vmem: deque[Operation] = deque()
        self.ds: deque[Operation] = deque()
        self.smem: list[Operation] = []
        self.issued = {"vmcnt": 0, "lgkmcnt": 0, "smem": 0}
        self.pending = 0
        self.watched = 0
        self.watch: dict[str, list[Operation]] = {"vmcnt": [], "lgkmcnt": [], "smem": []}
        self.undefined = ALL_REGISTERS
        self.defined_lanes: dict[int, int] = {}
        self.suspect = ALL_REGISTERS
        self.set_exec(ALL_LANES)
        self.define_sgprs(EXEC, 2)

    # Registers -----------------------------------------------------------------------------------

    def set_exec(self, mask: int) -> None:
        """Change EXEC."""
        self.exec_mask = mask
        self.all_lanes = mask == ALL_LANES
        self.scalars[EXEC], self.scalars[EXEC + 1] = mask & 0xFFFFFFFF, mask >> 32
        bits = self.sgpr[EXEC : EXEC + 2].view(np.uint8)
        self.lanes[:] = np.unpackbits(bits, bitorder="little").view(bool)

    @property
    def vcc(self) -> int:
        """VCC as 64 bits."""
        return self.scalars[VCC] | self.scalars[VCC + 1] << 32

    def active_lanes(self) -> Array | None:
        """A copy of the lane mask; None when every lane is on."""
        return None if self.all_lanes else self.lanes.copy()

    def define_sgprs(self, first: int, count: int) -> None:
        """Scalar registers the hardware sets up."""
        self.undefined &= ~(((1 << count) - 1) << (SGPR_BIT + first))
        self._update_suspect()

    def define_vgpr(self, row: int) -> None:
        """A vector register the hardware sets up in every lane."""
        self.undefined &= ~(1 << row)
        self._update_suspect()

    def _update_suspect(self) -> None:
        self.suspect = self.pending | self.watched | self.undefined

    # Reports -------------------------------------------------------------------------------------

    def report(
        self, kind: str, detail: str, lane: int | None = None, address: int | None = None
    ) -> None:
        """Record a fault at the instruction being executed."""
        instruction = self.program.instructions[self.current]
        self.launch.reporter.add(
            Report(
                kind,
                detail,
                instruction.text,
                instruction.index,
                instruction.pc,
                self.workgroup,
                self.number,
                lane,
                address,
            )
        )

    def name_of(self, index: int) -> str:
        """An instruction's text and pc, for messages."""
        instruction = self.program.instructions[index]
        return f"{instruction.text} at pc {instruction.pc:#x}"

    # A closer look at registers -------------------------------------------------------------------

    def inspect(self, index: int) -> None:
        """Check an instruction that touches a suspect register, before it runs."""
        self.current = index
        reads, writes = self.program.reads[index], self.program.writes[index]
        if self.pending & (reads | writes):
            self._check_pending(index, reads, writes)
        if self.watched & (reads | writes):
            self._learn_waits(reads | writes)
        if self.undefined & (reads | writes):
            self._check_defined(index, reads, writes)
        self._update_suspect()

    def _check_pending(self, index: int, reads: int, writes: int) -> None:
        record = self.program.records[index]
        for queue in (self.vmem, self.ds, self.smem):
            for operation in list(queue):
                hit = operation.mask & (reads | writes)
                if not hit:
                    continue
                names = ", ".join(register_name(b) for b in rows_of(hit))
                detail = f"{names} waits for {self.name_of(operation.index)} ({operation.counter})"
                if hit & reads:
                    self.report("pending_register", detail)
                    self._poison(operation)
                elif not self._returns_later(record, operation):
                    self.report("pending_overwrite", detail)

    @staticmethod
    def _returns_later(record: Any, operation: Operation) -> bool:
        """Loads on one counter return in order: the later one's value stays."""
        if operation.counter == "vmcnt":
            return isinstance(record, VmemAccess) and record.kind == "load"
        return operation.counter == "lgkmcnt" and isinstance(record, LdsAccess)

    def _poison(self, operation: Operation) -> None:
        """What a too early reader sees; true values of scalar registers, so that addresses and
        loops stay sane."""
        if operation.counter == "smem":
            first, values = operation.data
            for i, value in enumerate(values):
                self.scalars[first + i] = value
            return
        for row in rows_of(operation.mask):
            self.vgpr[row] = POISON

    def _learn_waits(self, touched: int) -> None:
        for counter, operations in self.watch.items():
            for operation in [o for o in operations if o.mask & touched]:
                name = "vmcnt" if counter == "vmcnt" else "lgkmcnt"
                self.launch.analysis.need(operation.wait, name, operation.younger)
                operations.remove(operation)
        self._update_watched()

    def _check_defined(self, index: int, reads: int, writes: int) -> None:
        record = self.program.records[index]
        partial = is_partial_write(record)
        spreading = 0
        for bit in rows_of(self.undefined & upper_addends(self.program.instructions[index])):
            if self.exec_mask & ~self.defined_lanes.get(bit, 0):
                spreading |= 1 << bit
        for bit in rows_of(self.undefined & reads & ~spreading):
            if partial and writes >> bit & 1:
                continue
            needed = ALL_LANES if isinstance(record, Matrix) else self.exec_mask
            missing = needed & ~self.defined_lanes.get(bit, 0) if bit < SGPR_BIT else 1
            if missing:
                lane = (missing & -missing).bit_length() - 1 if bit < SGPR_BIT else None
                self.report("uninitialized_register", register_name(bit), lane)
                self.undefined &= ~(1 << bit)  # once is enough
        for bit in rows_of(self.undefined & writes):
            if bit >= SGPR_BIT or self.all_lanes or isinstance(record, Matrix):
                self.undefined &= ~(1 << bit)
                continue
            lanes = self.defined_lanes.get(bit, 0) | self.exec_mask
            self.defined_lanes[bit] = lanes
            if lanes == ALL_LANES:
                self.undefined &= ~(1 << bit)
        if spreading:  # the upper half of the result is as undefined as that of the addend
            upper = self.program.instructions[index].operands["vdst"].index + 1
            self.undefined |= 1 << upper
            self.defined_lanes.pop(upper, None)

    # Outstanding operations -----------------------------------------------------------------------

    def issue(self, operation: Operation) -> None:
        """Put an operation in its counter's queue."""
        counter = operation.counter
        operation.sequence = self.issued[counter]
        self.issued[counter] += 1
        if counter == "vmcnt":
            self.vmem.append(operation)
        elif counter == "lgkmcnt":
            self.ds.append(operation)
        else:
            self.smem.append(operation)
        if operation.mask:
            self.pending |= operation.mask
            self.suspect |= operation.mask

    def wait(self, index: int, vmcnt: int, lgkmcnt: int) -> None:
        """s_waitcnt: complete what the counts guarantee.

        Vector memory and LDS operations return in order, so an operation is complete when no more
        than ``count`` younger ones of its kind can be outstanding with it. Scalar loads return in
        any order: only 0 covers them.
        """
        self.current = index
        self.launch.analysis.executed.add(index)
        for counter, queue, count in (("vmcnt", self.vmem, vmcnt), ("lgkmcnt", self.ds, lgkmcnt)):
            if self.watch[counter]:
                self._forget_covered(counter, count)
            while len(queue) > count:
                operation = queue.popleft()
                self._complete(operation, index, len(queue), count)
        if lgkmcnt == 0:
            if self.watch["smem"]:
                self.watch["smem"].clear()
                self._update_watched()
            for operation in self.smem:
                self._complete(operation, index, 0, 0)
            self.smem.clear()
        self._update_suspect()

    def _forget_covered(self, counter: str, count: int) -> None:
        """Drop watched operations that this wait would have completed too."""
        watched = self.watch[counter]
        issued = self.issued[counter]
        kept = [o for o in watched if issued - 1 - o.sequence < count]
        if len(kept) != len(watched):
            for operation in watched:
                if issued - 1 - operation.sequence >= count and operation.lds_id:
                    alternative = self.lds.alternative
                    if alternative[operation.lds_id] > self.epoch:
                        alternative[operation.lds_id] = self.epoch
            self.watch[counter] = kept
            self._update_watched()

    def _update_watched(self) -> None:
        watched = 0
        for operations in self.watch.values():
            for operation in operations:
                watched |= operation.mask
        self.watched = watched

    def _complete(self, operation: Operation, index: int, younger: int, count: int) -> None:
        """Deliver an operation's results; the wait ``index`` asked for ``count`` and ``younger``
        were issued after it."""
        operation.wait, operation.younger = index, younger
        counter = "vmcnt" if operation.counter == "vmcnt" else "lgkmcnt"
        tight = self.launch.analysis.required.get((index, counter)) == count
        if operation.dma is not None:
            self.lds.finish_dma(operation)
        elif operation.target is not None:
            if operation.lanes is None:
                operation.target[...] = operation.data
            else:
                np.copyto(operation.target, operation.data, where=operation.lanes)
        elif operation.counter == "smem":
            first, values = operation.data
            for i, value in enumerate(values):
                self.scalars[first + i] = value
        if operation.lds_id:
            self.lds.finish(operation, self.epoch, not tight)
        self.pending &= ~operation.mask
        if not tight and (operation.mask or operation.lds_id):
            self.watch[operation.counter].append(operation)
            self.watched |= operation.mask
