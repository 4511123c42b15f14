"""MFMA against matrices placed and read element by element with the ISA's formulas."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from gfx950_sim import CodeObject, Memory, run
from gfx950_sim.assemble import Assembly, assemble
from gfx950_sim.isa import matrix
from sim_snippets import SOME_LANES, Runner, Snippet, instructions_in

FP8, BF8, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16
FP4 = ml_dtypes.float4_e2m1fn
DTYPES = {"f16": np.float16, "bf16": BF16, "fp8": FP8, "bf8": BF8, "fp4": FP4, "f32": np.float32}
F8F6F4_CODES = {"fp8": 0, "bf8": 1, "fp4": 4}


def input_place(size: int, k_count: int, two_runs: bool, i: int, k: int) -> tuple[int, int]:
    """(lane, item) of A[i, k], and of B[k, i].

    CDNA4 ISA 7.1.4.1; with two runs, the FP8 tables of 7.1.5.1. FP4 has one run there.
    """
    groups = 64 // size
    if two_runs:
        run, inside = divmod(k, 16 * groups)
        return i + size * (inside // 16), 16 * run + inside % 16
    items = k_count // groups
    return i + size * (k // items), k % items


def output_place(size: int, i: int, j: int) -> tuple[int, int]:
    """(lane, register) of D[i, j] (CDNA4 ISA 7.1.4.2 with H = 4 and one block)."""
    rows = 64 // size
    return j + size * ((i // 4) % rows), i % 4 + 4 * (i // (4 * rows))


def place_input(values: np.ndarray, f8f6f4: bool = False) -> np.ndarray:
    """Registers [n, 64] of A [size, k], or of B transposed."""
    size, k_count = values.shape
    two_runs = f8f6f4 and values.dtype != FP4
    lanes = np.zeros((64, size * k_count // 64), values.dtype)
    for i, k in itertools.product(range(size), range(k_count)):
        lane, item = input_place(size, k_count, two_runs, i, k)
        lanes[lane, item] = values[i, k]
    if values.dtype == FP4:  # NumPy keeps one in the low half of each byte
        nibbles = lanes.view(np.uint8) & 0xF
        return (nibbles[:, ::2] + 16 * nibbles[:, 1::2]).view(np.uint32).T
    return lanes.view(np.uint32).T


def place_output(values: np.ndarray) -> np.ndarray:
    """Registers [n, 64] of C [size, size]."""
    size = len(values)
    registers = np.zeros((size * size // 64, 64), np.float32)
    for i, j in itertools.product(range(size), range(size)):
        lane, register = output_place(size, i, j)
        registers[register, lane] = values[i, j]
    return registers.view(np.uint32)


def read_output(registers: np.ndarray, size: int) -> np.ndarray:
    """D [size, size] from registers."""
    floats, values = registers.view(np.float32), np.zeros((size, size), np.float32)
    for i, j in itertools.product(range(size), range(size)):
        lane, register = output_place(size, i, j)
        values[i, j] = floats[register, lane]
    return values


def random_matrix(rng: np.random.Generator, shape: tuple[int, int], dtype) -> np.ndarray:
    """Values of many sizes, with denormals and zeros of the format among them."""
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-4, 4, shape))
    smallest = (
        2.0**-126 if dtype is np.float32 else float(ml_dtypes.finfo(dtype).smallest_subnormal)
    )
    values[rng.random(shape) < 0.1] = 3 * smallest
    values[rng.random(shape) < 0.1] = -0.0
    return values.astype(np.float32).astype(dtype)


def snippet(code: str, a, b, c, scales=(), **options) -> Snippet:
    """`code` with A, B and C written as {a}, {b}, {c}, scales as {sa}, {sb}; D replaces C."""
    registers: dict[int, np.ndarray] = {}
    ranges = {}

    def add(name: str, rows: np.ndarray) -> None:
        first = len(registers) + len(registers) % 2
        while len(registers) < first:
            registers[len(registers)] = np.zeros(64, np.uint32)
        registers.update({first + n: row for n, row in enumerate(rows)})
        ranges[name] = f"v[{first}:{first + len(rows) - 1}]" if len(rows) > 1 else f"v{first}"

    add("c", place_output(c))
    add("a", place_input(a, "f8f6f4" in code))
    add("b", place_input(b, "f8f6f4" in code))
    for name, scale in zip(("sa", "sb"), scales, strict=False):
        add(name, scale[np.newaxis])
    outputs = tuple(range(c.size // 64))
    return Snippet(code.format(**ranges), registers, outputs, **options)


def close(actual: np.ndarray, expected: np.ndarray, magnitude: np.ndarray) -> None:
    """Equal up to float32 rounding of a sum whose terms' absolute values add up to `magnitude`."""
    np.testing.assert_array_less(
        np.abs(actual.astype(np.float64) - expected), 2.0**-23 * np.maximum(magnitude, 2.0**-120)
    )


CASES: dict[str, tuple[Snippet, np.ndarray, np.ndarray]] = {}


def case(name: str, code: str, a, b, c, factors=None, **options) -> None:
    a64, b64, c64 = (x.astype(np.float64) for x in (a, b, c))
    if factors is not None:
        a64, b64 = a64 * factors[0], b64 * factors[1]
    expected = a64 @ b64.T + c64
    magnitude = np.abs(a64) @ np.abs(b64).T + np.abs(c64)
    CASES[name] = (snippet(code, a, b, c, **options), expected, magnitude)


RNG = np.random.default_rng(7)
DENSE = [
    *(
        (f"{s}x{s}x{k}_{t}", s, k, t, t)
        for s, k in ((16, 16), (16, 32), (32, 8), (32, 16))
        for t in ("f16", "bf16")
    ),
    *(
        (f"{s}x{s}x{k}_{a}_{b}", s, k, a, b)
        for s, k in ((16, 32), (32, 16))
        for a, b in itertools.product(("fp8", "bf8"), repeat=2)
    ),
    ("16x16x4_f32", 16, 4, "f32", "f32"),
    ("32x32x2_f32", 32, 2, "f32", "f32"),
]
for shape, size, k_count, a_type, b_type in DENSE:
    a = random_matrix(RNG, (size, k_count), DTYPES[a_type])
    b = random_matrix(RNG, (size, k_count), DTYPES[b_type])
    c = random_matrix(RNG, (size, size), np.float32)
    case(shape, f"v_mfma_f32_{shape} {{c}}, {{a}}, {{b}}, {{c}}", a, b, c)
    if shape == "16x16x32_f16":
        text = "v_mfma_f32_16x16x32_f16 {c}, {a}, {b}, "
        case("inline C of 0", text + "0", a, b, np.zeros((16, 16), np.float32))
        case("inline C of -4.0", text + "-4.0", a, b, np.full((16, 16), -4, np.float32))
        case("lanes off", text + "{c}", a, b, c, exec_mask=SOME_LANES)
        moves = "\n".join(f"v_accvgpr_write_b32 a{n}, v{n}" for n in range(12))
        back = "\n".join(f"v_accvgpr_read_b32 v{n}, a{n + 12}" for n in range(4))
        case(
            "accumulation registers",
            f"{moves}\nv_mfma_f32_16x16x32_f16 a[12:15], a[4:7], v[8:11], a[0:3]\n{back}",
            a,
            b,
            c,
        )

for size, k_count, shape in ((16, 128, "16x16x128"), (32, 64, "32x32x64")):
    blocks = k_count // 32
    c = random_matrix(RNG, (size, size), np.float32)
    for (a_type, a_code), (b_type, b_code) in itertools.product(F8F6F4_CODES.items(), repeat=2):
        a = random_matrix(RNG, (size, k_count), DTYPES[a_type])
        b = random_matrix(RNG, (size, k_count), DTYPES[b_type])
        kinds = f"cbsz:{a_code} blgp:{b_code}"
        name = f"{shape} {a_type} {b_type}"
        code = f"v_mfma_f32_{shape}_f8f6f4 {{c}}, {{a}}, {{b}}, {{c}} {kinds}"
        case(f"unscaled {name}", code, a, b, c)
        for a_byte, b_byte in itertools.product(range(4), repeat=2):
            every_byte = a_type == "fp8" and b_type in ("fp8", "fp4")
            if not every_byte and (a_byte, b_byte) != (3, 1):
                continue
            # Every row and block, on both sides, has a scale of its own.
            registers = [RNG.integers(0, 2**32, 64, dtype=np.uint32) for _ in range(2)]
            factors = []
            for register, byte in zip(registers, (a_byte, b_byte), strict=True):
                codes = RNG.permutation(np.arange(95, 159)).astype(np.uint8)
                register.view(np.uint8)[byte::4] = codes
                scale = np.zeros((size, k_count))
                for i, block in itertools.product(range(size), range(blocks)):
                    scale[i, 32 * block : 32 * (block + 1)] = 2.0 ** (
                        int(codes[size * block + i]) - 127
                    )
                factors.append(scale)
            low, high = (f"[{a_byte >> n & 1},{b_byte >> n & 1},0]" for n in (0, 1))
            code = (
                f"v_mfma_scale_f32_{shape}_f8f6f4 {{c}}, {{a}}, {{b}}, {{c}}, {{sa}}, {{sb}} "
                f"op_sel:{low} op_sel_hi:{high} {kinds}"
            )
            case(f"scaled {name} bytes {a_byte} {b_byte}", code, a, b, c, factors, scales=registers)

SPECIAL = {}
ones = np.ones((16, 128), FP8)
half_words = np.full(64, 0x7F7F7F7F, np.uint32)
nan_scale = half_words.copy()
nan_scale[16 * 2 + 5] = 0x7F7F7FFF  # row 5, block 2 of A
SPECIAL["NaN scale"] = snippet(
    "v_mfma_scale_f32_16x16x128_f8f6f4 {c}, {a}, {b}, {c}, {sa}, {sb} op_sel_hi:[0,0,0]",
    ones,
    ones,
    np.zeros((16, 16), np.float32),
    scales=(nan_scale, half_words),
)
infinite = np.ones((16, 32), np.float16)
infinite[3, 20], infinite[9, 1] = np.inf, np.nan
zeros = np.ones((16, 32), np.float16)
zeros[6, 20] = 0
SPECIAL["infinity and NaN"] = snippet(
    "v_mfma_f32_16x16x32_f16 {c}, {a}, {b}, 0", infinite, zeros, np.zeros((16, 16), np.float32)
)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner({name: case[0] for name, case in CASES.items()} | SPECIAL)


@pytest.mark.parametrize("name", CASES)
def test_product(runner, name):
    _, expected, magnitude = CASES[name]
    close(read_output(runner.run(name), len(expected)), expected, magnitude)


def test_a_nan_scale_spoils_its_row_only(runner):
    result = read_output(runner.run("NaN scale"), 16)
    assert np.isnan(result[5]).all()
    np.testing.assert_array_equal(np.delete(result, 5, axis=0), 128)


def test_infinity_and_nan(runner):
    result = read_output(runner.run("infinity and NaN"), 16)
    assert np.isnan(result[9]).all()
    assert np.isnan(result[3, 6])  # infinity times zero
    np.testing.assert_array_equal(np.delete(result[3], 6), np.inf)
    assert np.isfinite(np.delete(result, [3, 9], axis=0)).all()


@pytest.mark.parametrize("undefined", range(4, 17))
def test_exactly_the_registers_of_both_formats_are_read(undefined):
    """A fp8 in v[4:11], B fp4 in v[12:15]; v16 would belong to an 8-bit B."""
    defined = [r for r in (*range(17), 20, 21) if r != undefined]
    code = "\n".join(f"v_mov_b32 v{r}, 0" for r in defined)
    code += (
        "\nv_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:15], v[0:3], v20, v21 "
        "op_sel_hi:[0,0,0] blgp:4\ns_endpgm"
    )
    kernel = CodeObject(assemble({"k": Assembly(code, block_size=64)})).kernel("k")
    result = run(kernel, (1, 1, 1), (64, 1, 1), [], Memory(), strict=False)
    faults = [(r.kind, r.detail) for r in result.reports]
    assert faults == ([] if undefined == 16 else [("uninitialized_register", f"v{undefined}")])


@pytest.mark.parametrize("size", [16, 32])
def test_layout_formulas_agree_with_hardware_facts(size):
    """Spot checks of the two mappings against the ISA's tables."""
    if size == 16:
        assert input_place(16, 128, True, 3, 64 + 16 * 2 + 5) == (3 + 32, 16 + 5)
        assert input_place(16, 32, False, 3, 8 * 2 + 5) == (3 + 32, 5)
        assert input_place(16, 128, False, 3, 32 * 2 + 21) == (3 + 32, 21)
        assert output_place(16, 4 * 2 + 3, 7) == (7 + 32, 3)
    else:
        assert input_place(32, 64, True, 3, 32 + 16 + 5) == (3 + 32, 16 + 5)
        assert input_place(32, 16, False, 3, 8 + 5) == (3 + 32, 5)
        assert input_place(32, 64, False, 3, 32 + 21) == (3 + 32, 21)
        assert output_place(32, 8 * 3 + 4 * 1 + 2, 9) == (9 + 32, 14)


def test_a_constant_scale():
    def codes(bits, op_sel=0, op_sel_hi=0):
        (code,) = set(matrix.scale_codes(np.uint32([bits]), op_sel, op_sel_hi, 0).tolist())
        return code

    assert codes(0x3F800000) == codes(0x3F800000, 1, 1) == 127  # 1.0: its exponent
    assert codes(0xC0800000) == 129  # -4.0
    assert codes(64) == 64  # integers count as their bits
    assert codes(64, 1) == 0
    assert codes(2**32 - 2, 1, 1) == 255


@pytest.mark.parametrize("field", ["cbsz", "blgp"])
@pytest.mark.parametrize("code", [2, 3, 5, 7])
def test_formats_that_are_not_modelled_are_errors(field, code):
    record = matrix.INSTRUCTIONS["v_mfma_f32_16x16x128_f8f6f4"]
    rows = np.zeros((8, 64), np.uint32)
    with pytest.raises(NotImplementedError, match=f"{field} {code}"):
        record.function(rows, rows, rows[:4], **{field: code})


def test_every_instruction_of_the_table_is_here():
    assert set(matrix.INSTRUCTIONS) <= instructions_in(case[0] for case in CASES.values())
