"""Routes of clients to clusters, and how well they match the clusters that the data come from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..simulation.records import RunRecord
from .frame import client_column, unseen_clients

Floats = NDArray[np.float64]


def score_recovery(routes: Floats, truth: Sequence[int | None]) -> float:
    """How well the largest share of each client identifies its true cluster, whatever the clusters' numbers.

    Args:
        routes: ``[clients, clusters]`` shares of each client.
        truth: true cluster of each client, or None if it is unknown.

    Returns:
        The adjusted Rand index: 1 for the same clusters, about 0 for random ones. Of several largest shares
        the first counts. NaN if no client has a known cluster and finite shares.
    """
    from sklearn.metrics import adjusted_rand_score  # slow to import

    usable = [i for i, cluster in enumerate(truth) if cluster is not None and np.isfinite(routes[i]).all()]
    if not usable:
        return math.nan
    return float(adjusted_rand_score([truth[i] for i in usable], routes[usable].argmax(axis=1)))


def find_collapse(routes: Floats) -> int | None:
    """The one cluster that has the largest share at every client.

    Args:
        routes: ``[clients, clusters]`` shares; clients whose shares are not finite are left out.

    Returns:
        The cluster; None if clients differ or have no single largest share, and where there is no choice: one
        cluster, or fewer than two clients.
    """
    finite = routes[np.isfinite(routes).all(axis=1)]
    if len(finite) < 2 or finite.shape[1] < 2:
        return None
    # Before training all shares are equal and choose no cluster, though argmax would name the first.
    is_single = (finite == finite.max(axis=1, keepdims=True)).sum(axis=1) == 1
    chosen = set(finite.argmax(axis=1).tolist())
    return chosen.pop() if is_single.all() and len(chosen) == 1 else None


def routes_by_round(run: RunRecord) -> dict[int, Floats]:
    """Routes ``[clients, clusters]`` by round, of the rounds that have them; none for a single cluster."""
    found = {}
    for record in run.rounds:
        rows = record.routes
        if rows and len(rows[0]) > 1 and all(len(row) == len(rows[0]) for row in rows):
            found[record.round] = np.array(rows, dtype=np.float64)
    return found if len({routes.shape for routes in found.values()}) == 1 else {}


def true_clusters(run: RunRecord, clients: int) -> list[int | None]:
    """The true cluster of each client; None if it is unknown."""
    known = client_column(run, "cluster")
    return [known.get(i) for i in range(clients)]


def recovery_by_round(run: RunRecord) -> pd.Series:
    """Cluster recovery over the clients that can train; empty if fewer than two true clusters are known."""
    rounds, unseen = routes_by_round(run), unseen_clients(run)
    if not rounds:
        return pd.Series(dtype=np.float64)
    truth = true_clusters(run, len(next(iter(rounds.values()))))
    truth = [None if i in unseen else cluster for i, cluster in enumerate(truth)]
    if len(set(truth) - {None}) < 2:
        return pd.Series(dtype=np.float64)
    # Choices rarely change from round to round, and one index takes longer than all the rest.
    known: dict[bytes, float] = {}
    found = {}
    for at, routes in rounds.items():
        choice = np.where(np.isfinite(routes).all(axis=1), routes.argmax(axis=1), -1).tobytes()
        if choice not in known:
            known[choice] = score_recovery(routes, truth)
        found[at] = known[choice]
    return pd.Series(found, dtype=np.float64).dropna()
