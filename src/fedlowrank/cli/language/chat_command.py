"""The command ``chat``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...language.chat_session import ChatSession
from ...language.scores.text_generation import Decoding
from ..language_commands import default_model, language_of_run, open_language_run, params_of, prompt_of
from ..terminal import say


def chat(
    folder: Path,
    model: str | None,
    prompt: str | None,
    tokens: int,
    temperature: float | None,
    best: bool,
    allow_code: bool,
) -> int:
    """Let a model of a run answer one question, or every line of the standard input, in the format of training."""
    if tokens < 1:
        raise ConfigError(f"--tokens must be at least 1; it is {tokens}")
    if temperature is not None and not temperature > 0:
        raise ConfigError(f"--temperature must be above 0; it is {temperature}. Greedy decoding takes none.")
    run = open_language_run(folder, best, allow_code)
    language = language_of_run(run)
    if language.settings.task != "causal":
        raise ConfigError("this run's models write no text; `fedlowrank report` has how good they are")
    tokenizer, prompt_format = language.loaded.tokenizer, prompt_of(language)
    sampling: dict[str, Any] = {} if temperature is None else {"method": "sample", "temperature": temperature}
    decoding = Decoding(tokens, **sampling)
    name = default_model(run) if model is None else model
    with language.use_parameters(params_of(run, name)) as module:
        conversation = ChatSession(
            module,
            tokenizer,
            lambda text: prompt_format({"instruction": text, "input": ""}),
            decoding,
            language.uses_chat_template,
        )
        if prompt is not None:
            print(conversation.reply(prompt))
            return 0
        text_format = language.settings.format
        format_text = (
            "its chat template" if conversation.has_template else f"the format {text_format!r}, each alone"
        )
        say(f"{run.method.title} after round {run.round}, model {name}, asked in {format_text}. Ctrl-D ends.")
        _answer_lines(conversation)
    return 0


def _answer_lines(conversation: ChatSession) -> None:
    """Answer every line of the standard input until it ends."""
    while True:
        try:
            # a prompt is shown to a person, and not for input from a file
            question = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not question.strip():
            continue
        dropped_count = conversation.dropped_count
        try:
            print(conversation.reply(question), flush=True)
        except ConfigError as error:
            # the next question may be shorter
            print(f"error: {error.for_command}", file=sys.stderr)
        if conversation.dropped_count > dropped_count:
            say("The oldest turns no longer fit the model's context and were dropped.")
