"""Reads a LoRA adapter from a folder that PEFT wrote, and refuses what federated training does not allow."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from ...adapters.lora.adapted_layers import PEFT_PREFIX
from ...adapters.lora.peft_settings import IGNORED_SETTINGS, explain_refusal
from ...core.errors import ConfigError, DataError
from ..optional_packages import import_library

TOKEN_FIELD = "trainable_token_indices"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
METADATA_FILE = "fedlowrank.json"
"""What this package writes beside PEFT's files."""

A_ENDS = (".lora_A.weight", ".lora_embedding_A")
B_ENDS = (".lora_B.weight", ".lora_embedding_B")
"""Ends of the names of factors in the file; the rank is the first axis of A and the second of B."""

LAYER_FIELDS = ("target_modules", "layers_to_transform", "layers_pattern", "exclude_modules")
"""Fields of a configuration that name the adapted layers."""

COMPARED_FIELDS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout")
"""Fields of a configuration that machines compare beside the weights: those of the scale and of training."""


@dataclass(frozen=True)
class StoredAdapter:
    """A LoRA adapter in memory, with the names of PEFT's files.

    Attributes:
        title: the adapter in messages, such as ``the adapter in out/adapter``.
        config: content of ``adapter_config.json``.
        tensors: tensors of ``adapter_model.safetensors`` by name.
        scales: scale s of s·B A by the name of the layer in the base.
        classes: names of the classes in the order of its outputs, which this package stores; empty if they are not known.
        is_mean: whether it is the mean of several adapters, which may be truncated.
    """

    title: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    scales: Mapping[str, float]
    classes: tuple[str, ...] = ()
    is_mean: bool = False


def read_adapter(folder: Path) -> StoredAdapter:
    """Read an adapter folder.

    Raises:
        DataError: if the folder holds no adapter of PEFT, or a file cannot be read.
        ConfigError: if it is not a plain LoRA adapter, or has settings that federated training does not allow.
    """
    config = _read_config(folder)
    try:
        tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    except safetensors.SafetensorError as error:
        raise DataError(f"lora.start: {folder / WEIGHTS_FILE} cannot be read: {error}") from error
    scales = {
        find_layer(name): _compute_scale(config, find_layer(name), tensor.shape[0])
        for name, tensor in tensors.items()
        if name.endswith(A_ENDS)
    }
    metadata = folder / METADATA_FILE
    try:
        classes = (
            json.loads(metadata.read_text(encoding="utf-8")).get("classes", ()) if metadata.is_file() else ()
        )
    except ValueError as error:
        raise DataError(f"lora.start: {metadata} is not JSON: {error}") from error
    return StoredAdapter(f"the adapter in {folder}", config, tensors, scales, tuple(classes))


def find_layer(name: str) -> str:
    """Find the layer in the base by the name of one of its factors in the file."""
    return name.rpartition(".lora_")[0].removeprefix(PEFT_PREFIX)


def _read_config(folder: Path) -> dict[str, Any]:
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
        config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"lora.start: {folder / CONFIG_FILE} is not JSON: {error}") from error
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            f"lora.start: the adapter in {folder} is of type {config.get('peft_type')!r}, not LORA"
        )
    for field in dataclasses.fields(import_library("peft", "lora.start").LoraConfig):
        name, value = field.name, config.get(field.name)
        if name not in IGNORED_SETTINGS and (reason := explain_refusal(field, value)):
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


def _compute_scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """Compute the scale of a layer as PEFT does."""
    from peft.utils.other import get_pattern_key

    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    alpha = float(patterns.get(get_pattern_key(list(patterns), layer), config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
