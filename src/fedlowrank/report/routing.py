"""Where routers sent the clients, and how near that comes to the clusters that their data are from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from sklearn.metrics import adjusted_rand_score

from ..simulation.records import RoundRecord, RunRecord
from .courses import Course, Floats, course, shared_rounds
from .groups import Group, Spread, seed, spread
from .summary import part, unseen_clients

Routes = Sequence[Sequence[float]]
Truth = Sequence[int | None]


def recovery(routes: Routes, truth: Truth) -> float:
    """How well the largest share of each client tells its true cluster; numbers of clusters play no part.

    Args:
        routes: ``[clients, C]`` shares of each client.
        truth: true cluster of each client, or None where nobody knows.

    Returns:
        The adjusted Rand index: 1 for the same clusters, about 0 for a draw. Of several largest shares the first counts.
        NaN if there is no client with a known cluster and finite shares.
    """
    kept = [(c, max(range(len(r)), key=r.__getitem__)) for r, c in zip(routes, truth, strict=True) if _usable(r, c)]
    if not kept:
        return math.nan
    known, chosen = zip(*kept, strict=True)
    return float(adjusted_rand_score(known, chosen))


def collapsed(routes: Routes) -> int | None:
    """The one cluster that has the largest share at every client.

    Args:
        routes: ``[clients, C]`` shares of each client; clients whose shares are not finite are left out.

    Returns:
        The cluster; None if clients differ or have no single largest share, and where there is nothing to choose: one
        cluster, or fewer than two clients.
    """
    finite = [row for row in routes if _usable(row, 0)]
    if len(finite) < 2 or len(finite[0]) < 2:
        return None
    # shares that nothing has moved yet are even and choose no cluster, though an argmax would name the first
    chosen = {row.index(max(row)) if row.count(max(row)) == 1 else None for row in map(list, finite)}
    return chosen.pop() if len(chosen) == 1 else None


def routed(run: RunRecord) -> dict[int, Floats]:
    """Routes ``[clients, C]`` by round, of the rounds that have them; none if there are not several clusters."""
    found = {record.round: shares for record in run.rounds if (shares := _shares(record)) is not None}
    return found if all(shares.shape == next(iter(found.values())).shape for shares in found.values()) else {}


def true_clusters(run: RunRecord, clients: int) -> list[int | None]:
    """The true cluster of each client, by its identifier; None where nobody knows."""
    known = {row.get("id", i): row.get("cluster") for i, row in enumerate(run.clients)}
    return [known.get(i) for i in range(clients)]


def recovery_by_round(run: RunRecord) -> dict[int, float]:
    """Cluster recovery of a run over the clients that can train; none if fewer than two true clusters are known."""
    apart = unseen_clients(run)
    found = {}
    for at, shares in routed(run).items():
        truth = true_clusters(run, len(shares))
        kept = [i for i in range(len(shares)) if i not in apart]
        if len({truth[i] for i in kept} - {None}) > 1:
            value = recovery(shares[kept].tolist(), [truth[i] for i in kept])
            if math.isfinite(value):
                found[at] = value
    return found


def recovered(group: Group) -> Course | None:
    """Cluster recovery of a group over training, over the clients that can train; None where clusters are not known."""
    tracks = [track for one in group.runs if (track := recovery_by_round(one.run))]
    shared = shared_rounds(tracks)
    return course(shared, np.array([[track[at] for at in shared] for track in tracks])) if shared else None


def final_recovery(group: Group) -> Spread | None:
    """Cluster recovery at the last round with routes, over seeds."""
    return spread(track[max(track)] for one in group.runs if (track := recovery_by_round(one.run)))


def collapse_notes(groups: Sequence[Group]) -> list[str]:
    """A sentence for each group some of whose routers chose one cluster for all clients, and what to do about it."""
    said = []
    for group in groups:
        found = [(seed(one.run), *last) for one in group.runs if (last := _collapse(one.run)) is not None]
        if not found:
            continue
        _, round_, clusters, clients, _ = found[0]
        where = ", ".join(f"seed {name}: cluster {cluster}" for name, *_, cluster in found)
        said.append(
            f"{group.label}: the router collapsed. At round {round_} one of {clusters} clusters has the largest share at all "
            f"{clients} clients ({where}, counted from 0), so the others serve nobody and nothing tells the clients apart. "
            + _advice(group.first)
        )
    return said


def _advice(run: RunRecord) -> str:
    if part(part(part(run.config, "method"), "fields"), "router"):
        settings = "a lower learning rate of the router (router.lr), noise on it while it trains (router.noise)"
        return f"What may help: {settings}, or another seed."
    # methods that choose clusters by their losses have no router to slow down
    return "What may help: another seed, for the clusters then start from other values."


def _usable(row: Sequence[float], cluster: int | None) -> bool:
    return cluster is not None and len(row) > 0 and all(map(math.isfinite, row))


def _shares(record: RoundRecord) -> Floats | None:
    rows = record.routes
    if not rows or len(rows[0]) < 2 or any(len(row) != len(rows[0]) for row in rows):
        return None
    return np.array([[math.nan if share is None else share for share in row] for row in rows], dtype=np.float64)


def _collapse(run: RunRecord) -> tuple[int, int, int, int] | None:
    """Round, clusters, clients and the cluster that all of them chose in the end, unless that is right."""
    rounds = routed(run)
    if not rounds:
        return None
    at, shares = max(rounds.items())
    cluster = collapsed(shares.tolist())
    truth = true_clusters(run, len(shares))
    if cluster is None or (truth[0] is not None and len(set(truth)) == 1):
        return None
    # given the true cluster, a router does not choose
    fields = part(part(run.config, "method"), "fields")
    if part(fields, "router").get("routing") == "optimal":
        return None
    return at, shares.shape[1], len(shares), cluster
