"""The kernel's machine code on the simulator against the float64 oracle, through the launch
contract. Every launch also checks bounds, waits, races and uninitialised reads: a fault raises."""

import ml_dtypes
import numpy as np
import oracle
import pytest
from gfx950_sim import Memory, run
from kernel_launch import LOG2E, SCALE, check, kernel, launch, pack, random_query, rows_of

from jax_sparse_mla.kernel import contract
from jax_sparse_mla.kernel.specialisation import Specialisation

ROWS = 700


def draw(rng: np.random.Generator, lengths: list[int], rows: int = ROWS) -> list[np.ndarray]:
    return [rng.integers(0, rows, length) for length in lengths]


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("scale_format", ["pow2", "float32"])
def test_lengths_around_the_tile(scale_format, partial):
    rng = np.random.default_rng(1)
    kv = oracle.random_records(rng, ROWS, pow2=scale_format == "pow2")
    entries = draw(rng, [0, 1, 31, 32, 33, 127, 128, 129, 0])
    q = random_query(rng, len(entries), 16)
    check(q, kv, entries, scale_format=scale_format, partial=partial)


@pytest.mark.slow
@pytest.mark.parametrize("scale_format", ["pow2", "float32"])
@pytest.mark.parametrize("length", [130, 255, 257, 1023, 2047, 2048, 2049])
def test_longer_rows(length, scale_format):
    rng = np.random.default_rng(length)
    kv = oracle.random_records(rng, 4096, pow2=scale_format == "pow2")
    check(random_query(rng, 1, 16), kv, draw(rng, [length], 4096), scale_format=scale_format)


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 12, 15, 16, 17, 32])
def test_heads(heads):
    rng = np.random.default_rng(heads)
    kv = oracle.random_records(rng, ROWS)
    check(random_query(rng, 2, heads), kv, draw(rng, [40, 129]))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [64, 96, 128])
def test_many_heads(heads):
    rng = np.random.default_rng(heads)
    kv = oracle.random_records(rng, ROWS)
    check(random_query(rng, 2, heads), kv, draw(rng, [40, 150]))


def test_query_in_two_parts():
    rng = np.random.default_rng(2)
    kv = oracle.random_records(rng, ROWS)
    entries = draw(rng, [33, 140])
    q = random_query(rng, 2, 5)
    pair = (np.ascontiguousarray(q[..., :512]), np.ascontiguousarray(q[..., 512:]))
    out, lse, _ = launch(pair, kv, *rows_of(entries), SCALE)
    oracle.check(out, lse, oracle.attention(q, kv, entries, SCALE))


@pytest.mark.parametrize("run", [1, 15, 16, 31, 32, 127, 128, 129])
def test_masked_entries_in_front(run):
    rng = np.random.default_rng(run)
    kv = oracle.random_records(rng, ROWS)
    row = np.concatenate([np.full(run, -1), rng.integers(0, ROWS, 20)])
    check(random_query(rng, 1, 16), kv, [row])


def test_masked_entries_anywhere():
    rng = np.random.default_rng(3)
    kv = oracle.random_records(rng, ROWS)
    middle = np.concatenate([draw(rng, [128])[0], np.full(128, -1), draw(rng, [70])[0]])
    scattered = draw(rng, [200])[0]
    scattered[rng.random(200) < 0.6] = -1
    padded = np.concatenate([draw(rng, [5])[0], np.full(600, -1)])
    nothing = np.full(300, -1)
    check(random_query(rng, 4, 16), kv, [middle, scattered, nothing, padded])


def test_no_index_reads_outside_the_records():
    rng = np.random.default_rng(4)
    kv = oracle.random_records(rng, 50)
    hostile = np.array([-1, -(2**31), 2**31 - 1, 50, 51, 2**30, -2, 49, 0])
    rows = [rng.choice(hostile, 150), hostile[:7], rng.choice(hostile[:7], 140)]
    check(random_query(rng, 3, 16), kv, rows)


@pytest.mark.parametrize(
    ("begin", "end"),
    [(5, 2), (-7, 3), (0, 2**31 - 1), (2**31 - 1, 2**31 - 1), (-(2**31), -1), (12, 99)],
)
def test_any_bounds(begin, end):
    rng = np.random.default_rng(5)
    kv = oracle.random_records(rng, ROWS)
    indices = rng.integers(0, ROWS, 40).astype(np.int32)
    q = random_query(rng, 1, 4)
    out, lse, _ = launch(q, kv, indices, np.array([begin]), np.array([end]), SCALE)
    first, last = np.clip([begin, end], 0, 40)
    oracle.check(out, lse, oracle.attention(q, kv, [indices[first:last]], SCALE))


def test_nothing_at_all():
    rng = np.random.default_rng(6)
    q = random_query(rng, 2, 3)
    none = np.zeros(0, np.int64)
    kv = np.zeros((0, contract.RECORD_BYTES), np.uint8)
    check(q, kv, [none, none])
    check(q, kv, [np.array([0, -1, 7]), none])


@pytest.mark.parametrize("scale_format", ["pow2", "float32"])
def test_nothing_of_an_unselected_record_shows(scale_format):
    rng = np.random.default_rng(7)
    kv = oracle.random_records(rng, 64, pow2=scale_format == "pow2")
    good = np.array([3, 20, 41])
    bad = np.setdiff1d(np.arange(64), good)
    kv[bad] = 0xFF
    rows = [np.concatenate([good, np.full(140, -1), good]), np.array([-1, 41, -1, 70])]
    check(random_query(rng, 2, 16), kv, rows, scale_format=scale_format)


def test_nan_stays_in_its_row_or_head():
    rng = np.random.default_rng(8)
    kv = oracle.random_records(rng, 64)
    kv[5, 300] = oracle.E4M3_NAN
    kv[6, 528 + 2 * 7 : 528 + 2 * 8] = 0xFF
    q = random_query(rng, 5, 3)
    q[3, 1, 17] = np.inf
    q[3, 2, 570] = -np.inf
    q[4, 0, 200] = np.nan
    rows = [np.array([1, 2, 5]), np.arange(7, 40), np.array([6, 1, 2]), *[np.arange(7, 40)] * 2]
    check(q, kv, rows)


@pytest.mark.parametrize(
    "scale", [0.0, -0.0, 2.0**-126, 2.0**127, 3.0, np.inf, -np.inf, np.nan, -1.0, 2.0**-130, 1e-40]
)
def test_scales_of_pow2(scale):
    """Exact, or NaN in the rows that select them: never silently wrong."""
    rng = np.random.default_rng(9)
    kv = oracle.random_records(rng, 40)
    kv[4, :512] = kv[4, :512] & 0x83 | 1
    oracle.set_scale(kv, 4, 2, scale)
    rows = [np.arange(3, 30), np.arange(10, 40)]
    # So large a scale decides the softmax alone; a query blind to its block keeps it balanced.
    q = random_query(rng, 2, 16)
    q[..., 256:384] = 0
    check(q, kv, rows)


@pytest.mark.parametrize("scale", [0.0, -0.0, 3.0, -1.7, 1e-40, 1e30, 2.0**-149])
def test_scales_of_float32(scale):
    rng = np.random.default_rng(10)
    kv = oracle.random_records(rng, 40, pow2=False)
    oracle.set_scale(kv, 4, 2, scale)
    kv[4, 256:384] |= 1
    q = random_query(rng, 2, 16)
    q[..., 256:384] = 0
    check(q, kv, [np.arange(3, 30), np.arange(10, 40)], scale_format="float32")


@pytest.mark.parametrize("partial", [False, True])
def test_mixed_scales_under_a_balanced_softmax(partial):
    rng = np.random.default_rng(11)
    kv = oracle.random_records(rng, ROWS, exponents=range(-20, 21))
    # The query sees the rope part alone, so that the scales do not unbalance the weights.
    q = random_query(rng, 2, 16)
    q[..., :512] = 0
    check(q, kv, draw(rng, [128, 300]), partial=partial)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1.0, 8.0, 0.1])
def test_long_rows_meet_the_project_s_numbers(size):
    rng = np.random.default_rng(22)
    kv = oracle.random_records(rng, 4096)
    check(random_query(rng, 1, 16, size), kv, draw(rng, [2048], 4096), 0.02 / max(size, 1.0))


@pytest.mark.slow
def test_long_rows_of_mixed_scales_meet_the_project_s_numbers():
    rng = np.random.default_rng(23)
    kv = oracle.random_records(rng, 4096, exponents=range(-20, 21))
    q = random_query(rng, 2, 16)
    q[..., :512] = 0
    check(q, kv, draw(rng, [2048, 2048], 4096), 0.05)


def test_weight_and_scale_that_cancel():
    """Entries of tiny weight and huge scale: what counts is the product."""
    rng = np.random.default_rng(12)
    kv = oracle.random_records(rng, 64, exponents=[0])
    q = random_query(rng, 1, 16, 0.1)
    q[..., 512:] = 0
    q[..., 512] = 1
    rope = np.zeros((64, 64))
    rope[:, 0] = np.where(np.arange(64) % 2, -14.0, 0.0)
    scales = np.where(np.arange(64)[:, None] % 2, 2.0**20, 1.0) * np.ones((64, 4))
    kv = oracle.join_records(kv[:, :512], scales, rope)
    q[..., :512] = 0
    check(q, kv, [np.arange(64)], 1.0)


@pytest.mark.parametrize("size", [8.0, 0.1])
def test_large_and_small_queries(size):
    rng = np.random.default_rng(13)
    kv = oracle.random_records(rng, ROWS)
    check(random_query(rng, 1, 16, size), kv, draw(rng, [260]))


@pytest.mark.parametrize("scale", [0.0, -0.05, 3e-39, 1.0])
def test_softmax_scales(scale):
    rng = np.random.default_rng(14)
    kv = oracle.random_records(rng, ROWS)
    row = draw(rng, [140])[0]
    row[::7] = -1
    check(random_query(rng, 1, 16), kv, [row], scale)


def test_growing_scores_rescale_the_output():
    """Each tile outweighs the one before by more than the sums have room for."""
    rng = np.random.default_rng(15)
    kv = oracle.random_records(rng, 384)
    rope = np.zeros((384, 64))
    rope[:, 0] = np.arange(384) // 128 * 90.0
    kv = oracle.join_records(kv[:, :512], np.ones((384, 4)), rope)
    q = random_query(rng, 2, 16, 0.02)
    q[..., 512:] = 0
    q[0, :, 512] = 1
    q[1, :, 512] = -1
    check(q, kv, [np.arange(384)] * 2, 1.0)


@pytest.mark.parametrize("size", [1e9, 1e30])
def test_scores_beyond_float32_s_precision_are_nan(size):
    """Out and lse alike: an answer without a correct digit must not look like one."""
    rng = np.random.default_rng(20)
    kv = oracle.random_records(rng, ROWS)
    q = random_query(rng, 2, 16, size)
    q[1] = random_query(rng, 1, 16)[0]
    entries = draw(rng, [140, 140])
    out, lse, _ = launch(q, kv, *rows_of(entries), SCALE)
    assert np.isnan(out[0].astype(np.float32)).all()
    assert np.isnan(lse[0]).all()
    expected = oracle.attention(q[1:], kv, entries[1:], SCALE)
    oracle.check(out[1:], lse[1:], expected)


def test_split_rows_share_a_query():
    rng = np.random.default_rng(16)
    kv = oracle.random_records(rng, ROWS)
    entries = draw(rng, [50, 0, 129, 20, 3, 60])
    q = random_query(rng, 2, 16)
    out, lse, _ = launch(q, kv, *rows_of(entries), SCALE, num_splits=3, partial=True)
    expected = oracle.attention(np.repeat(q, 3, axis=0), kv, entries, SCALE)
    oracle.check(out, lse, expected)


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(17)
    kv = oracle.random_records(rng, ROWS)
    entries = draw(rng, [150, 7, 90])
    q = random_query(rng, 3, 16)
    out, lse, _ = launch(q, kv, *rows_of(entries), SCALE)
    for row in range(3):
        alone = launch(q[row : row + 1], kv, *rows_of(entries[row : row + 1]), SCALE)
        assert np.array_equal(alone[0][0].view(np.uint16), out[row].view(np.uint16))
        assert np.array_equal(alone[1][0], lse[row])


def test_has_invalid_never_changes_a_bit():
    rng = np.random.default_rng(22)
    kv = oracle.random_records(rng, ROWS)
    entries = [np.concatenate([draw(rng, [n])[0], np.full(300, -1)]) for n in (0, 20, 130)]
    q = random_query(rng, 3, 16)
    hinted, plain = (launch(q, kv, *rows_of(entries), SCALE, has_invalid=x) for x in (True, False))
    assert np.array_equal(hinted[0].view(np.uint16), plain[0].view(np.uint16))
    assert np.array_equal(hinted[1], plain[1])
    oracle.check(*hinted[:2], oracle.attention(q, kv, entries, SCALE))


def test_the_last_of_8192_rows_equals_the_first():
    rng = np.random.default_rng(23)
    kv = oracle.random_records(rng, ROWS)
    rows = 8192
    indices = rng.integers(0, ROWS, 150).astype(np.int32)
    bounds = np.zeros(rows, np.int32), np.full(rows, len(indices), np.int32)
    q = np.repeat(random_query(rng, 1, 2), rows, axis=0)
    out, lse, _ = launch(q, kv, indices, *bounds, SCALE, workgroups=[0, rows - 1])
    assert np.array_equal(out[0].view(np.uint16), out[-1].view(np.uint16))
    assert np.array_equal(lse[0], lse[-1])
    oracle.check(out[-1:], lse[-1:], oracle.attention(q[:1], kv, [indices], SCALE))


def test_a_row_s_head_groups_are_on_one_xcd():
    """Workgroups that differ by a multiple of 8 are on one XCD; every (row, group) is done once."""
    rng = np.random.default_rng(18)
    kv = oracle.random_records(rng, ROWS)
    entries = draw(rng, [3] * 9)
    q = random_query(rng, 9, 40)
    written: dict[int, set[tuple[int, int]]] = {}
    for workgroup in range(contract.num_workgroups(9, 40)):
        out, _, _ = launch(q, kv, *rows_of(entries), SCALE, workgroups=[workgroup])
        rows, heads = np.nonzero(~np.isnan(out[..., 0].astype(np.float32)))
        for row, head in zip(rows.tolist(), heads.tolist(), strict=True):
            written.setdefault(row, set()).add((head, workgroup % 8))
    for row in range(9):
        assert {head for head, _ in written[row]} == set(range(40))
        assert len(written[row]) == 40
        assert len({xcd for _, xcd in written[row]}) == 1


@pytest.mark.parametrize("order", ["reversed", *range(3)])
@pytest.mark.parametrize("scale_format", ["pow2", "float32"])
def test_wave_orders(order, scale_format):
    rng = np.random.default_rng(19)
    kv = oracle.random_records(rng, ROWS, pow2=scale_format == "pow2")
    entries = draw(rng, [300])
    check(
        random_query(rng, 1, 16), kv, entries, scale_format=scale_format, order=order, switch="wait"
    )


@pytest.mark.slow
@pytest.mark.parametrize("order", range(20))
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("scale_format", ["pow2", "float32"])
def test_random_wave_orders(order, scale_format, partial):
    rng = np.random.default_rng(20)
    kv = oracle.random_records(rng, ROWS, pow2=scale_format == "pow2")
    entries = draw(rng, [300])
    check(
        random_query(rng, 1, 16),
        kv,
        entries,
        scale_format=scale_format,
        partial=partial,
        order=order,
        switch="wait",
    )


def test_addresses_beyond_32_bits():
    """Records past 5 GiB, rows of q and out past 2^32 bytes and 2^31 elements: only what is used
    exists."""
    rng = np.random.default_rng(21)
    heads, rows, row = 128, 40000, 39995
    slots = np.array([2**31 // 656, 2**31 // 656 + 1, 2**32 // 656, 2**32 // 656 + 1, 8_500_000, 0])
    records = oracle.random_records(rng, len(slots))
    q = random_query(rng, 1, heads)
    memory, base = Memory(), 0x1000_0000_0000
    pointers = {name: base + (i << 36) for i, name in enumerate(("q", "kv", "out", "lse"))}
    out = np.zeros((heads, 512), ml_dtypes.bfloat16)
    lse = np.zeros(heads, np.float32)
    at = {"q": heads * 576 * 2, "out": heads * 512 * 2, "lse": heads * 4}
    for name, array in (("q", q.view(np.uint16)), ("out", out.view(np.uint16)), ("lse", lse)):
        place = pointers[name] + row * at[name]
        memory.map(array, name=name, address=place, writable=name != "q")
    # Neighbours share a page of the cache; each record is mapped by itself.
    for slot, record in zip(slots.tolist(), records, strict=True):
        memory.map(record.copy(), name=f"kv {slot}", address=pointers["kv"] + slot * 656)
    begin = np.zeros(rows, np.int32)
    end = np.zeros(rows, np.int32)
    end[row] = len(slots)
    arguments = pack(
        q_latent=pointers["q"],
        q_rope=pointers["q"] + 1024,
        kv=pointers["kv"],
        indices=memory.map(slots.astype(np.int32), name="indices"),
        row_begin=memory.map(begin, name="row_begin"),
        row_end=memory.map(end, name="row_end"),
        out=pointers["out"],
        lse=pointers["lse"],
        q_latent_row_stride=heads * 576,
        q_latent_head_stride=576,
        q_rope_row_stride=heads * 576,
        q_rope_head_stride=576,
        scale_log2e=SCALE * LOG2E,
        num_rows=rows,
        num_heads=heads,
        num_splits=1,
        kv_rows=8_500_001,
        num_indices=len(slots),
        flags=0,
    )
    groups = heads // 16
    first = row // 8 * 8 * groups + row % 8
    run(
        kernel(Specialisation("pow2", False)),
        grid=(contract.num_workgroups(rows, heads), 1, 1),
        block=(256, 1, 1),
        args=arguments,
        memory=memory,
        workgroups=[first + 8 * group for group in range(groups)],
    )
    expected = oracle.attention(q, records, [np.arange(len(slots))], SCALE)
    oracle.check(out[None], lse[None], expected)
