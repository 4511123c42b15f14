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
from jax_sparse_mla.kernel.softmax import LO_EXPONENT, REFINED, OwnWeights
from jax_sparse_mla.kernel.workgroup import Lane, same_lane

COLUMN_CHUNKS = 8
"""16-column parts of a column block."""
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Of the parts: neighbours share addresses."""
_VALUE_SCALE = 64
"""E8M0 scale given for the values with hi; 127, for 1, would leave less room for the weights'."""
_VALUE_SCALES = _VALUE_SCALE | _VALUE_SCALE + LO_EXPONENT << 8
"""The same with hi, and with lo and the rest, whose unit differs: bytes 0 and 1."""
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


class Term(NamedTuple):
    """One part of the weights, as an operand."""

    weights: Value
    scale: Value
    value_scale: int
    """Byte of _VALUE_SCALES."""


class Values(NamedTuple):
    """Where a wave finds values and weights."""

    wave: Value
    lds_base: Value
    own_weights_address: Value
    weights_addresses: list[list[Value]]
    """[hi, lo][waves 0 and 1, waves 2 and 3]."""
    exponents_address: Value

    def add_tile(self, output: Output, own: OwnWeights, address: Value) -> Output:
        """Add the staged tile's values times the weights: the published and the wave's own.

        ``address`` derives from ``values_address``.
        """
        exponent = isa.lds_load(self.exponents_address, 1)
        # Nobody else reads these columns: once read, they make room for the wave's own weights.
        first_values = self._read_values(address, 0)
        isa.lds_store(self.own_weights_address, own.line, 4)
        hi = self._read_weights(0)
        excess = exponent - output.reference

        def raise_reference_and_refine() -> list[Value]:
            is_refined = exponent > (REFINED >> 1)
            plain = is_refined.select(exponent - REFINED, exponent)
            raised = _raise_reference(output, plain)
            scale = _scale(plain - raised.reference)
            # What is not refined counts for nothing.
            rest = Term(self._read_rest(own, is_refined), is_refined.select(scale, fx.Int32(0)), 1)
            again = isa.opaque(address)
            parts = self._add(raised.parts, first_values, again, [rest])
            return [self._read_weights(0), scale, raised.reference, *parts]

        # The exponents of a refined tile exceed any limit too.
        exceeds = isa.ballot(excess > _HEADROOM) != fx.Uint64(0)
        # What is opaque leaves no work to that path alone: the sums would be held twice.
        unchanged = [hi, isa.opaque(_scale(excess)), output.reference, *output.parts]
        hi, scale, reference, *parts = isa.when(exceeds, raise_reference_and_refine, unchanged)
        terms = [Term(hi, scale, 0), Term(self._read_weights(1), scale, 1)]
        return Output(self._add(parts, first_values, address, terms), reference)

    def _add(
        self, parts: list[Value], first: Value, address: Value, terms: list[Term]
    ) -> list[Value]:
        """The parts with products of the values and the terms added."""
        sums = list(parts)
        ahead = first
        for part, following in zip(_ORDER, [*_ORDER[1:], None], strict=True):
            values = ahead
            if following is not None:
                ahead = self._read_values(address, following)
            isa.schedule_fence()
            for weights, scale, byte in terms:
                sums[part] = isa.mfma_fp8(
                    values, weights, sums[part], fx.Int32(_VALUE_SCALES), scale, byte_a=byte
                )
            isa.schedule_fence()
        return sums

    def _read_rest(self, own: OwnWeights, is_refined: Value) -> Value:
        """The rest of the weights, of the waves that have refined the tile; else anything."""
        lane = same_lane(self.wave)
        # Behind the own weights, and in the banks that the published rest has.
        row = 64 + (lane.t ^ ((self.wave & 1) * 8))
        chunk = (self.wave >> 1) * 16 + lane.t
        place = self.lds_base + (lds.LATENT.start + row * LATENT_DIM + chunk * lds.CHUNK)

        def store() -> list[Value]:
            isa.lds_store(place, own.rest, 4)
            return []

        isa.when(own.refined, lambda: isa.when(lane.g == BLOCKS - 1, store, []), [])
        number = _slice_number(lane.g, self.wave)
        published = self.lds_base + (lds.REST.start + number * lds.REST_SLICE + lane.t * 16)
        is_published = is_refined & (lane.g != self.wave)
        return isa.lds_load(is_published.select(published, place), 4)

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
    exponents = lds.exponents_place(lane.wave, lane.g) + lane.t * 4

    def own(place: Value) -> Value:
        """Where 16 bytes of the own slice lie: in row ``place``, the wave's first chunk."""
        swizzle = (place & 15) ^ (((place >> 4) & 1) * 4)
        chunk = (lane.wave * COLUMN_CHUNKS) ^ swizzle
        return lds_base + (lds.LATENT.start + place * LATENT_DIM + chunk * lds.CHUNK)

    def published(writer: Value, place: Value) -> Value:
        """Where 16 bytes of another wave's slice for this one lie."""
        number = _slice_number(writer, lane.wave)
        return lds_base + (lds.WEIGHTS.start + number * lds.WEIGHTS_SLICE + place * 16)

    def weights(part: int, run: int) -> Value:
        writer = (lane.g >> 1) + 2 * run
        place = ((lane.g & 1) * 2 + part) * 16 + lane.t
        return (writer == lane.wave).select(own(place), published(writer, place))

    return Values(
        wave=lane.wave,
        lds_base=lds_base,
        own_weights_address=own(lane.g * 16 + lane.t),
        weights_addresses=[[weights(part, run) for run in (0, 1)] for part in (0, 1)],
        exponents_address=lds_base + (exponents + lds.EXPONENTS.start),
    )


def _slice_number(writer: Value, reader: Value) -> Value:
    """Number of the slice in lds.WEIGHTS or REST that one wave has written for another."""
    return writer * (BLOCKS - 1) + ((reader - writer - 1) & (BLOCKS - 1))


def values_address(lane: Lane, lds_base: Value) -> Value:
    """The address for ``Values.add_tile``."""
    entry, half = lane.t >> 1, lane.t & 1
    row = (lane.g >> 1) * 32 + (lane.g & 1) * 8 + (entry >> 2) * 16 + (entry & 3)
    # The swizzle of that row is 8(g % 2) + entry % 4, XOR 4 in the second half of the wave.
    swizzle = ((lane.g & 1) * 8 + (entry & 3)) ^ ((entry >> 2) * 4)
    chunk = ((lane.wave & 1) * 8) ^ swizzle
    place = row * LATENT_DIM + (lane.wave >> 1) * 256 + chunk * lds.CHUNK + half * 8
    return lds_base + (lds.LATENT.start + place)


def _raise_reference(output: Output, exponent: Value) -> Output:
    """The output rescaled so that no exponent exceeds its reference.

    float32 has room for sums far above their reference, so that it is seldom needed; the first tile
    always sets it.
    """
    first, second = isa.swap_rows_16(exponent, exponent)
    largest = (first > second).select(first, second)
    first, second = isa.swap_rows_32(largest, largest)
    largest = (first > second).select(first, second)
    reference = (largest > output.reference).select(largest, output.reference)
    factor = isa.ldexp(fx.Float32(1.0), output.reference - reference)
    return Output([part * factor for part in output.parts], reference)


def _scale(excess: Value) -> Value:
    """The E8M0 scale to give for weights whose exponent exceeds the reference by ``excess``."""
    scale = excess + (127 + 127 - _VALUE_SCALE)
    return (scale < 1).select(fx.Int32(1), scale)
