"""The query: 16 heads of one row, quantised once into the operands of the score products."""

from typing import NamedTuple

import flydsl.expr as fx
from flydsl.expr.typing import Vector

from jax_sparse_mla.kernel import instructions as isa
from jax_sparse_mla.kernel.instructions import Value
from jax_sparse_mla.kernel.specialisation import ScaleFormat
from jax_sparse_mla.kernel.workgroup import Lane

BLOCKS = 4
"""128-column scale blocks of a latent."""


class ChunkOrder(NamedTuple):
    """Which 16 latent columns a lane holds in the two halves of score product ``j`` of 4.

    Chunk ``lane ^ fixed(j, half)`` of the 32. Any order is right if query and records agree; what
    differs is whose scale a lane supplies (see ``isa.mfma_fp8``).
    """

    scale_format: ScaleFormat

    def lane(self, lane: Lane) -> Value:
        """The part of the chunk number that depends on the lane."""
        if self.scale_format == "pow2":
            # Each product takes a quarter of every block: the lanes' bytes are scaled by lane
            # groups g // 2 and 2 + g // 2, so that group g supplies the scale of block g alone.
            return (lane.g >> 1) * 8 + (lane.g & 1)
        return lane.g

    def fixed(self, j: int, half: int) -> int:
        """The part that depends on product and half; product j of float32 is block j alone."""
        return 2 * j ^ 16 * half if self.scale_format == "pow2" else 8 * j ^ 4 * half


class Query(NamedTuple):
    """Operands of the score products; lane (t, g) holds head t."""

    hi: list[Value]
    """Four operands of 8 dwords, e4m3 of the latent."""
    lo: list[Value]
    """The same of what ``hi`` leaves over."""
    scales: list[Value]
    """E8M0 scales of ``hi`` and ``lo``, one an operand (pow2: all the same)."""
    rope: list[Value]
    """Two operands of 4 dwords, bfloat16."""
    factor: Value
    """softmax_scale * log2(e) as a positive number; NaN for a head that is not finite."""


_TINY = 2.0**-100
"""Stands for a softmax scale of 0: scores stay equal, yet the mask's bias still tells."""


def quantise_q(
    latent_row: Value, rope_row: Value, scale_log2e: Value, order: ChunkOrder, lane: Lane
) -> Query:
    """Load head t's query at the given addresses and split its latent into hi + lo.

    A negative softmax scale is moved into the query, so that the largest score is the largest
    product.
    """
    negative = scale_log2e < 0.0
    direction = negative.select(fx.Float32(-1.0), fx.Float32(1.0))
    latent = latent_row + fx.Uint64(fx.Uint32(order.lane(lane) * 32))
    values = [[_load_chunk(latent, 32 * order.fixed(j, h)) for h in (0, 1)] for j in range(4)]
    if order.scale_format == "pow2":
        own = [_largest([x for j in range(4) for x in values[j][half]]) for half in (0, 1)]
        pairs = [isa.maximum(*isa.swap_rows_16(x, x)) for x in own]
        # Lanes hold blocks (0 0 1 1) and (2 2 3 3) by group; the scale operand wants (0 1 2 3).
        even, odd = isa.swap_rows_32(*pairs)
        mine = ((lane.g & 1) == 0).select(even, odd)
        scales = [_scale_and_inverse(mine)[0]] * 4
        inverse = [[_scale_and_inverse(pairs[half])[1] for half in (0, 1)]] * 4
    else:
        largest = [maximum_of_groups(_largest(values[j][0] + values[j][1])) for j in range(4)]
        scaled = [_scale_and_inverse(x) for x in largest]
        scales = [scale for scale, _ in scaled]
        inverse = [[inv, inv] for _, inv in scaled]
    hi, lo = [], []
    for j in range(4):
        words: tuple[list[Value], list[Value]] = ([], [])
        for half in (0, 1):
            inv = inverse[j][half] * direction
            for i in range(4):
                for part, word in zip(
                    words,
                    split_fp8([x * inv for x in values[j][half][4 * i : 4 * i + 4]]),
                    strict=True,
                ):
                    part.append(word)
        hi.append(Vector.from_elements(words[0], fx.Int32))
        lo.append(Vector.from_elements(words[1], fx.Int32))
    rope = [isa.global_load(rope_row, 4, 64 * i) for i in range(2)]
    zero = fx.Float32(0.0)
    for x in [x for words in rope for i in range(4) for x in _floats(words[i])]:
        zero = isa.fma(x, fx.Float32(0.0), zero)
    sign = negative.select(fx.Int32(-0x7FFF8000), fx.Int32(0))
    flipped = [Vector.from_elements([w[i] ^ sign for i in range(4)], fx.Int32) for w in rope]
    positive = isa.maximum(scale_log2e * direction, fx.Float32(_TINY))
    return Query(hi, lo, scales, flipped, positive + sum_of_groups(zero))


def split_fp8(values: list[Value]) -> tuple[Value, Value]:
    """Four floats of at most 448 as e4m3 ``hi`` and as e4m3 of what it leaves over."""
    hi = isa.to_fp8(values)
    rest = [x - y for x, y in zip(values, isa.from_fp8(hi), strict=True)]
    return hi, isa.to_fp8(rest)


def _scale_and_inverse(largest: Value) -> tuple[Value, Value]:
    """The E8M0 scale that puts ``largest`` (not negative) in 128 .. 256, and its inverse."""
    scale = e8m0_scale(largest.bitcast(fx.Int32))
    return scale, inverse_of(scale)


def e8m0_scale(bits: Value) -> Value:
    """The E8M0 scale s for which float ``bits`` (not negative) / 2^(s - 127) is in 128 .. 256."""
    scale = fx.Int32(fx.Uint32(bits) >> 23) - 7
    return (scale < 1).select(fx.Int32(1), scale)


def inverse_of(scale: Value) -> Value:
    """1 / 2^(scale - 127) of an E8M0 scale below 254."""
    return ((254 - scale) << 23).bitcast(fx.Float32)


def maximum_of_groups(value: Value) -> Value:
    """The maximum over the four lanes of the same t."""
    value = isa.maximum(*isa.swap_rows_16(value, value))
    return isa.maximum(*isa.swap_rows_32(value, value))


def sum_of_groups(value: Value) -> Value:
    """The sum over the four lanes of the same t, the same in all of them."""
    first, second = isa.swap_rows_16(value, value)
    value = first + second
    first, second = isa.swap_rows_32(value, value)
    return first + second


def _largest(values: list[Value]) -> Value:
    return isa.maximum(*[abs(x) for x in values])


def _load_chunk(base: Value, offset: int) -> list[Value]:
    words = [isa.global_load(base, 4, offset + 16 * i) for i in (0, 1)]
    return [x for pair in words for i in range(4) for x in _floats(pair[i])]


def _floats(word: Value) -> list[Value]:
    """The two bfloat16 of a dword."""
    return [(word << 16).bitcast(fx.Float32), (word & -0x10000).bitcast(fx.Float32)]
