"""The FFI shim: its C++ driver, and what JAX sees of it."""

import fcntl
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gfx950_sim.hip
import jax
import pytest

from jax_sparse_mla.kernel import contract, shim, specialisation

ROOT = Path(__file__).parents[1]
BUILD_FOLDER = ROOT / "build" / "shim_tests"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lets one process at a time build in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def driver() -> Path:
    """The build folder of the C++ driver; its sources are compiled as one file, quickly."""
    folder = BUILD_FOLDER / f"jax-{jax.__version__}"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake, ninja = shutil.which("cmake", path=path), shutil.which("ninja", path=path)
    assert cmake is not None, "the test extra installs it"
    assert ninja is not None, "the test extra installs it"
    configure = [
        *(cmake, "-S", str(ROOT / "csrc"), "-B", str(folder), "-G", "Ninja"),
        *(f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DXLA_FFI_INCLUDE_DIR={jax.ffi.include_dir()}"),
        *("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_UNITY_BUILD=ON"),
        *("-DJAX_SPARSE_MLA_TESTS=ON", "-DJAX_SPARSE_MLA_WERROR=ON"),
    ]
    with locked(folder):
        for command in (configure, [cmake, "--build", str(folder)]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def code_file(driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A code object whose kernels take the contract's arguments and end at once."""
    path = tmp_path_factory.mktemp("shim") / "code_object.hsaco"
    subprocess.run([driver / "tests" / "shim_driver", "--code-object", path], check=True)
    return path


def test_driver(driver: Path) -> None:
    done = subprocess.run(
        [
            driver / "tests" / "shim_driver",
            driver / "libjax_sparse_mla_shim.so",
            driver / "tests" / "libsimulated_hip.so",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed, failed = (int(part.split()[0]) for part in done.stdout.splitlines()[-1].split(","))
    assert passed >= 30
    assert failed == 0


@pytest.mark.slow  # builds release code
def test_overhead_is_within_its_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.shim_overhead", "--rounds", "100"],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


PRELUDE = '''
import hashlib, os, re, sys, threading
import jax, jax.numpy as jnp, numpy as np
from pathlib import Path
from jax_sparse_mla.kernel import contract, shim, specialisation
from gfx950_sim.hip import Control

CODE = Path(sys.argv[1]).read_bytes()
HIP = os.environ["JAX_SPARSE_MLA_HIP_LIBRARY"]


def call(
    target=shim.KERNEL_TARGET, n=3, heads=16, q_dtype=jnp.bfloat16, out_dtype=jnp.bfloat16,
    code=CODE, **changed
):
    """One jitted custom call, as the lowering makes it, on operands of zeros."""
    attributes = dict(
        code=code, code_hash=hashlib.sha256(code).digest(), symbol="sparse_mla_whole",
        arch="gfx950", block_size=np.int32(256), lds_bytes=np.int32(65536),
        softmax_scale=np.float32(0.125), num_splits=np.int32(1), flags=np.int32(1),
    ) | changed
    results = (
        jax.ShapeDtypeStruct((n, heads, 512), out_dtype),
        jax.ShapeDtypeStruct((n, heads), jnp.float32),
    )
    operands = (
        jnp.zeros((n, heads, 512), q_dtype), jnp.zeros((n, heads, 64), jnp.bfloat16),
        jnp.zeros((100, 656), jnp.uint8), jnp.zeros(40, jnp.int32), jnp.zeros(n, jnp.int32),
        jnp.zeros(n, jnp.int32),
    )
    run = jax.jit(lambda *xs: jax.ffi.ffi_call(target, results)(*xs, **attributes))
    return jax.block_until_ready(run(*operands))


def expect_error(pattern, **arguments):
    try:
        call(**arguments)
    except jax.errors.JaxRuntimeError as error:
        assert re.search(pattern, str(error)), str(error)
    else:
        raise AssertionError(f"no error, wanted {pattern}")


def loads():
    return [c.device for c in Control(HIP).calls() if c.name == "hipModuleLoadData"]
'''


def run_python(script: str, code_file: Path, **environment: str) -> str:
    """Runs a script after the prelude in a process of its own, where HIP checks launches only."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(code_file)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT / "tests"),
            "JAX_PLATFORMS": "cpu",
            "JAX_SPARSE_MLA_HIP_LIBRARY": str(gfx950_sim.hip.build()),
            "GFX950_SIM_HIP_LAUNCH": "check",
        }
        | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_errors_reach_python(code_file: Path) -> None:
    """Faults become JaxRuntimeErrors with the shim's message, and the next call works."""
    run_python(
        """
        shim.register_kernel()
        call()
        expect_error("INVALID_ARGUMENT.*'q_latent' must be BF16, got F32", q_dtype=jnp.float32)
        expect_error("'num_splits' must be at least 1, got 0", num_splits=np.int32(0))
        expect_error("'flags': Wrong scalar data type: expected S32 but got S64", flags=np.int64(1))
        expect_error("expected 9 attributes, got 10", spare=np.int32(0))
        expect_error("does not have the hash", code_hash=bytes(32))
        expect_error("'arch' is 'gfx942' but the code object is for gfx950", arch="gfx942")
        expect_error("has no kernel 'other_whole'", symbol="other_whole")
        expect_error("'symbol' must end in _whole or _partial, got 'other'", symbol="other")
        expect_error("'lds_bytes' is 1 but", lds_bytes=np.int32(1))
        expect_error("the code object is truncated", code=CODE[:-1])
        Control(HIP).fail("hipModuleLaunchKernel", 719)
        expect_error(r"INTERNAL.*hipModuleLaunchKernel failed: hipErrorLaunchFailure \\(719\\)")
        call()
        assert len(loads()) == 1, loads()
        """,
        code_file,
    )


def test_out_is_of_the_kernels_dtype(code_file: Path) -> None:
    """A kernel that would write twice the bytes of ``out``, or half of them, is not launched."""
    run_python(
        """
        shim.register_kernel()
        call(symbol="sparse_mla_partial", out_dtype=jnp.float32)
        expect_error(
            "INVALID_ARGUMENT.*'out' must be F32 for kernel 'sparse_mla_partial', got BF16",
            symbol="sparse_mla_partial",
        )
        expect_error(
            "INVALID_ARGUMENT.*'out' must be BF16 for kernel 'sparse_mla_whole', got F32",
            out_dtype=jnp.float32,
        )
        assert Control(HIP).launch_count() == 1
        """,
        code_file,
    )


@pytest.mark.parametrize("kernel", specialisation.ALL)
def test_a_kernels_name_says_what_it_writes(kernel: specialisation.Specialisation) -> None:
    (kind,) = (kind for end, kind in contract.OUT_KINDS.items() if kernel.name.endswith(end))
    assert kind == ("f32" if kernel.partial else "bf16")


def test_target_of_another_contract_is_named(code_file: Path) -> None:
    """A program exported under another contract names a target that nobody registered."""
    run_python(
        """
        shim.register_kernel()
        expect_error("jax_sparse_mla_fwd_v0", target="jax_sparse_mla_fwd_v0")
        call()
        """,
        code_file,
    )


def test_another_device_arch_names_the_way_out(code_file: Path) -> None:
    run_python(
        """
        shim.register_kernel()
        expect_error(
            'FAILED_PRECONDITION.*compiled for gfx950 but device 0 is gfx942.*"reference"'
        )
        """,
        code_file,
        GFX950_SIM_HIP_ARCH="gfx942",
    )


def test_missing_hip_library_is_named(code_file: Path) -> None:
    run_python(
        """
        shim.register_kernel()
        expect_error("UNAVAILABLE.*JAX_SPARSE_MLA_HIP_LIBRARY names: /nowhere/libamdhip64.so")
        """,
        code_file,
        JAX_SPARSE_MLA_HIP_LIBRARY="/nowhere/libamdhip64.so",
    )


def test_one_load_a_device_over_threads_executables_and_backends(code_file: Path) -> None:
    run_python(
        """
        from jax.extend import backend

        def on(device, n):
            with jax.default_device(device):
                call(n=n)

        def everywhere():
            threads = [
                threading.Thread(target=on, args=(device, n))
                for device in jax.devices() for n in (1, 2)
            ]
            for thread in threads: thread.start()
            for thread in threads: thread.join()

        registering = [threading.Thread(target=shim.register_kernel) for _ in range(16)]
        for thread in registering: thread.start()
        for thread in registering: thread.join()
        assert len(jax.devices()) == 4
        everywhere()
        assert sorted(loads()) == [0, 1, 2, 3], loads()
        launches = Control(HIP).launch_count()
        assert launches == 8, launches
        backend.clear_backends()
        jax.clear_caches()
        shim.register_kernel()
        everywhere()
        assert sorted(loads()) == [0, 1, 2, 3], loads()
        assert Control(HIP).launch_count() == 2 * launches
        """,
        code_file,
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )


def test_grid_is_the_contracts(code_file: Path) -> None:
    """The shim counts workgroups as contract.num_workgroups does."""
    run_python(
        """
        from gfx950_sim.hip.handler import _LAUNCHER

        grids = []

        @_LAUNCHER
        def launcher(launch, text, size, user):
            grids.append(tuple(launch.contents.grid))
            return 0

        Control(HIP).library.simhip_set_launcher(launcher, None)
        shim.register_kernel()
        shapes = [(1, 1), (7, 16), (7, 17), (8, 32), (9, 33), (16, 128), (3, 129), (1, 512)]
        for rows, heads in shapes:
            call(n=rows, heads=heads)
        assert grids == [(contract.num_workgroups(*shape), 1, 1) for shape in shapes], grids
        """,
        code_file,
        GFX950_SIM_HIP_LAUNCH="simulate",
    )


def test_registers_without_hip(code_file: Path) -> None:
    """On a machine without ROCm the target registers; only "cpu" needs a named library."""
    output = run_python(
        """
        shim.register_kernel()
        shim.register_kernel()
        print(sorted(shim._registered), shim.hip_error())
        expect_error(shim.KERNEL_TARGET)
        """,
        code_file,
        JAX_SPARSE_MLA_HIP_LIBRARY="",
    )
    assert output.splitlines()[-1].startswith("['ROCM'] ")


def test_hip_that_the_process_has_comes_first(
    driver: Path, code_file: Path, tmp_path: Path
) -> None:
    """The plugin's HIP serves, even where another of an earlier name could be opened."""
    shutil.copyfile(driver / "libjax_sparse_mla_shim.so", tmp_path / "libamdhip64.so.7")
    loaded = str(driver / "tests" / "libsimulated_hip.so")
    environment = {"JAX_SPARSE_MLA_HIP_LIBRARY": "", "LD_LIBRARY_PATH": str(tmp_path)}
    run_python(
        'assert "no hipGetDevice" in shim.hip_error(), shim.hip_error()', code_file, **environment
    )
    run_python(
        f"""
        import ctypes
        ctypes.CDLL({loaded!r})
        assert shim.hip_error() is None, shim.hip_error()
        """,
        code_file,
        **environment,
    )


def test_shim_is_found_and_of_this_contract() -> None:
    path = shim.find()
    assert path is not None
    assert path.name == shim.LIBRARY_NAME
    shim.register_kernel()
    assert shim.hip_error() is None


def test_shim_that_is_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shim.kernel, "__path__", [str(tmp_path)])
    assert shim.find() is None
    with pytest.raises(RuntimeError, match=r"not built: no libjax_sparse_mla_shim\.so in .*pip"):
        shim.load()


def test_shim_of_another_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "VERSION", contract.VERSION + 1)
    with pytest.raises(RuntimeError, match=r"another launch contract .* install the package again"):
        shim.load()


def test_library_that_is_no_shim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shim.kernel, "__path__", [str(tmp_path)])
    library = tmp_path / shim.LIBRARY_NAME
    library.write_bytes(b"not a library")
    with pytest.raises(RuntimeError, match=r"cannot be loaded"):
        shim.load()
    library.unlink()
    shutil.copyfile(gfx950_sim.hip.build(), library)
    with pytest.raises(RuntimeError, match=r"another version .* no jax_sparse_mla_contract"):
        shim.load()
