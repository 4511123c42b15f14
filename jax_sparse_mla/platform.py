"""Which lowering a ROCm program gets: the kernel on gfx950, the reference on another GPU."""

import logging
import threading
from collections.abc import Iterable

import jax

from jax_sparse_mla.kernel.contract import ARCH

_logger = logging.getLogger(__name__)

DEFAULT_CORE_COUNT = 256
"""Compute units where no ROCm device is there to ask: those of an MI350X and an MI355X."""

_log_lock = threading.Lock()
_logged: set[str] = set()


def parse_arch(compute_capability: str) -> str:
    """The architecture in a compute capability: "gfx950" of "gfx950:sramecc+:xnack-"."""
    return str(compute_capability).partition(":")[0].strip()


def rocm_devices() -> list[jax.Device]:
    """The ROCm devices JAX knows in this process, none where there is no ROCm backend."""
    try:
        return list(jax.devices("rocm"))
    except RuntimeError:
        return []


def kernel_serves(archs: Iterable[str]) -> bool:
    """Whether the rocm lowering is the kernel, given the architectures of the ROCm devices.

    No device, or none that says what it is, means that the program is lowered for elsewhere (an
    export host): the kernel, whose launch checks the architecture again. Another architecture than
    gfx950 gets the reference, and one line in the log says so once a process.

    Raises:
      RuntimeError: the devices have different architectures, so no single program serves them.
    """
    found = sorted({arch for arch in archs if arch})
    if not found or found == [ARCH]:
        return True
    if len(found) > 1:
        raise RuntimeError(
            f"the ROCm devices of this process have different architectures ({', '.join(found)}); "
            "one lowering cannot serve them. Hide all but one kind with ROCR_VISIBLE_DEVICES, or "
            'pass implementation="reference".'
        )
    with _log_lock:
        first = found[0] not in _logged
        _logged.add(found[0])
    if first:
        _logger.warning(
            "sparse_mla_fwd: the kernel needs %s, these devices are %s: using the reference",
            ARCH,
            found[0],
        )
    return False


def use_kernel_on_rocm() -> bool:
    """Whether a program lowered for ROCm now, in this process, gets the kernel."""
    return kernel_serves(parse_arch(getattr(d, "compute_capability", "")) for d in rocm_devices())


def core_count() -> int:
    """Compute units of the ROCm devices of this process, 256 when unknown."""
    counts = [getattr(d, "core_count", None) for d in rocm_devices()]
    known = [int(c) for c in counts if c]
    return min(known, default=DEFAULT_CORE_COUNT)
