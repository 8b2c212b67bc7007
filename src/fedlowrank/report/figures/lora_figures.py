"""Figures of LoRA adapters of unequal rank: results by rank, replies, the server's update, training loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ...core.io.text import on_one_line
from ..statistics.groups import RunGroup, measure_of
from ..statistics.low_rank import (
    discarded_share,
    energy,
    has_adapters,
    list_rank_results,
    reply_values,
    server_rank,
    training_losses,
)
from ..statistics.measures import TEST_LOSS
from . import chart
from .style import INK, LIGHT, Picture, Style, Styles, add_legend, drawing, hue_color, make_styles, new_panels

# For axes and captions; runs are not judged by this measure.
TRAINING = replace(TEST_LOSS, sentence_name="training loss", title="Training loss")
PANELS = 4  # maximum number of panels in a figure by rank: a method has few series
MIN_CLOSE_RANKS = 8  # number of ranks from which markers are smaller and closer to their places
MAX_LISTED_RANKS = 9  # maximum number of ranks in a legend
SHARE: chart.Bounds = (0.0, 1.0)
STEPS = [1, 2, 2.5, 5, 10]
SERIES = {
    "personal": "personal is the model that the client itself uses",
    "server": "server is the server's whole model on the test examples of the client",
}


@drawing()
def plot_score_by_rank(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot results against the rank of the client: one panel per series, one line per method, bars over seeds."""
    measure = measure_of(groups)
    all_results = list_rank_results(groups, measure)
    names = list(dict.fromkeys(results.series for results in all_results))[:PANELS]
    if not names:
        return None
    panel_results = [results for results in all_results if results.series in names]
    methods = list(dict.fromkeys(results.group.short_label for results in panel_results))
    tables = [results.table for results in panel_results]
    ranks = sorted({int(rank) for table in tables for rank in table.index})
    # With many ranks, markers that are shifted as far would reach the next rank.
    spacing = min(1.0, MIN_CLOSE_RANKS / len(ranks))
    columns = min(2, len(names))
    rows = math.ceil(len(names) / columns)
    figure, panels = new_panels(0.6 + 2.3 * rows, rows, columns, sharey=True)
    ends = chart.all_ends(tables, measure.bounds)
    means = [mean for table in tables for mean in table["mean"]]
    chart.set_measure_axis(panels[0, 0].yaxis, measure, means, ends)
    for axes, name in zip(panels.flat, names, strict=False):
        axes.set_title(on_one_line(name, 24), loc="left", pad=4)
        for group, series, table in panel_results:
            if series == name:
                offset = (methods.index(group.short_label) - (len(methods) - 1) / 2) * 4 * spacing
                style = styles[group.short_label]
                chart.draw_bars(axes, table.sort_index(), style, measure, offset, 2.5 + 2.5 * spacing)
    for axes in panels[1:, 0]:
        axes.set_ylabel(panels[0, 0].get_ylabel())
    for axes in chart.finish_grid(panels, len(names)):
        axes.set_xlabel("rank of the client")
    chart.set_value_axis(panels[0, 0], ranks, is_log=True)
    add_legend(figure, [chart.legend_entry(styles[method_name]) for method_name in methods], methods)
    texts = "; ".join(
        f"{group.short_label}, {name}: "
        + ", ".join(f"rank {rank:.0f} {measure.format(mean)}" for rank, mean in table["mean"].items())
        for group, name, table in panel_results
    )
    seeds_note = chart.note_seeds(results.group for results in panel_results)
    seeds_note += " with bars of the 95 % interval" if seeds_note else ""
    series_text = "; ".join(SERIES[name] for name in names if name in SERIES)
    panel_note = f" Panels: {series_text}." if len(names) > 1 and series_text else ""
    return Picture(
        figure,
        f"{measure.title} by rank of the client",
        f"Line chart of {measure.sentence_name} against the rank of the client for "
        f"{chart.count_methods(len(methods))}: {texts}.",
        f"Mean {measure.sentence_name} at the last evaluated round over the clients of each rank{seeds_note}; the axis of "
        f"ranks is logarithmic.{panel_note} {'Low' if measure.is_loss else 'High'} is better, and a level "
        "line serves all ranks alike. Clients of different ranks hold different data, so a slope is not due "
        "to rank alone: compare methods.",
    )


def plot_replies(groups: Sequence[RunGroup]) -> list[Picture]:
    """Plot weight and truncation error of each client's reply against rounds, one picture per method."""
    return [picture for group in groups if (picture := _plot_replies(group))]


@drawing()
def _plot_replies(group: RunGroup) -> Picture | None:
    run = group.first
    ranks = pd.Series(run.ranks, dtype=np.int64)
    weights = reply_values(group.runs[0], "weights")
    replies = weights.notna().sum(axis=1)
    weights = weights[[client_id for client_id in weights if client_id in ranks]]
    counts = ranks[weights.columns].value_counts()
    if len(counts) < 2:
        return None
    errors = reply_values(group.runs[0], "truncation").reindex(index=weights.index, columns=weights.columns)
    styles = rank_styles(counts.index.tolist())
    figure, ((weight_axes,), (error_axes,)) = new_panels(4.4, 2, 1, sharey=False)
    line_style = {"color": INK, "linewidth": 1, "linestyle": (0, (1, 2)), "alpha": 0.7}
    even_weights = chart.thin_out(1 / replies)
    (even_line,) = weight_axes.plot(even_weights.index, even_weights, **line_style)
    is_log = _set_error_axis(error_axes, errors.stack().tolist())
    for client_id in weights:
        style = styles[ranks[client_id]]
        # Clients that take part now and then have markers, because a lone round would otherwise be invisible.
        marker = style.marker if weights[client_id].isna().any() else ""
        error = errors[client_id].where((errors[client_id] > 0) | (not is_log))
        for axes, curve in ((weight_axes, weights[client_id]), (error_axes, 100 * error)):
            values = chart.thin_out(curve)
            axes.plot(
                values.index, values, color=style.color, linestyle=style.line, marker=marker, markersize=3.5,
                linewidth=1.3, dash_capstyle="butt",
            )  # fmt: skip
    # Not from 0, because smoothed weights are close to each other; the dotted line shows equal weights.
    weight_axes.set(ylabel="weight of the reply")
    weight_axes.margins(y=0.08)
    weight_axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=STEPS))
    error_axes.set_xlabel("round")
    chart.set_round_axis(error_axes.xaxis)
    sorted_ranks = sorted(counts.index, reverse=True)
    legend_ranks = [sorted_ranks[i] for i in chart.space_evenly(len(sorted_ranks), MAX_LISTED_RANKS)]
    labels = [
        f"rank {rank}" + (f" ({counts[rank]} clients)" if counts[rank] > 1 else "") for rank in legend_ranks
    ]
    entries = [chart.legend_entry(styles[rank], "") for rank in legend_ranks]
    add_legend(figure, [*entries, even_line], [*labels, "equal weights"])
    last_weight, last_error = (_last_values(table).groupby(ranks).mean() for table in (weights, errors))
    texts = "; ".join(
        f"rank {rank} weight {last_weight[rank]:.3g}, error {_format_share(last_error.get(rank, math.nan))}"
        for rank in sorted_ranks
    )
    scale_note = ", on a logarithmic axis that has no place for errors of 0" if is_log else ""
    cut_note = (
        f" {len(legend_ranks)} of {len(counts)} ranks are named." if len(legend_ranks) < len(counts) else ""
    )
    return Picture(
        figure,
        f"Weights and truncation errors: {group.short_label}",
        f"Two line charts against rounds for {len(weights.columns)} clients under {group.short_label}. In the last "
        f"round of each client, means over the clients of a rank: {texts}.",
        f"Above: how much the reply of each client counts in a round, seed {run.seed}; dotted: what it "
        "would if all counted the same. Below: the part of the server's update W that the client's rank has "
        f"no room for, ‖W − Wʳ‖² in percent of ‖W‖² over all layers{scale_note}. A line is a client, its color "
        "and dash its rank; clients of one rank are sent the same, so their lines often coincide; it is "
        f"interrupted where the client took no part.{cut_note}",
    )


def rank_styles(ranks: Sequence[int]) -> dict[int, Style]:
    """Make a style for each rank, the largest first: palette colors while they last, else evenly spaced hues."""
    order = sorted(set(ranks), reverse=True)
    styles = dict(zip(order, make_styles([str(rank) for rank in order]).values(), strict=True))
    if len(order) <= len(LIGHT):
        return styles
    # Not the whole circle of hues, on which the largest and the smallest rank would look alike.
    hues = len(order) * 5 // 4
    return {rank: replace(styles[rank], color=hue_color(i, hues)) for i, rank in enumerate(order)}


def _set_error_axis(axes: Axes, errors: Sequence[float]) -> bool:
    """Set label, scale and limits of an axis of relative errors; return whether it is logarithmic."""
    positive_errors = [value for value in errors if value > 0]
    is_log = chart.is_wide_range(positive_errors, chart.DECADES)
    if is_log:
        axes.set_yscale("log")
        axes.set_ylim(100 * min(positive_errors) / 1.3, 130 * max(positive_errors))
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        chart.set_limits_from_zero(axes, 100 * max(positive_errors, default=0.01))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=STEPS))
    axes.set_ylabel("cut off / %")
    return is_log


def _last_values(table: pd.DataFrame) -> pd.Series:
    """Get the last value of each column that has one."""
    return table.ffill().iloc[-1].dropna()


def _format_share(value: float) -> str:
    return f"{100 * value:.3g} %" if math.isfinite(value) else "not recorded"


def plot_server_rank(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot the number of singular values in the server's update W against rounds, as a mean over layers.

    This number is the rank of W in the exact and the capped state; in the dense state it is at most what the clients
    ask for (:attr:`fedlowrank.linalg.delta.Delta.rank`). The record does not distinguish the states.
    """

    def set_axis(axes: Axes, ends: Sequence[float]) -> None:
        axes.set_ylabel("singular values of W")
        chart.set_limits_from_zero(axes, max(ends))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))

    server_ranks = [(group, *result) for group in groups if (result := server_rank(group))]
    spans = [f"{g.short_label} {low:.0f} to {high:.0f}" for g, _, low, high in server_ranks if low < high]
    layers = f" Layers differ at the end: {', '.join(spans)}." if spans else ""
    return chart.plot_lines(
        [chart.Line(group, group.short_label, curve) for group, curve, *_ in server_ranks], styles, set_axis,
        title="Rank of the server's update over rounds",
        description="the singular values that the server holds of its update, mean over layers,",
        formatter="{:.0f}".format,
        opening="Singular values of the server's update W that the server holds after each round, mean over "
        "layers. While it holds W as factors that is the rank of W, which begins at 0",
        ending=" Of a W that it holds as a whole matrix, it computes no more than the largest rank of a client:"
        f" a line at that number may be below the rank.{layers}",
    )  # fmt: skip


@drawing()
def plot_energy(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot energy of the server's update, and the share that a rank cap discards, against rounds; None if it discards none."""
    discard_lines = [chart.Line(g, g.short_label, curve) for g in groups if len(curve := discarded_share(g))]
    if not discard_lines:
        return None
    lines = [chart.Line(g, g.short_label, curve) for g in groups if len(curve := energy(g))]
    figure, ((energy_axes,), (discard_axes,)) = new_panels(4.4, 2, 1, sharey=False)
    entries = chart.draw_lines(energy_axes, lines, styles)
    chart.draw_lines(discard_axes, discard_lines, styles, 100.0, bounds=SHARE)
    for axes, top, label in (
        (energy_axes, max(chart.all_ends([line.table for line in lines], chart.NON_NEGATIVE)), "‖W‖²"),
        (
            discard_axes,
            100 * max(chart.all_ends([line.table for line in discard_lines], SHARE)),
            "cut off / %",
        ),
    ):
        axes.set_ylabel(label)
        chart.set_limits_from_zero(axes, top)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=STEPS))
    discard_axes.set_xlabel("round")
    chart.set_round_axis(discard_axes.xaxis)
    add_legend(figure, entries, [line.label for line in lines])
    last_values = ", ".join(f"{line.label} {line.table['mean'].iloc[-1]:.3g}" for line in lines)
    shares = [(line.label, line.table["mean"]) for line in discard_lines]
    peaks = ", ".join(f"{label} {_format_share(m.max())} at round {m.idxmax()}" for label, m in shares)
    return Picture(
        figure,
        "Energy of the server's update over rounds",
        f"Two line charts against rounds. Energy at the end: {last_values}. Most cut off: {peaks}.",
        "Above: energy ‖W‖² of the server's update after each round, summed over layers (the squared "
        "Frobenius norm). Below: what the cap on its rank cut off in that round, in percent of the energy "
        f"before the cut{chart.note_band([line.group for line in lines])} What is cut off is lost to all "
        "clients; if it stays above a few percent, a larger cap is worth a try.",
    )


def plot_training_loss(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot training loss against rounds for runs with adapters; further passes of a method are thin lines."""
    if not has_adapters(groups):
        return None
    lines = [
        chart.Line(
            group,
            f"{group.short_label}: {on_one_line(name, 16)}" if index else group.short_label,
            curve,
            index,
        )
        for group in groups
        for index, (name, curve) in enumerate(training_losses(group).items())
    ]
    lines = [line for line in lines if not line.series_index] if len(lines) > chart.LINES else lines
    has_more = any(line.series_index for line in lines)
    note = " Thin lines, without a band: further passes of a method." if has_more else ""
    return chart.plot_measure(
        lines, styles, TRAINING, opening="Mean loss over the training steps of each round, of all participants",
        ending=" It is taken while the clients train, so it falls within a round as well as from round to "
        "round: where it falls and the test loss does not, the clients overfit or their updates do not add up "
        f"at the server.{note}",
    )  # fmt: skip
