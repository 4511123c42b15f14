"""One wave's share of a tile: its 32 entries' indices, records, and their way into LDS."""

from collections.abc import Callable
from typing import NamedTuple

import flydsl.expr as fx

from jax_sparse_mla.kernel import instructions as isa
from jax_sparse_mla.kernel import lds
from jax_sparse_mla.kernel.contract import LATENT_DIM, RECORD_BYTES
from jax_sparse_mla.kernel.instructions import Value
from jax_sparse_mla.kernel.workgroup import Lane, LastEntry, Row, is_slot

_SCALES = LATENT_DIM
"""Offset of the four float32 scales in a record."""
_ROPE = LATENT_DIM + 16
"""Offset of the 64 bfloat16 of the rope part."""
_MASK = 2.0**127
"""Taken from the product of a masked entry; the smallest factor leaves 2^27 of it."""

_OTHER_GROUPS = (1 << 64) - (1 << 16)
"""Lanes that are not in group 0."""

# Entries are dealt to lanes in two ways, n being the entry's number in the wave:
# - to move a latent, 16 lanes take one row, 16 bytes a lane: lanes 16g .. 16g + 15 move entries
#   8g .. 8g + 7 one after the other, and lane (t, g) reads the index of entry 8g + t % 8;
# - as rows of the score products, lane (t, g) holds quarter g of entries t and 16 + t.
MOVES = 8
SUBTILES = 2


class Indices(NamedTuple):
    """Entries of the row as read, by the ways they are dealt."""

    moved: Value
    scored: list[Value]


class Side(NamedTuple):
    """What a lane knows of entries t and 16 + t: row t of the score products of each subtile."""

    scales: list[Value]
    """The entry's scale of block g, float32 bits."""
    rope: list[Value]
    """Two operands of 4 dwords for each subtile."""
    unmasked: list[Value]
    """Lanes that leave a score as it is, wave-uniform: all but group 0's with a masked entry."""


class Stream(NamedTuple):
    """Where a wave finds its entries of the row."""

    row: Row
    moved: Value
    """Byte offsets into the row's entries of tile 0."""
    scored: Value

    def load(self, tile: Value) -> Indices:
        """Read the wave's entries of a tile; those past the row give 0."""
        start, load = tile * (4 * lds.TILE), self.row.words.load
        return Indices(
            load(self.moved, start),
            [load(self.scored, start + 4 * 16 * s) for s in range(SUBTILES)],
        )


class Tiles(NamedTuple):
    """Where a wave finds the records of tile after tile."""

    stream: Stream
    last: LastEntry
    kv_rows: Value
    kv: Value
    moved_base: Value
    """64-bit address of this lane's part of record 0."""
    group: Value

    def _conditions(
        self, index: Value, offset: Value, ahead: int, tile: Value
    ) -> tuple[Value, Value]:
        """Whether the row goes on to an entry, and whether its index names a record."""
        left = (self.last.count - tile * lds.TILE - ahead) * 4
        return offset < left, is_slot(index, self.kv_rows)

    def moved_slots(self, indices: Indices, tile: Value) -> Value:
        """The slots of the latents this lane's group moves, one a lane; all are the row's own."""
        within, valid = self._conditions(indices.moved, self.stream.moved, 0, tile)
        return (within & valid).select(indices.moved, self.last.slot)

    def load_latent(self, slots: Value, move: int) -> list[Value]:
        """Start loading a latent, of entry 8g + move, chunks t and 16 + t."""
        record = _record(self.moved_base, isa.broadcast_in_row(slots, move))
        return [isa.global_load(record, 4, offset) for offset in (0, LATENT_DIM // 2)]

    def scored_slots(self, indices: Indices, tile: Value) -> tuple[list[Value], list[Value]]:
        """The slots of entries t and 16 + t, and Side.unmasked."""
        slots, masks = [], []
        for s, index in enumerate(indices.scored):
            within, valid = self._conditions(index, self.stream.scored, 16 * s, tile)
            # Opaque: put off to the use, it would keep the index while the next one is loaded.
            slots.append(isa.opaque((within & valid).select(index, self.last.slot)))
            # Two ballots: of a conjunction the compiler makes a number first.
            counts = isa.ballot(within) & isa.ballot(valid)
            masks.append(counts | fx.Uint64(_OTHER_GROUPS))
        return slots, masks

    def load_side(self, slots: list[Value]) -> list[Value]:
        """Start loading what a lane has of entries t and 16 + t beside the latents.

        The scale of block g of each, then the rope operands, two of 4 dwords each.
        """
        # Addresses of the lane group's parts are worked out anew, to spare registers.
        group = fx.Uint64(fx.Uint32(isa.opaque(self.group)))
        scales = [_record(self.kv + group * 4, slot) for slot in slots]
        ropes = [_record(self.kv + group * 16, slot) for slot in slots]
        return [isa.global_load(record, 1, _SCALES) for record in scales] + [
            isa.global_load(record, 4, _ROPE + 64 * i) for record in ropes for i in (0, 1)
        ]

    def bias(self, side: Side, subtile: int) -> Value:
        """0, or in lane group 0 of a masked entry what takes its score below all others."""
        unmasked = isa.lane_condition(side.unmasked[subtile])
        return unmasked.select(fx.Float32(0.0), fx.Float32(-_MASK))


def stream_of(row: Row, lane: Lane) -> Stream:
    """Prepare reading a row's entries."""
    first = lane.wave * lds.WAVE_ENTRIES
    moved = lane.g * MOVES + (lane.t & (MOVES - 1))
    return Stream(row, (first + moved) * 4, (first + lane.t) * 4)


def tiles_of(stream: Stream, last: LastEntry, kv: Value, kv_rows: Value, lane: Lane) -> Tiles:
    """Prepare what stays the same from tile to tile."""
    return Tiles(
        stream=stream,
        last=last,
        kv_rows=kv_rows,
        kv=kv,
        moved_base=kv + fx.Uint64(fx.Uint32(lane.t * 16)),
        group=lane.g,
    )


def stage_address(lane: Lane, lds_base: Value) -> Value:
    """The address for ``stage``."""
    # The swizzle of entry 8g + j is 8(g % 2) ^ 4(g // 2) ^ j.
    chunk = lane.t ^ ((lane.g & 1) * 8) ^ ((lane.g >> 1) * 4)
    row = lane.wave * lds.WAVE_ENTRIES + lane.g * MOVES
    return lds_base + (lds.LATENT.start + row * LATENT_DIM + chunk * lds.CHUNK)


def stage(latent: list[Value], address: Value, meanwhile: Callable[[int], None]) -> None:
    """Write the loaded latents to LDS; ``meanwhile(i)`` is called once move i has been written."""
    for j in range(MOVES):
        for half in (0, 1):
            offset = LATENT_DIM * j + LATENT_DIM // 2 * half
            isa.lds_store(address ^ (lds.CHUNK * j), latent[2 * j + half], 4, offset)
        isa.schedule_fence()
        meanwhile(j)
        isa.schedule_fence()


def _record(base: Value, slot: Value) -> Value:
    """Address of a lane's part of a record, in 64 bits: one multiply-add."""
    return base + fx.Uint64(fx.Uint32(slot)) * RECORD_BYTES
