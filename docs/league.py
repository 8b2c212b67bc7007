"""The league: every method on the tasks of ``experiments/league`` with one budget of tuning, rounds and seeds.

    python docs/league.py run digits [--jobs 2]              # tune, test, keep the figures, one method after another
    python docs/league.py run digits --methods floral,ifca   # of these methods alone
    python docs/league.py add my_module:Mine digits mnist    # a method of your own in the same way, and its row among the others
    python docs/league.py add my_module:Mine digits --set share=0.25 --force    # after a change of its code or fields
    python docs/league.py repeat digits floral --seeds 0,1   # one row again, beside its committed figures
    python docs/league.py write                              # docs/league.md from the figures that are kept

``run`` leaves in ``docs/results/league`` the files ``TASK.csv`` (one row for each test run), ``TASK-tuning.csv`` (every setting
that was tried) and ``TASK.json`` (title, commit, machine and versions for each method). A method is entered as soon as its runs
are finished, and one that is entered is not run again; so a task can be run in parts. ``add`` writes nothing there. The runs of
``repeat`` stay in ``runs/league-repeated``.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from running import find_test_runs, keep_figures, run_chosen, run_missing, split_numbers, split_words, tune
from scipy import stats
from tables.experiments import (
    describe_sources,
    paste,
    read_kept,
    read_sources,
    refuse_repeated,
    table_row,
)
from tables.settings import ROOT

from fedlowrank.config.comparison import find_changes
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.tuning import plan_tuning
from fedlowrank.core.errors import FedlowrankError
from fedlowrank.report.statistics.run_statistics import estimate
from fedlowrank.results.client_numbers import ACCURACY
from fedlowrank.results.records import RunRecord

TASKS = ROOT / "experiments" / "league"
FIGURES = ROOT / "docs" / "results" / "league"
RUNS = ROOT / "runs"
PAGE = ROOT / "docs" / "league.md"
ORDER = ("digits", "mnist", "cifar10", "femnist", "shakespeare", "agnews")
MEASURES = ("accuracy", "worst", "bytes", "flops", "seconds")
"""What :func:`read_runs` measures of a run that did not diverge."""
AT_CHANCE = "cifar10"
"""Task on which many methods do not exceed a constant guess: their ranks are noise, so mean ranks are also shown without it."""


def read_runs(out: Path) -> pd.DataFrame:
    """The test runs of a tuned experiment.

    Returns:
        Columns method, seed, diverged; accuracy, the mean over clients of the test accuracy of each method's own (first)
        models in the last round; worst, the mean of the tenth of the clients with the lowest; bytes, both ways, flops of all
        clients and CPU seconds of all rounds. A run that diverged has no number in them.
    """
    folders, diverged = find_test_runs(out)
    rows = [measure_run(folder) for folder in folders]
    for method, seed in diverged:
        rows.append({"method": method, "seed": seed, "diverged": True})
    columns = ["method", "seed", "diverged", *MEASURES]
    runs = pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(MEASURES, float))
    return runs.sort_values(["method", "seed"], ignore_index=True)


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
    file = TASKS / f"{task}.toml"

    def keep(method: str, out: Path) -> None:
        tried = pd.read_csv(out / "tuning.csv", dtype=str, keep_default_na=False)
        keep_figures(file, FIGURES, method, out, {".csv": read_runs(out), "-tuning.csv": tried})

    run_missing(file, FIGURES / f"{task}.json", RUNS / "league" / task, only, jobs, keep)


def repeat(task: str, method: str, seeds: Sequence[int]) -> pd.DataFrame:
    """Run a row of a task again with the setting that was chosen for it.

    Args:
        task: of the league.
        method: that has figures.
        seeds: of its test seeds.

    Returns:
        Columns method, seed, and what :func:`read_runs` gives of each run, the committed figure beside the one of this machine.
        A run that diverged has True as diverged, and no numbers.
    """
    again = read_runs(run_chosen(TASKS / f"{task}.toml", FIGURES, method, seeds, RUNS / "league-repeated"))
    committed = read_kept(FIGURES, task)
    both = committed.merge(again, "right", ["method", "seed"], suffixes=("", " again"))
    return both[["method", "seed", *(f"{m}{end}" for m in ("diverged", *MEASURES) for end in ("", " again"))]]


# The table


def rank_methods(rows: pd.DataFrame) -> pd.DataFrame:
    """Ranks by mean accuracy, 1 for the best, with 95 % intervals over draws of seeds with replacement.

    Of n seeds there are n^n draws, 3125 of five; all of them count. A run that diverged counts as accuracy 0. Methods with equal
    means share the mean of their ranks.

    Args:
        rows: of :func:`read_runs`.

    Returns:
        Columns rank, low and high, by method.
    """
    table = tabulate_accuracies(rows)
    low, high = np.quantile(draw_ranks(table), [0.025, 0.975], axis=0, method="inverted_cdf")
    return pd.DataFrame({"rank": rank_means(table), "low": low, "high": high}, index=table.index)


def tabulate_accuracies(rows: pd.DataFrame) -> pd.DataFrame:
    """Accuracies by method and seed, 0 for a run that diverged."""
    return rows.assign(accuracy=rows["accuracy"].fillna(0.0)).pivot_table("accuracy", "method", "seed")


def rank_means(table: pd.DataFrame) -> pd.Series:
    """Rank of each method by its mean accuracy over seeds."""
    return pd.Series(stats.rankdata(-table.to_numpy().mean(1).round(5)), index=table.index)


def draw_ranks(table: pd.DataFrame) -> NDArray[np.float64]:
    """Ranks ``[draws, methods]`` in all draws of the seeds with replacement, from accuracies ``[methods, seeds]``."""
    values = table.to_numpy()
    draws = itertools.product(range(values.shape[1]), repeat=values.shape[1])
    return np.array([stats.rankdata(-values[:, some].mean(1).round(5)) for some in draws])


def mean_ranks(tasks: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Mean ranks over tasks, with 95 % intervals over draws of the seeds, which are independent between tasks.

    Args:
        tasks: rows of :func:`read_runs` by task, of the same methods.

    Returns:
        Columns rank, low and high, and the rank in each task, by method, the best first.
    """
    # distribution of the sum of ranks of each method, in half ranks, for ranks may be shared
    sums: dict[str, NDArray[np.float64]] = {}
    tables = {task: tabulate_accuracies(rows) for task, rows in tasks.items()}
    for table in tables.values():
        for method, ranks in zip(table.index, draw_ranks(table).T, strict=True):
            shares = np.bincount((2 * ranks).astype(int)) / len(ranks)
            sums[method] = np.convolve(sums.get(method, np.ones(1)), shares)
    ranks = pd.DataFrame({task: rank_means(table) for task, table in tables.items()})
    ends = {
        m: np.searchsorted(np.cumsum(p) + 1e-12, [0.025, 0.975]) / (2 * len(tasks)) for m, p in sums.items()
    }
    found = pd.DataFrame(ends, index=["low", "high"]).T.assign(rank=ranks.mean(axis=1))
    return found[["rank", "low", "high"]].join(ranks).sort_values("rank")


def chosen_settings(tuning: Path) -> dict[str, str]:
    """The setting of each method, with a star where its learning rate is the largest or smallest that the method tried."""
    tried = pd.read_csv(tuning)
    fields = list(tried.columns[tried.columns.get_loc("messages") + 1 :])
    found = {}
    refuse_repeated(tuning, tried[tried["chosen"]], ("method", "chosen"))
    for method, own in tried.groupby("method", sort=False):
        (best,) = own[own["chosen"]][fields].to_dict("records")
        rates = own["optimizer.lr"]
        star = r"\*" if best["optimizer.lr"] in (rates.min(), rates.max()) else ""
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
        accuracy = estimate(kept["accuracy"])
        if accuracy is not None:
            cells += [
                f"{100 * accuracy.mean:.1f} ± {100 * accuracy.ci:.1f}",
                f"{100 * kept['worst'].mean():.1f}",
            ]
            cells += [f"{kept['bytes'].mean() / 1e6:.2f}", f"{kept['flops'].mean() / 1e9:.1f}"]
            cells += [f"{kept['seconds'].mean():.1f}"]
        else:
            cells += ["diverged", "–", "–", "–", "–"]
        lines.append(table_row([*cells, settings.get(str(method), "–"), f"{len(kept)} of {len(own)}"]))
    return "\n".join(lines)


def overall_table(tasks: Mapping[str, pd.DataFrame], titles: Mapping[str, str]) -> str:
    """Ranks of the methods in each task, by their mean, which is also given without :data:`AT_CHANCE`.

    The tasks have the same methods.
    """
    lines = [
        table_row(["mean rank", "95 % of mean ranks", f"without {AT_CHANCE}", "method", *tasks]),
        "| ---: | ---: | ---: | :--- |" + " ---: |" * len(tasks),
    ]
    others = mean_ranks({task: rows for task, rows in tasks.items() if task != AT_CHANCE})["rank"]
    for method, row in mean_ranks(tasks).iterrows():
        ends = f"{row['low']:.1f}–{row['high']:.1f}"
        own = [f"{row[task]:g}" for task in tasks]
        lines.append(
            table_row([f"{row['rank']:.1f}", ends, f"{others[method]:.1f}", titles[str(method)], *own])
        )
    return "\n".join(lines)


def write() -> None:
    """Replace the tables of ``docs/league.md``."""
    done = [task for task in ORDER if (FIGURES / f"{task}.json").exists()]
    tables = {task: read_kept(FIGURES, task) for task in done}
    sources = {task: read_sources(FIGURES / f"{task}.json") for task in done}
    titles = {k: v["title"] for by_method in sources.values() for k, v in by_method.items()}
    experiments = {task: ExperimentConfig.read(TASKS / f"{task}.toml") for task in ORDER}
    missing = {
        task: [m for m in e.compared_methods if m not in sources.get(task, {})]
        for task, e in experiments.items()
    }
    parts = []
    # agnews has other methods, those for LoRA
    methods = set(experiments[ORDER[0]].compared_methods)
    complete = {
        task: tables[task]
        for task in done
        if not missing[task] and set(experiments[task].compared_methods) == methods
    }
    if len(complete) > 1:
        overall = overall_table(complete, titles)
        about = f"Of the tasks with the same methods, of which none is missing: {', '.join(f'`{task}`' for task in complete)}."
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


# Adding a method


def add(method: str, tasks: Sequence[str], overrides: Sequence[str], jobs: int, force: bool = False) -> None:
    """Run a method that is not in the league, and print the tables with its row.

    Args:
        method: as ``method`` of an experiment file: ``module:Class``, found from the working directory.
        tasks: of the league; those that have figures.
        overrides: fields of the method, ``rank=4``.
        jobs: runs at a time.
        force: whether to move older runs of the method aside and train anew, instead of going on with them.
    """
    for task in tasks:
        if not (FIGURES / f"{task}.json").exists():
            sys.exit(
                f"{task} has no figures; these have: {', '.join(p.stem for p in sorted(FIGURES.glob('*.json')))}"
            )
        out = RUNS / "league-own" / method.replace(":", "-") / task
        tables = with_one_method(task, method, overrides)
        if not force:
            refuse_other_runs(tables, out)
        tune(tables, out, jobs, *(["--force"] if force else []))
        rows = pd.concat([read_kept(FIGURES, task), read_runs(out)], ignore_index=True)
        titles = {k: v["title"] for k, v in read_sources(FIGURES / f"{task}.json").items()} | {
            "own": f"**{method}**"
        }
        settings = chosen_settings(FIGURES / f"{task}-tuning.csv") | chosen_settings(out / "tuning.csv")
        print(f"{task}\n\n{task_table(rows, settings, titles)}\n")


def refuse_other_runs(tables: dict[str, Any], out: Path) -> None:
    """End with a message if the folder holds runs of another configuration, such as of older code of the method."""
    # code is found from the working directory, and paths are those of the repository, as in the command that runs it
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        with contextlib.chdir(ROOT):
            settings = plan_tuning(ExperimentConfig.parse(tables), out)
            changes = {run.folder: find_changes(run) for setting in settings for run in setting.runs}
    except FedlowrankError as error:
        sys.exit(f"error: {error.for_command}")
    finally:
        sys.path[:] = before
    for folder, changed in changes.items():
        if changed:
            sys.exit(
                f"{folder} holds a run of another configuration: {'; '.join(changed)}. Add --force to move the runs in {out} "
                "aside and train anew, or set this back."
            )


def with_one_method(task: str, method: str, fields: Sequence[str]) -> dict[str, Any]:
    """The tables of a task whose only method is this one, with the task's six learning rates."""
    tables = ExperimentConfig.read(TASKS / f"{task}.toml").to_dict()
    tables["tune"].pop("methods", None)
    own = {"method": method, "title": method, **parse_fields(fields)}
    return {**tables, "name": "league-own", "method": "own", "compare": ["own"], "methods": {"own": own}}


def parse_fields(fields: Sequence[str]) -> dict[str, Any]:
    """The fields of a method, each ``FIELD=VALUE`` as in TOML; end with a message that names the option if one is not."""
    # one by one, so that the message names the one; then together, for none may be set twice
    for some in [*([field] for field in fields), fields]:
        try:
            parsed = tomllib.loads("\n".join(some))
        except tomllib.TOMLDecodeError as error:
            sys.exit(
                f"--set {' --set '.join(some)}: {error}. A field is set once and as in TOML: --set share=0.25, and a word in "
                "quotes: --set 'kind=\"cosine\"'"
            )
    return parsed


def main() -> None:
    """Run, add, repeat or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "add"):
        added = commands.add_parser(name)
        if name == "add":
            added.add_argument("method", help="module:Class, found from the working directory")
            added.add_argument(
                "--set",
                action="append",
                default=[],
                metavar="FIELD=VALUE",
                help="a field of the method, as in TOML; may be repeated",
            )
            added.add_argument(
                "--force", action="store_true", help="move its older runs aside instead of going on with them"
            )
        else:
            added.add_argument(
                "--methods", type=split_words, default=[], help="only these, separated by commas"
            )
        added.add_argument("tasks", nargs="+", choices=ORDER)
        added.add_argument("--jobs", type=int, default=1)
    again = commands.add_parser("repeat")
    again.add_argument("task", choices=ORDER)
    again.add_argument("method")
    again.add_argument("--seeds", type=split_numbers, default=[0], help="separated by commas (default: 0)")
    commands.add_parser("write")
    given = parser.parse_args()
    if given.command == "run":
        for task in given.tasks:
            run(task, given.jobs, given.methods)
    elif given.command == "add":
        add(given.method, given.tasks, given.set, given.jobs, given.force)
    elif given.command == "repeat":
        print(repeat(given.task, given.method, given.seeds).T.to_string(header=False))
    if given.command in ("run", "write"):
        write()


if __name__ == "__main__":
    main()
