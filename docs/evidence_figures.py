"""Drawings of the evidence experiments, from the committed figures; see ``evidence.py``."""

from __future__ import annotations

import itertools
import json
import textwrap
from pathlib import Path

import matplotlib
from evidence_tables import (
    FIGURES,
    RESULTS,
    judge_claim,
    last_results,
    list_experiments,
    list_methods,
    read_claims,
    read_figures,
    title_of,
    unit_of,
)

from fedlowrank.report.significance import compare_over_seeds

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

VERDICTS = {"holds": ("tab:blue", "o"), "does not hold": ("tab:red", "s"), "undecided": ("0.35", "D")}
"""Color and marker."""
SERIES = {
    None: ("tab:blue", "o"),
    "server": ("tab:orange", "s"),
    "global": ("tab:orange", "s"),
    "gkr": ("tab:green", "^"),
}
"""Color and marker of the clients' own models and of further series."""


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
        means, (color, marker) = [one.mean for one in found], SERIES[series]
        label, style = series or "test", {"ls": "", "ms": 4, "capsize": 2}
        axes.errorbar(means, heights, None, halves, color=color, marker=marker, label=label, **style)
    axes.set_yticks(range(len(methods)), [titles[m] for m in methods], fontsize=7)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=7)
    axes.set_title("\n".join(textwrap.wrap(title_of(name), 62)), fontsize=8)
    axes.set_xlabel("test accuracy / %", fontsize=7)
    if len(axes.containers) > 1:
        axes.legend(fontsize=7)


def draw_claims(paper: str, path: Path) -> None:
    """The difference of every claim of a paper about an accuracy with its interval, colored by verdict.

    Args:
        paper: the paper's method.
        path: of the SVG.
    """
    claims = [claim for claim in read_claims() if claim["paper"] == paper]
    judged = [(claim, case) for claim in claims for case in judge_claim(claim)]
    shown = [(claim, case) for claim, case in judged if case.scale == 100.0]
    axes = _new_axes(8.4, 1.2 + 0.17 * len(shown))
    for verdict, (color, marker) in VERDICTS.items():
        rows = [(y, case) for y, (_, case) in enumerate(shown) if case.verdict == verdict]
        means = [100 * case.found.mean for _, case in rows]
        halves = [50 * (case.found.high - case.found.low) for _, case in rows]
        places = [y for y, _ in rows]
        axes.errorbar(
            means, places, None, halves, ls="", marker=marker, ms=4, capsize=2, color=color, label=verdict
        )
    axes.axvline(0, color="0.6", lw=0.8, zorder=0)
    names = [f"{claim['difference']}: {case.label}".replace("minus: ", "minus ") for claim, case in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=7)
    for y, ((above, _), (below, _)) in enumerate(itertools.pairwise(shown)):
        if above is not below:
            axes.axhline(y + 0.5, color="0.85", lw=0.6, zorder=0)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xscale("symlog", linthresh=2)
    ticks = [-50, -10, -2, 0, 2, 10, 50]
    axes.set_xticks(ticks, [f"{t:+d}".replace("-", "−") if t else "0" for t in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    furthest = max(100 * max(abs(case.found.low), abs(case.found.high)) for _, case in shown)
    axes.set_xlim(-1.4 * furthest, 1.4 * furthest)
    axes.set_xlabel("points of accuracy, first minus second\n(linear from −2 to 2, logarithmic beyond)")
    axes.legend(title="the claim", fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    _save(path)


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
