"""Scripts of ``benchmarks/`` import helpers from the folder itself and others from their own; so do their tests."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

sys.path += [str(BENCHMARKS), str(BENCHMARKS / "speed")]
