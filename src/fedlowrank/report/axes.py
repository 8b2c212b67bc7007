"""What the figures share: axes, their limits and ticks, entries of legends, words of captions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from .groups import Group
from .style import Style
from .units import tick

Styles = Mapping[str, Style]
ACCURACY = "test accuracy / %"
LOG_FROM = 20
"""Ratio of the largest to the smallest positive value from which an axis is logarithmic."""

THIN = 1.0
"""Width of the line of a further series of a method, in points."""


def handle(style: Style, marker: str | None = None, line: Any = None) -> Line2D:
    """Entry of a legend: line and marker of a style, or others instead."""
    return Line2D(
        [], [], color=style.colour, linestyle=style.line if line is None else line, markersize=6,
        marker=style.marker if marker is None else marker,
    )  # fmt: skip


def rgb(code: str) -> tuple[float, float, float]:
    """A colour such as ``#0a0001`` as numbers, to which an opacity can be added."""
    return (int(code[1:3], 16) / 255, int(code[3:5], 16) / 255, int(code[5:7], 16) / 255)


def around(axes: Axes, means: Sequence[float]) -> None:
    """Limits of an axis of accuracies around these fractions.

    From the means alone: the interval over two seeds can be many times as tall as everything there is to see.
    """
    low, high = 100 * min(means), 100 * max(means)
    pad = max(1.0, 0.06 * (high - low))
    axes.set_ylim(*within((low - pad, high + pad)))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))


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


def seeds_note(groups: Sequence[Group]) -> str:
    """End of a caption: over how many seeds the mean is, and what the band is."""
    many = max((len(group.runs) for group in groups), default=1)
    return f", mean over up to {many} seeds; the band is the 95 % interval over seeds." if many > 1 else "."
