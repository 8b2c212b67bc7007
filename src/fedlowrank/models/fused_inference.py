"""PyTorch's fused inference of attention, and the modules for which it is switched off.

In evaluation ``nn.TransformerEncoderLayer`` gives the weights of its layers to one operator and does not call the layers.
A layer of PEFT has the base weight as its ``weight``, so this inference would ignore the trained factors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_LOCK = threading.Lock()
# number of blocks that are open in all threads, and the setting before the first of them
_open_blocks = 0
_former_setting = True


def has_bypassed_layers(module: nn.Module) -> bool:
    """Whether fused inference would bypass a layer whose class is not PyTorch's own, and so may compute something else."""
    return any(
        not type(layer).__module__.startswith("torch.nn.modules.")
        for encoder_layer in module.modules()
        if isinstance(encoder_layer, nn.TransformerEncoderLayer)
        for child in encoder_layer.children()
        for layer in child.modules()
    )


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
