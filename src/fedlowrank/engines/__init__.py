"""Engines: ways to execute the clients of a round. Methods do not depend on the engine."""

from __future__ import annotations

from .auto import Auto
from .engine import Engine
from .processes import Processes
from .ray_cluster import Ray
from .sequential import Sequential, Wire
from .vectorized import Vectorized

ENGINES: dict[str, type[Engine]] = {
    "sequential": Sequential,
    "vectorized": Vectorized,
    "processes": Processes,
    "ray": Ray,
    "auto": Auto,
    "wire": Wire,
}
"""Engine classes by name."""

__all__ = ["ENGINES", "Auto", "Engine", "Processes", "Ray", "Sequential", "Vectorized", "Wire"]
