"""``fedlowrank serve`` tells from the server's log how a run ended, and what to do then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
from fedlowrank.cli.deployment import network_commands as commands
from fedlowrank.core.errors import CheckpointError, FedlowrankError, ResumeRefusedError
from fedlowrank.network import flower
from fedlowrank.network.deploy.flower_process import ProcessError
from fedlowrank.network.deploy.server_processes import RunStatus
from fedlowrank.storage.run_folder import RunFolder


class Link:
    """A SuperLink whose run goes on, as far as Flower knows."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def submit(self, app: Path) -> int:
        return 1

    def alive(self) -> bool:
        return True

    def status(self, run: int) -> RunStatus:
        return RunStatus("running", "")

    def unregister_revoked(self) -> list[str]:
        return []


@pytest.mark.parametrize(
    ("error", "begun", "expected"),
    [
        (
            ResumeRefusedError("run.rounds was 3 and is 4. Set it back."),
            True,
            "Set it back. Nothing has changed",
        ),
        (
            CheckpointError("the disk is full."),
            True,
            "the run failed: the disk is full. Go on with it by --resume",
        ),
        (CheckpointError("the disk is full."), False, "the run failed: the disk is full. Start it again"),
        (FedlowrankError("paused: it fell."), True, "the run is paused: it fell. Details"),
        (None, True, ""),
    ],
)
def test_the_end_of_a_run_is_reported_with_advice(
    error: FedlowrankError | None, begun: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drive(*_: Any, **__: Any) -> None:
        if error is not None:
            raise error

    tables = {"partition": {"kind": "iid", "clients": 2}, "data": {"source": "iris"}}
    (tmp_path / "experiment.json").write_text(json.dumps(tables))
    monkeypatch.setattr(flower, "drive", drive)
    monkeypatch.setenv(flower.EXPERIMENT, str(tmp_path / "experiment.json"))
    monkeypatch.setenv(flower.OUT, str(tmp_path / "runs" / "run"))
    monkeypatch.setenv(flower.LOG, str(tmp_path / "server.log"))
    arguments: Any = (None, None)
    if error is None:
        flower._serve(*arguments)
    else:
        with pytest.raises(type(error)):
            flower._serve(*arguments)

    monkeypatch.setattr(RunFolder, "has_begun", lambda _: begun)
    link: Any = Link(tmp_path / "superlink.log")
    watched = (link, tmp_path / "app", tmp_path / "server.log", tmp_path / "runs" / "run")
    if error is None:
        commands._see_through(*watched)
        return
    with pytest.raises(ProcessError) as caught:
        commands._see_through(*watched)
    assert expected in str(caught.value)
