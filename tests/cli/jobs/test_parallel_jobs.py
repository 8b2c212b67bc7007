"""``--jobs``: several runs at a time have the results of one after the other, and an error stays with its run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from fedlowrank.cli.commands import run_planned
from fedlowrank.cli.jobs import parallel
from fedlowrank.cli.jobs.parallel import Event, Outcome, run_parallel
from fedlowrank.cli.main import main
from fedlowrank.config.comparison import PlannedRun, plan_runs
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.results.records import RunRecord
from fedlowrank.storage.run_files import run_folders
from tests.cli.small_experiment import SMALL, done, refused, write

Capsys = pytest.CaptureFixture[str]

OWN = """
import time
from dataclasses import dataclass
from fedlowrank.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Fails(FedAvg):
    def server_update(self, server, total, view):
        raise RuntimeError("my own mistake")

@dataclass(frozen=True)
class Slow(FedAvg):
    def server_update(self, server, total, view):
        time.sleep(0.05)
        return super().server_update(server, total, view)
"""


def untimed(folder: Path) -> dict[str, list[str]]:
    # as text, for a loss that is not a number differs from itself
    return {f.name: [repr(r.untimed()) for r in RunRecord.load(f).rounds] for f in run_folders([folder])}


@pytest.mark.full
@pytest.mark.usefixtures("undrawn")
def test_two_jobs_have_the_bits_of_one_and_errors_stay_with_their_run(capsys: Capsys) -> None:
    text = SMALL.replace(
        "hidden = [4]", "hidden = [4]\n[methods.diverges]\nmethod = 'standalone'\noptimizer.lr = 1e38"
    )
    arguments = ["compare", write(Path(), text), "--methods", "standalone,diverges", "--seeds", "0,1"]
    first = done(capsys, *arguments, "-o", "one")
    second = done(capsys, *arguments, "-o", "two", "--jobs", "2")
    one, two = untimed(Path("one")), untimed(Path("two"))
    assert one == two
    assert len(one) == 4
    for out in (first, second):
        assert out.count("stopped: diverges, seed") == 2
        assert "not finite" in out
    csv = [Path(out, "report.csv").read_text().splitlines() for out in ("one", "two")]
    assert [row.split(",")[1] for row in csv[0]] == [row.split(",")[1] for row in csv[1]]


@pytest.mark.full
def test_workers_show_every_warning_of_the_package(capsys: Capsys) -> None:
    pytest.importorskip("flwr")
    arguments = ["compare", write(Path()), "run.secure.on=true", "run.secure.bits=8", "--methods", "fedavg"]
    warnings = []
    for jobs in "12":
        capsys.readouterr()
        assert main([*arguments, "--seeds", "0,1", "--jobs", jobs, "-o", jobs]) == 0
        captured = capsys.readouterr()
        shown = f"{captured.out} {captured.err}"
        warnings.append(" ".join(shown.split()).count("Raise secure.bits"))
    # one for each run
    assert warnings == [2, 2]


@pytest.mark.full
def test_a_killed_worker_and_an_error_are_reported_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (Path() / "own.py").write_text(OWN)
    made = ExperimentConfig.read(Path(write(Path())), ["run.rounds=50", "run.checkpoint_every=1"])
    runs = plan_runs(made, ["fedavg", "own:Fails", "standalone"], [0], (), Path("out"))
    run, killed = parallel.RunWorker.run, []

    def watched(worker: parallel.RunWorker, one: object, force: bool, on_event: object) -> Outcome:
        def kill(event: Event) -> None:
            if one is runs[0] and event.get("round") == 3:
                killed.append(worker.process.pid)
                os.kill(worker.process.pid, signal.SIGKILL)

        return run(worker, one, force, kill)  # type: ignore[arg-type]

    monkeypatch.setattr(parallel.RunWorker, "run", watched)
    outcomes = run_parallel(runs, 2, force=False)
    assert len(killed) == 1
    assert [outcome.state for outcome in outcomes] == ["failed", "failed", "finished"]
    assert "FedAvg, seed 0" in str(outcomes[0])
    assert "killed by signal 9" in str(outcomes[0])
    assert "RuntimeError: my own mistake" in str(outcomes[1])
    assert len(RunRecord.load(runs[2].folder).rounds) == 51
    # what was killed goes on, and ends as if nothing had been
    assert RunRecord.load(runs[0].folder).status["state"] == "stopped"
    (again,) = run_planned(runs[:1], 1, force=False)
    whole = run_planned(plan_runs(made, ["fedavg", "standalone"], [0], (), Path("whole")), 1, force=False)
    assert [outcome.state for outcome in (again, *whole)] == ["finished"] * 3
    # and both have the bits of runs in one process
    for one, outcome in zip((runs[0], runs[2]), whole, strict=True):
        assert untimed(one.folder) == untimed(outcome.run.folder)


@pytest.mark.full
def test_an_interrupt_stops_all_workers_and_leaves_resumable_folders(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path() / "own.py").write_text(OWN)
    run, begun = parallel.RunWorker.run, set()

    def watched(worker: parallel.RunWorker, one: PlannedRun, force: bool, on_event: object) -> Outcome:
        def interrupt(event: Event) -> None:
            if event.get("round") == 2:
                begun.add(one.folder)
                if len(begun) == 2:
                    os.kill(os.getpid(), signal.SIGINT)

        return run(worker, one, force, interrupt)

    monkeypatch.setattr(parallel.RunWorker, "run", watched)
    arguments = ["--methods", "own:Slow", "--seeds", "0,1,2", "--jobs", "2"]
    assert main(["compare", write(Path()), "run.rounds=2000", *arguments]) == 130
    said = capsys.readouterr().err
    assert "interrupted. " in said
    assert "failed" not in said
    assert len(begun) == 2
    for folder in begun:
        record = RunRecord.load(folder)
        assert record.status["message"] == "interrupted"
        assert 2 <= record.status["rounds"] == record.rounds[-1].round < 2000
    assert len(run_folders([Path("runs/small")])) == 2


@pytest.mark.full
def test_a_parent_that_dies_interrupts_its_worker() -> None:
    (Path() / "own.py").write_text(OWN)
    made = ExperimentConfig.read(Path(write(Path())), ["run.rounds=2000"])
    (planned_run,) = plan_runs(made, ["own:Slow"], [0], (), Path("out"))
    # as in a command that a script has started in the background
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        worker = parallel.RunWorker()
    finally:
        signal.signal(signal.SIGINT, handler)

    def die(event: Event) -> None:
        if event.get("round") == 2:
            # what the end of the process does: the worker may write before it reads
            worker._answers.close()
            time.sleep(0.5)
            worker._requests.close()
            raise SystemExit

    try:
        with pytest.raises(SystemExit):
            worker.run(planned_run, False, die)
        assert worker.process.wait(30) == 0
    finally:
        worker.process.kill()
        worker.close()
    record = RunRecord.load(planned_run.folder)
    assert record.status["message"] == "interrupted"
    assert 2 <= record.status["rounds"] == record.rounds[-1].round < 2000


def test_a_number_of_jobs_below_one(capsys: Capsys) -> None:
    assert "--jobs is a number of runs at a time" in refused(capsys, "compare", write(Path()), "--jobs", "0")


def test_a_missing_temporary_folder_is_named(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    said = refused(capsys, "compare", write(Path()), "--jobs", "2")
    assert "Set TMPDIR to a folder that can be written" in said
