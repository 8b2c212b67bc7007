"""Tidy data frames of run records: one row for each measured value."""

from __future__ import annotations

from itertools import chain
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


def evaluations(run: RunRecord) -> pd.DataFrame:
    """Test and validation results, one row for each client and evaluation.

    Returns:
        Columns ``measure`` (``accuracy`` or ``risk``), ``series``, ``split``, ``round``, ``client``,
        ``value``, ``measured`` (False where the client has no example), ``unseen`` (whether the client never
        trains) and ``examples`` (of the client in this split; NaN if not recorded).
    """
    keys, values = [], []
    for record in run.rounds:
        for measure, results in (("accuracy", record.accuracy), ("risk", record.risk)):
            for series, splits in (results or {}).items():
                for split, found in splits.items():
                    keys.append((measure, series, split, record.round))
                    values.append(found)
    frame = pd.DataFrame(keys, columns=["measure", "series", "split", "round"])
    lengths = [len(found) for found in values]
    frame = frame.loc[np.repeat(frame.index, lengths)].reset_index(drop=True)
    flat = list(chain.from_iterable(values))
    frame["client"] = list(chain.from_iterable(map(range, lengths)))
    frame["value"] = np.array(flat, dtype=np.float64)
    frame["measured"] = np.array([value is not None for value in flat], dtype=bool)
    frame["unseen"] = frame["client"].isin(unseen_clients(run))
    frame["examples"] = np.nan
    for split, rows in frame.groupby("split"):
        sizes = {client: float(size or 0) for client, size in client_column(run, str(split)).items()}
        frame.loc[rows.index, "examples"] = rows["client"].map(sizes)
    return frame


def model_sizes(run: RunRecord) -> pd.DataFrame:
    """Parameter counts of client models: columns ``series``, ``round``, ``client``, ``parameters``."""
    rows = [
        (series, record.round, client, size)
        for record in run.rounds
        for series, sizes in (record.parameters or {}).items()
        for client, size in enumerate(sizes)
    ]
    return pd.DataFrame(rows, columns=["series", "round", "client", "parameters"])


def by_round(run: RunRecord, kind: str) -> pd.DataFrame:
    """Values that a method reports after each round, rows by round, columns by name.

    Args:
        run: the run.
        kind: ``loss`` (of each training pass), ``ranks`` (of each weight), or a key of ``observed`` such as
            ``energy``.

    Returns:
        Floats, NaN where a round has no value; rounds without any value are left out.
    """
    known = {}
    for record in run.rounds:
        values = getattr(record, kind) if kind in ("loss", "ranks") else (record.observed or {}).get(kind)
        if values:
            known[record.round] = values
    return pd.DataFrame(list(known.values()), index=list(known), dtype=np.float64)
