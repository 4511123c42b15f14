"""Vector memory: widths, address forms, buffer bounds, DMA to LDS; each lane has its own place."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from gfx950_sim import SimulationFault
from gfx950_sim.isa import vmem
from sim_snippets import ALL_LANES, SOME_LANES, Runner, Snippet, instructions_in, lanes_of

RNG = np.random.default_rng(8)
BYTES = RNG.integers(0, 256, 16384, dtype=np.uint8)
DATA = RNG.integers(0, 2**32, (4, 64), dtype=np.uint32)
ON = lanes_of(SOME_LANES)
HALF = 8192
"""Offsets are taken from here, so that both signs of an instruction offset stay inside."""


class Case:
    """A snippet over a copy of BYTES, the registers v[0:3] and the memory it must leave."""

    def __init__(
        self, snippet: Snippet, registers: np.ndarray, memory: np.ndarray | None = None
    ) -> None:
        self.snippet, self.registers = snippet, registers
        self.memory = BYTES if memory is None else memory


CASES: dict[str, Case] = {}


def rows(values: np.ndarray) -> np.ndarray:
    """Registers [n, 64] that hold n dwords a lane."""
    return np.ascontiguousarray(values).view(np.uint32).reshape(64, -1).T


def fetched(places: np.ndarray, size: int) -> np.ndarray:
    """uint8 [64, size] at each lane's place."""
    return BYTES[places.astype(int)[:, None] + np.arange(size)]


def make(code: str, places: np.ndarray, **options) -> Snippet:
    """v[0:3] hold DATA, v22 the lane's place, v[20:21] its address, s[12:13] the memory's."""
    registers = dict(enumerate(DATA)) | {
        22: places.astype(np.uint32),
        23: np.zeros(64, np.uint32),
        20: np.zeros(64, np.uint32),
        21: np.zeros(64, np.uint32),
    }
    exec_mask = options.pop("exec_mask", ALL_LANES)
    text = f"""
s_mov_b64 exec, -1
v_lshl_add_u64 v[20:21], v[22:23], 0, s[12:13]
s_mov_b32 exec_lo, {exec_mask & 0xFFFFFFFF:#x}
s_mov_b32 exec_hi, {exec_mask >> 32:#x}
{code}
"""
    return Snippet(text, registers, (0, 1, 2, 3), memory=BYTES.copy(), **options)


def loaded(new: np.ndarray, mask: int = ALL_LANES) -> np.ndarray:
    """DATA with its first rows replaced in the lanes that are on."""
    result = DATA.copy()
    result[: len(new)] = np.where(lanes_of(mask), new, result[: len(new)])
    return result


def span(count: int) -> str:
    return f"v[0:{count - 1}]" if count > 1 else "v0"


def some_places(alignment: int, size: int) -> np.ndarray:
    """Places that do not overlap, around the middle."""
    slots = RNG.permutation(2048 // max(alignment, size))[:64]
    return HALF - 1024 + slots * max(alignment, size)


LOADS: dict[str, tuple[int, Callable[[np.ndarray], np.ndarray]]] = {
    "ubyte": (1, lambda b: b[:, 0].astype(np.uint32)[None]),
    "sbyte": (1, lambda b: b[:, 0].view(np.int8).astype(np.int32).view(np.uint32)[None]),
    "ushort": (2, lambda b: b.view(np.uint16)[:, 0].astype(np.uint32)[None]),
    "sshort": (2, lambda b: b.view(np.int16)[:, 0].astype(np.int32).view(np.uint32)[None]),
    "dword": (4, rows),
    "dwordx2": (8, rows),
    "dwordx3": (12, rows),
    "dwordx4": (16, rows),
}
RESOURCE = """
s_mov_b32 s16, s12
s_and_b32 s17, s13, 0xffff
s_or_b32 s17, s17, {stride:#x}
s_mov_b32 s18, {records}
s_mov_b32 s19, 0x27000
"""


def resource(records: int = len(BYTES), stride: int = 0) -> str:
    return RESOURCE.format(stride=stride << 16, records=records)


for width, (size, decode) in LOADS.items():
    count = max(size // 4, 1)
    for mask, suffix in ((ALL_LANES, ""), (SOME_LANES, " lanes off")):
        places = some_places(4, 16)
        for offset in (0, 4095, -4096) if not suffix else (-64,):
            new = decode(fetched(places + offset, size))
            CASES[f"global_load_{width} {offset}{suffix}"] = Case(
                make(
                    f"global_load_{width} {span(count)}, v[20:21], off offset:{offset}",
                    places,
                    exec_mask=mask,
                ),
                loaded(new, mask),
            )
        new = decode(fetched(places - 8, size))
        CASES[f"global_load_{width} saddr{suffix}"] = Case(
            make(
                f"global_load_{width} {span(count)}, v22, s[12:13] offset:-8",
                places,
                exec_mask=mask,
            ),
            loaded(new, mask),
        )
        new = decode(fetched(places + 24, size))
        CASES[f"buffer_load_{width}{suffix}"] = Case(
            make(
                f"{resource()}s_movk_i32 s20, 20\n"
                f"buffer_load_{width} {span(count)}, v22, s[16:19], s20 offen offset:4",
                places,
                exec_mask=mask,
            ),
            loaded(new, mask),
        )

for kind, size, dtype in (("ubyte", 1, np.uint8), ("sbyte", 1, np.int8), ("short", 2, np.int16)):
    for suffix, shift in (("d16", 0), ("d16_hi", 16)):
        places = some_places(2, 2)
        short = fetched(places, size).view(dtype)[:, 0].astype(np.int16).view(np.uint16)
        new = DATA[0] & np.uint32(0xFFFF0000 >> shift) | short.astype(np.uint32) << np.uint32(shift)
        for family, address in (("global", "v22, s[12:13]"), ("buffer", "v22, s[16:19], 0 offen")):
            CASES[f"{family}_load_{kind}_{suffix}"] = Case(
                make(f"{resource()}{family}_load_{kind}_{suffix} v0, {address}", places),
                loaded(new[None]),
            )

STORES = {
    "byte": (1, 0),
    "byte_d16_hi": (1, 2),
    "short": (2, 0),
    "short_d16_hi": (2, 2),
    "dword": (4, 0),
    "dwordx2": (8, 0),
    "dwordx3": (12, 0),
    "dwordx4": (16, 0),
}
for width, (size, skip) in STORES.items():
    count = max(size // 4, 1)
    source, data = np.ascontiguousarray(DATA.T).view(np.uint8), span(count)
    for mask, suffix in ((ALL_LANES, ""), (SOME_LANES, " lanes off")):
        places = some_places(4, 16)
        memory = BYTES.copy()
        for lane in np.flatnonzero(lanes_of(mask)):
            memory[places[lane] + 12 : places[lane] + 12 + size] = source[lane, skip : skip + size]
        for name, code in {
            f"global_store_{width}": f"global_store_{width} v[20:21], {data}, off offset:12",
            f"global_store_{width} saddr": f"global_store_{width} v22, {data}, s[12:13] offset:12",
            f"buffer_store_{width}": (
                f"{resource()}buffer_store_{width} {data}, v22, s[16:19], 0 offen offset:12"
            ),
        }.items():
            CASES[f"{name}{suffix}"] = Case(make(code, places, exec_mask=mask), DATA, memory)

# Bounds, dword by dword: lane l starts 4 * l before, at and beyond the end.
END = 6000
for width, size in (("dword", 4), ("dwordx2", 8), ("dwordx3", 12), ("dwordx4", 16)):
    count = size // 4
    places = END + 40 - 4 * np.arange(64)
    inside = places + 4 * (np.arange(count)[:, None] + 1) <= END
    code = f"{resource(END)}buffer_load_{width} {span(count)}, v22, s[16:19], 0 offen"
    new = np.where(inside, rows(fetched(places, size)), 0)
    CASES[f"buffer_load_{width} bounds"] = Case(make(code, places), loaded(new))
    # The scalar offset and the instruction's count, too.
    code = (
        f"{resource(END)}s_movk_i32 s20, 100\n"
        f"buffer_load_{width} {span(count)}, v22, s[16:19], s20 offen offset:24"
    )
    CASES[f"buffer_load_{width} bounds with offsets"] = Case(make(code, places - 124), loaded(new))
    places = END + 320 - 16 * np.arange(64)
    memory = BYTES.copy()
    for lane, word in np.ndindex(64, count):
        place = places[lane] + 4 * word
        if place + 4 <= END:
            memory[place : place + 4] = DATA[word, lane : lane + 1].view(np.uint8)
    code = f"{resource(END)}buffer_store_{width} {span(count)}, v22, s[16:19], 0 offen"
    CASES[f"buffer_store_{width} bounds"] = Case(make(code, places), DATA, memory)
for width, size in (("ubyte", 1), ("ushort", 2)):
    places = END + 8 - 2 * np.arange(64)
    decode = LOADS[width][1]
    new = np.where(places + size <= END, decode(fetched(places, size)), 0)
    code = f"{resource(END)}buffer_load_{width} v0, v22, s[16:19], 0 offen"
    CASES[f"buffer_load_{width} bounds"] = Case(make(code, places), loaded(new))
huge = np.full(64, 0xFFFFFFF0)
CASES["buffer_load far out of range"] = Case(
    make(f"{resource(END)}buffer_load_dword v0, v22, s[16:19], 0 offen offset:8", huge),
    loaded(np.zeros((1, 64), np.uint32)),
)
CASES["buffer_load: vector and instruction offset wrap at 32 bits"] = Case(
    make(f"{resource(END)}buffer_load_dword v0, v22, s[16:19], 0 offen offset:32", huge),
    loaded(np.repeat(BYTES[16:20].view(np.uint32), 64)[None]),
)
CASES["buffer_load without offset"] = Case(
    make(f"{resource(END)}buffer_load_dword v0, off, s[16:19], 0 offset:400", huge),
    loaded(np.repeat(BYTES[400:404].view(np.uint32), 64)[None]),
)
index = np.arange(64) * 3
strided = index * 40 + 8
in_records = index < 100
CASES["buffer_load idxen"] = Case(
    make(f"{resource(100, 40)}buffer_load_dwordx2 v[0:1], v22, s[16:19], 0 idxen offset:8", index),
    loaded(np.where(in_records, rows(fetched(strided, 8)), 0)),
)
CASES["buffer_load idxen offen"] = Case(
    make(
        f"{resource(100, 40)}v_mov_b32 v23, 4\n"
        "buffer_load_dwordx2 v[0:1], v[22:23], s[16:19], 0 idxen offen offset:4",
        index,
    ),
    loaded(np.where(in_records, rows(fetched(strided, 8)), 0)),
)

# DMA: lanes land one after the other from M0 on; then the LDS is read back, 16 bytes a lane.
for width, size in (("dword", 4), ("dwordx3", 12), ("dwordx4", 16)):
    for mask, suffix in ((ALL_LANES, ""), (SOME_LANES, " lanes off")):
        on = lanes_of(mask)
        for family in ("global", "buffer"):
            places = some_places(16, 16)
            offset = 64
            local = np.zeros(2048, np.uint8)
            first = 256 + offset
            for lane in np.flatnonzero(on):
                place = first + size * lane
                local[place : place + size] = BYTES[places[lane] + offset :][:size]
            if family == "global":
                load = f"global_load_lds_{width} v[20:21], off offset:{offset}"
            else:
                load = f"buffer_load_{width} v22, s[16:19], 0 offen offset:{offset} lds"
            code = f"""
s_mov_b64 s[20:21], exec
s_mov_b64 exec, -1
v_mov_b32 v24, 0
v_mov_b32 v25, 0
v_mov_b32 v26, 0
v_mov_b32 v27, 0
v_lshlrev_b32 v28, 2, v253
ds_write_b128 v28, v[24:27]
ds_write_b128 v28, v[24:27] offset:1024
s_waitcnt lgkmcnt(0)
s_mov_b64 exec, s[20:21]
{resource()}
s_mov_b32 m0, 256
{load}
s_waitcnt vmcnt(0)
s_mov_b64 exec, -1
ds_read_b128 v[0:3], v28 offset:{first}
"""
            CASES[f"{family}_load_lds_{width}{suffix}"] = Case(
                make(code, places, exec_mask=mask, lds_bytes=2048),
                rows(local[first : first + 1024].reshape(64, 16)),
            )


# Scratch: a lane's own bytes, by vector, scalar and instruction offset.
SCRATCH = {
    "scratch by instruction offset": (
        "scratch_store_dwordx4 off, v[0:3], off offset:16\ns_waitcnt vmcnt(0)\n"
        "scratch_load_dwordx2 v[0:1], off, off offset:20\n"
        "scratch_load_dword v2, off, off offset:28",
        [1, 2, 3, 3],
    ),
    "scratch of other widths": (
        "scratch_store_dwordx2 off, v[2:3], off\nscratch_store_dwordx3 off, v[0:2], off offset:8\n"
        "s_waitcnt vmcnt(0)\nscratch_load_dwordx4 v[0:3], off, off offset:4\n"
        "s_waitcnt vmcnt(0)\nscratch_load_dwordx3 v[0:2], off, off",
        [2, 3, 0, 2],
    ),
    "scratch by lane and scalar offset": (
        "v_and_b32 v22, 1, v22\nv_lshlrev_b32 v22, 2, v22\ns_movk_i32 s20, 32\n"
        "scratch_store_dword v22, v3, s20 offset:-8\nscratch_store_dword off, v2, off offset:40\n"
        "s_waitcnt vmcnt(0)\nscratch_load_dword v0, v22, s20 offset:-8",
        [3, 1, 2, 3],
    ),
}
for name, (code, order) in SCRATCH.items():
    places = np.arange(64)
    CASES[name] = Case(
        replace(make(code, places), private_bytes=64),
        DATA[order],
    )


BROKEN = {
    "beyond": replace(make("scratch_store_dword off, v0, off offset:64", places), private_bytes=64),
    "unwritten": replace(make("scratch_load_dword v0, off, off", places), private_bytes=64),
}


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner({name: case.snippet for name, case in CASES.items()} | BROKEN)


@pytest.mark.parametrize(
    ("name", "fault"), [("beyond", "4 bytes of scratch, a lane has 64"), ("unwritten", "scratch")]
)
def test_faulty_scratch_is_found(runner, name, fault):
    with pytest.raises(SimulationFault, match=fault):
        runner.run(name)


@pytest.mark.parametrize("name", CASES)
def test_vmem(runner, name):
    case = CASES[name]
    np.testing.assert_array_equal(runner.run(name), case.registers)
    np.testing.assert_array_equal(case.snippet.memory, case.memory)


def test_addresses_are_64_bit():
    low, high = np.uint32([[0xFFFFFFF8] * 64, [5] * 64])
    assert set(vmem.global_address(np.stack([low, high]), None, 16).tolist()) == {(6 << 32) + 8}
    assert set(vmem.global_address(low[None], 7 << 32, -8).tolist()) == {(7 << 32) + 0xFFFFFFF0}
    address, _ = vmem.buffer_address((0xFFFFFFF0, 1, 2**32 - 1, 0), None, low, 64, 0, 4)
    assert set(address.tolist()) == {(1 << 32) + 0xFFFFFFF0 + 0xFFFFFFF8 + 64}


def test_dma_addresses():
    # Bits 1:0 of M0 do not count for global loads; bits beyond 17 never do.
    assert vmem.dma_lds_address(0xFFFC0007, 8, 16, False)[:3].tolist() == [12, 28, 44]
    assert vmem.dma_lds_address(0xFFFC0007, 8, 4, True)[:3].tolist() == [15, 19, 23]


@pytest.mark.parametrize("flags", [(1 << 31, 0), (0, 1 << 23)])
def test_swizzled_descriptors_are_errors(flags):
    with pytest.raises(NotImplementedError, match="SWIZZLE_ENABLE"):
        vmem.buffer_address((0, flags[0], 64, flags[1]), None, None, 0, 0, 4)


def test_every_instruction_of_the_table_is_here():
    assert set(vmem.INSTRUCTIONS) <= instructions_in(case.snippet for case in CASES.values())
