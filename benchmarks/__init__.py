"""Benchmarks and reports; each module says what it measures. The kernel report needs the tests'
simulator."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
