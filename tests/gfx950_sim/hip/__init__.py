"""A simulated ``libamdhip64``: HIP as the FFI shim uses it, with launches run by the simulator.

``python -m gfx950_sim.hip`` builds the library and prints its path; name it in
JAX_SPARSE_MLA_HIP_LIBRARY. The C++ half (src/) knows devices, modules, streams, captures and
allocations, refuses what HIP refuses, fails calls on demand and records every call;
src/sim_control.h is its interface for test drivers. This Python half runs the launches: the library
finds the interpreter of its process at the first launch and calls `attach`. Without an interpreter,
launches are checked and recorded, and handed to the driver's own launcher if it set one.

A launch that the simulator stops (a fault, an unknown instruction) returns hipErrorLaunchFailure;
`attach(path)` gives the handler, whose ``failures()`` holds the exceptions and whose ``watch`` sees
each result.
"""

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from gfx950_sim.hip.build import build
from gfx950_sim.hip.control import Call, Control

if TYPE_CHECKING:
    from gfx950_sim.hip.handler import Handler

__all__ = ["Call", "Control", "attach", "build"]

_attach_lock = threading.Lock()
_handlers: "dict[str, Handler]" = {}  # one a library, guarded by the lock


def attach(path: str | Path) -> "Handler":
    """Makes the simulator the launcher of the library at ``path``; calling it again gives the same
    handler."""
    from gfx950_sim.hip.handler import Handler  # needs the whole simulator; building does not

    key = str(Path(path).resolve())
    with _attach_lock:
        if key not in _handlers:
            _handlers[key] = Handler(key)
        return _handlers[key]
