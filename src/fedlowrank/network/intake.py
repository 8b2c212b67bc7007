"""Bounds what is read of a reply into memory, while Flower fetches it piece by piece."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from flwr.app.message.array import Array
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_type_from_object_content,
    iterate_object_tree,
)

CHUNK = 5 << 20
"""Bytes of an array that Flower sends in one piece."""

PIECES = 16
"""Pieces of a reply beside those of its array."""

FRAME = 1 << 16
"""Bytes of a reply beside its header and its payload."""


class Intake:
    """Flower's client of the SuperLink, except that it stops reading a reply that is too large.

    The number of pieces is compared with the limit before a reply is read. While it is read, its bytes are
    compared, and how often its array repeats a piece. The guard of the SuperLink limits a single piece.

    Args:
        client: of a Flower grid.
        limit: bytes that the reply to a message may have, by the message's identifier.

    Attributes:
        refused: why a reply was refused, by the identifier of the message.
    """

    def __init__(self, client: Any, limit: Callable[[str], int]) -> None:
        self._client, self._limit = client, limit
        self._lock = threading.Lock()
        self._owners: dict[str, set[str]] = {}
        self._read: dict[str, int] = {}
        self._repeated: dict[str, int] = {}
        self._counted: set[str] = set()
        self.refused: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        """Delegate everything else to the client."""
        return getattr(self._client, name)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802 - Flower's name
        """Fetch the replies without their content, and refuse those with too many pieces."""
        reply = self._client.PullMessages(request)
        self._owners, self._read, self._repeated, self._counted = {}, {}, {}, set()
        for message, tree in zip(reply.messages_list, reply.message_object_trees, strict=True):
            asked = message.metadata.reply_to_message_id
            pieces = [piece.object_id for piece in iterate_object_tree(tree)]
            for piece in pieces:
                # replies may have pieces in common, such as the form of the data at registration
                self._owners.setdefault(piece, set()).add(asked)
            self._compare(asked, pieces=len(pieces))
        return reply

    def PullObject(self, request: Any) -> Any:  # noqa: N802 - Flower's name
        """Fetch a piece, unless all replies that it belongs to are too large."""
        owners = self._owners.get(request.object_id, set())
        if self._is_refused(owners):
            return PullObjectResponse(object_found=False)
        reply = self._client.PullObject(request)
        size = len(reply.object_content)
        with self._lock:
            # a piece that several replies have in common is fetched once for each of them
            first = size > 0 and request.object_id not in self._counted
            if not first:
                return PullObjectResponse(object_found=False) if self._is_refused(owners) else reply
            self._counted.add(request.object_id)
            try:
                repeats = repeated(reply.object_content)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                repeats = 0
                self.refused |= dict.fromkeys(owners, f"a piece of it cannot be read: {error!r}"[:300])
            for asked in owners:
                self._read[asked] = self._read.get(asked, 0) + size
                self._repeated[asked] = self._repeated.get(asked, 0) + repeats
                self._compare(asked, size=max(self._read[asked], CHUNK * (self._repeated[asked] - 1)))
        return PullObjectResponse(object_found=False) if self._is_refused(owners) else reply

    def _is_refused(self, owners: set[str]) -> bool:
        return bool(owners) and owners <= self.refused.keys()

    def _compare(self, asked: str, size: int = 0, pieces: int = 0) -> None:
        most = self._limit(asked) + FRAME
        if size > most or pieces > most // CHUNK + PIECES:
            what = f"{pieces} pieces" if pieces else "more bytes"
            self.refused.setdefault(
                asked, f"it has {what}, too many: {most} bytes are taken (network.limits.max_bytes)"
            )


def repeated(content: bytes) -> int:
    """The number of pieces of an array, which may be repeated; 0 if the content is not an array."""
    if not content or get_object_type_from_object_content(content) != Array.__qualname__:
        return 0
    return len(json.loads(get_object_body(content, Array)).get("arraychunk_ids", ()))
