"""One wave's share of a tile: its 32 entries' indices, records, and their way into LDS."""

from typing import NamedTuple

import flydsl.expr as fx

from jax_sparse_mla.kernel import instructions as isa
from jax_sparse_mla.kernel import lds
from jax_sparse_mla.kernel.contract import LATENT_DIM, RECORD_BYTES
from jax_sparse_mla.kernel.instructions import Value
from jax_sparse_mla.kernel.workgroup import Lane, Row, is_slot

MASKED = -(2.0**127)
"""Added to the product of a masked entry."""

_SCALES = LATENT_DIM
"""Offset of the four float32 scales in a record."""
_ROPE = LATENT_DIM + 16
"""Offset of the 64 bfloat16 of the rope part."""

# Entries are dealt to lanes in two ways, n being the entry's number in the wave:
# - to move a latent, 16 lanes take one row, 16 bytes a lane: lanes 16g .. 16g + 15 move entries
#   8g .. 8g + 7 one after the other, and lane (t, g) reads the index of entry 8g + t % 8;
# - as rows of the score products, lane (t, g) holds quarter g of entries t and 16 + t.
_MOVES = 8
SUBTILES = 2


class Indices(NamedTuple):
    """Entries of the row as read, by the ways they are dealt."""

    moved: Value
    scored: list[Value]


class Side(NamedTuple):
    """What a lane knows of entries t and 16 + t: row t of the score products of each subtile."""

    scales: list[Value]
    """The entry's scale of block g, float32 bits."""
    rope: list[list[Value]]
    """Two operands of 4 dwords."""
    bias: list[Value]
    """0, or MASKED in lane group 0 of a masked entry."""


class Tiles(NamedTuple):
    """Where a wave finds the entries of tile after tile."""

    row: Row
    kv_rows: Value
    moved_entry: Value
    scored_entry: list[Value]
    moved_base: Value
    """64-bit address of this lane's 16 bytes in record 0."""
    rope_base: Value
    scale_base: Value
    masked_bias: Value
    stage_address: Value

    def load_indices(self, tile: Value) -> Indices:
        """Read the wave's entries of a tile; those past the row give 0."""
        start = tile * (4 * lds.TILE)
        moved = self.row.words.load(self.moved_entry * 4, start)
        scored = [self.row.words.load(entry * 4, start) for entry in self.scored_entry]
        return Indices(moved, scored)

    def _resolve(self, index: Value, entry: Value, tile: Value) -> tuple[Value, Value]:
        """The slot to load, always one of the row's own, and whether the entry counts."""
        valid = (entry < self.row.count - tile * lds.TILE) & is_slot(index, self.kv_rows)
        return valid.select(index, self.row.spare_slot), valid

    def load_latent(self, indices: Indices, tile: Value) -> list[Value]:
        """Start loading the latents: for entry 8g + j, chunks t and 16 + t."""
        slot, _ = self._resolve(indices.moved, self.moved_entry, tile)
        result = []
        for j in range(_MOVES):
            record = _record(self.moved_base, isa.broadcast_in_row(slot, j))
            result += [isa.global_load(record, 4, offset) for offset in (0, LATENT_DIM // 2)]
        return result

    def load_side(self, indices: Indices, tile: Value) -> Side:
        """Start loading scales and rope parts; know the mask."""
        scales, rope, bias = [], [], []
        for index, entry in zip(indices.scored, self.scored_entry, strict=True):
            slot, valid = self._resolve(index, entry, tile)
            scales.append(isa.global_load(_record(self.scale_base, slot), 1, _SCALES))
            address = _record(self.rope_base, slot)
            rope.append([isa.global_load(address, 4, _ROPE + 64 * i) for i in range(2)])
            bias.append(valid.select(fx.Float32(0.0), self.masked_bias))
        return Side(scales, rope, bias)

    def stage(self, latent: list[Value]) -> None:
        """Write the loaded latents to LDS."""
        base = isa.opaque(self.stage_address)
        for j in range(_MOVES):
            address = base ^ (lds.CHUNK * j)
            for half in (0, 1):
                offset = LATENT_DIM * j + LATENT_DIM // 2 * half
                isa.lds_store(address, latent[2 * j + half], 4, offset)


def tiles_of(row: Row, kv: Value, kv_rows: Value, lane: Lane, lds_base: Value) -> Tiles:
    """Prepare what stays the same from tile to tile."""
    first = lane.wave * lds.WAVE_ENTRIES
    moved = lane.g * _MOVES + (lane.t & (_MOVES - 1))
    # The swizzle of entry 8g + j is 8(g % 2) ^ 4(g // 2) ^ j.
    chunk = lane.t ^ ((lane.g & 1) * 8) ^ ((lane.g >> 1) * 4)
    stage = lds_base + (
        lds.LATENT.start + (first + lane.g * _MOVES) * LATENT_DIM + chunk * lds.CHUNK
    )
    first_group = lane.g == 0
    return Tiles(
        row=row,
        kv_rows=kv_rows,
        moved_entry=first + moved,
        scored_entry=[first + (lane.t + 16 * s) for s in range(SUBTILES)],
        moved_base=kv + fx.Uint64(fx.Uint32(lane.t * 16)),
        rope_base=kv + fx.Uint64(fx.Uint32(lane.g * 16)),
        scale_base=kv + fx.Uint64(fx.Uint32(lane.g * 4)),
        masked_bias=first_group.select(fx.Float32(MASKED), fx.Float32(0.0)),
        stage_address=stage,
    )


def _record(base: Value, slot: Value) -> Value:
    """Address of a lane's part of a record, in 64 bits: one multiply-add."""
    return base + fx.Uint64(fx.Uint32(slot)) * RECORD_BYTES
