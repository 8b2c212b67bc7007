"""``network.json`` in a run folder: what a server needs to know of its clients to resume a run."""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
import shlex
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from ...core.errors import CheckpointError, ConfigError
from ...core.io.atomic_files import as_checkpoint_error, write_json
from ...results.records import read_records
from ...storage import checkpoint
from ...storage.digest import check_seal, seal
from ...storage.lock import exclusive
from ...storage.run_files import ACCOUNT, read_clients
from ...storage.run_folder import RunFolder
from ..operation.activity import LastReply, UpdateShape

logger = logging.getLogger(__name__)

MAX_REFUSALS = 100
"""Largest number of refused replies that are listed, the last ones."""


@dataclass
class Account:
    """What a server needs to know of its clients to resume a run.

    Attributes:
        run: identifier of the run for the clients.
        clients: numbers of examples in train, val and test, by client.
        refused: number of refused replies that count towards the blocklist, by client.
        branch: number of times that an operator named the checkpoint to go on from; clients refuse orders with a smaller
            number, and repeated rounds of the same one.
        excluded: round to which the run went back when an operator excluded a client, by client.
        silent: number of missed orders in a row, by client.
        updates: medians of the norms of updates, see :class:`..validation.norms.NormBound`.
        refusals: round, client and reason of the last refused replies.
        settings: section ``network`` of the experiment.
        long: whether each of a client's last updates was too long, by client, see
            :class:`..validation.norm_clipping.Strikes`.
        replies: last reply of each client.
        seconds: times of past replies, see :class:`..operation.grace.Grace`.
        shapes: length and direction of the updates of the last rounds, by round and client.
        paused: the reason why the run paused; empty if it is not paused.
        ended: round after which the clients were told that the run is over; 0 before.
        watched_from: first round in which a fall of validation is looked for.
        sent: bytes of all messages of the run, those for evaluation included: headers, payloads to clients (down) and
            from clients (up).
    """

    run: str = field(default_factory=lambda: secrets.token_hex(8))
    clients: dict[int, dict[str, int]] = field(default_factory=dict)
    refused: dict[int, int] = field(default_factory=dict)
    branch: int = 0
    excluded: dict[int, int] = field(default_factory=dict)
    silent: dict[int, int] = field(default_factory=dict)
    updates: dict[int, dict[str, tuple[float | None, float]]] = field(default_factory=dict)
    refusals: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    long: dict[int, list[int]] = field(default_factory=dict)
    replies: dict[int, LastReply] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    shapes: dict[int, dict[int, UpdateShape]] = field(default_factory=dict)
    paused: str = ""
    ended: int = 0
    watched_from: int = 0
    sent: dict[str, int] = field(default_factory=lambda: {"header": 0, "down": 0, "up": 0})

    @classmethod
    def read(cls, folder: Path) -> Account:
        """Read the account of a run folder; raises CheckpointError if it is missing or damaged."""
        path = folder / ACCOUNT
        try:
            with as_checkpoint_error(f"cannot read {path}"):
                text = path.read_text(encoding="utf-8")
            check_seal(json.loads(text), path)
            return _ADAPTER.validate_json(text, strict=True)
        except (ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}") from error

    def write(self, folder: Path) -> None:
        """Write the account, with its digest."""
        self.refusals = self.refusals[-MAX_REFUSALS:]
        write_json(folder / ACCOUNT, seal(dataclasses.asdict(self)))


_ADAPTER = pydantic.TypeAdapter(Account)


def prepare_resume(folder: Path, round: int | None, excluded_ids: Collection[int]) -> bool:
    """Prepare a run folder for ``fedlowrank resume RUN --round N --without CLIENT``.

    Args:
        folder: folder of the run.
        round: number of completed rounds at the checkpoint to go back to; None for the last one. If it is that of the
            last one, clients of a network that are ahead of it accept orders of repeated rounds from then on.
        excluded_ids: identifiers of the clients to exclude.

    Returns:
        Whether this process can resume the run; False if a server with remote clients has to.

    Raises:
        ConfigError: if the clients of the run cannot be excluded.
        CheckpointError: if the checkpoint is missing or a file is damaged; nothing has changed then.
    """
    if not (folder / ACCOUNT).exists():
        if excluded_ids:
            raise ConfigError(
                "--without excludes clients of a run over a network; the clients of this one are simulated"
            )
        if round is not None:
            with exclusive(folder):
                _restore_checkpoint(folder, round)
        return True
    with exclusive(folder):
        _go_back(folder, round, excluded_ids)
    logger.info("the run stands after round %d", checkpoint.rounds_kept(folder / "checkpoint")[-1])
    for client_id in sorted(excluded_ids):
        logger.info("client %d is excluded from now on", client_id)
    # a simulation stores the folders of its clients beside the run
    if folder.with_name(f"{folder.name}.clients").exists():
        return True
    logger.info(
        "start its server again to go on: fedlowrank serve FILE.toml --resume -o %s, with its keys",
        shlex.quote(str(folder)),
    )
    return False


def _go_back(folder: Path, round: int | None, excluded_ids: Collection[int]) -> None:
    """Put a network run back to an earlier checkpoint, and exclude clients from then on."""
    account = Account.read(folder)
    checkpoints = checkpoint.rounds_kept(folder / "checkpoint", require_last=round is None)
    target_round = checkpoints[-1] if round is None else round
    client_count = len(read_clients(folder))
    for client_id in excluded_ids:
        if not 0 <= client_id < client_count:
            raise ConfigError(f"--without {client_id}: clients go from 0 to {client_count - 1}")
        account.excluded[client_id] = target_round
    if len(account.excluded) >= client_count:
        raise ConfigError("--without leaves no client")
    if round is not None:
        # also for the last checkpoint: clients are ahead of it if it was restored, or the damaged one after it removed
        account.branch += 1
        account.ended = 0
        # the norms of repeated rounds are measured again
        account.updates = {t: norms for t, norms in account.updates.items() if t < target_round}
        account.shapes = {t: shapes for t, shapes in account.shapes.items() if t <= target_round}
        if account.watched_from > target_round:
            account.watched_from = 0
    # written before the checkpoint: a run whose clients expect to go back may also continue from where it was
    if target_round in checkpoints:
        account.write(folder)
    _restore_checkpoint(folder, target_round)


def _restore_checkpoint(folder: Path, round: int) -> None:
    """Put the checkpoint of a run back to an earlier round, with its records and status."""
    # only this command needs it, and it takes long to import
    from ...rounds.logs.loggers import forget_targets

    checkpoints = checkpoint.rounds_kept(folder / "checkpoint", require_last=False)
    is_last = not checkpoint.has_later(folder / "checkpoint", round)
    if round in checkpoints and not is_last:
        # before the checkpoint: a run with new targets may also continue from where it was
        forget_targets(folder)
    checkpoint.go_back(folder / "checkpoint", round)
    run_folder = RunFolder(folder, {}, [])
    run_folder.remove_later_best(round)
    if not is_last or run_folder.read_status().get("rounds", round) > round:
        # a server may continue the run much later; the checkpoints after this one may have been removed by hand
        records, _ = read_records(folder, round, run_folder.run_id)
        run_folder.rewrite(record.to_line() for record in records)
        run_folder.status("stopped", round, f"it went back to the checkpoint after round {round}")
