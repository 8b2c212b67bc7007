"""Formats: how an instruction and its response are written as one text."""

from __future__ import annotations

from typing import Literal, TypeAlias

from ...core.errors import ConfigError, did_you_mean
from .text_records import Conversation, Instruction, Preference, Record, Texts

Format: TypeAlias = Literal["auto", "alpaca", "plain", "verbatim", "chat", "none"]

TEXT_FORMATS: tuple[Format, ...] = ("alpaca", "plain", "verbatim", "none")
"""Formats of :func:`render_instruction`, which need no tokenizer."""

_TEMPLATE_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_TEMPLATE_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


def render_instruction(record: Instruction, format: Format, location: str = "a record") -> tuple[str, str]:
    """Write an instruction as a prompt and a response.

    The prompt does not depend on the response, so it is also the prompt for generation. An instruction that the chat
    template writes is a conversation first, see :func:`make_conversation`.

    Args:
        record: an instruction; without a response the second text is empty.
        format: ``alpaca``: the template of Stanford Alpaca, verbatim, whose prompt ends in ``### Response:`` without a
            line break; ``plain``: instruction and input, each followed by a line break; ``verbatim``: instruction, input
            and response with nothing between them; ``none``: no prompt.
        location: name of the record, for messages.

    Returns:
        Prompt and response. Their concatenation is the whole text.

    Raises:
        ConfigError: if the format is none of these, or it needs an instruction or input but the record has none.

    Source:
        Taori et al., "Stanford Alpaca: An Instruction-following LLaMA model" (2023), train.py,
        ``PROMPT_DICT``.
    """
    if format == "none":
        return "", record.response
    if format == "verbatim":
        return record.prompt + record.input, record.response
    if format == "plain":
        return "".join(f"{text}\n" for text in (record.prompt, record.input) if text), record.response
    if format != "alpaca":
        raise ConfigError(
            f"an instruction cannot be written as text in the format {format!r}. {did_you_mean(format, TEXT_FORMATS)}"
        )
    _check_instruction(record, format, location)
    template = _TEMPLATE_WITH_INPUT if record.input else _TEMPLATE_WITHOUT_INPUT
    return template.format(instruction=record.prompt, input=record.input), record.response


def make_conversation(record: Instruction, location: str = "a record") -> Conversation:
    """Make the conversation that the format ``chat`` writes: instruction and input as the user's turn, and the response.

    A blank line separates instruction and input.

    Raises:
        ConfigError: if the record has neither instruction nor input.
    """
    _check_instruction(record, "chat", location)
    question = "\n\n".join(text for text in (record.prompt, record.input) if text)
    turns = ({"role": "user", "content": question}, {"role": "assistant", "content": record.response})
    return Conversation(turns, (), 1, record.category, record.client, location)


def choose_format(texts: Texts, format: Format) -> Format:
    """The format in which texts are written: the given one, or for ``auto`` that which their rows call for.

    Conversations, also those of preference pairs, are always written by the chat template of the tokenizer.
    """
    if holds_messages(texts):
        return "chat"
    if format != "auto":
        return format
    return texts.format or ("alpaca" if any(map(_has_instruction, texts.train)) else "none")


def holds_messages(texts: Texts) -> bool:
    """Whether records are lists of messages, also those of preference pairs."""
    first_record = texts.train[0]
    return isinstance(
        first_record.chosen if isinstance(first_record, Preference) else first_record, Conversation
    )


def _has_instruction(record: Record) -> bool:
    record = record.chosen if isinstance(record, Preference) else record
    return isinstance(record, Instruction) and bool(record.prompt or record.input)


def _check_instruction(record: Instruction, format: Format, location: str) -> None:
    if not _has_instruction(record):
        raise ConfigError(
            f"{location} is plain text, and format {format!r} needs instructions. Use format 'none', or drop the record."
        )
