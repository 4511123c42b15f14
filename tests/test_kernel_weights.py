"""Rows where few entries matter: the waves that refine their weights, and how these come together.

Most tests choose weights of which e4m3 hi + lo leave 2^-11 or more, so that a rest that is missing,
misplaced or another's shows in every column, below the project's tolerances.
"""

import math
from typing import NamedTuple

import ml_dtypes
import numpy as np
import oracle
import pytest
from kernel_launch import SCALE, check, launch, random_query, rows_of

HEADS, TILE, WAVES, WAVE_ENTRIES = 16, 128, 4, 32
BITS = math.log(2)
"""The softmax scale under which scores are in bits."""
NOTHING = -100
"""An exponent of weights that add nothing."""
# Of 128 + 16j +- 4.125 units hi leaves 4.125 over, and lo an eighth of a unit, which the rest holds
# exactly; of 4.375 lo takes an eighth too much.
MANTISSAS = np.array(
    [
        1 + (1 + h % 7) / 8 + (-1) ** (h // 7) * (4.375 if h % 2 else 4.125) / 128
        for h in range(HEADS)
    ]
)
PLAIN, REFINED = 2.0**-9, 1e-4
"""What a weight may be off by, relative to itself."""
NOTHING_ELSE = 1e-6
"""Room for the rest of the arithmetic, relative to sum p|v|."""


class Row(NamedTuple):
    """The records of a row whose weights are chosen; all rows have the same query."""

    records: np.ndarray
    """[entries, 656] uint8."""
    exponents: np.ndarray
    """[entries, H]: an entry's weight is 2^exponent * MANTISSAS."""
    refined: np.ndarray
    """[entries]: whether the entry's wave refines its tile."""

    def room(self, scale_format: str) -> np.ndarray:
        """How far out may be off, [H, 512]."""
        weights = 2.0**self.exponents * MANTISSAS
        weights = weights / weights.sum(0)
        values = np.abs(oracle.unpack_records(self.records, scale_format)[:, :512])
        off = np.where(self.refined, REFINED, PLAIN) + NOTHING_ELSE
        return np.nan_to_num((off[:, None] * weights).T @ values)


def query(rows: int) -> np.ndarray:
    """The rows' query: head h sees rope columns 4h .. 4h + 3 alone."""
    q = np.zeros((rows, HEADS, 576))
    for head in range(HEADS):
        q[:, head, 512 + 4 * head : 516 + 4 * head] = 1
    return q.astype(ml_dtypes.bfloat16)


def row_of(
    rng: np.random.Generator, exponents: np.ndarray, refined: np.ndarray, *, negative: bool = False
) -> Row:
    """Random records with these weights.

    Scales of a column block differ by a factor of 2, so that each block's weights are others; with
    ``negative`` by sign too.
    """
    entries = len(exponents)
    exponents = np.broadcast_to(exponents, (HEADS, entries)).T if exponents.ndim == 1 else exponents
    rope = np.zeros((entries, HEADS, 4))
    fractions = np.log2(MANTISSAS)
    rope[..., 0] = exponents
    rope[..., 1] = fractions.astype(ml_dtypes.bfloat16)
    rope[..., 2] = fractions - rope[..., 1]
    codes = rng.integers(1, 0x40, (entries, 512)) | rng.integers(0, 2, (entries, 512)) << 7
    scales = np.array([0.25, 1.0, 4.0, 2.0]) * rng.choice([1, 2], (entries, 4))
    if negative:
        scales = scales * rng.choice([-1, 1], (entries, 4))
    records = oracle.join_records(codes.astype(np.uint8), scales, rope.reshape(entries, 64))
    return Row(records, exponents, refined)


def two_a_tile(rng: np.random.Generator, refined: np.ndarray, **options: bool) -> Row:
    """A row of two entries of weight in each tile and wave, at random places.

    ``refined`` [tiles, 4] says whose are to be refined: with their scales they outweigh the wave's
    before twice or more; others have half of these or less.
    """
    exponents = np.full((*refined.shape, WAVE_ENTRIES), NOTHING)
    least, most = np.ones((2, WAVES))
    for of_tile, of_waves in zip(exponents, refined, strict=True):
        chosen = np.where(of_waves, np.ceil(np.log2(most)), np.floor(np.log2(least)) - 4)
        places = np.stack([rng.permutation(WAVE_ENTRIES)[:2] for _ in range(WAVES)])
        np.put_along_axis(of_tile, places, chosen[:, None].astype(int), 1)
        least += 2 * 2.0**chosen
        most += 2 * 2.0 ** (chosen + 2)
    return row_of(rng, exponents.ravel(), np.repeat(refined.ravel(), WAVE_ENTRIES), **options)


def check_rows(
    rows: list[Row],
    *,
    q: np.ndarray | None = None,
    masked: int = 0,
    negative: bool = False,
    **options: object,
) -> tuple[np.ndarray, np.ndarray]:
    """Launch, compare with the oracle, and with the room that the rows' weights leave.

    ``masked`` entries stand before each row's own.
    """
    scale_format = "float32" if negative else "pow2"
    kv = np.concatenate([row.records for row in rows])
    ends = np.cumsum([len(row.records) for row in rows])
    entries = [
        np.concatenate([np.full(masked, -1), np.arange(end - len(row.records), end)])
        for row, end in zip(rows, ends, strict=True)
    ]
    q = query(len(rows)) if q is None else q
    out, lse, _ = launch(
        q, kv, *rows_of(entries), BITS, scale_format=scale_format, partial=True, **options
    )
    expected = oracle.attention(q, kv, entries, BITS, scale_format=scale_format)
    oracle.check(out, lse, expected)
    room = np.stack([row.room(scale_format) for row in rows])
    error = np.nan_to_num(np.abs(out - expected.out))
    worst = (error / np.maximum(room, 1e-30)).max()
    assert worst <= 1, f"off by {worst:.2f} of what there is room for"
    return out, lse


@pytest.mark.parametrize("negative", [False, True], ids=["pow2", "float32"])
def test_every_entry_of_a_tile(negative):
    """16 rows with two entries of weight in each wave, each time others."""
    rng = np.random.default_rng(1)
    places = np.stack([rng.permutation(WAVE_ENTRIES).reshape(16, 2) for _ in range(WAVES)], 1)
    rows = []
    for of_waves in places:
        exponents = np.full((WAVES, WAVE_ENTRIES), NOTHING)
        np.put_along_axis(exponents, of_waves, 0, 1)
        rows.append(row_of(rng, exponents.ravel(), np.full(TILE, True), negative=negative))
    check_rows(rows, negative=negative)


def test_the_room_tells_refined_weights_from_others():
    """Without the rest the same weights would be off by more than they have room for."""
    rng = np.random.default_rng(2)
    refined = np.array([[True] * WAVES, [False] * WAVES])
    row = two_a_tile(rng, refined)
    check_rows([row])
    with pytest.raises(AssertionError, match="of what there is room for"):
        check_rows([row._replace(refined=np.full(2 * TILE, True))])


@pytest.mark.parametrize("masked", [0, TILE + 3 * WAVE_ENTRIES, TILE - 3])
def test_tiles_refined_by_some_waves_only(masked):
    """Any set of waves, one after the other; ``masked`` shifts the entries of weight by waves."""
    rng = np.random.default_rng(3)
    rows = []
    for first in range(0, 16, 4):
        sets = np.array([[number >> wave & 1 for wave in range(WAVES)] for number in range(16)])
        refined = np.concatenate([np.ones((1, WAVES)), sets[first : first + 4][::-1]]).astype(bool)
        rows.append(two_a_tile(rng, refined))
    if masked % WAVE_ENTRIES:
        # A wave's tiles are then of two waves' entries: only the project's numbers are left.
        rows = [row._replace(refined=np.full(len(row.refined), False)) for row in rows]
    check_rows(rows, masked=masked)


def test_one_head_alone_makes_a_wave_refine():
    """Its 15 others gain from it too, with all their column blocks."""
    rng = np.random.default_rng(4)
    rows = []
    for head in (0, 7, 15):
        exponents = np.full((3 * TILE, HEADS), NOTHING)
        for tile in range(3):
            places = tile * TILE + np.arange(WAVES) * WAVE_ENTRIES + rng.integers(0, WAVE_ENTRIES)
            exponents[places] = -2 * tile
            exponents[places, head] = 3 * tile
        rows.append(row_of(rng, exponents, np.full(3 * TILE, True)))
    check_rows(rows)


@pytest.mark.parametrize(("value", "column"), [(np.nan, 100), (np.inf, 500), (-np.inf, 570)])
def test_a_head_that_is_not_finite_leaves_refined_ones_alone(value, column):
    rng = np.random.default_rng(5)
    refined = np.array([[True] * WAVES, [True, False, True, False], [False, True, True, False]])
    rows = [two_a_tile(rng, refined) for _ in range(3)]
    q = query(3)
    q[0, 3, column] = value
    q[1, 0, column] = q[1, 15, column] = value
    rows[2].records[-1, 300] = oracle.E4M3_NAN
    _, lse = check_rows(rows, q=q)
    np.testing.assert_array_equal(np.isnan(lse).sum(1), [1, 2, HEADS])


def test_latents_of_nothing_but_zeros():
    """There is no product to derive units from; of one sign or of both, by code or by scale."""
    rng = np.random.default_rng(6)
    refined = np.ones((2, WAVES), bool)
    rows = [two_a_tile(rng, refined) for _ in range(4)]
    rows[0].records[:, :512] = 0
    rows[1].records[:, :512] &= 0x80
    rows[2].records[:, 512:528] = 0
    rows[3].records[:TILE, 512:528] = 0
    out, _ = check_rows(rows)
    assert not out[:3].any()
    assert out[3].any()


@pytest.mark.parametrize("order", ["reversed", *range(3)])
def test_wave_orders_when_all_is_refined(order):
    rng = np.random.default_rng(7)
    check_rows([two_a_tile(rng, np.ones((4, WAVES), bool))], order=order, switch="wait")


@pytest.mark.slow
@pytest.mark.parametrize("order", range(20))
@pytest.mark.parametrize("negative", [False, True], ids=["pow2", "float32"])
def test_random_wave_orders_when_waves_refine(order, negative):
    rng = np.random.default_rng(100 + order)
    refined = np.concatenate([np.ones((2, WAVES)), rng.integers(0, 2, (3, WAVES))]).astype(bool)
    row = two_a_tile(rng, refined, negative=negative)
    check_rows([row], negative=negative, order=order, switch="wait")


# -- the project's numbers, on random records


def records_of(rng: np.random.Generator, rows: int, kind: str) -> np.ndarray:
    """Records whose codes are uniform, or normal-distributed values as a cache has them; or float32
    scales of either sign."""
    if kind == "normal":
        latents = (rng.standard_normal((rows, 512)) * 100).clip(-448, 448)
        codes = latents.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        scales = 2.0 ** rng.integers(-10, -3, (rows, 4))
        return oracle.join_records(codes, scales, rng.standard_normal((rows, 64)))
    records = oracle.random_records(rng, rows, pow2=kind != "float32")
    if kind == "float32":
        signs = rng.choice(np.array([0, 0x80], np.uint8), (rows, 4))
        records[:, 515:528:4] |= signs
    return records


KINDS = ("uniform", "normal", "float32")


def format_of(kind: str) -> str:
    return "float32" if kind == "float32" else "pow2"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_few_entries(kind):
    rng = np.random.default_rng(8)
    kv = records_of(rng, 300, kind)
    entries = [rng.integers(0, 300, length) for length in (2, 3, 5, 9, 20)]
    check(random_query(rng, 5, 16), kv, entries, scale_format=format_of(kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "scale"), [(1.0, SCALE), (8.0, 0.05), (0.1, SCALE)])
def test_many_rows_of_few_entries(kind, size, scale):
    rng = np.random.default_rng(9)
    kv = records_of(rng, 300, kind)
    entries = [rng.integers(0, 300, length) for length in range(1, 65)]
    check(random_query(rng, 64, 16, size), kv, entries, scale, scale_format=format_of(kind))


@pytest.mark.parametrize("exponent", [-121, -114, -60, 60, 110])
def test_scales_of_any_size(exponent):
    """The cosine distance tells, as long as bfloat16 has digits for out: not at 2^-126."""
    rng = np.random.default_rng(11)
    kv = oracle.random_records(rng, 200, exponents=[exponent])
    q = random_query(rng, 2, 16)
    # Large latents would decide the softmax alone.
    q[..., :512] = 0
    check(q, kv, [rng.integers(0, 200, length) for length in (7, 140)])


@pytest.mark.slow
def test_rows_of_equal_entries():
    """Scales and weights of a row are nearly the same, so that columns often cancel."""
    rng = np.random.default_rng(0)
    kv = oracle.random_records(rng, 64, exponents=[2])
    entries = [rng.integers(0, 64, length) for length in range(9, 33)]
    check(random_query(rng, len(entries), 16), kv, entries, 0.005)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["anywhere", "one wave", "one a tile"])
@pytest.mark.parametrize("heads", ["each its own", "all the same", "one alone"])
def test_few_entries_of_weight_in_long_rows(kind, place, heads):
    """2 to 20 entries carry all the weight but some 2^-14 of it."""
    rng = np.random.default_rng(10)
    length, rows = 500, 6
    kv = records_of(rng, rows * length, kind)
    scores = rng.uniform(-22, -19, (rows, length, HEADS))
    for row in scores:
        wave = rng.integers(0, WAVES)
        of_wave = np.flatnonzero(np.arange(length) % TILE // WAVE_ENTRIES == wave)
        if place == "one a tile":
            places = [rng.choice(of_wave[of_wave // TILE == tile]) for tile in range(4)]
        else:
            number = rng.integers(2, 21)
            places = rng.choice(of_wave if place == "one wave" else length, number, replace=False)
        chosen = rng.uniform(-3, 0, (len(places), HEADS))
        if heads == "all the same":
            chosen[:] = chosen[:, :1]
        if heads == "one alone":
            row[places, rng.integers(0, HEADS)] = chosen[:, 0]
        else:
            row[places] = chosen
    rope = np.zeros((rows * length, HEADS, 4))
    rope[..., 0] = scores.reshape(-1, HEADS)
    kv[:, 528:] = rope.reshape(-1, 64).astype(ml_dtypes.bfloat16).view(np.uint8)
    entries = [np.arange(i * length, (i + 1) * length) for i in range(rows)]
    check(query(rows), kv, entries, BITS, scale_format=format_of(kind))
