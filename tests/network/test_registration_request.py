"""A registration request that is lost is sent again; one whose answer takes long is answered once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from fedlowrank.network import transport
from fedlowrank.network.transport import Exchange, NodeMessage, Response

WAIT = 400.0


@dataclass
class Slow:
    """Node 1 answers every message after so many seconds; the first messages to node 2 are lost."""

    seconds: float = 0.0
    lost: int = 0
    now: float = 1000.0
    sent: list[tuple[float, int]] = field(default_factory=list)
    due: list[tuple[float, Response]] = field(default_factory=list)

    def nodes(self) -> set[int]:
        return {1, 2}

    def send(self, messages: Sequence[NodeMessage], group: str, seconds: float) -> None:
        for m in messages:
            if m.kind == "registration":
                self.sent.append((self.now, m.node))
            if m.node == 2 and self.lost:
                self.lost -= 1
                continue
            self.due.append((self.now + (self.seconds if m.node == 1 else 0.0), Response(m.node, m.kind)))

    def receive(self) -> list[Response]:
        actual = [r for when, r in self.due if when <= self.now]
        self.due = [(when, r) for when, r in self.due if when > self.now]
        return actual

    def cancel_orders(self) -> None: ...

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


def ask(carrier: Slow, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ask both nodes as a server that waits for them does, for WAIT seconds; the nodes that answered."""
    monkeypatch.setattr(transport, "time", carrier)
    exchange, actual = Exchange(carrier, WAIT), list[int]()
    while carrier.now < 1000.0 + WAIT:
        requests = [NodeMessage(n, "registration", "{}") for n in (1, 2) if n not in actual]
        actual += [r.node for r in exchange.run_round_trip(requests, "registration", 1.0)]
        carrier.now += 0.01
    # what comes after an answer is dropped
    carrier.now += WAIT
    orders = exchange.run_round_trip([NodeMessage(2, "order", "{}")], "round", 1.0)
    assert [(r.node, r.kind) for r in orders] == [(2, "order")]
    return actual


def test_a_lost_request_is_sent_again_after_half_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    carrier = Slow(lost=1)
    assert ask(carrier, monkeypatch) == [1, 2]
    times = [when - 1000.0 for when, node in carrier.sent if node == 2]
    assert times == pytest.approx([0.0, WAIT / 2], abs=2.0)
    assert [node for _, node in carrier.sent].count(1) == 1


def test_a_node_that_answers_two_requests_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    carrier = Slow(seconds=WAIT / 2 + 10)
    assert sorted(ask(carrier, monkeypatch)) == [1, 2]
    # it was asked again while it worked
    assert [node for _, node in carrier.sent].count(1) == 2
