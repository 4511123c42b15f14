"""Memory operations of a wave that were issued and are not known to be complete."""

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
UNFINISHED = 1 << 30
"""Epoch of what has not happened yet."""


@dataclass(slots=True, eq=False)
class Operation:
    """One issued memory instruction.

    Its registers hold stale values until the wait that covers it; `Wave.complete` then delivers.
    """

    index: int
    """The instruction's index."""
    counter: str
    """"vmcnt", "lgkmcnt" (LDS, in order) or "smem" (scalar loads, out of order, on lgkmcnt)."""
    wave: int
    mask: int = 0
    """Registers that wait for it, as bits (see `program`)."""
    target: Array | None = None
    """Destination rows, a view of the register file."""
    data: Any = None
    lanes: Array | None = None
    """Lanes that receive; None: all."""
    sequence: int = 0
    """Number of earlier operations of the same counter and wave."""
    lds_id: int = 0
    """Its number in the LDS history, 0 when it touches none."""
    atomic: bool = False
    """An atomic LDS access: two of them need no order."""
    epoch: int = 0
    """Barriers the wave had passed at issue."""
    dma: Any = None
    """For a DMA load: (`lds_memory.Plan`, rows), stored on completion."""
    wait: int = -1
    """Index of the s_waitcnt that completed it."""
    younger: int = 0
    """Operations of its counter issued after it when that wait ran."""
