"""Clients of like shapes, batched over a leading client axis.

Every client's ``local_update`` runs by itself, as a coroutine, up to its call of ``view.train``. There it
waits until all others have come to such a call or to their end (a *rendezvous*). Then equal requests are
stacked and executed together, and each client goes on with its own result. Control flow in a method is
therefore free.

Requests are equal if their functions have the same code *and the same captured values*, so a loss that
captures what differs between clients is executed client by client: slower, never wrong. So are losses that
are not this package's own (of a method or of the task), modules with layers that are not standard
(:mod:`fedlowrank.models.standard`), which might draw random numbers or count their calls, modules with batch
normalization, which padding would disturb, and functions with an operation that has no rule
(:mod:`fedlowrank.training.stacked`), of which the log tells. Uneven data is padded and masked; a client with
fewer steps stops while the others go on.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from ..core import tree
from ..core.contract.method import PaddedDimensions, Request, Task
from ..core.errors import NonFiniteError
from ..data.federation import Federation
from ..training.captured_variables import code_of, identity
from ..training.cohort import padded_axes, train_cohort
from ..training.feed import BufferPool
from ..training.stacked import UnsupportedError
from ..training.steps import refill
from ..training.trainer import LocalTrainer, Meter, all_finite, check_finite
from .engine import AnyMethod, ClientJob, ClientResult, Engine

CACHE = 8 << 20
"""Bytes of stacked parameters and constants on a CPU; a larger stack leaves the cache between steps."""

MEMORY = 4 << 30
"""Bytes of stacked parameters and constants on a GPU; gradients and activations take a few times as much."""

COHORT = 256
"""Clients in a cohort; more would hold too much memory while they wait for each other."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


class _Client:
    """A client's ``local_update``, suspended at every ``view.train``; a greenlet runs it.

    Args:
        work: runs ``local_update`` with this client as its trainer.
        local: execution for this client alone.

    Attributes:
        request: what it waits for; None before it has begun and after its end.
        result: what its box returned.
        error: a loss or parameter that was not finite, where that ended its work.
    """

    def __init__(self, work: Callable[[_Client], tuple[Any, Any]], local: LocalTrainer) -> None:
        self.local = local
        self.request: Request | None = None
        self.result: tuple[Any, Any] | None = None
        self.error: NonFiniteError | None = None
        self._engine = getcurrent()
        self._run = greenlet(lambda: work(self))

    def advance(self, answer: Any = None) -> None:
        """Answer the request and run to the next one or the end; errors of the method come out here."""
        self.request = None
        try:
            if isinstance(answer, NonFiniteError):
                found = self._run.throw(answer)
            else:
                found = self._run.switch() if answer is None else self._run.switch(answer)
        except NonFiniteError as error:
            self.error = error
            return
        if self._run.dead:
            self.result = found

    def cancel(self) -> None:
        """Abandon ``local_update`` where it waits, if it does."""
        self._run.throw()

    def train(self, request: Request) -> Any:
        """Ask, and wait for the answer."""
        self.request = request
        return self._engine.switch()

    def total(self, statistic: Callable[..., T], params: Any, constants: tuple[Any, ...]) -> T:
        """Statistics are summed client by client."""
        return self.local.total(statistic, params, constants)

    def steps(self, name: str) -> int:
        """Steps of a pass."""
        return self.local.steps(name)


@dataclass
class Vectorized(Engine):
    """Clients of like shapes, batched; equal to the sequential engine up to rounding."""

    name: ClassVar[str] = "vectorized"
    _pool: BufferPool = field(default_factory=BufferPool, init=False, repr=False)
    _supported: dict[Any, bool] = field(default_factory=dict, init=False, repr=False)
    _logged: set[str] = field(default_factory=set, init=False, repr=False)

    def close(self) -> None:
        """See the base class: memory of batches."""
        self._pool = BufferPool()

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Generator[ClientResult, None, None]:
        """See the base class."""
        for first in range(0, len(jobs), COHORT):
            yield from self._run_cohort(method, federation, task, round, jobs[first : first + COHORT])

    def _run_cohort(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> list[ClientResult]:
        """The results of clients that are suspended at the same time."""
        clients = [self._client(method, federation, task, round, job) for job in jobs]
        try:
            for client in clients:
                client.advance()
            while waiting := [c for c in clients if c.request is not None]:
                for client, answer in zip(waiting, self._execute(method, waiting, round), strict=True):
                    client.advance(answer)
        finally:
            for client in clients:
                client.cancel()
        return [self._outcome(client) for client in clients]

    def _outcome(self, client: _Client) -> ClientResult:
        if client.result is None:
            return ClientResult(None, None, Meter(), client.error)
        state, upload = client.result
        return ClientResult(state, upload, client.local.meter)

    def _client(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, job: ClientJob
    ) -> _Client:
        def work(client: _Client) -> tuple[Any, Any]:
            return self.local_update(method, federation, task, round, job, client)

        return _Client(work, self.trainer(method, federation, round, job.client))

    def _execute(self, method: AnyMethod, clients: list[_Client], round: int) -> list[Any]:
        groups: dict[Any, list[int]] = {}
        # clients mostly share one optimizer; its repr for each of them would cost as much as a small tree
        optimizers = {id(_request(c).optimizer): _request(c).optimizer for c in clients}
        words = {i: repr(optimizer) for i, optimizer in optimizers.items()}
        for i, client in enumerate(clients):
            groups.setdefault((words[id(_request(client).optimizer)], *_kind(client)), []).append(i)
        answers: list[Any] = [None] * len(clients)
        for members in groups.values():
            group = [clients[i] for i in members]
            local = group[0].local
            if local.model.couples or not local.is_standard(_request(group[0])):
                if local.data.loss.is_own:
                    self._log(method.title, group[0], f"the loss {local.data.loss.kind} is code of your own")
                found = [_alone(c) for c in group]
            else:
                found = []
                for chunk in _chunks(group):
                    found += (
                        [_alone(chunk[0])] if len(chunk) == 1 else self._together(method.title, chunk, round)
                    )
            for i, answer in zip(members, found, strict=True):
                answers[i] = answer
        return answers

    def _together(self, title: str, clients: list[_Client], round: int) -> list[Any]:
        """The answers to equal requests, executed as one batch."""
        order = sorted(range(len(clients)), key=lambda i: -clients[i].local.steps(_request(clients[i]).name))
        first = [clients[i] for i in order]
        trained = self._train(title, first, round)
        if trained is None:
            return [_alone(c) for c in clients]
        ends, losses = trained
        kind = first[0].local.kind(_request(first[0]))
        sound, steps = all_finite(losses, ends), [c.local.steps(_request(c).name) for c in first]
        means = (losses.sum(1, dtype=torch.float64).cpu() / torch.tensor(steps)).tolist()
        rows = [t.unbind() for t in tree.tensors(ends)]
        answers: list[Any] = [None] * len(clients)
        for place, i in enumerate(order):
            client, request = clients[i], _request(clients[i])
            mine = [row[place] for row in rows]
            if request.padded.start:
                # of padded dimensions, what is the client's, which also costs less than the whole
                own = zip(mine, tree.tensors(request.start), strict=True)
                mine, kind = [m[tuple(map(slice, t.shape))] for m, t in own], client.local.kind(request)
            end = refill(request.start, mine)
            client.local.count(request, kind)
            client.local.account(request, kind, means[place])
            try:
                if not sound:
                    check_finite(
                        client.local.data.info, round, request.name, losses[place, : steps[place]], end
                    )
                answers[i] = tree.canonical(end)
            except NonFiniteError as error:
                answers[i] = error
        return answers

    def _train(self, title: str, clients: list[_Client], round: int) -> tuple[Any, Tensor] | None:
        """Train a cohort, see :func:`train_cohort`; None if its functions cannot be batched over clients."""
        requests = [_request(c) for c in clients]
        request, local = requests[0], clients[0].local
        functions = local.kind(request), code_of(request.precondition), code_of(request.prox)
        known = self._supported.get(functions)
        if known is False:
            return None
        try:
            found = train_cohort([c.local for c in clients], requests, round, self._pool, compare=not known)
        except UnsupportedError as reason:
            self._supported[functions] = False
            self._log(title, clients[0], reason)
            return None
        self._supported[functions] = True
        return found

    def _log(self, title: str, client: _Client, reason: object) -> None:
        """Say once why clients are not batched."""
        message = f"{title} trains one client after another in {_request(client).name!r}: {reason}"
        if message not in self._logged:
            self._logged.add(message)
            logger.info("engine vectorized: %s", message)


def _alone(client: _Client) -> Any:
    """The answer to one client's request, exactly as the sequential engine gives it."""
    try:
        return client.local.train(_request(client))
    except NonFiniteError as error:
        return error


def _chunks(clients: list[_Client]) -> list[list[_Client]]:
    """As many clients at once as have room, in parts of like sizes."""
    request = _request(clients[0])
    tensors = tree.tensors((request.start, request.constants))
    room = CACHE if all(t.device.type == "cpu" for t in tensors) else MEMORY
    most = max(1, room // max(1, sum(t.nbytes for t in tensors)))
    parts = -(-len(clients) // most)
    bounds = [len(clients) * k // parts for k in range(parts + 1)]
    return [clients[a:b] for a, b in itertools.pairwise(bounds)]


def _request(client: _Client) -> Request:
    if client.request is None:
        raise AssertionError("the client is not waiting")
    return client.request


def _kind(client: _Client) -> tuple[Any, ...]:
    """What requests must have in common, beside the optimizer, to be executed at once."""
    r = _request(client)
    # what else looks at the parameters would see zeros that are not theirs
    padded = r.padded if r.prox is None and r.precondition is None else PaddedDimensions()
    term = None
    if r.proximal_term is not None:
        term = (
            r.proximal_term.strength,
            *(_form(t, padded.start) for t in (r.proximal_term.center, r.proximal_term.linear)),
        )
    return (
        *[identity(f) for f in (r.loss, r.precondition, r.prox)],
        r.name,
        client.local.model.name,
        client.local.data.form,
        _form(r.start, padded.start),
        _form(r.constants, padded.constants),
        term,
        client.local.steps(r.name) if r.optimizer.local_schedule.depends_on_total else None,
        # steps count in Adam
        None if r.kept is None else r.kept.state and tuple(r.kept.state.taken),
    )


def _form(value: Any, padded: Mapping[str, int]) -> Any:
    """What trees must have in common to be stacked: all but the sizes of padded dimensions."""
    if not padded:
        return tree.form(value)
    leaves = zip(tree.tensors(value), padded_axes(value, padded), strict=True)
    shapes = [(t.dtype, tuple([n for i, n in enumerate(t.shape) if i != axis]), axis) for t, axis in leaves]
    return tree.form(tree.map(lambda _: None, value)), tuple(shapes)
