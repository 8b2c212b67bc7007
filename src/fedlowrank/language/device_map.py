"""Places the layers of a base that one device does not hold: on several devices, in the CPU's memory, or in files.

accelerate places the layers and moves inputs between them (``device_map`` of transformers). The factors of an adapter
lie where their layer computes, also if its weight is loaded for each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..core.errors import ConfigError
from ..models.placement import find_layer_device
from .optional_packages import import_library

NAMED_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Ways in which accelerate chooses the device of each layer."""


def check_device_map(
    device_map: str | Mapping[str, Any] | None,
    max_memory: Mapping[str, Any] | None,
    offload_folder: str | None,
    new_tokens: tuple[str, ...],
) -> None:
    """Check the settings of a placement.

    Raises:
        ConfigError: if a name is unknown, a setting has no effect, or the embedding would have to be changed.
    """
    if device_map is None:
        for name, value in (("max_memory", max_memory), ("offload_folder", offload_folder)):
            if value is not None:
                raise ConfigError(f"language.{name} is of language.device_map, which is not set")
        return
    if isinstance(device_map, str) and device_map not in NAMED_MAPS:
        raise ConfigError(
            f"language.device_map: {device_map!r} is no choice; it is {', '.join(NAMED_MAPS)}, or a table of a device "
            "for each module, such as {'model.embed_tokens' = 0, 'model.layers.0' = 0, 'model.layers.1' = 'disk'}"
        )
    if max_memory is not None and not isinstance(device_map, str):
        raise ConfigError(
            "language.max_memory is for a device_map that accelerate chooses; leave it out beside a table"
        )
    if new_tokens:
        raise ConfigError(
            "language.new_tokens changes the embedding in memory; leave language.device_map out"
        )


def make_placement(
    device_map: str | Mapping[str, Any], max_memory: Mapping[str, Any] | None, offload_folder: str | None
) -> dict[str, Any]:
    """Make the arguments of ``from_pretrained``. Numbers of devices are integers, which a table in TOML has as texts."""
    import_library("accelerate", "language.device_map")
    arguments: dict[str, Any] = {"device_map": device_map}
    if not isinstance(device_map, str):
        arguments["device_map"] = {name: _read_device(device) for name, device in device_map.items()}
    if max_memory is not None:
        arguments["max_memory"] = {_read_device(device): size for device, size in max_memory.items()}
    if offload_folder is not None:
        arguments["offload_folder"] = str(Path(offload_folder).expanduser())
    return arguments


def _read_device(device: Any) -> Any:
    return int(device) if isinstance(device, str) and device.isdigit() else device


def check_embedding(model: Any) -> None:
    """Raise ConfigError if the weights of the embedding are loaded for each call; some code reads them."""
    if any(p.is_meta for p in model.get_input_embeddings().parameters()):
        raise ConfigError(
            "language.device_map: the embedding must be in the memory of a device. Place it there by a table of devices"
        )


def place_factors(peft_model: nn.Module) -> None:
    """Give factors without memory, which PEFT made like the weight of their layer, memory on the layer's device.

    Their values are not set.
    """
    for layer in peft_model.modules():
        base_layer = getattr(layer, "base_layer", None)
        if not isinstance(base_layer, nn.Module):
            continue
        for name, part in layer.named_children():
            if name != "base_layer" and any(p.is_meta for p in part.parameters()):
                part.to_empty(device=find_layer_device(base_layer) or "cpu")
