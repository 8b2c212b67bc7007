"""The language model of a federation: one frozen base, its tokenizer, and the LoRA factors that clients train."""

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
from ..data.text.chat.chat_template import find_turn_end
from ..data.text.label_tokens import list_label_classes
from ..data.text.text_formats import choose_format, holds_messages, render_instruction
from ..data.text.text_records import Instruction, Labeled, Texts, TokenLabeled
from ..data.text.tokens import TextSettings, tokenize
from ..models.architecture import Architecture
from ..models.stateless import exchange_slots, tied_names
from ..results.records import RoundRecord
from ..storage.digest import digest_of
from .base_model import (
    HEAD_NOTE,
    LanguageBase,
    LoadedBase,
    check_positions,
    find_end_tokens,
    keep_in_float32,
    load_base,
    stop_at_turn_end,
)
from .embedding_noise import add_embedding_noise
from .export.adapter_folders import COMMON_BASE_FOLDER, AdapterFolders, ModelParts
from .export.client_models import find_single_models
from .export.export_settings import ExportSettings
from .export.model_card import CardModel, RunFacts, format_card, gather_facts, list_lora_ranks
from .export.server_model import find_server_model
from .lora.adapter_mean import average_adapters
from .lora.peft_adapter import ADAPTER, attach_adapter
from .lora.peft_config import make_lora_config
from .lora.saved_modules import find_saved_modules
from .lora.start_adapter import check_adapter_classes, holds_head, load_start, merge_start_fields
from .lora.stored_adapter import COMPARED_FIELDS, CONFIG_FILE, METADATA_FILE, WEIGHTS_FILE, read_adapter
from .objectives.preference_pairs import score_pairs
from .objectives.text_embeddings import embed_pairs
from .packed_attention import use_packed_attention
from .sample_answers import sample_answers
from .trl.trl_trainer import check_trainer, find_trainer

if TYPE_CHECKING:
    from ..rounds.run import Run

ARCHITECTURE_NAME = "language"
"""Name of the architecture that all clients of a language model have."""

_RESULT_FIELDS = (
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern"),
    *("use_rslora", "lora_dropout", "fan_in_fan_out", "init_lora_weights"),
)
"""Fields of ``peft.LoraConfig`` on which results depend. The names of the factors already identify the adapted layers."""

FLOAT16_NOTE = (
    "language.autocast or dtype is float16: the loss is not scaled, so gradients lose digits below 6e-5 and become 0 below 6e-8. "
    "Take bfloat16, or language.trainer = 'trl', which scales the loss"
)
"""Note of a run whose gradients are computed in float16 by this package's own steps."""

INSTRUCTION_PLACEHOLDER = "{instruction}"
"""Stands for the instruction in the prompt that ``fedlowrank.json`` holds."""


@dataclass(frozen=True)
class LanguageSettings(LanguageBase):
    """Settings of the section ``[language]``: the base model, the tokenization of texts, and the precision of computation.

    Attributes:
        format: format of instructions: auto (chat for rows of messages, verbatim for other rows with a prompt and a
            completion or a preference pair, none for plain text, otherwise alpaca; a note names the choice), alpaca,
            plain, verbatim (prompt and response with nothing between them), chat (the tokenizer's template) or none. The
            template always writes conversations.
        context: maximum number of tokens of an example.
        loss_on: tokens that the loss counts. response or assistant: the response, or all turns of the assistant; last:
            the last turn of the assistant only; all: the prompt and the response.
        packing: whether several short samples are put into one row; the tokens of a sample attend to that sample
            only.
        truncate: treatment of samples longer than ``context``. right or left: that side is cut off; turns: the oldest
            turns are dropped, except the system's; refuse: an error is raised. The notes of the data set count the
            truncated samples of each client.
        system: form of the system's turn of a conversation. template: by the chat template; merge: its text is put
            before the text of the first user's turn, for templates without a system role.
        by_length: whether training batches have examples of similar length.
        neftune: strength α of the noise that is added to embeddings in training; 0 for no noise.
        autocast: dtype of matrix products, bfloat16 or float16, for weights of any dtype; none uses the dtype of the
            weights. This package's own steps do not scale the loss for float16, so small gradients are lost; a note says so.
        trainer: trainer of a pass. own: this package takes the gradient steps; trl: TRL's ``SFTTrainer`` takes them, or
            ``DPOTrainer`` for the loss dpo; or ``module:function``: your function, which creates a
            ``transformers.Trainer`` from a :class:`~fedlowrank.language.trl.training_pass.TrainingPass`.
        trainer_args: fields of ``trl.SFTConfig`` or ``trl.DPOConfig`` for such a trainer, such as ``{optim = "adamw_8bit"}``.
        prompts: questions that the models of a simulation answer before the first and after the last round, for the report.
        answer_tokens: maximum number of tokens of such an answer.
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
        """Settings of the tokenization."""
        return TextSettings(self.format, self.context, self.loss_on, self.packing, self.truncate, self.system)


@dataclass(frozen=True)
class Language:
    """A language model: its base, its tokenizer, and the ``PeftModel`` around the base.

    Attributes:
        settings: settings of the section ``[language]``.
        loaded: loaded base with its tokenizer.
        model: base with factors, a ``peft.PeftModel``.
        export: settings of the section ``[export]``, with which models are written for other programs.
        start: folders of the adapters from whose mean the factors start; empty for none.
    """

    settings: LanguageSettings
    loaded: LoadedBase
    model: Any
    export: ExportSettings = ExportSettings()
    start: tuple[Path, ...] = ()

    @cached_property
    def files(self) -> dict[str, str]:
        """Digest of the parts that all machines need: files of the base, weights of the start adapter, and new tokens."""
        digests = dict(self.loaded.files)
        if self.settings.new_tokens:
            digests["language.new_tokens"] = digest_of(json.dumps(self.settings.new_tokens).encode())
        for i, folder in enumerate(self.start):
            name = "start" if len(self.start) == 1 else f"start/{i}"
            digests[f"{name}/{WEIGHTS_FILE}"] = digest_of((folder / WEIGHTS_FILE).read_bytes())
            # other fields, such as the base's path, may differ
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            compared_fields = {n: config.get(n) for n in COMPARED_FIELDS}
            digests[f"{name}/{CONFIG_FILE}"] = digest_of(json.dumps(compared_fields, sort_keys=True).encode())
        return digests

    def describe(self) -> dict[str, Any]:
        """The files and adapter settings that must be unchanged when a run is resumed."""
        adapter = {n: str(getattr(self.model.peft_config[ADAPTER], n)) for n in _RESULT_FIELDS}
        return {"files": self.files, "adapter": adapter}

    @property
    def autocast(self) -> torch.dtype | None:
        """Type of matrix products; None for the type of the weights."""
        name = self.settings.autocast
        return None if name == "none" else getattr(torch, name)

    def architecture(self, example: Mapping[str, Tensor]) -> Architecture:
        """Make the architecture: the module with its frozen base; for pairs of texts it returns two scores or embeddings.

        Args:
            example: inputs of one batch.
        """
        head = PEFT_PREFIX + self.loaded.head[0] if len(self.loaded.head) == 1 else None
        architecture = Architecture(ARCHITECTURE_NAME, self.model, dict(example), head)
        if not self.settings.has_head:
            architecture._no_head = (
                f"a model of language.task = {self.settings.task!r} has no head here, and this method needs one. Choose another "
                "method, such as fedit, fedsa_lora, hetlora or ditto"
            )
        architecture.declare_repeatable()
        if RESPONSE_MASK in example:
            architecture.readout = score_pairs
        elif self.settings.task == "embedding":
            architecture.readout = embed_pairs
        architecture.autocast = self.autocast
        architecture.pass_trainer = find_trainer(
            self.settings.trainer, self.settings.trainer_args, self.loaded.tokenizer, self.settings.autocast
        )
        return architecture

    def answer(self, run: Run) -> list[dict[str, Any]]:
        """Generate answers to the prompts of the section ``[language]``; see :func:`.sample_answers.sample_answers`."""
        prompts, tokens = self.settings.prompts, self.settings.answer_tokens
        if not prompts:
            return []
        template = self.prompt_template or INSTRUCTION_PLACEHOLDER

        def write_prompt(question: str) -> str:
            return template.replace(INSTRUCTION_PLACEHOLDER, question)

        return sample_answers(
            run,
            prompts,
            self.use_parameters,
            self.loaded.tokenizer,
            write_prompt,
            tokens,
            self.uses_chat_template,
        )

    def write(
        self,
        run: Run,
        folder: Path,
        settings: ExportSettings | None = None,
        records: Sequence[RoundRecord] = (),
    ) -> list[Path]:
        """Write the current model of the server and of every client, each to its own folder.

        By default each model is written as an adapter of the base. An adapter whose rank exceeds the largest rank of
        a client is truncated to that rank. In the exact form, layers whose base weight changed are stored whole in the
        adapter's folder. If all base weights changed (FLoRA and FedEx-LoRA), the new base is written once, to ``base``,
        and clients are written as adapters for it. Clients that infer by a mixture of models (FedEM) are left out with a
        warning, because no adapter gives their scores.

        Args:
            run: run of this federation.
            folder: parent folder of ``server`` and ``client_0000``, ``client_0001``, ..., and ``server_merged``.
            settings: form of the export; None for the settings of the experiment without ``merged``.
            records: records of the run's rounds, for the metrics of the model cards.

        Returns:
            The paths of the written folders.

        Raises:
            TaskError: if a merged model is requested and the method has no model of the server.
        """
        settings = replace(self.export, merged=False) if settings is None else settings
        folders = self._folders(settings)
        max_layer_rank, model_rank = folders.lora.largest_rank, int(self.model.peft_config[ADAPTER].r)
        ranks = list_lora_ranks(run, max_layer_rank, model_rank)
        # the update of the stored weights is final minus initial factors, which has twice the rank
        max_update_rank = 2 * max(ranks) if folders.lora.principal else max(ranks)
        rank = max_update_rank if settings.rank is None else settings.rank
        if settings.rank is not None and settings.form == "adapters":
            shapes = folders.lora.shapes
            warn_lowered_ranks("adapters", dict.fromkeys(shapes, rank), shapes)
        written_paths: list[Path] = []

        def write(name: str, model: ModelParts, merged: bool = False) -> None:
            if settings.form == "adapters":
                truncations = folders.truncate(model, rank)
                paths = [folders.write_adapter(folder / name, model, truncations)]
            else:
                truncations, paths = None, self._write_exact(folders, folder, name, model)
            paths += [folders.write_whole(folder / f"{name}_merged", model, truncations)] if merged else []
            if settings.card:
                for path in paths:
                    self._write_card(path, folders.base_name, model, facts)
            written_paths.extend(paths)

        facts = gather_facts(run, ranks, records)
        server = find_server_model(run)
        if server is not None:
            write("server", folders.split_model(server, run.round, None), settings.merged)
        elif settings.merged:
            raise TaskError(f"merged: {run.method.title} has no model of the server to write as a whole")
        for info, params in find_single_models(run, run.federation.infos, "adapter"):
            write(f"client_{info.id:04d}", folders.split_model(params, run.round, info.id))
        return written_paths

    def _folders(self, settings: ExportSettings) -> AdapterFolders:
        metadata: dict[str, Any] = {"classes": self.classes} if self.classes else {}
        if self.prompt_format:
            metadata = {"prompt_format": self.prompt_format, "prompt": self.prompt_template}
        return AdapterFolders(self.model, self.loaded, settings.base_model, metadata)

    @property
    def prompt_format(self) -> str:
        """The format of the training prompts; empty for a model that writes no text."""
        return self.settings.format if self.settings.task == "causal" else ""

    @property
    def uses_chat_template(self) -> bool:
        """Whether the chat template writes the prompts, as it did in training."""
        return self.settings.format == "chat"

    @property
    def end_token(self) -> int | None:
        """Id of the token that ends an answer in training; None without such a token."""
        tokenizer = self.loaded.tokenizer
        end_token: int | None = (
            find_turn_end(tokenizer) if self.uses_chat_template else tokenizer.eos_token_id
        )
        return end_token

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of their indices; empty for a model without a classification head."""
        return tuple(self.loaded.model.config.id2label.values()) if self.settings.has_head else ()

    @property
    def prompt_template(self) -> str | None:
        """The training prompt, with the placeholder ``{instruction}``; None if the chat template writes prompts."""
        if self.uses_chat_template:
            return None
        if self.settings.format == "none":
            return INSTRUCTION_PLACEHOLDER
        return render_instruction(Instruction(INSTRUCTION_PLACEHOLDER, ""), self.settings.format)[0]

    def _write_exact(self, folders: AdapterFolders, folder: Path, name: str, model: ModelParts) -> list[Path]:
        """Write one model without truncation; also write its base if the base changed."""
        if model.client_id is not None and len(model.weight_updates) == len(model.factors):
            return folders.write_on_common(folder, name, model)
        return [folders.write_exact(folder / name, model)]

    def _write_card(self, path: Path, base: str, model: ModelParts, facts: RunFacts) -> None:
        """Write the model card of a folder."""
        is_adapter, whole_layers = (path / METADATA_FILE).is_file(), tuple[str, ...]()
        metadata = json.loads((path / METADATA_FILE).read_text(encoding="utf-8")) if is_adapter else {}
        if is_adapter:
            # a base that changed is stored beside its adapters
            config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
            base = config["base_model_name_or_path"]
            saved_modules = config["modules_to_save"] or ()
            whole_layers = tuple(
                name for name in (*model.weight_updates, *self.loaded.saved_modules) if name in saved_modules
            )
        client_id = None if path.name == COMMON_BASE_FOLDER else model.client_id
        truncation = metadata.get("truncation")
        task, prompt = self.settings.task, self.prompt_template if self.prompt_format else None
        rank, pad_token = metadata.get("rank"), self.loaded.model.config.pad_token_id
        has_turn_end = self.loaded.turn_end is not None
        end_tokens = find_end_tokens(self.loaded.model.generation_config) if has_turn_end else ()
        card = CardModel(
            base,
            client_id,
            is_adapter,
            task,
            prompt,
            rank,
            truncation,
            whole_layers,
            self.classes,
            pad_token,
            bool(model.token_rows),
            tuple(sorted(end_tokens)),
        )
        (path / "README.md").write_text(format_card(card, facts), encoding="utf-8")

    def write_one(self, folder: Path, params: Params, round: int, client: int | None) -> Path:
        """Write one model: truncated to ``export.rank`` if that is set, otherwise without truncation.

        Without truncation the folder holds a whole model if all base weights changed, otherwise an adapter.
        """
        folders = self._folders(self.export)
        model = folders.split_model(params, round, client)
        if self.export.rank is None:
            return folders.write_exact(folder, model)
        return folders.write_adapter(folder, model, folders.truncate(model, self.export.rank))

    @contextlib.contextmanager
    def use_parameters(self, params: Params) -> Iterator[Any]:
        """Put parameters into the model within a block, to generate text; the base is unchanged."""
        slots, tied_aliases = [], tied_names(self.model)
        for name, value in params.items():
            device = self.model.get_parameter(name).device
            parameter = nn.Parameter(value.detach().to(device), requires_grad=False)
            for alias in (name, *tied_aliases.get(name, ())):
                path, _, parameter_name = alias.rpartition(".")
                parameter_table: dict[str, Any] = self.model.get_submodule(path)._parameters
                slots.append((parameter_table, parameter_name, parameter))
        with exchange_slots(slots):
            yield self.model


def load_with_texts(
    texts: Texts,
    settings: LanguageSettings,
    lora: Mapping[str, Any],
    key: Key,
    classes: Sequence[str] = (),
) -> tuple[Dataset, Language]:
    """Load the model and tokenize its training texts; see :func:`load_language_model`.

    Without ``classes`` the class names are read from the texts.
    """
    _check_task(texts, settings)
    if holds_messages(texts) and settings.format not in ("auto", "chat"):
        raise ConfigError(
            f"language.format is {settings.format!r}, but the rows are lists of messages, which the chat template of the "
            "tokenizer writes. Set it to 'chat', or leave it out."
        )
    names, notes = tuple(classes) or _list_classes(texts), tuple[str, ...]()
    if settings.task == "causal" and settings.format == "auto":
        settings = replace(settings, format=choose_format(texts, settings.format))
        notes = (f"language.format = 'auto': the rows call for the format {settings.format!r}",)
    language = load_language_model(settings, lora, key, names)
    if settings.trainer == "own" and torch.float16 in (language.loaded.model.dtype, language.autocast):
        notes += (FLOAT16_NOTE,)
    check_positions(language.loaded.model, settings.context)
    dataset = tokenize(texts, language.loaded.tokenizer, settings.text)
    _check_tokens(dataset, language.loaded)
    assert dataset.classes == names
    return replace(dataset, notes=(*language.loaded.notes, *notes, *dataset.notes)), language


def _check_tokens(dataset: Dataset, loaded: LoadedBase) -> None:
    """Raise DataError if the texts have a token without an embedding in the model."""
    embedding_count = loaded.model.get_input_embeddings().weight.shape[0]
    if len(loaded.tokenizer) <= embedding_count:
        return
    for examples in (dataset.train, dataset.test):
        inputs: Any = None if examples is None else examples.inputs
        for name, tokens in inputs.items() if isinstance(inputs, dict) else ():
            if (
                name.endswith("input_ids")
                and len(tokens)
                and (largest_token := int(tokens.max())) >= embedding_count
            ):
                token = loaded.tokenizer.convert_ids_to_tokens(largest_token)
                raise DataError(
                    f"the texts have the token {token!r} ({largest_token}), but the model has {embedding_count} "
                    "embeddings: the tokenizer was given tokens that the model does not know. Resize the model's embeddings "
                    "and save it, or use its own tokenizer"
                )


def load_language_model(
    settings: LanguageSettings,
    lora: Mapping[str, Any],
    key: Key,
    classes: tuple[str, ...],
) -> Language:
    """Load the base, attach the LoRA adapter, and load the start adapter if there is one.

    Args:
        settings: settings of the base and of the tokenization; for a causal model with another format than ``auto``.
        lora: fields of ``peft.LoraConfig``, and ``start``, the folders of adapters from whose mean the factors
            start.
        key: source of randomness for new weights and for initial factors.
        classes: class names; empty for a causal model.

    Raises:
        FedlowrankError: if base and adapter do not match, or there are no rows that could decide on the format ``auto``.
    """
    if settings.task == "causal" and settings.format == "auto":
        raise ConfigError(
            "language.format is 'auto', and there are no rows here that decide on a format. Set it to that of the training, such "
            "as 'chat', 'alpaca' or 'verbatim'."
        )
    loaded = load_base(settings, classes, key / "base")
    if settings.task == "causal" and settings.format == "chat":
        loaded = stop_at_turn_end(loaded)
    if settings.packing:
        use_packed_attention(loaded.model)
    if settings.neftune and not settings.new_tokens:
        add_embedding_noise(loaded.model, settings.neftune)
    fields = dict(lora)
    folders = tuple(Path(os.path.expandvars(start)).expanduser() for start in fields.pop("start", ()))
    if folders and is_principal_initial(fields.get("init_lora_weights")):
        raise ConfigError(
            f"lora: init_lora_weights = {fields['init_lora_weights']!r} and lora.start are two starts of the same factors; leave "
            "one of them out"
        )
    start = None
    if settings.device_map is not None and is_principal_initial(fields.get("init_lora_weights")):
        raise ConfigError(
            f"lora: init_lora_weights = {fields['init_lora_weights']!r} begins at a part of the base's weights and changes them; "
            "leave it or language.device_map out"
        )
    if folders:
        adapters = [read_adapter(folder) for folder in folders]
        start = adapters[0] if len(adapters) == 1 else average_adapters(adapters, fields)
        fields = merge_start_fields(start, fields)
    config = make_lora_config(fields)
    loaded = replace(
        loaded, saved_modules=find_saved_modules(loaded.model, config.modules_to_save or (), loaded.head)
    )
    keep_in_float32(loaded.model, loaded.saved_modules)
    model = attach_adapter(
        loaded.model, config, key / "adapter", loaded.head, loaded.saved_modules, loaded.token_ids
    )
    if settings.neftune and settings.new_tokens:
        # PEFT calls the layer around the embedding, and not the embedding
        add_embedding_noise(loaded.model, settings.neftune)
    if start is not None:
        check_adapter_classes(start, classes)
        start_notes = load_start(model, start)
        notes = [n for n in loaded.notes if not (n.startswith(HEAD_NOTE) and holds_head(start, loaded.head))]
        loaded = replace(loaded, notes=(*notes, *start_notes))
    return Language(settings, loaded, model, start=folders)


def _list_classes(texts: Texts) -> tuple[str, ...]:
    """List the class names in the order of their indices in ``tokenize``."""
    if texts.kind not in ("classes", "token_classes"):
        return texts.classes
    records = [record for part in texts.parts for record in part]
    labels = [record.label for record in records if isinstance(record, Labeled)]
    labels += [label for record in records if isinstance(record, TokenLabeled) for label in record.labels]
    return list_label_classes(texts, labels) if labels and not texts.classes else texts.classes


def _check_task(texts: Texts, settings: LanguageSettings) -> None:
    """Raise ConfigError if the texts are for another task than the model's."""
    kind = texts.kind
    tasks = {"classes": "classification", "token_classes": "token_classification", "pairs": "embedding"}
    task = tasks.get(kind, "causal")
    if kind == "preferences" and settings.task != "causal":
        raise ConfigError(
            f"language.task is {settings.task!r}, but the rows are pairs of responses. Set it to 'causal'."
        )
    if "embedding" in (task, settings.task) and task != settings.task:
        row_kind = (
            "pairs of texts" if kind == "pairs" else f"{kind} and no pairs of texts ('anchor', 'positive')"
        )
        raise ConfigError(
            f"language.task is {settings.task!r}, but the rows are {row_kind}. Set it to {task!r}."
        )
    if task != settings.task and "causal" not in (task, settings.task):
        raise ConfigError(f"language.task is {settings.task!r}, but the rows are {kind}. Set it to {task!r}.")
