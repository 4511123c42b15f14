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
    """The entries of a row up to its last valid one, wave-uniform."""

    words: isa.BoundedWords
    """The row's entries; reads past them give 0."""
    count: Value
    """Entries up to and with the last valid one; 0 if the row has none."""
    spare_slot: Value
    """The slot of the last valid entry; masked entries load it, for it is this row's own."""


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
    octet = block // NUM_XCD
    rows = octet // groups
    spread_row = rows * NUM_XCD + block % NUM_XCD
    spread_group = octet - rows * groups
    one_group = groups == fx.Uint32(1)
    row = one_group.select(block, spread_row)
    group = one_group.select(fx.Uint32(0), spread_group)
    query = row // fx.Uint32(num_splits)
    return Work(fx.Int32(row), fx.Int32(query), fx.Int32(group) * HEADS_PER_GROUP)


def address(pointer: Value) -> Value:
    """A pointer argument as a 64-bit number."""
    return fx.Uint64(fx.ptrtoint(pointer))


def load_row(
    work: Work,
    indices: Value,
    row_begin: Value,
    row_end: Value,
    num_indices: Value,
    kv_rows: Value,
    lane: Lane,
) -> Row:
    """Read where the row lies, and find its last valid entry.

    Every row needs one valid slot for its masked entries to load, so the search from the end is
    always made; for a row without padding it ends at its first step.
    """
    where = fx.Uint64(fx.Uint32(work.row)) * 4

    def bound(pointer: Value) -> Value:
        value = isa.first_lane(isa.global_load_constant(address(pointer) + where))
        value = (value < 0).select(fx.Int32(0), value)
        return (value > num_indices).select(num_indices, value)

    begin, end = bound(row_begin), bound(row_end)
    length = (end > begin).select(end - begin, fx.Int32(0))
    start = address(indices) + fx.Uint64(fx.Uint32(begin)) * 4
    words = isa.BoundedWords(start, fx.Uint64(fx.Uint32(length)) * 4)
    lane_number = lane.g * 16 + lane.t

    def not_found(state: list[Value]) -> Value:
        end_of_search, count, _ = state
        return (end_of_search > 0) & (count == 0)

    def look_back(state: list[Value]) -> list[Value]:
        end_of_search, count, slot = state
        begin_of_search = (end_of_search > _STEP).select(end_of_search - _STEP, fx.Int32(0))
        offset = begin_of_search * 4
        found = [words.load(lane_number * 4 + LANES * 4 * i, offset) for i in range(_STEP // LANES)]
        for i, index in enumerate(found):
            position = begin_of_search + (lane_number + LANES * i)
            mask = isa.ballot((position < end_of_search) & is_slot(index, kv_rows))
            any_valid = mask != fx.Uint64(0)
            last = isa.highest_bit(any_valid.select(mask, fx.Uint64(1)))
            count = any_valid.select(begin_of_search + last + (LANES * i + 1), count)
            slot = any_valid.select(isa.read_lane(index, last), slot)
        return [begin_of_search, count, slot]

    initial = [length, fx.Int32(0), fx.Int32(0)]
    _, count, spare_slot = isa.repeat_while(initial, not_found, look_back)
    return Row(words, count, spare_slot)


_STEP = 256
"""Entries looked at in one step of the search."""


def is_slot(index: Value, kv_rows: Value) -> Value:
    """Whether an entry names a record; one unsigned compare masks negative and too large ones."""
    return fx.Uint32(index) < fx.Uint32(kv_rows)
