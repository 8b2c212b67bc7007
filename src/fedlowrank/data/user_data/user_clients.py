"""Reads the clients that a user passes: arrays, torch data sets or data frames, by name or in a list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.contract.task import client_title
from ...core.errors import DataError
from ...core.key import Key
from .columns import Columns
from .data_frames import SPLITS, check_rows, is_frame, read_frame_clients, read_frame_pair
from .torch_datasets import is_torch_data, read_dataset

_TUPLE_PARTS = {2: ("train", "test"), 3: SPLITS}
"""Names of the parts of a client that is a tuple of parts."""


@dataclass(frozen=True)
class GivenClient:
    """Arrays of one client as the user gave them.

    Attributes:
        title: name of the client in messages.
        name: name that the user gave the client; empty if the clients are a list.
        parts: pairs of inputs and targets by part, ``train``, ``val`` and ``test``; or one pair under the empty name,
            to be divided at random.
    """

    title: str
    name: str
    parts: Mapping[str, tuple[Any, Any]]


def read_user_clients(clients: Any, columns: Columns, key: Key) -> list[GivenClient]:
    """Read the clients, in the order of a list or dict, or of the sorted values of a frame's column.

    Raises:
        DataError: if the clients have none of the forms that ``Federation.from_arrays`` lists.
    """
    if is_frame(clients):
        frame_clients = read_frame_clients(clients, columns)
        return [
            GivenClient(client_title(i, name), name, parts) for i, (name, parts) in enumerate(frame_clients)
        ]
    for name, column in (("client", columns.client), ("split", columns.split)):
        if column is not None:
            raise DataError(
                f"{name}= names a column of one DataFrame with the rows of all clients, not of a "
                f"{type(clients).__name__}; leave it out"
            )
    if is_torch_data(clients):
        raise DataError(
            f"a single {type(clients).__name__} is one client. Give a list with a data set for each client, such as "
            "torch.utils.data.random_split(dataset, [0.5, 0.5]), or a dict of them by name."
        )
    if isinstance(clients, Mapping):
        if clients and set(clients) <= {*SPLITS}:
            raise DataError(
                f"{sorted(clients)} are the parts of one client and no names of clients; give a list of such "
                "dicts, one for each client"
            )
        names = [str(name) for name in clients]
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise DataError(f"two clients have the name {duplicates[0]!r}")
        values = list(clients.values())
    elif isinstance(clients, str | bytes) or not isinstance(clients, Iterable):
        raise DataError(
            f"the clients are a list with the data of each, or a dict of these by name, not {_describe(clients)}"
        )
    else:
        values = list(clients)
        names = [""] * len(values)
    if not values:
        raise DataError("a federation needs at least one client")
    titles = [client_title(i, name) for i, name in enumerate(names)]
    return [
        GivenClient(title, name, _read_parts(value, title, columns, key / "read" / i))
        for i, (title, name, value) in enumerate(zip(titles, names, values, strict=True))
    ]


def _read_parts(value: Any, title: str, columns: Columns, key: Key) -> dict[str, tuple[Any, Any]]:
    """Read the pairs of one client by part."""
    if (
        isinstance(value, tuple | list)
        and (names := _TUPLE_PARTS.get(len(value)))
        and _are_parts(value, columns, title)
    ):
        value = dict(zip(names, value, strict=True))
    if isinstance(value, Mapping) and ("train" in value or {*value} <= {*SPLITS}):
        if "train" not in value or {*value} - {*SPLITS}:
            raise DataError(
                f"{title}: splits are 'train' and optionally 'val' and 'test', not {sorted(map(str, value))}"
            )
        return {
            part: _read_pair(pair, f"{title} ({part})", columns, key / part) for part, pair in value.items()
        }
    return {"": _read_pair(value, title, columns, key)}


def _are_parts(values: tuple[Any, ...] | list[Any], columns: Columns, title: str) -> bool:
    """Whether the values are parts (data sets, frames with a target, dicts of columns, or tuples), and not one pair (x, y)."""
    if not all(_is_part(value, columns) for value in values):
        return False
    if len(values) == 2 and (isinstance(values[0], Mapping) or _is_table(values[0])) and _is_table(values[1]):
        raise DataError(
            f"{title}: its data can be the parts (train, test) or one pair (x, y) of two examples. Give the parts as "
            '{"train": ..., "test": ...}, or a pair as arrays, (numpy.array(x), numpy.array(y))'
        )
    return True


def _is_part(value: Any, columns: Columns) -> bool:
    """Whether a value of a tuple can be a part; a list of two rows is an array."""
    if is_torch_data(value) or isinstance(value, Mapping) or (columns.target is not None and is_frame(value)):
        return True
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return (isinstance(value[0], Mapping) or _has_rows(value[0])) and _has_rows(value[1])


def _has_rows(value: Any) -> bool:
    """Whether a value is an array or a list, and no single number or text."""
    if hasattr(value, "shape"):
        return len(value.shape) > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_table(value: Any) -> bool:
    """Whether a part is a tuple of two lists of one form, such as two rows of numbers, that can also be one array."""
    return isinstance(value, tuple) and _find_form(value[0]) == _find_form(value[1]) is not None


def _find_form(values: Any) -> tuple[Any, ...] | None:
    """Lengths of nested lists and the kind of their first value; None for arrays."""
    if hasattr(values, "shape"):
        return None
    lengths = []
    while isinstance(values, Sequence) and not isinstance(values, str | bytes):
        lengths.append(len(values))
        values = values[0] if len(values) else None
    shape = tuple(getattr(values, "shape", ()))
    return *lengths, shape, isinstance(values, str), isinstance(values, bool | np.bool_)


def _read_pair(value: Any, title: str, columns: Columns, key: Key) -> tuple[Any, Any]:
    """Read the inputs and targets of one part of a client."""
    if is_torch_data(value):
        return read_dataset(value, title, columns, key)
    if is_frame(value) and columns.target is not None:
        return read_frame_pair(value, columns, title)
    if isinstance(value, Mapping):
        target, features = columns.choose(list(value), f"{title}: ", "its dict has the keys")
        x = {name: value[name] for name in features}
        check_rows(x, value[target], title)
        return (x if len(features) > 1 else x[features[0]]), value[target]
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise DataError(f"{title}: expected a pair (x, y) of arrays, not {_describe(value)}")
    columns.refuse(f"{title}: ", "are a pair (x, y)")
    check_rows(value[0], value[1], title)
    return value[0], value[1]


def _describe(value: Any) -> str:
    """Describe what was given, and how to give it."""
    value_type = type(value)
    if is_frame(value):
        return f"a {value_type.__name__}; name its column of targets, target=..., for a frame as a client"
    if value_type.__module__.partition(".")[0] in ("datasets", "flwr_datasets"):
        return f"a {value_type.__name__} of {value_type.__module__.partition('.')[0]}; use Federation.from_partitions"
    if hasattr(value, "shape"):
        return f"a {value_type.__name__}; the clients are a list with a pair for each, [(x0, y0), (x1, y1)]"
    length = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return (
        f"a {value_type.__name__}{length}; a client may also be a torch.utils.data.Dataset or a dict of parts"
    )
