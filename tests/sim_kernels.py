"""Small FlyDSL kernels that the simulator's tests run, and their code objects.

FlyDSL wants torch to be importable and its settings in the environment, so all kernels are compiled
together in one child process: this file run as a script, ``sim_kernels.py FOLDER``.
"""

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gfx950_sim import CodeObject, Kernel, Memory, RunResult, run

from jax_sparse_mla.kernel import toolchain, worker

Array = np.ndarray[Any, Any]


@functools.cache
def code_objects() -> dict[str, bytes]:
    """The ELF of every kernel of this file, by kernel name; compiled on the first call."""
    linker = toolchain.find_linker()
    if linker is None:
        raise RuntimeError("compiling the test kernels needs ld.lld: pip install ziglang")
    with tempfile.TemporaryDirectory(prefix="sim-kernels-") as scratch:
        folder = Path(scratch)
        toolchain.write_toolkit(folder / "toolkit", linker)
        repository = str(Path(__file__).parents[1])
        environment = {n: v for n, v in os.environ.items() if not n.startswith("FLYDSL_")} | {
            "ROCM_PATH": str(folder / "toolkit"),
            "FLYDSL_GPU_ARCH": "gfx950",
            "FLYDSL_RUNTIME_CACHE_DIR": str(folder / "flydsl"),
            "PYTHONPATH": os.pathsep.join(filter(None, [repository, os.environ.get("PYTHONPATH")])),
        }
        child = subprocess.run(
            [sys.executable, __file__, scratch],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        if child.returncode:
            raise RuntimeError(f"compiling the test kernels failed:\n{child.stdout}{child.stderr}")
        return {name: (folder / name).read_bytes() for name in NAMES}


@dataclass
class Problem:
    """A launch of one of the kernels with fresh arrays, and the check of its results."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    inputs: dict[str, Array]
    outputs: dict[str, Array]
    scalars: tuple[int | float, ...]
    check: Callable[[dict[str, Array]], None]
    """Given the outputs, raises AssertionError where they are wrong."""

    def run(self, kernel: Kernel | None = None, **options: Any) -> RunResult:
        """Run the kernel, or another version of it; faults are collected, not raised."""
        memory = Memory()
        args: list[int | float] = [
            memory.map(array, name=name, writable=name in self.outputs)
            for name, array in (self.inputs | self.outputs).items()
        ]
        args += self.scalars
        options = {"strict": False} | options
        kernel = self.kernel if kernel is None else kernel
        return run(kernel, self.grid, self.block, args, memory, **options)

    @property
    def kernel(self) -> Kernel:
        """The kernel as FlyDSL compiled it."""
        return kernels()[self.name]


@functools.cache
def kernels() -> dict[str, Kernel]:
    """Every kernel of this file, parsed."""
    found = {}
    for name, elf in code_objects().items():
        code = CodeObject(elf)
        (metadata,) = code.metadata["amdhsa.kernels"]
        found[name] = code.kernel(metadata[".name"])
    return found


def problem(name: str) -> Problem:
    """A problem of the size the tests use."""
    return _PROBLEMS[name](np.random.default_rng(11))


def _elementwise(rng: np.random.Generator) -> Problem:
    n, a = 600, 1.5  # 3 workgroups, the last with lanes off
    x = rng.standard_normal(n).astype(np.float32)
    k = rng.integers(-1000, 1000, n).astype(np.int32)

    def check(outputs: dict[str, Array]) -> None:
        np.testing.assert_allclose(outputs["out"], a * x.astype(np.float64) + k, rtol=2**-23)

    out = {"out": np.full(n, np.nan, np.float32)}
    return Problem("elementwise", (3, 1, 1), (256, 1, 1), {"x": x, "k": k}, out, (a, n), check)


def _row_sum(rng: np.random.Generator) -> Problem:
    x = rng.standard_normal((3, 512)).astype(np.float32)

    def check(outputs: dict[str, Array]) -> None:
        exact = x.astype(np.float64)
        error = np.abs(outputs["out"] - exact.sum(1))
        assert (error <= np.abs(exact).sum(1) * 2.0**-22).all()

    out = {"out": np.full(3, np.nan, np.float32)}
    return Problem("row_sum", (3, 1, 1), (256, 1, 1), {"x": x}, out, (), check)


def _product_check(a: Array, b: Array) -> Callable[[dict[str, Array]], None]:
    def check(outputs: dict[str, Array]) -> None:
        error = np.abs(outputs["c"] - a @ b.T)
        assert (error <= np.abs(a) @ np.abs(b).T * 2.0**-22).all()

    return check


def _mma(name: str, dtype: Any) -> Callable[[np.random.Generator], Problem]:
    def make(rng: np.random.Generator) -> Problem:
        a, b = (rng.standard_normal((16, 96)).astype(dtype) for _ in range(2))
        inputs = {"a": a.view(np.uint16), "b": b.view(np.uint16)}
        c = {"c": np.full((16, 16), np.nan, np.float32)}
        check = _product_check(a.astype(np.float64), b.astype(np.float64))
        return Problem(name, (1, 1, 1), (64, 1, 1), inputs, c, (96,), check)

    return make


def _mma_fp8_scaled(rng: np.random.Generator) -> Problem:
    k = 1024
    inputs, values = {}, []
    scales = {}
    for side in ("a", "b"):
        data = rng.standard_normal((16, k)).astype(ml_dtypes.float8_e4m3fn)
        codes = rng.integers(107, 147, (16, k // 32)).astype(np.uint8)
        values.append(
            data.astype(np.float64) * np.ldexp(1.0, codes.astype(int) - 127).repeat(32, 1)
        )
        inputs[side] = data.view(np.uint8)
        # [row, chunk, step, g] to the kernel's [row, chunk, g, step].
        by_step = codes.reshape(16, k // 512, 4, 4).transpose(0, 1, 3, 2)
        scales[f"scale_{side}"] = np.ascontiguousarray(by_step)
    c = {"c": np.full((16, 16), np.nan, np.float32)}
    check = _product_check(*values)
    return Problem("mma_fp8_scaled", (1, 1, 1), (64, 1, 1), inputs | scales, c, (k,), check)


def _dma_transpose(name: str, dtype: Any) -> Callable[[np.random.Generator], Problem]:
    def make(rng: np.random.Generator) -> Problem:
        x = rng.integers(0, 256, (3, 64, 64)).astype(dtype) * dtype(201)

        def check(outputs: dict[str, Array]) -> None:
            np.testing.assert_array_equal(outputs["out"], x.transpose(0, 2, 1))

        out = {"out": np.zeros_like(x)}
        return Problem(name, (1, 1, 1), (256, 1, 1), {"x": x}, out, (3,), check)

    return make


def _buffer_copy(rng: np.random.Generator) -> Problem:
    n = 997
    x = rng.standard_normal(n).astype(np.float32)

    def check(outputs: dict[str, Array]) -> None:
        np.testing.assert_array_equal(outputs["out"], x)
        np.testing.assert_array_equal(outputs["seen"], np.pad(x, (0, 1280 - n)))

    outputs = {
        "out": np.full(n, np.nan, np.float32),
        "seen": np.full(1280, np.nan, np.float32),
    }
    return Problem("buffer_copy", (5, 1, 1), (64, 1, 1), {"x": x}, outputs, (n,), check)


_PROBLEMS: dict[str, Callable[[np.random.Generator], Problem]] = {
    "elementwise": _elementwise,
    "row_sum": _row_sum,
    "mma_f16": _mma("mma_f16", np.float16),
    "mma_bf16": _mma("mma_bf16", ml_dtypes.bfloat16),
    "mma_fp8_scaled": _mma_fp8_scaled,
    "dma_transpose_b16": _dma_transpose("dma_transpose_b16", np.uint16),
    "dma_transpose_b8": _dma_transpose("dma_transpose_b8", np.uint8),
    "buffer_copy": _buffer_copy,
}
NAMES = tuple(_PROBLEMS)
"""The kernels of this file."""


def _define() -> dict[str, Callable[[], Any]]:
    """Name to a function that compiles the kernel. Imports FlyDSL, so only the child calls it."""
    import flydsl.compiler as flyc
    import flydsl.expr as fx
    from flydsl._mlir import ir
    from flydsl._mlir.dialects import llvm
    from flydsl.expr import range_constexpr

    no_stream = fx.Stream(None)

    def null(dtype: Any) -> Any:
        return flyc.from_c_void_p(dtype, None)

    def intrinsic(result: Any, name: str, *operands: Any) -> Any:
        return llvm.call_intrinsic(result, f"llvm.amdgcn.{name}", list(operands), [], [])

    def lds_pointer(address: Any) -> Any:
        return llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address.ir_value())

    def int32(value: int) -> Any:
        return fx.Int32(value).ir_value()

    def vector(count: int, dtype: Any) -> Any:
        return fx.Vector.make_type(count, dtype)

    def load(pointer: Any, offset: Any, count: int, dtype: Any) -> Any:
        """`count` items from item `offset` on, in one access."""
        alignment = count * dtype.width // 8
        result = vector(count, dtype)
        loaded = llvm.LoadOp(result, (pointer + offset).llvm_ptr, alignment=alignment).result
        return fx.Vector(loaded, (count,), dtype)

    # elementwise: out[i] = a * x[i] + float(k[i]), i < n; the last workgroup has lanes off.

    @flyc.kernel
    def elementwise(x: fx.Pointer, k: fx.Pointer, out: fx.Pointer, a: fx.Float32, n: fx.Int32):
        i = fx.block_idx.x * fx.block_dim.x + fx.thread_idx.x
        if i < n:
            out[i] = x[i] * a + fx.Float32(k[i])

    @flyc.jit
    def elementwise_launch(
        x: fx.Pointer,
        k: fx.Pointer,
        out: fx.Pointer,
        a: fx.Float32,
        n: fx.Int32,
        stream: fx.Stream = no_stream,
    ):
        elementwise(x, k, out, a, n).launch(
            grid=((n + 255) // 256, 1, 1), block=(256, 1, 1), stream=stream
        )

    # row_sum: out[row] = sum of x[row, 0:512], a row a workgroup of 4 waves: lanes, then waves
    # through LDS.

    @flyc.kernel(known_block_size=[256, 1, 1])
    def row_sum(x: fx.Pointer, out: fx.Pointer):
        partial = fx.SharedAllocator().allocate(fx.Array[fx.Float32, 4, 16]).peek()
        thread = fx.Int32(fx.thread_idx.x)
        row = fx.Int32(fx.block_idx.x)
        pair = load(x, row * 512 + thread * 2, 2, fx.Float32)
        total = pair[0] + pair[1]
        for distance in (1, 2, 4, 8, 16, 32):
            total = total + fx.gpu.shuffle_xor(total, distance, 64)
        if thread % 64 == 0:
            partial[thread // 64] = total
        fx.gpu.barrier()
        if thread == 0:
            out[row] = (partial[0] + partial[1]) + (partial[2] + partial[3])

    @flyc.jit
    def row_sum_launch(
        x: fx.Pointer, out: fx.Pointer, rows: fx.Int32, stream: fx.Stream = no_stream
    ):
        row_sum(x, out).launch(grid=(rows, 1, 1), block=(256, 1, 1), stream=stream)

    # mma_f16, mma_bf16: c[16, 16] = a[16, k] b[16, k]^T by one wave, 32 of k at a time.

    def mma(dtype: Any, instruction: Any) -> Callable[[], Any]:
        @flyc.kernel(known_block_size=[64, 1, 1])
        def kernel(a: fx.Pointer, b: fx.Pointer, c: fx.Pointer, k: fx.Int32):
            lane = fx.Int32(fx.thread_idx.x)
            t, g = lane % 16, lane // 16
            offset = t * k + g * 8
            sums = fx.Vector.filled(4, 0.0, fx.Float32).ir_value()
            for start in range(fx.Int32(0), k, fx.Int32(32)):
                left = load(a, offset + start, 8, dtype).ir_value()
                right = load(b, offset + start, 8, dtype).ir_value()
                sums = instruction(vector(4, fx.Float32), [left, right, sums, 0, 0, 0])
            result = fx.Vector(sums, (4,), fx.Float32)
            for r in range_constexpr(4):
                c[(g * 4 + r) * 16 + t] = result[r]

        @flyc.jit
        def launch(
            a: fx.Pointer,
            b: fx.Pointer,
            c: fx.Pointer,
            k: fx.Int32,
            stream: fx.Stream = no_stream,
        ):
            kernel(a, b, c, k).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

        return lambda: flyc.compile(launch, null(dtype), null(dtype), null(fx.Float32), fx.Int32(0))

    # mma_fp8_scaled: c[16, 16] = a[16, k] b[16, k]^T in e4m3 with an E8M0 scale for each row and 32
    # of k, by one wave. Scale words: [16, k / 512, 4], byte s of word (row, chunk, g) scales k =
    # 512 chunk + 128 s + 32 g ...

    @flyc.kernel(known_block_size=[64, 1, 1])
    def mma_fp8_scaled(
        a: fx.Pointer,
        b: fx.Pointer,
        scale_a: fx.Pointer,
        scale_b: fx.Pointer,
        c: fx.Pointer,
        k: fx.Int32,
    ):
        lane = fx.Int32(fx.thread_idx.x)
        t, g = lane % 16, lane // 16
        sums = fx.Vector.filled(4, 0.0, fx.Float32).ir_value()
        for start in range(fx.Int32(0), k, fx.Int32(512)):
            word = t * (k // 128) + start // 128 + g
            scales = scale_a[word].ir_value(), scale_b[word].ir_value()
            for step in range_constexpr(4):
                sides = []
                for side in (a, b):
                    first = t * k + start + 128 * step + 16 * g
                    runs = [load(side, first + 64 * run, 16, fx.Int8) for run in (0, 1)]
                    words = [run.bitcast(fx.Int32) for run in runs]
                    sides.append(words[0].shuffle(words[1], list(range(8))).ir_value())
                sums = fx.rocdl.mfma_scale_f32_16x16x128_f8f6f4(
                    vector(4, fx.Float32), [*sides, sums, 0, 0, step, scales[0], step, scales[1]]
                )
        result = fx.Vector(sums, (4,), fx.Float32)
        for r in range_constexpr(4):
            c[(g * 4 + r) * 16 + t] = result[r]

    @flyc.jit
    def mma_fp8_scaled_launch(
        a: fx.Pointer,
        b: fx.Pointer,
        scale_a: fx.Pointer,
        scale_b: fx.Pointer,
        c: fx.Pointer,
        k: fx.Int32,
        stream: fx.Stream = no_stream,
    ):
        mma_fp8_scaled(a, b, scale_a, scale_b, c, k).launch(
            grid=(1, 1, 1), block=(64, 1, 1), stream=stream
        )

    # dma_transpose_*: out[tile, column, row] = x[tile, row, column], tiles of 64 x 64, by 4 waves:
    # DMA to LDS, then each wave reads 16 columns transposed, which all waves brought.

    def dma_transpose(
        dtype: Any, read: str, count: int, kind: Any, rows_a_read: int
    ) -> Callable[[], Any]:
        item = dtype.width // 8
        tile_bytes = 64 * 64 * item

        @flyc.kernel(known_block_size=[256, 1, 1])
        def kernel(x: fx.Pointer, out: fx.Pointer, tiles: fx.Int32):
            tile = fx.SharedAllocator().allocate(fx.Array[dtype, 64 * 64, 128]).peek()
            base = fx.Int32(fx.ptrtoint(tile.ptr))
            thread = fx.Int32(fx.thread_idx.x)
            lane, wave = thread % 64, thread // 64
            t, g = lane % 16, lane // 16
            chunk = 16 // rows_a_read  # lanes that fetch one row, each 8 bytes of it
            columns = wave * 16 + (8 // item) * (t % chunk)
            for number in range(fx.Int32(0), tiles, fx.Int32(1)):
                for part in range_constexpr(tile_bytes // 4096):
                    first = (
                        4096 * part
                        + fx.rocdl.readfirstlane(fx.Int32.ir_type, wave.ir_value()) * 1024
                    )
                    source = number * 4096 + (first + lane * 16) // item
                    target = lds_pointer(base + first)
                    intrinsic(
                        None,
                        "global.load.lds",
                        (x + source).llvm_ptr,
                        target,
                        int32(16),
                        int32(0),
                        int32(0),
                    )
                fx.rocdl.s_waitcnt(vmcnt=0)
                fx.gpu.barrier()
                # An instruction without effect, in whose place a test switches lanes off.
                intrinsic(None, "s.setprio", fx.Int16(0).ir_value())
                for part in range_constexpr(64 // (4 * rows_a_read)):
                    row = 4 * rows_a_read * part + rows_a_read * g
                    address = base + ((row + t // chunk) * 64 + columns) * item
                    words = intrinsic(vector(count, kind), read, lds_pointer(address))
                    target = out + (number * 4096 + (wave * 16 + t) * 64 + row)
                    llvm.StoreOp(words, target.llvm_ptr, alignment=8)
                fx.gpu.barrier()

        @flyc.jit
        def launch(x: fx.Pointer, out: fx.Pointer, tiles: fx.Int32, stream: fx.Stream = no_stream):
            kernel(x, out, tiles).launch(grid=(1, 1, 1), block=(256, 1, 1), stream=stream)

        return lambda: flyc.compile(launch, null(dtype), null(dtype), fx.Int32(0))

    # buffer_copy: out[i] = x[i] and seen[i] = x[i] for i < n, 4 floats a thread; beyond n, out is
    # left alone and seen is 0.

    @flyc.kernel(known_block_size=[64, 1, 1])
    def buffer_copy(x: fx.Pointer, out: fx.Pointer, seen: fx.Pointer, n: fx.Int32):
        i = (fx.Int32(fx.block_idx.x) * 64 + fx.Int32(fx.thread_idx.x)) * 4
        source, target = (
            fx.rocdl.get_buffer_rsrc(fx.rocdl.make_buffer_ptr(p, num_records_bytes=n * 4))
            for p in (x, out)
        )
        words = intrinsic(
            vector(4, fx.Float32),
            "raw.ptr.buffer.load.v4f32",
            source,
            (i * 4).ir_value(),
            int32(0),
            int32(0),
        )
        intrinsic(
            None,
            "raw.ptr.buffer.store.v4f32",
            words,
            target,
            (i * 4).ir_value(),
            int32(0),
            int32(0),
        )
        llvm.StoreOp(words, (seen + i).llvm_ptr, alignment=16)

    @flyc.jit
    def buffer_copy_launch(
        x: fx.Pointer,
        out: fx.Pointer,
        seen: fx.Pointer,
        n: fx.Int32,
        groups: fx.Int32,
        stream: fx.Stream = no_stream,
    ):
        buffer_copy(x, out, seen, n).launch(grid=(groups, 1, 1), block=(64, 1, 1), stream=stream)

    floats, zero = null(fx.Float32), fx.Int32(0)
    return {
        "elementwise": lambda: flyc.compile(
            elementwise_launch, floats, null(fx.Int32), floats, fx.Float32(0), zero
        ),
        "row_sum": lambda: flyc.compile(row_sum_launch, floats, floats, zero),
        "mma_f16": mma(fx.Float16, fx.rocdl.mfma_f32_16x16x32_f16),
        "mma_bf16": mma(fx.BFloat16, fx.rocdl.mfma_f32_16x16x32_bf16),
        "mma_fp8_scaled": lambda: flyc.compile(
            mma_fp8_scaled_launch,
            null(fx.Int8),
            null(fx.Int8),
            null(fx.Int32),
            null(fx.Int32),
            floats,
            zero,
        ),
        "dma_transpose_b16": dma_transpose(fx.Float16, "ds.read.tr16.b64.v4i16", 4, fx.Int16, 4),
        "dma_transpose_b8": dma_transpose(fx.Int8, "ds.read.tr8.b64.v2i32", 2, fx.Int32, 8),
        "buffer_copy": lambda: flyc.compile(buffer_copy_launch, floats, floats, floats, zero, zero),
    }


def main() -> None:
    """Compile every kernel to FOLDER/<name>."""
    folder = Path(sys.argv[1])
    worker.stand_in_for_torch()
    for name, compile_kernel in _define().items():
        (folder / name).write_bytes(worker.code_object(compile_kernel()).code)


if __name__ == "__main__":
    main()
