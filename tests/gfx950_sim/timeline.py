"""Plays recorded waves on one compute unit and estimates when each instruction issues.

COSTS.md is the model in words. Waves issue in order; the four SIMDs, the LDS, the path to memory
and the barriers are shared as the parameters say. Nothing here runs an instruction: the order of
each wave's instructions is given.
"""

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from gfx950_sim.banks import CROSSBAR
from gfx950_sim.costs import Cost, Parameters, Unit, cost_of
from gfx950_sim.decode import NO_WAIT
from gfx950_sim.estimates import LDS_PORTS, SIMDS, Estimate, Span
from gfx950_sim.program import Program, rows_of
from gfx950_sim.recording import SECTOR_BYTES, Demand, WaveTrace

L1_SECTORS = 32 * 1024 // SECTOR_BYTES
"""32 KB of L1 a compute unit (CDNA3 and CDNA4 white papers)."""

Workgroup = Sequence[WaveTrace]
"""The traces of a workgroup's waves, in order."""


class _Static(NamedTuple):
    """What the timeline needs of one instruction of the program."""

    cost: Cost
    reads: tuple[int, ...]
    added: tuple[int, ...]
    """Registers of a matrix instruction's C operand."""
    writes: tuple[int, ...]
    name: str
    dma: bool


def prepare(program: Program, parameters: Parameters) -> list[_Static]:
    """The program's costs and registers."""
    prepared = []
    for instruction, reads, writes in zip(
        program.instructions, program.reads, program.writes, strict=True
    ):
        cost = cost_of(instruction, parameters)
        added: tuple[int, ...] = ()
        if cost.unit is Unit.MFMA and instruction.operands["src2"].kind == "vgpr":
            c = instruction.operands["src2"]
            added = tuple(range(c.index, c.index + c.count))
            others = 0
            for key, operand in instruction.operands.items():
                if key not in ("vdst", "src2") and operand.kind == "vgpr":
                    others |= ((1 << operand.count) - 1) << operand.index
            reads &= others | ~(((1 << c.count) - 1) << c.index)
        if cost.unit in (Unit.LDS, Unit.VMEM):
            writes = 0  # the wait for a load covers its registers
        dma = "_load_lds_" in instruction.name or bool(instruction.modifiers.get("lds"))
        prepared.append(
            _Static(
                cost, tuple(rows_of(reads)), added, tuple(rows_of(writes)), instruction.name, dma
            )
        )
    return prepared


class _Wave:
    __slots__ = (
        *("trace", "demands", "position", "ready", "chain", "vmem", "lgkm", "last_vmem"),
        *("slot", "number", "simd", "group", "start", "since", "reason", "marks", "order"),
    )

    def __init__(self, trace: WaveTrace, group: "_Group", number: int, start: float) -> None:
        self.trace, self.demands = trace.instructions, trace.demands
        self.position = 0
        self.ready = [0.0] * 641
        self.chain = [0.0] * 641
        self.vmem: list[float] = []
        self.lgkm: list[float] = []
        self.last_vmem = 0.0
        self.group, self.number, self.slot = group, number, group.slot
        self.simd = number % SIMDS
        self.start = self.since = start
        self.reason = ""
        self.marks: list[float] = []
        self.order = 0


class _Group:
    """A resident workgroup."""

    def __init__(self, slot: int, number: int, waves: int) -> None:
        self.slot, self.number = slot, number
        self.alive = waves
        self.waiting: list[_Wave] = []


class _ComputeUnit:
    def __init__(
        self,
        code: list[_Static],
        p: Parameters,
        bandwidth: float,
        latency: float,
        header: int | None,
        spans: bool,
    ) -> None:
        self.code, self.p, self.header = code, p, header
        self.bandwidth, self.latency = bandwidth, latency
        self.estimate = Estimate()
        self.keep_spans = spans
        self.valu_free = [0.0] * SIMDS
        self.mfma_free = [0.0] * SIMDS
        self.salu_free = [0.0] * SIMDS
        self.lds_issue_free = [0.0] * SIMDS
        self.port_free = [0.0] * LDS_PORTS
        self.address_free = self.l1_free = self.memory_free = 0.0
        self.l1: OrderedDict[int, None] = OrderedDict()
        # (time, order, wave) and, for data of a DMA load that arrives, (time, order, (port,
        # clocks)).
        self.queue: list[tuple[float, int, _Wave | tuple[int, float]]] = []
        self.order = 0

    def push(self, time: float, what: "_Wave | tuple[int, float]") -> None:
        if isinstance(what, _Wave):
            heapq.heappush(self.queue, (time, what.order, what))
        else:
            self.order += 1
            heapq.heappush(self.queue, (time, -self.order, what))

    def add(self, workgroup: Workgroup, slot: int, number: int, start: float) -> None:
        group = _Group(slot, number, len(workgroup))
        for index, trace in enumerate(workgroup):
            wave = _Wave(trace, group, index, start)
            self.order += 1
            wave.order = self.order
            self.push(start, wave)

    def run(self, slots: Sequence[Sequence[Workgroup]], stagger: float) -> Estimate:
        following = [1] * len(slots)
        for slot, workgroups in enumerate(slots):
            self.add(workgroups[0], slot, 0, slot * stagger)
        while self.queue:
            now, _, what = heapq.heappop(self.queue)
            if not isinstance(what, _Wave):
                port, clocks = what
                self.port_free[port] = max(self.port_free[port], now) + clocks
                self.estimate.busy["LDS"] += clocks
                continue
            wave = what
            entry = self.code[wave.trace[wave.position]]
            earliest, reason = self.earliest(wave, entry, now)
            if earliest > now:
                wave.reason = wave.reason or reason
                self.push(earliest, wave)
                continue
            self.note_stall(wave, now, entry)
            self.issue(wave, entry, now)
            if entry.cost.unit is Unit.END:
                slot = wave.slot
                wave.group.alive -= 1
                if wave.group.alive == 0 and following[slot] < len(slots[slot]):
                    number = following[slot]
                    following[slot] += 1
                    begin = now + self.p.workgroup_start
                    self.add(slots[slot][number], slot, number, begin)
                elif wave.group.waiting and len(wave.group.waiting) == wave.group.alive:
                    self.release(wave.group, now)
        return self.estimate

    def earliest(self, wave: _Wave, entry: _Static, now: float) -> tuple[float, str]:
        """When the wave's next instruction can issue at the earliest, and what holds it."""
        unit, cost = entry.cost.unit, entry.cost
        time, reason = now, ""
        ready = wave.ready
        for register in entry.reads:
            if ready[register] > time:
                time, reason = ready[register], "dependence"
        if unit is Unit.MFMA:
            chain = wave.chain
            for register in entry.added:
                if chain[register] > time:
                    time, reason = chain[register], "dependence"
            for register in entry.writes:
                if chain[register] > time:  # results are written in order
                    time, reason = chain[register], "dependence"
            free = max(self.valu_free[wave.simd], self.mfma_free[wave.simd])
            if free > time:
                time, reason = free, "MFMA busy"
        elif unit is Unit.VALU:
            for register in entry.writes:
                if ready[register] > time:
                    time, reason = ready[register], "dependence"
            if self.valu_free[wave.simd] > time:
                time, reason = self.valu_free[wave.simd], "VALU busy"
        elif unit is Unit.LDS:
            if self.lds_issue_free[wave.simd] > time:
                time, reason = self.lds_issue_free[wave.simd], "LDS busy"
        elif unit is Unit.VMEM:
            if self.address_free > time:
                time, reason = self.address_free, "memory issue"
        elif unit is Unit.WAIT:
            done, which = self.wait_done(wave, cost)
            if done > time:
                time, reason = done, which
        elif unit in (Unit.SALU, Unit.BRANCH, Unit.SMEM) and self.salu_free[wave.simd] > time:
            time, reason = self.salu_free[wave.simd], "SALU busy"
        return time, reason

    def wait_done(self, wave: _Wave, cost: Cost) -> tuple[float, str]:
        done, reason = 0.0, ""
        if cost.wait.vmcnt != NO_WAIT.vmcnt and len(wave.vmem) > cost.wait.vmcnt:
            done, reason = wave.vmem[len(wave.vmem) - cost.wait.vmcnt - 1], "memory wait"
        if cost.wait.lgkmcnt != NO_WAIT.lgkmcnt and len(wave.lgkm) > cost.wait.lgkmcnt:
            lds = sorted(wave.lgkm)[len(wave.lgkm) - cost.wait.lgkmcnt - 1]
            if lds > done:
                done, reason = lds, "LDS wait"
        return done, reason

    def note_stall(self, wave: _Wave, now: float, entry: _Static) -> None:
        estimate = self.estimate
        if now > wave.since:
            estimate.stalls[wave.reason] += now - wave.since
            # A barrier holds the wave after it has issued.
            waiting = wave.trace[wave.position - (wave.reason == "barrier")]
            estimate.stalls_at[waiting, wave.reason] += now - wave.since
            if self.keep_spans:
                span = Span(wave.slot, wave.number, wave.reason, wave.reason, wave.since, now)
                estimate.spans.append(span)
        wave.reason = ""
        if self.keep_spans:
            end = now + entry.cost.issue
            estimate.spans.append(Span(wave.slot, wave.number, entry.name, "issue", now, end))

    def issue(self, wave: _Wave, entry: _Static, now: float) -> None:
        cost, unit, simd = entry.cost, entry.cost.unit, wave.simd
        index = wave.trace[wave.position]
        if index == self.header:
            wave.marks.append(now)
        following = now + cost.issue
        if unit is Unit.MFMA:
            self.valu_free[simd] = now + self.p.issue
            self.mfma_free[simd] = now + cost.busy
            self.estimate.busy["MFMA"] += cost.busy
        elif unit is Unit.VALU:
            self.valu_free[simd] = now + cost.busy
            self.estimate.busy["VALU"] += cost.busy
        elif unit is Unit.LDS:
            self.lds_issue_free[simd] = now + self.p.issue
            self.lds(wave, now, wave.demands.get(wave.position))
        elif unit is Unit.VMEM:
            self.memory(wave, entry, now, wave.demands.get(wave.position, Demand()))
        elif unit is Unit.WAIT:
            wave.vmem = [t for t in wave.vmem if t > now]
            wave.lgkm = [t for t in wave.lgkm if t > now]
        elif unit in (Unit.SALU, Unit.BRANCH, Unit.SMEM):
            self.salu_free[simd] = now + self.p.salu
            if unit is Unit.SMEM:
                wave.lgkm.append(now + cost.latency)
            elif unit is Unit.BRANCH and self.taken(wave, index):
                following = now + self.p.taken_branch
        for register in entry.writes:
            wave.ready[register] = now + cost.latency
            wave.chain[register] = now + cost.chain_latency
        self.advance(wave, unit, now, following)

    def advance(self, wave: _Wave, unit: Unit, now: float, following: float) -> None:
        wave.position += 1
        wave.since = following
        if unit is Unit.END:
            estimate = self.estimate
            estimate.clocks = max(estimate.clocks, now)
            estimate.wave_clocks += now - wave.start
            estimate.marks[wave.slot, wave.group.number, wave.number] = wave.marks
        elif unit is Unit.BARRIER:
            wave.group.waiting.append(wave)
            wave.reason = "barrier"
            if len(wave.group.waiting) == wave.group.alive:
                self.release(wave.group, now)
        else:
            self.push(following, wave)

    def release(self, group: _Group, now: float) -> None:
        for wave in group.waiting:
            self.push(now + self.p.barrier, wave)
        group.waiting = []

    def taken(self, wave: _Wave, index: int) -> bool:
        after = wave.position + 1
        return after < len(wave.trace) and wave.trace[after] != index + 1

    def lds(self, wave: _Wave, now: float, demand: Demand | None) -> None:
        phase = self.p.lds_phase
        if demand is None:
            phases = CROSSBAR.taken
        else:
            phases = demand.lds_phases
            if demand.lds_write:
                phase = self.p.lds_write_phase
        port = wave.simd // (SIMDS // LDS_PORTS)
        clocks = phases * phase * LDS_PORTS
        begin = max(now, self.port_free[port])
        self.port_free[port] = begin + clocks
        self.estimate.busy["LDS"] += clocks
        wave.lgkm.append(begin + clocks + self.p.lds_latency)

    def look_up(self, sectors: tuple[int, ...]) -> int:
        """Sectors that L1 lacks; they are kept now, and the least recently used give way."""
        missing = 0
        for sector in sectors:
            if sector in self.l1:
                self.l1.move_to_end(sector)
            else:
                missing += 1
                self.l1[sector] = None
        while len(self.l1) > L1_SECTORS:
            self.l1.popitem(last=False)
        return missing

    def memory(self, wave: _Wave, entry: _Static, now: float, demand: Demand) -> None:
        p = self.p
        # One instruction may stand between the address unit and a busy L1; the next waits at issue.
        self.address_free = max(now + p.address, self.l1_free)
        begin = max(now + p.address, self.l1_free)
        delivering = max(len(demand.sectors), demand.bytes / SECTOR_BYTES) * p.l1_sector
        self.l1_free = begin + delivering
        self.estimate.busy["L1"] += delivering
        moving = max(begin, self.memory_free)
        missing = len(demand.sectors) if demand.store else self.look_up(demand.sectors)
        clocks = missing * SECTOR_BYTES / self.bandwidth
        self.memory_free = moving + clocks
        self.estimate.busy["memory"] += clocks
        done = max(self.l1_free, self.memory_free) + self.latency
        if entry.dma:
            write = demand.lds_phases * p.lds_write_phase * LDS_PORTS
            self.push(done, (wave.simd // (SIMDS // LDS_PORTS), write))
            done += write
        done = max(done, wave.last_vmem)
        wave.last_vmem = done
        wave.vmem.append(done)
        if not demand.store:
            self.estimate.byte_clocks += demand.bytes * (done - now)


def estimate(
    program: Program,
    slots: Sequence[Sequence[Workgroup]],
    parameters: Parameters | None = None,
    *,
    latency: float | None = None,
    bandwidth: float | None = None,
    header: int | None = None,
    spans: bool = False,
) -> Estimate:
    """Estimates how one compute unit executes some workgroups.

    Args:
      program: the kernel.
      slots: as many as workgroups are resident at once; each is the list of workgroups it runs one
        after another. parameters: the model's; None for the settled ones. latency: clocks of a
        memory load without queues; None for L2's. bandwidth: bytes a clock from memory to this
        compute unit; None for L2's. header: index of the instruction whose times `Estimate.marks`
        keeps. spans: whether to keep `Estimate.spans`.
    """
    p = parameters or Parameters()
    unit = _ComputeUnit(
        prepare(program, p),
        p,
        p.l2_bytes if bandwidth is None else bandwidth,
        p.l2_latency if latency is None else latency,
        header,
        spans,
    )
    return unit.run(slots, p.stagger)
