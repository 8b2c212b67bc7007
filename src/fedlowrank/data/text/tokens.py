"""Tokenization of text records to a data set of token ids."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.arguments.bounds import check_minimum
from ...core.errors import ConfigError, DataError
from ...core.learning.losses import IGNORE_INDEX
from ..dataset import Dataset, Examples
from .chat.chat_template import ChatTemplate, LossOn, SystemRole
from .label_tokens import tokenize_labeled, tokenize_pairs, tokenize_words
from .on_disk.token_file import TokenFile
from .packing import Sample, pack_sequences
from .sample_limits import Draft, DropTurns, LengthLimit, Truncate, fit_samples
from .text_arrays import choose_pad_token, number_clients, number_strata, pad_rows, split_parts
from .text_formats import Format, choose_format, is_plain_text, make_conversation, render_instruction
from .text_records import Conversation, Instruction, Preference, Record, Texts


@dataclass(frozen=True)
class TextSettings:
    """Settings of the tokenization.

    Attributes:
        format: how instructions are written as text: ``chat``, as conversations of two turns; ``auto``, as the rows call for;
            or as in `text_formats.render_instruction`. Labeled texts stay unchanged, and conversations are written by the
            chat template.
        context: largest number of tokens of an example, at least 2.
        loss_on: what a causal model learns: ``response``, the response or all turns of the assistant, also
            called ``assistant``; ``last``, the last turn of the assistant; ``all``, every token.
        packing: whether short samples of instructions or conversations share a row, see
            `packing.pack_sequences`. Samples of different categories or natural clients never do.
        truncate: what happens to longer samples: see `sample_limits.LengthLimit`. Labeled texts lose their end.
        system: what to do with system turns of conversations, see `chat_template.ChatTemplate`.
    """

    format: Format = "alpaca"
    context: int = 512
    loss_on: LossOn = "response"
    packing: bool = False
    truncate: Truncate = "right"
    system: SystemRole = "template"

    def __post_init__(self) -> None:
        check_minimum("context", self.context, 2)


_CHUNK_RECORDS = 1024
"""Instructions that are written as text at once."""

_BATCH_TEXTS = 64
"""Texts that are tokenized at once: more take more time, for their tokens leave the processor's cache."""

DEFAULT_SETTINGS = TextSettings()
"""Instructions in the format of Alpaca, at most 512 tokens, loss on the response."""


def tokenize(texts: Texts, tokenizer: Any, settings: TextSettings = DEFAULT_SETTINGS) -> Dataset:
    """Convert texts to token ids, padded on the right to the longest example of both parts.

    Instructions, for a causal language model: inputs ``input_ids`` and ``attention_mask``, int64 [n, T];
    labels int64 [n, T] with the token's own id where the loss counts and -100 elsewhere, not shifted. A
    sample is: the tokens that the tokenizer writes before every text by itself (such as a BOS), the prompt, the response, an
    EOS; the first and the last once, also where the text has them already. Prompt and response are tokenized separately and
    joined, so that the tokens of the prompt are those from which a model generates; the tokens of the whole text may differ
    at the boundary. With packing there are ``position_ids``, too.

    Conversations, and instructions with format ``chat``: the same, with the tokens of the chat template and nothing else;
    see `chat_template.ChatTemplate`.

    Preference pairs: the same with one more axis, [n, 2, T]: at 0 the prompt with the chosen response, at 1
    with the rejected one.

    Pairs of texts, for embeddings: inputs as of labeled texts with one more axis, [n, 2, T]: at 0 the anchor, at 1
    the positive; the label is 0 everywhere.

    Labeled texts, for a classifier: inputs ``input_ids``, ``attention_mask`` and, if the tokenizer lists it
    among its ``model_input_names``, ``token_type_ids``, int64 [n, T], with the special tokens that the
    tokenizer adds; labels int64 [n]. Words with labels: the same, labels int64 [n, T], -100 where a token is
    not the first of a word.

    Categories become the strata of the data set, which partitions use. Its notes tell what was truncated or
    dropped: a sample without a response token left to learn is dropped.

    Args:
        texts: the records.
        tokenizer: tokenizer of ``transformers``, or an object with the same interface.
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
    kind = texts.kind
    if settings.packing and kind not in ("instructions", "conversations"):
        description = {"preferences": "are preference pairs", "pairs": "are pairs of texts"}.get(
            kind, "have class labels"
        )
        raise ConfigError(f"packing is for instructions; these texts {description}. Set packing to false.")
    if texts.folder is not None and (settings.packing or kind not in ("instructions", "conversations")):
        problem = "language.packing" if settings.packing else f"rows of the kind {kind!r}"
        raise ConfigError(
            f"data.on_disk is for instructions, conversations and plain texts, and not for {problem}. Leave it out"
        )
    if kind == "classes":
        return tokenize_labeled(texts, tokenizer, settings.context)
    if kind == "pairs":
        return tokenize_pairs(texts, tokenizer, settings.context)
    if kind == "token_classes":
        return tokenize_words(texts, tokenizer, settings.context)
    return _tokenize_causal(texts, tokenizer, settings)


def _tokenize_causal(texts: Texts, tokenizer: Any, settings: TextSettings) -> Dataset:
    notes = list(texts.notes)
    settings = replace(settings, format=choose_format(texts, settings.format))
    pad_token_id = choose_pad_token(tokenizer, notes)
    if tokenizer.eos_token_id is None and settings.format != "chat":
        notes.append("the tokenizer has no EOS: responses end without one")
    strata, strata_names = number_strata(texts.name, texts.parts)
    client_ids, client_names = number_clients(texts.parts)
    if texts.folder is not None:
        files = [
            TokenFile(_make_samples(description, records, tokenizer, settings, notes), texts.folder)
            for _, description, records in _name_parts(texts)
        ]
        width = max(file.width for file in files)
        mapped_examples: list[Examples] = [file.pad(width, pad_token_id) for file in files]
        file_records = [file.records for file in files]
        return _make_dataset(
            texts, mapped_examples, file_records, (strata, strata_names), (client_ids, client_names), notes
        )
    parts: list[list[list[Sample]]] = []
    for name, description, records in _name_parts(texts):
        columns = _make_columns(description, records, tokenizer, settings, notes)
        if settings.packing:
            (samples,) = columns
            packed_rows = _pack_groups(samples, records, settings.context)
            notes.append(f"{name} part: {len(samples)} samples packed into {len(packed_rows)} rows")
            columns = [packed_rows]
        parts.append(columns)
    width = max(len(sample.ids) for columns in parts for samples in columns for sample in samples)
    examples = [_make_examples(columns, width, pad_token_id, is_packed=settings.packing) for columns in parts]
    record_numbers = [torch.tensor([sample.record for sample in columns[0]]) for columns in parts]
    return _make_dataset(
        texts, examples, record_numbers, (strata, strata_names), (client_ids, client_names), notes
    )


def _name_parts(texts: Texts) -> Iterator[tuple[str, str, Sequence[Record]]]:
    """The parts of texts: the name, the name with the source, and the records."""
    for name, records in zip(("training", "test"), texts.parts, strict=False):
        yield name, f"{name} part of {texts.name!r}", records


def _make_dataset(
    texts: Texts,
    examples: Sequence[Examples],
    record_numbers: Sequence[Tensor],
    strata: tuple[Sequence[Tensor | None], tuple[str, ...]],
    natural_clients: tuple[Sequence[Tensor | None], tuple[str, ...]],
    notes: Sequence[str],
) -> Dataset:
    """Make the data set of the examples of each part, and of the numbers of their records.

    Args:
        texts: the records.
        examples: examples of each part.
        record_numbers: number of the record of each example, int64 [n], of each part.
        strata: category number of each record of each part, and the names of the categories.
        natural_clients: client number of each record of each part, and the names of the clients.
        notes: warnings for the reader of results.
    """
    strata_of_examples, clients_of_examples = (
        [None if v is None else v[index] for v, index in zip(values, record_numbers, strict=True)]
        for values, _ in (strata, natural_clients)
    )
    return Dataset(
        texts.name,
        *split_parts(examples),
        (),
        *split_parts(clients_of_examples),
        *split_parts(strata_of_examples),
        strata[1],
        tuple(notes),
        natural_clients[1],
    )


def _make_columns(
    description: str, records: Sequence[Record], tokenizer: Any, settings: TextSettings, notes: list[str]
) -> list[list[Sample]]:
    """The samples of the records: a list of them, or for preference pairs two of equal length."""
    if not isinstance(records[0], Preference):
        samples = _make_samples(description, records, tokenizer, settings, notes)
        return [[sample for sample in samples if sample is not None]]
    pairs = [record for record in records if isinstance(record, Preference)]
    sides = ("chosen", "rejected")
    descriptions = [f"{side} responses, {description}" for side in sides]
    drafts = [
        _make_drafts(side_description, [getattr(pair, side) for pair in pairs], tokenizer, settings, notes)
        for side_description, side in zip(descriptions, sides, strict=True)
    ]
    limit = LengthLimit(settings.context, settings.truncate)
    drop_turns = _make_drop_turns(drafts[0].chat, settings.context)
    fitted_pairs = fit_samples(
        descriptions, zip(*(side.drafts for side in drafts), strict=True), limit, drop_turns, notes
    )
    complete_pairs = [
        (chosen, rejected) for chosen, rejected in fitted_pairs if chosen is not None and rejected is not None
    ]
    if not complete_pairs:
        raise DataError(f"{description}: within {settings.context} tokens no pair is left. Raise context.")
    if len(complete_pairs) < len(pairs):
        notes.append(
            f"{description}: {len(pairs) - len(complete_pairs)} of {len(pairs)} pairs dropped: a response has no token"
        )
    return [[a for a, _ in complete_pairs], [b for _, b in complete_pairs]]


def _make_examples(
    columns: Sequence[Sequence[Sample]], width: int, pad_token_id: int, *, is_packed: bool
) -> Examples:
    """Padded tokens; two columns are stacked along axis 1."""
    x: dict[str, list[Tensor]] = {"input_ids": [], "attention_mask": []}
    y = []
    for samples in columns:
        ids, mask = pad_rows([sample.ids for sample in samples], width, pad_token_id)
        x["input_ids"].append(ids)
        x["attention_mask"].append(mask)
        y.append(pad_rows([sample.labels for sample in samples], width, IGNORE_INDEX)[0])
        if is_packed:
            positions = pad_rows([sample.positions for sample in samples], width, 0)[0]
            x.setdefault("position_ids", []).append(positions)
    if len(columns) == 1:
        return Examples({name: tensors[0] for name, tensors in x.items()}, y[0])
    return Examples({name: torch.stack(tensors, 1) for name, tensors in x.items()}, torch.stack(y, 1))


def _pack_groups(samples: Sequence[Sample], records: Sequence[Record], context: int) -> list[Sample]:
    """Rows of samples of the same category and client."""
    groups: dict[tuple[str | None, str | None], list[Sample]] = {}
    for sample in samples:
        record = records[sample.record]
        assert isinstance(record, Instruction | Conversation)
        groups.setdefault((record.category, record.client), []).append(sample)
    return list(chain.from_iterable(pack_sequences(group, context) for group in groups.values()))


def _make_samples(
    description: str, records: Sequence[Record], tokenizer: Any, settings: TextSettings, notes: list[str]
) -> Iterator[Sample | None]:
    """Tokens and labels of each record, truncated, one after another; None of those with nothing to learn."""
    limit = LengthLimit(settings.context, settings.truncate)
    drafts, chat = _make_drafts(description, records, tokenizer, settings, notes)
    drop_turns = _make_drop_turns(chat, settings.context)
    samples = fit_samples([description], zip(drafts), limit, drop_turns, notes)
    return (sample for (sample,) in samples)


class _Drafts(NamedTuple):
    """Samples of any length, read once.

    Attributes:
        drafts: the samples.
        chat: the chat template that writes them; None for records without turns.
    """

    drafts: Iterator[Draft]
    chat: ChatTemplate | None


def _make_drafts(
    description: str, records: Sequence[Record], tokenizer: Any, settings: TextSettings, notes: list[str]
) -> _Drafts:
    """Tokens and labels of each record, of any length, one after another.

    Raises:
        ConfigError: if settings are for conversations and the records have no turns.
    """
    if settings.format == "chat":
        chat = ChatTemplate(tokenizer, settings.loss_on, settings.system)
        return _Drafts(_draft_conversations(description, records, chat, settings, notes), chat)
    if settings.truncate == "turns":
        raise ConfigError(
            "truncate = 'turns' leaves out turns of conversations, and these rows have none. Set it to 'right', "
            "'left' or 'refuse'."
        )
    if settings.system == "merge":
        raise ConfigError(
            "system = 'merge' puts the system turn of a conversation before its first question, and these rows have no "
            "turns. Leave it out."
        )
    if settings.loss_on == "last":
        raise ConfigError(
            "loss_on = 'last' is for conversations, and these rows have no turns. Set loss_on to 'response' or "
            "'all'."
        )
    return _Drafts(_draft_instructions(description, records, tokenizer, settings, notes), None)


def _make_drop_turns(chat: ChatTemplate | None, context: int) -> DropTurns | None:
    """The function that leaves out the oldest turns of the samples of a record; None without turns."""
    if chat is None:
        return None

    def drop_turns(drafts: Sequence[Draft], record: int) -> Sequence[Sample]:
        conversations = [draft.conversation for draft in drafts if draft.conversation is not None]
        if len(conversations) == 1:
            return [chat.fit_turns(conversations[0], context, record)]
        return chat.fit_prompt_turns(conversations, context, record)

    return drop_turns


def _draft_conversations(
    description: str, records: Sequence[Any], chat: ChatTemplate, settings: TextSettings, notes: list[str]
) -> Iterator[Draft]:
    """Samples of any length of each conversation or instruction; after the last one come the notes."""
    conversations = (
        make_conversation(record, f"{description}, record {i}") if isinstance(record, Instruction) else record
        for i, record in enumerate(records, 1)
    )
    endless_count = blank_count = 0
    for conversation, sample in chat.samples(conversations):
        endless_count += not chat.has_end(sample)
        blank_count += chat.count_blank_turns(conversation)
        yield Draft(sample, 0, len(sample.ids), conversation.location, conversation.client, conversation)
    if endless_count and settings.loss_on != "all":
        notes.append(
            f"{description}: in {endless_count} of {len(records)} conversations no special token ends the last answer, so "
            "a model does not learn where to stop: check the chat template"
        )
    if blank_count and settings.loss_on != "all":
        notes.append(
            f"{description}: turns of the assistant with neither text nor calls of tools are not learnt: {blank_count}"
        )
    if chat.unread_keys:
        notes.append(
            f"{description}: the chat template reads no {', '.join(map(repr, chat.unread_keys))} of the messages"
        )


def _draft_instructions(
    description: str, records: Sequence[Any], tokenizer: Any, settings: TextSettings, notes: list[str]
) -> Iterator[Draft]:
    """Samples of any length of each instruction, tokenized in chunks; after the last one come the notes."""
    prefix = find_added_prefix(tokenizer)
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    iterator = iter(records)
    plain_count = 0
    for start in range(0, len(records), _CHUNK_RECORDS):
        chunk: list[Instruction] = list(islice(iterator, _CHUNK_RECORDS))
        plain_count += sum(map(is_plain_text, chunk))
        text_pairs = [render_instruction(record, settings.format) for record in chunk]
        rows = join_responses(tokenizer, text_pairs, prefix, eos)
        for i, (record, (ids, response_start, response_end)) in enumerate(
            zip(chunk, rows, strict=True), start
        ):
            labels = (
                ids.copy()
                if settings.loss_on == "all"
                else [IGNORE_INDEX] * response_start + ids[response_start:]
            )
            yield Draft(
                Sample(ids, labels, i),
                response_start,
                response_end,
                f"{description}, record {i + 1}",
                record.client,
            )
    if plain_count and settings.format == "alpaca":
        notes.append(
            f"{description}: records without an instruction, written without a prompt: {plain_count} of {len(records)}"
        )


class JoinedTokens(NamedTuple):
    """Tokens of a prompt with its response.

    Attributes:
        ids: the token ids.
        response_start: the position of the first token of the response.
        response_end: the position after its last token.
    """

    ids: list[int]
    response_start: int
    response_end: int


def join_responses(
    tokenizer: Any, text_pairs: Sequence[tuple[str, str]], prefix: list[int], end: list[int]
) -> Iterator[JoinedTokens]:
    """Tokenize prompts and responses apart and join them, so that no token spans both.

    Args:
        tokenizer: tokenizer of ``transformers``.
        text_pairs: each prompt, which may be empty, with its response.
        prefix: tokens before each prompt, see :func:`find_added_prefix`; left out where the text has them already.
        end: the token after each response, or nothing; left out where the response has it already.
    """
    prompts = _encode_in_batches(tokenizer, [prompt for prompt, _ in text_pairs])
    responses = _encode_in_batches(tokenizer, [response for _, response in text_pairs])
    for prompt, response in zip(prompts, responses, strict=True):
        has_prefix = [*prompt, *response][: len(prefix)] == prefix
        prompt_ids = prompt if has_prefix else [*prefix, *prompt]
        has_end = response[-1:] == end
        ids = [*prompt_ids, *response, *([] if has_end else end)]
        yield JoinedTokens(ids, len(prompt_ids), len(prompt_ids) + len(response))


def find_added_prefix(tokenizer: Any) -> list[int]:
    """Find the tokens that a tokenizer writes before every text by itself, such as a BOS or ``[gMASK]<sop>``."""
    # Kinds of tokenizers have different settings for it, so see what this one does.
    special_ids, plain_ids = list(tokenizer("a")["input_ids"]), _encode(tokenizer, ["a"])[0]
    # after the text may stand an EOS or another token, which is no prefix
    for length in range(len(special_ids) - len(plain_ids) + 1):
        if special_ids[length : length + len(plain_ids)] == plain_ids:
            return special_ids[:length]
    return []


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, without special tokens."""
    if _has_plain_backend(tokenizer):
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]
    encoding = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [list(ids) for ids in encoding["input_ids"]]


def _encode_in_batches(tokenizer: Any, texts: list[str]) -> Iterator[list[int]]:
    """Token ids of each text, one after another; see :func:`_encode`."""
    for start in range(0, len(texts), _BATCH_TEXTS):
        yield from _encode(tokenizer, texts[start : start + _BATCH_TEXTS])


def _has_plain_backend(tokenizer: Any) -> bool:
    """Whether the backend alone gives the tokens of a tokenizer, without offsets and so in less time."""
    fast_type = getattr(sys.modules.get("transformers"), "PreTrainedTokenizerFast", None)
    if fast_type is None or not isinstance(tokenizer, fast_type):
        return False
    backend = tokenizer.backend_tokenizer
    # a call of the tokenizer sets these three
    is_set_up = backend.truncation is None and backend.padding is None
    splits_special = bool(getattr(tokenizer, "split_special_tokens", False))
    return (
        is_set_up
        and backend.encode_special_tokens == splits_special
        and all(
            getattr(type(tokenizer), name, None) is getattr(fast_type, name, None)
            for name in ("__call__", "_encode_plus", "_batch_encode_plus")
        )
    )
