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

_SHOWN = 10


def match_columns(clients: Sequence[GivenClient]) -> tuple[list[GivenClient], FeatureNames]:
    """Put the columns of all data frames in the order of the first one.

    Args:
        clients: as they were given.

    Returns:
        The clients, and the names of the columns of their inputs. Arrays have no names and stay as they are.

    Raises:
        DataError: if a data frame has other columns than the first one, or several of one name.
    """
    inputs: dict[str, tuple[Any, ...]] = {}
    targets: dict[str, tuple[Any, ...]] = {}
    matched = []
    for client in clients:
        parts = {}
        for part, (x, y) in client.parts.items():
            who = client.title + (f" ({part})" if part else "")
            parts[part] = (_match(x, inputs, f"{who}: its inputs"), _match(y, targets, f"{who}: its targets"))
        matched.append(replace(client, parts=parts))
    return matched, inputs


def order_columns(frame: DataFrame, names: Sequence[Any], what: str) -> DataFrame:
    """The columns of a data frame in the order of these names.

    Args:
        frame: the data frame.
        names: of all columns, each once.
        what: begins a message.

    Raises:
        DataError: if it has other columns, or several of one name.
    """
    found = [*frame.columns]
    if found == [*names]:
        return frame
    _refuse_repeated(found, what)
    missing = [name for name in names if name not in found]
    extra = [name for name in found if name not in names]
    if not missing and not extra:
        return frame[[*names]]
    lacks = f"lack the columns {_list(missing)}" if missing else ""
    has = f"have the columns {_list(extra)} besides" if extra else ""
    cure = "" if missing else f" Leave them out: frame.drop(columns={_list(extra)})."
    dummies = (
        " Encode text (pandas.get_dummies) in one frame of all clients, so that all get the same columns."
        if any("_" in str(name) for name in (*missing, *extra))
        else ""
    )
    raise DataError(
        f"{what} {' and '.join(filter(None, (lacks, has)))}; columns are matched by name, and the model takes "
        f"{_list(names)}.{cure}{dummies}"
    )


def _match(given: Any, known: dict[str, tuple[Any, ...]], what: str) -> Any:
    """Inputs or targets with ordered columns; notes the names of those that are seen first."""
    if isinstance(given, Mapping):
        return {name: _match_one(one, known, name, f"{what} {name!r}") for name, one in given.items()}
    return _match_one(given, known, "", what)


def _match_one(given: Any, known: dict[str, tuple[Any, ...]], name: str, what: str) -> Any:
    if not is_frame(given):
        return given
    if name not in known:
        _refuse_repeated([*given.columns], what)
        known[name] = tuple(given.columns)
    return order_columns(given, known[name], what)


def _refuse_repeated(names: Sequence[Any], what: str) -> None:
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{what} have several columns {repeated[0]!r}; rename one of them")


def _list(names: Sequence[Any]) -> str:
    more = len(names) - _SHOWN
    return str([*names[:_SHOWN]]) + (f" and {more} more" if more > 0 else "")
