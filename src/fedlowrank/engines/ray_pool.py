"""Workers of a Ray cluster: who has which part of the data, and what happens when one dies."""

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
from .ray_worker import RayWorker, Shared

START = 120.0
"""Seconds in which at least one worker must start."""

logger = logging.getLogger(__name__)


def import_ray() -> Any:
    """The module ``ray``.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"run.engine 'ray' needs Ray: pip install 'fedlowrank[ray]' ({error})") from error


def connect() -> bool:
    """Connect to the cluster that Ray finds (``RAY_ADDRESS``), or start one on this machine.

    Returns:
        Whether this call did it; False if the process was connected already.

    Raises:
        ConfigError: if Ray is not installed, or there is no cluster at that address.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    # a cluster that is started here reports no usage statistics
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        with warnings.catch_warnings():
            # of defaults of Ray that will change
            warnings.simplefilter("ignore", FutureWarning)
            ray.init(include_dashboard=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        where = os.environ.get("RAY_ADDRESS", "the address of the last `ray start`")
        raise ConfigError(
            f"run.engine 'ray' finds no Ray cluster at {where}. Start one by `ray start --head`, or unset "
            "RAY_ADDRESS."
        ) from error
    return True


@dataclass(eq=False)
class RayActor:
    """An actor of Ray.

    Attributes:
        number: of the partition that it begins with.
        actor: a handle of :class:`.ray_worker.RayWorker`.
        started: reference of its place, which comes once it has its data.
        place: its process and machine; empty until it has started.
    """

    number: int
    actor: Any
    started: Any
    place: str = ""


class RayPool:
    """As many workers as partitions, in the beginning.

    Args:
        ray: the module, connected.
        shared: what all workers get.
        partitions: data of each partition, encoded.
        gpu: whether each worker has a GPU.

    Attributes:
        owners: the worker of each partition.

    Raises:
        ConfigError: if code or models cannot be pickled.
        WorkerError: if no worker starts.
    """

    def __init__(self, ray: Any, shared: Shared, partitions: Sequence[bytes], gpu: bool) -> None:
        self._ray = ray
        options = {"num_cpus": 1, "num_gpus": int(gpu), "scheduling_strategy": "SPREAD"}
        self._make = ray.remote(**options)(RayWorker)
        try:
            self._shared = ray.put(shared)
        except (TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                "run.engine 'ray' sends method and models to its workers, but they cannot be pickled: "
                f"{error}"
            ) from error
        self._partitions = [ray.put(p) for p in partitions]
        self.owners: list[RayActor] = []
        self._starting = [self._start(k) for k in range(len(self._partitions))]
        ray.wait([w.started for w in self._starting], num_returns=len(self._starting), timeout=START)
        self._await()

    def _start(self, number: int) -> RayActor:
        actor = self._make.remote(self._shared, self._partitions[number])
        return RayActor(number, actor, actor.place.remote())

    def _await(self) -> None:
        """Wait until there is a worker."""
        why = self.welcome()
        while not self.owners:
            waiting = [w.started for w in self._starting]
            if not waiting and why:
                raise WorkerError(
                    "no worker of the Ray cluster could start. Python, fedlowrank and code of your own must "
                    f"be the same on all its machines. {why}"
                )
            if not waiting or not self._ray.wait(waiting, timeout=START)[0]:
                raise WorkerError(
                    f"no worker of the Ray cluster is left, and none starts within {START:.0f} s. `ray "
                    f"status` shows its machines; add one by `ray start --address=...`, or set run.engine to "
                    f"'processes'. {why}",
                    python="Go on by simulate(..., resume=True).",
                    command="Go on by `fedlowrank resume`.",
                )
            why = self.welcome() or why

    def welcome(self) -> str:
        """Give the partitions of workers that have started since the last call to them.

        Returns:
            Why the last of those that could not start did not.
        """
        failure, new = "", list[RayActor]()
        for worker in list(self._starting):
            if not self._ray.wait([worker.started], timeout=0)[0]:
                continue
            self._starting.remove(worker)
            try:
                worker.place = self._ray.get(worker.started)
                new.append(worker)
            except self._ray.exceptions.RayError as error:
                failure = str(error)
                logger.warning("ray: worker %d could not start: %s", worker.number, failure)
        before = self.owners or [new[k % len(new)] for k in range(len(self._partitions)) if new]
        self.owners = list(before)
        for worker in new:
            self.owners[worker.number] = worker
        for k, owner in enumerate(self.owners):
            if owner in new and owner.number != k:
                owner.actor.adopt.remote(self._partitions[k])
        return failure

    def replace(self, dead: RayActor) -> None:
        """Give the partitions of a worker that died to others, and start another in its place.

        Raises:
            WorkerError: if there is no other, and none starts.
        """
        if dead not in self.owners:
            return
        self._ray.kill(dead.actor)
        # it works once there is room for it: the core of a process that died, or a machine that was added
        self._starting.append(self._start(dead.number))
        alive = [w for w in dict.fromkeys(self.owners) if w is not dead]
        if not alive:
            self.owners = []
            self._await()
            return
        for k, owner in enumerate(self.owners):
            if owner is dead:
                self.owners[k] = min(alive, key=self.owners.count)
                self.owners[k].actor.adopt.remote(self._partitions[k])

    def close(self) -> None:
        """End all workers."""
        for worker in dict.fromkeys([*self.owners, *self._starting]):
            self._ray.kill(worker.actor)
        self.owners, self._starting = [], []
