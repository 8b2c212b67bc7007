"""Tables of run records, a row for each round; routes of clients to clusters and their agreement."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..simulation.records import RunRecord
from ..simulation.scalars import score_recovery as score_recovery

Floats = NDArray[np.float64]


def section(config: Any, name: str) -> dict[str, Any]:
    """A section of ``run.json``; empty if it is missing or null."""
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def client_column(run: RunRecord, name: str) -> dict[int, Any]:
    """A column of ``clients.json`` by the client's identifier; None where a row lacks it."""
    return {row.get("id", i): row.get(name) for i, row in enumerate(run.clients)}


def unseen_clients(run: RunRecord) -> frozenset[int]:
    """Identifiers of the clients that never train."""
    return frozenset(client for client, unseen in client_column(run, "unseen").items() if unseen is True)


def hostile_clients(run: RunRecord) -> frozenset[int]:
    """Identifiers of the hostile clients of a simulated attack."""
    return frozenset(client for client, hostile in client_column(run, "hostile").items() if hostile is True)


def evaluations(run: RunRecord) -> dict[tuple[str, str, str], pd.DataFrame]:
    """Results of every client, by measure (``accuracy`` or ``risk``), series and split.

    Returns:
        Tables with a row a round and a column a client: NaN if the client has no example, infinite if its
        result is not finite.
    """
    results = (
        ((measure, series, split), record.round, values)
        for record in run.rounds
        for measure, found in (("accuracy", record.accuracy), ("risk", record.risk))
        for series, splits in (found or {}).items()
        for split, values in splits.items()
    )
    return _by_round(results)


def further_metrics(run: RunRecord) -> dict[tuple[str, str], pd.DataFrame]:
    """Metrics of ``run.metrics`` on test examples, by name and series, in the form of :func:`evaluations`."""
    return _by_round(
        ((name, series), record.round, splits["test"])
        for record in run.rounds
        for name, found in (record.metrics or {}).items()
        for series, splits in found.items()
        if "test" in splits
    )


def model_sizes(run: RunRecord) -> dict[str, pd.DataFrame]:
    """Parameter counts of client models by series, a row a round and a column a client."""
    return _by_round(
        (series, record.round, sizes)
        for record in run.rounds
        for series, sizes in (record.parameters or {}).items()
    )


def _by_round(found: Iterable[tuple[Any, int, list[Any]]]) -> dict[Any, pd.DataFrame]:
    rows: dict[Any, dict[int, list[Any]]] = {}
    for key, at, values in found:
        rows.setdefault(key, {})[at] = values
    tables = {}
    for key, by_round in rows.items():
        raw = list(by_round.values())
        table = np.array(raw, dtype=np.float64)
        if np.isnan(table).any():
            is_missing = np.array([[value is None for value in row] for row in raw])
            table[np.isnan(table) & ~is_missing] = np.inf
        tables[key] = pd.DataFrame(table, index=list(by_round))
    return tables


def method_values(run: RunRecord) -> dict[str, pd.DataFrame]:
    """What a method reports after each round, rows by round, columns by name.

    Returns:
        Tables of ``loss`` (of each training pass), ``ranks`` (of each weight) and what the method observes,
        such as ``energy``. NaN where a round lacks a value; rounds without any value are left out.
    """
    rows: dict[str, dict[int, dict[str, float]]] = {}
    for record in run.rounds:
        kinds: dict[str, dict[str, Any]] = {
            "loss": record.loss,
            "ranks": record.ranks,
            **(record.observed or {}),
        }
        for kind, values in kinds.items():
            if values:
                rows.setdefault(kind, {})[record.round] = values
    return {
        kind: pd.DataFrame(list(found.values()), index=list(found), dtype=np.float64)
        for kind, found in rows.items()
    }


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
