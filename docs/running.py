"""Running a tuned experiment method by method, and keeping the figures of each, for ``evidence.py`` and ``league.py``.

A method is kept as soon as its runs are finished, and one that is kept is not run again; so an experiment can be run in parts.
Of every method the file ``NAME.json`` says, in a line of its own, which commit, machine and versions its figures come from. This
line is written last: a method without it has no figures, whatever rows an interrupted command has left, and is run again.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from filelock import FileLock
from tables.experiments import read_sources, read_tried
from tables.settings import ROOT

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.config.reading.merging import format_toml
from fedlowrank.config.tuning import Setting, tuned_experiment
from fedlowrank.core.io.atomic_files import write_atomically


def run_missing(
    file: Path, sources: Path, runs: Path, only: Sequence[str], jobs: int, keep: Callable[[str, Path], None]
) -> None:
    """Tune and test the methods of an experiment that have no figures yet, one after another.

    Args:
        file: of the experiment, with a section ``[tune]``.
        sources: the file of :func:`read_sources`, where methods stand that have figures.
        runs: folder with a folder of runs for each method; runs that are there go on where they stopped.
        only: methods to run, in this order; empty for all.
        jobs: runs at a time.
        keep: called with a method and its folder when its runs are finished.
    """
    methods = ExperimentConfig.read(file).compared_methods
    if unknown := set(only) - set(methods):
        sys.exit(
            f"{file.stem} does not compare {', '.join(sorted(unknown))}; it compares {', '.join(methods)}"
        )
    for method in only or methods:
        if method in read_sources(sources):
            print(f"{method} of {file.stem} has figures and is not run again", flush=True)
            continue
        begin(runs / method)
        tune(select_method(file, method), runs / method, jobs)
        keep(method, runs / method)


def select_method(file: Path, method: str) -> dict[str, Any]:
    """The tables of an experiment whose only method is this one, with the method's own grid."""
    tables = ExperimentConfig.read(file).to_dict()
    for place in (tables.get("methods", {}), tables["tune"].get("methods", {})):
        for other in place.keys() - {method}:
            del place[other]
    return {**tables, "method": method, "compare": [method]}


def tune(tables: Mapping[str, Any], out: Path, jobs: int, *options: str) -> None:
    """Choose settings and test them with the command that everybody has."""
    run_command("tune", format_toml(tables), "--jobs", str(jobs), "-o", str(out), *options)


def run_chosen(file: Path, figures: Path, method: str, seeds: Sequence[int], runs: Path) -> Path:
    """Run a method again with the setting that was chosen for it.

    Args:
        file: of the experiment.
        figures: folder with the figures of the experiment, ``NAME.csv`` and ``NAME-tuning.csv``.
        method: with figures.
        seeds: to run, which have figures.
        runs: folder in which a new folder is made.

    Returns:
        The new folder, with the runs and their report. It is not removed.
    """
    name = file.stem
    if not (figures / f"{name}.csv").exists():
        sys.exit(f"{name} has no figures in {figures}")
    tried, kept = read_tried(figures / f"{name}-tuning.csv"), read_sources(figures / f"{name}.json")
    chosen = {row: values for row, is_chosen, values in tried if is_chosen and row in kept}
    if method not in chosen:
        sys.exit(f"{name} has no row {method!r}; it has {', '.join(chosen)}")
    own = pd.read_csv(figures / f"{name}.csv").query("method == @method")["seed"]
    if unknown := set(seeds) - set(own):
        sys.exit(f"{method} of {name} has no figures of seed {', '.join(map(str, sorted(unknown)))}")
    setting = Setting(method, {field: json.loads(value) for field, value in chosen[method].items()})
    text = tuned_experiment(ExperimentConfig.read(file), [setting]).to_toml()
    runs.mkdir(parents=True, exist_ok=True)
    out = Path(tempfile.mkdtemp(prefix=f"{name}-{method}-", dir=runs))
    run_command("compare", text, "-o", str(out), "--seeds", ",".join(map(str, seeds)))
    return out


def run_command(command: str, experiment: str, *options: str) -> None:
    """Run a ``fedlowrank`` command on an experiment given as text, with the working directory on the module search path.

    If the command fails, this program ends with its exit status; the command has said why.
    """
    paths = [str(Path.cwd()), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "experiment.toml"
        file.write_text(experiment)
        words = [sys.executable, "-m", "fedlowrank.cli.main", command, str(file), *options]
        if status := subprocess.run(words, check=False, cwd=ROOT, env=environment).returncode:
            sys.exit(status)


# Options of the commands


def split_words(text: str) -> list[str]:
    """The words of an option, separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def split_numbers(text: str) -> list[int]:
    """The numbers of an option, separated by commas."""
    try:
        return [int(word) for word in split_words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"numbers are separated by commas, such as 0,1; this is {text!r}"
        ) from None


# Where figures come from


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
        "machine": f"{model[1] if model else 'unknown processor'}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{os.cpu_count()} cores, no GPU",
    }


def _git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


# Keeping figures


def find_test_runs(out: Path) -> tuple[list[Path], list[tuple[str, int]]]:
    """Folders of the finished runs with test seeds, and method and seed of each run that diverged."""
    found = sorted(path.parent for path in out.glob("*-s*/run.json") if ".old-" not in path.parent.name)
    states = {folder: json.loads((folder / "status.json").read_text())["state"] for folder in found}
    ended = [folder for folder, state in states.items() if state == "finished"]
    diverged = [folder for folder, state in states.items() if state == "diverged"]
    missing = [folder.name for folder in found if folder not in ended and folder not in diverged]
    if missing or not found:
        sys.exit(f"not all runs in {out} came to their end: {', '.join(missing) or 'there are none'}")
    parts = [folder.name.rpartition("-s") for folder in diverged]
    return ended, [(method, int(seed)) for method, _, seed in parts]


def keep_figures(
    file: Path, figures: Path, method: str, out: Path, tables: Mapping[str, pd.DataFrame]
) -> None:
    """Enter the figures of a method, and then its line in ``NAME.json``.

    Rows of the method that are there, of an interrupted command, are replaced. Several processes may keep methods of one
    experiment at the same time.

    Args:
        file: of the experiment.
        figures: folder of the files, made if it does not exist.
        method: whose runs came to their end.
        out: folder of its runs.
        tables: the method's rows by the end of the file's name, ``-tuning.csv``; without rows, no file is made.
    """
    figures.mkdir(parents=True, exist_ok=True)
    order = ExperimentConfig.read(file).compared_methods
    # beside the runs of all methods, for a lock remains as an empty file
    with FileLock(out.parent / "figures.lock"):
        for ending, rows in tables.items():
            keep_rows(figures / f"{file.stem}{ending}", method, rows, order)
        # last, for a method that stands there has all its figures
        keep_source(figures / f"{file.stem}.json", file, method, out)


def keep_rows(file: Path, method: str, rows: pd.DataFrame, order: Sequence[str]) -> None:
    """Replace the rows of a method in a table of figures; the others stay as they are, as text.

    Args:
        file: CSV, compressed if its name says so; it need not exist.
        method: of the rows.
        rows: with a column method; a column that only one of both tables has is empty in the other.
        order: of methods in the file.
    """
    read: dict[str, Any] = {"dtype": str, "keep_default_na": False}
    tables = []
    if file.exists():
        there = pd.read_csv(file, **read)
        tables.append(there[there["method"] != method])
    if len(rows):
        text = rows.to_csv(float_format="%.6g", index=False)
        tables.append(pd.read_csv(io.StringIO(text), **read))
    if not tables:
        return
    both = pd.concat(tables)
    places = both["method"].map({name: k for k, name in enumerate(order)})
    data = both.iloc[places.argsort(kind="stable")].to_csv(index=False, lineterminator="\n").encode()
    # with an old time of writing, equal figures are an equal file
    write_atomically(file, gzip.compress(data, mtime=0) if file.suffix == ".gz" else data)


def read_versions(folders: Sequence[Path]) -> dict[str, str]:
    """Read the versions and the platform that all these runs name; end with a message if they differ."""
    versions = {folder: json.loads((folder / "run.json").read_text())["versions"] for folder in folders}
    first, found = next(iter(versions.items()))
    for folder, other in versions.items():
        if other != found:
            sys.exit(
                f"{first} ran with {found}, but {folder} with {other}: the figures of a method name one of them. "
                "Remove the runs of one of the two, and run the command again."
            )
    return found


def keep_source(sources: Path, file: Path, method: str, out: Path) -> None:
    """Add title, commit, machine, versions and number of diverged test runs of a method to ``NAME.json``."""
    ended, diverged = find_test_runs(out)
    experiment = ExperimentConfig.read(file)
    folders = [*ended, *(out / f"{name}-s{seed}" for name, seed in diverged)]
    source = json.loads((out / "source.json").read_text()) | {"versions": read_versions(folders)}
    own = {"title": experiment.method_title(method), **source}
    if diverged:
        own["diverged"] = len(diverged)
    kept = read_sources(sources) | {method: own}
    ordered = [m for m in experiment.compared_methods if m in kept]
    lines = [f"{json.dumps(m)}: {json.dumps(kept[m], ensure_ascii=False)}" for m in ordered]
    write_atomically(sources, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
