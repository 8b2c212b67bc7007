"""Chooses an engine by a rule from the models, the clients and the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from ..core.method import Task
from ..data.federation import Federation
from .base import AnyMethod, ClientJob, ClientResult, Engine
from .processes import Processes, can_fork, cores
from .sequential import Sequential
from .vectorized import Vectorized

SMALL = 150_000
"""Trained parameters up to which batching clients gains more on a CPU than a second core does."""

MEDIUM = 1_000_000
"""Trained parameters up to which batching clients gains on one core; above, arithmetic dominates."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


def choose(
    method: AnyMethod, federation: Federation, clients: int, micro_batch: int | None
) -> tuple[type[Engine], str]:
    """The engine for a federation, and the reason.

    Args:
        method: one of the user's own may hold code that cannot be batched.
        federation: its models and its device decide.
        clients: that train in a round.
        micro_batch: examples of which a gradient is taken at once, or None for whole batches.
    """
    models = federation.architectures.values()
    device = federation.clients[0].train.y.device.type
    if not all(model.is_standard for model in models):
        return Sequential, "a model has layers of its own or hooks"
    ours = not federation.loss.is_own and type(method).__module__.startswith("fedlowrank.")
    dense = all(p.ndim <= 2 for model in models for p in model.initial.values())
    parallel = device == "cpu" and cores() > 1 and clients > 1 and can_fork()
    most = SMALL if parallel else MEDIUM
    small = all(model.parameters <= most for model in models)
    # clients are batched by architecture: with many architectures there are few clients in a batch
    many = clients >= 4 * len(models)
    if ours and many and micro_batch is None and (device != "cpu" or (dense and small)):
        return (
            Vectorized,
            "small dense models, many clients" if device == "cpu" else f"one {device} for all clients",
        )
    if parallel:
        return Processes, f"{cores()} cores"
    return Sequential, "one core" if device == "cpu" else f"one {device}"


@dataclass
class Auto(Engine):
    """The engine that :func:`choose` names when the first round begins.

    Attributes:
        chosen: the engine, once the first round has begun.
    """

    name: ClassVar[str] = "auto"
    chosen: Engine | None = None

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Generator[ClientResult, None, None]:
        """See the base class."""
        if self.chosen is None:
            kind, reason = choose(method, federation, len(jobs), self.micro_batch)
            logger.info("engine auto: %s (%s)", kind.name, reason)
            self.chosen = kind(self.ledger, self.micro_batch)
        yield from self.chosen.run(method, federation, task, round, jobs)

    def each(self, work: Callable[[T], Any], items: Sequence[T]) -> list[Any]:
        """See the base class."""
        return super().each(work, items) if self.chosen is None else self.chosen.each(work, items)

    def close(self) -> None:
        """See the base class."""
        if self.chosen is not None:
            self.chosen.close()
