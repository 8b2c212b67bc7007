"""Adapters and settings of PEFT for which a layer's update is not s·B A of its weight, so that LoRA methods refuse them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...core.errors import TaskError

REFUSED_SETTINGS = {
    "use_dora": "its magnitudes change the base weight's columns, so an update is no longer s·B A",
    "lora_bias": "a bias beside B is not part of the low-rank update",
    "layer_replication": "it copies layers of the base",
    "trainable_token_indices": "the tokens are those of language.new_tokens",
    "target_parameters": "its factors of all experts are one pair of rank r · E, "
    "which a server cannot truncate; name layers in target_modules",
    "megatron_config": "layers of Megatron are split over processes",
    "loftq_config": "LoftQ changes the base",
    "eva_config": "EVA initializes A from data, which differ between clients",
    "corda_config": "CorDA changes the base",
    "lora_ga_config": "LoRA-GA changes the base",
    "use_qalora": "its A has a row of pooled inputs",
    "ensure_weight_tying": "a pair of factors belongs to one layer",
    "inference_mode": "it freezes the factors",
    "runtime_config": "it places the adapters of one machine",
    "megatron_core": "layers of Megatron are split over processes",
    "qalora_group_size": "its A has a row of pooled inputs",
}
"""Settings that must keep their default value, with the reason."""

IGNORED_SETTINGS = ("trainable_token_indices", "inference_mode", "runtime_config")
"""Settings of an existing adapter which may differ from their defaults: rows of tokens are parameters beside the factors, and the
others are of the program that made the adapter."""


def explain_refusal(field: dataclasses.Field[Any], value: Any) -> str | None:
    """The reason why a value of a field of ``peft.LoraConfig`` cannot be federated; None if it can."""
    reason = REFUSED_SETTINGS.get(field.name)
    if reason is None and field.metadata.get("is_lora_variant"):
        reason = "it is another update than s·B A"
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    # an empty table switches a variant on, with its defaults, and an empty list names nothing
    is_empty_list = isinstance(value, list | tuple | set) and not value
    return None if value is None or value == default or is_empty_list else reason


def refuse_other_adapters(module: nn.Module) -> None:
    """Refuse adapters of PEFT in a module whose update is not s·B A of a layer's weight.

    Raises:
        TaskError: if there is an adapter of another type than LoRA, one with a setting that :func:`explain_refusal` refuses,
            or a layer whose weight the factors do not update.
    """
    hint = "or choose a method that trains all parameters of the adapter, such as fedavg."
    for layer in module.modules():
        configs = getattr(layer, "peft_config", None)
        for config in configs.values() if isinstance(configs, Mapping) else ():
            peft_type = getattr(config, "peft_type", "LORA")
            if (title := str(getattr(peft_type, "value", peft_type))) != "LORA":
                raise TaskError(
                    f"the model has an adapter of PEFT's type {title}, not LORA. Make it with peft.LoraConfig, {hint}"
                )
            for field in dataclasses.fields(config):
                value = getattr(config, field.name)
                if field.name not in IGNORED_SETTINGS and (reason := explain_refusal(field, value)):
                    raise TaskError(
                        f"the model's adapter was made with {field.name} = {value!r}, but {reason}. Leave the setting out, {hint}"
                    )
    layers = dict(module.named_modules())
    for name, layer in layers.items():
        base, library = getattr(layer, "base_layer", None), type(layer).__module__
        if base is None or not library.startswith("peft.tuners.") or "trainable_tokens" in library:
            continue
        has_factors_of_weight = (
            library.startswith("peft.tuners.lora.")
            and isinstance(getattr(base, "weight", None), Tensor)
            and not hasattr(layer, "parameter_name")
            # attention reads the weight of its output layer without calling that layer
            and not isinstance(layers[name.rpartition(".")[0]], nn.MultiheadAttention)
        )
        if not has_factors_of_weight:
            raise TaskError(
                f"layer {name} ({type(base).__name__}) has PEFT's adapter {library}.{type(layer).__name__}, whose factors are "
                "not those of the weight that the model computes with. Leave the layer out of target_modules, or wrap the module "
                "by fedlowrank.adapters.lora.lora_layers.add_lora"
            )
