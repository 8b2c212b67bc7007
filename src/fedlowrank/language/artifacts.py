"""Standard adapter folders of PEFT, and bases with an update merged."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ..adapters.lora.adapted_layers import PEFT_PREFIX, AdaptedLayer
from ..core.errors import TaskError
from ..core.tree import Params
from ..linalg.pair import Factors, Pair, zero_pad_pair
from ..models.stateless import names_of_parameters
from .base_model import HEAD_NAMES
from .lora.peft_adapter import ADAPTER
from .optional import import_library, quiet

METADATA = "fedlowrank.json"


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
    whole: Mapping[str, Tensor] | None = None,
    round: int | None = None,
    client: int | None = None,
) -> Path:
    """Write an adapter folder as PEFT does: ``adapter_model.safetensors`` and ``adapter_config.json``.

    All layers get one rank r, the largest, smaller ones zero-padded; α = r and no rsLoRA, with
    the scale in B, so that no reader has to know the scale that was trained with. Beside them lies
    ``fedlowrank.json``.

    ``PeftModel.from_pretrained`` puts a head back through PEFT's ``modules_to_save``, so a classification
    model whose head is not the one of its files needs ``head`` even if it was frozen.

    Args:
        folder: made if it does not exist; other files in it stay. It is returned.
        pairs: factors by layer.
        scale: s of the update s·B A.
        config: ``peft_config["default"]`` of the model, where PEFT has settled the target modules.
        layers: the adapted layers (``find_lora(model, None).layers``).
        base_name: of the base, as the user gave it.
        digest: of the base's files (:func:`fedlowrank.storage.base_files.combine_file_digests`).
        head: all tensors of a classification head, by their names in the base.
        whole: all tensors of layers that are stored whole and not as factors, by their names in the base.
        round: that the adapter is from, counted from 0.
        client: whose it is; None for the server.
    """
    rank = max(1, *(pair.rank for pair in pairs.values()))
    tensors: Params = {PEFT_PREFIX + n: t for n, t in [*(head or {}).items(), *(whole or {}).items()]}
    for name, pair in pairs.items():
        padded = zero_pad_pair(Pair(pair.b * scale, pair.a), rank)
        for path, value in layers[name].shape_parameters(padded).items():
            tensors[name_in_file(path)] = value
    tensors = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    settings = _adapter_config(config, list(pairs), rank, base_name, head or {}, whole or {})
    metadata = {"format": 1, "digest": digest, "round": round, "client": client, "rank": rank, "scale": scale}
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True))
    (folder / METADATA).write_text(json.dumps(metadata, indent=2, sort_keys=True))
    return folder


def name_in_file(path: str) -> str:
    """The name of a factor in a file of PEFT, where the adapter's own name is left out."""
    return path.replace(f".{ADAPTER}.weight", ".weight").removesuffix(f".{ADAPTER}")


def merge_update(
    model: Any,
    layers: Mapping[str, AdaptedLayer],
    update: Mapping[str, Pair | Tensor],
    head: Mapping[str, Tensor] | None = None,
) -> Any:
    """A copy of the base of a model, with updates of its weights added in float32 and then cast.

    Args:
        model: a base with an adapter slot, which the copy lacks.
        layers: its adapted layers.
        update: factors, or whole matrices ``[d, k]``, by layer.
        head: tensors to replace the base's, by their names in it.

    Raises:
        TaskError: if a layer is quantized, or shares its weight with another.
    """
    made = copy.deepcopy(model).unload()
    owners = names_of_parameters(made)
    for name, one in update.items():
        weight = made.get_submodule(name).weight
        if not weight.is_floating_point():
            raise TaskError(f"the weight of {name} is quantized; merge into the base loaded without quantize")
        if len(owners[id(weight)]) > 1:
            shared = " and ".join(owners[id(weight)])
            raise TaskError(f"{shared} are one tensor, so an update of {name} cannot be merged into it alone")
        delta = one.b.float() @ one.a.float() if isinstance(one, Pair) else one.float()
        with torch.no_grad():
            weight.copy_(weight.float() + layers[name].reshape_update(delta).to(weight.device))
    state = made.state_dict()
    for name, value in (head or {}).items():
        state[name].copy_(value)
    return made


def save_model(folder: Path, model: Any, tokenizer: Any) -> Path:
    """Write a whole model as an ordinary folder of ``transformers``, with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    with quiet(import_library("transformers", "a language model")):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _adapter_config(
    config: Any,
    names: list[str],
    rank: int,
    base_name: str,
    head: Mapping[str, Tensor],
    whole: Mapping[str, Tensor],
) -> dict[str, Any]:
    """``adapter_config.json`` of an adapter as written here."""
    made = copy.deepcopy(config)
    made.r = made.lora_alpha = rank
    # PEFT would start anew from the weights of the base that it loads
    made.init_lora_weights = True
    # one rank, and B holds the scale of its layer
    made.rank_pattern, made.alpha_pattern = {}, {}
    made.use_rslora, made.inference_mode, made.base_model_name_or_path = False, True, base_name
    if whole:
        # a layer that is stored whole must not match
        made.target_modules = set(names)
    saved = dict.fromkeys(name.rpartition(".")[0] for name in whole)
    if head:
        # PEFT adds every module whose name ends in one of HEAD_NAMES by itself
        modules = dict.fromkeys(name.rpartition(".")[0] for name in head)
        other = [m for m in modules if not any(part.endswith(HEAD_NAMES) for part in m.split("."))]
        made.task_type, made.modules_to_save = "SEQ_CLS", [*other, *HEAD_NAMES, *saved]
    else:
        # PEFT looks in the file for the head of what is called a classification, and fails
        made.task_type = None if made.task_type == "SEQ_CLS" else made.task_type
        made.modules_to_save = list(saved) or None
    return {n: sorted(v) if isinstance(v, set) else v for n, v in made.to_dict().items()}
