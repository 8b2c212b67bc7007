"""Clients in forked worker processes with one thread each, as many as cores.

Workers are forked when the first round begins, so they share the method, its code and all data with their
parent. A round sends each worker what its clients need and receives what they made, as bytes of trees,
through shared memory. Jobs are sent longest first, by what the client cost the last time, each to the worker
that is free first; the result is the sequential engine's bit for bit, whichever worker trained a client.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import mmap
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar, TypeVar

import torch

from ..core import tree
from ..core.contract.method import AnyMethod, ClientInfo, Task
from ..core.errors import ConfigError, FedlowrankError, NonFiniteError
from ..data.federation import Federation
from ..training.trainer import Meter
from .engine import ClientJob, ClientResult, Engine
from .jobs import LazyJobs
from .sequential import Sequential

SHARED = 1 << 28
"""Bytes that two processes share, allocated as they are written; longer messages go through a pipe."""

PATIENCE = 2.0
"""Seconds after which a process looks whether its parent is still there."""

T = TypeVar("T")
WorkerHeader = dict[str, Any]
Serve = Callable[[WorkerHeader, list[bytes]], tuple[WorkerHeader, list[bytes]]]


class WorkerError(FedlowrankError):
    """A process that trains clients failed or died."""


class DuplexPipe:
    """One end of a duplex pipe between two processes: headers through a pipe, payloads through shared memory.

    Args:
        pipe: for the header.
        out: for the payloads that are sent.
        into: for those that come.
    """

    def __init__(self, pipe: Connection, out: mmap.mmap, into: mmap.mmap) -> None:
        self.pipe, self._out, self._into = pipe, out, into

    def send(self, header: WorkerHeader, payloads: Sequence[bytes]) -> None:
        """Send; the other end reads before it sends anything."""
        sizes = [len(b) for b in payloads]
        shared = sum(sizes) <= len(self._out)
        self._out.seek(0)
        for payload in payloads if shared else ():
            self._out.write(payload)
        self.pipe.send_bytes(json.dumps([header, sizes, shared]).encode())
        for payload in () if shared else payloads:
            self.pipe.send_bytes(payload)

    def receive(self) -> tuple[WorkerHeader, list[bytes]]:
        """Wait for a message."""
        header, sizes, shared = json.loads(self.pipe.recv_bytes())
        if not shared:
            return header, [self.pipe.recv_bytes() for _ in sizes]
        self._into.seek(0)
        return header, [self._into.read(n) for n in sizes]


class ForkedWorker:
    """A forked process that answers.

    Args:
        serve: makes an answer of a question; executed in the process.
    """

    def __init__(self, serve: Serve) -> None:
        mine, theirs = multiprocessing.Pipe()
        there, back = mmap.mmap(-1, SHARED), mmap.mmap(-1, SHARED)
        parent = os.getpid()
        self.line = DuplexPipe(mine, there, back)
        with warnings.catch_warnings():
            # of threads in the parent: none of them holds a lock that the child takes, for it only computes
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process = multiprocessing.get_context("fork").Process(
                target=_answer, args=(DuplexPipe(theirs, back, there), serve, parent), daemon=True
            )
            self.process.start()
        theirs.close()

    def ask(self, header: WorkerHeader, payloads: Sequence[bytes]) -> None:
        """Send a question."""
        try:
            self.line.send(header, payloads)
        except OSError as error:
            raise self._died() from error

    def answer(self) -> tuple[WorkerHeader, list[bytes]]:
        """Wait for the answer; raises WorkerError if there is none."""
        try:
            header, payloads = self.line.receive()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if "failed" in header:
            raise WorkerError(f"a worker process failed:\n{header['failed']}")
        return header, payloads

    def _died(self) -> WorkerError:
        self.process.join(1)
        code = self.process.exitcode
        why = (
            "was killed, perhaps for lack of memory"
            if code is not None and code < 0
            else f"ended with code {code}"
        )
        return WorkerError(
            f"a worker process {why}. Set run.engine to 'sequential', which takes one client at a time."
        )

    def close(self) -> None:
        """End the process."""
        self.line.pipe.close()
        self.process.terminate()
        self.process.join()


def _answer(line: DuplexPipe, serve: Serve, parent: int) -> None:
    """Answer requests until the parent closes the pipe or dies."""
    # what was garbage in the parent is not for this process to clear away: a lock of a thread that was not
    # forked may be in it
    gc.freeze()
    torch.set_num_threads(1)
    # the parent ends this process by SIGTERM, for which it may have a handler of its own; Ctrl-C is the parent's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        # other workers hold copies of the parent's end, so that its death does not close the pipe
        while not line.pipe.poll(PATIENCE):
            if os.getppid() != parent:
                return
        try:
            header, payloads = line.receive()
        except EOFError:
            return
        try:
            answer = serve(header, payloads)
        except Exception:  # noqa: BLE001 - whatever a method raises is told to the parent, which raises it
            answer = {"failed": traceback.format_exc()}, []
        with contextlib.suppress(BrokenPipeError):
            line.send(*answer)


@dataclass
class Processes(Engine):
    """As many processes as cores; the sequential engine's result bit for bit.

    Attributes:
        workers: how many processes; None for one a core that this process may use.
        costs: CPU seconds of each client when it was last trained.
    """

    name: ClassVar[str] = "processes"
    workers: int | None = None
    costs: dict[int, float] = field(default_factory=dict, repr=False)
    _pool: list[ForkedWorker] = field(default_factory=list, repr=False)
    _known: tuple[Any, ...] = field(default=(), repr=False)

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Generator[ClientResult, None, None]:
        """See the base class."""
        self._prepare(method, federation, task)
        outcomes: dict[int, ClientResult] = {}
        # the message that was sent last; often the next one is the same
        sent: tuple[Any, bytes] = None, tree.encode(None)
        clients = jobs.clients if isinstance(jobs, LazyJobs) else [job.client for job in jobs]
        left = sorted(range(len(jobs)), key=lambda i: self._expected(clients[i]))
        due, busy = 0, dict[Any, tuple[ForkedWorker, int]]()
        free = list(self._pool)
        try:
            while left or busy or outcomes:
                while left and free:
                    worker, place = free.pop(), left.pop()
                    job = jobs[place]
                    if job.down is not sent[0]:
                        sent = job.down, tree.encode(job.down)
                    worker.ask({"round": round, "client": job.client.id}, [sent[1], tree.encode(job.state)])
                    busy[worker.line.pipe] = worker, place
                while due in outcomes:
                    yield outcomes.pop(due)
                    due += 1
                for pipe in wait(list(busy)) if busy else ():
                    worker, place = busy.pop(pipe)
                    header, payloads = worker.answer()
                    self.costs[header["client"]] = header["seconds"]
                    outcomes[place] = decode_result(header, payloads)
                    free.append(worker)
        except BaseException:
            # what a worker is at is of no use any more, and would be taken for an answer to the next question
            self.close()
            raise

    def each(self, work: Callable[[T], Any], items: Sequence[T]) -> list[Any]:
        """See the base class; by processes that are forked for it, and so have all that ``work`` needs."""
        count = min(self.workers or cores(), cores(), len(items))
        if count < 2 or not can_fork():
            return super().each(work, items)
        pool = [
            ForkedWorker(lambda header, _: ({"found": [work(items[i]) for i in header["items"]]}, []))
            for _ in range(count)
        ]
        found: dict[int, Any] = {}
        try:
            for k, worker in enumerate(pool):
                worker.ask({"items": list(range(k, len(items), count))}, [])
            for k, worker in enumerate(pool):
                found |= zip(range(k, len(items), count), worker.answer()[0]["found"], strict=True)
        finally:
            for worker in pool:
                worker.close()
        return [found[i] for i in range(len(items))]

    def close(self) -> None:
        """End all processes."""
        for worker in self._pool:
            worker.close()
        self._pool, self._known = [], ()

    def _expected(self, client: ClientInfo) -> float:
        """Expected CPU seconds of a client; infinite if unknown, so that it starts early."""
        return self.costs.get(client.id, math.inf)

    def _prepare(self, method: AnyMethod, federation: Federation, task: Task) -> None:
        if not can_fork():
            raise ConfigError("run.engine 'processes' is for CPUs; on a GPU choose 'vectorized'")
        # referenced, so that no other object has the same identity
        known = (method, federation, task)
        same = len(self._known) == 3 and all(a is b for a, b in zip(known, self._known, strict=True))
        # workers are copies of this process: they would not see what user code reads and has been changed
        # since
        own = not type(method).__module__.startswith("fedlowrank.")
        if same and not own and all(a.is_standard for a in task.architectures.values()):
            return
        self.close()
        self._known = known
        inner = Sequential(self.ledger, self.micro_batch)
        for _ in range(min(self.workers or cores(), cores())):
            self._pool.append(
                ForkedWorker(
                    lambda header, payloads: train_client(inner, method, federation, task, header, payloads)
                )
            )


def train_client(
    engine: Sequential,
    method: AnyMethod,
    federation: Federation,
    task: Task,
    header: WorkerHeader,
    payloads: list[bytes],
) -> tuple[WorkerHeader, list[bytes]]:
    """Train one client in a worker.

    Args:
        engine: trains it.
        method: of the run.
        federation: with the client's data.
        task: of the run.
        header: ``client`` and ``round``.
        payloads: the encoded download and the encoded state of the client.

    Returns:
        What the work cost and how it failed, and the encoded next state and upload.
    """
    start = time.process_time()
    info = federation.infos[header["client"]]
    job = ClientJob(tree.decode(payloads[1]), tree.decode(payloads[0]), info)
    (outcome,) = engine.run(method, federation, task, header["round"], [job])
    error = outcome.error
    found = {
        "client": info.id,
        "steps": outcome.meter.steps,
        "flops": outcome.meter.flops,
        "losses": outcome.meter.losses,
        "error": None if error is None else list(error.__reduce__()[1]),
        "seconds": time.process_time() - start,
    }
    return found, [tree.encode(outcome.state), tree.encode(outcome.upload)]


def decode_result(header: WorkerHeader, payloads: list[bytes]) -> ClientResult:
    """What a client made of its job, from the answer of :func:`train_client`."""
    meter = Meter(header["steps"], header["flops"], header["losses"])
    if header["error"] is not None:
        return ClientResult(None, None, Meter(), NonFiniteError(*header["error"]))
    return ClientResult(tree.decode(payloads[0]), tree.decode(payloads[1]), meter)


def can_fork() -> bool:
    """Whether a fork of this process can compute: not if it uses a GPU."""
    return not torch.cuda.is_initialized()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
