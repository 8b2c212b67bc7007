"""Fixtures of the report's tests."""

from pathlib import Path

import pytest
from report_runs import MakeRun, maker


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Make a run folder: ``make_run(method, seed, rounds=..., **changes to run.json)``."""
    return maker(tmp_path)
