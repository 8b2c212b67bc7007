"""Trains one client after another in this process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core import tree
from ..core.contract import AnyMethod, Task
from ..core.errors import NonFiniteError
from ..data.federation import Federation
from .engine import ClientJob, ClientResult, Engine, diverged_result, finite_losses


@dataclass
class Sequential(Engine):
    """Trains one client after another. A pass updates its own copies in place and never changes a function's argument."""

    name: ClassVar[str] = "sequential"

    def run(
        self, method: AnyMethod, federation: Federation, task: Task, round: int, jobs: Sequence[ClientJob]
    ) -> Generator[ClientResult, None, None]:
        """See the base class."""
        for job in jobs:
            trainer = self.trainer(method, federation, round, job.client)
            try:
                state, upload = self.local_update(method, federation, task, round, job, trainer)
            except NonFiniteError as error:
                yield diverged_result(error, trainer.meter)
                continue
            yield ClientResult(state, upload, finite_losses(trainer.meter))


@dataclass
class Wire(Sequential):
    """Sequential engine that encodes every value that crosses a boundary as bytes and decodes it."""

    name: ClassVar[str] = "wire"

    def boundary(self, value: Any) -> Any:
        """Encode a value as bytes and decode it on its device."""
        return tree.map_leaves(lambda t, before: t.to(before.device), tree.decode(tree.encode(value)), value)
