"""Trains clients in forked worker processes with one thread each, one process per core.

Workers are forked when the first round begins, so they share the method, its code and all data with their parent. In
a round, each worker receives the states and downloads of its clients and returns their results, as encoded trees in
shared memory. Jobs are sent longest first, by the cost of the client in its last round, each to the first free
worker. Results are those of the sequential engine bit for bit, whichever worker trained a client.
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
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar, TypeVar

import torch

from ..core import tree
from ..core.contract import AnyMethod, ClientInfo, Task
from ..core.errors import ConfigError, FedlowrankError, NonFiniteError
from ..data.federation import Federation
from ..models.fingerprint import describe_layers
from ..training.trainer import Meter
from .engine import ClientJob, ClientResult, Engine, diverged_result, trains_by_user_code
from .jobs import LazyJobs
from .sequential import Sequential

SHARED_BYTES = 1 << 28
"""Bytes of memory that two processes share, allocated as it is written; longer messages go through a pipe."""

PARENT_CHECK_SECONDS = 2.0
"""Seconds between two checks in a worker that its parent still runs."""

T = TypeVar("T")
WorkerHeader = dict[str, Any]
Serve = Callable[[WorkerHeader, list[bytes]], tuple[WorkerHeader, list[bytes]]]


class WorkerError(FedlowrankError):
    """A worker process failed or died."""


class WorkerDiedError(WorkerError):
    """A worker process died.

    Args:
        exit_code: exit code of the process, minus the number of the signal that ended it; None if it is not known.
        work: description of the work that the process did, such as ``client 3 in round 1``.
    """

    def __init__(self, exit_code: int | None, work: str = "") -> None:
        advice = "Set run.engine to 'sequential', and start Python with -X faulthandler to see where it ends."
        if exit_code == -signal.SIGKILL:
            end = "was killed, perhaps for lack of memory"
            advice = "Set run.engine to 'sequential', which takes one client at a time."
        elif exit_code is not None and exit_code < 0:
            end = f"was ended by signal {-exit_code} ({signal.strsignal(-exit_code)})"
        else:
            end = f"ended with code {exit_code}"
        super().__init__(f"a worker process{f' that trained {work}' if work else ''} {end}. {advice}")
        self.exit_code, self.work = exit_code, work

    def __reduce__(self) -> tuple[type[WorkerDiedError], tuple[int | None, str]]:
        return type(self), (self.exit_code, self.work)


class DuplexPipe:
    """One end of a duplex pipe between two processes: headers through a pipe, payloads through shared memory.

    Args:
        pipe: pipe of the headers.
        send_buffer: shared memory of the payloads that are sent.
        receive_buffer: shared memory of the payloads that are received.
    """

    def __init__(self, pipe: Connection, send_buffer: mmap.mmap, receive_buffer: mmap.mmap) -> None:
        self.pipe, self._out, self._into = pipe, send_buffer, receive_buffer

    def send(self, header: WorkerHeader, payloads: Sequence[bytes]) -> None:
        """Send a message; the other end reads it before it sends anything."""
        sizes = [len(b) for b in payloads]
        is_shared = sum(sizes) <= len(self._out)
        self._out.seek(0)
        for payload in payloads if is_shared else ():
            self._out.write(payload)
        self.pipe.send_bytes(json.dumps([header, sizes, is_shared]).encode())
        for payload in () if is_shared else payloads:
            self.pipe.send_bytes(payload)

    def receive(self) -> tuple[WorkerHeader, list[bytes]]:
        """Wait for a message and return it."""
        header, sizes, is_shared = json.loads(self.pipe.recv_bytes())
        if not is_shared:
            return header, [self.pipe.recv_bytes() for _ in sizes]
        self._into.seek(0)
        return header, [self._into.read(n) for n in sizes]


class ForkedWorker:
    """A forked process that answers requests.

    Args:
        serve: function that computes the answer to a request, in the process.
    """

    def __init__(self, serve: Serve) -> None:
        parent_end, child_end = multiprocessing.Pipe()
        try:
            request_buffer, answer_buffer = mmap.mmap(-1, SHARED_BYTES), mmap.mmap(-1, SHARED_BYTES)
        except OSError as error:
            raise WorkerError(
                f"a worker process cannot share {2 * SHARED_BYTES >> 20} MiB of memory: {error.strerror}. Raise the limit of "
                "the address space (`ulimit -v`), or set run.engine to 'sequential'."
            ) from error
        parent_pid = os.getpid()
        self.line = DuplexPipe(parent_end, request_buffer, answer_buffer)
        with warnings.catch_warnings():
            # a warning about threads in the parent; none of them holds a lock that the child needs, which only
            # computes
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process = multiprocessing.get_context("fork").Process(
                target=_answer,
                args=(DuplexPipe(child_end, answer_buffer, request_buffer), serve, parent_pid),
                daemon=True,
            )
            self.process.start()
        child_end.close()

    def ask(self, header: WorkerHeader, payloads: Sequence[bytes]) -> None:
        """Send a request."""
        try:
            self.line.send(header, payloads)
        except OSError as error:
            raise self._died() from error

    def answer(self) -> tuple[WorkerHeader, list[bytes]]:
        """Wait for the answer.

        Raises:
            FedlowrankError: the error of the package that the request raised in the process, caused by a
                :class:`WorkerError` with the traceback.
            WorkerError: if the request raised another error, or if the process died.
        """
        try:
            header, payloads = self.line.receive()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if "failed" in header:
            failure = WorkerError(f"a worker process failed:\n{header['failed']}")
            if (package_error := restore_worker_error(header["error"])) is not None:
                raise package_error from failure
            raise failure
        return header, payloads

    def _died(self) -> WorkerDiedError:
        self.process.join(1)
        return WorkerDiedError(self.process.exitcode)

    def close(self) -> None:
        """End the process."""
        self.line.pipe.close()
        self.process.terminate()
        self.process.join()


def _answer(duplex_pipe: DuplexPipe, serve: Serve, parent_pid: int) -> None:
    """Answer requests until the parent closes the pipe or dies."""
    # this process must not collect its parent's garbage, which may hold a lock of a thread that was not forked
    gc.freeze()
    torch.set_num_threads(1)
    # the parent, which may handle SIGTERM itself, ends this process by SIGTERM; only the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        # other workers hold copies of the parent's end, so its death does not close the pipe
        while not duplex_pipe.pipe.poll(PARENT_CHECK_SECONDS):
            if os.getppid() != parent_pid:
                return
        try:
            header, payloads = duplex_pipe.receive()
        except EOFError:
            return
        try:
            answer = serve(header, payloads)
        except Exception as error:  # noqa: BLE001 - the parent raises what the method raised
            answer = {"failed": traceback.format_exc(), "error": describe_worker_error(error)}, []
        with contextlib.suppress(BrokenPipeError):
            duplex_pipe.send(*answer)


def describe_worker_error(error: Exception) -> list[Any] | None:
    """Describe an error of the package by its class, arguments and attributes; None for any other error."""
    if not isinstance(error, FedlowrankError):
        return None
    values = [*error.args, *vars(error).values()]
    if not all(value is None or isinstance(value, str | int | float) for value in values):
        return None
    return [type(error).__module__, type(error).__qualname__, list(error.args), vars(error)]


def restore_worker_error(description: list[Any] | None) -> FedlowrankError | None:
    """Inverse of :func:`describe_worker_error`; None if there is no description or this process lacks the class."""
    if description is None:
        return None
    module, name, args, attributes = description
    error_class = getattr(sys.modules.get(module), name, None)
    if not (isinstance(error_class, type) and issubclass(error_class, FedlowrankError)):
        return None
    # a class may take other arguments than its message
    error = error_class.__new__(error_class)
    error.args = tuple(args)
    vars(error).update(attributes)
    return error


@dataclass
class Processes(Engine):
    """Trains clients in forked processes. Results are those of the sequential engine bit for bit.

    Attributes:
        workers: number of processes; None for one per core that this process may use.
        costs: CPU seconds of each client in the last round in which it trained.
    """

    name: ClassVar[str] = "processes"
    workers: int | None = None
    costs: dict[int, float] = field(default_factory=dict, repr=False)
    _pool: list[ForkedWorker] = field(default_factory=list, init=False, repr=False)
    _known: tuple[Any, ...] = field(default=(), init=False, repr=False)
    _layers: list[dict[str, str]] | None = field(default=None, init=False, repr=False)

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Generator[ClientResult, None, None]:
        """See the base class."""
        self._prepare(method, federation, task)
        results: dict[int, ClientResult] = {}
        # the last download that was sent, because the next client often gets the same one
        last_download: tuple[Any, bytes] = None, tree.encode(None)
        clients = jobs.clients if isinstance(jobs, LazyJobs) else [job.client for job in jobs]
        waiting_indices = sorted(range(len(jobs)), key=lambda i: self._expected(clients[i]))
        next_index, busy_workers = 0, dict[Any, tuple[ForkedWorker, int]]()
        idle_workers = list(self._pool)
        try:
            while waiting_indices or busy_workers or results:
                while waiting_indices and idle_workers:
                    worker, index = idle_workers.pop(), waiting_indices.pop()
                    job = jobs[index]
                    if job.down is not last_download[0]:
                        last_download = job.down, tree.encode(job.down)
                    worker.ask(
                        {"round": round, "client": job.client.id}, [last_download[1], tree.encode(job.state)]
                    )
                    busy_workers[worker.line.pipe] = worker, index
                while next_index in results:
                    yield results.pop(next_index)
                    next_index += 1
                for pipe in wait(list(busy_workers)) if busy_workers else ():
                    worker, index = busy_workers.pop(pipe)
                    try:
                        header, payloads = worker.answer()
                    except WorkerDiedError as error:
                        work = f"client {clients[index].id} in round {round + 1}"
                        raise WorkerDiedError(error.exit_code, work) from error
                    self.costs[header["client"]] = header["seconds"]
                    results[index] = decode_result(header, payloads)
                    idle_workers.append(worker)
        except BaseException:
            # a busy worker's answer would be taken for the answer to the next request
            self.close()
            raise

    def each(self, work: Callable[[T], Any], items: Sequence[T]) -> list[Any]:
        """Map a function over items in processes that are forked for this call and share all data that ``work`` reads."""
        worker_count = min(self.workers or cores(), cores(), len(items))
        if worker_count < 2 or not can_fork():
            return super().each(work, items)
        pool = [
            ForkedWorker(lambda header, _: ({"results": [work(items[i]) for i in header["items"]]}, []))
            for _ in range(worker_count)
        ]
        results: dict[int, Any] = {}
        try:
            for k, worker in enumerate(pool):
                worker.ask({"items": list(range(k, len(items), worker_count))}, [])
            for k, worker in enumerate(pool):
                results |= zip(range(k, len(items), worker_count), worker.answer()[0]["results"], strict=True)
        finally:
            for worker in pool:
                worker.close()
        return [results[i] for i in range(len(items))]

    def close(self) -> None:
        """End all processes."""
        for worker in self._pool:
            worker.close()
        self._pool, self._known = [], ()

    def _expected(self, client: ClientInfo) -> float:
        """Estimate the CPU seconds of a client; infinite if unknown, so that the client starts early."""
        return self.costs.get(client.id, math.inf)

    def _prepare(self, method: AnyMethod, federation: Federation, task: Task) -> None:
        if not can_fork():
            if multiprocessing.current_process().daemon:
                raise ConfigError(
                    "run.engine 'processes' cannot start processes in a daemonic one, such as a worker of multiprocessing.Pool. "
                    "Choose run.engine = 'sequential', or a concurrent.futures.ProcessPoolExecutor"
                )
            raise ConfigError("run.engine 'processes' is for CPUs; on a GPU choose 'vectorized'")
        # workers are copies of this process: they do not see values that user code reads and that have changed since
        architectures = task.architectures.values()
        is_fixed = not trains_by_user_code(method, federation) and all(a.is_standard for a in architectures)
        # the options of standard layers, such as the p of a dropout
        layers = [describe_layers(a.module) for a in architectures] if is_fixed else None
        # kept alive, so that no other object gets the same identity
        run_inputs = (method, federation, task)
        if (
            is_fixed
            and self._known
            and layers == self._layers
            and all(a is b for a, b in zip(run_inputs, self._known, strict=True))
        ):
            return
        self.close()
        self._known, self._layers = run_inputs, layers
        engine = Sequential(self.ledger, self.micro_batch)
        for _ in range(min(self.workers or cores(), cores())):
            self._pool.append(
                ForkedWorker(
                    lambda header, payloads: train_client(engine, method, federation, task, header, payloads)
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
        engine: engine that trains the client.
        method: method of the run.
        federation: federation with the client's data.
        task: task of the run.
        header: header with ``client`` and ``round``.
        payloads: encoded download and encoded state of the client.

    Returns:
        A header with the cost of the work and the error of a failure, and the encoded next state and upload.
    """
    start = time.process_time()
    info = federation.infos[header["client"]]
    job = ClientJob(tree.decode(payloads[1]), tree.decode(payloads[0]), info)
    (result,) = engine.run(method, federation, task, header["round"], [job])
    error = result.error
    answer = {
        "client": info.id,
        "steps": result.meter.steps,
        "flops": result.meter.flops,
        "losses": result.meter.losses,
        "error": None if error is None else list(error.__reduce__()[1]),
        "seconds": time.process_time() - start,
    }
    return answer, [tree.encode(result.state), tree.encode(result.upload)]


def decode_result(header: WorkerHeader, payloads: list[bytes]) -> ClientResult:
    """Decode the answer of :func:`train_client`."""
    meter = Meter(header["steps"], header["flops"], header["losses"])
    if header["error"] is not None:
        return diverged_result(NonFiniteError(*header["error"]), meter)
    return ClientResult(tree.decode(payloads[0]), tree.decode(payloads[1]), meter)


def can_fork() -> bool:
    """Whether this process may fork one that can compute: not if it uses a GPU, or is a daemon as in a Pool."""
    return not torch.cuda.is_initialized() and not multiprocessing.current_process().daemon


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
