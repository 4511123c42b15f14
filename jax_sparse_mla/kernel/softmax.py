"""Weights: what the scores of a wave become, and how they reach the waves that use them.

Each wave takes the softmax of its 32 entries of a tile by itself, relative to a power of two
2^top, so that no wave waits for another's maximum. A weight is then multiplied by the entry's scale
of a column block, four ways, and quantised to e4m3 hi + lo with one exponent for the wave's 32
entries. So the scale is part of the weight's format: a product of weight and scale is off by 2^-9
of itself at most, or by 2^-18 of the largest of the 32, however scales are mixed.
"""

from typing import NamedTuple

import flydsl.expr as fx
from flydsl.expr.typing import Vector

from jax_sparse_mla.kernel import instructions as isa
from jax_sparse_mla.kernel import lds
from jax_sparse_mla.kernel.instructions import Value
from jax_sparse_mla.kernel.query import (
    BLOCKS,
    e8m0_scale,
    maximum_of_groups,
    residual_fp8,
    unit_of,
)
from jax_sparse_mla.kernel.scores import Scores
from jax_sparse_mla.kernel.tile import SUBTILES, Side

TOP_LIMIT = 2.0**26
"""Scores beyond it (in bits) would lose all precision in float32; they end as NaN."""


class Total(NamedTuple):
    """A wave's sum of weights for head t so far, lane group g's share: sum * 2^top."""

    sum: Value
    top: Value


def nothing_yet() -> Total:
    """The total at the start of a row."""
    return Total(fx.Float32(0.0), fx.Int32(-(2**26)))


def softmax(products: list[Value], factor: Value, total: Total) -> tuple[list[Value], Value, Total]:
    """Weights 2^(factor * product - top) of a wave's entries, at most 1, and ``top``.

    Weights come in pairs of registers, as the packed instructions want them.
    """
    largest = maximum_of_groups(isa.maximum(*[x[r] for x in products for r in range(4)]))
    top = isa.clamp(isa.ceiling(largest * factor), -TOP_LIMIT, TOP_LIMIT)
    pairs = [_pair(x[i], x[i + 1]) for x in products for i in (0, 2)]
    exponents = [isa.fma(x, _pair(factor, factor), _pair(-top, -top)) for x in pairs]
    weights = [_pair(isa.exp2(x[0]), isa.exp2(x[1])) for x in exponents]
    pairs = (weights[0] + weights[1]) + (weights[2] + weights[3])
    added = pairs[0] + pairs[1]
    whole_top = isa.to_integer(top)
    new_top = (whole_top > total.top).select(whole_top, total.top)
    new_sum = isa.ldexp(total.sum, total.top - new_top) + isa.ldexp(added, whole_top - new_top)
    return weights, whole_top, Total(new_sum, new_top)


def _pair(first: Value, second: Value) -> Value:
    return Vector.from_elements([first, second], fx.Float32)


class Weights(NamedTuple):
    """Where a wave writes its weights."""

    scores: Scores
    weights_address: Value
    exponents_address: Value

    def publish(self, weights: list[Value], top: Value, side: Side) -> Value:
        """Scale, quantise and write the weights of the wave's entries for the other waves.

        Returns the slice for the wave's own column block: there is no place for it yet.
        """
        scales = [self.scores.spread_scales(bits) for bits in side.scales]
        scaled = [
            [
                isa.broadcast_in_quad(scales[s][r], number) * weights[2 * s + r // 2][r % 2]
                for s in range(SUBTILES)
                for r in range(4)
            ]
            for number in range(BLOCKS)
        ]
        exponent, units = self._common_exponents(
            [isa.maximum(*[abs(x) for x in values]) for values in scaled]
        )
        isa.lds_store(self.exponents_address, exponent - 127 + top, 1)
        for number in range(BLOCKS):
            values, unit = scaled[number], units[number]
            pairs = [_pair(values[i], values[i + 1]) for i in range(0, 8, 2)]
            words = []
            for two in (pairs[:2], pairs[2:]):
                hi = isa.to_fp8(two, unit)
                # Even lane groups end with hi of two octets, odd ones with lo of the same two.
                words.append(isa.swap_rows_16(hi, residual_fp8(two, hi, unit)))
            line = Vector.from_elements([word[i] for i in (0, 1) for word in words], fx.Int32)
            if number < BLOCKS - 1:
                isa.lds_store(self.weights_address, line, 4, lds.WEIGHTS_SLICE * number)
        return line

    def _common_exponents(self, largest: list[Value]) -> tuple[Value, list[Value]]:
        """E8M0 scales and units of four numbers' maxima over the lane groups.

        Lane group g gets the scale of number g, and every lane the unit of all four.
        """
        even = isa.maximum(*isa.swap_rows_32(largest[0], largest[2]))
        odd = isa.maximum(*isa.swap_rows_32(largest[1], largest[3]))
        scale = e8m0_scale(isa.maximum(*isa.swap_rows_16(even, odd)))
        unit = unit_of(scale)
        even, odd = isa.swap_rows_16(unit, unit)
        unit0, unit2 = isa.swap_rows_32(even, even)
        unit1, unit3 = isa.swap_rows_32(odd, odd)
        return scale, [unit0, unit1, unit2, unit3]


def weights_of(scores: Scores, lds_base: Value) -> Weights:
    """Prepare what stays the same from tile to tile."""
    lane = scores.order.lane
    weights = lane.wave * ((BLOCKS - 1) * lds.WEIGHTS_SLICE) + (lane.g * 16 + lane.t) * 16
    block = (lane.wave + 1 + lane.g) & (BLOCKS - 1)
    exponents = block * lds.EXPONENTS_STRIDE + (lane.wave * 16 + lane.t) * 4
    return Weights(
        scores,
        lds_base + (weights + lds.WEIGHTS.start),
        lds_base + (exponents + lds.EXPONENTS.start),
    )
