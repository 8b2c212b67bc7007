"""Writes PEFT's adapter folders, and merges updates into a base."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from ...adapters.lora.adapted_layers import PEFT_PREFIX, AdaptedLayer
from ...core.errors import TaskError
from ...core.tree import Params
from ...linalg.pair import Factors, Pair, zero_pad_pair
from ...models.stateless import names_of_parameters
from ..base_model import HEAD_NAMES
from ..lora.new_tokens import find_output_layer
from ..lora.peft_adapter import ADAPTER
from ..lora.stored_adapter import METADATA_FILE
from ..optional_packages import import_library, silence_library


def write_adapter(
    folder: Path,
    pairs: Factors,
    scale: float,
    config: Any,
    layers: Mapping[str, AdaptedLayer],
    base_name: str,
    digest: str,
    *,
    head: Mapping[str, Tensor] | None = None,
    saved_tensors: Mapping[str, Tensor] | None = None,
    rows: Mapping[str, Tensor] | None = None,
    round: int | None = None,
    client_id: int | None = None,
) -> Path:
    """Write an adapter folder as PEFT does: ``adapter_model.safetensors`` and ``adapter_config.json``.

    All layers get the largest rank r; factors of a smaller rank are zero-padded. B includes the scale of training, and
    the configuration has α = r without rsLoRA, so that PEFT applies the scale 1. ``fedlowrank.json`` is written to the
    same folder.

    ``PeftModel.from_pretrained`` restores a head through PEFT's ``modules_to_save``. A classification model whose head
    differs from the head in the base's files therefore needs ``head``, even if the head was frozen.

    Args:
        folder: folder to write to, created if it does not exist; other files in it stay. It is returned.
        pairs: factor pairs by layer.
        scale: scale s of the update s·B A.
        config: ``peft_config["default"]`` of the model, with the target modules that PEFT found.
        layers: adapted layers of the model (``find_lora(model, None).layers``).
        base_name: name of the base, as the user gave it.
        digest: digest of the base's files (:func:`fedlowrank.storage.base_files.combine_file_digests`).
        head: all tensors of a classification head, by their names in the base.
        saved_tensors: all tensors of layers that are stored whole and not as factors, by their names in the base.
        rows: rows of new tokens, by their names in the file (:func:`..lora.new_tokens.name_rows`).
        round: index of the adapter's round, from 0.
        client_id: index of the client that owns the adapter; None for the server.
    """
    rank = max(1, *(pair.rank for pair in pairs.values()))
    tensors: Params = {PEFT_PREFIX + n: t for n, t in [*(head or {}).items(), *(saved_tensors or {}).items()]}
    tensors |= rows or {}
    for name, pair in pairs.items():
        padded_pair = zero_pad_pair(Pair(pair.b * scale, pair.a), rank)
        for path, value in layers[name].shape_parameters(padded_pair).items():
            tensors[name_in_file(path)] = value
    tensors = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    settings = _adapter_config(config, list(pairs), rank, base_name, head or {}, saved_tensors or {})
    metadata = {
        "format": 1,
        "digest": digest,
        "round": round,
        "client": client_id,
        "rank": rank,
        "scale": scale,
    }
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8"
    )
    (folder / METADATA_FILE).write_text(json.dumps(metadata, indent=2, sort_keys=True), encoding="utf-8")
    return folder


def name_in_file(path: str) -> str:
    """Return the name of a factor in a file of PEFT, which omits the name of the adapter."""
    return path.replace(f".{ADAPTER}.weight", ".weight").removesuffix(f".{ADAPTER}")


def merge_update(
    model: Any,
    layers: Mapping[str, AdaptedLayer],
    updates: Mapping[str, Pair | Tensor],
    head: Mapping[str, Tensor] | None = None,
) -> Any:
    """Copy the base of a model and add updates to its weights, in float32, then cast to the weight's dtype.

    If the embedding and the output layer are one tensor, and one of them has an update, they are two tensors in the copy
    (``tie_word_embeddings`` is false): PEFT's factors of one layer do not change the other.

    Args:
        model: base with an adapter; the copy has no adapter.
        layers: adapted layers of the model.
        updates: factors, or whole matrices ``[d, k]``, by layer.
        head: tensors that replace tensors of the base, by their names in the base.

    Raises:
        TaskError: if a layer is quantized or not in memory, or shares its weight with another, except embedding and
            output layer.
    """
    merged_model = copy.deepcopy(model).unload()
    _untie_embeddings(merged_model, updates)
    owners = names_of_parameters(merged_model)
    for name, update in updates.items():
        weight = merged_model.get_submodule(name).weight
        if weight.is_meta:
            raise TaskError(
                f"the weight of {name} is not in memory: language.device_map keeps it on the disk or in another memory. Merge "
                "a base that is in memory: set local.device_map to 'none'"
            )
        if not weight.is_floating_point():
            raise TaskError(f"the weight of {name} is quantized; merge into the base loaded without quantize")
        if len(owners[id(weight)]) > 1:
            shared_names = " and ".join(owners[id(weight)])
            raise TaskError(
                f"{shared_names} are one tensor, so an update of {name} cannot be merged into it alone"
            )
        delta = update.b.float() @ update.a.float() if isinstance(update, Pair) else update.float()
        with torch.no_grad():
            weight.copy_(weight.float() + layers[name].reshape_update(delta).to(weight.device))
    state = merged_model.state_dict()
    for name, value in (head or {}).items():
        state[name].copy_(value)
    return merged_model


def _untie_embeddings(model: Any, updated_layers: Collection[str]) -> None:
    """Give the output layer its own weight if it shares that of the embedding and one of both is updated, in place."""
    output = find_output_layer(model)
    if output is None or output.weight is not model.get_input_embeddings().weight:
        return
    pair = (model.get_input_embeddings(), output)
    if not any(module in pair for name, module in model.named_modules() if name in updated_layers):
        return
    output.weight = nn.Parameter(output.weight.detach().clone(), requires_grad=False)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def save_model(folder: Path, model: Any, tokenizer: Any) -> Path:
    """Write a whole model as an ordinary folder of ``transformers``, with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    with silence_library(import_library("transformers", "a language model")):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _adapter_config(
    config: Any,
    names: list[str],
    rank: int,
    base_name: str,
    head: Mapping[str, Tensor],
    saved_tensors: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Make the content of ``adapter_config.json`` for an adapter that :func:`write_adapter` writes."""
    file_config = copy.deepcopy(config)
    file_config.r = file_config.lora_alpha = rank
    # any other value makes PEFT initialize the factors from the weights of the base that it loads
    file_config.init_lora_weights = True
    # all layers have one rank, and B includes the scale of its layer
    file_config.rank_pattern, file_config.alpha_pattern = {}, {}
    file_config.use_rslora, file_config.inference_mode, file_config.base_model_name_or_path = (
        False,
        True,
        base_name,
    )
    if saved_tensors:
        # names instead of a pattern, because layers that are stored whole must not match
        file_config.target_modules = set(names)
    saved_modules = dict.fromkeys(name.rpartition(".")[0] for name in saved_tensors)
    if head:
        # PEFT itself adds every module whose name ends in one of HEAD_NAMES
        modules = dict.fromkeys(name.rpartition(".")[0] for name in head)
        other_modules = [m for m in modules if not any(part.endswith(HEAD_NAMES) for part in m.split("."))]
        file_config.task_type, file_config.modules_to_save = (
            "SEQ_CLS",
            [*other_modules, *HEAD_NAMES, *saved_modules],
        )
    else:
        # for the type SEQ_CLS PEFT expects a head in the file and fails without one
        file_config.task_type = None if file_config.task_type == "SEQ_CLS" else file_config.task_type
        file_config.modules_to_save = list(saved_modules) or None
    return {n: sorted(v) if isinstance(v, set) else v for n, v in file_config.to_dict().items()}
