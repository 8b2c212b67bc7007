"""PyTorch's fused inference of attention, and the modules for which it is switched off.

In evaluation ``nn.TransformerEncoderLayer`` gives the weights of its layers to one operator and does not call the layers.
A layer of PEFT has the base weight as its ``weight``, so this inference would ignore the trained factors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_LOCK = threading.Lock()
# number of blocks that are open in all threads, and the setting before the first of them
_open_blocks = 0
_former_setting = True


def find_bypassed_layer(module: nn.Module) -> str | None:
    """Name the first layer that fused inference would not call though it may compute something else; None without one.

    Fused inference computes what the ``forward`` of PyTorch's own layers and of this package's computes. PyTorch uses it
    neither where a layer has a forward hook, nor with other activations than ReLU and GELU.
    """
    for name, encoder_layer in module.named_modules():
        if not isinstance(encoder_layer, nn.TransformerEncoderLayer) or not _may_be_fused(encoder_layer):
            continue
        # further submodules are parametrizations, of which the weight is read, or the output layer of the attention, which
        # is not called in training either
        for child_name, layer in [("", encoder_layer), *encoder_layer.named_children()]:
            methods = ("forward",) if child_name else ("_sa_block", "_ff_block")
            if any(
                method in vars(layer) or not _is_known(getattr(type(layer), method)) for method in methods
            ):
                path = ".".join(filter(None, (name, child_name)))
                return f"{path or '(the module itself)'} ({type(layer).__name__})"
    return None


def _may_be_fused(encoder_layer: nn.TransformerEncoderLayer) -> bool:
    return (
        bool(encoder_layer.activation_relu_or_gelu)
        and getattr(encoder_layer.self_attn, "batch_first", True)
        and not any(layer._forward_hooks or layer._forward_pre_hooks for layer in encoder_layer.modules())
    )


def _is_known(method: Any) -> bool:
    return str(method.__module__).startswith(("torch.nn.modules.", f"{__package__.partition('.')[0]}."))


@contextmanager
def without_fused_inference() -> Iterator[None]:
    """Call each layer within a block, in evaluation as in training.

    PyTorch has one setting for the process. The first of several blocks in all threads changes it, and the last one
    restores it.
    """
    global _open_blocks, _former_setting
    with _LOCK:
        if not _open_blocks:
            _former_setting = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _open_blocks += 1
    try:
        yield
    finally:
        with _LOCK:
            _open_blocks -= 1
            if not _open_blocks:
                torch.backends.mha.set_fastpath_enabled(_former_setting)
