"""A module as a function of its parameters and buffers, called many times a second."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..core.tree import Params

Slot = tuple[dict[str, Any], str]
"""A module's table of parameters, buffers or submodules, and a name in it."""

SavedSlots = list[tuple[dict[str, Any], str, Any]]
"""Slots and what they held."""


class Stateless:
    """What ``torch.func.functional_call`` does, without its search for every name in every call.

    Args:
        module: whose submodules, parameters and buffers are in place already.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._slots: dict[str, Slot] = {}
        for prefix, layer in module.named_modules(remove_duplicate=False):
            for table in (layer._parameters, layer._buffers):
                for own in table:
                    self._slots[f"{prefix}.{own}".lstrip(".")] = table, own

    def __call__(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """Call the module with some of its parameters and buffers exchanged.

        Raises:
            KeyError: if it has no parameter or buffer of a name.
        """
        saved: SavedSlots = []
        try:
            self.install(params, saved)
            return self.module(*args, **kwargs)
        finally:
            restore(saved)

    def install(self, params: Params, saved: SavedSlots) -> None:
        """Put tensors in place of parameters and buffers, and append what was there to ``saved``."""
        for name, tensor in params.items():
            table, own = self._slots[name]
            saved.append((table, own, table[own]))
            table[own] = tensor

    def current(self, name: str) -> Tensor:
        """The tensor that the module holds now under a name."""
        table, own = self._slots[name]
        tensor: Tensor = table[own]
        return tensor


def restore(saved: SavedSlots) -> None:
    """Put back what slots held, the last one first, for a layer with two names was exchanged twice."""
    while saved:
        table, own, value = saved.pop()
        table[own] = value
