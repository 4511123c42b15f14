"""LDS bank conflicts: how many phases an LDS instruction takes.

The LDS of gfx950 has 64 banks of 4 bytes (CDNA4 ISA, "Local data share": 64 banks of 640 entries).
An instruction is done in phases, each serving a fixed group of lanes. Within a phase each bank
delivers one dword, to any number of lanes; lanes of one phase that want different dwords of one
bank conflict, and the phase is repeated.

Groups and banks by width, with what is known of them:

* ``ds_read_b128``: 4 phases of 16 lanes, 64 banks. AMD's blog on FP8 GEMM for CDNA4 names the
groups; HipKittens
  (arXiv 2511.08083, analysis/paper_experiments/phases) found the same groups and banks on an MI355X
  from the conflict counter of all pairs of lanes.
* ``ds_read_b64``: 2 phases of 32 lanes, 64 banks; ``ds_read_b96``: 8 phases of 8 lanes, 32 banks;
  ``ds_write_b64``: 4 phases of 16 lanes, 32 banks. Measured, HipKittens.
* ``ds_read_b64_tr_b8``, ``ds_read_b64_tr_b16``: as ds_read_b64. Assumed: they fetch the same bytes
from the same
  addresses and transpose on the way to the registers.
* ``ds_write_b128``, ``ds_write_b96``: 8 phases of 8 lanes in a row, 32 banks. From ds_write_b64's
128 bytes a phase and CDNA3's
  groups (AMD's blog on LDS bank conflicts in Composable Kernel).
* 4 bytes and less: 2 phases of 32 lanes (CDNA4 ISA: an access takes 2 cycles at least), reads on 64
banks, writes on 32. * DMA to LDS: written as ds_write of its width; lanes go to consecutive
addresses, so no conflict is possible. * ``ds_bpermute_b32`` and the like use the crossbar only: 2
phases.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Phases(NamedTuple):
    """Phases of one LDS instruction."""

    taken: int
    least: int
    """Without conflicts."""

    @property
    def conflicts(self) -> int:
        """Phases repeated because of bank conflicts."""
        return self.taken - self.least


CROSSBAR = Phases(2, 2)
"""An exchange between lanes that touches no LDS memory."""


class _Rule(NamedTuple):
    banks: int
    group_of_lane: Array
    groups: int


def _consecutive(lanes: int) -> Array:
    return np.arange(64) // lanes


_READ_B128_GROUP = np.array([0, 1, 1, 0, 1, 0, 0, 1, 2, 3, 3, 2, 3, 2, 2, 3]).repeat(4)
"""Lanes 0-3, 12-15, 20-27 go together, 4-11, 16-19, 28-31, and the same in the upper half."""
_READ_B96_GROUP = np.array([0, 1, 2, 3, 1, 0, 3, 2, 4, 5, 6, 7, 5, 4, 7, 6]).repeat(4)

_READ = {
    4: _Rule(64, _consecutive(32), 2),
    8: _Rule(64, _consecutive(32), 2),
    12: _Rule(32, _READ_B96_GROUP, 8),
    16: _Rule(64, _READ_B128_GROUP, 4),
}
_WRITE = {
    4: _Rule(32, _consecutive(32), 2),
    8: _Rule(32, _consecutive(16), 4),
    12: _Rule(32, _consecutive(8), 8),
    16: _Rule(32, _consecutive(8), 8),
}


@functools.cache
def _lane_bases(size: int, write: bool) -> tuple[_Rule, Array]:
    rule = (_WRITE if write else _READ)[max(size, 4)]
    return rule, rule.group_of_lane[:, np.newaxis].astype(np.int64) << 32


def phases(addresses: Array, size: int, lanes: Array | None, *, write: bool) -> Phases:
    """Phases of an LDS instruction.

    Args:
      addresses: byte addresses in the LDS, [k, 64]: k accesses a lane, each an access of its own.
      size: bytes of each access a lane: 1, 2, 4, 8, 12 or 16.
      lanes: bool [64] or [k, 64], the lanes that take part; None for all.
      write: whether it writes (DMA too) rather than reads.
    """
    taken = least = 0
    mask = None if lanes is None else np.broadcast_to(lanes, addresses.shape)
    for number, row in enumerate(addresses):
        step = _one_access(row, size, None if mask is None else mask[number], write)
        taken, least = taken + step.taken, least + step.least
    return Phases(taken, least)


def _one_access(addresses: Array, size: int, lanes: Array | None, write: bool) -> Phases:
    # Loops repeat few patterns, at most shifted: count each pattern once, from the first lane's row
    # of banks.
    shifted = addresses.astype(np.int64)
    shifted -= shifted[0] & -256
    return _pattern(shifted.tobytes(), size, None if lanes is None else lanes.tobytes(), write)


@functools.lru_cache(maxsize=4096)
def _pattern(addresses: bytes, size: int, lanes: bytes | None, write: bool) -> Phases:
    rule, bases = _lane_bases(size, write)
    dwords = (np.frombuffer(addresses, np.int64) >> 2)[:, np.newaxis] + np.arange(max(size // 4, 1))
    keys = bases | (dwords & 0xFFFFFFFF)
    if lanes is not None:
        keys = keys[np.frombuffer(lanes, bool)]
    distinct = np.unique(keys)
    slot = (distinct >> 32) * rule.banks + (distinct & 0xFFFFFFFF) % rule.banks
    demand = np.bincount(slot, minlength=rule.groups * rule.banks)
    worst = demand.reshape(rule.groups, rule.banks).max(axis=1)
    return Phases(int(worst.sum()), int((worst > 0).sum()))
