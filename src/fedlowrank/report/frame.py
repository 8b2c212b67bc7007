"""Tables of run records: a row for each round, a column for each client, pass, weight, ..."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from ..simulation.records import RunRecord


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
