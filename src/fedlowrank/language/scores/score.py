"""The score of a language model, and the interface of tasks that compute one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...data.text.packing import Sample
from ...data.text.text_records import Instruction


@dataclass(frozen=True)
class PromptFormat:
    """Format in which prompts are written and tokenized, as in training.

    Attributes:
        write: function that writes the prompt of a record with ``instruction`` and ``input`` (may be empty).
        special_tokens: whether the tokenizer adds its special tokens (such as a begin token) to the prompt. False for a
            chat template, which writes special tokens itself.
        end_token: id of the token that ends an answer in training; None without such a token.
        make_rows: function that makes tokens and labels of instructions with their answers, as in training; None for
            prompts and answers that are tokenized apart and joined. A chat template may write text between and after both.
    """

    write: Callable[[Mapping[str, str]], str]
    special_tokens: bool = True
    end_token: int | None = None
    make_rows: Callable[[Sequence[Instruction]], list[Sample]] | None = None

    def __call__(self, record: Mapping[str, str]) -> str:
        """Write the prompt of a record."""
        return self.write(record)


Render = Callable[[Mapping[str, str]], str]
"""Function that writes the prompt of a record with ``instruction`` and ``input``, or a :class:`PromptFormat`."""


def adds_special_tokens(format: Render) -> bool:
    """Whether the tokenizer adds its special tokens to the prompts of a format; always for a plain function."""
    return not isinstance(format, PromptFormat) or format.special_tokens


def find_end_token(format: Render, tokenizer: Any) -> int | None:
    """Find the token that ends an answer: the one of a format, or for a plain function the end token of the tokenizer."""
    end_token: int | None = format.end_token if isinstance(format, PromptFormat) else tokenizer.eos_token_id
    return end_token


@dataclass(frozen=True)
class Score:
    """Result of a model at a task.

    Attributes:
        name: name of the task.
        value: value of the task's metric; shares are in [0, 1].
        count: number of records in the mean; for perplexity, number of tokens.
        decoding: settings of text generation, in words.
        details: other results, and the settings that they depend on, by name.
    """

    name: str
    value: float
    count: int
    decoding: str
    details: dict[str, Any]


class ScoreTask(Protocol):
    """An evaluation task. Its settings are the fields of a dataclass, including ``path``, the file of its data."""

    def score(self, model: Any, tokenizer: Any, format: Render) -> Score:
        """Score a causal language model of transformers, or one wrapped by PEFT.

        Raises:
            DataError: if the data cannot be read or do not fit the task.
            ConfigError: if the settings do not fit the model.
        """
        ...
