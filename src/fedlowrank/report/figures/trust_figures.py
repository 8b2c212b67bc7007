"""Figures of private runs: ε against rounds, results against ε, and a clipping norm that follows the updates."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ..statistics.groups import RunGroup, measure_of
from ..trust import clipping_curve, is_replacing, privacy_curve
from . import chart
from .style import Picture, Styles, add_legend, drawing, new_figure

STEPS = [1, 2, 2.5, 5, 10]


def plot_privacy(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot the privacy spent against rounds, one line per method; None if no run is private."""
    private_groups = [group for group in groups if len(privacy_curve(group))]
    return chart.plot_lines(
        [chart.Line(group, group.short_label, privacy_curve(group)) for group in private_groups], styles,
        lambda axes, ends: _set_axis(axes, "privacy spent, ε", ends),
        title="Privacy spent over rounds",
        description="ε",
        formatter="{:.3g}".format,
        opening=f"ε of (ε, δ)-differential privacy of clients after each round, {_describe_privacy(private_groups)}",
        ending=" Lower is better.",
    )  # fmt: skip


@drawing()
def plot_private_accuracy(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot accuracy, or loss, against the privacy spent; None if no run is private."""
    measure = measure_of(groups)
    tables = [(g, g.curve(measure=measure).join(privacy_curve(g)["mean"].rename("epsilon"))) for g in groups]
    lines = [
        chart.Line(g, g.short_label, private_rows)
        for g, table in tables
        if len(private_rows := table.dropna(subset="epsilon"))
    ]
    if not lines:
        return None
    figure, axes = new_figure(3.1)
    means = [mean for line in lines for mean in line.table["mean"]]
    ends = chart.all_ends([line.table for line in lines], measure.bounds)
    chart.set_measure_axis(axes.yaxis, measure, means, ends)
    entries = chart.draw_lines(axes, lines, styles, measure.scale, bounds=measure.bounds, x="epsilon")
    axes.set_xlabel("privacy spent, ε")
    add_legend(figure, entries, [line.label for line in lines])
    last_values = ", ".join(
        f"{line.label} {measure.format(line.table['mean'].iloc[-1])} at ε = "
        f"{line.table['epsilon'].iloc[-1]:.3g}"
        for line in lines
    )
    private_groups = [line.group for line in lines]
    return Picture(
        figure,
        f"{measure.title} over privacy spent",
        f"Line chart of {measure.sentence_name} against ε for {chart.count_methods(len(lines))}. At the end: {last_values}.",
        f"Mean {measure.sentence_name} over clients against ε, {_describe_privacy(private_groups)}"
        f"{chart.note_band(private_groups, measure.bounds)}{chart.note_cut(axes, ends)} Evaluation itself is not "
        f"counted: its results are not private.{chart.note_points(lines)}",
        tips=chart.make_tips(
            axes, lines, measure.format, measure.scale, x="epsilon", x_formatter="ε = {:.3g}".format
        ),
    )


def plot_clipping_norm(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot a clipping norm that follows the norms of updates, against rounds; None if no clipping norm does."""
    return chart.plot_lines(
        [chart.Line(g, g.short_label, curve) for g in groups if len(curve := clipping_curve(g))], styles,
        lambda axes, ends: _set_axis(axes, "clipping norm C", ends),
        title="Clipping norm over rounds",
        description="the clipping norm",
        formatter="{:.3g}".format,
        opening="Bound on the norm of updates after each round; it follows a quantile of their norms",
    )  # fmt: skip


def _set_axis(axes: Axes, label: str, ends: Sequence[float]) -> None:
    axes.set_ylabel(label)
    chart.set_limits_from_zero(axes, max(ends) or 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=STEPS))


def _describe_privacy(groups: Sequence[RunGroup]) -> str:
    """Describe kinds, δ and relations of private runs, because different kinds of ε must not be compared."""
    texts: dict[str, list[str]] = {}
    for group in groups:
        privacy = group.first.section("run", "privacy")
        scope = (
            "the client that sent most"
            if privacy.get("kind") == "local"
            else "the models that the server releases"
        )
        change = "other data of one client" if is_replacing(group.first) else "the absence of one client"
        texts.setdefault(f"of {scope}, against {change}, with δ = {privacy.get('delta')}", []).append(
            group.short_label
        )
    if len(texts) == 1:
        return next(iter(texts))
    kinds_text = "; ".join(f"{', '.join(short_names)}: {text}" for text, short_names in texts.items())
    return f"which is not the same for all, so lines of different kinds do not compare ({kinds_text})"
