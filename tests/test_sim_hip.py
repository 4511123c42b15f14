"""The simulated HIP library: what it refuses, records, fails on demand and runs."""

import ctypes
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import gfx950_sim
import numpy as np
import pytest
from gfx950_sim.elf import KernelArgument
from gfx950_sim.hip import Control, attach, build, extents

from jax_sparse_mla.kernel import contract

SOURCES = Path(gfx950_sim.__file__).parent / "hip" / "src"

# add_one(int* data, int addend): data[lane] += addend, one wave; {lds} bytes of LDS, block {block}.
ADD_ONE = """
.text
.globl add_one
.p2align 8
.type add_one,@function
add_one:
  s_load_dwordx2 s[2:3], s[0:1], 0x0
  s_load_dword s4, s[0:1], 0x8
  v_lshlrev_b32 v1, 2, v0
  s_waitcnt lgkmcnt(0)
  global_load_dword v2, v1, s[2:3]
  s_waitcnt vmcnt(0)
  v_add_u32 v2, s4, v2
  global_store_dword v1, v2, s[2:3]
  s_endpgm
.Lend:
.size add_one, .Lend-add_one
.rodata
.p2align 6
.amdhsa_kernel add_one
  .amdhsa_next_free_vgpr 4
  .amdhsa_next_free_sgpr 8
  .amdhsa_accum_offset 4
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_kernarg_size 12
  .amdhsa_group_segment_fixed_size {lds}
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.target: amdgcn-amd-amdhsa--{arch}
amdhsa.kernels:
  - .name: add_one
    .symbol: add_one.kd
    .kernarg_segment_size: 12
    .group_segment_fixed_size: {lds}
    .private_segment_fixed_size: 0
    .kernarg_segment_align: 8
    .wavefront_size: 64
    .sgpr_count: 8
    .vgpr_count: 4
    .max_flat_workgroup_size: 256
    .args:
      - {{.size: 8, .offset: 0, .value_kind: global_buffer, .address_space: global}}
      - {{.size: 4, .offset: 8, .value_kind: by_value}}
...
.end_amdgpu_metadata
"""


def assemble(folder: Path, arch: str = "gfx950", lds: int = 0) -> bytes:
    source, obj, linked = (folder / f"{arch}_{lds}{suffix}" for suffix in (".s", ".o", ".hsaco"))
    source.write_text(ADD_ONE.format(arch=arch, lds=lds))
    zig = [sys.executable, "-m", "ziglang"]
    target = ["-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}"]
    subprocess.run([*zig, "clang", *target, "-c", source, "-o", obj], check=True)
    subprocess.run([*zig, "ld.lld", "-shared", obj, "-o", linked], check=True)
    return linked.read_bytes()


class Hip:
    """Calls that raise HipError unless the code is the expected one."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.hipGetErrorName.restype = ctypes.c_char_p
        self.library.hipGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *args, code: int = 0) -> None:
        got = getattr(self.library, name)(*args)
        assert got == code, (name, self.library.hipGetErrorName(got))

    def handle(self, name: str, *args) -> ctypes.c_void_p:
        out = ctypes.c_void_p()
        self.call(name, ctypes.byref(out), *args)
        return out

    def load(self, code: bytes, symbol: bytes = b"add_one"):
        module = self.handle("hipModuleLoadData", code)
        return module, self.handle("hipModuleGetFunction", module, symbol)

    def malloc(self, array: np.ndarray) -> ctypes.c_void_p:
        pointer = self.handle("hipMalloc", ctypes.c_size_t(array.nbytes))
        to_device = 1
        self.call(
            "hipMemcpy", pointer, array.ctypes.data_as(ctypes.c_void_p), array.nbytes, to_device
        )
        return pointer

    def read(self, pointer: ctypes.c_void_p, like: np.ndarray) -> np.ndarray:
        out = np.empty_like(like)
        self.call("hipMemcpy", out.ctypes.data_as(ctypes.c_void_p), pointer, out.nbytes, 2)
        return out

    def launch(
        self,
        function,
        pointer,
        addend,
        *,
        grid=(1, 1, 1),
        block=(64, 1, 1),
        lds=0,
        stream=None,
        code=0,
    ):
        values = [ctypes.c_void_p(pointer.value), ctypes.c_int32(addend)]
        parameters = (ctypes.c_void_p * 2)(*(ctypes.addressof(value) for value in values))
        self.call(
            "hipModuleLaunchKernel",
            function,
            *grid,
            *block,
            lds,
            stream,
            parameters,
            None,
            code=code,
        )


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


@pytest.fixture
def simulator(library):
    handler = attach(library)
    handler.install()
    handler.failures()
    return handler


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
    hip.call("hipModuleLoadData", ctypes.byref(module), damage(code), code=error)
    assert "not a loadable code object" in control.last_error_text()
    assert control.live("module") == 0


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
    forbidden(906, "hipModuleLaunchKernel", function, *[1] * 6, 0, None, *_packed(pointer, 1))
    hip.call("hipStreamEndCapture", stream, ctypes.byref(graph), code=903)
    hip.call("hipStreamBeginCapture", None, 0, code=900)
    hip.call("hipGraphExecDestroy", executable)
    hip.call("hipGraphDestroy", captured)
    hip.call("hipModuleUnload", module)
    hip.call("hipFree", pointer)
    assert [control.live(kind) for kind in ("graph", "graph_exec")] == [0, 0]


def _packed(pointer, addend):
    """kernelParams None and extra with a packed argument buffer."""
    buffer = ctypes.create_string_buffer(struct.pack("<Qi", pointer.value, addend), 12)
    size = ctypes.c_size_t(12)
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 3)
    extra._keep = (buffer, size)
    return None, extra


def test_a_launch_runs_on_the_simulator(hip, simulator, code):
    module, function = hip.load(code)
    data = np.arange(64, dtype=np.int32)
    pointer = hip.malloc(data)
    results = []
    with simulator.watch(lambda launch, result: results.append((launch.symbol, result))):
        hip.launch(function, pointer, 5)
        hip.call(
            "hipModuleLaunchKernel", function, 1, 1, 1, 64, 1, 1, 0, None, *_packed(pointer, 7)
        )
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
