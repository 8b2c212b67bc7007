"""What lies between method and wire: the weight of messages, and the loss of replies."""

from __future__ import annotations

from collections.abc import Iterable
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


def weigh(messages: Iterable[Any]) -> Traffic:
    """Measured weight of messages; None is no message at all.

    Args:
        messages: trees, as a method's ``download`` and ``local_update`` return them.
    """
    bytes_, parameters = 0, 0
    known: dict[int, tuple[Any, int, int]] = {}
    for message in messages:
        if message is None:
            continue
        if id(message) not in known:
            # kept with the message, for only of those that live are no two identities equal
            known[id(message)] = message, tree.encoded_size(message), tree.numel(message)
        bytes_ += known[id(message)][1]
        parameters += known[id(message)][2]
    return Traffic(bytes_, parameters)


def lost_replies(clients: list[int], rate: float, key: Key) -> set[int]:
    """The clients whose reply gets lost on its way, each with probability ``rate``."""
    if rate == 0:
        return set()
    draws = torch.rand(len(clients), generator=key.generator())
    return {c for c, u in zip(clients, draws.tolist(), strict=True) if u < rate}
