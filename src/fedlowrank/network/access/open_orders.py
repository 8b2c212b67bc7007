"""The open instructions of the server: what each node may fetch and reply, and how many bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.runtime_pb2 import PushAppMessagesRequest, PushAppMessagesResponse

from ..message_bounds import CHUNK_BYTES, EXTRA_PIECES, FRAME_BYTES

REMEMBERED_SECONDS = 600.0
"""Seconds for which an instruction is remembered after it has expired."""

TOO_LARGE_PREFIX = "it has"
"""Prefix of the reasons for refusing a reply that is too large."""


@dataclass
class OpenOrder:
    """A message of the server to a node, and the reply that the node has announced.

    Attributes:
        node: Flower's number of the node.
        limit: largest size of the reply in bytes; None for no limit.
        expires: time at which the message expires, in seconds since 1970.
        pieces: identifiers of the message's objects, which the node may fetch.
        is_closed: whether the server accepts no reply any more.
        reply: identifier of the reply, or "".
        announced: identifiers of the reply's objects.
        missing: identifiers of the announced objects that have not arrived.
        sizes: sizes in bytes of the objects that were sent, by identifier.
        refusal_reason: the reason why the reply is refused, or "".
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
    refusal_reason: str = ""


class OpenOrders:
    """The instructions that have not expired. They are not stored, since a run ends with the process of its server."""

    def __init__(self) -> None:
        self._open: dict[str, OpenOrder] = {}
        self._limits: dict[int, int] = {}
        self._unsent: set[str] = set()

    def set_limits(self, limits: Mapping[int, int]) -> None:
        """Limit the replies to the next instructions, in bytes, by node."""
        self._limits |= limits

    def add(self, request: PushAppMessagesRequest) -> None:
        """Record the messages that the server's half sends."""
        current_time = time.time()
        self._open = {
            name: order
            for name, order in self._open.items()
            if order.expires + REMEMBERED_SECONDS > current_time
        }
        for message, tree in zip(request.messages_list, request.message_object_trees, strict=False):
            metadata = message.metadata
            limit = self._limits.get(metadata.dst_node_id)
            expiry_time = metadata.created_at + metadata.ttl
            self._open[metadata.message_id] = OpenOrder(
                metadata.dst_node_id, limit, expiry_time, frozenset(_list_pieces(tree))
            )

    def note_unsent(self, response: PushAppMessagesResponse) -> None:
        """Record the objects that the server's half will send now; it sends the next message after the last of them."""
        self._unsent = set(response.objects_to_push)

    def note_sent(self, object_id: str) -> None:
        """Record that the server's half has sent an object."""
        self._unsent.discard(object_id)

    def close(self, names: Iterable[str]) -> list[str]:
        """Accept no more replies to these instructions; returns the replies that were announced."""
        orders = [self._open[name] for name in names if name in self._open]
        for order in orders:
            order.is_closed = True
        return [order.reply for order in orders if order.reply]

    def take_refused(self) -> dict[str, tuple[str, str]]:
        """Identifier and reason of every refused reply, by instruction; each is returned once."""
        orders = {
            name: order for name, order in self._open.items() if order.refusal_reason and not order.is_closed
        }
        self.close(orders)
        return {name: (order.reply, order.refusal_reason) for name, order in orders.items()}

    def is_incomplete(self, name: str) -> bool:
        """Whether pieces of the reply to an instruction are missing; Flower would wait for them for minutes."""
        order = self._open.get(name)
        return order is not None and bool(order.missing or order.refusal_reason)

    def may_fetch(self, node_id: int, object_id: str) -> bool:
        """Whether an object belongs to an instruction to a node."""
        return any(object_id in order.pieces for order in self._open.values() if order.node == node_id)

    def may_delete(self, node_id: int, name: str) -> bool:
        """Whether an instruction to a node is fully sent; if it were deleted earlier, the server's half would fail."""
        order = self._open.get(name)
        return order is not None and order.node == node_id and not order.pieces & self._unsent

    def find_reply_fault(self, node_id: int, request: PushMessagesRequest) -> str | None:
        """Check a reply that a node announces: return why it is refused, or record it and return None."""
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            return f"it announced {len(request.messages_list)} messages in one call"
        metadata, tree = request.messages_list[0].metadata, request.message_object_trees[0]
        if metadata.src_node_id != node_id:
            return "it spoke for another node"
        if metadata.dst_node_id != SUPERLINK_NODE_ID:
            return "it wrote to another node"
        if not metadata.reply_to_message_id:
            return "it gave an order"
        order = self._open.get(metadata.reply_to_message_id)
        if order is None or order.node != node_id:
            return "its reply answers nothing that it was asked, or comes too late"
        if order.is_closed:
            return "its reply comes too late"
        if order.reply not in ("", metadata.message_id):
            return "it replied twice, and differently"
        object_ids = _list_pieces(tree)
        if tree.object_id != metadata.message_id:
            return "the objects of its reply are those of another message"
        if (
            order.limit is not None
            and len(object_ids) > (max_bytes := order.limit + FRAME_BYTES) // CHUNK_BYTES + EXTRA_PIECES
        ):
            order.refusal_reason = _describe_excess(f"{len(object_ids)} pieces", max_bytes)
            return order.refusal_reason
        order.reply, order.announced = metadata.message_id, frozenset(object_ids)
        order.missing |= order.announced - order.sizes.keys()
        return None

    def note_missing(self, request: PushMessagesRequest, response: PushMessagesResponse) -> None:
        """Record the objects of a reply that Flower lacks; it has the others from other replies."""
        order = self._open[request.messages_list[0].metadata.reply_to_message_id]
        order.missing = set(response.objects_to_push)

    def find_piece_fault(self, node_id: int, request: PushObjectRequest) -> str | None:
        """Return why an object that a node sends is refused, or None."""
        object_id, size = request.object_id, len(request.object_content)
        orders = [
            order for order in self._open.values() if order.node == node_id and object_id in order.announced
        ]
        if not orders or not request.session_id:
            return "it sent an object that belongs to none of its replies"
        if all(order.is_closed for order in orders):
            return "its reply comes too late"
        for order in orders:
            # an object that is sent twice is stored once
            order.sizes[object_id] = size
            if order.limit is not None and sum(order.sizes.values()) > (
                max_bytes := order.limit + FRAME_BYTES
            ):
                order.refusal_reason = _describe_excess("more bytes", max_bytes)
        return next((order.refusal_reason for order in orders if order.refusal_reason), None)

    def note_arrival(self, node_id: int, object_id: str) -> None:
        """Record that an object is stored."""
        for order in self._open.values():
            if order.node == node_id:
                order.missing.discard(object_id)


def _list_pieces(tree: ObjectTree) -> list[str]:
    return [tree.object_id, *(object_id for child in tree.children for object_id in _list_pieces(child))]


def _describe_excess(excess: str, max_bytes: int) -> str:
    return f"{TOO_LARGE_PREFIX} {excess}, too many: {max_bytes} bytes are taken (network.limits.max_bytes)"
