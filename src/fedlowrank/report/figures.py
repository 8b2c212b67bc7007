"""Figures that compare methods. Each takes groups and styles and returns a picture, or None with nothing to draw.

Accuracy is in percent throughout, of the test examples, as the unweighted mean over the clients that can train. Where
there are no classes, the mean test loss takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cbook import boxplot_stats
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

from .axes import (
    LOG_FROM,
    Styles,
    cut_note,
    handle,
    judged_axis,
    line,
    methods,
    points_axis,
    prefixed,
    rgb,
    rounds_axis,
    seeds_note,
)
from .courses import Curve, Shown, curve, interval_ends, reach, shown_series
from .groups import Group, Spread, measure_of, spread, value_text, worded
from .measure import ACCURACY, LOSS, Measure
from .style import INK, WIDTH, Picture, Style, drawing, legend, new_figure
from .units import plain, si


def accuracy_over_rounds(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Accuracy against rounds, one line a method, with the 95 % interval over seeds as a band.

    Further series of a method, and the clients that never train, are thin lines in its color, unless that made too many
    lines (:func:`fedlowrank.report.courses.shown_series`).
    """
    judged = [group for group in groups if group.measure == ACCURACY]
    return _over_rounds(shown_series(judged, unseen=True), groups, styles, worded(ACCURACY, groups))


def loss_over_rounds(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Test loss against rounds: in all detail where it is what methods are judged by, else of the headlines."""
    if measure_of(groups) == LOSS:
        return _over_rounds(shown_series(groups, unseen=True), groups, styles, worded(LOSS, groups))
    heads = [Shown(group, group.headline, 0, group.short) for group in groups if group.headline is not None]
    return _over_rounds(heads, groups, styles, worded(LOSS, groups))


def _over_rounds(shown: Sequence[Shown], groups: Sequence[Group], styles: Styles, measure: Measure) -> Picture | None:
    found = [
        (one, styles[one.group.short].further(one.place), course)
        for one in shown
        if (course := curve(one.group, one.series, measure, unseen=one.unseen)) is not None
    ]
    if not found:
        return None
    count = len({one.group.label for one, *_ in found})
    with drawing():
        figure, axes = new_figure(3.1)
        axes.set(xlabel="round")
        # before the bands, which have to know the scale
        means = [float(value) for *_, course in found for value in course.mean]
        ends = reach([course for one, _, course in found if not one.place], measure.bounds)
        judged_axis(axes.yaxis, measure, means, ends)
        handles = [
            line(
                axes,
                course.rounds,
                course.mean,
                course.ci,
                style,
                measure.scale,
                bounds=measure.bounds,
                thin=one.place > 0,
            )
            for one, style, course in found
        ]
        rounds_axis(axes.xaxis)
        legend(figure, handles, [one.label for one, *_ in found])
    last = ", ".join(f"{one.label} {measure.text(float(course.mean[-1]))}" for one, _, course in found)
    thin = [one for one, *_ in found if one.place]
    more = " Thin lines, without a band: further models of a method, named after the colon." if thin else ""
    if any(one.unseen for one in thin):
        more = (
            " Thin lines, without a band, are named after the colon: further models of a method, and its mean over the"
        )
        more += " clients that never train, which are left out of all others."
    return Picture(
        figure,
        f"{measure.title} over rounds",
        f"Line chart of {measure.noun} against rounds for {methods(count)}. At the end: {last}.",
        f"Mean {measure.noun} over clients after each evaluated round{seeds_note(groups, measure.bounds)} "
        f"Round 0 is the state before training.{cut_note(axes, ends)}{more}",
    )


def accuracy_over_bytes(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Accuracy against the bytes sent both ways since the start; logarithmic where methods differ widely."""
    measure = measure_of(groups)
    found = [(group, course) for group in groups if (course := curve(group, None, measure)) is not None]
    if not found or all(course.bytes[-1] <= 0 for _, course in found):
        return None
    positive = [float(x) for _, course in found for x in course.bytes if x > 0]
    ends = [float(course.bytes[-1]) for _, course in found if course.bytes[-1] > 0]
    log = max(ends) / min(ends) >= LOG_FROM
    sending = {group.label: _from_first_byte(course, log) for group, course in found if course.bytes[-1] > 0}
    with drawing():
        figure, axes = new_figure(3.1)
        shown = [float(value) for course in sending.values() for value in course.mean]
        silent = [float(course.mean[-1]) for group, course in found if group.label not in sending]
        reached = reach([*sending.values()], measure.bounds)
        judged_axis(axes.yaxis, measure, [*shown, *silent], reached)
        handles = []
        for group, course in found:
            style = styles[group.short]
            cut = sending.get(group.label)
            if cut is None:
                axes.axhline(measure.scale * course.mean[-1], color=style.color, linestyle=style.line)
                handles.append(handle(style, marker=""))
            else:
                handles.append(line(axes, cut.bytes, cut.mean, cut.ci, style, measure.scale, bounds=measure.bounds))
        prefixed(axes.xaxis, "B", positive if log else None)
        axes.set(xlabel=f"sent both ways{', logarithmic' if log else ''}")
        legend(figure, handles, [group.short for group, _ in found])
    return Picture(
        figure,
        f"{measure.title} over communication",
        f"Line chart of {measure.noun} against bytes sent for {methods(len(found))}. Sent in all: "
        + ", ".join(f"{group.short} {si(float(course.bytes[-1]), 'B')}" for group, course in found)
        + ".",
        f"Mean {measure.noun} over clients against the bytes of all messages so far, both ways"
        f"{seeds_note(groups, measure.bounds)}{cut_note(axes, reached)}"
        + (f" A level line is the final {measure.noun} of a method that sends nothing." if silent else ""),
    )


def _from_first_byte(course: Curve, log: bool) -> Curve:
    """The curve, on a logarithmic axis without what is before the first message."""
    kept = course.bytes > 0 if log else np.ones(len(course.bytes), dtype=bool)
    ci = None if course.ci is None else course.ci[kept]
    return Curve(course.rounds[kept], course.mean[kept], ci, course.bytes[kept])


def client_boxes(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Box plot of the clients' accuracies at the last evaluated round, one box a method, ``+`` at the mean."""
    measure = measure_of(groups)
    found = [
        (group, [measure.scale * v for one in scores for v in one.values])
        for group in groups
        if (scores := group.last_of(group.headline, measure))
    ]
    if not found:
        return None
    with drawing():
        figure, axes = new_figure(0.9 + 0.36 * len(found))
        judged_axis(axes.xaxis, measure, [value for _, values in found for value in values])
        for y, (group, values) in enumerate(found):
            _box(axes, y, values, styles[group.short])
        axes.set_yticks(range(len(found)), [plain(group.short, 28) for group, _ in found])
        axes.set(ylim=(len(found) - 0.5, -0.5))
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    seeds = max(len(group.runs) for group, _ in found)
    pooled = f" The clients of all {seeds} seeds are pooled." if seeds > 1 else ""
    medians = ", ".join(f"{group.short} {_median(values, measure)}" for group, values in found)
    return Picture(
        figure,
        "Spread over clients",
        f"Box plot of the {measure.noun} of clients for {methods(len(found))}. Medians: {medians}.",
        f"{measure.noun.capitalize()} of each client at the last evaluated round. Box: quartiles; line: median; +: mean; "
        f"whiskers: the furthest client within 1.5 box lengths; dots: clients beyond.{pooled}",
    )


def _median(values: Sequence[float], measure: Measure) -> str:
    middle = float(np.median(values))
    return f"{middle:.1f} %" if measure == ACCURACY else measure.text(middle)


def trade_off(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Accuracy against computation, with marker areas that grow with the bytes sent."""
    measure = measure_of(groups)
    found: list[tuple[Group, Spread, float, float]] = []
    for group in groups:
        result = group.final(measure)
        flops = spread(one.totals.flops for one in group.runs)
        size = spread(one.totals.bytes for one in group.runs)
        if result is not None and flops is not None and size is not None and flops.mean > 0:
            found.append((group, result, flops.mean, size.mean))
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
                [at], [measure.scale * reached.mean], marker=style.marker, markersize=side, linestyle="",
                markerfacecolor=(*rgb(style.color), 0.35), markeredgecolor=style.color, markeredgewidth=1.4,
            )  # fmt: skip
        handles = [handle(styles[group.short], line="") for group, *_ in found]
        prefixed(axes.xaxis, "FLOP", flops_all if log else None)
        axes.set(xlabel=f"training computation per run{', logarithmic' if log else ''}")
        points_axis(axes, measure, [reached.mean for _, reached, *_ in found], 0.16)
        legend(figure, handles, [f"{plain(group.short, 30)} ({si(size, 'B')})" for group, _, _, size in found])
    said = "; ".join(
        f"{group.short} {measure.text(reached.mean)}, {si(flops, 'FLOP')}, {si(size, 'B')}"
        for group, reached, flops, size in found
    )
    return Picture(
        figure,
        f"{measure.title}, computation and communication",
        f"Scatter chart for {methods(len(found))}: {said}.",
        f"Mean {measure.noun} at the last evaluated round against the floating-point operations of training; the area of "
        f"a marker grows with the bytes sent both ways, given in the legend. {'High' if measure.higher else 'Low'}, to the "
        "left and small is better.",
    )


def sweep(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Final accuracy against the varied setting, one line a method, with the 95 % interval over seeds."""
    measure = measure_of(groups)
    found = [(group, result) for group in groups if group.vary and (result := group.final(measure)) is not None]
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
            y = np.array([result.mean for _, result in rows])
            low, high = interval_ends(y, np.array([result.ci or 0.0 for _, result in rows]), measure.bounds)
            bars = measure.scale * np.array([y - low, high - y])
            style, x = styles[short], [at for at, _ in rows]
            # Side by side by a few points on paper, so that bars at one value do not hide each other.
            aside = ScaledTranslation((i - (len(shorts) - 1) / 2) * 4 / 72, 0, figure.dpi_scale_trans)
            axes.errorbar(x, measure.scale * y, yerr=bars if bars.any() else None, color=style.color, linestyle=style.line,
                          marker=style.marker, markersize=5, capsize=2, elinewidth=1,
                          transform=axes.transData + aside)  # fmt: skip
            handles.append(handle(style))
            labels.append(short)
        _sweep_axis(axes, places, numeric)
        axes.set(xlabel=", ".join(name.rpartition(".")[2] for name in names))
        means = [result.mean for _, result in found]
        half = np.array([result.ci or 0.0 for _, result in found])
        low, high = interval_ends(np.array(means), half, measure.bounds)
        judged_axis(axes.yaxis, measure, means, [*map(float, low), *map(float, high)])
        legend(figure, handles, labels)
    said = "; ".join(f"{group.label} {measure.text(result.mean)}" for group, result in found)
    return Picture(
        figure,
        f"{measure.title} against {', '.join(name.rpartition('.')[2] for name in names)}",
        f"Line chart of final {measure.noun}: {said}.",
        f"Mean {measure.noun} over clients at the last evaluated round for each value of {', '.join(names)}"
        + (", mean over seeds with bars of the 95 % interval." if any(a.n > 1 for _, a in found) else "."),
    )


def _vary_key(group: Group) -> tuple[str, ...]:
    return tuple(f"{key.rpartition('.')[2]}={value_text(value)}" for key, value in group.vary)


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
        texts = [plain(", ".join(key), 32) for key in places]
        axes.set_xlim(-0.4, len(x) - 0.6)
        wide = sum(map(len, texts)) > 50
        axes.set_xticks(list(places.values()), texts, rotation=30 if wide else 0, ha="right" if wide else "center")


def _box(axes: Axes, y: int, values: Sequence[float], style: Style) -> None:
    one = boxplot_stats(np.asarray(values))[0]
    ink: Any = {"color": style.color, "linewidth": 1.3}
    axes.hlines([y, y], [one["whislo"], one["q3"]], [one["q1"], one["whishi"]], **ink)
    axes.vlines([one["whislo"], one["whishi"]], y - 0.15, y + 0.15, **ink)
    axes.add_patch(
        Rectangle(
            (one["q1"], y - 0.3), one["q3"] - one["q1"], 0.6,
            facecolor=(*rgb(style.color), 0.25), edgecolor=style.color, linewidth=1.3,
        )
    )  # fmt: skip
    axes.vlines([one["med"]], y - 0.3, y + 0.3, color=style.color, linewidth=2.4)
    axes.plot(one["fliers"], [y] * len(one["fliers"]), linestyle="", marker="o", markersize=3, color=style.color)
    axes.plot([one["mean"]], [y], linestyle="", marker="+", markersize=9, markeredgewidth=1.8, color=INK)


__all__ = ["WIDTH", "Styles", "accuracy_over_bytes", "accuracy_over_rounds", "client_boxes", "sweep", "trade_off"]
