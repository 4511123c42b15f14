"""The cost model's table, and timelines worked by hand."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import gfx950_sim
import pytest
from gfx950_sim import CodeObject
from gfx950_sim.assemble import Assembly, assemble
from gfx950_sim.costs import MFMA_PASSES, Parameters, Unit, cost_of
from gfx950_sim.estimates import chrome_trace
from gfx950_sim.program import load_program
from gfx950_sim.recording import Demand, WaveTrace
from gfx950_sim.timeline import estimate

P = Parameters()

SNIPPETS = {
    "valu": "v_add_f32 v1, v2, v3\n" * 10,
    "transcendental": "v_exp_f32 v1, v2\n" * 3,
    "chain": "v_mfma_f32_16x16x32_f16 v[0:3], v[8:11], v[12:15], v[0:3]\n" * 4,
    "through_a": """
v_mfma_f32_16x16x32_f16 v[0:3], v[8:11], v[12:15], 0
v_mfma_f32_16x16x32_f16 v[4:7], v[0:3], v[12:15], 0
""",
    "shadow": """
v_mfma_f32_16x16x32_f16 v[0:3], v[8:11], v[12:15], 0
v_add_f32 v20, v21, v22
v_add_f32 v23, v24, v25
v_add_f32 v26, v27, v28
v_mfma_f32_16x16x32_f16 v[4:7], v[8:11], v[12:15], 0
""",
    "lds": "ds_read_b128 v[0:3], v4\ns_waitcnt lgkmcnt(0)\n",
    "lds_many": "ds_read_b128 v[0:3], v4\n" * 8 + "s_waitcnt lgkmcnt(0)\n",
    "load": "global_load_dwordx4 v[0:3], v4, s[2:3]\ns_waitcnt vmcnt(0)\n",
    "two_loads": """
global_load_dwordx4 v[0:3], v8, s[2:3]
global_load_dwordx4 v[4:7], v8, s[2:3]
s_waitcnt vmcnt(1)
v_add_f32 v1, v2, v3
s_waitcnt vmcnt(0)
""",
    "dma": "global_load_lds_dwordx4 v[0:1], off\ns_waitcnt vmcnt(0)\n",
    "barrier": "s_barrier\nv_add_f32 v1, v2, v3\n",
    "nop": "s_nop 4\nv_add_f32 v1, v2, v3\n",
    "loop": """
s_mov_b32 s4, 0
again:
v_add_f32 v1, v2, v3
s_add_u32 s4, s4, 1
s_cmp_lt_u32 s4, 5
s_cbranch_scc1 again
""",
}


@pytest.fixture(scope="module")
def programs():
    code = CodeObject(
        assemble({name: Assembly(body + "s_endpgm\n") for name, body in SNIPPETS.items()})
    )
    return {name: load_program(code.kernel(name).code) for name in SNIPPETS}


def touch(sectors, size, *, at=0, **lds):
    """A load of so many bytes from so many sectors."""
    return Demand(sectors=tuple(range(at, at + sectors)), bytes=size, **lds)


def straight(program, demands=None):
    """The trace of a wave that runs a snippet from its first to its last instruction."""
    (end,) = [i.index for i in program.instructions if i.name == "s_endpgm"][:1]
    return WaveTrace(range(end + 1), demands or {})


def clocks(program, *workgroups, demands=None, parameters=P, **options):
    slots = [[w] for w in workgroups] or [[[straight(program, demands)]]]
    return estimate(program, slots, parameters, **options).clocks


# The table ---------------------------------------------------------------------------------------


def test_every_parameter_has_a_value_a_unit_and_a_source():
    rows = list(Parameters.rows())
    assert len(rows) > 15
    for name, value, unit, source in rows:
        assert value > 0, name
        assert unit or name == "compute_units"
        assert len(source) > 10, name
    assert P.scaled("issue", 1.3).issue == pytest.approx(5.2)


def test_the_page_lists_every_parameter_as_it_is():
    page = (Path(gfx950_sim.__file__).parent / "COSTS.md").read_text()
    assert Parameters.table() in page


@pytest.mark.parametrize(
    "shape", [s for s in MFMA_PASSES if s.startswith(("f32_16x16x", "f32_32x32x"))]
)
def test_passes_follow_from_the_peak_rate(shape):
    rows, columns, depth = (int(n) for n in shape.split("_")[1].split("x"))
    operand = shape.rsplit("_", 1)[1]
    # FLOP a clock and SIMD at AMD's peak rates for MI355X; CDNA3's shapes take as long as those
    # twice as deep.
    rate = {"f8f6f4": 2048, "i8": 2048, "f32": 64}.get(operand, 1024)
    old = shape in {
        *("f32_16x16x16_f16", "f32_16x16x16_bf16", "f32_32x32x8_f16", "f32_32x32x8_bf16"),
        *("i32_16x16x32_i8", "i32_32x32x16_i8"),
    }
    expected = 2 * rows * columns * depth * (2 if old else 1) / rate / 4
    assert MFMA_PASSES[shape] == expected


def test_two_narrow_formats_take_half_the_passes():
    code = """
v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[8:15], v[16:23], v[0:3]
v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[8:11], v[16:19], v[0:3] cbsz:4 blgp:4
v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[8:15], v[16:19], v[0:3] blgp:4
v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[8:11], v[16:23], v[0:3] cbsz:4
s_endpgm
"""
    program = load_program(CodeObject(assemble({"k": Assembly(code)})).kernel("k").code)
    costs = [cost_of(i, P) for i in program.instructions[:4]]
    assert {cost.unit for cost in costs} == {Unit.MFMA}
    assert [cost.busy for cost in costs] == [32, 16, 32, 32]


# Timelines worked by hand ------------------------------------------------------------------------


def test_vector_instructions_issue_every_four_clocks(programs):
    assert clocks(programs["valu"]) == 40


def test_waves_of_one_simd_share_its_lanes(programs):
    wave = straight(programs["valu"])
    four = [wave] * 4  # one a SIMD
    assert clocks(programs["valu"], four) == 40
    # Waves 0 and 4 alternate on SIMD 0: 20 instructions of 4 clocks, but for the last one's end.
    assert clocks(programs["valu"], [wave] * 8) == pytest.approx(80, abs=4)


def test_transcendentals_run_at_a_quarter_of_the_rate(programs):
    assert clocks(programs["transcendental"]) == 2 * 16 + 4


def test_a_chain_of_matrix_instructions_runs_at_their_passes(programs):
    # The fourth issues after three times 4 passes of 4 clocks.
    assert clocks(programs["chain"]) == 3 * 16 + 4


def test_a_matrix_result_used_as_a_factor_comes_later(programs):
    assert clocks(programs["through_a"]) == 16 + 16 + 4


def test_vector_instructions_run_beside_a_matrix_instruction(programs):
    assert clocks(programs["shadow"]) == 16 + 4


def test_nops_take_their_slots(programs):
    assert clocks(programs["nop"]) == 5 * 4 + 4


def test_an_lds_read_takes_its_phases_and_the_latency(programs):
    demand = {0: Demand(lds_phases=4, lds_least=4, lds_bytes=1024)}
    # Ports: two, so a phase takes twice the compute unit's clocks.
    done = 4 * 1.25 * 2 + 56
    assert clocks(programs["lds"], demands=demand) == done + 4
    conflicts = {0: Demand(lds_phases=20, lds_least=4, lds_bytes=1024)}
    assert clocks(programs["lds"], demands=conflicts) == 20 * 1.25 * 2 + 56 + 4


def test_lds_bandwidth_is_shared(programs):
    demand = {i: Demand(lds_phases=4, lds_least=4, lds_bytes=1024) for i in range(8)}
    wave = straight(programs["lds_many"], demand)
    alone = clocks(programs["lds_many"], [wave])
    both_ports = clocks(programs["lds_many"], [wave] * 4)
    assert alone == 8 * 10 + 56 + 4
    # 4 waves x 8 reads x 1 KB at 204.8 bytes a clock.
    assert both_ports == pytest.approx(4 * 8 * 1024 / 204.8 + 56 + 4, abs=8)


def test_a_load_takes_address_lines_bandwidth_and_latency(programs):
    demand = {0: touch(16, 1024)}
    at = 4 + max(16, 1024 / 64)
    assert clocks(programs["load"], demands=demand) == at + 500 + 4
    assert clocks(programs["load"], demands=demand, latency=2000) == at + 2000 + 4
    slow = clocks(programs["load"], demands=demand, latency=0, bandwidth=8)
    assert slow == 4 + 1024 / 8 + 4


def test_a_partial_wait_waits_for_the_older_load(programs):
    near = touch(1, 64)
    far = touch(64, 1024, at=100)
    program = programs["two_loads"]
    result = estimate(program, [[[straight(program, {0: near, 1: far})]]], P, spans=True)
    (add,) = [s for s in result.spans if s.name == "v_add_f32" and s.kind == "issue"]
    assert add.start == 4 + 1 + 500 + 4
    # The second: its address after the first's, 64 sectors, the latency.
    assert result.clocks == 4 + 4 + 64 + 500 + 4


def test_loads_return_in_order(programs):
    program = programs["two_loads"]
    slow_first = {0: touch(64, 1024), 1: touch(1, 64, at=100)}
    result = estimate(program, [[[straight(program, slow_first)]]], P, spans=True)
    waits = [s for s in result.spans if s.kind == "memory wait"]
    assert waits[0].end == 4 + 64 + 500


def test_loads_wait_at_issue_while_l1_is_busy(programs):
    program = programs["two_loads"]
    demand = touch(64, 1024)
    third = WaveTrace([0, 1, 0, 4, 5], dict.fromkeys(range(3), demand))
    result = estimate(program, [[[third]]], P, spans=True)
    loads = [
        s.start for s in result.spans if s.name.startswith("global_load") and s.kind == "issue"
    ]
    assert loads == [0, 4, 4 + 64]  # one stands before L1, the next at issue


def test_one_sector_for_all_lanes_still_moves_their_bytes(programs):
    broadcast = {0: touch(1, 1024)}
    assert clocks(programs["load"], demands=broadcast) == 4 + 1024 / 64 + 500 + 4


def test_what_l1_has_takes_no_bandwidth(programs):
    program = programs["two_loads"]
    first, far = touch(16, 1024), touch(16, 1024, at=100)
    again = clocks(program, demands={0: first, 1: first}, bandwidth=1)
    other = clocks(program, demands={0: first, 1: far}, bandwidth=1)
    assert (again, other) == (4 + 1024 + 500 + 4 + 4 + 4, 4 + 2048 + 500 + 4)
    # L1 keeps 32 KB: what was used before 512 other sectors is gone.
    flood = touch(512, 1024, at=1000)
    trace = WaveTrace([0, 0, 1, 4, 5], {0: first, 1: flood, 2: first})
    result = estimate(program, [[[trace]]], P, bandwidth=1)
    assert result.busy["memory"] == 64 * (16 + 512 + 16)


def test_a_dma_load_also_writes_the_lds(programs):
    demand = {0: touch(16, 1024, lds_phases=8, lds_least=8, lds_write=True)}
    assert clocks(programs["dma"], demands=demand) == 4 + 16 + 500 + 8 * 2 + 4


def test_a_barrier_waits_for_the_last_wave(programs):
    program = programs["barrier"]
    late = WaveTrace([*[1] * 25, 0, 1, 2], {})  # 25 adds before the barrier
    early = straight(program)
    result = estimate(program, [[[early, late]]], P, spans=True)
    first = [s for s in result.spans if s.wave == 0 and s.name == "v_add_f32"]
    assert first[0].start == 25 * 4 + 16
    assert result.stalls["barrier"] > 25 * 4
    assert {program.instructions[i].name for i, why in result.stalls_at if why == "barrier"} == {
        "s_barrier"
    }


def test_barriers_are_a_workgroups_own(programs):
    program = programs["barrier"]
    quick, slow = [straight(program)] * 2, [WaveTrace([*[1] * 99, 0, 1, 2], {})] * 2
    result = estimate(program, [[quick], [slow]], replace(P, stagger=0), spans=True)
    ends = [s.start for s in result.spans if s.slot == 0 and s.name == "s_endpgm"]
    assert max(ends) < 99 * 4


def test_a_slot_runs_its_workgroups_one_after_another(programs):
    program = programs["valu"]
    workgroup = [straight(program)]
    result = estimate(program, [[workgroup, workgroup]], P)
    assert result.clocks == 40 + P.workgroup_start + 40


def test_loop_iterations_are_timed(programs):
    program = programs["loop"]
    # s_mov, five trips of 4 instructions, s_endpgm.
    trace = WaveTrace([0, *[1, 2, 3, 4] * 5, 5], {})
    result = estimate(program, [[[trace]]], P, header=1)
    assert len(result.marks[0, 0, 0]) == 5
    assert result.clocks_per_iteration() == 3 * 4 + 16  # the taken branch takes 16 clocks
    two = estimate(program, [[[trace]], [[trace]]], replace(P, stagger=0), header=1)
    assert two.clocks_per_iteration() < result.clocks_per_iteration()
    with pytest.raises(ValueError, match="loop iterations"):
        estimate(program, [[[trace]]], P).clocks_per_iteration()


def test_bytes_in_flight(programs):
    demand = {0: touch(16, 1024)}
    result = estimate(programs["load"], [[[straight(programs["load"], demand)]]], P)
    assert result.bytes_in_flight == pytest.approx(1024 * 520 / 524)


@pytest.mark.parametrize("name", [name for name, *_ in Parameters.rows()])
def test_more_of_a_cost_never_makes_a_wave_faster(programs, name):
    # One wave alone: with several, a delay can change who goes first.
    if name in ("clock_ghz", "compute_units", "launch_us", "l2_bytes", "hbm_bytes"):
        return
    demands = {0: touch(16, 1024, lds_phases=8, lds_least=4)}
    for program in programs.values():
        base = clocks(program, demands=demands)
        assert clocks(program, demands=demands, parameters=P.scaled(name, 1.3)) >= base
        assert clocks(program, demands=demands, parameters=P.scaled(name, 0.7)) <= base


def test_the_timeline_is_a_chrome_trace(programs):
    program = programs["shadow"]
    result = estimate(program, [[[straight(program)] * 4]] * 2, P, spans=True)
    trace = json.loads(json.dumps(chrome_trace(result, P)))
    events = trace["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    assert {e["tid"] for e in events} == {0, 1, 2, 3}
    assert sum(e["name"].startswith("v_mfma") for e in events) == 2 * 8
    for slot in range(2):
        spans = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in events if (e["pid"], e["tid"]) == (slot, 0)
        )
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start + 1e-9
