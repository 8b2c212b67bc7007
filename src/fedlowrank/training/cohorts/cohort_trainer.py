"""The verbs of a view, executed for all clients of a cohort at once; their answers are kept for a replay."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...core import tree
from ...core.contract.method import ProximalTerm
from ...core.contract.training_request import KeptState, Request
from ...core.errors import NonFiniteError
from ...core.learning.optimizer import OptimizerState
from ..captured_variables import code_of
from ..cohort import train_cohort
from ..feed import BufferPool
from ..stacked import Stacked, UnsupportedError, stack, with_rows
from ..trainer import LocalTrainer, all_finite, check_finite
from . import varying_sizes  # noqa: F401 - importing it adds its rules to the table
from .closeness import full_precision, is_close
from .cohort_statistics import total_cohort
from .control_flow import (
    DifferingError,
    expand_to_clients,
    require_agreement,
    select_clients,
    split_clients,
    stack_clients,
    stack_numbers,
    unwrap_stacked,
)

T = TypeVar("T")

CACHE = 8 << 20
"""Bytes of stacked parameters and constants on a CPU; a larger stack leaves the cache between steps."""

MEMORY = 4 << 30
"""Bytes of stacked parameters and constants on a GPU; gradients and activations take a few times as much."""


@dataclasses.dataclass
class CohortMemory:
    """What an engine remembers from round to round.

    Attributes:
        pool: buffers for batches.
        is_equal: whether what is computed for many clients at once equals what one computes alone; by what it is: the functions
            of a pass, a statistic, the local update or the contribution of a kind of cohort. Without an entry it was not
            compared.
        log: tells a person why clients are trained one after another.
        parts: into how many parts the clients of a pass are divided, by its functions, where all at once ran out of memory.
    """

    pool: BufferPool
    is_equal: dict[Any, bool]
    log: Callable[[str, object], None]
    parts: dict[Any, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class VerbAnswer:
    """What a verb answered: a tree of the cohort, and the optimizer state that the pass left."""

    value: Any
    kept: OptimizerState | None = None


class PassAskedError(BaseException):
    """A cohort asks for a pass that is to be trained with those of other cohorts.

    Attributes:
        request: what it asks for.
    """

    def __init__(self, request: Request) -> None:
        super().__init__("a pass that is trained with those of other cohorts")
        self.request = request


class CohortTrainer:
    """The verbs ``train``, ``total`` and ``steps`` of K clients, those with the most examples first.

    A method's functions are pure, so a second call asks the same of the verbs. Its first questions get the answers of the
    first call: a part of the cohort, or one client alone, trains nothing again.

    Args:
        locals_: execution for each client alone, with its data and its meter.
        memory: of the engine.
        answers: of an earlier call for these clients.
        errors: clients whose training met a NaN in an earlier call, with the number of answers before it.
        joins: whether a pass with padded dimensions raises :class:`PassAskedError` instead of being trained.

    Attributes:
        locals_: as above.
        answers: given so far.
        errors: as above.
    """

    def __init__(
        self,
        locals_: Sequence[LocalTrainer],
        memory: CohortMemory,
        answers: Sequence[VerbAnswer] = (),
        errors: dict[int, tuple[int, NonFiniteError]] | None = None,
        joins: bool = False,
    ) -> None:
        self.locals_, self._memory, self._joins = list(locals_), memory, joins
        self._earlier = list(answers)
        self.answers: list[VerbAnswer] = []
        self.errors = {} if errors is None else errors

    def again(self, further: Sequence[VerbAnswer] = (), joins: bool = False) -> CohortTrainer:
        """The trainer for another call, which gets the answers of this one and further ones."""
        return type(self)(self.locals_, self._memory, [*self.answers, *further], self.errors, joins)

    def beside(self, locals_: Sequence[LocalTrainer]) -> CohortTrainer:
        """A trainer of other clients with the same memory and no answers."""
        return type(self)(locals_, self._memory)

    def part(self, places: Sequence[int]) -> CohortTrainer:
        """The trainer of some of the clients, with the answers that they have."""
        answers = [
            VerbAnswer(
                select_clients(a.value, places), None if a.kept is None else select_clients(a.kept, places)
            )
            for a in self.answers
        ]
        new = {place: i for i, place in enumerate(places)}
        errors = {new[k]: found for k, found in self.errors.items() if k in new}
        return type(self)([self.locals_[k] for k in places], self._memory, answers, errors, self._joins)

    def singles(self) -> list[ReplayTrainer]:
        """The trainer of each client with plain tensors."""
        columns = [split_clients((a.value, a.kept), len(self.locals_)) for a in self.answers]
        return [
            ReplayTrainer(local, [VerbAnswer(*column[k]) for column in columns], self.errors.get(k))
            for k, local in enumerate(self.locals_)
        ]

    def train(self, request: Request) -> Any:
        """See :meth:`fedlowrank.core.contract.method.ClientView.train`."""
        answer = self._next(lambda: self._train(request))
        if request.kept is not None:
            request.kept.state = answer.kept
        return _own_tree(answer.value)

    def total(self, statistic: Callable[..., T], params: Any, constants: tuple[Any, ...]) -> T:
        """See :meth:`fedlowrank.core.contract.method.ClientView.total`."""

        def compute() -> VerbAnswer:
            found = self._total_together(statistic, params, constants)
            return VerbAnswer(
                self._total_one_by_one(statistic, params, constants) if found is None else found
            )

        value: T = _own_tree(self._next(compute).value)
        return value

    def steps(self, name: str) -> Any:
        """Steps of a pass: a number, or where the clients differ a number of each, float64 ``[K]`` to compute with."""
        found = [local.steps(name) for local in self.locals_]
        return found[0] if len(set(found)) == 1 else stack_numbers(found)

    def _total_one_by_one(self, statistic: Callable[..., T], params: Any, constants: tuple[Any, ...]) -> T:
        given = split_clients((params, constants), len(self.locals_))
        return stack_clients(
            [local.total(statistic, *own) for local, own in zip(self.locals_, given, strict=True)]
        )

    def _total_together(
        self, statistic: Callable[..., Any], params: Any, constants: tuple[Any, ...]
    ) -> Any | None:
        """The sums of all clients in one pass; None where each must be computed alone."""
        last, clients = self.locals_[-1], len(self.locals_)
        if clients == 1 or last.model.couples or not last.has_standard(statistic):
            return None
        given = split_clients((params, constants), clients)
        cost = last.kind_of(statistic, *given[-1])
        kind = "total", cost
        known = self._memory.is_equal.get(kind)
        if known is False:
            return None
        try:
            with contextlib.nullcontext() if known else full_precision():
                found = total_cohort(self.locals_, statistic, params, constants)
                if not known:
                    alone = last.fresh().total(statistic, *given[-1])
                    self._memory.is_equal[kind] = is_close(split_clients(found, clients)[-1], alone)
        except (Exception, UnsupportedError, DifferingError) as reason:  # noqa: BLE001 - a client alone raises the statistic's own error, if it is one
            self._memory.is_equal[kind] = False
            self._memory.log("total", reason)
        if not self._memory.is_equal[kind]:
            return None
        for local, own in zip(self.locals_, given, strict=True):
            local.count_total(statistic, *own, cost)
        return found

    def _next(self, compute: Callable[[], VerbAnswer]) -> VerbAnswer:
        place = len(self.answers)
        answer = self._earlier[place] if place < len(self._earlier) else compute()
        self.answers.append(answer)
        return answer

    def _train(self, request: Request) -> VerbAnswer:
        changed = (request.precondition, request.prox, request.proximal_term, request.kept)
        # what changes a step by more than its loss might see the zeros
        joins = self._joins and request.padded.start and all(f is None for f in changed)
        if joins and not _counts_steps(request):
            raise PassAskedError(request)
        return self.answer(request)

    def answer(self, request: Request) -> VerbAnswer:
        """What a pass of all clients gives, batched over them where its functions can be."""
        found = self.batched(request)
        # an error of a client alone comes out by itself
        return self._one_by_one(request) if found is None else found

    def batched(self, request: Request, own: Sequence[Request] | None = None) -> VerbAnswer | None:
        """A pass of all clients at once; None where each client must be trained alone.

        Args:
            request: of all clients.
            own: of each client by itself, by which its cost is counted; None if padding changes none.
        """
        first, name = self.locals_[0], request.name
        if _counts_steps(request):
            require_agreement([local.steps(name) for local in self.locals_])
        if first.model.couples or not first.may_stack(request):
            if first.data.loss.is_own:
                self._memory.log(name, f"the loss {first.data.loss.kind} is code of your own")
            return None
        functions = first.kind(_of_one(request)), code_of(request.precondition), code_of(request.prox)
        known = self._memory.is_equal.get(functions)
        if known is False or len(self.locals_) == 1:
            return None
        parts = self._memory.parts.get(functions, 1)
        while True:
            try:
                found = self._together(request, not known, own, parts)
            except UnsupportedError as reason:
                self._memory.is_equal[functions] = False
                self._memory.log(name, reason)
                return None
            except torch.OutOfMemoryError as error:
                if parts >= len(self.locals_):
                    # a client alone may take a step in parts
                    self._memory.log(name, error)
                    return None
                parts = self._memory.parts[functions] = min(2 * parts, len(self.locals_))
            else:
                self._memory.is_equal[functions] = True
                return found

    def _together(
        self, request: Request, compare: bool, own_requests: Sequence[Request] | None, parts: int
    ) -> VerbAnswer:
        """A pass of all clients, at least so many parts of them one after another."""
        clients = len(self.locals_)

        def own(t: Tensor) -> Tensor:
            return expand_to_clients(t, clients).detach().clone(memory_format=torch.contiguous_format)

        start = tree.map_leaves(own, request.start)
        constants = tree.map_leaves(lambda t: expand_to_clients(t, clients), request.constants)
        term = request.proximal_term
        if term is not None and (term.center is not None or term.linear is not None):
            center, linear = (
                None if v is None else tree.map_leaves(lambda t: expand_to_clients(t, clients), v)
                for v in (term.center, term.linear)
            )
            term = ProximalTerm(term.strength, center, linear)
        before = None if request.kept is None else request.kept.state
        slots = None if before is None else [tree.map_leaves(own, slot) for slot in before.slots]
        ends, losses, kept = [], [], []
        for a, b in self._chunks(start, constants, parts):
            cut = _cut(a, b)
            state = None
            if request.kept is not None:
                past = (
                    None
                    if slots is None or before is None
                    else OptimizerState([cut(s) for s in slots], before.taken)
                )
                state = KeptState(past)
            some = None if term is None else ProximalTerm(term.strength, cut(term.center), cut(term.linear))
            whole = dataclasses.replace(
                request, start=cut(start), constants=cut(constants), proximal_term=some, kept=state
            )
            with with_rows():
                end, loss = train_cohort(
                    self.locals_[a:b], whole, self.locals_[0].round, self._memory.pool, compare
                )
            ends.append(tree.canonical(end))
            losses.append(loss)
            kept.append(None if state is None else state.state)
        end = ends[0] if len(ends) == 1 else tree.map_leaves(lambda *ts: torch.cat(ts), ends[0], *ends[1:])
        self._account(own_requests or [request], losses, end)
        return VerbAnswer(tree.map_leaves(stack, end), _join_kept(kept))

    def _chunks(self, start: Any, constants: Any, parts: int) -> list[tuple[int, int]]:
        """As many clients at once as have room, in at least that many parts of like sizes."""
        tensors = tree.tensors(start) + tree.tensors(constants)
        clients = len(self.locals_)
        on_cpu = all(t.device.type == "cpu" for t in tensors)
        size = sum(t.nbytes for t in tensors) // clients
        most = max(1, (CACHE if on_cpu else MEMORY) // max(1, size))
        parts = min(clients, max(parts, -(-clients // most)))
        bounds = [clients * k // parts for k in range(parts + 1)]
        return list(itertools.pairwise(bounds))

    def _account(self, requests: Sequence[Request], losses: Sequence[Tensor], end: Any) -> None:
        """Enter the cost and the mean loss of each client, and note who met a NaN.

        ``requests`` are one of all clients, or one of each.
        """
        name, k, first = requests[0].name, 0, self.locals_[0]
        costs = {
            id(r): (one, first.kind(one), first.is_standard(one)) for r in requests for one in [_of_one(r)]
        }
        sound = all(all_finite(part, []) for part in losses) and all_finite(losses[0][:0], end)
        for part in losses:
            steps = torch.tensor([local.steps(name) for local in self.locals_[k : k + len(part)]])
            means = (part.sum(1, dtype=torch.float64).cpu() / steps).tolist()
            for row, mean in zip(part, means, strict=True):
                local = self.locals_[k]
                one, kind, is_standard = costs[id(requests[k % len(requests)])]
                if not is_standard:
                    local.fit_cost(one, kind)
                local.count(one, kind)
                local.account(one, kind, mean)
                if not sound:
                    mine = tree.map_leaves(lambda t, k=k: t[k], end)
                    try:
                        check_finite(local.data.info, local.round, name, row[: local.steps(name)], mine)
                    except NonFiniteError as error:
                        self.errors.setdefault(k, (len(self.answers), error))
                k += 1

    def _one_by_one(self, request: Request) -> VerbAnswer:
        ends, kept = [], []
        for k, (local, own) in enumerate(
            zip(self.locals_, _requests(request, len(self.locals_)), strict=True)
        ):
            try:
                ends.append(local.train(own) if k not in self.errors else tree.canonical(own.start))
            except NonFiniteError as error:
                self.errors[k] = len(self.answers), error
                # what follows of the client is not used
                ends.append(tree.canonical(own.start))
            kept.append(None if own.kept is None else own.kept.state)
        if any(k is None for k in kept):
            return VerbAnswer(stack_clients(ends))
        return VerbAnswer(stack_clients(ends), stack_clients(kept))


class ReplayTrainer:
    """One client with plain tensors, whose first answers were computed with its cohort.

    Args:
        local: execution for this client alone.
        answers: of the cohort, as they are for this client.
        error: the number of answers before its training met a NaN, and the error.
    """

    def __init__(
        self,
        local: LocalTrainer,
        answers: Sequence[VerbAnswer],
        error: tuple[int, NonFiniteError] | None = None,
    ) -> None:
        self._local, self._answers, self._error = local, answers, error
        self._given = 0

    def train(self, request: Request) -> Any:
        """See :meth:`fedlowrank.core.contract.method.ClientView.train`."""
        if (answer := self._next()) is None:
            return self._local.train(request)
        if request.kept is not None:
            request.kept.state = answer.kept
        return _own_tree(answer.value)

    def total(self, statistic: Callable[..., T], params: Any, constants: tuple[Any, ...]) -> T:
        """See :meth:`fedlowrank.core.contract.method.ClientView.total`."""
        if (answer := self._next()) is None:
            return self._local.total(statistic, params, constants)
        value: T = _own_tree(answer.value)
        return value

    def steps(self, name: str) -> int:
        """See :meth:`fedlowrank.core.contract.method.ClientView.steps`."""
        return self._local.steps(name)

    def _next(self) -> VerbAnswer | None:
        place = self._given
        self._given += 1
        if self._error is not None and place >= self._error[0]:
            raise self._error[1]
        return self._answers[place] if place < len(self._answers) else None


def _own_tree(value: T) -> T:
    """An answer in containers that its receiver may change; a further call gets the same answer, unchanged."""
    return tree.map_leaves(lambda t: t, value)


def _counts_steps(request: Request) -> bool:
    """Whether a step depends on how many the pass has: clients with other numbers are trained separately."""
    schedule = request.optimizer.local_schedule
    return request.kept is not None or schedule.depends_on_total or schedule.rounds is not None


def _cut(a: int, b: int) -> Callable[[Any], Any]:
    """Some clients of trees ``[K, ...]``."""
    return lambda value: tree.map_leaves(lambda t: t[a:b], value)


def _of_one(request: Request) -> Request:
    """The request of the first client."""

    def first(value: Any) -> Any:
        return tree.map_leaves(lambda t: unwrap_stacked(t)[0] if isinstance(t, Stacked) else t, value)

    return dataclasses.replace(
        request, start=first(request.start), constants=first(request.constants), proximal_term=None, kept=None
    )


def _requests(request: Request, clients: int) -> list[Request]:
    """The request of each client."""
    term, kept = request.proximal_term, request.kept
    parts = (
        request.start,
        request.constants,
        None if term is None else [term.center, term.linear],
        None if kept is None else kept.state,
    )
    found = []
    for start, constants, own, state in split_clients(parts, clients):
        center = None if term is None or own is None else ProximalTerm(term.strength, *own)
        found.append(
            dataclasses.replace(
                request,
                start=start,
                constants=constants,
                proximal_term=center,
                kept=None if kept is None else KeptState(state),
            )
        )
    return found


def _join_kept(states: Sequence[OptimizerState | None]) -> OptimizerState | None:
    """The optimizer states of all clients, which have taken equally many steps."""
    found = [s for s in states if s is not None]
    if not found:
        return None
    slots = zip(*(s.slots for s in found), strict=True)
    return OptimizerState(
        [tree.map_leaves(lambda *ts: stack(torch.cat(ts)), *slot) for slot in slots], found[0].taken
    )
