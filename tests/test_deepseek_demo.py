"""The demo, small, as a user starts it."""

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_demo():
    command = [sys.executable, "-m", "examples.deepseek_v32.demo"]
    command += ["--hidden-size", "256", "--prompts", "300", "40"]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    stored, plain = re.findall(
        r"latents (?:as the records hold them)? +([\d.e-]+)$", child.stdout, re.M
    )
    assert float(stored) < 1e-2
    assert float(plain) < 8e-2
    (kernel,) = re.findall(r"out ([\d.e-]+) apart", child.stdout)
    assert float(kernel) < 5e-3
    assert "kernel and reference give the same text" in child.stdout
