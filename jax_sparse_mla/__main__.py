"""``python -m jax_sparse_mla doctor | precompile``."""

import argparse
import sys
import time
from pathlib import Path

from jax_sparse_mla import doctor
from jax_sparse_mla.kernel import compiler
from jax_sparse_mla.kernel.code_object import write_folder
from jax_sparse_mla.kernel.specialisation import ALL


def precompile(folder: Path) -> None:
    """Compile every specialisation into ``folder``."""
    begin = time.perf_counter()
    kernels = compiler.compile_all(ALL)
    write_folder(folder, kernels, compiler.source_hash())
    for specialisation, kernel in kernels.items():
        resources = ", ".join(f"{name} {value}" for name, value in kernel.resources.items())
        print(f"{specialisation.name}.hsaco  {len(kernel.code)} bytes  {resources}")
    print(
        f"{len(kernels)} kernels and manifest.json in {folder}, {time.perf_counter() - begin:.1f} s"
    )
    print(f"to use them: export {compiler.PRECOMPILED_VARIABLE}={folder.resolve()}")


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jax_sparse_mla", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="say what this machine would do, and why")
    command = commands.add_parser("precompile", help="compile all kernels into a folder")
    command.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the folder to write"
    )
    arguments = parser.parse_args()
    if arguments.command == "doctor":
        return doctor.main()
    try:
        precompile(arguments.out)
    except (compiler.CompileError, OSError) as error:
        print(f"precompile: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
