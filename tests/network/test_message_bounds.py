"""A reply that is too large is not read into memory: by the server's half."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Array, Metadata
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.superlink.grid.http_grid import HttpGrid

from fedlowrank.network.flower import GridTransport, to_records
from fedlowrank.network.transport import NodeMessage, Response


@dataclass
class SuperLink:
    """Holds a reply to the message ``asked``, and counts the bytes that are fetched of it."""

    header: str
    payload: bytes
    asked: str = "asked"
    fetched: int = 0
    replies: list[Any] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        about = Metadata(
            run_id=1, message_id="", src_node_id=7, dst_node_id=1, message_type="train.order", group_id="", ttl=60.0,
            reply_to_message_id=self.asked, created_at=0.0,
        )  # fmt: skip
        reply = make_message(metadata=about, content=to_records(self.header, self.payload))
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            self.objects = {i: o.deflate() for i, o in get_all_nested_objects(reply).items()}
            self.tree = get_object_tree(reply)
            self.reply = message_to_proto(remove_content_from_message(reply))

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:  # noqa: N802
        del request
        return PullAppMessagesResponse(messages_list=[self.reply], message_object_trees=[self.tree])

    def PullObject(self, request: Any) -> PullObjectResponse:  # noqa: N802
        content = self.objects[request.object_id]
        self.fetched += len(content)
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        del request


def received(link: SuperLink, most: int) -> Response:
    grid = HttpGrid(token="none")
    grid._client, grid._run = link, SimpleNamespace(run_id=1)  # type: ignore[assignment]
    transport = GridTransport(grid)
    transport._open = {"asked": NodeMessage(7, "order", "{}", b"", most)}
    (actual,) = transport.receive()
    assert transport.receive() == [] or not transport._open
    return actual


@pytest.mark.full
def test_a_reply_within_its_limit_is_read() -> None:
    # of which Flower sends each different piece once
    for payload in (random.Random(0).randbytes(12 << 20), bytes(12 << 20), b""):
        link = SuperLink("words", payload)
        actual = received(link, len(payload) + 10)
        assert (actual.header, actual.payload, actual.too_large, actual.problem) == ("words", payload, "", "")


def test_replies_that_share_pieces_are_read() -> None:
    """Clients that register send the same form of data: Flower stores it once, and fetches it for every reply."""
    links = [SuperLink("words", b"the form of the data", f"asked-{i}") for i in range(5)]
    whole = links[0]
    whole.objects = {i: content for link in links for i, content in link.objects.items()}
    assert len(whole.objects) < sum(len(link.objects) for link in links)
    actual = PullAppMessagesResponse(
        messages_list=[link.reply for link in links], message_object_trees=[link.tree for link in links]
    )
    whole.PullMessages = lambda request: actual  # type: ignore[method-assign, assignment]
    grid = HttpGrid(token="none")
    grid._client, grid._run = whole, SimpleNamespace(run_id=1)  # type: ignore[assignment]
    transport = GridTransport(grid)
    transport._open = {
        link.asked: NodeMessage(7 + k, "registration", "{}", b"", 2 << 20) for k, link in enumerate(links)
    }
    assert [(d.header, d.too_large) for d in transport.receive()] == [("words", "")] * 5


def test_a_reply_of_too_many_bytes_is_not_read_to_its_end() -> None:
    link = SuperLink("words", random.Random(0).randbytes(70 << 20))
    actual = received(link, 30 << 20)
    assert (actual.header, actual.payload, actual.problem) == ("", b"", "")
    assert "it has more bytes, too many: 31522816 bytes are taken" in actual.too_large
    # a piece has 5 MiB, and a few are fetched at once
    assert link.fetched < 60 << 20


@pytest.mark.full
def test_a_piece_that_is_repeated_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    link = SuperLink("words", bytes(100 << 20))
    # it crosses as one piece of 5 MiB
    assert sum(map(len, link.objects.values())) < 6 << 20
    monkeypatch.setattr(Array, "inflate", lambda *_, **__: pytest.fail("the array was put together"))
    actual = received(link, 50 << 20)
    assert "it has more bytes, too many: 52494336 bytes are taken" in actual.too_large


def test_nothing_is_read_of_a_reply_of_too_many_pieces() -> None:
    link = SuperLink("words", bytes(1 << 10))
    piece = link.tree.children[0]
    for _ in range(500):
        link.tree.children.append(piece)
    actual = received(link, 1 << 20)
    assert "pieces, too many: 1114112 bytes are taken" in actual.too_large
    assert link.fetched == 0


def test_an_array_that_cannot_be_read_is_refused() -> None:
    link = SuperLink("words", b"body")
    broken = next(i for i, content in link.objects.items() if b"arraychunk_ids" in content)
    link.objects[broken] = (
        link.objects[broken].replace(b"arraychunk_ids", b"arraychunk_ids{")[:-9] + b"{{{{{{{{{"
    )
    assert "a piece of it cannot be read: JSONDecodeError" in received(link, 1 << 20).too_large
