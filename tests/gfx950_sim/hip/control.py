"""The control functions of src/sim_control.h for Python tests."""

import ctypes
from pathlib import Path
from typing import NamedTuple


class _Call(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("thread", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("code", ctypes.c_int32),
    )


class Call(NamedTuple):
    """One HIP call as it returned."""

    name: str
    thread: int
    """The kernel's thread id."""
    stream: int
    """0 for the null stream and for calls without one."""
    device: int
    """The stream's device, or the calling thread's for the null stream and calls without one."""
    code: int


class Control:
    """Drives the simulated HIP library of this process.

    Args:
      path: the library, as `gfx950_sim.hip.build` gives it; loading it again gives the one already
        loaded.
    """

    def __init__(self, path: str | Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.simhip_call_count.restype = ctypes.c_uint64
        self.library.simhip_launch_count.restype = ctypes.c_uint64
        self.library.simhip_live.restype = ctypes.c_int64
        self.library.simhip_last_error_text.restype = ctypes.c_char_p

    def fail(self, call: str, code: int, *, occurrence: int = 1, times: int = 1) -> None:
        """Makes a HIP call fail.

        Args:
          call: the function's name.
          code: the hipError_t it returns.
          occurrence: which call from now on fails first; 1 is the next.
          times: how many fail from there; 0 for all.

        Raises:
          ValueError: the library has no such call.
        """
        status = self.library.simhip_fail(
            call.encode(), code, ctypes.c_uint64(occurrence), ctypes.c_uint64(times)
        )
        if status != 0:
            raise ValueError(f"the simulated HIP library has no call {call!r} that can fail")

    def clear_failures(self) -> None:
        """Forgets the failures still to come."""
        self.library.simhip_clear_failures()

    def calls(self) -> list[Call]:
        """The calls recorded so far, oldest first."""
        found = []
        entry = _Call()
        for index in range(self.library.simhip_call_count()):
            if self.library.simhip_get_call(ctypes.c_uint64(index), ctypes.byref(entry)) != 0:
                break
            found.append(
                Call(
                    entry.name.decode(),
                    entry.thread,
                    entry.stream or 0,
                    entry.device,
                    entry.code,
                )
            )
        return found

    def clear_calls(self) -> None:
        """Forgets the recorded calls."""
        self.library.simhip_clear_calls()

    def launch_count(self) -> int:
        """Launches that passed every check since the process started."""
        return int(self.library.simhip_launch_count())

    def live(self, kind: str) -> int:
        """How many "module", "stream", "memory", "graph" or "graph_exec" objects are alive."""
        return int(self.library.simhip_live(kind.encode()))

    def last_error_text(self) -> str:
        """What this thread's last failed call says beyond its code."""
        return str((self.library.simhip_last_error_text() or b"").decode())

    def register_memory(self, address: int, size: int) -> None:
        """Declares host memory as one allocation that kernels may use.

        Raises:
          ValueError: an allocation already begins there.
        """
        if self.library.simhip_register_memory(ctypes.c_void_p(address), ctypes.c_size_t(size)):
            raise ValueError(f"an allocation already begins at {address:#x}")

    def unregister_memory(self, address: int) -> None:
        """Takes back `register_memory`."""
        self.library.simhip_unregister_memory(ctypes.c_void_p(address))
