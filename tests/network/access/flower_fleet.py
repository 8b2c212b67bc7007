"""Flower's web application in this process, with registered clients, a run, and the gate before it."""

from __future__ import annotations

import asyncio
import datetime
import functools
import json
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message, Metadata
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import NOOP_FLWR_AID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
)
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.superlink.config_loader import get_federation_manager, get_objectstore_linkstate_factories
from flwr.superlink.main import create_app
from google.protobuf.message import Message as Protobuf

from fedlowrank.network.access.connections import Connections
from fedlowrank.network.access.gate import Gate
from fedlowrank.network.access.identity import Roster
from fedlowrank.network.deploy import guard
from fedlowrank.network.deploy.keys import ServerKeys, make_keys
from fedlowrank.network.flower import to_records

P = TypeVar("P", bound=Protobuf)
TOKEN = "secret"
SERVER = 1
"""Flower's number of the server as a node."""


def call(
    app: Any, path: str, body: bytes, headers: dict[str, str], most: int | None = None
) -> tuple[int, bytes]:
    """Status and content of the answer to a call; its body is sent in parts if ``most`` says so."""
    sent: list[Any] = []
    step = most or len(body) or 1
    parts = [body[i : i + step] for i in range(0, len(body), step)] or [b""]

    async def receive() -> Any:
        if not parts:
            return {"type": "http.disconnect"}
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "scheme": "https", "http_version": "1.1", "server": ("127.0.0.1", 8000),
        "client": ("192.0.2.7", 5), "headers": [*raw, (b"content-length", str(len(body)).encode())], "state": {},
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    status = next(int(m["status"]) for m in sent if m["type"] == "http.response.start")
    return status, b"".join(m.get("body", b"") for m in sent if m["type"] == "http.response.body")


@functools.cache
def web_application() -> Any:
    """Flower's web application, which takes half a second to make; a fleet gives it another database."""
    made = create_app()
    made.state.enable_supernode_auth = True
    return made


@dataclass
class Fleet:
    """A server with clients 0, 1, ... whose keys are in a folder.

    Attributes:
        folder: of the keys and the audit log.
        guarded: whether calls pass the guard, as with ``fedlowrank serve``; else they reach Flower itself.
        clients: how many.
        nodes: Flower's number of each client.
        failed: objects of the server that Flower did not store.
    """

    folder: Path
    guarded: bool = True
    clients: int = 3
    nodes: list[int] = field(default_factory=list)
    failed: int = 0

    def __post_init__(self) -> None:
        make_keys(self.folder / "keys", self.clients, [])
        keys = ServerKeys.read(self.folder / "keys" / "server")
        self.flower = web_application()
        manager = get_federation_manager(is_simulation=False)
        _, made = get_objectstore_linkstate_factories(FLWR_IN_MEMORY_DB_NAME, manager)
        self.flower.state.linkstate_factory = self.flower.state.runtime_state_factory = made
        self.state: Any = made.state()
        known = {}
        for client in range(self.clients):
            public = public_key_to_bytes(self.key(client).public_key())
            self.nodes.append(self.state.create_node(NOOP_FLWR_AID, "", public, 0))
            self.state.activate_node(self.nodes[-1], 30)
            known[keys.clients[client].read_text().strip()] = self.nodes[-1]
        (self.folder / "nodes.json").write_text(json.dumps(known))
        self.run = self.state.create_run(
            "a/b", "1", "0" * 64, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        (run,) = self.state.get_run_info(run_ids=[self.run])
        self.task_token = self.state.claim_task(run.primary_task_id)
        self.state.activate_task(run.primary_task_id)
        roster = Roster(self.folder / "keys" / "server" / "clients", self.folder / "nodes.json")
        self.audit = self.folder / "audit.jsonl"
        self.gate = Gate(self.flower, roster, Connections(), self.audit)
        self.app = guard.guard_app(self.gate, TOKEN) if self.guarded else self.flower

    def key(self, client: int) -> ec.EllipticCurvePrivateKey:
        """Private key of a client."""
        made = load_ssh_private_key(
            (self.folder / "keys" / f"client-{client}" / "client.key").read_bytes(), None
        )
        assert isinstance(made, ec.EllipticCurvePrivateKey)
        return made

    def signed(self, key: ec.EllipticCurvePrivateKey, ahead: float = 0.0) -> dict[str, str]:
        """Headers of a call, signed by a clock that is so many seconds ahead."""
        now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead)
        signature = key.sign(now.isoformat().encode(), ec.ECDSA(hashes.SHA256()))
        return {
            "content-type": "application/protobuf",
            "flwr-public-key": b64encode(public_key_to_bytes(key.public_key())).decode(),
            "flwr-timestamp": now.isoformat(),
            "flwr-signature": b64encode(signature).decode(),
        }

    def client(
        self, client: int, path: str, request: Protobuf, kind: type[P] | None = None
    ) -> tuple[int, P | bytes]:
        """Call as a client; the answer is decoded if it is good and of a kind."""
        headers = self.signed(self.key(client))
        status, body = call(self.app, f"/v1/fleet/{path}", request.SerializeToString(), headers)
        return status, kind.FromString(body) if kind is not None and status == 200 else body

    def server(self, path: str, request: Protobuf, kind: type[P]) -> P:
        """Call as the server's half."""
        headers = {
            "content-type": "application/protobuf",
            guard.TOKEN_HEADER: TOKEN,
            "flwr-task-token": self.task_token,
        }
        status, body = call(self.app, f"/v1/runtime/{path}", request.SerializeToString(), headers)
        assert status == 200, body
        return kind.FromString(body)

    def ask(self, limits: dict[int, int] | None = None, close: tuple[str, ...] = ()) -> dict[str, Any]:
        """Limit replies, or close instructions, as the server's half does."""
        body = json.dumps({"limits": {str(n): m for n, m in (limits or {}).items()}, "close": close}).encode()
        status, actual = call(self.app, guard.REPLIES_PATH, body, {guard.TOKEN_HEADER: TOKEN})
        assert status == 200
        return dict(json.loads(actual))

    def instruct(
        self,
        client: int,
        header: str = "{}",
        payload: bytes = b"",
        between: Callable[[Any], object] | None = None,
    ) -> Message:
        """Send an order to a client as the server's half does; something may happen before its objects follow."""
        message = self.message(SERVER, self.nodes[client], header=header, payload=payload)
        proto, tree, objects = packed(message)
        pushed = self.server(
            "push-messages",
            PushAppMessagesRequest(messages_list=[proto], message_object_trees=[tree]),
            PushAppMessagesResponse,
        )
        if between is not None:
            between(message)
        for name in pushed.objects_to_push:
            actual = self.server(
                "push-object",
                PushObjectRequest(
                    node=Node(node_id=SERVER), run_id=self.run, object_id=name, object_content=objects[name],
                    session_id=pushed.session_id,
                ),
                PushObjectResponse,
            )  # fmt: skip
            self.failed += not actual.stored
        return message

    def message(
        self, source: int, target: int, reply_to: str = "", header: str = "{}", payload: bytes = b""
    ) -> Message:
        """A message with its identifier."""
        about = Metadata(
            run_id=self.run, message_id="", src_node_id=source, dst_node_id=target, message_type="train.order",
            group_id="", ttl=500.0 if reply_to else 600.0, reply_to_message_id=reply_to, created_at=time.time(),
        )  # fmt: skip
        message = make_message(metadata=about, content=to_records(header, payload))
        message.metadata.__dict__["_message_id"] = message.object_id
        return message

    def announce(self, client: int, *messages: Message, node: int | None = None) -> tuple[int, Any]:
        """Announce messages as a client."""
        made = [packed(message) for message in messages]
        request = PushMessagesRequest(
            node=Node(node_id=self.nodes[client] if node is None else node),
            messages_list=[proto for proto, _, _ in made],
            message_object_trees=[tree for _, tree, _ in made],
        )
        return self.client(client, "push-messages", request, PushMessagesResponse)

    def push(
        self, client: int, name: str, content: bytes, session: str, run: int | None = None
    ) -> tuple[int, Any]:
        """Send an object as a client."""
        request = PushObjectRequest(
            node=Node(node_id=self.nodes[client]), run_id=self.run, object_id=name, object_content=content,
            session_id=session,
        )  # fmt: skip
        return self.client(client, "push-object", request, PushObjectResponse)

    def pull(self, client: int) -> list[Any]:
        """The instructions that wait for a client."""
        _, actual = self.client(
            client,
            "pull-messages",
            PullMessagesRequest(node=Node(node_id=self.nodes[client])),
            PullMessagesResponse,
        )
        return list(actual.messages_list)  # type: ignore[union-attr]

    def replies(self, *asked: str) -> list[str]:
        """Orders to which the server's half finds a reply."""
        actual = self.server(
            "pull-messages", PullAppMessagesRequest(message_ids=asked), PullAppMessagesResponse
        )
        return [message.metadata.reply_to_message_id for message in actual.messages_list]

    def stored(self) -> int:
        """Bytes of the objects that Flower stores."""
        return sum(len(one.content) for one in self.state.object_store.store.values())

    def denied(self) -> list[dict[str, Any]]:
        """The refused calls of the audit log."""
        lines = self.audit.read_text().splitlines() if self.audit.exists() else []
        return [line for line in map(json.loads, lines) if line["event"] == "denied"]


def packed(message: Message) -> tuple[Any, Any, dict[str, bytes]]:
    """A message without content, the tree of its objects, and these."""
    with no_object_id_recompute():
        objects = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
        return message_to_proto(remove_content_from_message(message)), get_object_tree(message), objects
