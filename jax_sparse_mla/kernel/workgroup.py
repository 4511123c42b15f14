"""What one workgroup works on: its row, its head group, and this thread's place in it."""

from typing import NamedTuple

import flydsl.expr as fx

from jax_sparse_mla.kernel import instructions as isa
from jax_sparse_mla.kernel.contract import HEADS_PER_GROUP, NUM_XCD
from jax_sparse_mla.kernel.instructions import Value
from jax_sparse_mla.kernel.lds import LANES


class Lane(NamedTuple):
    """This thread: lane ``16g + t`` of wave ``wave`` (wave-uniform)."""

    wave: Value
    t: Value
    g: Value


class Work(NamedTuple):
    """The row and the heads of this workgroup, wave-uniform."""

    row: Value
    query: Value
    first_head: Value


class Row(NamedTuple):
    """The entries of a row, wave-uniform."""

    words: isa.BoundedWords
    """The row's entries; reads past them give 0."""
    length: Value


class LastEntry(NamedTuple):
    """The last valid entry of a row, wave-uniform."""

    count: Value
    """Entries up to and with it; 0 if the row has none."""
    slot: Value
    """Its slot. Masked entries load that one, for it is this row's own."""


def this_lane() -> Lane:
    """Where the thread stands; the wave number is made a scalar."""
    wave = isa.first_lane(fx.Int32(fx.thread_idx.x) >> 6)
    return same_lane(wave)


def same_lane(wave: Value) -> Lane:
    """This thread again, given its wave: for use after a loop that has no register to spare."""
    lane = isa.lane_number()
    return Lane(wave, lane & 15, lane >> 4)


def this_work(num_heads: Value, num_splits: Value) -> Work:
    """The row and head group of this workgroup, as ``contract.num_workgroups`` deals them."""
    groups = fx.Uint32((num_heads + (HEADS_PER_GROUP - 1)) >> 4)
    block = fx.Uint32(fx.block_idx.x)

    def spread() -> list[Value]:
        octet = block // NUM_XCD
        rows = octet // groups
        return [rows * NUM_XCD + block % NUM_XCD, octet - rows * groups]

    # Division is a score of instructions: only where there is something to divide.
    row, group = isa.when(groups > fx.Uint32(1), spread, [block, fx.Uint32(0)])
    splits = fx.Uint32(num_splits)
    (query,) = isa.when(splits > fx.Uint32(1), lambda: [row // splits], [row])
    return Work(fx.Int32(row), fx.Int32(query), fx.Int32(group) * HEADS_PER_GROUP)


def address(pointer: Value) -> Value:
    """A pointer argument as a 64-bit number."""
    return fx.Uint64(fx.ptrtoint(pointer))


def load_row(
    work: Work, indices: Value, row_begin: Value, row_end: Value, num_indices: Value
) -> Row:
    """Read where the row lies; any begin and end are held within the indices.

    Offsets into a row are int32 bytes: a row has fewer than 2^29 entries.
    """
    where = fx.Uint64(fx.Uint32(work.row)) * 4

    def bound(pointer: Value) -> Value:
        value = isa.first_lane(isa.global_load_constant(pointer + where))
        value = (value < 0).select(fx.Int32(0), value)
        return (value > num_indices).select(num_indices, value)

    begin, end = bound(row_begin), bound(row_end)
    length = (end > begin).select(end - begin, fx.Int32(0))
    start = indices + fx.Uint64(fx.Uint32(begin)) * 4
    return Row(isa.BoundedWords(start, fx.Uint64(fx.Uint32(length)) * 4), length)


class Search(NamedTuple):
    """The search of a row from its end for a valid entry."""

    row: Row
    first: Value
    """Number of this lane's first entry in a step."""
    begin: Value
    """Where the step begins whose entries have been asked for; wave-uniform."""
    found: Value

    def _step(self, end: Value) -> tuple[Value, Value]:
        begin = (end > _STEP).select(end - _STEP, fx.Int32(0))
        return begin, self.row.words.load(self.first * 4, begin * 4, _LANE_STEP)

    def last_entry(self, kv_rows: Value) -> LastEntry:
        """The row's last valid entry; a row without padding takes one step.

        The search is always made, since a row that masks anything needs a slot of its own to load.
        """

        def look(end: Value, begin: Value, found: Value) -> list[Value]:
            position, own_slot = fx.Int32(-1), found[0]
            for i in range(_LANE_STEP):
                valid = (self.first + i < end - begin) & is_slot(found[i], kv_rows)
                position = valid.select(self.first + i, position)
                own_slot = valid.select(found[i], own_slot)
            lanes = isa.ballot(position >= 0)
            any_valid = lanes != fx.Uint64(0)
            last = isa.highest_bit(any_valid.select(lanes, fx.Uint64(1)))
            count = begin + isa.read_lane(position, last) + 1
            slot = isa.read_lane(own_slot, last)
            return [begin, any_valid.select(count, fx.Int32(0)), slot]

        first_look = look(self.row.length, self.begin, self.found)
        _, count, slot = isa.repeat_while(
            first_look,
            lambda state: (state[0] > 0) & (state[1] == 0),
            lambda state: look(state[0], *self._step(state[0])),
        )
        return LastEntry(count, slot)


def start_search(row: Row, lane: Lane) -> Search:
    """Ask for the entries of the search's first step."""
    search = Search(row, (lane.g * 16 + lane.t) * _LANE_STEP, fx.Int32(0), fx.Int32(0))
    begin, found = search._step(row.length)
    return search._replace(begin=begin, found=found)


_LANE_STEP = 4
_STEP = LANES * _LANE_STEP
"""Entries looked at in one step of the search."""


def is_slot(index: Value, kv_rows: Value) -> Value:
    """Whether an entry names a record; one unsigned compare masks negative and too large ones."""
    return fx.Uint32(index) < fx.Uint32(kv_rows)
