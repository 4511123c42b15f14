"""The op on meshes: automatic, explicit and manual, with rows, heads and batches sharded.

Every program is compiled for eight host devices, its HLO is searched for collectives, and its
result is compared with the oracle's.
"""

import functools
import inspect
import re

import jax
import numpy as np
import oracle
import pytest
from device_process import on_devices
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_attention import SCALE, lengths_to_indptr, queries

from jax_sparse_mla import sparse_mla_fwd

COLLECTIVE = re.compile(
    r"= (\S+) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
)
N, HEADS, ROWS, WIDTH, BATCH = 16, 16, 304, 256, 4


def on_meshes(test):
    """Run a test for an automatic and an explicit mesh of eight devices."""

    @functools.wraps(test)
    def run(self, kind, **kwargs):
        types = (AxisType.Auto if kind == "automatic" else AxisType.Explicit,) * 2
        mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=types)
        with jax.set_mesh(mesh):
            test(self, mesh, **kwargs)

    parameters = list(inspect.signature(test).parameters.values())
    parameters[1] = parameters[1].replace(name="kind")
    run.__signature__ = inspect.Signature(parameters)
    return pytest.mark.parametrize("kind", ["automatic", "explicit"])(on_devices(8)(run))


def attend(q, kv, indices, lengths):
    return sparse_mla_fwd(q, kv, None, indices, SCALE, row_lengths=lengths, return_lse=True)


def operands():
    rng = np.random.default_rng(0)
    q, kv = queries(rng, N, HEADS), oracle.random_records(rng, ROWS)
    indices = rng.integers(-20, ROWS + 20, (N, WIDTH)).astype(np.int32)
    return q, kv, indices, rng.integers(0, WIDTH, N).astype(np.int32)


def expected(q, kv, indices, lengths):
    return oracle.attention(q, kv, oracle.padded_rows(indices, lengths), SCALE)


def run(call, mesh, specs, args):
    """The results, and the shapes that collectives move."""
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)
    ]
    compiled = jax.jit(call).lower(*placed).compile()
    return compiled(*placed), COLLECTIVE.findall(compiled.as_text())


SPECS = {
    "heads": (P(None, "tensor"), P(), P(), P()),
    "rows": (P("data"), P(), P("data"), P("data")),
    "rows and heads": (P("data", "tensor"), P(), P("data"), P("data")),
    "rows over both axes": (
        P(("data", "tensor")),
        P(),
        P(("data", "tensor")),
        P(("data", "tensor")),
    ),
    "rows of q only": (P("data"), P(), P(), P()),
}


class TestOneCache:
    @pytest.mark.parametrize("sharded", SPECS)
    @on_meshes
    def test_rows_and_heads_stay_local(self, mesh, sharded):
        args, specs = operands(), SPECS[sharded]
        (out, lse), moved = run(attend, mesh, specs, args)
        assert not moved
        oracle.check(out, lse, expected(*args))
        assert tuple(out.sharding.spec)[:2] in (tuple(specs[0])[:2], (*specs[0], None))

    @on_meshes
    def test_the_pair_stays_local(self, mesh):
        q, *rest = operands()
        specs = (P("data", "tensor"), P("data", "tensor"), P(), P("data"), P("data"))
        args = (q[..., :512], q[..., 512:], *rest)
        (out, lse), moved = run(lambda a, b, *rest: attend((a, b), *rest), mesh, specs, args)
        assert not moved
        oracle.check(out, lse, expected(q, *rest))

    @on_meshes
    def test_a_sharded_stream_moves_indices_only(self, mesh):
        q, kv, indices, lengths = operands()
        rows = oracle.padded_rows(indices, lengths)
        stream = np.concatenate(rows)
        stream = np.pad(stream, (0, -len(stream) % 8), constant_values=-1)
        (out, lse), moved = run(
            lambda q, kv, i, p: sparse_mla_fwd(q, kv, p, i, SCALE, return_lse=True),
            mesh,
            (P("data", "tensor"), P(), P(("data", "tensor")), P()),
            (q, kv, stream, lengths_to_indptr(lengths)),
        )
        assert all(shape.startswith("s32") for shape in moved), moved
        oracle.check(out, lse, oracle.attention(q, kv, rows, SCALE))

    @on_meshes
    def test_a_sharded_cache_is_gathered_and_right(self, mesh):
        """Whoever shards the cache's rows without the context-parallel recipe gets the truth."""
        args = operands()
        (out, lse), moved = run(attend, mesh, (P(), P("data"), P(), P()), args)
        assert moved
        oracle.check(out, lse, expected(*args))

    @on_meshes
    def test_a_call_outside_jit_stays_sharded(self, mesh):
        args = operands()
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(args, SPECS["rows and heads"], strict=True)
        ]
        out, lse = attend(*placed)
        assert tuple(out.sharding.spec)[:2] == ("data", "tensor")
        oracle.check(out, lse, expected(*args))


def batch():
    q, kv, indices, lengths = operands()
    return (
        np.stack([np.roll(q, i, 0) for i in range(BATCH)]),
        np.stack([np.roll(kv, i, 0) for i in range(BATCH)]),
        np.stack([np.roll(indices, i, 1) for i in range(BATCH)]),
        np.stack([np.roll(lengths, i, 0) for i in range(BATCH)]),
    )


class TestDataParallelCaches:
    """vmap over caches of their own: each device reads its own cache, and none is moved."""

    def check(self, results, args):
        for i in range(BATCH):
            out, lse = (np.asarray(x)[i] for x in results)
            oracle.check(out, lse, expected(*(x[i] for x in args)))

    @on_meshes
    def test_everything_sharded_by_the_mapped_axis(self, mesh):
        args = batch()
        results, moved = run(jax.vmap(attend), mesh, (P("tensor"),) * 4, args)
        assert not moved
        self.check(results, args)

    @on_meshes
    def test_rows_sharded_too(self, mesh):
        args = batch()
        both = P("tensor", "data")
        results, moved = run(jax.vmap(attend), mesh, (both, P("tensor"), both, both), args)
        assert not moved
        self.check(results, args)

    @on_meshes
    def test_shared_indices(self, mesh):
        q, kv, indices, lengths = batch()
        call = jax.vmap(attend, in_axes=(0, 0, None, None))
        args = (q, kv, indices[0], lengths[0])
        results, moved = run(call, mesh, (P("tensor"), P("tensor"), P(), P()), args)
        assert not moved
        repeat = [np.stack([x] * BATCH) for x in args[2:]]
        self.check(results, (q, kv, *repeat))

    @on_meshes
    def test_nested(self, mesh):
        q, kv, indices, lengths = batch()
        inner = jax.vmap(attend, in_axes=(0, None, 0, 0))
        q, indices, lengths = (np.stack([x, x]) for x in (q, indices, lengths))
        both = P("data", "tensor")
        results, moved = run(
            jax.vmap(inner), mesh, (both, P("data"), both, both), (q, kv[:2], indices, lengths)
        )
        assert not moved
        for i, j in (0, 0), (0, 3), (1, 2):
            out, lse = (np.asarray(x)[i, j] for x in results)
            oracle.check(out, lse, expected(q[i, j], kv[i], indices[i, j], lengths[i, j]))


class TestShardMap:
    @pytest.mark.parametrize("check_vma", [True, False])
    @on_meshes
    def test_rows_and_heads(self, mesh, check_vma):
        args, specs = operands(), SPECS["rows and heads"]
        call = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=specs,
            out_specs=(P("data", "tensor"), P("data", "tensor")),
            check_vma=check_vma,
        )
        (out, lse), moved = run(call, mesh, specs, args)
        assert not moved
        oracle.check(out, lse, expected(*args))
        text = jax.jit(call).lower(*args).as_text() if mesh.axis_types[0] == AxisType.Auto else ""
        assert "CustomSPMDPartitioning" not in text

    @on_meshes
    def test_vmap_inside(self, mesh):
        args = batch()
        specs = (P("tensor"),) * 4
        call = jax.shard_map(jax.vmap(attend), mesh=mesh, in_specs=specs, out_specs=specs[:2])
        results, moved = run(call, mesh, specs, args)
        assert not moved
        TestDataParallelCaches().check(results, args)

    @on_meshes
    def test_over_one_axis_of_two(self, mesh):
        args = operands()
        call = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=SPECS["rows"],
            out_specs=(P("data"), P("data")),
            axis_names={"data"},
        )
        (out, lse), _ = run(call, mesh, SPECS["rows and heads"], args)
        oracle.check(out, lse, expected(*args))
