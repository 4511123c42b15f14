"""Every scalar ALU instruction and branch from machine code, against formulas over bits and
bytes."""

import pytest
from gfx950_sim.isa import scalar
from sim_snippets import Runner, Snippet

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EDGES = [0, 1, 2, 31, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678, 0x8000FFFF, 0xFFFF0001]
PAIRS = [(a, b) for a in EDGES for b in EDGES][::2]  # 50 pairs, one a lane
FIELDS = [
    0,
    5,
    31,
    0x00080004,
    0x00200000,
    0x00100010,
    0x0001001F,
    0x001F0000,
    0x00400003,
    0x00180008,
]
FIELD_PAIRS = [(a, b) for a in (*EDGES[3:8], 0xF0F0A5C3) for b in FIELDS][:60]
WIDE = [0, 1, M64, 1 << 63, (1 << 63) - 1, 1 << 32, M32, 0x123456789ABCDEF0, 0xFFFFFFFF00000000]
WIDE_PAIRS = [(a, b) for a in WIDE for b in WIDE][:60]
WIDE_SHIFTS = [(a, b) for a in WIDE for b in (0, 1, 31, 32, 33, 63, 64)][:60]


def to_signed(x: int, bits: int = 32) -> int:
    return int.from_bytes(x.to_bytes(bits // 8, "little"), "little", signed=True)


def bits_of(x: int, bits: int) -> str:
    return format(x, f"0{bits}b")


def overflow(total: int) -> int:
    return int(not -(1 << 31) <= total < 1 << 31)


def field(a: int, b: int, bits: int, signed: bool) -> int:
    """Bits offset .. offset + width of a, cut from its binary digits (zeros, or signs, above the
    top)."""
    offset, width = b & (bits - 1), b >> 16 & 0x7F
    digits = ("1" if signed and a >> (bits - 1) else "0") * 200 + bits_of(a, bits)
    digits = digits[: len(digits) - offset][-width:] if width else "0"
    value = int(digits, 2)
    if signed and 0 < width < bits and digits[0] == "1":
        value -= 1 << width
    return value & ((1 << bits) - 1)


def nonzero(f):
    """The formula's value, with SCC "not 0"."""
    return lambda *v: ((r := f(*v)), int(r != 0))


# name: (pairs, formula (a, b) -> value, or (value, scc)). Formulas without SCC show that SCC (1
# before) is kept.
TWO_SOURCES = {
    "s_add_u32": (PAIRS, lambda a, b: ((a + b) & M32, (a + b) >> 32)),
    "s_sub_u32": (PAIRS, lambda a, b: ((a - b) & M32, int(a < b))),
    "s_add_i32": (PAIRS, lambda a, b: ((a + b) & M32, overflow(to_signed(a) + to_signed(b)))),
    "s_sub_i32": (PAIRS, lambda a, b: ((a - b) & M32, overflow(to_signed(a) - to_signed(b)))),
    "s_addc_u32": (PAIRS, lambda a, b: ((a + b + 1) & M32, (a + b + 1) >> 32)),
    "s_subb_u32": (PAIRS, lambda a, b: ((a - b - 1) & M32, int(a < b + 1))),
    "s_min_i32": (PAIRS, lambda a, b: (min((a, b), key=to_signed), to_signed(a) < to_signed(b))),
    "s_max_i32": (PAIRS, lambda a, b: (max((a, b), key=to_signed), to_signed(a) >= to_signed(b))),
    "s_min_u32": (PAIRS, lambda a, b: (min(a, b), a < b)),
    "s_max_u32": (PAIRS, lambda a, b: (max(a, b), a >= b)),
    "s_mul_i32": (PAIRS, lambda a, b: a * b & M32),
    "s_mul_hi_u32": (PAIRS, lambda a, b: a * b >> 32),
    "s_mul_hi_i32": (PAIRS, lambda a, b: to_signed(a) * to_signed(b) >> 32 & M32),
    "s_absdiff_i32": (PAIRS, nonzero(lambda a, b: abs(to_signed((a - b) & M32)) & M32)),
    "s_pack_ll_b32_b16": (PAIRS, lambda a, b: a % 65536 + b % 65536 * 65536),
    "s_pack_lh_b32_b16": (PAIRS, lambda a, b: a % 65536 + b // 65536 * 65536),
    "s_pack_hh_b32_b16": (PAIRS, lambda a, b: a // 65536 + b // 65536 * 65536),
    **{
        f"s_lshl{n}_add_u32": (
            PAIRS,
            lambda a, b, n=n: ((a * 2**n + b) & M32, int(a * 2**n + b > M32)),
        )
        for n in (1, 2, 3, 4)
    },
    "s_lshl_b32": (PAIRS, nonzero(lambda a, b: a * 2 ** (b % 32) % 2**32)),
    "s_lshr_b32": (PAIRS, nonzero(lambda a, b: a // 2 ** (b % 32))),
    "s_ashr_i32": (PAIRS, nonzero(lambda a, b: to_signed(a) // 2 ** (b % 32) & M32)),
    "s_lshl_b64": (WIDE_SHIFTS, nonzero(lambda a, b: a * 2 ** (b % 64) % 2**64)),
    "s_lshr_b64": (WIDE_SHIFTS, nonzero(lambda a, b: a // 2 ** (b % 64))),
    "s_ashr_i64": (WIDE_SHIFTS, nonzero(lambda a, b: to_signed(a, 64) // 2 ** (b % 64) & M64)),
    "s_bfm_b32": (PAIRS, lambda a, b: int("1" * (a % 32) + "0" * (b % 32) or "0", 2) & M32),
    "s_bfm_b64": (PAIRS, lambda a, b: int("1" * (a % 64) + "0" * (b % 64) or "0", 2) & M64),
    "s_bfe_u32": (FIELD_PAIRS, nonzero(lambda a, b: field(a, b, 32, False))),
    "s_bfe_i32": (FIELD_PAIRS, nonzero(lambda a, b: field(a, b, 32, True))),
    "s_bfe_u64": (
        [(a, b) for a in WIDE[2:8] for b in FIELDS],
        nonzero(lambda a, b: field(a, b, 64, False)),
    ),
    "s_bfe_i64": (
        [(a, b) for a in WIDE[2:8] for b in FIELDS],
        nonzero(lambda a, b: field(a, b, 64, True)),
    ),
    "s_cselect_b32": (PAIRS, lambda a, b: a),
    "s_cselect_b64": (WIDE_PAIRS, lambda a, b: a),
}


def digitwise(rule, bits):
    def f(a: int, b: int) -> int:
        digits = zip(bits_of(a, bits), bits_of(b, bits), strict=True)
        return int("".join("01"[rule(x == "1", y == "1")] for x, y in digits), 2)

    return nonzero(f)


for bits, pairs in ((32, PAIRS), (64, WIDE_PAIRS)):
    for name, rule in {
        "and": lambda x, y: x and y,
        "or": lambda x, y: x or y,
        "xor": lambda x, y: x != y,
        "andn2": lambda x, y: x and not y,
        "orn2": lambda x, y: x or not y,
        "nand": lambda x, y: not (x and y),
        "nor": lambda x, y: not (x or y),
        "xnor": lambda x, y: x == y,
    }.items():
        TWO_SOURCES[f"s_{name}_b{bits}"] = (pairs, digitwise(rule, bits))

OLD = 0x0BADF00D_87654321
ONE_SOURCE = {
    **{
        f"s_{name}": formula
        for name, formula in {
            "mov_b32": lambda a: a,
            "mov_b64": lambda a: a,
            "cmov_b32": lambda a: a,
            "cmov_b64": lambda a: a,
            "not_b32": nonzero(lambda a: M32 - a),
            "not_b64": nonzero(lambda a: M64 - a),
            "brev_b32": lambda a: int(bits_of(a, 32)[::-1], 2),
            "brev_b64": lambda a: int(bits_of(a, 64)[::-1], 2),
            "bcnt0_i32_b32": nonzero(lambda a: bits_of(a, 32).count("0")),
            "bcnt0_i32_b64": nonzero(lambda a: bits_of(a, 64).count("0")),
            "bcnt1_i32_b32": nonzero(lambda a: bits_of(a, 32).count("1")),
            "bcnt1_i32_b64": nonzero(lambda a: bits_of(a, 64).count("1")),
            "ff0_i32_b32": lambda a: bits_of(a, 32)[::-1].find("0") & M32,
            "ff0_i32_b64": lambda a: bits_of(a, 64)[::-1].find("0") & M32,
            "ff1_i32_b32": lambda a: bits_of(a, 32)[::-1].find("1") & M32,
            "ff1_i32_b64": lambda a: bits_of(a, 64)[::-1].find("1") & M32,
            "flbit_i32_b32": lambda a: bits_of(a, 32).find("1") & M32,
            "flbit_i32_b64": lambda a: bits_of(a, 64).find("1") & M32,
            "bitset0_b32": lambda a: OLD & M32 & ~(1 << a % 32),
            "bitset1_b32": lambda a: OLD & M32 | 1 << a % 32,
            "bitset0_b64": lambda a: OLD & ~(1 << a % 64),
            "bitset1_b64": lambda a: OLD | 1 << a % 64,
            "sext_i32_i8": lambda a: to_signed(a % 256 << 24) >> 24 & M32,
            "sext_i32_i16": lambda a: to_signed(a % 65536 << 16) >> 16 & M32,
            "abs_i32": nonzero(lambda a: abs(to_signed(a)) & M32),
        }.items()
    }
}

ORDER = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}
COMPARES = {}
for name, order in ORDER.items():
    COMPARES[f"s_cmp_{name}_u32"] = (PAIRS, order)
    COMPARES[f"s_cmp_{name}_i32"] = (
        PAIRS,
        lambda a, b, order=order: order(to_signed(a), to_signed(b)),
    )
for name in ("eq", "lg"):
    COMPARES[f"s_cmp_{name}_u64"] = (WIDE_PAIRS, ORDER[name])
BIT_PAIRS = [(a, b) for a in EDGES[3:] for b in (0, 1, 15, 16, 30, 31, 32, 40)]
for bits, pairs in (
    (32, BIT_PAIRS),
    (64, [(a, b) for a in WIDE[:8] for b in (0, 1, 31, 32, 63, 64)]),
):
    for bit in (0, 1):
        COMPARES[f"s_bitcmp{bit}_b{bits}"] = (
            pairs,
            lambda a, b, bit=bit, bits=bits: bits_of(a, bits)[::-1][b % bits] == "01"[bit],
        )

IMMEDIATES = [0, 1, 0x1234, 0x7FFF, 0x8000, 0xFFFF]


def extend(k: int) -> int:
    return k - 65536 if k >= 32768 else k


WITH_IMMEDIATE = {
    "s_movk_i32": lambda a, k: extend(k) & M32,
    "s_cmovk_i32": lambda a, k: extend(k) & M32,
    "s_addk_i32": lambda a, k: ((a + extend(k)) & M32, overflow(to_signed(a) + extend(k))),
    "s_mulk_i32": lambda a, k: a * extend(k) & M32,
    **{f"s_cmpk_{n}_u32": lambda a, k, order=f: (a, order(a, k)) for n, f in ORDER.items()},
    **{
        f"s_cmpk_{n}_i32": lambda a, k, order=f: (a, order(to_signed(a), extend(k)))
        for n, f in ORDER.items()
    },
}
SAVE_EXEC = {
    "s_and_saveexec_b64": lambda a, e: a & e,
    "s_or_saveexec_b64": lambda a, e: a | e,
    "s_xor_saveexec_b64": lambda a, e: a ^ e,
    "s_andn2_saveexec_b64": lambda a, e: a & (M64 - e),
    "s_andn1_saveexec_b64": lambda a, e: (M64 - a) & e,
    "s_orn2_saveexec_b64": lambda a, e: a | (M64 - e),
}
EXECS = [(a, e) for a in WIDE[:6] for e in (M64, 0xFF, 1 << 63, 0x5555555555555555)]


def put(register: int, value: int, bits: int) -> str:
    text = f"s_mov_b32 s{register}, {value & M32:#x}\n"
    return text + (f"s_mov_b32 s{register + 1}, {value >> 32:#x}\n" if bits == 64 else "")


def keep(lane: int) -> str:
    """Result (s[20:21]) and SCC to lane ``lane`` of v8, v9 and v10."""
    return f"""s_cselect_b32 s18, 1, 0
v_writelane_b32 v8, s20, {lane}
v_writelane_b32 v9, s21, {lane}
v_writelane_b32 v10, s18, {lane}
"""


def name_register(first: int, bits: int) -> str:
    return f"s{first}" if bits == 32 else f"s[{first}:{first + 1}]"


SET_SCC = "s_cmp_eq_u32 0, 0\n"
CLEAR = "".join(f"v_mov_b32 v{row}, 0\n" for row in range(8, 13))


def _snippets() -> dict[str, str]:
    code = {}
    for name, (pairs, _) in {**TWO_SOURCES, **COMPARES}.items():
        record = scalar.INSTRUCTIONS[name]
        text = CLEAR
        for lane, (a, b) in enumerate(pairs):
            text += put(14, a, record.src[0]) + put(16, b, record.src[1]) + put(20, OLD, 64)
            destination = name_register(20, record.dst) + ", " if record.dst else ""
            sources = f"{name_register(14, record.src[0])}, {name_register(16, record.src[1])}"
            text += SET_SCC + f"{name} {destination}{sources}\n" + keep(lane)
        code[name] = text
    for name in ONE_SOURCE:
        record = scalar.INSTRUCTIONS[name]
        text = CLEAR
        for lane, a in enumerate(EDGES if record.src[0] == 32 else WIDE):
            text += put(14, a, record.src[0]) + put(20, OLD, 64) + SET_SCC
            destination = name_register(20, record.dst)
            text += f"{name} {destination}, {name_register(14, record.src[0])}\n" + keep(lane)
        code[name] = text
    for name in WITH_IMMEDIATE:
        text = CLEAR
        for lane, (a, k) in enumerate((a, k) for a in EDGES for k in IMMEDIATES):
            text += put(20, a, 32) + put(21, OLD >> 32, 32) + SET_SCC
            text += f"{name} s20, {k:#x}\n" + keep(lane)
        code[name] = text
    for name in SAVE_EXEC:
        text = CLEAR
        for lane, (a, e) in enumerate(EXECS):
            text += put(14, a, 64) + put(16, e, 64) + "s_mov_b64 exec, s[16:17]\n"
            text += f"{name} s[20:21], s[14:15]\ns_mov_b64 s[22:23], exec\n" + keep(lane)
            text += f"v_writelane_b32 v11, s22, {lane}\nv_writelane_b32 v12, s23, {lane}\n"
        code[name] = text
    code["cselect, cmov and cmovk with SCC 0"] = (
        CLEAR
        + put(14, 1, 32)
        + put(16, 2, 32)
        + put(20, 7, 32)
        + "s_mov_b32 s21, 0\ns_cmp_eq_u32 0, 1\ns_cmov_b32 s20, s14\n"
        + keep(0)
        + "s_cmp_eq_u32 0, 1\ns_cmovk_i32 s20, 0x5\n"
        + keep(1)
        + "s_cmp_eq_u32 0, 1\ns_cselect_b32 s20, s14, s16\n"
        + keep(2)
        + "s_cmp_eq_u32 0, 1\ns_addc_u32 s20, s14, s16\n"
        + keep(3)
        + "s_cmp_eq_u32 0, 1\ns_subb_u32 s20, s16, s14\n"
        + keep(4)
    )
    code["branches"] = (
        CLEAR + "s_mov_b32 s21, 0\n" + "".join(_branch(i, *c) for i, c in enumerate(BRANCHES))
    )
    code["backward"] = (
        CLEAR + "s_mov_b32 s20, 0\nloop:\ns_add_u32 s20, s20, 3\ns_cmp_lt_u32 s20, 30\n"
        "s_cbranch_scc1 loop\ns_mov_b32 s21, 0\n" + keep(0)
    )
    return code


BRANCHES = [
    # (what is set before, the branch, whether it is taken)
    ("s_cmp_eq_u32 0, 0", "s_cbranch_scc0", False),
    ("s_cmp_eq_u32 0, 0", "s_cbranch_scc1", True),
    ("s_cmp_eq_u32 0, 1", "s_cbranch_scc0", True),
    ("s_cmp_eq_u32 0, 1", "s_cbranch_scc1", False),
    ("s_mov_b64 vcc, 0", "s_cbranch_vccz", True),
    ("s_mov_b64 vcc, 0", "s_cbranch_vccnz", False),
    ("s_mov_b32 vcc_lo, 0\ns_mov_b32 vcc_hi, 8", "s_cbranch_vccz", False),
    ("s_mov_b32 vcc_lo, 0\ns_mov_b32 vcc_hi, 8", "s_cbranch_vccnz", True),
    ("s_mov_b64 exec, 0", "s_cbranch_execz", True),
    ("s_mov_b64 exec, 0", "s_cbranch_execnz", False),
    ("s_mov_b64 exec, 4", "s_cbranch_execz", False),
    ("s_mov_b64 exec, 4", "s_cbranch_execnz", True),
    ("", "s_branch", True),
]


def _branch(i: int, before: str, branch: str, taken: bool) -> str:
    return f"s_mov_b32 s20, 1\n{before}\n{branch} skip{i}\ns_mov_b32 s20, 0\nskip{i}:\n" + keep(i)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(
        {name: Snippet(code, {}, (8, 9, 10, 11, 12)) for name, code in _snippets().items()}
    )


def results(runner: Runner, name: str, count: int) -> list[tuple[int, int]]:
    """(64-bit result register, SCC) of each case."""
    out = runner.run(name).astype(object)
    return [(int(out[0, i] | out[1, i] << 32), int(out[2, i])) for i in range(count)]


def check(runner: Runner, name: str, cases: list, formula, dst: int) -> None:
    for case, (value, scc) in zip(cases, results(runner, name, len(cases)), strict=True):
        expected = formula(*case)
        wanted, wanted_scc = expected if isinstance(expected, tuple) else (expected, 1)
        if dst == 32:
            value &= M32
        assert (value, scc) == (wanted, int(wanted_scc)), [hex(v) for v in case]


@pytest.mark.parametrize("name", TWO_SOURCES)
def test_two_sources(runner, name):
    pairs, formula = TWO_SOURCES[name]
    check(runner, name, pairs, formula, scalar.INSTRUCTIONS[name].dst)


@pytest.mark.parametrize("name", ONE_SOURCE)
def test_one_source(runner, name):
    record = scalar.INSTRUCTIONS[name]
    values = [(v,) for v in (EDGES if record.src[0] == 32 else WIDE)]
    check(runner, name, values, ONE_SOURCE[name], record.dst)


@pytest.mark.parametrize("name", COMPARES)
def test_compares_set_scc_and_nothing_else(runner, name):
    pairs, formula = COMPARES[name]
    check(runner, name, pairs, lambda a, b: (OLD, formula(a, b)), 64)


@pytest.mark.parametrize("name", WITH_IMMEDIATE)
def test_immediates(runner, name):
    cases = [(a, k) for a in EDGES for k in IMMEDIATES]
    check(runner, name, cases, WITH_IMMEDIATE[name], 32)


@pytest.mark.parametrize("name", SAVE_EXEC)
def test_saveexec(runner, name):
    out = runner.run(name).astype(object)
    for lane, (a, e) in enumerate(EXECS):
        after = SAVE_EXEC[name](a, e)
        assert int(out[0, lane] | out[1, lane] << 32) == e
        assert int(out[3, lane] | out[4, lane] << 32) == after
        assert int(out[2, lane]) == (after != 0)


def test_the_other_value_of_scc(runner):
    values = [v & M32 for v, _ in results(runner, "cselect, cmov and cmovk with SCC 0", 5)]
    assert values == [7, 7, 2, 3, 1]


def test_branches(runner):
    taken = [value for value, _ in results(runner, "branches", len(BRANCHES))]
    assert taken == [int(case[2]) for case in BRANCHES]


def test_a_loop(runner):
    assert results(runner, "backward", 1)[0][0] == 30


def test_every_instruction_of_the_table_is_here():
    tested = {*TWO_SOURCES, *ONE_SOURCE, *COMPARES, *WITH_IMMEDIATE, *SAVE_EXEC}
    assert set(scalar.INSTRUCTIONS) - tested == set()
    assert set(scalar.BRANCHES) == {branch for _, branch, _ in BRANCHES}
