"""What ``fedlowrank status`` shows: how runs stand, which process writes them, and what their clients do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from ..core.errors import CheckpointError
from ..simulation.digest import read_sealed
from ..simulation.lock import is_alive, read_holder
from ..simulation.records import RunRecord, describe_missing, run_folders
from .terminal import OUT


def show(folders: Sequence[Path]) -> int:
    """Print a row for every run in these folders, or in the folders within them."""
    table = Table("run", "state", "rounds", "process", "clients", "last")
    for folder in run_folders(folders):
        table.add_row(*map(escape, row(folder)))
    OUT.print(table)
    return 0


def row(folder: Path) -> list[str]:
    """The cells of a run: its folder, state, rounds, process, clients, and what was said last."""
    run = RunRecord.load(folder)
    holder = read_holder(folder)
    process = str(holder["pid"]) if is_alive(holder) else ""
    done = run.rounds[-1].round if run.rounds else 0
    message = str(run.status.get("message", ""))
    if run.rounds and run.rounds[-1].lost:
        lost = "; ".join(f"client {client} lost: {why}" for client, why in run.rounds[-1].lost.items())
        message = "; ".join(filter(None, [message, lost]))
    if run.missing:
        message = "; ".join(filter(None, [message, describe_missing(run.missing)]))
    total = (run.config.get("run") or {}).get("rounds", "?")
    state = str(run.status.get("state", "unknown"))
    return [str(folder), state, f"{done} of {total}", process, _clients(run), message]


def _clients(run: RunRecord) -> str:
    """How many clients there are; over a network, how many registered and how many replies were refused."""
    if not (run.folder / "network.json").exists():
        return str(len(run.clients))
    try:
        account = read_sealed(run.folder / "network.json")
        refused = sum(account["refused"].values())
        return f"{len(account['clients'])} of {len(run.clients)} registered, {refused} replies refused"
    except CheckpointError as error:
        return str(error)
    except (LookupError, TypeError, AttributeError) as error:
        return f"network.json is damaged: {error!r}"
