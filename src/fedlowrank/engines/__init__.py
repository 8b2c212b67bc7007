"""Engines: ways to execute the clients of a round. A method knows of none of them."""

from __future__ import annotations

from .auto import Auto
from .base import Engine
from .processes import Processes
from .sequential import Sequential, Wire
from .vectorized import Vectorized

ENGINES: dict[str, type[Engine]] = {
    "sequential": Sequential,
    "vectorized": Vectorized,
    "processes": Processes,
    "auto": Auto,
    "wire": Wire,
}
"""Every engine by name."""

__all__ = ["ENGINES", "Auto", "Engine", "Processes", "Sequential", "Vectorized", "Wire"]
