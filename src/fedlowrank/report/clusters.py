"""Routes of clients to clusters, and how well they match the clusters that the data come from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score

from ..simulation.records import RunRecord
from .frame import client_column, section, unseen_clients
from .groups import Group, seed_of
from .metrics import Estimate, curve_over_seeds, estimate

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
    unseen = unseen_clients(run)
    found = {}
    for at, routes in routes_by_round(run).items():
        known = true_clusters(run, len(routes))
        truth = [None if i in unseen else cluster for i, cluster in enumerate(known)]
        if len(set(truth) - {None}) > 1:
            found[at] = score_recovery(routes, truth)
    return pd.Series(found, dtype=np.float64).dropna()


def recovery_curve(group: Group) -> pd.DataFrame:
    """Cluster recovery over training, over seeds; empty if clusters are not known."""
    return curve_over_seeds(recovery_by_round(run.record) for run in group.runs)


def final_recovery(group: Group) -> Estimate | None:
    """Cluster recovery at the last round with routes, over seeds."""
    return estimate(track.iloc[-1] for run in group.runs if len(track := recovery_by_round(run.record)))


def collapse_warnings(groups: Sequence[Group]) -> list[str]:
    """A warning for each group with a router that chose one cluster for all clients, with what may help."""
    warnings = []
    for group in groups:
        found = [(seed_of(run.record), *last) for run in group.runs if (last := _collapse(run.record))]
        if found:
            _, at, clusters, clients, _ = found[0]
            where = ", ".join(f"seed {seed}: cluster {cluster}" for seed, *_, cluster in found)
            # Methods that choose clusters by their losses have no router that could learn more slowly.
            advice = "another seed, for the clusters then start from other values"
            if section(section(section(group.first.config, "method"), "fields"), "router"):
                advice = "a lower learning rate of the router (router.lr), noise on it while it trains "
                advice += "(router.noise), or another seed"
            warnings.append(
                f"{group.label}: the router collapsed. At round {at} one of {clusters} clusters has the "
                f"largest share at all {clients} clients ({where}, counted from 0), so the others serve "
                f"nobody and nothing tells the clients apart. What may help: {advice}."
            )
    return warnings


def _collapse(run: RunRecord) -> tuple[int, int, int, int] | None:
    """Round, clusters, clients and the cluster that all of them chose in the end, unless that is right."""
    rounds = routes_by_round(run)
    if not rounds:
        return None
    at, routes = max(rounds.items())
    cluster, truth = find_collapse(routes), true_clusters(run, len(routes))
    is_right = truth[0] is not None and len(set(truth)) == 1
    # A router that is given the true cluster does not choose.
    router = section(section(section(run.config, "method"), "fields"), "router")
    if cluster is None or is_right or router.get("routing") == "optimal":
        return None
    return at, routes.shape[1], len(routes), cluster
