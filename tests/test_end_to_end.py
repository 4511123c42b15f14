"""The whole chain on the simulator: jit, custom call, shim, HIP, machine code, result."""

import collections
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from device_process import Child
from jax import export

from jax_sparse_mla import sparse_mla_fwd
from jax_sparse_mla.kernel import compiler, shim
from jax_sparse_mla.kernel.code_object import write_folder
from jax_sparse_mla.kernel.specialisation import Specialisation

SCALE = 0.07


class Problem:
    """Four ragged rows with masked entries, and what the op must give for them."""

    def __init__(self, seed: int, heads: int = 16, records: int = 400):
        rng = np.random.default_rng(seed)
        self.q = rng.standard_normal((4, heads, 576)).astype(ml_dtypes.bfloat16)
        self.kv = oracle.random_records(rng, records)
        self.indices = rng.integers(-1, records, (4, 160)).astype(np.int32)
        self.lengths = np.array([160, 0, 1, 129], np.int32)
        self.expected = oracle.attention(
            self.q, self.kv, oracle.padded_rows(self.indices, self.lengths), SCALE
        )

    @property
    def arrays(self):
        return self.q, self.kv, self.indices, self.lengths


@pytest.fixture(scope="module")
def problem():
    return Problem(0)


def attend(q, kv, indices, lengths, implementation=None, **options):
    return sparse_mla_fwd(
        q,
        kv,
        None,
        indices,
        SCALE,
        row_lengths=lengths,
        return_lse=True,
        implementation=implementation,
        **options,
    )


def kernel(*arrays, **options):
    return attend(*arrays, implementation="kernel", **options)


def test_eager(problem):
    oracle.check(*kernel(*problem.arrays), problem.expected)


def test_jit(problem):
    lowered = jax.jit(kernel).lower(*problem.arrays)
    assert lowered.as_text().count(f"custom_call @{shim.KERNEL_TARGET}") == 1
    oracle.check(*lowered.compile()(*problem.arrays), problem.expected)


def test_csr_jit(problem):
    indptr = np.concatenate([[0], np.cumsum(problem.lengths)]).astype(np.int32)
    rows = oracle.padded_rows(problem.indices, problem.lengths)
    stream = np.concatenate(rows).astype(np.int32)
    call = jax.jit(lambda *a: sparse_mla_fwd(*a, SCALE, return_lse=True, implementation="kernel"))
    oracle.check(*call(problem.q, problem.kv, indptr, stream), problem.expected)


def test_rocm_lowering_runs_on_the_cpu(problem):
    """What a ROCm machine would run, through its own lowering rule."""
    lowered = jax.jit(attend).trace(*problem.arrays).lower(lowering_platforms=("rocm",))
    assert f"custom_call @{shim.KERNEL_TARGET}" in lowered.as_text()
    oracle.check(*lowered.compile()(*problem.arrays), problem.expected)


def test_reference_and_kernel_agree(problem):
    """Both are within tolerance of the oracle; of each other they differ by a bfloat16 step."""
    out, lse = (np.asarray(x, np.float64) for x in kernel(*problem.arrays))
    reference_out, reference_lse = (np.asarray(x, np.float64) for x in attend(*problem.arrays))
    np.testing.assert_allclose(out, reference_out, rtol=2.01 / 128, atol=1e-3)
    np.testing.assert_allclose(lse, reference_lse, rtol=8.01 / 65536, atol=1e-5)


def test_vmap_over_everything():
    problems = [Problem(seed, heads=4, records=150) for seed in range(2)]
    stacked = [np.stack(arrays) for arrays in zip(*(p.arrays for p in problems), strict=True)]
    out, lse = jax.jit(jax.vmap(kernel))(*stacked)
    for i, problem in enumerate(problems):
        oracle.check(out[i], lse[i], problem.expected)


def test_vmap_over_queries_with_one_cache(problem):
    queries = np.stack([problem.q, problem.q[::-1]])
    out, lse = jax.vmap(kernel, in_axes=(0, None, None, None))(queries, *problem.arrays[1:])
    oracle.check(out[0], lse[0], problem.expected)
    flipped = oracle.attention(
        queries[1], problem.kv, oracle.padded_rows(problem.indices, problem.lengths), SCALE
    )
    oracle.check(out[1], lse[1], flipped)


@pytest.mark.parametrize("num_splits", [1, 2, 5])
def test_splits_are_merged(problem, num_splits):
    oracle.check(*kernel(*problem.arrays, num_splits=num_splits), problem.expected)


def test_sink_is_applied_once_after_the_merge(problem):
    sink = np.linspace(-3, 3, 16).astype(np.float32)
    out, lse = jax.jit(lambda *a: kernel(*a, num_splits=3, attn_sink=sink))(*problem.arrays)
    oracle.check(out, lse, oracle.apply_sink(problem.expected, sink))


def test_float32_scales():
    rng = np.random.default_rng(1)
    kv = oracle.random_records(rng, 100, pow2=False)
    problem = Problem(1, heads=3, records=100)
    expected = oracle.attention(
        problem.q,
        kv,
        oracle.padded_rows(problem.indices, problem.lengths),
        SCALE,
        scale_format="float32",
    )
    arrays = (problem.q, kv, problem.indices, problem.lengths)
    oracle.check(*kernel(*arrays, scale_format="float32"), expected)


@pytest.mark.parametrize(
    ("n", "width", "records"),
    [(0, 5, 10), (3, 0, 10), (3, 5, 0)],
    ids=["rows", "entries", "records"],
)
def test_nothing_to_do(n, width, records):
    q = jnp.ones((n, 2, 576), jnp.bfloat16)
    indices = jnp.zeros((n, width), jnp.int32)
    lengths = jnp.full((n,), width, jnp.int32)
    out, lse = kernel(q, jnp.zeros((records, 656), jnp.uint8), indices, lengths)
    np.testing.assert_array_equal(out, np.zeros((n, 2, 512)))
    np.testing.assert_array_equal(lse, np.full((n, 2), -np.inf))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("implementation", ["reference", "kernel"])
@pytest.mark.parametrize("columns", [slice(0, 512), slice(512, 576)], ids=["latent", "rope"])
def test_a_query_of_minus_infinities_is_nan(problem, columns, implementation, num_splits):
    """Though its logits may be -inf in every entry, it is no row without entries."""
    q = problem.q.copy()
    q[0, 2, columns] = -np.inf
    # All of one sign: no sum of infinities makes a NaN by itself.
    kv = problem.kv.copy()
    kv[:, :512] &= 0x7F
    kv[:, 529:656:2] &= 0x7F
    arrays = (q, kv, problem.indices, problem.lengths)
    rows = oracle.padded_rows(problem.indices, problem.lengths)
    expected = oracle.attention(q, kv, rows, SCALE)
    assert np.isnan(expected.lse).sum() == 1
    oracle.check(*attend(*arrays, implementation, num_splits=num_splits), expected)


@pytest.mark.parametrize("implementation", ["reference", "kernel"])
def test_entries_whose_logits_are_minus_infinity_weigh_nothing(problem, implementation):
    q = np.abs(problem.q)
    kv = problem.kv.copy()
    kv[::2, 528:] = np.full(64, -np.inf, ml_dtypes.bfloat16).view(np.uint8)
    indices = problem.indices.copy()
    indices[:, 0] = 1
    expected = oracle.attention(q, kv, oracle.padded_rows(indices, problem.lengths), SCALE)
    assert not np.isnan(expected.lse).any()
    oracle.check(*attend(q, kv, indices, problem.lengths, implementation), expected)


def test_inside_a_larger_program(problem):
    """Between other operations, in a scan, with the kernel called more than once."""

    @jax.jit
    def program(q, kv, indices, lengths):
        def layer(q, _):
            out, lse = kernel(q, kv, indices, lengths)
            return q.at[..., :512].add(out), lse

        return jax.lax.scan(layer, q, length=2)

    q, lses = program(*problem.arrays)
    expected = problem.expected
    oracle.check(np.asarray(problem.expected.out), lses[0], expected)
    second = problem.q.copy()
    second[..., :512] = q_after(problem)
    again = oracle.attention(
        second, problem.kv, oracle.padded_rows(problem.indices, problem.lengths), SCALE
    )
    np.testing.assert_allclose(lses[1], again.lse, rtol=2e-2, atol=5e-2)
    assert np.isfinite(np.asarray(q, np.float32)).all()


def q_after(problem):
    out = problem.expected.out.astype(ml_dtypes.bfloat16)
    return problem.q[..., :512] + out


def test_export_carries_the_kernel(problem):
    exported = export.export(
        jax.jit(attend),
        platforms=("cpu", "rocm"),
        disabled_checks=[export.DisabledSafetyCheck.custom_call(shim.KERNEL_TARGET)],
    )(*problem.arrays)
    again = export.deserialize(exported.serialize())
    assert b"ELF" in again.mlir_module_serialized
    oracle.check(*again.call(*problem.arrays), problem.expected)


def run_counted():
    """Compile and run; how many programs JAX looked for in its cache, and how many it found."""
    counts = collections.Counter()
    jax.monitoring.register_event_listener(
        lambda event, **_: counts.update([event.rpartition("/")[2]])
    )
    problem = Problem(0, heads=4)
    oracle.check(
        *jax.jit(functools.partial(kernel, num_splits=1))(*problem.arrays), problem.expected
    )
    return counts["compile_requests_use_cache"], counts["cache_hits"]


@pytest.mark.slow
def test_another_code_object_is_another_program_in_the_compilation_cache(tmp_path):
    specialisation = Specialisation("pow2", partial=False)
    first = compiler.code_object(specialisation)
    # What follows an ELF's sections belongs to none, so that only the hash is another.
    second = first._replace(code=first.code + bytes(16))
    for name, code in ("first", first), ("second", second):
        write_folder(tmp_path / name, {specialisation: code}, compiler.source_hash())
    missed = []
    for name in ("first", "first", "second", "first", "second"):
        child = Child(
            env={
                "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
                compiler.PRECOMPILED_VARIABLE: str(tmp_path / name),
            }
        )
        requests, hits = child.call(run_counted)
        child.stop()
        missed.append(requests - hits)
    assert missed[0] >= 1
    assert missed[1:] == [0, 1, 0, 0]
