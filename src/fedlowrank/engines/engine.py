"""Base class of engines, which map a method's ``local_update`` over the clients of a round."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

from ..core import tree
from ..core.arguments.user_code import is_of_package
from ..core.contract import AnyMethod, ClientInfo, ClientView, Pass, Task
from ..core.contract.hook_results import check_pair
from ..core.contract.training_request import Trainer
from ..core.contract.wrapper import MethodWrapper
from ..core.errors import NonFiniteError
from ..core.key import Key
from ..data.dataset import Examples
from ..data.federation import Federation
from ..models.statistics.client_buffers import collect_buffers, install_buffers
from ..training.cohorts.cohort_uploads import CohortUploads
from ..training.cohorts.cohort_view import Cohort
from ..training.flops import FlopLedger
from ..training.hook_calls import check_single_call, refuse_cohort_tensors, seed_for_hook
from ..training.kept_optimizers import KeepingTrainer, split_optimizers
from ..training.local_data import LocalData
from ..training.trainer import LocalTrainer, Meter

T = TypeVar("T")


def trains_by_user_code(method: AnyMethod, federation: Federation) -> bool:
    """Whether the method, a method that it wraps, or the loss is the user's own code."""
    if federation.loss.is_custom or not is_of_package(type(method)):
        return True
    return isinstance(method, MethodWrapper) and trains_by_user_code(method.inner, federation)


@dataclass(frozen=True)
class ClientJob:
    """One client's work in a round: its record, its state and its download."""

    state: Any
    down: Any
    client: ClientInfo


@dataclass(frozen=True)
class ClientResult:
    """The result of a client's work in a round.

    Attributes:
        state: the client's next state, to be committed once the server acknowledges the reply.
        upload: the client's reply.
        meter: measured cost of the work.
        error: error of training that met a NaN, so that there is no reply.
        lost: another reason for the missing reply, such as that the client cannot be reached.
        has_diverged: whether the reply is lost because the client, on another machine, found a number that is not finite.
        is_refused: whether the reply is lost because the server refused it, so that the client counts as hostile.
        cohort: uploads of all clients that were trained with this one; None if it was trained by itself.
        position: position of the client in the cohort.
    """

    state: Any
    upload: Any
    meter: Meter
    error: NonFiniteError | None = None
    lost: str | None = None
    has_diverged: bool = False
    is_refused: bool = False
    cohort: CohortUploads | None = None
    position: int = 0


@dataclass
class Engine(ABC):
    """Runs the clients of one round, in the order given.

    Attributes:
        ledger: floating-point operations of steps, counted once for all clients.
        micro_batch: number of examples whose gradient is computed at once, or None for whole batches; a run sets it
            by :meth:`with_micro_batch`.
    """

    name: ClassVar[str]
    ledger: FlopLedger = field(default_factory=FlopLedger, repr=False)
    micro_batch: int | None = None

    def with_micro_batch(self, micro_batch: int | None) -> Self:
        """Return this engine if it has that micro batch, else a copy with it.

        A copy shares the ledger. It has its own processes and buffers, and must be closed separately.
        """
        if micro_batch == self.micro_batch:
            return self
        return dataclasses.replace(self, micro_batch=micro_batch)

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
        """Map a function over items; the function's results must be JSON values."""
        return [work(item) for item in items]

    def map_clients(
        self,
        method: AnyMethod,
        federation: Federation,
        round: int,
        clients: Sequence[tuple[ClientInfo, Any]],
        call_for_client: Callable[[int, Trainer], T],
        call_for_cohort: Callable[[Cohort], list[T]],
    ) -> list[T]:
        """Call a pure function for clients; an engine with cohorts calls it for many clients at once.

        Args:
            method: method whose passes the trainers run.
            federation: clients and their data.
            round: index of the round, from 0.
            clients: record of each client, with its trees that are arguments of the function.
            call_for_client: function that calls the pure function for the client at an index, with its trainer.
            call_for_cohort: function that calls the pure function for all clients of a cohort at once.

        Returns:
            The results, in any order.
        """
        del call_for_cohort
        infos = [info for info, _ in clients]
        return [
            call_for_client(index, self.trainer(method, federation, round, info))
            for index, info in enumerate(infos)
        ]

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Release processes and buffers; the engine can be used again afterwards."""

    def choose_for_run(
        self, method: AnyMethod, federation: Federation, client_count: int, stored_name: str
    ) -> str:
        """Choose what determines the bits of a run, so that it computes the same ones when resumed on another machine.

        Args:
            method: method of the run.
            federation: federation of the run.
            client_count: expected number of clients in a round.
            stored_name: name that this method returned when the run began; empty for a new run.

        Returns:
            The name of the chosen engine, which is stored with the run; empty if nothing was chosen.
        """
        del method, federation, client_count, stored_name
        return ""

    def training_examples(self, federation: Federation, client_id: int) -> Examples:
        """Get the training examples of a client."""
        return federation.clients[client_id].train

    def boundary(self, value: Any) -> Any:
        """Convert a value that is sent between server and client, or stored, to what the receiver gets."""
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
        """Train a client with its own buffers and optimizer states; return its next state and its upload."""
        stored_state, optimizers = split_optimizers(self.boundary(job.state))
        state, client_task = install_buffers(task, stored_state)
        keeping_trainer = KeepingTrainer(trainer, job.client, optimizers)
        view = client_view(federation, client_task, job.client, round, keeping_trainer)
        down, location = self.boundary(job.down), f"{job.client.title}, round {round + 1}"
        device = federation.clients[job.client.id].train.y.device
        with (
            seed_for_hook(method, "local_update", view.key, device),
            check_single_call(method, "local_update", location, view.model, state=state, down=down),
        ):
            state, upload = check_pair(method, method.local_update(state, down, view), state)
            refuse_cohort_tensors((state, upload))
        if keeping_trainer.has_failed:
            # keeps the buffers from before the pass, because those of a failed pass may hold a NaN
            _, client_task = install_buffers(task, stored_state)
        return self.boundary(keeping_trainer.collect(collect_buffers(client_task, state))), self.boundary(
            upload
        )

    def trainer(
        self,
        method: AnyMethod,
        federation: Federation,
        round: int,
        client: ClientInfo,
        passes: Mapping[str, Pass] | None = None,
    ) -> LocalTrainer:
        """Make the trainer of one client; ``passes`` are those of the method, if the caller knows them."""
        key = client_key(federation, client.id, round)
        client_data = federation.clients[client.id]
        augment, turns, loss = federation.augment, client_data.quarter_turns, federation.loss
        examples = self.training_examples(federation, client.id)
        passes = method.local_passes() if passes is None else passes
        data = LocalData(client, examples, passes, key, augment, turns, federation.by_length, loss)
        models = federation.architectures
        return LocalTrainer(
            models[client.architecture],
            models.values(),
            data,
            round,
            self.ledger,
            micro_batch=self.micro_batch,
            may_halve=not (method.couples_examples or federation.loss.couples),
        )


def diverged_result(error: NonFiniteError, meter: Meter) -> ClientResult:
    """The result of a client whose training met a NaN or an infinity, with the cost of its work until then."""
    return ClientResult(None, None, dataclasses.replace(meter, losses={}), error)


def finite_losses(meter: Meter) -> Meter:
    """Remove the losses of passes that met a NaN or an infinity from a meter."""
    losses = {name: loss for name, loss in meter.losses.items() if math.isfinite(loss)}
    return dataclasses.replace(meter, losses=losses)


def client_key(federation: Federation, client_id: int, round: int) -> Key:
    """Derive the key from which a client draws all randomness of a round."""
    return federation.key / "client" / client_id / round


def client_view(
    federation: Federation, task: Task, client: ClientInfo, round: int, trainer: Trainer
) -> ClientView:
    """Make the view of a client, with everything that a method may use at the client."""
    key = client_key(federation, client.id, round)
    return ClientView(client, task, task.model(client), round, key, trainer)
