"""Run folders written by hand, file by file, as an engine would leave them."""

from __future__ import annotations

import gzip
import io
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from fedlowrank.report import render_terminal, write_report
from fedlowrank.report.figures.gallery import draw_all
from fedlowrank.report.figures.style import make_styles
from fedlowrank.report.findings import state_findings
from fedlowrank.report.statistics.accuracy_target import choose_target
from fedlowrank.report.statistics.experiments import read_experiments
from fedlowrank.report.statistics.groups import group_runs
from fedlowrank.report.statistics.run_statistics import RunStatistics
from fedlowrank.results.records import RunRecord
from fedlowrank.storage.run_files import RECORDS_FILE, REPRESENTATIONS, encode_representations, seal_run
from tests.support.client_tables import make_client_table

MakeRun = Callable[..., RunRecord]
Values = Sequence[Sequence[float | None]]


def rounds_of(
    test: Sequence[Sequence[float | None]], val: Sequence[Sequence[float | None]] | None = None
) -> list[dict]:
    """One JSON row a round, evaluated in each, with costs that are easy to add up."""
    rows = []
    for i, values in enumerate(test):
        splits = {"val": list(val[i] if val is not None else values), "test": list(values)}
        trained = i > 0
        rows.append(
            {
                "round": i,
                "participants": list(range(len(values))) if trained else [],
                "lost": {},
                "bytes_down": 1000 * trained,
                "bytes_up": 500 * trained,
                "parameters_down": 250 * trained,
                "parameters_up": 125 * trained,
                "steps": 20 * trained,
                "flops": 3_000_000 * trained,
                "seconds": {"train": 0.5 * trained, "server": 0.25 * trained, "evaluate": 0.125},
                "cpu_seconds": {"train": 1.0 * trained},
                "training_losses": {"local": 1.0 / (i + 1)} if trained else {},
                "accuracy": {"personal": splits},
            }
        )
    return rows


def maker(parent: Path) -> MakeRun:
    """A function that makes run folders: ``make(method, seed, rounds=..., **changes to run.json)``."""
    made = 0

    def make(
        method: str = "pfedlora",
        seed: int = 0,
        *,
        rounds: list[dict] | None = None,
        title: str | None = None,
        clients: list[dict] | None = None,
        status: dict | None = None,
        points: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
        fields: dict | None = None,
        run: dict | None = None,
        **changes: Any,
    ) -> RunRecord:
        nonlocal made
        made += 1
        folder = parent / f"run{made}"
        folder.mkdir()
        rows = rounds if rounds is not None else curve(method, seed)
        count = max(
            (len(v) for r in rows for s in (r["accuracy"] or {}).values() for v in s.values()), default=2
        )
        people = clients if clients is not None else members(count)
        config = {
            "format": 4,
            "name": "digits-demo",
            "title": "Digits over ten clients",
            "paper": "",
            "method": {
                "name": method,
                "title": title if title is not None else method,
                "citation": f"The authors of {method}",
                "fields": fields if fields is not None else {"mu": 0.9},
            },
            "data": {"name": "digits"},
            "partition": {"kind": "pathological", "clients": count, "classes_per_client": 2},
            "split": {"train": 0.8, "val": 0.1, "test": 0.1},
            "model": {"architectures": ["cnn1", "cnn2"]},
            "run": {
                "rounds": len(rows) - 1,
                "participation": 1.0,
                "seed": seed,
                "target": None,
                **(run or {}),
            },
            "reference": None,
            "vary": {},
            "classes": [str(i) for i in range(10)],
            "versions": {"python": "3.12.0", "torch": "2.6.0"},
        }
        config.update(changes)
        done = {"state": "finished", "rounds": len(rows) - 1, "message": ""}
        (folder / "run.json").write_text(json.dumps(config))
        (folder / "clients.json").write_text(json.dumps(people))
        lines = "".join(json.dumps(encode_round(row)) + "\n" for row in rows)
        (folder / RECORDS_FILE).write_bytes(gzip.compress(lines.encode()))
        (folder / "status.json").write_text(json.dumps(status if status is not None else done))
        seal_run(folder)
        if points is not None:
            x, label, client = points
            arrays = {
                "x": x.astype(np.float32),
                "label": label.astype(np.int64),
                "client": client.astype(np.int64),
            }
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
            (folder / REPRESENTATIONS).write_bytes(encode_representations(tensors))
        return RunRecord.load(folder)

    return make


def encode_round(row: dict) -> dict:
    """A row of these tests as a line of the file, where all numbers of clients are columns of one block."""
    kept = {
        k: v
        for k, v in row.items()
        if k not in ("accuracy", "client_losses", "metrics", "routes", "parameters")
    }
    tables = {
        "accuracy": row.get("accuracy") or {},
        "loss": row.get("client_losses") or {},
        **(row.get("metrics") or {}),
    }
    tables["parameters"] = {series: {"": counts} for series, counts in (row.get("parameters") or {}).items()}
    shares = itertools.zip_longest(*(row.get("routes") or []))
    tables["route"] = {str(cluster): {"": of} for cluster, of in enumerate(shares)}
    measured = make_client_table(tables)
    return {**kept, "measured": measured.to_dict() if measured.columns else None}


def members(count: int) -> list[dict]:
    """Rows of ``clients.json``: two classes each, and test examples that differ in number."""
    rows = []
    for i in range(count):
        train = [0] * 10
        train[(2 * i) % 10], train[(2 * i + 1) % 10] = 60, 40 + i
        sizes = {"train": sum(train), "val": 15, "test": 10 + 5 * i}
        rows.append({"id": i, "architecture": f"cnn{i % 2 + 1}", **sizes, "classes": {"train": train}})
    return rows


def curve(method: str, seed: int, count: int = 10, rounds: int = 20) -> list[dict]:
    """A made-up run that learns; the same method and seed give the same one."""
    random = np.random.default_rng([seed, *method.encode()])
    top, speed = 0.7 + 0.25 * random.random(), 3 + 10 * random.random()
    ease = random.normal(0, 0.04, count)
    test = []
    for i in range(rounds + 1):
        x = 0.1 + (top - 0.1) * (1 - np.exp(-i / speed)) + ease + random.normal(0, 0.01, count)
        test.append([float(v) for v in np.clip(x, 0, 1)])
    return rounds_of(test)


def with_losses(
    rows: list[dict], losses: Sequence[Sequence[float | None]], *, regression: bool = False
) -> list[dict]:
    """The rows with a test loss of each client in each round; of a regression without accuracies."""
    for row, values in zip(rows, losses, strict=True):
        names = list(row["accuracy"])
        row["client_losses"] = {name: {"val": list(values), "test": list(values)} for name in names}
        if regression:
            row["accuracy"] = {
                name: {"val": [None] * len(values), "test": [None] * len(values)} for name in names
            }
    return rows


def regression_of(losses: Sequence[Sequence[float | None]]) -> list[dict]:
    """One row a round of a task without classes."""
    return with_losses(rounds_of(losses), losses, regression=True)


def with_routes(rows: list[dict], routes: Sequence[Sequence[Sequence[float]] | None]) -> list[dict]:
    """The rows with each client's shares of the clusters in each round."""
    for row, shares in zip(rows, routes, strict=True):
        row["routes"] = shares
    return rows


def in_clusters(truth: Sequence[int | None], unseen: Sequence[int] = (), classes: bool = True) -> list[dict]:
    """Rows of ``clients.json`` with true clusters, some of the clients never training."""
    rows = members(len(truth))
    for i, (row, cluster) in enumerate(zip(rows, truth, strict=True)):
        row |= {"cluster": cluster, "unseen": i in unseen}
        if not classes:
            row["classes"] = {"train": [], "val": [], "test": []}
    return rows


def one_hot(chosen: Sequence[int], clusters: int, sure: float = 1.0) -> list[list[float]]:
    """Routes that give each client's chosen cluster a share of at least ``sure``, the others the rest in equal parts."""
    rest = (1 - sure) / max(1, clusters - 1)
    return [[sure if c == k else rest for c in range(clusters)] for k in chosen]


def cloud(n: int, clients: int = 4, classes: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Representations in clumps, one a class."""
    random = np.random.default_rng(n)
    label = np.arange(n) % classes
    x = 6 * np.eye(classes, 8)[label] + random.normal(size=(n, 8))
    return x, label, np.arange(n) * clients // n


def rows_of(table):
    """Exact values of a comparison, one dictionary a row, None where there is none."""
    return [
        {k: None if v is None or v != v else v for k, v in row.items()}
        for row in table.frame.to_dict("records")
    ]


def cells(table, block, title):
    """The cells of a column in a block of a comparison."""
    one = table.result_tables[block]
    place = [column.title for column in one.columns].index(title)
    return [row[len(one.fields) + place] for row in one.rows]


def titles_of(table, *blocks):
    """Titles of the columns in these blocks of a comparison, else in all."""
    return [
        column.title for name in blocks or table.result_tables for column in table.result_tables[name].columns
    ]


def main_of(record):
    """Headline results of a run in what it is judged by."""
    run = RunStatistics(record)
    return run.results(run.headline, run.measure)


def target_of(records, *given):
    """The target of the runs of one experiment."""
    return choose_target([[RunStatistics(record)] for record in records], *given)


def findings_of(runs):
    """The sentences on the results of runs."""
    return [str(one) for one in state_findings(read_experiments(runs)[0].families)]


def text_of(table, width=200, all_tables=True):
    """A comparison as a terminal shows it, by default with all its tables."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(render_terminal(table, all_tables))
    return console.file.getvalue()


def page_of(runs, tmp_path, **options):
    """The HTML page of runs."""
    write_report(runs, tmp_path / "r.html", **options)
    return (tmp_path / "r.html").read_text()


def both(runs):
    """Groups of runs with their styles, as figures take them."""
    groups = group_runs(runs)
    return groups, make_styles([group.short_label for group in groups])


def draw_figures(runs):
    """All figures of the runs of one experiment, with their headings."""
    (experiment,) = read_experiments(runs)
    return draw_all(experiment, make_styles([group.short_label for group in experiment.groups]))


def draw(plot, *runs):
    """The picture that a function makes of runs, or None."""
    return plot(*both(runs))


def legend_of(picture):
    """Labels of a picture's legend."""
    return [text.get_text() for text in picture.figure.legends[0].get_texts()]


def two_series(mixed, gkr, sizes=(60, 50), ranks=()):
    """Rows of rounds with two series of given means, sizes and ranks."""
    rows = rounds_of([[value] * 2 for value in mixed])
    for i, row in enumerate(rows):
        row["accuracy"] = {"mixed": {"test": [mixed[i]] * 2}, "gkr": {"test": [gkr[i] - 0.1, gkr[i] + 0.1]}}
        row["parameters"] = {"mixed": [sizes[0] - 10, sizes[0] + 10], "gkr": [sizes[1]] * 2}
        row["ranks"] = dict(ranks[i]) if i < len(ranks) else {}
    return rows
