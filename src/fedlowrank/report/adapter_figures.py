"""Figures of adapters of unequal rank: scores by rank, weights of replies, the server's update W, training losses.

As in :mod:`fedlowrank.report.figures`, each takes groups and styles and returns a picture, or None with nothing to draw.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from .adapters import (
    RankScore,
    by_reply,
    client_ranks,
    cut_off,
    energy,
    has_adapters,
    passes,
    rank_measure,
    rank_series,
    server_rank,
    training_loss,
)
from .axes import DECADES, Styles, cut_note, handle, judged_axis, line, methods, over_seeds, rounds_axis, seeds_note
from .courses import LINES, NON_NEGATIVE, Bounds, Course, Floats, interval_ends, reach
from .groups import Group, seed
from .measure import LOSS, Measure, spans
from .style import INK, LIGHT, WIDTH, Picture, Style, drawing, hue, legend, new_figure, styles
from .units import plain

TRAINING = replace(LOSS, noun="training loss", title="Training loss")
"""For axes and captions: not one of the measures that runs are judged by."""

PANELS = 4
"""Most panels of a figure by rank: a method has few series."""

TICK = 0.1
"""Least distance of two labels on an axis of ranks, as a part of the axis."""

CLOSE = 8
"""Ranks from which on markers are smaller and closer to their places."""

SHARE: Bounds = (0.0, 1.0)

LISTED = 9
"""Most ranks in a legend."""


def score_by_rank(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Accuracy, or loss, against the rank of the client: a panel a series, a line a method, bars over seeds."""
    found = rank_series(groups)
    names = list(dict.fromkeys(name for _, name, _ in found))[:PANELS]
    if not names:
        return None
    found = [one for one in found if one[1] in names]
    measure = rank_measure(groups)
    drawn = list(dict.fromkeys(group.short for group, *_ in found))
    columns = min(2, len(names))
    rows = math.ceil(len(names) / columns)
    ranks = sorted({rank for *_, scores in found for rank in scores})
    # of many ranks, markers set aside as far would stand at the next rank
    room = min(1.0, CLOSE / len(ranks))
    with drawing():
        figure = Figure(figsize=(WIDTH, 0.6 + 2.3 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        scores_of_all = [score for *_, scores in found for score in scores.values()]
        low, high = _ends(scores_of_all, measure)
        judged_axis(
            panels[0, 0].yaxis,
            measure,
            [one.score.mean for one in scores_of_all],
            [*map(float, low), *map(float, high)],
        )
        for axes, name in zip(panels.flat, names, strict=False):
            axes.set_title(plain(name, 24), fontsize=9.5, loc="left", pad=4)
            for group, series, scores in found:
                if series == name:
                    # side by side by a few points on paper, so that bars at one rank do not hide each other
                    shift = (drawn.index(group.short) - (len(drawn) - 1) / 2) * 4 / 72 * room
                    aside = ScaledTranslation(shift, 0, figure.dpi_scale_trans)
                    style, x = styles[group.short], sorted(scores)
                    mean = np.array([scores[rank].score.mean for rank in x])
                    low, high = _ends([scores[rank] for rank in x], measure)
                    bars = measure.scale * np.array([mean - low, high - mean])
                    axes.errorbar(
                        x, measure.scale * mean, yerr=bars if bars.any() else None, color=style.color, linestyle=style.line,
                        marker=style.marker, markersize=2.5 + 2.5 * room, capsize=2, elinewidth=1,
                        transform=axes.transData + aside,
                    )  # fmt: skip
        for axes in panels.flat[len(names) :]:
            axes.set_visible(False)
        for axes in panels[1:, 0]:
            axes.set_ylabel(panels[0, 0].get_ylabel())
        for axes in (panels[(len(names) - 1 - i) // columns, i] for i in range(columns)):
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("rank of the client")
        _rank_axis(panels[0, 0], ranks)
        legend(figure, [handle(styles[short]) for short in drawn], drawn)
    said = "; ".join(
        f"{group.short}, {name}: " + ", ".join(f"rank {r} {measure.text(s.score.mean)}" for r, s in scores.items())
        for group, name, scores in found
    )
    over = over_seeds([group for group, *_ in found])
    over += " with bars of the 95 % interval" if over else ""
    return Picture(
        figure,
        f"{measure.title} by rank of the client",
        f"Line chart of {measure.noun} against the rank of the client for {methods(len(drawn))}: {said}.",
        f"Mean {measure.noun} at the last evaluated round over the clients of each rank{over}; the axis of ranks is "
        f"logarithmic.{_series_note(names)} {'High' if measure.higher else 'Low'} is better, and a level line serves all "
        "ranks alike. Clients of different ranks hold different data, so a slope is not due to rank alone: compare methods.",
    )


def replies_over_rounds(groups: Sequence[Group]) -> list[Picture]:
    """Weight and truncation error of each client's reply against rounds, a picture for every method that has them."""
    return [picture for group in groups if (picture := _replies(group)) is not None]


def _replies(group: Group) -> Picture | None:
    run = group.first
    weights, errors = by_reply(run, "weights"), by_reply(run, "truncation")
    known = client_ranks(run)
    clients = [client for client in weights if client in known]
    if not clients or len({known[client] for client in clients}) < 2:
        return None
    counts = Counter(known[client] for client in clients)
    looks = rank_styles(list(counts))
    replies = Counter(at for track in weights.values() for at in track)
    with drawing():
        figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        at = sorted(replies)
        even = above.plot(at, [1 / replies[t] for t in at], color=INK, linewidth=1, linestyle=(0, (1, 2)), alpha=0.7)[0]
        shown = {client: errors.get(client, {}) for client in clients}
        log = _error_axis(below, [value for track in shown.values() for value in track.values()])
        for client in clients:
            # who took part now and then has markers, or a lone round would not be seen
            now_and_then = len(weights[client]) < len(at)
            _reply_line(above, weights[client], looks[known[client]], at, now_and_then)
            kept = {t: 100 * value for t, value in shown[client].items() if value > 0 or not log}
            _reply_line(below, kept, looks[known[client]], at, now_and_then)
        # not from 0: smoothed weights are close to each other, and the dotted line says where equal ones are
        above.set(ylabel="weight of the reply")
        above.margins(y=0.08)
        above.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        below.set_xlabel("round")
        rounds_axis(below.xaxis)
        listed = [list(counts)[i] for i in _spaced(len(counts), LISTED)]
        listed = sorted(listed, reverse=True)
        legend(
            figure,
            [*(_key(looks[rank]) for rank in listed), even],
            [*(f"rank {rank}" + (f" ({counts[rank]} clients)" if counts[rank] > 1 else "") for rank in listed),
             "equal weights"],
        )  # fmt: skip
    ends = "; ".join(
        f"rank {rank} weight {_last(weights, some):.3g}, error {_percent(_last(errors, some))}"
        for rank in sorted(counts, reverse=True)
        if (some := [client for client in clients if known[client] == rank])
    )
    scale = ", on a logarithmic axis that has no place for errors of 0" if log else ""
    cut = f" {len(listed)} of {len(counts)} ranks are named." if len(listed) < len(counts) else ""
    return Picture(
        figure,
        f"Weights and truncation errors: {group.short}",
        f"Two line charts against rounds for {len(clients)} clients under {group.short}. In the last round of each client, "
        f"means over the clients of a rank: {ends}.",
        f"Above: how much the reply of each client counts in a round, seed {seed(run)}; dotted: what it would if all counted "
        "the same. Below: the part of the server's update W that the client's rank has no room for, ‖W − Wʳ‖² in percent of "
        f"‖W‖² over all layers{scale}. A line is a client, its color "
        f"and dash its rank; clients of one rank are sent the same, so their lines often coincide; it is "
        f"interrupted where the client took no part.{cut}",
    )


def server_rank_over_rounds(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Singular values that the server holds of its update W, against rounds: mean over layers, one line a method.

    They are the rank of W in the exact and the capped state, but in the dense one no more than the clients ask for
    (:attr:`fedlowrank.linalg.delta.Delta.rank`), and the record does not tell the states apart.
    """
    found = [(group, got) for group in groups if (got := server_rank(group)) is not None]
    if not found:
        return None
    with drawing():
        figure, axes = new_figure(2.6)
        handles = [
            line(axes, got[0].rounds, got[0].mean, got[0].ci, styles[group.short], bounds=NON_NEGATIVE)
            for group, got in found
        ]
        top = max(reach([got[0] for _, got in found], NON_NEGATIVE))
        axes.set(xlabel="round", ylabel="singular values of W", ylim=(-0.03 * top, 1.06 * top))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
        rounds_axis(axes.xaxis)
        legend(figure, handles, [group.short for group, _ in found])
    said = ", ".join(
        f"{group.short} {got[0].mean[-1]:.0f}" + (f" ({got[1]:.0f} to {got[2]:.0f})" if got[1] < got[2] else "")
        for group, got in found
    )
    return Picture(
        figure,
        "Rank of the server's update over rounds",
        f"Line chart of the singular values that the server holds of its update against rounds for {methods(len(found))}. At "
        f"the end, mean over layers, with the least and the largest where they differ: {said}.",
        "Singular values of the server's update W that the server holds after each round, mean over layers. While it holds W "
        f"as factors that is the rank of W, which begins at 0{seeds_note([group for group, _ in found])} Of a W that it holds "
        "as a whole matrix, it computes no more than the largest rank of a client: a line at that number may be below the rank.",
    )


def energy_over_rounds(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Energy of the server's update and what a cap on its rank cut off, against rounds; None if none ever did."""
    cuts = [(group, cut) for group in groups if (cut := cut_off(group)) is not None]
    if not cuts:
        return None
    found = [(group, course) for group in groups if (course := energy(group)) is not None]
    with drawing():
        figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        handles = [
            line(above, one.rounds, one.mean, one.ci, styles[group.short], bounds=NON_NEGATIVE) for group, one in found
        ]
        for group, one in cuts:
            line(below, one.rounds, one.mean, one.ci, styles[group.short], 100.0, bounds=SHARE)
        for axes, top, label in (
            (above, max(reach([one for _, one in found], NON_NEGATIVE)), "‖W‖²"),
            (below, 100 * max(reach([one for _, one in cuts], SHARE)), "cut off / %"),
        ):
            axes.set(ylabel=label, ylim=(-0.03 * top, 1.06 * top))
            axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        below.set_xlabel("round")
        rounds_axis(below.xaxis)
        legend(figure, handles, [group.short for group, _ in found])
    said = ", ".join(
        f"{group.short} {_percent(float(cut.mean.max()))} at round {cut.rounds[int(cut.mean.argmax())]:.0f}"
        for group, cut in cuts
    )
    return Picture(
        figure,
        "Energy of the server's update over rounds",
        f"Two line charts against rounds. Energy at the end: "
        f"{', '.join(f'{group.short} {one.mean[-1]:.3g}' for group, one in found)}. Most cut off: {said}.",
        "Above: energy ‖W‖² of the server's update after each round, summed over layers (the squared Frobenius norm). Below: "
        "what the cap on its rank cut off in that round, in percent of the energy before the cut"
        f"{seeds_note([group for group, _ in found])} What is cut off is lost to all clients; if it stays above a few "
        "percent, a larger cap is worth a try.",
    )


def training_loss_over_rounds(groups: Sequence[Group], styles: Styles) -> Picture | None:
    """Training loss against rounds where there are adapters, a line a method; further passes are thin lines."""
    if not has_adapters(groups):
        return None
    found: list[tuple[Group, int, str, Course]] = []
    for group in groups:
        for place, name in enumerate(passes(group)):
            course = training_loss(group, name)
            if course is not None:
                found.append((group, place, f"{group.short}: {plain(name, 16)}" if place else group.short, course))
    if len(found) > LINES:
        found = [one for one in found if not one[1]]
    if not found:
        return None
    with drawing():
        figure, axes = new_figure(3.1)
        axes.set(xlabel="round")
        ends = reach([course for _, place, _, course in found if not place])
        judged_axis(axes.yaxis, TRAINING, [float(value) for *_, course in found for value in course.mean], ends)
        handles = [
            line(axes, course.rounds, course.mean, course.ci, styles[group.short].further(place), thin=place > 0)
            for group, place, _, course in found
        ]
        rounds_axis(axes.xaxis)
        legend(figure, handles, [label for _, _, label, _ in found])
    last = ", ".join(f"{label} {TRAINING.text(float(course.mean[-1]))}" for _, _, label, course in found)
    more = " Thin lines, without a band: further passes of a method." if any(place for _, place, *_ in found) else ""
    return Picture(
        figure,
        "Training loss over rounds",
        f"Line chart of training loss against rounds for {methods(len({group.label for group, *_ in found}))}. At the end: "
        f"{last}.",
        "Mean loss over the training steps of each round, of all participants"
        f"{seeds_note([g for g, *_ in found], TRAINING.bounds)}{cut_note(axes, ends)} It is taken while the clients train, so "
        "it falls within a round as well as from round to round: where it falls and the test loss does not, the clients "
        f"overfit or their updates do not add up at the server.{more}",
    )


def rank_styles(ranks: Sequence[int]) -> dict[int, Style]:
    """A look for each rank, the largest first: colors of the palette while they last, else evenly spaced hues."""
    order = sorted(set(ranks), reverse=True)
    looks = styles([str(rank) for rank in order])
    if len(order) <= len(LIGHT):
        return {rank: looks[str(rank)] for rank in order}
    # not all around the circle of hues, where the largest and the smallest would look alike
    return {rank: replace(looks[str(rank)], color=hue(i, len(order) * 5 // 4)) for i, rank in enumerate(order)}


def _ends(scores: Sequence[RankScore], measure: Measure) -> tuple[Floats, Floats]:
    """Lower and upper ends of the bars."""
    means, half = (np.array([getattr(one.score, name) or 0.0 for one in scores]) for name in ("mean", "ci"))
    return interval_ends(means, half, measure.bounds)


def _rank_axis(axes: Axes, ranks: Sequence[int]) -> None:
    # limits by hand: lines set aside from their values have none that matplotlib would look at
    low, high = ranks[0], ranks[-1]
    margin = (high / low) ** 0.07
    axes.set_xscale("log")
    axes.set_xlim(low / margin, high * margin)
    apart = (high / low) ** TICK
    kept = [high]
    for rank in reversed(ranks[:-1]):
        if kept[-1] >= rank * apart and (rank == low or rank >= low * apart):
            kept.append(rank)
    axes.xaxis.set_major_locator(FixedLocator(kept))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _series_note(names: Sequence[str]) -> str:
    said = {
        "personal": "personal is the model that the client itself uses, of its own rank",
        "server": "server is the server's whole model on the test examples of the client",
    }
    told = [said[name] for name in names if name in said]
    return f" Panels: {'; '.join(told)}." if len(names) > 1 and told else ""


def _error_axis(axes: Axes, errors: Sequence[float]) -> bool:
    """Label, scale and limits of an axis of relative errors; whether it is logarithmic."""
    positive = [value for value in errors if value > 0]
    log = spans(positive, DECADES)
    if log:
        axes.set_yscale("log")
        axes.set_ylim(100 * min(positive) / 1.3, 130 * max(positive))
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        top = 100 * max(positive, default=0.01)
        axes.set_ylim(-0.03 * top, 1.06 * top)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_ylabel("cut off / %")
    return log


def _reply_line(axes: Axes, track: Mapping[int, float], style: Style, rounds: Sequence[int], marked: bool) -> None:
    # no line over rounds in which the client took no part
    axes.plot(
        rounds, [track.get(at, math.nan) for at in rounds], color=style.color, linestyle=style.line,
        marker=style.marker if marked else "", markersize=3.5, linewidth=1.3, dash_capstyle="butt",
    )  # fmt: skip


def _key(style: Style) -> Line2D:
    return handle(style, marker="")


def _spaced(count: int, most: int) -> list[int]:
    return sorted({int(i) for i in np.linspace(0, count - 1, min(count, most)).round()})


def _last(tracks: Mapping[int, Mapping[int, float]], clients: Sequence[int]) -> float:
    """Mean over clients of what each has in its last round; NaN if none has any."""
    ends = [track[max(track)] for client in clients if (track := tracks.get(client))]
    return math.fsum(ends) / len(ends) if ends else math.nan


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %" if math.isfinite(value) else "not recorded"
