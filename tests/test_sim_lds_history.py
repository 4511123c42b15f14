"""LDS races between two waves: each rule by a few instructions, in any wave order."""

import numpy as np
import pytest
from gfx950_sim import CodeObject, Memory, run
from gfx950_sim.assemble import Assembly, assemble

ORDERS = ["round_robin", "reversed", *range(6)]

WRITE, READ = "ds_write_b32 v1, v0\n", "ds_read_b32 v2, v1\n"
WRITE_HIGH, READ_HIGH = "ds_write_b32 v1, v0 offset:256\n", "ds_read_b32 v2, v1 offset:256\n"
DMA = "s_mov_b32 m0, 0\nglobal_load_lds_dword v1, s[8:9]\n"
WAIT, WAIT_DMA = "s_waitcnt lgkmcnt(0)\n", "s_waitcnt vmcnt(0)\n"
USE = "v_mov_b32 v3, v2\n"
INIT = (WRITE + WRITE_HIGH + WAIT, "")
NOTHING = ("", "")

# Phases with a barrier between: (what wave 0 does, what wave 1 does). All 64 lanes, one dword each;
# both waves use the same addresses. Then the only kind of report, or None.
CASES: dict[str, tuple[list[tuple[str, str]], str | None]] = {
    "written, waited for, then read": ([INIT, ("", READ + WAIT)], None),
    "written, then read two barriers later": ([INIT, NOTHING, ("", READ + WAIT)], None),
    "written and not waited for": ([INIT, (WRITE, ""), (WAIT, READ + WAIT)], "lds_unfinished"),
    "written and read in one phase": ([INIT, (WRITE + WAIT, READ + WAIT)], "lds_race"),
    "written by both": ([INIT, (WRITE + WAIT, WRITE + WAIT)], "lds_race"),
    "read by both": ([INIT, (READ + WAIT, READ + WAIT)], None),
    "different bytes": ([INIT, (WRITE + WAIT, READ_HIGH + WAIT)], None),
    "read, then written by the other": ([INIT, (READ + WAIT, ""), ("", WRITE + WAIT)], None),
    "read and not waited for": (
        [INIT, (READ, ""), (WAIT + USE, WRITE + WAIT)],
        "lds_unfinished",
    ),
    "read in the phase of the other's write": ([INIT, (READ + WAIT, WRITE + WAIT)], "lds_race"),
    "own accesses are in order": ([INIT, (WRITE + READ + WRITE + WAIT, "")], None),
    "own accesses, then the other's": (
        [INIT, (WRITE + READ + WAIT, ""), ("", READ + WAIT + WRITE + WAIT)],
        None,
    ),
    "DMA, waited for, then read": ([INIT, (DMA + WAIT_DMA, ""), ("", READ + WAIT)], None),
    "DMA waited for after the barrier": (
        [INIT, (DMA, ""), (WAIT_DMA, READ + WAIT)],
        "lds_dma",
    ),
    "DMA waited for by the other wave": (
        [INIT, (DMA, WAIT_DMA), ("", READ + WAIT), (WAIT_DMA, "")],
        "lds_dma",
    ),
    "own DMA read too early": ([INIT, (DMA + READ + WAIT + WAIT_DMA, "")], "lds_dma"),
    "own DMA read after its wait": ([INIT, (DMA + WAIT_DMA + READ + WAIT, "")], None),
    "own DMA overwritten too early": ([INIT, (DMA + WRITE + WAIT + WAIT_DMA, "")], "lds_dma"),
    "own read not waited for before DMA": ([INIT, (READ + DMA + WAIT_DMA, "")], "lds_dma"),
    "own read waited for before DMA": ([INIT, (READ + WAIT + DMA + WAIT_DMA, "")], None),
    "DMA in the phase of the other's read": ([INIT, (READ + WAIT, DMA + WAIT_DMA)], "lds_race"),
    "DMA in the phase after the other's read": (
        [INIT, (READ + WAIT, ""), ("", DMA + WAIT_DMA)],
        None,
    ),
    "two DMA loads of a wave": ([INIT, (DMA + DMA + WAIT_DMA, "")], None),
    "DMA loads of both waves": ([INIT, (DMA + WAIT_DMA, DMA + WAIT_DMA)], "lds_race"),
    "double buffers": (
        [
            INIT,
            (WRITE + WAIT, READ_HIGH + WAIT),
            (WRITE_HIGH + WAIT, READ + WAIT),
            (WRITE + WAIT, READ_HIGH + WAIT),
        ],
        None,
    ),
    "double buffers with a barrier too few": (
        [
            INIT,
            (WRITE + WAIT + WRITE_HIGH + WAIT, READ_HIGH + WAIT),
            ("", READ + WAIT),
        ],
        "lds_race",
    ),
}


def body(number: int, phases: list[tuple[str, str]]) -> str:
    text = """s_load_dwordx2 s[8:9], s[0:1], 0x0
v_readfirstlane_b32 s20, v0
s_lshr_b32 s20, s20, 6
v_and_b32 v1, 63, v0
v_lshlrev_b32 v1, 2, v1
s_waitcnt lgkmcnt(0)
"""
    for i, (first, second) in enumerate(phases):
        at = f"{number}_{i}"
        text += f"s_cmp_lg_u32 s20, 0\ns_cbranch_scc1 second{at}\n{first}s_branch join{at}\n"
        text += f"second{at}:\n{second}join{at}:\ns_barrier\n"
    return text + "s_endpgm"


@pytest.fixture(scope="module")
def code() -> CodeObject:
    return CodeObject(
        assemble(
            {
                f"case_{i}": Assembly(body(i, phases), arguments=1, lds_bytes=512)
                for i, (phases, _) in enumerate(CASES.values())
            }
        )
    )


@pytest.mark.parametrize("case", CASES)
def test_every_order_gives_the_same_verdict(code, case):
    number = list(CASES).index(case)
    kind = CASES[case][1]
    for order in ORDERS:
        memory = Memory()
        data = memory.map(np.arange(64, dtype=np.uint32), "data")
        kernel = code.kernel(f"case_{number}")
        result = run(kernel, (1,), (128,), [data], memory, order, strict=False)
        found = {report.kind for report in result.reports}
        assert found == ({kind} if kind else set()), (order, result.reports)
        for report in result.reports:
            assert report.lane == 0
            assert report.address in (0, 256)
