"""Drawings of the evidence experiments, from the committed figures; see ``evidence.py``."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
from evidence_tables import FIGURES, RESULTS, last_results, read_figures

from fedlowrank.report.significance import compare_over_seeds

matplotlib.use("svg")

import matplotlib.pyplot as plt


def draw_downlink(name: str, path: Path) -> None:
    """Accuracy against bytes to the clients: FedSLR as a curve over λ for each series, others as points.

    Args:
        name: of an experiment whose methods ``lam_*`` are FedSLR with a growing λ.
        path: of the SVG.
    """
    figures = read_figures(name)
    titles = json.loads((FIGURES / f"{name}.json").read_text())["titles"]
    plt.rcParams.update({"svg.hashsalt": "fedlowrank", "svg.fonttype": "path"})
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
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
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw() -> None:
    """Draw all figures whose experiments have been entered."""
    if (FIGURES / "fedslr-mnist.csv").exists():
        draw_downlink("fedslr-mnist", RESULTS / "figures" / "fedslr-mnist-downlink.svg")
