"""Running a module with other tensors in place of some of its parameters, without changing the module.

``torch.func.functional_call`` does the same, but not in the cases that follow. A module that is registered
under two names is left with the substitute in place of its parameter. Replicas made by ``nn.DataParallel``
have no parameters, only attributes. Activation checkpointing inside the module computes wrong gradients
without a word, because it runs layers again in the backward pass, when the substitutes are gone. Two threads
that use one module see each other's substitutes.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..core.errors import TaskError

Hook = Callable[..., Any]

_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


def get_submodule(root: nn.Module, path: str) -> nn.Module:
    """Return the submodule of a dotted path.

    Unlike ``nn.Module.get_submodule``, it finds a submodule called ``type`` or like another attribute.
    """
    for name in path.split(".") if path else ():
        root = cast(nn.Module, root._modules[name])
    return root


def set_submodule(root: nn.Module, path: str, leaf: nn.Module) -> None:
    """Register a submodule under a dotted path of any names; missing modules on the path are created."""
    *parents, leaf_name = path.split(".")
    for parent in parents:
        root = cast(nn.Module, root._modules.setdefault(parent, nn.Module()))
    root._modules[leaf_name] = leaf


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters by name, as ``named_parameters`` does; also those of an ``nn.DataParallel`` replica."""
    tensors: dict[str, Tensor] = {}
    seen_ids: set[int] = set()
    for prefix, layer in module.named_modules():
        for attribute, p in _parameter_table(layer).items():
            if p is not None and id(p) not in seen_ids:
                seen_ids.add(id(p))
                tensors[f"{prefix}.{attribute}" if prefix else attribute] = p
    return tensors


@contextmanager
def lock_module(module: nn.Module) -> Iterator[None]:
    """Let only one thread at a time use a module; the others wait."""
    # setdefault is atomic, so that two threads cannot create two locks
    with _LOCKS.setdefault(module, threading.RLock()):
        yield


@contextmanager
def substitute_parameters(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Substitute parameters within a block, wherever the module uses them.

    Args:
        module: any module.
        values: substitutes by name of the parameter, as in :func:`named_tensors`.

    Raises:
        TaskError: if a substitute is read inside ``torch.utils.checkpoint`` while gradients are recorded.
    """
    tensors = named_tensors(module)
    values_by_id = {id(tensors[name]): value for name, value in values.items()}
    # frame 1 belongs to contextlib, frame 2 to the caller
    caller_frame = sys._getframe(2) if torch.is_grad_enabled() else None
    restorers: list[Callable[[], None]] = []
    try:
        for layer in module.modules():
            layer_parameters = _parameter_table(layer)
            substitutes = {
                attribute: values_by_id[id(p)]
                for attribute, p in layer_parameters.items()
                if id(p) in values_by_id
            }
            if substitutes:
                restorers.append(
                    _replace_parameters(
                        layer,
                        _Substitutes({**layer_parameters, **substitutes}, set(substitutes), caller_frame),
                    )
                )
        yield
    finally:
        for restore in reversed(restorers):
            restore()


@contextmanager
def add_forward_hooks(hooks: Iterable[tuple[nn.Module, Hook]]) -> Iterator[None]:
    """Add forward hooks to modules within a block; they get keyword arguments and run before the user's hooks."""
    handles = []
    try:
        for layer, hook in hooks:
            if _is_replica(layer):
                # all replicas share the dictionaries of the original, and each runs in its own thread
                for name in _HOOKS:
                    layer.__dict__[name] = layer.__dict__[name].copy()
            handles.append(layer.register_forward_hook(hook, with_kwargs=True, prepend=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Substitutes(dict[str, Tensor | None]):
    """The parameters of one layer, some of which are substitutes.

    Attributes:
        names: names of the substitutes.
        caller_frame: frame of the stack; activation checkpointing that began in an outer frame is allowed. None
            turns the check off.
    """

    def __init__(
        self, values: Mapping[str, Tensor | None], names: set[str], caller_frame: FrameType | None
    ) -> None:
        super().__init__(values)
        self.names, self.caller_frame = names, caller_frame

    def __getitem__(self, name: str) -> Tensor | None:
        if self.caller_frame is not None and name in self.names:
            self._refuse_checkpoint(name)
        return super().__getitem__(name)

    def _refuse_checkpoint(self, name: str) -> None:
        for frame, _ in traceback.walk_stack(sys._getframe(2)):
            if frame is self.caller_frame:
                return
            if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                raise TaskError(
                    f"a part of the module that reads {name!r} of an adapted layer is run by "
                    "torch.utils.checkpoint, which would run it again in the backward pass without the "
                    "adaptors, and the gradients be wrong. Switch activation checkpointing inside the "
                    "module off (gradient_checkpointing of transformers); to save memory call "
                    "torch.utils.checkpoint.checkpoint on this wrapper as a whole."
                )


def _is_replica(layer: nn.Module) -> bool:
    return bool(getattr(layer, "_is_replica", False))


def _parameter_table(layer: nn.Module) -> Mapping[str, Tensor | None]:
    if _is_replica(layer):
        # a replica's own table has only None entries and substitutes
        return {**cast(Mapping[str, Tensor | None], layer._former_parameters), **layer._parameters}
    return layer._parameters


def _replace_parameters(layer: nn.Module, values: _Substitutes) -> Callable[[], None]:
    """Replace the parameters of a layer; the returned function restores them."""
    original_parameters = layer._parameters
    # the parameters of a replica are attributes, which would be found first
    attributes = {
        attribute: layer.__dict__.pop(attribute) for attribute in values if attribute in layer.__dict__
    }
    layer.__dict__["_parameters"] = values

    def restore() -> None:
        layer.__dict__["_parameters"] = original_parameters
        layer.__dict__.update(attributes)

    return restore
