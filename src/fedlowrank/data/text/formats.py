"""How an instruction and its response are written down for a language model."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from ...core.errors import ConfigError, did_you_mean
from .records import Instruction

Format: TypeAlias = Literal["alpaca", "plain", "chat", "none"]

_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


def render(record: Instruction, format: Format, tokenizer: Any = None) -> tuple[str, str]:
    """The text before the response, and the response as it is to be learnt.

    The prompt does not depend on the response: it is the one to generate from, too.

    Args:
        record: an instruction; without a response the second text is empty.
        format: ``alpaca``: the template of Stanford Alpaca, letter by letter, whose prompt ends in ``### Response:``
            without a line break; ``plain``: instruction and input, each followed by a line break; ``chat``: the chat
            template of the tokenizer, with instruction and input, a blank line between them, as the words of the user
            (the response then ends as the template ends a turn); ``none``: nothing before the response, for plain text.
        tokenizer: for ``chat``: a tokenizer of ``transformers`` with a chat template.

    Returns:
        Prompt and response. Their concatenation is the whole text.

    Raises:
        ConfigError: if the format is unknown; if the record has neither instruction nor input but the format needs one;
            or, for ``chat``, if the tokenizer has no chat template, or one that begins otherwise once there is a
            response.

    Source:
        Taori et al., "Stanford Alpaca: An Instruction-following LLaMA model" (2023), train.py, ``PROMPT_DICT``.
    """
    if format == "none":
        return "", record.response
    if format == "plain":
        return "".join(f"{text}\n" for text in (record.prompt, record.input) if text), record.response
    if format not in get_args(Format):
        raise ConfigError(f"unknown format {format!r}. {did_you_mean(format, get_args(Format))}")
    if not record.prompt and not record.input:
        raise ConfigError(f"format {format!r} needs instructions, but there is plain text. Use format 'none'.")
    if format == "chat":
        return _chat(record, tokenizer)
    template = _WITH_INPUT if record.input else _WITHOUT_INPUT
    # Not one replacement after the other: an instruction may hold the word {input}.
    return template.format(instruction=record.prompt, input=record.input), record.response


def _chat(record: Instruction, tokenizer: Any) -> tuple[str, str]:
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "format 'chat' needs a tokenizer with a chat template, which this one lacks. "
            "Use format 'alpaca' or 'plain', or set tokenizer.chat_template."
        )
    words = "\n\n".join(text for text in (record.prompt, record.input) if text)
    turns = [{"role": "user", "content": words}]
    prompt = _apply(tokenizer, turns, generate=True)
    if not record.response:
        return prompt, ""
    whole = _apply(tokenizer, [*turns, {"role": "assistant", "content": record.response}], generate=False)
    if not whole.startswith(prompt):
        raise ConfigError(
            "the chat template of the tokenizer writes another prompt when a response follows, so that a model would "
            f"learn from other prompts than it replies to: {prompt[-60:]!r} is no part of the beginning of the whole. "
            "Use format 'alpaca' or 'plain', or another template."
        )
    return prompt, whole[len(prompt) :]


def _apply(tokenizer: Any, turns: list[dict[str, str]], *, generate: bool) -> str:
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError("format 'chat' needs jinja2: pip install 'fedlowrank[language]'") from error
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generate))
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template of the tokenizer fails: {error}. Use another format.") from error
