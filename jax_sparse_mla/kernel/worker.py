"""The process that compiles: ``worker.py FOLDER SPECIALISATION ...``.

FlyDSL imports torch without using it here. Where torch is absent, a stand-in module takes its
place; that and FlyDSL's settings through the environment are why compiling has its own process.
"""

import importlib.machinery
import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any

from jax_sparse_mla.kernel import contract
from jax_sparse_mla.kernel.code_object import CodeObject, to_entry
from jax_sparse_mla.kernel.specialisation import ALL


def stand_in_for_torch() -> None:
    """Make ``import torch`` succeed where torch is not installed."""
    if importlib.util.find_spec("torch") is not None:
        return
    torch, cuda = types.ModuleType("torch"), types.ModuleType("torch.cuda")
    torch.__spec__ = importlib.machinery.ModuleSpec("torch", None)
    names = "Tensor float16 bfloat16 float32 float64 bool uint8 int8 int16 int32 int64"
    for name in names.split():
        setattr(torch, name, type(name, (), {}))
    cuda.Stream = type("Stream", (), {})  # type: ignore[attr-defined]
    cuda.is_available = lambda: False  # type: ignore[attr-defined]
    torch.cuda = cuda  # type: ignore[attr-defined]
    sys.modules |= {"torch": torch, "torch.cuda": cuda}


def code_object(compiled: Any) -> CodeObject:
    """Take the code object out of what ``flyc.compile`` returned.

    FlyDSL's public ``export_to_c`` has the same bytes, but in an object that a host linker makes.
    """
    from flydsl._mlir import ir
    from flydsl._mlir.dialects import gpu
    from flydsl.compiler.jit_function import _create_mlir_context

    binaries: list[Any] = []

    def visit(op: Any) -> Any:
        if op.name == "gpu.binary":
            binaries.append(gpu.ObjectAttr(ir.ArrayAttr(op.attributes["objects"])[0]))
        return ir.WalkResult.ADVANCE

    with _create_mlir_context():
        ir.Module.parse(compiled._keepalive.ir).operation.walk(visit)
        (binary,) = binaries
        code, table = bytes(binary.object), str(binary.kernels)
    (symbol,) = re.findall(r'#gpu\.kernel_metadata<"(\w+)"', table)
    resources = {name: int(value) for name, value in re.findall(r"(\w+) = (-?\d+) : i64", table)}
    return CodeObject(
        code=code,
        symbol=symbol,
        arch=contract.ARCH,
        block_size=resources.pop("max_flat_workgroup_size"),
        lds_bytes=resources.pop("group_segment_fixed_size"),
        resources=resources,
    )


def main() -> None:
    """Compile the specialisations named on the command line, each to ``FOLDER/<name>``."""
    folder, *names = sys.argv[1:]
    stand_in_for_torch()
    from jax_sparse_mla.kernel import build

    for name in names:
        (specialisation,) = (s for s in ALL if s.name == name)
        kernel = code_object(build.compile_kernel(specialisation))
        (Path(folder) / name).write_bytes(to_entry(kernel))


if __name__ == "__main__":
    main()
