"""Reads the LoRA adapter from which a federation starts, from a folder that PEFT wrote."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ...adapters.lora.adapted_layers import PEFT_PREFIX
from ...adapters.lora.lora_factors import find_lora
from ...core.errors import ConfigError, DataError
from ...linalg.pair import Pair
from ...models.stateless import tied_names
from ..adapter_files import name_in_file
from ..base_model import HEAD_NAMES
from ..optional_packages import import_library
from .peft_adapter import ADAPTER
from .peft_config import explain_refusal

TOKEN_FIELD = "trainable_token_indices"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_TOKEN_LAYER = ".token_adapter."
"""What PEFT appends to the name of a layer whose rows of tokens are trained."""

_IGNORED_FIELDS = (TOKEN_FIELD, "inference_mode", "runtime_config")
"""Fields that need no default value: rows are loaded, and the others are of the program that stored the adapter."""

_INHERITED_FIELDS = ("r", "rank_pattern", "use_rslora", "lora_dropout", "modules_to_save")
_SCALE_FIELDS = ("lora_alpha", "alpha_pattern")
_LAYER_FIELDS = ("target_modules", "layers_to_transform", "layers_pattern", "exclude_modules")
"""Fields that the section ``[lora]`` inherits from the adapter unless it sets them.

α is inherited only together with the rank, and the fields that name layers only together with ``target_modules``.
"""


def read_start_config(folder: Path) -> dict[str, Any]:
    """Read the configuration of an adapter folder.

    Raises:
        DataError: if the folder holds no adapter of PEFT.
        ConfigError: if it is not a plain LoRA adapter, or has settings that federated training does not allow.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise DataError(
                f"lora.start: {folder} is no adapter folder of PEFT: there is no {name}. Name the folder that "
                "save_pretrained wrote"
            )
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
    except ValueError as error:
        raise DataError(f"lora.start: {folder / CONFIG_FILE} is not JSON: {error}") from error
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            f"lora.start: the adapter in {folder} is of type {config.get('peft_type')!r}, not LORA"
        )
    for field in dataclasses.fields(import_library("peft", "lora.start").LoraConfig):
        name, value = field.name, config.get(field.name)
        if name not in _IGNORED_FIELDS and (reason := explain_refusal(field, value)):
            raise ConfigError(f"lora.start: the adapter in {folder} has {name} = {value!r}, but {reason}")
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and initial.startswith(("pissa", "olora", "corda", "loftq")):
        raise ConfigError(
            f"lora.start: the adapter in {folder} began with init_lora_weights = {initial!r}, for which PEFT changes the base "
            "when it loads it, so that its factors are not of the base alone. Save it by "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...), as an adapter of the base"
        )
    if config.get("bias", "none") != "none":
        raise ConfigError(
            f"lora.start: the adapter in {folder} trained biases of the base, which are no part of s·B A"
        )
    return config


def merge_start_fields(folder: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the section ``[lora]`` by rank, α and modules of the adapter, where the section does not set them."""
    config = read_start_config(folder)
    # PEFT adds these names to each adapter of a classification model, even if the base has no such modules
    saved_modules = [n for n in config.get("modules_to_save") or () if n not in HEAD_NAMES]
    config["modules_to_save"] = saved_modules or None
    pattern: Mapping[str, int] = config.get("rank_pattern") or {}
    if "r" not in fields and "rank_pattern" not in fields and max(pattern.values(), default=0) > config["r"]:
        # keep only ranks above r: factors of a lower rank fit into layers of rank r
        config["rank_pattern"] = {n: r for n, r in pattern.items() if r > config["r"]}
    else:
        config.pop("rank_pattern", None)
    # the scale is α divided by the rank
    inherited_fields = [*_INHERITED_FIELDS, *(() if "r" in fields else _SCALE_FIELDS)]
    inherited_fields += () if "target_modules" in fields else _LAYER_FIELDS
    inherited_fields = [n for n in inherited_fields if config.get(n) is not None]
    return {n: config[n] for n in inherited_fields} | dict(fields)


def load_start(model: Any, folder: Path) -> None:
    """Copy the factors of an adapter folder into a model.

    The model then has the outputs of the base with this adapter. If the adapter's scale α/r differs from the model's, B is
    multiplied by their quotient. Components beyond the adapter's rank do not change.

    Args:
        model: model (``peft.PeftModel``) with initial factors.
        folder: folder of the adapter.

    Raises:
        ConfigError: if the adapter has a higher rank than the model, layers that the model does not adapt, or weights of
            another base.
        DataError: if the file cannot be read, or shapes do not fit the base.
    """
    config, lora = read_start_config(folder), find_lora(model, None)
    try:
        tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    except safetensors.SafetensorError as error:
        raise DataError(f"lora.start: {folder / WEIGHTS_FILE} cannot be read: {error}") from error
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for first_name, aliases in tied_names(model).items():
        stored_aliases = [n for n in (first_name, *aliases) if n in tensors]
        if any(not torch.equal(tensors[n], tensors[stored_aliases[0]]) for n in stored_aliases[1:]):
            raise ConfigError(
                f"lora.start: the adapter in {folder} has different weights for {' and '.join(stored_aliases)}, which are one "
                "tensor in the base (tied weights)"
            )
    for name, layer in lora.layers.items():
        a, b = name_in_file(str(layer.a)), name_in_file(str(layer.b))
        if a not in tensors or b not in tensors:
            continue
        pair = Pair(tensors.pop(b).flatten(1), tensors.pop(a).flatten(1))
        if (pair.b.shape[0], pair.a.shape[1]) != layer.shape:
            raise DataError(
                f"lora.start: layer {name} of the adapter in {folder} is {pair.b.shape[0]} × {pair.a.shape[1]}, and that of "
                f"the base {layer.shape[0]} × {layer.shape[1]}. The adapter is of another base model"
            )
        max_rank = parameters[str(layer.a)].shape[0]
        if pair.rank > max_rank:
            raise ConfigError(
                f"lora.start: the adapter in {folder} has rank {pair.rank} at {name}, and lora.r is {max_rank}. Set lora.r = "
                f"{pair.rank}, or leave it out to take that of the adapter"
            )
        scale_ratio = _compute_scale(config, name, pair.rank) / lora.scale
        with torch.no_grad():
            for path, value in layer.as_parameters(Pair(pair.b * scale_ratio, pair.a)).items():
                axis = 0 if path == layer.a else 1
                parameters[path].narrow(axis, 0, pair.rank).copy_(value)
    _check_token_ids(config, model, folder)
    _load_token_rows(model, parameters, tensors, folder)
    for name in [
        n
        for n in tensors
        if n in parameters and parameters[n].requires_grad and parameters[n].shape == tensors[n].shape
    ]:
        with torch.no_grad():
            parameters[name].copy_(tensors.pop(name))
    tensors = _drop_base_weights(model, parameters, tensors, config.get("modules_to_save") or (), folder)
    if tensors:
        raise ConfigError(
            f"lora.start: the adapter in {folder} has {sorted(tensors)[0]}, and {len(tensors) - 1} more, which this model does "
            "not adapt. Leave lora.target_modules out to adapt the layers of the adapter; of an adapter of a "
            "classification head only the factors can be taken"
        )


def _load_token_rows(
    model: Any, parameters: Mapping[str, Tensor], tensors: dict[str, Tensor], folder: Path
) -> None:
    """Copy the rows of ``language.new_tokens`` into a model.

    PEFT stores the trained rows of a layer, and those of tied layers twice. Of a layer without trained rows, such as the
    output layer, PEFT stores the whole weight if the vocabulary changed.

    Args:
        model: model (``peft.PeftModel``) that trains rows of tokens, or none.
        parameters: parameters of the model by name.
        tensors: tensors of the adapter's file; the rows are removed.
        folder: folder of the adapter, for messages.

    Raises:
        ConfigError: if the rows of tied layers differ.
    """
    token_layers = _list_token_layers(model)
    ids = next(iter(token_layers.values()), [])
    stored_rows: dict[int, Tensor] = {}
    for path, rows in parameters.items():
        layer, infix, _ = path.partition(_TOKEN_LAYER)
        name = path.removesuffix(f".{ADAPTER}")
        if not infix or name == path:
            continue
        weight, stored = tensors.get(f"{layer}.weight"), stored_rows.get(id(rows))
        if name in tensors and tensors[name].shape == rows.shape:
            values = tensors.pop(name)
        elif name not in tensors and stored is None and weight is not None and len(weight) > max(ids):
            values = weight[ids]
        else:
            continue
        if stored is not None and not torch.equal(stored, values):
            raise ConfigError(
                f"lora.start: the adapter in {folder} has different rows of tokens for {layer} and the embedding, which are one "
                "tensor in the base (tied weights)"
            )
        stored_rows[id(rows)] = values
        with torch.no_grad():
            rows.copy_(values)


def _drop_base_weights(
    model: Any,
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    saved_modules: Sequence[str],
    folder: Path,
) -> dict[str, Tensor]:
    """Drop the weights of the base from an adapter's tensors; PEFT stores the embedding if it is adapted or has new rows.

    The rows of ``language.new_tokens`` are not compared. In PEFT they begin at random values, and their trained values are
    loaded separately.

    Args:
        model: model (``peft.PeftModel``).
        parameters: parameters of the model by name.
        tensors: tensors of the adapter that the model has not loaded.
        saved_modules: ends of the names of modules that the adapter trained whole.
        folder: folder of the adapter, for messages.

    Returns:
        The tensors that are no weights of the base.

    Raises:
        ConfigError: if a weight is another one than that of the base.
    """
    token_layers = _list_token_layers(model)
    ids_by_weight = {
        id(parameters[f"{PEFT_PREFIX}{layer}{_TOKEN_LAYER}base_layer.weight"]): ids
        for layer, ids in token_layers.items()
    }
    other_tensors = {}
    for name, stored in tensors.items():
        layer = name.removesuffix(".weight")
        names = (name, f"{layer}.base_layer.weight", f"{layer}{_TOKEN_LAYER}base_layer.weight")
        weight = next((parameters[n] for n in names if n in parameters), None)
        if weight is None or weight.requires_grad or layer.endswith(tuple(saved_modules)):
            other_tensors[name] = stored
            continue
        is_equal = weight.shape == stored.shape
        if is_equal:
            differs = weight != stored.to(weight)
            differs[ids_by_weight.get(id(weight), [])] = False
            is_equal = not bool(differs.any())
        if not is_equal:
            raise ConfigError(
                f"lora.start: the adapter in {folder} has the weight {name} {[*stored.shape]}, which is not that of this base, "
                f"{[*weight.shape]}. If tokens were added for the adapter, set language.new_tokens to them, in their order, and "
                "resize the embedding for it to the length of the tokenizer; otherwise the adapter is of another base"
            )
    return other_tensors


def _list_token_layers(model: Any) -> dict[str, list[int]]:
    """List the ids of tokens whose rows a model trains, by layer."""
    layers: dict[str, list[int]] = model.peft_config[ADAPTER].trainable_token_indices or {}
    return layers


def _check_token_ids(config: Mapping[str, Any], model: Any, folder: Path) -> None:
    """Raise ConfigError if an adapter has rows of tokens, and the model trains the rows of others."""
    token_indices = config.get(TOKEN_FIELD) or []
    stored_ids = (
        {tuple(ids) for ids in token_indices.values()}
        if isinstance(token_indices, dict)
        else {tuple(token_indices)} - {()}
    )
    new_ids = {tuple(ids) for ids in (model.peft_config[ADAPTER].trainable_token_indices or {}).values()}
    if stored_ids - new_ids:
        raise ConfigError(
            f"lora.start: the adapter in {folder} has rows of the tokens {sorted(stored_ids)[0]}, and language.new_tokens trains "
            f"{sorted(new_ids)[0] if new_ids else 'none'}. Set language.new_tokens to the tokens of the adapter, in their order"
        )


def _compute_scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """Compute the scale of a layer as PEFT does."""
    from peft.utils.other import get_pattern_key

    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    alpha = float(patterns.get(get_pattern_key(list(patterns), layer), config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
