"""Writes every value of every run to one CSV file, a row for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from ...core.io.compressed_files import write_table
from ...results.client_numbers import FRAME_KEYS
from ...results.frames import ALL, client_frame
from ...results.records import RunRecord

COLUMNS = ("run", "method", "seed", "round", "client", "client_name", "series", "split", "metric", "value")


def list_values(record: RunRecord) -> pd.DataFrame:
    """List every evaluated value of a run: accuracy, loss and further metrics of all its series.

    Returns:
        A table with the columns :data:`COLUMNS`. ``run`` is the folder, ``method`` the name or variant;
        ``client_name`` is empty if clients have no names. An undefined value has no row; a value that is not finite
        is ``inf``.
    """
    table = client_frame(record.measurements, series=ALL)
    if "client_name" not in table:
        table["client_name"] = ""
    keys = ["round", "client", "client_name", "series", "split"]
    names = [name for name in table if name not in (*keys, *FRAME_KEYS)]
    values = table.melt(id_vars=keys, value_vars=names, var_name="metric", value_name="value").dropna(
        subset="value"
    )
    method, seed = record.section("method").get("name"), record.section("run").get("seed")
    return values.assign(run=str(record.folder), method=method, seed=seed)[list(COLUMNS)]


def write_values(records: Sequence[RunRecord], path: Path) -> None:
    """Write every value of runs as CSV, one run after another, so that only one run is in memory.

    The ending of the name chooses a compression, see :func:`fedlowrank.core.io.compressed_files.write_table`.

    Raises:
        ConfigError: if the compression is not supported.
        CheckpointError: if the file cannot be written.
    """
    write_table(path, _format_rows(records))


def _format_rows(records: Sequence[RunRecord]) -> Iterator[bytes]:
    yield f"{','.join(COLUMNS)}\n".encode()
    for record in records:
        yield str(list_values(record).to_csv(index=False, header=False, lineterminator="\n")).encode()
