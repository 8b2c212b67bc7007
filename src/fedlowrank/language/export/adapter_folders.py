"""Writes the models of a run to folders: as adapters, as adapters with some whole layers, or as whole models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...adapters.lora.adapted_layers import PEFT_PREFIX
from ...adapters.lora.lora_factors import LoRA, find_lora
from ...core.tree import Params
from ...linalg.pair import Factors, Pair
from ...linalg.truncation import Truncation, relative_error, truncate_update
from ...models.stateless import tied_names
from ...storage.base_files import combine_file_digests, digest_base_files
from ..base_model import LoadedBase
from ..lora.new_tokens import name_rows
from ..lora.peft_adapter import ADAPTER
from ..lora.stored_adapter import METADATA_FILE
from . import adapter_files
from .adapter_files import merge_update, save_model

COMMON_BASE_FOLDER = "base"
"""Name of the folder of a changed base, beside the adapters of that base."""


@dataclass(frozen=True)
class ModelParts:
    """One model, split into factors, weight updates and whole modules.

    Attributes:
        factors: LoRA factors by layer, without their scale.
        weight_updates: updates of the base's weights ``[d, k]``, by layer; empty for a plain adapter.
        head: parameters of the head by their names in the base.
        saved_params: parameters of further modules that are trained whole, by their names in the base.
        round: number of completed rounds.
        client_id: index of the client that owns the model; None for the server.
        token_rows: rows of new tokens by layer; see :mod:`..lora.new_tokens`.
    """

    factors: Factors
    weight_updates: dict[str, Tensor]
    head: Params
    saved_params: Params
    round: int
    client_id: int | None
    token_rows: Params = field(default_factory=dict)

    def compute_update(self, name: str, scale: float) -> Pair | Tensor:
        """Compute the total update of a layer's weight: the scaled factors plus the update of the base weight."""
        pair = self.factors[name]
        if name in self.weight_updates:
            return self.weight_updates[name] + pair.dense().float() * scale
        return Pair(pair.b * scale, pair.a)


class AdapterFolders:
    """Writes the models of one language model's clients and server.

    Args:
        model: base with LoRA factors (``peft.PeftModel``).
        loaded: loaded base, which gives name, digest, head and tokenizer.
        base_name: name of the base in adapter_config.json; None for the name under which it was loaded.
        metadata: further entries of ``fedlowrank.json``.
    """

    def __init__(
        self,
        model: Any,
        loaded: LoadedBase,
        base_name: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = model
        self._loaded = loaded
        self.base_name = base_name or loaded.name
        self._metadata = dict(metadata or {})
        self._lora: LoRA = find_lora(model, None)
        # PiSSA and OLoRA move the initial factors out of the base weights: the weights in the files still include them, the
        # weights in memory do not
        self._initial_factors: Factors = self._lora.trained if self._lora.principal else {}
        self._common_updates: dict[str, Tensor] = {}
        self._common_digest = ""

    def split_model(self, params: Params, round: int, client_id: int | None) -> ModelParts:
        """Split a model into its parts; parameters missing in ``params`` are taken from the wrapped model."""
        model_parameters = dict(self._model.named_parameters(remove_duplicate=False))
        tied_parameters = {
            alias: params[n]
            for n, aliases in tied_names(self._model).items()
            if n in params
            for alias in aliases
        }
        all_parameters = {
            name: p.detach() for name, p in (model_parameters | tied_parameters | params).items()
        }
        factors, weight_updates = {}, {}
        for name, layer in self._lora.layers.items():
            factors[name] = layer.read_pair(all_parameters)
            if name in self._initial_factors:
                factors[name] = _add_pairs(factors[name], self._initial_factors[name], -1.0)
            if layer.weight in params:
                moved_weight = all_parameters[layer.weight].float()
                update = moved_weight - self._lora.base[layer.weight].to(moved_weight)
                weight_updates[name] = (update.mT if layer.transposed else update).reshape(layer.shape)

        def select(modules: Sequence[str]) -> Params:
            prefixes = tuple(f"{PEFT_PREFIX}{module}." for module in modules)
            return {
                n.removeprefix(PEFT_PREFIX): all_parameters[n]
                for n in model_parameters
                if n.startswith(prefixes)
            }

        head, saved_tensors = select(self._loaded.head), select(self._loaded.saved_modules)
        rows = {
            layer: all_parameters[f"{name}.{ADAPTER}"]
            for layer, name in name_rows(self._token_layers).items()
        }
        return ModelParts(factors, weight_updates, head, saved_tensors, round, client_id, rows)

    @property
    def _token_layers(self) -> Mapping[str, list[int]]:
        """Ids of the tokens whose rows are trained, by layer."""
        return self._model.peft_config[ADAPTER].trainable_token_indices or {}

    @property
    def lora(self) -> LoRA:
        """The adapted layers of the base."""
        return self._lora

    def truncate(self, model: ModelParts, rank: int) -> dict[str, Truncation] | None:
        """Approximate a model's updates by factors of a given rank: the truncated SVD of each layer.

        Returns:
            The truncated update of each layer, or None if the model is already an adapter of at most this rank.
        """
        if not model.weight_updates and all(pair.rank <= rank for pair in model.factors.values()):
            return None
        return {n: truncate_update(model.compute_update(n, self._lora.scale), rank) for n in model.factors}

    def write_adapter(
        self, folder: Path, model: ModelParts, truncations: Mapping[str, Truncation] | None
    ) -> Path:
        """Write a model as a plain adapter of the base; ``fedlowrank.json`` states the truncation error.

        Args:
            folder: folder to write to, created if it does not exist. It is returned.
            model: model to write.
            truncations: truncated updates from :meth:`truncate`; None for a model that is already an adapter.
        """
        if truncations is None:
            self._write_adapter_files(folder, model.factors, self._lora.scale, model)
        else:
            self._write_adapter_files(folder, {n: t.pair for n, t in truncations.items()}, 1.0, model)
        errors = {
            "rank": json.loads((folder / METADATA_FILE).read_text(encoding="utf-8"))["rank"],
            "error": 0.0 if truncations is None else relative_error(truncations.values()),
            "layers": {n: 0.0 if truncations is None else truncations[n].error for n in model.factors},
        }
        _add_metadata(folder, {"truncation": errors})
        return folder

    def write_exact(self, folder: Path, model: ModelParts) -> Path:
        """Write a model without truncation.

        A layer whose base weight changed is stored whole, every other layer as factors. If all base weights changed, a
        whole model is written.
        """
        if len(model.weight_updates) == len(model.factors):
            return self.write_whole(folder, model)
        whole_tensors: Params = {}
        for name in model.weight_updates:
            layer = self._lora.layers[name]
            update = self._convert_to_memory(name, model.compute_update(name, self._lora.scale))
            weight = self._lora.base[layer.weight].detach()
            assert isinstance(update, Tensor)
            module = self._model.get_submodule(layer.weight.removesuffix(".weight"))
            whole_tensors |= {
                f"{name}.{tensor_name}": value for tensor_name, value in module.state_dict().items()
            }
            whole_tensors[f"{name}.weight"] = (weight.float() + layer.reshape_update(update)).to(weight.dtype)
        factors = {n: p for n, p in model.factors.items() if n not in model.weight_updates}
        return self._write_adapter_files(
            folder, factors, self._lora.scale, model, saved_tensors=whole_tensors
        )

    def write_whole(
        self, folder: Path, model: ModelParts, truncations: Mapping[str, Truncation] | None = None
    ) -> Path:
        """Write a whole model: the base plus the model's updates, or plus their approximations ``truncations``."""
        updates: dict[str, Pair | Tensor]
        if truncations is None:
            updates = {n: model.compute_update(n, self._lora.scale) for n in model.factors}
        else:
            updates = {n: t.pair for n, t in truncations.items()}
        merged_model = self._merge_updates(updates, model.head | model.saved_params, model.token_rows)
        return save_model(folder, merged_model, self._loaded.tokenizer)

    def write_on_common(self, folder: Path, name: str, model: ModelParts) -> list[Path]:
        """Write a model whose base weights all changed: the new base once for all clients, and an adapter for it.

        A model whose base differs from the first one written is written whole.
        """
        paths = []
        if not self._common_updates:
            merged_model = self._merge_updates(model.weight_updates)
            paths.append(save_model(folder / COMMON_BASE_FOLDER, merged_model, self._loaded.tokenizer))
            self._common_updates = model.weight_updates
            self._common_digest = combine_file_digests(digest_base_files(folder / COMMON_BASE_FOLDER))
        elif any(not torch.equal(w, self._common_updates[n]) for n, w in model.weight_updates.items()):
            return [self.write_whole(folder / name, model)]
        base = str((folder / COMMON_BASE_FOLDER).resolve())
        adapter_folder = self._write_adapter_files(
            folder / name, model.factors, self._lora.scale, model, base=(base, self._common_digest)
        )
        return [*paths, adapter_folder]

    def _merge_updates(
        self,
        updates: Mapping[str, Pair | Tensor],
        saved_tensors: Params | None = None,
        token_rows: Params | None = None,
    ) -> Any:
        """Copy the base as it is in the files, add updates to its weights, and replace some modules and rows of tokens."""
        memory_updates = {n: self._convert_to_memory(n, update) for n, update in updates.items()}
        merged_model = merge_update(self._model, self._lora.layers, memory_updates, saved_tensors)
        if self._loaded.use_cache is not None:
            merged_model.config.use_cache = self._loaded.use_cache
        with torch.no_grad():
            for layer, rows in (token_rows or {}).items():
                weight = merged_model.get_submodule(layer).weight
                weight[self._token_layers[layer]] = rows.to(weight)
        return merged_model

    def _convert_to_memory(self, name: str, update: Pair | Tensor) -> Pair | Tensor:
        """Convert an update of the weight in the files to an update of the weight in memory."""
        if name not in self._initial_factors:
            return update
        initial_pair, scale = self._initial_factors[name], self._lora.scale
        if isinstance(update, Pair):
            return _add_pairs(update, initial_pair, scale)
        return update + initial_pair.dense().float() * scale

    def _write_adapter_files(
        self,
        folder: Path,
        factors: Factors,
        scale: float,
        model: ModelParts,
        *,
        base: tuple[str, str] | None = None,
        saved_tensors: Params | None = None,
    ) -> Path:
        adapter_files.write_adapter(
            folder,
            factors,
            scale,
            self._model.peft_config[ADAPTER],
            self._lora.layers,
            *(base or (self.base_name, self._loaded.digest)),
            head=model.head,
            saved_tensors=(saved_tensors or {}) | model.saved_params,
            rows={name_rows(self._token_layers)[layer]: rows for layer, rows in model.token_rows.items()},
            round=model.round,
            client_id=model.client_id,
        )
        _add_metadata(folder, self._metadata)
        if self._loaded.token_ids:
            # the base's own tokenizer lacks the new tokens
            self._loaded.tokenizer.save_pretrained(folder)
        return folder


def _add_pairs(pair: Pair, other: Pair, factor: float) -> Pair:
    """Return factors of the sum of two products, pair + factor · other."""
    return Pair(torch.cat([pair.b, other.b * factor], 1), torch.cat([pair.a, other.a]))


def _add_metadata(folder: Path, entries: Mapping[str, Any]) -> None:
    """Add entries to the file ``fedlowrank.json`` of a folder."""
    metadata = json.loads((folder / METADATA_FILE).read_text(encoding="utf-8"))
    (folder / METADATA_FILE).write_text(
        json.dumps({**metadata, **entries}, indent=2, sort_keys=True), encoding="utf-8"
    )
