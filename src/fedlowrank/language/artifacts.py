"""Standard adapter folders of PEFT, out and in, and bases with an update merged."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ..adapters.adapted_layers import PEFT_PREFIX, AdaptedLayer
from ..core.errors import ConfigError, DataError, TaskError, did_you_mean
from ..core.tree import Params
from ..linalg.pair import Factors, Pair, zero_pad_pair
from .base import HEAD_NAMES
from .optional import import_library
from .peft_adapter import ADAPTER, kind_of
from .peft_config import lora_config, scale_of

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
METADATA = "fedlowrank.json"


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter as it was read.

    Attributes:
        pairs: factors by layer.
        scale: by which their product is multiplied; 1 for what :func:`write_adapter` wrote, which folds it
            into B.
        config: the ``LoraConfig`` of the folder, ``modules_to_save`` left out.
        head: tensors of a classification head by their names in the base; empty if the folder has none.
        base_name: the base, as the folder names it.
        digest: of the base's weights, or None if unknown.
        round: after which the adapter was saved, counted from 0, or None.
        client: whose it is, or None for the server's.
        notes: what could not be checked, each a sentence.
    """

    pairs: Factors
    scale: float
    config: Any
    head: Params
    base_name: str
    digest: str | None
    round: int | None
    client: int | None
    notes: tuple[str, ...]


def write_adapter(
    folder: Path,
    pairs: Factors,
    scale: float,
    config: Any,
    base_name: str,
    digest: str,
    head: Mapping[str, Tensor] | None = None,
    *,
    layers: Mapping[str, AdaptedLayer] | None = None,
    round: int | None = None,
    client: int | None = None,
    whole: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write an adapter folder as PEFT does: ``adapter_model.safetensors`` and ``adapter_config.json``.

    All layers get one rank r, the largest, smaller ones zero-padded; α = r and no rsLoRA, with
    the scale in B, so that no reader has to know the scale that was trained with. Beside them lies
    ``fedlowrank.json``.

    ``PeftModel.from_pretrained`` puts a head back through PEFT's ``modules_to_save``, so a classification
    model whose head is not the one of its files needs ``head`` even if it was frozen. A causal model's folder
    has no such modules.

    Args:
        folder: made if it does not exist; other files in it stay.
        pairs: factors by the dotted names of their layers in the base.
        scale: s of the update s·B A.
        config: the settings trained with, best ``peft_config["default"]`` of the model, where PEFT has
            settled the target modules.
        base_name: of the base, as the user gave it.
        digest: of the base's weights (:func:`fedlowrank.language.base.digest_weights`).
        head: all tensors of a classification head, by their names in the base.
        layers: the adapted layers (``find_lora(model, None).layers``); needed if embeddings or convolutions
            are adapted, whose factors have other names and shapes in a file. Without it every layer is taken
            for a linear one.
        round: that the adapter is from, counted from 0.
        client: whose it is; None for the server.
        whole: all tensors of layers that are stored whole and not as factors, by their names in the base.

    Returns:
        The folder.

    Raises:
        TaskError: if there are no pairs, a pair's shapes do not fit, or the target modules do not match its
            layer.
        DataError: if peft is missing.
    """
    if not pairs:
        raise TaskError("an adapter needs at least one layer")
    rank = max(1, *(pair.rank for pair in pairs.values()))
    tensors: Params = {}
    for name, pair in pairs.items():
        if pair.a.ndim != 2 or pair.b.ndim != 2 or pair.a.shape[0] != pair.rank:
            raise TaskError(
                f"{name}: B {list(pair.b.shape)} and A {list(pair.a.shape)} are no factors of one matrix"
            )
        if layers is not None and name not in layers:
            raise TaskError(f"no layer {name!r} is adapted. {did_you_mean(name, layers)}")
        wide = zero_pad_pair(Pair(pair.b.detach() * scale, pair.a.detach()), rank)
        tensors |= _name_for_file(name, wide, None if layers is None else layers[name])
    for name, value in [*(head or {}).items(), *(whole or {}).items()]:
        tensors[PEFT_PREFIX + name] = value.detach().cpu().clone().contiguous()
    made = _exported(config, list(pairs), rank, base_name, head, whole)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(made, indent=2, sort_keys=True))
    beside = {"format": 1, "digest": digest, "round": round, "client": client, "rank": rank, "scale": scale}
    (folder / METADATA).write_text(json.dumps(beside, indent=2, sort_keys=True))
    return folder


def read_adapter(folder: Path, digest: str | None = None) -> SavedAdapter:
    """Read an adapter folder, of :func:`write_adapter` or of PEFT itself.

    Args:
        folder: of the adapter.
        digest: of the base that it is meant for, or None not to compare.

    Raises:
        DataError: if files are missing or damaged, the weights are pickled, the adapter has parts that are
            neither factors nor a head, it uses a feature of PEFT that is refused here, or it is for another
            base.
    """
    if not (folder / WEIGHTS).is_file() and (folder / "adapter_model.bin").is_file():
        raise DataError(
            f"{folder} holds a pickled adapter_model.bin, which is not opened; save it as safetensors"
        )
    settings = _json(folder / CONFIG)
    beside = _json(folder / METADATA) if (folder / METADATA).is_file() else {}
    own, notes = beside.get("digest"), []
    if digest is not None and own is None:
        notes.append(
            f"{folder} does not say which weights its adapter is for; its base could not be compared."
        )
    if None not in (digest, own) and digest != own:
        raise DataError(
            f"{folder} holds adapters for another base: {settings.get('base_model_name_or_path')!r} with "
            f"digest {own}, and the base here has {digest}. Load the base, in the dtype and quantization, "
            "that they were trained on."
        )
    saved = settings.pop("modules_to_save", None) or ()
    known = import_library("peft", "a LoRA adapter").LoraConfig.__dataclass_fields__
    unknown = [n for n, v in settings.items() if v and n not in known]
    if unknown:
        notes.append(
            f"{folder / CONFIG} has settings that this version of PEFT does not know: {', '.join(unknown)}."
        )
    try:
        config = lora_config({n: v for n, v in settings.items() if n in known})
    except ConfigError as error:
        raise DataError(f"{folder / CONFIG}: {error}") from error
    try:
        tensors = safetensors.torch.load_file(folder / WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"cannot read {folder / WEIGHTS}: {error}") from error
    pairs, head = _split_tensors(folder, tensors)
    if head and not saved:
        raise DataError(
            f"{folder / WEIGHTS} replaces weights of the base, such as {next(iter(head))!r}; save the "
            "adapter with save_embedding_layers=False"
        )
    wrong = [n for n, pair in pairs.items() if pair.rank != config.r]
    if wrong:
        raise DataError(f"{folder}: {wrong[0]} has rank {pairs[wrong[0]].rank}, but r is {config.r}")
    name = settings.get("base_model_name_or_path") or ""
    place = beside.get("round"), beside.get("client")
    return SavedAdapter(pairs, scale_of(config), config, head, name, own, *place, tuple(notes))


def merge_update(
    model: Any,
    update: Mapping[str, Pair | Tensor],
    scale: float = 1.0,
    head: Mapping[str, Tensor] | None = None,
) -> Any:
    """A copy of a base with W + s·B A for the weights W of adapted layers, added in float32 and then cast.

    Args:
        model: a base, or one with an adapter slot, which the copy lacks.
        update: factors, or whole matrices ``[d, k]`` such as a server's update of full rank, by layer.
        scale: s.
        head: tensors to replace the base's, by their names in it.

    Raises:
        TaskError: if a layer does not exist, is quantized, or shares its weight with another; if an update
            does not fit its layer, or a tensor of the head does not exist.
    """
    made = copy.deepcopy(model)
    if hasattr(made, "peft_config"):
        made = made.unload()
    modules = dict(made.named_modules())
    owners: dict[int, list[str]] = {}
    for name, parameter in made.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name, one in update.items():
        weight = getattr(modules.get(name), "weight", None)
        if not isinstance(weight, Tensor):
            raise TaskError(f"the base has no layer {name!r} with a weight. {did_you_mean(name, modules)}")
        if not weight.is_floating_point():
            raise TaskError(f"the weight of {name} is quantized; merge into the base loaded without quantize")
        if len(owners[id(weight)]) > 1:
            shared = " and ".join(owners[id(weight)])
            raise TaskError(f"{shared} are one tensor, so an update of {name} cannot be merged into it alone")
        with torch.no_grad():
            delta = one.b.float() @ one.a.float() if isinstance(one, Pair) else one.float()
            if kind_of(modules[name]) in ("conv1d", "embedding"):
                delta = delta.mT
            rows, columns = weight.shape[0], weight[:1].numel()
            if delta.shape != (rows, columns):
                raise TaskError(
                    f"an update of shape {list(delta.shape)} does not fit {name}, {list(weight.shape)}"
                )
            total = weight.float() + scale * delta.reshape(weight.shape).to(weight.device)
            weight.copy_(total.to(weight.dtype))
    own = made.state_dict()
    for name, value in (head or {}).items():
        if name not in own or own[name].shape != value.shape:
            raise TaskError(f"the base has no tensor {name!r} of shape {list(value.shape)}")
        own[name].copy_(value)
    return made


def save_model(folder: Path, model: Any, tokenizer: Any) -> Path:
    """Write a whole model as an ordinary folder of ``transformers``, with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _name_for_file(name: str, pair: Pair, layer: AdaptedLayer | None) -> Params:
    """Factors by the names of a file: those of the model without the adapter's own name."""
    if layer is None:
        tensors = {f"{PEFT_PREFIX}{name}.lora_A.weight": pair.a, f"{PEFT_PREFIX}{name}.lora_B.weight": pair.b}
    else:
        named = layer.as_parameters(pair).items()
        tensors = {
            path.replace(f".{ADAPTER}.weight", ".weight").removesuffix(f".{ADAPTER}"): t for path, t in named
        }
    return {path: t.cpu().clone().contiguous() for path, t in tensors.items()}


def _exported(
    config: Any,
    names: list[str],
    rank: int,
    base_name: str,
    head: Mapping[str, Tensor] | None,
    whole: Mapping[str, Tensor] | None,
) -> dict[str, Any]:
    """``adapter_config.json`` of an adapter as written here."""
    from peft.tuners.tuners_utils import check_target_module_exists

    made = copy.deepcopy(config)
    made.r = made.lora_alpha = rank
    made.use_rslora, made.inference_mode, made.base_model_name_or_path = False, True, base_name
    # a layer that is stored whole must not match
    if whole or made.target_modules is None or str(made.target_modules).lower() == "all-linear":
        made.target_modules = set(names)
    lost = [name for name in names if not check_target_module_exists(made, name)]
    if lost:
        raise TaskError(
            f"target_modules {made.target_modules!r} of the settings do not match the layer {lost[0]}"
        )
    if head:
        made.task_type, made.modules_to_save = "SEQ_CLS", _modules_to_save(head)
    elif made.task_type == "SEQ_CLS":
        # PEFT looks in the file for the head of what is called a classification, and fails
        made.task_type = None
    if whole:
        layers = dict.fromkeys(name.rpartition(".")[0] for name in whole)
        made.modules_to_save = [*(made.modules_to_save or ()), *layers]
    return {n: sorted(v) if isinstance(v, set) else v for n, v in made.to_dict().items()}


def _modules_to_save(head: Mapping[str, Tensor]) -> list[str]:
    """Modules of the head's tensors, and the two names that PEFT's class for classification adds."""
    modules = dict.fromkeys(name.rpartition(".")[0] for name in head)
    # PEFT takes every module whose name ends in one of these
    covered = [m for m in modules if any(part.endswith(HEAD_NAMES) for part in m.split("."))]
    return [*(m for m in modules if m not in covered), *HEAD_NAMES]


def _split_tensors(folder: Path, tensors: Params) -> tuple[Factors, Params]:
    """Pairs by layer, and the tensors that are no factors by their names in the base."""
    a: Params = {}
    b: Params = {}
    head: Params = {}
    for path, value in tensors.items():
        if not path.startswith(PEFT_PREFIX):
            raise DataError(
                f"{folder / WEIGHTS}: {path!r} does not begin with {PEFT_PREFIX!r}, as PEFT's names do"
            )
        name = path.removeprefix(PEFT_PREFIX)
        for mark, side in (
            (".lora_A", a),
            (".lora_B", b),
            (".lora_embedding_A", a),
            (".lora_embedding_B", b),
        ):
            if name.endswith((mark, f"{mark}.weight")):
                side[name[: name.rindex(mark)]] = value.flatten(1)
                break
        else:
            if ".lora_" in name:
                raise DataError(f"{folder / WEIGHTS}: {path!r} is no factor of a plain LoRA")
            head[name] = value
    if not a or a.keys() != b.keys():
        raise DataError(
            f"{folder / WEIGHTS}: not every layer has both factors: {sorted(a.keys() ^ b.keys())[:3]}"
        )
    return {name: Pair(b[name], a[name]) for name in a}, head


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object")
    return found
