"""Shared parts of figures: lines, axes with their limits and ticks, legend entries, and texts for captions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation, Transform
from numpy.typing import NDArray

from ...core.io.text import join_words, on_one_line
from ..number_formats import format_si, format_tick
from ..statistics.groups import RunGroup
from ..statistics.measures import Measure
from .style import Picture, Style, Styles, Tip, add_legend, drawing, new_figure

Bounds = tuple[float, float]
Rounds = TypeVar("Rounds", pd.DataFrame, pd.Series)
UNBOUNDED: Bounds = (-math.inf, math.inf)
NON_NEGATIVE: Bounds = (0.0, math.inf)

LOG_FROM = 20  # ratio of the largest to the smallest positive value from which an axis is logarithmic
DECADES = 100.0  # ratio of the largest to the smallest loss beyond which an axis of losses is logarithmic
# Maximum number of lines in a figure with the further series; with more, only the headlines are drawn.
LINES = 14
POINTS = 250  # maximum number of points of a line: about one for each 1.3 units of the figure's width
TICK = 0.1  # least distance of two labels on an axis of values, as a share of the axis
MARGIN = 0.12  # margin of the values on an axis, as a share of their range: markers stand some points aside
MAX_TIPS = 40  # maximum number of points of a line that show their value under the pointer
THIN_LINE_WIDTH = 1.0  # width of the line of a further series of a method, in points


class Line(NamedTuple):
    """A line in a figure."""

    group: RunGroup
    label: str  # name in the legend
    table: pd.DataFrame  # columns ``mean`` and ``ci``, indexed by round
    series_index: int = 0  # 0 for the headline of the method, then 1, 2, ... for thin lines
    series: str | None = None
    unseen: bool = False  # whether the line is about the clients that never train
    seeds: Sequence[pd.Series] = ()  # values by round, thin lines instead of a band if bimodal


def choose_lines(
    groups: Sequence[RunGroup], measure: Measure, max_lines: int = LINES, *, unseen: bool = False
) -> list[Line]:
    """Choose the headline of every evaluated group, each followed by its further series unless those are too many.

    With ``unseen``, the headline over the clients that never train follows, if there are any.
    """
    lines = []
    for group in groups:
        for index, name in enumerate(group.series):
            label = f"{group.short_label}: {on_one_line(name)}" if index else group.short_label
            seeds = group.seed_curves(name, measure) if not index else []
            lines.append(Line(group, label, group.curve(name, measure), index, name, seeds=seeds))
        if unseen:
            curve, label = group.curve(measure=measure, unseen=True), f"{group.short_label}: unseen clients"
            lines.append(Line(group, label, curve, len(group.series), group.headline, unseen=True))
    lines = [line for line in lines if len(line.table)]
    return lines if len(lines) <= max_lines else [line for line in lines if not line.series_index]


def interval_ends(table: pd.DataFrame, bounds: Bounds = UNBOUNDED) -> tuple[pd.Series, pd.Series]:
    """Compute lower and upper ends of the intervals ``mean`` ± ``ci``, cut to possible values."""
    half_width = table["ci"].fillna(0.0)
    return (table["mean"] - half_width).clip(*bounds), (table["mean"] + half_width).clip(*bounds)


def all_ends(tables: Iterable[pd.DataFrame], bounds: Bounds = UNBOUNDED) -> list[float]:
    """List both ends of all intervals, for which an axis must have room."""
    return [float(end) for table in tables for side in interval_ends(table, bounds) for end in side]


def legend_entry(style: Style, marker: str | None = None, line: Any = None) -> Line2D:
    """Make a legend entry with the line and marker of a style, or with the given ones instead."""
    return Line2D(
        [], [], color=style.color, linestyle=style.line if line is None else line, markersize=6,
        marker=style.marker if marker is None else marker,
    )  # fmt: skip


def draw_lines(
    axes: Axes, lines: Sequence[Line], styles: Styles, scale: float = 1.0, *, bounds: Bounds = NON_NEGATIVE,
    x: str | None = None,
) -> list[Line2D]:  # fmt: skip
    """Draw means over seeds with their 95 % interval, cut to ``bounds``, as a band; return legend entries.

    The limits of a logarithmic axis must be set before. ``scale`` converts to the unit of the axis, ``x`` names the
    column for the horizontal axis instead of the rounds, and a thin line has no band.
    """
    entries = []
    for line in lines:
        style, table = styles[line.group.short_label].series_style(line.series_index), thin_out(line.table)
        x_values = (table.index if x is None else table[x]).to_numpy(dtype=np.float64)
        if not line.series_index and table["ci"].notna().any():
            low, high = interval_ends(table, bounds)
            if axes.get_yscale() == "log":
                # A logarithmic axis has no place below zero.
                low = np.maximum(low, axes.get_ylim()[0] / scale)
            axes.fill_between(x_values, scale * low, scale * high, color=style.color, alpha=0.15, linewidth=0)
        for seed_curve in line.seeds if x is None else ():
            axes.plot(seed_curve.index, scale * seed_curve, color=style.color, linewidth=0.8, alpha=0.6)
        # A single evaluation is drawn as a point, because a line through it would show nothing.
        entry = legend_entry(style, marker=style.marker if len(x_values) == 1 else "")
        if line.series_index:
            entry.set(linewidth=THIN_LINE_WIDTH, markerfacecolor="none")
        axes.plot(
            x_values, scale * table["mean"], color=style.color, linestyle=style.line, marker=entry.get_marker(),
            dash_capstyle="butt", linewidth=entry.get_linewidth(),
            markerfacecolor=entry.get_markerfacecolor(),
        )  # fmt: skip
        entries.append(entry)
    return entries


def make_tips(
    axes: Axes, lines: Sequence[Line], formatter: Callable[[float], str], scale: float = 1.0, *,
    x: str | None = None, x_formatter: Callable[[float], str] = "round {:g}".format,
) -> tuple[Tip, ...]:  # fmt: skip
    """List the values of lines as drawn by :func:`draw_lines`; ``formatter`` and ``x_formatter`` format them."""
    tips = []
    for line in lines:
        table = thin_out(line.table, MAX_TIPS)
        for x_value, mean in zip(table.index if x is None else table[x], table["mean"], strict=True):
            tips.append(
                Tip(axes, x_value, scale * mean, f"{line.label}, {x_formatter(x_value)}: {formatter(mean)}")
            )
    return tuple(tips)


@drawing()
def plot_lines(
    lines: Sequence[Line], styles: Styles, set_axis: Callable[[Axes, list[float]], None], *, title: str,
    description: str, formatter: Callable[[float], str], opening: str, ending: str = "", scale: float = 1.0,
    bounds: Bounds = NON_NEGATIVE, height: float = 2.6,
) -> Picture | None:  # fmt: skip
    """Plot lines against rounds; None without lines.

    ``set_axis`` sets up the vertical axis, given the ends of all bands. ``description`` describes the plot in a
    sentence, and ``formatter`` formats a value. ``opening`` is the caption before the note on seeds, ``ending`` the
    rest.
    """
    if not lines:
        return None
    figure, axes = new_figure(height)
    ends = all_ends([line.table for line in lines if not line.series_index], bounds)
    ends += [
        float(value)
        for line in lines
        for seed_curve in line.seeds
        for value in seed_curve
        if math.isfinite(value)
    ]
    set_axis(axes, ends)
    entries = draw_lines(axes, lines, styles, scale, bounds=bounds)
    axes.set_xlabel("round")
    set_round_axis(axes.xaxis)
    add_legend(figure, entries, [line.label for line in lines])
    last_values = ", ".join(f"{line.label} {formatter(line.table['mean'].iloc[-1])}" for line in lines)
    methods = count_methods(len({line.group.label for line in lines}))
    return Picture(
        figure, title, f"Line chart of {description} against rounds for {methods}. At the end of the lines: {last_values}.",
        f"{opening}{note_band([line.group for line in lines], bounds)}{note_cut(axes, ends)}{ending}"
        f"{note_modes(line.group for line in lines if line.seeds)}"
        f"{note_points(lines)}{note_ends(lines)}",
        tips=make_tips(axes, lines, formatter, scale),
    )  # fmt: skip


def plot_measure(
    lines: Sequence[Line], styles: Styles, measure: Measure, *, opening: str, ending: str = ""
) -> Picture | None:  # fmt: skip
    """Plot accuracies or losses against rounds; None without lines."""
    means = [mean for line in lines for mean in line.table["mean"]]
    return plot_lines(
        lines, styles, lambda axes, ends: set_measure_axis(axes.yaxis, measure, means, ends),
        title=f"{measure.title} over rounds", description=measure.sentence_name, formatter=measure.format,
        opening=opening, ending=ending, scale=measure.scale, bounds=measure.bounds, height=3.1,
    )  # fmt: skip


def draw_bars(
    axes: Axes, table: pd.DataFrame, style: Style, measure: Measure, offset: float, marker_size: float = 5.0
) -> None:  # fmt: skip
    """Draw means against the index, with bars of their 95 % interval, shifted by ``offset`` points.

    The shift keeps lines from hiding each other's bars.
    """
    low, high = interval_ends(table, measure.bounds)
    bars = measure.scale * np.array([table["mean"] - low, high - table["mean"]])
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    shift: Transform = ScaledTranslation(offset / 72, 0, figure.dpi_scale_trans)
    x, y = table.index.to_numpy(), measure.scale * table["mean"].to_numpy()
    axes.errorbar(
        x, y, yerr=bars if bars.any() else None, color=style.color,
        linestyle=style.line, marker=style.marker, markersize=marker_size, capsize=2, elinewidth=1,
        transform=axes.transData + shift,
    )  # fmt: skip


def is_wide_range(values: Sequence[float], factor: float) -> bool:
    """Whether all values are positive and the largest is more than ``factor`` times the smallest."""
    is_positive = bool(values) and all(value > 0 and math.isfinite(value) for value in values)
    return is_positive and max(values) > factor * min(values)


def set_measure_axis(
    axis: Axis, measure: Measure, means: Sequence[float], ends: Sequence[float] = ()
) -> None:  # fmt: skip
    """Set label, scale, limits and ticks of an axis of accuracies or losses around means and ends of intervals.

    Losses are on a logarithmic axis if all means are positive and span more than two decades. The axis shows at most
    one decade below the least mean, because it has no place for ends that are not positive.
    """
    axes = axis.axes
    set_limits = axes.set_xlim if isinstance(axis, XAxis) else axes.set_ylim
    axis.set_label_text(measure.axis_label)
    low, high = min([*means, *ends]), max([*means, *ends])
    if not measure.is_loss:
        if not isinstance(axis, XAxis):
            pad = max(1.0, 6 * (high - low))
            set_limits(*clip_percent((100 * low - pad, 100 * high + pad)))
            axis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
    elif is_wide_range(means, DECADES):
        axis.set_label_text(f"{measure.axis_label}, logarithmic")
        low = max(low, min(means) / 10)
        (axes.set_xscale if isinstance(axis, XAxis) else axes.set_yscale)("log")
        pad = (high / low) ** 0.05
        set_limits(low / pad, high * pad)
        axis.set_major_locator(LogLocator(numticks=8))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    else:
        # A loss has no scale of its own, so equal losses still need an axis.
        pad = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
        set_limits(low - pad, high + pad)
        axis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))


class Point(NamedTuple):
    """A marker in a scatter chart, for a method or series, at ``x`` and ``mean``, ``size`` wide."""

    label: str
    style: Style
    x: float
    mean: float
    size: float
    opacity: float  # opacity of the face; 0 for none


@drawing()
def plot_points(
    points: Sequence[Point], measure: Measure, xlabel: str, unit: str, *, title: str, alt: str, caption: str
) -> Picture:  # fmt: skip
    """Plot results as a scatter chart, logarithmic if the points are far apart."""
    figure, axes = new_figure(3.1)
    entries = []
    for point in points:
        face = (*point.style.rgb, point.opacity) if point.opacity else "none"
        marker_style: Any = {
            "markerfacecolor": face,
            "markeredgecolor": point.style.color,
            "markeredgewidth": 1.4,
        }
        coordinates = [point.x], [measure.scale * point.mean]
        # Large markers are drawn below small ones.
        marker_style |= {"marker": point.style.marker, "linestyle": "", "zorder": 2 + 1 / point.size}
        axes.plot(*coordinates, markersize=point.size, **marker_style)
        entries.append(Line2D([], [], markersize=min(point.size, 8), **marker_style))
    x_values = [point.x for point in points]
    is_log = max(x_values) / min(x_values) >= LOG_FROM
    set_prefix_axis(axes.xaxis, unit, x_values if is_log else None)
    axes.set_xlabel(f"{xlabel}{', logarithmic' if is_log else ''}")
    set_measure_axis(axes.yaxis, measure, [point.mean for point in points])
    axes.autoscale()
    axes.margins(0.16)
    if not measure.is_loss:
        axes.set_ylim(*clip_percent(axes.get_ylim()))
    if not is_log:
        axes.set_xlim(left=max(0.0, axes.get_xlim()[0]))
    add_legend(figure, entries, [point.label for point in points])
    tips = tuple(
        Tip(axes, p.x, measure.scale * p.mean, f"{p.label}: {measure.format(p.mean)}, {format_si(p.x, unit)}")
        for p in points
    )
    return Picture(figure, title, alt, caption, tips=tips)


def space_evenly(count: int, max_count: int) -> list[int]:
    """Choose up to ``max_count`` indices below ``count``, evenly spaced, with both ends."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(max_count, count)).tolist()})


def thin_out(table: Rounds, max_rounds: int = POINTS) -> Rounds:
    """Select up to ``max_rounds`` rounds of a table, evenly spaced, with both ends, because more points are not visible."""
    return table.iloc[space_evenly(len(table), max_rounds)]


def finish_grid(panels: NDArray[Any], panel_count: int) -> list[Axes]:
    """Hide unused panels; return the last visible panel of each column, which gets the tick labels."""
    columns = panels.shape[1]
    for axes in panels.flat[panel_count:]:
        axes.set_visible(False)
    bottom_axes = [panels[(panel_count - 1 - i) // columns, i] for i in range(columns)]
    for axes in bottom_axes:
        axes.tick_params(labelbottom=True)
    return bottom_axes


def clip_percent(limits: tuple[float, float]) -> tuple[float, float]:
    """Cut limits to the range of percentages, with a small margin."""
    low, high = limits
    return (max(low, -1.5) if low < 0 else low, min(high, 101.5))


def set_round_axis(axis: Axis, max_ticks: int = 8) -> None:
    """Set ticks at whole rounds."""
    axis.set_major_locator(MaxNLocator(nbins=max_ticks, integer=True, steps=[1, 2, 5, 10]))


def set_limits_from_zero(axes: Axes, top: float) -> None:
    """Set vertical limits from a little below 0 to a little above ``top``."""
    axes.set_ylim(-0.03 * top, 1.06 * top)


def set_prefix_axis(axis: Axis, unit: str, log_values: Sequence[float] | None) -> None:
    """Set ticks such as ``10 MB``; the axis is logarithmic over some values, with two or three ticks for one decade."""
    if log_values is not None:
        (axis.axes.set_xscale if isinstance(axis, XAxis) else axis.axes.set_yscale)("log")
        decades = math.log10(max(log_values) / min(log_values))
        axis.set_major_locator(LogLocator(subs=(1.0,) if decades > 2 else (1.0, 3.0), numticks=6))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value, unit)))


def set_value_axis(axes: Axes, values: Sequence[float], *, is_log: bool) -> None:
    """Set a horizontal axis with ticks at sorted values that leave room for their labels, with both ends."""
    low, high = values[0], values[-1]
    # Limits are set by hand, because matplotlib ignores lines that are shifted from their values.
    if is_log:
        axes.set_xscale("log")
        axes.set_xlim(low / (high / low) ** MARGIN, high * (high / low) ** MARGIN)
        positions = {value: math.log(value / low) / (math.log(high / low) or 1) for value in values}
    else:
        axes.set_xlim(low - MARGIN * (high - low), high + MARGIN * (high - low))
        positions = {value: (value - low) / ((high - low) or 1) for value in values}
    ticks = [high]
    for value in reversed(values[:-1]):
        if positions[ticks[-1]] - positions[value] >= TICK and (value == low or positions[value] >= TICK):
            ticks.append(value)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def set_method_axis(axes: Axes, labels: Sequence[str]) -> None:
    """Set up the vertical axis of a chart with a row for each method, the first on top."""
    axes.set_yticks(range(len(labels)), [on_one_line(label, 28) for label in labels])
    axes.set(ylim=(len(labels) - 0.5, -0.5))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def count_methods(count: int) -> str:
    """Describe in words how many methods a figure compares."""
    return "one method" if count == 1 else f"{count} methods"


def note_seeds(groups: Iterable[RunGroup]) -> str:
    """Describe the seeds as ``, mean over 3 seeds`` or ``, mean over up to 3 seeds``; empty if no group has more than one."""
    counts = {len(group.runs) for group in groups}
    if max(counts, default=1) < 2:
        return ""
    return f", mean over {'up to ' if len(counts) > 1 else ''}{max(counts)} seeds"


def note_band(groups: Iterable[RunGroup], bounds: Bounds = NON_NEGATIVE) -> str:
    """End a sentence with the number of seeds in the mean and the meaning of the band."""
    seeds_note, cut_note = note_seeds(groups), "" if bounds == UNBOUNDED else ", cut to possible values"
    return f"{seeds_note}; the band is the 95 % interval over seeds{cut_note}." if seeds_note else "."


def note_ends(lines: Iterable[Line]) -> str:
    """Explain for the caption that lines end before some seeds do, if so."""
    is_cut = any(
        len(line.table) and run.table.evaluated_rounds[-1] > line.table.index[-1]
        for line in lines
        for run in line.group.runs
        if run.table.evaluated_rounds
    )
    return " A line ends at the last evaluated round that all seeds of its method have." if is_cut else ""


def note_modes(groups: Iterable[RunGroup]) -> str:
    """Explain for the caption that the seeds of some groups are drawn instead of an interval, if so."""
    names = list(dict.fromkeys(on_one_line(group.short_label, 30) for group in groups))
    if not names:
        return ""
    reason = "its seeds succeed or fail" if len(names) == 1 else "their seeds succeed or fail"
    return f" Of {join_words(names)} every seed is drawn and no interval, for {reason}."


def note_points(lines: Iterable[Line]) -> str:
    """Explain for the caption that lines have more rounds than are drawn, if so."""
    is_long = any(len(line.table) > POINTS for line in lines)
    return f" Of each line at most {POINTS} rounds are drawn, evenly spaced." if is_long else ""


def note_cut(axes: Axes, ends: Sequence[float]) -> str:
    """Explain for the caption that a logarithmic axis has no place for the lower ends of some intervals, if so."""
    if axes.get_yscale() != "log" or not any(end < axes.get_ylim()[0] for end in ends):
        return ""
    return " Bands that reach further down, or below 0, end at the lower edge of the logarithmic axis."
