"""Figures that compare methods; each function returns a picture, or None if there is nothing to draw.

Accuracy is always in percent, on test examples, as the unweighted mean over the clients that can train. If there are
no classes, the mean test loss takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cbook import boxplot_stats
from matplotlib.patches import Rectangle

from ...core.io.text import on_one_line
from ...results.varied_settings import shorten_names
from ..number_formats import format_si
from ..statistics.groups import RunGroup, measure_of, with_token_names
from ..statistics.measures import TEST_ACCURACY, TEST_LOSS, Measure
from ..statistics.run_statistics import Estimate, estimate, format_estimate, result_sort_key
from ..statistics.setting_names import value_text
from . import chart
from .style import INK, Picture, Style, Styles, Tip, add_legend, drawing, new_figure


def plot_accuracy(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot accuracy against rounds, one line per method, with the 95 % interval over seeds as a band.

    Further series of a method, and the clients that never train, are thin lines in its color, unless there would be
    too many lines (:func:`fedlowrank.report.figures.chart.choose_lines`).
    """
    accuracy_groups = [group for group in groups if not group.measure.is_loss]
    return _plot_learning_curves(
        accuracy_groups, styles, with_token_names(TEST_ACCURACY, groups), is_detailed=True
    )


def plot_loss(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot test loss against rounds: every series if methods are judged by it, otherwise only the headlines."""
    is_detailed = measure_of(groups).is_loss
    return _plot_learning_curves(groups, styles, with_token_names(TEST_LOSS, groups), is_detailed=is_detailed)


def _plot_learning_curves(
    groups: Sequence[RunGroup], styles: Styles, measure: Measure, *, is_detailed: bool
) -> Picture | None:
    lines = chart.choose_lines(groups, measure, chart.LINES if is_detailed else 0, unseen=is_detailed)
    explanation = ""
    if any(line.unseen for line in lines):
        explanation = (
            " Thin lines, without a band, are named after the colon: further models of a method, and its"
        )
        explanation += " mean over the clients that never train, which are left out of all others."
    elif any(line.series_index for line in lines):
        explanation = " Thin lines, without a band: further models of a method, named after the colon."
    return chart.plot_measure(
        lines, styles, measure, opening=f"Mean {measure.sentence_name} over clients after each evaluated round",
        ending=f" Round 0 is the state before training.{explanation}",
    )  # fmt: skip


@drawing()
def plot_results(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot the final result of each method with its 95 % interval over seeds, the best on top, seeds as dots."""
    measure = measure_of(groups)
    results = [(group, result) for group in groups if (result := group.final(measure=measure))]
    results.sort(key=lambda pair: (pair[0].has_diverged, *result_sort_key(measure, pair[1])))
    if not results:
        return None
    figure, axes = new_figure(0.7 + 0.25 * len(results), 3.7)
    table = pd.DataFrame([(r.mean, _shown_ci(r)) for _, r in results], columns=["mean", "ci"])
    lows, highs = (measure.scale * end for end in chart.interval_ends(table, measure.bounds))
    seeds = [measure.scale * group.results(measure=measure)["last"].dropna() for group, _ in results]
    ends = chart.all_ends([table], measure.bounds)
    chart.set_measure_axis(
        axes.xaxis, measure, [value / measure.scale for seed_values in seeds for value in seed_values], ends
    )
    for y, (group, result) in enumerate(results):
        style = styles[group.short_label]
        if result.modes:
            marker_style: Any = {"marker": style.marker, "markersize": 6, "alpha": 0.8, "color": style.color}
            axes.plot(seeds[y], [y] * len(seeds[y]), linestyle="", **marker_style)
            continue
        marker_style = {"marker": "o", "markersize": 4, "alpha": 0.35, "color": style.color}
        axes.plot(seeds[y], [y] * len(seeds[y]), linestyle="", **marker_style)
        axes.hlines(y, lows[y], highs[y], color=style.color, linewidth=2)
        axes.plot([measure.scale * result.mean], [y], marker=style.marker, markersize=7, color=style.color)
    chart.set_method_axis(axes, [group.short_label for group, _ in results])
    texts = [
        f"{group.short_label} {format_estimate(measure, result) if result.modes else measure.format(result.mean)}"
        for group, result in results
    ]
    return Picture(
        figure,
        f"{measure.title} of each method",
        f"Dot chart of final {measure.sentence_name} for {chart.count_methods(len(results))}: {', '.join(texts)}.",
        f"Mean {measure.sentence_name} over clients at the last evaluated round"
        + ("" if all(group.has_diverged for group, _ in results) else ", the best on top")
        + (
            ". One seed, so there is no interval."
            if all(result.n == 1 for _, result in results)
            else "; line: 95 % interval of the mean over seeds, cut to possible values; light dots: seeds."
        )
        + chart.note_modes(group for group, result in results if result.modes)
        + "".join(
            f" Last: {group.short_label}, {result.diverged} diverged."
            for group, result in results
            if result.diverged
        ),
        tips=tuple(
            Tip(
                axes,
                measure.scale * result.mean,
                y,
                f"{group.short_label}: {format_estimate(measure, result)}",
            )
            for y, (group, result) in enumerate(results)
        ),
    )


@drawing()
def plot_communication(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot accuracy against the bytes sent both ways since the start; logarithmic if methods differ widely."""
    measure = measure_of(groups)
    lines = [chart.Line(g, g.short_label, curve) for g in groups if len(curve := g.curve(measure=measure))]
    bytes_by_label = {line.label: float(line.table["bytes"].iloc[-1]) for line in lines}
    totals = [total for total in bytes_by_label.values() if total > 0]
    if not totals:
        return None
    is_log = max(totals) / min(totals) >= chart.LOG_FROM
    # A logarithmic axis has no place for values before the first message.
    sending_lines = [
        line._replace(table=line.table[line.table["bytes"] > 0] if is_log else line.table)
        for line in lines
        if bytes_by_label[line.label] > 0
    ]
    silent_lines = [line for line in lines if bytes_by_label[line.label] <= 0]
    figure, axes = new_figure(3.1)
    means = [mean for line in sending_lines for mean in line.table["mean"]]
    means += [line.table["mean"].iloc[-1] for line in silent_lines]
    ends = chart.all_ends([line.table for line in sending_lines], measure.bounds)
    chart.set_measure_axis(axes.yaxis, measure, means, ends)
    entries = chart.draw_lines(axes, sending_lines, styles, measure.scale, bounds=measure.bounds, x="bytes")
    for line in silent_lines:
        style = styles[line.group.short_label]
        axes.axhline(measure.scale * line.table["mean"].iloc[-1], color=style.color, linestyle=style.line)
        entries.append(chart.legend_entry(style, marker=""))
    positive_sizes = [size for line in lines for size in line.table["bytes"] if size > 0]
    chart.set_prefix_axis(axes.xaxis, "B", positive_sizes if is_log else None)
    axes.set(xlabel=f"sent both ways{', logarithmic' if is_log else ''}")
    add_legend(figure, entries, [line.label for line in (*sending_lines, *silent_lines)])
    texts = ", ".join(f"{label} {format_si(total, 'B')}" for label, total in bytes_by_label.items())
    level_note = (
        f" A level line is the final {measure.sentence_name} of a method that sends nothing."
        if silent_lines
        else ""
    )
    return Picture(
        figure,
        f"{measure.title} over communication",
        f"Line chart of {measure.sentence_name} against bytes sent for {chart.count_methods(len(lines))}. Sent "
        f"until the end of the lines: {texts}.",
        f"Mean {measure.sentence_name} over clients against the bytes of all messages so far, both ways"
        f"{chart.note_band(groups, measure.bounds)}{chart.note_cut(axes, ends)}{level_note}"
        f"{chart.note_points(lines)}{chart.note_ends(lines)}",
        tips=chart.make_tips(
            axes,
            sending_lines,
            measure.format,
            measure.scale,
            x="bytes",
            x_formatter=lambda size: format_si(size, "B"),
        ),
    )


@drawing()
def plot_clients(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Draw box plots of the clients' accuracies at the last evaluated round, one per method, with ``+`` at the mean."""
    measure = measure_of(groups)
    values_by_group = []
    for group in groups:
        values = np.concatenate([run.client_values(group.headline, measure) for run in group.runs])
        if len(values):
            values_by_group.append((group, measure.scale * values))
    if not values_by_group:
        return None
    figure, axes = new_figure(0.9 + 0.36 * len(values_by_group))
    chart.set_measure_axis(axes.xaxis, measure, [value for _, values in values_by_group for value in values])
    for y, (group, values) in enumerate(values_by_group):
        _draw_box(axes, y, values, styles[group.short_label])
    chart.set_method_axis(axes, [group.short_label for group, _ in values_by_group])
    seed_count = max(len(group.runs) for group, _ in values_by_group)
    pooled_note = f" The clients of all {seed_count} seeds are pooled." if seed_count > 1 else ""
    medians = [(group, float(np.median(values))) for group, values in values_by_group]
    texts = [f"{g.short_label} {measure.format(m) if measure.is_loss else f'{m:.1f} %'}" for g, m in medians]
    return Picture(
        figure,
        "Spread over clients",
        f"Box plot of the {measure.sentence_name} of clients for {chart.count_methods(len(values_by_group))}. Medians: "
        f"{', '.join(texts)}.",
        f"{measure.sentence_name.capitalize()} of each client at the last evaluated round. Box: quartiles; line: "
        "median; +: mean; whiskers: the furthest client within 1.5 box lengths; dots: clients "
        f"beyond.{pooled_note}",
        tips=tuple(
            Tip(axes, median, y, f"{group.short_label}: median {measure.format(median / measure.scale)}")
            for y, (group, median) in enumerate(medians)
        ),
    )


def _draw_box(axes: Axes, y: int, values: Any, style: Style) -> None:
    box = boxplot_stats(np.asarray(values))[0]
    line_style: Any = {"color": style.color, "linewidth": 1.3}
    axes.hlines([y, y], [box["whislo"], box["q3"]], [box["q1"], box["whishi"]], **line_style)
    axes.vlines([box["whislo"], box["whishi"]], y - 0.15, y + 0.15, **line_style)
    corner, width = (box["q1"], y - 0.3), box["q3"] - box["q1"]
    face = (*style.rgb, 0.25)
    axes.add_patch(Rectangle(corner, width, 0.6, facecolor=face, edgecolor=style.color, linewidth=1.3))
    axes.vlines([box["med"]], y - 0.3, y + 0.3, color=style.color, linewidth=2.4)
    dots: Any = {"linestyle": "", "marker": "o", "markersize": 3, "color": style.color}
    axes.plot(box["fliers"], [y] * len(box["fliers"]), **dots)
    axes.plot([box["mean"]], [y], linestyle="", marker="+", markersize=9, markeredgewidth=1.8, color=INK)


def plot_trade_off(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot accuracy against computation, with marker areas that grow with the bytes sent."""
    measure = measure_of(groups)
    costs_by_group = []
    for group in groups:
        result = group.final(measure=measure)
        flops = estimate(run.costs["flops"] for run in group.runs)
        size = estimate(run.costs["bytes_up"] + run.costs["bytes_down"] for run in group.runs)
        if result and flops and size and flops.mean > 0:
            costs_by_group.append((group, result.mean, flops.mean, size.mean))
    if not costs_by_group:
        return None
    max_size = max(size for *_, size in costs_by_group) or 1.0
    points = [
        chart.Point(
            f"{on_one_line(group.short_label, 30)} ({format_si(size, 'B')})", styles[group.short_label], flops, mean,
            math.sqrt(36 + 700 * size / max_size), 0.35,
        )
        for group, mean, flops, size in costs_by_group
    ]  # fmt: skip
    texts = "; ".join(
        f"{group.short_label} {measure.format(mean)}, {format_si(flops, 'FLOP')}, {format_si(size, 'B')}"
        for group, mean, flops, size in costs_by_group
    )
    return chart.plot_points(
        points, measure, "training computation per run", "FLOP",
        title=f"{measure.title}, computation and communication",
        alt=f"Scatter chart for {chart.count_methods(len(costs_by_group))}: {texts}.",
        caption=f"Mean {measure.sentence_name} at the last evaluated round against the floating-point operations of "
        "training; the area of a marker grows with the bytes sent both ways, given in the legend. "
        f"{'Low' if measure.is_loss else 'High'}, to the left and small is better.",
    )  # fmt: skip


@drawing()
def plot_sweep(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot final accuracy against the varied setting, one line per method, with the 95 % interval over seeds."""
    measure = measure_of(groups)
    results = [(group, result) for group in groups if group.vary and (result := group.final(measure=measure))]
    settings = list(dict.fromkeys(_setting(group) for group, _ in results))
    if len(settings) < 2:
        return None
    names = list(dict.fromkeys(key for group, _ in results for key, _ in group.vary))
    values = [dict(group.vary).get(names[0]) for group, _ in results]
    is_number = len(names) == 1 and all(
        isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values
    )
    positions: list[Any] = values if is_number else [settings.index(_setting(group)) for group, _ in results]
    table = pd.DataFrame(
        [(group.short_label, result.mean, _shown_ci(result)) for group, result in results],
        columns=["method", "mean", "ci"], index=positions,
    )  # fmt: skip
    figure, axes = new_figure(3.1)
    methods = list(dict.fromkeys(table["method"]))
    for i, method_name in enumerate(methods):
        rows = table[table["method"] == method_name].sort_index(kind="stable")
        chart.draw_bars(axes, rows, styles[method_name], measure, (i - (len(methods) - 1) / 2) * 4)
    ticks = sorted(set(positions))
    if is_number:
        chart.set_value_axis(axes, ticks, is_log=ticks[0] > 0 and ticks[-1] / ticks[0] >= chart.LOG_FROM)
    else:
        texts = [on_one_line(setting, 32) for setting in settings]
        rotation, alignment = (30, "right") if sum(map(len, texts)) > 50 else (0, "center")
        axes.set_xlim(-0.4, len(ticks) - 0.6)
        axes.set_xticks(ticks, texts, rotation=rotation, ha=alignment)
    short_names, keys = ", ".join(shorten_names(names)), ", ".join(names)
    axes.set(xlabel=short_names)
    ends = chart.all_ends([table], measure.bounds)
    chart.set_measure_axis(axes.yaxis, measure, table["mean"].tolist(), ends)
    add_legend(figure, [chart.legend_entry(styles[method_name]) for method_name in methods], methods)
    texts = [f"{group.label} {measure.format(result.mean)}" for group, result in results]
    seeds_note = ", mean over seeds with bars of the 95 % interval" if table["ci"].notna().any() else ""
    return Picture(
        figure,
        f"{measure.title} against {short_names}",
        f"Line chart of final {measure.sentence_name}: {'; '.join(texts)}.",
        f"Mean {measure.sentence_name} over clients at the last evaluated round for each value of {keys}{seeds_note}.",
        tips=tuple(
            Tip(axes, position, measure.scale * result.mean, f"{group.label}: {measure.format(result.mean)}")
            for position, (group, result) in zip(positions, results, strict=True)
        ),
    )


def _shown_ci(result: Estimate) -> float:
    """Half-width of the interval of a result; NaN if results are bimodal, because it would describe no seed."""
    return math.nan if result.modes else result.ci


def _setting(group: RunGroup) -> str:
    names = shorten_names([key for key, _ in group.vary])
    return ", ".join(
        f"{name}={value_text(value)}" for name, (_, value) in zip(names, group.vary, strict=True)
    )
