"""Tables of simulated devices: a CSV file with a row for each client."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import ConfigError, did_you_mean
from ...core.io.text import explain_encoding
from ...data.download.data_files import expand_path, explain_missing

if TYPE_CHECKING:
    from pandas import Series

COLUMNS = {"speed": "speeds", "uplink": "uplink", "downlink": "downlink", "availability": "availability"}
"""Columns besides ``client``, with the field of ``Devices`` that each one sets."""


def read_device_table(file: str) -> dict[str, tuple[float, ...]]:
    """Read the capabilities of all clients' devices.

    Args:
        file: path of a CSV file with the column ``client`` (0, 1, ..., each once, in any order) and one or more of
            :data:`COLUMNS`, with the units of :class:`fedlowrank.rounds.participation.devices.Devices`.

    Returns:
        Numbers of all clients, one for each client, by name of the field.

    Raises:
        ConfigError: if the file cannot be read or a column or cell is invalid; the message names the row.
    """
    # importing pandas takes half a second
    import pandas as pd

    location = f"run.devices.file {file!r}"
    if not (path := Path(expand_path(file))).exists():
        raise ConfigError(f"{location}: {explain_missing(path)}")
    try:
        table = pd.read_csv(expand_path(file), dtype=str, keep_default_na=False, skipinitialspace=True)
    except UnicodeDecodeError as error:
        reason = explain_encoding(Path(expand_path(file))) or error
        raise ConfigError(f"{location} cannot be read as CSV: {reason}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{location} cannot be read as CSV: {error}") from error
    names = [str(name).strip() for name in table.columns]
    table.columns = pd.Index(names)
    for name in names:
        if name != "client" and name not in COLUMNS:
            raise ConfigError(
                f"{location}: there is no column {name!r}. {did_you_mean(name, ['client', *COLUMNS])}"
            )
    if "client" not in names or len(names) < 2:
        raise ConfigError(
            f"{location} needs the column client and one or more of {', '.join(COLUMNS)}; it has {', '.join(names)}"
        )
    client_ids = _numbers(table["client"], location)
    if sorted(client_ids) != list(range(len(client_ids))) or not client_ids:
        duplicate = next((c for c in client_ids if client_ids.count(c) > 1), None)
        reason = (
            f"client {duplicate:g} stands there more than once"
            if duplicate is not None
            else "some are missing"
        )
        raise ConfigError(f"{location} must list the clients 0, 1, ..., each once, but {reason}")
    order = sorted(range(len(client_ids)), key=client_ids.__getitem__)
    columns = {}
    for name in names:
        if name != "client":
            values = _numbers(table[name], location)
            columns[COLUMNS[name]] = tuple(values[row] for row in order)
    return columns


def _numbers(column: Series, location: str) -> list[float]:
    """Convert the cells of a column to numbers; the first row below the heading is line 2 of the file."""
    numbers = []
    for line, text in enumerate(column, 2):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(
                f"{location}, line {line}, column {column.name}: a number is needed, not {text!r}"
            )
        numbers.append(value)
    return numbers
