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
_UNIT = 127
_HEADROOM = 64
"""How far, in bits, new weights may exceed the reference before the output is rescaled."""


class Output(NamedTuple):
    """Sums of weighted values: register r of lane (t, g) in part c is column 16c + 4g + r of the
    wave's block, head t, in units of 2^reference."""

    parts: list[Value]
    reference: Value


def no_output() -> Output:
    """The output at the start of a row, with a reference below any exponent."""
    zeros = Vector.filled(4, 0.0, fx.Float32)
    return Output([zeros] * COLUMN_CHUNKS, fx.Int32(-(2**28)))


class Values(NamedTuple):
    """Where a wave finds values and weights."""

    latent_address: Value
    weights_address: Value
    exponents_address: Value

    def add_tile(self, output: Output) -> Output:
        """Add the staged tile's values times its published weights."""
        exponent = isa.lds_load(self.exponents_address, 1)
        hi, lo = self._read_weights(0), self._read_weights(1)
        output = _raise_reference(output, exponent)
        scale = exponent - output.reference + _UNIT
        scale = (scale < 1).select(fx.Int32(1), scale)
        base = isa.opaque(self.latent_address)
        parts = []
        for chunk, part in enumerate(output.parts):
            values = self._read_values(base, chunk)
            for weights in (hi, lo):
                part = isa.mfma_fp8(values, weights, part, fx.Int32(_UNIT), scale)
            parts.append(part)
        return Output(parts, output.reference)

    def _read_weights(self, part: int) -> Value:
        run = lds.WEIGHTS.size // 2
        words = [isa.lds_load(self.weights_address, 4, run * i + 256 * part) for i in (0, 1)]
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
    block_bytes = lds.WEIGHTS.size // (lds.WAVES * BLOCKS)
    weights = (lane.g >> 1) * (BLOCKS * block_bytes) + lane.wave * block_bytes
    weights = weights + (lane.g & 1) * 512 + lane.t * 16
    exponents = (lane.g * BLOCKS + lane.wave) * 64 + lane.t * 4
    return Values(
        lds_base + (latent + lds.LATENT.start),
        lds_base + (weights + lds.WEIGHTS.start),
        lds_base + (exponents + lds.EXPONENTS.start),
    )


def _raise_reference(output: Output, exponent: Value) -> Output:
    """Rescale the sums where new weights would exceed the reference by too much: seldom.

    float32 has room for sums far above their reference; the first tile always sets it.
    """
    exceeds = isa.ballot(exponent - output.reference > _HEADROOM) != fx.Uint64(0)

    def rescale() -> list[Value]:
        first, second = isa.swap_rows_16(exponent, exponent)
        largest = (first > second).select(first, second)
        first, second = isa.swap_rows_32(largest, largest)
        largest = (first > second).select(first, second)
        reference = (largest > output.reference).select(largest, output.reference)
        factor = isa.ldexp(fx.Float32(1.0), output.reference - reference)
        return [reference] + [part * factor for part in output.parts]

    reference, *parts = isa.when(exceeds, rescale, [output.reference, *output.parts])
    return Output(parts, reference)
