"""``python -m jax_sparse_mla doctor``: what this machine would do, why, and what would mend it."""

import importlib.metadata
import os
import platform as host
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_sparse_mla import platform
from jax_sparse_mla.attention import sparse_mla_fwd
from jax_sparse_mla.kernel import compiler, contract, shim, toolchain
from jax_sparse_mla.kernel.code_object import read_folder
from jax_sparse_mla.kernel.specialisation import ALL
from jax_sparse_mla.records import pack_records, unpack_records

OK, NOTE, PROBLEM = "ok", "note", "PROBLEM"
OLDEST_JAX = (0, 10)
MAX_OUT_ERROR = 2.01 / 128
MAX_LSE_ERROR = 1e-5


class Finding(NamedTuple):
    """One line of the report."""

    state: str
    """``OK``; ``NOTE``: does not keep the op from working here; ``PROBLEM``: it does."""
    subject: str
    detail: str
    fix: str = ""
    """The line that mends it."""


def main() -> int:
    """Print every finding; 0 if the op works here, else 1."""
    problems = 0
    for finding in examine():
        print(f"{finding.state:8}{finding.subject:12}{finding.detail}")
        if finding.fix:
            print(f"{'':20}fix: {finding.fix}")
        problems += finding.state == PROBLEM
    print("the op works here" if not problems else f"{problems} problem(s): the op does not work")
    return 1 if problems else 0


def examine() -> Iterator[Finding]:
    """All findings, in the order in which one would look."""
    yield _jax()
    yield from _devices()
    wanted = kernel_wanted()
    yield _decision(wanted)
    yield from _shim_and_hip(wanted)
    if os.environ.get(compiler.PRECOMPILED_VARIABLE):
        yield _precompiled(wanted)
    else:
        yield _flydsl(wanted)
        yield _linker(wanted)
        yield _cache(wanted)
    yield _self_test("reference")
    if wanted:
        yield _self_test("kernel")


def kernel_wanted() -> bool:
    """Whether calls on this machine's devices can reach the kernel."""
    if platform.rocm_devices():
        try:
            return platform.use_kernel_on_rocm()
        except RuntimeError:
            return False
    return shim.host_platform_enabled()


def _jax() -> Finding:
    versions = f"jax {jax.__version__} on Python {host.python_version()}"
    if jax.__version_info__ < OLDEST_JAX:
        return Finding(PROBLEM, "jax", versions, "pip install --upgrade 'jax>=0.10'")
    return Finding(OK, "jax", versions)


def _devices() -> Iterator[Finding]:
    for name in ("jax-rocm7-plugin", "jax-rocm60-plugin"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        yield Finding(OK, "plugin", f"{name} {version}")
        if not platform.rocm_devices():
            yield Finding(
                NOTE,
                "plugin",
                "it shows JAX no ROCm device",
                "check rocm-smi, the user's groups (render, video) and ROCR_VISIBLE_DEVICES",
            )
    try:
        devices = jax.devices()
    except RuntimeError as error:
        yield Finding(PROBLEM, "devices", str(error), "check JAX_PLATFORMS")
        return
    kinds = sorted({(d.platform, d.device_kind) for d in devices})
    shown = ", ".join(f"{platform_} {kind}" for platform_, kind in kinds)
    yield Finding(OK, "devices", f"{len(devices)}: {shown}")
    archs = {
        platform.parse_arch(getattr(d, "compute_capability", "")) for d in platform.rocm_devices()
    }
    if len(archs) > 1:
        yield Finding(
            PROBLEM,
            "arch",
            f"ROCm devices of different architectures: {', '.join(sorted(archs))}",
            "hide all but one kind with ROCR_VISIBLE_DEVICES",
        )
    elif archs:
        yield Finding(OK, "arch", archs.pop())


def _decision(wanted: bool) -> Finding:
    if platform.rocm_devices():
        choice = (
            f"the kernel: the devices are {contract.ARCH}"
            if wanted
            else f"the reference, if any: not all devices are {contract.ARCH}"
        )
    elif wanted:
        choice = (
            f'the reference; implementation="kernel" runs on "cpu", {shim.HIP_LIBRARY_VARIABLE} is '
            "set"
        )
    else:
        choice = "the reference: there is no ROCm device"
    return Finding(OK, "choice", choice)


def _shim_and_hip(wanted: bool) -> Iterator[Finding]:
    try:
        shim.register_kernel()
        hip_error = shim.hip_error()
    except RuntimeError as error:
        fix = "pip install --force-reinstall jax-sparse-mla (needs a C++17 compiler)"
        yield _needed_for_kernel(wanted, "shim", str(error), fix)
        return
    yield Finding(OK, "shim", str(shim.find()))
    if hip_error:
        fix = "install ROCm's HIP runtime, or the jax-rocm7-plugin that brings it"
        yield _needed_for_kernel(wanted, "HIP", hip_error, fix)
    else:
        named = os.environ.get(shim.HIP_LIBRARY_VARIABLE)
        yield Finding(OK, "HIP", named or "the system's libamdhip64")


def _precompiled(wanted: bool) -> Finding:
    folder = Path(os.environ[compiler.PRECOMPILED_VARIABLE])
    try:
        for specialisation in ALL:
            read_folder(folder, specialisation, compiler.source_hash())
    except ValueError as error:
        fix = f"python -m jax_sparse_mla precompile --out {folder}"
        return _needed_for_kernel(wanted, "precompiled", str(error), fix)
    return Finding(OK, "precompiled", f"{len(ALL)} kernels in {folder}")


def _flydsl(wanted: bool) -> Finding:
    version = toolchain.flydsl_version()
    if version is None:
        return _needed_for_kernel(wanted, "FlyDSL", "not installed", "pip install flydsl")
    return Finding(OK, "FlyDSL", version)


def _linker(wanted: bool) -> Finding:
    linker = toolchain.find_linker()
    if linker is None:
        fix = "pip install ziglang, or set ROCM_PATH to a ROCm installation"
        return _needed_for_kernel(wanted, "linker", "no ld.lld found", fix)
    return Finding(OK, "linker", " ".join(linker))


def _cache(wanted: bool) -> Finding:
    try:
        folder = compiler.cache_folder()
    except compiler.CompileError as error:
        return _needed_for_kernel(
            wanted, "cache", str(error), f"export {compiler.CACHE_VARIABLE}=a folder to write to"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding(
            NOTE,
            "cache",
            f"{folder} cannot be written ({error}): each process compiles anew",
            f"export {compiler.CACHE_VARIABLE}=a folder that can be written",
        )
    kept = sum(1 for s in ALL if (folder / compiler.entry_name(s)).exists())
    return Finding(OK, "cache", f"{folder} holds {kept} of {len(ALL)} kernels")


def _needed_for_kernel(wanted: bool, subject: str, detail: str, fix: str) -> Finding:
    if wanted:
        return Finding(PROBLEM, subject, detail, fix)
    return Finding(NOTE, subject, f"{detail} (only the kernel needs it)", fix)


def _self_test(implementation: str) -> Finding:
    try:
        out_error, lse_error = self_test_errors(implementation)
    except Exception as error:  # any failure is what this looks for
        if os.environ.get("JAX_TRACEBACK_FILTERING") == "off":
            traceback.print_exc()
        lines = (str(error).strip() or repr(error)).splitlines()
        summary = " ... ".join(dict.fromkeys([lines[0], lines[-1]]))
        return Finding(
            PROBLEM,
            implementation,
            f"one row fails: {type(error).__name__}: {summary}",
            "mend the problems above; JAX_TRACEBACK_FILTERING=off shows the whole error",
        )
    detail = (
        f"one row, relative error of out {out_error:.1e}, absolute error of lse {lse_error:.1e}"
    )
    # Not "greater than": an error that is NaN must not pass.
    if not (out_error <= MAX_OUT_ERROR and lse_error <= MAX_LSE_ERROR):
        return Finding(
            PROBLEM, implementation, f"wrong: {detail}", "report it, with this output, as a bug"
        )
    return Finding(OK, implementation, detail)


def self_test_errors(implementation: str) -> tuple[float, float]:
    """Largest errors of one row of 16 heads and 200 entries against float64 NumPy.

    Returns:
      The error of out relative to its largest element, and the absolute error of lse.
    """
    rng = np.random.default_rng(0)
    heads, entries, records, scale = 16, 200, 256, 576**-0.5
    q = jnp.asarray(rng.standard_normal((1, heads, 576)), jnp.bfloat16)
    latent = jnp.asarray(rng.standard_normal((records, 512)), jnp.float32)
    rope = jnp.asarray(rng.standard_normal((records, 64)), jnp.bfloat16)
    kv = pack_records(latent, rope)
    indices = rng.integers(0, records, (1, entries)).astype(np.int32)

    call: Callable[..., tuple[jax.Array, jax.Array]] = jax.jit(
        lambda q, kv, indices: sparse_mla_fwd(
            q, kv, None, indices, scale, return_lse=True, implementation=implementation
        )
    )
    out, lse = call(q, kv, jnp.asarray(indices))

    keys = np.concatenate([np.asarray(x, np.float64) for x in unpack_records(kv)], -1)[indices[0]]
    logits = scale * np.asarray(q[0], np.float64) @ keys.T
    peak = logits.max(-1, keepdims=True)
    weights = np.exp(logits - peak)
    total = weights.sum(-1, keepdims=True)
    expected = weights / total @ keys[:, :512]
    out_error = np.abs(np.asarray(out[0], np.float64) - expected).max() / np.abs(expected).max()
    lse_error = np.abs(np.asarray(lse[0], np.float64) - (peak + np.log(total))[:, 0]).max()
    return float(out_error), float(lse_error)
