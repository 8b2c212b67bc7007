"""Figures over the simulated time of a run with ``run.devices``."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from ..number_formats import format_seconds
from ..statistics.groups import RunGroup, measure_of
from . import chart
from .style import Picture, Styles, add_legend, drawing, new_figure

UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
"""Units of an axis of time with their seconds, the longest first."""


@drawing()
def plot_simulated_time(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot accuracy against the simulated seconds since the start, one line per method.

    The axis is logarithmic if the totals of methods differ widely.
    """
    measure = measure_of(groups)
    lines = [chart.Line(g, g.short_label, g.curve(measure=measure)) for g in groups]
    lines = [line for line in lines if _total(line.table) > 0]
    if not lines:
        return None
    totals = [_total(line.table) for line in lines]
    unit_seconds, unit = next((u for u in UNITS if max(totals) >= 3 * u[0]), UNITS[-1])
    is_log = max(totals) / min(totals) >= chart.LOG_FROM
    # a logarithmic axis has no place for the time before training
    lines = [
        line._replace(
            table=table[table["time"] > 0] if is_log else table,
        )
        for line in lines
        for table in (line.table.assign(time=line.table["simulated_seconds"] / unit_seconds),)
    ]
    figure, axes = new_figure(3.1)
    ends = chart.all_ends([line.table for line in lines], measure.bounds)
    chart.set_measure_axis(axes.yaxis, measure, [m for line in lines for m in line.table["mean"]], ends)
    if is_log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=6))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    entries = chart.draw_lines(axes, lines, styles, measure.scale, bounds=measure.bounds, x="time")
    axes.set_xlabel(f"simulated time / {unit}{', logarithmic' if is_log else ''}")
    add_legend(figure, entries, [line.label for line in lines])
    texts = ", ".join(
        f"{line.label} {format_seconds(total)}" for line, total in zip(lines, totals, strict=True)
    )
    return Picture(
        figure,
        f"{measure.title} over simulated time",
        f"Line chart of {measure.sentence_name} against simulated time for {chart.count_methods(len(lines))}. At "
        f"the end of the lines: {texts}.",
        f"Mean {measure.sentence_name} over clients against the time that the rounds take on the simulated devices "
        f"(run.devices){chart.note_band(groups, measure.bounds)}{chart.note_cut(axes, ends)}"
        f"{chart.note_points(lines)}{chart.note_ends(lines)}",
        tips=chart.make_tips(
            axes,
            lines,
            measure.format,
            measure.scale,
            x="time",
            x_formatter=lambda t: format_seconds(t * unit_seconds),
        ),
    )


def _total(table: pd.DataFrame) -> float:
    """Compute the simulated seconds until the last evaluation; 0 without a simulated clock."""
    return 0.0 if table.empty else float(table["simulated_seconds"].fillna(0.0).iloc[-1])
