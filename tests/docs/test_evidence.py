"""The evidence tables: what is computed from runs, and that the pages show what the committed figures give."""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import re
import shutil
import statistics
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedlowrank.config.experiment import ExperimentConfig

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> Any:
    """A script of ``docs/``, which imports its neighbors."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


evidence, running, tables, claims = map(load, ("evidence", "running", "tables.experiments", "tables.claims"))
RESULTS = ROOT / "docs" / "results"
settings = load("tables.settings")
SETTINGS = settings.read_settings()
ENTERED = sorted(path.stem.removesuffix("-tuning") for path in (RESULTS / "evidence").glob("*-tuning.csv"))
LOSSES = ("floral-synthetic", "stories")
"""Experiments whose results are losses."""
FILES = sorted(
    p for p in (ROOT / "experiments" / "evidence").rglob("*.toml") if not p.stem.startswith("base")
)


def rows() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two clients, two evaluated rounds of three, series personal and server."""
    values = {1: {"personal": ([0.1, 0.3], [0.5, 0.7]), "server": ([0.2, 0.2], [0.4, 0.0])}}
    values[3] = {"personal": ([0.5, 0.7], [0.9, 0.5]), "server": ([0.6, 0.6], [0.2, 0.4])}
    runs = [
        {
            "method": "m",
            "seed": 7,
            "round": r,
            "client": k,
            "series": s,
            "split": split,
            "accuracy": v[k],
            "loss": 9.0,
        }
        for r, series in values.items()
        for s, parts in series.items()
        for split, v in zip(("val", "test"), parts, strict=True)
        for k in range(2)
    ]
    rounds = [
        {"method": "m", "seed": 7, "round": r, "bytes_up": 10 * r, "bytes_down": 1, "flops": 2}
        for r in range(4)
    ]
    return pd.DataFrame(runs), pd.DataFrame(rounds)


@pytest.mark.full
def test_runs_are_summarized_by_round_and_series() -> None:
    actual = evidence.summarize_runs(*rows(), False).set_index(["series", "round"])
    last = actual.loc["personal", 3]
    assert (last["val"], last["test"], last["worst"]) == pytest.approx((0.6, 0.7, 0.5))
    assert (last["bytes_up"], last["bytes_down"], last["flops"]) == (60, 4, 8)
    assert actual.loc["server", 1]["test"] == pytest.approx(0.2)
    assert actual["headline"].to_dict() == {
        (s, r): s == "personal" for s in ("personal", "server") for r in (1, 3)
    }
    runs, rounds = rows()
    runs = runs.assign(accuracy=np.nan, loss=runs["accuracy"])
    losses = evidence.summarize_runs(runs, rounds, True)
    assert losses.set_index(["series", "round"]).loc["personal", 3]["worst"] == 0.9
    with pytest.raises(
        SystemExit, match=r"the runs have no accuracy: is_loss in docs/tables/experiments\.py"
    ):
        evidence.summarize_runs(runs, rounds, False)


def test_clients_and_costs_of_rounds_are_kept(tmp_path: Path) -> None:
    runs, rounds = rows()
    runs["n"] = 10

    def keep() -> None:
        running.keep_rows(tmp_path / "new-clients.csv.gz", "m", evidence.last_of_clients(runs), ["m"])
        costs = evidence.costs_of_rounds(rounds.assign(seconds_train=0.25042))
        running.keep_rows(tmp_path / "new-rounds.csv.gz", "m", costs, ["m"])

    keep()
    clients = pd.read_csv(tmp_path / "new-clients.csv.gz").set_index(["series", "client", "split"])
    # two clients, two series, two splits of the last round
    assert len(clients) == 8
    assert clients.loc[("server", 1, "test"), ["accuracy", "loss", "n"]].tolist() == [0.4, 9.0, 10]
    costs = pd.read_csv(tmp_path / "new-rounds.csv.gz")
    assert costs["bytes_up"].tolist() == [0, 10, 20, 30]
    assert costs["seconds_train"].tolist() == [0.25] * 4
    before = (tmp_path / "new-clients.csv.gz").read_bytes()
    (tmp_path / "new-clients.csv.gz").unlink()
    (tmp_path / "new-rounds.csv.gz").unlink()
    keep()
    assert (tmp_path / "new-clients.csv.gz").read_bytes() == before


@pytest.mark.full
def test_a_repeated_run_is_compared_in_every_round() -> None:
    committed = evidence.summarize_runs(*rows(), False)
    other = committed.assign(seed=8)  # a run that is not repeated
    again = committed.copy()
    again.loc[(again["series"] == "server") & (again["round"] == 1), "test"] += 0.05
    again["test"] += 1e-9  # below the six digits that are committed
    actual = evidence.compare_figures(pd.concat([committed, other]), again).set_index("series")
    assert actual["seed"].tolist() == [7, 7]
    assert actual.loc["personal", ["committed", "again", "largest"]].tolist() == pytest.approx([0.7, 0.7, 0])
    assert actual.loc["server", ["committed", "again", "largest"]].tolist() == pytest.approx([0.3, 0.3, 0.05])


def test_figures_with_a_run_twice_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "FIGURES", tmp_path)
    (tmp_path / "small.json").write_text('{"m": {}}')
    file, once = tmp_path / "small.csv", evidence.summarize_runs(*rows(), False)
    once.to_csv(file, index=False)
    assert len(tables.read_figures.__wrapped__("small")) == 4  # two rounds, two series
    pd.concat([once, once]).to_csv(file, index=False)
    with pytest.raises(SystemExit, match=r"small\.csv has more than one row of method m, seed 7, series "):
        tables.read_figures.__wrapped__("small")


def test_a_repeated_run_that_diverges_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m-s7").mkdir()
    (tmp_path / "m-s7" / "run.json").write_text("{}")
    (tmp_path / "m-s7" / "status.json").write_text('{"state": "diverged"}')
    monkeypatch.setattr(evidence, "run_chosen", lambda *_: tmp_path)
    evidence.repeat("small", "m", [7])
    assert capsys.readouterr().out == "m of small, seed 7: diverged, unlike the committed run\n"


def test_bytes_are_counted_until_the_target_is_reached() -> None:
    def of(method: str, tests: list[float]) -> list[dict[str, Any]]:
        common = {"method": method, "seed": 0, "series": "personal", "headline": True}
        return [
            {**common, "round": r, "test": t, "bytes_up": 1e6 * r, "bytes_down": 2e6 * r}
            for r, t in enumerate(tests)
        ]

    figures = pd.DataFrame(
        [*of("goal", [0.9, 0.5]), *of("fast", [0.1, 0.5, 0.4]), *of("slow", [0.1, 0.4, 0.4])]
    )
    costs = tables.running_costs(figures.assign(flops=5e12))
    assert tables._cost_to(figures, "fast", "goal", costs["MB"]) == "3.00"
    assert tables._cost_to(figures, "fast", "goal", costs["TFLOP"]) == "5.00"
    assert tables._cost_to(figures, "slow", "goal", costs["MB"]) == "0 of 1 seeds"
    assert set(tables.running_costs(figures)) == {"MB"}


def test_a_loss_is_reached_from_above() -> None:
    common = {"seed": 0, "series": "personal", "headline": True}
    losses = {"goal": [0.9, 0.5], "fast": [0.8, 0.6, 0.4], "slow": [0.9, 0.8, 0.6]}
    rows = [
        {**common, "method": method, "round": r, "test": loss}
        for method, curve in losses.items()
        for r, loss in enumerate(curve)
    ]
    figures = pd.DataFrame(rows)
    # the third round is the first with at most 0.5; by the rule for accuracies it would be the first of all
    cost = 10 * figures["round"]
    assert tables.costs_to(figures, "fast", "goal", cost, lower_is_better=True).to_dict() == {0: 20}
    assert tables.costs_to(figures, "slow", "goal", cost, lower_is_better=True).empty
    assert tables.costs_to(figures, "slow", "goal", cost).to_dict() == {0: 0}


@pytest.mark.parametrize(
    ("text", "said"),
    [("<!-- end -->\n", "there is no line <!-- evidence a -->"),
     ("<!-- evidence a -->\n", "there is no line <!-- end --> below <!-- evidence a -->"),
     ("<!-- end -->\n<!-- evidence a -->\n", "there is no line <!-- end --> below <!-- evidence a -->")],
)  # fmt: skip
def test_a_page_without_the_marks_of_a_table_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(SystemExit, match=said):
        tables.paste(tmp_path / "page.md", "a", "table")
    assert (tmp_path / "page.md").read_text() == text


@pytest.mark.full
def test_an_experiment_runs_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Methods that are run apart, the last one first, have the figures and the place in the files of a run of all at once."""
    (tmp_path / "small.toml").write_text(
        'name = "small"\nmethod = "fedavg"\ncompare = ["fedavg", "ifca", "fedrep"]\n[data]\nsource = "digits"\n'
        '[concept]\nkind = "rotation"\n[partition]\nkind = "iid"\nclients = 4\n[model]\nnames = ["mlp"]\nhidden = [8]\n'
        '[run]\nrounds = 2\n[tune]\nseeds = [100]\ntest_seeds = [0, 1]\n[tune.grid]\n"optimizer.lr" = [0.1, 0.3]\n'
        '[tune.methods.fedrep]\n"optimizer.lr" = [0.1]\nhead_epochs = [1, 2]\n'
    )

    def begin(out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "source.json").write_text(json.dumps({"commit": out.parents[2].name}))

    monkeypatch.setattr(running, "begin", begin)
    monkeypatch.setattr(evidence, "EXPERIMENTS", tmp_path)
    monkeypatch.setattr(settings, "EXPERIMENTS", tmp_path)
    for name, calls in (("parts", [["fedrep"], ["fedavg"], []]), ("whole", [[]])):
        monkeypatch.setattr(evidence, "FIGURES", tmp_path / name)
        monkeypatch.setattr(evidence, "RUNS", tmp_path / name / "runs")
        for only in calls:
            evidence.run("small", 1, only)
            shutil.rmtree(tmp_path / name / "runs" / "small" / "fedrep", ignore_errors=True)
    names = sorted(path.name for path in (tmp_path / "whole").glob("small*"))
    assert len(names) == 6, names  # with the shares of IFCA
    for file in names:
        parts, whole = (tmp_path / folder / file for folder in ("parts", "whole"))
        if file == "small.json":
            sources = json.loads(parts.read_text())
            assert list(sources) == ["fedavg", "ifca", "fedrep"]
            assert {source["commit"] for source in sources.values()} == {"parts"}
            continue
        kept, expected = (pd.read_csv(path) for path in (parts, whole))
        # the seconds of training are of one run
        same = [column for column in expected if not column.startswith("seconds_")]
        pd.testing.assert_frame_equal(kept[same], expected[same], check_like=True)
    monkeypatch.setattr(evidence, "read_figures", lambda name: pd.read_csv(tmp_path / "parts" / "small.csv"))
    capsys.readouterr()
    evidence.repeat("small", "fedrep", [1])
    (row,) = capsys.readouterr().out.splitlines()[-1:]
    assert row.split()[:3] == ["fedrep", "1", "personal"]
    assert float(row.split()[-1]) == 0


def test_a_claim_about_a_method_that_has_no_figures_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = {
        "experiment": "digits-share-10",
        "method": "pfedlora",
        "against": "standalone",
        "label": "l",
        "expected": "+",
    }
    claim = {"paper": "pFedLoRA", "claim": "c", "cases": [case]}
    monkeypatch.setattr(claims, "read_claims", lambda: [claim])
    with pytest.raises(SystemExit, match=r"compares standalone, which digits-share-10 does not have: l$"):
        claims.judge_claims.__wrapped__()


@pytest.mark.full
def test_runs_go_on_at_the_code_they_were_begun_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(path: str, text: str) -> str:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        running._git("add", ".")
        running._git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")
        actual: str = running._git("rev-parse", "HEAD")
        return actual

    monkeypatch.setattr(running, "ROOT", tmp_path)
    running._git("init", "-q")
    begun = commit("src/a.py", "1")
    commit("docs/a.md", "1")
    commit("experiments/evidence/new.toml", "1")
    running.check_commit(begun, tmp_path)
    commit("experiments/evidence/methods.py", "1")
    with pytest.raises(SystemExit, match=r"changes in experiments/evidence/methods\.py"):
        running.check_commit(begun, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", ENTERED)
def test_a_page_shows_the_table_of_the_figures(name: str) -> None:
    actual = SETTINGS[name]
    assert (
        tables.table(name, actual["baseline"], actual.get("target")) in (RESULTS / actual["page"]).read_text()
    )


RECOVERED = sorted(p.stem for p in (RESULTS / "evidence").glob("*-recovery.csv"))


@pytest.mark.parametrize("stem", RECOVERED)
def test_a_page_shows_which_runs_found_the_clusters(stem: str) -> None:
    name = stem.removesuffix("-recovery")
    page = (RESULTS / SETTINGS[name]["page"]).read_text().split(f"<!-- evidence {name} -->")[1]
    sources = json.loads((RESULTS / "evidence" / f"{name}.json").read_text())
    titles = {method: source["title"] for method, source in sources.items()}
    with (RESULTS / "evidence" / f"{stem}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for method in {row["method"] for row in rows}:
        values = [float(row["index"]) for row in rows if row["method"] == method]
        # a table of more than ten seeds has no column for each
        shown = values if len(values) <= 10 else [min(values), statistics.median(values), max(values)]
        if len(values) in (5, 20):
            cells = " | ".join(f"{value:.2f}" for value in [*shown, sum(values) / len(values)])
            assert f"| {titles[method]} | {cells} |" in page.split("<!-- end -->")[0]


@pytest.mark.full
def test_the_summary_shows_the_claims() -> None:
    for paper in claims.papers():
        assert claims.claims_table(paper) in (RESULTS / "index.md").read_text()
    for page, text in claims.comparisons_tables().values():
        assert text in (RESULTS / page).read_text()


def last(name: str, method: str, case: dict[str, Any]) -> dict[int, float]:
    """The last round of each seed, read as text."""
    with (RESULTS / "evidence" / f"{name}.csv").open(newline="") as file:
        own = [row for row in csv.DictReader(file) if row["method"] == method]
    series = case.get("series")
    own = [row for row in own if row["series"] == series] or [row for row in own if row["headline"] == "True"]
    end = max(int(row["round"]) for row in own)
    return {int(row["seed"]): float(row["test"]) for row in own if int(row["round"]) == end}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ENTERED)
def test_means_and_half_widths_are_the_textbooks(name: str) -> None:
    page = (RESULTS / SETTINGS[name]["page"]).read_text()
    rows = page.split(f"<!-- evidence {name} -->")[1].split("\n\n")[1].splitlines()[2:]
    scale, digits = (1, 4) if name in LOSSES else (100, 1)
    experiment = ExperimentConfig.read(next(path for path in FILES if path.stem == name))
    sources = json.loads((RESULTS / "evidence" / f"{name}.json").read_text())
    missing = [experiment.method_title(m) for m in experiment.compared_methods if m not in sources]
    assert (f"Not run yet: {'; '.join(missing)}." in page) is bool(missing)
    for row, method in zip(rows, sources, strict=True):
        values = scale * np.array([value for value in last(name, method, {}).values() if not np.isnan(value)])
        half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
        assert row.split(" | ")[2] == f"{values.mean():.{digits}f} ± {half:.{digits}f}", row


def intervals(name: str) -> set[str]:
    """Intervals of the differences of any two methods and series, as a page would print them.

    Of the last round and of the mean over all rounds, by trapezoids; 95 %, and 90 % as for an equivalence.
    """
    figures = pd.read_csv(RESULTS / "evidence" / f"{name}.csv")
    curves = figures.pivot_table("test", ["round", "seed"], ["method", "series"])
    ends = sorted(figures["round"].unique())
    by_round = [curves.loc[end] for end in ends]
    areas = [
        (a + b) * step / 2 for (a, b), step in zip(itertools.pairwise(by_round), np.diff(ends), strict=True)
    ]
    actual = set()
    for wide, level in itertools.product((by_round[-1], sum(areas) / ends[-1]), (0.95, 0.9)):
        actual |= {
            text for pair in itertools.permutations(wide, 2) for text in _print(wide, *pair, level, name)
        }
    return actual


def _print(wide: pd.DataFrame, a: Any, b: Any, level: float, name: str) -> set[str]:
    """The interval of one difference, with each number of digits that a page may have."""
    differences = (wide[a] - wide[b]).dropna().to_numpy()
    width = stats.t.ppf((1 + level) / 2, len(differences) - 1)
    half = width * differences.std(ddof=1) / len(differences) ** 0.5
    mean, scale = differences.mean(), 1 if name in LOSSES else 100
    low, high = scale * (mean - half), scale * (mean + half)
    printed = {f"[{low:{sign}.{k}f}, {high:{sign}.{k}f}]" for k in (1, 2, 4) for sign in ("+", "")}
    return {text.replace("-", "−") for text in printed}


@pytest.mark.full
@pytest.mark.parametrize("name", ENTERED)
def test_intervals_in_the_text_below_a_table_are_those_of_its_figures(name: str) -> None:
    page = (RESULTS / SETTINGS[name]["page"]).read_text()
    below = page.split(f"<!-- evidence {name} -->")[1].split("<!-- end -->")[1]
    below = re.split(r"\n#|<!-- evidence ", below)[0]
    printed = set(re.findall(r"\[[-−+]?[\d.]+, [-−+]?[\d.]+\]", below))
    assert printed <= intervals(name)


@pytest.mark.few(5)
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_an_experiment_follows_the_protocol(path: Path) -> None:
    made = ExperimentConfig.read(path)
    assert made.tune is not None
    assert path.stem == made.name
    assert made.name in SETTINGS
    assert len(made.tune.seeds) >= 2
    assert len(made.tune.test_seeds) >= 5
    for name in made.compared_methods:
        rates = made.tune.grid_of(name)["optimizer.lr"]
        assert len(rates) >= 3 or (rates == [0.1] and made.title.endswith("at one rate"))
    assert SETTINGS[made.name]["baseline"] in made.compared_methods


def test_the_page_shows_the_ensembles_indices() -> None:
    actual = pd.read_csv(RESULTS / "evidence" / "ensemble-draws.csv").pivot(
        index="seed", columns="arm", values="rand_index"
    )
    for seed, row in actual.iterrows():
        cells = [f"{row[arm]:.3f}" for arm in ("package", "plain, same models", "plain, own models")]
        assert f"| {seed} | {' | '.join(cells)} |" in (RESULTS / "floral.md").read_text()


def test_the_horizons_are_every_teacher_at_every_end_once() -> None:
    names = [name for chosen_by in ("server", "own") for name in settings.list_horizons(chosen_by)]
    assert len(set(names)) == len(names) == 2 * 6 * 6
    pattern = r"teacher-(24|8|1)-(skew|iid)-(10|20|60)(-cosine)?(-own)?"
    assert {path.stem for path in FILES if re.fullmatch(pattern, path.stem)} == set(names)
    for name in names:
        made = ExperimentConfig.read(ROOT / "experiments" / "evidence" / "horizons" / f"{name}.toml")
        parts = re.fullmatch(pattern, name)
        assert parts is not None
        rank, kind, rounds, cosine, own = parts.groups()
        assert made.tune is not None
        assert made.run.rounds == made.tune.rounds == int(rounds)
        assert made.tune.series == ("personal" if own else "server")
        assert type(made.partition).__name__.lower() == {"skew": "dirichlet", "iid": "iid"}[kind]
        assert made.data.source.rank == int(rank)
        assert len(made.tune.test_seeds) == 20
        label = settings.list_horizons("own" if own else "server")[name]
        words = f"rank {rank}, {'IID' if kind == 'iid' else 'skewed'}, {rounds} rounds"
        assert label == words + (", cosine" if cosine else "")


def test_an_experiment_of_a_sweep_changes_one_thing() -> None:
    folder = ROOT / "experiments" / "evidence"
    classes, shares = settings.SWEEPS.values()
    assert (list(classes), list(shares)) == ([2, 4, 6, 8, 10], [10, 30, 50, 70, 90, 100])
    changes = {name: f"partition.classes_per_client={value}" for value, name in classes.items()}
    changes |= {
        name: f"run.participation={value / 100}" for value, name in shares.items() if name not in changes
    }
    for name, change in changes.items():
        made = tomllib.loads(ExperimentConfig.read(folder / "sweeps" / f"{name}.toml").to_toml())
        base = ExperimentConfig.read(folder / "base-digits-sweeps.toml", [change])
        assert {"fedproto", "pfedlora"} <= set(made["compare"])
        assert made == tomllib.loads(base.to_toml()) | {
            key: made[key] for key in ("name", "title", "compare")
        }


@pytest.mark.parametrize("mark", ["classes", "shares"])
def test_a_table_of_a_sweep_has_means_and_differences_of_its_experiments(mark: str) -> None:
    text = (
        (RESULTS / "pfedlora.md").read_text().split(f"<!-- evidence {mark} -->")[1].split("<!-- end -->")[0]
    )
    head, _, *lines = [line.strip("| ").split(" | ") for line in text.strip().splitlines()]
    methods = {"Standalone": "standalone", "FedProto": "fedproto", "pFedLoRA": "pfedlora"}
    names = settings.SWEEPS[head[0]]
    assert [line[0] for line in lines] == [str(value) for value in names]
    for name, line in zip(names.values(), lines, strict=True):
        of = {methods[title]: last(name, methods[title], {}) for title in head[1:-1]}
        for title, cell in zip(head[1:-1], line[1:-1], strict=True):
            values = 100 * np.array(list(of[methods[title]].values()))
            half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
            assert cell == f"{values.mean():.1f} ± {half:.1f}"
        gaps = 100 * np.array([of["pfedlora"][seed] - of["fedproto"][seed] for seed in of["fedproto"]])
        half = stats.t.ppf(0.975, len(gaps) - 1) * gaps.std(ddof=1) / len(gaps) ** 0.5
        ends = f"[{gaps.mean() - half:+.1f}, {gaps.mean() + half:+.1f}]".replace("-", "−")
        assert line[-1].endswith(ends)


def test_a_claim_names_a_horizon_once() -> None:
    for claim in claims.read_claims():
        cases = [
            (case.get("experiment"), case.get("against"), case.get("series"), case.get("label"))
            for case in claim.get("cases", ())
        ]
        assert len(set(cases)) == len(cases)
        assert not any("horizons" in case for case in claim.get("cases", ()))
