"""Drawings of the evidence experiments, from the committed figures; see ``evidence.py``."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from evidence_claims import Case, judge_claims
from evidence_tables import (
    FIGURES,
    RESULTS,
    last_results,
    list_experiments,
    list_methods,
    list_seeds,
    read_figures,
    title_of,
    unit_of,
)

from fedlowrank.report.statistics.significance import compare_over_seeds

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

VERDICTS = {"holds": ("tab:blue", "o"), "does not hold": ("tab:red", "s"), "undecided": ("0.35", "D")}
"""Color and marker."""
SERIES = {
    None: ("clients' models", "tab:blue", "o"),
    "server": ("server's model", "tab:orange", "s"),
    "global": ("global model", "tab:orange", "s"),
    "gkr": ("GKR", "tab:green", "^"),
}
"""Name, color and marker of the models that clients use and of further series."""


def draw_downlink(name: str, path: Path) -> None:
    """Accuracy against bytes to the clients: FedSLR as a curve over λ for each series, others as points.

    Args:
        name: of an experiment whose methods ``lam_*`` are FedSLR with a growing λ.
        path: of the SVG.
    """
    figures = read_figures(name)
    titles = json.loads((FIGURES / f"{name}.json").read_text())["titles"]
    axes = _new_axes(6.4, 3.6)
    own = last_results(figures, None)
    methods = list(dict.fromkeys(figures["method"]))
    penalties = sorted(
        (m for m in methods if m.startswith("lam_")), key=lambda m: float(m.removeprefix("lam_"))
    )
    for series, label in ((None, "FedSLR, mixed model"), ("gkr", "FedSLR, global model (GKR)")):
        results = last_results(figures, series)
        found = [compare_over_seeds(100 * results.loc[m]["test"].to_numpy()) for m in penalties]
        x = [own.loc[m]["bytes_down"].mean() / 1e6 for m in penalties]
        half = [(one.high - one.low) / 2 for one in found]
        axes.errorbar(x, [one.mean for one in found], half, marker="o", capsize=2, label=label)
        if series is None:
            for place, one, method in zip(x, found, penalties, strict=True):
                text = f"λ = {method.removeprefix('lam_')}"
                axes.annotate(
                    text,
                    (place, one.mean),
                    (0, 7 + 11 * (method == penalties[0])),
                    textcoords="offset points",
                    fontsize=8,
                    ha="right",
                )
    for method in (m for m in methods if m not in penalties):
        rows = own.loc[method]
        one = compare_over_seeds(100 * rows["test"].to_numpy())
        place = rows["bytes_down"].mean() / 1e6
        axes.errorbar(
            [place],
            [one.mean],
            [(one.high - one.low) / 2],
            marker="s",
            capsize=2,
            ls="",
            label=titles[method],
        )
    axes.margins(y=0.15)
    axes.set(xlabel="sent to the clients / MB", ylabel="test accuracy / %")
    axes.legend(fontsize=8)
    _save(path)


def draw_page(page: str, path: Path) -> None:
    """Test accuracy of every method with its interval, a panel for each experiment of a page.

    Args:
        page: name of a page, ``fedhl.md``.
        path: of the SVG.
    """
    names = [name for name in list_experiments(page) if unit_of(name)[0] == 100.0]
    titles = {name: json.loads((FIGURES / f"{name}.json").read_text())["titles"] for name in names}
    rows = [names[i : i + 2] for i in range(0, len(names), 2)]
    heights = [0.9 + 0.2 * max(len(titles[name]) for name in row) for row in rows]
    _set_style()
    figure = plt.figure(figsize=(9.6, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(rows), 2, height_ratios=heights)
    for place, name in enumerate(names):
        _draw_experiment(figure.add_subplot(grid[divmod(place, 2)]), name, titles[name])
    drawn = {bar.get_label(): bar for axes in figure.axes for bar in axes.containers}
    if len(drawn) > 1:
        figure.legend(drawn.values(), drawn, loc="outside upper center", ncols=len(drawn), fontsize=8)
    _save(path)


def _draw_experiment(axes: Axes, name: str, titles: dict[str, str]) -> None:
    """Means over seeds and their 95 % intervals: clients' own models, and further series of a method."""
    figures, methods = read_figures(name), list_methods(name)
    for place, series in enumerate([None, *figures.loc[~figures["headline"], "series"].unique()]):
        results = last_results(figures, series)
        shown = [m for m in methods if m in results.index.get_level_values("method")]
        found = [compare_over_seeds(100 * results.loc[m]["test"].to_numpy()) for m in shown]
        heights = [methods.index(m) + 0.22 * place for m in shown]
        halves = [(one.high - one.low) / 2 for one in found]
        means, (label, color, marker) = [one.mean for one in found], SERIES[series]
        style = {"ls": "", "ms": 4, "capsize": 2}
        axes.errorbar(means, heights, None, halves, color=color, marker=marker, label=label, **style)
    kept, run = last_results(figures, None).groupby("method")["test"].count(), len(list_seeds(name))
    names = [titles[m] + (f", n = {kept[m]}" if kept[m] < run else "") for m in methods]
    axes.set_yticks(range(len(methods)), names, fontsize=7)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title("\n".join(textwrap.wrap(f"{name}: {title_of(name)}", 50)), fontsize=8)
    axes.set_xlabel("test accuracy / %", fontsize=7)


def draw_claims(paper: str, path: Path) -> None:
    """The difference of every claim of a paper about an accuracy with its interval, colored by verdict.

    Args:
        paper: the paper's method.
        path: of the SVG.
    """
    rows = _claim_rows(paper)
    axes = _new_axes(8.4, 1.2 + 0.17 * len(rows))
    for verdict, (color, marker) in VERDICTS.items():
        judged = [(y, case) for y, (_, case) in enumerate(rows) if case and case.verdict == verdict]
        for is_weak in (False, True):
            shown = [(y, case) for y, case in judged if case.is_weak == is_weak]
            means = [100 * case.found.mean for _, case in shown]
            halves = [50 * (case.found.high - case.found.low) for _, case in shown]
            style = {"ls": "", "marker": marker, "ms": 4, "capsize": 2, "color": color}
            label = None if is_weak else verdict
            filled = "white" if is_weak else color
            axes.errorbar(means, [y for y, _ in shown], None, halves, label=label, mfc=filled, **style)
    axes.axvline(0, color="0.6", lw=0.8, zorder=0)
    axes.set_yticks([y for y, (_, case) in enumerate(rows) if case], [t for t, c in rows if c], fontsize=7)
    for y, (text, case) in enumerate(rows):
        if not case:
            place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 7}
            axes.text(0.01, y, text, fontweight="bold", **place)
            if y and rows[y - 1][1]:
                axes.axhline(y - 0.5, color="0.85", lw=0.6, zorder=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xscale("symlog", linthresh=2)
    found = [case.found for _, case in rows if case]
    # a difference without an interval has NaN for its ends
    furthest = 140 * float(np.nanmax(np.abs([(one.mean, one.low, one.high) for one in found])))
    ticks = [sign * size for sign in (-1, 1) for size in (1, 2, 5, 10, 20, 50) if size < furthest]
    axes.set_xticks([0, *ticks], [f"{t}".replace("-", "−") for t in [0, *ticks]], fontsize=7)
    axes.grid(axis="x", color="0.93", lw=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(-furthest, furthest)
    axes.set_xlabel(
        "points of accuracy, first minus second (linear from −2 to 2, logarithmic beyond)", fontsize=8
    )
    legend = "the claim (hollow: its interval does not stand once corrected for the number of all)"
    axes.legend(
        title=legend, title_fontsize=8, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.3, 1.0)
    )
    _save(path)


def _claim_rows(paper: str) -> list[tuple[str, Case | None]]:
    """Lines of a figure from above: a claim, over two lines if it is long, and then its comparisons."""
    rows: list[tuple[str, Case | None]] = []
    for claim, cases in judge_claims():
        shown = [case for case in cases if case.scale == 100.0]
        if claim["paper"] == paper and shown:
            sign = " Claimed: below 0." if claim["expected"] == "-" else ""
            rows += [(line, None) for line in textwrap.wrap(claim["claim"] + sign, 68)]
            label = f"{claim['difference']}: ".replace("minus: ", "minus ")
            rows += [(label + case.label, case) for case in shown]
    return rows


def _new_axes(width: float, height: float) -> Axes:
    """Axes of a new figure, width and height in inches."""
    _set_style()
    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def _set_style() -> None:
    """The same figure becomes the same file."""
    plt.rcParams.update({"svg.hashsalt": "fedlowrank", "svg.fonttype": "path"})


def _save(path: Path) -> None:
    """Write the current figure without its date, so that the same figure is the same file."""
    plt.savefig(path, metadata={"Date": None})
    plt.close()


def draw() -> None:
    """Draw all figures whose experiments have been entered."""
    for paper in ("pFedLoRA", "FedSLR", "FedHL", "FLoRAL"):
        page = paper.lower()
        draw_claims(paper, RESULTS / "figures" / f"{page}-claims.svg")
        draw_page(f"{page}.md", RESULTS / "figures" / f"{page}-accuracy.svg")
    if (FIGURES / "fedslr-mnist.csv").exists():
        draw_downlink("fedslr-mnist", RESULTS / "figures" / "fedslr-mnist-downlink.svg")
