"""The files and commands of "Extend it in ten lines" are run in an empty folder, and the table of extras is complete."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fedlowrank import SGD, Federation, load_runs, simulate
from fedlowrank.cli.main import main
from fedlowrank.core.errors import TaskError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "extend.md").read_text()
FILES = dict(re.findall(r"ave (?:it|this) as `([\w.]+)`:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = "".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)).splitlines()


@pytest.mark.full
def test_files_are_short_and_run_from_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in FILES.items():
        Path(name).write_text(text)
        lines = [line for line in text.splitlines() if line and not line.startswith("# ")]
        assert len(lines) <= 10 or name == "mine.toml"
    for command in COMMANDS:
        words = shlex.split(command)
        # the battery of `check` is run with the tutorial's method
        if words[0] == "python":
            subprocess.run([sys.executable, *words[1:]], check=True)
        elif words[1] != "check":
            assert main(words[1:]) == 0, command
    printed = capsys.readouterr().out
    assert "round 6 validation 0.856" in printed
    assert "stopped early" in printed
    assert "Weighted mean" in printed

    last = load_runs("runs", last=True).query("split == 'test'")
    assert set(last["run"]) == {"metric", "data", "model", "method", "loss", "callback"}
    of_metric = last[last["run"] == "metric"]["my_metric:recall_of_zero"]
    assert of_metric.between(0, 1).all()
    # averaging with weights n_k is FedAvg
    accuracies = {run: group["accuracy"].tolist() for run, group in last.groupby("run")}
    assert accuracies["method"] == accuracies["metric"]

    exec(compile(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[-1], "page", "exec"), names := {})
    table = names["result"].to_frame()
    assert isinstance(table, pd.DataFrame)
    # it learns, and the callback ends it before the last of 20 rounds
    assert names["result"].rounds[-1].validation() > 0.8
    assert len(names["result"].rounds) < 20
    np.testing.assert_array_equal(np.bincount(np.load("my_data.npz")["client"]), 50)


def test_the_own_loss_is_the_one_that_is_minimized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_loss.py").write_text(FILES["my_loss.py"])
    monkeypatch.syspath_prepend(str(tmp_path))
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(8) % 2
    net = torch.nn.Linear(3, 2)
    federation = Federation.from_arrays([(x, y)], net, val=0, test=0)
    method = importlib.import_module("my_loss").SmoothFedAvg(optimizer=SGD(lr=0.5))
    result = simulate(method, federation, rounds=1)
    # one step on the full batch, by hand
    loss = torch.nn.functional.cross_entropy(net(x), y, label_smoothing=0.1)
    (gradient,) = torch.autograd.grad(loss, [net.weight])
    assert torch.allclose(result.personal(0)["weight"], net.weight - 0.5 * gradient, atol=1e-6)


@pytest.mark.full
def test_a_model_without_a_head_is_refused_with_what_to_type() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    clients = [(torch.randn(9, 3), torch.arange(9) % 2) for _ in range(2)]
    ends_otherwise = torch.nn.Sequential(net, torch.nn.LogSoftmax(-1))
    with pytest.raises(TaskError, match=r"head='0\.2' with the model"):
        simulate("fedrep", Federation.from_arrays(clients, ends_otherwise), rounds=1)
    for head in ("2", None):
        simulate("fedrep", Federation.from_arrays(clients, net, head=head), rounds=1)


def test_every_extra_is_in_the_table() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "installation.md").read_text()
    assert re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE) == list(extras)
