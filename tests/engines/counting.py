"""An engine that counts how many clients it executes together."""

from __future__ import annotations

from typing import Any

from fedlowrank.engines.vectorized import Vectorized


class Counting(Vectorized):
    """Counts how many clients were executed together.

    Attributes:
        sizes: of every group of more than one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def _together(self, title: str, clients: Any, round: int) -> list[Any]:
        self.sizes.append(len(clients))
        return super()._together(title, clients, round)
