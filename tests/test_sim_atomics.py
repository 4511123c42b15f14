"""Atomics: each operation on LDS and memory, where lanes meet, and the old value returned."""

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from gfx950_sim import CodeObject, Memory, run
from gfx950_sim.assemble import Assembly, assemble
from gfx950_sim.isa import atomics
from sim_snippets import ALL_LANES, SOME_LANES, Runner, Snippet, instructions_in, lanes_of

RNG = np.random.default_rng(9)
PLACES = 16
"""Items that the lanes share, four lanes each."""
PLACE = (RNG.permutation(64) % PLACES).astype(np.uint32)


def wrap(value: int, bits: int, signed: bool = False) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


# By operation: (type, old, data ...) -> new, on Python numbers; the pseudocode of the ISA.
def model(operation: str, kind: str, old, *data):
    bits = 64 if "64" in kind else 32
    x = data[0]
    match operation:
        case "add":
            return old + x if kind[0] == "f" else wrap(old + x, bits)
        case "sub":
            return wrap(old - x, bits)
        case "rsub":
            return wrap(x - old, bits)
        case "inc":
            return 0 if old >= x else old + 1
        case "dec":
            return x if old == 0 or old > x else old - 1
        case "min":
            return min(old, x)
        case "max":
            return max(old, x)
        case "and":
            return old & x
        case "or":
            return old | x
        case "xor":
            return old ^ x
        case "swap" | "wrxchg":
            return x
        case "cmpst":
            return data[1] if old == data[0] else old
        case "cmpswap":
            return data[0] if old == data[1] else old
    raise AssertionError(operation)


def items(kind: str, count: int) -> np.ndarray:
    """Old or new values of a type, small enough that lanes meet limits and equal values."""
    dtype = np.dtype(f"{'u' if kind[0] == 'b' else kind[0]}{int(kind[1:]) // 8}")
    if dtype.kind == "f":
        return (RNG.integers(-50, 50, count) / 4).astype(dtype)
    values = RNG.integers(0, 6, count).astype(dtype)
    values[RNG.random(count) < 0.3] = np.iinfo(dtype).max - 1
    return values


class Case:
    def __init__(
        self, code: Callable[[str], str], operation: str, kind: str, count: int, mask: int
    ):
        self.initial = items(kind, PLACES)
        self.data = [items(kind, 64) for _ in range(count)]
        words = self.initial.itemsize // 4
        self.final = self.initial.copy()
        self.old = np.zeros(64, self.initial.dtype)
        for lane in np.flatnonzero(lanes_of(mask)):
            place = PLACE[lane]
            self.old[lane] = self.final[place]
            data = [d[lane].item() for d in self.data]
            self.final[place] = model(operation, kind, self.final[place].item(), *data)
        self.on = lanes_of(mask)
        registers = {20: PLACE * np.uint32(4 * words)}
        for i, data in enumerate(self.data):
            for word, row in enumerate(data.view(np.uint32).reshape(64, -1).T):
                registers[4 + words * i + word] = row
        registers |= {n: np.full(64, 0xABCD0000 + n, np.uint32) for n in range(words)}
        self.kept = np.stack([registers[n] for n in range(words)])
        memory = np.zeros(1024, np.uint8)
        memory[: self.initial.nbytes] = self.initial.view(np.uint8)
        self.snippet = Snippet(
            code(f"v[4:{3 + words * count}]" if words * count > 1 else "v4"),
            registers,
            tuple(range(words)),
            exec_mask=mask,
            lds_bytes=1024,
            memory=memory,
        )

    def check(self, runner: Runner, name: str, returns: bool) -> None:
        registers = runner.run(name)
        memory = self.snippet.memory[: self.final.nbytes].view(self.final.dtype)
        np.testing.assert_array_equal(memory, self.final)
        if returns:
            old = self.old.view(np.uint32).reshape(64, -1).T
            np.testing.assert_array_equal(registers, np.where(self.on, old, self.kept))
        else:
            np.testing.assert_array_equal(registers, self.kept)


CASES: dict[str, tuple[Case, bool]] = {}
COPY_IN = """
s_mov_b64 s[20:21], exec
s_mov_b64 exec, -1
global_load_dwordx4 v[24:27], v253, s[12:13]
v_lshlrev_b32 v28, 2, v253
global_load_dwordx4 v[24:27], v28, s[12:13]
s_waitcnt vmcnt(0)
ds_write_b128 v28, v[24:27]
s_waitcnt lgkmcnt(0)
s_mov_b64 exec, s[20:21]
"""
COPY_OUT = """
s_waitcnt lgkmcnt(0)
s_mov_b64 exec, -1
ds_read_b128 v[24:27], v28
s_waitcnt lgkmcnt(0)
global_store_dwordx4 v28, v[24:27], s[12:13]
"""
RESOURCE = (
    "s_mov_b32 s16, s12\ns_and_b32 s17, s13, 0xffff\ns_movk_i32 s18, 1024\ns_mov_b32 s19, 0\n"
)


def lds_code(name: str, returns: bool, wide: bool, count: int) -> Callable[[str], str]:
    def code(data: str) -> str:
        if count == 2:
            data = "v[4:5], v[6:7]" if wide else "v4, v5"
        result = ("v[0:1], " if wide else "v0, ") if returns else ""
        return f"{COPY_IN}{name} {result}v20, {data}{COPY_OUT}"

    return code


def vmem_code(name: str, returns: bool, wide: bool) -> Callable[[str], str]:
    def code(data: str) -> str:
        if name.startswith("global"):
            result = ("v[0:1], " if wide else "v0, ") if returns else ""
            return f"{name} {result}v20, {data}, s[12:13]{' sc0' if returns else ''}"
        text = f"{RESOURCE}{name} {data}, v20, s[16:19], 0 offen{' sc0' if returns else ''}"
        move = "v_mov_b32 v0, v4\n" + ("v_mov_b32 v1, v5\n" if wide else "")
        return text + (f"\ns_waitcnt vmcnt(0)\n{move}" if returns else "")

    return code


for name, record in atomics.LDS.items():
    parts = name.split("_")
    if parts[1] == "pk":
        continue
    returns, wide = "rtn" in parts, record.dtype[1:] == "64"
    for mask in (ALL_LANES, SOME_LANES) if parts[1] in ("add", "cmpst") else (ALL_LANES,):
        code = lds_code(name, returns, wide, record.items)
        CASES[f"{name} {mask:x}"] = Case(code, parts[1], parts[-1], record.items, mask), returns
SIGNED = {"smin": ("min", "i"), "smax": ("max", "i"), "umin": ("min", "u"), "umax": ("max", "u")}
for name, record in atomics.VMEM.items():
    operation = name.split("_atomic_")[1].removesuffix("_x2").split("_")[0]
    if operation == "pk":
        continue
    operation, kind = SIGNED.get(operation, (operation, record.dtype[0]))
    wide = record.dtype[1:] == "64"
    for returns in (False, True):
        mask = SOME_LANES if operation in ("add", "cmpswap") else ALL_LANES
        case = Case(vmem_code(name, returns, wide), operation, record.dtype, record.items, mask)
        CASES[f"{name} {'returns' if returns else ''}"] = case, returns

# Two halves at once: exact sums of small numbers.
for kind, dtype in (("f16", np.float16), ("bf16", ml_dtypes.bfloat16)):
    pairs = [RNG.integers(-8, 8, (n, 2)).astype(dtype) for n in (PLACES, 64)]
    total, before = pairs[0].copy(), np.zeros((64, 2), dtype)
    for lane in range(64):
        before[lane] = total[PLACE[lane]]
        total[PLACE[lane]] += pairs[1][lane]
    for name in (
        f"ds_pk_add_{kind}",
        f"ds_pk_add_rtn_{kind}",
        f"global_atomic_pk_add_{kind}",
        f"buffer_atomic_pk_add_{kind}",
    ):
        returns = "rtn" in name
        if name.startswith("ds"):
            code = lds_code(name, returns, False, 1)
        else:
            code = vmem_code(name, returns, False)
        case = Case(code, "swap", "u32", 1, ALL_LANES)
        memory = np.zeros(1024, np.uint8)
        memory[: 4 * PLACES] = pairs[0].view(np.uint8).ravel()
        registers = dict(case.snippet.inputs) | {4: pairs[1].view(np.uint32)[:, 0]}
        case.snippet = replace(case.snippet, inputs=registers, memory=memory)
        case.final, case.old = total.view(np.uint32)[:, 0], before.view(np.uint32)[:, 0]
        CASES[name] = case, returns


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner({name: case.snippet for name, (case, _) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_atomic(runner, name):
    case, returns = CASES[name]
    case.check(runner, name, returns)


def test_every_instruction_of_the_tables_is_here():
    here = instructions_in(case.snippet for case, _ in CASES.values())
    assert set(atomics.LDS) | set(atomics.VMEM) <= here


def test_atomics_of_several_waves_need_no_barrier_but_readers_do():
    body = """
v_mov_b32 v1, 0
v_mov_b32 v2, 1
v_cmp_eq_u32 vcc, 0, v0
s_and_saveexec_b64 s[8:9], vcc
ds_write_b32 v1, v1
s_waitcnt lgkmcnt(0)
s_mov_b64 exec, s[8:9]
s_barrier
ds_add_u32 v1, v2
{}
ds_read_b32 v3, v1
"""
    end = "s_waitcnt lgkmcnt(0)\ns_endpgm"
    kernels = {
        "right": Assembly(body.format("s_waitcnt lgkmcnt(0)\ns_barrier\n") + end, lds_bytes=64),
        "broken": Assembly(body.format("") + end, lds_bytes=64),
    }
    code = CodeObject(assemble(kernels))
    for order in ("round_robin", "reversed", 1, 2):
        for name, expected in (("right", set()), ("broken", {"lds_race"})):
            result = run(
                code.kernel(name), (1, 1, 1), (256, 1, 1), [], Memory(), order, strict=False
            )
            assert {r.kind for r in result.reports} == expected, order


def test_atomics_of_several_workgroups_do_not_conflict():
    body = """
s_load_dwordx2 s[8:9], s[0:1], 0x0
v_mov_b32 v1, 0
v_mov_b32 v2, 1
s_waitcnt lgkmcnt(0)
global_atomic_add v1, v2, s[8:9]
s_endpgm
"""
    code = CodeObject(assemble({"count": Assembly(body, arguments=1)}))
    memory, counter = Memory(), np.zeros(4, np.uint32)
    address = memory.map(counter, name="counter", writable=True)
    assert run(code.kernel("count"), (5, 1, 1), (128, 1, 1), [address], memory).reports == []
    assert counter.tolist() == [640, 0, 0, 0]
    broken = run(code.kernel("count"), (1, 1, 1), (64, 1, 1), [address + 14], memory, strict=False)
    assert {r.kind for r in broken.reports} == {"misaligned"}
    broken = run(code.kernel("count"), (1, 1, 1), (64, 1, 1), [address + 16], memory, strict=False)
    assert {r.kind for r in broken.reports} == {"out_of_bounds"}
