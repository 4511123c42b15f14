"""The op and its recipes on meshes of eight host devices; what stays local is read from the HLO."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from device_process import on_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_sparse_mla as jsm
from jax_sparse_mla import context

SCALE = 0.02
# On the simulator a tile of one workgroup takes tens of milliseconds.
IMPLEMENTATIONS = ("reference", pytest.param("kernel", marks=pytest.mark.slow))
COLLECTIVES = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)"
)


class Problem:
    """Rows of different lengths with masked entries, and the oracle's answer."""

    def __init__(self, seed=0, n=8, heads=8, records=256, width=160):
        rng = np.random.default_rng(seed)
        self.q = rng.standard_normal((n, heads, 576)).astype(ml_dtypes.bfloat16)
        self.kv = oracle.random_records(rng, records)
        self.indices = rng.integers(-1, records, (n, width)).astype(np.int32)
        self.indices[rng.random((n, width)) < 0.1] = records + 5
        self.lengths = rng.integers(0, width + 1, n).astype(np.int32)
        self.lengths[: min(n, 2)] = [width, 0][:n]
        self.sink = rng.standard_normal(heads).astype(np.float32)
        self.rows = oracle.padded_rows(self.indices, self.lengths)
        self.indptr = np.cumsum([0, *self.lengths]).astype(np.int32)
        self.stream = np.concatenate([*self.rows, np.full(3, 1)]).astype(np.int32)

    def expected(self, sink=False):
        expected = oracle.attention(self.q, self.kv, self.rows, SCALE)
        return oracle.apply_sink(expected, self.sink) if sink else expected

    def check(self, got, sink=False):
        oracle.check(*got, self.expected(sink))


def width_for(implementation):
    return 160 if implementation == "reference" else 40


def problem_for(implementation):
    return Problem(width=width_for(implementation))


def mesh_of(axis_type="Auto", **axes):
    types = (getattr(AxisType, axis_type),) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def place(mesh, array, *spec):
    return None if array is None else jax.device_put(array, NamedSharding(mesh, P(*spec)))


def compiled_collectives(function, *args):
    """The function's result on these arguments, and the collectives in its compiled program."""
    compiled = jax.jit(function).lower(*args).compile()
    found = [line.strip() for line in compiled.as_text().splitlines() if COLLECTIVES.search(line)]
    return compiled(*args), found


def biggest(collectives):
    """Elements of the largest array that any of these instructions names."""
    shapes = re.findall(r"\b[a-z]+\d+\w*\[([\d,]*)\]", " ".join(collectives))
    return max((int(np.prod([int(d) for d in s.split(",") if d])) for s in shapes), default=0)


# -- the op by itself, under jit with sharded operands


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("axes", "axis_type"),
    [
        ({"tensor": 8}, "Auto"),
        ({"data": 8}, "Explicit"),
        ({"data": 2, "tensor": 4}, "Auto"),
        ({"data": 2, "tensor": 4}, "Explicit"),
    ],
)
@on_devices(8)
def test_padded_rows_and_heads_stay_local(axes, axis_type, implementation):
    problem = problem_for(implementation)
    mesh = mesh_of(axis_type, **axes)
    data = "data" if "data" in axes else None
    tensor = "tensor" if "tensor" in axes else None
    with jax.set_mesh(mesh):
        args = (
            place(mesh, problem.q, data, tensor),
            place(mesh, problem.kv),
            place(mesh, problem.indices, data),
            place(mesh, problem.lengths, data),
            place(mesh, problem.sink, tensor),
        )

        def attend(q, kv, indices, lengths, sink):
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

        got, collectives = compiled_collectives(attend, *args)
    assert collectives == []
    problem.check(got, sink=True)
    assert got[0].sharding.spec[:2] == (data, tensor)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@on_devices(8)
def test_csr_rows_move_indices_but_never_the_cache(implementation):
    problem = Problem(records=4096, width=width_for(implementation))
    mesh = mesh_of(data=8)
    args = (
        place(mesh, problem.q, "data"),
        place(mesh, problem.kv),
        place(mesh, problem.indptr),
        place(mesh, problem.stream),
    )
    got, collectives = compiled_collectives(
        lambda q, kv, indptr, stream: jsm.sparse_mla_fwd(
            q, kv, indptr, stream, SCALE, return_lse=True, implementation=implementation
        ),
        *args,
    )
    problem.check(got)
    assert biggest(collectives) <= problem.stream.size


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@on_devices(8)
def test_vmap_over_data_parallel_caches_needs_no_collective(implementation):
    problems = [Problem(seed, n=2, heads=4, records=64, width=40) for seed in range(8)]
    mesh = mesh_of(data=8)

    def stack(name):
        return place(mesh, np.stack([getattr(p, name) for p in problems]), "data")

    attend = functools.partial(
        jsm.sparse_mla_fwd, softmax_scale=SCALE, return_lse=True, implementation=implementation
    )

    def mapped(q, kv, indices, lengths):
        return jax.vmap(
            lambda q, kv, indices, lengths: attend(q, kv, None, indices, row_lengths=lengths)
        )(q, kv, indices, lengths)

    args = [stack(name) for name in ("q", "kv", "indices", "lengths")]
    got, collectives = compiled_collectives(mapped, *args)
    assert collectives == []
    for i, problem in enumerate(problems):
        problem.check((got[0][i], got[1][i]))

    # CSR streams of the same length, one a device.
    shortest = min(p.stream.size for p in problems)
    streams = place(mesh, np.stack([p.stream[:shortest] for p in problems]), "data")
    indptrs = np.stack([np.minimum(p.indptr, shortest) for p in problems])
    got, collectives = compiled_collectives(
        jax.vmap(attend), args[0], args[1], place(mesh, indptrs, "data"), streams
    )
    assert collectives == []
    for i, problem in enumerate(problems):
        rows = oracle.csr_rows(indptrs[i], problem.stream[:shortest])
        expected = oracle.attention(problem.q, problem.kv, rows, SCALE)
        oracle.check(got[0][i], got[1][i], expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@on_devices(8)
def test_nested_and_partial_vmap_on_a_mesh(implementation):
    """Four caches, two batches of queries each, and lengths that all share."""
    problems = [Problem(seed, n=2, heads=4, records=64, width=40) for seed in range(8)]
    mesh = mesh_of(data=4, tensor=2)
    caches = np.stack([p.kv for p in problems[::2]])
    lengths = np.array([40, 23], np.int32)

    def stack(name):
        stacked = np.stack([getattr(p, name) for p in problems])
        return place(mesh, stacked.reshape(4, 2, *stacked.shape[1:]), "data", "tensor")

    def one(q, kv, indices):
        return jsm.sparse_mla_fwd(
            q,
            kv,
            None,
            indices,
            SCALE,
            row_lengths=lengths,
            return_lse=True,
            implementation=implementation,
        )

    got, collectives = compiled_collectives(
        jax.vmap(jax.vmap(one, in_axes=(0, None, 0))),
        stack("q"),
        place(mesh, caches, "data"),
        stack("indices"),
    )
    assert collectives == []
    for i, problem in enumerate(problems):
        rows = oracle.padded_rows(problem.indices, lengths)
        expected = oracle.attention(problem.q, caches[i // 2], rows, SCALE)
        oracle.check(got[0][i // 2, i % 2], got[1][i // 2, i % 2], expected)


@on_devices(8)
def test_the_collectives_would_be_seen():
    mesh = mesh_of(data=8)
    x = place(mesh, np.arange(16), "data")
    got, collectives = compiled_collectives(lambda x: x[::-1] + x.sum(), x)
    np.testing.assert_array_equal(got, np.arange(16)[::-1] + 120)
    assert collectives
    assert biggest(collectives) >= 2


@on_devices(8)
def test_the_pieces_around_the_op_stay_local_too():
    """Writes into caches sharded over ranks or rows, in place, and what is done row by row."""
    mesh = mesh_of(x=8)

    def argument(dtype, *shape, spec=()):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def compiled(function, *arguments, donate=()):
        return jax.jit(function, donate_argnums=donate).lower(*arguments).compile()

    records = 80_000
    ranks = [
        argument(jnp.uint8, 8, records // 8, 656, spec=("x",)),
        argument(jnp.int32, 8, 4, spec=("x",)),
        argument(jnp.float32, 8, 4, 512, spec=("x",)),
        argument(jnp.float32, 8, 4, 64, spec=("x",)),
    ]
    tokens = [
        argument(jnp.int32, 32),
        argument(jnp.float32, 32, 512),
        argument(jnp.float32, 32, 64),
    ]
    blocks = argument(jnp.uint8, records // 16, 16, 656, spec=("x",))
    for program in (
        compiled(jax.vmap(jsm.write_records), *ranks, donate=0),
        compiled(jsm.write_records, blocks, *tokens, donate=0),
    ):
        assert not COLLECTIVES.search(program.as_text())
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes == records // 8 * 656
        assert memory.temp_size_in_bytes < 100_000
    rows = argument(jnp.int32, 64, 2048, spec=("x",))
    of_row = argument(jnp.int32, 64, spec=("x",))
    table = argument(jnp.int32, 64, 100)
    for program in (
        compiled(jsm.compact_rows, rows, of_row),
        compiled(functools.partial(jsm.split_rows, num_splits=4), of_row, of_row),
        compiled(functools.partial(jsm.block_table_to_slots, block_size=16), table, rows, of_row),
        compiled(
            jsm.merge_attention,
            argument(jnp.float32, 4, 64, 16, 512, spec=(None, "x")),
            argument(jnp.float32, 4, 64, 16, spec=(None, "x")),
        ),
    ):
        assert not COLLECTIVES.search(program.as_text())


# -- the recipes


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("form", "pair", "axis_type"), [("padded", False, "Auto"), ("csr", True, "Explicit")]
)
@on_devices(8)
def test_heads_recipe(form, pair, axis_type, implementation):
    problem = problem_for(implementation)
    mesh = mesh_of(axis_type, tensor=8)

    def attend(q, kv, indptr, indices, lengths, sink):
        return jsm.sparse_mla_heads(
            (q[..., :512], q[..., 512:]) if pair else q,
            kv,
            indptr,
            indices,
            SCALE,
            mesh=mesh,
            row_lengths=lengths,
            attn_sink=sink,
            return_lse=True,
            implementation=implementation,
        )

    rest = (
        (None, problem.indices, problem.lengths)
        if form == "padded"
        else (problem.indptr, problem.stream, None)
    )
    got, collectives = compiled_collectives(
        attend,
        place(mesh, problem.q, None, "tensor"),
        place(mesh, problem.kv),
        *(place(mesh, x) for x in rest),
        place(mesh, problem.sink, "tensor"),
    )
    assert collectives == []
    problem.check(got, sink=True)
    assert got[0].sharding.spec[:2] == (None, "tensor")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("form", "heads", "axis_type"), [("padded", None, "Explicit"), ("csr", "tensor", "Auto")]
)
@on_devices(8)
def test_rows_recipe(form, heads, axis_type, implementation):
    problem = problem_for(implementation)
    mesh = mesh_of(axis_type, data=4, tensor=2)

    def attend(q, kv, indptr, indices, lengths):
        return jsm.sparse_mla_rows(
            q,
            kv,
            indptr,
            indices,
            SCALE,
            mesh=mesh,
            heads=heads,
            row_lengths=lengths,
            return_lse=True,
            implementation=implementation,
        )

    q = place(mesh, problem.q, "data", heads)
    rest = (
        (None, place(mesh, problem.indices, "data"), place(mesh, problem.lengths, "data"))
        if form == "padded"
        else (place(mesh, problem.indptr), place(mesh, problem.stream), None)
    )
    got, collectives = compiled_collectives(attend, q, place(mesh, problem.kv), *rest)
    assert collectives == []
    problem.check(got)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@on_devices(8)
def test_rows_recipe_with_a_cache_for_each_rank(implementation):
    problems = [Problem(seed, n=2, heads=4, records=64, width=40) for seed in range(4)]
    mesh = mesh_of(data=4, tensor=2)
    join = {
        name: np.concatenate([getattr(p, name) for p in problems])
        for name in vars(Problem())
        if name in ("q", "kv", "indices", "lengths")
    }
    cache = join["kv"].reshape(4 * 4, 16, 656)  # blocks of 16 tokens, four a rank

    def attend(q, kv, indices, lengths):
        return jsm.sparse_mla_rows(
            q,
            kv,
            None,
            indices,
            SCALE,
            mesh=mesh,
            heads="tensor",
            own_caches=True,
            row_lengths=lengths,
            return_lse=True,
            implementation=implementation,
        )

    got, collectives = compiled_collectives(
        attend,
        place(mesh, join["q"], "data", "tensor"),
        place(mesh, cache, "data"),
        place(mesh, join["indices"], "data"),
        place(mesh, join["lengths"], "data"),
    )
    assert collectives == []
    for i, problem in enumerate(problems):
        problem.check((got[0][2 * i : 2 * i + 2], got[1][2 * i : 2 * i + 2]))


def owned_order(records, shards, interleave):
    """The slot that stands in each row of a context-sharded cache, by the ownership rule."""
    order = [[] for _ in range(shards)]
    for slot in range(records):
        owner = slot // (records // shards) if interleave is None else slot // interleave % shards
        order[owner].append(slot)
    return np.concatenate(order)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("form", "interleave", "axis_type"),
    [("padded", None, "Auto"), ("csr", 1, "Explicit"), ("padded", 16, "Auto")],
)
@on_devices(8)
def test_context_recipe(form, interleave, axis_type, implementation):
    problem = Problem(n=4, heads=4)
    mesh = mesh_of(axis_type, context=8)
    cache = problem.kv[owned_order(256, 8, interleave)].reshape(8, 32, 656)

    def attend(q, kv, indptr, indices, lengths, sink):
        return jsm.sparse_mla_context(
            q,
            kv,
            indptr,
            indices,
            SCALE,
            mesh=mesh,
            interleave=interleave,
            row_lengths=lengths,
            attn_sink=sink,
            return_lse=True,
            implementation=implementation,
        )

    rest = (
        (None, problem.indices, problem.lengths)
        if form == "padded"
        else (problem.indptr, problem.stream, None)
    )
    got, collectives = compiled_collectives(
        attend,
        place(mesh, problem.q),
        place(mesh, cache, "context"),
        *(place(mesh, x) for x in rest),
        place(mesh, problem.sink),
    )
    problem.check(got, sink=True)
    assert got[0].dtype == jnp.bfloat16
    # What moves is lse, gathered, and the outs, summed; never a record.
    assert biggest(collectives) <= got[0].size
    assert not any("u8[" in line for line in collectives)
    kinds = {match for line in collectives for match in COLLECTIVES.findall(line)}
    assert kinds == {"all-gather", "all-reduce"}


@on_devices(8)
def test_context_recipe_with_rows_and_heads_on_other_axes():
    problem = Problem(n=4, heads=4)
    mesh = mesh_of(data=2, context=2, tensor=2)
    for form in ("padded", "csr"):
        padded = form == "padded"
        got = jax.jit(
            lambda q, kv, indptr, indices, lengths: jsm.sparse_mla_context(
                q,
                kv,
                indptr,
                indices,
                SCALE,
                mesh=mesh,
                rows="data",
                heads="tensor",
                row_lengths=lengths,
                return_lse=True,
            )
        )(
            place(mesh, problem.q, "data", "tensor"),
            place(mesh, problem.kv, "context"),
            None if padded else problem.indptr,
            problem.indices if padded else problem.stream,
            problem.lengths if padded else None,
        )
        problem.check(got)


@on_devices(8)
def test_a_shard_that_owns_nothing_adds_nothing():
    problem = Problem(n=4, heads=4)
    mesh = mesh_of(context=8)
    # All entries on the second shard; every other shard's records are NaN.
    problem.indices = np.where(problem.indices >= 0, problem.indices % 32 + 32, -1)
    problem.rows = oracle.padded_rows(problem.indices, problem.lengths)
    poisoned = np.full_like(problem.kv, 0x7F)
    poisoned[32:64] = problem.kv[32:64]
    got = jax.jit(
        lambda q, kv, indices, lengths: jsm.sparse_mla_context(
            q, kv, None, indices, SCALE, mesh=mesh, row_lengths=lengths, return_lse=True
        )
    )(problem.q, place(mesh, poisoned, "context"), problem.indices, problem.lengths)
    problem.check(got)


@on_devices(8)
def test_each_context_shard_attends_only_its_share():
    """The rows that reach the op on each device are its own entries, moved to the front."""
    problem = Problem(n=4, heads=4, width=700)
    mesh = mesh_of(context=4)
    interleave = 16

    def spy(q, kv, indptr, indices, softmax_scale, *, row_lengths, **options):
        # Give the lengths back as lse: one part a device, so that the merge cannot mix them.
        lse = jnp.broadcast_to(row_lengths[:, None].astype(jnp.float32), q.shape[:2])
        return jnp.zeros((*q.shape[:2], 512), jnp.float32), lse

    original, context.sparse_mla_partial = context.sparse_mla_partial, spy
    gathered, context.merge_weights = [], context.merge_weights
    merge_weights = context.merge_weights

    def keep(lses):
        jax.debug.callback(lambda x: gathered.append(np.asarray(x)), lses)
        return merge_weights(lses)

    context.merge_weights = keep
    try:
        jax.block_until_ready(
            jax.jit(
                lambda q, kv, indices, lengths: jsm.sparse_mla_context(
                    q,
                    kv,
                    None,
                    indices,
                    SCALE,
                    mesh=mesh,
                    interleave=interleave,
                    row_lengths=lengths,
                )
            )(problem.q, place(mesh, problem.kv, "context"), problem.indices, problem.lengths)
        )
        jax.effects_barrier()
    finally:
        context.sparse_mla_partial, context.merge_weights = original, merge_weights
    want = np.array(
        [
            [np.sum((r >= 0) & (r < 256) & (r // interleave % 4 == s)) for r in problem.rows]
            for s in range(4)
        ]
    )
    np.testing.assert_array_equal(gathered[0][:, :, 0], want)
    tiles = jsm.context_tiles(
        None,
        problem.indices,
        num_shards=4,
        rows_per_shard=64,
        interleave=interleave,
        row_lengths=problem.lengths,
    )
    np.testing.assert_array_equal(tiles, np.sum(-(-want // 128), axis=1))


@on_devices(8)
def test_recipes_on_the_mesh_that_is_set():
    problem = Problem()
    with jax.set_mesh(mesh_of(tensor=8)):
        got = jax.jit(lambda *args: jsm.sparse_mla_heads(*args, SCALE, return_lse=True))(
            problem.q, problem.kv, problem.indptr, problem.stream
        )
    problem.check(got)


@on_devices(8)
def test_a_mesh_axis_that_does_not_divide_is_an_error():
    problem = Problem(n=3, heads=6)
    mesh = mesh_of(data=2, tensor=4)
    args = (problem.q, problem.kv, None, problem.indices, SCALE)
    for call in (
        lambda: jsm.sparse_mla_heads(*args, mesh=mesh),
        lambda: jsm.sparse_mla_rows(*args, mesh=mesh),
        lambda: jsm.sparse_mla_context(*args, mesh=mesh, context="data", heads="tensor"),
    ):
        with pytest.raises(ValueError, match="evenly divi"):
            call()


@on_devices(8)
def test_an_indptr_that_does_not_fit_is_an_error():
    problem = Problem()
    mesh = mesh_of(data=2)
    rows = functools.partial(jsm.sparse_mla_rows, mesh=mesh)
    context = functools.partial(jsm.sparse_mla_context, mesh=mesh, context="data")
    short, reals = problem.indptr[:-1], problem.indptr.astype(np.float32)
    for call in (rows, context):
        with pytest.raises(ValueError, match=r"kv_indptr must be \[\d+\], one more than rows"):
            call(problem.q, problem.kv, short, problem.stream, SCALE)
        with pytest.raises(TypeError, match="kv_indptr must be an integer array, not float32"):
            call(problem.q, problem.kv, reals, problem.stream, SCALE)


# -- ownership (one device is enough)


@settings(deadline=None, max_examples=60)
@given(
    num_shards=st.sampled_from([1, 2, 3, 8]),
    runs=st.integers(1, 4),
    interleave=st.sampled_from([None, 1, 4, 64]),
    slots=st.lists(
        st.one_of(st.integers(-2, 400), st.sampled_from([-(2**31), 2**31 - 1])), max_size=30
    ),
)
def test_every_slot_has_one_owner_and_its_own_row(num_shards, runs, interleave, slots):
    rows_per_shard = runs * (interleave or 8)
    records = num_shards * rows_per_shard
    slots = np.array([*slots, *range(records)], np.int32)
    local = np.stack(
        [
            localise(slots, shard, num_shards, rows_per_shard, interleave)
            for shard in range(num_shards)
        ]
    )
    inside = (slots >= 0) & (slots < records)
    np.testing.assert_array_equal((local >= 0).sum(0), inside)
    order = owned_order(records, num_shards, interleave).reshape(num_shards, rows_per_shard)
    for shard in range(num_shards):
        mine = local[shard] >= 0
        np.testing.assert_array_equal(order[shard][local[shard][mine]], slots[mine])


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def localise(slots, shard, num_shards, rows_per_shard, interleave):
    return jsm.localise_slots(
        slots, shard, num_shards=num_shards, rows_per_shard=rows_per_shard, interleave=interleave
    )


def test_interleaving_spreads_a_long_request_evenly():
    """2048 neighbouring tokens of a 128k cache: one shard's work, or everyone's."""
    indices = np.arange(2048)[None] + 5000
    shape = {"num_shards": 8, "rows_per_shard": 16384}
    contiguous = jsm.context_tiles(None, indices, **shape)
    np.testing.assert_array_equal(contiguous, [16, 0, 0, 0, 0, 0, 0, 0])
    interleaved = jsm.context_tiles(None, indices, interleave=64, **shape)
    assert interleaved.max() <= 3  # 256 entries a shard, and what the start adds
    csr = jsm.context_tiles(np.array([0, 2048]), indices[0], interleave=64, **shape)
    np.testing.assert_array_equal(csr, interleaved)


@pytest.mark.parametrize("interleave", [0, -1, 3])
def test_interleave_must_divide(interleave):
    with pytest.raises(ValueError, match=f"interleave must divide .* not be {interleave}"):
        jsm.localise_slots(np.arange(4), 0, num_shards=2, rows_per_shard=8, interleave=interleave)
