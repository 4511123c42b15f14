"""Find, check and register the FFI shim, the shared library that launches the kernel.

The library is built from ``csrc/`` when the package is installed and loads on any machine: HIP is
opened by the first launch.
"""

import ctypes
import os
import threading
from pathlib import Path

import jax

from jax_sparse_mla import kernel
from jax_sparse_mla.kernel import contract

LIBRARY_NAME = "libjax_sparse_mla_shim.so"
HIP_LIBRARY_VARIABLE = "JAX_SPARSE_MLA_HIP_LIBRARY"
"""Names a HIP library to open instead of the system's; the kernel then runs on "cpu" too."""

KERNEL_TARGET = f"jax_sparse_mla_fwd_v{contract.VERSION}"
"""Name of the custom call's target; a program exported under another contract does not find it."""

_lock = threading.Lock()
_registered: set[str] = set()


def find() -> Path | None:
    """The shim's path, or None if it is not built.

    An editable install keeps it apart from the sources, so every folder of the package counts.
    """
    for folder in kernel.__path__:
        path = Path(folder, LIBRARY_NAME)
        if path.is_file():
            return path
    return None


def host_platform_enabled() -> bool:
    """Whether the environment names a HIP library, so that the kernel runs on "cpu" too."""
    return bool(os.environ.get(HIP_LIBRARY_VARIABLE))


def load() -> ctypes.CDLL:
    """The shim, checked to be of this package's launch contract.

    Raises:
      RuntimeError: the shim is not built, cannot be loaded, or was built for another contract.
    """
    path = find()
    if path is None:
        looked = ", ".join(str(folder) for folder in kernel.__path__)
        raise RuntimeError(
            f"the FFI shim is not built: no {LIBRARY_NAME} in {looked}. Install the package with"
            " pip (`pip install .` or `pip install -e .`); that needs a C++17 compiler, not ROCm."
            " See BUILD.md."
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"the FFI shim cannot be loaded: {error}") from error
    built_for = _text(library, "jax_sparse_mla_contract")
    if built_for != expected_contract():
        raise RuntimeError(
            f"the FFI shim {path} was built for another launch contract than this package has:"
            f" install the package again. Shim: {built_for}. Package: {expected_contract()}."
        )
    return library


def register_kernel() -> None:
    """Make the kernel's launch known to XLA in this process; calling it again does nothing.

    A process that only loads an exported program calls it before it calls the program. One that
    traces the op need not: lowering the kernel calls it.

    The custom call's target, ``KERNEL_TARGET``, is registered for "ROCM", whether such a device is
    there or not, and for "cpu" when ``JAX_SPARSE_MLA_HIP_LIBRARY`` is set. Neither FlyDSL nor HIP
    is looked for.

    Raises:
      RuntimeError: the shim is not built, cannot be loaded, or was built for another launch
        contract.
    """
    platforms = {"ROCM": "jax_sparse_mla_execute"}
    if host_platform_enabled():
        platforms["cpu"] = "jax_sparse_mla_execute_host"
    with _lock:
        missing = platforms.keys() - _registered
        library = load() if missing else None
        for platform in missing:
            stages = {"initialize": "jax_sparse_mla_initialize", "execute": platforms[platform]}
            capsules = {
                stage: jax.ffi.pycapsule(getattr(library, name)) for stage, name in stages.items()
            }
            jax.ffi.register_ffi_target(KERNEL_TARGET, capsules, platform=platform)
            _registered.add(platform)


def hip_error() -> str | None:
    """Why the shim finds no HIP runtime to use, or None if it does.

    Raises:
      RuntimeError: as `load`.
    """
    return _text(load(), "jax_sparse_mla_hip_error") or None


def expected_contract() -> str:
    """The launch contract of this package, in the form in which the shim states its own."""
    entries = [*contract.OUT_KINDS.items(), *contract.ARGUMENTS]
    return " ".join([str(contract.VERSION), *(f"{name}:{kind}" for name, kind in entries)])


def _text(library: ctypes.CDLL, name: str) -> str:
    try:
        function = getattr(library, name)
    except AttributeError:
        raise RuntimeError(
            f"the FFI shim {library._name} is of another version of this package (it has no"
            f" {name}): install the package again."
        ) from None
    function.restype = ctypes.c_char_p
    return str(function().decode())
