"""Clients that a method does not tell apart are sent one message, and others each their own."""

from __future__ import annotations

from typing import Any

import pytest

from fedlowrank.core.contract import ClientInfo
from fedlowrank.core.contract.download_cache import MAX_MESSAGES, Downloads
from fedlowrank.methods.fedavg import FedAvg

INFOS = [ClientInfo(i, 10 + i, "ab"[i % 2], rank=1 + i % 3, cluster=i % 2, name=f"n{i}") for i in range(12)]


def messages(read: Any) -> tuple[list[Any], list[int]]:
    """What each client is sent by a method that reads some fields, and for which clients it was computed."""
    calls = []

    class Sender(FedAvg):
        def download(self, server: Any, client: Any) -> Any:
            actual = (server, read(client))
            calls.append(actual)
            return actual

    downloads = Downloads(Sender(), "server")
    return [downloads.message_to(info) for info in INFOS], calls


@pytest.mark.parametrize(
    ("read", "calls"),
    [
        (lambda c: None, 1),
        (lambda c: c.rank, 3),
        (lambda c: (c.rank, c.cluster), 6),
        # one field decides whether another one is read
        (lambda c: (c.rank, c.architecture if c.rank == 1 else ""), 4),
        (lambda c: c.example_count, 12),
        (lambda c: c.id, 12),
        (lambda c: c.title, 12),
        (lambda c: c.title if c.rank == 2 else c.rank, 2 + 4),
    ],
    ids=["nothing", "rank", "two", "condition", "examples", "id", "title", "title of some"],
)
def test_a_message_is_what_each_client_alone_is_sent(read: Any, calls: int) -> None:
    actual, made = messages(read)
    assert actual == [("server", read(info)) for info in INFOS]
    assert len(made) == calls


def test_at_most_so_many_messages_are_kept() -> None:
    class Sender(FedAvg):
        def download(self, server: Any, client: Any) -> Any:
            return [client.example_count]

    downloads = Downloads(Sender(), "server")
    for i in range(2 * MAX_MESSAGES):
        assert downloads.message_to(ClientInfo(i, i, "a")) == [i]
    assert sum(map(len, downloads._known.values())) == MAX_MESSAGES
