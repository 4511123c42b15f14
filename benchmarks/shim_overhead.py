"""Host time that the shim's Execute adds to a custom call: ``python -m benchmarks.shim_overhead``.

One jitted program makes 200 custom calls, each fed by the one before. It is timed on the CPU
platform with two handlers that get the same operands and attributes: the shim, on a HIP library
whose calls return at once, and an empty handler. Both pay what XLA itself costs (thunk, call
frame), so the difference over 200 is the shim's: decoding attributes, checking shapes, finding the
kernel, filling arguments. HIP's own time to enqueue a kernel comes on top of it, on any road to the
GPU. Rounds of the two alternate, so that a busy machine slows both; the medians are compared.
"""

import argparse
import ctypes
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parents[1]
CALLS = 200
LIMIT_US = 3.0


def build(folder: Path) -> None:
    """Builds the shim's release code, the empty handler, the HIP library and a code object."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        raise SystemExit("cmake is needed: pip install 'jax_sparse_mla[test]'")
    subprocess.run(
        [
            *(cmake, "-S", str(ROOT / "csrc"), "-B", str(folder)),
            f"-DXLA_FFI_INCLUDE_DIR={jax.ffi.include_dir()}",
            *("-DJAX_SPARSE_MLA_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    targets = ["jax_sparse_mla_shim", "shim_driver", "null_hip", "empty_handler"]
    subprocess.run(
        [cmake, "--build", str(folder), "--target", *targets], check=True, stdout=subprocess.DEVNULL
    )
    driver = folder / "tests" / "shim_driver"
    subprocess.run([driver, "--code-object", folder / "kernel.hsaco"], check=True)


def register(folder: Path) -> None:
    """Registers targets "shim" and "empty" for the CPU."""
    os.environ["JAX_SPARSE_MLA_HIP_LIBRARY"] = str(folder / "tests" / "libnull_hip.so")
    for target, library, symbol in (
        ("shim", "libjax_sparse_mla_shim.so", "jax_sparse_mla_execute_host"),
        ("empty", "tests/libempty_handler.so", "empty_execute"),
    ):
        function = getattr(ctypes.CDLL(str(folder / library)), symbol)
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")


def program(target: str, code: bytes, rows: int, heads: int) -> Callable[[], jax.Array]:
    """A compiled program of CALLS custom calls in a chain."""
    results = (
        jax.ShapeDtypeStruct((rows, heads, 512), jnp.bfloat16),
        jax.ShapeDtypeStruct((rows, heads), jnp.float32),
    )
    call = jax.ffi.ffi_call(target, results)
    attributes = {
        "code": code,
        "code_hash": hashlib.sha256(code).digest(),
        "symbol": "sparse_mla_whole",
        "arch": "gfx950",
        "block_size": np.int32(256),
        "lds_bytes": np.int32(65536),
        "softmax_scale": np.float32(0.1),
        "num_splits": np.int32(1),
        "flags": np.int32(1),
    }

    def chain(q_latent: jax.Array, *others: jax.Array) -> jax.Array:
        for _ in range(CALLS):
            q_latent, _ = call(q_latent, *others, **attributes)
        return q_latent

    operands = (
        jnp.zeros((rows, heads, 512), jnp.bfloat16),
        jnp.zeros((rows, heads, 64), jnp.bfloat16),
        jnp.zeros((64, 656), jnp.uint8),
        jnp.zeros(rows * 8, jnp.int32),
        jnp.zeros(rows, jnp.int32),
        jnp.full(rows, 8, jnp.int32),
    )
    compiled = jax.jit(chain).lower(*operands).compile()
    return lambda: jax.block_until_ready(compiled(*operands))


def measure(rounds: int, folder: Path) -> dict[str, float]:
    """Microseconds a call, median over rounds, for each handler and their difference."""
    build(folder)
    register(folder)
    code = (folder / "kernel.hsaco").read_bytes()
    run = {target: program(target, code, rows=1, heads=16) for target in ("empty", "shim")}
    times: dict[str, list[float]] = {target: [] for target in run}
    for _ in range(rounds):
        for target, execute in run.items():
            begin = time.perf_counter()
            execute()
            times[target].append((time.perf_counter() - begin) / CALLS * 1e6)
    medians = {target: statistics.median(values) for target, values in times.items()}
    return medians | {"added by the shim": medians["shim"] - medians["empty"]}


def main() -> int:
    """Prints the table; the exit code is 1 when the shim adds more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "shim_overhead")
    options = parser.parse_args()
    if jax.default_backend() != "cpu":
        raise SystemExit("run it with JAX_PLATFORMS=cpu")
    result = measure(options.rounds, options.build)
    for name, microseconds in result.items():
        print(f"{name:18} {microseconds:6.2f} us a call")
    print(f"{'limit':18} {LIMIT_US:6.2f}")
    return int(result["added by the shim"] > LIMIT_US)


if __name__ == "__main__":
    sys.exit(main())
