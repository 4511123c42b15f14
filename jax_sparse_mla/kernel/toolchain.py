"""Finding what compiling needs: FlyDSL and an AMDGPU-capable ``ld.lld``."""

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path


def flydsl_version() -> str | None:
    """The installed FlyDSL's version, or None."""
    try:
        return importlib.metadata.version("flydsl")
    except importlib.metadata.PackageNotFoundError:
        return None


def find_linker() -> list[str] | None:
    """The command of an ``ld.lld``: ROCm's, the ziglang wheel's, the one on PATH, or None."""
    for root in (os.environ.get("ROCM_PATH"), "/opt/rocm"):
        if root and os.access(path := Path(root) / "llvm" / "bin" / "ld.lld", os.X_OK):
            return [str(path)]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "ld.lld"]
    on_path = shutil.which("ld.lld")
    return [on_path] if on_path else None


def write_toolkit(folder: Path, linker: list[str]) -> None:
    """Lay out ``folder`` as the ROCm toolkit that MLIR expects: ``llvm/bin/ld.lld``."""
    path = folder / "llvm" / "bin" / "ld.lld"
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\nexec {shlex.join(linker)} "$@"\n')
    path.chmod(0o755)
