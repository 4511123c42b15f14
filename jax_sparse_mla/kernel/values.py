"""Weighted values: wave w adds up its 128 output columns, column block w, over all entries.

The latents are used as they lie in the records; a weight carries the entry's scale (softmax.py).
K position (lane group g, byte 8o + j) of the product is entry j of octet 2(g % 2) + o % 2 of wave
g // 2 + 2(o // 2): so each block of 32 that shares a scale operand is one wave's 32 entries. Entry
j of octet y is entry 16(j // 4) + 4y + j % 4 of its wave, as the scores left it.
"""

from typing import NamedTuple

import flydsl.expr as fx
from flydsl.expr.typing import Vector

from jax_sparse_mla.kernel import instructions as isa
from jax_sparse_mla.kernel import lds
from jax_sparse_mla.kernel.contract import LATENT_DIM
from jax_sparse_mla.kernel.instructions import Value
from jax_sparse_mla.kernel.query import BLOCKS
from jax_sparse_mla.kernel.workgroup import Lane

COLUMN_CHUNKS = 8
"""16-column parts of a column block."""
_VALUE_SCALE = 64
"""E8M0 scale given for the values: an inline constant, which 127, for 1, is not."""
_HEADROOM = 64
"""How far, in bits, new weights may exceed the reference before the output is rescaled."""


class Output(NamedTuple):
    """Sums of weighted values, in units of 2^reference.

    Register r of lane (t, g) in part c is column 16c + 4g + r of the wave's block, head t.
    """

    parts: list[Value]
    reference: Value


def no_output() -> Output:
    """The output at the start of a row, with a reference below any exponent."""
    zeros = Vector.filled(4, 0.0, fx.Float32)
    return Output([zeros] * COLUMN_CHUNKS, fx.Int32(-(2**28)))


class Values(NamedTuple):
    """Where a wave finds values and weights."""

    latent_address: Value
    own_weights_address: Value
    weights_addresses: list[list[Value]]
    """[hi, lo][waves 0 and 1, waves 2 and 3]."""
    exponents_address: Value

    def add_tile(self, output: Output, own_weights: Value) -> Output:
        """Add the staged tile's values times the weights: the published and the wave's own."""
        exponent = isa.lds_load(self.exponents_address, 1)
        base = isa.opaque(self.latent_address)
        # Nobody else reads these columns: once read, they make room for the wave's own weights.
        first_values = self._read_values(base, 0)
        isa.lds_store(self.own_weights_address, own_weights, 4)
        hi, lo = (self._read_weights(part) for part in (0, 1))
        output, excess = _raise_reference(output, exponent)
        scale = excess + (127 + 127 - _VALUE_SCALE)
        scale = (scale < 1).select(fx.Int32(1), scale)
        parts = []
        ahead = first_values
        for chunk, part in enumerate(output.parts):
            values = ahead
            if chunk + 1 < COLUMN_CHUNKS:
                ahead = self._read_values(base, chunk + 1)
            isa.schedule_fence()
            for weights in (hi, lo):
                part = isa.mfma_fp8(values, weights, part, fx.Int32(_VALUE_SCALE), scale)
            parts.append(part)
            isa.schedule_fence()
        return Output(parts, output.reference)

    def _read_weights(self, part: int) -> Value:
        words = [isa.lds_load(address, 4) for address in self.weights_addresses[part]]
        return Vector.from_elements([w[i] for w in words for i in range(4)], fx.Int32)

    def _read_values(self, base: Value, chunk: int) -> Value:
        words = []
        for octet in range(4):
            # The next octet of a wave lies four rows on, the wave after the next 64 rows.
            address = base ^ lds.CHUNK * (chunk ^ 4 * (octet % 2))
            offset = LATENT_DIM * (4 * (octet % 2) + 64 * (octet // 2))
            words.append(isa.lds_read_transposed(address, offset))
        return Vector.from_elements([w[i] for w in words for i in range(2)], fx.Int32)


def values_of(lane: Lane, lds_base: Value) -> Values:
    """Prepare what stays the same from tile to tile."""
    entry, half = lane.t >> 1, lane.t & 1
    row = (lane.g >> 1) * 32 + (lane.g & 1) * 8 + (entry >> 2) * 16 + (entry & 3)
    # The swizzle of that row is 8(g % 2) + entry % 4, XOR 4 in the second half of the wave.
    swizzle = ((lane.g & 1) * 8 + (entry & 3)) ^ ((entry >> 2) * 4)
    chunk = ((lane.wave & 1) * 8) ^ swizzle
    latent = row * LATENT_DIM + (lane.wave >> 1) * 256 + chunk * lds.CHUNK + half * 8
    exponents = lane.wave * lds.EXPONENTS_STRIDE + (lane.g * 16 + lane.t) * 4

    def own(place: Value) -> Value:
        """Where 16 bytes of the own slice lie: in row ``place``, the wave's first chunk."""
        swizzle = (place & 15) ^ (((place >> 4) & 1) * 4)
        chunk = (lane.wave * COLUMN_CHUNKS) ^ swizzle
        return lds_base + (lds.LATENT.start + place * LATENT_DIM + chunk * lds.CHUNK)

    def published(writer: Value, place: Value) -> Value:
        """Where 16 bytes of another wave's slice for this one lie."""
        number = writer * (BLOCKS - 1) + ((lane.wave - writer - 1) & (BLOCKS - 1))
        return lds_base + (lds.WEIGHTS.start + number * lds.WEIGHTS_SLICE + place * 16)

    def weights(part: int, run: int) -> Value:
        writer = (lane.g >> 1) + 2 * run
        place = ((lane.g & 1) * 2 + part) * 16 + lane.t
        return (writer == lane.wave).select(own(place), published(writer, place))

    return Values(
        latent_address=lds_base + (latent + lds.LATENT.start),
        own_weights_address=own(lane.g * 16 + lane.t),
        weights_addresses=[[weights(part, run) for run in (0, 1)] for part in (0, 1)],
        exponents_address=lds_base + (exponents + lds.EXPONENTS.start),
    )


def _raise_reference(output: Output, exponent: Value) -> tuple[Output, Value]:
    """Rescale the sums where new weights would exceed the reference by too much: seldom.

    float32 has room for sums far above their reference; the first tile always sets it. Returns too
    by how much ``exponent`` exceeds the reference now.
    """
    excess = exponent - output.reference
    exceeds = isa.ballot(excess > _HEADROOM) != fx.Uint64(0)

    def rescale() -> list[Value]:
        first, second = isa.swap_rows_16(exponent, exponent)
        largest = (first > second).select(first, second)
        first, second = isa.swap_rows_32(largest, largest)
        largest = (first > second).select(first, second)
        reference = (largest > output.reference).select(largest, output.reference)
        factor = isa.ldexp(fx.Float32(1.0), output.reference - reference)
        return [reference, exponent - reference] + [part * factor for part in output.parts]

    unchanged = [output.reference, excess, *output.parts]
    reference, excess, *parts = isa.when(exceeds, rescale, unchanged)
    return Output(parts, reference), excess
