"""Runs whose rounds are timed or measured without the evaluation of their models."""

from __future__ import annotations

from fedlowrank.rounds.run import Run


class RunWithoutEvaluation(Run):
    """A run that never evaluates its models, not even after the first and the last round."""

    def is_due(self) -> bool:
        """Whether the models are to be evaluated now: never."""
        return False
