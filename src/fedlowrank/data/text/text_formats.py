"""Formats: how an instruction and its response are written as one text."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from jinja2 import TemplateError

from ...core.errors import ConfigError, did_you_mean
from .text_records import Conversation, Instruction, Preference, Texts

Format: TypeAlias = Literal["auto", "alpaca", "plain", "verbatim", "chat", "none"]

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


def render_instruction(record: Instruction, format: Format, tokenizer: Any = None) -> tuple[str, str]:
    """Write an instruction as a prompt and a response.

    The prompt does not depend on the response, so it is also the prompt for generation.

    Args:
        record: an instruction; without a response the second text is empty.
        format: ``auto``: ``alpaca``, or ``none`` without a prompt; ``alpaca``: the template of Stanford
            Alpaca, verbatim, whose prompt ends in ``### Response:`` without a line break; ``plain``:
            instruction and input, each followed by a line break; ``verbatim``: instruction, input and
            response with nothing between them; ``chat``: the chat template of the tokenizer, with instruction
            and input, separated by a blank line, as the user's message (the response ends as the template
            ends a turn); ``none``: no prompt.
        tokenizer: tokenizer of ``transformers`` with a chat template, which ``chat`` needs.

    Returns:
        Prompt and response. Their concatenation is the whole text.

    Raises:
        ConfigError: if the format is unknown; if it needs an instruction or input but the record has none;
            or, for ``chat``, if the tokenizer has no chat template, or its prompt changes when a response
            follows.

    Source:
        Taori et al., "Stanford Alpaca: An Instruction-following LLaMA model" (2023), train.py,
        ``PROMPT_DICT``.
    """
    if format == "none" or (format == "auto" and not (record.prompt or record.input)):
        return "", record.response
    if format == "verbatim":
        return record.prompt + record.input, record.response
    if format == "plain":
        return "".join(f"{text}\n" for text in (record.prompt, record.input) if text), record.response
    if format not in get_args(Format):
        raise ConfigError(f"unknown format {format!r}. {did_you_mean(format, get_args(Format))}")
    if not record.prompt and not record.input:
        raise ConfigError(f"format {format!r} needs instructions, but this is plain text. Use format 'none'.")
    if format == "chat":
        return _render_chat(record, tokenizer)
    template = _TEMPLATE_WITH_INPUT if record.input else _TEMPLATE_WITHOUT_INPUT
    return template.format(instruction=record.prompt, input=record.input), record.response


def choose_format(texts: Texts, format: Format) -> Format:
    """The format in which texts are written: the given one, or for ``auto`` that which their rows call for.

    Conversations, also those of preference pairs, are always written by the chat template of the tokenizer.
    """
    if holds_messages(texts):
        return "chat"
    return format if format != "auto" else texts.format or "auto"


def holds_messages(texts: Texts) -> bool:
    """Whether records are lists of messages, also those of preference pairs."""
    first_record = texts.train[0]
    return isinstance(
        first_record.chosen if isinstance(first_record, Preference) else first_record, Conversation
    )


def _render_chat(record: Instruction, tokenizer: Any) -> tuple[str, str]:
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "format 'chat' needs a tokenizer with a chat template, which this one lacks. Use format 'alpaca' "
            "or 'plain', or set tokenizer.chat_template."
        )
    message = "\n\n".join(text for text in (record.prompt, record.input) if text)
    turns = [{"role": "user", "content": message}]
    prompt = _apply_template(tokenizer, turns, add_generation_prompt=True)
    if not record.response:
        return prompt, ""
    turns.append({"role": "assistant", "content": record.response})
    full_text = _apply_template(tokenizer, turns, add_generation_prompt=False)
    if not full_text.startswith(prompt):
        raise ConfigError(
            "the chat template of the tokenizer writes another prompt when a response follows, so the "
            "prompts of training and generation would differ: the whole text does not start with "
            f"{prompt[-60:]!r}. Use format 'alpaca' or 'plain', or another template."
        )
    response, eos_token = full_text[len(prompt) :], tokenizer.eos_token
    # White space after the EOS is no part of the turn.
    return prompt, response.rstrip() if eos_token and response.rstrip().endswith(eos_token) else response


def _apply_template(tokenizer: Any, turns: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
        )
    except TemplateError as error:
        raise ConfigError(f"the tokenizer's chat template fails: {error}. Use another format.") from error
