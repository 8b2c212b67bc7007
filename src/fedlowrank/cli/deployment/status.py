"""The command ``fedlowrank status``: the state of runs, the process that writes each, and the state of their clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from ...core.errors import CheckpointError
from ...network.operation.activity import UpdateShape
from ...network.persistence.account import Account
from ...results.records import RunRecord, describe_missing
from ...storage.digest import read_sealed
from ...storage.lock import is_in_use, read_holder
from ...storage.run_files import ACCOUNT
from ..read_runs import count_left_out, read_each
from ..terminal import OUT


def show(folders: Sequence[Path]) -> int:
    """Print a row for every run in these folders, or in the folders within them.

    The exit code is 1 if a damaged run was left out.
    """
    table = Table("run", "state", "rounds", "process", "clients", "last")
    rows, damaged_count = read_each(folders, lambda folder: (folder, row(folder)))
    for _, cells in rows:
        table.add_row(*map(escape, cells))
    OUT.print(table)
    for folder, _ in rows:
        if (client_table := clients_table(folder)) is not None:
            OUT.print(client_table)
            if paused := Account.read(folder).paused:
                # not in a table, so that the commands in it can be copied
                OUT.print(f"{folder} is paused: {paused}", soft_wrap=True, markup=False, highlight=False)
    return count_left_out(damaged_count)


def clients_table(folder: Path) -> Table | None:
    """Table of the server's records of each client; None for a run that is not over a network."""
    try:
        account, run = Account.read(folder), RunRecord.load(folder)
    except CheckpointError:
        # the row of the run reports the error
        return None
    columns = "examples", "last reply (UTC)", "bytes", "seconds", "length", "cosine", ""
    caption = "length: of the update, in usual norms; cosine: with the mean of the others"
    table = Table("client", *columns, title=str(folder), caption=caption)
    shapes = account.shapes.get(max(account.shapes, default=0), {})
    for client_id in range(len(run.clients)):
        reply, shape = account.replies.get(client_id), shapes.get(client_id, UpdateShape(None, None))
        reply_cells = ("none", "", "")
        if reply is not None:
            usage_note = "" if reply.is_used else ", not used"
            time_text = f"round {reply.round}, {reply.time[5:16].replace('T', ' ')}{usage_note}"
            reply_cells = (time_text, f"{reply.bytes:,}", f"{reply.seconds:g}")
        examples = str(account.clients[client_id]["train"]) if client_id in account.clients else ""
        length, cosine = ("" if x is None else f"{x:.2g}" for x in (shape.length, shape.cosine))
        table.add_row(
            str(client_id), examples, *reply_cells, length, cosine, escape(_remark(account, client_id))
        )
    return table


def _remark(account: Account, client_id: int) -> str:
    """List what keeps a client from taking part as the others do."""
    remarks = []
    if client_id not in account.clients:
        remarks.append("not registered")
    if client_id in account.excluded:
        remarks.append(f"excluded after round {account.excluded[client_id]}")
    limits = account.settings.get("limits", {})
    if 0 < limits.get("ban_after", 0) <= (refused_count := account.refused.get(client_id, 0)):
        remarks.append(f"on the blocklist: {refused_count} replies refused")
    elif refused_count:
        remarks.append(f"{refused_count} replies refused")
    if 0 < limits.get("strikes", 0) <= sum(account.long.get(client_id, ())):
        remarks.append("held to the usual norm")
    if missed_count := account.silent.get(client_id, 0):
        remarks.append(f"missed {missed_count} orders in a row")
    return "; ".join(remarks)


def row(folder: Path) -> list[str]:
    """Cells of a run: its folder, state, rounds, process, clients, and last message."""
    run = RunRecord.load(folder)
    holder = read_holder(folder)
    process = str(holder.get("pid", "")) if is_in_use(folder) else ""
    completed_count = run.rounds[-1].round if run.rounds else 0
    message = str(run.status.get("message", ""))
    if run.rounds and run.rounds[-1].lost:
        lost_text = "; ".join(
            f"client {client_id} lost: {reason}" for client_id, reason in run.rounds[-1].lost.items()
        )
        message = "; ".join(filter(None, [message, lost_text]))
    if run.missing:
        message = "; ".join(filter(None, [message, describe_missing(run.missing)]))
    round_count = (run.config.get("run") or {}).get("rounds", "?")
    state = str(run.status.get("state", "unknown"))
    return [str(folder), state, f"{completed_count} of {round_count}", process, _clients(run), message]


def _clients(run: RunRecord) -> str:
    """Number of clients; over a network, the numbers of registered clients and refused replies."""
    if not run.is_deployed:
        return str(len(run.clients))
    try:
        account = read_sealed(run.folder / ACCOUNT)
        refused_count = sum(account["refused"].values())
        return f"{len(account['clients'])} of {len(run.clients)} registered, {refused_count} replies refused"
    except CheckpointError as error:
        return str(error)
    except (LookupError, TypeError, AttributeError) as error:
        return f"{ACCOUNT} is damaged: {error!r}"
