"""How messages get from the server to the nodes and back, whatever carries them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

PATIENCE = 60.0
"""Seconds for which a wave waits for introductions alone: a node that says nothing must not hold up a round."""


@dataclass(frozen=True)
class Parcel:
    """A message to a node.

    Attributes:
        node: identifier of the node, the carrier's and not the client's.
        kind: hello, who are you; or order.
        words: JSON, see :mod:`.messages`.
        body: bytes of a tree.
    """

    node: int
    kind: Literal["hello", "order"]
    words: str
    body: bytes = b""


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
    """

    node: int
    kind: Literal["hello", "order"]
    words: str = ""
    body: bytes = b""
    problem: str = ""
    gone: bool = False


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
        """Wait no longer for what is still to come."""
        ...


def exchange(transport: Transport, parcels: Sequence[Parcel], group: str, seconds: float) -> Iterator[Delivery]:
    """Send messages and yield the replies as they arrive, one a message at most, until all are there or the time is up.

    Args:
        transport: the carrier.
        parcels: at most one to each node.
        group: name of this wave, for the carrier's records.
        seconds: to wait for all; for introductions no longer than :data:`PATIENCE`.
    """
    start = time.monotonic()
    open_ = {p.node: p.kind for p in parcels}
    transport.send(parcels, group, seconds)
    try:
        while open_ and time.monotonic() - start < (seconds if "order" in open_.values() else min(seconds, PATIENCE)):
            found = transport.receive()
            for delivery in found:
                # a reply that comes twice, or to something that was not asked, is no news
                if open_.get(delivery.node) == delivery.kind:
                    del open_[delivery.node]
                    yield delivery
            if open_ and not found:
                # often at first, when small models answer at once, and rarely when they take hours
                time.sleep(min(1.0, max(0.02, (time.monotonic() - start) / 20)))
    finally:
        transport.forget()
