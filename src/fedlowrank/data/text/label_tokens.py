"""Tokens of whole texts for encoders: with a class of each text or of each word, and pairs of texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import ConfigError, DataError, did_you_mean
from ...core.learning.losses import IGNORE_INDEX
from ..arrays import MAX_UNSEEN_CLASSES, encode_labels
from ..dataset import Dataset, Examples
from .text_arrays import choose_pad_token, number_clients, number_strata, pad_rows, split_parts
from .text_records import Labeled, Record, TextPair, Texts, TokenLabeled

_WHOLE_NUMBER = re.compile(r"-?[0-9]+")


def tokenize_labeled(texts: Texts, tokenizer: Any, context: int) -> Dataset:
    """Tokens of labeled texts; see :func:`.tokens.tokenize`."""
    notes = list(texts.notes)
    pad_values = _choose_padding(tokenizer, notes)
    parts = [[r for r in part if isinstance(r, Labeled)] for part in texts.parts]
    labels, classes = _number_labels(texts, [[record.label for record in part] for part in parts])
    encodings = []
    for name, records in zip(("training", "test"), parts, strict=False):
        encoding, truncated_count = _encode_truncated(tokenizer, [r.text for r in records], context)
        _note_truncated(f"{name} part of {texts.name!r}", truncated_count, len(records), context, notes)
        encodings.append(encoding)
    targets = [torch.tensor(numbers) for numbers in labels]
    examples = _make_examples(encodings, targets, pad_values)
    return _make_dataset(texts.name, examples, classes, parts, notes)


def tokenize_pairs(texts: Texts, tokenizer: Any, context: int) -> Dataset:
    """Tokens of pairs of texts; see :func:`.tokens.tokenize`."""
    notes = list(texts.notes)
    pad_values = _choose_padding(tokenizer, notes)
    parts = [[r for r in part if isinstance(r, TextPair)] for part in texts.parts]
    encodings = []
    for name, records in zip(("training", "test"), parts, strict=False):
        description = f"{name} part of {texts.name!r}"
        # anchor and positive of a pair one after the other
        encoding, truncated_count = _encode_truncated(
            tokenizer, [text for r in records for text in (r.anchor, r.positive)], context
        )
        _note_truncated(description, truncated_count, 2 * len(records), context, notes)
        encodings.append(encoding)
    dummy_labels = [torch.zeros(2 * len(records), dtype=torch.int64) for records in parts]
    examples = [_group_pairs(part) for part in _make_examples(encodings, dummy_labels, pad_values)]
    strata, strata_names = number_strata(texts.name, parts)
    dataset = _make_dataset(texts.name, examples, (), parts, notes)
    train, test = split_parts(strata)
    return replace(dataset, strata=train, strata_test=test, strata_names=strata_names)


def _group_pairs(examples: Examples) -> Examples:
    """Examples whose rows are two by two those of a pair, with a label that means nothing."""
    assert isinstance(examples.x, dict)
    return Examples({name: t.unflatten(0, (-1, 2)) for name, t in examples.x.items()}, examples.y[::2])


def tokenize_words(texts: Texts, tokenizer: Any, context: int) -> Dataset:
    """Tokens of texts whose words have labels; see :func:`.tokens.tokenize`.

    The first token of a word has its label. Other tokens of a word and special tokens have none (-100). Words have the
    tokens that they have in running text: where a tokenizer would join them, a space is written before each.

    Raises:
        ConfigError: if the tokenizer cannot tell which word a token is of, or joins words.
        DataError: if a text has another number of labels than words, or no token has a label.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            "labels by word need a fast tokenizer, which tells of which word a token is. Save one with "
            "transformers.AutoTokenizer.from_pretrained(name, use_fast=True)."
        )
    notes = list(texts.notes)
    pad_values = _choose_padding(tokenizer, notes)
    parts = [[r for r in part if isinstance(r, TokenLabeled)] for part in texts.parts]
    for record in chain.from_iterable(parts):
        if len(record.words) != len(record.labels):
            raise DataError(
                f"{record.location} has {len(record.words)} words and {len(record.labels)} labels. Give one for each."
            )
    space = _find_word_separator(tokenizer)
    if space:
        notes.append(
            "a space is written before each word, as in running text (what add_prefix_space = True does for tokenizers "
            "that have it)"
        )
    flat_labels, classes = _number_labels(
        texts, [[label for r in part for label in r.labels] for part in parts]
    )
    encodings, label_rows = [], []
    for name, records, part_labels in zip(("training", "test"), parts, flat_labels, strict=False):
        description = f"{name} part of {texts.name!r}"
        encoding, truncated_count = _encode_truncated(
            tokenizer, [[space + word for word in r.words] for r in records], context
        )
        _note_truncated(description, truncated_count, len(records), context, notes)
        text_labels, start = [], 0
        for i, record in enumerate(records):
            word_ids = encoding.word_ids(i)
            word_labels = part_labels[start : start + len(record.words)]
            start += len(record.words)
            text_labels.append(
                [
                    IGNORE_INDEX
                    if word is None or word == previous_word or word_labels[word] < 0
                    else word_labels[word]
                    for word, previous_word in zip(word_ids, [None, *word_ids], strict=False)
                ]
            )
        if all(label == IGNORE_INDEX for row in text_labels for label in row):
            raise DataError(f"{description}: no token has a label. Check the labels, or raise context.")
        encodings.append(encoding)
        label_rows.append(text_labels)
    width = max(len(row) for encoding in encodings for row in encoding["input_ids"])
    targets = [pad_rows(encoding, width, IGNORE_INDEX)[0] for encoding in label_rows]
    examples = _make_examples(encodings, targets, pad_values)
    return _make_dataset(texts.name, examples, classes, parts, notes)


def _find_word_separator(tokenizer: Any) -> str:
    """What to write before each word of a list, so that their tokens are those of the words in running text."""
    for space in ("", " "):
        words = [[f"{space}a", f"{space}b"]]
        try:
            ids = tokenizer(words, is_split_into_words=True, add_special_tokens=False)["input_ids"][0]
        except AssertionError:
            # releases of transformers before 5 refuse lists of words without add_prefix_space
            break
        if list(ids) == list(tokenizer(f"{space}a b", add_special_tokens=False)["input_ids"]):
            return space
    raise ConfigError(
        "labels by word: the tokenizer joins the words of a list, so they have other tokens than in running text. Save one "
        "with transformers.AutoTokenizer.from_pretrained(name, add_prefix_space=True)."
    )


def _make_dataset(
    name: str,
    examples: Sequence[Examples],
    classes: tuple[str, ...],
    parts: Sequence[Sequence[Record]],
    notes: Sequence[str],
) -> Dataset:
    client_ids, client_names = number_clients(parts)
    return Dataset(
        name,
        *split_parts(examples),
        classes,
        *split_parts(client_ids),
        notes=tuple(notes),
        natural_names=client_names,
    )


def _make_examples(
    encodings: Sequence[Any], targets: Sequence[Tensor], pad_values: dict[str, int]
) -> list[Examples]:
    """Padded inputs of each part, of the width of the longest text of all, with the targets."""
    width = max(len(row) for encoding in encodings for row in encoding["input_ids"])
    examples = []
    for encoding, y in zip(encodings, targets, strict=True):
        x = {name: pad_rows(encoding[name], width, value)[0] for name, value in pad_values.items()}
        mask = pad_rows(encoding["input_ids"], width, pad_values["input_ids"])[1]
        examples.append(Examples({**x, "attention_mask": mask}, y))
    return examples


def _choose_padding(tokenizer: Any, notes: list[str]) -> dict[str, int]:
    """The inputs of the model, each with the value that pads it."""
    pad_values = {"input_ids": choose_pad_token(tokenizer, notes)}
    if "token_type_ids" in tokenizer.model_input_names:
        pad_values["token_type_ids"] = getattr(tokenizer, "pad_token_type_id", 0)
    return pad_values


def _number_labels(
    texts: Texts, labels: Sequence[Sequence[str | int]]
) -> tuple[Sequence[list[int]], tuple[str, ...]]:
    """Class numbers in each part, and names of the classes; negative numbers stay."""
    number_by_name: dict[str | int, int] = {name: i for i, name in enumerate(texts.classes)}
    if texts.classes and not texts.labels_are_numbers:
        numbers = _match_names(texts, labels)
        if numbers is not None:
            return numbers, texts.classes
    for label in chain.from_iterable(labels) if texts.classes else ():
        if isinstance(label, str) and label not in number_by_name:
            hint = did_you_mean(label, texts.classes)
            raise DataError(f"{texts.name!r} has a label {label!r} that is no class. {hint}")
    if len({isinstance(label, str) for part in labels for label in part}) > 1:
        raise DataError(f"the labels of {texts.name!r} are text in some records and numbers in others.")
    if not texts.classes:
        arrays = [np.array(part) for part in labels]
        if arrays[0].dtype.kind in "iu" and min(int(part.min(initial=0)) for part in arrays) < 0:
            return [part.tolist() for part in arrays], list_label_classes(
                texts, list(chain.from_iterable(labels))
            )
        label_tensors, classes = encode_labels(arrays, f"the labels of {texts.name!r}")
        return [part.tolist() for part in label_tensors], classes
    class_numbers = [[int(number_by_name.get(label, label)) for label in part] for part in labels]
    return class_numbers, texts.classes


def list_label_classes(texts: Texts, labels: Sequence[str | int]) -> tuple[str, ...]:
    """Name the classes of labels whose texts name none: the sorted texts, or the numbers from 0 up to the largest label.

    Args:
        texts: texts of the labels, for messages.
        labels: labels of all texts or words, all text or all whole numbers; at least one.

    Raises:
        DataError: if a number is too large to be the index of a class.
    """
    numbers = [label for label in labels if isinstance(label, int)]
    if not numbers:
        return tuple(sorted({str(label) for label in labels}))
    max_label = max(numbers)
    if max_label >= max(MAX_UNSEEN_CLASSES, len(labels)):
        raise DataError(
            f"the labels of {texts.name!r} are the indices of classes, from 0 on; there is a {max_label}, and only "
            f"{len(labels)} labels. List the labels in data.classes, or give them as text."
        )
    return tuple(map(str, range(max_label + 1)))


def _match_names(texts: Texts, labels: Sequence[Sequence[str | int]]) -> list[list[int]] | None:
    """Class numbers of labels that are the names of classes, also as whole numbers; None if some are not.

    Raises:
        DataError: if labels and names of classes are whole numbers, and a label is no name: it may be meant to count
            from 0.
    """
    number_by_name = {name: i for i, name in enumerate(texts.classes)}
    label_set = set(chain.from_iterable(labels))
    unmatched_labels = {label for label in label_set if str(label) not in number_by_name}
    text_labels = {label for label in unmatched_labels if isinstance(label, str)}
    # negative numbers are words without a label
    numbers = sorted(int(label) for label in unmatched_labels - text_labels if int(label) >= 0)
    if not text_labels and not numbers:
        number_by_label = {label: number_by_name[str(label)] for label in label_set - unmatched_labels}
        return [[number_by_label.get(label, -1) for label in part] for part in labels]
    number_names = [name for name in texts.classes if _WHOLE_NUMBER.fullmatch(name)]
    if numbers and number_names:
        raise DataError(
            f"{texts.name!r} has a label {numbers[0]} that is no class, and names of classes are whole numbers, such as "
            f"{number_names[0]!r}. Such labels are matched to the names and do not count from 0: list the labels in "
            "data.classes as they are in the rows, or give the classes names that are no numbers."
        )
    return None


def _encode_truncated(tokenizer: Any, texts: Sequence[str | list[str]], context: int) -> tuple[Any, int]:
    """Inputs of the texts with special tokens, at most ``context``; and the number of truncated texts."""
    options: dict[str, Any] = {"is_split_into_words": True} if isinstance(texts[0], list) else {}
    encoding = tokenizer(texts, verbose=False, **options)
    truncated_count = sum(len(row) > context for row in encoding["input_ids"])
    if truncated_count:
        # The tokenizer itself truncates, because it knows which special tokens must stay.
        side, tokenizer.truncation_side = tokenizer.truncation_side, "right"
        try:
            encoding = tokenizer(texts, truncation=True, max_length=context, **options)
        finally:
            tokenizer.truncation_side = side
    if empty_count := sum(not row for row in encoding["input_ids"]):
        raise DataError(
            f"{empty_count} of {len(texts)} texts have no token. Use a tokenizer for their characters."
        )
    return encoding, truncated_count


def _note_truncated(
    description: str, truncated_count: int, text_count: int, context: int, notes: list[str]
) -> None:
    if truncated_count:
        notes.append(
            f"{description}: {truncated_count} of {text_count} texts are longer than {context} tokens and were truncated on "
            "the right"
        )
