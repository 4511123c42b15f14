"""Weights: what the scores of a wave become, and how they reach the waves that use them.

Each wave takes the softmax of its 32 entries of a tile by itself, relative to a power of two
2^top, so that no wave waits for another's maximum. A weight is then multiplied by the entry's scale
of a column block, four ways, and quantised to e4m3 hi + lo, in units that derive from the sum of
the 32 products. So the scale is part of the weight's format: a product of weight and scale is off
by 2^-9 of itself at most, or by 2^-23 of the sum, however scales are mixed.

Where many entries share a row such errors cancel. Where few do they might not, so a wave refines
its tile: it adds the rest, e2m1 of what hi and lo leave over. A product that is more than 1/32 of
the sum is then off by 2^-10 of itself at most, and by 2^-11 as a rule. A tile is refined if, for
any head and column block, its products outweigh those of all the wave's tiles before: an entry that
goes without makes up half of its wave's share of the row at most. So the last bits of a head may
depend on the heads that share its workgroup, never on other rows.
"""

from typing import NamedTuple

import flydsl.expr as fx
from flydsl.expr.typing import Vector

from jax_sparse_mla.kernel import instructions as isa
from jax_sparse_mla.kernel import lds
from jax_sparse_mla.kernel.instructions import Value
from jax_sparse_mla.kernel.query import BLOCKS, maximum_of_groups, residual
from jax_sparse_mla.kernel.scores import Scores
from jax_sparse_mla.kernel.tile import SUBTILES, Side
from jax_sparse_mla.kernel.workgroup import same_lane

TOP_LIMIT = 2.0**26
"""Scores beyond it (in bits) would lose all precision in float32; they end as NaN."""
REFINED = 2**29
"""Added to the published exponents of a refined tile; itself beyond any exponent."""
LO_EXPONENT = -5
"""Unit of lo and the rest, relative to that of hi: of products of 128 to 256 units hi leaves over 8
at most, 256 of lo's, and lo 8 of the rest's. Its largest code is 6: more than that is seldom, and
smaller products need the digits."""
_LO = 2.0**LO_EXPONENT
_SMALLEST_UNIT = 2.0**-121
"""About: that of lo must not be less than a conversion takes, 2^-127."""


class Total(NamedTuple):
    """What a wave has seen of head t so far, in units of 2^top."""

    sum: Value
    """The sum of weights, lane group g's share."""
    top: Value
    products: Value
    """About 2^-7 of the sum of products of weights and the scales of block number g."""


def nothing_yet() -> Total:
    """The total at the start of a row."""
    return Total(fx.Float32(0.0), fx.Int32(-(2**26)), fx.Float32(0.0))


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
    old = total.top - new_top
    new_sum = isa.ldexp(total.sum, old) + isa.ldexp(added, whole_top - new_top)
    return weights, whole_top, Total(new_sum, new_top, isa.ldexp(total.products, old))


def _pair(first: Value, second: Value) -> Value:
    return Vector.from_elements([first, second], fx.Float32)


class OwnWeights(NamedTuple):
    """The wave's weights for its own column block, as ``Values.add_tile`` places them."""

    line: Value
    """hi and lo: 16 bytes of a slice of lds.WEIGHTS."""
    refined: Value
    """Whether there is a rest; wave-uniform."""
    rest: Value
    """In lane group 3, 16 bytes of a slice of lds.REST."""


class Weights(NamedTuple):
    """Where a wave writes its weights."""

    scores: Scores
    lds_base: Value
    weights_address: Value
    exponents_address: Value
    group_lanes: list[Value]
    """Lanes of each lane group, wave-uniform."""

    def publish(
        self, weights: list[Value], top: Value, side: Side, total: Total
    ) -> tuple[OwnWeights, Total]:
        """Scale, quantise and write the weights of the wave's entries for the other waves.

        Returns the slice for the wave's own column block too: there is no place for it yet.
        """
        scales = [self.scores.spread_scales(bits) for bits in side.scales]
        units = _units(weights, scales)
        unit = units[0]
        for number in range(1, BLOCKS):
            unit = isa.lane_condition(self.group_lanes[number]).select(units[number], unit)
        products = isa.ldexp(unit, top - total.top)
        refined = isa.ballot(products > total.products) != fx.Uint64(0)
        total = total._replace(products=total.products + products)
        mark = refined.select(fx.Int32(REFINED - 127), fx.Int32(-127))
        exponent = isa.shift_right(unit.bitcast(fx.Int32), 23) + mark + top
        isa.lds_store(self.exponents_address, exponent, 1)
        rests = []
        for number, unit in enumerate(units):
            values = [
                isa.broadcast_in_quad(scales[s][r], number) * weights[2 * s + r // 2][r % 2]
                for s in range(SUBTILES)
                for r in range(4)
            ]
            words = []
            for i in (0, 4):
                pairs = [_pair(values[j], values[j + 1]) for j in (i, i + 2)]
                hi = isa.to_fp8(pairs, unit)
                rests.append(residual(pairs, hi, unit))
                # Even lane groups end with hi of two octets, odd ones with lo of the same two.
                words.append(isa.swap_rows_16(hi, isa.to_fp8(rests[-1], unit * _LO)))
            line = Vector.from_elements([word[i] for i in (0, 1) for word in words], fx.Int32)
            if number < BLOCKS - 1:
                isa.lds_store(self.weights_address, line, 4, lds.WEIGHTS_SLICE * number)
            # Numbers worked on side by side would take more registers than there are.
            isa.schedule_fence()
        (rest,) = isa.when(refined, lambda: [self._publish_rests(rests, units)], None)
        return OwnWeights(line, refined, rest), total

    def _publish_rests(self, rests: list[list[Value]], units: list[Value]) -> Value:
        """Write what hi and lo leave over, given what hi does.

        Returns the own block's share: in lane group 3, all octets of head t.
        """
        words = []
        for number, unit in enumerate(units):
            # lo is worked out again: opaque, or the compiler would keep it in registers.
            unit = isa.opaque(unit)
            pairs = [
                pair
                for rest in rests[2 * number : 2 * number + 2]
                for pair in residual(rest, isa.to_fp8(rest, unit * _LO), unit * _LO)
            ]
            words.append(isa.to_fp4(pairs, unit * _LO))
            isa.schedule_fence()
        # Lane group g has octet g of each number, and is to have all octets of number g.
        even, odd = (isa.swap_rows_32(words[i], words[i + 2]) for i in (0, 1))
        first, second = (isa.swap_rows_16(even[i], odd[i]) for i in (0, 1))
        line = Vector.from_elements([*first, *second], fx.Int32)
        lane = same_lane(self.scores.order.lane.wave)
        place = (lane.wave * (BLOCKS - 1) + lane.g) * lds.REST_SLICE + lane.t * 16

        def store() -> list[Value]:
            isa.lds_store(self.lds_base + (lds.REST.start + place), line, 4)
            return []

        isa.when(lane.g < BLOCKS - 1, store, [])
        return line


def _units(weights: list[Value], scales: list[Value]) -> list[Value]:
    """Units for the products with each number of a column block: 2^-7 of their sum, about.

    Conversions use its exponent alone, so bfloat16 will do for one matrix product that gives the
    sums of all four, to every lane group. Scaled before, so that no sum is infinite.
    """
    constants = [Vector.filled(4, x, fx.Float32) for x in (2.0**-7, _SMALLEST_UNIT)]
    scales = [isa.fma(scale, *constants) for scale in scales]
    a = isa.to_bf16([abs(scale[r]) for scale in scales for r in range(4)])
    b = isa.to_bf16([pair[i] for pair in weights for i in (0, 1)])
    sums = isa.mfma_bf16(a, b, Vector.filled(4, 0.0, fx.Float32))
    return [sums[number] for number in range(BLOCKS)]


def weights_of(scores: Scores, lds_base: Value) -> Weights:
    """Prepare what stays the same from tile to tile."""
    lane = scores.order.lane
    weights = lane.wave * ((BLOCKS - 1) * lds.WEIGHTS_SLICE) + (lane.g * 16 + lane.t) * 16
    block = (lane.wave + 1 + lane.g) & (BLOCKS - 1)
    exponents = lds.exponents_place(block, lane.wave) + lane.t * 4
    return Weights(
        scores,
        lds_base,
        lds_base + (weights + lds.WEIGHTS.start),
        lds_base + (exponents + lds.EXPONENTS.start),
        [isa.ballot(lane.g == number) for number in range(BLOCKS)],
    )
