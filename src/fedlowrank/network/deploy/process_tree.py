"""A program's family: the processes that it started and those that they started, found and ended for certain.

Flower puts a child of its server in a session of its own, so a signal to one process group does not reach all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One living process.

    Attributes:
        parent: number of the process that started it, or 1 if that is gone.
        group: its process group.
        command: its command line.
    """

    parent: int
    group: int
    command: str


def processes() -> dict[int, Process]:
    """All living processes of the machine by number; those that have ended and wait to be asked how are left out."""
    if not (_PROC / "self" / "stat").exists():
        return _listed()
    found = {}
    for folder in _PROC.glob("[0-9]*"):
        # any of them may end while it is looked at
        with contextlib.suppress(OSError):
            # the name, in parentheses, may hold anything; the state, the parent and the group follow the last of them
            state, parent, group = (
                (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
            )
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if state not in "ZX":
                found[int(folder.name)] = Process(int(parent), int(group), command)
    return found


def _listed() -> dict[int, Process]:
    """The same on systems without ``/proc``."""
    columns = "pid=,ppid=,pgid=,stat=,args="
    lines = subprocess.run(
        ["ps", "-A", "-ww", "-o", columns], capture_output=True, text=True, check=True
    ).stdout
    rows = (line.split(maxsplit=4) for line in lines.splitlines())
    return {int(row[0]): Process(int(row[1]), int(row[2]), row[-1]) for row in rows if row[3][0] not in "ZX"}


def descendants(root: int) -> dict[int, Process]:
    """The children of a process, their children, and so on; not the process itself."""
    everyone = processes()
    found: dict[int, Process] = {}
    generation = {root}
    while generation:
        generation = {number for number, process in everyone.items() if process.parent in generation} - set(
            found
        )
        found.update({number: everyone[number] for number in generation})
    return found


def members(groups: Iterable[int]) -> dict[int, Process]:
    """The living processes of some process groups."""
    wanted = set(groups)
    return {number: process for number, process in processes().items() if process.group in wanted}


def await_end(groups: Iterable[int], seconds: float) -> bool:
    """Wait until no process of some groups lives; whether that came about in time."""
    wanted, deadline = set(groups), time.monotonic() + seconds
    while members(wanted):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def kill(groups: Iterable[int], seconds: float = 10.0) -> dict[int, Process]:
    """End all processes of some groups at once, those included that they start meanwhile.

    Args:
        groups: process groups, each of which has or had a process of the caller's.
        seconds: to wait for their end.

    Returns:
        What still lives, which is nothing unless the system withholds it.
    """
    wanted, deadline = set(groups), time.monotonic() + seconds
    while (left := members(wanted)) and time.monotonic() < deadline:
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.02)
    return left
