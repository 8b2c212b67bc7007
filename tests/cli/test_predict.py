"""The command ``predict``: its CSV against the records of the run folder, its picture, and code that it must not import."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import pytest

from fedlowrank.results.records import RunRecord
from tests.cli.small_experiment import SMALL, done, files, refused, write

Capsys = pytest.CaptureFixture[str]


def accuracy_of(path: Path) -> dict[int, float]:
    rows = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            assert (row["label"] == row["prediction"]) == (row["correct"] == "True")
            rows[int(row["client"])].append(row["correct"] == "True")
    return {client: sum(actual) / len(actual) for client, actual in rows.items()}


def test_predictions_of_a_run_folder(capsys: Capsys) -> None:
    done(capsys, "run", write(Path()))
    folder = Path("runs/small/fedavg-s0")
    before = files(folder)
    said = done(capsys, "predict", str(folder), "--confusion", "confusion.svg")
    recorded = RunRecord.load(folder).rounds[-1]
    assert accuracy_of(Path("predictions.csv")) == dict(enumerate(recorded.values()))
    assert "15 test examples of 3 clients, after round 2" in said
    picture = Path("confusion.svg").read_text()
    for name in ("setosa", "versicolor", "virginica"):
        assert name in picture
    done(capsys, "predict", str(folder), "--client", "1", "--split", "val", "-o", "new/one.csv")
    assert accuracy_of(Path("new/one.csv")) == {1: recorded.values("accuracy", split="val")[1]}
    assert files(folder) == before


def test_what_cannot_be_predicted(capsys: Capsys) -> None:
    done(capsys, "run", write(Path()), "run.rounds=1")
    folder = "runs/small/fedavg-s0"
    assert "there is no client 7" in refused(capsys, "predict", folder, "--client", "7")
    assert "no series 'globl'" in refused(capsys, "predict", folder, "--series", "globl")
    assert "cannot draw" in refused(capsys, "predict", folder, "--confusion", "x.nothing")
    assert "not a run folder" in refused(capsys, "predict", "nowhere")


@pytest.mark.full
def test_a_metric_of_the_user_s_is_code(capsys: Capsys) -> None:
    Path("own_metric.py").write_text(
        "from pathlib import Path\nPath('imported').touch()\ndef f(s, y): return 0.5\n"
    )
    done(capsys, "run", write(Path()), "run.metrics=['own_metric:f']", "run.rounds=1")
    folder = Path("runs/small/fedavg-s0")
    last = RunRecord.load(folder).rounds[-1]
    assert last.values("own_metric:f", split="val") == last.values("own_metric:f") == [0.5] * 3
    Path("imported").unlink()
    for command in (["predict", str(folder)], ["resume", str(folder), "run.rounds=2"]):
        actual = refused(capsys, *command)
        assert "own_metric:f" in actual
        assert "--allow-code" in actual
    done(capsys, "report", str(folder))
    assert not Path("imported").exists()
    done(capsys, "predict", str(folder), "--allow-code")
    write(Path(), SMALL.replace("rounds = 2", 'rounds = 2\nmetrics = ["macrof1"]'))
    assert "Did you mean 'macro_f1'" in refused(capsys, "run", "small.toml", "-o", "other")


def test_a_run_without_its_best_round_says_what_keeps_it(capsys: Capsys) -> None:
    done(capsys, "run", write(Path()), "run.rounds=1", "-o", "RUN")
    actual = refused(capsys, "predict", "RUN", "--best")
    assert "run.keep_best = true" in actual
    assert "stopped" not in actual
