"""Modules whose layers accelerate has placed: on several devices, or in files from which each call loads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..core.errors import TaskError
from ..core.tree import Params
from .stateless import SavedSlots, Stateless


def is_placed(module: nn.Module) -> bool:
    """Whether accelerate placed the layers of a module on more than one device, or keeps weights in files."""
    maps: list[dict[str, Any]] = [getattr(m, "hf_device_map", None) or {} for m in module.modules()]
    return any(len({str(device) for device in device_map.values()}) > 1 for device_map in maps)


def find_layer_device(layer: nn.Module) -> torch.device | None:
    """Find the device on which accelerate computes a layer; None if it has not placed the layer."""
    devices = [getattr(hook, "execution_device", None) for hook in _list_hooks(layer)]
    return next((torch.device(device) for device in devices if device is not None), None)


def is_loaded_for_calls(layer: nn.Module) -> bool:
    """Whether accelerate loads the weights of a layer from the disk or from another memory for each call."""
    return any(getattr(hook, "offload", False) for hook in _list_hooks(layer))


def _list_hooks(layer: nn.Module) -> Sequence[Any]:
    hook = layer.__dict__.get("_hf_hook")
    hooks: Sequence[Any] = getattr(hook, "hooks", (hook,))
    return hooks


class PlacedStateless(Stateless):
    """Calls a placed module: each tensor is moved to the device of the parameter that it replaces."""

    def install(self, params: Params, saved_slots: SavedSlots) -> None:
        """Replace parameters and buffers; see :meth:`Stateless.install`.

        Raises:
            TaskError: if the weight of a layer is loaded from a file or from memory for each call, which would
                overwrite the replacement.
        """
        for name, tensor in params.items():
            table, local_name = self._slots[name]
            current = table[local_name]
            if current.is_meta:
                raise offloaded_error(name)
            saved_slots.append((table, local_name, current))
            table[local_name] = tensor.to(current.device)


def offloaded_error(name: str) -> TaskError:
    """Make the error for a method that changes a weight which is not in the memory of its device."""
    return TaskError(
        f"the method changes {name}, which language.device_map keeps on the disk or in another memory, from where each call "
        "loads it anew. Place that layer on a device, or let the method keep its updates as factors: base_updates = 'stacked' "
        "for flora and fedex_lora"
    )
