"""Messages between the server and the nodes, independent of the transport."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

logger = logging.getLogger(__name__)

REGISTRATION_SECONDS = 60.0
"""Seconds for which a round without any reachable client waits for registrations."""

POLL_SECONDS = 1.0
"""Seconds between two checks for new nodes while the server waits for clients."""


@dataclass(frozen=True)
class NodeMessage:
    """A message to a node.

    Attributes:
        node: identifier of the node at the transport, which is not that of the client.
        kind: kind of the message: a request to register, or an order.
        header: header in JSON, see :mod:`.messages`.
        payload: encoded tree.
        max_bytes: largest size of the reply in bytes, header and payload together; a transport may stop reading a larger one.
        signature: signature of the server, see :mod:`.site.signatures`; "" if keys are not checked.
    """

    node: int
    kind: Literal["registration", "order"]
    header: str
    payload: bytes = b""
    max_bytes: int = 2 << 20
    signature: str = ""


@dataclass(frozen=True)
class Response:
    """A node's reply to a message, or the report that there will be none.

    Attributes:
        node: identifier of the node.
        kind: kind of the message that it answers.
        header: header in JSON.
        payload: encoded tree.
        problem: the reason why there is no reply, as the transport states it; empty if there is one.
        disconnected: whether the node has disconnected; its client may come back as another node.
        too_large: the reason why the reply was not read to its end; empty if it was.
    """

    node: int
    kind: Literal["registration", "order"]
    header: str = ""
    payload: bytes = b""
    problem: str = ""
    disconnected: bool = False
    too_large: str = ""


class Transport(Protocol):
    """Carries messages to nodes and brings their responses."""

    def nodes(self) -> set[int]:
        """The nodes that can be reached now."""
        ...

    def send(self, messages: Sequence[NodeMessage], group: str, seconds: float) -> None:
        """Send messages that expire after ``seconds``."""
        ...

    def receive(self) -> list[Response]:
        """Return the responses since the last call, in any order; does not wait."""
        ...

    def cancel_orders(self) -> None:
        """Drop later responses to orders; those to registration requests are still received."""
        ...


class Exchange:
    """Runs message round trips with many nodes.

    A registration may take longer than one round trip, because a client first hashes its base model. A node
    that does not answer is asked again after half of ``wait``, because a busy server may have lost the message.

    Args:
        transport: transport that carries the messages.
        wait: seconds that a registration may take.
        describe_node: function that names a node in logs.

    Attributes:
        pending_nodes: time at which each node without an answer was first asked to register, by node.
    """

    def __init__(
        self, transport: Transport, wait: float, describe_node: Callable[[int], str] = "node {}".format
    ) -> None:
        self.transport, self.wait, self.name = transport, wait, describe_node
        self.pending_nodes: dict[int, float] = {}
        self._asked: dict[int, float] = {}
        self._last_log = -math.inf

    def run_round_trip(
        self,
        messages: Sequence[NodeMessage],
        group: str,
        seconds: float,
        limit: Callable[[], float] | None = None,
    ) -> Iterator[Response]:
        """Send messages and yield the responses as they arrive, at most one for each message.

        The round trip ends when all orders are answered or the time is up. Without orders it ends when no
        registration is pending. There is at most one message to each node; the group names the round trip in
        the transport's records.

        Args:
            messages: messages to send.
            group: name of the round trip in the transport's records.
            seconds: seconds until the messages expire.
            limit: function that returns the seconds after which enough responses have been yielded; None for ``seconds``.
        """
        start_time, node_ids = time.monotonic(), self.transport.nodes()
        # a node that left does not answer any more; one that came back may be another process
        self.pending_nodes = {
            n: t for n, t in self.pending_nodes.items() if n in node_ids and start_time - t < self.wait
        }
        self._asked = {
            n: t for n, t in self._asked.items() if n in self.pending_nodes and start_time - t < self.wait / 2
        }
        requests = [m for m in messages if m.kind == "registration" and m.node not in self._asked]
        orders = [m for m in messages if m.kind == "order"]
        unanswered_nodes = {m.node for m in orders}
        self.pending_nodes = {m.node: start_time for m in requests} | self.pending_nodes
        self._asked |= {m.node: start_time for m in requests}
        if requests:
            self.transport.send(requests, "registration", self.wait)
        if orders:
            self.transport.send(orders, group, seconds)
        try:
            while (
                unanswered_nodes if orders else self.pending_nodes
            ) and time.monotonic() - start_time < min(seconds, seconds if limit is None else limit()):
                responses = self.transport.receive()
                for response in responses:
                    # duplicates and unsolicited answers are dropped
                    if (
                        response.kind == "registration"
                        and self.pending_nodes.pop(response.node, None) is not None
                    ):
                        yield response
                    elif response.kind == "order" and response.node in unanswered_nodes:
                        unanswered_nodes.discard(response.node)
                        yield response
                if (unanswered_nodes if orders else self.pending_nodes) and not responses:
                    # frequent checks at first, when small models answer at once, and rare ones when answers take hours
                    time.sleep(min(1.0, max(0.02, (time.monotonic() - start_time) / 20)))
        finally:
            self.transport.cancel_orders()
            self._log_late_registrations()

    def _log_late_registrations(self) -> None:
        """Log the nodes whose registration takes long, at most once a minute."""
        current_time = time.monotonic()
        late_nodes = {
            n: current_time - t
            for n, t in sorted(self.pending_nodes.items())
            if current_time - t >= REGISTRATION_SECONDS / 2
        }
        if late_nodes and current_time - self._last_log >= REGISTRATION_SECONDS:
            self._last_log = current_time
            node_text = ", ".join(f"{self.name(n)} ({seconds:.0f} s)" for n, seconds in late_nodes.items())
            logger.info(
                "still waiting for the registration of %s; each may take %g s (network.wait), and rounds "
                "go on without it. A large base model takes minutes to hash.",
                node_text,
                self.wait,
            )
