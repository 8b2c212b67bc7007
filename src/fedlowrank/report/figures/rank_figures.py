"""Figures of the savings and costs of low rank: ranks, downlink, model size, accuracy relative to a reference."""

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
from ..statistics.paired import paired_differences
from . import chart
from .style import INK, Picture, Style, Styles, add_legend, drawing, new_figure, new_panels

PANELS = 24  # maximum number of panels of ranks; the weights of deeper models are thinned out evenly in depth
COLUMNS = 3
POINTS = 120  # maximum number of rounds in a panel of ranks, which is too narrow for more
# Least relevant relative change of a downlink: bytes of a message vary slightly.
MIN_RELATIVE_CHANGE = 0.005
CLIENTS = 20  # minimum number of clients for a violin: with few clients, the box plot shows everything


@drawing()
def plot_ranks(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot the rank of every low-rank weight against rounds, in percent of its first rank, one panel per weight."""
    curves_of_groups = [(group, curves) for group in groups if (curves := rank_curves(group))]
    names = list(dict.fromkeys(name for _, curves in curves_of_groups for name in curves))
    if not names or all(len(rank.percent) < 2 for _, curves in curves_of_groups for rank in curves.values()):
        return None
    panel_names = [names[i] for i in chart.space_evenly(len(names), PANELS)]
    columns = min(COLUMNS, len(panel_names))
    rows = math.ceil(len(panel_names) / columns)
    figure, panels = new_panels(0.5 + max(0.86 * rows, 2.2), rows, columns, sharey=True)
    for axes, name in zip(panels.flat, panel_names, strict=False):
        curve_pairs = [(group, curves[name]) for group, curves in curves_of_groups if name in curves]
        percent_lines = [
            chart.Line(g, g.short_label, chart.thin_out(rank.percent, POINTS)) for g, rank in curve_pairs
        ]
        chart.draw_lines(axes, percent_lines, styles)
        title = f"{_layer(name)}\n{_first_to_last([rank for _, rank in curve_pairs])}"
        axes.set_title(title, fontsize=8, loc="left", pad=3)
    for axes in chart.finish_grid(panels, len(panel_names)):
        axes.set_xlabel("round")
    percent_tables = [
        curves[name].percent for _, curves in curves_of_groups for name in panel_names if name in curves
    ]
    top = max(100.0, *chart.all_ends(percent_tables, chart.NON_NEGATIVE))
    panels[0, 0].set(ylim=(-0.05 * top, 1.05 * top))
    panels[0, 0].yaxis.set_major_locator(FixedLocator([0, 50, 100]) if top <= 100 else MaxNLocator(nbins=3))
    chart.set_round_axis(panels[0, 0].xaxis, 4)
    figure.supylabel("rank / % of the first")
    drawn_groups = [group for group, _ in curves_of_groups]
    entries = [chart.legend_entry(styles[group.short_label], marker="") for group in drawn_groups]
    add_legend(figure, entries, [group.short_label for group in drawn_groups])
    texts = "; ".join(
        f"{group.short_label}: "
        + ", ".join(f"{_layer(n)} {r.first:.0f} to {r.last:.0f}" for n, r in curves.items())
        for group, curves in curves_of_groups
    )
    count_note = f" {len(panel_names)} of {len(names)} weights are drawn, evenly spaced in depth."
    order = " in the order of the legend" if len(curves_of_groups) > 1 else ""
    return Picture(
        figure,
        "Rank of each layer over rounds",
        f"Line charts of the rank of {len(names)} weights against rounds for "
        f"{chart.count_methods(len(curves_of_groups))}. From the first rank to the last, {texts}.",
        "Rank of the server's weights after each round, in percent of the rank before training, a panel a "
        f"weight in the order of the model{chart.note_band(drawn_groups)} Above each panel: the first rank, "
        f"an arrow, the last one{order}.{count_note if len(panel_names) < len(names) else ''}",
    )


def _layer(name: str) -> str:
    return on_one_line(name.removesuffix(".weight"), 24)


def _first_to_last(ranks: Sequence[RankCurve]) -> str:
    """Format ranks as ``384 → 40``, or ``384 → 40, 75`` for two methods; a range of last ranks if that is too long."""
    first_text = ", ".join(dict.fromkeys(f"{rank.first:.0f}" for rank in ranks))
    text = f"{first_text} → {', '.join(f'{rank.last:.0f}' for rank in ranks)}"
    last_ranks = [rank.last for rank in ranks]
    return text if len(text) <= 24 else f"{first_text} → {min(last_ranks):.0f}–{max(last_ranks):.0f}"


@drawing()
def plot_downlink(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot bytes from the server to each participant against rounds, if they or the methods' ranks differ.

    The axis begins at 0, so that a fall is as large as it looks; it is logarithmic only if a change would be too
    small to see.
    """
    downlinks = [(group, table) for group in groups if len(table := downlink(group))]
    max_bytes = max((float(table["mean"].max()) for _, table in downlinks), default=0.0)
    if max_bytes <= 0:
        return None
    means = [table["mean"] for _, table in downlinks]
    peaks = [mean.max() for mean in means if mean.max() - mean.min() > MIN_RELATIVE_CHANGE * mean.max()]
    last_ranks = {tuple((name, rank.last) for name, rank in rank_curves(group).items()) for group in groups}
    if not peaks and len(last_ranks) < 2:
        return None
    is_log = bool(peaks) and max(peaks) * chart.LOG_FROM <= max_bytes
    silent_names = [group.short_label for group, table in downlinks if is_log and table["mean"].max() <= 0]
    drawn_tables = [
        (group, chart.thin_out(table)) for group, table in downlinks if group.short_label not in silent_names
    ]
    figure, axes = new_figure(3.1)
    for i, (group, table) in enumerate(drawn_tables):
        style = styles[group.short_label]
        # Markers distinguish coinciding lines: each method has them at rounds of its own.
        marker_count = max(1, min(3, len(table) // len(drawn_tables)))
        marker_indices = sorted(
            {
                int(len(table) / marker_count * (k + (i + 0.5) / len(drawn_tables)))
                for k in range(marker_count)
            }
        )
        axes.plot(
            table.index, table["mean"].where(table["mean"] > 0) if is_log else table["mean"], color=style.color,
            linestyle=style.line, marker=style.marker, markersize=5, markevery=marker_indices, dash_capstyle="butt",
        )  # fmt: skip
    positive_values = [float(value) for _, table in drawn_tables for value in table["mean"] if value > 0]
    chart.set_prefix_axis(axes.yaxis, "B", positive_values if is_log else None)
    if not is_log:
        chart.set_limits_from_zero(axes, max_bytes)
    axes.set(xlabel="round", ylabel="downlink, logarithmic" if is_log else "downlink per participant")
    chart.set_round_axis(axes.xaxis)
    labels = [
        f"{on_one_line(group.short_label, 22)}: {_format_change(table)}" for group, table in drawn_tables
    ]
    add_legend(figure, [chart.legend_entry(styles[group.short_label]) for group, _ in drawn_tables], labels)
    texts = ", ".join(f"{group.short_label} {_format_change(table)}" for group, table in downlinks)
    return Picture(
        figure,
        "Downlink over rounds",
        f"Line chart of bytes sent to each participant against rounds for {chart.count_methods(len(downlinks))}. "
        f"From the first round to the last: {texts}.",
        "Bytes of the server's messages in each round, divided by the number of participants"
        f"{chart.note_seeds(groups)}; the legend gives the first and the last round, once if they are equal. "
        "Each method has its markers at rounds of its own, so that lines which coincide can be told apart."
        + (f" Sends nothing: {', '.join(silent_names)}." if silent_names else ""),
    )


def _format_change(table: pd.DataFrame) -> str:
    first, last = format_si(table["mean"].iloc[0], "B"), format_si(table["mean"].iloc[-1], "B")
    return first if first == last else f"{first} → {last}"


@drawing()
def plot_relative_accuracy(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Draw violin plots of each client's accuracy, or loss, minus that under a reference method, with pooled seeds.

    The reference is FedAvg, otherwise Standalone, otherwise the first method.
    """
    evaluated_groups = [group for group in groups if group.final()]
    if len({group.label for group in evaluated_groups}) < 2:
        return None
    by_method = {group.method: group for group in reversed(evaluated_groups)}
    reference = by_method.get("fedavg") or by_method.get("standalone") or evaluated_groups[0]
    measure = measure_of(evaluated_groups)
    if max(len(run.record.clients) for run in reference.runs) < CLIENTS:
        return None
    values_by_line = []
    for line in chart.choose_lines(evaluated_groups, measure):
        differences = paired_differences(line.group, reference, measure, line.series)
        values = measure.scale * np.concatenate([np.empty(0), *differences])
        if len(values) and not (line.group is reference and not line.series_index):
            values_by_line.append((line, values))
    if not values_by_line:
        return None
    figure, axes = new_figure(0.9 + 0.36 * len(values_by_line))
    axes.axvline(0, color=INK, linewidth=1, alpha=0.6)
    for y, (line, values) in enumerate(values_by_line):
        _draw_violin(axes, y, values, styles[line.group.short_label], 0.1 if line.series_index else 0.3)
    chart.set_method_axis(axes, [line.label for line, _ in values_by_line])
    unit = "" if measure.is_loss else " / points"
    axes.set(xlabel=f"{measure.sentence_name} minus that of {on_one_line(reference.short_label, 24)}{unit}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
    format_spec = "+.3g" if measure.is_loss else "+.1f"
    medians = [
        f"{line.label} {f'{np.median(values):{format_spec}}'.replace('-', '−')}"
        for line, values in values_by_line
    ]
    method_count = len({line.group.label for line, _ in values_by_line})
    seed_count = max(len(line.group.runs) for line, _ in values_by_line)
    points = "" if measure.is_loss else " in percentage points"
    return Picture(
        figure,
        f"{measure.title} relative to {reference.short_label}",
        f"Violin plot of the {measure.sentence_name} of clients minus that under {reference.short_label}, for "
        f"{chart.count_methods(method_count)}. Medians{points}: {', '.join(medians)}.",
        f"{measure.sentence_name.capitalize()} of each client at the last evaluated round minus that of the same "
        f"client under {reference.short_label} with the same seed{',' if points else ''}{points}; "
        f"{'left' if measure.is_loss else 'right'} of the line is better. Thick line: median; thin lines: "
        "quartiles; shape: density of the clients, all shapes equally wide at their widest."
        + (f" The clients of all {seed_count} seeds are pooled." if seed_count > 1 else ""),
    )


def _draw_violin(axes: Axes, y: int, values: NDArray[np.float64], style: Style, opacity: float) -> None:
    from scipy.stats import gaussian_kde  # slow to import

    low, high = float(values.min()), float(values.max())
    lower_quartile, median, upper_quartile = (float(v) for v in np.quantile(values, [0.25, 0.5, 0.75]))
    if high - low > 1e-9:
        grid = np.linspace(low, high, 100)
        density = gaussian_kde(values)(grid)
        half_width = 0.42 * density / density.max()
        face = (*style.rgb, opacity)
        axes.fill_between(
            grid, y - half_width, y + half_width, facecolor=face, edgecolor=style.color, linewidth=1.1
        )
        quartile_widths = 0.42 * np.interp([lower_quartile, upper_quartile], grid, density) / density.max()
        axes.vlines(
            [lower_quartile, upper_quartile],
            y - quartile_widths,
            y + quartile_widths,
            color=style.color,
            linewidth=1,
        )
    axes.vlines([median], y - 0.42, y + 0.42, color=style.color, linewidth=2.4)


def plot_model_size(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot accuracy against the parameter count of a client's model, with a marker for every series of every method."""
    measure = measure_of(groups)
    labeled_points: list[tuple[str, chart.Point]] = []
    for group in groups:
        sizes = {
            name: size_estimates[0].mean
            for name in group.series
            if (size_estimates := model_size(group, name))
        }
        for index, name in enumerate(group.series):
            result, size = group.final(name, measure), sizes.get(name, 0.0)
            if result and size > 0:
                label = f"{on_one_line(group.short_label, 24)} {on_one_line(name, 10)}"
                label = label if len(sizes) > 1 else on_one_line(group.short_label, 32)
                marker_look = (6, 0.0) if index else (10, 0.5)
                legend = f"{label} ({format_si(size)})"
                labeled_points.append(
                    (label, chart.Point(legend, styles[group.short_label], size, result.mean, *marker_look))
                )
    if len({point.x for _, point in labeled_points}) < 2:
        return None
    texts = "; ".join(f"{label} {format_si(p.x)}, {measure.format(p.mean)}" for label, p in labeled_points)
    seeds_note = " and seeds" if max(len(group.runs) for group in groups) > 1 else ""
    has_more = any(not point.opacity for _, point in labeled_points)
    hollow_note = " Small and hollow: further models of a method." if has_more else ""
    return chart.plot_points(
        [point for _, point in labeled_points], measure, "parameters of a client's model", "",
        title=f"{measure.title} and model size",
        alt=f"Scatter chart of {measure.sentence_name} against model size: {texts}.",
        caption=f"Mean {measure.sentence_name} at the last evaluated round against the parameter count of a client's "
        f"model, mean over clients{seeds_note}: the factors of low-rank weights, of sparse ones the entries other "
        f"than zero, of any other all entries.{hollow_note} {'Low' if measure.is_loss else 'High'} and to the "
        "left is better.",
    )  # fmt: skip
