"""``fedlowrank serve`` tells from the server's log how a run ended, and what to do then."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.local_network import Clock, until

pytest.importorskip("flwr")
from fedlowrank.cli.deployment import network_commands as commands
from fedlowrank.core.errors import CheckpointError, FedlowrankError, ResumeRefusedError
from fedlowrank.network import flower
from fedlowrank.network.deploy.flower_process import ProcessError
from fedlowrank.network.deploy.server_processes import RunStatus, SuperLink
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

    def read_disk_error(self) -> str:
        return ""


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


class DeafLink(Link):
    """A SuperLink that gives the state of its run only after some requests.

    Attributes:
        failures: number of requests that fail.
        requests: number of requests until now.
    """

    def __init__(self, log: Path, failures: float) -> None:
        super().__init__(log)
        self.failures, self.requests = failures, 0

    def status(self, run: int) -> RunStatus:
        self.requests += 1
        if self.requests <= self.failures:
            raise ProcessError("`flwr list` had no answer within 120 s")
        return RunStatus("finished:completed", "")


def test_a_request_for_the_state_of_a_run_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(commands, "time", Clock())
    link: Any = DeafLink(tmp_path / "superlink.log", 3)
    commands._see_through(link, tmp_path / "app", tmp_path / "server.log", tmp_path / "run")
    assert link.requests == 4
    assert sum("`flwr list` had no answer within 120 s; it is asked again" in m for m in caplog.messages) == 3


def test_a_run_whose_state_is_never_given_is_no_endless_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(commands, "time", clock)
    link: Any = DeafLink(tmp_path / "superlink.log", float("inf"))
    with pytest.raises(ProcessError, match=r"10 requests failed in a row, .* had no answer .* by --resume"):
        commands._see_through(link, tmp_path / "app", tmp_path / "server.log", tmp_path / "run")
    assert 9 * 60 < clock.now < 11 * 60


def test_a_run_that_says_how_it_ended_needs_no_state(tmp_path: Path) -> None:
    link: Any = DeafLink(tmp_path / "superlink.log", float("inf"))
    log = tmp_path / "server.log"
    log.write_text("12:00:00 finished\n")
    commands._see_through(link, tmp_path / "app", log, tmp_path / "run")
    log.write_text("12:00:00 error: the disk is full.\n")
    with pytest.raises(ProcessError, match=r"the run failed: the disk is full\. Start it again"):
        commands._see_through(link, tmp_path / "app", log, tmp_path / "run")


FAILURE = "finished:failed", "ServerApp failed with exception: Failed to push object"


@pytest.mark.parametrize(
    ("free", "line", "expected"),
    [
        (1 << 30, "", "Failed to push object. Start it again"),
        # what a client says about its own disk
        (1 << 30, "fedlowrank: client 1: No space left on device", "Failed to push object. Start it again"),
        (1000, "", r"object. A likely cause: the disk of .* is full: .*. Free space. Start it again"),
        (
            1 << 30,
            "sqlite3.OperationalError: database or disk is full",
            r"superlink.log reports a full disk: sqlite3.OperationalError: database or disk is full. Free space. Start",
        ),
    ],
)
def test_a_full_disk_of_the_server_is_named_as_the_cause(
    free: int, line: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    link = SuperLink(tmp_path, None, port=1)
    link.log.write_text(f"INFO: \x1b[91mstarted\n{line}\nINFO: another line\n")
    for name in ("submit", "alive", "unregister_revoked"):
        monkeypatch.setattr(link, name, getattr(Link(link.log), name))
    monkeypatch.setattr(link, "status", lambda _: RunStatus(*FAILURE))
    monkeypatch.setattr(commands, "time", Clock())
    with pytest.raises(ProcessError, match=expected):
        commands._see_through(link, tmp_path / "app", tmp_path / "server.log", tmp_path / "run")


def _start(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_closed_terminal_ends_a_command_and_what_it_started(is_ignored: bool) -> None:
    code = """
        import signal, sys, time
        from fedlowrank.cli.deployment.network_commands import interrupted_once
        # these tests may run under nohup, whose processes ignore the signal
        signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "True" else signal.SIG_DFL)
        try:
            with interrupted_once():
                print("ready", flush=True)
                time.sleep(5)
                print("slept", flush=True)
        finally:
            print("cleaned up", flush=True)
    """
    process = _start(code, str(is_ignored))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    out, error = process.communicate(timeout=60)
    assert out.split("\n") == (["slept", "cleaned up", ""] if is_ignored else ["cleaned up", ""])
    assert ("KeyboardInterrupt" in error) is not is_ignored


def test_a_closed_terminal_ends_the_processes_of_a_trial(tmp_path: Path) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\necho started >> {tmp_path / 'log'}\nexec sleep 50\n")
    stand_in.chmod(0o755)
    code = """
        import signal, sys
        from pathlib import Path
        from fedlowrank.cli.deployment import poc
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        sys.executable = sys.argv[1]
        poc.poc(None, 2, Path(sys.argv[2]))
    """
    process = _start(code, str(stand_in), str(tmp_path / "trial"))
    log = tmp_path / "log"
    until(lambda: log.exists() and len(log.read_text().splitlines()) == 3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    pids = [int(pid) for pid in children.read_text().split()] if children.exists() else []
    start = time.monotonic()
    process.send_signal(signal.SIGHUP)
    # a process that runs on would hold the pipe of the output open
    process.communicate(timeout=100)
    assert time.monotonic() - start < 40
    # one that ended is listed until the process that inherited it has asked for its end
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20)
