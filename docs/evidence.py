"""Run the evidence experiments, keep their raw figures, and write the tables of the result pages from them.

    python docs/evidence.py run teacher-24 --jobs 2    # tune, test, and enter the figures; goes on where it stopped
    python docs/evidence.py write                      # all tables again, from the committed figures alone

``experiments/evidence/NAME.toml`` is an experiment with a section ``[tune]``. ``run`` leaves three files in
``docs/results/evidence``: ``NAME.csv``, one row for each run, series and evaluated round; ``NAME-tuning.csv``, every setting
that was tried; and ``NAME.json``, commit, machine, versions and titles. ``write`` replaces what stands between
``<!-- evidence NAME -->`` and ``<!-- end -->`` of the pages by tables of them. ``docs/results/evidence.toml`` says which page an
experiment belongs to, its natural baseline, and the claims of the papers that it decides.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedlowrank import load_rounds, load_runs
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.report.formats import format_signed
from fedlowrank.report.significance import Difference, compare_over_seeds

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "experiments" / "evidence"
RESULTS = ROOT / "docs" / "results"
FIGURES = RESULTS / "evidence"
RUNS = ROOT / "runs" / "evidence"
KEYS = ["method", "seed", "series", "round"]


# Running, and keeping figures


def run(name: str, jobs: int) -> None:
    """Tune and test an experiment, and enter its figures."""
    if _git("status", "--porcelain", "--", "src", "experiments"):
        sys.exit(
            "src/ or experiments/ have changes that are not committed: the figures would name a wrong commit"
        )
    out = RUNS / name
    out.mkdir(parents=True, exist_ok=True)
    source = out / "source.json"
    if not source.exists():
        source.write_text(json.dumps(_describe_source(), indent=1))
    command = [sys.executable, "-m", "fedlowrank.cli.main", "tune", f"experiments/evidence/{name}.toml"]
    subprocess.run([*command, "--jobs", str(jobs), "-o", str(out)], check=True, cwd=ROOT)
    enter(name)


def _describe_source() -> dict[str, Any]:
    """Commit, machine and versions."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "machine": f"{model[1] if model else platform.processor()}, {os.cpu_count()} cores, no GPU",
    }


def _git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def enter(name: str) -> None:
    """Write the figures of an experiment's finished runs into ``docs/results/evidence``."""
    FIGURES.mkdir(exist_ok=True)
    tests = _test_folders(RUNS / name)
    runs = pd.concat([load_runs(folder) for folder in tests], ignore_index=True)
    rounds = pd.concat([load_rounds(folder) for folder in tests], ignore_index=True)
    summarize_runs(runs, rounds).to_csv(
        FIGURES / f"{name}.csv", index=False, float_format="%.6g", lineterminator="\n"
    )
    tuning = (RUNS / name / "tuning.csv").read_text()
    (FIGURES / f"{name}-tuning.csv").write_text(tuning)
    stored = json.loads((tests[0] / "run.json").read_text())
    source = json.loads((RUNS / name / "source.json").read_text()) | {"versions": stored["versions"]}
    source["titles"] = {f.name.rpartition("-s")[0]: _title(f) for f in tests}
    (FIGURES / f"{name}.json").write_text(json.dumps(source, indent=1, ensure_ascii=False) + "\n")


def _test_folders(out: Path) -> list[Path]:
    """Folders of the runs with test seeds, all of which must have come to their end."""
    found = sorted(path.parent for path in out.glob("*-s*/run.json") if ".old-" not in str(path))
    states = {folder: json.loads((folder / "status.json").read_text())["state"] for folder in found}
    if missing := [f"{folder.name} ({state})" for folder, state in states.items() if state != "finished"]:
        sys.exit(f"not all runs in {out} came to their end: {', '.join(missing)}")
    if not found:
        sys.exit(f"there are no runs in {out}")
    return found


def _title(folder: Path) -> str:
    title: str = json.loads((folder / "run.json").read_text())["method"]["title"]
    return title


def summarize_runs(runs: pd.DataFrame, rounds: pd.DataFrame) -> pd.DataFrame:
    """Means over clients for each run, series and evaluated round.

    Args:
        runs: of :func:`fedlowrank.load_runs`.
        rounds: of :func:`fedlowrank.load_rounds`, of the same runs.

    Returns:
        Columns method, seed, series, round; headline, whether the series is the first of its method; val and
        test, the means over clients of the accuracy, or of the loss where there are no classes; worst, that of
        the client with the worst test result; and bytes_up and bytes_down of all rounds so far.
    """
    is_loss = runs["accuracy"].isna().all()
    measure = "loss" if is_loss else "accuracy"
    by_split = runs.pivot_table(measure, KEYS, "split", aggfunc="mean")
    tests = runs[runs["split"] == "test"].groupby(KEYS)[measure]
    found = by_split.reindex(columns=["val", "test"]).assign(worst=tests.max() if is_loss else tests.min())
    first = runs.groupby("method")["series"].first()
    totals = rounds.sort_values("round").set_index(["method", "seed", "round"])[["bytes_up", "bytes_down"]]
    found = found.reset_index()
    found.insert(4, "headline", found["series"].eq(found["method"].map(first)))
    return found.join(totals.groupby(["method", "seed"]).cumsum(), on=["method", "seed", "round"])


# Tables


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


def difference(results: pd.DataFrame, method: str, against: str, column: str = "test") -> Difference:
    """The paired difference of two methods over the seeds that both have."""
    return compare_over_seeds(
        (results.loc[method][column] - results.loc[against][column]).dropna().to_numpy()
    )


def table(name: str, baseline: str, target: str | None = None) -> str:
    """The results of an experiment as Markdown.

    Args:
        name: of the experiment.
        baseline: with which every method is compared.
        target: a method; bytes are counted until its last result is reached, both ways, seed by seed.
    """
    figures, experiment = read_figures(name), ExperimentConfig.read(EXPERIMENTS / f"{name}.toml")
    source, chosen, tune = json.loads((FIGURES / f"{name}.json").read_text()), _chosen(name), experiment.tune
    assert tune is not None, name
    scale, digits = (1.0, 4) if _is_regression(name) else (100.0, 1)
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
        *([f"MB to {source['titles'][target]}'s result"] if target else []),
    ]
    lines = [_row(heads), "| :--- | :--- |" + " ---: |" * (len(heads) - 2)]
    for method in dict.fromkeys(figures["method"]):
        cells = [source["titles"][method], chosen.get(method, "")]
        for one in series:
            results = last_results(figures, one)
            there = method in results.index.get_level_values("method")
            cells.append(_mean(results.loc[method]["test"] * scale, digits) if there else "")
            compared = there and method != baseline and baseline in results.index.get_level_values("method")
            cells.append(_text(difference(results, method, baseline), scale, digits) if compared else "")
        rows = last_results(figures, None).loc[method]
        cells.append(_mean(rows["worst"] * scale, digits))
        cells.append(format_signed(f"{_rise(figures, method, tune.series) * scale:+.{digits}f}"))
        cells += [f"{rows[column].mean() / 1e6:.2f}" for column in ("bytes_up", "bytes_down")]
        cells += [_bytes_to(figures, method, target)] if target else []
        lines.append(_row(cells))
    seeds = ", ".join(map(str, sorted(set(figures["seed"]))))
    return "\n".join(lines) + (
        f"\n\n{'Loss' if _is_regression(name) else 'Accuracy in %'}; {experiment.run.rounds} rounds; seeds {seeds}, "
        f"settings chosen on {', '.join(map(str, tune.seeds))}. Commit {source['commit']}, {source['machine']}, torch "
        f"{source['versions']['torch']}. [Figures](evidence/{name}.csv), [every setting tried](evidence/{name}-tuning.csv), "
        f"`python docs/evidence.py run {name}`."
    )


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _bytes_to(figures: pd.DataFrame, method: str, target: str) -> str:
    """Bytes both ways until the last result of a target method, in MB; how many seeds reached it if not all."""
    goal = last_results(figures, None).loc[target]["test"]
    own = figures[(figures["method"] == method) & figures["headline"]].sort_values("round")
    reached = own[own["test"] >= own["seed"].map(goal)].groupby("seed").first()
    if len(reached) < len(goal):
        return f"{len(reached)} of {len(goal)} seeds"
    return f"{(reached['bytes_up'] + reached['bytes_down']).mean() / 1e6:.2f}"


def _is_regression(name: str) -> bool:
    return (
        ExperimentConfig.read(EXPERIMENTS / f"{name}.toml")
        .data.to_dict(False)["source"]
        .startswith("synthetic_")
    )


def _chosen(name: str) -> dict[str, str]:
    """The chosen settings by method; an edge of the grid is marked."""
    with (FIGURES / f"{name}-tuning.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    fields = list(rows[0])[list(rows[0]).index("messages") + 1 :]
    found = {}
    for row in rows:
        if row["chosen"] == "True":
            tried = {f: {r[f] for r in rows if r["method"] == row["method"]} for f in fields if row[f]}
            found[row["method"]] = ", ".join(_name_setting(f, row[f], tried[f]) for f in tried)
    return found


def _name_setting(field: str, value: str, tried: set[str]) -> str:
    """A chosen value; marked by ``*`` where it is the smallest or largest of those that were tried."""
    numbers = [float(v) for v in tried] if all(re.fullmatch(r"[-+.e\d]+", v) for v in tried) else []
    edge = "*" if len(numbers) > 1 and float(value) in (min(numbers), max(numbers)) else ""
    return f"{field.rpartition('.')[2]} {value}{edge}"


def _rise(figures: pd.DataFrame, method: str, series: str | None) -> float:
    """Validation at the last round minus three quarters of the way, mean over seeds, of the models that were tuned."""
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
    text = f"{found.mean * scale:+.{digits}f} [{found.low * scale:+.{digits}f}, {found.high * scale:+.{digits}f}]"
    return format_signed(text)


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


def claims_table() -> str:
    """One row for every claim of the papers."""
    settings = tomllib.loads((RESULTS / "evidence.toml").read_text())
    lines = [
        "| paper | claim | their evidence | ours | verdict | where |",
        "| :--- | :--- | :--- | :--- | :--- | :--- |",
    ]
    for claim in settings["claims"]:
        ours, verdict = claim.get("ours", ""), claim.get("verdict", "")
        if "experiment" in claim:
            name = claim["experiment"]
            results = last_results(read_figures(name), claim.get("series"))
            found = difference(results, claim["method"], claim["against"], claim.get("column", "test"))
            titles = json.loads((FIGURES / f"{name}.json").read_text())["titles"]
            scale, digits = (1.0, 4) if _is_regression(name) else (100.0, 1)
            if claim.get("column", "test").startswith("bytes"):
                scale, digits = 1e-6, 2
            ours = f"{titles[claim['method']]} − {titles[claim['against']]}: {_text(found, scale, digits)}. {ours}".strip()
            verdict = f"**{judge(found.low, found.high, claim['expected'])}**. {verdict}".strip()
        link = f"[{claim['page'].removesuffix('.md')}]({claim['page']})"
        lines.append(
            "| " + " | ".join([claim["paper"], claim["claim"], claim["theirs"], ours, verdict, link]) + " |"
        )
    return "\n".join(lines)


def write() -> None:
    """Replace the tables of all pages."""
    settings = tomllib.loads((RESULTS / "evidence.toml").read_text())
    for name, found in settings["experiments"].items():
        if (FIGURES / f"{name}.csv").exists():
            paste(RESULTS / found["page"], name, table(name, found["baseline"], found.get("target")))
    paste(RESULTS / "index.md", "claims", claims_table())


def paste(page: Path, name: str, text: str) -> None:
    """Put a table between its marks on a page."""
    begin, end = f"<!-- evidence {name} -->\n", "<!-- end -->"
    old = page.read_text()
    if begin not in old:
        sys.exit(f"{page}: there is no line {begin.strip()}")
    pattern = f"({re.escape(begin)}).*?({re.escape(end)})"
    page.write_text(re.sub(pattern, lambda m: f"{m[1]}\n{text}\n\n{m[2]}", old, count=1, flags=re.DOTALL))


def main() -> None:
    """Run, enter or write."""
    parser = argparse.ArgumentParser(
        description="Run evidence experiments and write the result pages' tables."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "enter"):
        added = commands.add_parser(name)
        added.add_argument("names", nargs="+")
        added.add_argument("--jobs", type=int, default=1)
    commands.add_parser("write")
    given = parser.parse_args()
    for name in getattr(given, "names", ()):
        run(name, given.jobs) if given.command == "run" else enter(name)
    if given.command == "write":
        write()


if __name__ == "__main__":
    main()
