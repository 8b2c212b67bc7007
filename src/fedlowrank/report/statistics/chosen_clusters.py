"""Checks whether the clusters of a run are the true groups of clients, or one cluster for all clients."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...results.measurements import Floats
from ...results.records import RunRecord


class Collapse(NamedTuple):
    """A cluster that has the largest share at all clients."""

    round: int  # round at which shares were recorded last
    clusters: int
    clients: int
    cluster: int  # index of the cluster, from 0


def _last_routes(run: RunRecord) -> tuple[int, Floats] | None:
    """Get the last round with shares of clusters, and the shares ``[clients, clusters]``; None if the method has no choice."""
    routes_by_round = run.measurements.routes()
    # a router that is given the true cluster does not choose
    if not routes_by_round or run.section("method", "fields", "router").get("routing") == "optimal":
        return None
    return max(routes_by_round.items())


def finds_all_groups(run: RunRecord) -> bool | None:
    """Whether a method's clusters are the true groups of the clients that train, after the last recorded round.

    A group is found if more than half of its clients have their largest share at one cluster, and no other group has
    that cluster. The result is None if the method does not choose clusters or if fewer than two groups are known.
    """
    round_and_routes = _last_routes(run)
    if round_and_routes is None:
        return None
    routes, unseen_ids = round_and_routes[1], run.measurements.flagged_ids("unseen")
    choices_by_group: dict[int, list[int]] = {}
    for client_id, cluster in enumerate(run.measurements.true_clusters(len(routes))):
        if cluster is not None and client_id not in unseen_ids:
            shares = routes[client_id]
            is_single = np.isfinite(shares).all() and (shares == shares.max()).sum() == 1
            choices_by_group.setdefault(cluster, []).append(int(shares.argmax()) if is_single else -1)
    if len(choices_by_group) < 2:
        return None
    favorites = [max(set(choices), key=choices.count) for choices in choices_by_group.values()]
    is_majority = all(
        favorite >= 0 and 2 * choices.count(favorite) > len(choices)
        for favorite, choices in zip(favorites, choices_by_group.values(), strict=True)
    )
    return is_majority and len(set(favorites)) == len(choices_by_group)


def find_collapse(run: RunRecord) -> Collapse | None:
    """Find the cluster that all clients chose in the end; None if they chose several, or if one is right."""
    round_and_routes = _last_routes(run)
    if round_and_routes is None:
        return None
    last_round, routes = round_and_routes
    cluster, truth = find_common_cluster(routes), run.measurements.true_clusters(len(routes))
    is_right = truth[0] is not None and len(set(truth)) == 1
    return (
        None if cluster is None or is_right else Collapse(last_round, routes.shape[1], len(routes), cluster)
    )


def find_common_cluster(routes: Floats) -> int | None:
    """Find the one cluster that has the largest share at every client with finite shares ``[clients, clusters]``.

    The result is None if clients differ or have no single largest share, and if there is no choice: one cluster, or
    fewer than two clients.
    """
    finite_routes = routes[np.isfinite(routes).all(axis=1)]
    if len(finite_routes) < 2 or finite_routes.shape[1] < 2:
        return None
    # Before training all shares are equal and choose no cluster, although argmax would name the first.
    is_single = (finite_routes == finite_routes.max(axis=1, keepdims=True)).sum(axis=1) == 1
    clusters = set(finite_routes.argmax(axis=1).tolist())
    return clusters.pop() if is_single.all() and len(clusters) == 1 else None
