"""Tables of the evidence experiments, from the committed figures.

A part of ``docs/evidence.py``, which is the command; this file is only imported.
"""

from __future__ import annotations

import collections
import csv
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import integrate

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.data.datasets.synthetic import Synthetic
from fedlowrank.report.number_formats import format_signed
from fedlowrank.report.statistics.significance import Difference, compare_over_seeds
from tables.settings import FIGURES, RESULTS, find_experiment, read_settings
from tables.verdicts import wilson_interval

FOUND = 0.995
"""Adjusted Rand index from which a run has found the true clusters."""

MAX_SEEDS = 10
"""Maximum number of seeds for which a table has a column each."""

QUANTILES = {"lowest": 0.0, "median": 0.5, "highest": 1.0}
"""Columns of a table of more seeds."""

RECOVERY = "Adjusted Rand index of the clients' largest shares against their true clusters, last round:"
TRUNCATION = "Relative truncation error r̂ and weight p of a client of each rank, FedHL, last round:"


def has_figures(name: str) -> bool:
    """Whether an experiment has figures of any method."""
    return bool(read_sources(FIGURES / f"{name}.json"))


@cache
def read_figures(name: str) -> pd.DataFrame:
    """The figures of an experiment, as :func:`summarize_runs` made them."""
    return read_kept(FIGURES, name, keys=("method", "seed", "series", "round"))


@cache
def read_spread(name: str) -> pd.DataFrame:
    """The figures with a column ``spread``: the standard deviation of the test accuracy over the clients of a run, last round."""
    clients = read_kept(FIGURES, name, "-clients.csv.gz", ("method", "seed", "series", "client", "split"))
    keys = ["method", "seed", "series"]
    spread = clients[clients["split"] == "test"].groupby(keys)["accuracy"].std().rename("spread")
    return read_figures(name).join(spread, on=keys)


def read_kept(
    figures: Path, name: str, ending: str = ".csv", keys: Sequence[str] = ("method", "seed")
) -> pd.DataFrame:
    """A table of figures, of the methods that stand in ``NAME.json``.

    Others have rows if keeping them was interrupted; they have no figures yet.

    Args:
        figures: folder of the files.
        name: of the experiment.
        ending: of the file's name.
        keys: columns that name a row; two rows with the same are refused.
    """
    file = figures / f"{name}{ending}"
    rows = pd.read_csv(file)
    rows = rows[rows["method"].isin(read_sources(figures / f"{name}.json"))].reset_index(drop=True)
    refuse_repeated(file, rows, keys)
    return rows


def refuse_repeated(file: Path, rows: pd.DataFrame, keys: Sequence[str]) -> None:
    """End with a message if a table of figures has two rows for one thing, which would count twice."""
    repeated = rows[rows.duplicated([*keys])]
    if len(repeated):
        which = ", ".join(f"{key} {repeated.iloc[0][key]}" for key in keys)
        sys.exit(
            f"{file} has more than one row of {which}. Remove the rows that are too many; or remove all rows of this method "
            "here and its line in the .json file, and run it again."
        )


def last_results(figures: pd.DataFrame, series: str | None) -> pd.DataFrame:
    """The last round of each run.

    Args:
        figures: of an experiment.
        series: which models are judged; None for the first series of each method, its headline.

    Returns:
        Indexed by method and seed.
    """
    kept = figures["headline"] if series is None else figures["series"].eq(series)
    some = figures[kept]
    return some[some["round"] == some.groupby("method")["round"].transform("max")].set_index(
        ["method", "seed"]
    )


def difference(figures: pd.DataFrame, method: str, against: str, series: str | None = None) -> Difference:
    """The paired difference of two methods in the last round, over the seeds that both have."""
    return compare_over_seeds(paired_differences(figures, method, against, series).to_numpy())


def paired_differences(
    figures: pd.DataFrame, method: str, against: str, series: str | None = None, measure: str = "test"
) -> pd.Series:
    """The differences of two methods by seed, of the seeds in which neither diverged.

    Args:
        figures: of an experiment.
        method: minuend, judged by the series, or by its first where it lacks that series.
        against: subtrahend, judged in the same way.
        series: as in :func:`last_results`.
        measure: ``test`` or ``spread`` (of :func:`read_spread`) of the last round, or ``curve``, the mean of ``test`` over all
            rounds.
    """
    own = results_by_seed(figures, method, series, measure)
    return (own - results_by_seed(figures, against, series, measure)).dropna()


def results_by_seed(figures: pd.DataFrame, method: str, series: str | None, measure: str) -> pd.Series:
    """A measure of each seed of a method, see :func:`paired_differences`; without the seeds that diverged."""
    of_method = figures[figures["method"] == method]
    if series not in set(of_method["series"]):
        series = None
    last = last_results(of_method, series).loc[method]
    if measure != "curve":
        return last[measure].dropna()
    kept = of_method[of_method["headline"] if series is None else of_method["series"].eq(series)]
    curves = kept.pivot_table("test", "round", "seed")[last["test"].dropna().index]
    area = integrate.trapezoid(curves.to_numpy(), curves.index.to_numpy(), axis=0)
    return pd.Series(area / (curves.index[-1] - curves.index[0]), index=curves.columns)


def table(name: str, baseline: str, target: str | None = None) -> str:
    """The results of an experiment as Markdown.

    Args:
        name: of the experiment.
        baseline: with which every method is compared.
        target: a method; bytes, both ways, and FLOPs are counted until its last result is reached, seed by seed.
    """
    figures, experiment = read_figures(name), _read_experiment(name)
    sources, chosen, tune = read_sources(FIGURES / f"{name}.json"), _chosen(name), experiment.tune
    assert tune is not None, name
    (scale, digits), costs, lower_is_better = unit_of(name), running_costs(figures), is_loss(name)
    titles = read_titles(name)
    against = f"minus {titles[baseline]}"
    series = [None, *figures.loc[~figures["headline"], "series"].unique()]
    heads = [
        "method",
        "chosen",
        "test",
        against,
        *(h for s in series[1:] for h in (s, against)),
        "worst client",
    ]
    heads += [
        "last quarter",
        "MB up",
        "MB down",
        *([f"{unit} to {titles[target]}'s result" for unit in costs] if target else []),
    ]
    lines = [table_row(heads), "| :--- | :--- |" + " ---: |" * (len(heads) - 2)]
    for method in list_methods(name):
        lost = sources[method].get("diverged", 0)
        cells = [
            titles[method] + (f" ({lost} seed{'s' * (lost > 1)} diverged)" if lost else ""),
            chosen.get(method, ""),
        ]
        for one in series:
            results = last_results(figures, one)
            there = method in results.index.get_level_values("method")
            cells.append(mean_with_half_width(results.loc[method]["test"] * scale, digits) if there else "")
            compared = there and method != baseline
            cells.append(
                format_difference(difference(figures, method, baseline, one), scale, digits)
                if compared
                else ""
            )
        rows = last_results(figures, None).loc[method]
        cells.append(mean_with_half_width(rows["worst"] * scale, digits))
        cells.append(format_signed(f"{_rise(figures, method, tune.series) * scale:+.{digits}f}"))
        cells += [f"{rows[column].mean() / 1e6:.2f}" for column in ("bytes_up", "bytes_down")]
        if target:
            cells += [_cost_to(figures, method, target, cost, lower_is_better) for cost in costs.values()]
        lines.append(table_row(cells))
    seeds = ", ".join(map(str, sorted(set(figures["seed"]))))
    missing = [experiment.method_title(m) for m in experiment.compared_methods if m not in sources]
    unfinished = f"\n\nNot run yet: {'; '.join(missing)}." if missing else ""
    chosen = f"settings chosen on seeds {', '.join(map(str, tune.seeds))} after {tune.rounds} rounds"
    if all(is_chosen for _, is_chosen, _ in read_tried(FIGURES / f"{name}-tuning.csv")):
        chosen = "one setting, not chosen"
    return "\n".join(lines) + (
        f"\n\n{'Loss' if lower_is_better else 'Accuracy in %'}; {experiment.run.rounds} rounds; seeds {seeds}; "
        f"{chosen}. {describe_sources(sources)}. "
        f"[Figures](evidence/{name}.csv), "
        f"[every setting tried](evidence/{name}-tuning.csv), made by `python docs/evidence.py run {name}`. To repeat one row: "
        f"`python docs/evidence.py repeat {name} METHOD`, METHOD is one of {', '.join(list_methods(name))}.{unfinished}"
    )


def table_row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def running_costs(figures: pd.DataFrame) -> dict[str, pd.Series]:
    """Costs so far by unit; FLOPs where they were kept."""
    found = {"MB": (figures["bytes_up"] + figures["bytes_down"]) / 1e6}
    return found | ({"TFLOP": figures["flops"] / 1e12} if "flops" in figures else {})


def _cost_to(
    figures: pd.DataFrame, method: str, target: str, cost: pd.Series, lower_is_better: bool = False
) -> str:
    """Cost until a target method's last result; the number of seeds if not all reach it."""
    seeds = last_results(figures, None).loc[target].index
    found = costs_to(figures, method, target, cost, lower_is_better)
    if len(found) < len(seeds):
        return f"{len(found)} of {len(seeds)} seeds"
    return f"{found.mean():.2f}"


def costs_to(
    figures: pd.DataFrame, method: str, target: str, cost: pd.Series, lower_is_better: bool = False
) -> pd.Series:
    """Cost of each seed until a target method's last result is first reached; without the seeds that never reach it.

    Args:
        figures: of an experiment.
        method: whose cost is counted.
        target: whose last result of the same seed is to be reached.
        cost: so far, of each row of the figures.
        lower_is_better: whether a result at or below the target's reaches it, as for losses, instead of one at or above.
    """
    goal = last_results(figures, None).loc[target]["test"]
    own = figures[(figures["method"] == method) & figures["headline"]].sort_values("round")
    goals = own["seed"].map(goal)
    is_reached = own["test"] <= goals if lower_is_better else own["test"] >= goals
    reached = own[is_reached].groupby("seed").head(1)
    return cost[reached.index].set_axis(reached["seed"])


def truncation_table(name: str, method: str) -> str:
    """r̂_i and p_i of a method by rank as Markdown, means over clients and seeds."""
    rows = read_kept(FIGURES, name, "-truncation.csv", ("method", "seed", "client"))
    means = (
        rows[rows["method"] == method]
        .groupby("rank")[["truncation", "weight"]]
        .mean()
        .sort_index(ascending=False)
    )
    lines = [table_row(["rank", *map(str, means.index)]), "| :--- |" + " ---: |" * len(means)]
    lines.append(table_row(["r̂", *(f"{value:.3f}" for value in means["truncation"])]))
    lines.append(table_row(["p", *(f"{value:.3f}" for value in means["weight"])]))
    return "\n".join(lines)


def recovery_table(name: str) -> str:
    """Adjusted Rand index of every run whose method has shares of clusters, and how many find them, as Markdown."""
    rows = read_kept(FIGURES, name, "-recovery.csv")
    rows = rows.pivot(index="method", columns="seed", values="index")
    rows = rows.reindex([method for method in list_methods(name) if method in rows.index])
    titles = read_titles(name)
    shows_seeds = len(rows.columns) <= MAX_SEEDS
    columns = ["seed", *map(str, rows.columns)] if shows_seeds else ["of all seeds", *QUANTILES]
    lines = [
        table_row([*columns, "mean", "runs that find the clusters"]),
        "| :--- |" + " ---: |" * (len(columns) + 1),
    ]
    for method, row in rows.iterrows():
        values = row if shows_seeds else row.quantile(list(QUANTILES.values()))
        cells = ["diverged" if pd.isna(value) else f"{value:.2f}" for value in values]
        found, run = int((row >= FOUND).sum()), len(list_seeds(name))
        rate = format_rate(found, run, *wilson_interval(found, run))
        lines.append(table_row([titles[method], *cells, f"{row.mean():.2f}", rate]))
    return "\n".join(lines)


@cache
def _read_experiment(name: str) -> ExperimentConfig:
    return ExperimentConfig.read(find_experiment(name))


def list_experiments(page: str) -> list[str]:
    """Those of a page whose figures have been entered, in its order."""
    own = [name for name, found in read_settings().items() if found["page"] == page]
    text = (RESULTS / page).read_text()
    own.sort(key=lambda name: text.find(f"<!-- evidence {name} -->"))
    return [name for name in own if has_figures(name)]


def list_methods(name: str) -> list[str]:
    """Methods of an experiment that have figures, in the order of its file."""
    there = set(read_figures(name)["method"])
    return [method for method in _read_experiment(name).compared_methods if method in there]


def list_seeds(name: str) -> list[int]:
    """Test seeds of an experiment, those that diverged included."""
    tune = _read_experiment(name).tune
    assert tune is not None, name
    return list(tune.test_seeds)


def title_of(name: str) -> str:
    """The title of an experiment."""
    return _read_experiment(name).title


def is_loss(name: str) -> bool:
    """Whether an experiment's results are losses, those of a regression or of texts that are generated, and not accuracies."""
    experiment = _read_experiment(name)
    writes_text = experiment.language is not None and experiment.language.task == "causal"
    return writes_text or isinstance(experiment.data.source, Synthetic)


def unit_of(name: str) -> tuple[float, int]:
    """Factor and digits of an experiment's results in a table: of losses as they are, of accuracies in percent."""
    return (1.0, 4) if is_loss(name) else (100.0, 1)


def read_sources(file: Path) -> dict[str, dict[str, Any]]:
    """Title, commit, machine and versions of each method that has figures, and how many of its test runs diverged, if any."""
    try:
        return json.loads(file.read_text()) if file.exists() else {}
    except json.JSONDecodeError as error:
        sys.exit(f"{file} is no JSON: {error}. Was a line removed, and the comma before it left?")


def read_titles(name: str) -> dict[str, str]:
    """Titles of an experiment's methods that have figures."""
    return {method: source["title"] for method, source in read_sources(FIGURES / f"{name}.json").items()}


def describe_sources(sources: Mapping[str, Mapping[str, Any]]) -> str:
    """Commits of the figures by machine and version of torch, with the number of methods if there are several commits."""
    places: dict[str, collections.Counter[str]] = {}
    for s in sources.values():
        place = f"{s['machine']}, torch {s['versions']['torch']}"
        places.setdefault(place, collections.Counter())[s["commit"]] += 1
    parts = []
    for place, counts in places.items():
        commits = [f"{commit} ({n} method{'s' * (n > 1)})" for commit, n in counts.items()]
        alone = len(places) == len(commits) == 1
        parts.append(f"Commit {next(iter(counts)) if alone else ', '.join(commits)}, {place}")
    return "; ".join(parts)


def read_tried(tuning: Path) -> list[tuple[str, bool, dict[str, str]]]:
    """Every setting that was tried: its method, whether it was chosen, and the values as they stand in the file."""
    with tuning.open(newline="") as file:
        rows = list(csv.DictReader(file))
    keys = ("method", "chosen")
    refuse_repeated(
        tuning, pd.DataFrame([row for row in rows if row["chosen"] == "True"], columns=keys), keys
    )
    fields = list(rows[0])[list(rows[0]).index("messages") + 1 :]
    return [(row["method"], row["chosen"] == "True", {f: row[f] for f in fields if row[f]}) for row in rows]


def _chosen(name: str) -> dict[str, str]:
    """The chosen settings by method; an edge of the grid is marked."""
    rows, found = read_tried(FIGURES / f"{name}-tuning.csv"), {}
    for method, is_chosen, values in rows:
        if is_chosen:
            tried = {f: {own[f] for other, _, own in rows if other == method} for f in values}
            found[method] = ", ".join(_name_setting(f, value, tried[f]) for f, value in values.items())
    return found


def _name_setting(field: str, value: str, tried: set[str]) -> str:
    """A chosen value; marked by a star where it is the smallest or largest of those that were tried."""
    numbers = [float(v) for v in tried] if all(re.fullmatch(r"[-+.e\d]+", v) for v in tried) else []
    edge = r"\*" if len(numbers) > 1 and float(value) in (min(numbers), max(numbers)) else ""
    return f"{field.removeprefix('optimizer.')} {value}{edge}"


def _rise(figures: pd.DataFrame, method: str, series: str | None) -> float:
    """Validation of the tuned models at the last round minus three quarters of the way, mean over seeds."""
    own = figures[figures["method"] == method]
    own = own[own["series"].eq(series)] if series in set(own["series"]) else own[own["headline"]]
    by_round = own.groupby("round")["val"].mean()
    before = by_round[by_round.index <= 0.75 * by_round.index.max()]
    return float(by_round.iloc[-1] - before.iloc[-1])


def mean_with_half_width(values: pd.Series, digits: int) -> str:
    """The mean over seeds, and the half-width of its 95 % interval if there is one."""
    found = compare_over_seeds(values.to_numpy())
    half = "" if math.isnan(found.low) else f" ± {(found.high - found.low) / 2:.{digits}f}"
    return f"{found.mean:.{digits}f}{half}"


def format_difference(found: Difference, scale: float, digits: int) -> str:
    """A difference with its interval, if it has one.

    An end that rounds to zero keeps its sign, which a verdict may rest on.
    """
    mean = format_signed(f"{found.mean * scale:+.{digits}f}")
    if math.isnan(found.low):
        return mean
    return f"{mean} [{found.low * scale:+.{digits}f}, {found.high * scale:+.{digits}f}]".replace("-", "−")


def format_rate(successes: int, n: int, low: float, high: float) -> str:
    """A number of successful runs with the interval of its share."""
    return f"{successes} of {n} runs [{low:.0%}, {high:.0%}]".replace("%", " %")


def paste(page: Path, name: str, text: str) -> None:
    """Put a table between its marks on a page."""
    begin, end = f"<!-- evidence {name} -->\n", "<!-- end -->"
    old = page.read_text()
    if begin not in old:
        sys.exit(f"{page}: there is no line {begin.strip()}")
    pattern = f"({re.escape(begin)}).*?({re.escape(end)})"
    new, count = re.subn(pattern, lambda m: f"{m[1]}\n{text}\n\n{m[2]}", old, count=1, flags=re.DOTALL)
    if not count:
        sys.exit(f"{page}: there is no line {end} below {begin.strip()}")
    page.write_text(new)
