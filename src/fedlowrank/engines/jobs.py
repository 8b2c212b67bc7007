"""The jobs of a round, made when an engine asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from ..core.contract.method import ClientInfo
from .engine import ClientJob


class LazyJobs(Sequence[ClientJob]):
    """The jobs of a round; each is made when an engine asks for it.

    Args:
        clients: who takes part.
        make: gives a client's job.

    Attributes:
        clients: as above.
    """

    def __init__(self, clients: Sequence[ClientInfo], make: Callable[[ClientInfo], ClientJob]) -> None:
        self.clients, self._make = clients, make

    def __len__(self) -> int:
        """How many clients take part."""
        return len(self.clients)

    @overload
    def __getitem__(self, place: int) -> ClientJob: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[ClientJob]: ...

    def __getitem__(self, place: int | slice) -> ClientJob | Sequence[ClientJob]:
        """A job, or several."""
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        return self._make(self.clients[place])
