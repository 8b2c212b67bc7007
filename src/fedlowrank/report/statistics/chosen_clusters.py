"""What the clusters of a run are worth: whether they are the true groups of clients, or one for all clients."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...results.measurements import Floats
from ...results.records import RunRecord


class Collapse(NamedTuple):
    """One cluster that has the largest share at all clients."""

    round: int  # at which shares were recorded last
    clusters: int
    clients: int
    cluster: int  # which one; the first is 0


def _last_routes(run: RunRecord) -> tuple[int, Floats] | None:
    """The last round with shares of clusters, and these ``[clients, clusters]``; None if the method chooses none."""
    rounds = run.measurements.routes()
    # a router that is given the true cluster does not choose
    if not rounds or run.section("method", "fields", "router").get("routing") == "optimal":
        return None
    return max(rounds.items())


def finds_all_groups(run: RunRecord) -> bool | None:
    """Whether a method's clusters are the true groups of the clients that train, after the last recorded round.

    A group is found if more than half of its clients have their largest share at one cluster, and no other group has
    that cluster. None where the method does not choose clusters or fewer than two groups are known.
    """
    last = _last_routes(run)
    if last is None:
        return None
    routes, unseen = last[1], run.measurements.flagged("unseen")
    chosen: dict[int, list[int]] = {}
    for client, cluster in enumerate(run.measurements.true_clusters(len(routes))):
        if cluster is not None and client not in unseen:
            share = routes[client]
            is_single = np.isfinite(share).all() and (share == share.max()).sum() == 1
            chosen.setdefault(cluster, []).append(int(share.argmax()) if is_single else -1)
    if len(chosen) < 2:
        return None
    favorites = [max(set(places), key=places.count) for places in chosen.values()]
    is_majority = all(
        favorite >= 0 and 2 * places.count(favorite) > len(places)
        for favorite, places in zip(favorites, chosen.values(), strict=True)
    )
    return is_majority and len(set(favorites)) == len(chosen)


def find_collapse(run: RunRecord) -> Collapse | None:
    """The cluster that all clients chose in the end; None if they chose several, or if one is right."""
    last = _last_routes(run)
    if last is None:
        return None
    at, routes = last
    cluster, truth = find_common_cluster(routes), run.measurements.true_clusters(len(routes))
    is_right = truth[0] is not None and len(set(truth)) == 1
    return None if cluster is None or is_right else Collapse(at, routes.shape[1], len(routes), cluster)


def find_common_cluster(routes: Floats) -> int | None:
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
