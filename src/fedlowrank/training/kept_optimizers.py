"""Optimizer states that a client keeps from round to round (``optimizer.keep``), beside its method's state.

Methods do not see these states. An engine reads them from the client's stored state, passes each to its training
pass, and stores the state after the pass. They are committed with the client's state: a client that skips a round
continues from its last round, and a client whose reply is lost keeps its previous states. They are never sent. An
adaptation before inference is not a pass of a round: it begins with fresh states and changes none.

A pass that a method takes several times in a round has a state for each time. The learning rate, weight decay and
all other settings of a step are those of the round.
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
    """The stored state of a client that keeps the states of its optimizers.

    Attributes:
        state: state of the method, possibly with buffers.
        optimizers: optimizer states by the name of the pass, one for each time that the pass is taken in a round.
    """

    state: Any
    optimizers: dict[str, list[OptimizerState]]


def split_optimizers(client_state: Any) -> tuple[Any, dict[str, list[OptimizerState]]]:
    """Separate a client's stored state into the state of the method and the states of its optimizers."""
    if isinstance(client_state, StateWithOptimizers):
        return client_state.state, client_state.optimizers
    return client_state, {}


class KeepingTrainer:
    """Passes the optimizer states of a client to its training passes, and collects the next states.

    Args:
        trainer: trainer that executes the passes.
        client: client that owns the states, for error messages.
        states: optimizer states after the client's last round, by the name of the pass.

    Attributes:
        has_failed: whether a pass raised an error, such as that of a NaN, so that no state of the round is kept.
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
        """Build the state to store; a pass that was taken fewer times in this round, or not at all, keeps its states."""
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
        """Refuse a state that belongs to other parameters than the pass trains."""
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
    """Build the tree of one value that an optimizer keeps for each parameter; 0 where it keeps none yet."""
    tensor_iterator = iter(tensors)

    def fill(p: Tensor) -> Tensor:
        t = next(tensor_iterator)
        return tree.widen(p).new_zeros(p.shape) if t is None else t.detach()

    return tree.map_leaves(fill, start)
