"""From a specialisation to its code object: precompiled, cached on disk, or compiled by FlyDSL."""

import contextlib
import functools
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

import jax_sparse_mla
from jax_sparse_mla.kernel import contract, toolchain
from jax_sparse_mla.kernel.code_object import CodeObject, from_entry, read_folder, to_entry
from jax_sparse_mla.kernel.specialisation import Specialisation

PRECOMPILED_VARIABLE = "JAX_SPARSE_MLA_PRECOMPILED"
CACHE_VARIABLE = "JAX_SPARSE_MLA_CACHE_DIR"

_log = logging.getLogger(__name__)


class CompileError(RuntimeError):
    """The kernel could not be compiled here; the message says what is missing or went wrong."""


class _Memo:
    """Code objects of this process: each is read or compiled once, by whichever thread is first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kernels: dict[tuple[Specialisation, bool, Path], CodeObject] = {}

    def get(self, specialisation: Specialisation) -> CodeObject:
        precompiled = os.environ.get(PRECOMPILED_VARIABLE)
        # A precompiled folder is used alone: it works where there is no place for a cache.
        folder = Path(precompiled) if precompiled else cache_folder()
        key = (specialisation, bool(precompiled), folder)
        with self._lock:
            if key not in self._kernels:
                if precompiled:
                    kernel = read_folder(folder, specialisation, source_hash())
                else:
                    (kernel,) = _cached([specialisation]).values()
                self._kernels[key] = kernel
            return self._kernels[key]


_memo = _Memo()


def code_object(specialisation: Specialisation) -> CodeObject:
    """The code object of a specialisation.

    With JAX_SPARSE_MLA_PRECOMPILED set it comes from that folder and nothing else is tried: a
    ValueError names what is wrong with it. Else it comes from the cache on disk, or is compiled and
    cached; a CompileError says why it could not be.
    """
    return _memo.get(specialisation)


def cache_folder() -> Path:
    """Where compiled kernels are kept: JAX_SPARSE_MLA_CACHE_DIR, else the user's cache folder.

    A CompileError says so if the user has none.
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root) / "jax_sparse_mla"
    try:
        return Path.home() / ".cache" / "jax_sparse_mla"
    except RuntimeError as error:  # a container's user may have no home
        raise CompileError(
            f"no folder to keep compiled kernels in ({error}): set {CACHE_VARIABLE}"
        ) from error


@functools.cache
def source_hash() -> str:
    """Identifies the package version and the kernel's source."""
    digest = hashlib.sha256(jax_sparse_mla.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def entry_name(specialisation: Specialisation) -> str:
    """The cache entry's file name, from all that the code depends on: source, compiler, options."""
    parts = (source_hash(), toolchain.flydsl_version(), contract.ARCH, specialisation.name)
    return f"{specialisation.name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def compile_all(specialisations: Iterable[Specialisation]) -> dict[Specialisation, CodeObject]:
    """Like `code_object` for several at once, but never from a precompiled folder."""
    return _cached(list(specialisations))


def _cached(specialisations: list[Specialisation]) -> dict[Specialisation, CodeObject]:
    folder = cache_folder()
    paths = {s: folder / entry_name(s) for s in specialisations}
    found: dict[Specialisation, CodeObject] = {}
    for specialisation, path in paths.items():
        # A missing, truncated or corrupt entry is compiled again and replaced.
        with contextlib.suppress(OSError, ValueError):
            found[specialisation] = from_entry(path.read_bytes())
    missing = [s for s in specialisations if s not in found]
    for specialisation, kernel in (_compile(missing) if missing else {}).items():
        found[specialisation] = kernel
        try:
            _write_atomically(paths[specialisation], to_entry(kernel))
        except OSError as error:
            _log.warning("cannot keep the compiled kernel in %s: %s", folder, error)
    return {s: found[s] for s in specialisations}


def _write_atomically(path: Path, content: bytes) -> None:
    """Readers see the old file or the whole new one, whichever of many writers comes last."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _compile(specialisations: list[Specialisation]) -> dict[Specialisation, CodeObject]:
    if toolchain.flydsl_version() is None:
        raise CompileError(
            f"compiling the {contract.ARCH} kernel needs FlyDSL: pip install flydsl, or set "
            f"{PRECOMPILED_VARIABLE} to a folder written by: "
            "python -m jax_sparse_mla precompile --out DIR"
        )
    linker = toolchain.find_linker()
    if linker is None:
        raise CompileError(
            "compiling the kernel needs ld.lld: install ROCm (and set ROCM_PATH if it is not in "
            "/opt/rocm), or: pip install ziglang"
        )
    _log.info("compiling %s", ", ".join(s.name for s in specialisations))
    with tempfile.TemporaryDirectory(prefix="jax_sparse_mla-") as scratch:
        folder = Path(scratch)
        toolchain.write_toolkit(folder / "toolkit", linker)
        names = [s.name for s in specialisations]
        child = subprocess.run(
            [sys.executable, "-P", "-m", "jax_sparse_mla.kernel.worker", scratch, *names],
            env=_child_environment(folder),
            capture_output=True,
            text=True,
            check=False,
        )
        if child.returncode:
            raise CompileError(f"compiling the kernel failed:\n{child.stdout}{child.stderr}")
        return {s: from_entry((folder / s.name).read_bytes()) for s in specialisations}


def _child_environment(folder: Path) -> dict[str, str]:
    """This environment, without anything that would make FlyDSL emit other code."""
    ours = {n: v for n, v in os.environ.items() if not n.startswith("FLYDSL_") and n != "ARCH"}
    package_root = str(Path(jax_sparse_mla.__file__).parents[1])
    return ours | {
        "ROCM_PATH": str(folder / "toolkit"),
        "FLYDSL_GPU_ARCH": contract.ARCH,
        "FLYDSL_RUNTIME_CACHE_DIR": str(folder / "flydsl"),
        "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")])),
    }
