"""Optimizer states that a client keeps from round to round (``optimizer.keep``), beside its method's state.

Methods know nothing of them. An engine takes a client's optimizer states out of what the client keeps, hands each to
the pass that it belongs to, and stores what the pass makes of it. So they are committed with the client's state: a
client that skips a round goes on from its last one, and a client whose reply is lost keeps the states of before. They
never travel. An adaptation before inference is no pass of a round: it begins afresh and changes none.

A pass that a method takes several times in a round has a state for each time. The learning rate, weight decay and
everything else that a step needs are those of the round.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from ..core import tree
from ..core.contract import ClientInfo
from ..core.contract.training_request import KeptState, Request, Trainer
from ..core.errors import TaskError
from ..core.learning.optimizer import OptimizerState

T = TypeVar("T")


@tree.tree_dataclass
class StateWithOptimizers:
    """What a client keeps when it keeps states of its optimizers.

    Attributes:
        state: of the method, maybe with buffers.
        optimizers: by the name of the pass, one for each time that the pass is taken in a round.
    """

    state: Any
    optimizers: dict[str, list[OptimizerState]]


def split_optimizers(client_state: Any) -> tuple[Any, dict[str, list[OptimizerState]]]:
    """Separate what a client keeps into the rest and the states of its optimizers."""
    if isinstance(client_state, StateWithOptimizers):
        return client_state.state, client_state.optimizers
    return client_state, {}


class KeepingTrainer:
    """Hands the optimizer states of a client to its passes, and collects the next ones.

    Args:
        trainer: executes the passes.
        client: whose they are, for errors.
        states: of the client's last round.

    Attributes:
        has_failed: whether a pass raised an error, such as that of a NaN, so that nothing of the round is kept.
    """

    def __init__(self, trainer: Trainer, client: ClientInfo, states: dict[str, list[OptimizerState]]) -> None:
        self.has_failed = False
        self._trainer, self._client, self._states = trainer, client, states
        self._next: dict[str, list[OptimizerState]] = {}
        self._taken: Counter[str] = Counter()

    def train(self, request: Request) -> Any:
        """See :meth:`fedlowrank.core.contract.method.ClientView.train`."""
        try:
            return self._train(request)
        except Exception:
            self.has_failed = True
            raise

    def _train(self, request: Request) -> Any:
        if not request.optimizer.keep:
            return self._trainer.train(request)
        name, states = request.name, self._states.get(request.name, [])
        index = self._taken[name]
        self._taken[name] += 1
        previous_state = states[index] if index < len(states) else None
        if previous_state is not None:
            self._check(request, previous_state)
        kept_state = KeptState(previous_state)
        end = self._trainer.train(dataclasses.replace(request, kept=kept_state))
        if kept_state.state is not None:
            self._next.setdefault(name, []).append(kept_state.state)
        return end

    def sum_over_data(self, statistic: Callable[..., T], params: Any, constants: tuple[Any, ...]) -> T:
        """See :meth:`fedlowrank.core.contract.method.ClientView.sum_over_data`."""
        return self._trainer.sum_over_data(statistic, params, constants)

    def steps(self, name: str) -> int:
        """See :meth:`fedlowrank.core.contract.method.ClientView.steps`."""
        return self._trainer.steps(name)

    def collect(self, client_state: Any) -> Any:
        """What the client stores; a pass that this round did not take, or fewer times, keeps its states."""
        if self.has_failed:
            return StateWithOptimizers(client_state, self._states) if self._states else client_state
        remaining_states = {
            name: pass_states[self._taken[name] :] for name, pass_states in self._states.items()
        }
        states = remaining_states | {
            name: [*new_states, *remaining_states.get(name, [])] for name, new_states in self._next.items()
        }
        return StateWithOptimizers(client_state, states) if states else client_state

    def _check(self, request: Request, previous_state: OptimizerState) -> None:
        """Refuse a state of other parameters than those that are trained now."""
        new_shapes = _shapes(request.start)
        for slot in previous_state.slots:
            if (old_shapes := _shapes(slot)) != new_shapes:
                path = next(
                    (p for p in {**new_shapes, **old_shapes} if new_shapes.get(p) != old_shapes.get(p)), ""
                )
                raise TaskError(
                    f"optimizer.keep: the state that {self._client.title} keeps of its optimizer does not fit what it "
                    f"trains in pass {request.name!r}: {path or 'the tree'} had shape {old_shapes.get(path, 'none')} when it "
                    f"trained last, and has {new_shapes.get(path, 'none')} now. Set optimizer.keep = false for this method."
                )


def _shapes(value: Any) -> dict[str, list[int]]:
    return {path: list(t.shape) for path, t in tree.leaves(value)}


def slot_like(start: Any, tensors: Sequence[Tensor | None]) -> Any:
    """One of the values that an optimizer keeps of each parameter, as a tree; 0 where it keeps none yet."""
    tensor_iterator = iter(tensors)

    def fill(p: Tensor) -> Tensor:
        t = next(tensor_iterator)
        return tree.widen(p).new_zeros(p.shape) if t is None else t.detach()

    return tree.map_leaves(fill, start)
