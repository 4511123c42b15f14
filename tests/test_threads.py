"""Many threads and devices in one process: first calls at once, one load each, no leak."""

import gc
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from device_process import Child
from gfx950_sim.hip import Control
from test_sharding import SCALE, Problem

import jax_sparse_mla as jsm
from jax_sparse_mla.kernel import shim

# On the simulator a tile of one workgroup takes tens of milliseconds.
IMPLEMENTATIONS = ("reference", pytest.param("kernel", marks=pytest.mark.slow))


def attend(problem, implementation, **options):
    return jsm.sparse_mla_fwd(
        problem.q,
        problem.kv,
        None,
        problem.indices,
        SCALE,
        row_lengths=problem.lengths,
        return_lse=True,
        implementation=implementation,
        **options,
    )


def module_loads():
    control = Control(os.environ[shim.HIP_LIBRARY_VARIABLE])
    return [call.device for call in control.calls() if call.name == "hipModuleLoadData"]


def first_calls_at_once(implementation, sizes, ways):
    """Every device gets its first calls from several threads at the same time."""
    devices = jax.devices()
    problems = [Problem(i, n=2, heads=4 + i, records=64, width=40) for i in range(sizes)]
    jobs = [
        (device, problem, way) for device in devices for problem in problems for way in range(ways)
    ]
    start = threading.Barrier(len(jobs))

    def run(job):
        device, problem, way = job
        start.wait(timeout=120)
        with jax.default_device(device):
            if way == 0:
                got = jax.jit(lambda: attend(problem, implementation))()
            else:  # eagerly, through the op's own jit
                got = attend(problem, implementation)
        assert got[0].devices() == {device}
        problem.check(got)

    with ThreadPoolExecutor(len(jobs)) as pool:
        for future in [pool.submit(run, job) for job in jobs]:
            future.result(timeout=300)


def first_calls_then_new_backends(implementation):
    every_device = list(range(jax.device_count()))
    first_calls_at_once(implementation, sizes=2, ways=2)
    if implementation == "kernel":
        assert sorted(module_loads()) == every_device
    jax.extend.backend.clear_backends()
    jax.clear_caches()
    first_calls_at_once(implementation, sizes=1, ways=1)
    if implementation == "kernel":
        assert sorted(module_loads()) == every_device


@pytest.mark.parametrize(
    ("implementation", "devices"),
    [("reference", 2), ("kernel", 4)],
)
@pytest.mark.slow
def test_first_calls_from_many_threads_on_many_devices(implementation, devices):
    child = Child(devices)
    child.call(first_calls_then_new_backends, implementation)
    child.stop()


def options_side_by_side(implementation):
    """Executables that differ in one option, called in turn from threads: none gets another's."""
    problem = Problem(1, n=2, heads=4, records=64, width=40)
    plain = problem.expected()
    problem.sink = plain.lse[0].astype(np.float32)  # takes half
    sunk = problem.expected(sink=True)
    calls = {
        "plain": lambda: attend(problem, implementation),
        "sink": lambda: attend(problem, implementation, attn_sink=problem.sink),
        "split": lambda: attend(problem, implementation, num_splits=2),
        "float32": lambda: attend(problem, implementation, scale_format="float32"),
    }
    results = {}

    def run(name):
        results[name] = [np.asarray(x, np.float64) for x in jax.jit(calls[name])()]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, list(calls) * 2))
    for name, (out, lse) in results.items():
        expected = sunk if name == "sink" else plain
        np.testing.assert_allclose(out, expected.out, atol=1e-3, rtol=2e-2, err_msg=name)
        np.testing.assert_allclose(lse, expected.lse, atol=1e-2, rtol=1e-3, err_msg=name)
    assert np.abs(sunk.out - plain.out).max() > 5e-3  # the options do differ
    if implementation == "kernel":
        # bfloat16 and float32 out, two scale formats; sink and split share the float32 out.
        assert len(module_loads()) == 3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_options_do_not_mix(implementation):
    child = Child()
    child.call(options_side_by_side, implementation)
    child.stop()


def resident_bytes():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def growth_of_calls(implementation):
    """Bytes a call by which the process grows, from calls of compiled and of freshly traced ops."""
    problem = Problem(0, n=2, heads=4, records=64, width=40)
    args = [jax.device_put(x) for x in (problem.q, problem.kv, problem.indices, problem.lengths)]

    def run(q, kv, indices, lengths):
        return jsm.sparse_mla_fwd(
            q, kv, None, indices, SCALE, row_lengths=lengths, implementation=implementation
        )

    jitted = jax.jit(run)

    def calls(count):
        for _ in range(count):
            jitted(*args).block_until_ready()
            if implementation == "kernel" and _ % 100 == 0:
                # The simulated library keeps a record of every call.
                Control(os.environ[shim.HIP_LIBRARY_VARIABLE]).clear_calls()

    def traces(count):
        for _ in range(count):
            jax.jit(lambda *a: run(*a)).trace(*args)

    grown = {}
    for name, work, count in (("call", calls, 2000), ("trace", traces, 100)):
        work(count // 2)  # settles allocators and caches
        before = resident_bytes()
        work(count)
        grown[name] = (resident_bytes() - before) / count
    if implementation == "kernel":
        assert Control(os.environ[shim.HIP_LIBRARY_VARIABLE]).live("module") == 1
    return grown


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_memory_does_not_grow_with_calls(implementation):
    # Launches are checked but not simulated: what is measured is the op, the shim and XLA.
    child = Child(env={"GFX950_SIM_HIP_LAUNCH": "check"})
    grown = child.call(growth_of_calls, implementation)
    child.stop()
    assert grown["call"] < 500, grown
    assert grown["trace"] < 4000, grown
