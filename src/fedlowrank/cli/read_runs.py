"""Reads the runs that a command names; a damaged one among others does not keep these from being read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ..core.errors import CheckpointError
from ..results.records import RunRecord
from ..storage.run_files import read_representations, run_folders
from .terminal import OUT

T = TypeVar("T")


def read_each(folders: Sequence[Path], read: Callable[[Path], T]) -> tuple[list[T], int]:
    """Read run folders among folders and directly below them; warn of damaged ones and leave them out.

    Args:
        folders: run folders, or parents of run folders.
        read: reads one run folder; it raises CheckpointError if that is damaged.

    Returns:
        What was read of each run, and how many runs were left out.

    Raises:
        CheckpointError: if a folder that is named itself, and not by its parent, is damaged or holds no run; or if no
            run can be read.
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
    """Read a run with all of its files that a report shows."""
    record = RunRecord.load(folder)
    # a report reads these late, where an error would stop it for all runs
    read_representations(folder)
    _ = record.answers
    return record


def count_left_out(count: int) -> int:
    """Say how many runs were left out; the exit code of the command, 1 if there are any."""
    if count:
        OUT.print(f"{count} damaged run{'' if count == 1 else 's'} left out", style="yellow")
    return int(count > 0)
