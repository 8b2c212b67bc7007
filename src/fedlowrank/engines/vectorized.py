"""Clients of like shapes as one client whose tensors are stacked over a leading client axis.

A method's functions are pure functions of trees of tensors. So ``local_update`` is called once for a cohort of K clients:
a tensor that differs between them is a :class:`fedlowrank.training.stacked.Stacked` one ``[K, ...]``, one that is equal
for all stays as it is. Where control flow needs one answer and the clients differ, the cohort is divided by the answers and
the function is called again for each part; what was trained before is not trained again
(:mod:`fedlowrank.training.cohorts`). Where an operation has no rule, each client goes on alone, with plain tensors.

Passes are batched over clients if their functions have rules. So are none with losses that are not this package's own (of a
method or of the task), of modules with layers that are not standard (:mod:`fedlowrank.models.standard`), which might
draw random numbers or count their calls, and of modules with batch normalization, which padding would disturb; the log tells.
Uneven data is padded and masked; a client with fewer steps stops while the others go on.

In the first round that a kind of cohort comes, one client of it is also run alone. If its state or upload is another one,
clients of that kind run one after another, and the log says so.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core import tree
from ..core.contract.hook_results import check_pair
from ..core.contract.method import AnyMethod, ClientView, Task
from ..core.errors import NonFiniteError
from ..data.federation import Federation
from ..training.cohorts.cohort_trainer import CohortTrainer, PassMemory
from ..training.cohorts.cohort_view import CohortInfo, CohortKey
from ..training.cohorts.control_flow import DifferingError, split_clients, stack_clients
from ..training.feed import BufferPool
from ..training.kept_optimizers import KeepingTrainer, split_optimizers
from ..training.stacked import UnsupportedError, without_rows
from ..training.trainer import LocalTrainer, Meter
from .engine import ClientJob, ClientResult, Engine, client_key

COHORT = 256
"""Clients in a cohort."""

ROOM = 1 << 30
"""Bytes of a cohort's states and messages: at most so many as its clients have at once, before and after training."""

logger = logging.getLogger(__name__)

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


@dataclass
class Vectorized(Engine):
    """Clients of like shapes, batched; equal to the sequential engine up to rounding."""

    name: ClassVar[str] = "vectorized"
    cohort_trainer: ClassVar[type[CohortTrainer]] = CohortTrainer
    _logged: set[str] = field(default_factory=set, init=False, repr=False)
    _memory: PassMemory = field(init=False, repr=False)
    _is_equal: dict[Any, bool] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._title = ""
        self._memory = PassMemory(BufferPool(), {}, self._log_pass)

    def close(self) -> None:
        """See the base class: memory of batches."""
        self._memory.pool = BufferPool()

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Generator[ClientResult, None, None]:
        """See the base class."""
        self._title = method.title
        for first in range(0, len(jobs), COHORT):
            yield from self._run_block(method, federation, task, round, jobs[first : first + COHORT])

    def _run_block(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> list[ClientResult]:
        groups: dict[Any, list[_Member]] = {}
        for place, job in enumerate(jobs):
            member = _Member(place, job, self.trainer(method, federation, round, job.client))
            kind = job.client.architecture, tree.form(job.state), tree.form(job.down)
            groups.setdefault(kind, []).append(member)
        found: Found = []
        update = partial(self._update, method, federation, task, round)
        alone = partial(self._alone, method, federation, task, round)
        for kind, members in groups.items():
            # clients with the most steps first, in every pass
            members = sorted(members, key=lambda m: -len(m.local.data.examples))
            size = 2 * (tree.nbytes(members[0].job.state) + tree.nbytes(members[0].job.down))
            parts = -(-len(members) * size // ROOM) or 1
            bounds = [len(members) * k // parts for k in range(parts + 1)]
            for a, b in itertools.pairwise(bounds):
                found += self._run_cohort(kind, members[a:b], update, alone)
        return [result for _, result in sorted(found, key=lambda pair: pair[0])]

    def _run_cohort(self, kind: Any, members: list[_Member], update: Any, alone: Any) -> Found:
        """The results of clients of one kind, called at once if that gives what each gives alone."""
        known = self._is_equal.get(kind)
        stands_alone = not all(m.is_standard for m in members[0].local.models)
        if len(members) == 1 or known is False or stands_alone:
            return [alone(member) for member in members]
        trainer = self.cohort_trainer([m.local for m in members], self._memory)
        found = self._divide(members, trainer, update, alone)
        if known is None:
            self._is_equal[kind] = self._check(members[-1], dict(found), alone)
            if not self._is_equal[kind]:
                return [alone(_fresh(member)) for member in members]
        return found

    def _divide(self, members: list[_Member], trainer: CohortTrainer, update: Any, alone: Any) -> Found:
        """``update`` of all clients, or of parts of them wherever control flow needs one answer, or one by one."""
        parts: dict[str, list[int]] = {}
        try:
            with without_rows():
                found: Found = update(members, trainer)
            return found
        except DifferingError as differs:
            for k, value in enumerate(differs.values):
                parts.setdefault(repr(value), []).append(k)
        except UnsupportedError as reason:
            self._log(f"{self._title} goes on with one client after another: {reason}")
        except Exception as error:  # noqa: BLE001 - a client alone raises the method's own error, if it is one
            name = type(error).__name__
            self._log(f"{self._title} goes on with one client after another: {name}: {error}")
        if 1 < len(parts) <= max(8, len(members) // 8) and len(parts) < len(members):
            groups = [([members[k] for k in places], trainer.part(places)) for places in parts.values()]
            return [pair for some, own in groups for pair in self._divide(some, own, update, alone)]
        columns = [split_clients((a.value, a.kept), len(members)) for a in trainer.answers]
        return [
            alone(
                member,
                trainer.alone(
                    k, [type(a)(*column[k]) for a, column in zip(trainer.answers, columns, strict=True)]
                ),
            )
            for k, member in enumerate(members)
        ]

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
        state, upload = tree.canonical(keeping.collect(state)), tree.canonical(upload)
        pairs = split_clients((state, upload), len(members))
        return [
            (m.place, self._result(m, *pair, trainer.errors.get(k)))
            for k, (m, pair) in enumerate(zip(members, pairs, strict=True))
        ]

    def _result(self, member: _Member, state: Any, upload: Any, error: Any) -> ClientResult:
        if error is not None:
            return ClientResult(None, None, Meter(), error[1])
        return ClientResult(state, upload, member.local.meter)

    def _alone(
        self,
        method: AnyMethod,
        federation: Federation,
        task: Task,
        round: int,
        member: _Member,
        trainer: Any = None,
    ) -> tuple[int, ClientResult]:
        """The result of one client with plain tensors, as the sequential engine gives it."""
        try:
            state, upload = self.local_update(
                method, federation, task, round, member.job, trainer or member.local
            )
        except NonFiniteError as error:
            return member.place, ClientResult(None, None, Meter(), error)
        return member.place, ClientResult(state, upload, member.local.meter)

    def _check(self, member: _Member, found: dict[int, ClientResult], alone: Any) -> bool:
        """Whether a client's state and upload are those that it gives alone, up to rounding."""
        expected, got = alone(_fresh(member))[1], found[member.place]
        if expected.error is not None or got.error is not None:
            return (expected.error is None) == (got.error is None)
        same = _is_close((got.state, got.upload), (expected.state, expected.upload))
        if not same:
            self._log(
                f"{self._title} gives another state or upload for many clients at once than for one alone, so it runs "
                "one client after another"
            )
        return same

    def _log_pass(self, name: str, reason: object) -> None:
        """Say once why the clients of a pass are not batched."""
        self._log(f"{self._title} trains one client after another in {name!r}: {reason}")

    def _log(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.info("engine vectorized: %s", message)


def _fresh(member: _Member) -> _Member:
    """The client before it was run, with a meter of its own."""
    old = member.local
    local = LocalTrainer(old.model, old.models, old.data, old.round, old.ledger, old.micro_batch)
    return _Member(member.place, member.job, local)


def _is_close(found: Any, expected: Any) -> bool:
    """Whether trees are equal up to the rounding of a pass."""
    if tree.form(found) != tree.form(expected):
        return False
    pairs = zip(tree.tensors(found), tree.tensors(expected), strict=True)
    return all(_is_near(a, b) for a, b in pairs)


def _is_near(a: Tensor, b: Tensor) -> bool:
    if not a.numel() or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    wide = tree.wide_type(a.dtype)
    bound = max(1e-3, 30 * torch.finfo(a.dtype).eps) * float(b.to(wide).abs().max()) + 1e-5
    return float((a.to(wide) - b.to(wide)).abs().max()) <= bound
