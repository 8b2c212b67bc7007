"""The open instructions of the server: what each node may fetch, what it may reply, and how many bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.runtime_pb2 import PushAppMessagesRequest, PushAppMessagesResponse

from ..intake import CHUNK, FRAME, PIECES

LATE = 600.0
"""Seconds for which an instruction is remembered after it has expired."""

TOO_LARGE = "it has"
"""How the reasons begin for which a reply is too large."""


@dataclass
class OpenOrder:
    """A message of the server to a node, and the reply that the node has announced.

    Attributes:
        node: Flower's number of the node.
        limit: bytes that its reply may have; None for no limit.
        expires: when it expires, in seconds since 1970.
        pieces: its objects, which its node may fetch.
        is_closed: whether the server takes no reply any more.
        reply: identifier of the reply, or "".
        announced: objects of the reply.
        missing: those of them that have not arrived.
        sizes: bytes of those that were sent.
        refused: why the reply is refused, or "".
    """

    node: int
    limit: int | None
    expires: float
    pieces: frozenset[str]
    is_closed: bool = False
    reply: str = ""
    announced: frozenset[str] = frozenset()
    missing: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    refused: str = ""


class OpenOrders:
    """The instructions that have not expired. Nothing of it is stored: a run ends with the process of its server."""

    def __init__(self) -> None:
        self._open: dict[str, OpenOrder] = {}
        self._limits: dict[int, int] = {}
        self._unsent: set[str] = set()

    def set_limits(self, limits: Mapping[int, int]) -> None:
        """Limit the replies to the next instructions, in bytes, by node."""
        self._limits |= limits

    def add(self, request: PushAppMessagesRequest) -> None:
        """Note what the server's half sends."""
        now = time.time()
        self._open = {name: one for name, one in self._open.items() if one.expires + LATE > now}
        for message, tree in zip(request.messages_list, request.message_object_trees, strict=False):
            about = message.metadata
            limit = self._limits.get(about.dst_node_id)
            end = about.created_at + about.ttl
            self._open[about.message_id] = OpenOrder(about.dst_node_id, limit, end, frozenset(_pieces(tree)))

    def sending(self, response: PushAppMessagesResponse) -> None:
        """Note the objects that the server's half will send now; it sends the next message after the last of them."""
        self._unsent = set(response.objects_to_push)

    def sent(self, piece: str) -> None:
        """Note that the server's half has sent an object."""
        self._unsent.discard(piece)

    def close(self, names: Iterable[str]) -> list[str]:
        """Take no more of the replies to these instructions; returns the replies that were announced."""
        known = [self._open[name] for name in names if name in self._open]
        for one in known:
            one.is_closed = True
        return [one.reply for one in known if one.reply]

    def refused(self) -> dict[str, tuple[str, str]]:
        """Identifier and reason of every refused reply, by the instruction; each is returned once."""
        found = {name: one for name, one in self._open.items() if one.refused and not one.is_closed}
        self.close(found)
        return {name: (one.reply, one.refused) for name, one in found.items()}

    def is_incomplete(self, name: str) -> bool:
        """Whether pieces of the reply to an instruction are missing; Flower would wait for them for minutes."""
        one = self._open.get(name)
        return one is not None and bool(one.missing or one.refused)

    def may_fetch(self, node: int, piece: str) -> bool:
        """Whether an object belongs to an instruction to a node."""
        return any(piece in one.pieces for one in self._open.values() if one.node == node)

    def may_delete(self, node: int, name: str) -> bool:
        """Whether an instruction is to a node, and there: the server's half fails if it is deleted before."""
        one = self._open.get(name)
        return one is not None and one.node == node and not one.pieces & self._unsent

    def wrong_reply(self, node: int, request: PushMessagesRequest) -> str | None:
        """Why a reply that a node announces is refused, or None: it is noted then."""
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            return f"it announced {len(request.messages_list)} messages in one call"
        about, tree = request.messages_list[0].metadata, request.message_object_trees[0]
        if about.src_node_id != node:
            return "it spoke for another node"
        if about.dst_node_id != SUPERLINK_NODE_ID:
            return "it wrote to another node"
        if not about.reply_to_message_id:
            return "it gave an order"
        one = self._open.get(about.reply_to_message_id)
        if one is None or one.node != node:
            return "its reply answers nothing that it was asked, or comes too late"
        if one.is_closed:
            return "its reply comes too late"
        if one.reply not in ("", about.message_id):
            return "it replied twice, and differently"
        pieces = _pieces(tree)
        if tree.object_id != about.message_id:
            return "the objects of its reply are those of another message"
        if one.limit is not None and len(pieces) > (most := one.limit + FRAME) // CHUNK + PIECES:
            one.refused = _too_large(f"{len(pieces)} pieces", most)
            return one.refused
        one.reply, one.announced = about.message_id, frozenset(pieces)
        one.missing |= one.announced - one.sizes.keys()
        return None

    def wanted(self, request: PushMessagesRequest, response: PushMessagesResponse) -> None:
        """Note which objects of a reply Flower lacks; the others it has from other replies."""
        one = self._open[request.messages_list[0].metadata.reply_to_message_id]
        one.missing = set(response.objects_to_push)

    def wrong_piece(self, node: int, request: PushObjectRequest) -> str | None:
        """Why an object that a node sends is refused, or None."""
        piece, size = request.object_id, len(request.object_content)
        theirs = [one for one in self._open.values() if one.node == node and piece in one.announced]
        if not theirs or not request.session_id:
            return "it sent an object that belongs to none of its replies"
        if all(one.is_closed for one in theirs):
            return "its reply comes too late"
        for one in theirs:
            # one that is sent twice is stored once
            one.sizes[piece] = size
            if one.limit is not None and sum(one.sizes.values()) > (most := one.limit + FRAME):
                one.refused = _too_large("more bytes", most)
        return next((one.refused for one in theirs if one.refused), None)

    def arrived(self, node: int, piece: str) -> None:
        """Note that an object is stored."""
        for one in self._open.values():
            if one.node == node:
                one.missing.discard(piece)


def _pieces(tree: ObjectTree) -> list[str]:
    return [tree.object_id, *(piece for child in tree.children for piece in _pieces(child))]


def _too_large(what: str, most: int) -> str:
    return f"{TOO_LARGE} {what}, too many: {most} bytes are taken (network.limits.max_bytes)"
