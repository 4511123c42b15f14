"""The query: 16 heads of one row, quantised once into the operands of the score products."""

from typing import NamedTuple

import flydsl.expr as fx
from flydsl.expr.typing import Vector

from jax_sparse_mla.kernel import instructions as isa
from jax_sparse_mla.kernel.instructions import Value
from jax_sparse_mla.kernel.specialisation import ScaleFormat
from jax_sparse_mla.kernel.workgroup import Lane

E8M0_NAN = 255
_FOUR_NANS = -1
BLOCKS = 4
"""128-column scale blocks of a latent."""


class ChunkOrder(NamedTuple):
    """Which 16 latent columns a lane holds in the two halves of score product ``j`` of 4.

    Chunk ``lane_part ^ product_part(j, half)`` of the 32. Any order is right if query and records
    agree; what differs is whose scale a lane supplies (see ``isa.mfma_fp8``).
    """

    scale_format: ScaleFormat
    lane: Lane

    def block(self, number: int) -> Value:
        """A wave's column block ``number``: it counts from the one after its own, its own last."""
        return (self.lane.wave + (1 + number)) & (BLOCKS - 1)

    def lane_part(self) -> Value:
        """The part of the chunk number that depends on the lane."""
        if self.scale_format == "pow2":
            # Each product takes a quarter of every block: the lanes' bytes are scaled by lane
            # groups g // 2 and 2 + g // 2, so that group g supplies the scale of block g alone.
            return (self.lane.g >> 1) * 8 + (self.lane.g & 1)
        return self.lane.g

    def product_part(self, j: int, half: int) -> Value | int:
        """The part that depends on product and half; product j of float32 is block(j) alone."""
        if self.scale_format == "pow2":
            return 2 * j ^ 16 * half
        return self.block(j) * 8 ^ 4 * half


class Query(NamedTuple):
    """Operands of the score products; lane (t, g) holds head t."""

    hi: list[Value]
    """Four operands of 8 dwords, e4m3 of the latent."""
    lo: list[Value]
    """The same of what ``hi`` leaves over."""
    scale: Value
    """E8M0 scales of ``hi`` and ``lo``: of operand j in byte j, of all in byte 0 for pow2."""
    rope: list[Value]
    """Two operands of 4 dwords, bfloat16."""


def quantise_q(latent_row: Value, rope_row: Value, order: ChunkOrder) -> Query:
    """Load head t's query at the given addresses and split its latent into hi + lo.

    Where the rope part is not finite the scales are NaN, for in a product it might vanish.
    """
    rope = [isa.global_load(rope_row, 4, 64 * i) for i in range(2)]
    words = [[_load_chunk(latent_row, order, j, half) for half in (0, 1)] for j in range(BLOCKS)]
    if order.scale_format == "pow2":
        own = [_largest([w for product in words for w in product[half]]) for half in (0, 1)]
        pairs = [isa.maximum(*isa.swap_rows_16(x, x)) for x in own]
        # Lanes hold blocks (0 0 1 1) and (2 2 3 3) by group; the scale operand wants (0 1 2 3).
        even, odd = isa.swap_rows_32(*pairs)
        mine = ((order.lane.g & 1) == 0).select(even, odd)
        scale = e8m0_scale(mine)
        units = [[unit_of(e8m0_scale(x)) for x in pairs]] * BLOCKS
    else:
        largest = [maximum_of_groups(_largest(first + second)) for first, second in words]
        scales = [e8m0_scale(x) for x in largest]
        units = [[unit_of(part)] * 2 for part in scales]
        scale = scales[0] | scales[1] << 8 | scales[2] << 16 | scales[3] << 24
    hi, lo = [], []
    for product, product_units in zip(words, units, strict=True):
        parts: tuple[list[Value], list[Value]] = ([], [])
        for half, unit in zip(product, product_units, strict=True):
            for i in range(0, 8, 2):
                parts[0].append(isa.bf16_to_fp8(half[i], half[i + 1], unit))
                floats = [_floats(word) for word in half[i : i + 2]]
                parts[1].append(residual_fp8(floats, parts[0][-1], unit))
        hi.append(Vector.from_elements(parts[0], fx.Int32))
        lo.append(Vector.from_elements(parts[1], fx.Int32))
    zero = Vector.filled(2, 0.0, fx.Float32)
    for pair in [_floats(operand[i]) for operand in rope for i in range(4)]:
        zero = isa.fma(pair, Vector.filled(2, 0.0, fx.Float32), zero)
    finite = sum_of_groups(zero[0] + zero[1]) == 0.0
    return Query(hi, lo, finite.select(scale, fx.Int32(_FOUR_NANS)), rope)


def residual_fp8(pairs: list[Value], hi: Value, unit: Value) -> Value:
    """What the e4m3 word ``hi`` leaves over of two pairs of floats, as e4m3 in the same unit."""
    rest = [x - y for x, y in zip(pairs, isa.from_fp8(hi, unit), strict=True)]
    return isa.to_fp8(*rest, unit)


def e8m0_scale(value: Value) -> Value:
    """The E8M0 scale s for which ``value`` (not negative) / 2^(s - 127) is in 128 .. 256."""
    scale = fx.Int32(value.bitcast(fx.Uint32) >> 23) - 7
    return (scale < 1).select(fx.Int32(1), scale)


def unit_of(scale: Value) -> Value:
    """2^(scale - 127) of an E8M0 scale."""
    return (scale << 23).bitcast(fx.Float32)


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


def _largest(words: list[Value]) -> Value:
    """The largest magnitude of pairs of bfloat16, whose bits compare like integers."""
    result = isa.packed_max_u16(*[word & 0x7FFF7FFF for word in words])
    low, high = result << 16, result & -0x10000
    return (fx.Uint32(low) > fx.Uint32(high)).select(low, high).bitcast(fx.Float32)


def _load_chunk(row: Value, order: ChunkOrder, j: int, half: int) -> list[Value]:
    """Eight dwords of two bfloat16."""
    lane_part, product_part = order.lane_part(), order.product_part(j, half)
    if isinstance(product_part, int):
        address, offset = row + fx.Uint64(fx.Uint32(lane_part * 32)), product_part * 32
    else:
        address, offset = row + fx.Uint64(fx.Uint32((lane_part ^ product_part) * 32)), 0
    words = [isa.global_load(address, 4, offset + 16 * i) for i in (0, 1)]
    return [pair[i] for pair in words for i in range(4)]


def _floats(word: Value) -> Value:
    """The pair of bfloat16 of a dword as floats."""
    pair = [(word << 16).bitcast(fx.Float32), (word & -0x10000).bitcast(fx.Float32)]
    return Vector.from_elements(pair, fx.Float32)
