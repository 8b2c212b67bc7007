"""Engines: ways to execute the clients of a round. A method knows of none of them."""

from __future__ import annotations

from .base import Engine
from .sequential import Sequential, Wire
from .vectorised import Vectorised

ENGINES: dict[str, type[Engine]] = {"sequential": Sequential, "vectorised": Vectorised, "wire": Wire}
"""Every engine by name."""

__all__ = ["ENGINES", "Engine", "Sequential", "Vectorised", "Wire"]
