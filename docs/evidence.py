"""Run the evidence experiments, keep their raw figures, and write the tables of the result pages from them.

    python docs/evidence.py run teacher-24 --jobs 2    # tune, test, and enter the figures; goes on where it stopped
    python docs/evidence.py write                      # all tables again, from the committed figures alone
    python docs/evidence.py repeat teacher-24 fedhl    # one row again, beside its committed figures

``experiments/evidence/NAME.toml`` is an experiment with a section ``[tune]``. ``run`` leaves its figures in
``docs/results/evidence``: ``NAME.csv``, one row for each run, series and evaluated round; ``NAME-tuning.csv``, every setting
that was tried; ``NAME-clients.csv.gz`` and ``NAME-rounds.csv.gz``, the clients' last results and the rounds' costs; and
``NAME.json``, commit, machine, versions and titles. ``write`` replaces what stands between
``<!-- evidence NAME -->`` and ``<!-- end -->`` of the pages by tables of them. ``docs/results/evidence.toml`` says which page an
experiment belongs to, its natural baseline, and the claims of the papers that it decides.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tables.claims import claims_table, comparisons_tables, count_verdicts, papers, verdicts_table
from tables.drawings import draw
from tables.experiments import (
    EXPERIMENTS,
    FIGURES,
    RECOVERY,
    RESULTS,
    ROOT,
    TRUNCATION,
    paste,
    read_figures,
    read_settings,
    read_tried,
    recovery_table,
    table,
    truncation_table,
)

from fedlowrank import load_rounds, load_runs
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.tuning import Setting, tuned_experiment
from fedlowrank.results.records import RunRecord
from fedlowrank.results.scalars import list_scalars

RUNS = ROOT / "runs" / "evidence"
KEYS = ["method", "seed", "series", "round"]


# Running, and keeping figures


def run(name: str, jobs: int) -> None:
    """Tune and test an experiment, and enter its figures."""
    out = RUNS / name
    begin(out)
    command = [sys.executable, "-m", "fedlowrank.cli.main", "tune", f"experiments/evidence/{name}.toml"]
    subprocess.run([*command, "--jobs", str(jobs), "-o", str(out)], check=True, cwd=ROOT)
    enter(name)


def begin(out: Path) -> None:
    """Note commit and machine in a folder of runs, new or begun; refuse code that no commit has, or another one."""
    if _git("status", "--porcelain", "--", "src", "experiments"):
        sys.exit(
            "src/ or experiments/ have changes that are not committed: the figures would name a wrong commit"
        )
    out.mkdir(parents=True, exist_ok=True)
    source = out / "source.json"
    described = describe_source()
    if source.exists():
        begun = json.loads(source.read_text())
        check_commit(begun["commit"], out)
        # the same code; the experiment's file may have grown
        described = begun | {"commit": described["commit"]}
    source.write_text(json.dumps(described, indent=1))


def check_commit(begun: str, out: Path) -> None:
    """Refuse to go on with other code than the runs that are there."""
    changed = _git("diff", "--name-only", begun, "HEAD", "--", "src", ":(glob)experiments/**/*.py")
    if changed:
        sys.exit(
            f"{out} was begun at commit {begun}; since then there are changes in {', '.join(changed.split())}. Check "
            "out that commit to go on, or remove the folder to begin anew."
        )


def describe_source() -> dict[str, Any]:
    """Commit and machine, with its vector instructions, by which results round."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "machine": f"{model[1] if model else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{os.cpu_count()} cores, no GPU",
    }


def _git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def enter(name: str) -> None:
    """Write the figures of an experiment's finished runs into ``docs/results/evidence``."""
    FIGURES.mkdir(exist_ok=True)
    tests, failed = find_test_runs(RUNS / name)
    diverged = [method for method, _ in failed]
    runs = pd.concat([load_runs(folder, series="all") for folder in tests], ignore_index=True)
    rounds = pd.concat([load_rounds(folder) for folder in tests], ignore_index=True)
    results = summarize_runs(runs[~runs["unseen"]], rounds)
    keep_details(name, runs, rounds)
    tables = {"": results, "-truncation": observe_truncation(tests), "-recovery": observe_recovery(tests)}
    for ending, figures in tables.items():
        if len(figures):
            path = FIGURES / f"{name}{ending}.csv"
            figures.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")
    tuning = (RUNS / name / "tuning.csv").read_text()
    (FIGURES / f"{name}-tuning.csv").write_text(tuning)
    stored = json.loads((tests[0] / "run.json").read_text())
    source = json.loads((RUNS / name / "source.json").read_text()) | {"versions": stored["versions"]}
    source["diverged"] = {method: diverged.count(method) for method in diverged}
    made = ExperimentConfig.read(EXPERIMENTS / f"{name}.toml")
    source["titles"] = {method: made.method_title(method) for method in sorted(set(results["method"]))}
    (FIGURES / f"{name}.json").write_text(json.dumps(source, indent=1, ensure_ascii=False) + "\n")
    if name not in read_settings():
        print(f"{name} is not in {RESULTS / 'evidence.toml'}: `write` will show it on no page until it is")


def keep_details(name: str, runs: pd.DataFrame, rounds: pd.DataFrame) -> None:
    """Write the last results of every client, and what every round cost, as compressed CSV.

    Args:
        name: of the experiment; the files are ``NAME-clients.csv.gz`` and ``NAME-rounds.csv.gz``.
        runs: of :func:`fedlowrank.load_runs` with ``series="all"``.
        rounds: of :func:`fedlowrank.load_rounds`, of the same runs.
    """
    last = runs["round"] == runs.groupby(["method", "seed"])["round"].transform("max")
    clients = runs.loc[last, ["method", "seed", "series", "client", "split", "n", "accuracy", "loss"]]
    seconds = [column for column in rounds if column.startswith("seconds_")]
    costs = rounds[["method", "seed", "round", "bytes_up", "bytes_down", "flops", *seconds]]
    for ending, figures in (("clients", clients), ("rounds", costs)):
        # without the time of writing, equal figures are an equal file
        figures.to_csv(
            FIGURES / f"{name}-{ending}.csv.gz",
            index=False,
            float_format="%.6g",
            lineterminator="\n",
            compression={"method": "gzip", "mtime": 0},
        )


def _read_runs(folders: Sequence[Path]) -> pd.DataFrame:
    """The figures of finished runs."""
    runs = pd.concat([load_runs(folder, series="all") for folder in folders], ignore_index=True)
    rounds = pd.concat([load_rounds(folder) for folder in folders], ignore_index=True)
    return summarize_runs(runs[~runs["unseen"]], rounds)


def find_test_runs(out: Path) -> tuple[list[Path], list[tuple[str, int]]]:
    """Folders of the finished runs with test seeds, and method and seed of each run that diverged."""
    found = sorted(path.parent for path in out.glob("*-s*/run.json") if ".old-" not in str(path))
    states = {folder: json.loads((folder / "status.json").read_text()) for folder in found}
    ended = [folder for folder, status in states.items() if status["state"] == "finished"]
    missing = [f.name for f, status in states.items() if f not in ended and not _is_diverged(status)]
    if missing or not ended:
        sys.exit(f"not all runs in {out} came to their end: {', '.join(missing) or 'there are none'}")
    parts = [folder.name.rpartition("-s") for folder in found if folder not in ended]
    return ended, [(method, int(seed)) for method, _, seed in parts]


def _is_diverged(status: dict[str, Any]) -> bool:
    return bool(status["state"] == "diverged")


def summarize_runs(runs: pd.DataFrame, rounds: pd.DataFrame) -> pd.DataFrame:
    """Means over clients for each run, series and evaluated round.

    Args:
        runs: of :func:`fedlowrank.load_runs` with ``series="all"``, of clients that can train.
        rounds: of :func:`fedlowrank.load_rounds`, of the same runs.

    Returns:
        Columns method, seed, series, round; headline, whether the series is the first of its method; val and
        test, the means over clients of the accuracy, or of the loss where there are no classes; worst, that of
        the client with the worst test result; and bytes_up, bytes_down and flops of all rounds so far.
    """
    is_loss = runs["accuracy"].isna().all()
    measure = "loss" if is_loss else "accuracy"
    by_split = runs.pivot_table(measure, KEYS, "split", aggfunc="mean")
    tests = runs[runs["split"] == "test"].groupby(KEYS)[measure]
    found = by_split.reindex(columns=["val", "test"]).assign(worst=tests.max() if is_loss else tests.min())
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
    if not (FIGURES / f"{name}.csv").exists():
        sys.exit(f"{FIGURES.relative_to(ROOT)} has no figures of {name!r}")
    committed = read_figures(name)
    chosen = {row: values for row, is_chosen, values in read_tried(name) if is_chosen}
    if method not in chosen:
        sys.exit(f"{name} has no row {method!r}; it has {', '.join(chosen)}")
    if unknown := set(seeds) - set(committed.query("method == @method")["seed"]):
        sys.exit(f"{method} of {name} has no figures of seed {', '.join(map(str, sorted(unknown)))}")
    setting = Setting(method, {field: json.loads(value) for field, value in chosen[method].items()})
    tuned = tuned_experiment(ExperimentConfig.read(EXPERIMENTS / f"{name}.toml"), [setting])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tuned.toml"
        file.write_text(tuned.to_toml())
        command = [sys.executable, "-m", "fedlowrank.cli.main", "compare", str(file), "-o", folder]
        subprocess.run([*command, "--seeds", ",".join(map(str, seeds))], check=True, cwd=ROOT)
        again = _read_runs([path.parent for path in sorted(Path(folder).glob("*-s*/run.json"))])
    print(compare_figures(committed, again).to_string(index=False))


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
        if (FIGURES / f"{name}.csv").exists():
            text = table(name, found["baseline"], found.get("target"))
            if "truncation" in found:
                text += f"\n\n{TRUNCATION}\n\n{truncation_table(name, found['truncation'])}"
            if (FIGURES / f"{name}-recovery.csv").exists():
                text += f"\n\n{RECOVERY}\n\n{recovery_table(name)}"
            paste(RESULTS / found["page"], name, text)
    for page, text in comparisons_tables().values():
        paste(RESULTS / page, "claims", text)
    paste(RESULTS / "index.md", "count", count_verdicts())
    paste(RESULTS / "index.md", "verdicts", verdicts_table())
    for paper in papers():
        paste(RESULTS / "index.md", f"claims {paper}", claims_table(paper))
    draw()


def main() -> None:
    """Run, enter, write or repeat."""
    parser = argparse.ArgumentParser(
        description="Run evidence experiments and write the result pages' tables."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "enter"):
        added = commands.add_parser(name)
        added.add_argument("names", nargs="+")
        added.add_argument("--jobs", type=int, default=1)
    commands.add_parser("write")
    again = commands.add_parser("repeat")
    again.add_argument("name")
    again.add_argument("method")
    again.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = parser.parse_args()
    if given.command == "repeat":
        repeat(given.name, given.method, given.seeds)
    for name in getattr(given, "names", ()):
        run(name, given.jobs) if given.command == "run" else enter(name)
    if given.command == "write":
        write()


if __name__ == "__main__":
    main()
