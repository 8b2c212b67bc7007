"""The jobs of a round, each made when an engine reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from ..core.contract import ClientInfo
from .engine import ClientJob


class LazyJobs(Sequence[ClientJob]):
    """The jobs of a round; each is made when an engine reads it.

    Args:
        clients: who takes part.
        make: gives a client's job.

    Attributes:
        clients: as above.
    """

    def __init__(self, clients: Sequence[ClientInfo], make: Callable[[ClientInfo], ClientJob]) -> None:
        self.clients, self._make = clients, make

    def __len__(self) -> int:
        """Number of clients that take part."""
        return len(self.clients)

    @overload
    def __getitem__(self, place: int) -> ClientJob: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[ClientJob]: ...

    def __getitem__(self, place: int | slice) -> ClientJob | Sequence[ClientJob]:
        """The job at a place, or those of a slice."""
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        return self._make(self.clients[place])
