"""One wave's share of a tile: its 32 entries' indices, records, and their way into LDS."""

from typing import NamedTuple

import flydsl.expr as fx

from jax_sparse_mla.kernel import instructions as isa
from jax_sparse_mla.kernel import lds
from jax_sparse_mla.kernel.contract import LATENT_DIM, RECORD_BYTES
from jax_sparse_mla.kernel.instructions import Value
from jax_sparse_mla.kernel.workgroup import Lane, Row, is_slot

_SCALES = LATENT_DIM
"""Offset of the four float32 scales in a record."""
_ROPE = LATENT_DIM + 16
"""Offset of the 64 bfloat16 of the rope part."""
_MASK = 2.0**127
"""Taken from the score of a masked entry; the smallest factor leaves 2^27 of it."""
_SMALLEST_FACTOR = 2.0**-100

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
    valid: list[Value]
    """Which lanes' entries count, as wave-uniform masks."""


class Tiles(NamedTuple):
    """Where a wave finds the entries of tile after tile."""

    row: Row
    kv_rows: Value
    moved_entry: Value
    """Byte offsets into the row's entries of tile 0."""
    scored_entry: Value
    moved_base: Value
    """64-bit address of this lane's part of record 0."""
    kv: Value
    group: Value
    masked_bias: Value
    stage_address: Value

    def load_indices(self, tile: Value) -> Indices:
        """Read the wave's entries of a tile; those past the row give 0."""
        start = tile * (4 * lds.TILE)
        load = self.row.words.load
        return Indices(
            load(self.moved_entry, start),
            [load(self.scored_entry, start + 4 * 16 * s) for s in range(SUBTILES)],
        )

    def _resolve(self, index: Value, offset: Value, ahead: int, tile: Value) -> tuple[Value, Value]:
        """The slot to load, always one of the row's own, and whether the entry counts."""
        left = (self.row.count - tile * lds.TILE - ahead) * 4
        valid = (offset < left) & is_slot(index, self.kv_rows)
        return valid.select(index, self.row.spare_slot), valid

    def moved_slots(self, indices: Indices, tile: Value) -> Value:
        """The slots of the latents this lane's group moves, one a lane."""
        return self._resolve(indices.moved, self.moved_entry, 0, tile)[0]

    def load_latent(self, slots: Value, moves: range) -> list[Value]:
        """Start loading latents: for each entry 8g + move, chunks t and 16 + t."""
        result = []
        for move in moves:
            record = _record(self.moved_base, isa.broadcast_in_row(slots, move))
            result += [isa.global_load(record, 4, offset) for offset in (0, LATENT_DIM // 2)]
        return result

    def scored_slots(self, indices: Indices, tile: Value) -> tuple[list[Value], list[Value]]:
        """The slots of entries t and 16 + t, and which lanes' entries count (wave-uniform)."""
        resolved = [
            self._resolve(index, self.scored_entry, 16 * s, tile)
            for s, index in enumerate(indices.scored)
        ]
        return [slot for slot, _ in resolved], [isa.ballot(valid) for _, valid in resolved]

    def load_scales(self, slots: list[Value]) -> list[Value]:
        """Start loading the scale of block g of entries t and 16 + t."""
        base = self._base_of_group(4)
        return [isa.global_load(_record(base, slot), 1, _SCALES) for slot in slots]

    def load_rope(self, slots: list[Value]) -> list[Value]:
        """Start loading the rope operands of entries t and 16 + t, two of 4 dwords each."""
        base = self._base_of_group(16)
        records = [_record(base, slot) for slot in slots]
        return [isa.global_load(r, 4, _ROPE + 64 * i) for r in records for i in (0, 1)]

    def _base_of_group(self, stride: int) -> Value:
        """64-bit address of lane group g's part of record 0, g * stride bytes in; worked out when
        it is needed, for the registers."""
        return self.kv + fx.Uint64(fx.Uint32(isa.opaque(self.group))) * stride

    def bias(self, side: Side, subtile: int) -> Value:
        """0, or in lane group 0 of a masked entry what takes its score below all others."""
        valid = isa.lane_condition(side.valid[subtile])
        return valid.select(fx.Float32(0.0), self.masked_bias)

    def stage(self, latent: list[Value]) -> None:
        """Write the loaded latents to LDS."""
        base = isa.opaque(self.stage_address)
        for j in range(MOVES):
            address = base ^ (lds.CHUNK * j)
            for half in (0, 1):
                offset = LATENT_DIM * j + LATENT_DIM // 2 * half
                isa.lds_store(address, latent[2 * j + half], 4, offset)


def usable_factor(scale_log2e: Value) -> Value:
    """The factor from products to scores in bits; 0 becomes small enough to act like it."""
    small = abs(scale_log2e) < _SMALLEST_FACTOR
    return isa.first_lane(small.select(fx.Float32(_SMALLEST_FACTOR), scale_log2e))


def tiles_of(
    row: Row, kv: Value, kv_rows: Value, factor: Value, lane: Lane, lds_base: Value
) -> Tiles:
    """Prepare what stays the same from tile to tile."""
    first = lane.wave * lds.WAVE_ENTRIES
    moved = lane.g * MOVES + (lane.t & (MOVES - 1))
    # The swizzle of entry 8g + j is 8(g % 2) ^ 4(g // 2) ^ j.
    chunk = lane.t ^ ((lane.g & 1) * 8) ^ ((lane.g >> 1) * 4)
    stage = lds_base + (
        lds.LATENT.start + (first + lane.g * MOVES) * LATENT_DIM + chunk * lds.CHUNK
    )
    mask = (factor < 0.0).select(fx.Float32(_MASK), fx.Float32(-_MASK))
    return Tiles(
        row=row,
        kv_rows=kv_rows,
        moved_entry=(first + moved) * 4,
        scored_entry=(first + lane.t) * 4,
        moved_base=kv + fx.Uint64(fx.Uint32(lane.t * 16)),
        kv=kv,
        group=lane.g,
        masked_bias=(lane.g == 0).select(mask, fx.Float32(0.0)),
        stage_address=stage,
    )


def _record(base: Value, slot: Value) -> Value:
    """Address of a lane's part of a record, in 64 bits: one multiply-add."""
    return base + fx.Uint64(fx.Uint32(slot)) * RECORD_BYTES
