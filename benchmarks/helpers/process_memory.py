"""Resident memory of this process."""

from __future__ import annotations

import resource
from pathlib import Path


def measure_peak() -> float:
    """Measure the peak of the resident memory, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_resident() -> float:
    """Measure the resident memory now, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
