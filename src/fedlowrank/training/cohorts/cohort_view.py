"""What a method sees of a cohort: its info and its randomness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.contract.method import ClientInfo
from ...core.contract.training_request import Trainer
from ...core.key import Key
from ..stacked import UnsupportedError, stack
from .control_flow import require_agreement, stack_numbers, unwrap_stacked


@dataclass(frozen=True)
class Cohort:
    """Clients of one form, as a function sees them that is called once for all.

    Attributes:
        places: of the clients among those for whom the function is called.
        value: the trees of all, stacked.
        info: of all.
        key: of all.
        trainer: the verbs of a view, for all.
    """

    places: Sequence[int]
    value: Any
    info: CohortInfo
    key: CohortKey
    trainer: Trainer


class CohortInfo:
    """:class:`ClientInfo` of a cohort: the numbers of examples of all clients; else what all clients agree in.

    Args:
        infos: of the clients.

    Attributes:
        infos: as above.
        examples: of each client, float64 ``[K]``, which every method only computes with.
    """

    def __init__(self, infos: Sequence[ClientInfo]) -> None:
        self.infos = infos
        self.examples = stack_numbers([i.examples for i in infos])

    def __eq__(self, other: object) -> bool:
        return require_agreement([info == other for info in self.infos])

    def __hash__(self) -> int:
        return hash(require_agreement(self.infos))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return require_agreement([getattr(info, name) for info in self.infos])


class CohortKey:
    """The keys of all clients; a draw is made from each, so that it is what the client would draw alone.

    Args:
        keys: of the clients.
    """

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = keys

    def __truediv__(self, name: Any) -> CohortKey:
        return CohortKey([key / name for key in self._keys])

    def draw(self, f: Callable[[torch.Generator, int], Tensor], count: Any) -> Tensor:
        """See :meth:`fedlowrank.core.key.Key.draw`; rows beyond a client's own number are zero."""
        counts = (
            [int(n) for n in unwrap_stacked(count).tolist()]
            if isinstance(count, Tensor)
            else [count] * len(self._keys)
        )
        drawn = [f(key.generator(), n) for key, n in zip(self._keys, counts, strict=True)]
        return stack(torch.nn.utils.rnn.pad_sequence(drawn, batch_first=True))

    def generator(self) -> torch.Generator:
        """Refused: a generator belongs to one client."""
        raise UnsupportedError("a generator of one client; Key.draw draws for all")

    def numpy(self) -> Any:
        """Refused: a generator belongs to one client."""
        raise UnsupportedError("a generator of one client; Key.draw draws for all")

    def seed(self) -> int:
        """Refused: a seed belongs to one client."""
        raise UnsupportedError("the seed of one client")
