"""The workgroup's LDS: what lies where, in bytes.

The latent of one tile is kept as 128 rows of 512 bytes, a row an entry. Three access patterns meet
here, and all of them are free of bank conflicts because the 16-byte chunk ``C`` of the row of entry
``n`` of a wave (n = 0 .. 31) lies at chunk ``C ^ swizzle(n)``:

- staging writes: 16 lanes write 16 neighbouring chunks of one row;
- scores: 16 lanes read the same chunk of 16 rows, n = 16s .. 16s + 15;
- weighted values: 16 lanes read the halves of one chunk of the eight rows of an octet,
  n = 4y .. 4y + 3 and 16 + 4y .. 16 + 4y + 3, and the next 16 lanes those of octet y + 2.
"""

from typing import Any, NamedTuple

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
REST_SLICE = WAVE_ENTRIES * HEADS_PER_GROUP // 2
"""Bytes of what hi and lo leave over of the same weights: [head][octet] of 4 bytes, e2m1."""
EXPONENTS_SLICE = HEADS_PER_GROUP * 4
"""Bytes of the exponents of one wave for one column block: [head] int32."""

# Weights and rest: [writing wave][slice]; slice k is for column block (wave + 1 + k) % 4. There are
# only three: that for the wave's own block takes the place of values that this wave has read.
# Exponents: [column block][slice], where ``exponents_place`` says.
REGIONS = _lay_out(
    ("latent", TILE * LATENT_DIM),
    ("weights", WAVES * (WAVES - 1) * WEIGHTS_SLICE),
    ("rest", WAVES * (WAVES - 1) * REST_SLICE),
    ("exponents", WAVES * WAVES * EXPONENTS_SLICE),
)
LATENT, WEIGHTS, REST, EXPONENTS = REGIONS
# Before the first tile its place holds the query: e4m3 hi and lo in [head] rows like the latents',
# then [head][block] E8M0 bytes.
QUERY_HI = Region("query hi", LATENT.start, HEADS_PER_GROUP * LATENT_DIM)
QUERY_LO = Region("query lo", QUERY_HI.start + QUERY_HI.size, QUERY_HI.size)
QUERY_SCALES = Region("query scales", QUERY_LO.start + QUERY_LO.size, HEADS_PER_GROUP * 4)
TOTAL = REGIONS[-1].start + REGIONS[-1].size
"""Two workgroups share the 160 KiB of a compute unit."""


def exponents_place(block: Any, writer: Any) -> Any:
    """Offset in EXPONENTS of a wave's slice for a column block (numbers, or values of a kernel).

    The lane groups of a wave write for different blocks, and read of different waves: either way
    they meet different banks.
    """
    return (block * WAVES + ((block + writer) & (WAVES - 1))) * EXPONENTS_SLICE


def swizzle(entry: int) -> int:
    """The number a row's chunk numbers are XORed with; it changes their low four bits only."""
    return entry % 16 ^ 4 * (entry // 16 % 2)
