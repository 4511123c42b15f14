"""Two processes with jax.distributed, four host devices each: one mesh over both."""

import socket

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from device_process import Child, ChildError
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import SCALE, Problem

import jax_sparse_mla as jsm
from examples.deepseek_v32.generate import Engine
from examples.deepseek_v32.mesh import make_mesh, param_shardings
from examples.deepseek_v32.options import Options
from examples.deepseek_v32.random_checkpoint import tiny_config, write_random_checkpoint
from examples.deepseek_v32.scheduler import Limits
from examples.deepseek_v32.weights import load_params

PROCESSES, DEVICES_EACH = 2, 4


def join(process_id, port):
    """Become one of the processes."""
    jax.distributed.initialize(
        coordinator_address=f"localhost:{port}", num_processes=PROCESSES, process_id=process_id
    )
    assert jax.device_count() == PROCESSES * DEVICES_EACH
    assert jax.local_device_count() == DEVICES_EACH
    assert jax.process_index() == process_id


@pytest.fixture(scope="module")
def processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children = [Child(DEVICES_EACH) for _ in range(PROCESSES)]
    run_on_all(children, join, port)
    yield children
    for child in children:
        child.stop()


def run_on_all(children, function, *args):
    """Run a function in all processes at once; its process number comes first."""
    for number, child in enumerate(children):
        child.begin(function, number, *args)
    results, errors = [], []
    for child in children:  # each answer is read, or a later call would get it
        try:
            results.append(child.result())
        except ChildError as error:
            errors.append(error)
    if errors:
        raise ChildError("\n".join(map(str, errors)))
    return results


def place(mesh, array, *spec):
    """A global array; each process holds its devices' shards."""
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def check_own_shards(got, expected, axes):
    """The results' shards on this process against the same part of the oracle's answer."""
    out, lse = got
    by_device = {shard.device: shard for shard in lse.addressable_shards}
    seen = 0
    for shard in out.addressable_shards:
        part = shard.index[:2]
        want = oracle.Expected(*(x[part] for x in expected))
        oracle.check(shard.data, by_device[shard.device].data, want)
        seen += 1
    assert seen == DEVICES_EACH
    assert out.sharding.spec[: len(axes)] == axes


def mesh_of(**axes):
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def automatic(process_id):
    problem = Problem()
    mesh = mesh_of(data=2, tensor=4)  # data over the processes, tensor within one
    got = jax.jit(
        lambda q, kv, indices, lengths: jsm.sparse_mla_fwd(
            q, kv, None, indices, SCALE, row_lengths=lengths, return_lse=True
        )
    )(
        place(mesh, problem.q, "data", "tensor"),
        place(mesh, problem.kv),
        place(mesh, problem.indices, "data"),
        place(mesh, problem.lengths, "data"),
    )
    check_own_shards(got, problem.expected(), ("data", "tensor"))


def rows_with_own_caches(process_id):
    problems = [Problem(seed, n=4, heads=8, records=64, width=40) for seed in range(2)]
    mesh = mesh_of(data=2, tensor=4)

    def joined(name):
        return np.concatenate([getattr(problem, name) for problem in problems])

    got = jax.jit(
        lambda q, kv, indices, lengths: jsm.sparse_mla_rows(
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
        )
    )(
        place(mesh, joined("q"), "data", "tensor"),
        place(mesh, joined("kv"), "data"),
        place(mesh, joined("indices"), "data"),
        place(mesh, joined("lengths"), "data"),
    )
    parts = [problem.expected() for problem in problems]
    expected = oracle.Expected(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    check_own_shards(got, expected, ("data", "tensor"))


def context_over_the_processes(process_id, interleave):
    problem = Problem()
    mesh = mesh_of(context=8)
    order = np.arange(256).reshape(-1, 8, interleave or 32)  # run, shard, place in the run
    cache = problem.kv[order.transpose(1, 0, 2).reshape(-1)] if interleave else problem.kv
    got = jax.jit(
        lambda q, kv, indices, lengths, sink: jsm.sparse_mla_context(
            q,
            kv,
            None,
            indices,
            SCALE,
            mesh=mesh,
            interleave=interleave,
            row_lengths=lengths,
            attn_sink=sink,
            return_lse=True,
        )
    )(
        place(mesh, problem.q),
        place(mesh, cache, "context"),
        place(mesh, problem.indices),
        place(mesh, problem.lengths),
        place(mesh, problem.sink),
    )
    check_own_shards(got, problem.expected(sink=True), ())


def write_and_check(process_id):
    """A sharded write, then each process finds the faults in its own shards."""
    mesh = mesh_of(context=8)
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((6, 512)).astype(np.float32)
    rope = rng.standard_normal((6, 64)).astype(np.float32)
    slots = np.array([0, 9, 10, 79, -1, 80], np.int32)
    cache = place(mesh, np.zeros((80, 656), np.uint8), "context")

    def write(cache, slots, latent, rope):
        own = jsm.localise_slots(
            slots, jax.lax.axis_index("context"), num_shards=8, rows_per_shard=cache.shape[0]
        )
        return jsm.write_records(cache, own, latent, rope, scale_rule="float32")

    specs = (P("context"), P(), P(), P())
    written = jax.jit(
        jax.shard_map(write, mesh=mesh, in_specs=specs, out_specs=P("context")), donate_argnums=0
    )(cache, *(place(mesh, x) for x in (slots, latent, rope)))
    report = jsm.check_records(written)
    assert report.num_records == 40
    return report.slots.tolist()


def test_automatic_partitioning(processes):
    run_on_all(processes, automatic)


def test_data_parallel_rows_with_a_cache_for_each_process(processes):
    run_on_all(processes, rows_with_own_caches)


@pytest.mark.parametrize("interleave", [None, 4])
def test_context_parallel_over_both_processes(processes, interleave):
    run_on_all(processes, context_over_the_processes, interleave)


def test_each_process_writes_and_checks_its_own_records(processes):
    first, second = run_on_all(processes, write_and_check)
    assert (first, second) == ([0, 9, 10], [79])


# -- the example model

CONFIG = tiny_config(num_hidden_layers=2, vocab_size=320, eos_token_ids=())
PROMPTS = [list(range(10, 33)), [5, 6, 7] * 4]


def generate(mesh, folder):
    """The generated ids, and of each prompt the logits that its tokens were chosen from."""
    shardings = None if mesh is None else param_shardings(CONFIG, mesh, stacked=False)
    params = load_params(folder, CONFIG, dtype=jnp.float32, shardings=shardings)
    limits = Limits(num_blocks=12, block_size=8, max_length=40, lines=2, prefill_rows=12)
    engine = Engine(params, CONFIG, limits, Options(dtype=jnp.float32), mesh=mesh)
    logits = {number: [] for number in range(len(PROMPTS))}

    def keep(plans, step_logits):
        for plan, of_group in zip(plans, step_logits, strict=True):
            for request, _, output in plan.spans:
                if output >= 0:
                    logits[request.number].append(of_group[output])

    generated = engine.generate(PROMPTS, 4, keep)
    return generated, [np.stack(logits[number]) for number in logits]


def generate_on_mesh(process_id, folder, data, tensor):
    return generate(make_mesh(data, tensor, CONFIG), folder)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "tensor"), [(2, 4), (1, 8)])
def test_the_model_gives_the_single_process_logits(processes, tmp_path, data, tensor):
    """Rows over the processes and heads and experts within them, or those over the processes."""
    write_random_checkpoint(tmp_path, CONFIG, seed=5)
    want_ids, want_logits = generate(None, tmp_path)
    for ids, logits in run_on_all(processes, generate_on_mesh, tmp_path, data, tensor):
        assert ids == want_ids
        for got, want in zip(logits, want_logits, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
