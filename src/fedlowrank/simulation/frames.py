"""Results as tables of pandas: of one run, and of all runs below a folder."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..core.errors import CheckpointError
from .records import Accuracy, RoundRecord, RunRecord

KEYS = ("round", "client", "unseen", "hostile", "series", "split")


def client_frame(
    records: Sequence[RoundRecord],
    clients: int,
    unseen: Collection[int] = (),
    hostile: Collection[int] = (),
    *,
    last: bool = False,
) -> pd.DataFrame:
    """One row for each evaluated round, client, series and split.

    Args:
        records: of the run.
        clients: number of all clients.
        unseen: identifiers of clients that never train.
        hostile: identifiers of hostile clients.
        last: keep only the last evaluated round.

    Returns:
        Columns round, client, unseen, hostile, series, split, accuracy, loss and one for each further metric.
        NaN where a client has no example in a split or a metric is not defined; infinite where the result of
        a model that diverged is not finite. Clients that were not evaluated (``evaluate_clients``) have no
        row.
    """
    evaluated = [record for record in records if record.accuracy is not None]
    evaluated = evaluated[-1:] if last else evaluated
    names = list(dict.fromkeys(name for record in evaluated for name in record.metrics or ()))
    is_unseen, is_hostile = (np.isin(np.arange(clients), [*some]) for some in (unseen, hostile))
    parts = []
    for record in evaluated:
        who = np.arange(clients) if record.evaluated is None else np.array(record.evaluated, dtype=int)
        for series, splits in (record.accuracy or {}).items():
            for split in splits:
                tables = {"accuracy": record.accuracy, "loss": record.risk}
                tables |= {name: (record.metrics or {}).get(name) for name in names}
                keys = (record.round, who, is_unseen[who], is_hostile[who], series, split)
                columns = dict(zip(KEYS, keys, strict=True))
                columns |= {name: _column(table, series, split, who) for name, table in tables.items()}
                parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*KEYS, "accuracy", "loss"])


def _column(table: Accuracy | None, series: str, split: str, clients: Any) -> Any:
    """Values of some clients; NaN for None, infinity for what is not finite."""
    row = (table or {}).get(series, {}).get(split)
    if row is None:
        return np.full(len(clients), math.nan)
    return np.array([_number(row[i]) for i in clients], dtype=np.float64)


def _number(value: float | None) -> float:
    if value is None:
        return math.nan
    return math.inf if math.isnan(value) else value


COUNTS = ("bytes_up", "bytes_down", "parameters_up", "parameters_down", "steps", "flops")


def rounds_frame(records: Sequence[RoundRecord]) -> pd.DataFrame:
    """One row for each round, the one before training included.

    Returns:
        Columns round, participants and lost (numbers of clients), the fields bytes_up, bytes_down,
        parameters_up, parameters_down, steps and flops of :class:`.records.RoundRecord`, ``seconds_train``,
        ``seconds_server`` and ``seconds_evaluate``, and ``loss_PASS``, the mean training loss of each pass of
        the method; with a simulated clock ``simulated_seconds``.
    """
    rows = []
    for record in records:
        row: dict[str, Any] = {"round": record.round}
        row |= {"participants": len(record.participants), "lost": len(record.lost)}
        row |= {name: getattr(record, name) for name in COUNTS}
        if record.simulated_seconds is not None:
            row["simulated_seconds"] = record.simulated_seconds
        row |= {f"seconds_{name}": value for name, value in record.seconds.items()}
        row |= {f"loss_{name}": value for name, value in record.loss.items()}
        rows.append(row)
    return pd.DataFrame(rows)


def load_runs(folder: str | Path, *, last: bool = False) -> pd.DataFrame:
    """Read the results of all runs in a folder and in the folders below it.

    Args:
        folder: a run folder, or any folder above, such as ``"runs"``.
        last: keep only the last evaluated round of each run.

    Returns:
        One row for each run, evaluated round, client, series and split. First come columns of the run:
        ``run`` (its path below ``folder``), ``experiment``, ``method``, ``seed`` and one for each varied
        field, such as ``partition.alpha`` (None where a run does not vary it). Then come those of
        :meth:`.result.Result.to_frame`.

    Raises:
        CheckpointError: if there is no run, or one cannot be read.

    Example:
        >>> runs = load_runs("runs/", last=True).query("split == 'test' and not unseen")  # doctest: +SKIP
        >>> runs.groupby(["method", "seed"])["accuracy"].mean()  # doctest: +SKIP
    """
    parts = []
    for name, record in _load_records(folder):
        unseen, hostile = (
            {row.get("id", i) for i, row in enumerate(record.clients) if row.get(flag)}
            for flag in ("unseen", "hostile")
        )
        frame = client_frame(record.rounds, len(record.clients), unseen, hostile, last=last)
        parts.append(_labeled(frame, name, record))
    return _joined(parts)


def load_rounds(folder: str | Path) -> pd.DataFrame:
    """Read what the rounds of all runs in a folder cost: bytes, operations, seconds and training losses.

    Args:
        folder: as in :func:`load_runs`.

    Returns:
        One row for each run and round: columns of the run as in :func:`load_runs`, then those of
        :func:`rounds_frame`.

    Raises:
        CheckpointError: if there is no run, or one cannot be read.
    """
    return _joined(_labeled(rounds_frame(r.rounds), name, r) for name, r in _load_records(folder))


def _load_records(folder: str | Path) -> list[tuple[str, RunRecord]]:
    """The runs below a folder with their paths, without those that were moved aside."""
    root = Path(folder)
    folders = sorted(path.parent for path in root.rglob("run.json"))
    kept = [f for f in folders if not re.search(r"\.old-\d+(/|$)", f.relative_to(root).as_posix())]
    if not kept:
        raise CheckpointError(f"{root} holds no run: neither it nor a folder below it has a run.json")
    return [(root.name if f == root else f.relative_to(root).as_posix(), RunRecord.load(f)) for f in kept]


def _labeled(frame: pd.DataFrame, name: str, record: RunRecord) -> pd.DataFrame:
    config = record.config
    labels = {
        "run": name,
        "experiment": config.get("name"),
        "method": config.get("method", {}).get("name"),
        "seed": config.get("run", {}).get("seed"),
        **(config.get("vary") or {}),
    }
    # a varied value may be a list, which pandas would else spread over the rows
    columns = {key: pd.Series([value] * len(frame), dtype=_dtype(value)) for key, value in labels.items()}
    return pd.concat([pd.DataFrame(columns), frame.reset_index(drop=True)], axis=1)


def _dtype(value: Any) -> Any:
    return type(value) if isinstance(value, bool | int | float) else object


def _joined(parts: Any) -> pd.DataFrame:
    """One table of several, the columns of runs first."""
    tables = [table for table in parts if len(table)]
    if not tables:
        return pd.DataFrame(columns=["run", "experiment", "method", "seed", *KEYS, "accuracy", "loss"])
    # the columns that come before the round are those of runs
    labels = [name for t in tables for name in t.columns[: list(t.columns).index("round")]]
    others = [name for t in tables for name in t.columns]
    return pd.concat(tables, ignore_index=True)[list(dict.fromkeys([*labels, *others]))]
