"""What a run derives from the number of rounds that it begins with, and keeps when it gets more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError
from ..storage.digest import read_sealed
from ..storage.run_files import CONFIG, LEDGER
from ..trust.privacy.ledger import PrivacyLedger

MIN_EVALUATIONS = 50
"""Evaluations that a run has at least, however much they cost."""


@dataclass(frozen=True)
class Plan:
    """What a run derives from the number of rounds that it begins with, and keeps when it gets more.

    Stored in ``run.json`` as ``plan``.

    Attributes:
        interval: rounds between two evaluations at most, where ``run.evaluate_every`` is not set.
        noise: σ of differential privacy; None without privacy, and before it is found.
        engine: that ``auto`` chose; nothing with another engine.
    """

    interval: int
    noise: float | None = None
    engine: str = ""

    @classmethod
    def of(cls, rounds: int) -> Plan:
        """The plan of a new run."""
        return cls(max(1, rounds // MIN_EVALUATIONS))

    @classmethod
    def read(cls, folder: Path) -> Plan | None:
        """Read the plan of a run that goes on; None where there is no ``run.json``, which is refused later.

        A run from before plans were stored has the σ of its ledger.

        Raises:
            CheckpointError: if ``run.json``, the plan or the ledger is damaged.
        """
        stored_config = _read(folder)
        if "plan" not in stored_config:
            rounds = rounds_of(folder)
            plan = None if rounds is None else cls.of(rounds)
            return plan and cls(plan.interval, PrivacyLedger(folder / LEDGER).noise)
        try:
            plan = cls(**stored_config["plan"])
            if type(plan.interval) is not int or plan.interval < 1:
                raise ValueError(plan.interval)
            if plan.noise is not None and not (type(plan.noise) is float and plan.noise > 0):
                raise ValueError(plan.noise)
            if not isinstance(plan.engine, str):
                raise TypeError(plan.engine)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{folder / 'run.json'} is damaged: the plan {stored_config['plan']!r} must hold an interval and a noise. "
                "Restore the file from a copy"
            ) from error
        return plan


def rounds_of(folder: Path) -> int | None:
    """``run.rounds`` of a stored run; None where ``run.json`` does not say it."""
    run = _read(folder).get("run")
    rounds = run.get("rounds") if isinstance(run, dict) else None
    return rounds if isinstance(rounds, int) else None


def _read(folder: Path) -> dict[str, Any]:
    return read_sealed(folder / CONFIG) if (folder / CONFIG).is_file() else {}
