"""Which waits and barriers a run needed, and how strict each wait had to be.

When a wait completes an operation, the operation is watched until another wait would have covered
it too. If something consumes it before that (a register is used, another wave touches the LDS
bytes), the wait was needed, with a count of at most the number of younger operations at that
moment. A barrier was needed if it is the only one between two conflicting LDS accesses of
different waves.
"""

from dataclasses import dataclass, field

from gfx950_sim.decode import NO_WAIT, Instruction, Waitcnt


@dataclass
class WaitNeed:
    """What one counter of one s_waitcnt does."""

    instruction: Instruction
    counter: str
    """"vmcnt" or "lgkmcnt"."""
    count: int
    """As written."""
    required: int | None
    """The largest count with which every consumer is still covered; None when no consumer needs
    it."""


@dataclass
class Analysis:
    """Collected over the waves and workgroups of a run."""

    executed: set[int] = field(default_factory=set)
    """Indexes of s_waitcnt and s_barrier instructions that ran."""
    required: dict[tuple[int, str], int] = field(default_factory=dict)
    barriers: set[int] = field(default_factory=set)
    """Indexes of barriers that were needed."""

    def need(self, index: int, counter: str, count: int) -> None:
        """A consumer needs the wait ``index`` to have a count of at most ``count``."""
        key = (index, counter)
        before = self.required.get(key)
        if before is None or count < before:
            self.required[key] = count

    def waits(self, program: tuple[Instruction, ...]) -> list[WaitNeed]:
        """One entry for each counter that an executed s_waitcnt waits on."""
        needs = []
        for index in sorted(self.executed):
            instruction = program[index]
            if instruction.name != "s_waitcnt":
                continue
            counts = Waitcnt.of(instruction.modifiers["simm16"])
            for counter in ("vmcnt", "lgkmcnt"):
                count = getattr(counts, counter)
                if count != getattr(NO_WAIT, counter):
                    required = self.required.get((index, counter))
                    needs.append(WaitNeed(instruction, counter, count, required))
        return needs

    def needed_barriers(self, program: tuple[Instruction, ...]) -> list[Instruction]:
        """Executed barriers that order some pair of LDS accesses no other barrier orders."""
        return [program[i] for i in sorted(self.barriers)]

    def redundant_barriers(self, program: tuple[Instruction, ...]) -> list[Instruction]:
        """Executed barriers that order nothing of their own."""
        barriers = (i for i in sorted(self.executed) if program[i].name == "s_barrier")
        return [program[i] for i in barriers if i not in self.barriers]
