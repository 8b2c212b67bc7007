"""Communication volume of a round, and replies that are lost in transit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...core import tree
from ...core.key import Key


@dataclass(frozen=True)
class PayloadSize:
    """Size of messages.

    Attributes:
        bytes: size of the encoded messages in bytes.
        parameters: number of floating-point elements in the messages, as the papers count.
    """

    bytes: int = 0
    parameters: int = 0


NO_PAYLOAD = PayloadSize()
"""Size of no message."""


class Volume:
    """Sizes of the messages to or from the clients of a round, by client."""

    def __init__(self) -> None:
        # the message is kept beside its size, because identities are distinct only among living objects
        self._last: tuple[Any, PayloadSize] = None, NO_PAYLOAD
        self._sizes: dict[int, PayloadSize] = {}

    def add(self, client_id: int, message: Any, kind: Any = None) -> None:
        """Measure a message. An object that is sent to several clients in a row is measured once.

        Args:
            client_id: identifier of the client.
            message: tree that is sent; None is no message and has size 0.
            kind: object that messages of the same form share, so that only one of them is measured.
        """
        if message is None:
            return
        kind = message if kind is None else kind
        if kind is not self._last[0]:
            self._last = kind, PayloadSize(tree.encoded_size(message), tree.numel(message))
        self._sizes[client_id] = self._last[1]

    def of(self, client_id: int) -> PayloadSize:
        """Size of the message to or from a client; 0 if there was none."""
        return self._sizes.get(client_id, NO_PAYLOAD)

    @property
    def total(self) -> PayloadSize:
        """Total size of all messages."""
        sizes = self._sizes.values()
        return PayloadSize(sum(s.bytes for s in sizes), sum(s.parameters for s in sizes))


def draw_lost_replies(client_ids: list[int], rate: float, key: Key) -> set[int]:
    """Draw the clients whose reply is lost, each with probability ``rate``."""
    if rate == 0:
        return set()
    draws = torch.rand(len(client_ids), generator=key.generator())
    return {c for c, u in zip(client_ids, draws.tolist(), strict=True) if u < rate}
