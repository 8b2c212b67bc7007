"""GSM8K (Cobbe et al. 2021): prompts, and the answer that a completion gives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

from ...core.errors import DataError

STOP = ("\nQuestion:",)
"""Where a completion of a few-shot prompt begins a question of its own."""

# A minus directly after a number, a word or a bracket is a difference.
_NUMBER = re.compile(r"(?:(?<![\w)\]%.])[-−])?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
# what lm_eval's gsm8k takes away from both sides before it compares them as text
_IGNORED = (",", r"\$", r"(?s).*#### ", r"\.$")
_NOTHING = "[invalid]"


def grade_answers(completions: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
    """The share of right completions by three conventions.

    - ``last``: the last number equals the reference as a number, ``42.0`` being 42;
    - ``strict``: lm_eval's filter ``strict-match``: the first number after ``####``, compared as text;
    - ``flexible``: lm_eval's filter ``flexible-extract``: the last thing that looks like a number, likewise.

    Args:
        completions: what the model wrote.
        answers: the references: whole solutions that end in ``#### number``, or the numbers alone.

    Raises:
        DataError: if a reference has no number.
    """
    right = {"last": 0, "strict": 0, "flexible": 0}
    for i, (text, answer) in enumerate(zip(completions, answers, strict=True)):
        number = last_number(answer.rpartition("####")[2])
        if number is None:
            raise DataError(f"answer {i} has no number: {answer[-60:]!r}. It should end in '#### number'.")
        strict, flexible = _STRICT.search(text), list(_FLEXIBLE.finditer(text))
        right["last"] += last_number(text) == number
        right["strict"] += _is_exact_match(strict[1] if strict else _NOTHING, answer)
        right["flexible"] += _is_exact_match(flexible[-1][0] if flexible else _NOTHING, answer)
    return {name: count / len(answers) for name, count in right.items()}


def last_number(text: str) -> Decimal | None:
    """The last number of a text, commas and $ removed, or None.

    A sign counts where the minus does not follow a number, word or closing bracket: in ``9-4`` the last
    number is 4.
    """
    found = _NUMBER.findall(text)
    return Decimal(re.sub("[$,]", "", found[-1]).replace("−", "-")) if found else None


def _is_exact_match(extracted: str, reference: str) -> bool:
    """Whether lm_eval's ``exact_match`` of gsm8k holds; the reference may be a whole solution."""
    for pattern in _IGNORED:
        extracted, reference = re.sub(pattern, "", extracted), re.sub(pattern, "", reference)
    return extracted.lower() == reference.lower()


def build_few_shot_prompt(question: str, shots: Iterable[Mapping[str, str]]) -> str:
    """A chain-of-thought prompt: solved records of ``question`` and ``answer``, then the question."""
    solved = [f"Question: {shot['question']}\nAnswer: {shot['answer']}" for shot in shots]
    return "\n\n".join([*solved, f"Question: {question}\nAnswer:"])
