"""Notices that the clients' validation has fallen, and names the clients whose updates may be the cause."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from ...core.errors import FedlowrankError
from ...results.client_numbers import ACCURACY, LOSS
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


def find_fall(records: Sequence[RoundRecord], since: int, max_fall: float) -> Fall | None:
    """The fall after the last round that was evaluated, if it is above a bound.

    A minority of clients can neither hide a fall nor feign one, for medians over clients are compared. Best is the
    earlier round with the highest median.

    Args:
        records: of the rounds.
        since: rounds before this one are not compared with.
        max_fall: the bound; 0 for none.
    """
    if not max_fall:
        return None
    tables = {r.round: _read_validation(r, records[0]) for r in records if r.round >= since}
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
    return Fall(now, best, amount, scores) if amount > max_fall else None


def _read_validation(record: RoundRecord, first: RoundRecord) -> dict[int, float]:
    """Read the validation score of each client's model: the accuracy, or the negative relative loss."""

    def of_clients(record: RoundRecord, name: str) -> dict[int, float]:
        return {i: v for i, v in record.by_client(name, split="val").items() if v is not None}

    if accuracy := of_clients(record, ACCURACY):
        return accuracy
    usual = [v for v in of_clients(first, LOSS).values() if math.isfinite(v) and v > 0]
    scale = median_low(usual) if usual else 1.0
    losses = of_clients(record, LOSS)
    return {i: -v / scale if math.isfinite(v) else -math.inf for i, v in losses.items()}


def find_suspects(
    shapes: Mapping[int, Mapping[int, UpdateShape]], rounds: Collection[int], ratio: float
) -> dict[int, UpdateShape]:
    """The clients whose updates may be the cause of a fall, the likeliest first: a minority, or nobody.

    Those are named whose update points away from the mean of the others, or is longer than a ratio.

    Args:
        shapes: of the updates, by round and client.
        rounds: in which validation fell.
        ratio: usual lengths beyond which an update is long; 0 if lengths do not matter.
    """
    worst = find_worst_shapes(shapes, rounds)
    outlying = [
        client
        for client, shape in worst.items()
        if (shape.cosine or 0.0) < 0 or (ratio and (shape.length or 0.0) > ratio)
    ]
    return {client: worst[client] for client in outlying[: max(1, (len(worst) - 1) // 2)]}


def find_worst_shapes(
    shapes: Mapping[int, Mapping[int, UpdateShape]], rounds: Collection[int]
) -> dict[int, UpdateShape]:
    """Find each client's update with the lowest cosine in some rounds; the lowest cosine comes first."""
    worst: dict[int, UpdateShape] = {}
    for t in sorted(rounds):
        for client, shape in shapes.get(t, {}).items():
            if client not in worst or _sort_key(shape) < _sort_key(worst[client]):
                worst[client] = shape
    return dict(sorted(worst.items(), key=lambda item: _sort_key(item[1])))


def _sort_key(shape: UpdateShape) -> tuple[float, float]:
    """Return the sort key: low cosines first, then long updates."""
    return (1.0 if shape.cosine is None else shape.cosine, -(shape.length or 0.0))


def describe_fall(
    fall: Fall,
    suspected: Mapping[int, UpdateShape],
    everyone: Mapping[int, UpdateShape],
    out: Path,
    checkpoints: Sequence[int],
) -> str:
    """Describe why a run pauses: the fall, the clients whose updates stand out, and how to go on.

    Args:
        fall: that was found.
        suspected: the clients that may be the cause.
        everyone: all clients with their updates.
        out: run folder.
        checkpoints: rounds whose checkpoints are kept.
    """
    before = [t for t in checkpoints if t < fall.round]
    known = [t for t in before if t in fall.scores]
    back = max(known, key=lambda t: (fall.scores[t], t)) if known else max(before, default=None)
    described = "; ".join(f"client {c}: {shape.describe()}" for c, shape in (suspected or everyone).items())
    without = "".join(f" --without {c}" for c in sorted(suspected))
    text = (
        f"paused: the clients' validation after round {fall.round} is {fall.amount:.2g} below that after round "
        f"{fall.best} (network.max_fall). "
    )
    text += "Updates that stand out: " if suspected else "No update points away from the others or is long: "
    text += f"{described or 'none is known'}. "
    go_on = "on without them" if suspected else "back"
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
