"""Callbacks and logging that an experiment file or the command line names."""

from __future__ import annotations

import importlib
import linecache
import sys
from pathlib import Path

import pytest

from fedlowrank.cli.main import main
from fedlowrank.results.records import RunRecord
from tests.cli.small_experiment import SMALL, done, files, refused, write

CODE = """
def stop(record):
    print("round", record.round)
    return record.round == 2
"""


def forget() -> None:
    sys.modules.pop("own_stop", None)
    linecache.clearcache()
    importlib.invalidate_caches()


def test_a_changed_callback_is_named_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own_stop.py").write_text(CODE.replace("== 2", "== 9"))
    done(
        capsys, "run", write(Path(), SMALL.replace("rounds = 2", 'rounds = 1\ncallbacks = ["own_stop:stop"]'))
    )
    folder, resume = Path("runs/small/fedavg-s0"), ["resume", "runs/small/fedavg-s0", "--allow-code"]
    says = "the code of the callback own_stop:stop was changed"
    for text, rounds, is_named in (
        # comments are no code
        (CODE.replace("== 2", "== 9  # never"), 2, False),
        (CODE, 3, True),
        # the run has the new code now
        (CODE, 4, False),
    ):
        Path("own_stop.py").write_text(text)
        forget()
        capsys.readouterr()
        assert main([*resume, f"run.rounds={rounds}"]) == 0
        assert (says in capsys.readouterr().err) == is_named
        assert RunRecord.load(folder).rounds[-1].round == rounds


@pytest.mark.full
def test_callbacks_of_an_experiment_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own_stop.py").write_text(CODE)
    file = write(Path(), SMALL.replace("rounds = 2", 'rounds = 6\ncallbacks = ["own_stop:stop"]'))
    out = done(capsys, "run", file)
    assert "round 2\n" in out
    assert "round 3\n" not in out
    why = "stopped early: own_stop:stop returned True after round 2"
    assert why in out
    folder = Path("runs/small/fedavg-s0")
    assert why in " ".join(done(capsys, "status", str(folder)).split())
    done(capsys, "report", str(folder))
    assert f"FedAvg: seed 0 {why}." in Path("report.html").read_text()
    # somebody else's run folder imports nothing unless allowed
    assert "own_stop:stop" in refused(capsys, "resume", str(folder))
    before = files(folder)
    assert why in done(capsys, "resume", str(folder), "--allow-code")
    assert files(folder) == before
    done(capsys, "resume", str(folder), "run.rounds=8", "--allow-code")
    assert RunRecord.load(folder).rounds[-1].round == 8
