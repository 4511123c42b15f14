"""Scores: the products of a wave's 32 entries with 16 queries.

Entry n = 16s + m of a wave is row m of subtile s. A score register r of lane (t, g) in subtile s
holds entry 16s + 4g + r against head t: the layout of an MFMA result.
"""

from typing import NamedTuple

import flydsl.expr as fx
from flydsl.expr.typing import Vector

from jax_sparse_mla.kernel import instructions as isa
from jax_sparse_mla.kernel import lds
from jax_sparse_mla.kernel.contract import LATENT_DIM
from jax_sparse_mla.kernel.instructions import Value
from jax_sparse_mla.kernel.query import BLOCKS, ChunkOrder, Query
from jax_sparse_mla.kernel.tile import SUBTILES, Side
from jax_sparse_mla.kernel.workgroup import Lane

_UNIT = 127
"""E8M0 of 1."""
_E8M0_NAN = 255
_SIGN_AND_MANTISSA = -0x7F800001
"""0x807FFFFF: all 0 in 0, in a power of two from 2^-126 on, and in infinity."""


class Scores(NamedTuple):
    """How a wave computes its scores."""

    order: ChunkOrder
    read_address: Value
    one: Value
    """1.0: every row of an f32 product's B."""
    pick_block: list[Value]
    """B of an f32 product that copies K = block to all columns."""

    def products(self, query: Query, side: Side) -> list[Value]:
        """Products of the staged entries with the query, a masked entry's far below all others.

        A scale that the format does not allow makes the entry's products NaN.
        """
        bias = [self._bias(side, s) for s in range(SUBTILES)]
        if self.order.scale_format == "pow2":
            scales = [_e8m0(bits) for bits in side.scales]
            sums = bias
            for j in range(BLOCKS):
                for s in range(SUBTILES):
                    record = self._read(s, j)
                    for part in (query.hi[j], query.lo[j]):
                        sums[s] = isa.mfma_fp8(record, part, sums[s], scales[s], query.scales[j])
            return [self._add_rope(query, side, s, sums[s]) for s in range(SUBTILES)]
        sums = [self._add_rope(query, side, s, bias[s]) for s in range(SUBTILES)]
        for j in range(BLOCKS):
            for s in range(SUBTILES):
                record = self._read(s, j)
                product = Vector.filled(4, 0.0, fx.Float32)
                for part in (query.hi[j], query.lo[j]):
                    product = isa.mfma_fp8(record, part, product, fx.Int32(_UNIT), query.scales[j])
                sums[s] = isa.fma(product, self.spread_scale(side, s, j), sums[s])
        return sums

    def spread_scale(self, side: Side, subtile: int, block: int) -> Value:
        """The entries' scales of a block in the layout of the scores, the same for all heads.

        A product with a unit vector, exact in float32, spares the way through LDS.
        """
        scale = side.scales[subtile].bitcast(fx.Float32)
        return isa.mfma_f32(scale, self.pick_block[block], Vector.filled(4, 0.0, fx.Float32))

    def _bias(self, side: Side, subtile: int) -> Value:
        return isa.mfma_f32(side.bias[subtile], self.one, Vector.filled(4, 0.0, fx.Float32))

    def _add_rope(self, query: Query, side: Side, subtile: int, sums: Value) -> Value:
        for record, head in zip(side.rope[subtile], query.rope, strict=True):
            sums = isa.mfma_bf16(record, head, sums)
        return sums

    def _read(self, subtile: int, j: int) -> Value:
        """Operand of score product j: two chunks of the entry's row in LDS."""
        halves = []
        for half in (0, 1):
            chunk = self.order.fixed(j, half) ^ lds.swizzle(16 * subtile)
            # Swizzling reaches the low four bits of a chunk number; bit 4 is 256 bytes further.
            address = self.read_address ^ lds.CHUNK * (chunk % 16)
            offset = LATENT_DIM * 16 * subtile + 16 * lds.CHUNK * (chunk // 16)
            halves.append(isa.lds_load(address, 4, offset))
        return Vector.from_elements([h[i] for h in halves for i in range(4)], fx.Int32)


def scores_of(order: ChunkOrder, lane: Lane, lds_base: Value) -> Scores:
    """Prepare what stays the same from tile to tile."""
    row = lane.wave * lds.WAVE_ENTRIES + lane.t
    chunk = order.lane(lane)
    # Lanes hold entry t of a subtile, whose swizzle is t but for the subtile's own part.
    low = (chunk & 15) ^ lane.t
    address = lds_base + (lds.LATENT.start + row * LATENT_DIM + low * lds.CHUNK)
    zero, one = fx.Float32(0.0), fx.Float32(1.0)
    return Scores(
        order=order,
        read_address=address,
        one=one,
        pick_block=[(lane.g == block).select(one, zero) for block in range(BLOCKS)],
    )


def _e8m0(bits: Value) -> Value:
    """A record's scale as E8M0: 0 becomes 2^-127, what is no power of two NaN."""
    # Adding 0 makes a positive 0 of a negative one.
    bits = (bits.bitcast(fx.Float32) + 0.0).bitcast(fx.Int32)
    odd = (bits & _SIGN_AND_MANTISSA) != 0
    return odd.select(fx.Int32(_E8M0_NAN), fx.Int32(fx.Uint32(bits) >> 23))
