"""What the tests of the simulated HIP library share: a code object and calls that check their
code."""

import ctypes
import struct
import subprocess
import sys
from pathlib import Path

import gfx950_sim
import numpy as np

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
  .amdhsa_float_denorm_mode_32 3
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


def packed(pointer, addend):
    """kernelParams None and extra with a packed argument buffer."""
    buffer = ctypes.create_string_buffer(struct.pack("<Qi", pointer.value, addend), 12)
    size = ctypes.c_size_t(12)
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 3)
    extra._keep = (buffer, size)
    return None, extra
