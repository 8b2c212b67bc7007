"""Clients of like shapes as one client whose tensors are stacked over a leading client axis.

A method's functions are pure functions of trees of tensors. So ``local_update`` is called once for a cohort of K clients:
a tensor that differs between them is a :class:`fedlowrank.training.stacked.Stacked` one ``[K, ...]``, one that is equal
for all stays as it is. Where control flow needs one answer and the clients differ, the cohort is divided by the answers and
the function is called again for each part; what was trained before is not trained again
(:mod:`fedlowrank.training.cohorts`). Where an operation has no rule, each client goes on alone, with plain tensors.

Passes are batched over clients if their functions have rules. They are not batched if a loss is the user's own (of a method or
of the task), if a module has layers that are not standard (:mod:`fedlowrank.models.standard`), which might draw random numbers
or count their calls, or if it has batch normalization, which padding would disturb. Small steps of models of transformers without
dropout and hooks are batched, too; large ones gain nothing. The log names the reason.
Fewer than four clients of a kind run one after another, which is faster.
Uneven data is padded and masked; a client with fewer steps stops while the others go on.

In the first round that a kind of cohort comes, one client of it is also run alone. If its state or upload differs from the
cohort's, clients of that kind run one after another, and the log says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from ..core import tree
from ..core.contract.hook_results import check_pair
from ..core.contract.method import AnyMethod, ClientInfo, ClientView, Task
from ..core.contract.training_request import Trainer
from ..core.errors import NonFiniteError
from ..data.dataset import Examples
from ..data.federation import Federation
from ..training.cohorts.closeness import full_precision, is_close
from ..training.cohorts.cohort_trainer import CohortMemory, CohortTrainer
from ..training.cohorts.cohort_uploads import CohortUploads
from ..training.cohorts.cohort_view import Cohort, CohortInfo, CohortKey
from ..training.cohorts.control_flow import refuse_numbers, split_clients, stack_clients
from ..training.cohorts.division import divide
from ..training.cohorts.joint_passes import divide_jointly
from ..training.cohorts.pooled_examples import pool_examples
from ..training.feed import BufferPool
from ..training.kept_optimizers import KeepingTrainer, split_optimizers
from ..training.trainer import LocalTrainer, Meter
from .engine import ClientJob, ClientResult, Engine, client_key, finite_losses

COHORT = 256
"""Clients in a cohort."""

FEW = 4
"""Clients of one kind from which on a cohort takes less time than one client after another."""

ROOM = 1 << 30
"""Bytes of a cohort's states and messages: at most so many as its clients have at once, before and after training."""

logger = logging.getLogger(__name__)

T = TypeVar("T")

Found = list[tuple[int, ClientResult]]
"""Results by the place of their client among the jobs."""


@dataclass(frozen=True)
class _Member:
    """A client of a cohort.

    Attributes:
        place: among the jobs.
        job: its work.
        local: execution for it alone.
    """

    place: int
    job: ClientJob
    local: LocalTrainer


class _Together(Protocol):
    """Local training of all clients of a cohort at once."""

    def __call__(self, members: Sequence[_Member], trainer: CohortTrainer) -> Found: ...


class _Alone(Protocol):
    """Local training of one client, by its own trainer if none is given."""

    def __call__(self, member: _Member, trainer: Trainer | None = None) -> tuple[int, ClientResult]: ...


@dataclass
class Vectorized(Engine):
    """Clients of like shapes, batched; equal to the sequential engine up to rounding."""

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
        """See the base class: memory of batches."""
        self._memory.pool, self._pooled = BufferPool(), None

    def training_examples(self, federation: Federation, client: int) -> Examples:
        """See the base class: those of all clients lie in one tensor where they are few."""
        if self._pooled is None or self._pooled[0] is not federation:
            self._pooled = federation, pool_examples([own.train for own in federation.clients])
        return self._pooled[1][client]

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Generator[ClientResult, None, None]:
        """See the base class."""
        self._title = method.title
        for first in range(0, len(jobs), COHORT):
            yield from self._run_block(method, federation, task, round, jobs[first : first + COHORT])

    def map_clients(
        self,
        method: AnyMethod,
        federation: Federation,
        round: int,
        clients: Sequence[tuple[ClientInfo, Any]],
        alone: Callable[[int, Trainer], T],
        together: Callable[[Cohort], list[T]],
    ) -> list[T]:
        """See the base class: clients of one architecture whose trees have one form are a cohort."""
        self._title = method.title
        groups: dict[Hashable, list[tuple[int, LocalTrainer]]] = {}
        for place, (info, value) in enumerate(clients):
            local = self.trainer(method, federation, round, info)
            groups.setdefault((info.architecture, tree.form(value)), []).append((place, local))
        found: list[T] = []
        for members in groups.values():
            members.sort(key=lambda m: -len(m[1].data.examples))
            if len(members) < FEW or not self._may_stack(members[0][1]):
                found += [alone(*member) for member in members]
                continue
            trainer = self.cohort_trainer([local for _, local in members], self._memory)

            def call(some: Sequence[tuple[int, LocalTrainer]], trainer: CohortTrainer) -> list[T]:
                places = [place for place, _ in some]
                infos = [clients[k][0] for k in places]
                value = tree.canonical(stack_clients([clients[k][1] for k in places]))
                key = CohortKey([client_key(federation, i.id, round) for i in infos])
                return together(Cohort(places, value, CohortInfo(infos), key, trainer))

            found += divide(members, call, lambda member, own: alone(member[0], own), trainer, self._log)
        return found

    def _run_block(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> list[ClientResult]:
        groups: dict[Hashable, list[_Member]] = {}
        settings = repr(method)
        for place, job in enumerate(jobs):
            member = _Member(place, job, self.trainer(method, federation, round, job.client))
            form = settings, job.client.architecture, tree.form(job.state), tree.form(job.down)
            groups.setdefault(form, []).append(member)
        found: Found = []
        update = partial(self._update, method, federation, task, round)
        alone = partial(self._alone, method, federation, task, round)
        by_architecture: dict[str, list[tuple[Hashable, list[_Member]]]] = {}
        for kind, members in groups.items():
            # clients with the most steps first, in every pass
            members = sorted(members, key=lambda m: -len(m.local.data.examples))
            size = 2 * (tree.nbytes(members[0].job.state) + tree.nbytes(members[0].job.down))
            parts = -(-len(members) * size // ROOM) or 1
            bounds = [len(members) * k // parts for k in range(parts + 1)]
            cut = [(kind, members[a:b]) for a, b in itertools.pairwise(bounds)]
            by_architecture.setdefault(members[0].job.client.architecture, []).extend(cut)
        for cohorts in by_architecture.values():
            everyone = [m for _, members in cohorts for m in members]
            if len({m.job.client.rank for m in everyone}) > 1 and len(everyone) >= FEW:
                found += self._run_unequal_ranks(cohorts, update, alone)
                continue
            for kind, members in cohorts:
                found += self._run_cohort(kind, members, update, alone)
        return [result for _, result in sorted(found, key=lambda pair: pair[0])]

    def _run_unequal_ranks(
        self, cohorts: list[tuple[Hashable, list[_Member]]], update: _Together, alone: _Alone
    ) -> Found:
        """The results of cohorts that differ in rank: each is called by itself, and their passes are trained as one."""
        found: Found = []
        together: list[tuple[Hashable, list[_Member]]] = []
        for kind, members in cohorts:
            if self._memory.is_equal.get(kind) is False or not self._may_stack(members[0].local):
                found += [alone(member) for member in members]
            else:
                together.append((kind, members))
        waiting = [
            (members, self.cohort_trainer([m.local for m in members], self._memory, joins=True))
            for _, members in together
        ]
        new = [(kind, members) for kind, members in together if kind not in self._memory.is_equal]
        with full_precision() if new else contextlib.nullcontext():
            results = dict(found + divide_jointly(waiting, update, alone, self._log))
            for kind, members in new:
                self._memory.is_equal[kind] = self._check(members[-1], results, alone)
                if not self._memory.is_equal[kind]:
                    results |= [alone(_fresh(member)) for member in members]
        return [*results.items()]

    def _run_cohort(self, kind: Hashable, members: list[_Member], update: _Together, alone: _Alone) -> Found:
        """The results of clients of one kind, called at once if that gives what each gives alone."""
        known = self._memory.is_equal.get(kind)
        if len(members) < FEW or known is False or not self._may_stack(members[0].local):
            return [alone(member) for member in members]
        trainer = self.cohort_trainer([m.local for m in members], self._memory)
        if known:
            return divide(members, update, alone, trainer, self._log)
        with full_precision():
            found = divide(members, update, alone, trainer, self._log)
            self._memory.is_equal[kind] = self._check(members[-1], dict(found), alone)
        return found if self._memory.is_equal[kind] else [alone(_fresh(member)) for member in members]

    def _update(
        self,
        method: AnyMethod,
        federation: Federation,
        task: Task,
        round: int,
        members: Sequence[_Member],
        trainer: CohortTrainer,
    ) -> Found:
        """Local training of all clients of a cohort at once."""
        jobs = [m.job for m in members]
        stored, down = stack_clients([j.state for j in jobs]), stack_clients([j.down for j in jobs])
        state, optimizers = split_optimizers(tree.canonical(stored))
        infos = [j.client for j in jobs]
        info: Any = CohortInfo(infos)
        key: Any = CohortKey([client_key(federation, i.id, round) for i in infos])
        keeping = KeepingTrainer(trainer, info, optimizers)
        view = ClientView(info, task, task.model(infos[0]), round, key, keeping)
        state, upload = check_pair(method, method.local_update(state, tree.canonical(down), view))
        refuse_numbers((state, upload))
        state, upload = tree.canonical(keeping.collect(state)), tree.canonical(upload)
        states, kind = (
            split_clients(state, len(members)),
            (repr(method), infos[0].architecture, tree.form(upload)),
        )
        uploads = CohortUploads(upload, len(members), kind, self._memory)
        # a member whose training met a NaN is called alone, for a method may handle the error
        singles = trainer.singles() if trainer.errors else []
        failed = {
            k: self._alone(method, federation, task, round, members[k], singles[k])[1]
            for k in sorted(trainer.errors)
        }
        results = [
            failed.get(k) or ClientResult(states[k], uploads.row(k), m.local.meter)
            for k, m in enumerate(members)
        ]
        if all(result.error is not None for result in failed.values()):
            results = [dataclasses.replace(r, cohort=uploads, place=k) for k, r in enumerate(results)]
        return [(m.place, result) for m, result in zip(members, results, strict=True)]

    def _alone(
        self,
        method: AnyMethod,
        federation: Federation,
        task: Task,
        round: int,
        member: _Member,
        trainer: Trainer | None = None,
    ) -> tuple[int, ClientResult]:
        """The result of one client with plain tensors, as the sequential engine gives it."""
        try:
            state, upload = self.local_update(
                method, federation, task, round, member.job, trainer or member.local
            )
        except NonFiniteError as error:
            return member.place, ClientResult(None, None, Meter(), error)
        return member.place, ClientResult(state, upload, finite_losses(member.local.meter))

    def _check(self, member: _Member, found: dict[int, ClientResult], alone: _Alone) -> bool:
        """Whether a client's state and upload are those that it gives alone, up to rounding."""
        expected, got = alone(_fresh(member))[1], found[member.place]
        if expected.error is not None or got.error is not None:
            return (expected.error is None) == (got.error is None)
        same = is_close((got.state, got.upload), (expected.state, expected.upload))
        if not same:
            self._log(
                "gives another state or upload for many clients at once than for one alone, so it runs "
                "one client after another"
            )
        return same

    def _may_stack(self, local: LocalTrainer) -> bool:
        """Whether the steps of clients with these models may be taken together; if not, the reason is said once."""
        if reason := local.beyond_stacking:
            self._log(f"runs one client after another: {reason}")
        return reason is None

    def _log_pass(self, name: str, reason: object) -> None:
        """Say once why the clients of a pass are not batched."""
        self._log(f"trains one client after another in {name!r}: {reason}")

    def _log(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.info("engine vectorized: %s %s", self._title, message)


def _fresh(member: _Member) -> _Member:
    """The client before it was run, with a meter of its own."""
    return _Member(member.place, member.job, member.local.fresh())
