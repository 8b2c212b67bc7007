"""Reads the runs that a command names; a damaged run does not keep the others from being read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ..core.errors import CheckpointError
from ..core.io.text import format_count
from ..results.records import RunRecord
from ..storage.run_files import read_representations, run_folders
from .terminal import OUT

T = TypeVar("T")


def read_each(folders: Sequence[Path], read: Callable[[Path], T]) -> tuple[list[T], int]:
    """Read run folders among folders and directly below them; skip damaged ones with a warning.

    Args:
        folders: run folders, or parents of run folders.
        read: function that reads one run folder and raises CheckpointError if it is damaged.

    Returns:
        The result of each read, and the number of runs that were skipped.

    Raises:
        CheckpointError: if a folder that was given itself, and not found below a parent, is damaged or holds no run;
            or if no run can be read.
    """
    results: list[T] = []
    problems: list[str] = []
    for path in folders:
        for folder in run_folders([path]):
            try:
                results.append(read(folder))
            except CheckpointError as error:
                if folder == path:
                    raise
                problems.append(f"{folder} is left out: {error.for_command}")
    if problems and not results:
        raise CheckpointError("no run can be read.\n" + "\n".join(problems))
    for problem in problems:
        OUT.print(problem, style="yellow", markup=False, highlight=False, soft_wrap=True)
    return results, len(problems)


def read_for_report(folder: Path) -> RunRecord:
    """Read a run with all files that a report shows."""
    record = RunRecord.load(folder)
    # a report reads these files late, where an error would stop it for all runs
    read_representations(folder)
    _ = record.answers
    return record


def count_left_out(count: int) -> int:
    """Print how many runs were left out; returns the exit code, 1 if there are any."""
    if count:
        OUT.print(f"{format_count(count, 'damaged run')} left out", style="yellow")
    return int(count > 0)
