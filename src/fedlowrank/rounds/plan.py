"""Values that a run derives from its first number of rounds and keeps when it gets more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError
from ..storage.digest import read_sealed
from ..storage.run_files import CONFIG, LEDGER
from ..trust.privacy.ledger import PrivacyLedger

MIN_EVALUATIONS = 50
"""Minimum number of evaluations of a run, whatever they cost."""


@dataclass(frozen=True)
class Plan:
    """Values that a run derives from its first number of rounds and keeps when it gets more.

    The plan is stored in ``run.json`` as ``plan``.

    Attributes:
        interval: maximum number of rounds between two evaluations, if ``run.evaluate_every`` is not set.
        noise: noise multiplier σ of differential privacy; None without privacy, and before it is computed.
        engine: name of the engine that ``auto`` chose; empty with another engine.
    """

    interval: int
    noise: float | None = None
    engine: str = ""

    @classmethod
    def of(cls, rounds: int) -> Plan:
        """Make the plan of a new run."""
        return cls(max(1, rounds // MIN_EVALUATIONS))

    @classmethod
    def read(cls, folder: Path) -> Plan | None:
        """Read the plan of a resumed run; None without a ``run.json``, which is refused later.

        A run that was made before plans were stored takes σ from its ledger.

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
    """Read ``run.rounds`` of a stored run; None if ``run.json`` does not hold it."""
    run = _read(folder).get("run")
    rounds = run.get("rounds") if isinstance(run, dict) else None
    return rounds if isinstance(rounds, int) else None


def _read(folder: Path) -> dict[str, Any]:
    return read_sealed(folder / CONFIG) if (folder / CONFIG).is_file() else {}
