"""A run's folder: created once, appended to after every round, resumed after a stop."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import secrets
import shlex
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..core.errors import CheckpointError
from ..core.io.atomic_files import as_checkpoint_error, encode_json_rows, write_atomically
from ..core.version import __version__
from . import checkpoint
from .client_store import ClientStore, LazyMapping
from .digest import read_sealed, write_sealed
from .lock import exclusive
from .run_files import (
    ACCOUNT,
    CLIENTS,
    CONFIG,
    FORMAT,
    LEDGER,
    RECORDS_FILE,
    REPRESENTATIONS,
    RUN_ID,
    STATUS,
    encode_line,
    encode_representations,
    read_clients,
    read_run,
    write_config,
)
from .state import State

logger = logging.getLogger(__name__)

_BEFORE_THE_FIRST_CHECKPOINT = {
    "run.json", "clients.json", RECORDS_FILE, "status.json", ACCOUNT, "lock", "checkpoint",
    LEDGER, "logging.json", "tensorboard",
}  # fmt: skip


SECONDS_BETWEEN_CHECKPOINTS = 10.0
"""Seconds between two checkpoints, unless ``run.checkpoint_every`` sets a number of rounds."""


class RunFolder:
    """Writes the folder of one run. From :meth:`create` or :meth:`lock` to the end of its context, no other process can.

    Args:
        path: path of the folder.
        config: contents of ``run.json``.
        clients: rows of ``clients.json``.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], clients: list[dict[str, Any]]) -> None:
        self.path = path
        # the configuration as JSON reads it back: tuples become lists, keys become strings
        self.config = json.loads(json.dumps({"format": FORMAT, **config, "versions": versions()}))
        self.clients = clients
        self._lock = contextlib.ExitStack()
        self._saved: float | None = None
        self._saved_round: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    @cached_property
    def run_id(self) -> str | None:
        """Random identifier of the run; None for a run that was made before there were any."""
        return read_run(self.path)[1]

    def create(self, force: bool) -> None:
        """Make the folder.

        Args:
            force: whether to move an existing folder aside, to a name that ends in ``.old-1``, ``.old-2``, ...

        Raises:
            CheckpointError: if the folder exists and ``force`` is not set, or it cannot be made.
        """
        with as_checkpoint_error(f"cannot read {self.path}"):
            exists = self.path.exists()
        if exists:
            if not force:
                raise self.taken(self.path)
            self.move_aside(self.path)
        with as_checkpoint_error(f"cannot make {self.path}"):
            self.path.mkdir(parents=True)
        self._lock.enter_context(exclusive(self.path))
        self.run_id = secrets.token_hex(16)
        write_atomically(self.path / CLIENTS, encode_json_rows(self.clients))
        write_atomically(self.path / RECORDS_FILE, b"")
        self.status("running", 0)
        # last, because a folder counts as a run as soon as it holds this file
        self.reconfigure()

    @staticmethod
    def taken(path: Path) -> CheckpointError:
        """The error for a folder that exists where a run is to begin."""
        has_checkpoint = RunFolder.has_begun(path)
        resume = (
            f"Go on with it by `fedlowrank resume {shlex.quote(str(path))}`,"
            if has_checkpoint
            else "It holds no run to go on with:"
        )
        return CheckpointError(
            f"{path} exists already.",
            python=f"{'Go on with it by resume=True,' if has_checkpoint else 'It holds no run to go on with:'} choose another "
            "folder, or pass force=True to move it aside.",
            command=f"{resume} choose another folder with -o, or pass --force to move it aside.",
        )

    @staticmethod
    def move_aside(path: Path) -> Path:
        """Rename a folder to the first free name of those that end in ``.old-1``, ``.old-2``, ..., and return the new path.

        Raises:
            FolderInUseError: if another process writes it.
        """
        return RunFolder.move_all_aside([path])[0]

    @staticmethod
    def move_all_aside(paths: Sequence[Path]) -> list[Path]:
        """Rename several folders as :meth:`move_aside` does, all or none.

        Raises:
            FolderInUseError: if another process writes one of them.
        """
        with contextlib.ExitStack() as stack:
            for path in paths:
                stack.enter_context(exclusive(path))
            return [_rename_aside(path) for path in paths]

    def status(self, state: str, rounds: int, message: str = "") -> None:
        """Write ``status.json``: state, number of completed rounds and a message."""
        write_sealed(self.path / STATUS, {"state": state, "rounds": rounds, "message": message})

    def is_finished(self) -> bool:
        """Whether the run reached its end and recorded that in its status."""
        return self.read_status().get("state") == "finished"

    def read_status(self) -> dict[str, Any]:
        """Read ``status.json``."""
        return read_sealed(self.path / STATUS)

    @staticmethod
    def has_begun(path: Path) -> bool:
        """Whether a folder holds a checkpoint to resume from."""
        return checkpoint.exists(path / "checkpoint")

    @staticmethod
    def is_failed_start(path: Path) -> bool:
        """Whether a folder holds nothing but what a run writes before its first checkpoint."""
        if not path.is_dir() or RunFolder.has_begun(path):
            return False
        return {p.name.removesuffix(".part") for p in path.iterdir()} <= _BEFORE_THE_FIRST_CHECKPOINT

    def append(self, line: str) -> None:
        """Append the record of a round, a line of JSON."""
        with (
            as_checkpoint_error(f"cannot write {self.path / RECORDS_FILE}"),
            (self.path / RECORDS_FILE).open("ab") as file,
        ):
            file.write(encode_line(line))

    def rewrite(self, lines: Iterable[str]) -> None:
        """Replace all records, each a line of JSON."""
        write_atomically(self.path / RECORDS_FILE, map(encode_line, lines))

    def reconfigure(self) -> None:
        """Write the configuration, at first or after a change of settings that a resumed run may change."""
        write_config(self.path, {**self.config, RUN_ID: self.run_id})

    def is_due(self, round: int, last_round: int, round_interval: int | None) -> bool:
        """Whether a checkpoint follows a round.

        It follows the last round and each ``round_interval``-th. If that is None, it follows the first round and
        those that end at least :data:`SECONDS_BETWEEN_CHECKPOINTS` after the last checkpoint.
        """
        if round == last_round:
            return True
        if round_interval is not None:
            return round % round_interval == 0
        return self._saved is None or time.monotonic() - self._saved >= SECONDS_BETWEEN_CHECKPOINTS

    def save(self, state: State, changed_ids: Iterable[int], keep: int) -> None:
        """Write a checkpoint.

        Args:
            state: current state of the run.
            changed_ids: identifiers of the clients whose state changed since the last checkpoint.
            keep: number of checkpoints to keep, including this one.
        """
        with (
            as_checkpoint_error(f"cannot write {self.path / RECORDS_FILE}"),
            (self.path / RECORDS_FILE).open("rb+") as file,
        ):
            os.fsync(file.fileno())
        states = LazyMapping(sorted(changed_ids), state.clients.__getitem__)
        checkpoint.save(self.path / "checkpoint", state.round, state.stored_server, states, keep, self.run_id)
        self._saved, self._saved_round = time.monotonic(), state.round

    def is_saved(self, round: int) -> bool:
        """Whether the last checkpoint written is that of this round."""
        return self._saved_round == round

    def save_best(self, state: State) -> None:
        """Write a whole state to ``best``, beside the checkpoints."""
        checkpoint.save(
            self.path / "best", state.round, state.stored_server, state.clients, run_id=self.run_id
        )

    def has_best(self, round: int) -> bool:
        """Whether ``best`` holds the state after a round."""
        folder = self.path / "best"
        return checkpoint.exists(folder) and checkpoint.rounds_kept(folder)[-1] == round

    def remove_later_best(self, round: int) -> None:
        """Remove the state in ``best`` if it is of a round that will be repeated; move it aside if it is damaged."""
        folder = self.path / "best"
        try:
            is_later = checkpoint.exists(folder) and checkpoint.rounds_kept(folder)[-1] > round
        except CheckpointError:
            logger.warning(
                "the state of the best round in %s is damaged or cannot be read, and was moved to %s. The run goes on without "
                "it, and keeps the state of a better round.",
                folder,
                _rename_aside(folder),
            )
            return
        if is_later:
            with as_checkpoint_error(f"cannot remove {folder}"):
                shutil.rmtree(folder)

    def load(self, store: ClientStore, folder_name: str = "checkpoint") -> State:
        """Read a checkpoint.

        Args:
            store: empty store for the states of clients.
            folder_name: ``checkpoint`` for the last checkpoint, ``best`` for that of the best round by validation.

        Raises:
            CheckpointError: if there is no checkpoint, or it is damaged or of another run.
        """
        if folder_name == "best" and not checkpoint.exists(self.path / folder_name):
            raise CheckpointError(
                f"{self.path} holds no state of its best round. A run keeps it with run.keep_best = true, from its first "
                "evaluation with validation examples on. Take the last checkpoint,",
                python="or run the experiment with keep_best=True.",
                command="or run the experiment with run.keep_best=true.",
            )
        return checkpoint.load(self.path / folder_name, store, self.run_id)

    def lock(self) -> None:
        """Keep other processes from writing the folder; raises FolderInUseError if one does."""
        with as_checkpoint_error(f"cannot read {self.path}"):
            exists = (self.path / CONFIG).exists()
        if exists:
            self._lock.enter_context(exclusive(self.path))

    def repair_tables(self, round: int) -> bool:
        """Write ``clients.json`` and ``status.json`` again if they are damaged; return whether they were.

        Args:
            round: number of completed rounds.
        """
        is_damaged = False
        try:
            read_clients(self.path)
        except CheckpointError as error:
            logger.warning("%s It is written again.", error)
            write_atomically(self.path / CLIENTS, encode_json_rows(self.clients))
            is_damaged = True
        try:
            self.read_status()
        except CheckpointError as error:
            logger.warning("%s It is written again.", error)
            self.status("stopped", round, "its former status was lost")
            is_damaged = True
        return is_damaged

    def has_ended(self, round: int, stored_config: Mapping[str, Any]) -> bool:
        """Whether the run finished at this round, and the settings do not ask for more than before.

        Args:
            round: number of completed rounds.
            stored_config: configuration that the folder held before.
        """
        status, is_same = self.read_status(), ends_equally(stored_config["run"], self.config["run"])
        return is_same and status.get("state") == "finished" and status.get("rounds") == round

    def save_representations(self, representations: dict[str, Tensor]) -> None:
        """Store test representations for plots."""
        if representations:
            write_atomically(self.path / REPRESENTATIONS, encode_representations(representations))


def ends_equally(stored_run: Mapping[str, Any], current_run: Mapping[str, Any]) -> bool:
    """Whether settings of a run, as ``run.json`` stores them, do not ask for another end than the stored ones."""
    is_same = all(stored_run.get(name) == current_run[name] for name in ("rounds", "patience"))
    return is_same and stored_run.get("callbacks", []) == current_run["callbacks"]


def _rename_aside(path: Path) -> Path:
    if Path.cwd().is_relative_to(path.resolve()):
        raise CheckpointError(
            f"cannot move {path} aside: it is the working folder, or holds it. Choose another folder."
        )
    new_paths = (path.with_name(f"{path.name}.old-{i}") for i in range(1, 10**6))
    with as_checkpoint_error(f"cannot move {path} aside"):
        return path.rename(next(new_path for new_path in new_paths if not new_path.exists()))


def versions() -> dict[str, str]:
    """Versions of the software that a run depends on."""
    return {
        "fedlowrank": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }
