"""Local training in a round of the vectorized engine, by one call of the method for a cohort or for one client."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..core import tree
from ..core.contract import AnyMethod, ClientView, Task
from ..core.contract.hook_results import check_pair
from ..core.errors import NonFiniteError
from ..data.federation import Federation
from ..training.client_tensors.control_flow import refuse_numbers, split_clients, stack_clients
from ..training.cohorts.closeness import is_close
from ..training.cohorts.cohort_trainer import CohortMemory, CohortTrainer, ReplayTrainer
from ..training.cohorts.cohort_uploads import CohortUploads
from ..training.cohorts.cohort_view import CohortInfo, CohortKey
from ..training.hook_calls import check_call, refuse_draws
from ..training.kept_optimizers import KeepingTrainer, split_optimizers
from ..training.trainer import LocalTrainer
from .engine import ClientJob, ClientResult, Engine, diverged_result, finite_losses

PlacedResult = tuple[int, ClientResult]
"""Index of a client among the jobs, with the client's result."""


@dataclass(frozen=True)
class CohortMember:
    """A client of a cohort.

    Attributes:
        index: index of the client among the jobs.
        job: job of the client.
        local: trainer that trains this client by itself.
    """

    index: int
    job: ClientJob
    local: LocalTrainer

    def restarted(self) -> CohortMember:
        """Copy the client as it was before training, with an empty meter."""
        return CohortMember(self.index, self.job, self.local.fresh())


@dataclass(frozen=True)
class RoundTraining:
    """Trains the clients of a round.

    Attributes:
        engine: engine that calls the method for a single client.
        method: method of the run.
        federation: federation with the clients' data.
        task: task of the run.
        round: index of the round, from 0.
        memory: memory of the engine.
        log: function that logs a message once.
    """

    engine: Engine
    method: AnyMethod
    federation: Federation
    task: Task
    round: int
    memory: CohortMemory
    log: Callable[[str], None]

    def train_cohort(self, members: Sequence[CohortMember], trainer: CohortTrainer) -> list[PlacedResult]:
        """Train all clients of a cohort by one call of the method.

        Args:
            members: clients of the cohort.
            trainer: trainer of the cohort.
        """
        method, jobs = self.method, [m.job for m in members]
        stacked_state, down = stack_clients([j.state for j in jobs]), stack_clients([j.down for j in jobs])
        state, optimizers = split_optimizers(tree.canonical(stacked_state))
        infos = [j.client for j in jobs]
        info: Any = CohortInfo(infos)
        key: Any = CohortKey([m.local.data.key for m in members])
        keeping_trainer = KeepingTrainer(trainer, info, optimizers)
        view = ClientView(info, self.task, self.task.model(infos[0]), self.round, key, keeping_trainer)
        down = tree.canonical(down)
        with (
            refuse_draws(
                method, "local_update", members[0].local.data.key, members[0].local.data.examples.y.device
            ),
            check_call(method, "local_update", model=view.model, state=state, down=down),
        ):
            state, upload = check_pair(method, method.local_update(state, down, view), state)
        refuse_numbers((state, upload))
        state, upload = tree.canonical(keeping_trainer.collect(state)), tree.canonical(upload)
        states = split_clients(state, len(members))
        kind = repr(method), infos[0].architecture, tree.form(upload)
        uploads = CohortUploads(upload, len(members), kind, self.memory)
        # a member whose training met a NaN is called by itself, because a method may handle the error
        trainers = trainer.split_by_client() if trainer.errors else []
        retried_results = {k: self.train_one(members[k], trainers[k])[1] for k in sorted(trainer.errors)}
        # the upload of a method that handled the error was not computed by the cohort
        cohort = uploads if all(result.error is not None for result in retried_results.values()) else None
        results = [
            (m.index, ClientResult(states[k], uploads.row(k), m.local.meter, cohort=cohort, position=k))
            for k, m in enumerate(members)
        ]
        for k, result in retried_results.items():
            results[k] = members[k].index, dataclasses.replace(result, cohort=cohort, position=k)
        return results

    def train_one(self, member: CohortMember, trainer: ReplayTrainer | None = None) -> PlacedResult:
        """Train one client with plain tensors, as the sequential engine does.

        Args:
            member: client to train.
            trainer: trainer of the client; None for its own trainer, which has computed nothing yet.
        """
        own_trainer = trainer or member.local
        try:
            state, upload = self.engine.local_update(
                self.method, self.federation, self.task, self.round, member.job, own_trainer
            )
        except NonFiniteError as error:
            return member.index, diverged_result(error, own_trainer.meter)
        return member.index, ClientResult(state, upload, finite_losses(member.local.meter))

    def train_each(self, members: Sequence[CohortMember]) -> list[PlacedResult]:
        """Train clients one after another."""
        return [self.train_one(member) for member in members]

    def retrain_each(self, members: Sequence[CohortMember]) -> list[PlacedResult]:
        """Train clients again from the start, one after another."""
        return [self.train_one(member.restarted()) for member in members]

    def has_equal_result(self, member: CohortMember, result: ClientResult) -> bool:
        """Whether a client that is trained by itself gets the state and the upload of its cohort, up to rounding.

        Args:
            member: client, which is trained again.
            result: result of the client in its cohort.
        """
        _, expected = self.train_one(member.restarted())
        if expected.error is not None or result.error is not None:
            return (expected.error is None) == (result.error is None)
        is_equal = is_close((result.state, result.upload), (expected.state, expected.upload))
        if not is_equal:
            self.log(
                "gives another state or upload for many clients at once than for one alone, so it runs "
                "one client after another"
            )
        return is_equal
