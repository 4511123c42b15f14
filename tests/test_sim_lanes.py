"""Data between lanes: swaps, lane reads and writes, DPP, exchanges through the LDS crossbar."""

import numpy as np
import pytest
from gfx950_sim.isa import lanes, lds
from sim_snippets import ALL_LANES, SOME_LANES, Runner, Snippet, instructions_in, lanes_of

A = (np.arange(64) * 7 + 1000).astype(np.uint32)
B = (np.arange(64) * 11 + 5000).astype(np.uint32)
OLD = (np.arange(64) + 90000).astype(np.uint32)
ON = lanes_of(SOME_LANES)

CASES: dict[str, tuple[Snippet, list]] = {}


def case(name, code, expected, inputs=None, outputs=None, **options):
    inputs = {0: A, 1: B, 2: OLD} if inputs is None else inputs
    outputs = tuple(range(len(expected))) if outputs is None else outputs
    CASES[name] = (Snippet(code, inputs, outputs, **options), expected)


# Swaps, by the loops of the ISA's pseudocode.
dst, src = A.copy(), B.copy()
for half in range(2):
    for lane in range(16):
        low, high = half * 32 + lane, half * 32 + lane + 16
        src[low], dst[high] = A[high], B[low]
case("permlane16_swap", "v_permlane16_swap_b32 v0, v1", [dst, src])
dst, src = A.copy(), B.copy()
for lane in range(32):
    src[lane], dst[lane + 32] = A[lane + 32], B[lane]
case("permlane32_swap", "v_permlane32_swap_b32 v0, v1", [dst, src])

for modifiers in ("bound_ctrl:1", "fi:1", "bound_ctrl:1 fi:1"):
    case(
        f"permlane32_swap {modifiers}", f"v_permlane32_swap_b32_e64 v0, v1 {modifiers}", [dst, src]
    )
case(
    "permlane32_swap lanes off",
    "v_permlane32_swap_b32 v0, v1",
    [np.where(ON, dst, A), np.where(ON, src, B)],
    exec_mask=SOME_LANES,
)

# One lane.
for lane in (0, 1, 37, 63):
    case(f"readlane {lane}", f"v_readlane_b32 s20, v0, {lane}\nv_mov_b32 v0, s20", [[A[lane]] * 64])
case(
    "readlane of a register, lane number beyond 63",
    "s_movk_i32 s21, 64+5\nv_readlane_b32 s20, v0, s21\nv_mov_b32 v0, s20",
    [[A[5]] * 64],
)
case(
    "readlane of a lane that is off",
    "v_readlane_b32 s20, v0, 1\ns_mov_b64 exec, -1\nv_mov_b32 v0, s20",
    [[A[1]] * 64],
    exec_mask=1,
)
for mask, first in ((ALL_LANES, 0), (1 << 63, 63), (0xFF00, 8), (SOME_LANES, 0)):
    case(
        f"readfirstlane {mask:#x}",
        "v_readfirstlane_b32 s20, v0\ns_mov_b64 exec, -1\nv_mov_b32 v0, s20",
        [[A[first]] * 64],
        exec_mask=mask,
    )
case(
    "readfirstlane without a lane",
    "s_mov_b64 exec, 0\nv_readfirstlane_b32 s20, v0\ns_mov_b64 exec, -1\nv_mov_b32 v0, s20",
    [[A[0]] * 64],
)
written = A.copy()
written[41] = 77
case("writelane", "s_movk_i32 s21, 77\nv_writelane_b32 v0, s21, 41", [written])
case(
    "writelane of a lane that is off",
    "s_movk_i32 s21, 77\nv_writelane_b32 v0, s21, 41",
    [written],
    exec_mask=2,
)


# DPP: v2 keeps its old value where nothing is written.
def source_lane(control: str, number: int, lane: int) -> int | None:
    """The lane that `lane` reads, by the description of each control in the ISA."""
    row, t = lane // 16 * 16, lane % 16
    match control:
        case "row_shl":
            return lane + number if t + number < 16 else None
        case "row_shr":
            return lane - number if t >= number else None
        case "row_ror":
            return row + (t - number) % 16
        case "row_newbcast":
            return row + number
        case "wave_shl":
            return lane + 1 if lane < 63 else None
        case "wave_shr":
            return lane - 1 if lane > 0 else None
        case "wave_rol":
            return (lane + 1) % 64
        case "wave_ror":
            return (lane + 63) % 64
        case "row_mirror":
            return row + 15 - t
        case "row_half_mirror":
            return lane // 8 * 8 + 7 - lane % 8
        case "row_bcast":
            if number == 15:
                return row - 1 if lane >= 16 else None
            return 31 if lane >= 32 else None
    raise AssertionError(control)


def dpp_expected(sources, mask=ALL_LANES, zero=False, row_mask=0xF, bank_mask=0xF):
    result = OLD.copy()
    for lane, source in enumerate(sources):
        if not mask >> lane & 1 or not row_mask >> lane // 16 & 1:
            continue
        if not bank_mask >> lane % 16 // 4 & 1:
            continue
        if source is not None and mask >> source & 1:
            result[lane] = A[source]
        elif zero:
            result[lane] = 0
    return result


CONTROLS = [
    *((c, n) for c in ("row_shl", "row_shr", "row_ror") for n in (1, 2, 7, 8, 15)),
    *(("row_newbcast", n) for n in (0, 5, 15)),
    *((c, 1) for c in ("wave_shl", "wave_shr", "wave_rol", "wave_ror")),
    ("row_bcast", 15),
    ("row_bcast", 31),
    ("row_mirror", None),
    ("row_half_mirror", None),
]
for control, number in CONTROLS:
    text = control if number is None else f"{control}:{number}"
    sources = [source_lane(control, number, lane) for lane in range(64)]
    move = f"v_mov_b32_dpp v2, v0 {text} row_mask:0xf bank_mask:0xf"
    for suffix, mask in (("", ALL_LANES), (" lanes off", SOME_LANES)):
        for bound, zero in (("", False), (" bound_ctrl:0", True)):
            case(
                f"dpp {text}{bound}{suffix}",
                move + bound,
                [dpp_expected(sources, mask, zero)],
                outputs=(2,),
                exec_mask=mask,
            )
for pattern in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2), (2, 2, 2, 2), (0, 3, 1, 1)):
    sources = [lane // 4 * 4 + pattern[lane % 4] for lane in range(64)]
    quad = ",".join(map(str, pattern))
    case(
        f"dpp quad_perm {quad}",
        f"v_mov_b32_dpp v2, v0 quad_perm:[{quad}] row_mask:0xf bank_mask:0xf",
        [dpp_expected(sources)],
        outputs=(2,),
    )
mirrored = [source_lane("row_mirror", None, lane) for lane in range(64)]
case(
    "dpp row and bank mask",
    "v_mov_b32_dpp v2, v0 row_mirror row_mask:0x5 bank_mask:0x9",
    [dpp_expected(mirrored, row_mask=5, bank_mask=9)],
    outputs=(2,),
)
case(
    "dpp on an addition",
    "v_add_u32_dpp v0, v0, v1 row_mirror row_mask:0xf bank_mask:0xf",
    [A[mirrored] + B],
)

# Through the LDS crossbar.
SHUFFLED = np.random.default_rng(5).permutation(64)
targets = (SHUFFLED * 4).astype(np.uint32)
wait = "\ns_waitcnt lgkmcnt(0)"
case("bpermute", "ds_bpermute_b32 v0, v1, v0" + wait, [A[SHUFFLED]], {0: A, 1: targets})
case(
    "bpermute offset, bits below and beyond the lane number ignored",
    "ds_bpermute_b32 v0, v1, v0 offset:8" + wait,
    [A[(SHUFFLED + 2) % 64]],
    {0: A, 1: targets + np.uint32(3 + 1024)},
)
case(
    "bpermute lanes off",
    "ds_bpermute_b32 v0, v1, v0" + wait,
    [np.where(ON, np.where(ON[SHUFFLED], A[SHUFFLED], 0), A)],
    {0: A, 1: targets},
    exec_mask=SOME_LANES,
)
received = np.zeros(64, np.uint32)
received[SHUFFLED] = A
case("permute", "ds_permute_b32 v0, v1, v0" + wait, [received], {0: A, 1: targets})
clash = np.zeros(64, np.uint32)
clash[0], clash[9] = A[62], A[63]
case(
    "permute: the highest lane wins, who gets nothing has 0",
    "ds_permute_b32 v0, v1, v0" + wait,
    [clash],
    {0: A, 1: np.where(np.arange(64) == 63, 36, 256).astype(np.uint32)},
)
received = np.zeros(64, np.uint32)
for lane in np.flatnonzero(ON):
    received[SHUFFLED[lane]] = A[lane]
case(
    "permute lanes off",
    "ds_permute_b32 v0, v1, v0" + wait,
    [np.where(ON, received, A)],
    {0: A, 1: targets},
    exec_mask=SOME_LANES,
)
for distance in (1, 2, 4, 8, 16):
    case(
        f"swizzle swap {distance}",
        f"ds_swizzle_b32 v0, v0 offset:swizzle(SWAP,{distance})" + wait,
        [A[np.arange(64) ^ distance]],
    )
case(
    "swizzle broadcast",
    "ds_swizzle_b32 v0, v0 offset:swizzle(BROADCAST,8,3)" + wait,
    [A[np.arange(64) // 8 * 8 + 3]],
)
case(
    "swizzle reverse",
    "ds_swizzle_b32 v0, v0 offset:swizzle(REVERSE,32)" + wait,
    [A[np.arange(64) ^ 31]],
)
case(
    "swizzle quad",
    "ds_swizzle_b32 v0, v0 offset:swizzle(QUAD_PERM,3,0,2,2)" + wait,
    [A[np.arange(64) // 4 * 4 + np.array([3, 0, 2, 2] * 16)]],
)
case(
    "swizzle lanes off",
    "ds_swizzle_b32 v0, v0 offset:swizzle(SWAP,1)" + wait,
    [np.where(ON, np.where(ON[np.arange(64) ^ 1], A[np.arange(64) ^ 1], 0), A)],
    exec_mask=SOME_LANES,
)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner({name: snippet for name, (snippet, _) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_lanes(runner, name):
    np.testing.assert_array_equal(runner.run(name), CASES[name][1])


@pytest.mark.parametrize("control", [0x100, 0x110, 0x120, 0x131, 0x13D, 0x144, 0x160, 0x1FF])
def test_unknown_dpp_controls_are_errors(control):
    with pytest.raises(NotImplementedError, match=f"{control:#x}"):
        lanes.dpp_source(control)


def test_a_swap_that_is_not_documented_is_an_error():
    with pytest.raises(NotImplementedError, match="bound_ctrl"):
        lanes.permlane16_swap(A, B, ON, op_sel=2)


@pytest.mark.parametrize("offset", [0xC000, 0xE000, 0x8100])
def test_unknown_swizzle_modes_are_errors(offset):
    with pytest.raises(NotImplementedError, match=f"{offset:#x}"):
        lds.swizzle_source(offset)


def test_every_instruction_of_the_table_is_here():
    here = instructions_in(snippet for snippet, _ in CASES.values())
    exchanges = {name for name, record in lds.INSTRUCTIONS.items() if record.kind == "exchange"}
    assert set(lanes.INSTRUCTIONS) | exchanges <= here
