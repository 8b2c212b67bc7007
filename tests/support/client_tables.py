"""Numbers of clients as tests write them: by name, series and split, one value a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlowrank.results.measurements import ClientTable, Column

Tables = dict[str, dict[str, dict[str, list[Any]]]]


def make_client_table(tables: Mapping[str, Mapping[str, Mapping[str, Sequence[Any]]]]) -> ClientTable:
    """The block of the first so many clients with these numbers; shorter rows end in None."""
    columns = [
        Column(name, series, split, list(values))
        for name, of in tables.items()
        for series, splits in of.items()
        for split, values in splits.items()
    ]
    count = max((len(column.values) for column in columns), default=0)
    for column in columns:
        column.values.extend([None] * (count - len(column.values)))
    return ClientTable(list(range(count)), columns)


def read_tables(measured: ClientTable | None) -> Tables:
    """The numbers of a block; nothing without evaluation."""
    actual: Tables = {}
    for column in measured.columns if measured else ():
        actual.setdefault(column.name, {}).setdefault(column.series, {})[column.split] = column.values
    return actual


def replace_values(measured: ClientTable, **tables: Any) -> ClientTable:
    """The block of one client with other numbers under some names, none under a name that is given None."""
    of_one = {
        name: {series: {split: [v] for split, v in splits.items()} for series, splits in of.items()}
        for name, of in tables.items()
    }
    return ClientTable(measured.client_ids, make_client_table({**read_tables(measured), **of_one}).columns)
