"""Scores: the products of a wave's 32 entries with 16 queries.

Entry n = 16s + m of a wave is row m of subtile s. A score register r of lane (t, g) in subtile s
holds entry 16s + 4g + r against head t: the layout of an MFMA result.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import flydsl.expr as fx
from flydsl.expr.typing import Vector

from jax_sparse_mla.kernel import instructions as isa
from jax_sparse_mla.kernel import lds
from jax_sparse_mla.kernel.contract import LATENT_DIM
from jax_sparse_mla.kernel.instructions import Value
from jax_sparse_mla.kernel.query import BLOCKS, E8M0_NAN, ChunkOrder, Query
from jax_sparse_mla.kernel.tile import SUBTILES, Side, Tiles

_UNIT = 127
"""E8M0 of 1."""


class Scores(NamedTuple):
    """How a wave computes its scores."""

    order: ChunkOrder
    one: Value
    """1.0: every row of an f32 product's B."""
    own_block: Value
    """Lanes (t, g) with g = block(t % 4), wave-uniform."""
    block_lanes: list[Value]
    """Lanes (t, g) with g = block(j)."""

    def products(
        self,
        query: Query,
        side: Side,
        tiles: Tiles,
        address: Value,
        meanwhile: Callable[[int], None],
    ) -> list[Value]:
        """Products of the staged entries with the query, a masked entry's far below all others.

        ``address`` derives from ``read_address``. A scale that the format does not allow makes the
        entry's products NaN. ``meanwhile(i)`` is called at step i of 8, to issue what the matrix
        unit has time for.
        """
        zeros = Vector.filled(4, 0.0, fx.Float32)
        bias = [isa.mfma_f32(tiles.bias(side, s), self.one, zeros) for s in range(SUBTILES)]
        reads = [(s, j) for j in range(BLOCKS) for s in range(SUBTILES)]
        # float32 has sums to keep in the registers that reading further ahead takes.
        ahead = 2 if self.order.scale_format == "pow2" else 1
        records = _read_ahead(reads, ahead, lambda s, j: self._read(address, s, j), meanwhile)
        if self.order.scale_format == "pow2":
            scales = [_e8m0(bits) for bits in side.scales]
            sums = bias
            for (s, j), record in records:
                for part in (query.hi[j], query.lo[j]):
                    sums[s] = isa.mfma_fp8(record, part, sums[s], scales[s], query.scale)
            return [self._add_rope(query, side, s, sums[s]) for s in range(SUBTILES)]
        sums = bias
        for (s, j), record in records:
            product = zeros
            for part in (query.hi[j], query.lo[j]):
                product = isa.mfma_fp8(
                    record, part, product, fx.Int32(_UNIT), query.scale, byte_b=j
                )
            scales = self._spread(side.scales[s], isa.opaque_scalar(self.block_lanes[j]))
            sums[s] = isa.fma(scales, product, sums[s])
        return [self._add_rope(query, side, s, sums[s]) for s in range(SUBTILES)]

    def spread_scales(self, bits: Value) -> Value:
        """The entries' scales in the layout of the scores: in lane (t, g) that of block(t % 4)."""
        return self._spread(bits, self.own_block)

    def _spread(self, bits: Value, lanes: Value) -> Value:
        """The scales of entries t, block g, in the layout of the scores.

        A product with the unit vectors that ``lanes`` picks, exact in float32, spares the way
        through LDS.
        """
        pick = isa.lane_condition(lanes).select(fx.Float32(1.0), fx.Float32(0.0))
        zeros = Vector.filled(4, 0.0, fx.Float32)
        return isa.mfma_f32(bits.bitcast(fx.Float32), pick, zeros)

    def _add_rope(self, query: Query, side: Side, subtile: int, sums: Value) -> Value:
        for record, head in zip(side.rope[2 * subtile :], query.rope, strict=False):
            sums = isa.mfma_bf16(record, head, sums)
        return sums

    def _read(self, base: Value, subtile: int, j: int) -> Value:
        """Operand of score product j: two chunks of the entry's row in LDS."""
        halves = []
        for half in (0, 1):
            # Rows start at multiples of 512 bytes, so XOR reaches all of a chunk number.
            part = self.order.product_part(j, half) ^ lds.swizzle(16 * subtile)
            offset = LATENT_DIM * 16 * subtile
            if isinstance(part, int):
                offset, part = offset + 16 * lds.CHUNK * (part // 16), part % 16
            halves.append(isa.lds_load(base ^ part * lds.CHUNK, 4, offset))
        return Vector.from_elements([h[i] for h in halves for i in range(4)], fx.Int32)


def _read_ahead(
    places: list[tuple[int, int]],
    ahead: int,
    read: Callable[[int, int], Value],
    meanwhile: Callable[[int], None],
) -> Iterator[tuple[tuple[int, int], Value]]:
    """Each place with what was read there, reading ``ahead`` places before the use."""
    ready = [read(*place) for place in places[:ahead]]
    for number, place in enumerate(places):
        if number + ahead < len(places):
            ready.append(read(*places[number + ahead]))
        meanwhile(number)
        isa.schedule_fence()
        yield place, ready.pop(0)
        isa.schedule_fence()


def scores_of(order: ChunkOrder) -> Scores:
    """Prepare what stays the same from tile to tile."""
    lane = order.lane
    own_block = isa.ballot(lane.g == order.block(lane.t))
    block_lanes = [isa.ballot(lane.g == order.block(j)) for j in range(BLOCKS)]
    return Scores(order, fx.Float32(1.0), own_block, block_lanes)


def read_address(order: ChunkOrder, lds_base: Value) -> Value:
    """The address for ``Scores.products``."""
    lane = order.lane
    row = lane.wave * lds.WAVE_ENTRIES + lane.t
    # Lanes hold entry t of a subtile, whose swizzle is t but for the subtile's own part.
    chunk = order.lane_part() ^ lane.t
    return lds_base + (lds.LATENT.start + row * LATENT_DIM + chunk * lds.CHUNK)


def _e8m0(bits: Value) -> Value:
    """A record's scale as E8M0: 0 becomes 2^-127, what is no power of two NaN.

    Rotated, the exponent comes last, and any bit of mantissa or sign makes the number exceed 255.
    """
    # Adding 0 makes a positive 0 of a negative one.
    bits = (bits.bitcast(fx.Float32) + 0.0).bitcast(fx.Int32)
    return isa.minimum_unsigned(isa.rotate_right(bits, 23), fx.Int32(E8M0_NAN))
