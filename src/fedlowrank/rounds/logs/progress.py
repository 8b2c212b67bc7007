"""Progress of a run in the terminal: a progress bar, or plain lines where there is no terminal."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ...core.io.streams import TolerantStream
from ...results.client_numbers import LOSS
from ...results.records import RoundRecord
from ...results.varied_settings import name_varied
from .console import console

CONSOLE = console(stderr=True)

SECONDS_BETWEEN_LINES = 30.0
"""Seconds between two lines where there is no terminal, such as in a log file."""


def run_label(config: Mapping[str, Any]) -> str:
    """Name a run by its method, its seed and the varied settings: ``pFedLoRA, seed 0, lr 0.1``.

    Args:
        config: contents of ``run.json``.
    """
    vary = config.get("vary") or {}
    names = name_varied([*vary], config["method"].get("name", ""))
    parts = [
        config["method"]["title"],
        f"seed {config['run']['seed']}",
        *(f"{name} {value}" for name, value in zip(names, vary.values(), strict=True)),
    ]
    return ", ".join(parts)


def tell(text: str) -> None:
    """Print a text on the error stream, beside a progress bar."""
    print(text, file=TolerantStream(sys.stderr))


@contextmanager
def bar(title: str, rounds: int, completed_rounds: int = 0) -> Iterator[Callable[[RoundRecord], None]]:
    """Show a bar over the rounds of a run, with the mean test accuracy, or the test loss in a regression.

    In Jupyter the bar is a widget. Where the error stream is no terminal, a plain line is printed every 30 seconds
    and after the last round.

    Args:
        title: title of the run.
        rounds: number of rounds in all.
        completed_rounds: number of rounds that were completed before a run is resumed.

    Yields:
        A function to call with every record.
    """
    has_widgets = CONSOLE.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
    if CONSOLE.is_jupyter and not has_widgets:
        tell("a progress bar in Jupyter needs ipywidgets: pip install 'fedlowrank[notebook]'")
    if not (has_widgets or CONSOLE.is_terminal):
        yield from _lines(title, rounds)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=CONSOLE) as progress:
        task = progress.add_task(title, total=rounds, completed=completed_rounds, accuracy="")

        def show(record: RoundRecord) -> None:
            progress.update(task, completed=record.round)
            if text := describe_record(record):
                progress.update(task, accuracy=text)

        yield show


def _lines(title: str, rounds: int) -> Iterator[Callable[[RoundRecord], None]]:
    """Print a plain line every :data:`SECONDS_BETWEEN_LINES` seconds and one at the end."""
    printed, line, result, last = time.monotonic(), "", "", ""

    def show(record: RoundRecord) -> None:
        nonlocal printed, line, result, last
        result = describe_record(record) or result
        line = f"{title}: round {record.round} of {rounds}{', ' * bool(result)}{result}"
        if time.monotonic() - printed >= SECONDS_BETWEEN_LINES:
            tell(line)
            printed, last = time.monotonic(), line

    try:
        yield show
    finally:
        if line != last:
            tell(line)


def describe_record(record: RoundRecord) -> str:
    """Describe the mean test accuracy or loss of a record and the privacy spent; empty without evaluation."""
    accuracy, loss = record.mean(split="test"), record.mean(LOSS, split="test")
    privacy = record.server_metrics.get("privacy")
    privacy_text = "" if privacy is None else f", ε {privacy['epsilon']:.3g} at δ {privacy['delta']:g}"
    if accuracy is not None:
        return f"test {100 * accuracy:5.1f} %{privacy_text}"
    return "" if loss is None else f"test loss {loss:.3g}{privacy_text}"
