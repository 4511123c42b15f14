"""The workgroup's LDS: what lies where, in bytes.

The latent of one tile is kept as 128 rows of 512 bytes, a row an entry. Three access patterns meet
here, and all of them are free of bank conflicts because the 16-byte chunk ``C`` of the row of entry
``n`` of a wave (n = 0 .. 31) lies at chunk ``C ^ swizzle(n)``:

- staging writes: 16 lanes write 16 neighbouring chunks of one row;
- scores: 16 lanes read the same chunk of 16 rows, n = 16s .. 16s + 15;
- weighted values: 16 lanes read the halves of one chunk of the eight rows of an octet,
  n = 4y .. 4y + 3 and 16 + 4y .. 16 + 4y + 3, and the next 16 lanes those of octet y + 2.
"""

from typing import NamedTuple

from jax_sparse_mla.kernel.contract import HEADS_PER_GROUP, LATENT_DIM, TILE

WAVES = 4
LANES = 64
WAVE_ENTRIES = TILE // WAVES
"""Wave w computes the scores of entries 32w .. 32w + 31 of a tile."""
CHUNK = 16
"""Bytes that move together; a 128-column scale block of a row is eight chunks."""


class Region(NamedTuple):
    """A named part of LDS."""

    name: str
    start: int
    size: int


def _lay_out(*sizes: tuple[str, int]) -> tuple[Region, ...]:
    regions: list[Region] = []
    start = 0
    for name, size in sizes:
        regions.append(Region(name, start, size))
        start += size
    return tuple(regions)


WEIGHTS_SLICE = WAVE_ENTRIES * HEADS_PER_GROUP * 2
"""Bytes of the weights of one wave's entries for one column block: [2 pairs of octets][hi, lo]
[head] of 16 bytes, e4m3."""
EXPONENTS_STRIDE = WAVES * HEADS_PER_GROUP * 4 + 64
"""Bytes of the exponents for one column block: [writing wave][head] int32, and 64 more, so that the
lane groups, which write to different blocks, meet different banks."""

# Weights: [writing wave][slice]; slice k is for column block (wave + 1 + k) % 4. There are only
# three: the slice for the wave's own block takes the place of values that this wave has read.
REGIONS = _lay_out(
    ("latent", TILE * LATENT_DIM),
    ("weights", WAVES * (WAVES - 1) * WEIGHTS_SLICE),
    ("exponents", WAVES * EXPONENTS_STRIDE),
)
LATENT, WEIGHTS, EXPONENTS = REGIONS
# Before the first tile its place holds the query: e4m3 hi and lo in [head] rows like the latents',
# then [head][block] E8M0 bytes.
QUERY_HI = Region("query hi", LATENT.start, HEADS_PER_GROUP * LATENT_DIM)
QUERY_LO = Region("query lo", QUERY_HI.start + QUERY_HI.size, QUERY_HI.size)
QUERY_SCALES = Region("query scales", QUERY_LO.start + QUERY_LO.size, HEADS_PER_GROUP * 4)
TOTAL = REGIONS[-1].start + REGIONS[-1].size


def swizzle(entry: int) -> int:
    """The number a row's chunk numbers are XORed with; it changes their low four bits only."""
    return entry % 16 ^ 4 * (entry // 16 % 2)
