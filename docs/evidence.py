"""Run the evidence experiments, keep their raw figures, and write the tables of the result pages from them.

    python docs/evidence.py run teacher-24 --jobs 2    # tune, test, and enter the figures, one method after another
    python docs/evidence.py run teacher-24 --methods fedhl,flora    # of these methods alone
    python docs/evidence.py write                      # all tables again, from the committed figures alone
    python docs/evidence.py repeat teacher-24 fedhl    # one row again, beside its committed figures

``experiments/evidence/NAME.toml``, or a file in a folder there, is an experiment with a section ``[tune]``. ``run`` leaves its
figures in ``docs/results/evidence``: ``NAME.csv``, one row for each run, series and evaluated round; ``NAME-tuning.csv``,
every setting that was tried; ``NAME-clients.csv.gz`` and ``NAME-rounds.csv.gz``, the clients' last results and the rounds'
costs; and ``NAME.json``, title, commit, machine and versions of each method. ``write`` replaces what stands between
``<!-- evidence NAME -->`` and ``<!-- end -->`` of the pages by tables of them. ``docs/results/evidence.toml`` says which page an
experiment belongs to, its natural baseline, and the claims of the papers that it decides. A method that has figures, a line in
``NAME.json``, is not run again, so that an experiment can be run in parts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from running import find_test_runs, keep_figures, run_chosen, run_missing, split_numbers, split_words
from tables.claims import claims_table, comparisons_tables, count_verdicts, papers, verdicts_table
from tables.drawings import draw
from tables.experiments import (
    RECOVERY,
    TRUNCATION,
    has_figures,
    is_loss,
    paste,
    read_figures,
    recovery_table,
    table,
    truncation_table,
)
from tables.horizons import choices_table, horizons_table
from tables.settings import EXPERIMENTS, FIGURES, RESULTS, ROOT, SWEEPS, find_experiment, read_settings
from tables.sweeps import sweeps_table

from fedlowrank import load_rounds, load_runs
from fedlowrank.results.records import RunRecord
from fedlowrank.results.scalars import list_scalars

RUNS = ROOT / "runs" / "evidence"
KEYS = ["method", "seed", "series", "round"]


# Running, and keeping figures


def run(name: str, jobs: int, only: Sequence[str] = ()) -> None:
    """Tune and test the methods of an experiment that have no figures yet, and enter the figures of each."""
    file = find_experiment(name)
    if not file.exists():
        sys.exit(f"{EXPERIMENTS.relative_to(ROOT)} has no {name}.toml")
    run_missing(file, FIGURES / f"{name}.json", RUNS / name, only, jobs, partial(enter, name))
    if name not in read_settings():
        print(f"{name} is not in {RESULTS / 'evidence.toml'}: `write` will show it on no page until it is")


def enter(name: str, method: str, out: Path) -> None:
    """Add the figures of a method's finished runs to those in ``docs/results/evidence``."""
    tests, diverged = find_test_runs(out)
    if not tests:
        sys.exit(f"{method} of {name} has no figures: all its {len(diverged)} test runs diverged")
    runs, rounds = read_run_tables(tests)
    tables = {
        ".csv": summarize_runs(runs[~runs["unseen"]], rounds, is_loss(name)),
        "-truncation.csv": observe_truncation(tests),
        "-recovery.csv": observe_recovery(tests),
        "-tuning.csv": pd.read_csv(out / "tuning.csv", dtype=str, keep_default_na=False),
        "-clients.csv.gz": last_of_clients(runs),
        "-rounds.csv.gz": costs_of_rounds(rounds),
    }
    keep_figures(find_experiment(name), FIGURES, method, out, tables)


def last_of_clients(runs: pd.DataFrame) -> pd.DataFrame:
    """The last results of every client, of :func:`fedlowrank.load_runs` with ``series="all"``."""
    last = runs["round"] == runs.groupby(["method", "seed"])["round"].transform("max")
    return runs.loc[last, ["method", "seed", "series", "client", "split", "n", "accuracy", "loss"]]


def costs_of_rounds(rounds: pd.DataFrame) -> pd.DataFrame:
    """What every round cost, of :func:`fedlowrank.load_rounds`, with times in whole milliseconds."""
    seconds = [column for column in rounds if column.startswith("seconds_")]
    costs = rounds[["method", "seed", "round", "bytes_up", "bytes_down", "flops", *seconds]]
    return costs.round(dict.fromkeys(seconds, 3))


def read_run_tables(folders: Sequence[Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read :func:`fedlowrank.load_runs`, with all series, and :func:`fedlowrank.load_rounds` of finished runs."""
    runs = pd.concat([load_runs(folder, series="all") for folder in folders], ignore_index=True)
    return runs, pd.concat([load_rounds(folder) for folder in folders], ignore_index=True)


def summarize_runs(runs: pd.DataFrame, rounds: pd.DataFrame, lower_is_better: bool) -> pd.DataFrame:
    """Means over clients for each run, series and evaluated round.

    Args:
        runs: of :func:`fedlowrank.load_runs` with ``series="all"``, of clients that can train.
        rounds: of :func:`fedlowrank.load_rounds`, of the same runs.
        lower_is_better: whether the results are losses, see :func:`.tables.experiments.is_loss`.

    Returns:
        Columns method, seed, series, round; headline, whether the series is the first of its method; val and
        test, the means over clients of the accuracy, or of the loss; worst, that of the client with the worst
        test result; and bytes_up, bytes_down and flops of all rounds so far.
    """
    measure = "loss" if lower_is_better else "accuracy"
    if runs[measure].isna().all():
        sys.exit(
            f"the runs have no {measure}: is_loss in docs/tables/experiments.py does not know their data"
        )
    by_split = runs.pivot_table(measure, KEYS, "split", aggfunc="mean")
    tests = runs[runs["split"] == "test"].groupby(KEYS)[measure]
    found = by_split.reindex(columns=["val", "test"]).assign(
        worst=tests.max() if lower_is_better else tests.min()
    )
    first = runs.groupby("method")["series"].first()
    costs = ["bytes_up", "bytes_down", "flops"]
    totals = rounds.sort_values("round").set_index(["method", "seed", "round"])[costs]
    found = found.reset_index()
    found.insert(4, "headline", found["series"].eq(found["method"].map(first)))
    return found.join(totals.groupby(["method", "seed"]).cumsum(), on=["method", "seed", "round"])


def observe_truncation(folders: Sequence[Path]) -> pd.DataFrame:
    """FedHL's truncation errors r̂_i and weights p_i in the last round, one row for each run and client.

    Returns:
        Columns method, seed, client, rank, truncation and weight; empty if no method reports them.
    """
    rows = []
    for folder in folders:
        record = RunRecord.load(folder)
        server_metrics = record.rounds[-1].server_metrics
        method, _, seed = folder.name.rpartition("-s")
        for client, error in server_metrics.get("truncation", {}).items():
            rank, weight = record.clients[int(client)]["rank"], server_metrics["weights"][client]
            rows.append({"method": method, "seed": int(seed), "client": int(client), "rank": rank})
            rows[-1] |= {"truncation": error, "weight": weight}
    return pd.DataFrame(rows)


def observe_recovery(folders: Sequence[Path]) -> pd.DataFrame:
    """Agreement of the clients' largest shares with their true clusters in the last round, one row for each run.

    Returns:
        Columns method, seed and index, the adjusted Rand index; empty if no method has shares.
    """
    rows = []
    for folder in folders:
        record = RunRecord.load(folder)
        found = list_scalars(record.rounds[-1], record.clients, 0).get("routes/recovery")
        if found is not None:
            method, _, seed = folder.name.rpartition("-s")
            rows.append({"method": method, "seed": int(seed), "index": found})
    return pd.DataFrame(rows)


# Repeating


def repeat(name: str, method: str, seeds: Sequence[int]) -> None:
    """Run one row of a table again, at its chosen setting, and print it beside the committed figures.

    Args:
        name: of an experiment whose figures are committed.
        method: of the row.
        seeds: of its test seeds.
    """
    out = run_chosen(find_experiment(name), FIGURES, method, seeds, RUNS / "repeated")
    tests, diverged = find_test_runs(out)
    if tests:
        runs, rounds = read_run_tables(tests)
        again = summarize_runs(runs[~runs["unseen"]], rounds, is_loss(name))
        print(compare_figures(read_figures(name), again).to_string(index=False))
    for _, seed in diverged:
        print(f"{method} of {name}, seed {seed}: diverged, unlike the committed run")


def compare_figures(committed: pd.DataFrame, again: pd.DataFrame) -> pd.DataFrame:
    """Test results of repeated runs beside the committed ones, one row for each run and series.

    Args:
        committed: as :func:`summarize_runs` made them, of all runs.
        again: the same of some runs.

    Returns:
        Columns method, seed, series; committed and again, the results of the last round, six digits; and
        largest, the largest difference of any evaluated round.
    """
    both = committed.merge(again, "right", KEYS, suffixes=("", "_again")).sort_values("round")
    both["largest"] = (both["test"] - both["test_again"].map(lambda value: float(f"{value:.6g}"))).abs()
    groups = both.groupby(KEYS[:3], sort=False)
    found = groups[["test", "test_again"]].last().rename(columns={"test": "committed", "test_again": "again"})
    return found.join(groups["largest"].max()).reset_index()


def write() -> None:
    """Replace the tables of all pages, and draw the figures."""
    for name, found in read_settings().items():
        if has_figures(name):
            text = table(name, found["baseline"], found.get("target"))
            if "truncation" in found:
                text += f"\n\n{TRUNCATION}\n\n{truncation_table(name, found['truncation'])}"
            if (FIGURES / f"{name}-recovery.csv").exists():
                text += f"\n\n{RECOVERY}\n\n{recovery_table(name)}"
            paste(RESULTS / found["page"], name, text)
    for page, text in comparisons_tables().values():
        paste(RESULTS / page, "claims", text)
    for page in ("fedhl.md", "fedhl-horizons.md"):
        paste(RESULTS / page, "horizons", horizons_table())
    paste(RESULTS / "fedhl-horizons.md", "choices", choices_table())
    for swept, mark in zip(SWEEPS, ("classes", "shares"), strict=True):
        paste(RESULTS / "pfedlora.md", mark, sweeps_table(swept))
    paste(RESULTS / "index.md", "count", count_verdicts())
    paste(RESULTS / "index.md", "verdicts", verdicts_table())
    for paper in papers():
        paste(RESULTS / "index.md", f"claims {paper}", claims_table(paper))
    draw()


def main() -> None:
    """Run, write or repeat."""
    parser = argparse.ArgumentParser(
        description="Run evidence experiments and write the result pages' tables."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    added = commands.add_parser("run")
    added.add_argument("names", nargs="+")
    added.add_argument("--methods", type=split_words, default=[], help="only these, separated by commas")
    added.add_argument("--jobs", type=int, default=1)
    commands.add_parser("write")
    again = commands.add_parser("repeat")
    again.add_argument("name")
    again.add_argument("method")
    again.add_argument("--seeds", type=split_numbers, default=[0], help="separated by commas (default: 0)")
    given = parser.parse_args()
    if given.command == "repeat":
        repeat(given.name, given.method, given.seeds)
    for name in getattr(given, "names", ()):
        run(name, given.jobs, given.methods)
    if given.command == "write":
        write()


if __name__ == "__main__":
    main()
