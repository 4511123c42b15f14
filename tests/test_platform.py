"""Which lowering a ROCm program gets."""

import logging
import types

import pytest

from jax_sparse_mla import platform


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("gfx950", "gfx950"),
        ("gfx950:sramecc+:xnack-", "gfx950"),
        ("gfx942:xnack-", "gfx942"),
        ("", ""),
    ],
)
def test_parse_arch(text, arch):
    assert platform.parse_arch(text) == arch


@pytest.mark.parametrize("archs", [[], ["gfx950"], ["gfx950"] * 8, [""], ["", "gfx950"]])
def test_the_kernel_serves_gfx950_and_hosts_without_a_device(archs):
    assert platform.kernel_serves(archs)


def test_another_arch_gets_the_reference_and_one_line_in_the_log(caplog):
    with caplog.at_level(logging.WARNING, "jax_sparse_mla"):
        assert not platform.kernel_serves(["gfx908"] * 2)
        assert not platform.kernel_serves(["gfx908"])
    assert len(caplog.records) == 1
    assert "gfx950" in caplog.text
    assert "gfx908" in caplog.text
    assert "reference" in caplog.text


def test_mixed_archs_are_an_error():
    with pytest.raises(RuntimeError, match=r'gfx942, gfx950.*implementation="reference"'):
        platform.kernel_serves(["gfx950", "gfx942"])


def devices(*archs, cores=256):
    return [types.SimpleNamespace(compute_capability=arch, core_count=cores) for arch in archs]


def test_devices_are_asked(monkeypatch):
    for found, kernel in (
        (devices(), True),
        (devices("gfx950:sramecc+"), True),
        (devices("gfx942"), False),
    ):
        monkeypatch.setattr(platform, "rocm_devices", lambda found=found: found)
        assert platform.use_kernel_on_rocm() is kernel


def test_core_count(monkeypatch):
    assert platform.core_count() == platform.DEFAULT_CORE_COUNT  # no ROCm device here
    monkeypatch.setattr(platform, "rocm_devices", lambda: devices("gfx950", cores=128))
    assert platform.core_count() == 128
    monkeypatch.setattr(platform, "rocm_devices", lambda: [types.SimpleNamespace()])
    assert platform.core_count() == platform.DEFAULT_CORE_COUNT
