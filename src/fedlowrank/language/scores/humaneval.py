"""HumanEval (Chen et al. 2021): completions run against the tests of their problems.

Not a security boundary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .generate import truncate_at_stop
from .sandbox import ProgramLimits, ProgramRun, run_program

STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""Where a completion leaves the function that it was to complete (Chen et al. 2021, section 2.3)."""

COLUMNS = ("prompt", "entry_point", "test")
"""Columns of a problem, all text."""


def grade_completions(
    problems: Sequence[Mapping[str, str]],
    completions: Sequence[Sequence[str]],
    limits: ProgramLimits,
    stop: Sequence[str] = STOP,
) -> list[list[ProgramRun]]:
    """Run completions with the tests of their problems, each by :func:`run_program`.

    Args:
        problems: each with :data:`COLUMNS`.
        completions: for each problem its samples, what follows the prompt.
        limits: of each run.
        stop: completions are cut before the first of these.
    """
    return [
        [run_program(build_program(problem, truncate_at_stop(text, stop)), limits) for text in samples]
        for problem, samples in zip(problems, completions, strict=True)
    ]


def build_program(problem: Mapping[str, str], completion: str) -> str:
    """A program that passes if the completion is right: prompt, completion and tests."""
    return f"{problem['prompt']}{completion}\n{problem['test']}\ncheck({problem['entry_point']})\n"


def mean_pass_at_k(runs: Sequence[Sequence[ProgramRun]], k: int) -> float:
    """Mean of :func:`pass_at_k` over the problems."""
    return sum(pass_at_k(len(own), sum(run.passed for run in own), k) for own in runs) / len(runs)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased pass@k of n samples, c correct: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, eq. 1)."""
    if samples - correct < k:
        return 1.0
    return float(1 - np.prod(1 - k / np.arange(samples - correct + 1, samples + 1)))


def describe_isolation(runs: Sequence[Sequence[ProgramRun]]) -> str:
    """Isolation of the programs, each way in which it differed between them once."""
    found = [run.isolation for own in runs for run in own]
    return " | ".join(sorted({"unknown: over too soon" if one is None else one.describe() for one in found}))
