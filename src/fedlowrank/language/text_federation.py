"""A federation of language models from an experiment's tables: one frozen base, clients with LoRA factors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..adapters.lora.adapted_layers import PEFT_PREFIX
from ..core.errors import ConfigError
from ..core.key import Key
from ..core.tree import Params
from ..data.dataset import Dataset
from ..data.text.text_formats import choose_format
from ..data.text.text_records import Labeled, Texts, TokenLabeled
from ..data.text.tokens import TextSettings, tokenize
from ..models.architecture import Architecture
from ..models.stateless import exchange_slots
from .base_model import LanguageBase, LoadedBase, load_base
from .folders import AdapterFolders, ModelParts
from .packed_attention import use_packed_attention
from .peft_adapter import attach_adapter
from .peft_config import lora_config

if TYPE_CHECKING:
    from ..rounds.run import Run

NAME = "language"
"""Name of the one architecture."""


@dataclass(frozen=True)
class LanguageSettings(LanguageBase):
    """Which language model is adapted, how texts become tokens, and in which precision it computes.

    Attributes:
        format: how an instruction is written: auto (alpaca, or what the rows call for), alpaca, plain,
            verbatim (prompt and response, nothing between them), chat (the tokenizer's template) or none.
            Conversations are always written by the template.
        context: tokens of an example at most.
        loss_on: response or assistant: the response, or all turns of the assistant; last: its last turn alone;
            all: the prompt too.
        packing: several short samples in one row, each attending to itself alone.
        truncate: what happens to longer samples: right or left, which side is cut off; turns, whole turns are
            left out from the beginning, the system's stays; refuse, an error. The notes count them by client.
        system: of conversations: template, the system's turn is written by the template; merge, its text is
            put before the first user's, for templates without such a role.
        by_length: training batches of examples of like length.
        autocast: bfloat16 or float16: type in which matrices are multiplied, whatever the type of the
            weights; none leaves it.
    """

    format: Literal["auto", "alpaca", "plain", "verbatim", "chat", "none"] = "auto"
    context: int = 256
    loss_on: Literal["response", "assistant", "last", "all"] = "response"
    packing: bool = False
    truncate: Literal["right", "left", "turns", "refuse"] = "right"
    system: Literal["template", "merge"] = "template"
    by_length: bool = False
    autocast: Literal["none", "bfloat16", "float16"] = "none"

    @property
    def text(self) -> TextSettings:
        """How texts become tokens."""
        return TextSettings(self.format, self.context, self.loss_on, self.packing, self.truncate, self.system)


@dataclass(frozen=True)
class Language:
    """A language model: its base with the tokenizer, and the base as PEFT wraps it."""

    settings: LanguageSettings
    loaded: LoadedBase
    model: Any

    def describe(self) -> dict[str, Any]:
        """What a resumed run must find unchanged."""
        return {"base": self.loaded.name, "digest": self.loaded.digest}

    def architecture(self, example: Mapping[str, Tensor]) -> Architecture:
        """The code, with the base frozen inside."""
        head = PEFT_PREFIX + self.loaded.head[0] if len(self.loaded.head) == 1 else None
        made = Architecture(NAME, self.model, dict(example), head)
        if self.settings.autocast != "none":
            made.autocast = getattr(torch, self.settings.autocast)
        return made

    def write(self, run: Run, folder: Path, merged: bool = False, rank: int | None = None) -> list[Path]:
        """Standard adapter folders of the server and of every client, as they stand.

        Layers whose base weight changed are stored whole in the adapter's folder. If the whole base changed
        (FLoRA and FedEx-LoRA, merged), it is written once, to ``base``, and clients are adapters for it.

        Args:
            run: of this federation.
            folder: gets ``server`` and ``client_0000``, ``client_0001``, ...
            merged: write the server's whole model too, to ``server_merged``.
            rank: write every model as the best adapter of this rank for the initial base.

        Returns:
            The folders written.
        """
        folders, written = AdapterFolders(self.model, self.loaded), []

        def write(name: str, model: ModelParts) -> None:
            if rank is not None:
                written.append(folders.write_truncated(folder / name, model, rank))
            elif model.client is not None and len(model.weight_updates) == len(model.factors):
                written.extend(folders.write_on_common(folder, name, model))
            else:
                written.append(folders.write(folder / name, model))

        for info in run.federation.infos:
            made = run.local_model(info)
            if info.id == 0 and made.server is not None:
                server = folders.model(made.server, run.round, None)
                write("server", server)
                if merged:
                    written.append(folders.write_whole(folder / "server_merged", server))
            write(f"client_{info.id:04d}", folders.model(made.personal(), run.round, info.id))
        return written

    def write_one(self, folder: Path, params: Params, round: int, client: int | None) -> Path:
        """The adapter folder of one model, or the whole model where all its base weights moved."""
        folders = AdapterFolders(self.model, self.loaded)
        return folders.write(folder, folders.model(params, round, client))

    @contextlib.contextmanager
    def live(self, params: Params) -> Iterator[Any]:
        """The model with these parameters in place of its own, to generate with; none of them is the base."""
        slots = []
        for name, value in params.items():
            path, _, own = name.rpartition(".")
            table: dict[str, Any] = self.model.get_submodule(path)._parameters
            slots.append((table, own, nn.Parameter(value.detach(), requires_grad=False)))
        with exchange_slots(slots):
            yield self.model


def load_with_texts(
    texts: Texts, settings: LanguageSettings, lora: Mapping[str, Any], key: Key, classes: Sequence[str] = ()
) -> tuple[Dataset, Language]:
    """Tokens of texts, and the model that learns them; see :func:`load_language_model`.

    Without ``classes`` they are those that the texts have.
    """
    _check_task(texts, settings)
    names = tuple(classes) or _classes(texts)
    settings = replace(settings, format=choose_format(texts, settings.format))
    made = load_language_model(settings, lora, key, names)
    dataset = tokenize(texts, made.loaded.tokenizer, settings.text)
    assert dataset.classes == names
    return replace(dataset, notes=(*made.loaded.notes, *dataset.notes)), made


def load_language_model(
    settings: LanguageSettings, lora: Mapping[str, Any], key: Key, classes: tuple[str, ...]
) -> Language:
    """The model without texts; of a causal model ``classes`` are empty.

    Args:
        settings: the base and the form of texts.
        lora: fields of ``peft.LoraConfig``.
        key: of new weights and of A.
        classes: their names.

    Raises:
        FedlowrankError: if base and adapter do not fit.
    """
    loaded = load_base(settings, classes, key / "base")
    if settings.packing:
        use_packed_attention(loaded.model)
    model = attach_adapter(loaded.model, lora_config(dict(lora)), key / "adapter", loaded.head)
    loaded.model.config.use_cache = False
    return Language(settings, loaded, model)


def _classes(texts: Texts) -> tuple[str, ...]:
    """Names of the classes in the order in which tokenize numbers them."""
    records = [record for part in texts.parts for record in part]
    labels = {record.label for record in records if isinstance(record, Labeled)}
    labels |= {label for record in records if isinstance(record, TokenLabeled) for label in record.labels}
    if texts.classes or not labels:
        return texts.classes
    numbers = [label for label in labels if isinstance(label, int)]
    return tuple(map(str, range(max(numbers) + 1))) if numbers else tuple(sorted(map(str, labels)))


def _check_task(texts: Texts, settings: LanguageSettings) -> None:
    """Reject texts of another task than the model's."""
    kind = texts.kind
    task = {"classes": "classification", "token_classes": "token_classification"}.get(kind, "causal")
    if task != settings.task and "causal" not in (task, settings.task):
        raise ConfigError(f"language.task is {settings.task!r}, but the rows are {kind}. Set it to {task!r}.")
