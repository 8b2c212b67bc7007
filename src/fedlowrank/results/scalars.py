"""The numbers of a round in the form of TensorBoard, Weights & Biases and MLflow: a tag and a number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .client_numbers import ACCURACY, LOSS, SPLITS
from .measurements import Measurements
from .records import RoundRecord


def list_scalars(
    record: RoundRecord, clients: Sequence[Mapping[str, Any]], bytes_before: int
) -> dict[str, float]:
    """Convert the record of a round to numbers by tag.

    Tags are ``accuracy/<series>/<split>`` (unweighted mean over clients, in [0, 1]), ``loss/<series>/<split>`` (mean
    loss on the same examples) and ``<metric>/<series>/<split>`` for each further metric, each also with the suffix
    ``/unseen`` for the clients that never train, which no other tag includes. Such a mean is NaN if the value of one
    client is not finite. Further tags are ``bytes/up``, ``bytes/down`` and ``bytes/total`` (cumulative),
    ``training_loss/<pass>`` (in training), ``routes/recovery`` (adjusted Rand index), ``privacy/epsilon`` and
    ``seconds/<kind>``. A missing number has no entry, nor has one of the further tags whose value is not finite.

    Args:
        record: record of the round.
        clients: rows of ``clients.json``.
        bytes_before: bytes sent in both directions in all earlier rounds.
    """
    table = Measurements.of([record], clients)
    means: dict[str, float | None] = {}
    for name in (ACCURACY, LOSS, *table.metrics):
        for split in SPLITS:
            for series in table.series(name, split):
                tag = f"{name}/{series}/{split}"
                means[tag] = table.mean(name, series, split)
                means[f"{tag}/unseen"] = table.mean(name, series, split, "unseen")
    numbers_by_tag: dict[str, float | None] = {
        "routes/recovery": table.recovery().get(record.round),
        "bytes/up": record.bytes_up,
        "bytes/down": record.bytes_down,
        "bytes/total": bytes_before + record.bytes_up + record.bytes_down,
        "privacy/epsilon": table.last("privacy", "epsilon"),
    }
    numbers_by_tag |= {f"training_loss/{name}": value for name, value in record.training_losses.items()}
    numbers_by_tag |= {f"seconds/{kind}": value for kind, value in record.seconds.items()}
    numbers = {
        tag: value for tag, value in numbers_by_tag.items() if value is not None and math.isfinite(value)
    }
    return {tag: mean for tag, mean in means.items() if mean is not None} | numbers
