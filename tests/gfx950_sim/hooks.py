"""What a run tells to those who watch it (counts, bank conflicts, cycle model)."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gfx950_sim.decode import Instruction

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class MemoryEvent:
    """One executed memory instruction of one wave."""

    workgroup: int
    wave: int
    position: int
    """Index in ``result.traces[workgroup, wave]`` of this execution."""
    instruction: Instruction
    space: str
    """"lds", "global" or "scalar"; a DMA load makes two events: "global" (its reads) and "lds"
    (its writes)."""
    kind: str
    """"load", "store" or "dma"."""
    addresses: Array
    """uint64 [k, 64]: byte addresses of k accesses a lane (LDS: offset in the workgroup's LDS).
    Scalar: [1, 1]."""
    size: int
    """Bytes a lane of each access."""
    lanes: Array
    """bool [64] (or [k, 64]): the lanes that access."""


class Observer(Protocol):
    """Gets the events of a run; `run(..., observer=...)`."""

    def memory(self, event: MemoryEvent) -> None:
        """Called for each executed memory instruction, in the order the waves were run."""
