"""Chooses an engine by a rule from the models, the clients and the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from ..core.contract.method import AnyMethod, ClientInfo, Task
from ..core.contract.training_request import Trainer
from ..data.federation import Federation
from ..training.cohorts.cohort_view import Cohort
from ..training.flops import forward_flops
from .engine import ClientJob, ClientResult, Engine
from .processes import Processes, can_fork, cores
from .sequential import Sequential
from .vectorized import Vectorized

SMALL = 150_000
"""Trained parameters up to which batching clients gains more on a CPU than a second core does."""

MEDIUM = 1_000_000
"""Trained parameters up to which batching clients gains on one core; above, arithmetic dominates."""

HEAVY = 2e9
"""Floating-point operations of a round from which further processes are worth their start and messages."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


def choose_engine(
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
    several = device == "cpu" and cores() > 1 and clients > 1 and can_fork()
    parallel = several and _operations(method, federation, clients) >= HEAVY
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
    return Sequential, f"one {device}" if device != "cpu" else "little work" if several else "one core"


def _operations(method: AnyMethod, federation: Federation, clients: int) -> float:
    """Floating-point operations of a round's training, roughly: three forward passes for each example."""
    models = federation.architectures
    each = {name: forward_flops(model) for name, model in models.items()}
    passes = method.local_passes().values()
    total = 0.0
    for info in federation.infos:
        # a step may take the remaining examples of an epoch, but no more than there are
        seen = sum(min(p.batch_size, info.examples) * p.steps_over(info.examples) for p in passes)
        total += 3 * each[info.architecture] * seen
    return total * clients / len(federation.infos)


@dataclass
class Auto(Engine):
    """The engine that :func:`choose_engine` names when a run begins.

    A run that goes on keeps its bits: a machine with other cores, on which another engine would be chosen, does not
    exchange the vectorized one for others.

    Attributes:
        chosen: the engine, once it is known.
        reason: why; nothing once the log says it.
    """

    name: ClassVar[str] = "auto"
    chosen: Engine | None = None
    reason: str = ""

    @property
    def has_cohorts(self) -> bool:
        """See the base class."""
        return self.chosen is not None and self.chosen.has_cohorts

    def choose_for_run(self, method: AnyMethod, federation: Federation, clients: int, earlier: str) -> str:
        """See the base class."""
        kind, reason = choose_engine(method, federation, clients, self.micro_batch)
        if earlier and (earlier == Vectorized.name) != (kind is Vectorized):
            kind, reason = Vectorized if earlier == Vectorized.name else Sequential, "as the run began"
        self.chosen, self.reason = kind(self.ledger, self.micro_batch), reason
        return kind.name

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Generator[ClientResult, None, None]:
        """See the base class."""
        if self.chosen is None:
            self.choose_for_run(method, federation, len(jobs), "")
        assert self.chosen is not None
        if self.reason:
            # only where clients train: a run may also be opened to be read
            logger.info("engine auto: %s (%s)", self.chosen.name, self.reason)
            self.reason = ""
        yield from self.chosen.run(method, federation, task, round, jobs)

    def each(self, work: Callable[[T], Any], items: Sequence[T]) -> list[Any]:
        """See the base class."""
        return super().each(work, items) if self.chosen is None else self.chosen.each(work, items)

    def map_clients(
        self,
        method: AnyMethod,
        federation: Federation,
        round: int,
        clients: Sequence[tuple[ClientInfo, Any]],
        alone: Callable[[int, Trainer], T],
        together: Callable[[Cohort], list[T]],
    ) -> list[T]:
        """See the base class."""
        if self.chosen is None:
            return super().map_clients(method, federation, round, clients, alone, together)
        return self.chosen.map_clients(method, federation, round, clients, alone, together)

    def close(self) -> None:
        """See the base class."""
        if self.chosen is not None:
            self.chosen.close()
