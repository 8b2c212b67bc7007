"""Limits the size of replies, and removes unwanted replies from Flower's database.

The guard of the SuperLink (:mod:`.access`) enforces the limits, and hands out no reply with a missing piece.
Without a guard, as in an app that was submitted by hand, nothing is limited before it is stored.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.superlink.grid.http_grid import HttpGrid

from .deploy import guard


class Replies:
    """The replies to the messages of a grid, before they are fetched.

    Args:
        grid: grid of the server's half.
        client: client of the grid, for calls to the SuperLink.
    """

    def __init__(self, grid: HttpGrid, client: Any) -> None:
        self._grid, self._client = grid, client
        self._is_guarded = guard.TOKEN_VARIABLE in os.environ

    def limit(self, limits: Mapping[int, int]) -> None:
        """Limit the bytes of the replies to the next messages, by node."""
        self._ask(limits=limits)

    def take_refused(self) -> dict[str, str]:
        """Return the reasons why replies were refused, by message, and remove these replies; each is returned once."""
        refusals: dict[str, tuple[str, str]] = self._ask().get("refused", {})
        for name, _ in refusals.values():
            self.remove(name)
        return {message_id: reason for message_id, (_, reason) in refusals.items()}

    def close(self, message_ids: Collection[str]) -> None:
        """Refuse further replies to these messages, and remove the replies that have arrived."""
        if message_ids:
            for name in self._ask(message_ids=message_ids).get("dropped", ()):
                self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a reply from Flower's database."""
        if name and self._grid._run is not None:
            self._client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(
                    node=self._grid.node, run_id=self._grid._run.run_id, message_object_id=name
                )
            )

    def _ask(
        self, limits: Mapping[int, int] | None = None, message_ids: Collection[str] = ()
    ) -> dict[str, Any]:
        if not self._is_guarded:
            return {}

        def post() -> Any:
            answer = self._client._client.post(f"{self._client._base_url}{guard.REPLIES_PATH}", json=request)
            answer.raise_for_status()
            return answer

        request = {
            "limits": {str(node): max_bytes for node, max_bytes in (limits or {}).items()},
            "close": list(message_ids),
        }
        reply: dict[str, Any] = self._client._retry_invoker.invoke(post).json()
        return reply
