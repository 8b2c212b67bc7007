"""Tables of run records, a row for each round; routes of clients to clusters and their agreement."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...results.records import RunRecord

Floats = NDArray[np.float64]


def section(config: Any, name: str) -> dict[str, Any]:
    """A section of ``run.json``; empty if it is missing or null."""
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def find_collapse(routes: Floats) -> int | None:
    """The one cluster that has the largest share at every client with finite shares ``[clients, clusters]``.

    None if clients differ or have no single largest share, and where there is no choice: one cluster, or
    fewer than two clients.
    """
    finite = routes[np.isfinite(routes).all(axis=1)]
    if len(finite) < 2 or finite.shape[1] < 2:
        return None
    # Before training all shares are equal and choose no cluster, though argmax would name the first.
    is_single = (finite == finite.max(axis=1, keepdims=True)).sum(axis=1) == 1
    chosen = set(finite.argmax(axis=1).tolist())
    return chosen.pop() if is_single.all() and len(chosen) == 1 else None


def true_clusters(run: RunRecord, clients: int) -> list[int | None]:
    """The true cluster of each client; None if it is unknown."""
    known = run.measurements.column("cluster")
    return [known.get(i) for i in range(clients)]
