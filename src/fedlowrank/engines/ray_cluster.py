"""Trains clients on the workers of a Ray cluster; results equal those of the sequential engine bit for bit.

A worker is a Ray actor with one core and one thread, or with one GPU if the run is on GPUs. Client i belongs to
partition i mod P of the data; P is the number of workers at the start. A worker gets its partition once, through
Ray's object store, so data are not sent again. A block of clients of one partition is one task.

States, downloads, uploads and data are sent as encoded trees. Ray itself pickles (cloudpickle) the method, the models
and the task, once for each worker, and lists of such bytes and plain numbers. This is no trust boundary: anyone who
can reach a Ray cluster can run any code on it, so a cluster must belong to its user. The user's own code in modules
must be importable on every machine.

A worker that dies costs time but no result. The driver keeps what a block needs until its results have arrived, and
randomness depends only on names, so the worker that gets the partition next computes the same bits.

Contributions are not added on the workers before they are sent. Floating-point addition is not associative, and the
sums of a round are taken in the order of its clients: partial sums of workers would have other bits, which would
change with the number of workers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..core import tree
from ..core.contract import AnyMethod, Task
from ..core.errors import ConfigError
from ..data.federation import Federation
from .engine import ClientJob, ClientResult, Engine
from .processes import WorkerError, decode_result, restore_worker_error
from .ray_pool import RayActor, RayPool, connect, import_ray
from .ray_worker import encode_partition, share

MEAN_CLIENTS_PER_TASK = 8
"""Average number of clients in a task; a task is one message."""

MAX_WINDOWS = 3
"""Maximum number of windows in progress, so that no worker waits and the memory of the driver is bounded."""

MAX_ATTEMPTS = 4
"""Number of workers that may die with the same block before the run fails."""

MAX_STORED_DOWNLOADS = 8
"""Maximum number of downloads that stay in the object store, because the next clients may get the same ones."""

MAX_INLINE_BYTES = 1 << 15
"""Maximum bytes of a download that is sent with each block, because storing it would take longer."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _ClientBlock:
    """Clients of one partition, which one task trains.

    Attributes:
        partition: index of the partition of the data.
        indices: indices of the clients in the window.
        arguments: arguments of :meth:`.ray_worker.RayWorker.train`.
        worker: actor that trains the clients.
        probe: the worker's probe when it got the block.
        task: references to the results.
        attempts: number of workers that died after they got the block.
    """

    partition: int
    indices: list[int]
    arguments: tuple[Any, ...]
    worker: RayActor | None = None
    probe: Any = None
    task: Any = None
    attempts: int = 0


@dataclass
class Ray(Engine):
    """Trains clients on the workers of a Ray cluster. Results are those of the sequential engine bit for bit.

    The engine uses the cluster that the process is connected to, else the cluster at ``RAY_ADDRESS``, else one that
    Ray starts on this machine.

    Attributes:
        workers: number of workers, at most one per core or GPU; None for that many.
    """

    name: ClassVar[str] = "ray"
    workers: int | None = None
    _pool: RayPool | None = field(default=None, init=False, repr=False)
    _partitions: int = field(default=0, init=False, repr=False)
    _connected: bool = field(default=False, init=False, repr=False)
    _known: tuple[Any, ...] = field(default=(), init=False, repr=False)
    _downs: list[tuple[Any, bytes, Any]] = field(default_factory=list, init=False, repr=False)

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Generator[ClientResult, None, None]:
        """See the base class."""
        try:
            pool = self._prepare(method, federation, task)
            device = federation.clients[0].train.y.device
            window_size = MEAN_CLIENTS_PER_TASK * self._partitions
            windows: deque[list[_ClientBlock]] = deque()
            for start in range(0, len(jobs), window_size):
                pool.admit_started()
                windows.append(self._divide_by_partition(round, jobs[start : start + window_size]))
                for block in windows[-1]:
                    _submit(pool, block)
                if len(windows) == MAX_WINDOWS:
                    yield from _collect_results(pool, windows, device)
            while windows:
                yield from _collect_results(pool, windows, device)
        except BaseException:
            # results that workers still compute are no longer needed
            self.close()
            raise
        self._downs = []

    def close(self) -> None:
        """Stop the workers, and close the connection if this engine opened it."""
        if self._pool is not None and import_ray().is_initialized():
            self._pool.close()
        if self._connected:
            import_ray().shutdown()
        self._pool, self._connected, self._known, self._downs = None, False, (), []

    def _prepare(self, method: AnyMethod, federation: Federation, task: Task) -> RayPool:
        """Get the workers; they are started anew for another method, federation or task."""
        # kept alive, so that no other object gets the same identity
        run_inputs = (method, federation, task)
        is_same = len(self._known) == 3 and all(a is b for a, b in zip(run_inputs, self._known, strict=True))
        if self._pool is not None and is_same:
            return self._pool
        self.close()
        self._connected = connect()
        ray, has_gpus = import_ray(), federation.clients[0].train.y.device.type != "cpu"
        resource_name = "GPU" if has_gpus else "CPU"
        resource_count = int(ray.cluster_resources().get(resource_name, 0))
        if not resource_count:
            raise ConfigError(f"run.engine 'ray': the Ray cluster has no {resource_name}; see `ray status`")
        client_count = len(federation.clients)
        self._partitions = min(self.workers or resource_count, resource_count, client_count)
        partitions = [
            encode_partition(federation, range(k, client_count, self._partitions))
            for k in range(self._partitions)
        ]
        self._pool = RayPool(ray, share(method, federation, task, self.micro_batch), partitions, has_gpus)
        self._known = run_inputs
        return self._pool

    def _divide_by_partition(self, round: int, jobs: Sequence[ClientJob]) -> list[_ClientBlock]:
        """Divide the jobs of a window into one block for each partition."""
        indices_by_partition: dict[int, list[int]] = {}
        for index, job in enumerate(jobs):
            indices_by_partition.setdefault(job.client.id % self._partitions, []).append(index)
        downloads = [self._reference(job.down) for job in jobs]
        states = [tree.encode(job.state) for job in jobs]
        blocks = []
        for partition, indices in indices_by_partition.items():
            distinct_downloads = list(dict.fromkeys(downloads[p] for p in indices))
            download_indices = [distinct_downloads.index(downloads[p]) for p in indices]
            client_ids = [jobs[p].client.id for p in indices]
            arguments = (
                round,
                client_ids,
                download_indices,
                *[states[p] for p in indices],
                *distinct_downloads,
            )
            blocks.append(_ClientBlock(partition, indices, arguments))
        return blocks

    def _reference(self, down: Any) -> Any:
        """Convert a download to the argument of a task: its bytes, or a reference to them in the object store."""
        for stored_download, _, reference in self._downs:
            if stored_download is down:
                return reference
        data = tree.encode(down)
        digest = hashlib.blake2b(data).digest()
        references = [r for _, d, r in self._downs if d == digest]
        if references:
            reference = references[0]
        elif len(data) <= MAX_INLINE_BYTES:
            reference = data
        else:
            reference = import_ray().put(data)
        self._downs = [(down, digest, reference), *self._downs[: MAX_STORED_DOWNLOADS - 1]]
        return reference


def _submit(pool: RayPool, block: _ClientBlock) -> None:
    block.worker = pool.owners[block.partition]
    block.probe = block.worker.probe
    # arguments and results are passed separately, so that small ones are sent with the call and not through
    # object stores
    train = block.worker.actor.train.options(num_returns=1 + len(block.indices))
    block.task = train.remote(*block.arguments)


def _collect_results(
    pool: RayPool, windows: deque[list[_ClientBlock]], device: Any
) -> Generator[ClientResult, None, None]:
    """Yield the results of the oldest window, in the order of its jobs."""
    results: dict[int, ClientResult] = {}
    for i, block in enumerate(windows[0]):
        in_progress = [*windows[0][i:], *(b for window in list(windows)[1:] for b in window)]
        for index, (header, payloads) in zip(
            block.indices, _await_answers(pool, block, in_progress), strict=True
        ):
            result = decode_result(header, payloads)
            if device.type != "cpu":
                state, upload = (tree.move(v, device) for v in (result.state, result.upload))
                result = dataclasses.replace(result, state=state, upload=upload)
            results[index] = result
    windows.popleft()
    for index in sorted(results):
        yield results.pop(index)


def _await_answers(pool: RayPool, block: _ClientBlock, in_progress: Sequence[_ClientBlock]) -> Any:
    """Wait for the answers of a block; blocks of a worker that died are run again.

    Raises:
        FedlowrankError: the error of the package that a client's training raised, caused by a :class:`.processes.WorkerError`
            with the traceback.
        WorkerError: if a client's training raised another error, or if no worker is left to run it.
    """
    ray = import_ray()
    while True:
        try:
            failure, *answers = ray.get(block.task)
        except ray.exceptions.RayTaskError as error:
            raise WorkerError(f"a worker of the Ray cluster failed:\n{error}") from error
        except ray.exceptions.RayError as error:
            _run_again(pool, block, in_progress, error)
            continue
        if failure is not None:
            traceback_text, description = failure
            worker_error = WorkerError(f"a worker of the Ray cluster failed:\n{traceback_text}")
            if (package_error := restore_worker_error(description)) is not None:
                raise package_error from worker_error
            raise worker_error
        return answers


def _run_again(
    pool: RayPool, block: _ClientBlock, in_progress: Sequence[_ClientBlock], error: Exception
) -> None:
    dead_worker = block.worker
    if dead_worker is None:
        raise AssertionError("the block was not submitted")
    lost_blocks = [b for b in in_progress if b.worker is dead_worker]
    reason = str(error).strip().splitlines()[0]
    logger.warning(
        "ray: worker %d (%s) died; %d of its clients are run again: %s",
        dead_worker.number, dead_worker.location, sum(len(b.indices) for b in lost_blocks), reason,
    )  # fmt: skip
    for lost_block in lost_blocks:
        # a worker that was already dead when it got the block does not count: several may die at once
        lost_block.attempts += pool.has_answered(lost_block.probe)
    if block.attempts >= MAX_ATTEMPTS:
        raise WorkerError(
            f"workers of the Ray cluster died {MAX_ATTEMPTS} times while they trained clients "
            f"{block.arguments[1]}, perhaps for lack of memory. Start fewer workers a machine (ray start "
            f"--num-cpus=N), or set run.engine to 'sequential', which takes one client at a time. {error}"
        ) from error
    pool.replace(dead_worker)
    for lost_block in lost_blocks:
        _submit(pool, lost_block)
