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


def render_instruction(record: Instruction, format: Format) -> tuple[str, str]:
    """Write an instruction as a prompt and a response.

    The prompt does not depend on the response, so it is also the prompt for generation. An instruction that the chat
    template writes is a conversation first, see :func:`make_conversation`.

    Args:
        record: an instruction; without a response the second text is empty.
        format: ``alpaca``: the template of Stanford Alpaca, verbatim, whose prompt ends in ``### Response:`` without a
            line break, and no prompt for plain text; ``plain``: instruction and input, each followed by a line break;
            ``verbatim``: instruction, input and response with nothing between them; ``none``: no prompt.

    Returns:
        Prompt and response. Their concatenation is the whole text.

    Raises:
        ConfigError: if the format is none of these.

    Source:
        Taori et al., "Stanford Alpaca: An Instruction-following LLaMA model" (2023), train.py,
        ``PROMPT_DICT``.
    """
    if format == "none" or (format == "alpaca" and is_plain_text(record)):
        return "", record.response
    if format == "verbatim":
        return record.prompt + record.input, record.response
    if format == "plain":
        return "".join(f"{text}\n" for text in (record.prompt, record.input) if text), record.response
    if format != "alpaca":
        raise ConfigError(
            f"an instruction cannot be written as text in the format {format!r}. {did_you_mean(format, TEXT_FORMATS)}"
        )
    template = _TEMPLATE_WITH_INPUT if record.input else _TEMPLATE_WITHOUT_INPUT
    return template.format(instruction=record.prompt, input=record.input), record.response


def make_conversation(record: Instruction, location: str = "a record") -> Conversation:
    """Make the conversation that the format ``chat`` writes: instruction and input as the user's turn, and the response.

    A blank line separates instruction and input.

    Raises:
        ConfigError: if the record has neither instruction nor input.
    """
    if is_plain_text(record):
        raise ConfigError(
            f"{location} is plain text, and format 'chat' needs instructions. Drop the record, or set the format to 'auto' or "
            "'plain', which write it without a prompt."
        )
    question = "\n\n".join(text for text in (record.prompt, record.input) if text)
    turns = ({"role": "user", "content": question}, {"role": "assistant", "content": record.response})
    return Conversation(turns, (), 1, record.category, record.client, location)


def choose_format(texts: Texts, format: Format) -> Format:
    """The format in which texts are written: the given one, or for ``auto`` that which their rows call for.

    Conversations, also those of preference pairs, are always written by the chat template of the tokenizer.

    Raises:
        ConfigError: if the format is ``alpaca`` and no record of the training part has an instruction or input.
    """
    if holds_messages(texts):
        return "chat"
    if format == "auto" and texts.format is not None:
        return texts.format
    if format not in ("auto", "alpaca"):
        return format
    if not all(map(is_plain_text, texts.train)):
        return "alpaca"
    if format == "alpaca":
        raise ConfigError(
            f"the records of {texts.name!r} are plain text, and format 'alpaca' needs instructions. Use format 'none'."
        )
    return "none"


def holds_messages(texts: Texts) -> bool:
    """Whether records are lists of messages, also those of preference pairs."""
    first_record = texts.train[0]
    return isinstance(
        first_record.chosen if isinstance(first_record, Preference) else first_record, Conversation
    )


def is_plain_text(record: Record) -> bool:
    """Whether a record has neither instruction nor input."""
    record = record.chosen if isinstance(record, Preference) else record
    return not (isinstance(record, Instruction) and (record.prompt or record.input))
