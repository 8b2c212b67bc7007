"""The jobs of a round, each made when an engine reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from ..core.contract import ClientInfo
from .engine import ClientJob


class LazyJobs(Sequence[ClientJob]):
    """Lazy sequence of the jobs of a round; each job is made when an engine reads it.

    Args:
        clients: records of the participants.
        make_job: function that maps a client to its job.

    Attributes:
        clients: records of the participants.
    """

    def __init__(self, clients: Sequence[ClientInfo], make_job: Callable[[ClientInfo], ClientJob]) -> None:
        self.clients, self._make = clients, make_job

    def __len__(self) -> int:
        """Number of participants."""
        return len(self.clients)

    @overload
    def __getitem__(self, index: int) -> ClientJob: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[ClientJob]: ...

    def __getitem__(self, index: int | slice) -> ClientJob | Sequence[ClientJob]:
        """Make the job at an index, or the jobs of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._make(self.clients[index])
