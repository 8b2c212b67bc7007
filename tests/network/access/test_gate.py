"""What a registered client and a stranger can call; each attack is shown to work on Flower alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
pytest.importorskip("cryptography")
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import FlowerError
from flwr.superlink.routers.fleet import node_auth

from fedlowrank.network.access import gate
from fedlowrank.network.access.identity import allow_clocks
from fedlowrank.network.deploy import guard
from fedlowrank.network.deploy.keys import revoke_client
from tests.network.access.flower_fleet import SERVER, TOKEN, Fleet, call, packed


def reply_of(fleet: Fleet, client: int, order: Any, header: str = "{}", payload: bytes = b"") -> Any:
    return fleet.message(fleet.nodes[client], SERVER, order.metadata.message_id, header, payload)


def send(fleet: Fleet, client: int, reply: Any) -> list[int]:
    """Announce a reply and send its objects; the statuses."""
    status, actual = fleet.announce(client, reply)
    if status != 200:
        return [status]
    objects = packed(reply)[2]
    return [
        status,
        *(fleet.push(client, n, objects[n], actual.session_id)[0] for n in actual.objects_to_push),
    ]


@pytest.mark.parametrize("guarded", [False, True])
def test_a_client_gives_no_orders_to_another(tmp_path: Path, guarded: bool) -> None:
    fleet = Fleet(tmp_path, guarded)
    forged = fleet.message(SERVER, fleet.nodes[1])
    status, _ = fleet.announce(0, forged)
    actual = [m.metadata.message_id for m in fleet.pull(1)]
    if guarded:
        assert (status, actual) == (403, [])
        (line,) = fleet.denied()
        assert (line["client"], line["call"], line["why"]) == (
            0,
            "push-messages",
            "it spoke for another node",
        )
        assert str(fleet.nodes[0]) not in tmp_path.joinpath("audit.jsonl").read_text()
    else:
        assert (status, actual) == (200, [forged.metadata.message_id])


@pytest.mark.parametrize("guarded", [False, True])
def test_a_client_does_not_reply_for_another(tmp_path: Path, guarded: bool) -> None:
    fleet = Fleet(tmp_path, guarded)
    order = fleet.instruct(1)
    forged = reply_of(fleet, 1, order)
    assert fleet.announce(0, forged)[0] == (403 if guarded else 200)
    # the one who was asked still can reply, which Flower alone refuses by now
    reply = reply_of(fleet, 1, order, "honest")
    assert fleet.announce(1, reply)[0] == 200
    assert fleet.state.num_message_res() == 1
    if guarded:
        assert set(send(fleet, 1, reply)) == {200}
        assert fleet.replies(order.metadata.message_id) == [order.metadata.message_id]


def test_every_push_is_one_reply_to_an_order_of_the_server(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    order, other = fleet.instruct(0), fleet.instruct(1)
    mine, asked = fleet.nodes[0], order.metadata.message_id
    good = reply_of(fleet, 0, order)
    wrong = {
        "it announced 2 messages in one call": [good, good],
        "it announced 0 messages in one call": [],
        "it wrote to another node": [fleet.message(mine, fleet.nodes[1], asked)],
        "it gave an order": [fleet.message(mine, SERVER)],
        "its reply answers nothing that it was asked, or comes too late": [
            fleet.message(mine, SERVER, other.metadata.message_id)
        ],
        "it spoke for another node": [fleet.message(fleet.nodes[1], SERVER, other.metadata.message_id)],
    }
    for why, messages in wrong.items():
        assert fleet.announce(0, *messages) == (403, why.encode())
    assert fleet.announce(0, good, node=fleet.nodes[1]) == (403, b"it spoke for another node")
    assert {line["why"] for line in fleet.denied()} == set(wrong)
    assert fleet.state.num_message_res() == 0
    assert set(send(fleet, 0, good)) == {200}
    assert fleet.announce(0, reply_of(fleet, 0, order, "two")) == (403, b"it replied twice, and differently")
    # one whose answer was lost on the way announces again
    assert fleet.announce(0, good)[0] == 200


@pytest.mark.parametrize("guarded", [False, True])
def test_a_client_neither_reads_nor_deletes_what_was_sent_to_another(tmp_path: Path, guarded: bool) -> None:
    fleet = Fleet(tmp_path, guarded)
    order = fleet.instruct(1, "for client 1 alone", b"personal")
    name, run = order.metadata.message_id, fleet.run

    def read(client: int) -> Any:
        request = PullObjectRequest(node=Node(node_id=fleet.nodes[client]), run_id=run, object_id=name)
        status, actual = fleet.client(client, "pull-object", request, PullObjectResponse)
        return (status, actual.object_found) if status == 200 else status  # type: ignore[union-attr]

    def delete(client: int) -> int:
        request = ConfirmMessageReceivedRequest(
            node=Node(node_id=fleet.nodes[client]), run_id=run, message_object_id=name
        )
        return fleet.client(client, "confirm-message-received", request)[0]

    assert read(0) == (403 if guarded else (200, True))
    assert delete(0) == (403 if guarded else 200)
    assert read(1) == (200, guarded)
    if guarded:
        assert (delete(1), read(1)) == (200, (200, False))


# -- before the body is read


def begun(
    fleet: Fleet, headers: dict[str, str], path: str = "push-object", declared: int = 0
) -> tuple[int, int]:
    """Status of a call whose last byte is withheld, and how many bytes of it were read; 0 while it waits."""
    sent: list[Any] = []
    read = 0

    async def receive() -> Any:
        nonlocal read
        if read < 1 << 20:
            read += 1 << 16
            return {"type": "http.request", "body": bytes(1 << 16), "more_body": True}
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    length = [(b"content-length", str(declared).encode())] if declared else []
    scope = {
        "type": "http", "method": "POST", "path": f"/v1/fleet/{path}", "client": ("192.0.2.7", 5),
        "raw_path": b"", "query_string": b"", "scheme": "https", "root_path": "", "state": {},
        "headers": [*((n.encode(), v.encode()) for n, v in headers.items()), *length],
    }  # fmt: skip

    async def run() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(fleet.app(scope, receive, send), 0.2)

    asyncio.run(run())
    starts = [m for m in sent if m["type"] == "http.response.start"]
    assert all((b"connection", b"close") in m["headers"] for m in starts)
    return next((m["status"] for m in starts), 0), read


def test_nothing_is_read_of_the_call_of_a_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(tmp_path)
    own, stranger = fleet.key(0), ec.generate_private_key(ec.SECP384R1())
    kind = {"content-type": "application/protobuf"}
    stolen = fleet.signed(own) | {"flwr-signature": fleet.signed(stranger)["flwr-signature"]}
    naive = fleet.signed(own) | {"flwr-timestamp": "2026-01-01T00:00:00"}
    for headers in (kind, fleet.signed(stranger), stolen, naive, kind | {"flwr-public-key": "?"}):
        assert begun(fleet, headers) == (401, 0)
        assert begun(fleet, headers, "activate-node") == (412, 0)
    # Flower alone reads, and waits
    fleet.app = fleet.flower
    assert begun(fleet, kind)[1] >= 1 << 20
    fleet.app = guard.guard_app(fleet.gate, TOKEN)
    # who has a key may send as much as a piece has, and not for ever
    assert begun(fleet, fleet.signed(own), declared=7 << 20) == (413, 0)
    assert begun(fleet, fleet.signed(own), "pull-messages", declared=2 << 20) == (413, 0)
    assert begun(fleet, fleet.signed(own), "pull-messages")[0] in (0, 413)
    assert begun(fleet, fleet.signed(own), "no-such-call") == (404, 0)
    assert begun(fleet, fleet.signed(own), "register-node") == (404, 0)
    assert begun(fleet, fleet.signed(own)) == (0, 1 << 20)
    monkeypatch.setattr(gate, "MAX_PAUSE_SECONDS", 0.05)
    assert begun(fleet, fleet.signed(own)) == (408, 1 << 20)


def test_a_body_that_never_pauses_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_BODY_SECONDS", 0.05)

    async def receive() -> Any:
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x", "more_body": True}

    with pytest.raises(gate.Refusal, match="too slowly"):
        asyncio.run(gate.read_body({}, receive, 1 << 20))
    # a slow machine may need longer for four pieces
    monkeypatch.setattr(gate, "MAX_BODY_SECONDS", 60.0)
    with pytest.raises(gate.Refusal, match="may have 3 bytes"):
        asyncio.run(gate.read_body({}, receive, 3))


# -- keys and clocks


@pytest.mark.parametrize("ahead", [-299, 0, 299])
def test_clocks_may_differ_by_five_minutes(
    tmp_path: Path, ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SYSTEM_TIME_TOLERANCE", 5), ("TIMESTAMP_TOLERANCE", 300)):
        monkeypatch.setattr(node_auth, name, value)
    fleet = Fleet(tmp_path)
    body = PullMessagesRequest(node=Node(node_id=fleet.nodes[0])).SerializeToString()

    def pull() -> int:
        return call(fleet.app, "/v1/fleet/pull-messages", body, fleet.signed(fleet.key(0), ahead))[0]

    # Flower alone takes a clock that is behind, but hardly one that is ahead
    assert pull() == (401 if ahead > 0 else 200)
    allow_clocks()
    assert pull() == 200


@pytest.mark.parametrize(("ahead", "words"), [(301, "301 s ahead of"), (-310, "310 s behind")])
def test_a_client_whose_clock_is_further_off_is_told_so(tmp_path: Path, ahead: float, words: str) -> None:
    fleet = Fleet(tmp_path)
    status, body = call(fleet.app, "/v1/fleet/activate-node", b"", fleet.signed(fleet.key(1), ahead))
    error = FlowerError.from_json(body.decode())
    assert (status, error is not None and words in str(error.public_details)) == (412, True)
    # who has no key learns no time
    stranger = fleet.signed(ec.generate_private_key(ec.SECP384R1()), ahead)
    assert words.encode() not in call(fleet.app, "/v1/fleet/activate-node", b"", stranger)[1]


def test_a_key_is_refused_from_the_moment_it_is_revoked(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    request = PullMessagesRequest(node=Node(node_id=fleet.nodes[1]))
    assert fleet.client(1, "pull-messages", request)[0] == 200
    revoke_client(tmp_path / "keys", 1)
    status, why = fleet.client(1, "pull-messages", request)
    assert status == 401
    assert b"revoked" in why  # type: ignore[operator]
    assert fleet.client(0, "pull-messages", PullMessagesRequest(node=Node(node_id=fleet.nodes[0])))[0] == 200


# -- bytes


@pytest.mark.parametrize("guarded", [False, True])
def test_a_reply_takes_no_more_bytes_than_its_order_allows(tmp_path: Path, guarded: bool) -> None:
    fleet = Fleet(tmp_path, guarded)
    limit = 6 << 20
    if guarded:
        fleet.ask(limits={fleet.nodes[0]: limit, fleet.nodes[1]: limit})
    order, other = fleet.instruct(0), fleet.instruct(1)
    statuses = send(fleet, 0, reply_of(fleet, 0, order, payload=random.Random(0).randbytes(12 << 20)))
    stored = fleet.stored()
    if not guarded:
        assert set(statuses) == {200}
        assert stored > 12 << 20
        return
    assert 413 in statuses
    assert stored < limit + (64 << 10) + 10000
    # Flower would have the server wait for the missing pieces; the server is told at once, and once
    assert fleet.replies(order.metadata.message_id, other.metadata.message_id) == []
    ((asked, (name, why)),) = fleet.ask()["refused"].items()
    assert asked == order.metadata.message_id
    assert "it has more bytes, too many: 6356992 bytes are taken (network.limits.max_bytes)" in why
    assert fleet.ask()["refused"] == {}
    assert fleet.denied()[0]["client"] == 0
    confirm = ConfirmMessageReceivedRequest(
        node=Node(node_id=SERVER), run_id=fleet.run, message_object_id=name
    )
    fleet.server("confirm-message-received", confirm, ConfirmMessageReceivedResponse)
    assert fleet.stored() < 5000
    # an honest one is not touched by all this
    assert set(send(fleet, 1, reply_of(fleet, 1, other, payload=bytes(5 << 20)))) == {200}
    assert fleet.replies(other.metadata.message_id) == [other.metadata.message_id]


def test_a_reply_of_too_many_pieces_is_not_begun(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.ask(limits={fleet.nodes[0]: 1000})
    order = fleet.instruct(0)
    reply = reply_of(fleet, 0, order)
    request = PushMessagesRequest(node=Node(node_id=fleet.nodes[0]))
    proto, tree, _ = packed(reply)
    tree.children.extend([ObjectTree(object_id=f"{i:064x}") for i in range(30)])
    request.messages_list.append(proto)
    request.message_object_trees.append(tree)
    assert fleet.client(0, "push-messages", request)[0] == 413
    assert list(fleet.ask()["refused"]) == [order.metadata.message_id]


def test_a_reply_is_handed_out_when_it_is_whole(tmp_path: Path) -> None:
    """Else a client that announces a reply and sends nothing would keep the server waiting beyond its deadline."""
    fleet = Fleet(tmp_path)
    order, asked = (made := fleet.instruct(0)), made.metadata.message_id
    reply = reply_of(fleet, 0, order)
    objects = packed(reply)[2]
    _, actual = fleet.announce(0, reply)
    *first, last = actual.objects_to_push
    for name in first:
        assert fleet.push(0, name, objects[name], actual.session_id)[0] == 200
        assert fleet.replies(asked) == []
    # an object of nobody's reply, and one outside a session
    strange = fleet.push(0, "0" * 64, b"x", actual.session_id)
    assert strange == (403, b"it sent an object that belongs to none of its replies")
    assert fleet.push(0, last, objects[last], "")[0] == 403
    assert fleet.push(1, last, objects[last], actual.session_id)[0] == 403
    assert fleet.push(0, last, objects[last], actual.session_id)[0] == 200
    assert fleet.replies(asked) == [asked]


def test_what_the_server_waits_for_no_more_is_not_stored(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    orders = [fleet.instruct(client) for client in range(3)]
    names = tuple(order.metadata.message_id for order in orders)
    begun_reply, late = reply_of(fleet, 0, orders[0]), reply_of(fleet, 1, orders[1])
    objects = packed(begun_reply)[2]
    _, actual = fleet.announce(0, begun_reply)
    assert fleet.ask(close=names[:2])["dropped"] == [begun_reply.metadata.message_id]
    one = actual.objects_to_push[0]
    assert fleet.push(0, one, objects[one], actual.session_id) == (403, b"its reply comes too late")
    assert fleet.announce(1, late) == (403, b"its reply comes too late")
    assert set(send(fleet, 2, reply_of(fleet, 2, orders[2]))) == {200}


@pytest.mark.parametrize("guarded", [False, True])
def test_a_client_does_not_delete_what_is_on_its_way(tmp_path: Path, guarded: bool) -> None:
    """Flower fails in the server's half then, which ends the run for all."""
    fleet = Fleet(tmp_path, guarded)

    def delete(order: Any) -> int:
        name = order.metadata.message_id
        request = ConfirmMessageReceivedRequest(
            node=Node(node_id=fleet.nodes[0]), run_id=fleet.run, message_object_id=name
        )
        return fleet.client(0, "confirm-message-received", request)[0]

    actual: list[int] = []
    order = fleet.instruct(0, between=lambda order: actual.append(delete(order)))
    assert (actual[0], fleet.failed > 0) == ((403, False) if guarded else (200, True))
    assert delete(order) == 200
