"""Tables of the evidence experiments and of the claims, from the committed figures; see ``evidence.py``."""

from __future__ import annotations

import csv
import itertools
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.report.formats import format_signed
from fedlowrank.report.significance import ALPHA, Difference, compare_over_seeds, correct_holm

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "experiments" / "evidence"
RESULTS = ROOT / "docs" / "results"
FIGURES = RESULTS / "evidence"
VERDICTS = ("holds", "does not hold", "undecided")
BREAK = "<br>"
"""Between the lines of a cell."""
RECOVERY = "Adjusted Rand index of the clients' largest shares against their true clusters, last round:"
TRUNCATION = "Relative truncation error r̂ and weight p of a client of each rank, FedHL, last round:"


@cache
def read_figures(name: str) -> pd.DataFrame:
    """The figures of an experiment, as :func:`summarize_runs` made them."""
    return pd.read_csv(FIGURES / f"{name}.csv")


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
    """The paired difference of two methods in the last round, over the seeds that both have.

    Args:
        figures: of an experiment.
        method: minuend; it has the series.
        against: subtrahend, judged by the same series, or by its first where it lacks that series.
        series: as in :func:`last_results`.
    """
    own = last_results(figures, series)
    others = own if against in own.index.get_level_values("method") else last_results(figures, None)
    # a seed that diverged is in neither
    return compare_over_seeds((own.loc[method]["test"] - others.loc[against]["test"]).dropna().to_numpy())


def table(name: str, baseline: str, target: str | None = None) -> str:
    """The results of an experiment as Markdown.

    Args:
        name: of the experiment.
        baseline: with which every method is compared.
        target: a method; bytes, both ways, and FLOPs are counted until its last result is reached, seed by seed.
    """
    figures, experiment = read_figures(name), _read_experiment(name)
    source, chosen, tune = json.loads((FIGURES / f"{name}.json").read_text()), _chosen(name), experiment.tune
    assert tune is not None, name
    (scale, digits), costs = unit_of(name), _costs(figures)
    against = f"minus {source['titles'][baseline]}"
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
        *([f"{unit} to {source['titles'][target]}'s result" for unit in costs] if target else []),
    ]
    lines = [_row(heads), "| :--- | :--- |" + " ---: |" * (len(heads) - 2)]
    for method in list_methods(name):
        lost = source.get("diverged", {}).get(method)
        cells = [
            source["titles"][method] + (f" ({lost} seed{'s' * (lost > 1)} diverged)" if lost else ""),
            chosen.get(method, ""),
        ]
        for one in series:
            results = last_results(figures, one)
            there = method in results.index.get_level_values("method")
            cells.append(_mean(results.loc[method]["test"] * scale, digits) if there else "")
            compared = there and method != baseline
            cells.append(_text(difference(figures, method, baseline, one), scale, digits) if compared else "")
        rows = last_results(figures, None).loc[method]
        cells.append(_mean(rows["worst"] * scale, digits))
        cells.append(format_signed(f"{_rise(figures, method, tune.series) * scale:+.{digits}f}"))
        cells += [f"{rows[column].mean() / 1e6:.2f}" for column in ("bytes_up", "bytes_down")]
        cells += [_cost_to(figures, method, target, cost) for cost in costs.values()] if target else []
        lines.append(_row(cells))
    seeds = ", ".join(map(str, sorted(set(figures["seed"]))))
    return "\n".join(lines) + (
        f"\n\n{'Loss' if scale == 1 else 'Accuracy in %'}; {experiment.run.rounds} rounds; seeds {seeds}, "
        f"settings chosen on {', '.join(map(str, tune.seeds))} after {tune.rounds} rounds. Commit {source['commit']}, "
        f"{source['machine']}, torch {source['versions']['torch']}. [Figures](evidence/{name}.csv), "
        f"[every setting tried](evidence/{name}-tuning.csv), `python docs/evidence.py run {name}`."
    )


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _costs(figures: pd.DataFrame) -> dict[str, pd.Series]:
    """Costs so far by unit; FLOPs where they were kept."""
    found = {"MB": (figures["bytes_up"] + figures["bytes_down"]) / 1e6}
    return found | ({"TFLOP": figures["flops"] / 1e12} if "flops" in figures else {})


def _cost_to(figures: pd.DataFrame, method: str, target: str, cost: pd.Series) -> str:
    """Cost until a target method's last result; the number of seeds if not all reach it."""
    goal = last_results(figures, None).loc[target]["test"]
    own = figures[(figures["method"] == method) & figures["headline"]].sort_values("round")
    reached = own[own["test"] >= own["seed"].map(goal)].groupby("seed").head(1)
    if len(reached) < len(goal):
        return f"{len(reached)} of {len(goal)} seeds"
    return f"{cost[reached.index].mean():.2f}"


def truncation_table(name: str, method: str) -> str:
    """r̂_i and p_i of a method by rank as Markdown, means over clients and seeds."""
    rows = pd.read_csv(FIGURES / f"{name}-truncation.csv")
    means = (
        rows[rows["method"] == method]
        .groupby("rank")[["truncation", "weight"]]
        .mean()
        .sort_index(ascending=False)
    )
    lines = [_row(["rank", *map(str, means.index)]), "| :--- |" + " ---: |" * len(means)]
    lines.append(_row(["r̂", *(f"{value:.3f}" for value in means["truncation"])]))
    lines.append(_row(["p", *(f"{value:.3f}" for value in means["weight"])]))
    return "\n".join(lines)


def recovery_table(name: str) -> str:
    """Adjusted Rand index of every run whose method has shares of clusters as Markdown."""
    rows = pd.read_csv(FIGURES / f"{name}-recovery.csv").pivot(index="method", columns="seed", values="index")
    rows = rows.reindex([method for method in list_methods(name) if method in rows.index])
    titles = json.loads((FIGURES / f"{name}.json").read_text())["titles"]
    lines = [
        _row(["seed", *map(str, rows.columns), "mean"]),
        "| :--- |" + " ---: |" * (len(rows.columns) + 1),
    ]
    for method, row in rows.iterrows():
        cells = ["diverged" if pd.isna(value) else f"{value:.2f}" for value in row]
        lines.append(_row([titles[method], *cells, f"{row.mean():.2f}"]))
    return "\n".join(lines)


@cache
def _read_experiment(name: str) -> ExperimentConfig:
    return ExperimentConfig.read(EXPERIMENTS / f"{name}.toml")


def read_settings() -> dict[str, dict[str, str]]:
    """What ``evidence.toml`` says of every experiment."""
    settings: dict[str, dict[str, str]] = tomllib.loads((RESULTS / "evidence.toml").read_text())[
        "experiments"
    ]
    return settings


def list_experiments(page: str) -> list[str]:
    """Those of a page whose figures have been entered."""
    own = (name for name, found in read_settings().items() if found["page"] == page)
    return [name for name in own if (FIGURES / f"{name}.csv").exists()]


def list_methods(name: str) -> list[str]:
    """Methods of an experiment that have figures, in the order of its file."""
    there = set(read_figures(name)["method"])
    return [method for method in _read_experiment(name).compared_methods if method in there]


def title_of(name: str) -> str:
    """The title of an experiment."""
    return _read_experiment(name).title


def unit_of(name: str) -> tuple[float, int]:
    """Factor and digits of an experiment's results in a table: of losses as they are, of accuracies in percent."""
    is_loss = _read_experiment(name).data.to_dict(False)["source"].startswith("synthetic_")
    return (1.0, 4) if is_loss else (100.0, 1)


def read_tried(name: str) -> list[tuple[str, bool, dict[str, str]]]:
    """Every setting that was tried: its method, whether it was chosen, and the values as they stand in the file."""
    with (FIGURES / f"{name}-tuning.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    fields = list(rows[0])[list(rows[0]).index("messages") + 1 :]
    return [(row["method"], row["chosen"] == "True", {f: row[f] for f in fields if row[f]}) for row in rows]


def _chosen(name: str) -> dict[str, str]:
    """The chosen settings by method; an edge of the grid is marked."""
    rows, found = read_tried(name), {}
    for method, is_chosen, values in rows:
        if is_chosen:
            tried = {f: {own[f] for other, _, own in rows if other == method} for f in values}
            found[method] = ", ".join(_name_setting(f, value, tried[f]) for f, value in values.items())
    return found


def _name_setting(field: str, value: str, tried: set[str]) -> str:
    """A chosen value; marked by ``*`` where it is the smallest or largest of those that were tried."""
    numbers = [float(v) for v in tried] if all(re.fullmatch(r"[-+.e\d]+", v) for v in tried) else []
    edge = "*" if len(numbers) > 1 and float(value) in (min(numbers), max(numbers)) else ""
    return f"{field.rpartition('.')[2]} {value}{edge}"


def _rise(figures: pd.DataFrame, method: str, series: str | None) -> float:
    """Validation of the tuned models at the last round minus three quarters of the way, mean over seeds."""
    own = figures[figures["method"] == method]
    own = own[own["series"].eq(series)] if series in set(own["series"]) else own[own["headline"]]
    by_round = own.groupby("round")["val"].mean()
    before = by_round[by_round.index <= 0.75 * by_round.index.max()]
    return float(by_round.iloc[-1] - before.iloc[-1])


def _mean(values: pd.Series, digits: int) -> str:
    found = compare_over_seeds(values.to_numpy())
    half = f" ± {(found.high - found.low) / 2:.{digits}f}" if found.n > 1 else ""
    return f"{found.mean:.{digits}f}{half}"


def _text(found: Difference, scale: float, digits: int) -> str:
    """A difference with its interval; an end that rounds to zero keeps its sign, which a verdict may rest on."""
    mean = format_signed(f"{found.mean * scale:+.{digits}f}")
    return f"{mean} [{found.low * scale:+.{digits}f}, {found.high * scale:+.{digits}f}]".replace("-", "−")


# Claims


def judge(low: float, high: float, expected: str) -> str:
    """Whether an interval of a difference shows what a claim expects.

    Args:
        low: of the 95 % interval.
        high: of the 95 % interval.
        expected: the sign of the difference by the claim, ``+`` or ``-``.
    """
    if expected == "-":
        low, high = -high, -low
    if low > 0:
        return "holds"
    return "does not hold" if high < 0 else "undecided"


class Case(NamedTuple):
    """One comparison that a claim is about, and what the figures say about it."""

    label: str
    found: Difference  # method minus the other
    scale: float  # to the unit of a table
    digits: int
    verdict: str

    def text(self) -> str:
        """The difference with its interval."""
        return f"{self.label}: {_text(self.found, self.scale, self.digits)}"


def read_claims() -> list[dict[str, Any]]:
    """The claims of the papers, in the order of the summary."""
    claims: list[dict[str, Any]] = tomllib.loads((RESULTS / "evidence.toml").read_text())["claims"]
    return claims


def judge_claim(claim: dict[str, Any]) -> list[Case]:
    """The comparisons of a claim with their verdicts; none if it rests on text alone."""
    return [_judge_case(claim | case) for case in claim.get("cases", ())]


def _judge_case(case: dict[str, str]) -> Case:
    name = case["experiment"]
    found = difference(read_figures(name), case["method"], case["against"], case.get("series"))
    scale, digits = unit_of(name)
    return Case(case["label"], found, scale, digits, judge(found.low, found.high, case["expected"]))


def summarize_verdicts(verdicts: Sequence[str]) -> str:
    """One verdict where all agree, else how many there are of each."""
    counts = {verdict: verdicts.count(verdict) for verdict in VERDICTS if verdict in verdicts}
    if len(counts) == 1:
        where = {1: "", 2: " in both"}.get(len(verdicts), f" in all {len(verdicts)}")
        return next(iter(counts)) + where
    return ", ".join(f"{verdict} in {count} of {len(verdicts)}" for verdict, count in counts.items())


def claims_table() -> str:
    """A table for each paper, one row for every claim of it."""
    claims = read_claims()
    judged = [judge_claim(claim) for claim in claims]
    every = [case for cases in judged for case in cases]
    corrected = correct_holm([case.found.p for case in every])
    weak = [c for c, p in zip(every, corrected, strict=True) if p >= ALPHA and c.verdict != "undecided"]
    lines: list[str] = []
    papers = itertools.groupby(zip(claims, judged, strict=True), lambda pair: pair[0]["paper"])
    for paper, pairs in papers:
        lines += [
            f"### {paper}\n",
            "| claim | verdict | measured here | the paper |",
            "| :--- | :--- | :--- | :--- |",
        ]
        lines += [_claim_row(claim, cases, weak) for claim, cases in pairs]
        about = f"{paper}: differences behind the verdicts, with their 95 % intervals"
        lines.append(f"\n![{about}](figures/{paper.lower()}-claims.svg)\n")
    return "\n".join(lines) + (
        f"\nThe tables have {len(every)} intervals. † {len(weak)} of them leave out 0, but not once "
        "corrected for their number: p by Holm for all of them is 0.05 or more."
    )


def _claim_row(claim: dict[str, Any], cases: Sequence[Case], weak: Sequence[Case]) -> str:
    """A row of the summary; cases that a correction for their number does not leave standing have a mark."""
    measured, verdict = claim.get("measured", ""), claim.get("verdict", "")
    if cases:
        shown = BREAK.join(case.text() + "†" * (case in weak) for case in cases)
        measured = BREAK.join(filter(None, [f"{claim['difference']}:", shown, measured]))
        verdict = f"**{summarize_verdicts([c.verdict for c in cases])}**. {verdict}".strip()
    return _row([f"[{claim['claim']}]({claim['page']})", verdict, measured, claim["reported"]])


def write() -> None:
    """Replace the tables of all pages."""
    for name, found in read_settings().items():
        if (FIGURES / f"{name}.csv").exists():
            text = table(name, found["baseline"], found.get("target"))
            if "truncation" in found:
                text += f"\n\n{TRUNCATION}\n\n{truncation_table(name, found['truncation'])}"
            if (FIGURES / f"{name}-recovery.csv").exists():
                text += f"\n\n{RECOVERY}\n\n{recovery_table(name)}"
            paste(RESULTS / found["page"], name, text)
    paste(RESULTS / "index.md", "claims", claims_table())


def paste(page: Path, name: str, text: str) -> None:
    """Put a table between its marks on a page."""
    begin, end = f"<!-- evidence {name} -->\n", "<!-- end -->"
    old = page.read_text()
    if begin not in old:
        sys.exit(f"{page}: there is no line {begin.strip()}")
    pattern = f"({re.escape(begin)}).*?({re.escape(end)})"
    page.write_text(re.sub(pattern, lambda m: f"{m[1]}\n{text}\n\n{m[2]}", old, count=1, flags=re.DOTALL))
