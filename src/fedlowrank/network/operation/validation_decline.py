"""Detects that the clients' validation has fallen, and names the clients whose updates may be the cause."""

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
    """A run pauses, because a person has to decide how it continues."""


@dataclass(frozen=True)
class Fall:
    """A fall of the clients' validation.

    Attributes:
        round: number of completed rounds after which the fall was found.
        best: number of completed rounds at the best earlier evaluation, with which it is compared.
        amount: median over clients of the fall: of the accuracy, or for a regression the rise of the loss divided by
            the loss before training.
        scores: median validation over clients after each evaluated round, by completed rounds.
    """

    round: int
    best: int
    amount: float
    scores: Mapping[int, float]


def find_fall(records: Sequence[RoundRecord], first_round: int, max_fall: float) -> Fall | None:
    """Find the fall after the last evaluated round, if it is above a bound.

    A minority of clients can neither hide nor feign a fall, because medians over clients are compared. The best round is
    the earlier round with the highest median.

    Args:
        records: records of the rounds.
        first_round: first round that is compared.
        max_fall: bound of the fall; 0 for none.
    """
    if not max_fall:
        return None
    tables = {r.round: _read_validation(r, records[0]) for r in records if r.round >= first_round}
    tables = {t: values for t, values in tables.items() if values}
    if len(tables) < 2:
        return None
    scores = {t: median_low(values.values()) for t, values in tables.items()}
    *earlier_rounds, last_round = sorted(scores)
    best = max(earlier_rounds, key=lambda t: (scores[t], t))
    common_ids = tables[best].keys() & tables[last_round].keys()
    if not common_ids:
        return None
    amount = median_low(tables[best][i] - tables[last_round][i] for i in common_ids)
    return Fall(last_round, best, amount, scores) if amount > max_fall else None


def _read_validation(record: RoundRecord, first_record: RoundRecord) -> dict[int, float]:
    """Read the validation score of each client's model: the accuracy, or the negative relative loss."""

    def of_clients(record: RoundRecord, name: str) -> dict[int, float]:
        return {i: v for i, v in record.by_client(name, split="val").items() if v is not None}

    if accuracy := of_clients(record, ACCURACY):
        return accuracy
    initial_losses = [v for v in of_clients(first_record, LOSS).values() if math.isfinite(v) and v > 0]
    scale = median_low(initial_losses) if initial_losses else 1.0
    losses = of_clients(record, LOSS)
    return {i: -v / scale if math.isfinite(v) else -math.inf for i, v in losses.items()}


def find_suspects(
    shapes: Mapping[int, Mapping[int, UpdateShape]], rounds: Collection[int], ratio: float
) -> dict[int, UpdateShape]:
    """Find the clients whose updates may have caused a fall, the likeliest first; at most a minority, possibly none.

    A client is named if its update points away from the mean of the others, or is longer than the ratio.

    Args:
        shapes: length and direction of the updates, by round and client.
        rounds: rounds in which validation fell.
        ratio: multiple of the usual length beyond which an update is long; 0 to ignore lengths.
    """
    worst_shapes = find_worst_shapes(shapes, rounds)
    outlier_ids = [
        client_id
        for client_id, shape in worst_shapes.items()
        if (shape.cosine or 0.0) < 0 or (ratio and (shape.length or 0.0) > ratio)
    ]
    minority = max(0, len(worst_shapes) - 1) // 2
    return {client_id: worst_shapes[client_id] for client_id in outlier_ids[:minority]}


def find_worst_shapes(
    shapes: Mapping[int, Mapping[int, UpdateShape]], rounds: Collection[int]
) -> dict[int, UpdateShape]:
    """Find each client's update with the lowest cosine in some rounds; the lowest cosine comes first."""
    worst_shapes: dict[int, UpdateShape] = {}
    for t in sorted(rounds):
        for client_id, shape in shapes.get(t, {}).items():
            if client_id not in worst_shapes or _sort_key(shape) < _sort_key(worst_shapes[client_id]):
                worst_shapes[client_id] = shape
    return dict(sorted(worst_shapes.items(), key=lambda item: _sort_key(item[1])))


def _sort_key(shape: UpdateShape) -> tuple[float, float]:
    """Return the sort key: low cosines first, then long updates."""
    return (1.0 if shape.cosine is None else shape.cosine, -(shape.length or 0.0))


def describe_fall(
    fall: Fall,
    suspects: Mapping[int, UpdateShape],
    all_shapes: Mapping[int, UpdateShape],
    run_path: Path,
    checkpoints: Sequence[int],
) -> str:
    """Describe why a run pauses: the fall, the clients whose updates stand out, and how to go on.

    Args:
        fall: fall that was found.
        suspects: updates of the clients that may be the cause, by client.
        all_shapes: updates of all clients, by client.
        run_path: path of the run folder.
        checkpoints: rounds whose checkpoints are kept.
    """
    earlier_rounds = [t for t in checkpoints if t < fall.round]
    scored_rounds = [t for t in earlier_rounds if t in fall.scores]
    target_round = (
        max(scored_rounds, key=lambda t: (fall.scores[t], t))
        if scored_rounds
        else max(earlier_rounds, default=None)
    )
    descriptions = "; ".join(
        f"client {c}: {shape.describe()}" for c, shape in (suspects or all_shapes).items()
    )
    options = "".join(f" --without {c}" for c in sorted(suspects))
    text = (
        f"paused: the clients' validation after round {fall.round} is {fall.amount:.2g} below that after round "
        f"{fall.best} (network.max_fall). "
    )
    text += "Updates that stand out: " if suspects else "No update points away from the others or is long: "
    text += f"{descriptions or 'none is known'}. "
    continuation = "on without them" if suspects else "back"
    if target_round is None:
        text += f"No checkpoint before round {fall.round} is kept; raise run.keep_checkpoints next time. "
    else:
        text += (
            f"To go {continuation}: fedlowrank resume {shlex.quote(str(run_path))} --round {target_round}{options}, then "
            "serve --resume. "
        )
        if fall.scores.get(target_round, -math.inf) < fall.scores[fall.best] - fall.amount / 2:
            text += f"The state after round {target_round} may be spoiled already. "
    return text + "If the fall is to be accepted: serve --resume alone."
