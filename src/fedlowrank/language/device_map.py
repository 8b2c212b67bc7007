"""Places the layers of a base that one device does not hold: on several devices, in the CPU's memory, or in files.

accelerate places the layers and moves inputs between them (``device_map`` of transformers). The factors of an adapter
lie where their layer computes, also if its weight is loaded for each call.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..core.errors import ConfigError, did_you_mean
from ..models.placement import find_layer_device, is_loaded_for_calls
from .optional_packages import import_library

NAMED_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Ways in which accelerate chooses the device of each layer."""

NO_MAP = "none"
"""Value of ``local.device_map`` for no device map although the experiment has one."""


def check_device_map(
    device_map: str | Mapping[str, Any] | None,
    max_memory: Mapping[str, Any] | None,
    offload_folder: str | None,
    new_tokens: tuple[str, ...],
    is_quantized: bool = False,
) -> None:
    """Check the settings of a placement.

    Raises:
        ConfigError: if a name is unknown, a setting has no effect, the embedding would have to be changed, or quantized
            layers would be loaded for each call.
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
    if not isinstance(device_map, str):
        _check_names(device_map)
        if is_quantized and _is_partly_loaded(device_map):
            raise quantized_placement_error()
    if max_memory is not None and not isinstance(device_map, str):
        raise ConfigError(
            "language.max_memory is for a device_map that accelerate chooses; leave it out beside a table"
        )
    if new_tokens:
        raise ConfigError(
            "language.new_tokens changes the embedding in memory; leave language.device_map out"
        )


def _is_partly_loaded(device_map: Mapping[str, Any]) -> bool:
    """Whether a table puts layers on the disk, or in the CPU's memory beside another device."""
    devices = set(map(str, device_map.values()))
    return bool({"cpu", "disk"} & devices) and devices != {"cpu"}


def quantized_placement_error() -> ConfigError:
    """Make the error for quantized layers that would be loaded for each call."""
    return ConfigError(
        "language.device_map: quantized layers cannot be on the disk, or in the CPU's memory beside a GPU. Leave out quantize, "
        "or place all layers on GPUs or all on the CPU, by a table or by a larger language.max_memory"
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
        parent = Path(os.path.expandvars(offload_folder)).expanduser()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            # a folder of its own, because bases have weights of equal names
            arguments["offload_folder"] = tempfile.mkdtemp(prefix="base-", dir=parent)
        except OSError as error:
            raise ConfigError(f"language.offload_folder: {parent} cannot be written: {error}") from error
    return arguments


def remove_offload_folder_with(model: Any, arguments: Mapping[str, Any]) -> None:
    """Remove the folder of offloaded weights when the model is no longer used."""
    if (folder := arguments.get("offload_folder")) is not None:
        weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)


def _check_names(device_map: Mapping[str, Any]) -> None:
    """Raise ConfigError if a table places nothing, or a module twice."""
    if not device_map:
        raise ConfigError(
            "language.device_map is an empty table; name a device for each module, or leave it out"
        )
    for name in device_map:
        outer_names = [n for n in device_map if n != name and (n == "" or name.startswith(f"{n}."))]
        if outer_names:
            raise ConfigError(
                f"language.device_map places {name!r} and {outer_names[0]!r}, which contains it. Name the parts of "
                f"{outer_names[0]!r} one by one instead of the whole"
            )


def check_module_names(model: nn.Module, device_map: str | Mapping[str, Any] | None) -> None:
    """Raise ConfigError if a table names a module that the model does not have; accelerate ignores it."""
    if device_map is None or isinstance(device_map, str):
        return
    names = {name for name, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers())}
    if unknown_names := [name for name in device_map if name not in names]:
        raise ConfigError(
            f"language.device_map: the model has no module {unknown_names[0]!r}. {did_you_mean(unknown_names[0], sorted(names))}"
        )


def _read_device(device: Any) -> Any:
    return int(device) if isinstance(device, str) and device.isdigit() else device


def check_embedding(model: Any) -> None:
    """Raise ConfigError if the weights of the embedding, or of an output layer tied to it, are loaded for each call."""
    parts = {"the embedding": model.get_input_embeddings()}
    if getattr(model.config, "tie_word_embeddings", False):
        parts["the output layer, which shares its weight with the embedding,"] = model.get_output_embeddings()
    for title, part in parts.items():
        if part is not None and is_loaded_for_calls(part):
            raise ConfigError(
                f"language.device_map: {title} must be in the memory of a device. Place it there by a table of devices, or raise "
                "language.max_memory"
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
