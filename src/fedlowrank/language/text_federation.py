"""A federation of language models from an experiment's tables: one frozen base, clients with LoRA factors."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ..adapters.lora.adapted_layers import PEFT_PREFIX, is_principal_initial
from ..adapters.lora.rank_limits import warn_lowered_ranks
from ..core.arguments.bounds import check_bounds, check_minimum
from ..core.errors import ConfigError, DataError, TaskError
from ..core.key import Key
from ..core.learning.preference_losses import RESPONSE_MASK
from ..core.tree import Params
from ..data.dataset import Dataset
from ..data.text.text_formats import choose_format, hold_messages, render
from ..data.text.text_records import Instruction, Labeled, Texts, TokenLabeled
from ..data.text.tokens import TextSettings, tokenize
from ..models.architecture import Architecture
from ..models.stateless import exchange_slots, tied_names
from ..results.records import RoundRecord
from ..storage.digest import digest_of
from .artifacts import METADATA
from .base_model import LanguageBase, LoadedBase, check_positions, keep_in_float32, load_base
from .embedding_noise import add_embedding_noise
from .export.export_settings import ExportSettings
from .export.model_card import CardModel, RunFacts, format_card, gather_facts, lora_ranks_of_clients
from .export.server_model import find_server_model
from .folders import COMMON, AdapterFolders, ModelParts
from .lora.peft_adapter import ADAPTER, attach_adapter
from .lora.peft_config import lora_config
from .lora.saved_modules import find_saved_modules
from .lora.start_adapter import WEIGHTS, fields_with_start, load_start
from .objectives.preference_pairs import score_pairs
from .objectives.text_embeddings import embed_pairs
from .packed_attention import use_packed_attention
from .sample_answers import sample_answers
from .trl.trl_trainer import check_trainer, find_trainer

if TYPE_CHECKING:
    from ..rounds.run import Run

NAME = "language"
"""Name of the one architecture."""

_RESULT_FIELDS = (
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern"),
    *("use_rslora", "lora_dropout", "fan_in_fan_out", "init_lora_weights"),
)
"""Fields of ``peft.LoraConfig`` on which results depend; the layers are told by the names of the factors."""

INSTRUCTION = "{instruction}"
"""Stands for the instruction in the prompt that ``fedlowrank.json`` holds."""


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
        neftune: α of the noise on embeddings while training (:mod:`.embedding_noise`); 0 for none.
        autocast: bfloat16 or float16: type in which matrices are multiplied, whatever the type of the
            weights; none leaves it.
        trainer: own, the steps of this package; trl, those of TRL's ``SFTTrainer``; or ``module:function`` of yours that makes
            a ``transformers.Trainer`` of a :class:`~fedlowrank.language.trl.trl_trainer.TrainingPass`.
        trainer_args: fields of ``trl.SFTConfig`` for such a trainer, such as ``{optim = "adamw_8bit"}``.
        prompts: questions that the models of a simulation answer before the first and after the last round, for the report.
        answer_tokens: of such an answer at most.
    """

    format: Literal["auto", "alpaca", "plain", "verbatim", "chat", "none"] = "auto"
    context: int = 256
    loss_on: Literal["response", "assistant", "last", "all"] = "response"
    packing: bool = False
    truncate: Literal["right", "left", "turns", "refuse"] = "right"
    system: Literal["template", "merge"] = "template"
    by_length: bool = False
    neftune: float = 0.0
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    trainer: str = "own"
    trainer_args: Mapping[str, Any] = field(default_factory=dict)
    prompts: tuple[str, ...] = ()
    answer_tokens: int = 48

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, {"neftune": ">= 0"}, "language")
        if self.packing and self.task != "causal":
            raise ConfigError(
                f"language.packing joins texts of a causal model, and language.task is {self.task!r}. Set packing to false."
            )
        check_minimum("language.answer_tokens", self.answer_tokens, 1)
        check_trainer(self.trainer, self.trainer_args, "language")
        if self.prompts and self.task != "causal":
            raise ConfigError(
                f"language.prompts are answered by a causal model, and language.task is {self.task!r}. Leave prompts out"
            )

    @property
    def text(self) -> TextSettings:
        """How texts become tokens."""
        return TextSettings(self.format, self.context, self.loss_on, self.packing, self.truncate, self.system)


@dataclass(frozen=True)
class Language:
    """A language model: its base with the tokenizer, and the base as PEFT wraps it.

    Attributes:
        settings: of the section ``[language]``.
        loaded: the base with its tokenizer.
        model: a ``peft.PeftModel`` of the base.
        export: of the section ``[export]``: how models are written for other programs.
        start: folder of the adapter that the factors start from, or None.
    """

    settings: LanguageSettings
    loaded: LoadedBase
    model: Any
    export: ExportSettings = ExportSettings()
    start: Path | None = None

    @cached_property
    def files(self) -> dict[str, str]:
        """Digest of each file that all machines must have: those of the base and of the start."""
        found = dict(self.loaded.files)
        if self.start is not None:
            found[f"start/{WEIGHTS}"] = digest_of((self.start / WEIGHTS).read_bytes())
        return found

    def describe(self) -> dict[str, Any]:
        """What a resumed run must find unchanged."""
        adapter = {n: str(getattr(self.model.peft_config[ADAPTER], n)) for n in _RESULT_FIELDS}
        return {"files": self.files, "adapter": adapter}

    def architecture(self, example: Mapping[str, Tensor]) -> Architecture:
        """The code, with the base frozen inside; of pairs it makes two scores or embeddings."""
        head = PEFT_PREFIX + self.loaded.head[0] if len(self.loaded.head) == 1 else None
        made = Architecture(NAME, self.model, dict(example), head)
        made.declare_repeatable()
        if RESPONSE_MASK in example:
            made.readout = score_pairs
        elif self.settings.task == "embedding":
            made.readout = embed_pairs
        if self.settings.autocast != "none":
            made.autocast = getattr(torch, self.settings.autocast)
        made.pass_trainer = find_trainer(
            self.settings.trainer, self.settings.trainer_args, self.loaded.tokenizer, self.settings.autocast
        )
        return made

    def answer(self, run: Run) -> list[dict[str, Any]]:
        """Answers to the prompts of the section ``[language]``; see :func:`.sample_answers.sample_answers`."""
        prompts, tokens = self.settings.prompts, self.settings.answer_tokens
        if not prompts:
            return []
        template = self.prompt_template or INSTRUCTION

        def write_prompt(question: str) -> str:
            return template.replace(INSTRUCTION, question)

        return sample_answers(
            run, prompts, self.live, self.loaded.tokenizer, write_prompt, tokens, self.asks_by_template
        )

    def write(
        self,
        run: Run,
        folder: Path,
        settings: ExportSettings | None = None,
        records: Sequence[RoundRecord] = (),
    ) -> list[Path]:
        """Write the models of the server and of every client, as they stand, to folders of their own.

        By default each is an adapter of the base, truncated to the largest rank of a client if it is of a higher
        one. In the exact form layers whose base weight changed are stored whole in the adapter's folder. If the
        whole base changed (FLoRA and FedEx-LoRA), it is written once, to ``base``, and clients are adapters for it.

        Args:
            run: of this federation.
            folder: gets ``server`` and ``client_0000``, ``client_0001``, ..., and ``server_merged``.
            settings: in which form; None for those of the experiment without ``merged``.
            records: of the rounds of the run, for the metrics of the model cards.

        Returns:
            The folders written.

        Raises:
            TaskError: if a merged model is asked for and the method has no model of the server.
        """
        settings = replace(self.export, merged=False) if settings is None else settings
        folders = self._folders(settings)
        largest, own = folders.lora.largest_rank, int(self.model.peft_config[ADAPTER].r)
        ranks = lora_ranks_of_clients(run, largest, own)
        # what is added to the weights of the files is the end less the start, of twice the rank
        most = 2 * max(ranks) if folders.lora.principal else max(ranks)
        rank = most if settings.rank is None else settings.rank
        if settings.rank is not None and settings.form == "adapters":
            shapes = folders.lora.shapes
            warn_lowered_ranks("adapters", dict.fromkeys(shapes, rank), shapes)
        written: list[Path] = []

        def write(name: str, model: ModelParts, merged: bool = False) -> None:
            if settings.form == "adapters":
                parts = folders.truncate(model, rank)
                made = [folders.write_adapter(folder / name, model, parts)]
            else:
                parts, made = None, self._write_exact(folders, folder, name, model)
            made += [folders.write_whole(folder / f"{name}_merged", model, parts)] if merged else []
            if settings.card:
                for path in made:
                    self._write_card(path, folders.base_name, model, facts)
            written.extend(made)

        facts = gather_facts(run, ranks, records)
        server = find_server_model(run)
        if server is not None:
            write("server", folders.model(server, run.round, None), settings.merged)
        elif settings.merged:
            raise TaskError(f"merged: {run.method.title} has no model of the server to write as a whole")
        for info in run.federation.infos:
            write(f"client_{info.id:04d}", folders.model(run.personal(info), run.round, info.id))
        return written

    def _folders(self, settings: ExportSettings) -> AdapterFolders:
        metadata: dict[str, Any] = {"classes": self.classes} if self.classes else {}
        if self.settings.task == "causal":
            metadata = {"prompt_format": self.settings.format, "prompt": self.prompt_template}
        return AdapterFolders(self.model, self.loaded, settings.base_model, metadata)

    @property
    def asks_by_template(self) -> bool:
        """Whether the chat template writes the prompts, as it did in training; else it is no part of their format."""
        return self.settings.format == "chat"

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of their numbers; empty without a head of classes."""
        return tuple(self.loaded.model.config.id2label.values()) if self.settings.has_head else ()

    @property
    def prompt_template(self) -> str | None:
        """The prompt of training with ``{instruction}`` for the instruction; None for the chat template."""
        if self.asks_by_template:
            return None
        if self.settings.format == "none":
            return INSTRUCTION
        return render(Instruction(INSTRUCTION, ""), self.settings.format)[0]

    def _write_exact(self, folders: AdapterFolders, folder: Path, name: str, model: ModelParts) -> list[Path]:
        """Write one model without truncation, and the base that it is for if that changed."""
        if model.client is not None and len(model.weight_updates) == len(model.factors):
            return folders.write_on_common(folder, name, model)
        return [folders.write_exact(folder / name, model)]

    def _write_card(self, path: Path, base: str, model: ModelParts, facts: RunFacts) -> None:
        """Write the model card of a folder."""
        is_adapter, whole = (path / METADATA).is_file(), tuple[str, ...]()
        stored = json.loads((path / METADATA).read_text()) if is_adapter else {}
        if is_adapter:
            # that of adapters for a base that changed lies beside them
            config = json.loads((path / "adapter_config.json").read_text())
            base = config["base_model_name_or_path"]
            saved = config["modules_to_save"] or ()
            whole = tuple(name for name in (*model.weight_updates, *self.loaded.saved) if name in saved)
        client = None if path.name == COMMON else model.client
        truncation = stored.get("truncation")
        task, prompt = self.settings.task, self.prompt_template if self.settings.task == "causal" else None
        rank, pad = stored.get("rank"), self.loaded.model.config.pad_token_id
        card = CardModel(base, client, is_adapter, task, prompt, rank, truncation, whole, self.classes, pad)
        (path / "README.md").write_text(format_card(card, facts))

    def write_one(self, folder: Path, params: Params, round: int, client: int | None) -> Path:
        """Write one model: as an adapter of at most ``export.rank`` if that is set, or else without truncation.

        Without truncation it is a whole model if all its base weights moved.
        """
        folders = self._folders(self.export)
        model = folders.model(params, round, client)
        if self.export.rank is None:
            return folders.write_exact(folder, model)
        return folders.write_adapter(folder, model, folders.truncate(model, self.export.rank))

    @contextlib.contextmanager
    def live(self, params: Params) -> Iterator[Any]:
        """The model with these parameters in place of its own, to generate with; none of them is the base."""
        slots, tied = [], tied_names(self.model)
        for name, value in params.items():
            parameter = nn.Parameter(value.detach(), requires_grad=False)
            for each in (name, *tied.get(name, ())):
                path, _, own = each.rpartition(".")
                table: dict[str, Any] = self.model.get_submodule(path)._parameters
                slots.append((table, own, parameter))
        with exchange_slots(slots):
            yield self.model


def load_with_texts(
    texts: Texts,
    settings: LanguageSettings,
    lora: Mapping[str, Any],
    key: Key,
    classes: Sequence[str] = (),
) -> tuple[Dataset, Language]:
    """Tokens of texts, and the model that learns them; see :func:`load_language_model`.

    Without ``classes`` they are those that the texts have.
    """
    _check_task(texts, settings)
    if hold_messages(texts) and settings.format not in ("auto", "chat"):
        raise ConfigError(
            f"language.format is {settings.format!r}, but the rows are lists of messages, which the chat template of the "
            "tokenizer writes. Set it to 'chat', or leave it out."
        )
    names = tuple(classes) or _classes(texts)
    settings = replace(settings, format=choose_format(texts, settings.format))
    made = load_language_model(settings, lora, key, names)
    check_positions(made.loaded.model, settings.context)
    dataset = tokenize(texts, made.loaded.tokenizer, settings.text)
    _check_tokens(dataset, made.loaded)
    assert dataset.classes == names
    return replace(dataset, notes=(*made.loaded.notes, *dataset.notes)), made


def _check_tokens(dataset: Dataset, loaded: LoadedBase) -> None:
    """Refuse tokens that the model has no embedding for."""
    known = loaded.model.get_input_embeddings().weight.shape[0]
    if len(loaded.tokenizer) <= known:
        return
    for part in (dataset.train, dataset.test):
        inputs: Any = None if part is None else part.inputs
        for name, tokens in inputs.items() if isinstance(inputs, dict) else ():
            if name.endswith("input_ids") and len(tokens) and (most := int(tokens.max())) >= known:
                token = loaded.tokenizer.convert_ids_to_tokens(most)
                raise DataError(
                    f"the texts have the token {token!r} ({most}), but the model has {known} embeddings: the tokenizer was "
                    "given tokens that the model does not know. Resize the model's embeddings and save it, or use its own "
                    "tokenizer"
                )


def load_language_model(
    settings: LanguageSettings,
    lora: Mapping[str, Any],
    key: Key,
    classes: tuple[str, ...],
) -> Language:
    """The model without texts; of a causal model ``classes`` are empty.

    Args:
        settings: the base and the form of texts.
        lora: fields of ``peft.LoraConfig``; and ``start``, the folder of an adapter to start from, or None.
        key: of new weights and of A.
        classes: their names.

    Raises:
        FedlowrankError: if base and adapter do not fit.
    """
    loaded = load_base(settings, classes, key / "base")
    if settings.packing:
        use_packed_attention(loaded.model)
    if settings.neftune:
        add_embedding_noise(loaded.model, settings.neftune)
    fields = dict(lora)
    start = fields.pop("start", None)
    folder = None if start is None else Path(os.path.expandvars(start)).expanduser()
    if folder is not None and is_principal_initial(fields.get("init_lora_weights")):
        raise ConfigError(
            f"lora: init_lora_weights = {fields['init_lora_weights']!r} and lora.start are two starts of the same factors; leave "
            "one of them out"
        )
    if folder is not None:
        fields = fields_with_start(folder, fields)
    config = lora_config(fields)
    loaded = replace(
        loaded, saved=find_saved_modules(loaded.model, config.modules_to_save or (), loaded.head)
    )
    keep_in_float32(loaded.model, loaded.saved)
    model = attach_adapter(loaded.model, config, key / "adapter", loaded.head, loaded.saved)
    if folder is not None:
        load_start(model, folder)
    loaded.model.config.use_cache = False
    return Language(settings, loaded, model, start=folder)


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
    tasks = {"classes": "classification", "token_classes": "token_classification", "pairs": "embedding"}
    task = tasks.get(kind, "causal")
    if kind == "preferences" and settings.task != "causal":
        raise ConfigError(
            f"language.task is {settings.task!r}, but the rows are pairs of responses. Set it to 'causal'."
        )
    if "embedding" in (task, settings.task) and task != settings.task:
        what = "pairs of texts" if kind == "pairs" else f"{kind} and no pairs of texts ('anchor', 'positive')"
        raise ConfigError(f"language.task is {settings.task!r}, but the rows are {what}. Set it to {task!r}.")
    if task != settings.task and "causal" not in (task, settings.task):
        raise ConfigError(f"language.task is {settings.task!r}, but the rows are {kind}. Set it to {task!r}.")
