"""Tokens of conversations by the tokenizer's chat template, and which of them are the assistant's."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from jinja2 import TemplateError

from ....core.errors import ConfigError, DataError
from ....core.learning.losses import IGNORE_INDEX
from ..packing import Sample
from ..text_records import ChatMessage, Conversation
from .chat_messages import drop_oldest_exchange, is_blank, is_learnt, merge_system

LossOn: TypeAlias = Literal["response", "assistant", "last", "all"]
SystemRole: TypeAlias = Literal["template", "merge"]
Span = tuple[int, int]

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

_WRITTEN_KEYS = ("role", "content", "tool_calls", "weight", "train")
"""Keys of messages that are checked, or that say what is learnt."""

_MAX_TRIED_CONVERSATIONS = 20
"""At most so many conversations are written without a key, to find out whether the template reads it."""

_CHUNK_CHARACTERS = 1 << 13
"""Conversations of about so many characters are tokenized at once."""

# What templates raise: their own errors, and those of Python's operations on values that they do not expect.
_RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


class _Encoded(NamedTuple):
    """Tokens of a text, and the characters from which each was made."""

    ids: list[int]
    offsets: list[Span]


class ChatTemplate:
    """Writes conversations by a tokenizer's chat template and marks the assistant's tokens.

    A whole conversation is tokenized at once. The assistant's text is what the template puts between ``{%
    generation %}`` and ``{% endgeneration %}``; in a template without these markers it is what follows the
    prompt for generation, so that a model learns to write after the very text that it will be given. White
    space that a template writes after the token that ends a turn is not learnt.

    Args:
        tokenizer: a fast tokenizer of ``transformers`` with a chat template.
        loss_on: ``response`` or ``assistant``: all turns of the assistant; ``last``: its last turn alone;
            ``all``: every token. But for ``all``, turns that their row marks as not learnt
            (:func:`.chat_messages.is_learnt`) and turns without text or calls of tools are left out.
        system: ``template``: the system's turn is written by the template; ``merge``: its text is put before
            the first user's.

    Raises:
        ConfigError: if the tokenizer has no chat template, or gives no offsets of its tokens.
    """

    def __init__(self, tokenizer: Any, loss_on: LossOn, system: SystemRole) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "conversations and format 'chat' need a tokenizer with a chat template, which this one lacks. Use the "
                "tokenizer of an instruction-tuned model, or set tokenizer.chat_template and save it; for instructions "
                "you may also use format 'alpaca' or 'plain'."
            )
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                "conversations and format 'chat' need a fast tokenizer, which gives the offsets of its tokens. Save one with "
                "transformers.AutoTokenizer.from_pretrained(name, use_fast=True)."
            )
        self._tokenizer, self._loss_on, self._system = tokenizer, loss_on, system
        self._ends = _list_added_tokens(tokenizer)
        self._special = frozenset(tokenizer.convert_tokens_to_ids(list(self._ends)))
        self._read_keys: set[str] = set()
        self._tried_keys: Counter[str] = Counter()
        self._title = f"the chat template of {tokenizer.name_or_path or type(tokenizer).__name__!r}"

    def write_prompt(self, conversation: Conversation) -> str:
        """Write the text after which the first turn to learn is generated.

        Raises:
            DataError: if the template fails.
        """
        return self._render(conversation, conversation.learn_from, add_generation_prompt=True)

    def sample(self, conversation: Conversation, record: int = 0) -> Sample:
        """Tokens and labels of a conversation of any length; see :meth:`samples`."""
        ((_, sample),) = self.samples([conversation], record)
        return sample

    def samples(
        self, conversations: Iterable[Conversation], first_record: int = 0
    ) -> Iterator[tuple[Conversation, Sample]]:
        """Each conversation with its tokens and labels, of any length. Many are tokenized at once.

        Args:
            conversations: their turns, read once.
            first_record: number of the first one, for the samples.

        Raises:
            DataError: if the template fails, leaves a turn out, or rewrites earlier turns when later ones
                follow, so that it cannot be told which tokens the assistant writes.
        """
        iterator = iter(conversations)
        while True:
            chunk, error = self._write_chunk(iterator)
            encodings = self._encode([text for _, _, text in chunk]) if chunk else []
            for (conversation, written, text), encoding in zip(chunk, encodings, strict=True):
                yield conversation, self._label(written, text, encoding, first_record)
                first_record += 1
            # errors come in the order of the conversations
            if error is not None:
                raise error
            if not chunk:
                return

    def _write_chunk(
        self, conversations: Iterator[Conversation]
    ) -> tuple[list[tuple[Conversation, Conversation, str]], DataError | None]:
        """The next conversations, each as it is written and its text; and the error of the one after them."""
        chunk: list[tuple[Conversation, Conversation, str]] = []
        character_count = 0
        try:
            for conversation in conversations:
                written = self._merge_system(conversation)
                text = self._render(written)
                self._check_turns_are_written(written, text)
                has_new_keys = self._try_keys(written, text)
                chunk.append((conversation, written, text))
                character_count += len(text)
                # what is tried next may depend on what the caller makes of this conversation
                if has_new_keys or character_count >= _CHUNK_CHARACTERS:
                    break
        except DataError as error:
            return chunk, error
        return chunk, None

    def _merge_system(self, conversation: Conversation) -> Conversation:
        if self._system != "merge":
            return conversation
        messages = merge_system(conversation.messages, conversation.location)
        merged_count = len(conversation.messages) - len(messages)
        start = max(0, conversation.learn_from - merged_count)
        return replace(conversation, messages=messages, learn_from=start)

    def _label(self, conversation: Conversation, text: str, encoding: _Encoded, record: int) -> Sample:
        """The tokens of a conversation with those labels that are learnt."""
        if self._loss_on == "all":
            if not all(map(is_learnt, conversation.messages)):
                raise DataError(
                    f"{conversation.location}: a turn is marked as not learnt ('weight': 0 or 'train': false), and loss_on = "
                    "'all' learns every token. Set loss_on to 'assistant'."
                )
            return Sample(encoding.ids, encoding.ids.copy(), record)
        spans = self._find_marked_spans(conversation)
        if spans is None:
            spans = self._find_spans_after_prompts(conversation, text, encoding)
        loss_mask = _find_overlaps(encoding.offsets, spans)
        labels = np.where(loss_mask, encoding.ids, IGNORE_INDEX).tolist()
        return Sample(encoding.ids, labels, record)

    @property
    def unread_keys(self) -> list[str]:
        """Keys of messages so far that changed nothing of what the template writes."""
        return sorted(self._tried_keys.keys() - self._read_keys)

    def count_blank_turns(self, conversation: Conversation) -> int:
        """The number of turns that are not learnt because they have neither text nor calls of tools."""
        return len(self._list_marked_turns(conversation)) - len(self._choose_turns(conversation))

    def has_end(self, sample: Sample) -> bool:
        """Whether the last token to learn is a special one, by which a model learns to stop."""
        last_target = next((label for label in reversed(sample.labels) if label != IGNORE_INDEX), None)
        return last_target is None or last_target in self._special

    def fit_turns(self, conversation: Conversation, context: int, record: int = 0) -> Sample:
        """The sample without as many of the oldest exchanges as it takes to fit the context.

        The system's turn and the last exchange stay, even where they are longer than the context.
        """
        sample = self.sample(conversation, record)
        while len(sample.ids) > context:
            shorter = _drop_exchange(conversation, None)
            if shorter is None:
                return sample
            conversation, sample = shorter, self.sample(shorter, record)
        return sample

    def fit_prompt_turns(
        self, conversations: Sequence[Conversation], context: int, record: int = 0
    ) -> list[Sample]:
        """The samples of responses to one prompt, without as many of its oldest exchanges as it takes for all to fit.

        All lose the same turns. The system's turn and the prompt's last exchange stay, even where a sample is longer than
        the context.
        """
        samples = [self.sample(conversation, record) for conversation in conversations]
        while any(len(sample.ids) > context for sample in samples):
            shorter = [_drop_exchange(c, c.learn_from) for c in conversations]
            conversations = [conversation for conversation in shorter if conversation is not None]
            if len(conversations) < len(samples):
                break
            samples = [self.sample(conversation, record) for conversation in conversations]
        return samples

    def _render(
        self, conversation: Conversation, turns: int | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """The first turns as text, with ``add_generation_prompt`` up to where the assistant writes."""
        messages = [dict(message) for message in conversation.messages[:turns]]
        try:
            return str(self._apply(messages, conversation, add_generation_prompt))
        except _RENDER_ERRORS as error:
            location, hint = conversation.location, "Change the row, or use another template."
            if messages and messages[0]["role"] == "system" and self._renders(messages[1:], conversation):
                hint = (
                    "It has no role 'system'. Set system = 'merge' to put the system's text before the first "
                    "user's, or use another template."
                )
            raise DataError(f"{location}: {self._title} fails: {error}. {hint}") from error

    def _apply(
        self, messages: list[dict[str, Any]], conversation: Conversation, add_generation_prompt: bool
    ) -> Any:
        tools = list(conversation.tools) or None
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _renders(self, messages: list[dict[str, Any]], conversation: Conversation) -> bool:
        try:
            self._apply(messages, conversation, False)
        except _RENDER_ERRORS:
            return False
        return True

    def _check_turns_are_written(self, conversation: Conversation, text: str) -> None:
        """Reject a template that leaves out a text, calls of tools, or the tools."""
        prefix = f"{conversation.location}: {self._title} leaves out"
        for k, message in enumerate(conversation.messages):
            role, hint = message["role"], "Use another template."
            is_written = message["content"].strip() in text
            if role in ("system", "user") and not is_written:
                if role == "system":
                    hint = "Set system = 'merge' to put it before the first user's text, or use another template."
                raise DataError(f"{prefix} or changes turn {k + 1}, of the {role}. {hint}")
            # a template may change what an assistant or a tool says, such as its thoughts; an answer often repeats a tool's
            is_written = not message["content"].strip() or (is_written and role != "tool")
            if not is_written and self._is_unread(conversation, text, "content", k):
                raise DataError(f"{prefix} the text of turn {k + 1}, of the {role}. {hint}")
            if message.get("tool_calls") and self._is_unread(conversation, text, "tool_calls", k):
                raise DataError(
                    f"{prefix} the calls of tools of turn {k + 1}, so that a model would learn an answer without them. Use a "
                    "template that writes them, or leave these rows out."
                )
        if conversation.tools and self._is_same(replace(conversation, tools=()), text):
            raise DataError(
                f"{prefix} the tools. Use a template that writes them, or leave the column 'tools' out."
            )

    def _try_keys(self, conversation: Conversation, text: str) -> bool:
        """Find out which further keys of messages the template reads, and return whether there were any to try."""
        keys = {key for message in conversation.messages for key in message}
        new_keys = [
            key
            for key in keys - self._read_keys - set(_WRITTEN_KEYS)
            if self._tried_keys[key] < _MAX_TRIED_CONVERSATIONS
        ]
        for key in new_keys:
            self._tried_keys[key] += 1
            if not self._is_unread(conversation, text, key):
                self._read_keys.add(key)
        return bool(new_keys)

    def _is_unread(self, conversation: Conversation, text: str, key: str, turn: int | None = None) -> bool:
        """Whether the text is the same without a key in one turn, or in all; of a content, with an empty one."""
        replacement = {"content": ""} if key == "content" else {}
        messages = tuple(
            {name: value for name, value in message.items() if name != key} | replacement
            if turn in (None, k)
            else message
            for k, message in enumerate(conversation.messages)
        )
        return self._is_same(replace(conversation, messages=messages), text)

    def _is_same(self, conversation: Conversation, text: str) -> bool:
        """Whether the template writes a conversation as this text."""
        try:
            return str(self._apply([dict(m) for m in conversation.messages], conversation, False)) == text
        except _RENDER_ERRORS:
            # it misses what was left out
            return False

    def _encode(self, texts: list[str]) -> list[_Encoded]:
        # the template writes the special tokens itself
        encoding = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        return list(map(_Encoded, encoding["input_ids"], encoding["offset_mapping"]))

    def _find_marked_spans(self, conversation: Conversation) -> list[Span] | None:
        """Characters between the markers of the template; None without markers."""
        tools = list(conversation.tools) or None
        template = self._tokenizer.get_chat_template(None, tools)
        if not _MARKER.search(template):
            return None
        # apply_chat_template(return_assistant_tokens_mask=True) finds tokens by single characters, and loses
        # turns that begin or end in a space, of which byte-level tokenizers trim the offsets
        # (huggingface/transformers#47325).
        library = importlib.import_module("transformers.utils.chat_template_utils")
        _, marked_spans = library.render_jinja_template(
            conversations=[[dict(message) for message in conversation.messages]],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        spans: list[Span] = [(a, b) for a, b in marked_spans[0]]
        turns, learnt_turns = _list_assistant_turns(conversation.messages), self._choose_turns(conversation)
        if self._loss_on == "last" and learnt_turns == turns[-1:]:
            return spans[-1:]
        if learnt_turns == turns:
            return spans
        if len(spans) != len(turns):
            raise DataError(
                f"{conversation.location}: {self._title} marks {len(spans)} places for {len(turns)} turns of the "
                "assistant, so it is unclear which of them are learnt. Use another template."
            )
        return [span for span, k in zip(spans, turns, strict=True) if k in learnt_turns]

    def _list_marked_turns(self, conversation: Conversation) -> list[int]:
        """The turns of the assistant that are to be learnt by ``loss_on`` and by their marks."""
        turns = [k for k in _list_assistant_turns(conversation.messages) if k >= conversation.learn_from]
        turns = turns[-1:] if self._loss_on == "last" else turns
        return [k for k in turns if is_learnt(conversation.messages[k])]

    def _choose_turns(self, conversation: Conversation) -> list[int]:
        """The turns of the assistant to learn."""
        messages = conversation.messages
        return [k for k in self._list_marked_turns(conversation) if not is_blank(messages[k])]

    def _find_spans_after_prompts(
        self, conversation: Conversation, text: str, encoding: _Encoded
    ) -> list[Span]:
        """Characters that follow the prompt for generation, of each turn of the assistant to learn."""
        messages, spans = conversation.messages, []
        for k in self._choose_turns(conversation):
            location = f"{conversation.location}, turn {k + 1}"
            if k == 0:
                raise DataError(
                    f"{location}: the assistant begins, so there is no prompt. Drop this turn, or use a template "
                    "with {% generation %} markers."
                )
            prompt = self._render(conversation, k, add_generation_prompt=True)
            partial_text = text if k + 1 == len(messages) else self._render(conversation, k + 1)
            if not partial_text.startswith(prompt):
                raise DataError(
                    f"{location}: {self._title} writes another prompt when the assistant's text follows, so the "
                    f"prompts of training and generation would differ: it is no longer {prompt[-60:]!r}. Use a "
                    "template with {% generation %} markers."
                )
            end = self._find_end(partial_text, text, encoding)
            if end is None:
                raise DataError(
                    f"{location}: {self._title} rewrites earlier turns when later ones follow (as some do with "
                    "thoughts), so a model would not learn what it has to write. Set loss_on = 'last', split the "
                    "conversation, or use a template with {% generation %} markers."
                )
            spans.append((len(prompt), self._strip_after_end(text, len(prompt), end)))
        return spans

    def _find_end(self, partial_text: str, text: str, encoding: _Encoded) -> int | None:
        """Where a conversation up to a turn ends within the whole text; None if the turn was rewritten.

        A template may end a whole conversation with special tokens that it does not write between turns.
        """
        if text.startswith(partial_text):
            return len(partial_text)
        ((ids, offsets),) = self._encode([partial_text])
        common_length = 0
        while (
            common_length < min(len(ids), len(encoding.ids))
            and ids[common_length] == encoding.ids[common_length]
        ):
            common_length += 1
        remaining_tokens = zip(ids[common_length:], offsets[common_length:], strict=True)
        if common_length and all(
            token in self._special or not partial_text[a:b].strip() for token, (a, b) in remaining_tokens
        ):
            return encoding.offsets[common_length - 1][1]
        return None

    def _strip_after_end(self, text: str, start: int, end: int) -> int:
        """The end of a turn without white space after a token that ends it."""
        turn = text[start:end].rstrip()
        return start + len(turn) if turn.endswith(self._ends) else end


def find_turn_end(tokenizer: Any) -> int | None:
    """Find the token by which a tokenizer's chat template ends the assistant's turns, and a model learns to stop.

    It is the first added or special token after the assistant's text.

    Args:
        tokenizer: tokenizer of ``transformers`` with a chat template.

    Returns:
        The id of the token; None if the template writes no such token, or needs other turns than a question and an
        answer.
    """
    answer = "answer"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    try:
        text = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=False))
    except _RENDER_ERRORS:
        return None
    rest = text.rpartition(answer)[2]
    ends = {rest.find(token): token for token in _list_added_tokens(tokenizer) if token in rest}
    return int(tokenizer.convert_tokens_to_ids(ends[min(ends)])) if ends else None


def _list_added_tokens(tokenizer: Any) -> tuple[str, ...]:
    """The added and special tokens of a tokenizer, without those of white space, sorted."""
    added_tokens = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return tuple(sorted(token for token in added_tokens | {*tokenizer.all_special_tokens} if token.strip()))


def _drop_exchange(conversation: Conversation, max_turns: int | None) -> Conversation | None:
    """The conversation without its oldest exchange; None if it has one alone, see :func:`.chat_messages.drop_oldest_exchange`."""
    messages = drop_oldest_exchange(conversation.messages, max_turns)
    if messages is None:
        return None
    dropped_count = len(conversation.messages) - len(messages)
    start = max(0, conversation.learn_from - dropped_count)
    return replace(conversation, messages=messages, learn_from=start)


def _list_assistant_turns(messages: Sequence[ChatMessage]) -> list[int]:
    return [k for k, message in enumerate(messages) if message["role"] == "assistant"]


def _find_overlaps(offsets: list[Span], spans: list[Span]) -> np.ndarray:
    """Which tokens hold characters of a span, bool [T]; a blank one, whose offsets are trimmed, by its end."""
    limits = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets))
    starts, ends = limits[::2], limits[1::2]
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        mask |= (start < ends) & ((starts < end) | ((starts == ends) & (ends <= end)))
    return mask
