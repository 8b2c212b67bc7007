"""Figures of what low rank saves and what it costs each client: ranks, downlink, model size, relative accuracy.

As in :mod:`fedlowrank.report.figures`, each takes groups and styles and returns a picture, or None with nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator
from numpy.typing import NDArray
from scipy.stats import gaussian_kde

from .axes import LOG_FROM, Styles, handle, methods, over_seeds, points_axis, prefixed, rgb, rounds_axis, seeds_note
from .courses import NON_NEGATIVE, Course, reach, shown_series
from .groups import Group, measure_of, seed, spread
from .measure import ACCURACY, Measure
from .sizes import Rank, downlink, group_size, ranks
from .style import INK, WIDTH, Picture, Style, drawing, legend, new_figure
from .summary import RunSummary, unseen_clients
from .units import plain, si

PANELS = 24
"""Most panels of ranks; of a deeper model, so many weights are drawn, evenly spaced in depth."""

COLUMNS = 3
POINTS = 120
"""Most rounds drawn in a panel of ranks, which is not wide enough to tell more apart."""

CHANGED = 0.005
"""Relative change of a downlink from which it counts as one: bytes of a message vary by a digit here and there."""

CLIENTS = 20
"""Fewest clients for a violin: of a few, the box plot shows all that there is."""


def rank_over_rounds(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Rank of every low-rank weight against rounds, in percent of its first rank: a panel a weight, a line a method."""
    found = [(group, mine) for group in groups if (mine := ranks(group))]
    names = list(dict.fromkeys(name for _, mine in found for name in mine))
    if not names or all(len(rank.percent.rounds) < 2 for _, mine in found for rank in mine.values()):
        return None
    shown = [names[i] for i in np.linspace(0, len(names) - 1, min(PANELS, len(names))).round().astype(int)]
    columns = min(COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    with drawing():
        figure = Figure(figsize=(WIDTH, 0.5 + max(0.86 * rows, 2.2)), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes, name in zip(panels.flat, shown, strict=False):
            lines = [(group, mine[name]) for group, mine in found if name in mine]
            for group, rank in lines:
                _rank_line(axes, rank.percent, styles[group.short])
            axes.set_title(f"{_layer(name)}\n{_from_to([rank for _, rank in lines])}", fontsize=8, loc="left", pad=3)
        for axes in panels.flat[len(shown) :]:
            axes.set_visible(False)
        # the last visible panel of each column has the ticks
        lowest = [panels[(len(shown) - 1 - i) // columns, i] for i in range(columns)]
        for axes in lowest:
            axes.tick_params(labelbottom=True)
        lowest[columns // 2].set_xlabel("round")
        drawn = [mine[name].percent for _, mine in found for name in shown if name in mine]
        top = max(100.0, *reach(drawn, NON_NEGATIVE))
        panels[0, 0].set(ylim=(-0.05 * top, 1.05 * top))
        panels[0, 0].yaxis.set_major_locator(FixedLocator([0, 50, 100]) if top <= 100 else MaxNLocator(nbins=3))
        rounds_axis(panels[0, 0].xaxis, 4)
        figure.supylabel("rank / % of the first", fontsize=10.5)
        legend(figure, [handle(styles[group.short], marker="") for group, _ in found], [g.short for g, _ in found])
    said = "; ".join(
        f"{group.short}: " + ", ".join(f"{_layer(n)} {r.first:.0f} to {r.last:.0f}" for n, r in mine.items())
        for group, mine in found
    )
    some = (
        f" {len(shown)} of {len(names)} weights are drawn, evenly spaced in depth." if len(shown) < len(names) else ""
    )
    order = " in the order of the legend" if len(found) > 1 else ""
    return Picture(
        figure,
        "Rank of each layer over rounds",
        f"Line charts of the rank of {len(names)} weights against rounds for {methods(len(found))}. From the first "
        f"rank to the last, {said}.",
        "Rank of the server's weights after each round, in percent of the rank before training, a panel a weight in the "
        f"order of the model{seeds_note([group for group, _ in found])} Above each panel: the first rank, an arrow, the "
        f"last one{order}.{some}",
    )


def downlink_over_rounds(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Bytes from the server to each participant against rounds, where that changes or the methods' ranks differ.

    From 0 up, so that a fall is as large as it looks; logarithmic only where all that changes would be too small to see.
    """
    found = [(group, sent) for group in groups if (sent := downlink(group)) is not None]
    largest = max((float(sent.mean.max()) for _, sent in found), default=0.0)
    if largest <= 0:
        return None
    changing = [float(s.mean.max()) for _, s in found if np.ptp(s.mean) > CHANGED * s.mean.max()]
    ends = {tuple((name, rank.last) for name, rank in ranks(group).items()) for group in groups}
    if not changing and len(ends) < 2:
        return None
    log = bool(changing) and max(changing) * LOG_FROM <= largest
    silent = [group.short for group, sent in found if log and sent.mean.max() <= 0]
    drawn = [(group, sent) for group, sent in found if group.short not in silent]
    with drawing():
        figure, axes = new_figure(3.1)
        for i, (group, sent) in enumerate(drawn):
            style = styles[group.short]
            # Lines that coincide are told apart by markers, each method's at rounds of its own.
            times = max(1, min(3, len(sent.rounds) // len(drawn)))
            at = sorted({int(len(sent.rounds) / times * (k + (i + 0.5) / len(drawn))) for k in range(times)})
            axes.plot(
                sent.rounds, np.where(sent.mean > 0, sent.mean, np.nan) if log else sent.mean, color=style.color,
                linestyle=style.line, marker=style.marker, markersize=5, markevery=at, dash_capstyle="butt",
            )  # fmt: skip
        positive = [float(value) for _, sent in drawn for value in sent.mean if value > 0]
        prefixed(axes.yaxis, "B", positive if log else None)
        if not log:
            axes.set_ylim(-0.03 * largest, 1.06 * largest)
        axes.set(xlabel="round", ylabel="downlink, logarithmic" if log else "downlink per participant")
        rounds_axis(axes.xaxis)
        legend(
            figure,
            [handle(styles[group.short]) for group, _ in drawn],
            [f"{plain(group.short, 22)}: {_course(sent)}" for group, sent in drawn],
        )
    said = ", ".join(f"{group.short} {_course(sent)}" for group, sent in found)
    return Picture(
        figure,
        "Downlink over rounds",
        f"Line chart of bytes sent to each participant against rounds for {methods(len(found))}. From the first round "
        f"to the last: {said}.",
        "Bytes of the server's messages in each round, divided by the number of participants"
        f"{over_seeds(groups)}; the legend gives the first and the last round, once if "
        "they are equal. Each method has its markers at rounds of its own, so that lines which coincide can be told apart."
        + (f" Sends nothing: {', '.join(silent)}." if silent else ""),
    )


def relative_accuracy(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Violin plot of each client's accuracy, or loss, minus that under a reference method, seeds pooled."""
    judged = [group for group in groups if group.last]
    if len({group.label for group in judged}) < 2:
        return None
    reference, measure = _reference(judged), measure_of(judged)
    base = {seed(one.run): by_client(one, one.headline, measure) for one in reference.runs}
    if max(len(one.run.clients) for one in reference.runs) < CLIENTS:
        return None
    found = []
    for one in shown_series(judged):
        if one.group is reference and not one.place:
            continue
        gaps = [
            measure.scale * (value - base[name][client])
            for run in one.group.runs
            if (name := seed(run.run)) in base
            for client, value in by_client(run, one.series, measure).items()
            if client in base[name]
        ]
        if gaps:
            found.append((one, np.array(gaps)))
    if not found:
        return None
    with drawing():
        figure, axes = new_figure(0.9 + 0.36 * len(found))
        axes.axvline(0, color=INK, linewidth=1, alpha=0.6)
        for y, (one, values) in enumerate(found):
            _violin(axes, y, values, styles[one.group.short], 0.1 if one.place else 0.3)
        axes.set_yticks(range(len(found)), [plain(one.label, 28) for one, _ in found])
        unit = " / points" if measure == ACCURACY else ""
        axes.set(
            ylim=(len(found) - 0.5, -0.5), xlabel=f"{measure.noun} minus that of {plain(reference.short, 24)}{unit}"
        )
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    medians = ", ".join(f"{one.label} {_points(float(np.median(values)), measure)}" for one, values in found)
    count = len({one.group.label for one, _ in found})
    seeds = max(len(one.group.runs) for one, _ in found)
    points = " in percentage points" if measure == ACCURACY else ""
    return Picture(
        figure,
        f"{measure.title} relative to {reference.short}",
        f"Violin plot of the {measure.noun} of clients minus that under {reference.short}, for {methods(count)}. "
        f"Medians{points}: {medians}.",
        f"{measure.noun.capitalize()} of each client at the last evaluated round minus that of the same client under "
        f"{reference.short} with the same seed{',' if points else ''}{points}; {'right' if measure.higher else 'left'} of "
        "the line is better. Thick line: median; thin lines: quartiles; shape: density of the clients, all shapes equally "
        "wide at their widest." + (f" The clients of all {seeds} seeds are pooled." if seeds > 1 else ""),
    )


def accuracy_over_size(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Accuracy against the numbers that a client's model takes, a marker for every series of every method."""
    measure = measure_of(groups)
    found: list[tuple[str, Style, int, float, float]] = []
    for group in groups:
        known = {name: held[0].mean for name in group.series if (held := group_size(group, name)) is not None}
        for place, name in enumerate(group.series):
            reached = spread(score.mean for score in group.last_of(name, measure))
            if reached is not None and known.get(name, 0.0) > 0:
                label = f"{plain(group.short, 24)} {plain(name, 10)}" if len(known) > 1 else plain(group.short, 32)
                found.append((label, styles[group.short], place, reached.mean, known[name]))
    sizes = [size for *_, size in found]
    if len(set(sizes)) < 2:
        return None
    log = max(sizes) / min(sizes) >= LOG_FROM
    with drawing():
        figure, axes = new_figure(3.1)
        handles = []
        for _, style, place, mean, size in found:
            face: Any = "none" if place else (*rgb(style.color), 0.5)
            look: Any = {"markerfacecolor": face, "markeredgecolor": style.color, "markeredgewidth": 1.4}
            axes.plot(
                [size], [measure.scale * mean], marker=style.marker, markersize=6 if place else 10, linestyle="", **look
            )
            handles.append(handle(style, line=""))
            handles[-1].set(markersize=5 if place else 8, **look)
        prefixed(axes.xaxis, "", sizes if log else None)
        axes.set(xlabel=f"numbers in a client's model{', logarithmic' if log else ''}")
        points_axis(axes, measure, [mean for *_, mean, _ in found], 0.1)
        if not log:
            axes.set_xlim(left=max(0.0, axes.get_xlim()[0]))
        legend(figure, handles, [f"{label} ({si(size)})" for label, *_, size in found])
    said = "; ".join(f"{label} {si(size)}, {measure.text(mean)}" for label, *_, mean, size in found)
    several = max(len(group.runs) for group in groups) > 1
    hollow = " Small and hollow: further models of a method." if any(place for _, _, place, *_ in found) else ""
    return Picture(
        figure,
        f"{measure.title} and model size",
        f"Scatter chart of {measure.noun} against model size: {said}.",
        f"Mean {measure.noun} at the last evaluated round against the numbers that a client's model takes then, mean over "
        f"clients{' and seeds' if several else ''}: the factors of low-rank weights, of sparse ones the "
        f"entries other than zero, of any other all entries.{hollow} {'High' if measure.higher else 'Low'} and to the left is "
        "better.",
    )


def by_client(one: RunSummary, series: str | None, measure: Measure = ACCURACY) -> Mapping[int, float]:
    """Test accuracy or loss of each client that has one and can train, at the last evaluated round with any."""
    summary = one.by(measure).get(series) if series is not None else None
    if summary is None or summary.last is None:
        return {}
    record = next(record for record in one.run.rounds if record.round == summary.last.round)
    values, apart = measure.of(record)[summary.name]["test"], unseen_clients(one.run)
    return {
        client: value
        for client, value in enumerate(values)
        if value is not None and math.isfinite(value) and client not in apart
    }


def _reference(groups: Sequence[Group]) -> Group:
    """FedAvg, else Standalone, else the first."""
    wanted = (next((group for group in groups if group.method == name), None) for name in ("fedavg", "standalone"))
    return next((group for group in wanted if group is not None), groups[0])


def _rank_line(axes: Axes, course: Course, style: Style) -> None:
    kept = np.unique(np.linspace(0, len(course.rounds) - 1, min(POINTS, len(course.rounds))).round().astype(int))
    x, y = course.rounds[kept], course.mean[kept]
    if course.ci is not None:
        low, high = (end[kept] for end in course.ends(NON_NEGATIVE))
        axes.fill_between(x, low, high, color=style.color, alpha=0.15, linewidth=0)
    axes.plot(x, y, color=style.color, linestyle=style.line, dash_capstyle="butt", linewidth=1.5)


def _violin(axes: Axes, y: int, values: NDArray[np.float64], style: Style, opacity: float) -> None:
    low, high = float(values.min()), float(values.max())
    first, median, third = (float(v) for v in np.quantile(values, [0.25, 0.5, 0.75]))
    if high - low > 1e-9:
        grid = np.linspace(low, high, 100)
        density = gaussian_kde(values)(grid)
        width = 0.42 * density / density.max()
        axes.fill_between(
            grid, y - width, y + width, facecolor=(*rgb(style.color), opacity), edgecolor=style.color, linewidth=1.1
        )
        around = 0.42 * np.interp([first, third], grid, density) / density.max()
        axes.vlines([first, third], y - around, y + around, color=style.color, linewidth=1)
    axes.vlines([median], y - 0.42, y + 0.42, color=style.color, linewidth=2.4)


def _layer(name: str) -> str:
    return plain(name.removesuffix(".weight"), 24)


def _from_to(found: Sequence[Rank]) -> str:
    """``384 → 40``, or ``384 → 40, 75`` for two methods; without the least space, the range of the last ranks."""
    first = list(dict.fromkeys(f"{rank.first:.0f}" for rank in found))
    last = [f"{rank.last:.0f}" for rank in found]
    said = f"{', '.join(first)} → {', '.join(last)}"
    if len(said) <= 24:
        return said
    return f"{', '.join(first)} → {min(rank.last for rank in found):.0f}–{max(rank.last for rank in found):.0f}"


def _course(sent: Course) -> str:
    first, last = si(float(sent.mean[0]), "B"), si(float(sent.mean[-1]), "B")
    return first if first == last else f"{first} → {last}"


def _points(value: float, measure: Measure) -> str:
    return (f"{value:+.1f}" if measure == ACCURACY else f"{value:+.3g}").replace("-", "−")
