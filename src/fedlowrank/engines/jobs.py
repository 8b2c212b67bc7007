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
        make_job: gives a client's job.

    Attributes:
        clients: as above.
    """

    def __init__(self, clients: Sequence[ClientInfo], make_job: Callable[[ClientInfo], ClientJob]) -> None:
        self.clients, self._make = clients, make_job

    def __len__(self) -> int:
        """Number of clients that take part."""
        return len(self.clients)

    @overload
    def __getitem__(self, index: int) -> ClientJob: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[ClientJob]: ...

    def __getitem__(self, index: int | slice) -> ClientJob | Sequence[ClientJob]:
        """The job at an index, or those of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._make(self.clients[index])
