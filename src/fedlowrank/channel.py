"""What lies between method and wire: the weight of messages, and the loss of replies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import tree
from .key import Key


@dataclass(frozen=True)
class Traffic:
    """What messages weigh.

    Attributes:
        bytes: of the encoded messages.
        parameters: floating-point elements in them, as the papers count.
    """

    bytes: int = 0
    parameters: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(self.bytes + other.bytes, self.parameters + other.parameters)


class Scales:
    """Weighs messages one after another; one that comes again at once, as where all are sent the same, is weighed once."""

    def __init__(self) -> None:
        # the message is kept beside its weight, for only of those that live are no two identities equal
        self._last: tuple[Any, Traffic] = None, Traffic()

    def weigh(self, message: Any) -> Traffic:
        """Measured weight of a message; None is no message at all.

        Args:
            message: a tree, as a method's ``download`` and ``local_update`` return it.
        """
        if message is None:
            return Traffic()
        if message is not self._last[0]:
            self._last = message, Traffic(tree.encoded_size(message), tree.numel(message))
        return self._last[1]


def lost_replies(clients: list[int], rate: float, key: Key) -> set[int]:
    """The clients whose reply gets lost on its way, each with probability ``rate``."""
    if rate == 0:
        return set()
    draws = torch.rand(len(clients), generator=key.generator())
    return {c for c, u in zip(clients, draws.tolist(), strict=True) if u < rate}
