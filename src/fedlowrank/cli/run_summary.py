"""What a command prints at the end of a run."""

from __future__ import annotations

import shlex
from pathlib import Path

from ..report import comparison, render_terminal
from ..simulation.records import RunRecord
from .terminal import OUT


def show_run(folder: Path) -> int:
    """Print what came of a run."""
    record = RunRecord.load(folder)
    OUT.print(render_terminal(comparison([record])))
    if record.status.get("state") == "finished" and (message := record.status.get("message")):
        OUT.print(f"finished after round {record.rounds[-1].round}; {message}")
    OUT.print(f"run folder: {folder}")
    OUT.print(f"`fedlowrank report {shlex.quote(str(folder))}` writes a page that defines every column.")
    return 0
