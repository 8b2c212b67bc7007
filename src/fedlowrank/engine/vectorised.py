"""Clients of like shapes at once, over a leading client axis.

Every client's ``local_update`` runs by itself, in a thread of its own but never two at a time, up to its call of
``view.train``. There it waits until all others have come to such a call or to their end (a *rendezvous*). Then equal
requests are stacked and executed together, and each client goes on with its own result. Control flow in a method is
therefore free.

Requests are equal if their functions have the same code *and the same captured values*, so a loss that captures what
differs between clients is executed client by client: slower, never wrong. So are models with dropout, whose random
numbers would differ, and with batch normalisation, which padding would disturb. Uneven data is padded and masked; a
client with fewer steps stops while the others go on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import CellType, FunctionType, MethodType
from typing import Any, ClassVar, TypeVar

import torch

from .. import tree
from ..data.federation import Federation
from ..descent import refill
from ..errors import NonFiniteError
from ..method import Request, Task
from ..train import LocalTrainer, Meter, all_finite, check_finite, shapes
from .base import AnyMethod, Engine, Job, Outcome, client_view
from .stacked import descend_together

CACHE = 8 << 20
"""Bytes of stacked parameters on a CPU: in a larger stack they leave the cache from one step to the next."""

MEMORY = 4 << 30
"""Bytes of stacked parameters on a GPU; gradients and activations take a few times as much."""

T = TypeVar("T")


class _CancelledError(Exception):
    """Tells a waiting client that the round has failed elsewhere."""


class _Client:
    """A client's ``local_update``, suspended at every ``view.train``; a thread runs it.

    Args:
        work: runs the client's box, given this thread as its trainer.
        local: execution for this client alone.
    """

    def __init__(self, work: Callable[[_Client], tuple[Any, Any]], local: LocalTrainer) -> None:
        self.work = work
        self.local = local
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self.stopped: Callable[[], object] = _nothing
        self.request: Request | None = None
        self.result: tuple[Any, Any] | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Work until done; ``stopped`` is called whenever this client waits, and at its end."""
        try:
            if isinstance(cancelled := self.answers.get(), BaseException):
                raise cancelled
            self.result = self.work(self)
        except BaseException as error:  # noqa: BLE001 - handed over to the engine's thread, which raises it
            self.error = error
        self.request = None
        self.stopped()

    def train(self, request: Request) -> Any:
        """Ask, and wait for the answer."""
        self.request = request
        self.stopped()
        answer = self.answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def total(self, statistic: Callable[..., T], params: Any, given: tuple[Any, ...]) -> T:
        """Statistics are summed client by client."""
        return self.local.total(statistic, params, given)

    def steps(self, name: str) -> int:
        """Steps of a pass."""
        return self.local.steps(name)


@dataclass
class Vectorised(Engine):
    """Clients of like shapes at once; equal to the sequential engine up to rounding."""

    name: ClassVar[str] = "vectorised"
    _threads: ThreadPoolExecutor | None = field(default=None, init=False, repr=False)
    _width: int = field(default=0, init=False, repr=False)

    def close(self) -> None:
        """See the base class: threads that have nothing to do."""
        if self._threads is not None:
            self._threads.shutdown()
        self._threads, self._width = None, 0

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[Job]
    ) -> Iterator[Outcome]:
        """See the base class."""
        clients = [self._client(method, federation, task, round, job) for job in jobs]
        if not clients:
            return
        if self._threads is None or self._width < len(clients):
            # every client of a round waits in a thread of its own
            self.close()
            self._threads, self._width = ThreadPoolExecutor(len(clients), "client"), len(clients)
        try:
            for client in clients:
                self._threads.submit(client.run)
            _advance(clients, [None] * len(clients))
            while waiting := [c for c in clients if c.request is not None]:
                answers = self._execute(method, waiting, round)
                _advance(waiting, answers)
            for client in clients:
                if client.error is not None and not isinstance(client.error, NonFiniteError):
                    raise client.error
        except BaseException:
            for client in clients:
                client.stopped = _nothing
            for client in clients:
                # also for those that are not waiting yet
                client.answers.put(_CancelledError())
            self.close()
            raise
        for client in clients:
            if isinstance(client.error, NonFiniteError):
                yield Outcome(None, None, Meter(), client.error)
            elif client.result is not None:
                state, upload = client.result
                yield Outcome(self.boundary(state), self.boundary(upload), client.local.meter)

    def _client(self, method: AnyMethod, federation: Federation, task: Task, round: int, job: Job) -> _Client:
        def work(client: _Client) -> tuple[Any, Any]:
            view = client_view(federation, task, round, job.client, client)
            result: tuple[Any, Any] = method.local_update(self.boundary(job.state), self.boundary(job.down), view)
            return result

        return _Client(work, self.trainer(method, federation, round, job.client))

    def _execute(self, method: AnyMethod, clients: list[_Client], round: int) -> list[Any]:
        groups: dict[Any, list[int]] = {}
        for i, client in enumerate(clients):
            groups.setdefault(_kind(client), []).append(i)
        answers: list[Any] = [None] * len(clients)
        for members in groups.values():
            group = [clients[i] for i in members]
            local = group[0].local
            if local.random or local.model.couples:
                found = [_alone(c) for c in group]
            else:
                found = []
                for chunk in _chunks(group):
                    found += [_alone(chunk[0])] if len(chunk) == 1 else _together(method.title, chunk, round)
            for i, answer in zip(members, found, strict=True):
                answers[i] = answer
        return answers


def _nothing() -> None:
    """Nobody waits for a client's stop."""


def _advance(clients: Sequence[_Client], answers: Sequence[Any]) -> None:
    """Let clients go on with an answer each, one after another, each until its next request or its end.

    One hands over to the next by itself: to come back here in between would take as long again.
    """
    done: SimpleQueue[None] = SimpleQueue()
    for client, following, answer in zip(clients, clients[1:], answers[1:], strict=False):
        client.stopped = functools.partial(following.answers.put, answer)
    clients[-1].stopped = functools.partial(done.put, None)
    clients[0].answers.put(answers[0])
    done.get()


def _alone(client: _Client) -> Any:
    """The answer to one client's request, exactly as the sequential engine gives it."""
    try:
        return client.local.train(_request(client))
    except NonFiniteError as error:
        return error


def _chunks(clients: list[_Client]) -> list[list[_Client]]:
    """As many clients at once as have room, in parts of like sizes."""
    start = tree.tensors(_request(clients[0]).start)
    room = CACHE if all(t.device.type == "cpu" for t in start) else MEMORY
    most = max(1, room // max(1, sum(t.numel() * t.element_size() for t in start)))
    parts = -(-len(clients) // most)
    bounds = [len(clients) * k // parts for k in range(parts + 1)]
    return [clients[a:b] for a, b in itertools.pairwise(bounds)]


def _together(title: str, clients: list[_Client], round: int) -> list[Any]:
    """The answers to equal requests, executed at once."""
    order = sorted(range(len(clients)), key=lambda i: -clients[i].local.steps(_request(clients[i]).name))
    first = [clients[i] for i in order]
    ends, losses = descend_together(title, [c.local for c in first], [_request(c) for c in first], round)
    kind = first[0].local.kind(_request(first[0]))
    sound = all_finite(torch.cat(losses), ends)
    rows = [t.unbind() for t in tree.tensors(ends)]
    answers: list[Any] = [None] * len(clients)
    for place, i in enumerate(order):
        client, request = clients[i], _request(clients[i])
        end = refill(request.start, [row[place] for row in rows])
        client.local.account(request, kind, losses[place])
        try:
            if not sound:
                check_finite(client.local.data.info, round, request.name, losses[place], end)
            answers[i] = tree.canonical(end)
        except NonFiniteError as error:
            answers[i] = error
    return answers


def _request(client: _Client) -> Request:
    if client.request is None:
        raise AssertionError("the client is not waiting")
    return client.request


def _kind(client: _Client) -> Any:
    """What requests must have in common to be executed at once."""
    r = _request(client)
    x = client.local.data.examples.x
    inputs = tuple((n, t.shape[1:]) for n, t in x.items()) if isinstance(x, dict) else x.shape[1:]
    return (
        *(identity(f) for f in (r.loss, r.precondition, r.prox)),
        r.name,
        repr(r.optimiser),
        client.local.model.name,
        shapes(r.start),
        shapes(r.given),
        None if r.pull is None else (r.pull.strength, shapes(r.pull.towards), shapes(r.pull.along)),
        repr(tree.skeleton((r.start, r.given))),
        inputs,
    )


def identity(value: Any, within: tuple[int, ...] = ()) -> Any:
    """What a function computes, as a value to compare: its code and what it captured.

    Numbers and strings count by value, everything else by being the very same object.

    Args:
        value: a function or what it captured.
        within: functions whose captured values are being looked at, for those that refer to themselves.
    """
    if isinstance(value, MethodType):
        return (identity(value.__func__, within), id(value.__self__))
    if isinstance(value, FunctionType) and id(value) in within:
        return ("itself", within.index(id(value)))
    if isinstance(value, FunctionType):
        held = [c.cell_contents for c in value.__closure__ or () if not _is_empty(c)]
        held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return (id(value.__code__), tuple(identity(v, (*within, id(value))) for v in held))
    if value is None or isinstance(value, (bool, int, float, str)):
        return (type(value).__name__, value)
    return id(value)


def _is_empty(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False
