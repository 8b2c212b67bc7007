"""Gradient checkpointing of a model whose parameters are given at every call.

A block's forward pass is done again when the gradient is taken, after ``functional_call`` has put the module's own parameters
back. What was given must be in place then too, or the gradient is that of another model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def same_parameters(model: nn.Module) -> Contexts:
    """``context_fn`` for :func:`torch.utils.checkpoint.checkpoint`: recompute with the parameters of the forward pass."""

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return contextlib.nullcontext(), held(_now(model))

    return contexts


Place = tuple[nn.Module, str, Tensor]
"""A module, the name of a parameter of its own, and the tensor to be there."""


def _now(model: nn.Module) -> list[Place]:
    return [(m, n, p) for m in model.modules() for n, p in m._parameters.items() if p is not None]


@contextlib.contextmanager
def held(places: list[Place]) -> Iterator[None]:
    """Put tensors in the places of parameters, and what was there back afterwards."""
    before = [(m, n, m._parameters[n]) for m, n, p in places if m._parameters[n] is not p]
    changed = {(id(m), n) for m, n, _ in before}
    for m, n, p in places:
        if (id(m), n) in changed:
            m._parameters[n] = p  # type: ignore[assignment]
    try:
        yield
    finally:
        for m, n, old in before:
            m._parameters[n] = old
