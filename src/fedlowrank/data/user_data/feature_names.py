"""Names of the columns of data frames: inputs are matched by name, never by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...core.errors import DataError
from .data_frames import is_frame
from .user_clients import GivenClient

if TYPE_CHECKING:
    from pandas import DataFrame

FeatureNames = Mapping[str, tuple[Any, ...]]
"""Names of the columns of each input that was given as data frames; a single input has the empty name."""

_MAX_SHOWN_NAMES = 10


def match_columns(clients: Sequence[GivenClient]) -> tuple[list[GivenClient], FeatureNames]:
    """Put the columns of all data frames in the order of the first one.

    Args:
        clients: clients as the user gave them.

    Returns:
        The clients, and the names of the columns of their inputs. Arrays have no names and stay unchanged.

    Raises:
        DataError: if a data frame has other columns than the first one, or several with one name.
    """
    inputs: dict[str, tuple[Any, ...]] = {}
    targets: dict[str, tuple[Any, ...]] = {}
    matched_clients = []
    for client in clients:
        parts = {}
        for part, (x, y) in client.parts.items():
            title = client.title + (f" ({part})" if part else "")
            parts[part] = (
                _match_all(x, inputs, f"{title}: its inputs"),
                _match_all(y, targets, f"{title}: its targets"),
            )
        matched_clients.append(replace(client, parts=parts))
    return matched_clients, inputs


def order_columns(frame: DataFrame, names: Sequence[Any], title: str) -> DataFrame:
    """Put the columns of a data frame in the order of given names.

    Args:
        frame: data frame to reorder.
        names: names of all columns, each once.
        title: description of the columns, with which the message begins.

    Raises:
        DataError: if the data frame has other columns, or several with one name.
    """
    columns = [*frame.columns]
    if columns == [*names]:
        return frame
    _refuse_repeated(columns, title)
    missing_columns = [name for name in names if name not in columns]
    extra_columns = [name for name in columns if name not in names]
    if not missing_columns and not extra_columns:
        return frame[[*names]]
    missing_text = f"lack the columns {_list_names(missing_columns)}" if missing_columns else ""
    extra_text = f"have the columns {_list_names(extra_columns)} besides" if extra_columns else ""
    advice = "" if missing_columns else f" Leave them out: frame.drop(columns={_list_names(extra_columns)})."
    encoding_hint = (
        " Encode text (pandas.get_dummies) in one frame of all clients, so that all get the same columns."
        if any("_" in str(name) for name in (*missing_columns, *extra_columns))
        else ""
    )
    raise DataError(
        f"{title} {' and '.join(filter(None, (missing_text, extra_text)))}; columns are matched by name, and the model takes "
        f"{_list_names(names)}.{advice}{encoding_hint}"
    )


def _match_all(values: Any, names_by_input: dict[str, tuple[Any, ...]], title: str) -> Any:
    """Order the columns of inputs or targets; names that are seen for the first time are recorded."""
    if isinstance(values, Mapping):
        return {
            name: _match_one(value, names_by_input, name, f"{title} {name!r}")
            for name, value in values.items()
        }
    return _match_one(values, names_by_input, "", title)


def _match_one(value: Any, names_by_input: dict[str, tuple[Any, ...]], name: str, title: str) -> Any:
    if not is_frame(value):
        return value
    if name not in names_by_input:
        _refuse_repeated([*value.columns], title)
        names_by_input[name] = tuple(value.columns)
    return order_columns(value, names_by_input[name], title)


def _refuse_repeated(names: Sequence[Any], title: str) -> None:
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{title} have several columns {duplicates[0]!r}; rename one of them")


def _list_names(names: Sequence[Any]) -> str:
    unlisted = len(names) - _MAX_SHOWN_NAMES
    return str([*names[:_MAX_SHOWN_NAMES]]) + (f" and {unlisted} more" if unlisted > 0 else "")
