"""Drawings of the evidence experiments, from the committed figures.

A part of ``docs/evidence.py``, which is the command; this file is only imported.
"""

from __future__ import annotations

import io
import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd

from fedlowrank.report.statistics.significance import compare_over_seeds
from tables.claims import Case, judge_claims, label_of
from tables.experiments import (
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
from tables.horizons import find_lead
from tables.settings import HORIZONS, RESULTS, SWEEPS, TEACHERS, name_horizon
from tables.sweeps import list_common_methods
from tables.verdicts import MARGIN

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation, blended_transform_factory

LOOKS = {"for": ("tab:blue", "o"), "open": ("0.35", "D"), "against": ("tab:red", "s")}
"""Color and marker of a comparison by its mark."""
METHOD_MARKERS = "sD^ovPX"
"""A marker for each method of an experiment, in its order."""
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
ROWS = 40
"""Rows of a panel of claims, so that its axis is never far; only a single claim can have more."""
TITLE_WIDTH = 54
"""Characters in a line of a claim's title, which stands in the margin left of the axes."""
CLAIMED = {
    "+": "",
    "-": " Claimed: below 0.",
    ">=": " Claimed: above −1, by the 90 % interval.",
    "=": " Claimed: within ±1, by the 90 % interval.",
}
"""What a claim says about its differences, unless that they are above 0."""
NO_BREAK = "\N{NO-BREAK SPACE}"

Row = tuple[str, Case | None]
"""A line of a panel of claims: a comparison, or a line of a claim's title."""


def draw_downlink(name: str, path: Path) -> None:
    """Accuracy against bytes to the clients: FedSLR as a curve over λ for each series, others as hollow points.

    Methods without a penalty send nearly the same, so that a second panel shows the right end of the first.

    Args:
        name: of an experiment whose methods ``lam_*`` are FedSLR with a growing λ.
        path: of the SVG.
    """
    _set_style()
    figure, (whole, near) = plt.subplots(1, 2, figsize=(7.6, 3.6), width_ratios=(3, 2), layout="constrained")
    most = _draw_downlink(whole, name, labeled=(0, 0.9))
    _draw_downlink(near, name, labeled=(0.9, 1))
    whole.margins(y=0.1)
    whole.set_xlim(0, 1.06 * most)
    near.set(xlim=(0.975 * most, 1.011 * most), ylim=(89, 98))
    near.xaxis.set_major_locator(MaxNLocator(4))
    near.set_title("the right end of the left panel", fontsize=8)
    for axes in (whole, near):
        axes.set_xlabel("sent to the clients / MB", fontsize=8)
        axes.tick_params(labelsize=8)
    whole.set_ylabel("test accuracy / %", fontsize=8)
    figure.legend(*whole.get_legend_handles_labels(), fontsize=8, ncols=3, loc="outside upper center")
    figure.supxlabel("Hollow points are moved to the right, so that they do not hide each other.", fontsize=8)
    _save(path)


def _draw_downlink(axes: Axes, name: str, labeled: tuple[float, float]) -> float:
    """Draw curves, points and their 95 % intervals; return the most that is sent, in MB.

    Args:
        axes: where to draw.
        name: of the experiment.
        labeled: λ stands at points that send between these shares of the most.
    """
    figures, titles = read_figures(name), read_titles(name)
    sent = last_results(figures, None).groupby("method")["bytes_down"].mean() / 1e6
    penalties = sorted(
        (m for m in titles if m.startswith("lam_")), key=lambda m: float(m.removeprefix("lam_"))
    )
    for series, label in ((None, "FedSLR, mixed model"), ("gkr", "FedSLR, global model (GKR)")):
        means, halves = _means_of(figures, series, penalties)
        axes.errorbar(sent[penalties], means, halves, marker="o", ms=4, capsize=2, label=label)
        for x, mean, half, method in zip(sent[penalties], means, halves, penalties, strict=True):
            if series is None and labeled[0] < x / sent.max() <= labeled[1]:
                text = f"λ = {method.removeprefix('lam_')}"
                axes.annotate(
                    text, (x, mean + half), (0, 4), textcoords="offset points", fontsize=7, ha="center"
                )
    others = [method for method in titles if method not in penalties]
    for place, (method, marker) in enumerate(zip(others, "sD^v", strict=True)):
        # two after each other in the list send the same
        moved = axes.transData + ScaledTranslation(
            (6 + 6 * (place % 2)) / 72, 0, axes.get_figure().dpi_scale_trans
        )
        style = {"marker": marker, "ms": 5, "mfc": "none", "capsize": 2, "ls": "", "transform": moved}
        axes.errorbar(sent[[method]], *_means_of(figures, None, [method]), label=titles[method], **style)
    return float(sent.max())


def _means_of(
    figures: pd.DataFrame, series: str | None, methods: Sequence[str]
) -> tuple[list[float], list[float]]:
    """Mean test accuracy of each method at the end, and half-widths of its 95 % interval, in percent."""
    results = last_results(figures, series)
    compared = [compare_over_seeds(100 * results.loc[m]["test"].to_numpy()) for m in methods]
    return [c.mean for c in compared], [(c.high - c.low) / 2 for c in compared]


def _means_over(names: Iterable[str], series: str | None, method: str) -> tuple[list[float], list[float]]:
    """Mean test accuracy of a method at the end of each experiment, and half-widths as in :func:`_means_of`."""
    ends = [_means_of(read_figures(name), series, [method]) for name in names]
    return [means[0] for means, _ in ends], [halves[0] for _, halves in ends]


def draw_page(page: str, path: Path) -> None:
    """Test accuracy of every method with its interval, a panel for each experiment of a page.

    Args:
        page: name of a page, ``fedhl.md``.
        path: of the SVG.
    """
    names = [n for n in list_experiments(page) if not is_loss(n)]
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
    all_series = [None, *figures.loc[~figures["headline"], "series"].unique()]
    having = {
        series: set(last_results(figures, series).index.get_level_values("method")) for series in all_series
    }
    of_method = {method: [series for series in all_series if method in having[series]] for method in methods}
    for series in all_series:
        shown = [method for method in methods if method in having[series]]
        means, halves = _means_of(figures, series, shown)
        # around the label of the method
        heights = [
            methods.index(m) + 0.22 * (of_method[m].index(series) - (len(of_method[m]) - 1) / 2)
            for m in shown
        ]
        label, color, marker = SERIES[series]
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
            names = [name_horizon(teacher, f"{rounds}{ending}") for rounds in HORIZONS]
            leads = [find_lead(name, "flexlora", "server") for name in names]
            halves = [50 * (lead.high - lead.low) for lead in leads]
            means = [100 * lead.mean for lead in leads]
            axes.errorbar(HORIZONS, means, halves, marker="o", ms=4, capsize=2, label=f"rank {label}")
        axes.axhline(0, color="0.6", lw=0.8, zorder=0)
        _set_horizons(axes)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("rounds, logarithmic", fontsize=8)
    panels[0].set_ylabel("FedHL minus FlexLoRA / points", fontsize=8)
    panels[0].legend(fontsize=8, loc="upper left")
    _save(path)


def _set_horizons(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_xticks(HORIZONS, [str(rounds) for rounds in HORIZONS])
    axes.minorticks_off()


def draw_horizons(chosen_by: str, path: Path) -> None:
    """Test accuracy of every method over the horizon, a panel for each teacher and rate.

    Args:
        chosen_by: as in :func:`.settings.list_horizons`; these models are drawn.
        path: of the SVG.
    """
    _set_style()
    series = "server" if chosen_by == "server" else None
    figure, grid = plt.subplots(3, 4, figsize=(9.6, 7.2), sharex=True, sharey="row", layout="constrained")
    columns = list(itertools.product(TEACHERS, ("", "-cosine")))
    for axes, (teacher, rate) in zip(grid.flat, columns, strict=True):
        names = [name_horizon(teacher, f"{rounds}{rate}", chosen_by) for rounds in HORIZONS]
        for place, method in enumerate(list_methods(names[0])):
            means, halves = _means_over(names, series, method)
            label = read_titles(names[0])[method]
            beside = [rounds * 1.03 ** (place - 3) for rounds in HORIZONS]  # so that none hides another
            style = {"marker": METHOD_MARKERS[place], "ms": 3.5, "lw": 0.9, "capsize": 1.5}
            axes.errorbar(beside, means, halves, label=label, **style)
        _set_horizons(axes)
        axes.set_xlim(8, 75)
        axes.tick_params(labelsize=7)
        axes.set_title(f"rank {TEACHERS[teacher]}, {'cosine' if rate else 'constant rate'}", fontsize=8)
    figure.supxlabel("rounds, logarithmic; a run and a choice of the rate for each", fontsize=8)
    figure.supylabel(f"test accuracy of the {SERIES[series][0]} / %", fontsize=8)
    handles = {h.get_label(): h for axes in grid.flat for h in axes.containers}
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=4, fontsize=8)
    _save(path)


def draw_sweeps(path: Path) -> None:
    """Figures 8 and 9 of pFedLoRA on digits: test accuracy of every method, a panel for what changes.

    Args:
        path: of the SVG.
    """
    _set_style()
    _, panels = plt.subplots(1, len(SWEEPS), figsize=(7.2, 2.9), layout="constrained")
    titles = read_titles("digits-classes-2")  # of both sweeps
    places = {method: place for place, method in enumerate(titles)}
    for axes, (swept, names) in zip(panels, SWEEPS.items(), strict=True):
        for method in list_common_methods(swept):
            means, halves = _means_over(names.values(), None, method)
            style = {
                "marker": METHOD_MARKERS[places[method]],
                "color": f"C{places[method]}",
                "ms": 4,
                "capsize": 2,
            }
            axes.errorbar(list(names), means, halves, label=titles[method], **style)
        axes.set_xticks(list(names))
        axes.set_xlabel(swept, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("test accuracy / %", fontsize=8)
    _save(path)


def draw_claims(paper: str, path: Path) -> None:
    """Every claim of a paper with its comparisons: their intervals, marks and the paper's effects.

    Args:
        paper: the paper's method.
        path: of the SVG.
    """
    panels = [(unit, claims) for unit in UNITS for claims in _fill_panels(_claim_rows(paper, unit))]
    heights = [0.5 + 0.17 * sum(map(len, claims)) for _, claims in panels]
    _set_style()
    figure, all_axes = plt.subplots(
        len(panels),
        figsize=(9, 0.6 + sum(heights)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    points = [
        case for unit, claims in panels for _, case in itertools.chain(*claims) if case and unit == "points"
    ]
    for axes, (unit, claims) in zip(all_axes[:, 0], panels, strict=True):
        _draw_rows(figure, axes, claims, unit)
        if unit == "points":
            _scale_points(axes, points)
    shown = [
        Line2D([], [], color=color, marker=marker, ls="", label=mark)
        for mark, (color, marker) in LOOKS.items()
    ]
    shown.append(Line2D([], [], color="0.35", marker="o", mfc="white", ls="", label="not after Holm"))
    shown.append(Line2D([], [], color="black", marker="|", ms=9, mew=2, ls="", label="the paper"))
    if points:
        shown.append(Patch(color="0.92", label="within one point"))
    figure.legend(handles=shown, fontsize=8, ncols=len(shown), loc="outside upper center")
    _save(path)


def _draw_rows(figure: Figure, axes: Axes, claims: Sequence[Sequence[Row]], unit: str) -> None:
    """Claims and comparisons of one unit, the claims separated by lines."""
    scale = 100.0 if unit == "runs" else 1.0
    rows = list(itertools.chain(*claims))
    for end in list(itertools.accumulate(map(len, claims)))[:-1]:
        axes.axhline(end - 0.5, color="0.85", lw=0.6, zorder=0)
    for y, (text, case) in enumerate(rows):
        if case is None:
            # from the left edge of the figure, in the margin of the labels
            place = blended_transform_factory(figure.transFigure, axes.transData)
            title = axes.text(0.01, y, text, fontweight="bold", transform=place, va="center", fontsize=7)
            title.set_in_layout(False)
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


def _claim_rows(paper: str, unit: str) -> list[list[Row]]:
    """Lines of each claim from above: the claim, over several lines, and then its comparisons."""
    claims: list[list[Row]] = []
    for claim, cases, verdict in judge_claims():
        of_unit = [case for case in cases if case.unit == unit]
        if claim["paper"] != paper or not (of_unit or (unit == "points" and not cases)):
            continue
        shown = f"→ {verdict}".replace(" ", NO_BREAK)
        expected = of_unit[0].expected if of_unit else "+"
        title = f"{claim['claim']}{CLAIMED[expected]} {shown}"
        # of many comparisons of two methods the methods are named once
        once = len(of_unit) > MANY and not claim["difference"].endswith("minus")
        rows: list[Row] = [(line, None) for line in textwrap.wrap(title, TITLE_WIDTH)]
        rows += [(f"{claim['difference']}:", None)] if once else []
        rows += [
            ((case.label if once else label_of(claim, case)) + _note_diverged(case), case) for case in of_unit
        ]
        claims.append(rows)
    return claims


def _note_diverged(case: Case) -> str:
    """That a method diverged in some seeds, for which a comparison can be open although its interval excludes 0."""
    count = max(case.diverged)
    return f", diverged in {count} seed{'s' * (count > 1)}" if count else ""


def _fill_panels(claims: Sequence[list[Row]]) -> list[list[list[Row]]]:
    """Claims in panels of at most :data:`ROWS` rows, in their order; a longer claim has a panel of its own."""
    panels: list[list[list[Row]]] = []
    for rows in claims:
        if panels and sum(map(len, panels[-1])) + len(rows) <= ROWS:
            panels[-1].append(rows)
        else:
            panels.append([rows])
    return panels


def _set_style() -> None:
    """The same figure becomes the same file."""
    plt.rcParams.update({"svg.hashsalt": "fedlowrank", "svg.fonttype": "none"})


def _save(path: Path) -> None:
    """Write the current figure without its date, so that the same figure is the same file.

    The names of clip paths are hashes of their places with more digits than are printed, in which the solver of the layout
    differs from run to run; they become numbers.
    """
    buffer = io.StringIO()
    plt.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close()
    svg = buffer.getvalue()
    for number, name in enumerate(re.findall(r'<clipPath id="(\w+)">', svg)):
        svg = svg.replace(name, f"clip{number}")
    path.write_text(svg)


def draw() -> None:
    """Draw all figures whose experiments have been entered."""
    for paper in ("pFedLoRA", "FedSLR", "FedHL", "FLoRAL"):
        page = paper.lower()
        draw_claims(paper, RESULTS / "figures" / f"{page}-claims.svg")
    draw_leads(RESULTS / "figures" / "fedhl-leads.svg")
    for chosen_by in ("server", "own"):
        draw_horizons(chosen_by, RESULTS / "figures" / f"fedhl-horizons-{chosen_by}.svg")
    draw_sweeps(RESULTS / "figures" / "pfedlora-sweeps.svg")
    for page in ("pfedlora", "fedslr", "fedhl", "floral"):
        draw_page(f"{page}.md", RESULTS / "figures" / f"{page}-accuracy.svg")
    if has_figures("fedslr-mnist"):
        draw_downlink("fedslr-mnist", RESULTS / "figures" / "fedslr-mnist-downlink.svg")
