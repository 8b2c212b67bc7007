"""Drawings of the evidence experiments, from the committed figures.

A part of ``docs/evidence.py``, which is the command; this file is only imported.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from fedlowrank.report.statistics.significance import compare_over_seeds
from tables.claims import Case, judge_claims, label_of
from tables.experiments import (
    RESULTS,
    has_figures,
    is_loss,
    last_results,
    list_experiments,
    list_methods,
    list_seeds,
    read_figures,
    read_titles,
    title_of,
)
from tables.horizons import HORIZONS, TEACHERS, find_lead
from tables.verdicts import MARGIN

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator
from matplotlib.transforms import blended_transform_factory

LOOKS = {"for": ("tab:blue", "o"), "open": ("0.35", "D"), "against": ("tab:red", "s")}
"""Color and marker of a comparison by its mark."""
UNITS = {
    "points": "points of accuracy, first minus second (logarithmic beyond ±2)",
    "loss": "loss, first minus second",
    "runs": "successful runs / %, with Wilson's 95 % interval",
}
"""What a panel's axis shows."""
SERIES = {
    None: ("clients' models", "tab:blue", "o"),
    "server": ("server's model", "tab:orange", "s"),
    "global": ("global model", "tab:orange", "s"),
    "gkr": ("GKR", "tab:green", "^"),
}
"""Name, color and marker of the models that clients use and of further series."""

MANY = 10
"""Comparisons of a claim from which on their labels are short."""


def draw_downlink(name: str, path: Path) -> None:
    """Accuracy against bytes to the clients: FedSLR as a curve over λ for each series, others as points.

    Args:
        name: of an experiment whose methods ``lam_*`` are FedSLR with a growing λ.
        path: of the SVG.
    """
    figures = read_figures(name)
    titles = read_titles(name)
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

    Experiments that are tuned again by the clients' own models, ``-own``, have no panel.

    Args:
        page: name of a page, ``fedhl.md``.
        path: of the SVG.
    """
    names = [n for n in list_experiments(page) if not is_loss(n) and not n.endswith("-own")]
    titles = {name: read_titles(name) for name in names}
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


def draw_leads(path: Path) -> None:
    """FedHL minus FlexLoRA, the server's model, over the horizon: a panel for each rate, a line for each teacher."""
    _set_style()
    _, panels = plt.subplots(1, 2, figsize=(7.2, 2.9), sharey=True, layout="constrained")
    for axes, (ending, title) in zip(
        panels, (("", "constant rate"), ("-cosine", "cosine rate")), strict=True
    ):
        for teacher, label in TEACHERS.items():
            names = {rounds: f"teacher-{teacher}-{rounds}{ending}" for rounds in HORIZONS}
            found = {rounds: find_lead(name, "flexlora", "server") for rounds, name in names.items()}
            leads = {rounds: lead for rounds, lead in found.items() if lead is not None}
            halves = [50 * (lead.high - lead.low) for lead in leads.values()]
            means = [100 * lead.mean for lead in leads.values()]
            axes.errorbar(list(leads), means, halves, marker="o", ms=4, capsize=2, label=f"rank {label}")
        axes.axhline(0, color="0.6", lw=0.8, zorder=0)
        axes.set_xscale("log")
        axes.set_xticks(HORIZONS, [str(rounds) for rounds in HORIZONS])
        axes.minorticks_off()
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("rounds", fontsize=8)
    panels[0].set_ylabel("FedHL minus FlexLoRA / points", fontsize=8)
    panels[0].legend(fontsize=8, loc="upper left")
    _save(path)


def draw_claims(paper: str, path: Path) -> None:
    """Every claim of a paper with its comparisons: their intervals, marks and the paper's effects.

    Args:
        paper: the paper's method.
        path: of the SVG.
    """
    panels = {unit: rows for unit in UNITS if (rows := _claim_rows(paper, unit))}
    heights = [0.5 + 0.17 * len(rows) for rows in panels.values()]
    _set_style()
    figure, all_axes = plt.subplots(
        len(panels),
        figsize=(9, 0.6 + sum(heights)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    for axes, (unit, rows) in zip(all_axes[:, 0], panels.items(), strict=True):
        _draw_rows(figure, axes, rows, unit)
    shown = [
        Line2D([], [], color=color, marker=marker, ls="", label=mark)
        for mark, (color, marker) in LOOKS.items()
    ]
    shown.append(Line2D([], [], color="0.35", marker="o", mfc="white", ls="", label="not after Holm"))
    shown.append(Line2D([], [], color="black", marker="|", ms=9, mew=2, ls="", label="the paper"))
    if "points" in panels:
        shown.append(Patch(color="0.92", label="within one point"))
    figure.legend(handles=shown, fontsize=8, ncols=len(shown), loc="outside upper center")
    _save(path)


def _draw_rows(figure: Figure, axes: Axes, rows: Sequence[tuple[str, Case | None]], unit: str) -> None:
    """The claims and comparisons of one unit."""
    scale = 100.0 if unit == "runs" else 1.0
    for y, (text, case) in enumerate(rows):
        if case is None:
            # from the left edge of the figure, over the labels and the axes
            place = blended_transform_factory(figure.transFigure, axes.transData)
            title = axes.text(0.01, y, text, fontweight="bold", transform=place, va="center", fontsize=7)
            title.set_in_layout(False)
            if y and rows[y - 1][1]:
                axes.axhline(y - 0.5, color="0.85", lw=0.6, zorder=0)
            continue
        found, (color, marker) = case.judged, LOOKS[case.judged.mark]
        filled = color if case.is_strong or found.mark == "open" else "white"
        style = {"ls": "", "marker": marker, "ms": 4, "capsize": 2, "color": color, "mfc": filled}
        sides = [[scale * (found.value - found.low)], [scale * (found.high - found.value)]]
        axes.errorbar([scale * found.value], [y], None, sides, **style)
        axes.plot(case.effects, [y] * len(case.effects), color="black", marker="|", ms=9, mew=1.5, ls="")
    axes.set_yticks([y for y, (_, case) in enumerate(rows) if case], [t for t, c in rows if c], fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel(UNITS[unit], fontsize=8)
    axes.grid(axis="x", color="0.93", lw=0.6)
    axes.set_axisbelow(True)
    axes.axvline(50 if unit == "runs" else 0, color="0.6", lw=0.8, zorder=0)
    if unit == "runs":
        axes.set_xlim(-3, 103)
    if unit == "points":
        _scale_points(axes, [case for _, case in rows if case])


def _scale_points(axes: Axes, cases: Sequence[Case]) -> None:
    """An axis on which differences of one point are visible beside those of 50."""
    ends = [(case.judged.value, case.judged.low, case.judged.high, *case.effects) for case in cases]
    # a difference without an interval has NaN for its ends
    furthest = 1.4 * float(np.nanmax(np.abs([end for four in ends for end in four])))
    axes.axvspan(-MARGIN, MARGIN, color="0.92", zorder=-1)
    axes.set_xscale("symlog", linthresh=2, linscale=1.2)
    ticks = [sign * size for sign in (-1, 1) for size in (1, 2, 5, 20, 50) if size < furthest]
    axes.set_xticks([0, *ticks], [f"{t}".replace("-", "−") for t in [0, *ticks]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(-furthest, furthest)


def _claim_rows(paper: str, unit: str) -> list[tuple[str, Case | None]]:
    """Lines of a panel from above: a claim, over two lines if it is long, and then its comparisons."""
    rows: list[tuple[str, Case | None]] = []
    for claim, cases, verdict in judge_claims():
        if claim["paper"] != paper or (cases[0].unit if cases else "points") != unit:
            continue
        sign = {"-": " Claimed: below 0.", ">=": " Claimed: above −1.", "=": " Claimed: within ±1."}
        title = f"{claim['claim']}{sign.get(claim.get('expected', '+'), '')} → {verdict}"
        # of many comparisons of two methods the methods are named once
        once = len(cases) > MANY and not claim["difference"].endswith("minus")
        rows += [(line, None) for line in textwrap.wrap(title, 130)]
        rows += [(f"{claim['difference']}:", None)] if once else []
        rows += [(case.label if once else label_of(claim, case), case) for case in cases]
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
    draw_leads(RESULTS / "figures" / "fedhl-leads.svg")
    for page in ("pfedlora", "fedslr", "fedhl", "fedhl-horizons", "floral"):
        draw_page(f"{page}.md", RESULTS / "figures" / f"{page}-accuracy.svg")
    if has_figures("fedslr-mnist"):
        draw_downlink("fedslr-mnist", RESULTS / "figures" / "fedslr-mnist-downlink.svg")
