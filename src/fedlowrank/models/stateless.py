"""A module as a function of its parameters and buffers, called many times a second."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from ..core.tree import Params

Slot = tuple[dict[str, Any], str]
"""A module's table of parameters, buffers or submodules, with a name in it."""

SavedSlots = list[tuple[dict[str, Any], str, Any]]
"""Slots with their former values."""


ABSENT: Any = object()
"""Marks the former value of a slot that did not exist; restoring deletes the slot."""


class Stateless:
    """Calls a module as ``torch.func.functional_call`` does, without searching for every name in every call.

    Args:
        module: module whose submodules, parameters and buffers are already in place.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._slots: dict[str, Slot] = {}
        for prefix, layer in module.named_modules(remove_duplicate=False):
            for table in (layer._parameters, layer._buffers):
                for local_name in table:
                    self._slots[f"{prefix}.{local_name}".lstrip(".")] = table, local_name

    def __call__(self, params: Params, *args: Any, **kwargs: Any) -> Any:
        """Call the module with some of its parameters and buffers replaced.

        Raises:
            KeyError: if the module has no parameter or buffer of a name.
        """
        saved_slots: SavedSlots = []
        try:
            self.install(params, saved_slots)
            return self.module(*args, **kwargs)
        finally:
            restore_slots(saved_slots)

    def install(self, params: Params, saved_slots: SavedSlots) -> None:
        """Replace parameters and buffers by tensors, and append the former values to ``saved_slots``."""
        for name, tensor in params.items():
            table, local_name = self._slots[name]
            saved_slots.append((table, local_name, table[local_name]))
            table[local_name] = tensor

    def current(self, name: str) -> Tensor:
        """Get the current tensor of a name."""
        table, local_name = self._slots[name]
        tensor: Tensor = table[local_name]
        return tensor


def is_within(name: str, module: str | None) -> bool:
    """Whether a dotted name is that of a module or of something inside it; False if there is no module."""
    return module is not None and (name == module or name.startswith(f"{module}."))


def names_of_parameters(module: nn.Module) -> dict[int, list[str]]:
    """List all names of each parameter by the identity of the tensor; tied weights have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def tied_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """List the further names of each parameter that several layers share, by its first name.

    The weight below a LoRA layer of PEFT counts as that layer's own, because a method that moves it, such as FLoRA,
    does not move the weight of the other layer.
    """
    name_groups = [names for names in names_of_parameters(module).values() if len(names) > 1]
    return {
        first_name: tuple(aliases) for first_name, *aliases in name_groups if ".base_layer." not in first_name
    }


def restore_slots(saved_slots: SavedSlots) -> None:
    """Restore the former values of slots, the last one first, because a layer with two names was replaced twice."""
    while saved_slots:
        table, local_name, value = saved_slots.pop()
        if value is ABSENT:
            del table[local_name]
        else:
            table[local_name] = value


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restore a module's attributes, modes, hooks and buffers after a block that calls it.

    Assignments of ``forward`` are undone, and it works on copies of the buffers. Hooks that the call registers are removed with
    the attribute that notes them, such as those by which transformers capture hidden states. Lists and dicts that it changes in
    place stay changed. For lazy layers, which the call may initialize, only the mode is restored.
    """
    modules = list(module.modules())
    modes = [(m, m.training) for m in modules]
    initialized_modules = [m for m in modules if not _is_lazy(m)]
    tables: list[dict[str, Any]] = [
        *(m._buffers for m in initialized_modules),
        *(m.__dict__ for m in initialized_modules),
        *(
            t
            for m in initialized_modules
            for n, t in vars(m).items()
            if "_hooks" in n and isinstance(t, dict)
        ),
    ]
    saved_tables = [dict(table) for table in tables]
    copies = {id(b): b.clone() for m in initialized_modules for b in m._buffers.values() if b is not None}
    for m in initialized_modules:
        m._buffers.update({n: copies[id(b)] for n, b in m._buffers.items() if b is not None})
    try:
        yield
    finally:
        for table, former_values in zip(tables, saved_tables, strict=True):
            table.clear()
            table.update(former_values)
        for m, mode in modes:
            m.training = mode


def _is_lazy(module: nn.Module) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(t is not None and nn.parameter.is_lazy(t) for t in tensors)


@contextlib.contextmanager
def exchange_slots(slots: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Replace the values of slots within a block, and restore the former ones."""
    saved_slots: SavedSlots = []
    try:
        for table, local_name, value in slots:
            saved_slots.append((table, local_name, table[local_name]))
            table[local_name] = value
        yield
    finally:
        restore_slots(saved_slots)


Contexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]


def keep_parameters_for_recomputation(module: nn.Module) -> Contexts:
    """Make a ``context_fn`` of :func:`torch.utils.checkpoint.checkpoint` that keeps the forward pass's parameters.

    ``functional_call`` has restored the module's own parameters by the time activations are recomputed.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        slots = [(m._parameters, n, p) for m in module.modules() for n, p in m._parameters.items()]
        return contextlib.nullcontext(), exchange_slots(slots)

    return contexts
