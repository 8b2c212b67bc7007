"""Starts a model from a LoRA adapter, or from the mean of several: settings that it hands on, and its factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...adapters.lora.adapted_layers import PEFT_PREFIX
from ...adapters.lora.lora_factors import find_lora
from ...core.errors import ConfigError, DataError
from ...core.tree import widen
from ...linalg.pair import Pair
from ...linalg.truncation import Truncation, relative_error, truncate_update
from ...models.stateless import tied_names
from ..base_model import HEAD_NAMES
from ..export.adapter_files import name_in_file
from .peft_adapter import ADAPTER
from .stored_adapter import LAYER_FIELDS, TOKEN_FIELD, StoredAdapter, find_layer

_TOKEN_LAYER = ".token_adapter."
"""What PEFT appends to the name of a layer whose rows of tokens are trained."""

_INHERITED_FIELDS = (
    *("r", "rank_pattern", "lora_alpha", "alpha_pattern"),
    *("use_rslora", "lora_dropout", "modules_to_save"),
)
"""Fields that the section ``[lora]`` inherits from the adapter unless it sets them.

The fields that name layers are inherited only together with ``target_modules``.
"""


def merge_start_fields(adapter: StoredAdapter, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the section ``[lora]`` by rank, α and modules of the adapter, where the section does not set them."""
    config = dict(adapter.config)
    # PEFT adds these names to each adapter of a classification model, even if the base has no such modules
    saved_modules = [n for n in config.get("modules_to_save") or () if n not in HEAD_NAMES]
    config["modules_to_save"] = saved_modules or None
    if adapter.is_mean:
        # a mean has no α of its own, and the scale 1 at any rank
        config["lora_alpha"] = fields.get("r", config["r"])
    inherited_fields = [*_INHERITED_FIELDS]
    inherited_fields += () if "target_modules" in fields else LAYER_FIELDS
    inherited_fields = [n for n in inherited_fields if config.get(n) is not None]
    return {n: config[n] for n in inherited_fields} | dict(fields)


def check_adapter_classes(adapter: StoredAdapter, classes: Sequence[str]) -> None:
    """Raise ConfigError if an adapter is known to have been trained for other classes, or for these in another order."""
    if adapter.classes and classes and tuple(classes) != adapter.classes:
        raise ConfigError(
            f"lora.start: {adapter.title} was trained for the classes {list(adapter.classes)}, in this order, and this run has "
            f"{list(classes)}. Set data.classes to those of the adapter"
        )


def holds_head(adapter: StoredAdapter, head: Sequence[str]) -> bool:
    """Whether an adapter holds the weights of a head, so that the model does not have them from elsewhere."""
    return all(any(n.startswith(f"{PEFT_PREFIX}{h}.") for n in adapter.tensors) for h in head)


def load_start(model: Any, adapter: StoredAdapter) -> list[str]:
    """Copy the factors of an adapter into a model.

    The model then has the outputs of the base with this adapter. If the adapter's scale α/r differs from the model's, B is
    multiplied by their quotient. Components beyond the adapter's rank do not change. A mean of adapters is truncated to the
    model's rank.

    Args:
        model: model (``peft.PeftModel``) with initial factors.
        adapter: adapter to start from.

    Returns:
        Notes: on the error of a truncation.

    Raises:
        ConfigError: if a single adapter has a higher rank than the model, layers that the model does not adapt, or weights of
            another base.
        DataError: if shapes do not fit the base.
    """
    config, tensors, lora = adapter.config, dict(adapter.tensors), find_lora(model, None)
    truncations: list[Truncation] = []
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for first_name, aliases in tied_names(model).items():
        stored_aliases = [n for n in (first_name, *aliases) if n in tensors]
        if any(not torch.equal(tensors[n], tensors[stored_aliases[0]]) for n in stored_aliases[1:]):
            raise ConfigError(
                f"lora.start: {adapter.title} has different weights for {' and '.join(stored_aliases)}, which are one "
                "tensor in the base (tied weights)"
            )
    for name, layer in lora.layers.items():
        a, b = name_in_file(str(layer.a)), name_in_file(str(layer.b))
        if a not in tensors or b not in tensors:
            continue
        # in float32, because scaled factors in half precision would be rounded
        pair = widen(Pair(tensors.pop(b).flatten(1), tensors.pop(a).flatten(1)))
        if (pair.b.shape[0], pair.a.shape[1]) != layer.shape:
            raise DataError(
                f"lora.start: layer {name} of {adapter.title} is {pair.b.shape[0]} × {pair.a.shape[1]}, and that of "
                f"the base {layer.shape[0]} × {layer.shape[1]}. The adapter is of another base model"
            )
        max_rank = parameters[str(layer.a)].shape[0]
        if adapter.is_mean and pair.rank > max_rank:
            truncation = truncate_update(pair, max_rank)
            # a layer may have no higher rank, and then nothing is lost
            truncations += [truncation] if max_rank < layer.largest_rank else []
            pair = truncation.pair
        if pair.rank > max_rank:
            raise ConfigError(
                f"lora.start: {adapter.title} has rank {pair.rank} at {name}, and lora.r is {max_rank}. Set lora.r = "
                f"{pair.rank}, or leave it out to take that of the adapter"
            )
        scale_ratio = adapter.scales[find_layer(a)] / lora.scale
        with torch.no_grad():
            for path, value in layer.as_parameters(Pair(pair.b * scale_ratio, pair.a)).items():
                axis = 0 if path == layer.a else 1
                parameters[path].narrow(axis, 0, pair.rank).copy_(value)
    _check_token_ids(config, model, adapter.title)
    _load_token_rows(model, parameters, tensors, adapter.title)
    for name in [
        n
        for n in tensors
        if n in parameters and parameters[n].requires_grad and parameters[n].shape == tensors[n].shape
    ]:
        with torch.no_grad():
            parameters[name].copy_(tensors.pop(name))
    tensors = _drop_base_weights(
        model, parameters, tensors, config.get("modules_to_save") or (), adapter.title
    )
    if tensors:
        raise ConfigError(
            f"lora.start: {adapter.title} has {sorted(tensors)[0]}, and {len(tensors) - 1} more, which this model does "
            "not adapt. Leave lora.target_modules out to adapt the layers of the adapter; of an adapter of a "
            "classification head only the factors can be taken"
        )
    if not truncations:
        return []
    return [
        f"lora.start: {adapter.title} is truncated to lora.r, rank {max(t.pair.rank for t in truncations)}, with a relative "
        f"error of {relative_error(truncations):.1%}. Leave lora.r out to start from the exact mean"
    ]


def _load_token_rows(
    model: Any, parameters: Mapping[str, Tensor], tensors: dict[str, Tensor], title: str
) -> None:
    """Copy the rows of ``language.new_tokens`` into a model.

    PEFT stores the trained rows of a layer, and those of tied layers twice. Of a layer without trained rows, such as the
    output layer, PEFT stores the whole weight if the vocabulary changed.

    Args:
        model: model (``peft.PeftModel``) that trains rows of tokens, or none.
        parameters: parameters of the model by name.
        tensors: tensors of the adapter's file; the rows are removed.
        title: the adapter, for messages.

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
                f"lora.start: {title} has different rows of tokens for {layer} and the embedding, which are one "
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
    title: str,
) -> dict[str, Tensor]:
    """Drop the weights of the base from an adapter's tensors; PEFT stores the embedding if it is adapted or has new rows.

    The rows of ``language.new_tokens`` are not compared. In PEFT they begin at random values, and their trained values are
    loaded separately.

    Args:
        model: model (``peft.PeftModel``).
        parameters: parameters of the model by name.
        tensors: tensors of the adapter that the model has not loaded.
        saved_modules: ends of the names of modules that the adapter trained whole.
        title: the adapter, for messages.

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
                f"lora.start: {title} has the weight {name} {[*stored.shape]}, which is not that of this base, "
                f"{[*weight.shape]}. If tokens were added for the adapter, set language.new_tokens to them, in their order, and "
                "resize the embedding for it to the length of the tokenizer; otherwise the adapter is of another base"
            )
    return other_tensors


def _list_token_layers(model: Any) -> dict[str, list[int]]:
    """List the ids of tokens whose rows a model trains, by layer."""
    layers: dict[str, list[int]] = model.peft_config[ADAPTER].trainable_token_indices or {}
    return layers


def _check_token_ids(config: Mapping[str, Any], model: Any, title: str) -> None:
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
            f"lora.start: {title} has rows of the tokens {sorted(stored_ids)[0]}, and language.new_tokens trains "
            f"{sorted(new_ids)[0] if new_ids else 'none'}. Set language.new_tokens to the tokens of the adapter, in their order"
        )
