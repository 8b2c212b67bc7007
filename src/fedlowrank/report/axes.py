"""What the figures share: axes, their limits and ticks, entries of legends, words of captions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from .courses import NON_NEGATIVE, UNBOUNDED, Bounds, Floats, interval_ends
from .groups import Group
from .measure import ACCURACY, Measure, spans
from .style import Style
from .units import tick

Styles = Mapping[str, Style]
LOG_FROM = 20
"""Ratio of the largest to the smallest positive value from which an axis is logarithmic."""

DECADES = 100.0
"""Ratio of the largest to the smallest loss beyond which an axis of losses is logarithmic."""

THIN = 1.0
"""Width of the line of a further series of a method, in points."""


def handle(style: Style, marker: str | None = None, line: Any = None) -> Line2D:
    """Entry of a legend: line and marker of a style, or others instead."""
    return Line2D(
        [], [], color=style.color, linestyle=style.line if line is None else line, markersize=6,
        marker=style.marker if marker is None else marker,
    )  # fmt: skip


def rgb(code: str) -> tuple[float, float, float]:
    """A color such as ``#0a0001`` as numbers, to which an opacity can be added."""
    return (int(code[1:3], 16) / 255, int(code[3:5], 16) / 255, int(code[5:7], 16) / 255)


def around(axes: Axes, shown: Sequence[float]) -> None:
    """Limits of an axis of accuracies around all that is drawn, as fractions."""
    low, high = 100 * min(shown), 100 * max(shown)
    pad = max(1.0, 0.06 * (high - low))
    axes.set_ylim(*within((low - pad, high + pad)))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))


def judged_axis(axis: Axis, measure: Measure, means: Sequence[float], ends: Sequence[float] = ()) -> None:
    """Label, scale, limits and ticks of an axis of accuracies or losses around means and the ends of their intervals.

    Losses are on a logarithmic axis where all means are positive and span more than two decades. It has no place for
    the ends that are not positive: below the least mean it shows one decade at most.
    """
    vertical = not isinstance(axis, XAxis)
    axes = axis.axes
    if measure == ACCURACY:
        axis.set_label_text(measure.axis)
        if vertical:
            around(axes, [*means, *ends])
        return
    log = spans(means, DECADES)
    axis.set_label_text(f"{measure.axis}, logarithmic" if log else measure.axis)
    low, high = min([*means, *ends]), max([*means, *ends])
    if log:
        low = max(low, min(means) / 10)
        (axes.set_yscale if vertical else axes.set_xscale)("log")
        pad = (high / low) ** 0.05
        limits = (low / pad, high * pad)
        axis.set_major_locator(LogLocator(numticks=8))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    else:
        # a loss has no scale of its own: equal ones still need an axis
        pad = 0.06 * (high - low) or 0.06 * abs(high) or 1.0
        limits = (low - pad, high + pad)
        axis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    (axes.set_ylim if vertical else axes.set_xlim)(*limits)


def points_axis(axes: Axes, measure: Measure, means: Sequence[float], margin: float) -> None:
    """The vertical axis of a scatter chart of accuracies or losses, with a margin for the markers on all sides."""
    judged_axis(axes.yaxis, measure, means)
    axes.autoscale()
    axes.margins(margin)
    if measure == ACCURACY:
        axes.set_ylim(*within(axes.get_ylim()))


def line(
    axes: Axes, x: Floats, mean: Floats, ci: Floats | None, style: Style, scale: float = 1.0, *,
    bounds: Bounds = UNBOUNDED, thin: bool = False,
) -> Line2D:  # fmt: skip
    """Draw means with their interval over seeds as a band.

    Args:
        axes: where to; a logarithmic axis must have its limits.
        x: ``[n]`` places.
        mean: ``[n]`` means.
        ci: ``[n]`` half-widths of the interval, or None for one seed.
        style: look of the method.
        scale: factor of means and half-widths to the unit of the axis.
        bounds: the least and the largest possible value, to which the band is cut.
        thin: a further line of the method, without a band.

    Returns:
        The entry of a legend.
    """
    if ci is not None and not thin:
        low, high = interval_ends(mean, ci, bounds)
        if axes.get_yscale() == "log":
            # below zero a logarithmic axis has no place
            low = np.maximum(low, axes.get_ylim()[0] / scale)
        axes.fill_between(x, scale * low, scale * high, color=style.color, alpha=0.15, linewidth=0)
    # One evaluation is a point; a line through it would show nothing.
    key = handle(style, marker=style.marker if len(mean) == 1 else "")
    if thin:
        key.set(linewidth=THIN, markerfacecolor="none")
    axes.plot(
        x, scale * mean, color=style.color, linestyle=style.line, marker=key.get_marker(), dash_capstyle="butt",
        linewidth=key.get_linewidth(), markerfacecolor=key.get_markerfacecolor(),
    )  # fmt: skip
    return key


def within(limits: tuple[float, float]) -> tuple[float, float]:
    """Limits cut to what a percentage can be."""
    low, high = limits
    return (max(low, -1.5) if low < 0 else low, min(high, 101.5))


def rounds_axis(axis: Axis, most: int = 8) -> None:
    """Ticks at whole rounds."""
    axis.set_major_locator(MaxNLocator(nbins=most, integer=True, steps=[1, 2, 5, 10]))


def prefixed(axis: Axis, unit: str, log_over: Sequence[float] | None) -> None:
    """Ticks such as ``10 MB``; on a logarithmic axis two or three a decade where one decade is all there is."""
    if log_over is not None:
        scale = axis.axes.set_xscale if isinstance(axis, XAxis) else axis.axes.set_yscale
        scale("log")
        decades = math.log10(max(log_over) / min(log_over))
        axis.set_major_locator(LogLocator(subs=(1.0,) if decades > 2 else (1.0, 3.0), numticks=6))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value, unit)))


def methods(count: int) -> str:
    """How many methods a figure compares, in words."""
    return "one method" if count == 1 else f"{count} methods"


def seeds_note(groups: Sequence[Group], bounds: Bounds = NON_NEGATIVE) -> str:
    """End of a caption: over how many seeds the mean is, and what the band is, cut where it has bounds."""
    said, cut = over_seeds(groups), "" if bounds == UNBOUNDED else ", cut to possible values"
    return f"{said}; the band is the 95 % interval over seeds{cut}." if said else "."


def cut_note(axes: Axes, ends: Sequence[float]) -> str:
    """A sentence for the caption if a logarithmic axis has no place for the lower ends of some intervals."""
    if axes.get_yscale() != "log" or not any(end < axes.get_ylim()[0] for end in ends):
        return ""
    return " Bands that reach further down, or below 0, end at the lower edge of the logarithmic axis."


def over_seeds(groups: Sequence[Group]) -> str:
    """``, mean over 3 seeds``, or ``, mean over up to 3 seeds``; nothing where no group has more than one."""
    counts = {len(group.runs) for group in groups}
    if max(counts, default=1) < 2:
        return ""
    many = f"{max(counts)}" if len(counts) == 1 else f"up to {max(counts)}"
    return f", mean over {many} seeds"
