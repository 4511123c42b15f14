"""A compiled kernel and its two forms on disk: a cache entry and a folder of ``.hsaco`` files."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from jax_sparse_mla.kernel import contract
from jax_sparse_mla.kernel.specialisation import ALL, Specialisation

MANIFEST = "manifest.json"


class CodeObject(NamedTuple):
    """An AMDGPU ELF with one kernel, and what a launch must know about it."""

    code: bytes
    symbol: str
    arch: str
    block_size: int
    """Work-items a workgroup."""
    lds_bytes: int
    """LDS a workgroup, in bytes."""
    resources: dict[str, int]
    """Registers, spills and scratch, as the compiler reports them."""

    @property
    def code_hash(self) -> bytes:
        """SHA-256 of the code."""
        return hashlib.sha256(self.code).digest()

    def describe(self) -> dict[str, Any]:
        """Everything but the code itself, as JSON values."""
        fields = self._asdict()
        del fields["code"]
        return fields | {"sha256": self.code_hash.hex()}

    @classmethod
    def restore(cls, description: dict[str, Any], code: bytes) -> "CodeObject":
        """Undo `describe`; a ValueError if the code is not the one described."""
        if hashlib.sha256(code).hexdigest() != description.get("sha256"):
            raise ValueError("the code object does not match its recorded SHA-256")
        return cls(code, **{name: description[name] for name in cls._fields if name != "code"})


def to_entry(kernel: CodeObject) -> bytes:
    """One self-checking file: the SHA-256 of the rest, a line of JSON, the code."""
    content = json.dumps(kernel.describe()).encode() + b"\n" + kernel.code
    return hashlib.sha256(content).digest() + content


def from_entry(entry: bytes) -> CodeObject:
    """Undo `to_entry`; a ValueError if the entry is truncated or corrupt."""
    digest, content = entry[:32], entry[32:]
    if hashlib.sha256(content).digest() != digest:
        raise ValueError("not a cache entry, or a damaged one: its SHA-256 is another")
    header, _, code = content.partition(b"\n")
    return CodeObject.restore(json.loads(header), code)


def write_folder(folder: Path, kernels: dict[Specialisation, CodeObject], source: str) -> None:
    """Write ``<name>.hsaco`` for each kernel and the manifest that `read_folder` wants.

    ``source`` identifies the kernel's source; reading checks it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for specialisation, kernel in kernels.items():
        file = f"{specialisation.name}.hsaco"
        (folder / file).write_bytes(kernel.code)
        entries.append(specialisation._asdict() | {"file": file} | kernel.describe())
    manifest = {
        "contract_version": contract.VERSION,
        "source": source,
        "kernarg": kernarg_layout(),
        "kernels": entries,
    }
    # The manifest comes last: a folder that has one is complete.
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def read_folder(folder: Path, specialisation: Specialisation, source: str) -> CodeObject:
    """Read one kernel of a folder that `write_folder` wrote.

    Raises a ValueError that names the file at fault if the folder is incomplete, damaged, or was
    written from another version of the kernel.
    """
    path = folder / MANIFEST
    again = "write it again with: python -m jax_sparse_mla precompile --out DIR"
    try:
        manifest = json.loads(path.read_text())
        version, written = manifest["contract_version"], manifest["source"]
        entry = next(
            entry
            for entry in manifest["kernels"]
            if specialisation == tuple(entry[field] for field in Specialisation._fields)
        )
    except StopIteration:
        known = ", ".join(s.name for s in ALL)
        raise ValueError(f"{path} has no {specialisation.name} (of {known}); {again}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a readable manifest ({error!r}); {again}") from error
    if (version, written) != (contract.VERSION, source):
        raise ValueError(f"{path} was written by another version of the kernel; {again}")
    file = folder / str(entry.get("file"))
    try:
        return CodeObject.restore(entry, file.read_bytes())
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{file} is damaged ({error}); {again}") from error


def kernarg_layout() -> list[dict[str, Any]]:
    """Name, kind and byte offset of each kernel argument."""
    layout, offset = [], 0
    for argument in contract.ARGUMENTS:
        size = 8 if argument.kind == "pointer" else 4
        offset = -(-offset // size) * size
        layout.append({"name": argument.name, "kind": argument.kind, "offset": offset})
        offset += size
    return layout
