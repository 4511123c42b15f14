"""The simulated HIP library: what it answers, refuses, records and fails on demand."""

import ctypes
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
from gfx950_sim.hip import Control, build
from sim_hip import Hip, assemble, packed


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


LAUNCHER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
)


@pytest.fixture
def no_simulator(library):
    """Launches are checked, recorded and otherwise do nothing."""
    launcher = LAUNCHER(lambda *_: 0)
    Control(library).library.simhip_set_launcher(launcher, None)
    yield
    Control(library).library.simhip_set_launcher(None, None)


def test_the_device_is_the_threads_own(hip):
    hip.call("hipSetDevice", 3)
    seen = []

    def other():
        device = ctypes.c_int(-1)
        hip.call("hipGetDevice", ctypes.byref(device))
        seen.append(device.value)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    device = ctypes.c_int(-1)
    hip.call("hipGetDevice", ctypes.byref(device))
    assert (device.value, seen) == (3, [0])
    hip.call("hipSetDevice", 8, code=101)
    hip.call("hipSetDevice", -1, code=101)
    hip.call("hipSetDevice", 0)


def test_device_properties_have_hips_layout(hip):
    layout = pytest.importorskip("tinygrad.runtime.autogen.hip").hipDeviceProp_tR0600
    properties = layout()
    assert ctypes.sizeof(properties) == 1472
    hip.call("hipGetDevicePropertiesR0600", ctypes.byref(properties), 0)
    assert bytes(properties.gcnArchName).rstrip(b"\0") == b"gfx950:sramecc+:xnack-"
    assert (properties.multiProcessorCount, properties.warpSize) == (256, 64)
    assert (properties.major, properties.minor) == (9, 5)
    assert properties.maxSharedMemoryPerMultiProcessor == 160 * 1024
    assert properties.l2CacheSize == 4 << 20
    value = ctypes.c_int()
    hip.call("hipDeviceGetAttribute", ctypes.byref(value), 63, 0)
    assert value.value == 256
    hip.call("hipDeviceGetAttribute", ctypes.byref(value), 12345, 0, code=801)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda c: b"\x7fELG" + c[4:], 200),
        (lambda c: c[:18] + struct.pack("<H", 62) + c[20:], 200),  # x86-64
        (lambda c: c[:4] + b"\x01" + c[5:], 200),  # 32 bits
        (lambda c: c[:60] + b"\0\0" + c[62:], 200),  # no sections
        (lambda c: c.replace(b"AMDGPU\0", b"amdgpu\0"), 200),  # no metadata
        (lambda c: c.replace(b"amdhsa.kernels", b"amdhsa.nothing"), 200),
    ],
)
def test_a_damaged_code_object_is_refused(hip, control, code, damage, error):
    module = ctypes.c_void_p()
    before = control.live("module")
    hip.call("hipModuleLoadData", ctypes.byref(module), damage(code), code=error)
    assert "not a loadable code object" in control.last_error_text()
    assert control.live("module") == before


def test_a_foreign_arch_is_refused(hip, control, tmp_path):
    module = ctypes.c_void_p()
    hip.call("hipModuleLoadData", ctypes.byref(module), assemble(tmp_path, arch="gfx942"), code=209)
    assert control.last_error_text() == "the code object is for gfx942, device 0 is gfx950"


def test_functions_belong_to_a_live_module_and_its_device(hip, control, code, no_simulator):
    module, function = hip.load(code)
    out = ctypes.c_void_p()
    hip.call("hipModuleGetFunction", ctypes.byref(out), module, b"add_two", code=500)
    assert control.last_error_text() == 'the module has no kernel "add_two"'
    pointer = hip.malloc(np.zeros(64, np.int32))
    hip.call("hipSetDevice", 1)
    hip.call("hipModuleGetFunction", ctypes.byref(out), module, b"add_one", code=101)
    hip.launch(function, pointer, 1, code=98)
    stream = hip.handle("hipStreamCreate")
    hip.call("hipSetDevice", 0)
    hip.launch(function, pointer, 1, stream=stream, code=98)  # the stream's device counts
    assert "loaded on device 0, the stream is on device 1" in control.last_error_text()
    hip.launch(function, pointer, 1)
    hip.call("hipModuleUnload", module)
    hip.launch(function, pointer, 1, code=400)
    hip.call("hipModuleUnload", module, code=400)
    hip.call("hipStreamDestroy", stream)
    hip.launch(function, pointer, 1, stream=stream, code=400)
    hip.call("hipFree", pointer)


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        ({"grid": (0, 1, 1)}, 9),
        ({"block": (64, 0, 1)}, 9),
        ({"block": (32, 32, 2)}, 9),  # 2048 work items
        ({"grid": (1 << 25, 1, 1), "block": (128, 1, 1)}, 9),  # 2^32 work items
        ({"grid": ((1 << 25) - 1, 1, 1), "block": (128, 1, 1)}, 0),
        ({"block": (257, 1, 1)}, 719),  # compiled for 256
        ({"lds": 160 * 1024}, 0),
        ({"lds": 160 * 1024 + 1}, 1),
    ],
)
def test_launches_beyond_the_machine_are_refused(hip, code, no_simulator, shape, error):
    module, function = hip.load(code)
    hip.launch(function, ctypes.c_void_p(4096), 1, code=error, **shape)
    hip.call("hipModuleUnload", module)


def test_static_and_dynamic_lds_add_up(hip, tmp_path, no_simulator):
    module, function = hip.load(assemble(tmp_path, lds=65536))
    hip.launch(function, ctypes.c_void_p(4096), 1, lds=98304)
    hip.launch(function, ctypes.c_void_p(4096), 1, lds=98305, code=1)
    attribute = ctypes.c_int()
    hip.call("hipFuncGetAttribute", ctypes.byref(attribute), 1, function)
    assert attribute.value == 65536
    hip.call("hipModuleUnload", module)


def test_any_call_fails_on_demand(hip, control, code):
    control.fail("hipModuleLoadData", 2, occurrence=2)
    module, _ = hip.load(code)
    out = ctypes.c_void_p()
    hip.call("hipModuleLoadData", ctypes.byref(out), code, code=2)
    assert control.last_error_text() == "hipModuleLoadData: failure injected by the test"
    assert hip.library.hipGetLastError() == 2
    assert hip.library.hipGetLastError() == 0
    assert hip.library.hipGetErrorString(2) == b"out of memory"
    again, _ = hip.load(code)
    control.fail("hipModuleUnload", 999, times=0)
    for _ in range(3):
        hip.call("hipModuleUnload", module, code=999)
    control.clear_failures()
    hip.call("hipModuleUnload", module)
    hip.call("hipModuleUnload", again)
    with pytest.raises(ValueError, match="hipModuleLoadDatum"):
        control.fail("hipModuleLoadDatum", 1)


def test_every_call_is_recorded(hip, control, code, no_simulator):
    module, function = hip.load(code)
    hip.call("hipSetDevice", 0)
    stream = hip.handle("hipStreamCreate")
    control.clear_calls()
    launches = control.launch_count()
    hip.launch(function, ctypes.c_void_p(4096), 1, stream=stream)
    hip.launch(function, ctypes.c_void_p(4096), 1, grid=(0, 1, 1), code=9)
    hip.call("hipStreamSynchronize", stream)
    calls = control.calls()
    assert [(c.name, c.code) for c in calls] == [
        ("hipModuleLaunchKernel", 0),
        ("hipModuleLaunchKernel", 9),
        ("hipStreamSynchronize", 0),
    ]
    assert [c.stream for c in calls] == [stream.value, 0, stream.value]
    assert {c.thread for c in calls} == {threading.get_native_id()}
    assert control.launch_count() == launches + 1
    hip.call("hipSetDevice", 5)
    hip.call("hipStreamSynchronize", stream)  # the stream is still of device 0
    hip.call("hipSetDevice", 0)
    assert [c.device for c in control.calls()[-3:]] == [5, 0, 0]
    hip.call("hipStreamDestroy", stream)
    hip.call("hipModuleUnload", module)


def test_capture_records_launches_and_forbids_the_rest(hip, control, code, no_simulator):
    module, function = hip.load(code)
    pointer = hip.malloc(np.zeros(64, np.int32))
    stream = hip.handle("hipStreamCreate")
    before = control.launch_count()
    status = ctypes.c_int()
    hip.call("hipStreamBeginCapture", stream, 0)
    hip.call("hipStreamIsCapturing", stream, ctypes.byref(status))
    assert status.value == 1
    hip.launch(function, pointer, 1, stream=stream)
    graph = ctypes.c_void_p()
    hip.call("hipStreamEndCapture", stream, ctypes.byref(graph))
    captured = ctypes.c_void_p(graph.value)
    assert control.launch_count() == before
    executable = hip.handle("hipGraphInstantiate", graph, None, None, 0)
    for _ in range(3):
        hip.call("hipGraphLaunch", executable, stream)
    assert control.launch_count() == before + 3

    def forbidden(error, name, *args):
        hip.call("hipStreamBeginCapture", stream, 0)
        hip.call(name, *args, code=error)
        hip.call("hipStreamIsCapturing", stream, ctypes.byref(status))
        assert status.value == 2
        hip.call("hipStreamEndCapture", stream, ctypes.byref(graph), code=901)

    out = ctypes.c_void_p()
    forbidden(900, "hipMalloc", ctypes.byref(out), 16)
    forbidden(900, "hipModuleLoadData", ctypes.byref(out), code)
    forbidden(900, "hipStreamSynchronize", stream)
    forbidden(900, "hipDeviceSynchronize")
    forbidden(906, "hipModuleLaunchKernel", function, *[1] * 6, 0, None, *packed(pointer, 1))
    hip.call("hipStreamEndCapture", stream, ctypes.byref(graph), code=903)
    hip.call("hipStreamBeginCapture", None, 0, code=900)
    hip.call("hipGraphExecDestroy", executable)
    hip.call("hipGraphDestroy", captured)
    hip.call("hipModuleUnload", module)
    hip.call("hipFree", pointer)
    assert [control.live(kind) for kind in ("graph", "graph_exec")] == [0, 0]
