"""Programs that leave the process: export, loading without FlyDSL and torch, compilation cache."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_process import Child, on_devices
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import SCALE, Problem

import jax_sparse_mla as jsm

# On the simulator a tile of one workgroup takes tens of milliseconds.
IMPLEMENTATIONS = ("reference", pytest.param("kernel", marks=pytest.mark.slow))
CHECKS = [
    export.DisabledSafetyCheck.custom_call(jsm.KERNEL_TARGET),
    export.DisabledSafetyCheck.platform(),  # to run the rocm lowering on the CPU
]

WITHOUT_COMPILERS = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flydsl", "torch", "triton"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture(scope="module")
def bare_process():
    """A process with eight devices that cannot import FlyDSL or torch."""
    child = Child(8, prelude=WITHOUT_COMPILERS)
    yield child
    child.stop()


def attend(implementation):
    def run(q, kv, indices, lengths, sink):
        return jsm.sparse_mla_fwd(
            q,
            kv,
            None,
            indices,
            SCALE,
            row_lengths=lengths,
            attn_sink=sink,
            return_lse=True,
            implementation=implementation,
        )

    return run


def small_problem():
    return Problem(n=3, heads=4, records=64, width=40)


def arguments(problem):
    return problem.q, problem.kv, problem.indices, problem.lengths, problem.sink


def load_and_run(serialized, args):
    """In the bare process: nothing but JAX and the kernel's registration is needed."""
    assert not {"flydsl", "torch"} & set(sys.modules)
    jsm.register_kernel()
    results = export.deserialize(bytearray(serialized)).call(*args)
    assert not {"flydsl", "torch"} & set(sys.modules)
    return [np.asarray(x) for x in results]


def bare_process_really_is_bare():
    for name in ("flydsl", "torch"):
        with pytest.raises(ImportError, match="not installed here"):
            __import__(name)


def test_the_bare_process_cannot_import_flydsl_or_torch(bare_process):
    bare_process.call(bare_process_really_is_bare)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("platforms", [("cpu",), ("rocm",), ("cpu", "rocm")])
def test_export_runs_in_a_fresh_process(bare_process, platforms, implementation):
    problem = small_problem()
    exported = export.export(
        jax.jit(attend(implementation)), platforms=platforms, disabled_checks=CHECKS
    )(*arguments(problem))
    assert (jsm.KERNEL_TARGET in exported.mlir_module()) == (implementation == "kernel")
    got = bare_process.call(load_and_run, bytes(exported.serialize()), arguments(problem))
    problem.check(got, sink=True)


@pytest.mark.slow
def test_by_default_rocm_gets_the_kernel_and_the_cpu_the_reference(bare_process):
    problem = small_problem()
    for platforms, has_kernel in (("rocm",), True), (("cpu",), False), (("cpu", "rocm"), True):
        exported = export.export(
            jax.jit(attend(None)), platforms=platforms, disabled_checks=CHECKS
        )(*arguments(problem))
        assert (jsm.KERNEL_TARGET in exported.mlir_module()) == has_kernel
        got = bare_process.call(load_and_run, bytes(exported.serialize()), arguments(problem))
        problem.check(got, sink=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_and_entries_of_any_number(implementation):
    """One export serves every batch: n and nnz are symbolic."""

    def run(q, kv, indptr, indices):
        return jsm.sparse_mla_fwd(
            q, kv, indptr, indices, SCALE, return_lse=True, implementation=implementation
        )

    scope = export.SymbolicScope()

    def argument(shape, dtype):
        return jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype)

    platforms = ("cpu", "rocm") if implementation == "kernel" else ("cpu", "cuda", "rocm")
    exported = export.export(jax.jit(run), platforms=platforms, disabled_checks=CHECKS)(
        argument("n, 4, 576", jnp.bfloat16),
        argument("records, 656", jnp.uint8),
        argument("n + 1", jnp.int32),
        argument("nnz", jnp.int32),
    )
    loaded = export.deserialize(exported.serialize())
    for n, records, width in ((1, 30, 20), (5, 64, 40)):
        problem = Problem(n=n, heads=4, records=records, width=width)
        problem.check(loaded.call(problem.q, problem.kv, problem.indptr, problem.stream))


def symbolic(shape, dtype, scope=export.SymbolicScope()):  # noqa: B008 one scope for all on purpose
    return jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (
            jsm.write_records,
            [("r, 656", "uint8"), ("t", "int32"), ("t, 512", "float32"), ("t, 64", "float32")],
        ),
        (jsm.unpack_records, [("r, 656", "uint8")]),
        (jsm.repack_records, [("r, 656", "uint8")]),
        (jsm.padded_to_csr, [("n, w", "int32")]),
        (jsm.compact_rows, [("n, w", "int32"), ("n", "int32")]),
        (jsm.compact_csr, [("n + 1", "int32"), ("z", "int32")]),
        (functools.partial(jsm.csr_to_padded, width=16), [("n + 1", "int32"), ("z", "int32")]),
        (functools.partial(jsm.split_rows, num_splits=3), [("n", "int32"), ("n", "int32")]),
        (
            functools.partial(jsm.block_table_to_slots, block_size=16),
            [("r, m", "int32"), ("n, w", "int32"), ("n", "int32")],
        ),
        (jsm.merge_attention, [("p, n, h, 512", "float32"), ("p, n, h", "float32")]),
        (jsm.apply_sink, [("n, h, 512", "float32"), ("n, h", "float32"), ("h", "float32")]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_pieces_export_with_symbolic_sizes(function, arguments):
    exported = export.export(jax.jit(function))(*(symbolic(*argument) for argument in arguments))
    sizes = {"r": 70, "m": 3, "t": 600, "n": 5, "w": 7, "z": 11, "p": 3, "h": 2}
    rng = np.random.default_rng(0)
    concrete = []
    for shape, dtype in arguments:
        dims = [eval(dim, {}, sizes) for dim in shape.split(",")]
        values = rng.integers(0, 80, dims) if "int" in dtype else rng.standard_normal(dims)
        concrete.append(values.astype(dtype))
    got = export.deserialize(exported.serialize()).call(*concrete)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(function(*concrete)), strict=True):
        np.testing.assert_array_equal(a, b)


# -- several devices


def heads_recipe(implementation, softmax_scale=SCALE):
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Auto,))

    def run(q, kv, indices, lengths):
        return jsm.sparse_mla_heads(
            q,
            kv,
            None,
            indices,
            softmax_scale,
            mesh=mesh,
            row_lengths=lengths,
            return_lse=True,
            implementation=implementation,
        )

    return run, mesh


def on_mesh(mesh, problem):
    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    q = put(problem.q, None, "tensor")
    return q, put(problem.kv), put(problem.indices), put(problem.lengths)


def context_recipe(implementation):
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))

    def run(q, kv, indices, lengths):
        return jsm.sparse_mla_context(
            q,
            kv,
            None,
            indices,
            SCALE,
            mesh=mesh,
            row_lengths=lengths,
            return_lse=True,
            implementation=implementation,
        )

    return run, mesh


def export_recipe(recipe, implementation):
    run, mesh = recipe(implementation)
    problem = Problem(n=2, heads=8, records=64, width=40)
    args = place_for(recipe, mesh, problem)
    exported = export.export(jax.jit(run), platforms=("cpu", "rocm"), disabled_checks=CHECKS)(*args)
    assert exported.nr_devices == 8
    return bytes(exported.serialize())


def place_for(recipe, mesh, problem):
    if recipe is heads_recipe:
        return on_mesh(mesh, problem)
    cache = jax.device_put(problem.kv, NamedSharding(mesh, P("context")))
    return problem.q, cache, problem.indices, problem.lengths


def run_exported_recipe(serialized, recipe):
    assert not {"flydsl", "torch"} & set(sys.modules)
    jsm.register_kernel()
    _, mesh = recipe("reference")
    problem = Problem(n=2, heads=8, records=64, width=40)
    loaded = export.deserialize(bytearray(serialized))
    got = jax.jit(loaded.call)(*place_for(recipe, mesh, problem))
    problem.check(got)
    assert len(got[0].sharding.device_set) == 8


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("recipe", [heads_recipe, context_recipe])
def test_recipes_export_from_several_devices(bare_process, recipe, implementation):
    exporter = Child(8)
    serialized = exporter.call(export_recipe, recipe, implementation)
    exporter.stop()
    bare_process.call(run_exported_recipe, serialized, recipe)


# -- the persistent compilation cache


def compile_recipe(recipe, softmax_scale=None, implementation="reference"):
    """Compile and run a recipe; the hits and requests that JAX counts for it."""
    counts = {"cache_hits": 0, "compile_requests_use_cache": 0}

    def listen(event, **_):
        name = event.rpartition("/")[2]
        if name in counts:
            counts[name] += 1

    make = functools.partial(recipe, softmax_scale=softmax_scale) if softmax_scale else recipe
    run, mesh = make(implementation)
    problem = Problem(n=2, heads=8, records=64, width=40)
    args = place_for(recipe, mesh, problem)
    jax.monitoring.register_event_listener(listen)
    got = jax.jit(run)(*args)
    expected = oracle.attention(problem.q, problem.kv, problem.rows, softmax_scale or SCALE)
    oracle.check(*got, expected)
    return counts["cache_hits"], counts["compile_requests_use_cache"]


@pytest.mark.parametrize(
    ("recipe", "implementation"),
    [
        (heads_recipe, "reference"),
        pytest.param(heads_recipe, "kernel", marks=pytest.mark.slow),
        pytest.param(context_recipe, "kernel", marks=pytest.mark.slow),
    ],
)
def test_a_second_process_hits_the_compilation_cache(tmp_path, recipe, implementation):
    env = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    outcomes = []
    entries = []
    for softmax_scale in (None, None, 0.03 if recipe is heads_recipe else None):
        child = Child(8, env=env)
        outcomes.append(child.call(compile_recipe, recipe, softmax_scale, implementation))
        child.stop()
        entries.append({re.sub("-atime$", "", path.name) for path in tmp_path.iterdir()})
    (hits, requests), (second_hits, second_requests), (third_hits, third_requests) = outcomes
    assert hits < requests  # the first process compiled
    assert second_hits == second_requests == requests
    assert entries[1] == entries[0]
    if recipe is heads_recipe:  # another option is another program
        assert third_hits < third_requests
        assert entries[2] > entries[1]


@on_devices(8)
def test_what_the_partitioner_placed_cannot_be_exported():
    """Why the recipes are there: JAX does not serialise custom_partitioning on several devices."""
    problem = Problem(n=2, heads=8, records=64, width=40)
    _, mesh = heads_recipe("reference")
    exported = None
    with pytest.raises(Exception, match=r"not yet implemented|[Cc]annot serialize|custom call"):
        exported = export.export(jax.jit(attend("reference")))(
            *on_mesh(mesh, problem), problem.sink
        ).serialize()
    assert exported is None
