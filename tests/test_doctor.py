"""The doctor: exit code 0 only where the op works, and a line that mends every problem."""

import pytest

from jax_sparse_mla import doctor, platform
from jax_sparse_mla.doctor import NOTE, OK, PROBLEM, Finding
from jax_sparse_mla.kernel import compiler, shim, toolchain


def report(capsys) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and for each subject its state with the line that mends it."""
    code = doctor.main()
    findings: dict[str, tuple[str, str]] = {}
    subject = ""
    for line in capsys.readouterr().out.splitlines()[:-1]:
        if line.startswith(" "):
            findings[subject] = findings[subject][0], line.partition("fix: ")[2]
        else:
            subject = line[8:20].strip()
            findings[subject] = line[:8].strip(), ""
    return code, findings


@pytest.fixture
def quick(monkeypatch):
    """Without the rows that it computes."""
    monkeypatch.setattr(doctor, "_self_test", lambda name: Finding(OK, name, ""))


def test_here_all_is_well(capsys):
    code, findings = report(capsys)
    assert code == 0
    assert {"jax", "devices", "choice", "shim", "HIP", "FlyDSL", "linker", "cache"} <= set(findings)
    assert findings["reference"][0] == findings["kernel"][0] == OK
    assert all(state != PROBLEM for state, _ in findings.values())


def no_flydsl(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "flydsl_version", lambda: None)


def no_linker(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain, "find_linker", lambda: None)


def no_shim(monkeypatch, tmp_path):
    monkeypatch.setattr(shim.kernel, "__path__", [str(tmp_path)])
    monkeypatch.setattr(shim, "_registered", set())


def no_hip(monkeypatch, tmp_path):
    monkeypatch.setattr(shim, "hip_error", lambda: "no HIP runtime found")


def empty_folder(monkeypatch, tmp_path):
    monkeypatch.setenv(compiler.PRECOMPILED_VARIABLE, str(tmp_path))


DAMAGE = [
    (no_flydsl, "FlyDSL", "pip install flydsl"),
    (no_linker, "linker", "pip install ziglang"),
    (no_shim, "shim", "C++17 compiler"),
    (no_hip, "HIP", "ROCm"),
    (empty_folder, "precompiled", "precompile --out"),
]


@pytest.mark.parametrize(("damage", "subject", "fix"), DAMAGE)
def test_what_the_kernel_lacks_is_a_problem_only_where_it_is_wanted(
    quick, monkeypatch, tmp_path, capsys, damage, subject, fix
):
    damage(monkeypatch, tmp_path)
    for wanted, code, state in ((True, 1, PROBLEM), (False, 0, NOTE)):
        monkeypatch.setattr(doctor, "kernel_wanted", lambda wanted=wanted: wanted)
        got, findings = report(capsys)
        assert got == code
        assert findings[subject][0] == state
        assert fix in findings[subject][1]


@pytest.mark.parametrize("errors", [(0.1, 0.0), (0.0, 1e-3), (float("nan"), 0.0)])
def test_a_wrong_result_is_a_problem(monkeypatch, errors):
    monkeypatch.setattr(doctor, "self_test_errors", lambda name: errors)
    finding = doctor._self_test("kernel")
    assert finding.state == PROBLEM
    assert finding.fix


def test_a_row_that_fails_is_a_problem(monkeypatch):
    def fail(name):
        raise RuntimeError("first line\nlast line")

    monkeypatch.setattr(doctor, "self_test_errors", fail)
    finding = doctor._self_test("kernel")
    assert finding.state == PROBLEM
    assert "RuntimeError: first line ... last line" in finding.detail
    assert finding.fix


def test_a_cache_that_cannot_be_written_is_noted(quick, monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "file"))
    code, findings = report(capsys)
    assert (code, findings["cache"][0]) == (0, NOTE)
    assert compiler.CACHE_VARIABLE in findings["cache"][1]


def test_other_gpus(quick, monkeypatch, capsys):
    def device(arch):
        return type("Device", (), {"compute_capability": arch})()

    for archs, code in ((["gfx942"], 0), (["gfx950", "gfx942"], 1)):
        monkeypatch.setattr(platform, "rocm_devices", lambda archs=archs: [*map(device, archs)])
        got, findings = report(capsys)
        assert got == code
        if code:
            assert "ROCR_VISIBLE_DEVICES" in findings["arch"][1]
