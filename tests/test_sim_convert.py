"""Conversions: every small-format code, every rounding edge, op_sel, scales, lanes that are off."""

import ml_dtypes
import numpy as np
import pytest
from gfx950_sim.isa import convert
from sim_snippets import (
    SOME_LANES,
    Runner,
    Snippet,
    assert_same_floats,
    instructions_in,
    lanes_of,
)

FP8, BF8, FP4 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn
SMALL = {"fp8": FP8, "bf8": BF8}
CODES = np.arange(256, dtype=np.uint8)
WORDS = CODES.view(np.uint32)
"""Four codes a lane: all 256 of them."""
OLD = np.arange(64, dtype=np.uint32) * np.uint32(0x01010101) ^ np.uint32(0x5A5AA5A5)


def bits(values) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32)


def edge_floats() -> np.ndarray:
    """float32 [64]: the edges of f16, bf16, fp8 and bf8, and random values."""
    edges = [
        0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, 2**-10, -(2**-10), 1.5 * 2**-10, 2**-9, 2**-17,
        3 * 2**-17, 2**-25, 1.0000001 * 2**-25, 2**-24, 6.0975e-05, 1.0, -1.0, 1.0625, 1.1875,
        1.125, 1.375, 1.00390625, 1.01171875, 1.0009765625, 1.00048828125, 1.00146484375, 447.9,
        448, -448, 463.99, 464, 464.01, 480, -1000, 57344, 61439, 61440, -61440, 65504, 65519,
        65520, -65520, 1e10, 3.3895e38, 3.4e38, np.inf, -np.inf, np.nan,
    ]  # fmt: skip
    rest = np.random.default_rng(2).standard_normal(64 - len(edges)) * 50
    return np.concatenate([edges, rest]).astype(np.float32)


EDGES = edge_floats()
OTHERS = np.roll(EDGES, 17) * np.float32(-1)
EXPONENTS = np.concatenate([[0, 1, 126, 127, 128, 254, 255], np.arange(100, 157)]).astype(np.uint32)
SCALES = EXPONENTS << np.uint32(23) | np.uint32(0x80012345)
"""Only the exponent field counts."""


def factors() -> np.ndarray:
    values = np.ldexp(1.0, EXPONENTS.astype(int) - 127)
    return np.where(EXPONENTS == 255, np.nan, values)


CASES: dict[str, tuple[Snippet, object]] = {}


def case(name, snippet, expected):
    """`expected` is compared by its dtype, see `assert_same_floats`."""
    CASES[name] = (snippet, expected)


def pair_words(low, high, dtype) -> np.ndarray:
    both = np.stack([np.asarray(low), np.asarray(high)], axis=-1).astype(dtype)
    return both.view(np.uint16 if both.dtype.itemsize == 2 else np.uint8)


with np.errstate(all="ignore"):
    for small, dtype in SMALL.items():
        values = CODES.view(dtype).astype(np.float32).reshape(64, 4)
        for byte in range(4):
            case(
                f"cvt_f32_{small} byte {byte}",
                Snippet(f"v_cvt_f32_{small}_sdwa v0, v1 src0_sel:BYTE_{byte}", {1: WORDS, 0: OLD}),
                values[:, byte],
            )
        for word in range(2):
            case(
                f"cvt_pk_f32_{small} word {word}",
                Snippet(
                    f"v_cvt_pk_f32_{small}_sdwa v[0:1], v2 src0_sel:WORD_{word}",
                    {2: WORDS, 0: OLD, 1: OLD},
                    (0, 1),
                ),
                values[:, 2 * word : 2 * word + 2].T,
            )
            sel = f"op_sel:[{word},0,0]"
            for wide, target in (("f16", np.float16), ("bf16", ml_dtypes.bfloat16)):
                exact = values[:, 2 * word : 2 * word + 2].astype(np.float64) * factors()[:, None]
                case(
                    f"cvt_scalef32_pk_{wide}_{small} word {word}",
                    Snippet(
                        f"v_cvt_scalef32_pk_{wide}_{small} v0, v1, v2 {sel}",
                        {1: WORDS, 2: SCALES, 0: OLD},
                    ),
                    exact.astype(target),
                )
            case(
                f"cvt_scalef32_pk_f32_{small} word {word}",
                Snippet(
                    f"v_cvt_scalef32_pk_f32_{small} v[0:1], v2, v3 {sel}",
                    {2: WORDS, 3: SCALES, 0: OLD, 1: OLD},
                    (0, 1),
                ),
                exact.astype(np.float32).T,
            )
        for byte in range(4):
            exact = values[:, byte].astype(np.float64) * factors()
            low, high = byte & 1, byte >> 1
            case(
                f"cvt_scalef32_f32_{small} byte {byte}",
                Snippet(
                    f"v_cvt_scalef32_f32_{small} v0, v1, v2 op_sel:[{low},{high},0]",
                    {1: WORDS, 2: SCALES, 0: OLD},
                ),
                exact.astype(np.float32),
            )
            for half in range(2):
                halves = np.stack([OLD & 0xFFFF, OLD >> 16], -1).astype(np.uint16).view(np.float16)
                halves[:, half] = exact.astype(np.float16)
                case(
                    f"cvt_scalef32_f16_{small} byte {byte} half {half}",
                    Snippet(
                        f"v_cvt_scalef32_f16_{small} v0, v1, v2 op_sel:[{low},{high},{half}]",
                        {1: WORDS, 2: SCALES, 0: OLD},
                    ),
                    halves,
                )

    def packed(low, high, dtype) -> np.ndarray:
        """[64, 2] codes of two lists of values, rounded by an independent library."""
        pair = np.stack(np.broadcast_arrays(low, high), -1).astype(np.float64)
        with np.errstate(over="ignore"):
            return pair.astype(np.float32).astype(dtype)

    def into_half(codes, half, dtype) -> np.ndarray:
        """OLD as four small floats a lane, with those of one half replaced."""
        result = OLD.copy().view(np.uint8).reshape(64, 4).view(dtype)
        result[:, 2 * half : 2 * half + 2] = codes
        return result

    for small, dtype in SMALL.items():
        narrow = packed(EDGES, OTHERS, dtype)
        for half in range(2):
            sel = f"op_sel:[0,0,{half}]"
            case(
                f"cvt_pk_{small}_f32 half {half}",
                Snippet(
                    f"v_cvt_pk_{small}_f32 v0, v1, v2 {sel}",
                    {1: bits(EDGES), 2: bits(OTHERS), 0: OLD},
                ),
                into_half(narrow, half, dtype),
            )
            case(
                f"cvt_pk_{small}_f32 half {half} modifiers",
                Snippet(
                    f"v_cvt_pk_{small}_f32 v0, -v1, |v2| {sel}",
                    {1: bits(EDGES), 2: bits(OTHERS), 0: OLD},
                ),
                into_half(packed(-EDGES, np.abs(OTHERS), dtype), half, dtype),
            )
            exact = np.stack([EDGES, OTHERS], -1).astype(np.float64) / factors()[:, None]
            case(
                f"cvt_scalef32_pk_{small}_f32 half {half}",
                Snippet(
                    f"v_cvt_scalef32_pk_{small}_f32 v0, v1, v2, v3 op_sel:[0,0,0,{half}]",
                    {1: bits(EDGES), 2: bits(OTHERS), 3: SCALES, 0: OLD},
                ),
                into_half(exact.astype(dtype), half, dtype),
            )
            for wide, source in (("f16", np.float16), ("bf16", ml_dtypes.bfloat16)):
                pair = np.stack([EDGES, OTHERS], -1).astype(source)
                exact = pair.astype(np.float64) / factors()[:, None]
                case(
                    f"cvt_scalef32_pk_{small}_{wide} half {half}",
                    Snippet(
                        f"v_cvt_scalef32_pk_{small}_{wide} v0, v1, v2 {sel}",
                        {1: pair.view(np.uint32)[:, 0], 2: SCALES, 0: OLD},
                    ),
                    into_half(exact.astype(dtype), half, dtype),
                )
        case(
            f"cvt_scalef32_pk_{small}_f32 inline scale",
            Snippet(
                f"v_cvt_scalef32_pk_{small}_f32 v0, v1, v2, 4.0",
                {1: bits(EDGES), 2: bits(OTHERS), 0: OLD},
            ),
            into_half(packed(EDGES / 4, OTHERS / 4, dtype), 0, dtype),
        )

    # fp4: two nibbles a byte, at every boundary between codes and at every byte.
    nibbles = np.stack([CODES & 0xF, CODES >> 4], -1).view(FP4).astype(np.float64)
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7])
    around = [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(8))]
    specials = [0, 1e-45, 0.5, 6, 1e30, np.inf, np.nan, 4]
    FOURTHS = np.concatenate([*around, specials]).astype(np.float32)
    FOURTHS = np.concatenate([FOURTHS, -FOURTHS])
    TURNED = np.roll(FOURTHS, 23)
    fourths = {1: bits(FOURTHS), 2: bits(TURNED), 0: OLD}

    def fp4_byte(low, high) -> np.ndarray:
        """uint8 [64] of two codes, rounded by an independent library; NaN is 6 with its sign."""
        pair = np.stack([low, high], -1).astype(np.float64)
        codes = np.abs(pair).astype(FP4).view(np.uint8)
        codes = np.where(np.isnan(pair), 7, codes) | np.signbit(pair) << 3
        return (codes[:, 0] | codes[:, 1] << 4).astype(np.uint8)

    def into_byte(codes, byte) -> np.ndarray:
        """OLD as bytes [64, 4], with one replaced."""
        result = OLD.copy().view(np.uint8).reshape(64, 4)
        result[:, byte] = codes
        return result

    for byte in range(4):
        low, high = byte & 1, byte >> 1
        exact = nibbles.reshape(64, 4, 2)[:, byte] * factors()[:, None]
        case(
            f"cvt_scalef32_pk_f32_fp4 byte {byte}",
            Snippet(
                f"v_cvt_scalef32_pk_f32_fp4 v[0:1], v2, v3 op_sel:[{low},{high},0]",
                {2: WORDS, 3: SCALES, 0: OLD, 1: OLD},
                (0, 1),
            ),
            exact.astype(np.float32).T,
        )
        # Each source's own power of two brings it back to where the rounding is.
        shifted = [np.ldexp(x, EXPONENTS.astype(int) - 127) for x in (FOURTHS, TURNED)]
        signs = [np.copysign(x / factors(), x) for x in shifted]
        case(
            f"cvt_scalef32_pk_fp4_f32 byte {byte}",
            Snippet(
                f"v_cvt_scalef32_pk_fp4_f32 v0, v1, v2, v3 op_sel:[0,0,{low},{high}]",
                {1: bits(shifted[0]), 2: bits(shifted[1]), 3: SCALES, 0: OLD},
            ),
            into_byte(fp4_byte(*signs), byte),
        )
        case(
            f"cvt_scalef32_pk_fp4_f32 byte {byte} modifiers, inline scale",
            Snippet(
                f"v_cvt_scalef32_pk_fp4_f32 v0, -v1, |v2|, 2.0 op_sel:[0,0,{low},{high}]",
                fourths,
            ),
            into_byte(fp4_byte(-FOURTHS / 2, np.abs(TURNED) / 2), byte),
        )
    case(
        "cvt_scalef32_pk_fp4_f32 whole dword",
        Snippet(
            "\n".join(
                f"v_cvt_scalef32_pk_fp4_f32 v0, v{1 + n % 2}, v{2 - n % 2}, 1.0 "
                f"op_sel:[0,0,{n & 1},{n >> 1}]"
                for n in range(4)
            ),
            fourths,
        ),
        np.stack([fp4_byte(FOURTHS, TURNED), fp4_byte(TURNED, FOURTHS)] * 2, -1),
    )

    two = {1: bits(EDGES), 2: bits(OTHERS), 0: OLD}
    case(
        "cvt_pk_f16_f32",
        Snippet("v_cvt_pk_f16_f32 v0, v1, v2", two),
        packed(EDGES, OTHERS, np.float16),
    )
    case(
        "cvt_pk_bf16_f32",
        Snippet("v_cvt_pk_bf16_f32 v0, v1, v2", two),
        packed(EDGES, OTHERS, ml_dtypes.bfloat16),
    )
    case("cvt_f16_f32", Snippet("v_cvt_f16_f32 v0, v1", two), packed(EDGES, 0, np.float16))
    toward_zero = packed(EDGES, OTHERS, np.float16)
    exact = np.stack([EDGES, OTHERS], -1)
    toward_zero = np.where(
        np.abs(toward_zero).astype(np.float32) > np.abs(exact),
        np.nextafter(toward_zero, np.float16(0)),
        toward_zero,
    )
    case("cvt_pkrtz_f16_f32", Snippet("v_cvt_pkrtz_f16_f32 v0, v1, v2", two), toward_zero)

    halves = np.stack([EDGES, OTHERS], -1).astype(np.float16)
    case(
        "cvt_f32_f16",
        Snippet("v_cvt_f32_f16 v0, v1", {1: halves.view(np.uint32)[:, 0], 0: OLD}),
        halves[:, 0].astype(np.float32),
    )
    case(
        "cvt_f32_f16 upper half",
        Snippet(
            "v_cvt_f32_f16_sdwa v0, v1 src0_sel:WORD_1", {1: halves.view(np.uint32)[:, 0], 0: OLD}
        ),
        halves[:, 1].astype(np.float32),
    )

    # MODE.FP16_OVFL: overflow is the largest number; true infinities stay in f16, not in fp8.
    def saturated(values, dtype, keep_infinity=False) -> np.ndarray:
        limit = float(ml_dtypes.finfo(dtype).max)
        clipped_values = np.clip(values, -limit, limit)
        if keep_infinity:
            clipped_values = np.where(np.isinf(values), values, clipped_values)
        return np.where(np.isnan(values), values, clipped_values).astype(np.float32).astype(dtype)

    both = np.stack([EDGES, OTHERS], -1).astype(np.float64)
    for small, dtype in SMALL.items():
        case(
            f"cvt_pk_{small}_f32 FP16_OVFL",
            Snippet(f"v_cvt_pk_{small}_f32 v0, v1, v2", two, fp16_overflow=True),
            into_half(saturated(both, dtype), 0, dtype),
        )
        case(
            f"cvt_scalef32_pk_{small}_f32 FP16_OVFL",
            Snippet(
                f"v_cvt_scalef32_pk_{small}_f32 v0, v1, v2, 0.5 op_sel:[0,0,0,1]",
                two,
                fp16_overflow=True,
            ),
            into_half(saturated(both * 2, dtype), 1, dtype),
        )
    case(
        "cvt_pk_f16_f32 FP16_OVFL",
        Snippet("v_cvt_pk_f16_f32 v0, v1, v2", two, fp16_overflow=True),
        saturated(both, np.float16, keep_infinity=True),
    )
    brains = np.stack([EDGES, OTHERS], -1).astype(ml_dtypes.bfloat16)
    case(
        "cvt_f32_bf16",
        Snippet("v_cvt_f32_bf16 v0, v1", {1: brains.view(np.uint32)[:, 0], 0: OLD}),
        brains[:, 0].astype(np.float32),
    )

INTEGERS = np.uint32([0, 1, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x80000001, 16777217, 0xFF7FFFFF])
INTEGERS = np.concatenate([INTEGERS, np.random.default_rng(3).integers(0, 2**32, 56)]).astype(
    np.uint32
)
REALS = np.float32(
    [
        0.0, -0.0, 0.5, -0.5, 0.99999994, -0.99999994, 1.5, -1.5, 2.5, -2.5, 2147483520,
        2147483648, -2147483648, -2147483904, 4294967040, 4294967296, -1, 1e-40, np.inf,
        -np.inf, np.nan, 3e9, -3e9, 1e20
    ]
)  # fmt: skip
REALS = np.concatenate([REALS, np.random.default_rng(4).standard_normal(40) * 1e5]).astype(
    np.float32
)


def clipped(values, low, high) -> np.ndarray:
    """Whole numbers by Python's own integers: NaN is 0, beyond the range the nearest end."""
    return np.array(
        [
            0 if np.isnan(v) else low if v < low else high if v > high else int(v)
            for v in map(float, values)
        ],
        np.int64,
    ).astype(np.uint32)


I32, U32 = (-(2**31), 2**31 - 1), (0, 2**32 - 1)
case(
    "cvt_f32_i32",
    Snippet("v_cvt_f32_i32 v0, v1", {1: INTEGERS, 0: OLD}),
    INTEGERS.view(np.int32).astype(np.float32),
)
case(
    "cvt_f32_u32",
    Snippet("v_cvt_f32_u32 v0, v1", {1: INTEGERS, 0: OLD}),
    INTEGERS.astype(np.float32),
)
case("cvt_i32_f32", Snippet("v_cvt_i32_f32 v0, v1", {1: bits(REALS), 0: OLD}), clipped(REALS, *I32))
case("cvt_u32_f32", Snippet("v_cvt_u32_f32 v0, v1", {1: bits(REALS), 0: OLD}), clipped(REALS, *U32))
case(
    "cvt_flr_i32_f32",
    Snippet("v_cvt_flr_i32_f32 v0, v1", {1: bits(REALS), 0: OLD}),
    clipped(np.floor(REALS), *I32),
)
case(
    "cvt_rpi_i32_f32",
    Snippet("v_cvt_rpi_i32_f32 v0, v1", {1: bits(REALS), 0: OLD}),
    clipped(np.floor(REALS.astype(np.float64) + 0.5), *I32),
)
for byte in range(4):
    case(
        f"cvt_f32_ubyte{byte}",
        Snippet(f"v_cvt_f32_ubyte{byte} v0, v1", {1: INTEGERS, 0: OLD}),
        INTEGERS.view(np.uint8).reshape(64, 4)[:, byte].astype(np.float32),
    )
DOUBLES = INTEGERS.view(np.int32).astype(np.float64) * 1.1
DOUBLE_WORDS = DOUBLES.view(np.uint32).reshape(64, 2)
case(
    "cvt_f64_i32",
    Snippet("v_cvt_f64_i32 v[0:1], v2", {2: INTEGERS, 0: OLD, 1: OLD}, (0, 1)),
    INTEGERS.view(np.int32).astype(np.float64).view(np.uint32).reshape(64, 2).T,
)
case(
    "cvt_f64_f32",
    Snippet("v_cvt_f64_f32 v[0:1], v2", {2: bits(REALS), 0: OLD, 1: OLD}, (0, 1)),
    np.where(np.isnan(REALS), np.nan, REALS.astype(np.float64)).view(np.uint32).reshape(64, 2).T,
)
case(
    "cvt_f32_f64",
    Snippet("v_cvt_f32_f64 v0, v[2:3]", {2: DOUBLE_WORDS[:, 0], 3: DOUBLE_WORDS[:, 1], 0: OLD}),
    DOUBLES.astype(np.float32),
)
case(
    "cvt_i32_f64",
    Snippet("v_cvt_i32_f64 v0, v[2:3]", {2: DOUBLE_WORDS[:, 0], 3: DOUBLE_WORDS[:, 1], 0: OLD}),
    clipped(DOUBLES, *I32),
)
case(
    "cvt_u32_f64",
    Snippet("v_cvt_u32_f64 v0, v[2:3]", {2: DOUBLE_WORDS[:, 0], 3: DOUBLE_WORDS[:, 1], 0: OLD}),
    clipped(DOUBLES, *U32),
)
case(
    "cvt_f64_u32",
    Snippet("v_cvt_f64_u32 v[0:1], v2", {2: INTEGERS, 0: OLD, 1: OLD}, (0, 1)),
    INTEGERS.astype(np.float64).view(np.uint32).reshape(64, 2).T,
)
# 16-bit results clear the upper half.
SHORTS = np.where(np.arange(64) < 32, INTEGERS >> np.uint32(16), INTEGERS) & np.uint32(0xFFFF)
for kind, dtype, ends in (("u16", np.uint16, (0, 65535)), ("i16", np.int16, (-32768, 32767))):
    whole = SHORTS.astype(np.uint16).view(dtype)
    case(
        f"cvt_f16_{kind}",
        Snippet(f"v_cvt_f16_{kind} v0, v1", {1: SHORTS | np.uint32(0xABCD0000), 0: OLD}),
        packed(whole, 0, np.float16),
    )
    case(
        f"cvt_{kind}_f16",
        Snippet(f"v_cvt_{kind}_f16 v0, v1", {1: halves.view(np.uint32)[:, 0], 0: OLD}),
        clipped(halves[:, 0], *ends) & np.uint32(0xFFFF),
    )
case(
    "cvt_pk_i16_i32",
    Snippet("v_cvt_pk_i16_i32 v0, v1, v2", {1: INTEGERS, 2: ~INTEGERS, 0: OLD}),
    np.stack([np.clip(x.view(np.int32), -32768, 32767) for x in (INTEGERS, ~INTEGERS)], -1).astype(
        np.int16
    ),
)
case(
    "cvt_pk_u16_u32",
    Snippet("v_cvt_pk_u16_u32 v0, v1, v2", {1: INTEGERS, 2: ~INTEGERS, 0: OLD}),
    np.stack([np.minimum(x, 65535) for x in (INTEGERS, ~INTEGERS)], -1).astype(np.uint16),
)

PARTIAL = [
    "cvt_f32_fp8 byte 2",
    "cvt_pk_f32_fp8 word 1",
    "cvt_scalef32_pk_f16_fp8 word 1",
    "cvt_scalef32_pk_fp8_f32 half 1",
    "cvt_scalef32_pk_f32_fp4 byte 1",
    "cvt_scalef32_pk_fp4_f32 byte 2",
    "cvt_pk_fp8_f32 half 0",
    "cvt_pk_bf16_f32",
    "cvt_i32_f32",
    "cvt_f64_i32",
]


@pytest.fixture(scope="module")
def runner() -> Runner:
    snippets = {name: snippet for name, (snippet, _) in CASES.items()}
    for name in PARTIAL:
        snippets[f"{name} partial"] = snippets[name].with_exec(SOME_LANES)
    return Runner(snippets)


@pytest.mark.parametrize("name", CASES)
def test_conversion(runner, name):
    assert_same_floats(runner.run(name), CASES[name][1])


@pytest.mark.parametrize("name", PARTIAL)
def test_lanes_that_are_off_keep_their_register(runner, name):
    on = lanes_of(SOME_LANES)
    result, whole = runner.run(f"{name} partial"), runner.run(name)
    np.testing.assert_array_equal(result[:, on], whole[:, on])
    np.testing.assert_array_equal(result[:, ~on], np.broadcast_to(OLD, result.shape)[:, ~on])


def test_every_instruction_of_the_table_is_here():
    assert set(convert.INSTRUCTIONS) <= instructions_in(snippet for snippet, _ in CASES.values())
