"""The compiler front end: cache entries, the cache on disk, precompiled folders, missing tools."""

import json
import logging
import os
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_sparse_mla.kernel import compiler, contract, toolchain
from jax_sparse_mla.kernel.code_object import (
    MANIFEST,
    CodeObject,
    from_entry,
    kernarg_layout,
    read_folder,
    to_entry,
    write_folder,
)
from jax_sparse_mla.kernel.specialisation import ALL, Specialisation

POW2 = Specialisation("pow2", partial=False)


def kernel(code: bytes = b"\x7fELF\n{}\n") -> CodeObject:
    return CodeObject(code, "symbol", contract.ARCH, 256, 80_000, {"vgpr_count": 200})


@pytest.fixture
def compiles(monkeypatch, tmp_path):
    """Replaces the child process; the list holds every specialisation compiled."""
    compiled: list[Specialisation] = []

    def fake(specialisations):
        compiled.extend(specialisations)
        time.sleep(0.05)
        return {s: kernel(s.name.encode()) for s in specialisations}

    monkeypatch.setattr(compiler, "_compile", fake)
    monkeypatch.setattr(compiler, "_memo", compiler._Memo())
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(compiler.PRECOMPILED_VARIABLE, raising=False)
    return compiled


def forget_process_memo(monkeypatch):
    monkeypatch.setattr(compiler, "_memo", compiler._Memo())


@given(st.binary())
def test_entry_round_trip(code):
    assert from_entry(to_entry(kernel(code))) == kernel(code)


@given(st.data())
def test_truncated_entry_is_refused(data):
    entry = to_entry(kernel())
    with pytest.raises(ValueError, match="SHA-256"):
        from_entry(entry[: data.draw(st.integers(0, len(entry) - 1))])


@given(st.data())
def test_entry_with_another_byte_is_refused(data):
    entry = bytearray(to_entry(kernel()))
    entry[data.draw(st.integers(0, len(entry) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match="SHA-256"):
        from_entry(bytes(entry))


def test_compiled_once_in_a_process_and_once_on_a_machine(compiles, monkeypatch):
    threads = [threading.Thread(target=compiler.code_object, args=(POW2,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiles == [POW2]
    forget_process_memo(monkeypatch)
    assert compiler.code_object(POW2) == kernel(POW2.name.encode())
    assert compiles == [POW2]


def test_each_specialisation_gets_its_own_code(compiles):
    assert {compiler.code_object(s).code for s in ALL} == {s.name.encode() for s in ALL}


@pytest.mark.parametrize("content", [b"", b"\0" * 100, to_entry(kernel())[:-1]])
def test_damaged_cache_file_is_replaced(compiles, monkeypatch, content):
    compiler.code_object(POW2)
    (path,) = compiler.cache_folder().iterdir()
    whole = path.read_bytes()
    path.write_bytes(content)
    forget_process_memo(monkeypatch)
    assert compiler.code_object(POW2) == kernel(POW2.name.encode())
    assert compiles == [POW2, POW2]
    assert path.read_bytes() == whole


def test_key_depends_on_source_compiler_and_options(monkeypatch):
    keys = [compiler.entry_name(s) for s in ALL]
    monkeypatch.setattr(compiler, "source_hash", lambda: "other source")
    keys.append(compiler.entry_name(POW2))
    monkeypatch.setattr(toolchain, "flydsl_version", lambda: "other version")
    keys.append(compiler.entry_name(POW2))
    assert len(set(keys)) == len(keys)


def test_cache_that_cannot_be_written_only_warns(compiles, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "file" / "folder"))
    with caplog.at_level(logging.WARNING):
        assert compiler.code_object(POW2) == kernel(POW2.name.encode())
    assert "cannot keep the compiled kernel" in caplog.text


def test_a_user_without_a_home_needs_a_cache_only_to_compile(monkeypatch, tmp_path):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(compiler.Path, "home", no_home)
    for variable in (compiler.CACHE_VARIABLE, "XDG_CACHE_HOME", compiler.PRECOMPILED_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    forget_process_memo(monkeypatch)
    with pytest.raises(compiler.CompileError, match=f"set {compiler.CACHE_VARIABLE}"):
        compiler.code_object(POW2)
    write_folder(tmp_path, {POW2: kernel()}, compiler.source_hash())
    monkeypatch.setenv(compiler.PRECOMPILED_VARIABLE, str(tmp_path))
    assert compiler.code_object(POW2) == kernel()


def test_many_writers_leave_one_whole_entry(tmp_path):
    path = tmp_path / "entry"
    entries = [to_entry(kernel(bytes([i]) * 200_000)) for i in range(8)]
    seen: list[bytes] = []

    def write(entry):
        for _ in range(20):
            compiler._write_atomically(path, entry)
            seen.append(path.read_bytes())

    threads = [threading.Thread(target=write, args=(entry,)) for entry in entries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for content in seen:
        from_entry(content)
    assert list(tmp_path.iterdir()) == [path]


def test_folder_round_trip(tmp_path):
    kernels = {s: kernel(s.name.encode()) for s in ALL}
    write_folder(tmp_path, kernels, "source")
    assert {s: read_folder(tmp_path, s, "source") for s in ALL} == kernels
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert manifest["kernarg"] == kernarg_layout()
    assert {entry["arch"] for entry in manifest["kernels"]} == {contract.ARCH}


def test_precompiled_folder_is_used_alone(compiles, monkeypatch, tmp_path):
    write_folder(tmp_path, {POW2: kernel()}, compiler.source_hash())
    monkeypatch.setenv(compiler.PRECOMPILED_VARIABLE, str(tmp_path))
    assert compiler.code_object(POW2) == kernel()
    with pytest.raises(ValueError, match=r"manifest\.json has no sparse_mla_float32_whole"):
        compiler.code_object(Specialisation("float32", partial=False))
    assert compiles == []


def break_nothing_but_source(folder):
    pass


def break_manifest(folder):
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:-20])


def break_version(folder):
    path = folder / MANIFEST
    path.write_text(path.read_text().replace('"contract_version": ', '"contract_version": 9'))


def break_code(folder):
    (folder / f"{POW2.name}.hsaco").write_bytes(b"")


def remove_code(folder):
    (folder / f"{POW2.name}.hsaco").unlink()


def remove_manifest(folder):
    (folder / MANIFEST).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_nothing_but_source, r"manifest\.json was written by another version"),
        (break_version, r"manifest\.json was written by another version"),
        (break_manifest, r"manifest\.json is not a readable manifest"),
        (remove_manifest, r"manifest\.json is not a readable manifest"),
        (break_code, r"sparse_mla_pow2_whole\.hsaco is damaged"),
        (remove_code, r"sparse_mla_pow2_whole\.hsaco is damaged"),
    ],
)
def test_faulty_folder_is_named(tmp_path, damage, message):
    write_folder(tmp_path, {POW2: kernel()}, "source")
    damage(tmp_path)
    source = "other" if damage is break_nothing_but_source else "source"
    with pytest.raises(ValueError, match=message):
        read_folder(tmp_path, POW2, source)


def test_missing_flydsl_is_named(monkeypatch):
    monkeypatch.setattr(toolchain, "flydsl_version", lambda: None)
    with pytest.raises(compiler.CompileError, match="needs FlyDSL"):
        compiler._compile([POW2])


def test_missing_linker_is_named(monkeypatch):
    monkeypatch.setattr(toolchain, "find_linker", lambda: None)
    with pytest.raises(compiler.CompileError, match=r"needs ld\.lld"):
        compiler._compile([POW2])


def test_failing_child_is_quoted(monkeypatch):
    monkeypatch.setattr(toolchain, "find_linker", lambda: ["false"])
    with pytest.raises(compiler.CompileError, match="compiling the kernel failed"):
        compiler._compile([POW2])


def test_linker_of_rocm_comes_first(monkeypatch, tmp_path):
    toolchain.write_toolkit(tmp_path, ["echo", "a b"])
    linker = tmp_path / "llvm" / "bin" / "ld.lld"
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    assert toolchain.find_linker() == [str(linker)]
    assert subprocess.check_output([linker, "c d"], text=True) == "a b c d\n"


WITHOUT_FLYDSL_OR_TORCH = """
import sys
for name in ("flydsl", "torch"):
    sys.modules[name] = None
from jax_sparse_mla.kernel import compiler
from jax_sparse_mla.kernel.specialisation import ALL
for specialisation in ALL:
    print(compiler.code_object(specialisation).code_hash.hex())
"""


@pytest.mark.slow
def test_cold_compile_of_everything(tmp_path):
    """`precompile` takes under a minute, and its folder needs neither FlyDSL nor a linker."""
    environment = os.environ | {compiler.CACHE_VARIABLE: str(tmp_path / "cache")}
    environment.pop(compiler.PRECOMPILED_VARIABLE, None)
    begin = time.perf_counter()
    folder = tmp_path / "kernels"
    command = [sys.executable, "-m", "jax_sparse_mla", "precompile", "--out", str(folder)]
    output = subprocess.check_output(command, env=environment, text=True)
    assert time.perf_counter() - begin < 60
    assert output.count(".hsaco") == len(ALL)
    manifest = json.loads((folder / MANIFEST).read_text())
    environment[compiler.PRECOMPILED_VARIABLE] = str(folder)
    environment |= {"PATH": "", "ROCM_PATH": ""}
    hashes = subprocess.check_output(
        [sys.executable, "-c", WITHOUT_FLYDSL_OR_TORCH], env=environment, text=True
    )
    assert hashes.split() == [entry["sha256"] for entry in manifest["kernels"]]


CACHED_LOOKUP = """
import time
from jax_sparse_mla.kernel import compiler
from jax_sparse_mla.kernel.specialisation import ALL
begin = time.perf_counter()
compiler.code_object(ALL[0])
print(time.perf_counter() - begin)
"""


def test_cached_kernel_adds_little_to_a_first_call(compiles):
    """The budget is 50 ms; nothing here but reading a few files may be in it."""
    compiler.compile_all(ALL)
    environment = os.environ | {compiler.CACHE_VARIABLE: str(compiler.cache_folder())}
    seconds = [
        float(subprocess.check_output([sys.executable, "-c", CACHED_LOOKUP], env=environment))
        for _ in range(3)
    ]
    assert min(seconds) < 0.05
