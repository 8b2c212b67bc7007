"""Checks the calls of clients: the signature before the body is read, and that a client acts only for itself."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Hashable, MutableMapping
from pathlib import Path
from typing import Any, TypeVar

from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    PushMessagesResponse,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    PullObjectRequest,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.run_pb2 import GetRunRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest, PushAppMessagesResponse
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf

from ...core.io.atomic_files import append_event
from ..message_bounds import CHUNK_BYTES
from .connections import MAX_KNOWN_ADDRESSES, Connections
from .identity import Caller, RefusedCallerError, Roster, identify_caller
from .open_orders import TOO_LARGE_PREFIX, OpenOrders

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[AsgiMessage, Receive, Send], Awaitable[None]]
P = TypeVar("P", bound=Protobuf)

CLIENT_PATHS = "/v1/fleet/"
"""Prefix of the paths of calls by clients."""

SERVER_PATHS = "/v1/runtime/"
"""Prefix of the paths of calls by the server's half."""

MAX_BODY_BYTES = 1 << 20
"""Largest size in bytes of a call by a client."""

MAX_PIECE_BODY_BYTES = CHUNK_BYTES + (64 << 10)
"""Largest size in bytes of a call that sends a piece of a reply."""

MAX_PAUSE_SECONDS = 20.0
"""Seconds for which a caller may pause in the middle of a call."""

MAX_BODY_SECONDS = 300.0
"""Seconds that reading the body of a call may take: 18 KiB/s for the largest body."""

LOG_INTERVAL_SECONDS = 60.0
"""Seconds during which a refusal that was logged is not logged again."""

_UNREGISTERED_CALLS: dict[str, type[Protobuf]] = {
    "register-node": RegisterNodeFleetRequest,
    "unregister-node": UnregisterNodeFleetRequest,
}
_CALLS: dict[str, type[Protobuf]] = {
    "activate-node": ActivateNodeRequest,
    "deactivate-node": DeactivateNodeRequest,
    "send-node-heartbeat": SendNodeHeartbeatRequest,
    "pull-messages": PullMessagesRequest,
    "push-messages": PushMessagesRequest,
    "get-run": GetRunRequest,
    "get-fab": GetFabRequest,
    "push-object": PushObjectRequest,
    "pull-object": PullObjectRequest,
    "confirm-message-received": ConfirmMessageReceivedRequest,
}
_ACTIVATION_FAILED_CODE = 2004
"""Flower's code of the error whose details its SuperNode prints before it ends."""


class Refusal(Exception):  # noqa: N818 - no error of the program
    """A refusal of a call, which is answered but not passed on.

    Args:
        status: HTTP status of the answer.
        reason: text for the caller.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Gate:
    """Answers for Flower's web application, and passes on the calls that clients may make.

    Args:
        app: Flower's web application (ASGI).
        roster: registered clients; None on a server without keys, which accepts every signature and leaves it to Flower
            to check that a node acts for itself.
        connections: open connections; None if they are not counted.
        audit: path of the audit log, or None.
    """

    def __init__(
        self,
        app: App,
        roster: Roster | None,
        connections: Connections | None = None,
        audit: Path | None = None,
    ) -> None:
        self.app, self.roster, self.connections, self.audit = app, roster, connections, audit
        self.instructions = OpenOrders()
        self._logged: dict[str, float] = {}

    async def answer_client(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """Answer a call whose path is one of the clients'."""
        name = str(scope["path"]).removeprefix(CLIENT_PATHS)
        try:
            caller = self._identify(scope, name)
            request_types = _CALLS if self.roster is not None else _CALLS | _UNREGISTERED_CALLS
            if scope["method"] != "POST" or name not in request_types:
                raise Refusal(404, "clients call nothing of that name")
            body = await read_body(
                scope, receive, MAX_PIECE_BODY_BYTES if name == "push-object" else MAX_BODY_BYTES
            )
            request = _parse(request_types[name], body)
            if (reason := self._find_objection(caller, request)) is not None:
                if self.log(f"{caller} was refused: {reason} ({name})"):
                    append_event(self.audit, "denied", client=caller.client, call=name, why=reason)
                # after a 403, Flower's SuperNode assumes that its run is over, and passes on no text
                raise Refusal(413 if reason.startswith(TOO_LARGE_PREFIX) else 403, reason)
        except Refusal as refusal:
            await send_answer(send, refusal.status, str(refusal))
            return
        # answers to other calls may be large
        is_kept = isinstance(request, (PushMessagesRequest, PushObjectRequest))
        reply = await self._forward(scope, body, receive, send, is_kept)
        if reply is None:
            return
        if isinstance(request, PushMessagesRequest):
            self.instructions.note_missing(request, _parse(PushMessagesResponse, reply))
        if isinstance(request, PushObjectRequest) and _parse(PushObjectResponse, reply).stored:
            self.instructions.note_arrival(request.node.node_id, request.object_id)

    async def answer_server(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """Pass on a call of the server's own processes, and record which instructions they send."""
        path = str(scope["path"])
        if path == f"{SERVER_PATHS}push-messages":
            body = await read_body(scope, receive)
            self.instructions.add(_parse(PushAppMessagesRequest, body))
            reply = await self._forward(scope, body, receive, send)
            if reply is not None:
                self.instructions.note_unsent(_parse(PushAppMessagesResponse, reply))
        elif path == f"{SERVER_PATHS}push-object":
            body = await read_body(scope, receive)
            if await self._forward(scope, body, receive, send) is not None:
                self.instructions.note_sent(_parse(PushObjectRequest, body).object_id)
        elif path == f"{SERVER_PATHS}pull-messages":
            request = _parse(PullAppMessagesRequest, await read_body(scope, receive))
            # Flower hands out a reply as soon as it is announced, and the server would wait for its pieces
            complete_names = [
                name for name in request.message_ids if not self.instructions.is_incomplete(name)
            ]
            del request.message_ids[:]
            request.message_ids.extend(complete_names)
            await self._forward(scope, request.SerializeToString(), receive, send, is_kept=False)
        else:
            await self.app(scope, receive, send)

    async def answer_replies(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """Set limits and close instructions as the server asks; answer with the refused replies."""
        command = json.loads(await read_body(scope, receive))
        self.instructions.set_limits(
            {int(node_id): int(max_bytes) for node_id, max_bytes in command["limits"].items()}
        )
        dropped_replies = self.instructions.close(command["close"])
        reply = {"refused": self.instructions.take_refused(), "dropped": dropped_replies}
        await send_answer(send, 200, json.dumps(reply))

    def _identify(self, scope: AsgiMessage, name: str) -> Caller:
        """Identify the caller; raises Refusal."""
        try:
            caller = identify_caller(scope.get("headers", ()), self.roster)
        except RefusedCallerError as error:
            caller_name = "a caller without a key" if error.client is None else f"client {error.client}"
            self.log(f"{caller_name} was refused: {error}")
            if name == "activate-node":
                error_body = {
                    "code": _ACTIVATION_FAILED_CODE,
                    "detail": "Failed to activate SuperNode.",
                    "extra": str(error),
                }
                raise Refusal(412, json.dumps(error_body)) from error
            # this ends Flower's SuperNode; the next one gets the reason when it activates its node
            raise Refusal(401, str(error)) from error
        if not self.prove(scope, caller.key):
            raise Refusal(503, "this client has too many connections")
        return caller

    def prove(self, scope: AsgiMessage, owner: Hashable) -> bool:
        """Record the owner of the connection of a call; False if the owner has too many connections."""
        return self.connections is None or self.connections.prove(scope.get("client"), owner)

    def _find_objection(self, caller: Caller, request: Any) -> str | None:
        """Return why a client may not make a call, or None if it may."""
        if isinstance(request, (ActivateNodeRequest, RegisterNodeFleetRequest)):
            return None if request.public_key == caller.key else "it spoke for another node"
        node_id, orders = (
            int(request.node.node_id if hasattr(request, "node") else request.node_id),
            self.instructions,
        )
        # without keys, only Flower knows the owner of a node
        if caller.node not in (None, node_id):
            return "it spoke for another node"
        if isinstance(request, PushMessagesRequest):
            return orders.find_reply_fault(node_id, request)
        if isinstance(request, PushObjectRequest):
            return orders.find_piece_fault(node_id, request)
        if isinstance(request, PullObjectRequest) and not orders.may_fetch(node_id, request.object_id):
            return "it fetched what was not sent to it"
        if isinstance(request, ConfirmMessageReceivedRequest) and not orders.may_delete(
            node_id, request.message_object_id
        ):
            return "it deleted what was not sent to it, or not yet"
        return None

    def log(self, text: str, key: str = "") -> bool:
        """Log a refusal, at most once a minute for one key (by default the text); return whether it was logged."""
        current_time, key = time.monotonic(), key or text
        self._logged = {
            logged_key: log_time
            for logged_key, log_time in self._logged.items()
            if current_time - log_time < LOG_INTERVAL_SECONDS
        }
        if key in self._logged or len(self._logged) >= MAX_KNOWN_ADDRESSES:
            return False
        self._logged[key] = current_time
        print(text, flush=True)
        return True

    async def _forward(
        self, scope: AsgiMessage, body: bytes, receive: Receive, send: Send, is_kept: bool = True
    ) -> bytes | None:
        """Pass on a call whose body has been read; returns the answer if it is successful and ``is_kept``."""
        is_passed, status, answer_body = False, 0, bytearray()

        async def receive_body() -> AsgiMessage:
            nonlocal is_passed
            if is_passed:
                return await receive()
            is_passed = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send_and_keep(message: AsgiMessage) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif is_kept:
                answer_body.extend(message.get("body", b""))
            await send(message)

        await self.app(scope, receive_body, send_and_keep)
        return bytes(answer_body) if is_kept and status == 200 else None


async def read_body(scope: AsgiMessage, receive: Receive, max_bytes: int | None = None) -> bytes:
    """Read the body of a call.

    Args:
        scope: ASGI scope of the call.
        receive: function that receives the next part of the body.
        max_bytes: largest size of the body in bytes; None for a call of the server's own processes, whose duration is
            not limited either.

    Raises:
        Refusal: if the body is too large, too slow or incomplete.
    """
    lengths = [
        int(v) for n, v in scope.get("headers", ()) if bytes(n).lower() == b"content-length" and v.isdigit()
    ]
    if max_bytes is not None and max(lengths, default=0) > max_bytes:
        raise Refusal(413, f"this call may have {max_bytes} bytes")
    chunks, byte_count = [], 0
    try:
        async with asyncio.timeout(None if max_bytes is None else MAX_BODY_SECONDS):
            has_more = True
            while has_more:
                async with asyncio.timeout(None if max_bytes is None else MAX_PAUSE_SECONDS):
                    message = await receive()
                if message["type"] != "http.request":
                    raise Refusal(400, "the call was broken off")
                chunks.append(bytes(message.get("body", b"")))
                byte_count += len(chunks[-1])
                has_more = message.get("more_body", False)
                if max_bytes is not None and byte_count > max_bytes:
                    raise Refusal(413, f"this call may have {max_bytes} bytes")
    except TimeoutError:
        raise Refusal(408, "the call came too slowly") from None
    return b"".join(chunks)


def _parse(message_type: type[P], body: bytes) -> P:
    message: P = message_type()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Refusal(400, f"this is no {message_type.__name__}") from error
    return message


async def send_answer(send: Send, status: int, text: str) -> None:
    """Answer a call, and end its connection unless the status is a success."""
    body = text.encode()
    headers = [(b"content-length", str(len(body)).encode())]
    if body:
        headers.append((b"content-type", b"application/json" if text.startswith("{") else b"text/plain"))
    if status >= 400:
        # part of the call's body may be unread
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
