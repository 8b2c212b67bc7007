"""Tokenization of text records to a data set of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...core.choices import check_choices
from ...core.errors import ConfigError, DataError, did_you_mean
from ...core.loss import IGNORE_INDEX
from ..arrays import encode_labels
from ..checks import check_minimum
from ..dataset import Dataset, Examples
from .formats import Format, render
from .packing import Sample, pack_sequences
from .records import Instruction, Labeled, Records, Texts

T = TypeVar("T")


@dataclass(frozen=True)
class TextSettings:
    """Settings of the tokenization.

    Attributes:
        format: how instructions are written as text, see `formats.render`. Labeled texts stay unchanged.
        context: largest number of tokens of an example, at least 2. Longer ones are truncated.
        loss_on: for instructions: whether a model learns the ``response`` only, or ``all``, the prompt too.
        truncate: side on which a long example is cut: on the ``right`` the response loses its end and its
            EOS; on the ``left`` the prompt loses its beginning (a BOS stays).
        packing: for instructions: whether short samples share a row, see `packing.pack_sequences`. Samples of
            different categories or natural clients never do.
    """

    format: Format = "alpaca"
    context: int = 512
    loss_on: Literal["response", "all"] = "response"
    truncate: Literal["right", "left"] = "right"
    packing: bool = False

    def __post_init__(self) -> None:
        check_choices(self)
        check_minimum("context", self.context, 2)


DEFAULT = TextSettings()
"""Instructions in the format of Alpaca, at most 512 tokens, loss on the response."""


def tokenize(texts: Texts, tokenizer: Any, settings: TextSettings = DEFAULT) -> Dataset:
    """Convert texts to token ids, padded on the right to the longest example of both parts.

    Instructions, for a causal language model: inputs ``input_ids`` and ``attention_mask``, int64 [n, T];
    labels int64 [n, T] with the token's own id where the loss counts and -100 elsewhere. They are not
    shifted: position t holds the label of the token at t, which a loss compares with the prediction from the
    tokens before t. A sample is: a BOS, if the tokenizer adds one by itself (with format ``chat``: if the
    template writes one), the prompt, the response, an EOS. Prompt and response are tokenized separately and
    joined. So the boundary is exact, and the tokens of the prompt are those of the prompt alone, from which a
    model generates; the tokens of the whole text may differ at the boundary. With format ``chat`` no EOS is
    appended if the template ends in one, and white space after it is dropped.

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


class _SpecialTokens(NamedTuple):
    bos: list[int]  # one or none
    eos: int | None
    pad: int


class _Part(NamedTuple):
    """Samples of a part of the data set, and the record that each comes from."""

    samples: list[Sample]
    records: list[int]


def _tokenize_instructions(texts: Texts, tokenizer: Any, settings: TextSettings) -> Dataset:
    notes = list(texts.notes)
    special = _special_tokens(tokenizer, notes)
    records = [[r for r in part if isinstance(r, Instruction)] for part in _parts(texts)]
    strata, strata_names = _strata(texts.name, records)
    natural = _natural_clients(records)
    parts = []
    for k, name in enumerate(("training", "test")[: len(records)]):
        where = f"{name} part of {texts.name!r}"
        part = _make_samples(where, records[k], tokenizer, special, settings, notes)
        if settings.packing:
            groups = [_take(values[k], part.records) for values in (strata, natural)]
            packed = _pack(part, groups, settings.context, special.eos)
            notes.append(f"{name} part: {len(part.samples)} samples packed into {len(packed.samples)} rows")
            part = packed
        parts.append(part)
    width = max(len(sample.ids) for part in parts for sample in part.samples)
    examples = []
    for part in parts:
        ids, mask = _pad([sample.ids for sample in part.samples], width, special.pad)
        labels, _ = _pad([sample.labels for sample in part.samples], width, IGNORE_INDEX)
        examples.append(Examples({"input_ids": ids, "attention_mask": mask}, labels))
    strata = [_take(values, part.records) for values, part in zip(strata, parts, strict=True)]
    natural = [_take(values, part.records) for values, part in zip(natural, parts, strict=True)]
    return Dataset(
        texts.name,
        *_pair(examples),
        (),
        *_pair(natural),
        *_pair(strata),
        strata_names,
        tuple(notes),
    )


def _make_samples(
    where: str,
    records: Sequence[Instruction],
    tokenizer: Any,
    special: _SpecialTokens,
    settings: TextSettings,
    notes: list[str],
) -> _Part:
    """Tokens and labels of each record, truncated; samples with nothing to learn are dropped."""
    is_chat = settings.format == "chat"
    rendered = [_render(record, settings.format, tokenizer) for record in records]
    prompts = _encode(tokenizer, [prompt for prompt, _ in rendered])
    responses = _encode(tokenizer, [response for _, response in rendered])
    # A chat template writes its BOS itself.
    bos = [] if is_chat else special.bos
    samples, kept, truncated = [], [], 0
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        head = [*bos, *prompt]
        end = [] if special.eos is None else [special.eos]
        if is_chat and response[-1:] == end:
            end = []
        ids = [*head, *response, *end]
        labels = ids.copy() if settings.loss_on == "all" else [IGNORE_INDEX] * len(head) + ids[len(head) :]
        is_response = [0] * len(head) + [1] * len(response) + [0] * len(end)
        if len(ids) > settings.context:
            truncated += 1
            front = settings.context if settings.truncate == "right" else len(bos)
            back = len(ids) - (settings.context - front)
            ids, labels, is_response = (row[:front] + row[back:] for row in (ids, labels, is_response))
        # Nothing predicts the first token of a sample.
        if any(is_response[1:]):
            samples.append(Sample(ids, labels))
            kept.append(i)
    count, context = len(records), settings.context
    if truncated:
        notes.append(
            f"{where}: {truncated} of {count} samples are longer than {context} tokens and were truncated on "
            f"the {settings.truncate}"
        )
    if len(kept) < count:
        notes.append(f"{where}: {count - len(kept)} of {count} samples dropped: no response token is left")
    if not kept:
        raise DataError(
            f"{where}: within {context} tokens no sample has a token of its response. Raise context, or set "
            "truncate to 'left'."
        )
    return _Part(samples, kept)


def _render(record: Instruction, format: Format, tokenizer: Any) -> tuple[str, str]:
    """Prompt and response, without white space after the EOS that a chat template writes."""
    prompt, response = render(record, format, tokenizer)
    end = getattr(tokenizer, "eos_token", None)
    if format == "chat" and end and response.rstrip().endswith(end):
        response = response.rstrip()
    return prompt, response


def _pack(part: _Part, groups: Sequence[Tensor | None], context: int, eos: int | None) -> _Part:
    """Rows of samples of the same groups, with the first record of the group for each row."""
    keys = zip(*([0] * len(part.records) if g is None else g.tolist() for g in groups), strict=True)
    members: dict[tuple[int, ...], list[int]] = {}
    for i, key in enumerate(keys):
        members.setdefault(key, []).append(i)
    rows: list[Sample] = []
    records: list[int] = []
    for indices in members.values():
        packed = pack_sequences([part.samples[i] for i in indices], context, eos)
        rows += packed
        records += [part.records[indices[0]]] * len(packed)
    return _Part(rows, records)


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
    parts = [[r for r in part if isinstance(r, Labeled)] for part in _parts(texts)]
    labels, classes = _labels(texts, parts)
    pads = {"input_ids": pad}
    if "token_type_ids" in tokenizer.model_input_names:
        pads["token_type_ids"] = getattr(tokenizer, "pad_token_type_id", 0)
    encoded = []
    for name, records in zip(("training", "test"), parts, strict=False):
        rows, truncated = _encode_truncated(tokenizer, [r.text for r in records], settings, list(pads))
        if truncated:
            notes.append(
                f"{name} part of {texts.name!r}: {truncated} of {len(records)} texts are longer than "
                f"{settings.context} tokens and were truncated on the {settings.truncate}"
            )
        encoded.append(rows)
    width = max(len(row) for rows in encoded for row in rows["input_ids"])
    examples = []
    for rows, y in zip(encoded, labels, strict=True):
        x = {name: _pad(rows[name], width, value)[0] for name, value in pads.items()}
        examples.append(Examples({**x, "attention_mask": _pad(rows["input_ids"], width, pad)[1]}, y))
    natural = _natural_clients(parts)
    return Dataset(texts.name, *_pair(examples), classes, *_pair(natural), notes=tuple(notes))


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


def _encode_truncated(
    tokenizer: Any, texts: list[str], settings: TextSettings, names: Sequence[str]
) -> tuple[dict[str, list[list[int]]], int]:
    """Ids of each text with special tokens, at most ``context``; and the number of truncated texts."""
    found = tokenizer(texts, verbose=False)
    rows = {name: [list(row) for row in found[name]] for name in names}
    long = [i for i, row in enumerate(rows["input_ids"]) if len(row) > settings.context]
    if long:
        # The tokenizer itself truncates, because it knows which special tokens must stay.
        side = tokenizer.truncation_side
        tokenizer.truncation_side = settings.truncate
        try:
            again = tokenizer([texts[i] for i in long], truncation=True, max_length=settings.context)
        finally:
            tokenizer.truncation_side = side
        for name in names:
            for i, row in zip(long, again[name], strict=True):
                rows[name][i] = list(row)
    if empty := sum(not row for row in rows["input_ids"]):
        raise DataError(f"{empty} of {len(texts)} texts have no token. Use a tokenizer for their characters.")
    return rows, len(long)


def _special_tokens(tokenizer: Any, notes: list[str]) -> _SpecialTokens:
    pad, eos, bos = _pad_token(tokenizer, notes), tokenizer.eos_token_id, tokenizer.bos_token_id
    if eos is None:
        notes.append("the tokenizer has no EOS: responses end without one")
    # Kinds of tokenizers have different settings for a BOS, so see whether the tokenizer adds one.
    with_special, without = list(tokenizer("a")["input_ids"]), _encode(tokenizer, ["a"])[0]
    adds_bos = bos is not None and with_special[:1] == [bos] and without[:1] != [bos]
    return _SpecialTokens([bos] if adds_bos else [], eos, pad)


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


def _natural_clients(parts: Sequence[Sequence[Instruction | Labeled]]) -> list[Tensor | None]:
    """Client number of each record in each part, int64 [n], -1 for none; None for a part without clients."""
    names = sorted({record.client for part in parts for record in part if record.client is not None})
    numbers: dict[str | None, int] = {name: i for i, name in enumerate(names)}
    ids = [torch.tensor([numbers.get(record.client, -1) for record in part]) for part in parts]
    return [part if bool((part >= 0).any()) else None for part in ids]


def _parts(texts: Texts) -> list[Records]:
    return [texts.train] if texts.test is None else [texts.train, texts.test]


def _pair(parts: Sequence[T]) -> tuple[T, T | None]:
    """The values of the training part and of the test part, None if there is none."""
    return parts[0], parts[1] if len(parts) > 1 else None


def _take(values: Tensor | None, index: list[int]) -> Tensor | None:
    return None if values is None else values[index]
