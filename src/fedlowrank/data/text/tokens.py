"""From records to examples of token ids."""

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
from ..counting import at_least
from ..dataset import Dataset, Examples
from .formats import Format, render
from .packing import Sample, pack_sequences
from .records import Instruction, Labeled, Texts

T = TypeVar("T")


@dataclass(frozen=True)
class TextSettings:
    """How texts become tokens.

    Attributes:
        format: how instructions are written down, see `formats.render`. Labeled texts are taken as they are.
        context: largest number of tokens of an example, at least 2. Longer ones are truncated.
        loss_on: of instructions: whether a model learns the ``response`` alone, or ``all``, the prompt too.
        truncate: where a long example is cut: on the ``right``, so that the response loses its end and its EOS; or on
            the ``left``, so that the prompt loses its beginning (a BOS stays).
        packing: of instructions: whether short samples share a row, see `packing.pack_sequences`. Samples of
            different categories or natural clients never do.
    """

    format: Format = "alpaca"
    context: int = 512
    loss_on: Literal["response", "all"] = "response"
    truncate: Literal["right", "left"] = "right"
    packing: bool = False

    def __post_init__(self) -> None:
        check_choices(self)
        at_least("context", self.context, 2)


DEFAULT = TextSettings()
"""Instructions in the format of Alpaca, at most 512 tokens, loss on the response."""


def tokenize(texts: Texts, tokenizer: Any, settings: TextSettings = DEFAULT) -> Dataset:
    """Texts as token ids, padded on the right to the longest example of both parts.

    Instructions, for a causal language model: inputs ``input_ids`` and ``attention_mask``, int64 [n, T]; labels int64
    [n, T] with the token's own id where the loss counts and -100 elsewhere. They are not shifted: position t holds the
    label of the token at t, which a loss compares with the prediction from the tokens before t. A sample is: a BOS, if
    the tokenizer adds one by itself (with format ``chat``: if the template writes one), the prompt, the response, an
    EOS. Prompt and response are tokenized apart from each other and joined. So the boundary is exact whatever the
    tokenizer would merge across it, and the tokens of the prompt are those of the prompt alone, from which a model
    generates; the tokens of the whole text at once may differ at the boundary. With format ``chat`` no EOS is appended
    if the template ends in one, and white space behind it is left out.

    Labeled texts, for a classifier: inputs ``input_ids``, ``attention_mask`` and, if the tokenizer names it among its
    ``model_input_names``, ``token_type_ids``, int64 [n, T], with the special tokens that the tokenizer adds; labels
    int64 [n].

    Categories become the strata of the data set, by which partitions go. Its notes say what was truncated or dropped: a
    sample of which no token of the response is left to learn is dropped.

    Args:
        texts: the records.
        tokenizer: of ``transformers``, or an object that is called like one.
        settings: format, length and loss.

    Returns:
        The data set.

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
    if texts.kind == "classes":
        if settings.packing:
            raise ConfigError("packing is for instructions; these texts have class labels. Set packing to false.")
        return _classification(texts, tokenizer, settings)
    return _causal(texts, tokenizer, settings)


class _Special(NamedTuple):
    """Special tokens: BOS as a list of one or none, EOS, padding."""

    bos: list[int]
    eos: int | None
    pad: int


class _Part(NamedTuple):
    """Samples of a part of the data set, with the record that each comes from."""

    samples: list[Sample]
    records: list[int]


def _causal(texts: Texts, tokenizer: Any, settings: TextSettings) -> Dataset:
    notes = list(texts.notes)
    special = _special(tokenizer, notes)
    parts = [[r for r in part if isinstance(r, Instruction)] for part in (texts.train, texts.test) if part is not None]
    strata, strata_names = _strata(texts.name, parts)
    natural = _natural(parts)
    cut = []
    for k, (name, records) in enumerate(zip(("training", "test"), parts, strict=False)):
        part = _samples(f"{name} part of {texts.name!r}", records, tokenizer, special, settings, notes)
        if settings.packing:
            groups = [None if of is None else of[part.records] for of in (strata[k], natural[k])]
            packed = _packed(part, groups, settings.context, special.eos)
            notes.append(f"{name} part: {len(part.samples)} samples packed into {len(packed.samples)} rows")
            part = packed
        cut.append(part)
    width = max(len(sample.ids) for part in cut for sample in part.samples)
    examples = [_examples(part.samples, width, special.pad) for part in cut]
    strata, natural = (
        [None if of is None else of[part.records] for of, part in zip(values, cut, strict=True)]
        for values in (strata, natural)
    )
    return Dataset(
        texts.name,
        examples[0],
        _second(examples),
        (),
        natural[0],
        _second(natural),
        strata[0],
        _second(strata),
        strata_names,
        tuple(notes),
    )


def _samples(
    where: str,
    records: Sequence[Instruction],
    tokenizer: Any,
    special: _Special,
    settings: TextSettings,
    notes: list[str],
) -> _Part:
    """Tokens and labels of each record, truncated; those without anything to learn are left out."""
    chat = settings.format == "chat"
    written = [_written(record, settings.format, tokenizer) for record in records]
    prompts = _encode(tokenizer, [prompt for prompt, _ in written])
    responses = _encode(tokenizer, [response for _, response in written])
    # A chat template writes its BOS itself.
    bos = [] if chat else special.bos
    samples, kept, truncated = [], [], 0
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        head = [*bos, *prompt]
        end = [special.eos] if special.eos is not None and (not chat or response[-1:] != [special.eos]) else []
        ids = [*head, *response, *end]
        labels = ids.copy() if settings.loss_on == "all" else [IGNORE_INDEX] * len(head) + ids[len(head) :]
        # 1 for a token of the response itself
        learnt = [0] * len(head) + [1] * len(response) + [0] * len(end)
        if len(ids) > settings.context:
            truncated += 1
            front = settings.context if settings.truncate == "right" else len(bos)
            back = len(ids) - (settings.context - front)
            ids, labels, learnt = (row[:front] + row[back:] for row in (ids, labels, learnt))
        # Nothing predicts the first token of all.
        if any(learnt[1:]):
            samples.append(Sample(ids, labels))
            kept.append(i)
    if truncated:
        notes.append(
            f"{where}: {truncated} of {len(records)} samples are longer than {settings.context} tokens and were "
            f"truncated on the {settings.truncate}"
        )
    if len(kept) < len(records):
        notes.append(
            f"{where}: {len(records) - len(kept)} of {len(records)} samples dropped: no response token is left"
        )
    if not kept:
        raise DataError(
            f"{where}: within {settings.context} tokens no sample has a token of its response. Raise context, or set "
            "truncate to 'left'."
        )
    return _Part(samples, kept)


def _written(record: Instruction, format: Format, tokenizer: Any) -> tuple[str, str]:
    prompt, response = render(record, format, tokenizer)
    if format == "chat":
        end = getattr(tokenizer, "eos_token", None)
        if end and response.rstrip().endswith(end):
            response = response.rstrip()
    return prompt, response


def _packed(part: _Part, groups: Sequence[Tensor | None], context: int, eos: int | None) -> _Part:
    """Rows of samples that agree in their group; of each row a record that it holds, to look up its group."""
    of = zip(*([0] * len(part.records) if g is None else g.tolist() for g in groups), strict=True)
    members: dict[tuple[int, ...], list[int]] = {}
    for i, group in enumerate(of):
        members.setdefault(group, []).append(i)
    rows: list[Sample] = []
    records: list[int] = []
    for indices in members.values():
        packed = pack_sequences([part.samples[i] for i in indices], context, eos)
        rows += packed
        records += [part.records[indices[0]]] * len(packed)
    return _Part(rows, records)


def _examples(samples: Sequence[Sample], width: int, pad: int) -> Examples:
    ids, mask = _padded([sample.ids for sample in samples], width, pad)
    labels, _ = _padded([sample.labels for sample in samples], width, IGNORE_INDEX)
    return Examples({"input_ids": ids, "attention_mask": mask}, labels)


def _padded(rows: Sequence[Sequence[int]], width: int, fill: int) -> tuple[Tensor, Tensor]:
    """Rows filled up on the right, int64 [n, width], and 1 where they are not filled, int64 [n, width]."""
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(width) < lengths[:, None]
    out = torch.full((len(rows), width), fill)
    out[mask] = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64)
    return out, mask.long()


def _classification(texts: Texts, tokenizer: Any, settings: TextSettings) -> Dataset:
    notes = list(texts.notes)
    pad = _padding(tokenizer, notes)
    parts = [[r for r in part if isinstance(r, Labeled)] for part in (texts.train, texts.test) if part is not None]
    labels, classes = _labels(texts, parts)
    natural = _natural(parts)
    names = ["input_ids", *(["token_type_ids"] if "token_type_ids" in tokenizer.model_input_names else [])]
    fills = {"input_ids": pad, "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0)}
    coded = []
    for name, records in zip(("training", "test"), parts, strict=False):
        found, truncated = _encode_whole(tokenizer, [r.text for r in records], settings, names)
        if truncated:
            notes.append(
                f"{name} part of {texts.name!r}: {truncated} of {len(records)} texts are longer than "
                f"{settings.context} tokens and were truncated on the {settings.truncate}"
            )
        coded.append(found)
    width = max(len(row) for found in coded for row in found["input_ids"])
    examples = []
    for found, y in zip(coded, labels, strict=True):
        x = {n: _padded(found[n], width, fills[n])[0] for n in names}
        x["attention_mask"] = _padded(found["input_ids"], width, pad)[1]
        examples.append(Examples(x, y))
    return Dataset(
        texts.name, examples[0], _second(examples), classes, natural[0], _second(natural), notes=tuple(notes)
    )


def _second(parts: Sequence[T]) -> T | None:
    """What belongs to the test part, or None if there is none."""
    return parts[1] if len(parts) > 1 else None


def _labels(texts: Texts, parts: Sequence[Sequence[Labeled]]) -> tuple[list[Tensor], tuple[str, ...]]:
    """Numbers of the classes in each part, int64 [n], and their names."""
    named = {isinstance(record.label, str) for part in parts for record in part}
    if len(named) > 1:
        raise DataError(f"the labels of {texts.name!r} are text in some records and numbers in others.")
    if not texts.classes:
        return encode_labels([np.array([r.label for r in part]) for part in parts], f"the labels of {texts.name!r}")
    known = {name: i for i, name in enumerate(texts.classes)}
    for label in (record.label for part in parts for record in part):
        if isinstance(label, str) and label not in known:
            raise DataError(f"{texts.name!r} has a label {label!r} that is no class. {did_you_mean(label, known)}")
    return [
        torch.tensor([known[r.label] if isinstance(r.label, str) else r.label for r in part]) for part in parts
    ], texts.classes


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, without special tokens."""
    found = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [list(ids) for ids in found]


def _encode_whole(
    tokenizer: Any, texts: list[str], settings: TextSettings, names: Sequence[str]
) -> tuple[dict[str, list[list[int]]], int]:
    """Ids of each text with special tokens, at most ``context`` of them, and how many were truncated."""
    found = tokenizer(texts, verbose=False)
    rows = {name: [list(row) for row in found[name]] for name in names}
    long = [i for i, row in enumerate(rows["input_ids"]) if len(row) > settings.context]
    if long:
        # The tokenizer itself truncates, since it knows which special tokens must stay.
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
        raise DataError(f"{empty} of {len(texts)} texts have no token. Use a tokenizer that knows their characters.")
    return rows, len(long)


def _special(tokenizer: Any, notes: list[str]) -> _Special:
    pad, eos = _padding(tokenizer, notes), tokenizer.eos_token_id
    if eos is None:
        notes.append("the tokenizer has no EOS: responses end without one")
    bos = tokenizer.bos_token_id
    # Whether a tokenizer puts a BOS in front is found by trying: its settings for that differ between kinds.
    with_special, without = list(tokenizer("a")["input_ids"]), _encode(tokenizer, ["a"])[0]
    adds = bos is not None and with_special[:1] == [bos] and without[:1] != [bos]
    return _Special([bos] if adds else [], eos, pad)


def _padding(tokenizer: Any, notes: list[str]) -> int:
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    eos = tokenizer.eos_token_id
    notes.append(f"the tokenizer has no padding token: {'token 0' if eos is None else 'EOS'} pads")
    return 0 if eos is None else int(eos)


def _strata(name: str, parts: Sequence[Sequence[Instruction]]) -> tuple[Sequence[Tensor | None], tuple[str, ...]]:
    """Number of each record's category in each part, int64 [n], and the names of the categories."""
    values = [[record.category for record in part] for part in parts]
    missing = sum(value is None for part in values for value in part)
    if missing == sum(map(len, values)):
        return [None] * len(parts), ()
    if missing:
        raise DataError(f"{missing} records of {name!r} have no category, but others have one. Give all one, or none.")
    coded, names = encode_labels([np.array(part) for part in values], f"the categories of {name!r}")
    return coded, names


def _natural(parts: Sequence[Sequence[Instruction] | Sequence[Labeled]]) -> list[Tensor | None]:
    """Number of each record's natural client in each part, int64 [n], -1 for none; None where no record has one."""
    ids: list[Tensor | None] = []
    names = sorted({record.client for part in parts for record in part if record.client is not None})
    numbers = {name: i for i, name in enumerate(names)}
    for part in parts:
        found = [-1 if record.client is None else numbers[record.client] for record in part]
        ids.append(torch.tensor(found) if any(i >= 0 for i in found) else None)
    return ids
