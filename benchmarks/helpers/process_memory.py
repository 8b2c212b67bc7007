"""Resident memory of this process."""

from __future__ import annotations

import resource
from pathlib import Path


def measure_peak() -> float:
    """Measure the peak of the resident memory, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_resident() -> float:
    """Measure the resident memory now, in MiB."""
    return read_memory("VmRSS")


def read_memory(field: str) -> float:
    """Read a size from the status of this process, in MiB; Linux alone has it.

    Args:
        field: such as ``VmRSS``, the resident memory; ``VmHWM``, its peak; ``RssAnon``, its anonymous part.
    """
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) / 1024


def reset_peak() -> None:
    """Let the peak ``VmHWM`` begin anew at the resident memory of now."""
    Path("/proc/self/clear_refs").write_text("5")
