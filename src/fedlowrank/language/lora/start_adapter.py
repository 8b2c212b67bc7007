"""An existing LoRA adapter that a federation starts from: a folder as PEFT writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from ...adapters.lora.lora_factors import find_lora
from ...core.errors import ConfigError, DataError
from ...linalg.pair import Pair
from ...models.stateless import tied_names
from ..artifacts import name_in_file
from ..base_model import HEAD_NAMES
from .peft_config import REFUSED_SETTINGS

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_TAKEN = ("r", "rank_pattern", "use_rslora", "lora_dropout", "modules_to_save")
_SCALE = ("lora_alpha", "alpha_pattern")
_LAYERS = ("target_modules", "layers_to_transform", "layers_pattern", "exclude_modules")
"""Fields that the section ``[lora]`` takes from the folder unless it sets them: α goes with the rank, and layers together."""


def read_start_config(folder: Path) -> dict[str, Any]:
    """The configuration of an adapter folder.

    Raises:
        DataError: if the folder holds no adapter of PEFT.
        ConfigError: if it is no plain LoRA adapter, or has settings that federated training cannot have.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise DataError(
                f"lora.start: {folder} is no adapter folder of PEFT: there is no {name}. Name the folder that "
                "save_pretrained wrote"
            )
    try:
        found: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise DataError(f"lora.start: {folder / CONFIG} is not JSON: {error}") from error
    if found.get("peft_type") != "LORA":
        raise ConfigError(
            f"lora.start: the adapter in {folder} is of type {found.get('peft_type')!r}, not LORA"
        )
    for name, reason in REFUSED_SETTINGS.items():
        if found.get(name):
            raise ConfigError(
                f"lora.start: the adapter in {folder} has {name} = {found[name]!r}, but {reason}"
            )
    begun = found.get("init_lora_weights")
    if isinstance(begun, str) and begun.startswith(("pissa", "olora", "corda", "loftq")):
        raise ConfigError(
            f"lora.start: the adapter in {folder} began with init_lora_weights = {begun!r}, for which PEFT changes the base "
            "when it loads it, so that its factors are not of the base alone. Save it by "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...), as an adapter of the base"
        )
    if found.get("bias", "none") != "none":
        raise ConfigError(
            f"lora.start: the adapter in {folder} trained biases of the base, which are no part of s·B A"
        )
    return found


def fields_with_start(folder: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``[lora]``, with rank, α and modules of the folder where it does not set them."""
    stored = read_start_config(folder)
    # PEFT adds these names to each adapter of a classification, whether the base has such modules or not
    saved = [n for n in stored.get("modules_to_save") or () if n not in HEAD_NAMES]
    stored["modules_to_save"] = saved or None
    pattern: Mapping[str, int] = stored.get("rank_pattern") or {}
    if "r" not in fields and "rank_pattern" not in fields and max(pattern.values(), default=0) > stored["r"]:
        # layers of a higher rank than the others have room for it
        stored["rank_pattern"] = {n: r for n, r in pattern.items() if r > stored["r"]}
    else:
        stored.pop("rank_pattern", None)
    # the scale is the quotient of α and the rank
    taken = [*_TAKEN, *(() if "r" in fields else _SCALE)]
    taken += () if "target_modules" in fields else _LAYERS
    taken = [n for n in taken if stored.get(n) is not None]
    return {n: stored[n] for n in taken} | dict(fields)


def load_start(model: Any, folder: Path) -> None:
    """Put the factors of an adapter folder in place of those of a model.

    The model then computes what PEFT computes with the base and this adapter. Where its scale α/r is another one, B carries
    the quotient; components beyond the adapter's rank stay as they are.

    Args:
        model: a ``peft.PeftModel`` whose factors are fresh.
        folder: of the adapter.

    Raises:
        ConfigError: if the adapter has a higher rank than the model, or layers that the model does not adapt.
        DataError: if the file cannot be read, or shapes are of another base.
    """
    config, lora = read_start_config(folder), find_lora(model, None)
    try:
        stored = safetensors.torch.load_file(folder / WEIGHTS)
    except safetensors.SafetensorError as error:
        raise DataError(f"lora.start: {folder / WEIGHTS} cannot be read: {error}") from error
    own = dict(model.named_parameters(remove_duplicate=False))
    for first, others in tied_names(model).items():
        held = [n for n in (first, *others) if n in stored]
        if any(not torch.equal(stored[n], stored[held[0]]) for n in held[1:]):
            raise ConfigError(
                f"lora.start: the adapter in {folder} has different weights for {' and '.join(held)}, which are one tensor in "
                "the base (tied weights)"
            )
    for name, layer in lora.layers.items():
        a, b = name_in_file(str(layer.a)), name_in_file(str(layer.b))
        if a not in stored or b not in stored:
            continue
        pair = Pair(stored.pop(b).flatten(1), stored.pop(a).flatten(1))
        if (pair.b.shape[0], pair.a.shape[1]) != layer.shape:
            raise DataError(
                f"lora.start: layer {name} of the adapter in {folder} is {pair.b.shape[0]} × {pair.a.shape[1]}, and that of "
                f"the base {layer.shape[0]} × {layer.shape[1]}. The adapter is of another base model"
            )
        room = own[str(layer.a)].shape[0]
        if pair.rank > room:
            raise ConfigError(
                f"lora.start: the adapter in {folder} has rank {pair.rank} at {name}, and lora.r is {room}. Set lora.r = "
                f"{pair.rank}, or leave it out to take that of the adapter"
            )
        quotient = _scale_of(config, name, pair.rank) / lora.scale
        with torch.no_grad():
            for path, value in layer.as_parameters(Pair(pair.b * quotient, pair.a)).items():
                axis = 0 if path == layer.a else 1
                own[path].narrow(axis, 0, pair.rank).copy_(value)
    for name in [n for n in stored if n in own and own[n].requires_grad and own[n].shape == stored[n].shape]:
        with torch.no_grad():
            own[name].copy_(stored.pop(name))
    # PEFT stores an embedding of the base beside its factors
    whole = {n: own.get(n, own.get(n.replace(".weight", ".base_layer.weight"))) for n in stored}
    same = [n for n, p in whole.items() if p is not None and torch.equal(p, stored[n].to(p))]
    stored = {n: t for n, t in stored.items() if n not in same}
    if stored:
        raise ConfigError(
            f"lora.start: the adapter in {folder} has {sorted(stored)[0]}, and {len(stored) - 1} more, which this model does "
            "not adapt. Leave lora.target_modules out to adapt the layers of the adapter; of an adapter of a "
            "classification head only the factors can be taken"
        )


def _scale_of(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """The scale of a layer as PEFT has it."""
    from peft.utils.other import get_pattern_key

    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    alpha = float(patterns.get(get_pattern_key(list(patterns), layer), config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
