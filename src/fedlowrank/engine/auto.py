"""The engine that a short timed trial finds fastest for a model, a method and a machine.

The trial trains a few of the first round's clients by every engine that can, and throws the results away. What it found is
kept in a file of the user's cache folder, so that the same run on the same machine is executed in the same way again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from .. import tree
from ..data.federation import Federation
from ..errors import FedlowrankError, NonFiniteError, TaskError
from ..method import Task
from ..progress import tell
from ..record import write_json
from .base import AnyMethod, Engine, Job, Outcome
from .processes import Processes, can_fork, cores
from .sequential import Sequential
from .vectorised import Vectorised

SAMPLE = 8
"""Clients of a trial at most."""

LONG = 10.0
"""Seconds a client may take for a trial to be worth its while; above that, what surrounds the steps weighs nothing."""

MARGIN = 0.9
"""Share of the sequential engine's time below which another one is chosen, for that one is exact and simple."""

T = TypeVar("T")


def cache_file() -> Path:
    """Where choices are kept: in ``$XDG_CACHE_HOME``, else in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedlowrank" / "engines.json"


@dataclass
class Auto(Engine):
    """The fastest of sequential, vectorised and processes.

    Attributes:
        cache: file of choices, or None to try anew in every run.
        say: tells a person what was chosen and why.
        chosen: the engine, once the first round has begun.
    """

    name: ClassVar[str] = "auto"
    cache: Path | None = field(default_factory=cache_file)
    say: Callable[[str], None] = field(default=tell, repr=False)
    chosen: Engine | None = None

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[Job]
    ) -> Iterator[Outcome]:
        """See the base class."""
        if self.chosen is None and jobs:
            self.chosen = self._choose(method, federation, task, round, jobs)
        engine = self.chosen or self._made(Sequential)
        yield from engine.run(method, federation, task, round, jobs)

    def each(self, work: Callable[[T], dict[str, Any]], items: Sequence[T]) -> list[dict[str, Any]]:
        """See the base class."""
        return super().each(work, items) if self.chosen is None else self.chosen.each(work, items)

    def close(self) -> None:
        """See the base class."""
        if self.chosen is not None:
            self.chosen.close()

    def _made(self, kind: type[Engine]) -> Engine:
        return kind(self.ledger, self.places, self.micro_batch)

    def _choose(self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[Job]) -> Engine:
        if not all(a.is_standard for a in federation.architectures.values()):
            # a trial would call the user's code more often than training does
            self.say("engine auto: sequential, because a model has layers of its own or hooks")
            return self._made(Sequential)
        key = fingerprint(method, federation, len(jobs))
        kinds = {k.name: k for k in self._candidates(federation)}
        known = self._read().get(key)
        if known in kinds:
            self.say(f"engine auto: {known}, as a trial found before (see {self.cache})")
            return self._made(kinds[known])
        seconds = {}
        for name, kind in kinds.items():
            engine = self._made(kind)
            with contextlib.closing(engine):
                found = _seconds(engine, method, federation, task, round, jobs[:SAMPLE])
            if found is not None:
                seconds[name] = found
            if found is not None and name == "sequential" and found > LONG * len(jobs[:SAMPLE]):
                break
        best = min(seconds, key=lambda n: seconds[n], default="sequential")
        if "sequential" in seconds and seconds[best] > MARGIN * seconds["sequential"]:
            best = "sequential"
        if len(seconds) == 1 and "processes" in kinds:
            # clients that take so long gain by every core, whatever surrounds them
            best = "processes"
        figures = ", ".join(f"{n} {s:.3g} s" for n, s in seconds.items())
        self.say(f"engine auto: {best}; {len(jobs[:SAMPLE])} clients took {figures}")
        self._write({**self._read(), key: best})
        return self._made(kinds[best])

    def _candidates(self, federation: Federation) -> list[type[Engine]]:
        device = next(iter(federation.clients)).train.y.device.type
        found: list[type[Engine]] = [Sequential]
        if self.micro_batch is None:
            found.append(Vectorised)
        if device == "cpu" and cores() > 1 and can_fork():
            found.append(Processes)
        return found

    def _read(self) -> dict[str, str]:
        try:
            found = {} if self.cache is None else json.loads(self.cache.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}

    def _write(self, choices: dict[str, str]) -> None:
        if self.cache is None:
            return
        try:
            self.cache.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.cache, choices)
        except (OSError, FedlowrankError) as error:
            # then it is made again the next time
            self.say(f"engine auto: the choice cannot be kept in {self.cache}: {error}")


def _seconds(
    engine: Engine, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[Job]
) -> float | None:
    """Seconds of a second time, when all that is found once is known; None if the engine cannot."""
    try:
        start = time.perf_counter()
        list(engine.run(method, federation, task, round, jobs))
        first = time.perf_counter() - start
        if first > LONG * len(jobs):
            return first
        start = time.perf_counter()
        list(engine.run(method, federation, task, round, jobs))
        return time.perf_counter() - start
    except (TaskError, NonFiniteError):
        return None


def fingerprint(method: AnyMethod, federation: Federation, clients: int) -> str:
    """What a choice depends on: method and settings, forms of models and data, the machine."""
    models = {n: [tree.signature(a.initial), a.couples] for n, a in federation.architectures.items()}
    sizes = sorted(len(c.train) for c in federation.clients)
    facts = [
        repr(method),
        models,
        clients,
        [sizes[0], sizes[len(sizes) // 2], sizes[-1]],
        str(next(iter(federation.clients)).train.y.device) + (" bytes" if federation.is_packed else ""),
        cores(),
        torch.get_num_threads(),
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
