"""What the clients of a round come to, one after another, so that not all of it need be in memory at once."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from time import perf_counter, process_time
from typing import Any

from torch import Tensor

from ..core import tree
from ..core.method import ClientInfo, Reply
from ..engines.base import Outcome
from ..training.trainer import Meter
from .client_store import Shelf
from .communication import Volume

AT_ONCE = 256
"""States that are put on the shelf together, for each time all its places are copied."""


SMALL = 1 << 20
"""Bytes of a tensor up to which it lies among others in memory; the system gives larger ones pages of their own."""


def _moved(t: Tensor) -> Tensor:
    return t.clone() if t.nbytes <= SMALL else t


class Clock:
    """Seconds by what they were spent on; within a block that is timed another one may be, whose time is not the outer's too."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self._names: list[str] = []
        self._since = 0.0, 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time until the end of the block to that name."""
        self._charge()
        self._names.append(name)
        try:
            yield
        finally:
            self._charge()
            self._names.pop()

    def _charge(self) -> None:
        wall, cpu = perf_counter(), process_time()
        if self._names:
            name = self._names[-1]
            self.wall[name] = self.wall.get(name, 0.0) + wall - self._since[0]
            self.cpu[name] = self.cpu.get(name, 0.0) + cpu - self._since[1]
        self._since = wall, cpu


class Collection:
    """Outcomes on their way to the server, and what is noted of each.

    Args:
        clients: in the order of the outcomes.
        losses: replies that are lost whatever happens, by client, with the reason.
        unlucky: clients whose reply is lost if nothing else happens to it.
        drop: whether a client whose training met a NaN is left out; else its error is raised.
        shelf: an empty one, for states.
        clock: to tell training from the rest.

    Attributes:
        lost: clients whose reply does not arrive, with the reason.
        meters: of all clients.
        volume: sizes of the replies, the lost ones included.
        states: of those whose reply arrived.
        arrived: who they are.
    """

    def __init__(
        self,
        clients: Sequence[ClientInfo],
        losses: Mapping[str, str],
        unlucky: Set[int],
        drop: bool,
        shelf: Shelf,
        clock: Clock,
    ) -> None:
        self._clients, self._losses, self._unlucky, self._drop, self._clock = clients, losses, unlucky, drop, clock
        self.volume = Volume()
        self._waiting: dict[int, Any] = {}
        self.lost: dict[str, str] = {}
        self.meters: list[Meter] = []
        self.states = shelf
        self.arrived: set[int] = set()

    def replies(self, outcomes: Iterator[Outcome]) -> Generator[Reply[Any], None, None]:
        """Those that arrive, in the order of the clients; to be closed, for an engine must know when nobody waits any more.

        Raises:
            NonFiniteError: if a client's training met a NaN, and that is to stop the run.
        """
        try:
            yield from self._arriving(outcomes)
        finally:
            if isinstance(outcomes, Generator):
                outcomes.close()

    def _arriving(self, outcomes: Iterator[Outcome]) -> Iterator[Reply[Any]]:
        for info in self._clients:
            with self._clock("train"):
                outcome = next(outcomes)
            self.meters.append(outcome.meter)
            self.volume.add(info.id, outcome.upload)
            why = self._why_lost(info, outcome)
            if why is not None:
                self.lost[str(info.id)] = why
                continue
            self._keep(info.id, outcome.state)
            if outcome.upload is not None:
                yield Reply(info, outcome.upload)
        with self._clock("train"):
            # what an engine does after the last one
            next(outcomes, None)
        self._shelve()

    def _keep(self, client: int, state: Any) -> None:
        self.arrived.add(client)
        self._waiting[client] = state
        if len(self._waiting) >= AT_ONCE:
            self._shelve()

    def _shelve(self) -> None:
        # copied one behind the other: between the tensors of training, where they came to be, each would keep a hole open
        compact = {client: tree.map(_moved, state) for client, state in self._waiting.items()}
        self.states, self._waiting = self.states | compact, {}

    def _why_lost(self, info: ClientInfo, outcome: Outcome) -> str | None:
        if outcome.error is not None and outcome.lost is None and not self._drop:
            raise outcome.error
        if str(info.id) in self._losses:
            return self._losses[str(info.id)]
        if outcome.lost is not None:
            return outcome.lost
        if outcome.error is not None:
            return str(outcome.error)
        where = tree.not_finite(outcome.upload)
        if where is not None:
            return f"the reply of client {info.id} holds a NaN or an infinity at {where}; it was dropped"
        return "the reply was lost" if info.id in self._unlucky else None
