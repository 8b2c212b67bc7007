"""GSM8K (Cobbe et al. 2021): prompts, and the answer that a completion gives."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from ...core.errors import ConfigError, DataError

STOP = ("\nQuestion:",)
"""Where a completion of a few-shot prompt begins a question of its own."""

# A minus directly after a number, a word or a bracket is a difference.
_NUMBER = re.compile(r"(?:(?<![\w)\]%.])[-−])?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
# what lm_eval's gsm8k takes away from both sides before it compares them as text
_IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")
_NOTHING = "[invalid]"


@dataclass(frozen=True)
class GradedAnswers:
    """Which completions are right, by each convention.

    Attributes:
        last: the last number equals the reference as a number, ``42.0`` being 42.
        strict: as lm_eval's filter ``strict-match``: the first number after ``####``, compared as text.
        flexible: as lm_eval's filter ``flexible-extract``: the last thing that looks like a number, compared
            as text.
    """

    last: list[bool]
    strict: list[bool]
    flexible: list[bool]

    def rates(self) -> dict[str, float]:
        """The share of right completions by each convention."""
        return {name: sum(flags) / len(flags) for name, flags in vars(self).items()}


def last_number(text: str) -> Decimal | None:
    """The last number of a text, commas and $ removed, or None.

    A sign counts where the minus does not follow a number, word or closing bracket: in ``9-4`` the last
    number is 4.
    """
    found = _NUMBER.findall(text)
    return Decimal(re.sub("[$,]", "", found[-1]).replace("−", "-")) if found else None


def strict_extract(text: str) -> str:
    """What lm_eval's filter ``strict-match`` takes: the first number after ``####``, or ``[invalid]``."""
    found = _STRICT.search(text)
    return found[1].strip() if found else _NOTHING


def flexible_extract(text: str) -> str:
    """What lm_eval's filter ``flexible-extract`` takes: the last match of its pattern, or ``[invalid]``."""
    found = list(_FLEXIBLE.finditer(text))
    return found[-1][0].strip() if found else _NOTHING


def is_exact_match(extracted: str, reference: str) -> bool:
    """Whether lm_eval's ``exact_match`` of gsm8k holds; the reference may be a whole solution."""
    for pattern in _IGNORED:
        extracted, reference = re.sub(pattern, "", extracted), re.sub(pattern, "", reference)
    return extracted.lower() == reference.lower()


def grade_answers(completions: Sequence[str], answers: Sequence[str]) -> GradedAnswers:
    """Grade completions.

    Args:
        completions: what the model wrote.
        answers: the references: whole solutions that end in ``#### number``, or the numbers alone.

    Raises:
        DataError: if there is nothing to grade, the lengths differ or a reference has no number.
    """
    if not answers or len(completions) != len(answers):
        raise DataError(
            f"there are {len(completions)} completions and {len(answers)} answers; equally many are needed."
        )
    right = []
    for i, answer in enumerate(answers):
        number = last_number(answer.rpartition("####")[2])
        if number is None:
            raise DataError(f"answer {i} has no number: {answer[-60:]!r}. It should end in '#### number'.")
        right.append(number)
    return GradedAnswers(
        [last_number(text) == number for text, number in zip(completions, right, strict=True)],
        [
            is_exact_match(strict_extract(text), answer)
            for text, answer in zip(completions, answers, strict=True)
        ],
        [
            is_exact_match(flexible_extract(text), answer)
            for text, answer in zip(completions, answers, strict=True)
        ],
    )


def build_few_shot_prompt(question: str, shots: Sequence[Mapping[str, str]]) -> str:
    """A chain-of-thought prompt: solved questions, then the question.

    Args:
        question: to be answered.
        shots: records with ``question`` and ``answer``, commonly the first 8 of the training part.

    Raises:
        ConfigError: if there is no shot.
    """
    if not shots:
        raise ConfigError("a few-shot prompt needs at least one solved question")
    solved = [f"Question: {shot['question']}\nAnswer: {shot['answer']}" for shot in shots]
    return "\n\n".join([*solved, f"Question: {question}\nAnswer:"])
