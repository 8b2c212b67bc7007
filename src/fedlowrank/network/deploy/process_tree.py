"""Finds and ends the process tree of a subprocess, by process groups.

Flower starts a child of its server in a session of its own, so a signal to one process group is not enough.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import NamedTuple

import psutil


class Process(NamedTuple):
    """The process group and the command line of a living process."""

    group: int
    command: str


def list_living_processes() -> dict[int, Process]:
    """All living processes of the machine by identifier, without zombies."""
    processes = {}
    for process in psutil.process_iter(["status", "cmdline"]):
        # a process may end while it is read
        with contextlib.suppress(OSError):
            group, command = os.getpgid(process.pid), " ".join(process.info["cmdline"] or ())
            if process.info["status"] not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                processes[process.pid] = Process(group, command)
    return processes


def find_descendants(root_pid: int) -> dict[int, Process]:
    """The children of a process, their children, and so on, without the process itself."""
    try:
        children = {child.pid for child in psutil.Process(root_pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return {}
    return {pid: process for pid, process in list_living_processes().items() if pid in children}


def end_groups(groups: set[int], patience: float = 0.0) -> set[int]:
    """Wait for all processes of some groups to end, and kill those that remain, or that start meanwhile.

    Args:
        groups: identifiers of the process groups.
        patience: seconds before the processes are killed.

    Returns:
        Identifiers of the processes that survive for ten more seconds.
    """
    start_time = time.monotonic()
    while survivors := {pid for pid, process in list_living_processes().items() if process.group in groups}:
        waited_seconds = time.monotonic() - start_time
        if waited_seconds > patience + 10:
            break
        for pid in survivors if waited_seconds >= patience else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return survivors
