"""Runs tests in processes of their own: with several devices, or without some modules.

The number of host devices is settled when JAX starts, so a test that wants eight runs in a child
process. ``@on_devices(8)`` does that: the body is an ordinary test, and the child, which serves all
such tests of the run, raises its errors here.
"""

import atexit
import functools
import importlib
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

TESTS = Path(__file__).parent


class ChildError(AssertionError):
    """What went wrong in the child: its traceback."""


class Child:
    """A Python process that runs functions of the test modules, one after the other."""

    def __init__(
        self, num_devices: int = 1, env: dict[str, str] | None = None, prelude: str = ""
    ) -> None:
        """Start the process.

        Args:
          num_devices: host devices JAX has there.
          env: environment variables to set.
          prelude: code to run before anything else is imported.
        """
        flags = f"--xla_force_host_platform_device_count={num_devices}"
        paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **(env or {}),
        }
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{prelude}\nimport device_process\ndevice_process._serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        atexit.register(self.stop)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a module-level function of a test module there; its result, or ChildError."""
        with self._lock:
            self.begin(function, *args, **kwargs)
            return self.result()

    def begin(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Start such a call; `result` waits for its end."""
        assert self._process.stdin is not None
        _send(self._process.stdin, (function.__module__, function.__qualname__, args, kwargs))

    def result(self) -> Any:
        """The result of the call begun last."""
        assert self._process.stdout is not None
        try:
            ok, value = pickle.load(self._process.stdout)
        except EOFError:
            raise ChildError(f"the child died with status {self._process.wait()}") from None
        if not ok:
            raise ChildError(f"in the child process:\n{value}")
        return value

    def stop(self) -> None:
        """End the process."""
        atexit.unregister(self.stop)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def on_devices(num_devices: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test in a child process with so many host devices."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            if _in_child:
                test(*args, **kwargs)
            else:
                _shared_child(num_devices).call(test, *args, **kwargs)

        return run

    return decorate


@functools.cache
def _shared_child(num_devices: int) -> Child:
    return Child(num_devices)


_in_child = False


def _send(stream: BinaryIO, value: Any) -> None:
    stream.write(pickle.dumps(value))
    stream.flush()


def _serve() -> None:
    # This file also runs as the module that tests import, where the flag must be set.
    sys.modules["device_process"]._in_child = True  # type: ignore[attr-defined]
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints must not mix with the answers
    while True:
        try:
            module, name, args, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
            answer = (True, function(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        _send(answers, answer)
