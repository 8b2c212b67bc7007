"""The league: one budget for every method, ranks and means from the raw runs, and a row for a method that a user adds."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from torch import nn

from fedlowrank import Federation, simulate
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.tuning import plan_tuning
from fedlowrank.core.errors import NonFiniteError
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.methods import METHODS, FedAvg

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
league: Any = importlib.import_module("league")
running: Any = importlib.import_module("running")
sys.path.pop(0)

TUNES_FACTORS = {"fedit", "hetlora", "flexlora", "flora", "fedhl", "ffa_lora", "fedsa_lora", "fedex_lora"}
DONE = sorted(path.stem for path in league.FIGURES.glob("*.json"))


@pytest.mark.parametrize("task", league.ORDER)
def test_every_method_has_the_same_budget(task: str) -> None:
    experiment = ExperimentConfig.read(league.TASKS / f"{task}.toml")
    expected = TUNES_FACTORS | {"standalone"} if task == "agnews" else set(METHODS) - TUNES_FACTORS
    assert set(experiment.compared_methods) == expected
    budget: dict[str, list[int]] = {}
    for setting in plan_tuning(experiment, Path("out")):
        budget.setdefault(setting.method, []).append(len(setting.runs))
    assert budget == {method: [2] * 6 for method in expected}
    assert experiment.tune is not None
    assert experiment.tune.test_seeds == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    "method", ExperimentConfig.read(league.TASKS / "agnews.toml").compared_methods, ids=str
)
def test_a_method_of_a_lora_task_accepts_the_ranks_of_its_clients(method: str) -> None:
    experiment = ExperimentConfig.read(league.TASKS / "agnews.toml")
    clients = [(np.random.default_rng(k).normal(size=(20, 20)), np.arange(20)) for k in range(10)]
    federation = Federation.from_arrays(
        clients, nn.Linear(20, 20), rank=experiment.lora.ranks, val=0, test=0.5
    )
    result = simulate(experiment.build_method(method), federation, rounds=1)
    assert len(result.rounds) == 2


def test_ranks_by_hand() -> None:
    accuracy = {"best": [0.9, 0.8], "twin": [0.5, 0.6], "other twin": [0.6, 0.5], "lost": [0.99, None]}
    rows = pd.DataFrame(
        [
            {"method": method, "seed": seed, "accuracy": value, "diverged": value is None}
            for method, values in accuracy.items()
            for seed, value in enumerate(values)
        ]
    )
    ranks = league.rank_methods(rows)
    assert ranks["rank"].to_dict() == {"best": 1, "twin": 2.5, "other twin": 2.5, "lost": 4}
    # of the four draws of two seeds: seed 0 twice has lost, best, other twin, twin; seed 1 twice has best, twin, other twin, lost
    assert ranks.loc["lost", ["low", "high"]].tolist() == [1, 4]
    assert ranks.loc["twin", ["low", "high"]].tolist() == [2, 4]


@pytest.mark.parametrize("task", DONE)
def test_the_page_shows_what_the_raw_runs_give(task: str) -> None:
    rows = pd.read_csv(league.FIGURES / f"{task}.csv")
    titles = {
        method: source["title"]
        for method, source in league.read_sources(league.FIGURES / f"{task}.json").items()
    }
    page = league.PAGE.read_text()
    start = page.index(f"    python docs/league.py run {task}\n")
    lines = page[start : page.index("</div>", page.index("sortable", start))].splitlines()
    shown = {
        cells[3]: cells for cells in (re.split(r" *\| *", line) for line in lines if line.startswith("| "))
    }
    means = {m: np.nan_to_num(g["accuracy"].to_numpy()).mean().round(5) for m, g in rows.groupby("method")}
    places = dict(zip(means, stats.rankdata([-v for v in means.values()]), strict=True))
    assert {titles[m] for m in means} == shown.keys() - {"method", ":---"}
    for method, own in rows.groupby("method"):
        cells, kept = shown[titles[method]], own[~own["diverged"]]
        assert float(cells[1]) == places[method]
        assert cells[10] == f"{len(kept)} of 5"
        if len(kept):
            mean, half = map(float, cells[4].split(" ± "))
            low, high = stats.t.interval(
                0.95, len(kept) - 1, kept["accuracy"].mean(), stats.sem(kept["accuracy"])
            )
            assert mean == pytest.approx(100 * (low + high) / 2, abs=0.051)
            assert half == pytest.approx(100 * (high - low) / 2, abs=0.051)
            assert float(cells[5]) == pytest.approx(100 * kept["worst"].mean(), abs=0.051)


@pytest.mark.parametrize("task", DONE)
def test_what_was_tested_is_the_best_in_validation(task: str) -> None:
    tried = pd.read_csv(league.FIGURES / f"{task}-tuning.csv")
    for method, own in tried.groupby("method"):
        assert len(own) == 6, method
        best = own["validation_mean"].max()
        assert own.loc[own["chosen"], "validation_mean"].tolist() == [best], method


SMALL_TASK = (
    'name = "small"\nmethod = "standalone"\n{compare}\n[data]\nsource = "digits"\n[partition]\nkind = "iid"\nclients = 20\n'
    '[model]\nnames = ["mlp"]\nhidden = [8]\n[run]\nrounds = 2\nengine = "vectorized"\n'
    '[tune]\nseeds = [100]\ntest_seeds = [0, 1]\n[tune.grid]\n"optimizer.lr" = [0.1, 0.3]\n'
)
DITTO = '[tune.methods.ditto]\n"optimizer.lr" = [0.1]\nlam = [0.1, 1.0]\n'


@pytest.fixture
def small_league(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A league with one small task, outside of the repository."""
    (tmp_path / "tasks").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, folder in (("TASKS", "tasks"), ("FIGURES", "figures"), ("RUNS", "runs")):
        monkeypatch.setattr(league, name, tmp_path / folder)

    def begin(out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "source.json").write_text('{"commit": "abc"}')

    monkeypatch.setattr(running, "begin", begin)
    return tmp_path


@pytest.mark.full
def test_a_method_of_ones_own_gets_a_row(small_league: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (small_league / "tasks" / "digits.toml").write_text(SMALL_TASK.format(compare=""))
    (small_league / "own_method.py").write_text(
        "from dataclasses import dataclass\nfrom fedlowrank.methods import Standalone\n\n\n"
        "@dataclass(frozen=True)\nclass Slower(Standalone):\n    share: float = 0.5\n"
    )
    league.run("digits", 1)
    rows = pd.read_csv(small_league / "figures" / "digits.csv")
    assert rows["seed"].tolist() == [0, 1]
    assert (rows["worst"] <= rows["accuracy"]).all()
    league.add("own_method:Slower", ["digits"], ["share=0.25"], 1)
    table = capsys.readouterr().out
    # the same training under another name: both have the accuracy of Standalone, and share the first rank
    (own,) = (line for line in table.splitlines() if "**own_method:Slower**" in line)
    (other,) = (line for line in table.splitlines() if "| Standalone |" in line)
    assert own.split("|")[1] == other.split("|")[1] == " 1.5 "
    assert own.split("|")[4] == other.split("|")[4]


def test_a_run_that_diverged_counts_as_one(tmp_path: Path) -> None:
    federation = Federation.from_arrays(
        [(1e20 * np.eye(4, dtype=np.float32), np.arange(4))] * 2, nn.Linear(4, 4), val=0, test=0
    )
    for seed, lr in ((0, 1e-30), (3, 1e30)):
        method = FedAvg(optimizer=SGD(lr=lr, momentum=0.9), epochs=4)
        with pytest.raises(NonFiniteError) if lr > 1 else contextlib.nullcontext():
            simulate(method, federation, rounds=2, folder=tmp_path / f"fedavg-s{seed}")
    assert league.find_test_runs(tmp_path) == ([tmp_path / "fedavg-s0"], [("fedavg", 3)])


@pytest.mark.full
def test_a_task_runs_in_parts(small_league: Path) -> None:
    def texts() -> list[list[str]]:
        return [
            (small_league / "figures" / name).read_text().splitlines()
            for name in ("digits.csv", "digits-tuning.csv")
        ]

    task = small_league / "tasks" / "digits.toml"
    task.write_text(SMALL_TASK.format(compare='compare = ["standalone"]'))
    league.run("digits", 1)
    rows, tried = texts()
    shutil.rmtree(small_league / "runs")
    task.write_text(SMALL_TASK.format(compare='compare = ["standalone", "ditto"]') + DITTO)
    league.run("digits", 1, ["standalone"])
    assert texts() == [rows, tried]
    with pytest.raises(SystemExit, match="does not compare fedavg; it compares standalone, ditto"):
        league.run("digits", 1, ["fedavg"])
    league.run("digits", 1)
    all_rows, all_tried = texts()
    # the runs of the method that has figures are gone, and its rows are as they were
    assert all_rows[: len(rows)] == rows
    assert [line.rstrip(",") for line in all_tried[1 : len(tried)]] == [
        line.rstrip(",") for line in tried[1:]
    ]
    settings = pd.read_csv(small_league / "figures" / "digits-tuning.csv")
    assert settings.groupby("method")["chosen"].sum().to_dict() == {"standalone": 1, "ditto": 1}
    assert settings["lam"].fillna(0).tolist() == [0, 0, 0.1, 1.0]
    assert not (small_league / "runs" / "league" / "digits" / "standalone").exists()
    sources = json.loads((small_league / "figures" / "digits.json").read_text())
    assert {m: s["commit"] for m, s in sources.items()} == {"standalone": "abc", "ditto": "abc"}
    for method in sources:
        again = league.repeat("digits", method, [1, 0]).set_index("seed")
        for measure in ("accuracy", "worst", "bytes"):
            # six digits are kept
            assert again[f"{measure} again"].tolist() == pytest.approx(again[measure].tolist(), rel=1e-5)
    with pytest.raises(SystemExit, match="ditto of digits has no figures of seed 7"):
        league.repeat("digits", "ditto", [0, 7])
