"""The numbers of a round as TensorBoard, Weights & Biases and MLflow take them: a tag and a number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .measurements import Measurements
from .records import RoundRecord


def scalars(record: RoundRecord, clients: Sequence[Mapping[str, Any]], bytes_before: int) -> dict[str, float]:
    """Turn the record of a round into numbers by tag.

    Tags are ``accuracy/<series>/<split>`` (unweighted mean over clients, in [0, 1]) and
    ``loss/<series>/<split>`` (mean loss on the same examples), with ``/unseen`` behind them for the clients
    that never train, who are in no other tag; ``bytes/up``, ``bytes/down`` and ``bytes/total`` (cumulative),
    ``loss/<pass>`` (in training), ``routes/recovery`` (adjusted Rand index), ``privacy/epsilon`` and
    ``seconds/<kind>``. A number that is missing or not finite has no entry.

    Args:
        record: of the round.
        clients: rows of ``clients.json``.
        bytes_before: sent both ways in all rounds before.
    """
    table = Measurements.of([record], clients)
    found: dict[str, float | None] = {}
    for name in ("accuracy", "loss"):
        for split in ("val", "test"):
            for series in table.series(name, split):
                tag = f"{name}/{series}/{split}"
                found[tag] = table.mean(name, series, split)
                found[f"{tag}/unseen"] = table.mean(name, series, split, "unseen")
    found["routes/recovery"] = table.recovery().get(record.round)
    found |= {
        "bytes/up": record.bytes_up,
        "bytes/down": record.bytes_down,
        "bytes/total": bytes_before + record.bytes_up + record.bytes_down,
        "privacy/epsilon": table.last("privacy", "epsilon"),
    }
    found |= {f"loss/{name}": value for name, value in record.loss.items()}
    found |= {f"seconds/{kind}": value for kind, value in record.seconds.items()}
    return {tag: value for tag, value in found.items() if value is not None and math.isfinite(value)}
