"""Drawings of the evidence experiments, from the committed figures; see ``evidence.py``."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import matplotlib
from evidence_tables import FIGURES, RESULTS, judge_claim, last_results, read_claims, read_figures

from fedlowrank.report.significance import compare_over_seeds

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

VERDICTS = {"holds": ("tab:blue", "o"), "does not hold": ("tab:red", "s"), "undecided": ("0.35", "D")}
"""Color and marker."""


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


def draw_claims(path: Path) -> None:
    """The difference of every claim about an accuracy with its interval, colored by verdict.

    Args:
        path: of the SVG.
    """
    judged = [(claim, case) for claim in read_claims() for case in judge_claim(claim)]
    shown = [(claim, case) for claim, case in judged if case.scale == 100.0]
    axes = _new_axes(8.4, 0.8 + 0.17 * len(shown))
    for verdict, (color, marker) in VERDICTS.items():
        rows = [(y, case) for y, (_, case) in enumerate(shown) if case.verdict == verdict]
        means = [100 * case.found.mean for _, case in rows]
        halves = [50 * (case.found.high - case.found.low) for _, case in rows]
        places = [y for y, _ in rows]
        axes.errorbar(
            means, places, None, halves, ls="", marker=marker, ms=4, capsize=2, color=color, label=verdict
        )
    axes.axvline(0, color="0.6", lw=0.8, zorder=0)
    names = [f"{claim['difference']}: {case.label}" for claim, case in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=7)
    for y, ((above, _), (below, _)) in enumerate(itertools.pairwise(shown)):
        if above is not below:
            axes.axhline(y + 0.5, color="0.85", lw=0.6, zorder=0)
    axes.invert_yaxis()
    axes.set_xscale("symlog", linthresh=2)
    ticks = [-50, -10, -2, 0, 2, 10, 50]
    axes.set_xticks(ticks, [f"{t:+d}".replace("-", "−") if t else "0" for t in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(y=0.01)
    furthest = max(100 * max(abs(case.found.low), abs(case.found.high)) for _, case in shown)
    axes.set_xlim(-1.4 * furthest, 1.4 * furthest)
    axes.set_xlabel("points of accuracy, first minus second\n(linear from −2 to 2, logarithmic beyond)")
    axes.legend(title="the claim", fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    _save(path)


def _new_axes(width: float, height: float) -> Axes:
    """Axes of a new figure, width and height in inches."""
    plt.rcParams.update({"svg.hashsalt": "fedlowrank", "svg.fonttype": "path"})
    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def _save(path: Path) -> None:
    """Write the current figure without its date, so that the same figure is the same file."""
    plt.savefig(path, metadata={"Date": None})
    plt.close()


def draw() -> None:
    """Draw all figures whose experiments have been entered."""
    draw_claims(RESULTS / "figures" / "claims.svg")
    if (FIGURES / "fedslr-mnist.csv").exists():
        draw_downlink("fedslr-mnist", RESULTS / "figures" / "fedslr-mnist-downlink.svg")
