"""HumanEval (Chen et al. 2021): completions run against the tests of their problems.

Not a security boundary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.errors import ConfigError, DataError
from .generate import truncate_at_stop
from .sandbox import Limits, Run, run_program

STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""Where a completion leaves the function that it was to complete (Chen et al. 2021, section 2.3)."""

COLUMNS = ("task_id", "prompt", "entry_point", "test")
"""Columns of a problem, all text."""


@dataclass(frozen=True)
class GradedPrograms:
    """How completions fared.

    Attributes:
        runs: for each problem, how each of its completions ended.
    """

    runs: list[list[Run]]

    def correct(self) -> list[int]:
        """For each problem, how many of its completions passed."""
        return [sum(run.passed for run in runs) for runs in self.runs]

    def pass_at(self, k: int) -> float:
        """Mean of :func:`pass_at_k` over the problems."""
        return sum(
            pass_at_k(len(runs), c, k) for runs, c in zip(self.runs, self.correct(), strict=True)
        ) / len(self.runs)

    def isolation(self) -> str:
        """Isolation of the programs; one line for each way in which it differed between them."""
        found = [run.isolation for runs in self.runs for run in runs]
        lines = sorted({"unknown: over too soon" if one is None else one.describe() for one in found})
        return " | ".join(lines)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of pass@k: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    Args:
        samples: n, completions of a problem.
        correct: c, how many of them pass.
        k: at least 1, at most n.

    Raises:
        ConfigError: if the numbers do not fit.
    """
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ConfigError(
            f"pass@k needs 1 <= k <= samples and 0 <= correct <= samples; given {k=}, {samples=}, {correct=}"
        )
    if samples - correct < k:
        return 1.0
    return float(1 - np.prod(1 - k / np.arange(samples - correct + 1, samples + 1)))


def build_program(problem: Mapping[str, str], completion: str) -> str:
    """A program that passes if the completion is right: prompt, completion and tests."""
    return f"{problem['prompt']}{completion}\n{problem['test']}\ncheck({problem['entry_point']})\n"


def grade_completions(
    problems: Sequence[Mapping[str, str]],
    completions: Sequence[Sequence[str]],
    *,
    execute: bool = False,
    limits: Limits | None = None,
    stop: Sequence[str] = STOP,
) -> GradedPrograms:
    """Run completions, each in a process of its own.

    Args:
        problems: with the columns of the published file.
        completions: for each problem its samples, what follows the prompt.
        execute: must be True: programs that a model wrote are run on this machine, and the limits are no
            security boundary (see :func:`fedlowrank.language.scores.sandbox.run_program`).
        limits: of each run.
        stop: completions are cut before the first of these.

    Raises:
        ConfigError: if ``execute`` is not True.
        DataError: if there is no problem, a column is missing, or a problem has no completion.
    """
    if not problems or len(problems) != len(completions):
        raise DataError(
            f"there are {len(problems)} problems and completions of {len(completions)}; all are needed, one "
            "at least."
        )
    for problem, samples in zip(problems, completions, strict=True):
        missing = [column for column in COLUMNS if not isinstance(problem.get(column), str)]
        if missing or not samples:
            name = problem.get("task_id", "a problem")
            raise DataError(
                f"{name} has no text in {', '.join(missing)}." if missing else f"{name} has no completion."
            )
    return GradedPrograms(
        [
            [
                run_program(build_program(problem, truncate_at_stop(text, stop)), limits, execute=execute)
                for text in samples
            ]
            for problem, samples in zip(problems, completions, strict=True)
        ]
    )
