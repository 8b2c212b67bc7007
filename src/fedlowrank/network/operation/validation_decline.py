"""Notices that the clients' validation has fallen, and names the clients whose updates may be the cause."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from ...core.errors import FedlowrankError
from ...results.measurements import ACCURACY, LOSS
from ...results.records import RoundRecord
from .activity import UpdateShape


class PausedError(FedlowrankError):
    """A run pauses, for a person has to decide how it goes on."""


@dataclass(frozen=True)
class Fall:
    """A fall of the clients' validation.

    Attributes:
        round: after which it was found.
        best: the round that it is compared with.
        amount: the median over clients of the fall: of the accuracy, or of a regression the rise of the loss over
            the loss before training.
        scores: validation after each round that was evaluated, the median over clients.
    """

    round: int
    best: int
    amount: float
    scores: Mapping[int, float]


def find_fall(records: Sequence[RoundRecord], since: int, most: float) -> Fall | None:
    """The fall after the last round that was evaluated, if it is above a bound.

    A minority of clients can neither hide a fall nor feign one, for medians over clients are compared. Best is the
    earlier round with the highest median.

    Args:
        records: of the rounds.
        since: rounds before this one are not compared with.
        most: the bound; 0 for none.
    """
    if not most:
        return None
    tables = {r.round: _validation(r, records[0]) for r in records if r.round >= since}
    tables = {t: values for t, values in tables.items() if values}
    if len(tables) < 2:
        return None
    scores = {t: median_low(values.values()) for t, values in tables.items()}
    *earlier, now = sorted(scores)
    best = max(earlier, key=lambda t: (scores[t], t))
    both = tables[best].keys() & tables[now].keys()
    if not both:
        return None
    amount = median_low(tables[best][i] - tables[now][i] for i in both)
    return Fall(now, best, amount, scores) if amount > most else None


def _validation(record: RoundRecord, first: RoundRecord) -> dict[int, float]:
    """What each client's model is worth on its validation examples: the more, the better."""

    def of_clients(record: RoundRecord, name: str) -> dict[int, float]:
        return {i: v for i, v in record.by_client(name, "val").items() if v is not None}

    if accuracy := of_clients(record, ACCURACY):
        return accuracy
    usual = [v for v in of_clients(first, LOSS).values() if math.isfinite(v) and v > 0]
    scale = median_low(usual) if usual else 1.0
    losses = of_clients(record, LOSS)
    return {i: -v / scale if math.isfinite(v) else -math.inf for i, v in losses.items()}


def suspects(
    shapes: Mapping[int, Mapping[int, UpdateShape]], rounds: Collection[int], ratio: float
) -> dict[int, UpdateShape]:
    """The clients whose updates may be the cause of a fall, the likeliest first: a minority, or nobody.

    Those are named whose update points away from the mean of the others, or is longer than a ratio.

    Args:
        shapes: of the updates, by round and client.
        rounds: in which validation fell.
        ratio: usual lengths beyond which an update is long; 0 if lengths do not matter.
    """
    worst = worst_shapes(shapes, rounds)
    odd = [
        client
        for client, shape in worst.items()
        if (shape.cosine or 0.0) < 0 or (ratio and (shape.length or 0.0) > ratio)
    ]
    return {client: worst[client] for client in odd[: max(1, (len(worst) - 1) // 2)]}


def worst_shapes(
    shapes: Mapping[int, Mapping[int, UpdateShape]], rounds: Collection[int]
) -> dict[int, UpdateShape]:
    """Of each client the update of some rounds that agrees least with the others, the oddest client first."""
    worst: dict[int, UpdateShape] = {}
    for t in sorted(rounds):
        for client, shape in shapes.get(t, {}).items():
            if client not in worst or _order(shape) < _order(worst[client]):
                worst[client] = shape
    return dict(sorted(worst.items(), key=lambda item: _order(item[1])))


def _order(shape: UpdateShape) -> tuple[float, float]:
    """Sorts odd updates first."""
    return (1.0 if shape.cosine is None else shape.cosine, -(shape.length or 0.0))


def describe_fall(
    fall: Fall,
    named: Mapping[int, UpdateShape],
    everyone: Mapping[int, UpdateShape],
    out: Path,
    kept: Sequence[int],
) -> str:
    """What is said when a run pauses: what fell, whose updates are odd, and how it goes on.

    Args:
        fall: that was found.
        named: the clients that may be the cause.
        everyone: all clients with their updates.
        out: run folder.
        kept: rounds whose checkpoints are kept.
    """
    before = [t for t in kept if t < fall.round]
    known = [t for t in before if t in fall.scores]
    back = max(known, key=lambda t: (fall.scores[t], t)) if known else max(before, default=None)
    who = "; ".join(f"client {c}: {shape.describe()}" for c, shape in (named or everyone).items())
    without = "".join(f" --without {c}" for c in sorted(named))
    text = (
        f"paused: the clients' validation after round {fall.round} is {fall.amount:.2g} below that after round "
        f"{fall.best} (network.max_fall). "
    )
    text += "Updates that stand out: " if named else "No update points away from the others or is long: "
    text += f"{who or 'none is known'}. "
    go_on = "on without them" if named else "back"
    if back is None:
        text += f"No checkpoint before round {fall.round} is kept; raise run.keep_checkpoints next time. "
    else:
        text += (
            f"To go {go_on}: fedlowrank resume {shlex.quote(str(out))} --round {back}{without}, then "
            "serve --resume. "
        )
        if fall.scores.get(back, -math.inf) < fall.scores[fall.best] - fall.amount / 2:
            text += f"The state after round {back} may be spoiled already. "
    return text + "If the fall is to be accepted: serve --resume alone."
