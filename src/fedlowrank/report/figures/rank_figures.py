"""Figures of what low rank saves and costs: ranks, downlink, model size, accuracy relative to a reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator
from numpy.typing import NDArray

from ...core.io.text import on_one_line
from ..number_formats import format_si
from ..statistics.groups import RunGroup, measure_of
from ..statistics.low_rank import RankCurve, downlink, model_size, rank_curves
from . import chart
from .style import INK, Picture, Style, Styles, add_legend, drawing, new_figure, new_panels

PANELS = 24  # most panels of ranks; of a deeper model, so many weights are drawn, evenly spaced in depth
COLUMNS = 3
POINTS = 120  # most rounds drawn in a panel of ranks, which is too narrow for more
# Relative change of a downlink that counts: bytes of a message vary by a digit here and there.
MIN_RELATIVE_CHANGE = 0.005
CLIENTS = 20  # fewest clients for a violin: of a few, the box plot shows everything


@drawing()
def plot_ranks(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Rank of every low-rank weight against rounds, in percent of its first rank: a panel a weight."""
    curves_of_groups = [(group, mine) for group in groups if (mine := rank_curves(group))]
    names = list(dict.fromkeys(name for _, mine in curves_of_groups for name in mine))
    if not names or all(len(rank.percent) < 2 for _, mine in curves_of_groups for rank in mine.values()):
        return None
    shown = [names[i] for i in chart.space_evenly(len(names), PANELS)]
    columns = min(COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure, panels = new_panels(0.5 + max(0.86 * rows, 2.2), rows, columns, sharey=True)
    for axes, name in zip(panels.flat, shown, strict=False):
        lines = [(group, mine[name]) for group, mine in curves_of_groups if name in mine]
        percent = [chart.Line(g, g.short, chart.thin_out(rank.percent, POINTS)) for g, rank in lines]
        chart.draw_lines(axes, percent, styles)
        title = f"{_layer(name)}\n{_first_to_last([rank for _, rank in lines])}"
        axes.set_title(title, fontsize=8, loc="left", pad=3)
    chart.finish_grid(panels, len(shown))[columns // 2].set_xlabel("round")
    drawn = [mine[name].percent for _, mine in curves_of_groups for name in shown if name in mine]
    top = max(100.0, *chart.all_ends(drawn, chart.NON_NEGATIVE))
    panels[0, 0].set(ylim=(-0.05 * top, 1.05 * top))
    panels[0, 0].yaxis.set_major_locator(FixedLocator([0, 50, 100]) if top <= 100 else MaxNLocator(nbins=3))
    chart.set_round_axis(panels[0, 0].xaxis, 4)
    figure.supylabel("rank / % of the first")
    drawn_groups = [group for group, _ in curves_of_groups]
    entries = [chart.legend_entry(styles[group.short], marker="") for group in drawn_groups]
    add_legend(figure, entries, [group.short for group in drawn_groups])
    texts = "; ".join(
        f"{group.short}: " + ", ".join(f"{_layer(n)} {r.first:.0f} to {r.last:.0f}" for n, r in mine.items())
        for group, mine in curves_of_groups
    )
    some = f" {len(shown)} of {len(names)} weights are drawn, evenly spaced in depth."
    order = " in the order of the legend" if len(curves_of_groups) > 1 else ""
    return Picture(
        figure,
        "Rank of each layer over rounds",
        f"Line charts of the rank of {len(names)} weights against rounds for "
        f"{chart.count_methods(len(curves_of_groups))}. From the first rank to the last, {texts}.",
        "Rank of the server's weights after each round, in percent of the rank before training, a panel a "
        f"weight in the order of the model{chart.note_band(drawn_groups)} Above each panel: the first rank, "
        f"an arrow, the last one{order}.{some if len(shown) < len(names) else ''}",
    )


def _layer(name: str) -> str:
    return on_one_line(name.removesuffix(".weight"), 24)


def _first_to_last(ranks: Sequence[RankCurve]) -> str:
    """``384 → 40``, or ``384 → 40, 75`` for two methods; the range of the last ranks if that is too long."""
    first = ", ".join(dict.fromkeys(f"{rank.first:.0f}" for rank in ranks))
    text = f"{first} → {', '.join(f'{rank.last:.0f}' for rank in ranks)}"
    last = [rank.last for rank in ranks]
    return text if len(text) <= 24 else f"{first} → {min(last):.0f}–{max(last):.0f}"


@drawing()
def plot_downlink(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Bytes from the server to each participant against rounds, where they or the methods' ranks differ.

    From 0 up, so that a fall is as large as it looks; logarithmic only where a change would be too small to
    see.
    """
    downlinks = [(group, sent) for group in groups if len(sent := downlink(group))]
    largest = max((float(sent["mean"].max()) for _, sent in downlinks), default=0.0)
    if largest <= 0:
        return None
    means = [sent["mean"] for _, sent in downlinks]
    peaks = [mean.max() for mean in means if mean.max() - mean.min() > MIN_RELATIVE_CHANGE * mean.max()]
    last_ranks = {tuple((name, rank.last) for name, rank in rank_curves(group).items()) for group in groups}
    if not peaks and len(last_ranks) < 2:
        return None
    log = bool(peaks) and max(peaks) * chart.LOG_FROM <= largest
    silent = [group.short for group, sent in downlinks if log and sent["mean"].max() <= 0]
    drawn = [(group, chart.thin_out(sent)) for group, sent in downlinks if group.short not in silent]
    figure, axes = new_figure(3.1)
    for i, (group, sent) in enumerate(drawn):
        style = styles[group.short]
        # Markers tell lines that coincide apart: each method has them at rounds of its own.
        times = max(1, min(3, len(sent) // len(drawn)))
        at = sorted({int(len(sent) / times * (k + (i + 0.5) / len(drawn))) for k in range(times)})
        axes.plot(
            sent.index, sent["mean"].where(sent["mean"] > 0) if log else sent["mean"], color=style.color,
            linestyle=style.line, marker=style.marker, markersize=5, markevery=at, dash_capstyle="butt",
        )  # fmt: skip
    positive = [float(value) for _, sent in drawn for value in sent["mean"] if value > 0]
    chart.set_prefix_axis(axes.yaxis, "B", positive if log else None)
    if not log:
        chart.set_limits_from_zero(axes, largest)
    axes.set(xlabel="round", ylabel="downlink, logarithmic" if log else "downlink per participant")
    chart.set_round_axis(axes.xaxis)
    labels = [f"{on_one_line(group.short, 22)}: {_format_change(sent)}" for group, sent in drawn]
    add_legend(figure, [chart.legend_entry(styles[group.short]) for group, _ in drawn], labels)
    texts = ", ".join(f"{group.short} {_format_change(sent)}" for group, sent in downlinks)
    return Picture(
        figure,
        "Downlink over rounds",
        f"Line chart of bytes sent to each participant against rounds for {chart.count_methods(len(downlinks))}. "
        f"From the first round to the last: {texts}.",
        "Bytes of the server's messages in each round, divided by the number of participants"
        f"{chart.note_seeds(groups)}; the legend gives the first and the last round, once if they are equal. "
        "Each method has its markers at rounds of its own, so that lines which coincide can be told apart."
        + (f" Sends nothing: {', '.join(silent)}." if silent else ""),
    )


def _format_change(sent: pd.DataFrame) -> str:
    first, last = format_si(sent["mean"].iloc[0], "B"), format_si(sent["mean"].iloc[-1], "B")
    return first if first == last else f"{first} → {last}"


@drawing()
def plot_relative_accuracy(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Violin plot of each client's accuracy, or loss, minus that under a reference method, seeds pooled.

    The reference is FedAvg, else Standalone, else the first method.
    """
    judged = [group for group in groups if group.final()]
    if len({group.label for group in judged}) < 2:
        return None
    by_method = {group.method: group for group in reversed(judged)}
    reference = by_method.get("fedavg") or by_method.get("standalone") or judged[0]
    measure = measure_of(judged)
    base = {run.record.seed: run.client_values(run.headline, measure) for run in reference.runs}
    if max(len(run.record.clients) for run in reference.runs) < CLIENTS:
        return None
    found = []
    for line in chart.choose_lines(judged, measure):
        gaps = [
            (run.client_values(line.series, measure) - base[seed]).dropna()
            for run in line.group.runs
            if (seed := run.record.seed) in base
        ]
        values = measure.scale * np.concatenate([np.empty(0), *gaps])
        if len(values) and not (line.group is reference and not line.place):
            found.append((line, values))
    if not found:
        return None
    figure, axes = new_figure(0.9 + 0.36 * len(found))
    axes.axvline(0, color=INK, linewidth=1, alpha=0.6)
    for y, (line, values) in enumerate(found):
        _draw_violin(axes, y, values, styles[line.group.short], 0.1 if line.place else 0.3)
    chart.set_method_axis(axes, [line.label for line, _ in found])
    unit = "" if measure.is_loss else " / points"
    axes.set(xlabel=f"{measure.noun} minus that of {on_one_line(reference.short, 24)}{unit}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
    form = "+.3g" if measure.is_loss else "+.1f"
    medians = [f"{line.label} {f'{np.median(values):{form}}'.replace('-', '−')}" for line, values in found]
    count = len({line.group.label for line, _ in found})
    seeds = max(len(line.group.runs) for line, _ in found)
    points = "" if measure.is_loss else " in percentage points"
    return Picture(
        figure,
        f"{measure.title} relative to {reference.short}",
        f"Violin plot of the {measure.noun} of clients minus that under {reference.short}, for "
        f"{chart.count_methods(count)}. Medians{points}: {', '.join(medians)}.",
        f"{measure.noun.capitalize()} of each client at the last evaluated round minus that of the same "
        f"client under {reference.short} with the same seed{',' if points else ''}{points}; "
        f"{'left' if measure.is_loss else 'right'} of the line is better. Thick line: median; thin lines: "
        "quartiles; shape: density of the clients, all shapes equally wide at their widest."
        + (f" The clients of all {seeds} seeds are pooled." if seeds > 1 else ""),
    )


def _draw_violin(axes: Axes, y: int, values: NDArray[np.float64], style: Style, opacity: float) -> None:
    from scipy.stats import gaussian_kde  # slow to import

    low, high = float(values.min()), float(values.max())
    first, median, third = (float(v) for v in np.quantile(values, [0.25, 0.5, 0.75]))
    if high - low > 1e-9:
        grid = np.linspace(low, high, 100)
        density = gaussian_kde(values)(grid)
        width = 0.42 * density / density.max()
        face = (*style.rgb, opacity)
        axes.fill_between(grid, y - width, y + width, facecolor=face, edgecolor=style.color, linewidth=1.1)
        around = 0.42 * np.interp([first, third], grid, density) / density.max()
        axes.vlines([first, third], y - around, y + around, color=style.color, linewidth=1)
    axes.vlines([median], y - 0.42, y + 0.42, color=style.color, linewidth=2.4)


def plot_model_size(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Accuracy against the parameter count of a client's model, a marker for every series of every method."""
    measure = measure_of(groups)
    found: list[tuple[str, chart.Point]] = []
    for group in groups:
        known = {name: both[0].mean for name in group.series if (both := model_size(group, name))}
        for place, name in enumerate(group.series):
            result, size = group.final(name, measure), known.get(name, 0.0)
            if result and size > 0:
                label = f"{on_one_line(group.short, 24)} {on_one_line(name, 10)}"
                label = label if len(known) > 1 else on_one_line(group.short, 32)
                look = (6, 0.0) if place else (10, 0.5)
                legend = f"{label} ({format_si(size)})"
                found.append((label, chart.Point(legend, styles[group.short], size, result.mean, *look)))
    if len({point.x for _, point in found}) < 2:
        return None
    texts = "; ".join(f"{label} {format_si(p.x)}, {measure.format(p.mean)}" for label, p in found)
    seeds = " and seeds" if max(len(group.runs) for group in groups) > 1 else ""
    has_more = any(not point.opacity for _, point in found)
    hollow = " Small and hollow: further models of a method." if has_more else ""
    return chart.plot_points(
        [point for _, point in found], measure, "parameters of a client's model", "",
        title=f"{measure.title} and model size",
        alt=f"Scatter chart of {measure.noun} against model size: {texts}.",
        caption=f"Mean {measure.noun} at the last evaluated round against the parameter count of a client's "
        f"model, mean over clients{seeds}: the factors of low-rank weights, of sparse ones the entries other "
        f"than zero, of any other all entries.{hollow} {'Low' if measure.is_loss else 'High'} and to the "
        "left is better.",
    )  # fmt: skip
