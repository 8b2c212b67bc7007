"""What a score is, and what a task that gives one has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class PromptFormat:
    """How prompts are written and tokenized: as in training.

    Attributes:
        write: makes the prompt of a record with ``instruction`` and ``input`` (may be empty).
        special_tokens: whether the tokenizer adds its special tokens (such as a begin token) to it. False for a chat
            template, which writes those that it has.
    """

    write: Callable[[Mapping[str, str]], str]
    special_tokens: bool = True

    def __call__(self, record: Mapping[str, str]) -> str:
        """The prompt of a record."""
        return self.write(record)


Render = Callable[[Mapping[str, str]], str]
"""The prompt of an instruction record with ``instruction`` and ``input``; a :class:`PromptFormat`, or a function."""


def adds_special_tokens(format: Render) -> bool:
    """Whether the tokenizer adds its special tokens to the prompts of a format; to those of a plain function it does."""
    return not isinstance(format, PromptFormat) or format.special_tokens


@dataclass(frozen=True)
class Score:
    """What a model is worth at a task.

    Attributes:
        name: of the task.
        value: the headline number; shares are in [0, 1].
        count: records that it is a mean over; for perplexity, tokens.
        decoding: the settings by which text was generated, in words.
        details: other results and settings on which they depend, by name.
    """

    name: str
    value: float
    count: int
    decoding: str
    details: dict[str, Any]


class ScoreTask(Protocol):
    """An evaluation; its settings are the fields of a dataclass, ``path`` that of its data among them."""

    def score(self, model: Any, tokenizer: Any, format: Render) -> Score:
        """Score a causal language model of transformers, or one wrapped by PEFT.

        Raises:
            DataError: if the data cannot be read or do not fit the task.
            ConfigError: if the settings do not fit.
        """
        ...
