"""What ``docs/results/evidence.toml`` says of experiments, with the horizons and sweeps written out.

A part of ``docs/evidence.py``, which is the command; this file is only imported.
"""

from __future__ import annotations

import itertools
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "experiments" / "evidence"
RESULTS = ROOT / "docs" / "results"
FIGURES = RESULTS / "evidence"
TEACHERS = {
    f"{rank}-{kind}": f"{rank}, {title}"
    for rank in (24, 8, 1)
    for kind, title in (("skew", "skewed"), ("iid", "IID"))
}
"""Teachers of the horizons: part of an experiment's name, and rank and split in words."""
HORIZONS = (10, 20, 60)
"""Rounds."""
ENDS = {
    f"{rounds}{rate}": f"{rounds} rounds{', cosine' if rate else ''}"
    for rate in ("", "-cosine")
    for rounds in HORIZONS
}
"""Horizon and learning rate: end of an experiment's name, and words."""
SWEEPS = {
    "classes of a client": {classes: f"digits-classes-{classes}" for classes in (2, 4, 6, 8, 10)},
    "clients in a round / %": {
        share: "digits-classes-2" if share == 50 else f"digits-share-{share}"
        for share in (10, 30, 50, 70, 90, 100)
    },
}
"""pFedLoRA's Figures 8 and 9 on digits: what changes, and the experiment of each of its values."""


def list_horizons(chosen_by: str) -> dict[str, str]:
    """Names of the experiments with every teacher, horizon and rate, and their labels.

    Args:
        chosen_by: ``server`` or ``own``, the models whose validation accuracy chose the learning rates.
    """
    return {
        name_horizon(teacher, end, chosen_by): f"rank {title}, {rounds}"
        for (teacher, title), (end, rounds) in itertools.product(TEACHERS.items(), ENDS.items())
    }


def name_horizon(teacher: str, end: str, chosen_by: str = "server") -> str:
    """Name of the experiment with a teacher, of :data:`TEACHERS`, and a horizon and rate, of :data:`ENDS`."""
    return f"teacher-{teacher}-{end}" + ("-own" if chosen_by == "own" else "")


def find_experiment(name: str) -> Path:
    """The file of an experiment, in the folder of all or in one of its folders."""
    return next(EXPERIMENTS.rglob(f"{name}.toml"), EXPERIMENTS / f"{name}.toml")


@cache
def read_settings() -> dict[str, dict[str, str]]:
    """What ``evidence.toml`` says of every experiment."""
    written = read_evidence()
    horizons = {
        name: settings
        for chosen_by, settings in written["horizons"].items()
        for name in list_horizons(chosen_by)
    }
    sweeps = {name: written["sweeps"] for values in SWEEPS.values() for name in values.values()}
    return {**written["experiments"], **horizons, **sweeps}


@cache
def read_evidence() -> dict[str, Any]:
    """The tables of ``evidence.toml`` as they are written."""
    return tomllib.loads((RESULTS / "evidence.toml").read_text())
