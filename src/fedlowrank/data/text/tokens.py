"""Tokenization of text records to a data set of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...core.arguments.bounds import check_minimum
from ...core.errors import ConfigError, DataError, did_you_mean
from ...core.learning.losses import IGNORE_INDEX
from ..arrays import encode_labels
from ..dataset import Dataset, Examples
from .packing import Sample, pack_sequences
from .text_formats import Format, render
from .text_records import Instruction, Labeled, Texts

T = TypeVar("T")


@dataclass(frozen=True)
class TextSettings:
    """Settings of the tokenization.

    Attributes:
        format: how instructions are written as text, see `formats.render`. Labeled texts stay unchanged.
        context: largest number of tokens of an example, at least 2. Longer ones lose their end.
        loss_on: for instructions: whether a model learns the ``response`` only, or ``all``, the prompt too.
        packing: for instructions: whether short samples share a row, see `packing.pack_sequences`. Samples of
            different categories or natural clients never do.
    """

    format: Format = "alpaca"
    context: int = 512
    loss_on: Literal["response", "all"] = "response"
    packing: bool = False

    def __post_init__(self) -> None:
        check_minimum("context", self.context, 2)


DEFAULT = TextSettings()
"""Instructions in the format of Alpaca, at most 512 tokens, loss on the response."""


def tokenize(texts: Texts, tokenizer: Any, settings: TextSettings = DEFAULT) -> Dataset:
    """Convert texts to token ids, padded on the right to the longest example of both parts.

    Instructions, for a causal language model: inputs ``input_ids`` and ``attention_mask``, int64 [n, T];
    labels int64 [n, T] with the token's own id where the loss counts and -100 elsewhere, not shifted. A
    sample is: a BOS, if the tokenizer adds one by itself (with format ``chat``: if the template writes one),
    the prompt, the response, an EOS (with ``chat``: unless the template writes it). Prompt and response are
    tokenized separately and joined, so that the tokens of the prompt are those from which a model generates;
    the tokens of the whole text may differ at the boundary.

    Labeled texts, for a classifier: inputs ``input_ids``, ``attention_mask`` and, if the tokenizer lists it
    among its ``model_input_names``, ``token_type_ids``, int64 [n, T], with the special tokens that the
    tokenizer adds; labels int64 [n].

    Categories become the strata of the data set, which partitions use. Its notes tell what was truncated or
    dropped: a sample without a response token left to learn is dropped.

    Args:
        texts: the records.
        tokenizer: of ``transformers``, or an object with the same interface.
        settings: format, length and loss.

    Raises:
        ConfigError: if the context is longer than the tokenizer's, or settings do not fit the texts.
        DataError: if nothing is left of a part, or only some records have a category.
    """
    limit = getattr(tokenizer, "model_max_length", None)
    if limit is not None and settings.context > limit:
        raise ConfigError(
            f"context is {settings.context}, but the tokenizer is made for at most {limit} tokens "
            "(tokenizer.model_max_length). Lower context."
        )
    if texts.kind == "instructions":
        return _tokenize_instructions(texts, tokenizer, settings)
    if settings.packing:
        raise ConfigError("packing is for instructions; these texts have class labels. Set packing to false.")
    return _tokenize_labeled(texts, tokenizer, settings)


def _tokenize_instructions(texts: Texts, tokenizer: Any, settings: TextSettings) -> Dataset:
    notes = list(texts.notes)
    pad, eos = _pad_token(tokenizer, notes), tokenizer.eos_token_id
    if eos is None:
        notes.append("the tokenizer has no EOS: responses end without one")
    records = [[r for r in part if isinstance(r, Instruction)] for part in texts.parts]
    strata, strata_names = _strata(texts.name, records)
    natural = _natural_clients(records)
    parts = []
    for name, own in zip(("training", "test"), records, strict=False):
        samples = _make_samples(f"{name} part of {texts.name!r}", own, tokenizer, settings, notes)
        if settings.packing:
            groups: dict[tuple[str | None, str | None], list[Sample]] = {}
            for sample in samples:
                record = own[sample.record]
                groups.setdefault((record.category, record.client), []).append(sample)
            packed = [pack_sequences(group, settings.context, eos) for group in groups.values()]
            found, samples = len(samples), list(chain.from_iterable(packed))
            notes.append(f"{name} part: {found} samples packed into {len(samples)} rows")
        parts.append(samples)
    width = max(len(sample.ids) for part in parts for sample in part)
    examples = []
    for part in parts:
        ids, mask = _pad([sample.ids for sample in part], width, pad)
        labels, _ = _pad([sample.labels for sample in part], width, IGNORE_INDEX)
        examples.append(Examples({"input_ids": ids, "attention_mask": mask}, labels))
    kept = [[sample.record for sample in part] for part in parts]
    strata, natural = (
        [None if v is None else v[index] for v, index in zip(values, kept, strict=True)]
        for values in (strata, natural)
    )
    return Dataset(
        texts.name, *_pair(examples), (), *_pair(natural), *_pair(strata), strata_names, tuple(notes)
    )


def _make_samples(
    where: str, records: Sequence[Instruction], tokenizer: Any, settings: TextSettings, notes: list[str]
) -> list[Sample]:
    """Tokens and labels of each record, truncated; samples with nothing to learn are dropped."""
    rendered = [render(record, settings.format, tokenizer) for record in records]
    prompts = _encode(tokenizer, [prompt for prompt, _ in rendered])
    responses = _encode(tokenizer, [response for _, response in rendered])
    # A chat template writes its BOS itself.
    bos = [] if settings.format == "chat" else _added_bos(tokenizer)
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    samples, truncated, context = [], 0, settings.context
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        head = [*bos, *prompt]
        has_end = settings.format == "chat" and response[-1:] == eos
        ids = [*head, *response, *([] if has_end else eos)]
        labels = ids.copy() if settings.loss_on == "all" else [IGNORE_INDEX] * len(head) + ids[len(head) :]
        truncated += len(ids) > context
        # Nothing predicts the first token of a sample.
        if max(len(head), 1) < min(len(head) + len(response), context):
            samples.append(Sample(ids[:context], labels[:context], i))
    count = len(records)
    if truncated:
        notes.append(
            f"{where}: {truncated} of {count} samples are longer than {context} tokens and were truncated on "
            "the right"
        )
    if len(samples) < count:
        notes.append(f"{where}: {count - len(samples)} of {count} samples dropped: no response token is left")
    if not samples:
        raise DataError(
            f"{where}: within {context} tokens no sample has a token of its response. Raise context."
        )
    return samples


def _pad(rows: Sequence[Sequence[int]], width: int, value: int) -> tuple[Tensor, Tensor]:
    """Rows padded on the right, and their mask (0 for padding), both int64 [n, width]."""
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(width) < lengths[:, None]
    out = torch.full((len(rows), width), value)
    out[mask] = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64)
    return out, mask.long()


def _tokenize_labeled(texts: Texts, tokenizer: Any, settings: TextSettings) -> Dataset:
    notes = list(texts.notes)
    pad = _pad_token(tokenizer, notes)
    parts = [[r for r in part if isinstance(r, Labeled)] for part in texts.parts]
    labels, classes = _labels(texts, parts)
    pads = {"input_ids": pad}
    if "token_type_ids" in tokenizer.model_input_names:
        pads["token_type_ids"] = getattr(tokenizer, "pad_token_type_id", 0)
    encoded = []
    for name, records in zip(("training", "test"), parts, strict=False):
        rows, truncated = _encode_truncated(tokenizer, [r.text for r in records], settings.context)
        if truncated:
            notes.append(
                f"{name} part of {texts.name!r}: {truncated} of {len(records)} texts are longer than "
                f"{settings.context} tokens and were truncated on the right"
            )
        encoded.append(rows)
    width = max(len(row) for rows in encoded for row in rows["input_ids"])
    examples = []
    for rows, y in zip(encoded, labels, strict=True):
        x = {name: _pad(rows[name], width, value)[0] for name, value in pads.items()}
        examples.append(Examples({**x, "attention_mask": _pad(rows["input_ids"], width, pad)[1]}, y))
    return Dataset(texts.name, *_pair(examples), classes, *_pair(_natural_clients(parts)), notes=tuple(notes))


def _labels(texts: Texts, parts: Sequence[Sequence[Labeled]]) -> tuple[list[Tensor], tuple[str, ...]]:
    """Class numbers in each part, int64 [n], and names of the classes."""
    labels = [[record.label for record in part] for part in parts]
    if len({isinstance(label, str) for part in labels for label in part}) > 1:
        raise DataError(f"the labels of {texts.name!r} are text in some records and numbers in others.")
    if not texts.classes:
        return encode_labels([np.array(part) for part in labels], f"the labels of {texts.name!r}")
    numbers: dict[str | int, int] = {name: i for i, name in enumerate(texts.classes)}
    for label in chain.from_iterable(labels):
        if isinstance(label, str) and label not in numbers:
            hint = did_you_mean(label, texts.classes)
            raise DataError(f"{texts.name!r} has a label {label!r} that is no class. {hint}")
    return [torch.tensor([numbers.get(label, label) for label in part]) for part in labels], texts.classes


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, without special tokens."""
    found = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [list(ids) for ids in found["input_ids"]]


def _encode_truncated(tokenizer: Any, texts: list[str], context: int) -> tuple[Any, int]:
    """Inputs of the texts with special tokens, at most ``context``; and the number of truncated texts."""
    rows = tokenizer(texts, verbose=False)
    truncated = sum(len(row) > context for row in rows["input_ids"])
    if truncated:
        # The tokenizer itself truncates, because it knows which special tokens must stay.
        side, tokenizer.truncation_side = tokenizer.truncation_side, "right"
        try:
            rows = tokenizer(texts, truncation=True, max_length=context)
        finally:
            tokenizer.truncation_side = side
    if empty := sum(not row for row in rows["input_ids"]):
        raise DataError(f"{empty} of {len(texts)} texts have no token. Use a tokenizer for their characters.")
    return rows, truncated


def _added_bos(tokenizer: Any) -> list[int]:
    """The BOS that a tokenizer adds by itself, or nothing."""
    # Kinds of tokenizers have different settings for it, so see what this one does.
    bos = [tokenizer.bos_token_id]
    with_special, without = list(tokenizer("a")["input_ids"]), _encode(tokenizer, ["a"])[0]
    return bos if with_special[:1] == bos and without[:1] != bos else []


def _pad_token(tokenizer: Any, notes: list[str]) -> int:
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    eos = tokenizer.eos_token_id
    notes.append(f"the tokenizer has no padding token: {'token 0' if eos is None else 'EOS'} pads")
    return 0 if eos is None else int(eos)


def _strata(name: str, parts: list[list[Instruction]]) -> tuple[Sequence[Tensor | None], tuple[str, ...]]:
    """Category number of each record in each part, int64 [n], and the names of the categories."""
    values = [[record.category for record in part] for part in parts]
    missing = sum(value is None for part in values for value in part)
    if missing == sum(map(len, values)):
        return [None] * len(parts), ()
    if missing:
        raise DataError(f"{missing} records of {name!r} have no category, but others have one.")
    return encode_labels([np.array(part) for part in values], f"the categories of {name!r}")


def _natural_clients(parts: Sequence[Sequence[Instruction | Labeled]]) -> Sequence[Tensor | None]:
    """Client number of each record in each part, int64 [n], -1 for none; None for a part without clients."""
    names = sorted({record.client for part in parts for record in part if record.client is not None})
    numbers: dict[str | None, int] = {name: i for i, name in enumerate(names)}
    ids = [torch.tensor([numbers.get(record.client, -1) for record in part]) for part in parts]
    return [part if bool((part >= 0).any()) else None for part in ids]


def _pair(parts: Sequence[T]) -> tuple[T, T | None]:
    """The values of the training part and of the test part, None if there is none."""
    return parts[0], parts[1] if len(parts) > 1 else None
