"""Table of a run's measurements, and statistics over the clients of an evaluation by :func:`summarize`.

A row is (round, client or -1, series, split, name, value). Numbers of a client are its accuracy, its loss, each
further metric, the parameters of its model, and its share of each cluster (``route``, by cluster as series). Numbers
of a round are bytes, parameters sent, steps, operations, seconds, training losses by pass, ranks by weight, and the
method's own metrics of its server. Rows are only ever appended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigError, did_you_mean
from .client_metrics import find_number
from .client_numbers import ACCURACY, COUNTED_LABELS, ROUTE, list_further_metrics

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
ClientSelection = Literal["counted", "unseen", "all"]
"""Clients of a statistic: those that count in means (they can train and are not hostile), those that never train, or all."""

COSTS = ("bytes_up", "bytes_down", "parameters_up", "parameters_down", "steps", "flops")
"""Names of the costs of a round."""

TRAINING_LOSS = "training_loss"
"""Name of the mean loss of a pass over the steps of a round."""

COLUMNS = ("round", "client", "series", "split", "name", "value")


def is_lower_better(name: str) -> bool | None:
    """Whether a smaller value of a client number is better; None for a metric of the user's own and for sizes."""
    number = find_number(name)
    return None if number is None else number.lower_is_better


@dataclass(frozen=True)
class Column:
    """One number of several clients.

    Attributes:
        name: name of the number, such as ``accuracy``.
        series: name of one of the method's models; for a route, the cluster.
        split: name of the split that the number was measured on; empty if it does not depend on examples.
        values: values of the clients; None for a client without one.
    """

    name: str
    series: str
    split: str
    values: list[float | None]


@dataclass(frozen=True)
class ClientTable:
    """Measurements of some clients at one time, as an evaluation makes them and a client's answer carries them.

    Attributes:
        client_ids: identifiers of the clients.
        columns: columns of the numbers, the headline series first.
    """

    client_ids: list[int]
    columns: list[Column]

    def to_dict(self) -> dict[str, Any]:
        """Convert the table to JSON values, which share its lists."""
        return {"clients": self.client_ids, "columns": [vars(column) for column in self.columns]}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`."""
        return cls(list(value["clients"]), [Column(**column) for column in value["columns"]])

    @classmethod
    def join(cls, tables: Sequence[ClientTable]) -> Self:
        """Join the tables of several groups of clients, in the order of the clients' identifiers."""
        if len(tables) == 1 and tables[0].client_ids == sorted(tables[0].client_ids):
            return cls(tables[0].client_ids, tables[0].columns)
        positions = {
            i: position for position, i in enumerate(sorted(i for table in tables for i in table.client_ids))
        }
        rows: dict[tuple[str, str, str], list[float | None]] = {}
        for table in tables:
            for column in table.columns:
                key = column.name, column.series, column.split
                row = rows.setdefault(key, [None] * len(positions))
                for i, value in zip(table.client_ids, column.values, strict=True):
                    row[positions[i]] = value
        return cls([*positions], [Column(*key, values) for key, values in rows.items()])

    def extended(self, table: ClientTable) -> ClientTable:
        """Add the rows of another table for clients that this table lacks; its own rows stand."""
        own_ids = set(self.client_ids)
        positions = [k for k, i in enumerate(table.client_ids) if i not in own_ids]
        added_columns = [replace(c, values=[c.values[k] for k in positions]) for c in table.columns]
        added_rows = ClientTable([table.client_ids[k] for k in positions], added_columns)
        return ClientTable.join([self, added_rows])

    def series(self, name: str = ACCURACY) -> list[str]:
        """List the series of a number, the headline first."""
        return list(dict.fromkeys(column.series for column in self.columns if column.name == name))

    @property
    def metrics(self) -> list[str]:
        """Names of the further metrics."""
        return list_further_metrics(column.name for column in self.columns)

    def values(
        self, name: str = ACCURACY, *, series: str | None = None, split: str = "test"
    ) -> list[float | None]:
        """Values of one column, one for each client; by default of the headline series. Empty if it was not measured.

        Raises:
            ConfigError: if no column has that series.
        """
        for column in self.columns:
            if (column.name, column.split) == (name, split) and series in (None, column.series):
                return list(column.values)
        series_names = {c.series for c in self.columns if c.name not in (COUNTED_LABELS, ROUTE)}
        if name != ROUTE and series is not None and series_names and series not in series_names:
            raise ConfigError(f"there is no series {series!r}. {did_you_mean(series, series_names)}")
        return []

    def by_client(
        self, name: str = ACCURACY, *, series: str | None = None, split: str = "test"
    ) -> dict[int, float | None]:
        """Values of one column as in :meth:`values`, by the client's identifier."""
        return dict(zip(self.client_ids, self.values(name, series=series, split=split), strict=False))


def as_row(values: Iterable[float | None]) -> Floats:
    """Convert values of clients to numbers ``[clients]``: NaN for None, infinity for NaN."""
    numbers = [math.inf if v is not None and math.isnan(v) else v for v in values]
    return np.array(numbers, dtype=np.float64)


def summarize(
    values: Floats,
    weights: NDArray[Any] | None = None,
    *,
    lower_is_better: bool | None = False,
    is_evaluated: NDArray[np.bool_] | None = None,
) -> dict[str, Floats]:
    """Compute statistics over the clients of every evaluation; means over clients are defined only here.

    Args:
        values: array ``[evaluations, clients]``; NaN for a client without a value, infinite if a value is not finite.
        weights: numbers of examples ``[clients]`` or ``[evaluations, clients]``; None if they are not known.
        lower_is_better: whether the worst value is the largest; None if that is not known.
        is_evaluated: array ``[evaluations, clients]`` that says whether a client was evaluated; None for all.

    Returns:
        Arrays with one entry for each evaluation: ``mean`` and ``std`` over the clients with a finite value (divided
        by their number, because they are no sample), ``weighted`` mean, and ``worst``, the mean of the worst ceil(10
        %) of these clients. They are NaN if no client has a finite value; ``worst`` also if the worse direction is
        not known. Every client is in one of four counts: ``clients`` with a finite value, ``non_finite`` with a value
        that is not finite, ``without`` a value although they were evaluated, such as without examples, and
        ``not_evaluated``.
    """
    # column-major, so that numpy adds up one client after another and a mean does not depend on memory layout
    values = np.asfortranarray(values)
    is_finite = np.isfinite(values)
    count = is_finite.sum(axis=1)
    finite_values = np.where(is_finite, values, 0.0)
    weights = np.where(is_finite, math.nan if weights is None else weights, 0.0)
    # the worst values first; values that are not finite come last
    cost = -np.sort(np.where(is_finite, -values if lower_is_better else values, np.inf), axis=1)
    worst_count = np.ceil(count / 10).astype(int)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = finite_values.sum(axis=1) / count
        deviations = np.where(is_finite, values - mean[:, None], 0.0)
        if values.shape[1]:
            sums = np.take_along_axis(
                np.cumsum(cost, axis=1), np.maximum(worst_count, 1)[:, None] - 1, axis=1
            )
            worst = sums[:, 0] / worst_count
        else:
            worst = np.full(len(values), math.nan)
        if lower_is_better is None:
            worst = np.full(len(values), math.nan)
        worst = np.where(count > 0, worst, math.nan)
        is_missing = np.isnan(values)
        evaluation_mask = np.ones_like(is_missing) if is_evaluated is None else is_evaluated
        return {
            "mean": mean,
            "std": np.sqrt((deviations**2).sum(axis=1) / count),
            "weighted": (finite_values * weights).sum(axis=1) / weights.sum(axis=1),
            "worst": worst if lower_is_better else -worst,
            "clients": count,
            "without": (is_missing & evaluation_mask).sum(axis=1),
            "not_evaluated": (is_missing & ~evaluation_mask).sum(axis=1),
            "non_finite": np.isinf(values).sum(axis=1),
        }


def mean_over_clients(values: Iterable[float | None]) -> float | None:
    """Mean over the clients with a value, by which rounds and settings are chosen; None if no client has one.

    It is NaN if a client's value is not finite: a round is not better for a client whose model diverged.
    """
    return _mean_of_row(as_row(values))


def _mean_of_row(row: Floats) -> float | None:
    """Mean of a row of :func:`as_row`, as in :func:`mean_over_clients`."""
    statistics = {name: statistic[0] for name, statistic in summarize(row[None]).items()}
    if statistics["non_finite"]:
        return math.nan
    return None if math.isnan(statistics["mean"]) else float(statistics["mean"])


def measure_recovery(routes: Floats, truth: Sequence[int | None]) -> float:
    """Compute the adjusted Rand index of the clients' largest shares against their true clusters, None if unknown.

    ``routes`` are shares ``[clients, clusters]``; among several largest ones the first counts. The index is 1 for the
    same clusters, about 0 for random ones, and NaN if no client has a known cluster and finite shares.
    """
    from sklearn.metrics import adjusted_rand_score  # slow to import

    client_ids = [
        i for i, cluster in enumerate(truth) if cluster is not None and np.isfinite(routes[i]).all()
    ]
    if not client_ids:
        return math.nan
    return float(adjusted_rand_score([truth[i] for i in client_ids], routes[client_ids].argmax(axis=1)))


class Measured(Protocol):
    """An object with numbers for a table, such as the record of a round."""

    def append_to(self, table: Measurements) -> None:
        """Append all numbers to a table."""
        ...


class Measurements:
    """The table of a run.

    Args:
        clients: rows of ``clients.json``: who never trains, who is hostile, true clusters, numbers of examples.
    """

    def __init__(self, clients: Sequence[Mapping[str, Any]]) -> None:
        self._clients = clients
        self._of_clients: dict[tuple[str, str, str], dict[int, Floats]] = {}
        self._of_rounds: dict[tuple[str, str], dict[int, float]] = {}
        self._evaluated: dict[int, list[int]] = {}

    @classmethod
    def of(cls, records: Iterable[Measured], clients: Sequence[Mapping[str, Any]]) -> Measurements:
        """Make the table of a run from the records of its rounds."""
        table = cls(clients)
        for record in records:
            record.append_to(table)
        return table

    def append(self, round: int, name: str, value: float, *, series: str = "") -> None:
        """Append a number of a round."""
        self._of_rounds.setdefault((name, series), {})[round] = value

    def append_clients(self, round: int, table: ClientTable) -> None:
        """Append the measurements of clients; clients that are not in the table have no values."""
        self._evaluated[round] = table.client_ids
        for column in table.columns:
            row = np.full(max([len(self._clients), *(i + 1 for i in table.client_ids)]), math.nan)
            row[table.client_ids] = as_row(column.values)
            self._of_clients.setdefault((column.name, column.series, column.split), {})[round] = row

    @property
    def client_count(self) -> int:
        """Number of clients."""
        return len(self._clients)

    @property
    def all_series(self) -> list[str]:
        """Names of the series of evaluations, the headline first."""
        return list(dict.fromkeys(s for name, s, _ in self._of_clients if name == ACCURACY))

    def splits(self, round: int, series: str) -> list[str]:
        """List the splits on whose examples a series was evaluated in a round."""
        return [
            split
            for (n, s, split), rows in self._of_clients.items()
            if (n, s) == (ACCURACY, series) and round in rows
        ]

    def series(self, name: str, split: str = "test") -> list[str]:
        """List the series of a client number, the headline first."""
        return [s for n, s, split_name in self._of_clients if (n, split_name) == (name, split)]

    @property
    def evaluated_rounds(self) -> list[int]:
        """Indices of the rounds whose models were evaluated."""
        return list(self._evaluated)

    def evaluated(self, round: int) -> list[int]:
        """Identifiers of the clients that were evaluated in a round."""
        return self._evaluated.get(round, [])

    def row(self, round: int, name: str, series: str, split: str = "") -> Floats | None:
        """A number of each client in a round; None if it was not measured."""
        return self._of_clients.get((name, series, split), {}).get(round)

    @property
    def metrics(self) -> list[str]:
        """Names of the further metrics."""
        return list_further_metrics(name for name, _, _ in self._of_clients)

    def of_clients(self, name: str, series: str, split: str = "") -> pd.DataFrame:
        """A number of all clients, with rows of rounds and columns of clients; NaN without a value, infinite if not finite."""
        import pandas as pd  # slow to import, as below

        rows = self._of_clients.get((name, series, split), {})
        count = len(next(iter(rows.values()), ()))
        table = np.array(list(rows.values()), dtype=np.float64).reshape(len(rows), count)
        return pd.DataFrame(table, index=list(rows))

    def of_rounds(self, name: str) -> pd.DataFrame:
        """A number of rounds: a row for each round that has it, a column for each series; NaN where a round lacks it."""
        import pandas as pd

        rows: dict[int, dict[str, float]] = {}
        for (number_name, series), values in self._of_rounds.items():
            if number_name == name:
                for t, value in values.items():
                    rows.setdefault(t, {})[series] = value
        return pd.DataFrame([rows[t] for t in sorted(rows)], index=sorted(rows), dtype=np.float64)

    def last(self, name: str, series: str = "") -> float | None:
        """The last value of a round's number; None if there is none."""
        values = self._of_rounds.get((name, series), {})
        return values[max(values)] if values else None

    def flagged_ids(self, flag: Literal["unseen", "hostile"]) -> frozenset[int]:
        """Identifiers of the clients that never train, or that are hostile."""
        return frozenset(i for i, value in self.column(flag).items() if value is True)

    def column(self, name: str) -> dict[int, Any]:
        """A column of ``clients.json`` by the client's identifier; None where a row lacks it."""
        return {row.get("id", i): row.get(name) for i, row in enumerate(self._clients)}

    def select_clients(self, group: ClientSelection, count: int) -> list[int]:
        """Indices of a group among ``count`` clients, see :data:`ClientSelection`."""
        unseen, hostile = self.flagged_ids("unseen"), self.flagged_ids("hostile")
        if group == "all":
            return list(range(count))
        if group == "unseen":
            return [i for i in range(count) if i in unseen]
        return [i for i in range(count) if i not in unseen and i not in hostile]

    def examples(self, split: str, count: int) -> NDArray[Any]:
        """Numbers of examples of ``count`` clients in a split; NaN for all if one is not known."""
        example_counts = self.column(split)
        if any(example_counts.get(i) is None for i in range(count)):
            return np.full(count, math.nan)
        return np.array([example_counts[i] for i in range(count)])

    def weights(self, round: int, split: str, count: int) -> NDArray[Any]:
        """Weights of ``count`` clients in a mean over examples: their labels that count, or their examples.

        A client whose labels all count may have no number of them.
        """
        row, examples = self.row(round, COUNTED_LABELS, "", split), self.examples(split, count)
        return examples if row is None else np.where(np.isnan(row), examples, row)

    def over_clients(
        self, name: str, series: str, split: str = "test", group: ClientSelection = "counted"
    ) -> pd.DataFrame:
        """Compute statistics over clients by round with :func:`summarize`, for the rounds with a finite value.

        The weighted mean is weighted by the labels that count, which are the examples unless there are labels of
        pixels or tokens, or some labels are left out: the weighted mean of accuracies is the accuracy on the labels
        of all clients together. The worst clients are those in the direction of :func:`is_lower_better`; NaN if it is
        unknown. A client whose value is not finite is in no mean, so rounds and settings are compared by
        :func:`mean_over_clients`.
        """
        import pandas as pd

        rows = self._of_clients.get((name, series, split), {})
        count = len(next(iter(rows.values()), ()))
        positions = self.select_clients(group, count)
        rows_with_values = {t: row[positions] for t, row in rows.items() if np.isfinite(row[positions]).any()}
        values = np.array(list(rows_with_values.values()), dtype=np.float64).reshape(
            len(rows_with_values), len(positions)
        )
        flags = [np.isin(positions, self.evaluated(t)) for t in rows_with_values]
        statistics = summarize(
            values,
            np.array([self.weights(t, split, count)[positions] for t in rows_with_values]).reshape(
                values.shape
            ),
            lower_is_better=is_lower_better(name),
            is_evaluated=np.array(flags, dtype=np.bool_).reshape(values.shape),
        )
        return pd.DataFrame(statistics, index=list(rows_with_values))

    def mean(self, name: str, series: str, split: str, group: ClientSelection = "counted") -> float | None:
        """The mean of :func:`mean_over_clients` after the last round that has the number; None without a value."""
        rows = self._of_clients.get((name, series, split), {})
        if not rows:
            return None
        row = rows[max(rows)]
        return _mean_of_row(row[self.select_clients(group, len(row))])

    def routes(self) -> dict[int, Floats]:
        """Shares ``[clients, clusters]`` by round, if all clients have them; empty for a single cluster."""
        clusters = self.series(ROUTE, "")
        if len(clusters) < 2:
            return {}
        tables = [self._of_clients[ROUTE, cluster, ""] for cluster in clusters]
        if any(tables[0].keys() != table.keys() for table in tables):
            # rounds have different numbers of clusters
            return {}
        rounds = {t: np.stack([table[t] for table in tables], axis=1) for t in tables[0]}
        return {t: shares for t, shares in rounds.items() if not np.isnan(shares).any()}

    def true_clusters(self, client_count: int) -> list[int | None]:
        """True clusters of ``client_count`` clients; None if a cluster is unknown."""
        clusters = self.column("cluster")
        return [clusters.get(i) for i in range(client_count)]

    def recovery(self) -> dict[int, float]:
        """Cluster recovery over the clients that can train, by round; empty if fewer than two true clusters are known."""
        rounds, unseen = self.routes(), self.flagged_ids("unseen")
        clusters = self.true_clusters(len(next(iter(rounds.values()), ())))
        truth = [None if i in unseen else cluster for i, cluster in enumerate(clusters)]
        if len(set(truth) - {None}) < 2:
            return {}
        # choices rarely change between rounds, and computing one index takes longer than all the rest
        index_of_choice: dict[bytes, float] = {}
        recovery_by_round = {}
        for t, routes in rounds.items():
            choice = np.where(np.isfinite(routes).all(axis=1), routes.argmax(axis=1), -1).tobytes()
            if choice not in index_of_choice:
                index_of_choice[choice] = measure_recovery(routes, truth)
            if not math.isnan(index_of_choice[choice]):
                recovery_by_round[t] = index_of_choice[choice]
        return recovery_by_round

    def __iter__(self) -> Iterator[tuple[int, int, str, str, str, float]]:
        """Iterate over the rows; a client without a value has none."""
        for (name, series), numbers in self._of_rounds.items():
            for t, value in numbers.items():
                yield t, -1, series, "", name, value
        for (name, series, split), rows in self._of_clients.items():
            for t, row in rows.items():
                for client_id in np.flatnonzero(~np.isnan(row)):
                    yield t, int(client_id), series, split, name, float(row[client_id])

    def frame(self) -> pd.DataFrame:
        """Make a data frame of all rows, with the columns :data:`COLUMNS`."""
        import pandas as pd

        return pd.DataFrame(list(self), columns=list(COLUMNS))
