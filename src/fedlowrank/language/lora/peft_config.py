"""Makes a ``peft.LoraConfig`` and rejects settings that federated training does not allow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ...adapters.lora.adapted_layers import is_gaussian_initial
from ...adapters.lora.peft_settings import explain_refusal
from ...core.arguments.bounds import check_minimum
from ...core.errors import ConfigError, did_you_mean
from ..optional_packages import import_library


def make_lora_config(fields: Mapping[str, Any]) -> Any:
    """Make a ``peft.LoraConfig`` from its fields, by PEFT's names.

    Raises:
        ConfigError: for an unknown field, a value that PEFT rejects, or a feature that changes the base or
            the form s·B A of the update.
        DataError: if peft is missing.
    """
    library = import_library("peft", "a LoRA adapter")
    known_fields = {f.name: f for f in dataclasses.fields(library.LoraConfig)}
    for name, value in fields.items():
        if name not in known_fields:
            raise ConfigError(
                f"lora: peft's LoraConfig has no setting {name!r}. {did_you_mean(name, known_fields)}"
            )
        if reason := explain_refusal(known_fields[name], value):
            raise ConfigError(f"lora: {name} = {value!r} cannot be used in federated training: {reason}.")
    if str(getattr(fields.get("peft_type"), "value", fields.get("peft_type") or "LORA")) != "LORA":
        raise ConfigError(f"lora: peft_type = {fields['peft_type']!r}; only LORA is federated here")
    if fields.get("bias", "none") != "none":
        raise ConfigError(
            f"lora: bias = {fields['bias']!r} cannot be used in federated training: it trains the base's "
            "biases."
        )
    initial = fields.get("init_lora_weights", True)
    if is_gaussian_initial(initial) is None:
        raise ConfigError(
            f"lora: init_lora_weights = {initial!r} cannot be used in federated training: an adapter must "
            "begin as B = 0 on an unchanged base, or at a part of its weights that is the same on all machines. Take true "
            "(Kaiming uniform), 'gaussian', 'pissa' or 'olora'."
        )
    try:
        config = library.LoraConfig(**fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lora: {error}") from error
    numeric_types = (int, float)
    config.r = check_minimum("lora.r", config.r, 1)
    _check_patterns(config)
    saved_modules = config.modules_to_save
    if saved_modules is not None and (
        isinstance(saved_modules, str) or not all(isinstance(name, str) for name in saved_modules)
    ):
        raise ConfigError(
            f"lora: modules_to_save must be a list of names of modules; it is {saved_modules!r}"
        )
    if not isinstance(config.lora_alpha, numeric_types) or not 0 < config.lora_alpha < math.inf:
        raise ConfigError(f"lora: lora_alpha must be above 0; it is {config.lora_alpha!r}")
    if not isinstance(config.lora_dropout, numeric_types) or not 0 <= config.lora_dropout < 1:
        raise ConfigError(f"lora: lora_dropout must be in [0, 1); it is {config.lora_dropout!r}")
    return config


def _check_patterns(config: Any) -> None:
    """Raise ConfigError if a rank or an α of a pattern is out of bounds."""
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(config, name)
        if not isinstance(patterns, Mapping):
            raise ConfigError(
                f"lora: {name} must be a table from names of layers to numbers; it is {patterns!r}"
            )
        for key, value in patterns.items():
            if name == "rank_pattern":
                check_minimum(f"lora.{name}, {key!r}", value, 1)
            elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"lora.{name}: α of {key!r} must be above 0; it is {value!r}")
