"""Copies of modules."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.errors import TaskError
from .fingerprint import global_names, is_installed
from .standard import HOOK_TABLES


def copy_module(module: nn.Module, *, runs_hooks: bool = True) -> nn.Module:
    """Copy a module with all its parameters and buffers; computed tensors among its attributes are detached.

    ``copy.deepcopy`` refuses a tensor that has a gradient function, such as the weight that ``weight_norm`` computes before
    each call, or the list of weights of an LSTM.

    Args:
        module: module to copy.
        runs_hooks: whether the hooks of the copy will run.

    Raises:
        TaskError: if a ``forward`` that was assigned to a layer has captured a tensor or a module with tensors, such as the
            layer itself by its former ``forward``; or if a hook has captured a layer. A function is not copied, so the copy
            would compute with the original tensors, or write into the original layer.
    """
    # without gradients, because an LSTM computes its list of weights anew when it is copied
    with torch.no_grad(), _DetachedCopies():
        copied_module = copy.deepcopy(module)
    for name, layer in copied_module.named_modules():
        if not is_compiled(layer) and has_captured_tensors(vars(layer).get("forward")):
            raise TaskError(
                f"layer {name or '(the module itself)'} ({type(layer).__name__}) has a forward that was assigned to the object "
                "and has captured a tensor or a module, so a copy of the layer would compute with the original weights. Define "
                "forward in a subclass; or assign types.MethodType(function, layer) with a function that reads weights from the "
                "layer that it gets, such as lambda layer, x: 2 * nn.Linear.forward(layer, x)"
            )
        hooks = [hook for table in HOOK_TABLES for hook in vars(layer)[table].values()] if runs_hooks else []
        if any(_captures_layer(hook, module) for hook in hooks):
            raise TaskError(
                f"layer {name or '(the module itself)'} ({type(layer).__name__}) has a hook that has captured a layer of the "
                "module, such as self in a function within __init__, so the hook of a copy would read or write the original. "
                "Register a bound method (self.save), which is copied with the module"
            )
    return copied_module


class _DetachedCopies(TorchFunctionMode):
    """Copies a computed tensor as a detached one, in whatever container or object it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def is_compiled(layer: nn.Module) -> bool:
    """Whether a layer is the result of ``torch.compile(module)``; a copy of it compiles the copied module."""
    # importing its class takes seconds
    return type(layer).__name__ == "OptimizedModule" and "_orig_mod" in layer._modules


def has_captured_tensors(function: Any) -> bool:
    """Whether a callable reaches a tensor, or a module with tensors, that ``copy.deepcopy`` of the callable would not copy."""
    return any(
        isinstance(value, Tensor)
        or (isinstance(value, nn.Module) and any(True for _ in chain(value.parameters(), value.buffers())))
        for value in _captured_values(function)
    )


def _captures_layer(function: Any, module: nn.Module) -> bool:
    """Whether a callable reaches a layer of a module that ``copy.deepcopy`` of the callable would not copy."""
    layers = set(module.modules())
    return any(isinstance(value, nn.Module) and value in layers for value in _captured_values(function))


def _captured_values(function: Any) -> Iterator[Any]:
    """Yield the tensors, modules and parts that a callable reaches and that ``copy.deepcopy`` of it would not copy.

    Functions are not copied, and neither is anything they have captured: free variables, default values and global
    variables. Parts of a ``functools.partial``, of a bound method and of an object are copied.
    """
    pending, visited = [(function, False)], {}
    while pending:
        value, is_captured = pending.pop()
        if (id(value), is_captured) in visited:
            continue
        visited[id(value), is_captured] = value
        if is_captured:
            yield value
        if not isinstance(value, Tensor | nn.Module):
            is_shared = is_captured or isinstance(value, FunctionType | BuiltinMethodType)
            pending += [(part, is_shared) for part in _parts(value)]


def _parts(value: Any) -> Iterator[Any]:
    """Yield what a callable or a container computes with."""
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not bound yet
                continue
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        if not is_installed(value.__module__ or ""):
            yield from (value.__globals__.get(name) for name in global_names(value.__code__))
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, BuiltinMethodType):
        yield value.__self__
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif callable(value) and not isinstance(value, type):
        yield type(value).__call__
        yield from getattr(value, "__dict__", {}).values()
