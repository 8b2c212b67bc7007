"""Copies of modules."""

from __future__ import annotations

import copy
from types import FunctionType

import torch
from torch import Tensor, nn

from ..core.errors import TaskError


def copy_module(module: nn.Module) -> nn.Module:
    """Copy a module with all its parameters and buffers; computed tensors among its attributes are detached.

    ``copy.deepcopy`` refuses a tensor that has a gradient function, such as the weight that ``weight_norm`` computes before
    each call, or the list of weights of an LSTM.

    Raises:
        TaskError: if a function that was assigned as the ``forward`` of a layer with parameters cannot be copied. It has
            captured the layer, its parameters or its former ``forward``, and would use them in the copy, too.
    """
    layers = dict(module.named_modules())
    attributes = [value for layer in layers.values() for value in vars(layer).values()]
    entries = [entry for value in attributes if isinstance(value, list | tuple) for entry in value]
    computed_tensors = [t for t in (*attributes, *entries) if isinstance(t, Tensor) and not t.is_leaf]
    # without gradients, because an LSTM computes its list of weights anew when it is copied
    with torch.no_grad():
        copied_module = copy.deepcopy(module, {id(t): t.detach().clone() for t in computed_tensors})
    for name, layer in copied_module.named_modules():
        forward = vars(layer).get("forward")
        is_shared = isinstance(forward, FunctionType) and forward is vars(layers[name]).get("forward")
        if is_shared and any(True for _ in layer.parameters()):
            raise TaskError(
                f"layer {name or '(the module itself)'} ({type(layer).__name__}) has a forward that was assigned to the object "
                "and is no method of it, so a copy of the layer would compute with the original weights. Define forward in "
                "a subclass, or assign types.MethodType(function, layer) with a function of the layer and its inputs"
            )
    return copied_module
