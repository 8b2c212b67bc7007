"""The vectorized engine: clients whose models have one form are trained as one client, a cohort.

The functions of a method are pure functions of trees of tensors. The engine calls ``local_update`` once for a cohort
of K clients. A tensor that differs between the clients is a
:class:`~fedlowrank.training.client_tensors.client_tensor.ClientTensor` ``[K, ...]``; a tensor that all clients share
stays unchanged. If control flow needs one answer and the clients differ, the engine divides the cohort by the answers
and calls the function again for each part. No pass is trained twice (:mod:`fedlowrank.training.cohorts`). If an
operation has no rule, the engine calls the function for each client, with plain tensors.

A pass is batched over clients if all its functions have rules. It is not batched if a loss is the user's own (of a
method or of the task), if a module has nonstandard layers (:mod:`fedlowrank.models.standard`), which might draw
random numbers or count their calls, or if a module has batch normalization, which padding would disturb. Small steps
of transformers without dropout and hooks are batched, too; batching large ones is not faster. The log names the
reason. If fewer than four clients are of one kind, they run one after another, which is faster. Uneven data is padded
and masked. A client with fewer steps stops while the others go on.

In the first round of each kind of cohort, the engine also runs one client by itself. If its state or upload differs
from that of the cohort, clients of that kind run one after another, and the log says so.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ..core import tree
from ..core.contract import AnyMethod, ClientInfo, Task
from ..core.contract.training_request import Trainer
from ..data.dataset import Examples
from ..data.federation import Federation
from ..training.client_tensors.control_flow import stack_clients
from ..training.cohorts.closeness import full_precision
from ..training.cohorts.cohort_batches import BufferPool
from ..training.cohorts.cohort_trainer import CohortMemory, CohortTrainer
from ..training.cohorts.cohort_view import Cohort, CohortInfo, CohortKey
from ..training.cohorts.division import divide
from ..training.cohorts.joint_passes import divide_jointly
from ..training.cohorts.pooled_examples import pool_examples
from ..training.hook_calls import check_call, refuse_draws
from ..training.trainer import LocalTrainer
from .engine import ClientJob, ClientResult, Engine, client_key
from .round_training import CohortMember, PlacedResult, RoundTraining

MAX_COHORT = 256
"""Maximum number of clients in a cohort."""

MIN_COHORT = 4
"""Minimum number of clients of one kind for which a cohort takes less time than one client after another."""

MAX_COHORT_BYTES = 1 << 30
"""Maximum bytes of the states and messages of a cohort's clients before and after training."""

logger = logging.getLogger(__name__)

T = TypeVar("T")

MembersOfKind = tuple[Hashable, list[CohortMember]]
"""A kind, with the clients of that kind."""


@dataclass
class Vectorized(Engine):
    """Trains clients in cohorts. Results are those of the sequential engine up to rounding."""

    name: ClassVar[str] = "vectorized"
    cohort_trainer: ClassVar[type[CohortTrainer]] = CohortTrainer
    _logged: set[str] = field(default_factory=set, init=False, repr=False)
    _memory: CohortMemory = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._title = ""
        self._memory = CohortMemory(BufferPool(), {}, self._log_pass)
        self._pooled: tuple[Federation, list[Examples]] | None = None

    @property
    def has_cohorts(self) -> bool:
        """See the base class."""
        return True

    def close(self) -> None:
        """Release the buffers of batches and the copies of examples."""
        self._memory.pool, self._pooled = BufferPool(), None

    def training_examples(self, federation: Federation, client_id: int) -> Examples:
        """Get the training examples of a client as a view of one tensor with the examples of all clients, if they are few."""
        if self._pooled is None or self._pooled[0] is not federation:
            self._pooled = federation, pool_examples([data.train for data in federation.clients])
        return self._pooled[1][client_id]

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Generator[ClientResult, None, None]:
        """See the base class."""
        self._title = method.title
        training = RoundTraining(self, method, federation, task, round, self._memory, self._log)
        for start in range(0, len(jobs), MAX_COHORT):
            yield from self._run_jobs(training, jobs[start : start + MAX_COHORT])

    def map_clients(
        self,
        method: AnyMethod,
        federation: Federation,
        round: int,
        clients: Sequence[tuple[ClientInfo, Any]],
        call_for_client: Callable[[int, Trainer], T],
        call_for_cohort: Callable[[Cohort], list[T]],
    ) -> list[T]:
        """Call a pure function for cohorts: clients of one architecture whose trees have one form."""
        self._title = method.title
        groups: dict[Hashable, list[tuple[int, LocalTrainer]]] = {}
        passes = method.local_passes()
        for index, (info, value) in enumerate(clients):
            local_trainer = self.trainer(method, federation, round, info, passes)
            groups.setdefault((info.architecture, tree.form(value)), []).append((index, local_trainer))

        def call_for_members(members: Sequence[tuple[int, LocalTrainer]], trainer: CohortTrainer) -> list[T]:
            indices = [index for index, _ in members]
            infos = [clients[k][0] for k in indices]
            value = tree.canonical(stack_clients([clients[k][1] for k in indices]))
            key = CohortKey([client_key(federation, i.id, round) for i in infos])
            cohort = Cohort(indices, value, CohortInfo(infos), key, trainer)
            first_data = members[0][1].data
            with (
                refuse_draws(method, "client_model", first_data.key, first_data.examples.y.device),
                check_call(method, "client_model", value=value),
            ):
                return call_for_cohort(cohort)

        def call_for_member(member: tuple[int, LocalTrainer], trainer: Trainer) -> T:
            return call_for_client(member[0], trainer)

        results: list[T] = []
        for members in groups.values():
            members.sort(key=lambda m: -len(m[1].data.examples))
            if len(members) < MIN_COHORT or not self._check_stacking(members[0][1]):
                results += [call_for_client(*member) for member in members]
                continue
            trainer = self.cohort_trainer([local_trainer for _, local_trainer in members], self._memory)
            results += divide(members, call_for_members, call_for_member, trainer, self._log)
        return results

    def _run_jobs(self, training: RoundTraining, jobs: Sequence[ClientJob]) -> list[ClientResult]:
        """Train the clients of at most as many jobs as a cohort may have, in the order of the jobs."""
        results: list[PlacedResult] = []
        for cohorts in self._form_cohorts(training, jobs).values():
            ranks = [member.job.client.rank for _, members in cohorts for member in members]
            if len(set(ranks)) > 1 and len(ranks) >= MIN_COHORT:
                results += self._run_unequal_ranks(training, cohorts)
                continue
            for kind, members in cohorts:
                results += self._run_cohort(training, kind, members)
        return [result for _, result in sorted(results, key=lambda pair: pair[0])]

    def _form_cohorts(
        self, training: RoundTraining, jobs: Sequence[ClientJob]
    ) -> dict[str, list[MembersOfKind]]:
        """Form cohorts of clients of one kind that fit into memory, by architecture."""
        method, groups = training.method, dict[Hashable, list[CohortMember]]()
        method_settings, down, form_of_down = repr(method), None, tree.form(None)
        passes = method.local_passes()
        for index, job in enumerate(jobs):
            local_trainer = self.trainer(method, training.federation, training.round, job.client, passes)
            # clients usually share one download
            if job.down is not down:
                down, form_of_down = job.down, tree.form(job.down)
            form = method_settings, job.client.architecture, tree.form(job.state), form_of_down
            groups.setdefault(form, []).append(CohortMember(index, job, local_trainer))
        by_architecture: dict[str, list[MembersOfKind]] = {}
        for kind, group in groups.items():
            # in every pass, clients with the most steps come first
            members = sorted(group, key=lambda m: -len(m.local.data.examples))
            first_job = members[0].job
            client_bytes = 2 * (tree.nbytes(first_job.state) + tree.nbytes(first_job.down))
            cohort_count = -(-len(members) * client_bytes // MAX_COHORT_BYTES) or 1
            bounds = [len(members) * k // cohort_count for k in range(cohort_count + 1)]
            cohorts = [(kind, members[a:b]) for a, b in itertools.pairwise(bounds)]
            by_architecture.setdefault(first_job.client.architecture, []).extend(cohorts)
        return by_architecture

    def _run_unequal_ranks(
        self, training: RoundTraining, cohorts: Sequence[MembersOfKind]
    ) -> list[PlacedResult]:
        """Train cohorts that differ in rank: the method is called for each cohort, and their passes are trained as one."""
        results: dict[int, ClientResult] = {}
        joint_cohorts: list[MembersOfKind] = []
        for kind, members in cohorts:
            if self._memory.is_equal.get(kind) is False or not self._check_stacking(members[0].local):
                results |= training.train_each(members)
            else:
                joint_cohorts.append((kind, members))
        cohort_trainers = [
            (members, self.cohort_trainer([m.local for m in members], self._memory, joins=True))
            for _, members in joint_cohorts
        ]
        untested_cohorts = [
            (kind, members) for kind, members in joint_cohorts if kind not in self._memory.is_equal
        ]
        with full_precision() if untested_cohorts else contextlib.nullcontext():
            results |= divide_jointly(cohort_trainers, training.train_cohort, training.train_one, self._log)
            for kind, members in untested_cohorts:
                is_equal = training.has_equal_result(members[-1], results[members[-1].index])
                self._memory.is_equal[kind] = is_equal
                if not is_equal:
                    results |= training.retrain_each(members)
        return [*results.items()]

    def _run_cohort(
        self, training: RoundTraining, kind: Hashable, members: list[CohortMember]
    ) -> list[PlacedResult]:
        """Train clients of one kind, as a cohort if that gives the same results as single clients."""
        was_equal = self._memory.is_equal.get(kind)
        if len(members) < MIN_COHORT or was_equal is False or not self._check_stacking(members[0].local):
            return training.train_each(members)
        trainer = self.cohort_trainer([m.local for m in members], self._memory)
        if was_equal:
            return divide(members, training.train_cohort, training.train_one, trainer, self._log)
        with full_precision():
            results = divide(members, training.train_cohort, training.train_one, trainer, self._log)
            is_equal = training.has_equal_result(members[-1], dict(results)[members[-1].index])
            self._memory.is_equal[kind] = is_equal
        return results if is_equal else training.retrain_each(members)

    def _check_stacking(self, local_trainer: LocalTrainer) -> bool:
        """Whether steps of clients with these models may be batched over clients; if not, the reason is logged once."""
        if reason := local_trainer.beyond_stacking:
            self._log(f"runs one client after another: {reason}")
        return reason is None

    def _log_pass(self, name: str, reason: object) -> None:
        """Log once the reason why a pass is not batched over clients."""
        self._log(f"trains one client after another in {name!r}: {reason}")

    def _log(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.info("engine vectorized: %s %s", self._title, message)
