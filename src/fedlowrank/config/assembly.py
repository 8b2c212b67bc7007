"""Builds a federation from an experiment: the data of each client, and its model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.contract import ClientInfo
from ..core.errors import ConfigError
from ..core.key import Key
from ..core.learning.losses import Loss
from ..data.augment import Augment
from ..data.clients import make_clients, subsample_training
from ..data.dataset import ClientData, Dataset, Examples, Inputs, Stored, draw_subset, standardize_client
from ..data.datasets.csv_table import TableDataset
from ..data.federation import Federation
from ..data.partitioning.concept import Concept, LabelShift, apply_concept
from ..data.partitioning.own_partition import OwnPartition
from ..data.partitioning.partition import Partition
from ..data.partitioning.split import Split
from ..data.user_data.user_arrays import TARGET_WARNINGS
from ..language import language_model as language_models
from ..language.base_model import warn_slow_precision
from ..language.export.export_settings import ExportSettings
from ..language.language_model import Language, LanguageSettings
from ..language.objectives.preference_pairs import make_pairs
from ..language.objectives.reference_scores import add_reference
from ..models.architecture import Architecture, build_architecture, choose_heads
from ..models.zoo import CHARACTER_MODELS, ModelSettings
from ..rounds.run_settings import RunSettings
from .sections.data_section import DataSettings
from .sections.lora_section import LoraSettings, PeftSettings, broadcast_ranks


class FederationSettings(Protocol):
    """The sections of an experiment from which a federation is made; see :class:`.experiment.ExperimentConfig`."""

    name: str
    language: LanguageSettings | None
    data: DataSettings
    partition: Partition
    split: Split
    concept: Concept
    augment: Augment
    model: ModelSettings
    lora: LoraSettings | PeftSettings
    loss: Loss
    export: ExportSettings
    run: RunSettings

    @property
    def run_here(self) -> RunSettings:
        """The settings of the run on this machine."""

    @property
    def language_here(self) -> LanguageSettings | None:
        """The settings of the language model on this machine."""

    @property
    def start_here(self) -> tuple[str, ...]:
        """Folders of the adapters to start from on this machine; empty for none."""


@dataclass(frozen=True)
class Shares:
    """The data of an experiment's clients.

    Attributes:
        data: data of each client.
        classes: names of the classes; empty if there are none.
        notes: notes on the data set.
        language: language model for which the texts were tokenized, or None.
        columns: name of each input; empty if the inputs have no names.
    """

    data: tuple[ClientData, ...]
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    language: Language | None = None
    columns: tuple[str, ...] = ()


_TRIED_EXAMPLES = 8
"""Examples on which it is tried whether a model reads the whole part of its inputs alone."""


def share_data(experiment: FederationSettings, standardize: bool = True) -> Shares:
    """Read the data and divide them among the clients with the seed of the run.

    Args:
        experiment: experiment whose sections describe the data.
        standardize: False leaves out ``standard_per_client``, to see the values from which its statistics are
            computed.

    Raises:
        DataError: if the data cannot be read or divided as asked.
    """
    key, preparation, language = Key((experiment.run.seed,)), experiment.data.preparation, None
    # report a name that cannot be imported before data are read
    partition = experiment.partition
    partition = partition.with_function() if isinstance(partition, OwnPartition) else partition
    if experiment.language is None:
        dataset = experiment.data.load(experiment.run.seed)
        if experiment.data.is_own:
            dataset = _note_unused_test(dataset, experiment.split)
    else:
        texts: Any = experiment.data.source.load()
        dataset, language = language_models.load_with_texts(texts, *_language_settings(experiment))
        language = _complete_language(experiment, language)
        dataset = _note_unused_test(dataset, experiment.split)
    if preparation.examples is not None:
        dataset = draw_subset(dataset, preparation.examples)
    data = make_clients(dataset, partition, experiment.split, key)
    if preparation.keep < 1:
        data = subsample_training(data, preparation.keep, preparation.keep_at_least, key / "keep")
    if standardize and preparation.normalize == "standard_per_client" and experiment.language is None:
        data = [standardize_client(client) for client in data]
    if isinstance(experiment.concept, LabelShift) and 0 <= experiment.loss.ignore_index < len(
        dataset.classes
    ):
        raise ConfigError(
            f"concept.kind = 'label_shift' shifts all labels, and loss.ignore_index = {experiment.loss.ignore_index}, which does "
            "not count, is one of them. Write -100 in its place in the data, and leave loss.ignore_index out."
        )
    data = apply_concept(experiment.concept, data, len(dataset.classes))
    if experiment.loss.is_preference:
        data = _compare_responses(experiment, data, dataset.name, language)
    # a loss that is set determines the meaning of the targets
    is_open = experiment.loss.kind == "auto"
    notes = tuple(note for note in dataset.notes if is_open or note not in TARGET_WARNINGS)
    columns = dataset.columns if isinstance(dataset, TableDataset) else ()
    return Shares(tuple(data), dataset.classes, notes, language, columns)


def _note_unused_test(dataset: Dataset, split: Split) -> Dataset:
    """Add a note to a data set whose test part the split leaves unused."""
    if dataset.test is None or split.official_test != "unused":
        return dataset
    alternative = "" if dataset.natural_test is None else "'own_test' (each client on its own) or "
    note = (
        f"{len(dataset.test)} rows of the test part are not used: split 'local' divides the training part. Set split.kind "
        f"to {alternative}'whole_test' to test on them, or split.pool to 'all' to divide them, too"
    )
    return dataclasses.replace(dataset, notes=(*dataset.notes, note))


def _compare_responses(
    experiment: FederationSettings, data: Sequence[ClientData], name: str, language: Language | None
) -> list[ClientData]:
    """Prepare pairs of responses as a preference loss needs them."""
    pairs = make_pairs(data, experiment.loss, name)
    example = _example(pairs[0].train.inputs)
    if experiment.loss.kind != "dpo" or language is None or not isinstance(example, dict):
        return pairs
    return add_reference(pairs, language.architecture(example), experiment.run_here.device)


def load_language(
    experiment: FederationSettings, classes: tuple[str, ...], prompt_format: str = ""
) -> Language | None:
    """Load the language model without its texts.

    Args:
        experiment: experiment whose sections describe the model.
        classes: names of the classes; empty for a model without a classification head.
        prompt_format: format that the texts call for, which ``language.format = "auto"`` selects; empty if unknown.

    Returns:
        The model, or None if the experiment has none.
    """
    if experiment.language is None:
        return None
    settings, lora, key = _language_settings(experiment)
    if prompt_format and settings.format == "auto":
        settings = dataclasses.replace(settings, format=prompt_format)
    language = language_models.load_language_model(settings, lora, key, classes)
    return _complete_language(experiment, language)


def _complete_language(experiment: FederationSettings, language: Language) -> Language:
    """Add the section ``[export]`` to the model; warn if this machine computes slowly in its dtype."""
    # the type of the weights, because ``auto`` leaves the choice to the files
    dtype = str(language.loaded.model.dtype).removeprefix("torch.")
    warn_slow_precision(dtype, language.settings.autocast, experiment.run_here.device)
    return dataclasses.replace(language, export=experiment.export)


def _language_settings(experiment: FederationSettings) -> tuple[Any, Mapping[str, Any], Key]:
    """Settings of the base model, fields of ``peft.LoraConfig``, and key of new weights."""
    extra: dict[str, Any] = {}
    if isinstance(experiment.lora, PeftSettings):
        extra = {**(experiment.lora.model_extra or {}), "start": experiment.start_here}
    settings: Any = experiment.language_here
    path = os.path.expandvars(os.path.expanduser(settings.path))  # noqa: PTH111 - a hub name is no path
    key = Key((experiment.run.seed,)) / "init" / "language"
    return dataclasses.replace(settings, path=path), extra, key


def assemble(
    experiment: FederationSettings,
    shares: Shares,
    *,
    sizes: Sequence[int] | None = None,
    local_ids: frozenset[int] | None = None,
) -> Federation:
    """Build the federation of an experiment.

    Args:
        experiment: experiment whose sections describe the clients and their models.
        shares: data of the clients.
        sizes: number of training examples of each client, for federations where some data are on other machines.
        local_ids: identifiers of the clients whose data are on this machine, or None for all; see
            :class:`Federation`.

    Raises:
        DataError: if a client's data do not fit the others.
        TaskError: if a model does not fit the data.
    """
    data, key = shares.data, Key((experiment.run.seed,))
    models = _models(experiment, shares, key)
    names = experiment.model.names if shares.language is None else tuple(models)
    ranks = broadcast_ranks(experiment.lora.ranks, len(data))
    counts = [len(d.train) for d in data] if sizes is None else sizes
    cluster = experiment.concept.cluster
    infos = [
        ClientInfo(i, n, names[i % len(names)], ranks[i], cluster(i), data[i].name)
        for i, n in enumerate(counts)
    ]
    used_architectures = {i.architecture for i in infos}
    return Federation(
        data,
        infos,
        {n: m for n, m in models.items() if n in used_architectures},
        shares.classes,
        experiment.run.seed,
        experiment.name,
        (*shares.notes, *(n for d in data for n in d.notes)),
        experiment.augment,
        shares.language is not None and shares.language.settings.by_length,
        shares.language,
        local_ids,
        loss=experiment.loss,
        feature_names={"": shares.columns} if shares.columns else {},
    )


def _models(experiment: FederationSettings, shares: Shares, key: Key) -> Mapping[str, Architecture]:
    first_examples = shares.data[0].train
    example = _example(first_examples.x)
    if isinstance(example, dict):
        if shares.language is None:
            raise ConfigError(
                "data: the built-in models take one tensor; use Federation.from_arrays for dicts of inputs"
            )
        return {"language": shares.language.architecture(example)}
    lora, head = experiment.lora, experiment.model.head
    if not isinstance(lora, LoraSettings):
        raise ConfigError("language: these data are no texts")
    x = first_examples.inputs
    inputs = None if isinstance(x, dict) else x
    is_fractional = inputs is not None and bool((inputs != inputs.round()).any())
    character_models = [n for n in experiment.model.names if n in CHARACTER_MODELS]
    if is_fractional and character_models:
        raise ConfigError(
            f"model {character_models[0]} takes the numbers of characters, but these inputs are not whole. Set data.normalize to "
            "'none'; in an .npz file save them as int64, for unsigned bytes are pixels and divided by 255."
        )
    outputs = _outputs(first_examples, shares.classes)
    factories = experiment.model.factories(tuple(example.shape[1:]), outputs)
    models = {
        n: build_architecture(n, lora.wrap(f, head, key / "lora" / n), example, head, key / "init" / n)
        for n, f in factories.items()
    }
    if inputs is not None and is_fractional:
        _refuse_scaled_ids(experiment, models, inputs[:_TRIED_EXAMPLES])
    choose_heads(models, outputs)
    return models


def _refuse_scaled_ids(experiment: FederationSettings, models: Mapping[str, Architecture], x: Tensor) -> None:
    """Raise ConfigError if a model reads the whole part of its inputs alone, as one that looks up rows of a table."""
    for name, model in models.items():
        with torch.no_grad():
            reads_whole_part = torch.equal(model.probe(x), model.probe(x.trunc()))
        if reads_whole_part:
            raise ConfigError(
                f"model {name} takes whole numbers, such as those of words, but these inputs have fractions. Set data.normalize "
                f"to 'none', which is {experiment.data.preparation.normalize!r}."
            )


def _outputs(examples: Examples, classes: tuple[str, ...]) -> int:
    """Width of a model's output: the number of classes or targets; 0 for token labels."""
    return 0 if examples.has_token_labels else len(classes) or examples.y.shape[1]


def _example(x: Stored) -> Inputs:
    """One input; zeros if the data are on another machine, where only the shape is known."""
    if isinstance(x, dict):
        return {n: t[:1] if len(t) else torch.zeros(1, *t.shape[1:], dtype=t.dtype) for n, t in x.items()}
    return x[:1] if len(x) else torch.zeros(1, *x.shape[1:], dtype=x.dtype)
