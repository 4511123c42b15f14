"""The query: 16 heads of one row, quantised once into the operands of the score products."""

from typing import NamedTuple

import flydsl.expr as fx
from flydsl.expr.typing import Vector

from jax_sparse_mla.kernel import instructions as isa
from jax_sparse_mla.kernel import lds
from jax_sparse_mla.kernel.contract import LATENT_DIM
from jax_sparse_mla.kernel.instructions import Value
from jax_sparse_mla.kernel.specialisation import ScaleFormat
from jax_sparse_mla.kernel.workgroup import Lane

E8M0_NAN = 255
_FOUR_NANS = -1
_SIGN = -(2**31)
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


class RawQuery(NamedTuple):
    """The query as loaded."""

    latent: list[Value]
    """Of heads 4w .. 4w + 3 for wave w: lane l has columns 8l .. 8l + 7, four dwords."""
    rope: list[Value]


class QueryPlace(NamedTuple):
    """Where the workgroup's query lies: 64-bit addresses, strides between heads in elements."""

    latent: Value
    latent_stride: Value
    rope: Value
    rope_stride: Value
    first_head: Value
    num_heads: Value

    def head(self, number: Value) -> Value:
        """A head of the group; numbers past the last head read the last."""
        head = self.first_head + number
        return fx.Uint64(fx.Uint32((head < self.num_heads).select(head, self.num_heads - 1)))


_SMALLEST_FACTOR = 2.0**-100
"""Stands for a softmax scale of 0: scores stay equal, yet a mask still tells."""
_HEADS_A_WAVE = lds.HEADS_PER_GROUP // lds.WAVES


def positive_factor(scale_log2e: Value) -> Value:
    """From products to scores in bits, wave-uniform; a negative sign goes into the query."""
    return isa.first_lane(isa.maximum(abs(scale_log2e), fx.Float32(_SMALLEST_FACTOR)))


def load_q(place: QueryPlace, lane: Lane) -> RawQuery:
    """Start loading the query: a quarter of the latents, all of the rope part."""
    number = fx.Uint64(fx.Uint32(lane.g * 16 + lane.t))
    stride = fx.Uint64(fx.Uint32(place.latent_stride)) * 2
    heads = [place.head(lane.wave * _HEADS_A_WAVE + i) for i in range(_HEADS_A_WAVE)]
    latent = [isa.global_load(place.latent + head * stride + number * 16, 4) for head in heads]
    rope = place.rope + place.head(lane.t) * fx.Uint64(fx.Uint32(place.rope_stride)) * 2
    rope = rope + fx.Uint64(fx.Uint32(lane.g * 16))
    return RawQuery(latent, [isa.global_load(rope, 4, 64 * i) for i in range(2)])


def quantise_q(raw: RawQuery, scale_log2e: Value, order: ChunkOrder, lds_base: Value) -> Query:
    """Split the latent into hi + lo, each wave four heads, and take it from LDS as operands.

    bfloat16 is 8 bits, which the two e4m3 hold without loss down to 2^-9 of the largest value of
    the head's 128-column block; smaller ones are off by 2^-18 of that largest at most. Where the
    rope part is not finite the scales are NaN, for in a product it might vanish.
    """
    lane = order.lane
    sign = isa.first_lane(scale_log2e.bitcast(fx.Int32)) & _SIGN
    number = lane.g * 16 + lane.t
    first_head = lane.wave * _HEADS_A_WAVE
    # Head h's chunk C, 16 codes, lies at C ^ h, as an entry's do at C ^ swizzle.
    chunk = (number >> 1) ^ first_head
    place = first_head * LATENT_DIM + chunk * lds.CHUNK + (number & 1) * 8
    codes_address = lds_base + (lds.QUERY_HI.start + place)
    scales_address = lds_base + (lds.QUERY_SCALES.start + first_head * 4 + lane.g)
    scales = []
    for i, words in enumerate(raw.latent):
        pairs = [_floats(words[j], sign) for j in range(4)]
        largest = isa.maximum(*[abs(pair[j]) for pair in pairs for j in (0, 1)])
        # The 16 lanes of a group have the 128 columns of a block.
        largest = isa.row_maximum(largest.bitcast(fx.Int32)).bitcast(fx.Float32)
        scales.append(e8m0_scale(largest))
        unit = unit_of(scales[-1])
        hi = [isa.to_fp8(pairs[j : j + 2], unit) for j in (0, 2)]
        lo = [isa.to_fp8(residual(pairs[j : j + 2], hi[j // 2], unit), unit) for j in (0, 2)]
        address = codes_address ^ lds.CHUNK * i
        for codes, region in ((hi, lds.QUERY_HI), (lo, lds.QUERY_LO)):
            offset = LATENT_DIM * i + region.start - lds.QUERY_HI.start
            isa.lds_store(address, Vector.from_elements(codes, fx.Int32), 2, offset)

    def store_scales() -> list[Value]:
        for i, scale in enumerate(scales):
            isa.lds_store_byte(scales_address + 4 * i, scale)
        return []

    isa.when(lane.t == 0, store_scales, [])
    isa.barrier()
    address = lds_base + (
        lds.QUERY_HI.start + lane.t * LATENT_DIM + (order.lane_part() ^ lane.t) * lds.CHUNK
    )
    hi, lo = (
        [_operand(address, order, j, region.start - lds.QUERY_HI.start) for j in range(BLOCKS)]
        for region in (lds.QUERY_HI, lds.QUERY_LO)
    )
    scale = isa.lds_load(lds_base + (lds.QUERY_SCALES.start + lane.t * 4), 1)
    if order.scale_format == "pow2":
        scale = isa.shift_right(scale, lane.g * 8)
    else:
        scale = isa.rotate_right(scale, order.block(0) * 8)
    # The first tile takes the query's place.
    isa.barrier()
    zero = Vector.filled(2, 0.0, fx.Float32)
    for pair in [_floats(words[i], sign) for words in raw.rope for i in range(4)]:
        zero = isa.fma(pair, Vector.filled(2, 0.0, fx.Float32), zero)
    finite = sum_of_groups(zero[0] + zero[1]) == 0.0
    both = sign | isa.shift_right(sign, 16)
    rope = [Vector.from_elements([w[i] ^ both for i in range(4)], fx.Int32) for w in raw.rope]
    return Query(hi, lo, finite.select(scale, fx.Int32(_FOUR_NANS)), rope)


def _operand(address: Value, order: ChunkOrder, j: int, offset: int) -> Value:
    parts = [order.product_part(j, half) for half in (0, 1)]
    words = [isa.lds_load(address ^ part * lds.CHUNK, 4, offset) for part in parts]
    return Vector.from_elements([w[i] for w in words for i in range(4)], fx.Int32)


def residual(pairs: list[Value], codes: Value, unit: Value) -> list[Value]:
    """What an e4m3 word leaves over of two pairs of floats."""
    return [x - y for x, y in zip(pairs, isa.from_fp8(codes, unit), strict=True)]


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


def _floats(word: Value, sign: Value) -> Value:
    """The pair of bfloat16 of a dword as floats, their signs changed if ``sign`` has the bit."""
    pair = [(word << 16) + sign, (word & -0x10000) ^ sign]
    return Vector.from_elements([x.bitcast(fx.Float32) for x in pair], fx.Float32)
