"""The code of the page on metrics is run as a reader would run it, and its table names what there is."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from fedlowrank.cli.main import main
from fedlowrank.results.client_metrics import METRICS
from fedlowrank.results.records import RunRecord
from fedlowrank.rounds.run_settings import RunSettings

torch.set_num_threads(1)

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "metrics.md").read_text()

EXPERIMENT = """
method = "fedavg"
[data]
source = "digits"
[partition]
kind = "iid"
clients = 4
[model]
names = ["mlp"]
hidden = [8]
[run]
rounds = 1
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_metrics", raising=False)


@pytest.mark.full
def test_the_python_examples_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    scope: dict[str, Any] = {}
    for text in blocks:
        if text.startswith("# my_metrics.py"):
            Path("my_metrics.py").write_text(text)
        else:
            exec(compile(text, "metrics.md", "exec"), scope)
    areas, *_ = capsys.readouterr().out.splitlines()
    assert all(0.5 < float(value) <= 1 for value in areas.strip("[]").split(","))
    records = {name: RunRecord.load(Path("runs") / name) for name in ("fedavg", "standalone")}
    for name, record in records.items():
        values = record.rounds[-1].values("accuracy", series="personal", split="test")
        mean = sum(v for v in values if v is not None) / len(values)
        assert scope["curves"].loc[5, name] == pytest.approx(mean)
        assert scope["by_seed"].loc[(name, 0), "accuracy"] == pytest.approx(mean)
    assert scope["scores"].shape == (10, 10)
    assert not scope["wrong"]["correct"].any()


@pytest.mark.full
def test_the_commands_and_the_experiment_file() -> None:
    (settings,) = re.findall(r"```toml\n\[run\]\n(.*?)```", PAGE, re.DOTALL)
    Path("experiment.toml").write_text(EXPERIMENT + settings)
    # the command for a user's table is run in tests/cli/test_predict_rows.py
    commands = [c for c in re.findall(r"^fedlowrank (.*)$", PAGE, re.MULTILINE) if "hospitals" not in c]
    assert [c.split()[0] for c in commands] == ["run", "predict", "predict"]
    for command in commands:
        assert main(shlex.split(command)) == 0
    last = RunRecord.load(Path("runs/digits")).rounds[-1]
    assert last.measured.metrics == ["macro_f1", "auroc"]
    actual = pd.read_csv("predictions.csv").groupby("client")["correct"].mean()
    assert actual.tolist() == last.values("accuracy", series="personal", split="test")
    assert set(pd.read_csv("client3.csv")["client"]) == {3}
    assert Path("confusion.svg").read_text().startswith("<?xml")


def test_the_table_names_all_metrics() -> None:
    rows = re.findall(r"^\| (`.*?) \| ", PAGE, re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == list(METRICS)


def test_the_docstring_of_the_settings_names_all_metrics() -> None:
    text = " ".join((RunSettings.__doc__ or "").split())
    (names,) = re.findall(r" metrics: [^:]*: ([^:]*); or ", text)
    assert re.split("; in a regression |, ", names) == list(METRICS)
