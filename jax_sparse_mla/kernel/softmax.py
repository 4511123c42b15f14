"""Weights: what the scores of a wave become, and how they reach the waves that use them.

Each wave takes the softmax of its 32 entries of a tile by itself, relative to a power of two
2^top, so that no wave waits for another's maximum. A weight is then multiplied by the entry's scale
of a column block, four ways, and quantised to e4m3 hi + lo with one exponent for the wave's 32
entries: the scale is part of the weight's format, and any mixture of scales keeps its precision.
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
    inverse_of,
    maximum_of_groups,
    split_fp8,
)
from jax_sparse_mla.kernel.scores import Scores
from jax_sparse_mla.kernel.tile import SUBTILES, Side
from jax_sparse_mla.kernel.workgroup import Lane

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
    """Weights 2^(factor * product - top) of a wave's entries, at most 1, and ``top``."""
    flat = [products[s][r] for s in range(SUBTILES) for r in range(4)]
    largest = maximum_of_groups(isa.maximum(*flat))
    top = isa.clamp(isa.ceiling(largest * factor), -TOP_LIMIT, TOP_LIMIT)
    exponents = [
        isa.fma(p, Vector.filled(4, factor, fx.Float32), Vector.filled(4, -top, fx.Float32))
        for p in products
    ]
    weights = [
        Vector.from_elements([isa.exp2(e[r]) for r in range(4)], fx.Float32) for e in exponents
    ]
    pairs = weights[0] + weights[1]
    added = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
    whole_top = isa.to_integer(top)
    new_top = (whole_top > total.top).select(whole_top, total.top)
    new_sum = isa.ldexp(total.sum, total.top - new_top) + isa.ldexp(added, whole_top - new_top)
    return weights, whole_top, Total(new_sum, new_top)


class Weights(NamedTuple):
    """Where a wave writes its weights."""

    scores: Scores
    group: Value
    weights_address: Value
    exponents_address: Value

    def publish(self, weights: list[Value], top: Value, side: Side) -> None:
        """Scale, quantise and write the weights of the wave's entries for all column blocks."""
        scaled = [
            [weights[s] * self.scores.spread_scale(side, s, block) for s in range(SUBTILES)]
            for block in range(BLOCKS)
        ]
        exponent, inverses = self._common_exponents([_largest_bits(x) for x in scaled])
        isa.lds_store(self.exponents_address, exponent - 127 + top, 1)
        for block in range(BLOCKS):
            octet = [x * inverses[block] for x in scaled[block]]
            hi, lo = zip(*[split_fp8([x[r] for r in range(4)]) for x in octet], strict=True)
            # Even lane groups end with hi of two octets, odd ones with lo of the same two.
            words = [isa.swap_rows_16(*pair) for pair in zip(hi, lo, strict=True)]
            line = [word[i] for i in (0, 1) for word in words]
            isa.lds_store(
                self.weights_address,
                Vector.from_elements(line, fx.Int32),
                4,
                _BLOCK_BYTES * block,
            )

    def _common_exponents(self, largest: list[Value]) -> tuple[Value, list[Value]]:
        """Of four numbers' maxima over the lane groups: lane group g's own E8M0 scale is that of
        number g, and every lane has the inverse of all four."""
        even = _max_bits(*isa.swap_rows_32(largest[0], largest[2]))
        odd = _max_bits(*isa.swap_rows_32(largest[1], largest[3]))
        scale = e8m0_scale(_max_bits(*isa.swap_rows_16(even, odd)))
        inverse = inverse_of(scale)
        even, odd = isa.swap_rows_16(inverse, inverse)
        inv0, inv2 = isa.swap_rows_32(even, even)
        inv1, inv3 = isa.swap_rows_32(odd, odd)
        return scale, [inv0, inv1, inv2, inv3]


_BLOCK_BYTES = lds.WEIGHTS.size // (lds.WAVES * BLOCKS)
_BLOCK_EXPONENTS = lds.EXPONENTS.size // (lds.WAVES * BLOCKS)


def weights_of(scores: Scores, lane: Lane, lds_base: Value) -> Weights:
    """Prepare what stays the same from tile to tile."""
    number = lane.g * 16 + lane.t
    weights = lane.wave * (BLOCKS * _BLOCK_BYTES) + number * 16
    exponents = lane.wave * (BLOCKS * _BLOCK_EXPONENTS) + number * 4
    return Weights(
        scores,
        lane.g,
        lds_base + (weights + lds.WEIGHTS.start),
        lds_base + (exponents + lds.EXPONENTS.start),
    )


def _largest_bits(vectors: list[Value]) -> Value:
    """The largest magnitude of a lane's weights as bits, which compare like integers."""
    bits = [x[r].bitcast(fx.Int32) & 0x7FFFFFFF for x in vectors for r in range(4)]
    result = bits[0]
    for value in bits[1:]:
        result = _max_bits(result, value)
    return result


def _max_bits(first: Value, second: Value) -> Value:
    return (first > second).select(first, second)
