"""From assembly text to a gfx950 code object, with the ziglang wheel's assembler and linker."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class AssemblyError(ValueError):
    """The assembler or linker refused the text; the message says what it said."""


@dataclass(frozen=True)
class Assembly:
    """One kernel to assemble.

    At entry s[0:1] is the address of the arguments, s2, s3 and s4 the workgroup's number in x, y
    and z, and v0 the work item (x | y << 10 | z << 20).
    """

    body: str
    """Instructions, one a line; labels need names that are unique among the kernels."""
    arguments: int = 0
    """Number of 8-byte arguments."""
    lds_bytes: int = 0
    private_bytes: int = 0
    """Scratch of a lane."""
    fp16_overflow: bool = False
    """MODE.FP16_OVFL: conversions to f16 and fp8 saturate."""
    block_size: int = 1024
    """Most work items a workgroup may have."""


def _code(name: str, kernel: Assembly) -> str:
    return f"""
.text
.globl {name}
.p2align 8
.type {name},@function
{name}:
{kernel.body}
.size {name}, .-{name}

.rodata
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_group_segment_fixed_size {kernel.lds_bytes}
  .amdhsa_private_segment_fixed_size {kernel.private_bytes}
  .amdhsa_enable_private_segment {int(kernel.private_bytes > 0)}
  .amdhsa_fp16_overflow {int(kernel.fp16_overflow)}
  .amdhsa_kernarg_size {8 * kernel.arguments}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_system_sgpr_workgroup_id_y 1
  .amdhsa_system_sgpr_workgroup_id_z 1
  .amdhsa_system_vgpr_workitem_id 2
  .amdhsa_next_free_vgpr 512
  .amdhsa_accum_offset 256
  .amdhsa_next_free_sgpr 102
  .amdhsa_float_denorm_mode_32 3
.end_amdhsa_kernel
"""


def _metadata(name: str, kernel: Assembly) -> str:
    arguments = "".join(
        f"\n      - {{.offset: {8 * i}, .size: 8, .value_kind: by_value}}"
        for i in range(kernel.arguments)
    )
    return f"""  - .name: {name}
    .symbol: {name}.kd
    .kernarg_segment_size: {8 * kernel.arguments}
    .kernarg_segment_align: 8
    .group_segment_fixed_size: {kernel.lds_bytes}
    .private_segment_fixed_size: {kernel.private_bytes}
    .max_flat_workgroup_size: {kernel.block_size}
    .wavefront_size: 64
    .sgpr_count: 108
    .vgpr_count: 512
    .args:{arguments or " []"}
"""


def assemble(kernels: Mapping[str, Assembly]) -> bytes:
    """The code object (ELF) that holds all these kernels, by symbol.

    Raises:
        AssemblyError: with the assembler's messages.
    """
    code = "".join(_code(name, kernel) for name, kernel in kernels.items())
    metadata = "".join(_metadata(name, kernel) for name, kernel in kernels.items())
    text = f""".amdgcn_target "amdgcn-amd-amdhsa--gfx950"
.amdhsa_code_object_version 6
{code}
.amdgpu_metadata
amdhsa.version: [1, 2]
amdhsa.kernels:
{metadata}.end_amdgpu_metadata
"""
    zig = [sys.executable, "-m", "ziglang"]
    with tempfile.TemporaryDirectory(prefix="gfx950-sim-") as scratch:
        source, parts, linked = (Path(scratch) / f"kernels.{end}" for end in ("s", "o", "hsaco"))
        source.write_text(text)
        target = ["-target", "amdgcn-amd-amdhsa", "-mcpu=gfx950"]
        _run([*zig, "clang", *target, "-c", str(source), "-o", str(parts)])
        _run([*zig, "ld.lld", "-shared", str(parts), "-o", str(linked)])
        return linked.read_bytes()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssemblyError(done.stderr or done.stdout)
