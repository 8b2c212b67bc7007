"""The files of a report: a page, and its table as Markdown and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..core.files import as_checkpoint_error, write_atomically
from ..simulation.records import RunRecord
from .html import page
from .tables import comparison, to_csv, to_markdown
from .words import mixed


def write_report(runs: Sequence[RunRecord], out: Path, *, target: float | None = None, command: str = "") -> None:
    """Write a report as an HTML page, with its table as Markdown and CSV next to it.

    Equal runs give equal files, byte for byte.

    Args:
        runs: in the order in which methods shall appear; see :class:`fedlowrank.simulation.records.RunRecord`.
        out: the page, such as ``report.html``; ``report.md`` and ``report.csv`` are written next to it.
        target: accuracy in (0, 1] for the columns "to target"; None for the runs' own, else the largest whole percent
            that all of them reached.
        command: command line that makes these runs again, for the reader.

    Raises:
        ConfigError: if there is no run or the target is out of range.
        CheckpointError: if a file cannot be written.
    """
    text = page(runs, target, command)
    table = comparison(runs, target)
    warning = mixed(runs)
    markdown = (f"> {warning}\n\n" if warning else "") + to_markdown(table)
    with as_checkpoint_error(f"cannot make {out.parent}"):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, text.encode())
    write_atomically(out.with_suffix(".md"), markdown.encode())
    write_atomically(out.with_suffix(".csv"), to_csv(table).encode())
