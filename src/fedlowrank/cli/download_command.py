"""The command ``data get``: downloads data sets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table

from ..core.errors import ConfigError
from ..data.download.downloads import DOWNLOADS, download_dataset
from .terminal import OUT


class _DownloadBars:
    """A progress bar for each file; see :class:`~fedlowrank.data.download.remote_files.ProgressReport`."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._shown = 0.0

    def progress(self, name: str, byte_count: int, total: int | None) -> None:
        """Move the bar of a file."""
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total)
        if byte_count == total or time.monotonic() - self._shown > 0.1:
            self._shown = time.monotonic()
            self._bars.update(self._tasks[name], completed=byte_count, total=total)

    def message(self, text: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(text, highlight=False, soft_wrap=True)


def get_data(names: Sequence[str], folder: Path | None) -> int:
    """Download a data set, or list all data sets that can be downloaded.

    Args:
        names: name of a data set, or empty for the list.
        folder: folder for the files; None for ``data/NAME``.
    """
    if len(names) > 1:
        raise ConfigError(f"`fedlowrank data get` takes one name, not {' '.join(names)!r}")
    if not names:
        table = Table("name", "", "size", "license", title="Data sets to download")
        for name, row in DOWNLOADS.items():
            table.add_row(name, row.title, row.size, row.license)
        OUT.print(table)
        OUT.print("`fedlowrank data get NAME -o FOLDER` downloads one. Its authors' license applies.")
        return 0
    (name,) = names
    folder = Path("data") / name if folder is None else folder
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=OUT) as bars:
        settings = download_dataset(name, folder, _DownloadBars(bars))
    OUT.print(
        f"{folder}: complete. License: {DOWNLOADS[name].license}. In an experiment file:", soft_wrap=True
    )
    print(settings)
    return 0
