"""Fixtures of the tests of the network."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.engines.sequential import Sequential
from fedlowrank.network.deploy import process_tree
from fedlowrank.rounds.run import Run
from tests.network.deployments import CommandProcess
from tests.support.local_network import small


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
    left = {
        n: p.command for n, p in process_tree.list_living_processes().items() if str(tmp_path) in p.command
    }
    for number in left:
        os.kill(number, signal.SIGKILL)
    assert not left


@pytest.fixture
def processes() -> Iterator[list[CommandProcess]]:
    """Commands that a test starts; all end with it."""
    started: list[CommandProcess] = []
    yield started
    for process in started:
        process.close()


@pytest.fixture
def experiment() -> ExperimentConfig:
    """SCAFFOLD with three clients, for tests of single orders."""
    return small("scaffold", rounds=4)


@pytest.fixture
def sequential_run(experiment: ExperimentConfig) -> Run:
    """The run of the experiment within one process, before its first round."""
    return Run(experiment.build_method("scaffold"), experiment.federation(), experiment.run, Sequential())
