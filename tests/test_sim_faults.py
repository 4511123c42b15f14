"""Every fault the simulator looks for, shown by breaking a right kernel in one place.

The kernels are those of `sim_kernels`, whose unbroken runs give no report (test_sim_kernels). Kinds
that no single change of theirs makes have a few lines of assembly, right and broken.
"""

import functools

import numpy as np
import pytest
from gfx950_sim import CodeObject, Memory, RunResult, SimulationFault, run
from gfx950_sim.assemble import Assembly, assemble
from gfx950_sim.decode import Instruction
from gfx950_sim.mutate import replace, with_wait, without
from gfx950_sim.reports import FAULTS
from sim_kernels import NAMES, Problem, problem

ORDERS = ["round_robin", "reversed", *range(20)]
WAIT_FAULTS = {"pending_register", "pending_overwrite", "lds_dma", "lds_race", "lds_unfinished"}


@functools.cache
def unbroken(name: str) -> RunResult:
    result = problem(name).run()
    assert result.reports == []
    return result


def find(name: str, text: str, nth: int = 0) -> Instruction:
    """An executed instruction of the kernel by the start of its text."""
    result = unbroken(name)
    executed = set().union(*result.traces.values())
    program = [i for i in result.program if i.index in executed]
    return [i for i in program if i.text.startswith(text)][nth]


def kinds(result: RunResult) -> set[str]:
    return {report.kind for report in result.reports}


def patched(launch: Problem, instruction: Instruction, first: int, value: int, bits: int):
    """The kernel with a bit field of one instruction changed."""
    pc, size = instruction.pc, instruction.size
    code = int.from_bytes(launch.kernel.code[pc : pc + size], "little")
    code = code & ~(((1 << bits) - 1) << first) | value << first
    return replace(launch.kernel, instruction, code.to_bytes(size, "little"))


# Waits and barriers, by the simulator's own dependence analysis ---------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_needed_wait_is_needed(name):
    """Weakened by one, or removed, each is reported; one that is not needed can go."""
    result = unbroken(name)
    needs = result.analysis.waits(result.program)
    assert needs
    for need in needs:
        if need.required is None:
            launch = problem(name)
            broken = launch.run(with_wait(launch.kernel, need.instruction, need.counter, None))
            assert broken.reports == []
            launch.check(launch.outputs)
            continue
        assert need.required >= need.count
        for count in (need.required + 1, None):
            launch = problem(name)
            broken = launch.run(with_wait(launch.kernel, need.instruction, need.counter, count))
            assert kinds(broken) & WAIT_FAULTS, (need, count)
        if need.required > need.count:
            launch = problem(name)
            kernel = with_wait(launch.kernel, need.instruction, need.counter, need.required)
            assert launch.run(kernel).reports == []
            launch.check(launch.outputs)


@pytest.mark.parametrize("name", ["row_sum", "dma_transpose_b16", "dma_transpose_b8"])
def test_every_needed_barrier_is_needed(name):
    result = unbroken(name)
    barriers = result.analysis.needed_barriers(result.program)
    assert barriers
    for barrier in barriers:
        launch = problem(name)
        broken = launch.run(without(launch.kernel, barrier))
        assert kinds(broken) & {"lds_race", "lds_dma", "lds_unfinished"}, barrier
    for barrier in result.analysis.redundant_barriers(result.program):
        launch = problem(name)
        assert launch.run(without(launch.kernel, barrier)).reports == []
        launch.check(launch.outputs)


@pytest.mark.parametrize(("which", "meaning"), [(0, "read after write"), (1, "write after read")])
def test_races_between_waves_are_found_in_any_order(which, meaning):
    """The first barrier of the loop orders reads after the DMA writes of other waves, the second
    the next tile's writes after these reads."""
    barriers = [i for i in unbroken("dma_transpose_b8").program if i.name == "s_barrier"]
    loop = barriers[-2:]
    for order in ORDERS:
        launch = problem("dma_transpose_b8")
        broken = launch.run(without(launch.kernel, loop[which]), order=order)
        assert kinds(broken) & {"lds_race", "lds_dma", "lds_unfinished"}, (meaning, order)


def test_a_missing_barrier_after_lds_writes_is_found_in_any_order():
    barrier = find("row_sum", "s_barrier")
    for order in ORDERS:
        launch = problem("row_sum")
        broken = launch.run(without(launch.kernel, barrier), order=order)
        assert kinds(broken) & {"lds_race", "uninitialized_lds"}, order


def test_dma_read_before_its_wait():
    wait = find_waits("dma_transpose_b8", "vmcnt")[-1]
    for order in ORDERS:
        launch = problem("dma_transpose_b8")
        broken = launch.run(with_wait(launch.kernel, wait, "vmcnt", None), order=order)
        assert kinds(broken) & {"lds_dma", "lds_unfinished"}, order


def find_waits(name: str, counter: str) -> list[Instruction]:
    result = unbroken(name)
    return [n.instruction for n in result.analysis.waits(result.program) if n.counter == counter]


def test_a_register_used_before_its_wait_is_named():
    wait = find_waits("mma_f16", "vmcnt")[0]
    launch = problem("mma_f16")
    broken = launch.run(with_wait(launch.kernel, wait, "vmcnt", None))
    report = broken.reports[0]
    assert report.kind == "pending_register"
    assert report.instruction.startswith("v_mfma_f32_16x16x32_f16")
    assert "global_load_dwordx4" in report.detail
    with pytest.raises(SimulationFault, match="v_mfma_f32_16x16x32_f16"):
        launch.run(with_wait(launch.kernel, wait, "vmcnt", None), strict=True)


# Memory -----------------------------------------------------------------------------------------


def test_an_access_outside_every_allocation_is_located():
    """n is one more than the arrays hold: one lane of the last wave goes beyond all three."""
    launch = problem("elementwise")
    n = len(launch.inputs["x"])
    launch.scalars = (launch.scalars[0], n + 1)
    result = launch.run()
    outside = [r for r in result.reports if r.kind == "out_of_bounds"]
    assert {r.instruction.split()[0] for r in outside} == {
        "global_load_dword",
        "global_store_dword",
    }
    for report in outside:
        assert (report.workgroup, report.wave, report.lane) == (n // 256, n % 256 // 64, n % 64)
        assert f"{report.address:#x}" in str(report)
        assert report.instruction in str(report)
    for name in ("x", "k", "out"):
        assert any(f"past the end of {name} " in report.detail for report in outside)


def test_a_shifted_address_is_found():
    store = find("mma_f16", "global_store_dword", 3)
    launch = problem("mma_f16")
    # The last of four stores; its 13-bit offset now points beyond the matrix.
    result = launch.run(patched(launch, store, 0, 1024, 13))
    assert kinds(result) == {"out_of_bounds"}
    assert {r.index for r in result.reports} == {store.index}


def test_memory_never_written_is_found():
    launch = problem("row_sum")
    memory = Memory()
    x = memory.map(launch.inputs["x"].nbytes, name="x", writable=True)
    out = memory.map(launch.outputs["out"], name="out", writable=True)
    result = run(launch.kernel, launch.grid, launch.block, [x, out], memory, strict=False)
    assert "uninitialized_memory" in kinds(result)
    assert result.reports[0].instruction.startswith("global_load_dwordx2")


def test_a_store_to_an_input_is_found():
    launch = problem("elementwise")
    launch.inputs["out"] = launch.outputs.pop("out")
    result = launch.run()
    assert kinds(result) == {"read_only"}


def test_two_workgroups_that_store_different_values_are_found():
    """Without the row's share of the address, every workgroup stores to out[0]."""
    launch = problem("row_sum")
    add = find("row_sum", "s_add_u32")
    result = launch.run(patched(launch, add, 8, 128, 8))  # ssrc1 = 0
    assert kinds(result) == {"conflicting_stores"}
    launch = problem("row_sum")
    launch.inputs["x"][:] = launch.inputs["x"][0]
    result = launch.run(patched(launch, add, 8, 128, 8))
    assert result.reports == []  # the same value from all of them is no conflict


# LDS and lanes ----------------------------------------------------------------------------------


def test_an_lds_access_past_the_group_size_is_found():
    read = find("dma_transpose_b16", "ds_read_b64_tr_b16")
    launch = problem("dma_transpose_b16")
    result = launch.run(patched(launch, read, 0, 8192, 16))
    assert "lds_bounds" in kinds(result)
    assert {r.index for r in result.reports if r.kind == "lds_bounds"} == {read.index}
    # 8 bytes before the end is the last place.
    end = launch.kernel.lds_bytes
    assert end == 8192


@pytest.mark.parametrize("name", ["dma_transpose_b16", "dma_transpose_b8"])
def test_a_transposed_read_with_lanes_off_is_found(name):
    place = find(name, "s_setprio")
    launch = problem(name)
    s_mov_exec_lo_0 = (0xBEFE0080).to_bytes(4, "little")
    result = launch.run(replace(launch.kernel, place, s_mov_exec_lo_0))
    report = next(r for r in result.reports if r.kind == "exec")
    assert report.instruction.startswith(f"ds_read_b64_tr_{name[-3:].lstrip('_')}")


# Kinds that need code of their own: (right, broken, the only kind reported) ----------------------

LANE_4 = "v_lshlrev_b32 v1, 2, v0\n"
LOAD = "s_load_dwordx4 s[8:11], s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\n"
SNIPPETS = {
    "uninitialized_register": ("v_mov_b32 v3, 1\nv_add_u32 v2, v0, v3", "v_add_u32 v2, v0, v3"),
    "uninitialized_lds": (
        f"{LANE_4}ds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)\nds_read_b32 v2, v1",
        f"{LANE_4}ds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)\nds_read_b32 v2, v1 offset:4",
    ),
    "pending_overwrite": (
        f"{LOAD}{LANE_4}global_load_dword v2, v1, s[8:9]\ns_waitcnt vmcnt(0)\nv_mov_b32 v2, 0",
        f"{LOAD}{LANE_4}global_load_dword v2, v1, s[8:9]\nv_mov_b32 v2, 0\ns_waitcnt vmcnt(0)",
    ),
    "misaligned": (
        f"v_lshlrev_b32 v1, 3, v0\n{LANE_4.replace('v1', 'v3')}ds_write_b64 v1, v[0:1]\n"
        "s_waitcnt lgkmcnt(0)\nds_read_b64_tr_b16 v[2:3], v1",
        f"v_lshlrev_b32 v1, 3, v0\n{LANE_4.replace('v1', 'v3')}ds_write_b64 v1, v[0:1]\n"
        "s_waitcnt lgkmcnt(0)\nv_sub_u32 v1, v1, v3\nds_read_b64_tr_b16 v[2:3], v1",
    ),
    "barrier": (
        "s_barrier",
        "v_readfirstlane_b32 s8, v0\ns_cmp_eq_u32 s8, 0\ns_cbranch_scc1 past\ns_barrier\npast:",
    ),
    "lds_dma": (
        f"{LOAD}v_lshlrev_b32 v1, 4, v0\ns_mov_b32 m0, 0\n"
        "global_load_lds_dwordx4 v1, s[8:9]\ns_waitcnt vmcnt(0)\nds_read_b128 v[4:7], v1",
        f"{LOAD}v_lshlrev_b32 v1, 4, v0\ns_mov_b32 m0, 0\n"
        "global_load_lds_dwordx4 v1, s[8:9]\nds_read_b128 v[4:7], v1\ns_waitcnt vmcnt(0)",
    ),
}


@functools.cache
def snippets() -> CodeObject:
    kernels = {}
    for kind, bodies in SNIPPETS.items():
        for state, body in zip(("right", "broken"), bodies, strict=True):
            text = f"{body}\ns_waitcnt vmcnt(0) lgkmcnt(0)\ns_endpgm".replace(
                "past", f"past_{kind}"
            )
            kernels[f"{kind}_{state}"] = Assembly(text, arguments=2, lds_bytes=1024)
    return CodeObject(assemble(kernels))


@pytest.mark.parametrize("kind", SNIPPETS)
def test_other_kinds(kind):
    waves = 2 if kind == "barrier" else 1
    for state in ("right", "broken"):
        memory = Memory()
        data = memory.map(np.zeros(1024, np.uint8), name="data")
        result = run(
            snippets().kernel(f"{kind}_{state}"),
            (1, 1, 1),
            (64 * waves, 1, 1),
            [data, 0],
            memory,
            strict=False,
        )
        assert kinds(result) == ({kind} if state == "broken" else set())


def test_every_kind_of_fault_is_shown_here():
    with open(__file__) as file:
        text = file.read()
    assert [kind for kind in FAULTS if f'"{kind}"' not in text] == []
