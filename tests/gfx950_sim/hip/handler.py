"""Runs the HIP library's launches on the simulator, in the same process."""

import ctypes
import functools
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gfx950_sim
from gfx950_sim.elf import CodeObject
from gfx950_sim.hip import extents

_LOG = logging.getLogger(__name__)

HIP_ERROR_LAUNCH_FAILURE = 719


class _Launch(ctypes.Structure):
    """SimhipLaunch of src/sim_control.h."""

    _fields_ = (
        ("id", ctypes.c_uint64),
        ("symbol", ctypes.c_char_p),
        ("code", ctypes.c_void_p),
        ("code_size", ctypes.c_size_t),
        ("arguments", ctypes.c_void_p),
        ("arguments_size", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_lds_bytes", ctypes.c_uint32),
    )


_LAUNCHER = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(_Launch),
    ctypes.c_void_p,  # char*: as c_char_p ctypes would pass a copy
    ctypes.c_size_t,
    ctypes.c_void_p,
)


@dataclass(frozen=True)
class Launch:
    """A launch that came through the HIP library."""

    id: int
    symbol: str
    device: int
    stream: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: bytes


@dataclass(frozen=True)
class Failure:
    """A launch that the simulator stopped."""

    launch: Launch
    error: BaseException
    text: str


Watcher = Callable[[Launch, Any], None]
"""Called with each finished launch and the simulator's result."""


class Handler:
    """What the library calls; one a loaded library."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        # Launches of several devices come on several threads. The simulator runs one at a time:
        # under the GIL that costs nothing, and its waves are reused from launch to launch.
        self._one_at_a_time = threading.Lock()
        self._guard = threading.Lock()
        self._failures: list[Failure] = []
        self._watchers: list[Watcher] = []
        self.run_options: dict[str, Any] = {}
        """More keyword arguments of `gfx950_sim.run`, such as ``order``."""
        self._callback = _LAUNCHER(self._launch)  # lives as long as the library may call it
        self.install()

    def install(self) -> None:
        """Makes the simulator the library's launcher (again, after a test set its own)."""
        self._library.simhip_set_launcher(self._callback, None)

    def failures(self) -> list[Failure]:
        """The launches that failed since the last call of this function, oldest first."""
        with self._guard:
            failures, self._failures = self._failures, []
        return failures

    @contextmanager
    def watch(self, watcher: Watcher) -> Iterator[None]:
        """Calls ``watcher`` with each launch that finishes meanwhile."""
        with self._guard:
            self._watchers.append(watcher)
        try:
            yield
        finally:
            with self._guard:
                self._watchers.remove(watcher)

    def _launch(self, pointer: Any, text: int, size: int, _user: Any) -> int:
        view = pointer.contents
        launch = Launch(
            id=view.id,
            symbol=view.symbol.decode(),
            device=view.device,
            stream=view.stream or 0,
            grid=tuple(view.grid),
            block=tuple(view.block),
            arguments=ctypes.string_at(view.arguments, view.arguments_size),
        )
        try:
            code = ctypes.string_at(view.code, view.code_size)
            with self._one_at_a_time:
                result = self._run(launch, code)
            with self._guard:
                watchers = list(self._watchers)
            for watcher in watchers:
                watcher(launch, result)
        except BaseException as error:  # nothing may pass the C boundary, not even SystemExit
            self._report(launch, error, text, size)
            return HIP_ERROR_LAUNCH_FAILURE
        return 0

    def _report(self, launch: Launch, error: BaseException, text: int, size: int) -> None:
        message = f"{type(error).__name__}: {error}"
        _LOG.error("launch %d of %s failed: %s", launch.id, launch.symbol, message)
        # The traceback holds the simulator's frames, and these hold the arrays: keep its text, not
        # the frames.
        trace = "".join(traceback.format_exception(error))
        with self._guard:
            self._failures.append(Failure(launch, error.with_traceback(None), trace))
        encoded = message.encode()[: size - 1] + b"\0"
        ctypes.memmove(text, encoded, len(encoded))

    def _run(self, launch: Launch, code: bytes) -> Any:
        kernel = _code_object(code).kernel(launch.symbol)
        slots = [slot for slot in kernel.arguments if not slot.value_kind.startswith("hidden_")]
        if extents.is_contract_layout(slots):
            regions = extents.contract_regions(launch.symbol, slots, launch.arguments)
        else:
            regions = extents.registered_regions(
                launch.symbol, slots, launch.arguments, self._find_memory
            )
        memory = gfx950_sim.Memory()
        for region in regions:
            memory.map_host(region.address, region.size, region.name, region.writable)
        return gfx950_sim.run(
            kernel, launch.grid, launch.block, launch.arguments, memory, **self.run_options
        )

    def _find_memory(self, address: int) -> tuple[int, int] | None:
        base, size = ctypes.c_void_p(), ctypes.c_size_t()
        found = self._library.simhip_find_memory(
            ctypes.c_void_p(address), ctypes.byref(base), ctypes.byref(size)
        )
        return (base.value or 0, size.value) if found == 0 else None


@functools.lru_cache(maxsize=64)
def _code_object(code: bytes) -> CodeObject:
    return CodeObject(code)
