"""Fixtures of the report's tests."""

from pathlib import Path

import pytest

from fedlowrank.report.formats import page
from tests.report.report_runs import MakeRun, maker


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Make a run folder: ``make_run(method, seed, rounds=..., **changes to run.json)``."""
    return maker(tmp_path)


@pytest.fixture
def words_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without figures, which take nine tenths of the time: for tests of what is written."""
    monkeypatch.setattr(page, "draw_all", lambda groups, styles: iter(()))
