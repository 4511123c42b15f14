"""What is lowered for a device: the choice of kernel or reference, splits, and their merge.

The kernel's launch is replaced by the reference here, so that the seam to it is tested alone.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from test_attention import SCALE, queries

import jax_sparse_mla.kernel.launch
from jax_sparse_mla import platform, sparse_mla_fwd
from jax_sparse_mla.attention import sparse_mla_partial
from jax_sparse_mla.kernel import shim
from jax_sparse_mla.lowering import MAX_SPLITS, choose_num_splits
from jax_sparse_mla.reference import sparse_mla_reference


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def launches(monkeypatch):
    """Replaces the launch by the reference; gives the options of every launch lowered."""
    seen = []

    def sparse_mla_call(q_latent, q_rope, kv, indices, row_begin, row_end, **options):
        m = row_begin.shape[0]
        assert row_end.shape == (m,)
        assert m == q_latent.shape[0] * options["num_splits"]
        seen.append(options | {"shapes": (q_latent.shape, q_rope.shape, kv.shape, indices.shape)})
        repeat = lambda q: jnp.repeat(q, options["num_splits"], 0)  # noqa: E731
        return sparse_mla_reference(
            repeat(q_latent),
            repeat(q_rope),
            kv,
            indices,
            row_begin,
            row_end,
            softmax_scale=options["softmax_scale"],
            scale_format=options["scale_format"],
            partial=options["partial"],
            width=indices.shape[0],
        )

    jax.clear_caches()
    monkeypatch.setattr(jax_sparse_mla.kernel.launch, "sparse_mla_call", sparse_mla_call)
    yield seen
    jax.clear_caches()


def problem(rng, n=3, heads=4):
    q, kv = queries(rng, n, heads), oracle.random_records(rng, 90)
    indices = rng.integers(-9, 95, (n, 700)).astype(np.int32)
    lengths = rng.permutation(np.r_[0, 1, rng.integers(100, 701, n)])[:n].astype(np.int32)
    return q, kv, indices, lengths


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 64])
def test_splits_are_merged(rng, launches, num_splits):
    q, kv, indices, lengths = problem(rng)
    expected = oracle.attention(q, kv, oracle.padded_rows(indices, lengths), SCALE)
    out, lse = sparse_mla_fwd(
        q,
        kv,
        None,
        indices,
        SCALE,
        row_lengths=lengths,
        return_lse=True,
        num_splits=num_splits,
        implementation="kernel",
    )
    assert out.dtype == jnp.bfloat16
    oracle.check(out, lse, expected)
    (launch,) = launches
    assert launch["num_splits"] == num_splits
    assert launch["partial"] == (num_splits > 1)
    # A whole q goes as both operands: nothing was sliced.
    assert launch["shapes"] == ((3, 4, 576), (3, 4, 576), (90, 656), (2100,))


def test_partial_results_of_a_split_stay_float32(rng, launches):
    q, kv, indices, lengths = problem(rng)
    options = {"row_lengths": lengths, "num_splits": 3, "implementation": "kernel"}
    out, lse = sparse_mla_partial(q, kv, None, indices, SCALE, **options)
    expected = oracle.attention(q, kv, oracle.padded_rows(indices, lengths), SCALE)
    assert out.dtype == jnp.float32
    oracle.check(out, lse, expected)
    np.testing.assert_allclose(out, expected.out, rtol=0, atol=2e-5)


def test_the_number_of_splits_is_chosen_from_sizes_and_device(rng, launches, monkeypatch):
    q, kv, indices, lengths = problem(rng)
    monkeypatch.setattr(platform, "core_count", lambda: 14)
    sparse_mla_fwd(q, kv, None, indices, SCALE, row_lengths=lengths, implementation="kernel")
    assert launches[0]["num_splits"] == choose_num_splits(3, 4, 2100, 14) == 4


def test_batches_reach_the_kernel_as_one_launch(rng, launches):
    q, kv, indices, lengths = problem(rng, n=6)
    q, indices, lengths = (x.reshape(2, 3, *x.shape[1:]) for x in (q, indices, lengths))
    kv = np.stack([kv, kv[::-1]])
    call = jax.vmap(
        lambda q, kv, i, n: sparse_mla_fwd(
            q, kv, None, i, SCALE, row_lengths=n, return_lse=True, implementation="kernel"
        )
    )
    results = call(q, kv, indices, lengths)
    assert launches[0]["shapes"][2:] == ((180, 656), (4200,))
    for i in range(2):
        rows = oracle.padded_rows(indices[i], lengths[i])
        out, lse = (np.asarray(x[i]) for x in results)
        oracle.check(out, lse, oracle.attention(q[i], kv[i], rows, SCALE))


def test_nothing_to_do_launches_nothing(rng, launches):
    q, kv, indices, _ = problem(rng)
    for n, rows, width in (0, 90, 5), (3, 0, 5), (3, 90, 0):
        out, lse = sparse_mla_fwd(
            q[:n],
            kv[:rows],
            None,
            indices[:n, :width],
            SCALE,
            return_lse=True,
            implementation="kernel",
        )
        assert (np.asarray(out) == 0).all()
        assert np.isneginf(lse).all()
    assert not launches


def lower_for_rocm(q, kv, indices, **options):
    def call(q, kv, indices):
        return sparse_mla_fwd(q, kv, None, indices, SCALE, **options)

    return jax.jit(call).trace(q, kv, indices).lower(lowering_platforms=("rocm",))


class TestChoiceOnRocm:
    def test_no_device_lowers_the_kernel(self, rng, launches):
        q, kv, indices, _ = problem(rng)
        lower_for_rocm(q, kv, indices)
        assert len(launches) == 1

    def test_another_arch_lowers_the_reference(self, rng, launches, monkeypatch):
        q, kv, indices, _ = problem(rng)
        monkeypatch.setattr(platform, "use_kernel_on_rocm", lambda: False)
        lower_for_rocm(q, kv, indices)
        assert not launches
        lower_for_rocm(q, kv, indices, implementation="kernel")
        assert len(launches) == 1

    def test_the_reference_can_be_asked_for(self, rng, launches):
        q, kv, indices, _ = problem(rng)
        lower_for_rocm(q, kv, indices, implementation="reference")
        assert not launches

    def test_an_unquantised_cache_lowers_the_reference(self, rng, launches):
        q, _, indices, _ = problem(rng)
        lower_for_rocm(q, np.zeros((90, 576), ml_dtypes.bfloat16), indices)
        assert not launches

    @pytest.mark.parametrize("target", ["cpu", "cuda"])
    def test_the_kernel_elsewhere_is_an_error_that_says_why(self, launches, monkeypatch, target):
        monkeypatch.delenv(shim.HIP_LIBRARY_VARIABLE)
        call = jax.jit(
            lambda *a: sparse_mla_fwd(a[0], a[1], None, a[2], SCALE, implementation="kernel")
        )
        traced = call.trace(*problem(np.random.default_rng(0))[:3])
        with pytest.raises(ValueError, match=r'implementation="kernel" needs an AMD gfx950 GPU'):
            traced.lower(lowering_platforms=(target,))
        assert not launches

    def test_the_cpu_gets_the_reference(self, rng, launches):
        q, kv, indices, _ = problem(rng)
        sparse_mla_fwd(q, kv, None, indices, SCALE)
        assert not launches


class TestNumberOfSplits:
    @pytest.mark.parametrize(
        ("rows", "heads", "entries", "cores", "expected"),
        [
            (1, 16, 2048, 256, 16),  # one tile of 128 a part
            (1, 16, 2049, 256, 16),
            (1, 16, 1 << 20, 256, MAX_SPLITS),
            (1, 128, 2048, 256, 16),
            (4, 128, 4 * 2048, 256, 8),  # 32 workgroups
            (8, 16, 8 * 2048, 256, 16),
            (64, 16, 64 * 2048, 256, 4),
            (64, 17, 64 * 2048, 256, 2),
            (100, 16, 100 * 2048, 256, 2),
            (129, 16, 129 * 2048, 256, 1),
            (256, 16, 256 * 2048, 256, 1),
            (8192, 128, 1 << 24, 256, 1),
            (1, 16, 100, 256, 1),
            (1, 16, 0, 256, 1),
            (0, 16, 0, 256, 1),
            (5, 0, 100, 256, 1),
            (1, 16, 2048, 1, 1),
            (1, 16, 3 * 128, 256, 2),
        ],
    )
    def test_the_rule(self, rows, heads, entries, cores, expected):
        assert choose_num_splits(rows, heads, entries, cores) == expected


def test_a_stream_the_kernel_cannot_count_is_an_error():
    q = jax.ShapeDtypeStruct((1, 1, 576), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((10, 656), jnp.uint8)
    indptr = jax.ShapeDtypeStruct((2,), jnp.int32)
    indices = jax.ShapeDtypeStruct((2**29,), jnp.int32)
    call = jax.jit(lambda *a: sparse_mla_fwd(*a, SCALE, implementation="kernel"))
    with pytest.raises(ValueError, match="kv_indices: a stream of 536870912 entries is longer"):
        call.lower(q, kv, indptr, indices)
