"""Helpers for commands that run one method: they read the experiment, and print the results."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ..config.experiment import ExperimentConfig
from ..config.reading.merging import LayeredTables
from ..config.reading.unread_overrides import SEVERAL_RUNS, refuse_unread_overrides
from ..report import compare_runs, render_terminal
from ..results.records import RunRecord
from .terminal import OUT


def read_one(file: Path, overrides: Sequence[str], method: str | None) -> tuple[ExperimentConfig, str]:
    """Read an experiment, choose the one method that a command runs, and check that something reads each override.

    Args:
        file: path of the experiment file.
        overrides: overrides of the file.
        method: method that the command line names, or None for the one that the file names.
    """
    config_tables = LayeredTables.read(file, overrides)
    experiment = ExperimentConfig.parse_laid(config_tables, method)
    name = experiment.choose_method(method)
    experiment.refuse_overrides_of_other_methods(config_tables, [name])
    reasons = {**SEVERAL_RUNS, "method": f"--method is {method}"} if method else dict(SEVERAL_RUNS)
    if experiment.method or method:
        reasons["compare"] = (
            f"the method that runs is {name}. Choose another one by --method, or use `fedlowrank compare`."
        )
    refuse_unread_overrides(config_tables, reasons)
    return experiment, name


def show_run(folder: Path) -> int:
    """Print the results of a run."""
    record = RunRecord.load(folder)
    OUT.print(render_terminal(compare_runs([record]), all_tables=True))
    if record.status.get("state") == "finished" and (message := record.status.get("message")):
        OUT.print(f"finished after round {record.rounds[-1].round}; {message}")
    OUT.print(f"run folder: {folder}")
    OUT.print(f"`fedlowrank report {shlex.quote(str(folder))}` writes a page that defines every column.")
    return 0
