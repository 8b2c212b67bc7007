"""What a step computed, as a list to be computed again without asking the loss how.

A small model takes a step in less time than Python, autograd and ``vmap`` need to find out what is to be done. So after a step
has been taken often enough, one of its kind is *recorded*: every operation that reached torch's dispatcher, those of the backward
pass and of the update among them. From then on the same operations are *played* on other tensors. A tape is kept only if

- all that the loss captured has a value (:func:`captured`), which is looked at again before every step: numbers, words, models,
  settings that are frozen, lists of these;
- while it was recorded, no number was looked at, none was drawn at random, and no tensor came from anywhere but the inputs;
- played on the inputs on which it was recorded, it gives the same bits.

What is the same in every step, such as the ones with which a backward pass begins, is computed once. So whether a tape is used,
and from when on, changes no result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .closures import everything, identity
from .descent import Work
from .method import Batch
from .models.architecture import Architecture

LARGEST = 1 << 28
"""Bytes of all that a step computes, above which it is not recorded: it would gain nothing, and nothing is let go meanwhile."""

_LOOKS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__}
"""What makes numbers of Python of a tensor, so that what follows may depend on them."""


_aten = torch.ops.aten
_MADE = {
    *(_aten.ones_like, _aten.zeros_like, _aten.full_like, _aten.new_ones, _aten.new_zeros, _aten.new_full),
    *(_aten.ones, _aten.zeros, _aten.full, _aten.scalar_tensor, _aten.arange),
}
"""What makes tensors whose content depends on no other tensor's content."""


class UnrepeatableError(Exception):
    """A step does what need not be the same in the next one."""


class _NoNumber:
    """In the place of a number that is another one in the next step; whoever makes use of it fails."""

    def _fail(self, *_: Any) -> Any:
        raise UnrepeatableError("the loss depends on the number of the step")

    __eq__ = __ne__ = __hash__ = __bool__ = __int__ = __index__ = __float__ = __str__ = __format__ = _fail
    __repr__ = _fail


def captured(loss: Any) -> Any:
    """Identity of what a loss computes now: what it captured by its value, models by being the same.

    Raises:
        UnrepeatableError: if it captured what has no such value, as a tensor.
    """
    return identity(loss, _model)


def _model(value: Any) -> Any:
    if isinstance(value, Architecture) and not value.random:
        return "model", id(value)
    raise UnrepeatableError(f"the loss captures a {type(value).__name__}, or what is not there yet")


def fixed(loss: Any) -> list[Tensor]:
    """What the models that a loss captured hold: tensors that nobody changes."""
    models = [v.module for v in everything(loss) if isinstance(v, Architecture)]
    return [t for m in models for t in (*m.parameters(), *m.buffers())]


def form(batch: Batch) -> Any:
    """What a tape depends on in a batch."""
    x = batch.x
    inputs = tuple((n, t.shape, t.stride(), t.dtype) for n, t in (x.items() if isinstance(x, dict) else [("", x)]))
    return inputs, batch.y.shape, batch.y.dtype, batch.mask is None


def _inputs(work: Work, batch: Batch) -> list[Tensor]:
    x = list(batch.x.values()) if isinstance(batch.x, dict) else [batch.x]
    return [*work.params, *work.constants, *x, batch.y, *([] if batch.mask is None else [batch.mask])]


def _copied(batch: Batch) -> Batch:
    """The batch in memory of its own, and without its number, which is another one in every step."""
    x = {n: t.clone() for n, t in batch.x.items()} if isinstance(batch.x, dict) else batch.x.clone()
    step: Any = _NoNumber()
    return Batch(x, batch.y.clone(), None if batch.mask is None else batch.mask.clone(), step)


class Tape:
    """A recorded step.

    Args:
        take: takes a step, and returns its loss.
        work: as it was before a step; left as it is.
        batch: of that step.

    Raises:
        UnrepeatableError: if no tape can stand for such a step.
    """

    def __init__(self, take: Callable[[Work, Batch], Tensor], work: Work, batch: Batch) -> None:
        first, second = work.twin(), work.twin()
        inputs = _inputs(first, copy := _copied(batch))
        if any(a.stride() != b.stride() for a, b in zip(inputs, _inputs(work, batch), strict=True)):
            raise UnrepeatableError("an input overlaps with itself")
        recorder = _Recorder(inputs, fixed(work.request.loss))
        before = list(first.params)
        try:
            with _NoLooks(), recorder:
                value = take(first, copy)
        except (TypeError, AttributeError, LookupError, ValueError, RuntimeError) as error:
            # the same step was taken without a recorder before
            raise UnrepeatableError(str(error)) from error
        kept = [_place(new) == _place(old) for new, old in zip(first.params, before, strict=True)]
        new = [None if k else recorder.node(p) for k, p in zip(kept, first.params, strict=True)]
        recorder.graph.output((recorder.node(value), new))
        recorder.fold()
        recorder.graph.eliminate_dead_code()
        self._play = fx.GraphModule(recorder.root, recorder.graph).forward
        # for as long as the tape lives no other object takes the place of what the loss captured
        self._loss = work.request.loss
        again = self.play(second, copy)
        pairs = [(value, again), *zip(first.params, second.params, strict=True)]
        if not all(torch.equal(a, b) for a, b in pairs):
            raise UnrepeatableError("the step comes out otherwise when it is played")

    def play(self, work: Work, batch: Batch) -> Tensor:
        """Take a step, and return its loss."""
        with torch.no_grad():
            value, new = self._play(*_inputs(work, batch))
        work.replace({i: t for i, t in enumerate(new) if t is not None})
        result: Tensor = value
        return result


def _place(t: Tensor) -> Any:
    """Where and how a tensor lies in memory; two of the same place are the same, as long as they live."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation.

    Args:
        inputs: tensors that will be others when the tape is played; no two of them share memory.
        fixed: tensors that will be the same.

    Attributes:
        graph: what was computed.
        root: holds those of the fixed tensors that took part.
    """

    def __init__(self, inputs: list[Tensor], fixed: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.root = fx.Graph(), torch.nn.Module()
        self._fixed = {_place(t): t.detach() for t in fixed if t.numel()}
        # whose memory must not be given to others while tensors are known by where they lie
        self._alive, self._bytes = list(inputs), 0
        self._nodes = {_place(t): self.graph.placeholder(f"input_{i}") for i, t in enumerate(inputs)}
        # what depends on no input's content; None once one of these was changed in place
        self._same: dict[fx.Node, Tensor] | None = {}
        if len(self._nodes) < len(inputs) or any(t.numel() == 0 for t in inputs):
            raise UnrepeatableError("an input is empty")

    def node(self, t: Tensor) -> fx.Node:
        """What stands for a tensor."""
        place = _place(t)
        if place not in self._nodes and place in self._fixed:
            name = f"fixed_{len(self._nodes)}"
            self.root.register_buffer(name, self._fixed[place])
            self._nodes[place] = self.graph.get_attr(name)
        if place not in self._nodes:
            raise UnrepeatableError("a tensor comes from elsewhere")
        return self._nodes[place]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute, and write down."""
        del types
        if torch.Tag.nondeterministic_seeded in func.tags or func is torch.ops.aten._local_scalar_dense.default:
            raise UnrepeatableError(f"{func} gives what may be another number")
        known, named = (self._written(a) for a in (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        parts = [out] if isinstance(out, Tensor) else list(out or ())
        given = [(i, t) for i, t in enumerate(parts) if t is not None]
        if any(not isinstance(t, Tensor) or t.numel() == 0 for _, t in given):
            raise UnrepeatableError(f"{func} gives what is no tensor, or an empty one")
        if self._bytes > LARGEST:
            raise UnrepeatableError("the step is too large to gain by it")
        changes = func._schema.is_mutable
        same = self._is_same(func, known, named)
        # another view of the same is there already
        if changes or any(_place(t) not in self._nodes for _, t in given):
            node = self.graph.call_function(func, known, named)
            for i, t in given:
                self._alive.append(t)
                self._bytes += t.nbytes
                if _place(t) not in self._nodes:
                    part = node if out is t else self.graph.call_function(operator.getitem, (node, i))
                    self._nodes[_place(t)] = part
                    if same and self._same is not None:
                        self._same[part] = t
        return out

    def _is_same(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the result depends on no input's content."""
        used: list[fx.Node] = []
        map_arg((args, kwargs), used.append)
        known = self._same or {}
        if func._schema.is_mutable:
            if any(n in known for n in used):
                self._same = None
            return False
        return func.overloadpacket in _MADE or (bool(used) and all(n in known for n in used))

    def fold(self) -> None:
        """Let what is the same in every step be there already."""
        known = self._same or {}
        for node, value in known.items():
            if any(user not in known for user in node.users):
                name = f"same_{node.name}"
                self.root.register_buffer(name, value.detach())
                with self.graph.inserting_before(node):
                    node.replace_all_uses_with(self.graph.get_attr(name))

    def _written(self, value: Any) -> Any:
        return map_aggregate(value, lambda v: self.node(v) if isinstance(v, Tensor) else v)


class _NoLooks(TorchFunctionMode):
    """Lets nobody look at a number."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute, unless it makes numbers of a tensor."""
        del types
        if func in _LOOKS:
            raise UnrepeatableError(f"the step looks at numbers by {func.__name__}")
        return func(*args, **(kwargs or {}))
