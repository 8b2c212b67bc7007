"""The numbers of a round as TensorBoard, Weights & Biases and MLflow take them: a tag and a number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    unseen = {row.get("id", i) for i, row in enumerate(clients) if row.get("unseen") is True}
    found: dict[str, float | None] = {}
    for field, table in (("accuracy", record.accuracy), ("loss", record.risk)):
        for series, splits in (table or {}).items():
            for split, row in splits.items():
                tag = f"{field}/{series}/{split}"
                found[tag] = _mean([v for i, v in enumerate(row) if i not in unseen])
                found[f"{tag}/unseen"] = _mean([v for i, v in enumerate(row) if i in unseen])
    found["routes/recovery"] = _recovery(record.routes, clients, unseen)
    found |= {
        "bytes/up": record.bytes_up,
        "bytes/down": record.bytes_down,
        "bytes/total": bytes_before + record.bytes_up + record.bytes_down,
        "privacy/epsilon": (record.observed or {}).get("privacy", {}).get("epsilon"),
    }
    found |= {f"loss/{name}": value for name, value in record.loss.items()}
    found |= {f"seconds/{kind}": value for kind, value in record.seconds.items()}
    return {tag: value for tag, value in found.items() if value is not None and math.isfinite(value)}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(known) / len(known) if known else None


def _recovery(
    routes: list[list[float]] | None, clients: Sequence[Mapping[str, Any]], unseen: set[int]
) -> float | None:
    """Adjusted Rand index over the clients that can train; None if fewer than two true clusters are known."""
    if not routes or len(routes[0]) < 2 or any(len(row) != len(routes[0]) for row in routes):
        return None
    known = {row.get("id", i): row.get("cluster") for i, row in enumerate(clients)}
    truth = [None if i in unseen else known.get(i) for i in range(len(routes))]
    return score_recovery(np.array(routes, dtype=np.float64), truth) if len(set(truth) - {None}) > 1 else None


def score_recovery(routes: NDArray[np.float64], truth: Sequence[int | None]) -> float:
    """Adjusted Rand index of the clients' largest shares against their true clusters, None if unknown.

    ``routes`` are shares ``[clients, clusters]``; of several largest ones the first counts. The index is 1
    for the same clusters, about 0 for random ones, and NaN if no client has a known cluster and finite
    shares.
    """
    from sklearn.metrics import adjusted_rand_score  # slow to import

    usable = [i for i, cluster in enumerate(truth) if cluster is not None and np.isfinite(routes[i]).all()]
    if not usable:
        return math.nan
    return float(adjusted_rand_score([truth[i] for i in usable], routes[usable].argmax(axis=1)))
