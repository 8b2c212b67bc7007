"""Figures that compare methods. Each takes groups and styles and returns a picture, or None with nothing to draw.

Accuracy is in percent throughout, of the test examples, as the unweighted mean over clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cbook import boxplot_stats
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from .axes import (
    ACCURACY,
    LOG_FROM,
    THIN,
    Styles,
    around,
    handle,
    methods,
    prefixed,
    rgb,
    rounds_axis,
    seeds_note,
    within,
)
from .groups import Curve, Group, Spread, curve, shown_series, spread, value_text
from .style import INK, WIDTH, Picture, Style, drawing, legend, new_figure
from .units import percent, plain, si


def accuracy_over_rounds(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Accuracy against rounds, one line a method, with the 95 % interval over seeds as a band.

    Further series of a method are thin lines in its colour, unless that made too many lines
    (:func:`fedlowrank.report.groups.shown_series`).
    """
    found = [
        (one, styles[one.group.short].further(one.place), line)
        for one in shown_series(groups)
        if (line := curve(one.group, one.series)) is not None
    ]
    if not found:
        return None
    count = len({one.group.label for one, *_ in found})
    with drawing():
        figure, axes = new_figure(3.1)
        handles = [_line(axes, line.rounds, line, style, thin=one.place > 0) for one, style, line in found]
        axes.set(xlabel="round", ylabel=ACCURACY)
        rounds_axis(axes.xaxis)
        around(axes, [float(value) for *_, line in found for value in line.mean])
        legend(figure, handles, [one.label for one, *_ in found])
    ends = ", ".join(f"{one.label} {percent(float(line.mean[-1]))} %" for one, _, line in found)
    thin = " Thin lines, without a band: further models of a method, named after the colon."
    return Picture(
        figure,
        "Accuracy over rounds",
        f"Line chart of test accuracy against rounds for {methods(count)}. At the end: {ends}.",
        f"Mean test accuracy over clients after each evaluated round{seeds_note(groups)} "
        f"Round 0 is the state before training.{thin if any(one.place for one, *_ in found) else ''}",
    )


def accuracy_over_bytes(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Accuracy against the bytes sent both ways since the start; logarithmic where methods differ widely."""
    found = [(group, line) for group in groups if (line := curve(group)) is not None]
    if not found or all(line.bytes[-1] <= 0 for _, line in found):
        return None
    positive = [float(x) for _, line in found for x in line.bytes if x > 0]
    ends = [float(line.bytes[-1]) for _, line in found if line.bytes[-1] > 0]
    log = max(ends) / min(ends) >= LOG_FROM
    with drawing():
        figure, axes = new_figure(3.1)
        handles = []
        for group, line in found:
            style = styles[group.short]
            if line.bytes[-1] <= 0:
                axes.axhline(100 * line.mean[-1], color=style.colour, linestyle=style.line)
                handles.append(handle(style, marker=""))
            else:
                kept = line.bytes > 0 if log else np.ones(len(line.bytes), dtype=bool)
                cut = Curve(
                    line.rounds[kept], line.mean[kept], None if line.ci is None else line.ci[kept], line.bytes[kept]
                )
                handles.append(_line(axes, cut.bytes, cut, style))
        prefixed(axes.xaxis, "B", positive if log else None)
        axes.set(xlabel=f"sent both ways{', logarithmic' if log else ''}", ylabel=ACCURACY)
        around(axes, [float(value) for _, line in found for value in line.mean])
        legend(figure, handles, [group.short for group, _ in found])
    silent = any(line.bytes[-1] <= 0 for _, line in found)
    return Picture(
        figure,
        "Accuracy over communication",
        f"Line chart of test accuracy against bytes sent for {methods(len(found))}. Sent in all: "
        + ", ".join(f"{group.short} {si(float(line.bytes[-1]), 'B')}" for group, line in found)
        + ".",
        f"Mean test accuracy over clients against the bytes of all messages so far, both ways{seeds_note(groups)}"
        + (" A level line is the final accuracy of a method that sends nothing." if silent else ""),
    )


def client_boxes(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Box plot of the clients' accuracies at the last evaluated round, one box a method, ``+`` at the mean."""
    found = [(group, [100 * v for one in group.last for v in one.values]) for group in groups if group.last]
    if not found:
        return None
    with drawing():
        figure, axes = new_figure(0.9 + 0.36 * len(found))
        for y, (group, values) in enumerate(found):
            _box(axes, y, values, styles[group.short])
        axes.set_yticks(range(len(found)), [plain(group.short, 28) for group, _ in found])
        axes.set(ylim=(len(found) - 0.5, -0.5), xlabel=ACCURACY)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    seeds = max(len(group.runs) for group, _ in found)
    pooled = f" The clients of all {seeds} seeds are pooled." if seeds > 1 else ""
    medians = ", ".join(f"{group.short} {np.median(values):.1f} %" for group, values in found)
    return Picture(
        figure,
        "Spread over clients",
        f"Box plot of the test accuracy of clients for {methods(len(found))}. Medians: {medians}.",
        "Test accuracy of each client at the last evaluated round. Box: quartiles; line: median; +: mean; whiskers: "
        f"the furthest client within 1.5 box lengths; dots: clients beyond.{pooled}",
    )


def trade_off(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Accuracy against computation, with marker areas that grow with the bytes sent."""
    found: list[tuple[Group, Spread, float, float]] = []
    for group in groups:
        accuracy = group.accuracy
        flops = spread(one.totals.flops for one in group.runs)
        size = spread(one.totals.bytes for one in group.runs)
        if accuracy is not None and flops is not None and size is not None and flops.mean > 0:
            found.append((group, accuracy, flops.mean, size.mean))
    if not found:
        return None
    largest = max(size for *_, size in found) or 1.0
    flops_all = [flops for _, _, flops, _ in found]
    log = max(flops_all) / min(flops_all) >= LOG_FROM
    with drawing():
        figure, axes = new_figure(3.1)
        # Large markers first, so that none hides a smaller one.
        for group, reached, at, sent in sorted(found, key=lambda row: -row[3]):
            style = styles[group.short]
            side = math.sqrt(36 + 700 * sent / largest)
            axes.plot(
                [at], [100 * reached.mean], marker=style.marker, markersize=side, linestyle="",
                markerfacecolor=(*rgb(style.colour), 0.35), markeredgecolor=style.colour, markeredgewidth=1.4,
            )  # fmt: skip
        handles = [handle(styles[group.short], line="") for group, *_ in found]
        prefixed(axes.xaxis, "FLOP", flops_all if log else None)
        axes.set(xlabel=f"training computation per run{', logarithmic' if log else ''}", ylabel=ACCURACY)
        axes.margins(0.16)
        axes.set_ylim(*within(axes.get_ylim()))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
        legend(figure, handles, [f"{plain(group.short, 30)} ({si(size, 'B')})" for group, _, _, size in found])
    said = "; ".join(
        f"{group.short} {percent(accuracy.mean)} %, {si(flops, 'FLOP')}, {si(size, 'B')}"
        for group, accuracy, flops, size in found
    )
    return Picture(
        figure,
        "Accuracy, computation and communication",
        f"Scatter chart for {methods(len(found))}: {said}.",
        "Mean test accuracy at the last evaluated round against the floating-point operations of training; the area of "
        "a marker grows with the bytes sent both ways, given in the legend. High, to the left and small is better.",
    )


def sweep(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Final accuracy against the varied setting, one line a method, with the 95 % interval over seeds."""
    found = [(group, accuracy) for group in groups if group.vary and (accuracy := group.accuracy) is not None]
    settings = list(dict.fromkeys(_vary_key(group) for group, _ in found))
    if len(settings) < 2:
        return None
    names = list(dict.fromkeys(key for group, _ in found for key, _ in group.vary))
    raw = [dict(group.vary).get(names[0]) for group, _ in found]
    numeric = len(names) == 1 and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in raw)
    places: dict[tuple[str, ...], float] = {key: float(i) for i, key in enumerate(settings)}
    if numeric:
        places = {_vary_key(group): float(v) for (group, _), v in zip(found, raw, strict=True) if v is not None}
    with drawing():
        figure, axes = new_figure(3.1)
        handles, labels = [], []
        shorts = list(dict.fromkeys(group.short for group, _ in found))
        for i, short in enumerate(shorts):
            rows = sorted(((places[_vary_key(g)], a) for g, a in found if g.short == short), key=lambda row: row[0])
            y = np.array([accuracy.mean for _, accuracy in rows])
            ci = np.array([accuracy.ci or 0.0 for _, accuracy in rows])
            style, x = styles[short], [at for at, _ in rows]
            # Side by side by a few points on paper, so that bars at one value do not hide each other.
            aside = ScaledTranslation((i - (len(shorts) - 1) / 2) * 4 / 72, 0, figure.dpi_scale_trans)
            axes.errorbar(x, 100 * y, yerr=100 * ci if ci.any() else None, color=style.colour, linestyle=style.line,
                          marker=style.marker, markersize=5, capsize=2, elinewidth=1,
                          transform=axes.transData + aside)  # fmt: skip
            handles.append(handle(style))
            labels.append(short)
        _sweep_axis(axes, places, numeric)
        axes.set(xlabel=", ".join(name.rpartition(".")[2] for name in names), ylabel=ACCURACY)
        means = [accuracy.mean for _, accuracy in found]
        room = max(means) - min(means) + 0.02
        bars = [(accuracy.mean, min(accuracy.ci or 0.0, room)) for _, accuracy in found]
        around(axes, [mean + sign * bar for mean, bar in bars for sign in (-1, 1)])
        legend(figure, handles, labels)
    said = "; ".join(f"{group.label} {percent(accuracy.mean)} %" for group, accuracy in found)
    return Picture(
        figure,
        f"Accuracy against {', '.join(name.rpartition('.')[2] for name in names)}",
        f"Line chart of final test accuracy: {said}.",
        f"Mean test accuracy over clients at the last evaluated round for each value of {', '.join(names)}"
        + (", mean over seeds with bars of the 95 % interval." if any(a.n > 1 for _, a in found) else "."),
    )


def _vary_key(group: Group) -> tuple[str, ...]:
    return tuple(f"{key}={value_text(value)}" for key, value in group.vary)


def _sweep_axis(axes: Axes, places: Mapping[tuple[str, ...], float], numeric: bool) -> None:
    # Limits by hand: lines set aside from their values have none that matplotlib would look at.
    x = sorted(set(places.values()))
    if numeric:
        pad = 0.07 * (x[-1] - x[0])
        axes.set_xlim(x[0] - pad, x[-1] + pad)
        if x[0] > 0 and x[-1] / x[0] >= LOG_FROM:
            factor = (x[-1] / x[0]) ** 0.07
            axes.set_xscale("log")
            axes.set_xlim(x[0] / factor, x[-1] * factor)
        # A tick at every value, unless they would collide.
        if len(x) <= 12:
            axes.xaxis.set_major_locator(FixedLocator(x))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    else:
        texts = [plain(", ".join(part.rpartition(".")[2] for part in key), 24) for key in places]
        axes.set_xlim(-0.4, len(x) - 0.6)
        wide = sum(map(len, texts)) > 50
        axes.set_xticks(list(places.values()), texts, rotation=30 if wide else 0, ha="right" if wide else "center")


def _line(axes: Axes, x: Any, line: Curve, style: Style, thin: bool = False) -> Line2D:
    if line.ci is not None and not thin:
        axes.fill_between(
            x, 100 * (line.mean - line.ci), 100 * (line.mean + line.ci), color=style.colour, alpha=0.15, linewidth=0
        )
    # One evaluation is a point; a line through it would show nothing.
    key = handle(style, marker=style.marker if len(line.mean) == 1 else "")
    if thin:
        key.set(linewidth=THIN, markerfacecolor="none")
    axes.plot(
        x, 100 * line.mean, color=style.colour, linestyle=style.line, marker=key.get_marker(), dash_capstyle="butt",
        linewidth=key.get_linewidth(), markerfacecolor=key.get_markerfacecolor(),
    )  # fmt: skip
    return key


def _box(axes: Axes, y: int, values: Sequence[float], style: Style) -> None:
    one = boxplot_stats(np.asarray(values))[0]
    ink: Any = {"color": style.colour, "linewidth": 1.3}
    axes.hlines([y, y], [one["whislo"], one["q3"]], [one["q1"], one["whishi"]], **ink)
    axes.vlines([one["whislo"], one["whishi"]], y - 0.15, y + 0.15, **ink)
    axes.add_patch(
        Rectangle(
            (one["q1"], y - 0.3), one["q3"] - one["q1"], 0.6,
            facecolor=(*rgb(style.colour), 0.25), edgecolor=style.colour, linewidth=1.3,
        )
    )  # fmt: skip
    axes.vlines([one["med"]], y - 0.3, y + 0.3, color=style.colour, linewidth=2.4)
    axes.plot(one["fliers"], [y] * len(one["fliers"]), linestyle="", marker="o", markersize=3, color=style.colour)
    axes.plot([one["mean"]], [y], linestyle="", marker="+", markersize=9, markeredgewidth=1.8, color=INK)


__all__ = ["WIDTH", "Styles", "accuracy_over_bytes", "accuracy_over_rounds", "client_boxes", "sweep", "trade_off"]
