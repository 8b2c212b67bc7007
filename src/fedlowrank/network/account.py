"""``network.json`` in a run folder: what a server needs of its clients to go on with a run."""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, ConfigError
from ..core.files import as_checkpoint_error, write_json
from ..simulation import checkpoint
from ..simulation.digest import KEY, check_seal, sealed
from ..simulation.lock import exclusive

logger = logging.getLogger(__name__)

ACCOUNT = "network.json"
"""Name of the file."""

REFUSALS = 100
"""Refused replies that are listed, the last ones."""


@dataclass
class Account:
    """What a server needs of its clients to go on with a run.

    Attributes:
        run: names the run to the clients.
        clients: numbers of examples in train, val and test, by client (as text).
        refused: refused replies that count towards the blocklist, by client.
        branch: how often the run went back to an earlier checkpoint; clients refuse orders of a smaller
            number.
        excluded: clients that an operator excluded, with the round to which the run went back then.
        silent: missed orders in a row, by client.
        updates: see :class:`.norms.NormBound`.
        refusals: round, client and reason of the last refused replies.
        settings: the section ``network`` of the experiment.
    """

    run: str
    clients: dict[str, dict[str, int]] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    branch: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    silent: dict[str, int] = field(default_factory=dict)
    updates: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    refusals: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Account:
        """Read the account of a run folder; raises CheckpointError if it is missing or damaged."""
        path = folder / ACCOUNT
        kinds = {f.name: type(getattr(cls(""), f.name)) for f in dataclasses.fields(cls)}
        try:
            with as_checkpoint_error(f"cannot read {path}"):
                stored: dict[str, Any] = json.loads(path.read_text())
            if KEY in stored or "branch" in stored:
                # one that has neither is of a version without digests
                check_seal(stored, path)
            known = {name: value for name, value in stored.items() if name in kinds}
            sound = {"run", "clients", "refused"} <= known.keys()
            sound = sound and all(type(value) is kinds[name] for name, value in known.items())
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}") from error
        if not sound:
            raise CheckpointError(f"{path} is damaged: it does not name a run and its clients")
        return cls(**known)

    def write(self, folder: Path) -> None:
        """Write it, with its digest."""
        self.refusals = self.refusals[-REFUSALS:]
        write_json(folder / ACCOUNT, sealed(dataclasses.asdict(self)))


def new_run_id() -> str:
    """A name for a run that no other run has."""
    return secrets.token_hex(8)


def go_back(folder: Path, round: int | None, without: Collection[int]) -> None:
    """Put a network run back to an earlier checkpoint, and exclude clients from then on.

    Args:
        folder: of the run.
        round: rounds completed at the checkpoint; None for the last one.
        without: clients to exclude.

    Raises:
        ConfigError: if there is no such client.
        CheckpointError: if the checkpoint is missing or a file is damaged; nothing has changed then.
    """
    account = Account.read(folder)
    kept = checkpoint.rounds_kept(folder / "checkpoint")
    target = kept[-1] if round is None else round
    with as_checkpoint_error(f"cannot read {folder / 'clients.json'}"):
        clients = len(json.loads((folder / "clients.json").read_text()))
    for client in without:
        if not 0 <= client < clients:
            raise ConfigError(f"--without {client}: clients go from 0 to {clients - 1}")
        account.excluded[str(client)] = target
    if len(account.excluded) >= clients:
        raise ConfigError("--without leaves no client")
    if target in kept[:-1]:
        account.branch += 1
        # the norms of rounds that are done again are measured again
        account.updates = {t: norms for t, norms in account.updates.items() if int(t) < target}
    # before the checkpoint: a run whose clients expect to go back may go on from where it was, too
    if target in kept:
        account.write(folder)
    restore_checkpoint(folder, target)


def restore_checkpoint(folder: Path, round: int) -> None:
    """Put the checkpoint of a run back to an earlier round.

    Args:
        folder: of the run.
        round: rounds completed at that checkpoint.

    Raises:
        CheckpointError: if the checkpoint is missing or damaged; nothing has changed then.
    """
    checkpoint.go_back(folder / "checkpoint", round)
    best = folder / "best"
    if checkpoint.exists(best) and checkpoint.rounds_kept(best)[-1] > round:
        # of a round that will be done again
        with as_checkpoint_error(f"cannot remove {best}"):
            shutil.rmtree(best)


def prepare_resume(folder: Path, round: int | None, without: Collection[int]) -> bool:
    """Prepare a run folder for ``fedlowrank resume RUN --round N --without CLIENT``.

    Args:
        folder: of the run.
        round: rounds completed at the checkpoint to go back to; None for the last one.
        without: clients to exclude from then on.

    Returns:
        Whether this process can go on with the run; False if a server with remote clients must.

    Raises:
        ConfigError: if the clients of the run cannot be excluded.
        CheckpointError: if the checkpoint is missing or a file is damaged; nothing has changed then.
    """
    if not (folder / ACCOUNT).exists():
        if without:
            raise ConfigError(
                "--without excludes clients of a run over a network; the clients of this one are simulated"
            )
        if round is not None:
            with exclusive(folder):
                restore_checkpoint(folder, round)
        return True
    with exclusive(folder):
        go_back(folder, round, without)
    logger.info("the run stands after round %d", checkpoint.rounds_kept(folder / "checkpoint")[-1])
    for client in sorted(without):
        logger.info("client %d is excluded from now on", client)
    # a simulation keeps the folders of its clients beside the run
    if folder.with_name(f"{folder.name}.clients").exists():
        return True
    logger.info(
        "start its server again to go on: fedlowrank serve FILE.toml --resume -o %s, with its keys", folder
    )
    return False
