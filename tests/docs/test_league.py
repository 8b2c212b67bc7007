"""The league: one budget for every method, ranks and means from the raw runs, and a row for a method that a user adds."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import math
import re
import shlex
import shutil
import sys
import tomllib
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
evidence: Any = importlib.import_module("evidence")
sys.path.pop(0)

TUNES_FACTORS = {"fedit", "hetlora", "flexlora", "flora", "fedhl", "ffa_lora", "fedsa_lora", "fedex_lora"}
DONE = sorted(path.stem for path in league.FIGURES.glob("*.json"))


@pytest.mark.few(2)
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


def test_mean_ranks_are_those_of_all_pairs_of_draws() -> None:
    accuracies = {
        "one": {"a": [0.9, 0.5], "b": [0.8, 0.7], "c": [0.1, 0.7]},
        "two": {"a": [0.3, 0.4], "b": [0.3, 0.4], "c": [0.5, 0.2]},
    }
    tasks = {
        task: pd.DataFrame(
            [{"method": m, "seed": k, "accuracy": v} for m, vs in by_method.items() for k, v in enumerate(vs)]
        )
        for task, by_method in accuracies.items()
    }
    draws = list(itertools.product((0, 1), repeat=2))
    sums: dict[str, list[float]] = {m: [] for m in "abc"}
    for first, second in itertools.product(draws, repeat=2):
        ranks = [
            stats.rankdata([-sum(by_method[m][k] for k in some) for m in "abc"])
            for by_method, some in zip(accuracies.values(), (first, second), strict=True)
        ]
        for place, m in enumerate("abc"):
            sums[m].append(sum(r[place] for r in ranks) / 2)
    actual = league.mean_ranks(tasks)
    for m, values in sums.items():
        # one draw of sixteen is more than 2.5 %
        assert actual.loc[m, ["low", "high"]].tolist() == [min(values), max(values)]
    # in the second task all means are equal
    assert actual["rank"].to_dict() == {"b": 1.5, "a": 2.0, "c": 2.5}


@pytest.mark.parametrize("task", DONE)
def test_intervals_of_ranks_are_those_of_all_draws(task: str) -> None:
    """Of five seeds there are 126 multisets; a multiset stands for as many draws as it has orders."""
    rows = pd.read_csv(league.FIGURES / f"{task}.csv").assign(accuracy=lambda r: r["accuracy"].fillna(0.0))
    table = rows.pivot(index="method", columns="seed", values="accuracy")
    ranks, counts = [], []
    for seeds in itertools.combinations_with_replacement(table.columns, len(table.columns)):
        ranks.append(stats.rankdata(-sum(table[seed] for seed in seeds).div(5).round(5)))
        repeated = [seeds.count(seed) for seed in set(seeds)]
        counts.append(math.factorial(5) // math.prod(map(math.factorial, repeated)))
    assert sum(counts) == 3125
    actual = league.rank_methods(rows)
    for place, method in enumerate(table.index):
        drawn = sorted(np.repeat([row[place] for row in ranks], counts))
        # at most 2.5 %, 78 draws, are below or above
        assert actual.loc[method, ["low", "high"]].tolist() == [drawn[78], drawn[-79]], method


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
    # code is searched in the working directory alone
    assert str(small_league) not in sys.path
    with pytest.raises(SystemExit, match=r"share was 0\.25 and is 0\.75.* Add --force to move"):
        league.add("own_method:Slower", ["digits"], ["share=0.75"], 1)
    with pytest.raises(SystemExit, match=r"error: .*shrae"):
        league.add("own_method:Slower", ["digits"], ["shrae=0.75"], 1)
    assert capsys.readouterr().out == ""
    league.add("own_method:Slower", ["digits"], ["share=0.75"], 1, force=True)
    assert capsys.readouterr().out == table
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


def write_diverged_runs(out: Path) -> None:
    """Two test runs of FedAvg that diverged, and the settings that were tried before."""
    for seed in (0, 1):
        (out / f"fedavg-s{seed}").mkdir(parents=True)
        (out / f"fedavg-s{seed}" / "run.json").write_text('{"versions": {"torch": "2"}}')
        (out / f"fedavg-s{seed}" / "status.json").write_text('{"state": "diverged"}')
    (out / "source.json").write_text('{"commit": "abc", "machine": "here"}')
    (out / "tuning.csv").write_text(
        "method,chosen,messages,optimizer.lr\nfedavg,True,,0.1\nfedavg,False,,0.3\n"
    )


def test_a_task_whose_only_method_diverged_everywhere(
    small_league: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small_league / "tasks" / "digits.toml").write_text(
        SMALL_TASK.format(compare='compare = ["fedavg", "ditto"]')
    )
    (small_league / "league.md").write_text("<!-- evidence league -->\n<!-- end -->\n")
    monkeypatch.setattr(league, "ORDER", ("digits",))
    monkeypatch.setattr(league, "PAGE", small_league / "league.md")
    out = small_league / "runs" / "digits" / "fedavg"
    write_diverged_runs(out)
    tried = pd.read_csv(out / "tuning.csv", dtype=str, keep_default_na=False)
    figures = {".csv": league.read_runs(out), "-tuning.csv": tried}
    running.keep_figures(small_league / "tasks" / "digits.toml", league.FIGURES, "fedavg", out, figures)
    league.write()
    page = (small_league / "league.md").read_text()
    assert "| 1 | 1–1 | FedAvg | diverged | – | – | – | – | 0.1\\* | 0 of 2 |" in page
    assert "Not run yet: Ditto." in page


def test_a_row_that_diverges_again_is_shown(small_league: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    league.FIGURES.mkdir()
    head = "method,seed,diverged,accuracy,worst,bytes,flops,seconds"
    (league.FIGURES / "digits.csv").write_text(f"{head}\nfedavg,0,True,,,,,\nfedavg,1,False,0.5,0.25,8,9,1\n")
    (league.FIGURES / "digits.json").write_text('{"fedavg": {}}')
    write_diverged_runs(small_league / "again")
    monkeypatch.setattr(league, "run_chosen", lambda *_: small_league / "again")
    rows = league.repeat("digits", "fedavg", [0, 1]).set_index("seed")
    assert rows["diverged"].tolist() == [True, False]
    assert rows["diverged again"].tolist() == [True, True]
    assert rows["accuracy"].fillna(-1).tolist() == [-1, 0.5]
    assert rows["accuracy again"].isna().all()


# Commands


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What commands would do: names of functions with their arguments."""
    calls: list[tuple[Any, ...]] = []
    for script, name, result in (
        (league, "run", None),
        (league, "add", None),
        (league, "write", None),
        (league, "repeat", pd.DataFrame({"accuracy": [0.5]})),
        (evidence, "run", None),
        (evidence, "repeat", None),
        (evidence, "write", None),
    ):

        def call(*given: Any, name: str = name, result: Any = result) -> Any:
            calls.append((name, *given))
            return result

        monkeypatch.setattr(script, name, call)
    return calls


def start(script: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a command of a script, given as typed."""
    monkeypatch.setattr(sys, "argv", [script.__name__, *shlex.split(words, comments=True)])
    script.main()


@pytest.mark.parametrize(
    ("script", "words", "expected"),
    [
        (league, "run --methods floral,ifca digits mnist", ("run", "digits", 1, ["floral", "ifca"])),
        (league, "run digits --methods floral", ("run", "digits", 1, ["floral"])),
        (league, "add --set share=0.25 --set rank=2 own:Slower digits",
         ("add", "own:Slower", ["digits"], ["share=0.25", "rank=2"], 1, False)),
        (league, "add own:Slower digits mnist --set share=0.25 --force",
         ("add", "own:Slower", ["digits", "mnist"], ["share=0.25"], 1, True)),
        (league, "repeat --seeds 0,1 digits floral", ("repeat", "digits", "floral", [0, 1])),
        (evidence, "run --methods fedhl,flora teacher-24", ("run", "teacher-24", 1, ["fedhl", "flora"])),
        (evidence, "repeat --seeds 3,4 teacher-24 fedhl", ("repeat", "teacher-24", "fedhl", [3, 4])),
    ],
)  # fmt: skip
def test_options_may_stand_before_the_names(
    script: Any,
    words: str,
    expected: tuple[Any, ...],
    called: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start(script, words, monkeypatch)
    assert called[0] == expected


@pytest.mark.parametrize(
    ("script", "texts"),
    [
        (league, [league.__doc__, league.PAGE.read_text()]),
        (evidence, [evidence.__doc__, (ROOT / "docs" / "results" / "protocol.md").read_text()]),
    ],
    ids=["league", "evidence"],
)
def test_every_command_that_is_printed_can_be_typed(
    script: Any, texts: list[str], called: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = rf"python docs/{script.__name__}\.py ([^\n`]*)"
    commands = [
        words.replace("[", "").replace("]", "") for text in texts for words in re.findall(pattern, text)
    ]
    assert len(commands) > 5
    for words in commands:
        called.clear()
        start(script, words, monkeypatch)
        assert called[0][0] == words.split()[0]


def test_seeds_that_are_no_numbers_are_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        start(league, "repeat digits floral --seeds all", monkeypatch)
    assert "numbers are separated by commas, such as 0,1; this is 'all'" in capsys.readouterr().err


def test_fields_of_an_own_method_are_read_as_toml() -> None:
    fields = ["share=0.25", 'kind="a b"', "router.lr = 0.1", "router.steps=2"]
    expected = {"share": 0.25, "kind": "a b", "router": {"lr": 0.1, "steps": 2}}
    assert league.parse_fields(fields) == expected
    assert league.parse_fields([]) == {}
    with pytest.raises(SystemExit, match=r"^--set share=abc: .*a word in quotes"):
        league.parse_fields(["rank=2", "share=abc"])
    with pytest.raises(SystemExit, match=r"^--set rank=2 --set rank=3: .*set once"):
        league.parse_fields(["rank=2", "rank=3"])


def test_the_page_says_which_settings_are_tried() -> None:
    tune = tomllib.loads((league.TASKS / "base.toml").read_text())["tune"]
    for own in tune["methods"].values():
        rates, values = own.values()
        assert (next(iter(own)), rates, len(values)) == ("optimizer.lr", [0.1, 0.3, 1.0], 2)
    six = tune["grid"]["optimizer.lr"]
    text = tomllib.loads((league.TASKS / "agnews.toml").read_text())["tune"]["grid"]["optimizer.lr"]
    assert (six[0], six[-1], text[0], text[-1]) == (0.01, 3.0, 3e-4, 0.1)
    # with settings of their own, and not in the list
    assert not {"fedala", "fedkd", "scaffold", "fednova", "local_adaptor"} & set(tune["methods"])
    page = " ".join(league.PAGE.read_text().split("| column |")[0].split())
    assert (
        "under `tune.methods` in `experiments/league/base.toml` try three learning rates (0.1, 0.3 and 1), each with two values "
        "of one setting of their own. All others try six learning rates (0.01 to 3; on `agnews` 3e-4 to 0.1), also where they "
        "have settings of their own."
    ) in page


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


def test_all_methods_of_the_tasks_have_a_mean_rank() -> None:
    page = league.PAGE.read_text()
    about, table = page.split("## All tasks\n")[1].split("</div>")[0].split("<div")
    tasks = re.findall(r"`(\w+)`", about)
    methods = [ExperimentConfig.read(league.TASKS / f"{task}.toml").compared_methods for task in tasks]
    assert len(tasks) > 1
    assert all(set(other) == set(methods[0]) for other in methods)
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) == len(methods[0]) > 30
    for rank, _, without, _, *ranks in rows:
        of_task = dict(zip(tasks, map(float, ranks), strict=True))
        assert float(rank) == pytest.approx(np.mean([*of_task.values()]), abs=0.051)
        del of_task["cifar10"]
        assert float(without) == pytest.approx(np.mean([*of_task.values()]), abs=0.051)
