"""The league: every method on the tasks of ``experiments/league`` with one budget of tuning, rounds and seeds.

    python docs/league.py run digits [--jobs 2]              # tune, test, keep the figures, one method after another
    python docs/league.py run digits --methods floral ifca   # of these methods alone
    python docs/league.py add my_module:Mine digits mnist    # a method of your own in the same way, and its row among the others
    python docs/league.py write                              # docs/league.md from the figures that are kept

``run`` leaves in ``docs/results/league`` the files ``TASK.csv`` (one row for each test run), ``TASK-tuning.csv`` (every setting
that was tried) and ``TASK.json`` (title, commit, machine and versions for each method). A method is entered as soon as its runs
are finished, and one that is entered is not run again; so a task can be run in parts. ``add`` writes nothing there.
"""

from __future__ import annotations

import argparse
import collections
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from evidence import begin, find_test_runs
from scipy import stats
from tables.experiments import paste, table_row

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.reading.merging import format_toml
from fedlowrank.results.client_numbers import ACCURACY
from fedlowrank.results.records import RunRecord

ROOT = Path(__file__).resolve().parents[1]
TASKS = ROOT / "experiments" / "league"
FIGURES = ROOT / "docs" / "results" / "league"
RUNS = ROOT / "runs"
PAGE = ROOT / "docs" / "league.md"
ORDER = ("digits", "mnist", "cifar10", "femnist", "shakespeare", "agnews")
DRAWS = 4000
"""Draws of seeds with replacement, for the intervals of ranks."""


def tune(file: Path, out: Path, jobs: int) -> None:
    """Choose settings and test them with the command that everybody has."""
    command = [
        sys.executable,
        "-m",
        "fedlowrank.cli.main",
        "tune",
        str(file),
        "--jobs",
        str(jobs),
        "-o",
        str(out),
    ]
    paths = [str(Path.cwd()), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    subprocess.run(command, check=True, cwd=ROOT, env=environment)


def read_runs(out: Path) -> pd.DataFrame:
    """The test runs of a tuned experiment.

    Returns:
        Columns method, seed, diverged; accuracy, the mean over clients of the test accuracy of each method's own (first)
        models in the last round; worst, the mean of the tenth of the clients with the lowest; bytes, both ways, flops of all
        clients and CPU seconds of all rounds. A run that diverged has none of them.
    """
    folders, diverged = find_test_runs(out)
    rows = [measure_run(folder) for folder in folders]
    for method, seed in diverged:
        rows.append({"method": method, "seed": seed, "diverged": True})
    return pd.DataFrame(rows).sort_values(["method", "seed"], ignore_index=True)


def measure_run(folder: Path) -> dict[str, Any]:
    """One row of :func:`read_runs`."""
    record = RunRecord.load(folder)
    measured = record.measurements
    last = measured.over_clients(ACCURACY, measured.series(ACCURACY)[0]).iloc[-1]
    method, _, seed = folder.name.rpartition("-s")
    return {
        "method": method,
        "seed": int(seed),
        "diverged": False,
        "accuracy": last["mean"],
        "worst": last["worst"],
        "bytes": sum(r.bytes_up + r.bytes_down for r in record.rounds),
        "flops": sum(r.flops for r in record.rounds),
        "seconds": sum(sum(r.cpu_seconds.values()) for r in record.rounds),
    }


def run(task: str, jobs: int, only: Sequence[str] = ()) -> None:
    """Run the methods of a task that have no figures yet, one after another, and keep the figures of each.

    Args:
        task: of the league.
        jobs: runs at a time.
        only: methods to run, in this order; empty for all.
    """
    methods = ExperimentConfig.read(TASKS / f"{task}.toml").compared_methods
    if unknown := set(only) - set(methods):
        sys.exit(f"{task} does not compare {', '.join(sorted(unknown))}; it compares {', '.join(methods)}")
    for method in only or methods:
        if method in read_sources(task):
            continue
        out = RUNS / "league" / task / method
        begin(out)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{task}.toml"
            file.write_text(format_toml(select_method(task, method)))
            tune(file, out, jobs)
        enter(task, method, out)


def select_method(task: str, method: str) -> dict[str, Any]:
    """The tables of a task whose only method is this one, with the method's own grid."""
    tables = ExperimentConfig.read(TASKS / f"{task}.toml").to_dict()
    for place in (tables.get("methods", {}), tables["tune"].get("methods", {})):
        for other in place.keys() - {method}:
            del place[other]
    return {**tables, "method": method, "compare": [method]}


def read_sources(task: str) -> dict[str, dict[str, Any]]:
    """Title, commit, machine and versions of each method that has figures."""
    file = FIGURES / f"{task}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def enter(task: str, method: str, out: Path) -> None:
    """Keep the figures of a method whose runs are finished."""
    FIGURES.mkdir(exist_ok=True)
    for name, table in (
        (f"{task}.csv", read_runs(out).to_csv(index=False, float_format="%.6g", lineterminator="\n")),
        (f"{task}-tuning.csv", (out / "tuning.csv").read_text()),
    ):
        append_table(FIGURES / name, table)
    stored = json.loads(next(out.glob("*-s*/run.json")).read_text())
    title = ExperimentConfig.read(TASKS / f"{task}.toml").method_title(method)
    source = json.loads((out / "source.json").read_text()) | {"versions": stored["versions"]}
    sources = read_sources(task) | {method: {"title": title, **source}}
    (FIGURES / f"{task}.json").write_text(json.dumps(sources, indent=1, ensure_ascii=False) + "\n")


def append_table(file: Path, table: str) -> None:
    """Append the rows of a CSV text to a file, as text; a column that only one of them has is empty in the other."""
    tables = [pd.read_csv(io.StringIO(table), dtype=str)]
    if file.exists():
        tables.insert(0, pd.read_csv(file, dtype=str))
    pd.concat(tables).to_csv(file, index=False, lineterminator="\n")


# The table


def rank_methods(rows: pd.DataFrame) -> pd.DataFrame:
    """Ranks by mean accuracy, 1 for the best, with 95 % intervals over draws of seeds.

    A run that diverged counts as accuracy 0. Methods with equal means share the mean of their ranks.

    Args:
        rows: of :func:`read_runs`.

    Returns:
        Columns rank, low and high, by method.
    """
    table = rows.assign(accuracy=rows["accuracy"].fillna(0.0)).pivot_table("accuracy", "method", "seed")
    values, generator = table.to_numpy(), np.random.default_rng(0)
    seeds = generator.integers(values.shape[1], size=(DRAWS, values.shape[1]))
    drawn = np.array([stats.rankdata(-values[:, some].mean(1).round(5)) for some in seeds])
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0, method="inverted_cdf")
    rank = stats.rankdata(-values.mean(1).round(5))
    return pd.DataFrame({"rank": rank, "low": low, "high": high}, index=table.index)


def chosen_settings(tuning: Path) -> dict[str, str]:
    """The setting of each method, with a star where its learning rate is the largest or smallest that the method tried."""
    tried = pd.read_csv(tuning)
    fields = list(tried.columns[tried.columns.get_loc("messages") + 1 :])
    found = {}
    for method, own in tried.groupby("method", sort=False):
        (best,) = own[own["chosen"]][fields].to_dict("records")
        rates = own["optimizer.lr"]
        star = "*" if best["optimizer.lr"] in (rates.min(), rates.max()) else ""
        parts = [f"{best['optimizer.lr']:g}{star}"]
        others = {f: v for f, v in best.items() if f != "optimizer.lr" and pd.notna(v)}
        found[str(method)] = ", ".join([*parts, *(f"{f} = {v:g}" for f, v in others.items())])
    return found


def task_table(rows: pd.DataFrame, settings: dict[str, str], titles: dict[str, str]) -> str:
    """The table of a task as Markdown, the best first."""
    ranks = rank_methods(rows)
    lines = [
        "| rank | 95 % of ranks | method | accuracy, % | worst tenth, % | MB | GFLOP | CPU s | rate, other setting | runs |",
        "| ---: | ---: | :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method, rank in ranks.sort_values(["rank", "low"]).iterrows():
        own = rows[rows["method"] == method]
        kept = own[~own["diverged"]]
        cells = [f"{rank['rank']:g}", f"{rank['low']:g}–{rank['high']:g}", titles[str(method)]]
        if len(kept):
            half = (
                stats.sem(kept["accuracy"]) * stats.t.ppf(0.975, len(kept) - 1) if len(kept) > 1 else math.nan
            )
            cells += [
                f"{100 * kept['accuracy'].mean():.1f} ± {100 * half:.1f}",
                f"{100 * kept['worst'].mean():.1f}",
            ]
            cells += [f"{kept['bytes'].mean() / 1e6:.2f}", f"{kept['flops'].mean() / 1e9:.1f}"]
            cells += [f"{kept['seconds'].mean():.1f}"]
        else:
            cells += ["diverged", "–", "–", "–", "–"]
        lines.append(table_row([*cells, settings.get(str(method), "–"), f"{len(kept)} of {len(own)}"]))
    return "\n".join(lines)


def overall_table(tasks: dict[str, pd.DataFrame], titles: dict[str, str]) -> str:
    """Ranks of all methods that every task has, by their mean."""
    ranks = {task: rank_methods(rows)["rank"] for task, rows in tasks.items()}
    together = pd.DataFrame(ranks).dropna()
    order = together.mean(axis=1).sort_values()
    lines = [table_row(["mean rank", "method", *tasks]), "| ---: | :--- |" + " ---: |" * len(tasks)]
    for method, mean in order.items():
        own = [f"{v:g}" for v in together.loc[method]]
        lines.append(table_row([f"{mean:.1f}", titles[str(method)], *own]))
    return "\n".join(lines)


def write() -> None:
    """Replace the tables of ``docs/league.md``."""
    done = [task for task in ORDER if (FIGURES / f"{task}.csv").exists()]
    tables = {task: pd.read_csv(FIGURES / f"{task}.csv") for task in done}
    sources = {task: read_sources(task) for task in done}
    titles = {k: v["title"] for by_method in sources.values() for k, v in by_method.items()}
    experiments = {task: ExperimentConfig.read(TASKS / f"{task}.toml") for task in ORDER}
    missing = {
        task: [m for m in e.compared_methods if m not in sources.get(task, {})]
        for task, e in experiments.items()
    }
    parts = []
    complete = {task: tables[task] for task in done if not missing[task]}
    if len(complete) > 1:
        overall = overall_table(complete, titles)
        about = (
            f"Of the tasks that all their methods have run: {', '.join(f'`{task}`' for task in complete)}."
        )
        parts += ["## All tasks", about, f'<div class="sortable" markdown>\n\n{overall}\n\n</div>']
    for task in done:
        settings = chosen_settings(FIGURES / f"{task}-tuning.csv")
        parts += [
            f"## {experiments[task].title}",
            f"    python docs/league.py run {task}",
            f'<div class="sortable" markdown>\n\n{task_table(tables[task], settings, titles)}\n\n</div>',
        ]
        if missing[task]:
            parts += [f"Not run yet: {', '.join(experiments[task].method_title(m) for m in missing[task])}."]
        parts += [
            f"*Raw data: `docs/results/league/{task}.csv`. Settings: `experiments/league/{task}.toml`. "
            f"{describe_sources(sources[task])}.*"
        ]
    without = [f"`{task}`" for task in ORDER if task not in done]
    if without:
        parts += ["## Not run yet", f"The settings of {', '.join(without)} are in `experiments/league`."]
    paste(PAGE, "league", "\n\n".join(parts))


def describe_sources(sources: dict[str, dict[str, Any]]) -> str:
    """Commit, machine and version of torch of the figures; with the number of methods if they have several."""
    counts = collections.Counter(
        f"{s['commit']}; {s['machine']}; torch {s['versions']['torch']}" for s in sources.values()
    )
    if len(counts) == 1:
        return f"Commit {next(iter(counts))}"
    return "; ".join(f"{n} methods: commit {text}" for text, n in counts.items())


# Adding a method


def add(method: str, tasks: Sequence[str], overrides: Sequence[str], jobs: int) -> None:
    """Run a method that is not in the league, and print the tables with its row.

    Args:
        method: as ``method`` of an experiment file: ``module:Class``, found from the working directory.
        tasks: of the league; those that have figures.
        overrides: fields of the method, ``rank=4``.
        jobs: runs at a time.
    """
    for task in tasks:
        if not (FIGURES / f"{task}.csv").exists():
            sys.exit(
                f"{task} has no figures; these have: {', '.join(p.stem for p in sorted(FIGURES.glob('*.json')))}"
            )
        out = RUNS / "league-own" / method.replace(":", "-") / task
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{task}.toml"
            file.write_text(format_toml(with_one_method(task, method, overrides)))
            tune(file, out, jobs)
        rows = pd.concat([pd.read_csv(FIGURES / f"{task}.csv"), read_runs(out)], ignore_index=True)
        titles = {k: v["title"] for k, v in read_sources(task).items()} | {"own": f"**{method}**"}
        settings = chosen_settings(FIGURES / f"{task}-tuning.csv") | chosen_settings(out / "tuning.csv")
        print(f"{task}\n\n{task_table(rows, settings, titles)}\n")


def with_one_method(task: str, method: str, fields: Sequence[str]) -> dict[str, Any]:
    """The tables of a task whose only method is this one, with the grid of methods without a parameter of their own."""
    tables = ExperimentConfig.read(TASKS / f"{task}.toml").to_dict()
    tables["tune"].pop("methods", None)
    own = {"method": method, "title": method, **tomllib.loads("\n".join(fields))}
    return {**tables, "name": "league-own", "method": "own", "compare": ["own"], "methods": {"own": own}}


def main() -> None:
    """Run, add or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "add"):
        added = commands.add_parser(name)
        if name == "add":
            added.add_argument("method", help="module:Class, found from the working directory")
            added.add_argument(
                "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the method, as in TOML"
            )
        else:
            added.add_argument("--methods", nargs="+", default=[], metavar="METHOD", help="only these")
        added.add_argument("tasks", nargs="+", choices=ORDER)
        added.add_argument("--jobs", type=int, default=1)
    commands.add_parser("write")
    given = parser.parse_args()
    if given.command == "run":
        for task in given.tasks:
            run(task, given.jobs, given.methods)
    elif given.command == "add":
        add(given.method, given.tasks, given.set, given.jobs)
    if given.command != "add":
        write()


if __name__ == "__main__":
    main()
