"""The trainer of a cohort: executes ``train``, ``sum_over_data`` and ``steps`` of a view for all clients together."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...core import tree
from ...core.contract import ProximalTerm
from ...core.contract.training_request import KeptState, Request
from ...core.errors import NonFiniteError
from ...core.learning.optimizer import OptimizerState
from ...models.statistics.local_statistics import train_by_batches
from ..captured_variables import code_of
from ..client_tensors.client_tensor import ClientTensor, NoRuleError, to_client_tensor, with_rows
from ..client_tensors.control_flow import (
    DifferingError,
    expand_to_clients,
    require_agreement,
    select_clients,
    split_clients,
    stack_clients,
    stack_numbers,
    unwrap_client_tensor,
)
from ..trainer import LocalTrainer, Meter, check_finite
from .closeness import full_precision, is_close
from .cohort_batches import BufferPool
from .cohort_statistics import sum_over_cohort
from .cohort_steps import train_cohort

T = TypeVar("T")

MAX_BYTES_ON_CPU = 8 << 20
"""Maximum bytes of parameters and constants of clients that are trained together on a CPU; more would leave
the cache between steps."""

MAX_BYTES_ON_GPU = 4 << 30
"""Maximum bytes of parameters and constants of clients that are trained together on a GPU; gradients and
activations take a few times as much."""


@dataclasses.dataclass
class CohortMemory:
    """Objects that an engine keeps for its cohorts from round to round.

    Attributes:
        pool: buffers for batches.
        is_equal: whether the result of a cohort equals that of a single client. Keys are the functions of a pass, a
            statistic, and the local update or the contribution of a kind of cohort. A result without an entry has
            not been compared.
        log: function that logs the name of a pass and the reason why its clients are trained one after another.
        parts: number of parts into which the clients of a pass are divided, by the functions of the pass; only of passes that
            ran out of memory.
    """

    pool: BufferPool
    is_equal: dict[Any, bool]
    log: Callable[[str, object], None]
    parts: dict[Any, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TrainerAnswer:
    """The result of a call of ``train`` or ``sum_over_data``.

    Attributes:
        value: result tree of the cohort, or of one client.
        kept: optimizer state after a pass, if it is kept.
    """

    value: Any
    kept: OptimizerState | None = None


@dataclasses.dataclass(frozen=True)
class Divergence:
    """How the training of a client of a cohort met a NaN or an infinity, while that of the others goes on.

    Attributes:
        answer_count: number of answers before it.
        error: the error.
        meter: cost of the client's work until then, that of the pass included.
    """

    answer_count: int
    error: NonFiniteError
    meter: Meter


class PassAskedError(BaseException):
    """A cohort requests a pass that is trained together with those of other cohorts.

    Attributes:
        request: request of the pass.
    """

    def __init__(self, request: Request) -> None:
        super().__init__("a pass that is trained with those of other cohorts")
        self.request = request


class CohortTrainer:
    """Executes ``train``, ``sum_over_data`` and ``steps`` for K clients, those with the most examples first.

    A method's functions are pure, so a second call of them makes the same calls of the trainer, with the same arguments. The
    trainer answers these from the first call. So no pass is trained again if a function is called again for a part
    of the cohort or for one client.

    Args:
        client_trainers: trainer of each client, with its data and its meter.
        memory: objects that the engine keeps from round to round.
        answers: answers of an earlier call for these clients.
        errors: divergence of each client whose training produced a NaN in an earlier call.
        joins: whether a pass with padded dimensions raises :class:`PassAskedError` and is not trained.

    Attributes:
        client_trainers: the argument ``client_trainers``.
        answers: answers given so far.
        errors: the argument ``errors``, with the errors of this call.
    """

    def __init__(
        self,
        client_trainers: Sequence[LocalTrainer],
        memory: CohortMemory,
        answers: Sequence[TrainerAnswer] = (),
        errors: dict[int, Divergence] | None = None,
        joins: bool = False,
    ) -> None:
        self.client_trainers, self._memory, self._joins = list(client_trainers), memory, joins
        self._earlier = list(answers)
        self.answers: list[TrainerAnswer] = []
        self.errors = {} if errors is None else errors

    def make_replay(self, new_answers: Sequence[TrainerAnswer] = (), joins: bool = False) -> CohortTrainer:
        """Create the trainer for another call of the function, with the answers of this trainer and further ones."""
        return type(self)(
            self.client_trainers, self._memory, [*self.answers, *new_answers], self.errors, joins
        )

    def for_other_clients(self, locals_: Sequence[LocalTrainer]) -> CohortTrainer:
        """Create a trainer of other clients with the same memory and without answers."""
        return type(self)(locals_, self._memory)

    def select(self, positions: Sequence[int]) -> CohortTrainer:
        """Create the trainer of the clients at some indices, with their slices of the answers."""
        answers = [
            TrainerAnswer(
                select_clients(a.value, positions),
                None if a.kept is None else select_clients(a.kept, positions),
            )
            for a in self.answers
        ]
        new_positions = {position: i for i, position in enumerate(positions)}
        errors = {new_positions[k]: error for k, error in self.errors.items() if k in new_positions}
        return type(self)(
            [self.client_trainers[k] for k in positions], self._memory, answers, errors, self._joins
        )

    def split_by_client(self) -> list[ReplayTrainer]:
        """Create the trainers of the single clients, which answer with plain tensors."""
        columns = [split_clients((a.value, a.kept), len(self.client_trainers)) for a in self.answers]
        return [
            ReplayTrainer(local, [TrainerAnswer(*column[k]) for column in columns], self.errors.get(k))
            for k, local in enumerate(self.client_trainers)
        ]

    def train(self, request: Request) -> Any:
        """See :meth:`fedlowrank.core.contract.method.ClientView.train`."""
        answer = self._next(lambda: self._train(request))
        if request.kept is not None:
            request.kept.state = answer.kept
        return _copy_containers(answer.value)

    def sum_over_data(self, statistic: Callable[..., T], params: Any, constants: tuple[Any, ...]) -> T:
        """See :meth:`fedlowrank.core.contract.method.ClientView.sum_over_data`."""

        def compute() -> TrainerAnswer:
            sums = self._sum_over_cohort(statistic, params, constants)
            return TrainerAnswer(self._sum_one_by_one(statistic, params, constants) if sums is None else sums)

        value: T = _copy_containers(self._next(compute).value)
        return value

    def steps(self, name: str) -> Any:
        """Number of steps of a pass: an integer if all clients have the same, otherwise a float64 tensor ``[K]``."""
        steps = [local.steps(name) for local in self.client_trainers]
        return steps[0] if len(set(steps)) == 1 else stack_numbers(steps)

    def _sum_one_by_one(self, statistic: Callable[..., T], params: Any, constants: tuple[Any, ...]) -> T:
        arguments = split_clients((params, constants), len(self.client_trainers))
        sums = [
            local.sum_over_data(statistic, *args)
            for local, args in zip(self.client_trainers, arguments, strict=True)
        ]
        return stack_clients(sums)

    def _sum_over_cohort(
        self, statistic: Callable[..., Any], params: Any, constants: tuple[Any, ...]
    ) -> Any | None:
        """Sum for all clients in one pass over their examples; None if each client must be computed alone."""
        last_local, client_count = self.client_trainers[-1], len(self.client_trainers)
        if client_count == 1 or last_local.model.couples or not last_local.uses_standard_code(statistic):
            return None
        arguments = split_clients((params, constants), client_count)
        cost = last_local.kind_of(statistic, *arguments[-1])
        cache_key = "total", cost
        was_equal = self._memory.is_equal.get(cache_key)
        if was_equal is False:
            return None
        try:
            with contextlib.nullcontext() if was_equal else full_precision():
                sums = sum_over_cohort(self.client_trainers, statistic, params, constants)
                if not was_equal:
                    expected = last_local.fresh().sum_over_data(statistic, *arguments[-1])
                    self._memory.is_equal[cache_key] = is_close(
                        split_clients(sums, client_count)[-1], expected
                    )
        except (Exception, NoRuleError, DifferingError) as reason:  # noqa: BLE001 - a client alone raises the statistic's own error, if it is one
            self._memory.is_equal[cache_key] = False
            self._memory.log("total", reason)
        if not self._memory.is_equal[cache_key]:
            return None
        for local, args in zip(self.client_trainers, arguments, strict=True):
            local.count_sum_over_data(statistic, *args, cost)
        return sums

    def _next(self, compute: Callable[[], TrainerAnswer]) -> TrainerAnswer:
        index = len(self.answers)
        answer = self._earlier[index] if index < len(self._earlier) else compute()
        self.answers.append(answer)
        return answer

    def _train(self, request: Request) -> TrainerAnswer:
        extras = (request.precondition, request.prox, request.proximal_term, request.kept)
        # a function beside the loss might see the zeros of the padding
        joins = self._joins and request.padded.start and all(extra is None for extra in extras)
        if joins and not _counts_steps(request):
            raise PassAskedError(request)
        return self.answer(request)

    def answer(self, request: Request) -> TrainerAnswer:
        """Train a pass of all clients, batched over them where its functions allow it."""
        batched = self.train_batched(request)
        return self._train_one_by_one(request) if batched is None else batched

    @train_by_batches()
    def train_batched(
        self, request: Request, requests: Sequence[Request] | None = None
    ) -> TrainerAnswer | None:
        """Train a pass of all clients together.

        Args:
            request: request of all clients.
            requests: request of each client without padding, by which its cost is counted; None if nothing is
                padded.

        Returns:
            The answer, or None if each client must be trained alone.
        """
        first_local, name = self.client_trainers[0], request.name
        if _counts_steps(request):
            require_agreement([local.steps(name) for local in self.client_trainers])
        if first_local.model.couples or not first_local.may_batch_over_clients(request):
            if first_local.data.loss.is_custom:
                self._memory.log(name, f"the loss {first_local.data.loss.kind} is code of your own")
            return None
        functions = (
            first_local.kind(_of_first_client(request)),
            code_of(request.precondition),
            code_of(request.prox),
        )
        was_equal = self._memory.is_equal.get(functions)
        if was_equal is False or len(self.client_trainers) == 1:
            return None
        part_count = self._memory.parts.get(functions, 1)
        while True:
            try:
                answer = self._train_parts(request, not was_equal, requests, part_count)
            except NoRuleError as reason:
                self._memory.is_equal[functions] = False
                self._memory.log(name, reason)
                return None
            except torch.OutOfMemoryError as error:
                if part_count >= len(self.client_trainers):
                    # a client that is trained alone may take a step in parts
                    self._memory.log(name, error)
                    return None
                part_count = self._memory.parts[functions] = min(2 * part_count, len(self.client_trainers))
            else:
                self._memory.is_equal[functions] = True
                return answer

    def _train_parts(
        self, request: Request, compare: bool, requests: Sequence[Request] | None, part_count: int
    ) -> TrainerAnswer:
        """Train a pass of all clients in at least ``part_count`` parts of them, one part after another."""
        client_count = len(self.client_trainers)

        def copy_for_clients(t: Tensor) -> Tensor:
            return expand_to_clients(t, client_count).detach().clone(memory_format=torch.contiguous_format)

        start = tree.map_leaves(copy_for_clients, request.start)
        constants = tree.map_leaves(lambda t: expand_to_clients(t, client_count), request.constants)
        term = request.proximal_term
        if term is not None and (term.center is not None or term.linear is not None):
            center, linear = (
                None if v is None else tree.map_leaves(lambda t: expand_to_clients(t, client_count), v)
                for v in (term.center, term.linear)
            )
            term = ProximalTerm(term.strength, center, linear)
        previous_state = None if request.kept is None else request.kept.state
        slots = (
            None
            if previous_state is None
            else [tree.map_leaves(copy_for_clients, slot) for slot in previous_state.slots]
        )
        ends, losses, kept_states = [], [], []
        for a, b in self._bounds_of_parts(start, constants, part_count):
            cut = _slice_clients(a, b)
            state = None
            if request.kept is not None:
                if slots is None or previous_state is None:
                    state = KeptState(None)
                else:
                    state = KeptState(OptimizerState([cut(s) for s in slots], previous_state.step_counts))
            part_term = (
                None if term is None else ProximalTerm(term.strength, cut(term.center), cut(term.linear))
            )
            part_request = dataclasses.replace(
                request, start=cut(start), constants=cut(constants), proximal_term=part_term, kept=state
            )
            with with_rows():
                end, loss = train_cohort(
                    self.client_trainers[a:b],
                    part_request,
                    self.client_trainers[0].round,
                    self._memory.pool,
                    compare,
                )
            ends.append(tree.canonical(end))
            losses.append(loss)
            kept_states.append(None if state is None else state.state)
        end = ends[0] if len(ends) == 1 else tree.map_leaves(_join_parts, start, *ends)
        self._account(requests or [request], losses, end)
        return TrainerAnswer(tree.map_leaves(to_client_tensor, end), _join_kept(kept_states))

    def _bounds_of_parts(self, start: Any, constants: Any, part_count: int) -> list[tuple[int, int]]:
        """Start and exclusive end index of at least ``part_count`` parts of similar sizes, each of which fits into memory."""
        tensors = tree.tensors(start) + tree.tensors(constants)
        client_count = len(self.client_trainers)
        on_cpu = all(t.device.type == "cpu" for t in tensors)
        size = sum(t.nbytes for t in tensors) // client_count
        max_clients = max(1, (MAX_BYTES_ON_CPU if on_cpu else MAX_BYTES_ON_GPU) // max(1, size))
        part_count = min(client_count, max(part_count, -(-client_count // max_clients)))
        bounds = [client_count * k // part_count for k in range(part_count + 1)]
        return list(itertools.pairwise(bounds))

    def _account(self, requests: Sequence[Request], losses: Sequence[Tensor], end: Any) -> None:
        """Enter the cost and the mean loss of each client into its meter, and store the errors of clients with a NaN.

        Args:
            requests: one request of all clients, or the request of each client.
            losses: losses ``[clients, steps]`` of each part.
            end: trained tree of all clients.
        """
        name, locals_ = requests[0].name, self.client_trainers
        costs = self._count_passes(requests)
        sums = [part_losses.sum(1, dtype=torch.float64) for part_losses in losses]
        loss_sums = (sums[0] if len(sums) == 1 else torch.cat(sums)).tolist()
        for local, (steps, flops), loss_sum in zip(locals_, costs, loss_sums, strict=True):
            local.enter_pass(name, steps, flops, loss_sum / steps)
        if all(map(math.isfinite, loss_sums)) and tree.not_finite(end) is None:
            return
        rows = [row for part_losses in losses for row in part_losses]
        for k, (local, (steps, _), row) in enumerate(zip(locals_, costs, rows, strict=True)):
            client_end = tree.map_leaves(lambda t, k=k: t[k], end)
            try:
                check_finite(local.data.info, local.round, name, row[:steps], client_end)
            except NonFiniteError as error:
                self.errors.setdefault(k, Divergence(len(self.answers), error, copy.deepcopy(local.meter)))

    def _count_passes(self, requests: Sequence[Request]) -> list[tuple[int, int]]:
        """Count the steps and the operations of each client's pass.

        Args:
            requests: one request of all clients, or the request of each client.
        """
        first_local = self.client_trainers[0]
        has_texts, is_standard = first_local.data.width is not None, first_local.is_standard(requests[0])
        kinds = {}
        for request_id, request in {id(request): request for request in requests}.items():
            single_request = _of_first_client(request)
            kinds[request_id] = single_request, first_local.kind(single_request)
        costs, counts = [], dict[tuple[int, int], tuple[int, int]]()
        for k, local in enumerate(self.client_trainers):
            # batches with the same number of examples cost the same, except for texts
            form = id(requests[k % len(requests)]), -1 - k if has_texts else len(local.data.examples)
            if form not in counts:
                single_request, kind = kinds[form[0]]
                if not is_standard:
                    local.fit_cost(single_request, kind)
                local.count(single_request, kind)
                counts[form] = local.steps(single_request.name), local.flops(single_request, kind)
            costs.append(counts[form])
        return costs

    def _train_one_by_one(self, request: Request) -> TrainerAnswer:
        ends, kept_states = [], []
        requests = _split_request(request, len(self.client_trainers))
        for k, (local, single_request) in enumerate(zip(self.client_trainers, requests, strict=True)):
            try:
                ends.append(
                    local.train(single_request)
                    if k not in self.errors
                    else tree.canonical(single_request.start)
                )
            except NonFiniteError as error:
                self.errors[k] = Divergence(len(self.answers), error, copy.deepcopy(local.meter))
                # the function's results for this client are not used from here on
                ends.append(tree.canonical(single_request.start))
            kept_states.append(None if single_request.kept is None else single_request.kept.state)
        if any(k is None for k in kept_states):
            return TrainerAnswer(stack_clients(ends))
        return TrainerAnswer(stack_clients(ends), stack_clients(kept_states))


class ReplayTrainer:
    """The trainer of one client with plain tensors, which answers its first calls from its cohort.

    Args:
        local: trainer of this client alone.
        answers: slices of the cohort's answers for this client.
        error: divergence of the client's training; None if there was no NaN.
    """

    def __init__(
        self,
        local: LocalTrainer,
        answers: Sequence[TrainerAnswer],
        error: Divergence | None = None,
    ) -> None:
        self._local, self._answers, self._error = local, answers, error
        self._calls = 0

    @property
    def meter(self) -> Meter:
        """The cost of the client's work, up to the NaN if there was one."""
        return self._local.meter if self._error is None else self._error.meter

    def train(self, request: Request) -> Any:
        """See :meth:`fedlowrank.core.contract.method.ClientView.train`."""
        if (answer := self._next()) is None:
            return self._local.train(request)
        if request.kept is not None:
            request.kept.state = answer.kept
        return _copy_containers(answer.value)

    def sum_over_data(self, statistic: Callable[..., T], params: Any, constants: tuple[Any, ...]) -> T:
        """See :meth:`fedlowrank.core.contract.method.ClientView.sum_over_data`."""
        if (answer := self._next()) is None:
            return self._local.sum_over_data(statistic, params, constants)
        value: T = _copy_containers(answer.value)
        return value

    def steps(self, name: str) -> int:
        """See :meth:`fedlowrank.core.contract.method.ClientView.steps`."""
        return self._local.steps(name)

    def _next(self) -> TrainerAnswer | None:
        index = self._calls
        self._calls += 1
        if self._error is not None and index >= self._error.answer_count:
            raise self._error.error
        return self._answers[index] if index < len(self._answers) else None


def _copy_containers(value: T) -> T:
    """Copy the containers of an answer, which the method may change; the tensors are shared."""
    return tree.map_leaves(lambda t: t, value)


def _counts_steps(request: Request) -> bool:
    """Whether a step depends on the number of steps of the pass, so that clients with unequal numbers cannot be batched."""
    schedule = request.optimizer.local_schedule
    return request.kept is not None or schedule.depends_on_total or schedule.rounds is not None


def _slice_clients(a: int, b: int) -> Callable[[Any], Any]:
    """Build a function that slices the clients a to b - 1 out of trees ``[K, ...]``."""
    return lambda value: tree.map_leaves(lambda t: t[a:b], value)


def _of_first_client(request: Request) -> Request:
    """The request of the first client."""

    def first(value: Any) -> Any:
        return tree.map_leaves(
            lambda t: unwrap_client_tensor(t)[0] if isinstance(t, ClientTensor) else t, value
        )

    return dataclasses.replace(
        request, start=first(request.start), constants=first(request.constants), proximal_term=None, kept=None
    )


def _split_request(request: Request, client_count: int) -> list[Request]:
    """The request of each client."""
    term, kept_state = request.proximal_term, request.kept
    trees = (
        request.start,
        request.constants,
        None if term is None else [term.center, term.linear],
        None if kept_state is None else kept_state.state,
    )
    requests = []
    for start, constants, term_tensors, state in split_clients(trees, client_count):
        client_term = (
            None if term is None or term_tensors is None else ProximalTerm(term.strength, *term_tensors)
        )
        requests.append(
            dataclasses.replace(
                request,
                start=start,
                constants=constants,
                proximal_term=client_term,
                kept=None if kept_state is None else KeptState(state),
            )
        )
    return requests


def _join_parts(start: Tensor, *ends: Tensor) -> Tensor:
    """Join the trained tensors of parts of the clients; ``start`` holds them already if its slices were trained in place."""
    slices = start.split([len(end) for end in ends])
    if all(
        end.data_ptr() == s.data_ptr() and end.stride() == s.stride()
        for end, s in zip(ends, slices, strict=True)
    ):
        return start
    return torch.cat(ends)


def _join_kept(states: Sequence[OptimizerState | None]) -> OptimizerState | None:
    """Join the optimizer states of parts of the clients, all of which have taken equally many steps."""
    kept_states = [s for s in states if s is not None]
    if not kept_states:
        return None
    slots = zip(*(s.slots for s in kept_states), strict=True)
    return OptimizerState(
        [tree.map_leaves(lambda *ts: to_client_tensor(torch.cat(ts)), *slot) for slot in slots],
        kept_states[0].step_counts,
    )
