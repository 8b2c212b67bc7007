"""Results as pandas tables: of one run, and of all runs below a folder."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..core.errors import CheckpointError, ConfigError, DataError, did_you_mean
from ..core.io.text import list_first
from .client_numbers import ACCURACY, COUNTED_LABELS, FRAME_KEYS, LOSS
from .measurements import COSTS, Measurements
from .records import (
    NOT_SETTINGS,
    SECTIONS,
    STORAGE_SETTINGS,
    RoundRecord,
    RunRecord,
    describe_missing,
)

logger = logging.getLogger(__name__)

ALL = "all"
"""Name in the place of a series that selects the rows of every series."""


def client_frame(table: Measurements, *, last: bool = False, series: str | None = None) -> pd.DataFrame:
    """Tabulate one or all series, by default the headline, one row for each evaluated round, client and split.

    A method may evaluate several models of a client, which are its *series*: Ditto the client's own model and the
    global one. A mean over rows of several series describes no model, so series other than the headline have to be
    named.

    Args:
        table: measurements of the run.
        last: whether to keep only the last evaluated round.
        series: name of a series, or ``"all"``; None for the headline, the first that the method reports.

    Returns:
        Columns round, client, client_name (if clients have names), unseen, hostile, series, split, n (examples of the
        client in the split; NaN if they are not known), counted_labels (if accuracy and loss are means over labels of
        pixels or tokens, or if some labels are left out), accuracy, loss and one for each further metric. A value is
        NaN if a client has no example in a split or a metric is not defined, and infinite if the result of a diverged
        model is not finite. Clients that were not evaluated (``evaluate_clients``) have no row.

    Raises:
        ConfigError: if there is no such series.
    """
    all_series = table.all_series
    if all_series:
        _require_series(series, all_series, "the run")
    rounds, number_names = table.evaluated_rounds, [ACCURACY, LOSS, *table.metrics]
    unseen, hostile = table.flagged_ids("unseen"), table.flagged_ids("hostile")
    frames = []
    for t in rounds[-1:] if last else rounds:
        client_ids = np.array(table.evaluated(t), dtype=int)
        is_unseen, is_hostile = (np.isin(client_ids, [*flagged_ids]) for flagged_ids in (unseen, hostile))
        for series_name in _choose_series(series, all_series):
            for split in table.splits(t, series_name):
                n = table.examples(split, table.client_count)[client_ids]
                keys = (t, client_ids, is_unseen, is_hostile, series_name, split, n)
                columns = dict(zip(FRAME_KEYS, keys, strict=True))
                if (labels := table.row(t, COUNTED_LABELS, "", split)) is not None:
                    columns[COUNTED_LABELS] = labels[client_ids]
                for name in number_names:
                    row = table.row(t, name, series_name, split)
                    columns[name] = math.nan if row is None else row[client_ids]
                frames.append(pd.DataFrame(columns))
    if not frames:
        return pd.DataFrame(columns=[*FRAME_KEYS, ACCURACY, LOSS])
    frame = pd.concat(frames, ignore_index=True)
    client_names = table.column("name")
    if any(client_names.values()):
        name_column = [client_names.get(i) or "" for i in frame["client"]]
        frame.insert(FRAME_KEYS.index("client") + 1, "client_name", name_column)
    return frame


def _choose_series(series: str | None, all_series: Sequence[str]) -> Sequence[str]:
    """Choose the names of the series to show from those that a run has."""
    if series is None:
        return all_series[:1]
    return all_series if series == ALL else [name for name in all_series if name == series]


def _require_series(series: str | None, all_series: Collection[str], owner: str) -> None:
    """Raise ConfigError if an unknown series is named."""
    if series is not None and series != ALL and series not in all_series:
        raise ConfigError(
            f"{owner} has no series {series!r}. {did_you_mean(series, sorted(all_series))} "
            f"series = {ALL!r} gives rows of all."
        )


def rounds_frame(records: Sequence[RoundRecord]) -> pd.DataFrame:
    """Tabulate the rounds, one row for each, including the one before training.

    Returns:
        Columns round, participants and lost (numbers of clients), the fields bytes_up, bytes_down,
        parameters_up, parameters_down, steps and flops of :class:`.records.RoundRecord`, ``seconds_train``,
        ``seconds_server`` and ``seconds_evaluate``, and ``training_loss_PASS``, the mean training loss of each pass of
        the method; with a simulated clock ``simulated_seconds``.
    """
    rows = []
    for record in records:
        row: dict[str, Any] = {"round": record.round}
        row |= {"participants": len(record.participants), "lost": len(record.lost)}
        row |= {name: getattr(record, name) for name in COSTS}
        if record.simulated_seconds is not None:
            row["simulated_seconds"] = record.simulated_seconds
        row |= {f"seconds_{name}": value for name, value in record.seconds.items()}
        row |= {f"training_loss_{name}": value for name, value in record.training_losses.items()}
        rows.append(row)
    return pd.DataFrame(rows)


def average_by_examples(table: pd.DataFrame, by: str | Sequence[str], column: str = ACCURACY) -> pd.Series:
    """Average results over clients, each weighted by its number of examples n, or by counted_labels where it has them.

    ``table.groupby(by)[column].mean()`` counts every client once, as the report does. The mean here counts every
    example once; for pixels, tokens, and examples of which some have no label, it counts every label that counts
    once. The mean of accuracies is the accuracy on the labels of all clients together.

    Args:
        table: rows of one series and one split, from :func:`load_runs` or
            :meth:`..rounds.outcome.result.Result.to_frame`.
        by: names of the columns to group by, such as ``["method", "seed"]``.
        column: name of the column to average.

    Returns:
        The means by the values of ``by``. Clients without a value are left out; NaN if no client is left, and
        infinite if the model of a client diverged.

    Raises:
        DataError: if several series, splits or rounds of a client would be averaged, or if n is not known.

    Example:
        >>> test = load_runs("runs/", last=True).query("split == 'test'")  # doctest: +SKIP
        >>> average_by_examples(test, ["method", "seed"]).groupby("method").mean()  # doctest: +SKIP
    """
    keys = [by] if isinstance(by, str) else list(by)
    repeated_rows = table[
        table.duplicated([*keys, *{"run", "client"}.difference(keys).intersection(table)], keep=False)
    ]
    for name in ("series", "split", "round"):
        values = [*repeated_rows[name].unique()]
        if len(values) > 1 and name not in keys:
            raise DataError(
                f"average_by_examples: of a client, rows of {name} {', '.join(map(repr, values[:3]))} would be "
                f'averaged together. Choose one, such as table.query("{name} == {values[-1]!r}"), or add '
                f"{name!r} to by."
            )
    rows = table[table[column].notna()]
    weights = rows["n"] if COUNTED_LABELS not in rows else rows[COUNTED_LABELS].fillna(rows["n"])
    if weights.isna().any():
        raise DataError(
            "average_by_examples: the numbers of examples of some clients are not known, as in a run over a "
            "network under privacy. Average clients alike: table.groupby(by)[column].mean()"
        )
    products = pd.DataFrame({"total": rows[column] * weights, "weight": weights})
    sums = products.groupby([rows[key] for key in keys], dropna=False).sum()
    means: pd.Series = sums["total"] / sums["weight"]
    # a run has None in the columns of fields that it does not vary
    index = table.groupby(keys, dropna=False).size().index
    return means.reindex(index).rename(column)


def load_runs(folder: str | Path, *, last: bool = False, series: str | None = None) -> pd.DataFrame:
    """Read the results of all runs in a folder and in the folders below it.

    Args:
        folder: path of a run folder or of any folder above, such as ``"runs"``.
        last: whether to keep only the last evaluated round of each run.
        series: name of one of a method's models, or ``"all"``; None for the headline of each method, by which the
            report judges it. Runs of methods that lack a named series have no rows.

    Returns:
        One row for each run, evaluated round, client, series and split. First come columns of the run:
        ``run`` (its path below ``folder``), ``experiment``, ``method``, ``seed`` and one for each varied
        field, such as ``partition.alpha`` (None where a run does not vary it). Then come those of
        :meth:`..rounds.outcome.result.Result.to_frame`.

    Raises:
        CheckpointError: if there is no run, or if one cannot be read.
        ConfigError: if no run has such a series.

    Example:
        >>> runs = load_runs("runs/", last=True).query("split == 'test' and not unseen")  # doctest: +SKIP
        >>> runs.groupby(["method", "seed"])["accuracy"].mean()  # doctest: +SKIP
    """
    records = _load_records(folder)
    _require_series(series, _series_of(record.rounds for _, record in records), f"no run in {folder}")
    frames = []
    for name, record in records:
        if series in (None, ALL, *_series_of([record.rounds])):
            frames.append(
                _add_run_columns(client_frame(record.measurements, last=last, series=series), name, record)
            )
    return _join_frames(frames)


def _series_of(runs: Iterable[Sequence[RoundRecord]]) -> set[str]:
    return {name for rounds in runs for record in rounds for name in record.series()}


def load_rounds(folder: str | Path) -> pd.DataFrame:
    """Read the costs of the rounds of all runs in a folder: bytes, operations, seconds and training losses.

    Args:
        folder: path of a folder, as in :func:`load_runs`.

    Returns:
        One row for each run and round: columns of the run as in :func:`load_runs`, then those of
        :func:`rounds_frame`.

    Raises:
        CheckpointError: if there is no run, or if one cannot be read.
    """
    return _join_frames(
        _add_run_columns(rounds_frame(r.rounds), name, r) for name, r in _load_records(folder)
    )


def _load_records(folder: str | Path) -> list[tuple[str, RunRecord]]:
    """Read the runs below a folder with their paths, without runs that were moved aside."""
    root = Path(folder)
    folders = sorted(path.parent for path in root.rglob("run.json"))
    run_folders = [f for f in folders if not re.search(r"\.old-\d+(/|$)", f.relative_to(root).as_posix())]
    if not run_folders:
        raise CheckpointError(f"{root} holds no run: neither it nor a folder below it has a run.json")
    records = [
        (root.name if f == root else f.relative_to(root).as_posix(), RunRecord.load(f)) for f in run_folders
    ]
    for _, record in records:
        if record.missing:
            logger.warning("%s: %s; they have no rows", record.folder, describe_missing(record.missing))
    _warn_of_differing_settings(records)
    return records


def _warn_of_differing_settings(records: Iterable[tuple[str, RunRecord]]) -> None:
    """Warn of runs of one method and variation with different settings, which a mean by method would mix."""
    records_by_key: dict[str, dict[str, RunRecord]] = {}
    for name, record in records:
        key = json.dumps([record.experiment, record.method, record.vary], sort_keys=True)
        records_by_key.setdefault(key, {})[name] = record
    for same in records_by_key.values():
        (first, first_record), *others = same.items()
        first_settings = _flatten_settings(first_record)
        for name, record in others:
            settings = _flatten_settings(record)
            # a setting that did not exist when a run was made has its default there
            names = [n for n in first_settings.keys() & settings if first_settings[n] != settings[n]]
            if names:
                logger.warning(
                    "%s and %s are runs of one method and differ in %s: group the rows by 'run', too, or a mean mixes their "
                    "settings", first, name, list_first(sorted(names), 3),
                )  # fmt: skip
                break


def _flatten_settings(record: RunRecord) -> dict[str, str]:
    """Settings of a run on which results depend, as ``section.key`` to text."""
    sections = {"method": record.section("method", "fields"), **{n: record.config.get(n) for n in SECTIONS}}
    (settings,) = pd.json_normalize(sections).to_dict("records")
    return {str(n): repr(v) for n, v in settings.items() if n not in (*NOT_SETTINGS, *STORAGE_SETTINGS)}


def _add_run_columns(frame: pd.DataFrame, name: str, record: RunRecord) -> pd.DataFrame:
    """Insert the columns of a run before those of a table."""
    config = record.config
    labels = {
        "run": name,
        "experiment": config.get("name"),
        "method": config.get("method", {}).get("name"),
        "seed": config.get("run", {}).get("seed"),
        **(config.get("vary") or {}),
    }
    # a varied value may be a list, which pandas would otherwise spread over the rows
    columns = {
        key: pd.Series([value] * len(frame), dtype=_choose_dtype(value)) for key, value in labels.items()
    }
    return pd.concat([pd.DataFrame(columns), frame.reset_index(drop=True)], axis=1)


def _choose_dtype(value: Any) -> Any:
    """Choose the column type for a value of a setting; a whole number beyond 64 bits stays an object."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return object
    return type(value) if isinstance(value, bool | int | float) else object


def _join_frames(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Join several tables into one, with the columns of runs first."""
    tables = [table for table in frames if len(table)]
    if not tables:
        return pd.DataFrame(columns=["run", "experiment", "method", "seed", *FRAME_KEYS, ACCURACY, LOSS])
    # the columns before the round are those of runs
    run_columns = [name for t in tables for name in t.columns[: list(t.columns).index("round")]]
    columns = [name for t in tables for name in t.columns]
    return pd.concat(tables, ignore_index=True)[list(dict.fromkeys([*run_columns, *columns]))]
