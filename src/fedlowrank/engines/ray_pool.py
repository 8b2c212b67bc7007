"""Manages the workers of a Ray cluster: their partitions of the data, and the replacement of workers that die."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import ConfigError
from .processes import WorkerError
from .ray_worker import RayWorker, WorkerSetup

START_SECONDS = 120.0
"""Maximum seconds until at least one worker must have started."""

logger = logging.getLogger(__name__)


def import_ray() -> Any:
    """Import the module ``ray``.

    Raises:
        ConfigError: if ``ray`` is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"run.engine 'ray' needs Ray: pip install 'fedlowrank[ray]' ({error})") from error


def connect() -> bool:
    """Connect to the cluster that Ray finds (``RAY_ADDRESS``), or start one on this machine.

    Returns:
        Whether this call connected; False if the process was connected already.

    Raises:
        ConfigError: if Ray is not installed, or if there is no cluster at that address.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    # a cluster that is started here reports no usage statistics
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        with warnings.catch_warnings():
            # warnings about defaults of Ray that will change
            warnings.simplefilter("ignore", FutureWarning)
            ray.init(include_dashboard=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        address = os.environ.get("RAY_ADDRESS", "the address of the last `ray start`")
        raise ConfigError(
            f"run.engine 'ray' finds no Ray cluster at {address}. Start one by `ray start --head`, or unset "
            "RAY_ADDRESS."
        ) from error
    return True


@dataclass(eq=False)
class RayActor:
    """A Ray actor that trains clients.

    Attributes:
        number: index of the actor's first partition.
        actor: handle of a :class:`.ray_worker.RayWorker`.
        probe: reference to the result of the last call of ``describe_location``. The first result is ready once the
            worker has its data; a later one shows that the worker lived when another worker died.
        location: process and machine of the worker; empty until it has started.
    """

    number: int
    actor: Any
    probe: Any
    location: str = ""


class RayPool:
    """The workers of a run, at the start one for each partition.

    Args:
        ray: imported module, connected to the cluster.
        worker_setup: code and models for all workers.
        partitions: encoded data of the partitions.
        has_gpus: whether each worker has a GPU.

    Attributes:
        owners: workers of the partitions.

    Raises:
        ConfigError: if the code or the models cannot be pickled.
        WorkerError: if no worker starts.
    """

    def __init__(
        self, ray: Any, worker_setup: WorkerSetup, partitions: Sequence[bytes], has_gpus: bool
    ) -> None:
        self._ray = ray
        options = {"num_cpus": 1, "num_gpus": int(has_gpus), "scheduling_strategy": "SPREAD"}
        self._make = ray.remote(**options)(RayWorker)
        try:
            self._shared = ray.put(worker_setup)
        except (TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                "run.engine 'ray' sends method and models to its workers, but they cannot be pickled: "
                f"{error}"
            ) from error
        self._partitions = [ray.put(p) for p in partitions]
        self.owners: list[RayActor] = []
        self._starting = [self._start(k) for k in range(len(self._partitions))]
        ray.wait([w.probe for w in self._starting], num_returns=len(self._starting), timeout=START_SECONDS)
        self._await_workers()

    def _start(self, number: int) -> RayActor:
        actor = self._make.remote(self._shared, self._partitions[number])
        return RayActor(number, actor, actor.describe_location.remote())

    def _await_workers(self) -> None:
        """Wait until at least one worker has started."""
        failure = self.admit_started()
        while not self.owners:
            start_references = [w.probe for w in self._starting]
            if not start_references and failure:
                raise WorkerError(
                    "no worker of the Ray cluster could start. Python, fedlowrank and code of your own must "
                    f"be the same on all its machines. {failure}"
                )
            if not start_references or not self._ray.wait(start_references, timeout=START_SECONDS)[0]:
                raise WorkerError(
                    f"no worker of the Ray cluster is left, and none starts within {START_SECONDS:.0f} s. `ray "
                    f"status` shows its machines; add one by `ray start --address=...`, or set run.engine to "
                    f"'processes'. {failure}",
                    python="Go on by simulate(..., resume=True).",
                    command="Go on by `fedlowrank resume`.",
                )
            failure = self.admit_started() or failure

    def admit_started(self) -> str:
        """Give partitions to the workers that have started since the last call.

        Returns:
            The reason why a worker could not start; empty if none failed.
        """
        failure, new_workers = "", list[RayActor]()
        for worker in list(self._starting):
            if not self._ray.wait([worker.probe], timeout=0)[0]:
                continue
            self._starting.remove(worker)
            try:
                worker.location = self._ray.get(worker.probe)
                new_workers.append(worker)
            except self._ray.exceptions.RayError as error:
                failure = str(error)
                logger.warning("ray: worker %d could not start: %s", worker.number, failure)
        owners = self.owners or [
            new_workers[k % len(new_workers)] for k in range(len(self._partitions)) if new_workers
        ]
        self.owners = list(owners)
        for worker in new_workers:
            self.owners[worker.number] = worker
        for k, owner in enumerate(self.owners):
            if owner in new_workers and owner.number != k:
                owner.actor.adopt.remote(self._partitions[k])
        return failure

    def replace(self, dead_worker: RayActor) -> None:
        """Give the partitions of a dead worker to other workers, and start another worker in its place.

        Raises:
            WorkerError: if there is no other worker, and none starts.
        """
        if dead_worker not in self.owners:
            return
        self._ray.kill(dead_worker.actor)
        # the new worker starts once there is room: the core of a process that died, or a machine that was added
        self._starting.append(self._start(dead_worker.number))
        live_workers = [w for w in dict.fromkeys(self.owners) if w is not dead_worker]
        if not live_workers:
            self.owners = []
            self._await_workers()
            return
        for worker in live_workers:
            # Ray may not have noticed yet that this worker is dead, too
            worker.probe = worker.actor.describe_location.remote()
        for k, owner in enumerate(self.owners):
            if owner is dead_worker:
                self.owners[k] = min(live_workers, key=self.owners.count)
                self.owners[k].actor.adopt.remote(self._partitions[k])

    def has_answered(self, probe: Any) -> bool:
        """Whether a worker has answered a probe: one that was dead before, or is still busy, has not."""
        if not self._ray.wait([probe], timeout=0)[0]:
            return False
        try:
            self._ray.get(probe)
        except self._ray.exceptions.RayError:
            return False
        return True

    def close(self) -> None:
        """Stop all workers."""
        for worker in dict.fromkeys([*self.owners, *self._starting]):
            self._ray.kill(worker.actor)
        self.owners, self._starting = [], []
