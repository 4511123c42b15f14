"""Builds the simulated HIP library with the host's C++ compiler and keeps it by the hash of its
sources."""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_SOURCES = Path(__file__).parent / "src"
_PYTHON_FOLDER = Path(__file__).parents[2]
_FLAGS = (
    *("-std=c++17", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Wshadow"),
)


def cache_folder() -> Path:
    """Where built libraries are kept: GFX950_SIM_CACHE_DIR, else a folder in the user's cache."""
    if folder := os.environ.get("GFX950_SIM_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gfx950_sim"


def build(extra_flags: Sequence[str] = ()) -> Path:
    """Builds the library unless it is there already.

    Args:
      extra_flags: more compiler flags, such as ``-fsanitize=thread``; each set gets a library of
        its own.

    Returns:
      The path of the shared library.

    Raises:
      RuntimeError: the compiler is missing or fails; the message holds its output.
    """
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, *_FLAGS, *extra_flags, f'-DGFX950_SIM_PYTHON_FOLDER="{_PYTHON_FOLDER}"']
    digest = hashlib.sha256("\0".join(command).encode())
    for source in sorted(_SOURCES.glob("*.[ch]*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    library = cache_folder() / f"libamdhip64-gfx950-sim-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    # Processes that build at once each write their own file; the last rename wins and the files are
    # alike.
    handle, name = tempfile.mkstemp(dir=library.parent, prefix=".build-", suffix=".so")
    os.close(handle)
    unfinished = Path(name)
    command += [str(_SOURCES / "library.cc"), "-o", name, "-ldl", "-pthread"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        unfinished.chmod(0o755)  # mkstemp made it for this user alone
        unfinished.replace(library)
    except FileNotFoundError as error:
        raise RuntimeError(f"no C++ compiler {compiler!r}; install g++ or set CXX") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return library
