"""Communication volume of a round, and replies that are lost on their way."""

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
        bytes: of the encoded messages.
        parameters: floating-point elements in them, as the papers count.
    """

    bytes: int = 0
    parameters: int = 0

    def __add__(self, other: PayloadSize) -> PayloadSize:
        """Size of both."""
        return PayloadSize(self.bytes + other.bytes, self.parameters + other.parameters)


class Volume:
    """Sizes of the messages to or from the clients of a round, by client."""

    def __init__(self) -> None:
        # the message is kept beside its size: identities are distinct only among objects that live
        self._last: tuple[Any, PayloadSize] = None, PayloadSize()
        self._sizes: dict[int, PayloadSize] = {}

    def add(self, client_id: int, message: Any, kind: Any = None) -> None:
        """Measure a message. The same object again, as where all clients are sent the same, is measured once.

        Args:
            client_id: identifier.
            message: a tree; None is no message and takes nothing.
            kind: an object that messages of one form share, of which one is measured.
        """
        if message is None:
            return
        kind = message if kind is None else kind
        if kind is not self._last[0]:
            self._last = kind, PayloadSize(tree.encoded_size(message), tree.numel(message))
        self._sizes[client_id] = self._last[1]

    def of(self, client_id: int) -> PayloadSize:
        """Size of the message to or from a client; nothing if there was none."""
        return self._sizes.get(client_id, PayloadSize())

    @property
    def total(self) -> PayloadSize:
        """Size of all messages together."""
        return sum(self._sizes.values(), PayloadSize())


def draw_lost_replies(client_ids: list[int], rate: float, key: Key) -> set[int]:
    """The clients whose reply is lost, each with probability ``rate``."""
    if rate == 0:
        return set()
    draws = torch.rand(len(client_ids), generator=key.generator())
    return {c for c, u in zip(client_ids, draws.tolist(), strict=True) if u < rate}
