"""Memory of this process."""

from __future__ import annotations

import resource
from pathlib import Path


def peak() -> float:
    """MiB that it has had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident() -> float:
    """MiB that it has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
