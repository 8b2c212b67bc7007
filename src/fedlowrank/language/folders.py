"""Which folders the models of a run become: adapters, adapters with some whole layers, or whole models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..adapters.lora.adapted_layers import PEFT_PREFIX
from ..adapters.lora.lora_factors import LoRA, find_lora
from ..core.tree import Params
from ..linalg.pair import Factors, Pair
from ..linalg.truncation import Truncation, relative_error, truncate_update
from ..models.stateless import tied_names
from ..storage.base_files import combine_file_digests, digest_base_files
from . import artifacts
from .artifacts import METADATA, merge_update, save_model
from .base_model import LoadedBase
from .lora.peft_adapter import ADAPTER

COMMON = "base"
"""Folder of a base that moved, beside the adapters that are for it."""


@dataclass(frozen=True)
class ModelParts:
    """One model, taken apart.

    Attributes:
        factors: of every layer; their scale is the slot's.
        weight_updates: what was added to the base's weights ``[d, k]``, by layer; empty for a plain adapter.
        head: parameters of the head by their names in the base.
        saved: parameters of further modules that are trained whole, likewise.
        round: rounds completed.
        client: whose it is, or None for the server's.
    """

    factors: Factors
    weight_updates: dict[str, Tensor]
    head: Params
    saved: Params
    round: int
    client: int | None

    def update(self, name: str, scale: float) -> Pair | Tensor:
        """All that is added to the weight of a layer."""
        pair = self.factors[name]
        if name in self.weight_updates:
            return self.weight_updates[name] + pair.dense().float() * scale
        return Pair(pair.b * scale, pair.a)


class AdapterFolders:
    """Writes the models of one language model's clients and server.

    Args:
        model: the base with LoRA factors (``peft.PeftModel``).
        loaded: the base's name, digest, head and tokenizer.
        base_name: of the base in adapter_config.json; None for the name by which it was loaded.
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
        # what the factors began at, which is part of the weights of the files and not of those in memory
        self._taken: Factors = self._lora.trained if self._lora.principal else {}
        self._common: dict[str, Tensor] = {}
        self._common_digest = ""

    def model(self, params: Params, round: int, client: int | None) -> ModelParts:
        """A model from its parameters; those that it lacks are the wrapped model's own."""
        own = dict(self._model.named_parameters(remove_duplicate=False))
        tied = {
            more: params[n] for n, others in tied_names(self._model).items() if n in params for more in others
        }
        everything = {name: p.detach() for name, p in (own | tied | params).items()}
        factors, weight_updates = {}, {}
        for name, layer in self._lora.layers.items():
            factors[name] = layer.read_pair(everything)
            if name in self._taken:
                factors[name] = _add_pair(factors[name], self._taken[name], -1.0)
            if layer.weight in params:
                update = everything[layer.weight].float() - self._lora.base[layer.weight].float()
                weight_updates[name] = (update.mT if layer.transposed else update).reshape(layer.shape)

        def of(names: Sequence[str]) -> Params:
            modules = tuple(f"{PEFT_PREFIX}{module}." for module in names)
            return {n.removeprefix(PEFT_PREFIX): everything[n] for n in own if n.startswith(modules)}

        head, saved = of(self._loaded.head), of(self._loaded.saved)
        return ModelParts(factors, weight_updates, head, saved, round, client)

    @property
    def lora(self) -> LoRA:
        """The adapted layers of the base."""
        return self._lora

    def truncate(self, model: ModelParts, rank: int) -> dict[str, Truncation] | None:
        """The best approximation of a model's updates by factors of a rank, by layer.

        Returns:
            None if the model is an adapter of at most this rank already.
        """
        if not model.weight_updates and all(pair.rank <= rank for pair in model.factors.values()):
            return None
        return {n: truncate_update(model.update(n, self._lora.scale), rank) for n in model.factors}

    def write_adapter(self, folder: Path, model: ModelParts, parts: Mapping[str, Truncation] | None) -> Path:
        """Write a model as a plain adapter of the base; ``fedlowrank.json`` says what it lost.

        Args:
            folder: made if it does not exist. It is returned.
            model: the model.
            parts: of :meth:`truncate`; None for a model that is an adapter already.
        """
        if parts is None:
            self._adapter(folder, model.factors, self._lora.scale, model)
        else:
            self._adapter(folder, {n: t.pair for n, t in parts.items()}, 1.0, model)
        errors = {
            "rank": json.loads((folder / METADATA).read_text())["rank"],
            "error": 0.0 if parts is None else relative_error(parts.values()),
            "layers": {n: 0.0 if parts is None else parts[n].error for n in model.factors},
        }
        _add_metadata(folder, {"truncation": errors})
        return folder

    def write_exact(self, folder: Path, model: ModelParts) -> Path:
        """Write a model without truncation.

        A layer whose weight changed is stored whole, every other one as factors. If all weights changed it is
        a whole model.
        """
        if len(model.weight_updates) == len(model.factors):
            return self.write_whole(folder, model)
        whole: Params = {}
        for name in model.weight_updates:
            layer = self._lora.layers[name]
            update = self._in_memory(name, model.update(name, self._lora.scale))
            weight = self._lora.base[layer.weight].detach()
            assert isinstance(update, Tensor)
            module = self._model.get_submodule(layer.weight.removesuffix(".weight"))
            whole |= {f"{name}.{own}": value for own, value in module.state_dict().items()}
            whole[f"{name}.weight"] = (weight.float() + layer.reshape_update(update)).to(weight.dtype)
        factors = {n: p for n, p in model.factors.items() if n not in model.weight_updates}
        return self._adapter(folder, factors, self._lora.scale, model, whole=whole)

    def write_whole(
        self, folder: Path, model: ModelParts, parts: Mapping[str, Truncation] | None = None
    ) -> Path:
        """Write a whole model: the base plus the model's updates, or plus their approximations ``parts``."""
        update: dict[str, Pair | Tensor]
        if parts is None:
            update = {n: model.update(n, self._lora.scale) for n in model.factors}
        else:
            update = {n: t.pair for n, t in parts.items()}
        made = self._merge(update, model.head | model.saved)
        return save_model(folder, made, self._loaded.tokenizer)

    def write_on_common(self, folder: Path, name: str, model: ModelParts) -> list[Path]:
        """Write a model whose whole base moved: the base once for all clients, and an adapter for it.

        A model that shares its base with no other is written whole.
        """
        written = []
        if not self._common:
            made = self._merge(model.weight_updates)
            written.append(save_model(folder / COMMON, made, self._loaded.tokenizer))
            self._common = model.weight_updates
            self._common_digest = combine_file_digests(digest_base_files(folder / COMMON))
        elif any(not torch.equal(w, self._common[n]) for n, w in model.weight_updates.items()):
            return [self.write_whole(folder / name, model)]
        base = str((folder / COMMON).resolve())
        own = self._adapter(
            folder / name, model.factors, self._lora.scale, model, base=(base, self._common_digest)
        )
        return [*written, own]

    def _merge(self, updates: Mapping[str, Pair | Tensor], whole: Params | None = None) -> Any:
        """A copy of the base of the files with updates of its weights added, and some modules replaced."""
        found = {n: self._in_memory(n, one) for n, one in updates.items()}
        return merge_update(self._model, self._lora.layers, found, whole)

    def _in_memory(self, name: str, update: Pair | Tensor) -> Pair | Tensor:
        """An update of a weight of the files as one of the weight in memory."""
        if name not in self._taken:
            return update
        taken, scale = self._taken[name], self._lora.scale
        if isinstance(update, Pair):
            return _add_pair(update, taken, scale)
        return update + taken.dense().float() * scale

    def _adapter(
        self,
        folder: Path,
        factors: Factors,
        scale: float,
        model: ModelParts,
        *,
        base: tuple[str, str] | None = None,
        whole: Params | None = None,
    ) -> Path:
        artifacts.write_adapter(
            folder,
            factors,
            scale,
            self._model.peft_config[ADAPTER],
            self._lora.layers,
            *(base or (self.base_name, self._loaded.digest)),
            head=model.head,
            whole=(whole or {}) | model.saved,
            round=model.round,
            client=model.client,
        )
        _add_metadata(folder, self._metadata)
        return folder


def _add_pair(pair: Pair, other: Pair, factor: float) -> Pair:
    """The factors of a sum of products, pair + factor · other."""
    return Pair(torch.cat([pair.b, other.b * factor], 1), torch.cat([pair.a, other.a]))


def _add_metadata(folder: Path, more: Mapping[str, Any]) -> None:
    """Add entries to ``fedlowrank.json`` of a folder."""
    found = json.loads((folder / METADATA).read_text())
    (folder / METADATA).write_text(json.dumps({**found, **more}, indent=2, sort_keys=True))
