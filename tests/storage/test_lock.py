"""One process at a time writes a run folder, and a folder says what became of the process that wrote it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedlowrank import simulate
from fedlowrank.cli.main import main
from fedlowrank.core.errors import CheckpointError
from fedlowrank.results.records import RunRecord
from fedlowrank.storage.lock import (
    FolderInUseError,
    exclusive,
    identify_process,
    is_alive,
    is_in_use,
    read_holder,
)
from fedlowrank.storage.run_files import actual_status
from fedlowrank.storage.run_folder import RunFolder
from tests.support.interrupted_runs import (
    count_lines,
    make_tiny_federation,
    read_rounds,
    start_command,
    wait_for_exit_code,
    wait_for_round,
    write_experiment,
)


def state(folder: Path) -> str:
    return str(RunRecord.load(folder).status["state"])


@pytest.mark.full
def test_a_second_process_is_refused_by_name_and_a_killed_one_leaves_the_folder_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder, log = write_experiment(tmp_path), tmp_path / "run", tmp_path / "log"
    first = start_command("run", file, "run.rounds=40", "run.checkpoint_every=1", "-o", folder, log=log)
    try:
        assert wait_for_round(folder, 3, first)
        # it stands still in the middle of a round, and holds the folder
        os.kill(first, signal.SIGSTOP)
        written, before = count_lines(folder), sorted(p.name for p in tmp_path.iterdir())
        for arguments in (
            ["resume", str(folder)],
            ["run", str(file), "-o", str(folder), "--force"],
            [
                "compare",
                str(file),
                "--methods",
                "pfedlora",
                "run.rounds=40",
                "run.checkpoint_every=1",
                "--force",
            ],
        ):
            if arguments[0] == "compare":
                (tmp_path / "pfedlora-s0").symlink_to(folder)
                arguments += ["-o", str(tmp_path)]
            assert main(arguments) == 1
            assert f"in use by process {first}" in capsys.readouterr().err
        assert (count_lines(folder), state(folder)) == (written, "running")
        assert [n for n in sorted(p.name for p in tmp_path.iterdir()) if n != "pfedlora-s0"] == before
    finally:
        os.kill(first, signal.SIGKILL)
        wait_for_exit_code(first)
    assert state(folder) == "stopped"
    assert "killed" in RunRecord.load(folder).status["message"]
    both = [start_command("resume", folder, log=log) for _ in range(2)]
    codes = [wait_for_exit_code(process) for process in both]
    assert 0 in codes, log.read_text()
    assert [r["round"] for r in read_rounds(folder)] == list(range(41))
    assert state(folder) == "finished"


@pytest.mark.full
def test_any_error_ends_the_status_running(tmp_path: Path) -> None:
    def fail(record: Any) -> None:
        if record.round == 2:
            raise ZeroDivisionError("in the user's own function")

    with pytest.raises(ZeroDivisionError):
        simulate("pfedlora", make_tiny_federation(), rounds=3, folder=tmp_path / "run", on_round=fail)
    actual = RunRecord.load(tmp_path / "run").status
    assert (actual["state"], actual["rounds"]) == ("stopped", 2)
    assert "ZeroDivisionError: in the user's own function" in actual["message"]


@pytest.mark.full
def test_a_status_that_could_not_be_written_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = RunFolder.status

    def status(self: RunFolder, state: str, rounds: int, message: str = "") -> None:
        if state != "running":
            raise CheckpointError("the disk is full")
        written(self, state, rounds, message)

    monkeypatch.setattr(RunFolder, "status", status)
    with pytest.raises(CheckpointError, match="the disk is full"):
        simulate("pfedlora", make_tiny_federation(), rounds=1, folder=tmp_path / "run")
    assert '"running"' in (tmp_path / "run" / "status.json").read_text()
    assert state(tmp_path / "run") == "stopped"


def test_a_lock_is_exclusive_and_names_its_process(tmp_path: Path) -> None:
    with exclusive(tmp_path):
        assert is_alive(read_holder(tmp_path))
        with pytest.raises(FolderInUseError, match=f"process {os.getpid()}"), exclusive(tmp_path):
            pass
    assert read_holder(tmp_path) == {}
    with exclusive(tmp_path):
        pass
    (tmp_path / "lock").write_text("[" * 100_000)
    assert read_holder(tmp_path) == {}
    with pytest.raises(CheckpointError, match="cannot lock"), exclusive(tmp_path / "nowhere"):
        pass


def test_a_folder_is_in_use_as_long_as_its_lock_is_held_whatever_the_clock_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_in_use(tmp_path)
    with exclusive(tmp_path):
        # the start time of every process moves with the clock
        start = psutil.Process().create_time()
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: start + 3600)
        assert is_in_use(tmp_path)
        assert actual_status(tmp_path, {"state": "running"}) == {"state": "running"}
    assert not is_in_use(tmp_path)
    assert actual_status(tmp_path, {"state": "running"})["state"] == "stopped"


def test_without_locks_of_the_file_system_the_described_process_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: Any, operation: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    with exclusive(tmp_path), monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        assert is_in_use(tmp_path)
        (tmp_path / "lock").write_text(json.dumps({**identify_process(os.getpid()), "pid": 2**22 + 1}))
        assert not is_in_use(tmp_path)


def test_a_process_is_known_by_its_number_its_start_and_its_machine() -> None:
    me = identify_process(os.getpid())
    assert is_alive(me)
    assert not is_alive({**me, "started": me["started"] - 100})
    assert not is_alive({**me, "pid": 2**22 + 1})
    assert is_alive({**me, "pid": 2**22 + 1, "host": "another"}), "nobody here can know"
    assert not is_alive({})
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        theirs = identify_process(child.pid)
        assert is_alive(theirs)
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(theirs), "it ended, and its parent has not asked how"
