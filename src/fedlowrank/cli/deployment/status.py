"""What ``fedlowrank status`` shows: how runs stand, which process writes them, and what their clients do."""

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
from ...storage.lock import is_alive, read_holder
from ..read_runs import count_left_out, read_each
from ..terminal import OUT


def show(folders: Sequence[Path]) -> int:
    """Print a row for every run in these folders, or in the folders within them.

    The exit code is 1 if a damaged run was left out.
    """
    table = Table("run", "state", "rounds", "process", "clients", "last")
    rows, left_out = read_each(folders, lambda folder: (folder, row(folder)))
    for _, cells in rows:
        table.add_row(*map(escape, cells))
    OUT.print(table)
    for folder, _ in rows:
        if (clients := clients_table(folder)) is not None:
            OUT.print(clients)
            if paused := Account.read(folder).paused:
                # not in a table, so that its commands can be copied
                OUT.print(f"{folder} is paused: {paused}", soft_wrap=True, markup=False, highlight=False)
    return count_left_out(left_out)


def clients_table(folder: Path) -> Table | None:
    """What the server of a run remembers of each client, or None if it has none over a network."""
    try:
        account, run = Account.read(folder), RunRecord.load(folder)
    except CheckpointError:
        # the row of the run says so
        return None
    columns = "examples", "last reply (UTC)", "bytes", "seconds", "length", "cosine", ""
    caption = "length: of the update, in usual norms; cosine: with the mean of the others"
    table = Table("client", *columns, title=str(folder), caption=caption)
    shapes = account.shapes.get(max(account.shapes, default=0), {})
    for client in range(len(run.clients)):
        reply, shape = account.replies.get(client), shapes.get(client, UpdateShape(None, None))
        last = ("none", "", "")
        if reply is not None:
            used = "" if reply.used else ", not used"
            when = f"round {reply.round}, {reply.time[5:16].replace('T', ' ')}{used}"
            last = (when, f"{reply.bytes:,}", f"{reply.seconds:g}")
        examples = str(account.clients[client]["train"]) if client in account.clients else ""
        length, cosine = ("" if x is None else f"{x:.2g}" for x in (shape.length, shape.cosine))
        table.add_row(str(client), examples, *last, length, cosine, escape(_remark(account, client)))
    return table


def _remark(account: Account, client: int) -> str:
    """What keeps a client from taking part as the others do."""
    remarks = []
    if client not in account.clients:
        remarks.append("not registered")
    if client in account.excluded:
        remarks.append(f"excluded after round {account.excluded[client]}")
    limits = account.settings.get("limits", {})
    if 0 < limits.get("ban_after", 0) <= (refused := account.refused.get(client, 0)):
        remarks.append(f"on the blocklist: {refused} replies refused")
    elif refused:
        remarks.append(f"{refused} replies refused")
    if 0 < limits.get("strikes", 0) <= sum(account.long.get(client, ())):
        remarks.append("held to the usual norm")
    if missed := account.silent.get(client, 0):
        remarks.append(f"missed {missed} orders in a row")
    return "; ".join(remarks)


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
