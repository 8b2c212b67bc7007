"""Chooses an engine by a rule from the models, the clients and the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ..core.contract import AnyMethod, ClientInfo, Task
from ..core.contract.training_request import Trainer
from ..data.federation import Federation
from ..training.cohorts.cohort_view import Cohort
from ..training.flops import forward_flops
from .engine import ClientJob, ClientResult, Engine, trains_by_user_code
from .processes import Processes, can_fork, cores
from .sequential import Sequential
from .vectorized import Vectorized

MAX_PARAMETERS_BESIDE_CORES = 150_000
"""Maximum number of trained parameters for which batching clients gains more on a CPU than a second core does."""

MAX_PARAMETERS_ON_ONE_CORE = 1_000_000
"""Maximum number of trained parameters for which batching clients gains on one core; above, arithmetic dominates."""

MIN_PARALLEL_FLOPS = 2e9
"""Minimum number of floating-point operations of a round for which further processes are worth their start and messages."""

MIN_CLIENTS_PER_MODEL = 4
"""Minimum number of clients of a round per architecture for which batching clients is worth it."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


def choose_engine(
    method: AnyMethod, federation: Federation, client_count: int, micro_batch: int | None
) -> tuple[type[Engine], str]:
    """Choose the engine for a federation.

    Args:
        method: method of the run; a method of the user's own may hold code that cannot be batched.
        federation: federation whose models and device decide.
        client_count: number of clients that train in a round.
        micro_batch: number of examples whose gradient is computed at once, or None for whole batches.

    Returns:
        The engine class, and the reason for a log message.
    """
    models = federation.architectures.values()
    device = federation.clients[0].train.y.device.type
    if not all(model.is_standard for model in models):
        return Sequential, "a model has layers of its own or hooks"
    # clients are batched by architecture, so with many architectures a batch holds few clients
    has_many_clients = client_count >= MIN_CLIENTS_PER_MODEL * len(models)
    can_batch = has_many_clients and micro_batch is None and not trains_by_user_code(method, federation)
    if device != "cpu":
        if can_batch:
            return Vectorized, f"one {device} for all clients"
        return Sequential, f"one {device}"
    can_use_cores = cores() > 1 and client_count > 1 and can_fork()
    is_worth_cores = can_use_cores and _count_flops(method, federation, client_count) >= MIN_PARALLEL_FLOPS
    max_parameters = MAX_PARAMETERS_BESIDE_CORES if is_worth_cores else MAX_PARAMETERS_ON_ONE_CORE
    are_models_small = all(model.parameter_count <= max_parameters for model in models)
    are_layers_dense = all(p.ndim <= 2 for model in models for p in model.initial.values())
    if can_batch and are_layers_dense and are_models_small:
        return Vectorized, "small dense models, enough clients to batch"
    if is_worth_cores:
        return Processes, f"{cores()} cores"
    return Sequential, "little work" if can_use_cores else "one core"


def _count_flops(method: AnyMethod, federation: Federation, client_count: int) -> float:
    """Estimate the floating-point operations of training in a round, as three forward passes for each example."""
    models = federation.architectures
    flops_of = {name: forward_flops(model) for name, model in models.items()}
    passes = method.local_passes().values()
    total = 0.0
    for info in federation.infos:
        # a step may take the rest of an epoch, but no more examples than there are
        example_count = sum(
            min(p.batch_size, info.example_count) * p.steps_over(info.example_count) for p in passes
        )
        total += 3 * flops_of[info.architecture] * example_count
    return total * client_count / len(federation.infos)


@dataclass
class Auto(Engine):
    """Delegates to the engine that :func:`choose_engine` names when a run begins.

    A resumed run computes the same bits on every machine. Therefore it never changes between the vectorized engine
    and the others, even if another engine would be chosen on the current machine.

    Attributes:
        chosen_engine: engine that was chosen; None before the choice.
        reason: reason for the choice; empty once it has been logged.
    """

    name: ClassVar[str] = "auto"
    chosen_engine: Engine | None = field(default=None, init=False)
    reason: str = field(default="", init=False)

    @property
    def has_cohorts(self) -> bool:
        """See the base class."""
        return self.chosen_engine is not None and self.chosen_engine.has_cohorts

    def choose_for_run(
        self, method: AnyMethod, federation: Federation, client_count: int, stored_name: str
    ) -> str:
        """See the base class."""
        engine_class, reason = choose_engine(method, federation, client_count, self.micro_batch)
        if stored_name and (stored_name == Vectorized.name) != (engine_class is Vectorized):
            engine_class, reason = (
                Vectorized if stored_name == Vectorized.name else Sequential,
                "as the run began",
            )
        self.chosen_engine, self.reason = engine_class(self.ledger, self.micro_batch), reason
        return engine_class.name

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Generator[ClientResult, None, None]:
        """See the base class."""
        if self.chosen_engine is None:
            self.choose_for_run(method, federation, len(jobs), "")
        assert self.chosen_engine is not None
        if self.reason:
            # logged only where clients train, because a run may also be opened for reading
            logger.info("engine auto: %s (%s)", self.chosen_engine.name, self.reason)
            self.reason = ""
        yield from self.chosen_engine.run(method, federation, task, round, jobs)

    def each(self, work: Callable[[T], Any], items: Sequence[T]) -> list[Any]:
        """See the base class."""
        return (
            super().each(work, items) if self.chosen_engine is None else self.chosen_engine.each(work, items)
        )

    def map_clients(
        self,
        method: AnyMethod,
        federation: Federation,
        round: int,
        clients: Sequence[tuple[ClientInfo, Any]],
        call_for_client: Callable[[int, Trainer], T],
        call_for_cohort: Callable[[Cohort], list[T]],
    ) -> list[T]:
        """See the base class."""
        if self.chosen_engine is None:
            return super().map_clients(method, federation, round, clients, call_for_client, call_for_cohort)
        return self.chosen_engine.map_clients(
            method, federation, round, clients, call_for_client, call_for_cohort
        )

    def close(self) -> None:
        """See the base class."""
        if self.chosen_engine is not None:
            self.chosen_engine.close()
