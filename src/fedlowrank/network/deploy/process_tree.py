"""Finds and ends the process tree of a subprocess, by process groups.

Flower starts a child of its server in a session of its own, so a signal to one process group is not enough.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Process:
    """A living process.

    Attributes:
        group: its process group.
        command: its command line.
    """

    group: int
    command: str


def processes() -> dict[int, Process]:
    """All living processes of the machine by number, without zombies."""
    living = {}
    for process in psutil.process_iter(["status", "cmdline"]):
        # it may end while it is looked at
        with contextlib.suppress(OSError):
            group, command = os.getpgid(process.pid), " ".join(process.info["cmdline"] or ())
            if process.info["status"] not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                living[process.pid] = Process(group, command)
    return living


def descendants(root: int) -> dict[int, Process]:
    """The children of a process, their children, and so on; not the process itself."""
    try:
        children = {child.pid for child in psutil.Process(root).children(recursive=True)}
    except psutil.NoSuchProcess:
        return {}
    return {pid: process for pid, process in processes().items() if pid in children}


def members(groups: Iterable[int]) -> dict[int, Process]:
    """The living processes of some process groups."""
    wanted = set(groups)
    return {pid: process for pid, process in processes().items() if process.group in wanted}


def wait_for_end(groups: Iterable[int], seconds: float) -> bool:
    """Wait until all processes of some groups have ended; whether they did in time."""
    wanted, deadline = set(groups), time.monotonic() + seconds
    while members(wanted):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def kill(groups: Iterable[int], seconds: float = 10.0) -> dict[int, Process]:
    """Kill all processes of some groups, also those that start meanwhile; returns those that survive."""
    wanted, deadline = set(groups), time.monotonic() + seconds
    while (left := members(wanted)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return left
