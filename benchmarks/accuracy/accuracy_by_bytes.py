"""Accuracy against uplink bytes, up to 64 times fewer: FedAvg, FedSLR, pFedLoRA and FedHL on MNIST.

    python benchmarks/accuracy/accuracy_by_bytes.py [--data data/mnist] [--runs bytes.jsonl] [--seeds 3] [--rounds 20]
                               [--table FILE] [--figure FILE]

50 clients share 32,000 training images of MNIST by a Dirichlet distribution with α = 0.5; half of a client's
images are for training and half for the test. The model is an MLP 784-200-10. Every setting is the mildest
whose message is at most 1/16 or 1/64 of the uncompressed message: it is found from the shapes of messages,
before any training. Finished runs stand in the file of ``--runs``, one line each, and are not computed again.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import ScaledTranslation

from fedlowrank import METHODS, SGD, ClientInfo, Compression, Federation, Key, Method, Task, simulate
from fedlowrank.core import tree
from fedlowrank.core.errors import NonFiniteError, TaskError
from fedlowrank.data.datasets.idx import Mnist
from fedlowrank.data.partitioning.partition import Dirichlet
from fedlowrank.models.architectures.mlp import MLP
from fedlowrank.report.figures.chart import legend_entry
from fedlowrank.report.figures.style import (
    Style,
    add_legend,
    drawing,
    final_colors,
    make_styles,
    new_figure,
)
from fedlowrank.results.records import RoundRecord
from fedlowrank.training.tracing import trace_upload
from fedlowrank.trust.compression import parse_stages, stage_bytes
from fedlowrank.trust.protection import protect
from fedlowrank.trust.trust_settings import Trust
from fedlowrank.trust.updates import compute_update

sys.path.append(str(Path(__file__).resolve().parents[1]))  # other folders of benchmarks/
from helpers.seed_statistics import mean_and_half_width

CLIENTS, IMAGES = 50, 32_000
RANKS = (64, 32, 16, 16, 8)
COMMON = {"epochs": 1, "batch_size": 32, "optimizer": SGD(lr=0.1)}
OWN = {"pfedlora": {"width": 100}}
COMPARED = ("fedavg", "fedslr", "pfedlora", "fedhl")
FAMILIES = {"top_k": "top_k:{} + int8", "low_rank": "low_rank:{} + int8"}
TARGETS = (16, 64)
# families that are run without error feedback, too, at the last target
ABLATION = {"fedavg": "top_k", "fedslr": "low_rank", "fedhl": "top_k"}


MOVED = 3.0
"""Points of the page by which the families' points stand apart from their lines."""


class Setting(NamedTuple):
    """How many times fewer bytes are aimed at, by which stages, and whether with error feedback."""

    target: int
    family: str
    uplink: str
    feedback: bool


def make_method(name: str) -> Method[Any, Any, Any, Any]:
    return METHODS[name](**COMMON, **OWN.get(name, {}))


@functools.lru_cache(maxsize=2)
def make_federation(data: str, seed: int) -> Federation:
    """The clients; their ranks are only read by FedHL."""
    train, key = Mnist(data).load().train, Key((seed,))
    chosen = (key / "images").numpy().permutation(len(train.y))[:IMAGES]
    x, y = train.x[chosen], train.y[chosen]
    parts = Dirichlet(CLIENTS, alpha=0.5, min_size=100).assign(y.numpy(), 10, key / "partition")
    return Federation.from_arrays(
        [(x[part], y[part]) for part in map(torch.from_numpy, parts)],
        lambda: MLP(784, (200,), 10), rank=[RANKS[i % len(RANKS)] for i in range(CLIENTS)], classes=10,
        val=0.0, test=0.5, seed=seed,
    )  # fmt: skip


def trace_messages(name: str, source: tuple[str, int], uplink: str) -> list[Any]:
    """Messages of clients, for FedHL one of each rank, of the shapes that training gives; no values."""
    method, task = make_method(name), make_federation(*source).task(1)
    trust = Trust(compression=Compression(uplink))
    method = protect(method, task, trust, None, expected_count=CLIENTS, is_deployed=False)
    server = method.server_init(task)
    return [
        trace_upload(method, task, info, method.download(server, info))[0]
        for info in different_clients(name, task)
    ]


def different_clients(name: str, task: Task) -> list[ClientInfo]:
    """Clients whose messages differ in size."""
    return list(task.clients[: len(RANKS) if name == "fedhl" else 1])


def payload_bytes(message: Any) -> int:
    """Bytes of the numbers of a message alone, a bit for each boolean."""
    return sum(
        -(-t.numel() // 8) if t.dtype == torch.bool else t.numel() * t.element_size()
        for t in tree.tensors(message)
    )


@functools.cache
def message_bytes(name: str, source: tuple[str, int], uplink: str) -> tuple[float, float]:
    """Bytes of a message, and of its header alone, mean over the ranks of clients."""
    messages = trace_messages(name, source, uplink)
    sizes = [tree.encoded_size(m) for m in messages]
    return float(np.mean(sizes)), float(
        np.mean([s - payload_bytes(m) for s, m in zip(sizes, messages, strict=True)])
    )


def find_setting(name: str, source: tuple[str, int], family: str, target: int) -> str | None:
    """The mildest setting of a family with messages of at most 1/target of the bytes; None if there is none.

    A share is a number of ten-thousandths, a rank a whole number.
    """
    full, _ = message_bytes(name, source, "")

    def write(number: int) -> str:
        return FAMILIES[family].format(number / 10_000 if family == "top_k" else number)

    low, high = 0, 10_000 if family == "top_k" else 200
    while high - low > 1:
        middle = (low + high) // 2
        fits = message_bytes(name, source, write(middle))[0] <= full / target
        low, high = (middle, high) if fits else (low, middle)
    return write(low) if low else None


def list_settings(name: str, source: tuple[str, int]) -> Iterator[Setting]:
    """What is run of a method."""
    yield Setting(1, "none", "", True)
    if name == "standalone":
        return
    yield Setting(4, "int8", "int8", True)
    for family in FAMILIES:
        for target in TARGETS:
            uplink = find_setting(name, source, family, target)
            if uplink is not None:
                yield Setting(target, family, uplink, True)
                if family == ABLATION.get(name) and target == TARGETS[-1]:
                    yield Setting(target, family, uplink, False)


def measure(name: str, source: tuple[str, int], rounds: int, setting: Setting) -> dict[str, Any]:
    """One run, as a line of the file."""
    began = time.process_time()
    records: list[RoundRecord] = []
    row = {
        "method": name,
        "seed": source[1],
        "rounds": rounds,
        **setting._asdict(),
        "accuracy": {},
        "error": "",
    }
    try:
        result = simulate(
            make_method(name), make_federation(*source), rounds=rounds, participation=0.2,
            evaluate_every=rounds, representations=0, on_round=records.append,
            compression=Compression(setting.uplink, error_feedback=setting.feedback),
        )  # fmt: skip
        row["accuracy"] = {series: result.mean_accuracy(series=series) for series in records[-1].series()}
    except (NonFiniteError, TaskError) as error:
        row["error"] = str(error)
    return row | {
        "bytes_up": sum(r.bytes_up for r in records),
        "messages": sum(len(r.participants) for r in records),
        "loss": [round(sum(r.training_losses.values()), 4) for r in records],
        "cpu_seconds": round(time.process_time() - began, 2),
    }


def run_all(data: str, runs: Path, seeds: int, rounds: int) -> list[dict[str, Any]]:
    """All runs, those of the file first."""
    done = [json.loads(line) for line in runs.read_text().splitlines()] if runs.exists() else []
    known = {identify(row) for row in done}
    for seed in range(seeds):
        for name in ("standalone", *COMPARED):
            # the shapes of messages are the same for all seeds
            for setting in list_settings(name, (data, 0)):
                if (name, seed, rounds, setting.uplink, setting.feedback) in known:
                    continue
                row = measure(name, (data, seed), rounds, setting)
                with runs.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                done.append(row)
                print(
                    seed,
                    name,
                    setting,
                    f"{headline(row):.4f}",
                    row["bytes_up"],
                    row["cpu_seconds"],
                    flush=True,
                )
    return [row for row in done if row["seed"] < seeds and row["rounds"] == rounds]


def identify(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["method"], row["seed"], row["rounds"], row["uplink"], row["feedback"]


def headline(row: dict[str, Any]) -> float:
    """Accuracy of the models that clients use; NaN if the run diverged."""
    return float(next(iter(row["accuracy"].values()), math.nan))


def group(rows: list[dict[str, Any]]) -> dict[tuple[str, Setting], list[dict[str, Any]]]:
    """Runs that differ in the seed alone, seeds in order."""
    found: dict[tuple[str, Setting], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        setting = Setting(*(row[field] for field in Setting._fields))
        found.setdefault((row["method"], setting), []).append(row)
    return found


def write_table(rows: list[dict[str, Any]]) -> list[str]:
    """Accuracies and bytes, as Markdown."""
    lines = [
        "| method | uplink | error feedback | bytes a message | times fewer | accuracy, % | difference |",
        "| :--- | :--- | :---: | ---: | ---: | ---: | ---: |",
    ]
    groups = group(rows)
    for name in ("standalone", *COMPARED):
        full = groups[name, Setting(1, "none", "", True)]
        for (of, setting), found in groups.items():
            if of != name:
                continue
            size = np.mean([row["bytes_up"] / row["messages"] for row in found])
            before = np.mean([row["bytes_up"] / row["messages"] for row in full])
            points = [100 * headline(row) for row in found]
            gaps = [p - 100 * headline(row) for p, row in zip(points, full, strict=False)]
            feedback = "–" if not setting.uplink else "yes" if setting.feedback else "no"
            accuracy, gap = mean_and_half_width(points), mean_and_half_width(gaps)
            cells = [
                METHODS[name].title, f"`{setting.uplink}`" if setting.uplink else "none",
                feedback, f"{size:,.0f}",
                f"{before / size:.1f}" if size else "–", f"{accuracy[0]:.1f} ± {accuracy[1]:.1f}",
                f"{gap[0]:+.1f} ± {gap[1]:.1f}".replace("-", "−") if setting.uplink else "",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_stages(data: str) -> list[str]:
    """What every stage saves, as Markdown."""
    lines = [
        "| method | uplink | update | after the first stage | after the second | message | header in it |",
        "| :--- | :--- | ---: | ---: | ---: | ---: | ---: |",
    ]
    source = data, 0
    for name in COMPARED:
        federation = make_federation(*source)
        method, task = make_method(name), federation.task(1)
        server, infos = method.server_init(task), different_clients(name, task)
        updates = []
        for info in infos:
            down = method.download(server, info)
            upload, _ = trace_upload(method, task, info, down)
            updates.append(
                compute_update(upload, method.describe_update(down, info, task).reference, compared_only=True)
            )
        for uplink in dict.fromkeys(setting.uplink for setting in list_settings(name, source)):
            each = [stage_bytes(parse_stages(uplink), update, Key((0,))) for update in updates]
            sizes = [f"{np.mean([e[stage] for e in each]):,.0f}" for stage in each[0]]
            sizes += [""] * (3 - len(sizes))
            whole, header = message_bytes(name, source, uplink)
            cells = [
                METHODS[name].title,
                f"`{uplink}`" if uplink else "none",
                *sizes,
                f"{whole:,.0f}",
                f"{header:,.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy over uplink bytes: a solid line a method for top_k, a dashed one for low_rank.

    The two lines of a method share the points without compression and of int8, which are drawn once. Other points are moved by
    a few points of the page to the left or right, so that they do not hide each other; the lines are not.
    """
    titles = [METHODS[name].title for name in COMPARED]
    with drawing(), final_colors():
        matplotlib.rcParams["svg.hashsalt"] = "fedlowrank"
        figure, axes = new_figure(3.3)
        styles, entries, labels = make_styles(titles), [], []
        for name, title in zip(COMPARED, titles, strict=True):
            style = styles[title]
            shared = _points_of(rows, name, ("none", "int8"))
            _draw_points(axes, shared, style, style.color, 0.0)
            for place, family in enumerate(FAMILIES):
                own = _points_of(rows, name, (family,))
                line = (0.0, (2.5, 1.5)) if place else "-"
                fill = "white" if place else style.color
                x, y, _ = zip(*sorted([*own, *shared]), strict=True)
                axes.plot(x, y, color=style.color, linestyle=line, linewidth=1.3)
                _draw_points(axes, own, style, fill, -MOVED if place else MOVED)
                entry = legend_entry(style, line=line)
                entry.set_markerfacecolor(fill)
                entries.append(entry)
                labels.append(f"{title}, {family}")
        axes.set_xscale("log")
        axes.autoscale_view()
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v / 1000:g}"))
        axes.set_xlabel("kB a message from a client to the server")
        axes.set_ylabel("test accuracy, %")
        add_legend(figure, entries, labels)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, facecolor="white", metadata={"Date": None})


def _points_of(
    rows: list[dict[str, Any]], name: str, families: tuple[str, ...]
) -> list[tuple[float, float, float]]:
    """Bytes a message, mean accuracy and half-width of its interval, in percent, for each setting with error feedback."""
    return [
        (
            float(np.mean([row["bytes_up"] / row["messages"] for row in found])),
            *mean_and_half_width([100 * headline(row) for row in found]),
        )
        for (of, setting), found in group(rows).items()
        if of == name and setting.feedback and setting.family in families
    ]


def _draw_points(
    axes: Axes, points: list[tuple[float, float, float]], style: Style, fill: str, moved: float
) -> None:
    """Draw points and their intervals, moved to the right by ``moved`` points of the page."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    x, y, half = zip(*points, strict=True)
    # moved points do not count for the limits of the axes otherwise
    axes.update_datalim([(size, mean + sign * end) for size, mean, end in points for sign in (-1, 1)])
    axes.errorbar(
        x, y, yerr=half, color=style.color, linestyle="", marker=style.marker, markersize=5, markerfacecolor=fill, capsize=2,
        elinewidth=1, transform=axes.transData + ScaledTranslation(moved / 72, 0, figure.dpi_scale_trans),
    )  # fmt: skip


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="data/mnist", help="folder of the IDX files")
    parser.add_argument("--runs", type=Path, default=Path("bytes.jsonl"), help="file of finished runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--table", type=Path, help="file to write the tables to")
    parser.add_argument("--figure", type=Path, help="file to write the figure to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = run_all(args.data, args.runs, args.seeds, args.rounds)
    lines = [*write_table(rows), "", *write_stages(args.data)]
    cpu = sum(row["cpu_seconds"] for row in rows)
    lines += ["", f"{len(rows)} runs, {cpu / 60:.1f} CPU minutes, torch {torch.__version__}"]
    print("\n".join(lines))
    if args.table:
        args.table.write_text("\n".join(lines) + "\n")
    if args.figure:
        draw(rows, args.figure)


if __name__ == "__main__":
    main()
