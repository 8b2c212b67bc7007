"""What a score is, and what a task that gives one has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Render = Callable[[Mapping[str, str]], str]
"""The prompt of an instruction record with ``instruction`` and ``input`` (may be empty).

It should be the format of training.
"""


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
