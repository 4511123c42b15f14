"""Launches through the simulated HIP library: on the simulator, from many threads, in other
processes."""

import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from gfx950_sim.elf import KernelArgument
from gfx950_sim.hip import Control, attach, build, extents
from sim_hip import SOURCES, Hip, assemble, packed

from jax_sparse_mla.kernel import contract


@pytest.fixture(scope="module")
def library() -> Path:
    return build()


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> bytes:
    return assemble(tmp_path_factory.mktemp("code"))


@pytest.fixture
def hip(library) -> Hip:
    return Hip(library)


@pytest.fixture
def control(library):
    control = Control(library)
    control.clear_failures()
    control.clear_calls()
    yield control
    control.clear_failures()


@pytest.fixture
def simulator(library):
    handler = attach(library)
    handler.install()
    handler.failures()
    return handler


def test_a_launch_runs_on_the_simulator(hip, simulator, code):
    module, function = hip.load(code)
    data = np.arange(64, dtype=np.int32)
    pointer = hip.malloc(data)
    results = []
    with simulator.watch(lambda launch, result: results.append((launch.symbol, result))):
        hip.launch(function, pointer, 5)
        hip.call("hipModuleLaunchKernel", function, 1, 1, 1, 64, 1, 1, 0, None, *packed(pointer, 7))
    np.testing.assert_array_equal(hip.read(pointer, data), data + 12)
    assert [symbol for symbol, _ in results] == ["add_one", "add_one"]
    hip.call("hipFree", pointer)
    hip.call("hipModuleUnload", module)


def test_a_fault_is_a_launch_failure_with_its_text(hip, control, simulator, code):
    module, function = hip.load(code)
    data = np.zeros(32, np.int32)  # half of what the wave touches
    pointer = hip.malloc(data)
    hip.launch(function, pointer, 1, code=719)
    (failure,) = simulator.failures()
    assert failure.launch.symbol == "add_one"
    assert "global_load_dword" in str(failure.error)
    assert "global_load_dword" in control.last_error_text()
    assert simulator.failures() == []
    hip.call("hipFree", pointer)
    hip.launch(function, pointer, 1, code=719)
    (failure,) = simulator.failures()
    assert "lies in no allocation" in str(failure.error)
    hip.call("hipModuleUnload", module)


def test_threads_on_many_devices_launch_at_once(hip, simulator, code):
    errors = []

    def work(device):
        try:
            hip.call("hipSetDevice", device)
            module, function = hip.load(code)
            data = np.arange(64, dtype=np.int32) * device
            pointer = hip.malloc(data)
            for _ in range(5):
                hip.launch(function, pointer, device)
            np.testing.assert_array_equal(hip.read(pointer, data), data + 5 * device)
            hip.call("hipFree", pointer)
            hip.call("hipModuleUnload", module)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(device,)) for device in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


def run_python(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": "", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_environment_sets_devices_archs_and_failures(library, code, tmp_path):
    (tmp_path / "code").write_bytes(code)
    script = f"""
import ctypes
hip = ctypes.CDLL({str(library)!r})
count, out = ctypes.c_int(), ctypes.c_void_p()
code = open({str(tmp_path / "code")!r}, "rb").read()
print(hip.hipGetDeviceCount(ctypes.byref(count)), count.value)
for device in range(count.value):
    print(hip.hipSetDevice(device), hip.hipModuleLoadData(ctypes.byref(out), code))
print(hip.hipInit(0), hip.hipInit(0), hip.hipInit(0))
"""
    out = run_python(
        script,
        GFX950_SIM_HIP_DEVICES="3",
        GFX950_SIM_HIP_ARCH="gfx950,gfx942",
        GFX950_SIM_HIP_FAIL="hipInit:3:2,hipModuleGetFunction:1",
    )
    assert out.splitlines() == ["0 3", "0 0", "0 209", "0 209", "0 3 0"]


def test_no_devices(library):
    script = f"""
import ctypes
hip = ctypes.CDLL({str(library)!r})
print(hip.hipGetDeviceCount(ctypes.byref(ctypes.c_int())), hip.hipSetDevice(0))
"""
    assert run_python(script, GFX950_SIM_HIP_DEVICES="0").split() == ["100", "100"]


def test_the_library_finds_the_simulator_by_itself(library, code, tmp_path):
    # A process that knows nothing of the simulator, as one that only names the library in the
    # environment: the launch comes from a thread without the GIL.
    (tmp_path / "code").write_bytes(code)
    script = f"""
import ctypes, threading
hip = ctypes.CDLL({str(library)!r})
module, function, pointer = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
code = open({str(tmp_path / "code")!r}, "rb").read()
assert hip.hipModuleLoadData(ctypes.byref(module), code) == 0
assert hip.hipModuleGetFunction(ctypes.byref(function), module, b"add_one") == 0
assert hip.hipMalloc(ctypes.byref(pointer), 256) == 0
assert hip.hipMemset(pointer, 0, 256) == 0
addend = ctypes.c_int(41)
parameters = (ctypes.c_void_p * 2)(ctypes.addressof(pointer), ctypes.addressof(addend))
def launch():
    assert hip.hipModuleLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, None, parameters, None) == 0
threads = [threading.Thread(target=launch) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(list((ctypes.c_int * 64).from_address(pointer.value)) == [82] * 64)
"""
    assert run_python(script).strip() == "True"


def _contract_arguments(**values):
    slots, packed = [], b""
    for argument in contract.ARGUMENTS:
        form = {"pointer": "Q", "i32": "i", "f32": "f"}[argument.kind]
        size = struct.calcsize(form)
        kind = "global_buffer" if argument.kind == "pointer" else "by_value"
        slots.append(KernelArgument(len(packed), size, kind))
        packed += struct.pack(form, values.get(argument.name, 0))
    return slots, packed


def test_extents_follow_the_launch_contract():
    slots, arguments = _contract_arguments(
        q_latent=0x10000,
        q_rope=0x10000 + 1024,  # q [3, 4, 576] passed twice
        kv=1 << 40,
        indices=0x200000,
        row_begin=0x300000,
        row_end=0x300018,
        out=0x400000,
        lse=0x500000,
        q_latent_row_stride=4 * 576,
        q_latent_head_stride=576,
        q_rope_row_stride=4 * 576,
        q_rope_head_stride=576,
        num_rows=6,
        num_heads=4,
        num_splits=2,
        kv_rows=3_300_000,
        num_indices=100,
    )
    assert extents.is_contract_layout(slots)
    regions = {
        r.name: r for r in extents.contract_regions("sparse_mla_pow2_whole", slots, arguments)
    }
    assert regions["q_latent and q_rope"][1:] == (0x10000, 3 * 4 * 576 * 2, False)
    assert regions["kv"].size == 3_300_000 * 656  # beyond 2^31
    assert regions["indices"].size == 400
    assert (regions["row_begin"].size, regions["row_end"].address) == (24, 0x300018)
    assert (regions["out"].size, regions["out"].writable) == (6 * 4 * 512 * 2, True)
    assert regions["lse"].size == 96
    partial = extents.contract_regions("sparse_mla_pow2_partial", slots, arguments)
    assert {r.name: r.size for r in partial}["out"] == 6 * 4 * 512 * 4
    assert not extents.is_contract_layout(slots[:-1])


def test_empty_arrays_have_no_extent():
    slots, arguments = _contract_arguments(num_splits=1, num_heads=4)
    assert extents.contract_regions("sparse_mla_pow2_whole", slots, arguments) == []


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sixteen_threads_under_a_sanitizer(sanitizer, code, tmp_path):
    (tmp_path / "code").write_bytes(code)
    driver = tmp_path / "stress"
    subprocess.run(
        [
            *("g++", "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"),
            *(f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"),
            '-DGFX950_SIM_PYTHON_FOLDER=""',
            *(SOURCES / "library.cc", SOURCES / "stress.cc", "-o", driver, "-ldl", "-pthread"),
        ],
        check=True,
        timeout=300,
    )
    done = subprocess.run([driver, tmp_path / "code"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
