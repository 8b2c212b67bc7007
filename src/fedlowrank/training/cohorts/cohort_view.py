"""A method's view of a cohort: its info and its randomness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.contract import ClientInfo
from ...core.contract.training_request import Trainer
from ...core.key import Key
from ..client_tensors.client_tensor import NoRuleError, to_client_tensor
from ..client_tensors.control_flow import require_agreement, stack_numbers, unwrap_client_tensor


@dataclass(frozen=True)
class Cohort:
    """Arguments of a function that is called once for clients whose trees have the same form.

    Attributes:
        positions: indices of the clients among all clients for which the function is called.
        value: trees of the clients as one tree of client tensors.
        info: info of the clients.
        key: keys of the clients.
        trainer: trainer that executes the functions of the view for all clients.
    """

    positions: Sequence[int]
    value: Any
    info: CohortInfo
    key: CohortKey
    trainer: Trainer


class CohortInfo:
    """:class:`ClientInfo` of a cohort: its attributes are those that all clients share, except ``example_count``.

    An attribute in which the clients differ divides the cohort.

    Args:
        infos: info of each client.

    Attributes:
        infos: the argument ``infos``.
        example_count: number of examples of each client, a float64 tensor ``[K]``.
    """

    def __init__(self, infos: Sequence[ClientInfo]) -> None:
        self.infos = infos
        self.example_count = stack_numbers([i.example_count for i in infos])

    def __eq__(self, other: object) -> bool:
        return require_agreement([info == other for info in self.infos])

    def __hash__(self) -> int:
        return hash(require_agreement(self.infos))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return require_agreement([getattr(info, name) for info in self.infos])


class CohortKey:
    """The keys of all clients. Each client draws from its own key, so it draws the same values as alone.

    Args:
        keys: key of each client.
    """

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = keys

    def __truediv__(self, name: Any) -> CohortKey:
        return CohortKey([key / name for key in self._keys])

    def draw(self, f: Callable[[torch.Generator, int], Tensor], count: Any) -> Tensor:
        """See :meth:`fedlowrank.core.key.Key.draw`; rows beyond a client's own number are zero."""
        counts = (
            [int(n) for n in unwrap_client_tensor(count).tolist()]
            if isinstance(count, Tensor)
            else [count] * len(self._keys)
        )
        draws = [f(key.generator(), n) for key, n in zip(self._keys, counts, strict=True)]
        return to_client_tensor(torch.nn.utils.rnn.pad_sequence(draws, batch_first=True))

    def generator(self) -> torch.Generator:
        """Refused: a generator belongs to one client."""
        raise NoRuleError("a generator of one client; Key.draw draws for all")

    def numpy(self) -> Any:
        """Refused: a generator belongs to one client."""
        raise NoRuleError("a generator of one client; Key.draw draws for all")

    def seed(self) -> int:
        """Refused: a seed belongs to one client."""
        raise NoRuleError("the seed of one client")
