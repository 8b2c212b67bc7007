"""The trainer of one client: executes its training passes and sums over its training data."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..core import tree
from ..core.arguments.user_code import is_of_package
from ..core.contract import Batch, ClientInfo
from ..core.contract.training_request import Request
from ..core.errors import LossError, NonFiniteError, naming
from ..core.io.text import format_count
from ..core.key import Key
from ..models.architecture import Architecture
from ..models.coupling import mixes_examples
from ..models.hidden_state import record_frozen_versions, refuse_changed_parameters
from ..models.statistics.local_statistics import infer_by, train_by_batches
from .captured_variables import code_of
from .flops import FlopCounter, FlopLedger
from .hook_calls import refuse_in_place
from .local_data import BatchSize, LocalData, chunk_size, gather, size_of
from .steps import PassSteps

T = TypeVar("T")

logger = logging.getLogger(__name__)

_BATCHES_OF_ONE = (
    "Set drop_last = true in the method, or a batch_size that leaves no client a batch of one example; a client "
    "with one example cannot train this model."
)


@dataclass
class Meter:
    """The cost of one client's work in a round.

    Attributes:
        steps: number of optimizer steps.
        flops: number of floating-point operations of training passes and statistics.
        losses: mean loss over the steps of each pass, by the name of the pass.
    """

    steps: int = 0
    flops: int = 0
    losses: dict[str, float] = field(default_factory=dict)


MAX_BATCHED_STEP = 1 << 14
"""Maximum product of a batch's tokens and the hidden size with which many transformer models train faster together."""


class PassTrainer(Protocol):
    """A trainer that takes the steps of a pass instead of :func:`descend`, such as one of another library."""

    def __call__(
        self, request: Request, data: LocalData, model: Architecture, round: int, micro_batch: int | None
    ) -> tuple[Any, Tensor]:
        """Train a pass; returns the trained tree, and the losses of the steps or their mean ``[steps or 1]``."""
        ...


class LocalTrainer:
    """Executes training passes for one client, one after another.

    Args:
        model: architecture of the client.
        models: all architectures of the task.
        data: training data of the client.
        round: index of the round, from 0.
        ledger: ledger of the cost of steps, shared by all clients of a run.
        micro_batch: number of examples whose gradient is computed together, or None for the whole batch.
        may_halve: whether a step of repeatable models that runs out of memory is taken in halves; False if the loss
            of a batch is not a mean over its examples.
    """

    def __init__(
        self,
        model: Architecture,
        models: Iterable[Architecture],
        data: LocalData,
        round: int,
        ledger: FlopLedger,
        micro_batch: int | None = None,
        may_halve: bool = False,
    ) -> None:
        self.model = model
        self.models = list(models)
        self.data = data
        self.round = round
        self.ledger = ledger
        self.micro_batch = micro_batch
        self.may_halve = may_halve
        self.meter = Meter()

    def fresh(self) -> LocalTrainer:
        """Create a trainer of the same client with a new meter."""
        return LocalTrainer(
            self.model,
            self.models,
            self.data,
            self.round,
            self.ledger,
            micro_batch=self.micro_batch,
            may_halve=self.may_halve,
        )

    def steps(self, name: str) -> int:
        """See :meth:`fedlowrank.core.contract.method.ClientView.steps`."""
        return self.data.steps(name)

    @train_by_batches()
    def train(self, request: Request) -> Any:
        """See :meth:`fedlowrank.core.contract.method.ClientView.train`."""
        name, kind = request.name, self.kind(request)
        is_standard = self.is_standard(request)
        is_repeatable = all(m.may_run_again for m in self.models)
        if not is_standard and is_repeatable:
            self.fit_cost(request, kind)
        training = contextlib.nullcontext() if is_standard else self._in_training(self.data.key / name)
        pass_trainer: PassTrainer | None = self.model.pass_trainer
        call = f"a function of view.train ({self.data.info.title}, round {self.round + 1}, pass {name!r})"
        unchanged = refuse_in_place(call, constants=request.constants)
        try:
            with training, unchanged, naming(self.owner, _BATCHES_OF_ONE):
                if is_standard or (pass_trainer is not None and not self.ledger.is_fitted(kind)):
                    self.count(request, kind)
                if pass_trainer is not None:
                    end, losses = pass_trainer(request, self.data, self.model, self.round, self.micro_batch)
                else:
                    end, losses = descend(
                        request,
                        self.data.batches(name),
                        self.round,
                        self.micro_batch,
                        self._counting(kind, is_standard),
                        self.steps(name),
                        self.owner if self.may_halve and is_repeatable else None,
                    )
        except LossError as error:
            location = f"{self.data.info.title}, round {self.round + 1}, pass {name!r}"
            raise LossError(f"{location}: {error}") from error
        self.account(request, kind, float(losses.mean(dtype=tree.wide_type(losses.dtype))))
        check_finite(self.data.info, self.round, name, losses, end)
        return tree.canonical(end)

    def is_standard(self, request: Request) -> bool:
        """Whether a step has no side effects: its functions and loss are this package's, and all layers are standard.

        Only then may an engine evaluate the loss more often than the user's own loop would, or for many clients
        together.
        """
        return self.uses_standard_code(request.loss, request.precondition, request.prox)

    def uses_standard_code(self, *functions: Callable[..., Any] | None) -> bool:
        """Whether functions and loss are this package's, and all layers are standard."""
        return self._has_package_functions(*functions) and self.has_standard_models

    def _has_package_functions(self, *functions: Callable[..., Any] | None) -> bool:
        """Whether functions and loss are this package's."""
        return all(f is None or is_of_package(f) for f in functions) and not self.data.loss.is_custom

    def may_batch_over_clients(self, request: Request) -> bool:
        """Whether an engine may take the steps of many clients together: only the models may be nonstandard."""
        functions = request.loss, request.precondition, request.prox
        return self._has_package_functions(*functions) and self.beyond_stacking is None

    @property
    def has_standard_models(self) -> bool:
        """Whether all layers of all models are standard."""
        return all(m.is_standard for m in self.models)

    @property
    def beyond_stacking(self) -> str | None:
        """The reason why steps of clients with these models are not taken together, for a message; None if they are."""
        return next((reason for m in self.models if (reason := m.beyond_stacking or self._is_large(m))), None)

    def _is_large(self, model: Architecture) -> str | None:
        """The reason why steps of a nonstandard model are no faster together; None if they are."""
        if model.is_standard:
            return None
        if model.hidden_size is None or self.data.width is None:
            return "only models of transformers on texts are trained together beside standard ones"
        rows = max(min(p.batch_size, len(self.data.examples)) for p in self.data.passes.values())
        size = rows * self.data.width * model.hidden_size
        if size <= MAX_BATCHED_STEP:
            return None
        return f"a step of {rows} x {self.data.width} tokens of {model.hidden_size} numbers is as fast alone"

    def _counting(self, kind: Any, is_standard: bool) -> Callable[[Batch], AbstractContextManager[None]]:
        """The context manager that is entered around each step to count its operations.

        Steps of standard layers have been counted without being taken. All others are counted when they are taken,
        the first of each size in every pass: counting may change the order of sums, and a result must not depend on
        earlier work of the process.
        """
        counted_sizes: set[BatchSize] = set()
        is_known = is_standard or self.ledger.is_fitted(kind)

        def around(batch: Batch) -> AbstractContextManager[None]:
            size = size_of(batch)
            if is_known or size in counted_sizes:
                return contextlib.nullcontext()
            counted_sizes.add(size)
            return self.ledger.counting(kind, size)

        return around

    def account(self, request: Request, kind: Any, loss: float) -> None:
        """Enter a pass of the given :meth:`kind`, whose steps are counted, and its mean loss into the meter."""
        self.enter_pass(request.name, self.steps(request.name), self.flops(request, kind), loss)

    def flops(self, request: Request, kind: Any) -> int:
        """Operations of a pass of the given :meth:`kind`, whose steps are counted."""
        return self.ledger.total(kind, Counter(self.data.size(i) for i in self.data.order(request.name)))

    def enter_pass(self, name: str, steps: int, flops: int, loss: float) -> None:
        """Enter the steps, the operations and the mean loss of a pass into the meter."""
        self.meter.flops += flops
        self.meter.steps += steps
        self.meter.losses[name] = loss

    def count(self, request: Request, kind: Any) -> None:
        """Count the operations of one step of each size for a request of standard layers, without taking the steps."""
        pass_steps = None
        for size, i in {self.data.size(i): i for i in self.data.order(request.name)}.items():
            if not self.ledger.knows(kind, size):
                pass_steps = pass_steps or PassSteps(request, self.round)
                with self.ledger.counting(kind, size):
                    pass_steps.gradient(pass_steps.loss(gather(self.data.examples, i, loss=self.data.loss)))

    def fit_cost(self, request: Request, kind: Any) -> None:
        """Fit the cost of steps on texts to a few short ones, which are counted and not taken; other data is skipped."""
        if self.data.width is None or self.ledger.has_tried(kind):
            return
        pass_steps = PassSteps(request, self.round)

        def count(texts: int, tokens: int) -> int:
            index = torch.zeros(texts, dtype=torch.int64)
            batch = gather(self.data.examples, index, columns=tokens, loss=self.data.loss)
            with self._in_training(self.data.key / "cost"), FlopCounter() as counter:
                pass_steps.gradient(pass_steps.loss(batch))
            return int(counter.total)

        self.ledger.fit(kind, count, self.data.width or 0)

    @contextlib.contextmanager
    def _in_training(self, key: Key) -> Iterator[None]:
        """Put all models in training mode, and let user code draw from generators seeded by ``key``.

        Raises:
            TaskError: if a model's forward has changed a frozen parameter, which all clients share.
        """
        versions = [record_frozen_versions(model) for model in self.models]
        with key.global_generators(self.data.examples.y.device):
            for model in self.models:
                model.set_training(True)
            try:
                yield
            finally:
                for model in self.models:
                    model.set_training(False)
        for model, model_versions in zip(self.models, versions, strict=True):
            refuse_changed_parameters(model, model_versions, self.owner)

    @property
    def owner(self) -> str:
        """The client and its data, for error messages."""
        examples = len(self.data.examples)
        return f"{self.data.info.title} with {format_count(examples, 'training example')}"

    def inputs(self) -> Iterator[Any]:
        """The inputs of all examples, chunk by chunk, for the statistics of batch normalizations."""
        return (b.x for b in self.data.chunks(equal_width=True, in_one=self._in_one_chunk()))

    def _in_one_chunk(self) -> bool:
        """Whether examples without a gradient must be in one chunk, because a model mixes the examples of a batch."""
        is_one = len(self.data.examples) <= chunk_size(self.data.examples)
        return not is_one and any(map(mixes_examples, self.models))

    def kind(self, request: Request) -> Any:
        """Key of everything but the batch on which the cost of a step depends."""
        return self.kind_of(request.loss, request.start, request.constants)

    def kind_of(self, function: Callable[..., Any], params: Any, constants: Any) -> Any:
        """Key of everything but the batch on which the cost of a loss or of a statistic depends."""
        forms = [tree.form(t, plain=False) for t in (params, constants)]
        return code_of(function), self.data.loss, self.model.name, self.data.form, *forms

    def sum_over_data(self, statistic: Callable[..., T], params: Any, constants: tuple[Any, ...]) -> T:
        """See :meth:`fedlowrank.core.contract.method.ClientView.sum_over_data`."""
        sums: Any = None
        sizes: Counter[BatchSize] = Counter()
        call = f"the statistic of view.sum_over_data ({self.data.info.title}, round {self.round + 1})"
        unchanged = refuse_in_place(call, params=params, constants=constants)
        kind = self.kind_of(statistic, params, constants)
        is_standard = self.uses_standard_code(statistic)
        counting = self._counting(kind, is_standard)
        draws = (
            contextlib.nullcontext()
            if is_standard
            else (self.data.key / "total").global_generators(self.data.examples.y.device)
        )
        with torch.no_grad(), draws, unchanged, infer_by(self.inputs, self.owner), naming(self.owner):
            if any(model.couples for model in self.models):
                self.meter.flops += self._count_statistics(statistic, params, constants)
            if is_standard:
                self.count_sum_over_data(statistic, params, constants, kind)
            for batch in self.data.chunks(in_one=self._in_one_chunk()):
                with counting(batch):
                    partial_sum = statistic(params, batch, *constants)
                sizes[size_of(batch)] += 1
                partial_sum = tree.widen(partial_sum)
                sums = partial_sum if sums is None else tree.add(sums, partial_sum)
        if not is_standard:
            self.meter.flops += self.ledger.total(kind, sizes)
        total: T = tree.canonical(sums)
        return total

    def count_sum_over_data(
        self, statistic: Callable[..., Any], params: Any, constants: tuple[Any, ...], kind: Any
    ) -> None:
        """Enter the cost of :meth:`sum_over_data` for a statistic of standard layers with the given :meth:`kind_of`."""
        sizes = Counter[BatchSize]()
        for rows in self.data.chunk_slices(self._in_one_chunk()):
            size = self.data.chunk_shape(rows)
            if not self.ledger.knows(kind, size):
                batch = self.data.chunk(rows)
                with torch.no_grad(), self.ledger.counting(kind, size):
                    statistic(params, batch, *constants)
            sizes[size] += 1
        self.meter.flops += self.ledger.total(kind, sizes)

    def _count_statistics(
        self, statistic: Callable[..., Any], params: Any, constants: tuple[Any, ...]
    ) -> int:
        """Compute the statistics of batch normalizations, and count their cost beyond that of the examples themselves."""
        batch = next(self.data.chunks(in_one=self._in_one_chunk()))
        counts: list[int] = []
        for _ in range(2):
            with FlopCounter() as counter:
                statistic(params, batch, *constants)
            counts.append(int(counter.total))
        return counts[0] - counts[1]


def descend(
    request: Request,
    batches: Iterator[Batch],
    round: int,
    micro_batch: int | None = None,
    counting: Callable[[Batch], AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
    steps: int = 1,
    owner: str | None = None,
) -> tuple[Any, Tensor]:
    """Take one step for each batch.

    A step that runs out of memory is repeated in two halves, and later steps are taken in parts of that size; this
    happens at most once in a pass.

    Args:
        request: request of the pass.
        batches: batches of the pass, one for each step.
        round: index of the round, from 0.
        micro_batch: number of examples whose gradient is computed together; these gradients sum to that of the
            batch.
        counting: function of the batch whose context manager is entered around each loss and its gradient.
        steps: number of batches, for a schedule within the pass.
        owner: client named in the message if a step is halved; None to raise the error instead.

    Returns:
        The trained tree, and the loss of every step ``[steps]``.
    """
    pass_steps = PassSteps(request, round, steps)
    losses: list[Tensor] = []
    for batch in batches:
        micro_size = len(batch) if micro_batch is None else min(micro_batch, len(batch))
        try:
            with counting(batch):
                value, grads = _gradient(pass_steps, batch, micro_batch)
        except torch.OutOfMemoryError:
            if owner is None or micro_size == 1:
                raise
            micro_batch = micro_size // 2
            logger.warning(
                "%s: a step on %d examples ran out of memory; this step and those after it in the pass take %d at once. Set "
                "run.micro_batch = %d",
                owner,
                micro_size,
                micro_batch,
                micro_batch,
            )
            # halve only once in a pass
            owner = None
            with counting(batch):
                value, grads = _gradient(pass_steps, batch, micro_batch)
        pass_steps.step(grads)
        losses.append(value)
    if request.kept is not None:
        request.kept.state = pass_steps.optimizer_state()
    return pass_steps.params_tree, torch.stack(losses)


def _gradient(
    pass_steps: PassSteps, batch: Batch, micro_batch: int | None
) -> tuple[Tensor, list[Tensor | None]]:
    """Compute the loss of a batch and its gradient."""
    if micro_batch is None or len(batch) <= micro_batch:
        loss = pass_steps.loss(batch)
        gradient = pass_steps.gradient(loss)  # checks that the loss is a number first
        return loss.detach(), gradient
    weights, device = batch.weights, batch.y.device
    loss_weights = batch.loss.weigh(batch.y)
    mean_weight = None if loss_weights is None else loss_weights[1].double().mean()
    total = torch.zeros((), device=device)
    grads: list[Tensor | None] = [None] * len(pass_steps.params)
    for indices in torch.split(torch.arange(len(batch), device=device), micro_batch):
        x = {n: t[indices] for n, t in batch.x.items()} if isinstance(batch.x, dict) else batch.x[indices]
        value = pass_steps.loss(
            Batch(x, batch.y[indices], step=batch.step, loss=batch.loss, example_weight=mean_weight)
        )
        if weights is None:
            value = value * (len(indices) / len(batch))
        else:
            # the value stays on the device: a Python number would wait for the previous steps
            value = value * (weights[indices].sum().double() / weights.sum().clamp(min=1)).to(value.dtype)
        for i, (total_grad, g) in enumerate(zip(grads, pass_steps.gradient(value), strict=True)):
            if g is not None:
                wide_grad = g.to(tree.wide_type(g.dtype))
                grads[i] = wide_grad if total_grad is None else total_grad + wide_grad
        total = total + value.detach()
    return total, [
        None if g is None else g.to(p.dtype) for g, p in zip(grads, pass_steps.params, strict=True)
    ]


def check_finite(client: ClientInfo, round: int, name: str, losses: Tensor, end: Any) -> None:
    """Raise :class:`NonFiniteError` if a loss or a parameter is NaN or infinite."""
    if tree.not_finite([losses, end]) is None:
        return
    nonfinite_steps = (~torch.isfinite(losses)).nonzero()
    raise NonFiniteError(
        client.id, round, name, int(nonfinite_steps[0]) if len(nonfinite_steps) else None, client.title
    )
