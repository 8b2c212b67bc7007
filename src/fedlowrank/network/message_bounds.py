"""Limits the bytes of a message that are read into memory while Flower fetches it piece by piece."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from flwr.app.message.array import Array
from flwr.app.message.arraychunk import ArrayChunk
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_type_from_object_content,
    iterate_object_tree,
)

CHUNK_BYTES = 5 << 20
"""Largest number of bytes of an array that Flower sends in one piece."""

EXTRA_PIECES = 16
"""Number of pieces that a message may have in addition to those of its array."""

FRAME_BYTES = 1 << 16
"""Number of bytes that a message may have in addition to its header and its payload."""

MAX_RECORD_BYTES = 4 << 20
"""Largest number of bytes in all pieces without array data. In memory, Flower's number records take many times as much."""


class FetchBound:
    """Compares the fetched bytes of a message with a limit.

    Args:
        max_bytes: largest number of bytes of header and payload.
        hint: name of the setting of the limit, for the reason.

    Attributes:
        problem: the reason why the message is refused; empty if it is not.
    """

    def __init__(self, max_bytes: int, hint: str = "network.limits.max_bytes") -> None:
        self.max_bytes, self.hint = max_bytes + FRAME_BYTES, hint
        self.problem = ""
        self._read_bytes = self._record_bytes = self._chunk_count = 0

    @property
    def pieces(self) -> int:
        """Largest number of pieces of the message."""
        return self.max_bytes // CHUNK_BYTES + EXTRA_PIECES

    def expect(self, piece_count: int) -> None:
        """Compare the message's number of pieces with the limit."""
        if piece_count > self.pieces:
            self._exceed(f"{piece_count} pieces")

    def add(self, content: bytes) -> None:
        """Count a fetched piece."""
        self._read_bytes += len(content)
        try:
            if get_object_type_from_object_content(content) != ArrayChunk.__qualname__:
                self._record_bytes += len(content)
            self._chunk_count += count_array_chunks(content)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self.problem = self.problem or f"a piece of it cannot be read: {error!r}"[:300]
        # an array may name one piece many times
        if (
            max(self._read_bytes, CHUNK_BYTES * (self._chunk_count - 1)) > self.max_bytes
            or self._record_bytes > MAX_RECORD_BYTES
        ):
            self._exceed("more bytes")

    def _exceed(self, excess: str) -> None:
        self.problem = (
            self.problem or f"it has {excess}, too many: {self.max_bytes} bytes are taken ({self.hint})"
        )


class BoundedClient:
    """Flower's client of the SuperLink, with a limit beyond which it stops reading a reply.

    The number of pieces is compared with the limit before a reply is read. During reading, its bytes and
    the repetitions of pieces in its array are compared. The guard of the SuperLink limits each single piece.

    Args:
        client: client of a Flower grid.
        limit: function that maps a message's identifier to the largest size of its reply in bytes.

    Attributes:
        refused: reasons why replies were refused, by the identifier of the message.
    """

    def __init__(self, client: Any, limit: Callable[[str], int]) -> None:
        self._client, self._limit = client, limit
        self._lock = threading.Lock()
        self._owners: dict[str, set[str]] = {}
        self._bounds: dict[str, FetchBound] = {}
        self._counted: set[str] = set()
        self._names: dict[str, str] = {}
        self.refused: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        """Delegate all other attributes to the client."""
        return getattr(self._client, name)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802 - Flower's name
        """Fetch the replies without their content, and refuse those with too many pieces."""
        reply = self._client.PullMessages(request)
        self._owners, self._bounds, self._counted = {}, {}, set()
        for message, tree in zip(reply.messages_list, reply.message_object_trees, strict=True):
            message_id = message.metadata.reply_to_message_id
            self._names[message_id] = message.metadata.message_id
            piece_ids = [piece.object_id for piece in iterate_object_tree(tree)]
            for piece in piece_ids:
                # replies may share pieces, such as the form of the data at registration
                self._owners.setdefault(piece, set()).add(message_id)
            bound = self._bounds[message_id] = FetchBound(self._limit(message_id))
            bound.expect(len(piece_ids))
            self._record_refusal(message_id)
        return reply

    def PullObject(self, request: Any) -> Any:  # noqa: N802 - Flower's name
        """Fetch a piece, unless all replies to which it belongs are too large."""
        owners = self._owners.get(request.object_id, set())
        if self._is_refused(owners):
            return PullObjectResponse(object_found=False)
        reply = self._client.PullObject(request)
        with self._lock:
            # a piece that several replies share is fetched once for each of them
            if reply.object_content and request.object_id not in self._counted:
                self._counted.add(request.object_id)
                for message_id in owners:
                    self._bounds[message_id].add(reply.object_content)
                    self._record_refusal(message_id)
        return PullObjectResponse(object_found=False) if self._is_refused(owners) else reply

    def take_refused(self, message_id: str) -> tuple[str, str]:
        """Identifier of the refused reply to a message, and the reason; each is returned only once."""
        return self._names.pop(message_id), self.refused.pop(message_id)

    def _is_refused(self, owners: set[str]) -> bool:
        return bool(owners) and owners <= self.refused.keys()

    def _record_refusal(self, message_id: str) -> None:
        if self._bounds[message_id].problem:
            self.refused.setdefault(message_id, self._bounds[message_id].problem)


def count_array_chunks(content: bytes) -> int:
    """Count the pieces of an array, which may be repeated; 0 if the content is not an array."""
    if not content or get_object_type_from_object_content(content) != Array.__qualname__:
        return 0
    return len(json.loads(get_object_body(content, Array)).get("arraychunk_ids", ()))
