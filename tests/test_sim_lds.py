"""LDS: every width and form, each lane at an address of its own, lanes off, transposed reads."""

import numpy as np
import pytest
from gfx950_sim.isa import lds
from sim_snippets import SOME_LANES, Runner, Snippet, instructions_in, lanes_of

RNG = np.random.default_rng(6)
BYTES = RNG.integers(0, 256, 4096, dtype=np.uint8)
"""What the snippets fill the LDS with: 16 dwords a lane."""
ON = lanes_of(SOME_LANES)
SIZE = 4096

CASES: dict[str, tuple[Snippet, np.ndarray]] = {}


def rows(values: np.ndarray) -> np.ndarray:
    """Registers [n, 64] that hold n dwords a lane."""
    return np.ascontiguousarray(values).view(np.uint32).reshape(64, -1).T


DATA = rows(BYTES.reshape(64, 64))
"""16 registers; lane l has bytes 64 l .. 64 l + 63."""
FILL = "".join(f"ds_write_b128 v20, v[{4 * n}:{4 * n + 3}] offset:{16 * n}\n" for n in range(4))
FILL += "s_waitcnt lgkmcnt(0)\n"
BASE = (np.arange(64) * 64).astype(np.uint32)


def frame(addresses: np.ndarray) -> dict[int, np.ndarray]:
    registers = dict(enumerate(DATA))
    return registers | {20: BASE, 21: addresses.astype(np.uint32)}


def fetched(addresses: np.ndarray, size: int) -> np.ndarray:
    """uint8 [64, size] at each lane's address."""
    return BYTES[addresses.astype(int)[:, None] + np.arange(size)]


def read_case(name: str, code: str, expected: np.ndarray, addresses: np.ndarray, **options) -> None:
    """The code reads to v0...; v21 has the addresses."""
    text = f"s_mov_b64 s[20:21], exec\ns_mov_b64 exec, -1\n{FILL}s_mov_b64 exec, s[20:21]\n{code}"
    outputs = tuple(range(len(expected)))
    snippet = Snippet(text, frame(addresses), outputs, lds_bytes=SIZE, **options)
    CASES[name] = (snippet, expected)


def some_addresses(alignment: int, size: int, limit: int = SIZE) -> np.ndarray:
    return RNG.integers(0, (limit - size) // alignment, 64) * alignment


for name, size in (("b32", 4), ("b64", 8), ("b96", 12), ("b128", 16)):
    registers = size // 4
    destination = f"v[0:{registers - 1}]" if registers > 1 else "v0"
    addresses = some_addresses(16 if size == 12 else size, size, SIZE - 256)
    for offset in (0, 240):
        read_case(
            f"read_{name} offset {offset}",
            f"ds_read_{name} {destination}, v21 offset:{offset}",
            rows(fetched(addresses + offset, size)),
            addresses,
        )
    kept = np.where(ON, rows(fetched(addresses, size)), DATA[:registers])
    read_case(
        f"read_{name} lanes off",
        f"ds_read_{name} {destination}, v21",
        kept,
        addresses,
        exec_mask=SOME_LANES,
    )
    # A write at a permuted place, then a whole read back of what every lane's place holds.
    place = RNG.permutation(64) * 64
    written = BYTES.copy()
    for lane in np.flatnonzero(ON):
        written[place[lane] + 32 : place[lane] + 32 + size] = BYTES[64 * lane : 64 * lane + size]
    source = f"v[0:{registers - 1}]" if registers > 1 else "v0"
    read_case(
        f"write_{name} lanes off",
        f"ds_write_{name} v21, {source} offset:32\ns_waitcnt lgkmcnt(0)\ns_mov_b64 exec, -1\n"
        "ds_read_b128 v[0:3], v20 offset:32",
        rows(written.reshape(64, 64)[:, 32:48]),
        place,
        exec_mask=SOME_LANES,
    )

for name, size in (("b32", 4), ("b64", 8)):
    registers = size // 4
    addresses = some_addresses(size, size, SIZE - 64 * size * 6)
    for form, unit in (("2", size), ("2st64", 64 * size)):
        both = [fetched(addresses + n * unit, size) for n in (1, 5)]
        read_case(
            f"read{form}_{name}",
            f"ds_read{form}_{name} v[0:{2 * registers - 1}], v21 offset0:1 offset1:5",
            rows(np.concatenate(both, axis=1)),
            addresses,
        )
    written = BYTES.copy()
    place = RNG.permutation(64) * 64
    for lane in range(64):
        for n, first in ((2, 0), (4, registers)):
            data = BYTES[64 * lane + 4 * first :][:size]
            written[place[lane] + n * size : place[lane] + n * size + size] = data
    sources = ("v0", "v1") if registers == 1 else ("v[0:1]", "v[2:3]")
    read_case(
        f"write2_{name}",
        f"ds_write2_{name} v21, {sources[0]}, {sources[1]} offset0:2 offset1:4\n"
        "s_waitcnt lgkmcnt(0)\n"
        + "".join(f"ds_read_b128 v[{4 * n}:{4 * n + 3}], v20 offset:{16 * n}\n" for n in range(4)),
        rows(written.reshape(64, 64)),
        place,
    )
# st64: dword 64 n away, so that lane l of 16 writes its two at 4 l + 256 n.
written = BYTES.copy()
for lane in range(64):
    for n, first in ((3, 0), (7, 1)):
        written[4 * lane + 256 * n : 4 * lane + 256 * n + 4] = BYTES[64 * lane + 4 * first :][:4]
read_case(
    "write2st64_b32",
    "ds_write2st64_b32 v21, v0, v1 offset0:3 offset1:7\ns_waitcnt lgkmcnt(0)\n"
    "ds_read_b128 v[0:3], v20 offset:16",
    rows(written.reshape(64, 64)[:, 16:32]),
    4 * np.arange(64),
)

written = BYTES.copy()
for lane in range(32):
    for n, first in ((1, 0), (3, 2)):
        written[8 * lane + 512 * n : 8 * lane + 512 * n + 8] = BYTES[64 * lane + 4 * first :][:8]
read_case(
    "write2st64_b64",
    "s_mov_b32 exec_hi, 0\nds_write2st64_b64 v21, v[0:1], v[2:3] offset0:1 offset1:3\n"
    "s_waitcnt lgkmcnt(0)\ns_mov_b64 exec, -1\n"
    + "".join(f"ds_read_b128 v[{4 * n}:{4 * n + 3}], v20 offset:{16 * n}\n" for n in range(4)),
    rows(written.reshape(64, 64)),
    8 * np.arange(64),
)

for name, dtype in (("u8", np.uint8), ("i8", np.int8), ("u16", np.uint16), ("i16", np.int16)):
    size = np.dtype(dtype).itemsize
    addresses = some_addresses(size, size)
    values = fetched(addresses, size).view(dtype)[:, 0]
    read_case(
        f"read_{name}",
        f"ds_read_{name} v0, v21",
        values.astype(np.int64).astype(np.uint32)[np.newaxis],
        addresses,
    )
    if name == "i16":
        continue
    short = values.astype(np.int16 if dtype is np.int8 else np.uint16).view(np.uint16)
    for suffix, shift in (("d16", 0), ("d16_hi", 16)):
        kept = DATA[0] & np.uint32(0xFFFF0000 >> shift)
        read_case(
            f"read_{name}_{suffix}",
            f"ds_read_{name}_{suffix} v0, v21",
            (kept | short.astype(np.uint32) << np.uint32(shift))[np.newaxis],
            addresses,
        )
for name, size, shift in (("b8", 1, 0), ("b16", 2, 0), ("b8_d16_hi", 1, 16), ("b16_d16_hi", 2, 16)):
    place = RNG.permutation(64) * 64
    written = BYTES.copy()
    for lane in range(64):
        data = BYTES[64 * lane + shift // 8 :][:size]
        written[place[lane] + 18 : place[lane] + 18 + size] = data
    read_case(
        f"write_{name}",
        f"ds_write_{name} v21, v0 offset:18\ns_waitcnt lgkmcnt(0)\nds_read_b32 v0, v20 offset:16",
        rows(written.reshape(64, 64)[:, 16:20]),
        place,
    )

# Transposed reads, element by element as the facts page states them.
for name, dtype in (("b8", np.uint8), ("b16", np.uint16)):
    addresses = some_addresses(8, 8)
    source = fetched(addresses, 8).view(dtype)
    count = source.shape[1]
    result = np.zeros_like(source)
    for lane in range(64):
        row, t = lane // 16 * 16, lane % 16
        for j in range(count):
            result[lane, j] = source[row + 16 // count * j + t // count, t % count]
    read_case(f"read_b64_tr_{name}", f"ds_read_b64_tr_{name} v[0:1], v21", rows(result), addresses)
    # A matrix of 16 columns whose rows lie 128 bytes apart comes out by columns.
    width = np.dtype(dtype).itemsize
    chunks = 16 * width // 8
    row_of, chunk = np.arange(64) // chunks, np.arange(64) % chunks
    addresses = 128 * row_of + 8 * chunk
    tile = BYTES.reshape(32, 128)[: 64 // chunks, : 16 * width].copy().view(dtype)
    columns = [tile[:, t].reshape(4, count)[g] for g in range(4) for t in range(16)]
    read_case(
        f"read_b64_tr_{name} of a matrix",
        f"ds_read_b64_tr_{name} v[0:1], v21",
        rows(np.array(columns)),
        addresses,
    )


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner({name: snippet for name, (snippet, _) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_lds(runner, name):
    np.testing.assert_array_equal(runner.run(name), CASES[name][1])


def test_addresses_wrap_at_32_bits():
    vaddr = np.uint32([0xFFFFFFFC, 8])
    assert lds.one_address(vaddr, 12, 1).tolist() == [[264, 276]]
    assert lds.two_addresses(8)(vaddr, 1, 255).tolist() == [[4, 16], [2036, 2048]]


@pytest.mark.parametrize("name", ["ds_read_b64_tr_b4", "ds_read_b96_tr_b6"])
def test_narrower_transposes_are_not_modelled(name):
    assert name not in lds.INSTRUCTIONS


def test_every_instruction_of_the_table_is_here():
    here = instructions_in(snippet for snippet, _ in CASES.values())
    # The exchanges, which touch no LDS memory, are in test_sim_lanes.
    memory = {name for name, record in lds.INSTRUCTIONS.items() if record.kind != "exchange"}
    assert memory <= here
