"""What the records say about sizes: numbers that a client's model takes, ranks of the server's weights, the downlink.

Runs recorded before these were measured have none of the first two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..simulation.records import RoundRecord, RunRecord
from .courses import Course, course, shared_rounds
from .groups import Group, Spread, spread, vary_text
from .summary import RunSummary, SeriesSummary


@dataclass(frozen=True)
class Size:
    """Numbers that the model of a series takes.

    Attributes:
        mean: over clients.
        std: over clients, dividing by their number.
    """

    mean: float
    std: float


@dataclass(frozen=True)
class Rank:
    """The rank of one weight over training.

    Attributes:
        percent: of the rank in the first record, which is the one before any training.
        first: that rank, mean over seeds.
        last: the rank at the last of the shared rounds, mean over seeds.
    """

    percent: Course
    first: float
    last: float


def model_size(one: RunSummary, series: str) -> Size | None:
    """Size of the models of a series, of all clients, at the round of the series' last accuracy.

    Returns:
        The size; without a usable accuracy that of the last record that has one; None if none has.
    """
    known = {r.round: sizes for r in one.run.rounds if (sizes := (r.parameters or {}).get(series))}
    if not known:
        return None
    judged = one.series.get(series, SeriesSummary(series, None, None, None, None)).last
    values = np.array(known[judged.round if judged is not None and judged.round in known else max(known)], dtype=float)
    return Size(float(values.mean()), float(values.std()))


def group_size(group: Group, series: str) -> tuple[Spread, Spread] | None:
    """Mean over clients and standard deviation over clients of the size of a series' models, both over seeds."""
    found = [size for one in group.runs if (size := model_size(one, series)) is not None]
    mean, std = spread(size.mean for size in found), spread(size.std for size in found)
    return None if mean is None or std is None else (mean, std)


def sizes_differ(groups: Sequence[Group]) -> bool:
    """Whether some client's model has not one size in all methods, series and evaluations of one setting.

    Where it has, its size is that of its architecture, and a report need not say it. Settings with other values of what
    is varied are apart: a larger architecture is no news.
    """
    seen: dict[tuple[str, str, int], set[int]] = {}
    for group in groups:
        for one in group.runs:
            for record in one.run.rounds:
                for sizes in (record.parameters or {}).values():
                    for client, size in enumerate(sizes):
                        seen.setdefault((group.name, vary_text(group.vary), client), set()).add(size)
    return any(len(sizes) > 1 for sizes in seen.values())


def ranks(group: Group) -> dict[str, Rank]:
    """The ranks of a group's low-rank weights over training, by the weights' names in the order of the model.

    Weights that not all seeds have, or whose rank was zero before training, are left out.
    """
    tracks = [{r.round: r.ranks for r in one.run.rounds if r.ranks} for one in group.runs]
    tracks = [track for track in tracks if track]
    shared = shared_rounds(tracks)
    if not shared:
        return {}
    found = {}
    for name in tracks[0][min(tracks[0])]:
        if not all(name in at for track in tracks for at in track.values()):
            continue
        full = np.array([track[min(track)][name] for track in tracks], dtype=np.float64)
        if not (full > 0).all():
            continue
        values = np.array([[track[at][name] for at in shared] for track in tracks], dtype=np.float64)
        found[name] = Rank(
            course(shared, 100 * values / full[:, None]), float(full.mean()), float(values[:, -1].mean())
        )
    return found


def last_ranks(group: Group) -> dict[str, float]:
    """Rank of every low-rank weight in the last record that has ranks, mean over the seeds that have the weight."""
    found: dict[str, list[int]] = {}
    for one in group.runs:
        for name, rank in next((r.ranks for r in reversed(one.run.rounds) if r.ranks), {}).items():
            found.setdefault(name, []).append(rank)
    return {name: float(np.mean(values)) for name, values in found.items()}


def downlink(group: Group) -> Course | None:
    """Bytes that the server sent to each participant in each round of training, or None if nobody ever took part."""
    tracks: list[Mapping[int, float]] = [_sent(one.run) for one in group.runs]
    tracks = [track for track in tracks if track]
    shared = shared_rounds(tracks)
    return course(shared, np.array([[track[at] for at in shared] for track in tracks])) if shared else None


def _sent(run: RunRecord) -> dict[int, float]:
    def each(record: RoundRecord) -> float:
        return record.bytes_down / len(record.participants)

    return {record.round: each(record) for record in run.rounds if record.participants}
