"""Table of a language model's answers before and after a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .statistics.groups import RunGroup


class AnswerRow(NamedTuple):
    """An answer of a language model to a prompt.

    Attributes:
        prompt: text of the question.
        model: name of the model that answered.
        answer: text that the model wrote.
    """

    prompt: str
    model: str
    answer: str


def list_answers(groups: Sequence[RunGroup]) -> list[AnswerRow]:
    """List answers of the first run of each method, by prompt: once before the first round, then after the last."""
    rows: list[AnswerRow] = []
    before: dict[str, str] = {}
    after: dict[str, list[AnswerRow]] = {}
    for group in groups:
        answers = group.first.answers
        last_round = max((row["round"] for row in answers), default=0)
        for row in answers:
            prompt, text = row["prompt"], row["answer"]
            if row["round"] == 0:
                before.setdefault(prompt, text)
            elif row["round"] == last_round:
                name = f"{group.label}, {row['model']}, round {last_round}"
                after.setdefault(prompt, []).append(AnswerRow(prompt, name, text))
    for prompt in dict.fromkeys([*before, *after]):
        if prompt in before:
            rows.append(AnswerRow(prompt, "before", before[prompt]))
        rows += after.get(prompt, [])
    return rows
