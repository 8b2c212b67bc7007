"""Runs that are killed, interrupted or starved of disk end, once resumed, as if nothing had happened."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gzip
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank import Federation, load_rounds, load_runs, simulate
from fedlowrank.cli.main import main
from fedlowrank.config.comparison import PlannedRun, find_changes
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core import tree
from fedlowrank.core.errors import CheckpointError, FedlowrankError
from fedlowrank.core.learning.optimizer import SGD, LocalSchedule
from fedlowrank.methods import METHODS
from fedlowrank.methods.pfedlora import PFedLoRA
from fedlowrank.results.records import RoundRecord, RunRecord
from fedlowrank.rounds.participation.participants import Participants
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.storage import checkpoint
from fedlowrank.storage.digest import seal, write_sealed
from fedlowrank.storage.run_files import (
    RECORDS_FILE,
    REPRESENTATIONS,
    read_answers,
    read_lines,
    read_representations,
    seal_run,
)
from tests.support.interrupted_runs import (
    SplitNetwork,
    count_lines,
    make_tiny_federation,
    read_rounds,
    start_command,
    wait_for_exit_code,
    wait_for_round,
    write_experiment,
)

torch.set_num_threads(1)

ROUNDS = 10


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    # the command line installs a handler of its own
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def files_of(folder: Path) -> dict[str, tuple[bytes, Any]]:
    """States and tables of the checkpoint files, without the identifier of the run."""
    contents = {}
    for path in sorted((folder / "checkpoint").iterdir()):
        data = path.read_bytes()
        size = int.from_bytes(data[-8:], "big")
        table = json.loads(data[-8 - size : -8])
        del table["run"], table["digest"]
        contents[path.name] = data[: -8 - size], table
    return contents


def assert_same_end(folder: Path, whole: Path, names: bool = True) -> None:
    """Metrics and states equal bit for bit; the file names too where checkpoints fell on the same rounds."""
    assert read_rounds(folder) == read_rounds(whole)
    if names:
        assert files_of(folder) == files_of(whole)
    one, other = checkpoint.load(folder / "checkpoint"), checkpoint.load(whole / "checkpoint")
    assert one.round == other.round
    assert tree.encode(one.server) == tree.encode(other.server)
    assert one.clients.keys() == other.clients.keys()
    for client, state in one.clients.items():
        assert tree.encode(state) == tree.encode(other.clients[client])
    kept = "representations.safetensors"
    assert (folder / kept).read_bytes() == (whole / kept).read_bytes()
    assert RunRecord.load(folder).status["state"] == "finished"


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    # what torch and others import when first needed, the forked processes then have
    simulate("pfedlora", make_tiny_federation(), rounds=1)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of a run of the small experiment that nothing disturbed, by ``checkpoint_every``."""
    made: dict[int, Path] = {}

    def of(every: int) -> Path:
        if every not in made:
            folder = tmp_path_factory.mktemp(f"whole-{every}")
            file = write_experiment(folder)
            arguments = ["run", str(file), f"run.checkpoint_every={every}", "-o", str(folder / "run")]
            assert wait_for_exit_code(start_command(*arguments, log=folder / "log")) == 0, (
                folder / "log"
            ).read_text()
            made[every] = folder / "run"
        return made[every]

    return of


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("every", "seed"),
    [
        *((1, 0), (3, 4)),
        *(pytest.param(*more, marks=pytest.mark.full) for more in ((1, 1), (1, 2), (3, 5), (3, 6))),
    ],
)
def test_a_killed_run_resumes_to_the_same_bits(
    tmp_path: Path, unbroken: Callable[[int], Path], every: int, seed: int
) -> None:
    whole = unbroken(every)
    file, folder, log = write_experiment(tmp_path), tmp_path / "run", tmp_path / "log"
    chance = random.Random(seed)
    process = start_command("run", file, f"run.checkpoint_every={every}", "-o", folder, log=log)
    at = chance.randrange(0, 5)
    for _ in range(3):
        # the moment falls anywhere in the rounds after that one: training, appending, writing of the
        # checkpoint
        if not wait_for_round(folder, at, process):
            process = 0
            break
        time.sleep(chance.random() * 0.03)
        os.kill(process, signal.SIGKILL)
        wait_for_exit_code(process)
        at = min(ROUNDS, at + chance.randrange(1, 4))
        process = start_command("resume", folder, log=log)
    if process:
        assert wait_for_exit_code(process) == 0, log.read_text()
    assert_same_end(folder, whole)


@pytest.mark.full
@pytest.mark.parametrize("every", [1, 100], ids=["after a checkpoint", "before the first one"])
def test_a_killed_process_of_the_installed_command(
    every: int, tmp_path: Path, unbroken: Callable[[int], Path]
) -> None:
    whole, folder = unbroken(every), tmp_path / "run"
    command = [sys.executable, "-m", "fedlowrank.cli.main"]
    with subprocess.Popen(
        [
            *command,
            "run",
            str(write_experiment(tmp_path)),
            f"run.checkpoint_every={every}",
            "-o",
            str(folder),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        wait_for_round(folder, 3)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert count_lines(folder) < ROUNDS + 1
    assert main(["resume", str(folder)]) == 0
    assert_same_end(folder, whole)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("every", [1, 100])
def test_a_signal_stops_cleanly(
    tmp_path: Path, unbroken: Callable[[int], Path], number: signal.Signals, every: int
) -> None:
    whole = unbroken(every)
    file, folder, log = write_experiment(tmp_path), tmp_path / "run", tmp_path / "log"
    process = start_command("run", file, f"run.checkpoint_every={every}", "-o", folder, log=log)
    assert wait_for_round(folder, 3, process)
    os.kill(process, number)
    assert wait_for_exit_code(process) == 130, log.read_text()
    said = log.read_text()
    assert "interrupted" in said
    assert f"fedlowrank resume {folder}" in "".join(said.splitlines()[-1:])
    assert "Traceback" not in said
    stopped = RunRecord.load(folder)
    assert stopped.status["state"] == "stopped"
    # what was finished is kept, whatever the distance between checkpoints
    assert 3 <= checkpoint.load(folder / "checkpoint").round <= len(stopped.rounds)
    assert not list(folder.rglob("*.part"))
    assert main(["resume", str(folder)]) == 0
    assert_same_end(folder, whole, names=False)


# A federation so small that hundreds of runs take a second.


def whole_run(folder: Path, **settings: Any) -> Path:
    simulate(METHODS["lg_fedavg"](), make_tiny_federation(), folder=folder, **settings)
    return folder


TINY = {"rounds": 3, "participation": 0.6, "checkpoint_every": 2, "representations": 6}


class CrashError(BaseException):
    """The process is gone: no handler for errors may catch this."""


class Disk:
    """Counts what is done to files, and from the k-th time on does nothing but raise."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, make: Callable[[], BaseException], at: int | None
    ) -> None:
        self.calls, self.at, self.make = 0, at, make
        touched = [(Path, "replace"), (Path, "mkdir"), (Path, "rename"), (os, "fsync")]
        if make is not full:
            # a full disk still lets files go
            touched.append((Path, "unlink"))
        for owner, name in touched:
            monkeypatch.setattr(owner, name, self.counted(getattr(owner, name)))
        opened = Path.open

        def opening(path: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
            if mode[0] != "r":
                self.count()
            file = opened(path, mode, *rest, **more)
            if mode[0] != "r":
                write = file.write

                def half(data: Any) -> Any:
                    try:
                        self.count()
                    except BaseException:
                        # a write may stop anywhere
                        write(data[: len(data) // 2])
                        file.flush()
                        raise
                    return write(data)

                return Wrapped(file, half)
            return file

        monkeypatch.setattr(Path, "open", opening)

    def count(self) -> None:
        self.calls += 1
        if self.at is not None and self.calls >= self.at:
            raise self.make()

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            self.count()
            return function(*arguments, **more)

        return call


class Wrapped:
    """A file whose writes go elsewhere."""

    def __init__(self, file: Any, write: Callable[[Any], Any]) -> None:
        self.file, self.write = file, write

    def __enter__(self) -> Wrapped:
        self.file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def crash() -> BaseException:
    return CrashError()


def full() -> BaseException:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken() -> BaseException:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def go_on(folder: Path) -> None:
    """What a person would do: resume what can be resumed, else start again."""
    resumable = (folder / "run.json").exists() and checkpoint.exists(folder / "checkpoint")
    simulate(
        "lg_fedavg", make_tiny_federation(), folder=folder, resume=resumable, force=not resumable, **TINY
    )


def operations(tmp_path: Path, make: Callable[[], BaseException] = crash) -> int:
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, make, None)
        simulate("lg_fedavg", make_tiny_federation(), folder=tmp_path / "counted", **TINY)
        return disk.calls


@pytest.mark.full
@pytest.mark.parametrize("make", [crash, full], ids=["crash", "full disk"])
def test_a_stop_at_any_operation_on_files_can_be_resumed(
    tmp_path: Path, make: Callable[[], BaseException]
) -> None:
    whole = whole_run(tmp_path / "whole", **TINY)
    count = operations(tmp_path, make)
    assert count > 40
    seen = set()
    # a crash at every operation; a full disk, which takes the same ways out, at every third
    for at in range(1, count + 1, 1 if make is crash else 3):
        folder = tmp_path / f"run-{at}"
        expected = CrashError if make is crash else CheckpointError
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, make, at)
            with pytest.raises(expected) as caught:
                simulate("lg_fedavg", make_tiny_federation(), folder=folder, **TINY)
        if make is full:
            assert "No space left" in str(caught.value), f"operation {at}: {caught.value}"
        if checkpoint.exists(folder / "checkpoint"):
            # whatever happened, the last checkpoint is whole
            seen.add(checkpoint.load(folder / "checkpoint").round)
        go_on(folder)
        assert_same_end(folder, whole)
        assert not list((folder / "checkpoint").glob("*.part"))
    assert seen == {0, 2, 3}


@pytest.mark.full
def test_a_resumed_run_may_be_stopped_again_anywhere(tmp_path: Path) -> None:
    whole = whole_run(tmp_path / "whole", **TINY)
    count = operations(tmp_path)
    chance = random.Random(0)
    for number in range(10):
        folder = tmp_path / f"run-{number}"
        for _ in range(3):
            with pytest.MonkeyPatch.context() as patch:
                Disk(patch, crash, chance.randrange(1, count + 1))
                with contextlib.suppress(CrashError):
                    go_on(folder)
        go_on(folder)
        assert_same_end(folder, whole)


@pytest.mark.full
def test_a_full_disk_leaves_the_last_checkpoint_as_it_was(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run", **TINY)
    before = files_of(folder)
    state = checkpoint.load(folder / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, full, 3)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.save(folder / "checkpoint", 4, state.server, state.clients)
    after = files_of(folder)
    assert {n: after[n] for n in before} == before
    assert checkpoint.load(folder / "checkpoint").round == 3


@pytest.mark.full
@pytest.mark.parametrize("at", range(1, 7))
def test_a_broken_disk_gives_the_same_kind_of_error(tmp_path: Path, at: int) -> None:
    # not even the half-written file can be removed
    folder = whole_run(tmp_path / "run", **TINY)
    state = checkpoint.load(folder / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        Disk(patch, broken, at)
        with pytest.raises(CheckpointError, match="error"):
            checkpoint.save(folder / "checkpoint", 4, state.server, state.clients)
    actual = checkpoint.load(folder / "checkpoint")
    assert actual.round in (3, 4)
    assert tree.equal(actual.server, state.server)


def stopped_run(folder: Path, every: int = 1) -> Path:
    """A small experiment stopped after two rounds, by an error in the third."""
    file = write_experiment(folder)
    process = start_command(
        "run", file, f"run.checkpoint_every={every}", "-o", folder / "run", log=folder / "log"
    )
    assert wait_for_round(folder / "run", 2, process)
    os.kill(process, signal.SIGINT)
    assert wait_for_exit_code(process) == 130
    return folder / "run"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped_run(tmp_path_factory.mktemp("stopped"))


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("methods.pfedlora.mu=0.7", "mu"),
        ("methods.pfedlora.width=8", "width"),
        ("defaults.optimizer.lr=0.2", "lr"),
        ("defaults.batch_size=16", "batch_size"),
        ("run.participation=1.0", "run.participation"),
        ("run.seed=1", "run.seed"),
        ("run.rounds=9", "run.rounds was 10 and is 9"),
        ("run.lost_replies=0.1", "run.lost_replies"),
        ("partition.classes_per_client=2", "partition.classes_per_client"),
        ("data.source=wine", "data"),
        ("model.hidden=[13]", "hidden"),
    ],
)
def test_resume_refuses_another_configuration(
    stopped: Path, override: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()}
    assert main(["resume", str(stopped), override]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert named in said
    assert {p: p.read_bytes() for p in stopped.rglob("*") if p.is_file()} == before


@pytest.mark.full
@pytest.mark.parametrize(
    "override", ["run.checkpoint_every=2", "run.target=0.8", "run.representations=40", "title=Another title"]
)
def test_resume_takes_settings_that_change_no_result(
    stopped: Path, tmp_path: Path, unbroken: Callable[[int], Path], override: str
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    assert main(["resume", str(tmp_path / "run"), override]) == 0
    assert read_rounds(tmp_path / "run") == read_rounds(unbroken(1))


def without_new_settings(folder: Path) -> None:
    """Make ``run.json`` as before there were some settings: of a run, its parts, a model, a method, its optimizer."""
    config = json.loads((folder / "run.json").read_text())
    fields = config["method"]["fields"]
    for table, name in [
        (config["run"], "devices"), (config["run"], "unseen"), (config["run"]["privacy"], "accountant"),
        (config["model"], "head"), (fields, "mu"), (fields["optimizer"]["schedule"], "warmup"),
    ]:  # fmt: skip
        del table[name]
    (folder / "run.json").write_text(json.dumps(config))
    seal_run(folder)


@pytest.mark.full
def test_settings_that_came_later_do_not_stop_a_resumption(
    stopped: Path, tmp_path: Path, unbroken: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    without_new_settings(folder)
    for override, named in [
        ("run.devices.latency=0.5", "run.devices.latency was 0.0 and is 0.5"),
        ("run.unseen=0.5", "run.unseen was 0.0 and is 0.5"),
        ("methods.pfedlora.mu=0.7", "method.fields.mu was 0.9 and is 0.7"),
    ]:
        assert main(["resume", str(folder), override]) == 1
        assert named in capsys.readouterr().err
    # neither does a comparison refuse it
    experiment = ExperimentConfig.read(write_experiment(tmp_path), ["run.checkpoint_every=1"])
    assert find_changes(PlannedRun(experiment, "pfedlora", {}, folder)) == []
    assert main(["resume", str(folder)]) == 0
    assert read_rounds(folder) == read_rounds(unbroken(1))


@pytest.mark.full
def test_a_finished_run_is_left_as_it_is(tmp_path: Path, unbroken: Callable[[int], Path]) -> None:
    shutil.copytree(unbroken(1), tmp_path / "run")
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert_same_end(tmp_path / "run", unbroken(1))


# Damage


@pytest.mark.few(1)
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_truncated_checkpoint_file_is_named(tmp_path: Path, keep: float) -> None:
    folder = whole_run(tmp_path / "run", **TINY, keep_checkpoints=1)
    for file in sorted((folder / "checkpoint").glob("*.checkpoint")):
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * keep)])
        with pytest.raises(CheckpointError, match=file.name):
            simulate("lg_fedavg", make_tiny_federation(), folder=folder, resume=True, **TINY)
        file.write_bytes(data)
    simulate("lg_fedavg", make_tiny_federation(), folder=folder, resume=True, **TINY)


def test_a_damaged_last_checkpoint_can_be_removed_and_an_older_one_cannot(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run", **TINY)
    before, last = sorted((folder / "checkpoint").glob("*.checkpoint"))[-2:]
    kept = before.read_bytes()
    before.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{before.name}.*do not remove it"):
        simulate("lg_fedavg", make_tiny_federation(), folder=folder, resume=True, **TINY)
    before.write_bytes(kept)
    whole = last.read_bytes()
    last.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{last.name}.*remove it to go on from {before.name}"):
        simulate("lg_fedavg", make_tiny_federation(), folder=folder, resume=True, **TINY)
    last.unlink()
    simulate("lg_fedavg", make_tiny_federation(), folder=folder, resume=True, **TINY)
    assert last.read_bytes() == whole


def change_run(folder: Path, **changes: Any) -> None:
    """Change entries of ``run.json`` by hand."""
    config = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(config | changes))
    seal_run(folder)


def test_other_software_is_named_and_another_format_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, more = whole_run(tmp_path / "run", **TINY), {**TINY, "rounds": TINY["rounds"] + 1}
    versions = json.loads((folder / "run.json").read_text())["versions"]
    change_run(folder, versions={**versions, "torch": "1.0", "fedlowrank": "0.0.1"})
    simulate("lg_fedavg", make_tiny_federation(), folder=folder, resume=True, **more)
    (said,) = [r.getMessage() for r in caplog.records if "other software" in r.getMessage()]
    assert f"fedlowrank 0.0.1 (now {versions['fedlowrank']}), torch 1.0 (now {versions['torch']})" in said
    change_run(folder, format=1, versions={**versions, "fedlowrank": "0.0.1"})
    with pytest.raises(CheckpointError, match=r"has format 1, .* format 4\. .*that made it \(0\.0\.1\)"):
        simulate("lg_fedavg", make_tiny_federation(), folder=folder, resume=True, **more)


@pytest.mark.full
def test_a_missing_checkpoint_file_is_named(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run", **TINY)
    for file in (folder / "checkpoint").iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        simulate("lg_fedavg", make_tiny_federation(), folder=folder, resume=True, **TINY)


ENTRY = [0, 4, "00"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "table",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        {},
        {"round": 3},
        {"round": "three", "server": ENTRY, "clients": {}},
        {"round": 3, "server": 7, "clients": {}},
        {"round": 3, "server": ENTRY, "clients": []},
        {"round": 3, "server": ENTRY, "clients": {"x": ENTRY}},
        {"round": 3, "server": ENTRY, "clients": {}},
    ],
)
def test_a_damaged_table_of_contents_is_named(tmp_path: Path, table: Any) -> None:
    folder = whole_run(tmp_path / "run", **TINY)
    contents = table if isinstance(table, bytes) else json.dumps(seal(table)).encode()
    damaged = b"1234" + contents + len(contents).to_bytes(8, "big")
    (folder / "checkpoint" / "000003.checkpoint").write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"000003\.checkpoint"):
        simulate("lg_fedavg", make_tiny_federation(), folder=folder, resume=True, **TINY)


def gzip_lines(rows: list[str]) -> bytes:
    return b"".join(gzip.compress(row.encode(), mtime=0) for row in rows)


@pytest.mark.full
def test_an_incomplete_last_line_is_left_out(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run", **TINY)
    whole, complete = (folder / RECORDS_FILE).read_bytes(), read_lines(folder)
    members = [len(gzip.compress(line, mtime=0)) for line in complete]
    assert sum(members) == len(whole)
    for cut in range(1, members[-1]):
        (folder / RECORDS_FILE).write_bytes(whole[:-cut])
        # the line is whole where only the checksum after it is not
        assert read_lines(folder) in (complete[:-1], complete)
    assert read_lines(folder) == complete[:-1]


@pytest.mark.few(2)
@pytest.mark.parametrize("rounds", [TINY["rounds"], 5])
@pytest.mark.parametrize(
    "damage", ["short", "a gap", "no JSON", "another object", "missing", "not compressed"]
)
def test_a_run_goes_on_from_its_checkpoint_when_records_are_lost(
    tmp_path: Path, damage: str, rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    how = {**TINY, "evaluate_every": 1}
    whole = simulate(
        "lg_fedavg", make_tiny_federation(), folder=tmp_path / "whole", **{**how, "rounds": rounds}
    )
    folder = whole_run(tmp_path / "run", **how)
    path = folder / RECORDS_FILE
    text = [line.decode() for line in read_lines(folder)]
    rows, lost = {
        "short": (text[:2], [2, 3]),
        "a gap": ([text[0], *text[2:]], [1]),
        "no JSON": ([text[0], text[1][:20] + "\n", *text[2:]], [1]),
        "another object": ([text[0], '{"color": 1}\n', *text[2:]], [1]),
        "missing": ([], [0, 1, 2, 3]),
        "not compressed": (text, [0, 1, 2, 3]),
    }[damage]
    path.write_bytes("".join(rows).encode() if damage == "not compressed" else gzip_lines(rows))
    if damage == "missing":
        path.unlink()
    named = {1: "round 1 is", 2: "rounds 2 to 3 are", 4: "rounds 0 to 3 are"}[len(lost)]
    if damage in ("short", "a gap"):
        actual = RunRecord.load(folder)
        assert actual.missing == tuple(lost)
        assert load_runs(folder)["round"].unique().tolist() == [t for t in range(4) if t not in lost]
        assert f"{named} lost; they have no rows" in caplog.text
    else:
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl.*resume"):
            RunRecord.load(folder)
    result = simulate(
        "lg_fedavg", make_tiny_federation(), folder=folder, resume=True, **{**how, "rounds": rounds}
    )
    assert f"{named} lost" in caplog.text
    # what is known again is as it was, and the states are those of an unbroken run
    kept = {r.round: r for r in RunRecord.load(folder).rounds}
    assert {r.round: r.untimed() for r in result.rounds} == {t: r.untimed() for t, r in kept.items()}
    assert sorted(kept) == [t for t in range(rounds + 1) if t not in lost or t == 3]
    for t, record in kept.items():
        if record.restored:
            assert (t, record.steps) == (3, 0)
            assert record.measured == whole.rounds[t].measured
        else:
            assert record.untimed() == whole.rounds[t].untimed()
    assert RunRecord.load(folder).missing == tuple(lost)
    states = [checkpoint.load(f / "checkpoint") for f in (folder, tmp_path / "whole")]
    assert tree.encode(states[0].server) == tree.encode(states[1].server)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"7", b"null", b'"text"', b"\xff\xfe\x00{", b"[" * 100_000]
)
@pytest.mark.parametrize("name", ["run.json", "clients.json", "status.json"])
def test_a_damaged_table_is_named(
    tmp_path: Path, name: str, text: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = whole_run(tmp_path / "run", **TINY)
    before = read_rounds(folder)
    (folder / name).write_bytes(text)
    for command in (["report", str(folder)], ["status", str(folder)]):
        assert main(command) == 1
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert str(folder / name) in said.replace("\n", "")
        assert len(said) < 1000
    for reader in (load_runs, load_rounds):
        with pytest.raises(CheckpointError, match=name):
            reader(folder)
    if name == "run.json":
        for command in ("resume", "predict", "export", "adapters"):
            assert main([command, str(folder), *(["-o", str(tmp_path / "out")] * (command != "resume"))]) == 1
            assert name in capsys.readouterr().err
        with pytest.raises(CheckpointError, match=name):
            simulate("lg_fedavg", make_tiny_federation(), folder=folder, resume=True, **TINY)
    else:
        # the run knows what they hold
        simulate("lg_fedavg", make_tiny_federation(), folder=folder, resume=True, **TINY)
        assert read_rounds(folder) == before
        assert RunRecord.load(folder).status["state"] in ("finished", "stopped")


@pytest.mark.full
@pytest.mark.parametrize("name", ["run.json", "clients.json", "status.json", RECORDS_FILE])
def test_every_flipped_bit_is_noticed_or_harmless(tmp_path: Path, name: str) -> None:
    folder = whole_run(tmp_path / "run", **TINY)
    path, whole = folder / name, RunRecord.load(folder)
    data = path.read_bytes()
    # bytes over the whole file, their bits in turn
    noticed: list[str] = []
    for at in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        try:
            actual = RunRecord.load(folder)
        except CheckpointError as error:
            noticed.append(str(error))
            continue
        assert actual.clients == whole.clients
        assert actual.missing or actual.rounds == whole.rounds
        for mine, other in ((actual.config, whole.config), (actual.status, whole.status)):
            # the name of a digest itself may be hit
            assert {key: mine.get(key) for key in other} == other
    assert len(noticed) > 0.8 * len(data) // 7
    assert all(name in said for said in noticed)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "key"), [("run.json", "digest"), ("run.json", "clients_digest"), ("status.json", "digest")]
)
def test_a_file_without_its_digest_is_refused_until_it_is_sealed(tmp_path: Path, name: str, key: str) -> None:
    folder = whole_run(tmp_path / "run", **TINY)
    path, whole = folder / name, RunRecord.load(folder)
    table = json.loads(path.read_text())
    del table[key]
    path.write_text(json.dumps(seal(table) if key != "digest" else table))
    with pytest.raises(CheckpointError, match=f"{key!r}.*seal_run"):
        RunRecord.load(folder)
    seal_run(folder)
    assert RunRecord.load(folder) == whole


def test_damaged_representations_are_named(tmp_path: Path) -> None:
    whole_run(tmp_path / "run", **TINY)
    run, path = RunRecord.load(tmp_path / "run"), tmp_path / "run" / REPRESENTATIONS
    actual = read_representations(run.folder)
    assert actual is not None
    assert len(actual["x"])
    data = path.read_bytes()
    for at in range(0, len(data), 5):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="representations"):
            read_representations(run.folder)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="or remove it"):
        read_representations(run.folder)


def test_left_overs_are_removed(tmp_path: Path) -> None:
    folder = whole_run(tmp_path / "run", **TINY)
    before = files_of(folder)
    (folder / "checkpoint" / "000099.checkpoint.part").write_bytes(b"left over")
    simulate("lg_fedavg", make_tiny_federation(), folder=folder, resume=True, **TINY)
    assert files_of(folder) == before


# From Python


def stop_after(rounds: int) -> Callable[[RoundRecord], None]:
    def listener(record: RoundRecord) -> None:
        if record.round == rounds:
            raise KeyboardInterrupt

    return listener


@pytest.fixture
def half(tmp_path: Path) -> Path:
    with pytest.raises(KeyboardInterrupt):
        simulate(
            PFedLoRA(width=2),
            make_tiny_federation(),
            folder=tmp_path / "half",
            on_round=stop_after(1),
            **TINY,
        )
    return tmp_path / "half"


@pytest.mark.full
def test_python_resumes_to_the_same_end(half: Path, tmp_path: Path) -> None:
    simulate(PFedLoRA(width=2), make_tiny_federation(), folder=tmp_path / "whole", **TINY)
    result = simulate(PFedLoRA(width=2), make_tiny_federation(), folder=half, resume=True, **TINY)
    assert_same_end(half, tmp_path / "whole", names=False)
    assert [r.round for r in result.rounds] == [0, 1, 2, 3]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"method": PFedLoRA(width=3)}, "method.fields.width was 2 and is 3"),
        (
            {"method": PFedLoRA(width=2, optimizer=SGD(lr=0.5))},
            "method.fields.optimizer.lr was 0.01 and is 0.5",
        ),
        ({"method": METHODS["standalone"]()}, "method.name was 'pfedlora' and is 'standalone'"),
        ({"participation": 0.4}, "participation was 0.6 and is 0.4"),
        ({"rounds": 2}, "rounds was 3 and is 2"),
        ({"federation": make_tiny_federation(seed=1)}, "seed was 0 and is 1"),
        ({"federation": make_tiny_federation(shift=1.0)}, "client 1"),
    ],
    ids=["width", "lr", "method", "participation", "rounds", "seed", "data"],
)
def test_python_refuses_what_changed(half: Path, change: dict[str, Any], named: str) -> None:
    given: dict[str, Any] = {
        "method": PFedLoRA(width=2),
        "federation": make_tiny_federation(),
        **TINY,
        **change,
    }
    method, on = given.pop("method"), given.pop("federation")
    before = {p: p.read_bytes() for p in half.rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError) as caught:
        simulate(method, on, folder=half, resume=True, **given)
    assert named in str(caught.value)
    assert {p: p.read_bytes() for p in half.rglob("*") if p.is_file()} == before


@pytest.mark.full
def test_another_number_of_clients_is_named(half: Path) -> None:
    smaller = Federation.from_arrays(
        [(torch.randn(10, 4), torch.zeros(10).long()) for _ in range(2)], SplitNetwork, classes=2
    )
    with pytest.raises(CheckpointError, match="client"):
        simulate(PFedLoRA(width=2), smaller, folder=half, resume=True, **TINY)


def test_resuming_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FedlowrankError, match="folder"):
        simulate("standalone", make_tiny_federation(), resume=True, rounds=1)
    with pytest.raises(CheckpointError):
        simulate("standalone", make_tiny_federation(), folder=tmp_path / "none", resume=True, rounds=1)
    assert main(["resume", str(tmp_path / "none")]) == 1
    assert "run.json" in capsys.readouterr().err
    simulate("standalone", make_tiny_federation(), folder=tmp_path / "python", rounds=1)
    assert main(["resume", str(tmp_path / "python")]) == 1
    assert "Python" in capsys.readouterr().err


def test_a_run_is_not_extended_into_rounds_with_a_learning_rate_of_zero(tmp_path: Path) -> None:
    # one step a round; the learning rate is 0 from the fifth step on
    optimizer = SGD(lr=0.1, local_schedule=LocalSchedule("linear", steps=4, rounds=50))
    method = METHODS["fedavg"](optimizer=optimizer, batch_size=1000)
    simulate(method, make_tiny_federation(), folder=tmp_path / "run", rounds=3)
    with pytest.raises(CheckpointError, match="learning rate of 0 before round 20"):
        simulate(method, make_tiny_federation(), folder=tmp_path / "run", resume=True, rounds=20)


def test_a_resumed_run_evaluates_in_the_same_rounds_if_the_first_drew_no_client(
    tmp_path: Path,
) -> None:
    given: dict[str, Any] = {"rounds": 120, "participation": 0.3, "sampling": "poisson"}
    clients = len(make_tiny_federation().clients)
    seed = next(
        seed
        for seed in itertools.count()
        if not Participants(clients, RunSettings(**given), make_tiny_federation(seed=seed).key).draw(0)
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    simulate("fedavg", make_tiny_federation(seed=seed), folder=whole, **given)
    with pytest.raises(KeyboardInterrupt):
        simulate("fedavg", make_tiny_federation(seed=seed), folder=broken, on_round=stop_after(7), **given)
    simulate("fedavg", make_tiny_federation(seed=seed), folder=broken, resume=True, **given)
    evaluated = [[r.round for r in RunRecord.load(f).rounds if r.measured] for f in (whole, broken)]
    assert len(evaluated[0]) < 100, "else nothing is planned"
    assert evaluated[0] == evaluated[1]


def test_the_state_of_a_best_round_that_is_repeated_is_removed(tmp_path: Path) -> None:
    given: dict[str, Any] = {"rounds": 8, "checkpoint_every": 1, "keep_best": True, "keep_checkpoints": 8}
    method, folder = METHODS["fedavg"](optimizer=SGD(lr=0.2)), tmp_path / "run"
    simulate(method, make_tiny_federation(), folder=folder, **given)
    shutil.copytree(folder, tmp_path / "whole")
    best = checkpoint.rounds_kept(folder / "best")[-1]
    assert best > 2
    # as if the process had been killed after it wrote the best state and before the next checkpoint
    checkpoint.go_back(folder / "checkpoint", best - 2)
    write_sealed(folder / "status.json", {"state": "running", "rounds": best - 2, "message": ""})
    with pytest.raises(KeyboardInterrupt):
        simulate(
            method,
            make_tiny_federation(),
            folder=folder,
            resume=True,
            on_round=stop_after(best - 1),
            **given,
        )
    kept = checkpoint.rounds_kept(folder / "best") if checkpoint.exists(folder / "best") else []
    assert all(t < best for t in kept)
    simulate(method, make_tiny_federation(), folder=folder, resume=True, **given)
    for file in sorted((tmp_path / "whole" / "best").iterdir()):
        assert (folder / "best" / file.name).read_bytes() == file.read_bytes()


def test_an_interrupt_while_the_best_state_is_written_does_not_lose_it(tmp_path: Path) -> None:
    given: dict[str, Any] = {"rounds": 7, "checkpoint_every": 1, "keep_best": True, "representations": 0}
    method, folder = METHODS["fedavg"](optimizer=SGD(lr=0.2)), tmp_path / "run"
    simulate(method, make_tiny_federation(), folder=tmp_path / "whole", **given)
    expected = checkpoint.load(tmp_path / "whole" / "best")
    assert expected.round > 1
    # an audit hook cannot be removed, so it disarms itself
    armed_paths = {str(folder / "best" / f"{expected.round:06d}.checkpoint.part")}

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and str(arguments[0]) in armed_paths:
            armed_paths.clear()
            raise KeyboardInterrupt

    sys.addaudithook(hook)
    with pytest.raises(KeyboardInterrupt):
        simulate(method, make_tiny_federation(), folder=folder, **given)
    assert checkpoint.load(folder / "checkpoint").round == expected.round, "a trained round is lost"
    simulate(method, make_tiny_federation(), folder=folder, **given, resume=True)
    actual = checkpoint.load(folder / "best")
    assert (actual.round, tree.encode(actual.server)) == (expected.round, tree.encode(expected.server))
    assert read_rounds(folder) == read_rounds(tmp_path / "whole")


SEPARATED = "line\u2028line\u2029line\u0085line\nend"
"""Line separators that JSON leaves in a string as they are, and one that it escapes."""


class Companion:
    """Writes adapters and answers like a language model, and ends the run the first time it does."""

    def __init__(self, ends_in: str, end: BaseException) -> None:
        self.ends_in, self.end, self.calls = ends_in, end, list[tuple[str, int]]()

    def describe(self) -> dict[str, Any]:
        return {}

    def answer(self, run: Any) -> list[dict[str, Any]]:
        self._call("answers", run.round)
        return [{"round": run.round, "model": "server", "prompt": "p", "answer": SEPARATED}]

    def write(self, run: Any, folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        self._call("adapters", run.round)
        (folder / "server").write_text("whole")
        return [folder]

    def _call(self, name: str, round: int) -> None:
        self.calls.append((name, round))
        if round == 3 and name == self.ends_in:
            self.ends_in = ""
            raise self.end


@pytest.mark.parametrize("end", [KeyboardInterrupt(), RuntimeError("out of memory"), CheckpointError("full")])
@pytest.mark.parametrize("ends_in", ["adapters", "answers"])
def test_an_end_while_adapters_or_answers_are_written_loses_neither_them_nor_a_round(
    tmp_path: Path, ends_in: str, end: BaseException
) -> None:
    companion, folder = Companion(ends_in, end), tmp_path / "run"
    federation = dataclasses.replace(make_tiny_federation(), companion=companion)
    given: dict[str, Any] = {"rounds": 3, "adapters": (3,), "representations": 0, "checkpoint_every": 3}
    with pytest.raises(type(end)):
        simulate("fedavg", federation, folder=folder, **given)
    before = files_of(folder)
    assert checkpoint.load(folder / "checkpoint").round == 3
    trained: list[RoundRecord] = []
    simulate("fedavg", federation, folder=folder, resume=True, on_round=trained.append, **given)
    assert (trained, files_of(folder)) == ([], before)
    assert (folder / "adapters" / "round-0003" / "server").read_text() == "whole"
    assert [(row["round"], row["answer"]) for row in read_answers(folder)] == [(0, SEPARATED), (3, SEPARATED)]
    # what is complete is not generated again
    assert companion.calls.count(("answers", 3)) == (2 if ends_in == "answers" else 1)


def test_files_of_another_run_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        simulate("fedavg", make_tiny_federation(), folder=tmp_path / name, rounds=2, representations=0)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    resumed = simulate(
        "fedavg", make_tiny_federation(), folder=tmp_path / "copy", rounds=3, resume=True, representations=0
    )
    assert len(resumed.rounds) == 4, "a copy of a whole folder is the same run"
    for name in ("checkpoint", RECORDS_FILE):
        shutil.copytree(tmp_path / "a", tmp_path / "mixed")
        if name == "checkpoint":
            shutil.rmtree(tmp_path / "mixed" / name)
            shutil.copytree(tmp_path / "b" / name, tmp_path / "mixed" / name)
        else:
            shutil.copy(tmp_path / "b" / name, tmp_path / "mixed" / name)
        with pytest.raises(CheckpointError, match="another run"):
            simulate("fedavg", make_tiny_federation(), folder=tmp_path / "mixed", rounds=3, resume=True)
        shutil.rmtree(tmp_path / "mixed")
    shutil.copy(tmp_path / "b" / RECORDS_FILE, tmp_path / "a" / RECORDS_FILE)
    with pytest.raises(CheckpointError, match="another run"):
        RunRecord.load(tmp_path / "a")


def test_a_damaged_best_state_does_not_stop_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {"keep_best": True, "representations": 0, "folder": tmp_path / "run"}
    simulate("fedavg", make_tiny_federation(), rounds=2, **given)
    (path,) = (tmp_path / "run" / "best").iterdir()
    path.write_bytes(path.read_bytes()[:-20])
    assert len(simulate("fedavg", make_tiny_federation(), rounds=3, resume=True, **given).rounds) == 4
    assert str(tmp_path / "run" / "best.old-1") in caplog.text
    assert (tmp_path / "run" / "best.old-1" / path.name).exists()


def test_the_working_folder_is_not_moved_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for folder in (".", "..", tmp_path):
        with pytest.raises(CheckpointError, match="working folder"):
            simulate("fedavg", make_tiny_federation(), folder=folder, rounds=1, force=True)
    assert tmp_path.exists()


def test_a_changed_metric_is_refused_from_python_and_one_may_be_added_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, folder = make_tiny_federation(), tmp_path / "run"
    module = types.ModuleType("metrics_of_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def define(value: float) -> Callable[..., float]:
        def share(scores: Any, targets: Any) -> float:
            return value

        share.__module__ = module.__name__
        vars(module)["share"] = share
        return share

    def run(rounds: int, *metrics: Any) -> list[Any]:
        result = simulate(
            "fedavg", federation, folder=folder, rounds=rounds, resume=rounds > 1, metrics=metrics
        )
        frame = result.to_frame()
        return [float(v) for name in frame if name.endswith("share") for v in frame[name].dropna().unique()]

    def name_metric(value: float) -> str:
        define(value)
        return f"{module.__name__}:share"

    for make_metric in (define, name_metric):
        shutil.rmtree(folder, ignore_errors=True)
        assert run(1, make_metric(1.0)) == [1.0]
        assert run(2, make_metric(1.0)) == [1.0]
        with pytest.raises(CheckpointError, match=r"the code of (metrics_of_test:)?share was changed"):
            run(3, make_metric(2.0))
        assert run(3, make_metric(1.0), "macro_f1") == [1.0]
        run(4)
        run(5, "macro_f1")
