"""A run's folder: created once, appended to after every round, resumed after a stop."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import safetensors.torch
import torch
from torch import Tensor

from ..core.errors import CheckpointError
from ..core.files import as_checkpoint_error, write_atomically, write_json, write_json_rows
from ..core.method import Method
from ..core.version import __version__
from ..models.coupling import mixes_examples
from ..trust.budget import LEDGER
from . import checkpoint
from .client_store import LazyMapping
from .lock import exclusive
from .records import FORMAT, METRICS, RoundRecord, read_lines
from .run import Run
from .settings import RunSettings
from .stored_settings import add_defaults

FREE_TO_CHANGE = (
    "versions", "title", "paper", "reference", "experiment", "notes", "remarks", "plan",
    "run.checkpoint_every", "run.evaluate_every", "run.target", "run.representations", "run.adapters",
    "run.keep_best", "run.pixels", "run.keep_checkpoints", "run.metrics", "run.patience", "run.callbacks",
    "run.log",
)  # fmt: skip
"""Parts of the configuration that do not change results, or restate other parts."""


_BEFORE_THE_FIRST_CHECKPOINT = {
    "run.json", "clients.json", METRICS, "metrics.jsonl", "status.json", "network.json", "lock", "checkpoint",
    LEDGER, "logging.json", "tensorboard",
}  # fmt: skip


SECONDS = 10.0
"""Between two checkpoints, unless ``run.checkpoint_every`` says how many rounds."""


class RunFolder:
    """Writes one run. From :meth:`create` or :meth:`restore` to the end of its context, no other process can.

    Args:
        path: of the folder.
        config: what goes into ``run.json``.
        clients: what goes into ``clients.json``.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], clients: list[dict[str, Any]]) -> None:
        self.path = path
        # as it will be read back: tuples become lists, keys become strings
        self.config = json.loads(json.dumps({"format": FORMAT, **config, "versions": versions()}))
        self.clients = clients
        self._lock = contextlib.ExitStack()
        self._saved: float | None = None
        self._saved_round: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def create(self, force: bool) -> None:
        """Make the folder.

        Args:
            force: move an existing one aside, to a name that ends in ``.old-1``, ``.old-2``, ...

        Raises:
            CheckpointError: if it exists and ``force`` is not set, or cannot be made.
        """
        if self.path.exists():
            if not force:
                raise CheckpointError(self.taken(self.path))
            self.move_aside(self.path)
        with as_checkpoint_error(f"cannot make {self.path}"):
            self.path.mkdir(parents=True)
        self._lock.enter_context(exclusive(self.path))
        write_json_rows(self.path / "clients.json", self.clients)
        write_atomically(self.path / METRICS, b"")
        self.status("running", 0)
        # last, for a folder counts as a run once it holds this file
        write_json(self.path / "run.json", self.config)

    @staticmethod
    def taken(path: Path) -> str:
        """What to say of a folder that exists where a run is to begin."""
        go_on = (
            f" Go on with it by `fedlowrank resume {path}`,"
            if RunFolder.has_begun(path)
            else " It holds no run to go on with:"
        )
        return (
            f"{path} exists already.{go_on} choose another folder with -o, or pass --force to move it aside."
        )

    @staticmethod
    def move_aside(path: Path) -> None:
        """Rename a folder to a name that ends in ``.old-1``, ``.old-2``, ...; the first that is free.

        Raises:
            FolderInUseError: if another process writes it.
        """
        number = next(i for i in range(1, 10**6) if not path.with_name(f"{path.name}.old-{i}").exists())
        with exclusive(path), as_checkpoint_error(f"cannot move {path} aside"):
            path.rename(path.with_name(f"{path.name}.old-{number}"))

    def status(self, state: str, rounds: int, message: str = "") -> None:
        """Say how the run stands."""
        write_json(self.path / "status.json", {"state": state, "rounds": rounds, "message": message})

    def is_finished(self) -> bool:
        """Whether the run came to its end and said so."""
        return self.read_status().get("state") == "finished"

    def read_status(self) -> dict[str, Any]:
        """Read ``status.json``."""
        with as_checkpoint_error(f"cannot read {self.path / 'status.json'}"):
            found = (self.path / "status.json").read_text()
        try:
            status = json.loads(found)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path / 'status.json'} is damaged: {error}") from error
        return status if isinstance(status, dict) else {}

    @staticmethod
    def has_begun(path: Path) -> bool:
        """Whether a folder holds a checkpoint to go on from."""
        return checkpoint.exists(path / "checkpoint")

    @staticmethod
    def is_failed_start(path: Path) -> bool:
        """Whether a folder holds nothing but what a run writes before its first checkpoint."""
        if not path.is_dir() or RunFolder.has_begun(path):
            return False
        return {p.name.removesuffix(".part") for p in path.iterdir()} <= _BEFORE_THE_FIRST_CHECKPOINT

    def append(self, record: RoundRecord) -> None:
        """Add the record of a round."""
        with (
            as_checkpoint_error(f"cannot write {self.path / METRICS}"),
            (self.path / METRICS).open("ab") as file,
        ):
            file.write(record.to_bytes())

    def rewrite(self, records: list[RoundRecord]) -> None:
        """Replace all records."""
        write_atomically(self.path / METRICS, (record.to_bytes() for record in records))

    def reconfigure(self) -> None:
        """Write the configuration again, where only what is free to change has changed."""
        write_json(self.path / "run.json", self.config)

    def is_due(self, round: int, settings: RunSettings) -> bool:
        """Whether a checkpoint follows a round: the first, the last, and those by the settings."""
        if round == settings.rounds:
            return True
        if settings.checkpoint_every is not None:
            return round % settings.checkpoint_every == 0
        return self._saved is None or time.monotonic() - self._saved >= SECONDS

    def save(self, run: Run) -> None:
        """Write a checkpoint of the run as it stands."""
        with (
            as_checkpoint_error(f"cannot write {self.path / METRICS}"),
            (self.path / METRICS).open("rb+") as file,
        ):
            os.fsync(file.fileno())
        changed = LazyMapping(sorted(run.unsaved), run.state.clients.__getitem__)
        keep = run.settings.keep_checkpoints
        checkpoint.save(self.path / "checkpoint", run.round, run.state.server, changed, keep)
        run.unsaved.clear()
        self._saved, self._saved_round = time.monotonic(), run.round

    def save_once(self, run: Run) -> None:
        """Write a checkpoint of the run as it stands, unless the last one written is of this round."""
        if self._saved_round != run.round:
            self.save(run)

    def save_best(self, run: Run) -> None:
        """Write the whole state as it stands to ``best``, beside the checkpoints."""
        checkpoint.save(self.path / "best", run.round, run.state.server, run.state.clients)

    def read(self, run: Run, which: str = "checkpoint") -> dict[str, Any]:
        """Put a run where its last checkpoint was, and leave the folder as it is.

        Args:
            run: made of the same configuration and data.
            which: ``checkpoint`` for the last one, ``best`` for that of the best round by validation.

        Returns:
            The stored configuration.

        Raises:
            CheckpointError: if the configuration or the data changed; the message names the field.
        """
        try:
            stored = json.loads((self.path / "run.json").read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path} is not a run folder that can be resumed: {error}") from error
        changes = changes_of(stored, self.config, run.method)
        if changes:
            raise CheckpointError(
                f"{self.path} cannot be resumed with another configuration: "
                + "; ".join(changes)
                + ". Set these back, or start a new run in another folder."
            )
        run.restore(checkpoint.load(self.path / which, run.new_store()))
        found: dict[str, Any] = stored
        return found

    def restore(self, run: Run) -> list[RoundRecord]:
        """Put a run where its last checkpoint was, to go on from there.

        Returns:
            The records of the rounds until then.

        Raises:
            CheckpointError: as :meth:`read`, or if the records are damaged.
            FolderInUseError: if another process writes it.
        """
        if (self.path / "run.json").exists():
            self._lock.enter_context(exclusive(self.path))
        stored = self.read(run)
        try:
            lines = read_lines(self.path)[: run.round + 1]
            records = [RoundRecord.from_json(line, len(self.clients)) for line in lines]
        except (OSError, zlib.error, ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{self.path / METRICS} is missing or damaged: {error}") from error
        if [r.round for r in records] != list(range(run.round + 1)):
            raise CheckpointError(f"{self.path / METRICS} lacks rounds that the checkpoint holds")
        if len(records) > 1:
            run.plan_evaluations(records[1].flops)
        if self.config != stored:
            self.reconfigure()
        checkpoint.tidy(self.path / "checkpoint")
        if self._ended_early(run, stored):
            run.stopped = str(self.read_status().get("message", ""))
        elif run.round < run.settings.rounds:
            # rounds after the checkpoint will be done again
            self.rewrite(records)
            self.status("running", run.round)
        return records

    def _ended_early(self, run: Run, stored: Mapping[str, Any]) -> bool:
        """Whether the run finished where it stands, and no setting asks for more than it did then."""
        status, before, now = self.read_status(), stored["run"], self.config["run"]
        same = all(before.get(name) == now[name] for name in ("rounds", "patience"))
        same &= before.get("callbacks", []) == now["callbacks"]
        return same and status.get("state") == "finished" and status.get("rounds") == run.round

    def write_models(self, run: Run) -> None:
        """Write the models as they stand to ``adapters/round-NNNN``, in the form that others read.

        Raises:
            CheckpointError: if these are no language models, or the folder cannot be written.
        """
        companion = run.federation.companion
        if companion is None:
            raise CheckpointError("run.adapters: only language models have adapter folders; leave it empty")
        with as_checkpoint_error(f"cannot write {self.path / 'adapters'}"):
            companion.write(run, self.path / "adapters" / f"round-{run.round:04d}")

    def save_representations(self, found: dict[str, Tensor]) -> None:
        """Keep test representations for pictures."""
        if found:
            write_atomically(self.path / "representations.safetensors", safetensors.torch.save(found))


def changes_of(stored: Any, now: Any, method: Method[Any, Any, Any, Any]) -> list[str]:
    """Fields of ``run.json`` in which two configurations differ so that one run cannot go on as the other.

    A run may get more rounds, for its rounds until now are those of a run that had as many from the start,
    unless the method plans them by their number.

    Args:
        stored: the configuration of the run. Settings that it lacks count as their defaults
            (:func:`fedlowrank.simulation.stored_settings.add_defaults`).
        now: how it is to go on, or some sections of it.
        method: that it runs.
    """
    stored = add_defaults(stored, method) if isinstance(stored, dict) else stored
    before, after = (_rounds(c) for c in (stored, now))
    if not isinstance(before, int) or not isinstance(after, int) or before == after:
        return differences(stored, now)
    more = differences({**stored, "run": {**stored["run"], "rounds": after}}, now)
    if after < before:
        return [f"run.rounds was {before} and is {after}, but a run can only get more rounds", *more]
    if not method.uses_rounds:
        return more
    why = f"{method.title} plans its rounds by how many there are"
    others = f"{before} of {after} are others than {before} of {before}"
    return [f"run.rounds was {before} and is {after}; {why}, so {others}", *more]


def _rounds(config: Any) -> Any:
    run = config.get("run") if isinstance(config, dict) else None
    return run.get("rounds") if isinstance(run, dict) else None


def differences(stored: Any, now: Any, path: str = "") -> list[str]:
    """Dotted fields in which two configurations differ, each with both values."""
    if isinstance(stored, dict) and isinstance(now, dict):
        found: list[str] = []
        for key in sorted({*stored, *now}, key=str):
            here = f"{path}.{key}" if path else str(key)
            if here in FREE_TO_CHANGE:
                continue
            if key not in stored or key not in now:
                found.append(f"{here} is only in the {'stored' if key in stored else 'new'} configuration")
            else:
                found += differences(stored[key], now[key], here)
        return found
    if stored == now:
        return []
    if path == "fingerprint" and isinstance(stored, list) and isinstance(now, list):
        changed = [i for i, (a, b) in enumerate(zip(stored, now, strict=False)) if a != b]
        return [
            f"data: the examples of client {changed[0] if changed else min(len(stored), len(now))} are others"
        ]
    return [f"{path} was {stored!r} and is {now!r}"]


def versions() -> dict[str, str]:
    """Software that a run depends on."""
    return {
        "fedlowrank": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }


def representations(run: Run, limit: int) -> dict[str, Tensor]:
    """Representations of about ``limit`` test examples, evenly from all clients, by each client's own model.

    Returns:
        ``x [n, d]``, ``label [n]`` and ``client [n]``; empty if the models have no head to split from.
    """
    federation = run.federation
    if limit < 1 or any(a.head_name is None for a in federation.architectures.values()):
        return {}
    share = max(1, limit // len(federation.clients))
    x, label, client = [], [], []
    for info, data in zip(federation.infos, federation.clients, strict=True):
        if not len(data.test):
            continue
        params = run.personal(info)
        model = federation.architectures[info.architecture]
        some = data.test.take(torch.arange(min(share, len(data.test))))
        seen = data.test if mixes_examples(model) else some
        with torch.inference_mode():
            x.append(model.represent(params, seen.x)[: len(some)].cpu().flatten(1).clone())
        label.append(some.y.cpu())
        client.append(torch.full_like(label[-1], info.id))
    if len({t.shape[1] for t in x}) != 1:
        return {}
    return {"x": torch.cat(x).contiguous(), "label": torch.cat(label), "client": torch.cat(client)}
