"""What an engine is: a way to map a method's ``local_update`` over the clients of a round."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ..core import tree
from ..core.contract.hook_results import check_pair
from ..core.contract.method import AnyMethod, ClientInfo, ClientView, Task
from ..core.contract.training_request import Trainer
from ..core.errors import NonFiniteError
from ..core.key import Key
from ..data.dataset import Examples
from ..data.federation import Federation
from ..models.statistics.client_buffers import collect_buffers, install_buffers
from ..training.cohorts.cohort_uploads import CohortUploads
from ..training.cohorts.cohort_view import Cohort
from ..training.flops import FlopLedger
from ..training.kept_optimizers import KeepingTrainer, split_optimizers
from ..training.local_data import LocalData
from ..training.trainer import LocalTrainer, Meter

T = TypeVar("T")


@dataclass(frozen=True)
class ClientJob:
    """One client's work in a round: its state, what it received, and who it is."""

    state: Any
    down: Any
    client: ClientInfo


@dataclass(frozen=True)
class ClientResult:
    """What a client made of its job.

    Attributes:
        state: the client's next state, to be committed once the server acknowledges the reply.
        upload: its reply.
        meter: what the work cost.
        error: why there is no reply, if training met a NaN.
        lost: why there is none otherwise, such as a client that cannot be reached.
        diverged: whether it is lost because a number of it is not finite, found where the client is elsewhere.
        refused: whether it is lost because the server refuses what the client sends, so that it counts as hostile.
        cohort: the uploads of all clients with which it trained, stacked; None where clients train one by one.
        place: of the client in it.
    """

    state: Any
    upload: Any
    meter: Meter
    error: NonFiniteError | None = None
    lost: str | None = None
    diverged: bool = False
    refused: bool = False
    cohort: CohortUploads | None = None
    place: int = 0


@dataclass
class Engine(ABC):
    """Runs the clients of one round, in the order given.

    Attributes:
        ledger: what steps cost, found once for all clients.
        micro_batch: examples of which a gradient is taken at once, or None for all of a batch.
    """

    name: ClassVar[str]
    ledger: FlopLedger = field(default_factory=FlopLedger, repr=False)
    micro_batch: int | None = None

    @property
    def has_cohorts(self) -> bool:
        """Whether :meth:`map_clients` calls functions for many clients at once."""
        return False

    @abstractmethod
    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Generator[ClientResult, None, None]:
        """Execute the jobs of one round."""

    def each(self, work: Callable[[T], Any], items: Sequence[T]) -> list[Any]:
        """Map a function over items; results are JSON values."""
        return [work(item) for item in items]

    def map_clients(
        self,
        method: AnyMethod,
        federation: Federation,
        round: int,
        clients: Sequence[tuple[ClientInfo, Any]],
        alone: Callable[[int, Trainer], T],
        together: Callable[[Cohort], list[T]],
    ) -> list[T]:
        """Call a pure function for clients, for many at once where the engine can.

        Args:
            method: whose passes trainers run.
            federation: the clients' data.
            round: counted from 0.
            clients: each with the trees that the function takes of it.
            alone: gives the result of the client at a place.
            together: gives the results of a cohort.

        Returns:
            The results in any order.
        """
        del together
        return [alone(k, self.trainer(method, federation, round, i)) for k, (i, _) in enumerate(clients)]

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Release processes and buffers; the engine can be used again."""

    def choose_for_run(self, method: AnyMethod, federation: Federation, clients: int, earlier: str) -> str:
        """Choose what a run needs to know to end with the same bits on another machine.

        Args:
            method: of the run.
            federation: of the run.
            clients: expected in a round.
            earlier: what this returned when the run began; nothing for a new run.

        Returns:
            What is stored with the run: nothing, or the name of the engine that was chosen.
        """
        del method, federation, clients, earlier
        return ""

    def training_examples(self, federation: Federation, client: int) -> Examples:
        """The training examples of a client."""
        return federation.clients[client].train

    def boundary(self, value: Any) -> Any:
        """A value that crosses between server and client, or is stored, as the other side sees it."""
        return tree.canonical(value)

    def local_update(
        self,
        method: AnyMethod,
        federation: Federation,
        task: Task,
        round: int,
        job: ClientJob,
        trainer: Trainer,
    ) -> tuple[Any, Any]:
        """Local training with the client's own buffers and optimizer states: its next state, and its upload."""
        stored, optimizers = split_optimizers(self.boundary(job.state))
        state, own_task = install_buffers(task, stored)
        keeping = KeepingTrainer(trainer, job.client, optimizers)
        view = client_view(federation, own_task, round, job.client, keeping)
        found = method.local_update(state, self.boundary(job.down), view)
        state, upload = check_pair(method, found)
        if keeping.has_failed:
            # the buffers of before: those of a pass that failed may hold a NaN
            _, own_task = install_buffers(task, stored)
        return self.boundary(keeping.collect(collect_buffers(own_task, state))), self.boundary(upload)

    def trainer(
        self, method: AnyMethod, federation: Federation, round: int, client: ClientInfo
    ) -> LocalTrainer:
        """Execution of training for one client alone."""
        key = client_key(federation, client.id, round)
        own = federation.clients[client.id]
        passes, by_length = method.local_passes(), federation.by_length
        augment, turns, loss = federation.augment, own.quarter_turns, federation.loss
        examples = self.training_examples(federation, client.id)
        data = LocalData(client, examples, passes, key, augment, turns, by_length, loss)
        models = federation.architectures
        mine, others = models[client.architecture], models.values()
        return LocalTrainer(
            mine,
            others,
            data,
            round,
            self.ledger,
            micro_batch=self.micro_batch,
            may_halve=not (method.couples_examples or federation.loss.couples),
        )


def finite_losses(meter: Meter) -> Meter:
    """A meter without the losses of passes that met a NaN or an infinity."""
    losses = {name: loss for name, loss in meter.losses.items() if math.isfinite(loss)}
    return dataclasses.replace(meter, losses=losses)


def client_key(federation: Federation, client: int, round: int) -> Key:
    """Randomness of one client in one round."""
    return federation.key / "client" / client / round


def client_view(
    federation: Federation, task: Task, round: int, client: ClientInfo, trainer: Trainer
) -> ClientView:
    """What a method may use at a client."""
    key = client_key(federation, client.id, round)
    return ClientView(client, task, task.model(client), round, key, trainer)
