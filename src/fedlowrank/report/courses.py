"""How accuracies and losses went over training, and which of them figures show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .groups import Group, half_width
from .measure import Measure
from .summary import scores
from .units import plain

Floats = NDArray[np.float64]
Bounds = tuple[float, float]
UNBOUNDED: Bounds = (-math.inf, math.inf)
NON_NEGATIVE: Bounds = (0.0, math.inf)
LINES = 14
"""Most lines of a figure with the further series of methods; with more, the headlines alone are drawn."""


@dataclass(frozen=True)
class Shown:
    """A series of a method as figures show it.

    Attributes:
        group: the method.
        series: name of the series.
        place: 0 for the headline, then 1, 2, ...
        label: the method, with the series after a colon unless it is the headline.
        unseen: whether it is about the clients that never train.
    """

    group: Group
    series: str
    place: int
    label: str
    unseen: bool = False


@dataclass(frozen=True)
class Course:
    """A quantity over training, at the rounds that all seeds share.

    Attributes:
        rounds: ``[n]`` rounds completed.
        mean: ``[n]`` mean over seeds.
        ci: ``[n]`` half-width of the 95 % interval over seeds, or None for one seed.
    """

    rounds: Floats
    mean: Floats
    ci: Floats | None

    def ends(self, bounds: Bounds = UNBOUNDED) -> tuple[Floats, Floats]:
        """Lower and upper end of the interval, ``[n]`` each; the mean twice for one seed."""
        return interval_ends(self.mean, self.ci, bounds)


@dataclass(frozen=True)
class Curve(Course):
    """Test accuracy or loss of one series of a group over training, with what had been sent by then.

    Attributes:
        bytes: ``[n]`` bytes both ways since the start, mean over seeds.
    """

    bytes: Floats


def shown_series(groups: Sequence[Group], most: int = LINES, *, unseen: bool = False) -> list[Shown]:
    """The headline of every group that was evaluated, each followed by the group's further series.

    Args:
        groups: the groups.
        most: if there were more than so many in all, only the headlines.
        unseen: after them, the headline over the clients that never train, where there are any.
    """
    found = []
    for group in groups:
        for place, name in enumerate(group.series):
            if group.last_of(name):
                found.append(Shown(group, name, place, f"{group.short}: {plain(name)}" if place else group.short))
        if unseen and group.headline is not None and group.unseen():
            place = len(group.series)
            found.append(Shown(group, group.headline, place, f"{group.short}: unseen clients", unseen=True))
    return found if len(found) <= most else [one for one in found if not one.place]


def curve(
    group: Group, series: str | None = None, measure: Measure | None = None, *, unseen: bool = False
) -> Curve | None:
    """The group's accuracy or loss over training, or None if none of its runs was evaluated.

    Args:
        group: the group.
        series: the series; None for the headline.
        measure: accuracy or loss; None for what the group is judged by.
        unseen: over the clients that never train instead of those that can.
    """
    tracks = []
    for one in group.runs:
        name = one.headline if series is None else series
        if name is None:
            continue
        spent = np.cumsum([record.bytes_up + record.bytes_down for record in one.run.rounds], dtype=np.float64)
        until = {record.round: float(total) for record, total in zip(one.run.rounds, spent, strict=True)}
        found = scores(one.run, name, measure=measure or group.measure, unseen=unseen)
        track = {got.round: (got.mean, until[got.round]) for got in found}
        if track:
            tracks.append(track)
    shared = shared_rounds(tracks)
    if not shared:
        return None
    values = np.array([[track[at] for at in shared] for track in tracks])
    means, sent = values[:, :, 0], values[:, :, 1]
    return Curve(np.array(shared, dtype=np.float64), means.mean(axis=0), interval(means), sent.mean(axis=0))


def shared_rounds(tracks: Sequence[Mapping[int, Any]]) -> list[int]:
    """The rounds that all seeds have, ascending; none without seeds."""
    return sorted(set.intersection(*(set(track) for track in tracks))) if tracks else []


def interval(values: Floats) -> Floats | None:
    """Half-width of the 95 % interval over the seeds of ``values [seeds, n]``, or None for one seed."""
    return half_width(1.0, len(values)) * values.std(axis=0, ddof=1) if len(values) > 1 else None


def interval_ends(mean: Floats, ci: Floats | None, bounds: Bounds = UNBOUNDED) -> tuple[Floats, Floats]:
    """Lower and upper ends of intervals, cut to what the quantity can be.

    Args:
        mean: ``[n]`` means.
        ci: ``[n]`` half-widths, or None for one seed.
        bounds: the least and the largest possible value.
    """
    if ci is None:
        return mean, mean
    return np.clip(mean - ci, *bounds), np.clip(mean + ci, *bounds)


def reach(courses: Sequence[Course], bounds: Bounds = UNBOUNDED) -> list[float]:
    """Both ends of every interval of these courses, for which an axis must have room."""
    return [float(end) for one in courses for side in one.ends(bounds) for end in side]


def course(rounds: Sequence[int], values: Floats) -> Course:
    """The course of ``values [seeds, n]`` at these rounds."""
    return Course(np.array(rounds, dtype=np.float64), values.mean(axis=0), interval(values))
