"""What the records say about adapters of unequal rank: scores by rank, weights of replies, the server's update W.

Accuracies are fractions. Clients that never train are left out, as in every other mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..simulation.records import RoundRecord, RunRecord
from .ablation import Ablation
from .courses import Course, course, shared_rounds
from .groups import Group, Spread, measure_of, predicts_tokens, spread, vary_text, worded
from .low_rank_figures import by_client
from .measure import LOSS, Measure
from .rows import Row
from .summary import part
from .units import NONE, loss_pair, percent_pair, plain

Read = Callable[[RoundRecord], float | None]


@dataclass(frozen=True)
class RankScore:
    """Test accuracy or loss of the clients of one rank at the last evaluated round.

    Attributes:
        score: mean over these clients, over seeds.
        clients: how many they are in each seed.
    """

    score: Spread
    clients: tuple[int, ...]


def client_ranks(run: RunRecord) -> dict[int, int]:
    """The rank of each client that has one, by its identifier."""
    found = {row.get("id", i): row.get("rank") for i, row in enumerate(run.clients)}
    return {client: rank for client, rank in found.items() if type(rank) is int and rank > 0}


def has_adapters(groups: Sequence[Group]) -> bool:
    """Whether any run has adapters, a language model, or clients with ranks of their own."""
    runs = [one.run for group in groups for one in group.runs]
    return any(part(run.config, "lora") or part(run.config, "language") or client_ranks(run) for run in runs)


def rank_measure(groups: Sequence[Group]) -> Measure:
    """By what clients of different ranks are compared: loss of language models and regressions, else accuracy."""
    tokens = all(predicts_tokens(group.first) for group in groups)
    return worded(LOSS, groups) if tokens else measure_of(groups)


def by_rank(group: Group, series: str, measure: Measure | None = None) -> dict[int, RankScore]:
    """Test scores of a series by the rank of the client, the largest rank first.

    Args:
        group: the group.
        series: its name.
        measure: accuracy or loss; None for :func:`rank_measure`.
    """
    measure = rank_measure([group]) if measure is None else measure
    found: dict[int, list[tuple[float, int]]] = {}
    for one in group.runs:
        ranks = client_ranks(one.run)
        values: dict[int, list[float]] = {}
        for client, value in by_client(one, series, measure).items():
            if client in ranks:
                values.setdefault(ranks[client], []).append(value)
        for rank, some in values.items():
            found.setdefault(rank, []).append((math.fsum(some) / len(some), len(some)))
    return {
        rank: RankScore(over_seeds, tuple(n for _, n in found[rank]))
        for rank in sorted(found, reverse=True)
        if (over_seeds := spread(mean for mean, _ in found[rank])) is not None
    }


def rank_series(groups: Sequence[Group]) -> list[tuple[Group, str, dict[int, RankScore]]]:
    """Every series of every group with its scores by rank; none unless there are clients of two ranks."""
    if not groups:
        return []
    measure = rank_measure(groups)
    found = [(group, name, by_rank(group, name, measure)) for group in groups for name in group.series]
    found = [one for one in found if one[2]]
    return found if len({rank for *_, scores in found for rank in scores}) > 1 else []


def rank_tables(groups: Sequence[Group]) -> list[Ablation]:
    """A table for every experiment and value of what is varied: a row for each rank, a column for each model."""
    names = list(dict.fromkeys(group.name for group in groups))
    tables = []
    for name in names:
        mine = [group for group in groups if group.name == name]
        for text in dict.fromkeys(vary_text(group.vary) for group in mine):
            some = [group for group in mine if vary_text(group.vary) == text]
            where = ([f"in {name}"] if len(names) > 1 else []) + ([f"with {text}"] if text else [])
            if found := rank_series(some):
                tables.append(_rank_table(some, found, " ".join(where)))
    return tables


def _rank_table(
    groups: Sequence[Group], found: Sequence[tuple[Group, str, dict[int, RankScore]]], where: str
) -> Ablation:
    measure = rank_measure(groups)
    show = loss_pair if measure == LOSS else percent_pair
    rows = []
    for rank in sorted({rank for *_, scores in found for rank in scores}, reverse=True):
        here = [scores.get(rank) for *_, scores in found]
        counts = sorted({n for score in here if score is not None for n in score.clients})
        many = str(counts[0]) if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
        cells = tuple(NONE if score is None else show(score.score.mean, score.score.ci) for score in here)
        rows.append(((str(rank), many), cells))
    several = any(group.series[1:] for group in groups)
    unit = f" / {measure.unit}" if measure.unit else ""
    seeds = max(score.score.n for *_, scores in found for score in scores.values())
    said = f"Mean {measure.noun} over the clients of each rank at the last evaluated round"
    said += f", mean over up to {seeds} seeds ± half-width of the 95 % confidence interval" if seeds > 1 else ""
    said += "; lower is better" if not measure.higher else ""
    return Ablation(
        f"{measure.title}{unit} by rank of the client{f' {where}' if where else ''}",
        ("rank", "clients"),
        tuple(f"{group.short}: {plain(name)}" if several else group.short for group, name, _ in found),
        tuple(rows),
        1,
        f"{said}. Clients of different ranks hold different data, so differences down a column are not due to rank alone.",
    )


def adapter_row(group: Group) -> Row:
    """What the CSV has of adapters besides :func:`fedlowrank.report.rows.row_of`; empty for runs without.

    ``perplexity`` is the exponential of the mean loss per token over clients and seeds, so the geometric mean of theirs;
    ``accuracy_rank_8`` or ``loss_rank_8`` the mean over the clients of rank 8. A further series follows after a point.
    """
    row: Row = {}
    ranked = {name: scores for _, name, scores in rank_series([group])}
    kind = "loss" if rank_measure([group]) == LOSS else "accuracy"
    for name in group.series:
        end = "" if name == group.headline else f".{plain(name)}"
        result = spread(score.mean for score in group.last_of(name, LOSS))
        if predicts_tokens(group.first) and result is not None:
            row[f"perplexity{end}"] = perplexity(result.mean)
        row |= {f"{kind}_rank_{rank}{end}": one.score.mean for rank, one in ranked.get(name, {}).items()}
    return row


def perplexity(loss: float) -> float:
    """The exponential of a loss per token in nats; infinite where that is too large a number."""
    return math.exp(loss) if loss < math.log(np.finfo(np.float64).max) else math.inf


def ranks_in_words(run: RunRecord) -> str:
    """The ranks of the clients with how many have each, such as ``8 × 2, 4``; empty if none has one."""
    counts = Counter(client_ranks(run).values())
    return ", ".join(f"{rank} × {n}" if n > 1 else str(rank) for rank, n in sorted(counts.items(), reverse=True))


def by_reply(run: RunRecord, kind: str) -> dict[int, dict[int, float]]:
    """What a method observed of each client's reply.

    Args:
        run: the run.
        kind: ``weights``, p_i of the reply; or ``truncation``, ‖W - W^{r_i}‖_F² / ‖W‖_F² of what the client was sent.

    Returns:
        By client and round, without what is not finite.
    """
    found: dict[int, dict[int, float]] = {}
    for record in run.rounds:
        for client, value in (record.observed or {}).get(kind, {}).items():
            if client.isdecimal() and value is not None and math.isfinite(value):
                found.setdefault(int(client), {})[record.round] = float(value)
    return dict(sorted(found.items()))


def server_rank(group: Group) -> tuple[Course, float, float] | None:
    """Rank of the server's update, which is 0 before training, over training.

    Returns:
        The mean over layers, and the least and the largest rank of a layer in the last record, means over seeds; None
        if there is no update that began at 0.
    """
    tracks, ends = [], []
    for one in group.runs:
        first = next((record.ranks for record in one.run.rounds if record.ranks), {})
        names = [name for name, rank in first.items() if rank == 0]
        each = {record.round: [record.ranks[n] for n in names if n in record.ranks] for record in one.run.rounds}
        found = {at: some for at, some in each.items() if some}
        if any(rank > 0 for some in found.values() for rank in some):
            tracks.append({at: math.fsum(some) / len(some) for at, some in found.items()})
            ends.append(found[max(found)])
    shared = shared_rounds(tracks)
    if not shared:
        return None
    least, most = (float(np.mean([end(some) for some in ends])) for end in (min, max))
    return course(shared, np.array([[track[at] for at in shared] for track in tracks])), least, most


def energy(group: Group) -> Course | None:
    """‖W‖_F², summed over layers, over training; None where it was not recorded."""
    return _tracked(group, lambda record: _total(record, "energy"))


def cut_off(group: Group) -> Course | None:
    """Share of ‖W‖_F² that a cap on the rank cut off in each round, of that before the cut; None if it never did."""

    def share(record: RoundRecord) -> float | None:
        kept, lost = _total(record, "energy"), _total(record, "discarded")
        if kept is None or lost is None:
            return None
        return lost / (kept + lost) if lost > 0 else 0.0

    found = _tracked(group, share)
    return found if found is not None and bool((found.mean > 0).any()) else None


def passes(group: Group) -> list[str]:
    """Names of the passes whose training loss was recorded, in order."""
    return list(dict.fromkeys(name for one in group.runs for record in one.run.rounds for name in record.loss))


def training_loss(group: Group, name: str) -> Course | None:
    """Mean loss over the steps of a pass, of all participants, over training; None if it was not recorded."""
    return _tracked(group, lambda record: record.loss.get(name))


def _total(record: RoundRecord, kind: str) -> float | None:
    layers = (record.observed or {}).get(kind)
    return math.fsum(math.nan if value is None else value for value in layers.values()) if layers else None


def _tracked(group: Group, read: Read) -> Course | None:
    tracks = []
    for one in group.runs:
        values = {record.round: read(record) for record in one.run.rounds}
        track = {at: value for at, value in values.items() if value is not None and math.isfinite(value)}
        if track:
            tracks.append(track)
    shared = shared_rounds(tracks)
    return course(shared, np.array([[track[at] for at in shared] for track in tracks])) if shared else None
