"""How messages get from the server to the nodes and back, whatever carries them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

PATIENCE = 60.0
"""Seconds for which a round that has nobody to ask waits for registrations."""

LOOK = 1.0
"""Seconds between two looks for new nodes while clients are waited for."""


@dataclass(frozen=True)
class Parcel:
    """A message to a node.

    Attributes:
        node: identifier of the node, the carrier's and not the client's.
        kind: hello, who are you; or order.
        words: JSON, see :mod:`.messages`.
        body: bytes of a tree.
        most: bytes that the reply may have, words and body together; a carrier may stop reading a larger one.
    """

    node: int
    kind: Literal["hello", "order"]
    words: str
    body: bytes = b""
    most: int = 2 << 20


@dataclass(frozen=True)
class Delivery:
    """A reply of a node, or the news that there will be none.

    Attributes:
        node: whose.
        kind: of the message that it answers.
        words: JSON.
        body: bytes of a tree.
        problem: why there is no reply, in the carrier's words; empty if there is one.
        gone: whether the node is no longer there; its client may come back at another.
        too_large: why the reply was not read to its end; empty if it was.
    """

    node: int
    kind: Literal["hello", "order"]
    words: str = ""
    body: bytes = b""
    problem: str = ""
    gone: bool = False
    too_large: str = ""


class Transport(Protocol):
    """A carrier of messages."""

    def nodes(self) -> set[int]:
        """The nodes that can be reached now."""
        ...

    def send(self, parcels: Sequence[Parcel], group: str, seconds: float) -> None:
        """Send messages, of which none is worth anything after so many seconds."""
        ...

    def receive(self) -> list[Delivery]:
        """What arrived since the last call, in any order; does not wait."""
        ...

    def forget(self) -> None:
        """Wait no longer for replies to orders; those to hello may still come."""
        ...


class Exchange:
    """Message round trips with many nodes. Registrations may take longer than one round trip: a late one is accepted.

    A client that hashes a large base model before it can say who it is takes minutes. It is asked once, and not again before
    ``wait`` seconds have passed.

    Args:
        transport: the carrier.
        wait: seconds that a registration may take.
        say: takes log messages.

    Attributes:
        asked: when each node was asked who it is that has not answered yet.
    """

    def __init__(self, transport: Transport, wait: float, say: Callable[[str], None]) -> None:
        self.transport, self.wait, self.say = transport, wait, say
        self.asked: dict[int, float] = {}
        self._logged = -math.inf

    def replies(self, parcels: Sequence[Parcel], group: str, seconds: float) -> Iterator[Delivery]:
        """Send messages and yield the replies as they arrive, one a message at most.

        It ends when all orders are answered or the time is up; if there are none, when all registrations are there.

        Args:
            parcels: at most one to each node.
            group: name of this round trip, for the carrier's records.
            seconds: to wait.
        """
        start, present = time.monotonic(), self.transport.nodes()
        # a node that has gone answers no more; one that is back may be another process
        self.asked = {n: t for n, t in self.asked.items() if n in present and start - t < self.wait}
        questions = [p for p in parcels if p.kind == "hello" and p.node not in self.asked]
        orders = [p for p in parcels if p.kind == "order"]
        open_ = {p.node for p in orders}
        self.asked |= {p.node: start for p in questions}
        if questions:
            self.transport.send(questions, "registration", self.wait)
        if orders:
            self.transport.send(orders, group, seconds)
        try:
            while (open_ if orders else self.asked) and time.monotonic() - start < seconds:
                found = self.transport.receive()
                for delivery in found:
                    # a reply that comes twice, or to something that was not asked, is no news
                    if delivery.kind == "hello" and self.asked.pop(delivery.node, None) is not None:
                        yield delivery
                    elif delivery.kind == "order" and delivery.node in open_:
                        open_.discard(delivery.node)
                        yield delivery
                if (open_ if orders else self.asked) and not found:
                    # often at first, when small models answer at once, and rarely when they take hours
                    time.sleep(min(1.0, max(0.02, (time.monotonic() - start) / 20)))
        finally:
            self.transport.forget()
            self._log()

    def _log(self) -> None:
        """Name the nodes whose registration takes long, once a minute."""
        now = time.monotonic()
        late = {n: now - t for n, t in sorted(self.asked.items()) if now - t >= PATIENCE / 2}
        if late and now - self._logged >= PATIENCE:
            self._logged = now
            named = ", ".join(f"node {n} ({seconds:.0f} s)" for n, seconds in late.items())
            self.say(
                f"still waiting for the registration of {named}; each may take {self.wait:g} s (network.wait), and rounds go on "
                "without it. A large base model takes minutes to hash."
            )
