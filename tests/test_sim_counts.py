"""Counts by class, loops, and LDS bank conflicts."""

import numpy as np
import pytest
from gfx950_sim import CodeObject, Memory, banks, counts, run
from gfx950_sim.assemble import Assembly, assemble
from gfx950_sim.decode import decode_program
from gfx950_sim.recording import Recorder, conflicts_by_instruction, memory_totals

# Adds a number a lane through the LDS, 4 times; the loop is entered in its middle, as compilers
# rotate it.
LOOP = """
s_load_dwordx2 s[2:3], s[0:1], 0x0
v_lshlrev_b32 v1, 2, v0
v_mov_b32 v2, 0
s_mov_b32 s4, 0
s_waitcnt lgkmcnt(0)
s_branch middle
top:
s_add_u32 s4, s4, 1
middle:
global_load_dword v3, v1, s[2:3]
s_waitcnt vmcnt(0)
ds_write_b32 v1, v3
s_waitcnt lgkmcnt(0)
ds_read_b32 v4, v1
s_waitcnt lgkmcnt(0)
v_add_f32 v2, v2, v4
v_exp_f32 v5, v4
s_cmp_lt_u32 s4, 3
s_cbranch_scc1 top
global_store_dword v1, v2, s[2:3]
s_endpgm
"""


@pytest.fixture(scope="module")
def kernel():
    return CodeObject(assemble({"loop": Assembly(LOOP, arguments=1, lds_bytes=256)})).kernel("loop")


@pytest.fixture(scope="module")
def recorded(kernel):
    memory = Memory()
    data = np.arange(64, dtype=np.float32)
    address = memory.map(data, name="data", writable=True)
    recorder = Recorder()
    result = run(kernel, (1, 1, 1), (64, 1, 1), [address], memory, observer=recorder)
    assert data[5] == 20  # the kernel does what its comment says: 4 trips of 5.0
    return result, recorder.traces(result.traces)


def names(kernel, indexes):
    program = decode_program(kernel.code)
    return [program[i].name for i in sorted(indexes)]


def test_a_rotated_loop_is_found_whole(kernel):
    program = decode_program(kernel.code)
    (loop,) = counts.loops(program)
    assert names(kernel, loop.body)[0] == "s_add_u32"
    assert names(kernel, loop.body)[-1] == "s_cbranch_scc1"
    assert program[loop.header].name == "global_load_dword"
    assert len(loop.body) == 11


def test_nested_loops_are_both_found():
    code = """
outer:
s_mov_b32 s4, 0
inner:
s_add_u32 s4, s4, 1
s_cmp_lt_u32 s4, 9
s_cbranch_scc1 inner
s_add_u32 s5, s5, 1
s_cmp_lt_u32 s5, 9
s_cbranch_scc1 outer
s_endpgm
"""
    program = decode_program(CodeObject(assemble({"nest": Assembly(code)})).kernel("nest").code)
    program = [i for i in program if i.pc <= 32]
    outer, inner = counts.loops(program)
    assert inner.body < outer.body
    assert (len(outer.body), len(inner.body)) == (7, 3)
    often = [0, *[1, 2, 3] * 50, 4, 5, 6]
    assert counts.hot_loop(program, [often]) == inner
    seldom = [0, 1, 2, 3, 4, 5, 6] * 50
    assert counts.hot_loop(program, [seldom]) == outer


def test_counts_by_class(kernel):
    program = decode_program(kernel.code)
    loop = counts.hot_loop(program)
    found = counts.Counts.of(loop.instructions(program))
    assert {group: found.group(group) for group in counts.GROUPS if found.group(group)} == {
        counts.VALU: 2,
        counts.LDS: 2,
        counts.LOAD: 1,
        counts.SALU: 2,
        counts.BRANCH: 1,
        counts.WAIT: 3,
    }
    assert found.kinds(counts.VALU) == {"float": 1, "transcendental": 1}
    assert found.kinds(counts.LDS) == {"write b32": 1, "read b32": 1}
    assert found.total == len(loop.body)


def test_counts_of_what_ran(kernel, recorded):
    result, traces = recorded
    loop = counts.hot_loop(result.program, [t.instructions for t in traces.values()])
    orders = [trace.instructions for trace in traces.values()]
    each = counts.executed_per_iteration(result.program, loop, orders)
    assert each.group(counts.LDS) == 2
    assert each.group(counts.SALU) == pytest.approx(1 + 3 / 4)  # s_add is skipped on the first trip
    assert counts.executed_outside(loop, orders) == 8


def test_bytes_by_memory_space(recorded):
    _, traces = recorded
    totals = memory_totals(list(traces.values()))
    assert totals.lds_bytes == 4 * 2 * 256
    assert totals.lds_conflicts == 0
    assert (totals.global_read, totals.global_written) == (4 * 256, 256)
    assert totals.scalar_read == 8
    (trace,) = traces.values()
    touched = [demand.sectors for demand in trace.demands.values() if demand.bytes]
    assert {len(sectors) for sectors in touched} == {4}  # 256 aligned bytes
    assert len({sector for sectors in touched for sector in sectors}) == 4


@pytest.mark.parametrize(
    ("name", "group", "kind"),
    [
        ("v_mfma_scale_f32_16x16x128_f8f6f4", counts.MFMA, "scaled fp8"),
        ("v_mfma_f32_16x16x32_bf16", counts.MFMA, "bf16"),
        ("v_cvt_pk_fp8_f32", counts.VALU, "convert"),
        ("v_cndmask_b32", counts.VALU, "select"),
        ("v_pk_mul_f32", counts.VALU, "packed"),
        ("v_permlane32_swap_b32", counts.VALU, "lane exchange"),
        ("v_accvgpr_read_b32", counts.VALU, "move"),
        ("v_lshlrev_b32", counts.VALU, "bits"),
        ("v_add_u32", counts.VALU, "integer"),
        ("v_fma_f32", counts.VALU, "float"),
    ],
)
def test_classes_of_vector_instructions(name, group, kind):
    from gfx950_sim.decode import Instruction

    instruction = Instruction(0, 0, 8, name, "VOP3", {})
    assert counts.classify(instruction) == counts.Class(group, kind)


@pytest.mark.parametrize(
    ("modifiers", "kind"),
    [
        ({}, "fp8"),
        ({"cbsz": 1}, "fp8"),
        ({"blgp": 4}, "fp8 by fp4"),
        ({"cbsz": 4, "blgp": 1}, "fp4 by fp8"),
        ({"cbsz": 4, "blgp": 4}, "fp4"),
        ({"cbsz": 2, "blgp": 3}, "fp6"),
    ],
)
def test_matrix_kinds_follow_the_formats(modifiers, kind):
    from gfx950_sim.decode import Instruction

    for name, prefix in (("v_mfma", ""), ("v_mfma_scale", "scaled ")):
        instruction = Instruction(
            0, 0, 8, f"{name}_f32_16x16x128_f8f6f4", "VOP3P_MFMA", {}, modifiers
        )
        assert counts.classify(instruction) == counts.Class(counts.MFMA, prefix + kind)


def test_a_dma_load_is_not_a_plain_load():
    code = """
global_load_lds_dwordx4 v[0:1], off
buffer_load_dwordx4 v1, s[4:7], 0 offen lds
buffer_load_dwordx4 v[4:7], v1, s[4:7], 0 offen
s_endpgm
"""
    program = decode_program(
        CodeObject(assemble({"dma": Assembly(code, lds_bytes=1024)})).kernel("dma").code
    )[:3]
    found = counts.Counts.of(program)
    assert (found.group(counts.DMA), found.group(counts.LOAD)) == (2, 1)


# Bank conflicts ----------------------------------------------------------------------------------

LANES = np.arange(64)


def phases(addresses, size, *, write=False, lanes=None):
    return banks.phases(np.asarray(addresses)[np.newaxis], size, lanes, write=write)


@pytest.mark.parametrize(
    ("size", "write", "least"),
    [
        (4, False, 2),
        (8, False, 2),
        (16, False, 4),
        (4, True, 2),
        (8, True, 4),
        (16, True, 8),
    ],
)
def test_lanes_in_a_row_have_no_conflict(size, write, least):
    assert phases(LANES * size, size, write=write) == (least, least)


def test_one_dword_for_all_lanes_is_no_conflict():
    assert phases(LANES * 0 + 40, 4).conflicts == 0
    assert phases(LANES * 0 + 48, 16).conflicts == 0


def test_a_stride_of_all_banks_serialises():
    # 32 lanes of a phase, each with another dword of bank 0.
    assert phases(LANES * 256, 4) == (64, 2)
    # Writes see 32 banks: a stride of 128 bytes is as bad for them, and half as bad for reads.
    assert phases(LANES * 128, 4, write=True) == (64, 2)
    assert phases(LANES * 128, 4) == (32, 2)


def test_lanes_off_take_no_part():
    some = LANES < 2
    assert phases(LANES * 256, 4, lanes=some) == (2, 1)
    assert phases(LANES * 256, 4, lanes=LANES < 0) == (0, 0)


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        (0, 3, 1),
        (0, 4, 0),
        (0, 12, 1),
        (0, 20, 1),
        (0, 27, 1),
        (0, 28, 0),
        (0, 32, 0),
        (4, 31, 1),
        (36, 63, 1),
    ],
)
def test_the_lanes_that_a_128_bit_read_serves_together(first, second, together):
    # As HipKittens measured: two lanes on the same bank conflict only if their phase is the same.
    addresses = np.full(64, 0)
    addresses[second] = 256
    lanes = (first == LANES) | (second == LANES)
    assert phases(addresses, 16, lanes=lanes).conflicts == together


def test_128_bit_reads_of_rows_conflict_without_a_swizzle():
    # AMD's blog on FP8 GEMM for CDNA4: 16 rows of 128 bytes, lane l reads 16 bytes at column l //
    # 16.
    rows, columns = LANES % 16, LANES // 16
    plain = phases(rows * 128 + columns * 16, 16)
    swizzled = phases(rows * 128 + (columns ^ rows % 8) * 16, 16)
    assert plain.conflicts > 0
    assert swizzled == (4, 4)


def test_two_address_reads_count_both():
    rows = np.stack([LANES * 4, LANES * 4 + 256 * 64])
    assert banks.phases(rows, 4, None, write=False) == (4, 4)


def test_conflicts_are_told_by_instruction():
    code = """
v_lshlrev_b32 v1, 8, v0
v_mov_b32 v2, 1.0
ds_write_b32 v1, v2
ds_write_b32 v1, v2 offset:4
v_lshlrev_b32 v3, 2, v0
s_waitcnt lgkmcnt(0)
ds_write_b32 v3, v2 offset:16384
s_endpgm
"""
    kernel = CodeObject(assemble({"worst": Assembly(code, lds_bytes=32768)})).kernel("worst")
    recorder = Recorder()
    result = run(kernel, (1, 1, 1), (64, 1, 1), [], Memory(), observer=recorder)
    traces = list(recorder.traces(result.traces).values())
    found = conflicts_by_instruction(result.program, traces)
    assert [(times, repeated) for _, times, repeated in found] == [(1, 62), (1, 62)]
