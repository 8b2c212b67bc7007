"""Fixtures of the tests of the network."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlowrank.network.deploy import process_tree


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    """Capture what the command line prints while a run goes on."""
    caplog.set_level("INFO", "fedlowrank")


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is a site of its own, whose runs have spent nothing."""
    monkeypatch.setenv("FEDLOWRANK_STATE", str(tmp_path / "state"))


@pytest.fixture
def no_process_left(tmp_path: Path) -> Iterator[None]:
    """No process of a test outlives it: all have its folder on their command lines, or a parent that has."""
    yield
    left = {n: p.command for n, p in process_tree.living_processes().items() if str(tmp_path) in p.command}
    for number in left:
        os.kill(number, signal.SIGKILL)
    assert not left
