"""A progress bar for long work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .record import RoundRecord

CONSOLE = Console(stderr=True)


@contextmanager
def bar(title: str, rounds: int, done: int = 0) -> Iterator[Callable[[RoundRecord], None]]:
    """A bar over the rounds of one run, with the mean test accuracy beside it.

    Args:
        title: of the method.
        rounds: in all.
        done: before a resumed run goes on.

    Yields:
        A function to be called with every record.
    """
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=CONSOLE) as progress:
        task = progress.add_task(title, total=rounds, completed=done, accuracy="")

        def show(record: RoundRecord) -> None:
            progress.update(task, completed=record.round)
            if record.accuracy:
                known = [a for a in next(iter(record.accuracy.values()))["test"] if a is not None]
                if known:
                    progress.update(task, accuracy=f"test {100 * sum(known) / len(known):5.1f} %")

        yield show
