"""A run's folder: created once, appended to after every round, resumed after a stop."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..core.errors import CheckpointError
from ..core.files import as_checkpoint_error, encode_json_rows, write_atomically
from ..core.method import Method
from ..core.version import __version__
from ..models.coupling import mixes_examples
from ..models.fingerprint import compare_layers
from ..trust.budget import LEDGER
from . import checkpoint
from .client_store import LazyMapping
from .digest import read_sealed, write_sealed
from .lock import exclusive
from .records import (
    CLIENTS,
    CONFIG,
    FORMAT,
    METRICS,
    REPRESENTATIONS,
    STATUS,
    RoundRecord,
    describe_missing,
    encode_representations,
    read_clients,
    read_config,
    read_lines,
    salvage_lines,
    write_config,
)
from .run import Run
from .settings import RunSettings
from .stored_settings import add_defaults

logger = logging.getLogger(__name__)

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
                raise self.taken(self.path)
            self.move_aside(self.path)
        with as_checkpoint_error(f"cannot make {self.path}"):
            self.path.mkdir(parents=True)
        self._lock.enter_context(exclusive(self.path))
        write_atomically(self.path / CLIENTS, encode_json_rows(self.clients))
        write_atomically(self.path / METRICS, b"")
        self.status("running", 0)
        # last, for a folder counts as a run once it holds this file
        write_config(self.path, self.config)

    @staticmethod
    def taken(path: Path) -> CheckpointError:
        """The error about a folder that exists where a run is to begin."""
        begun = RunFolder.has_begun(path)
        resume = (
            f"Go on with it by `fedlowrank resume {path}`," if begun else "It holds no run to go on with:"
        )
        return CheckpointError(
            f"{path} exists already.",
            python=f"{'Go on with it by resume=True,' if begun else 'It holds no run to go on with:'} choose another "
            "folder, or pass force=True to move it aside.",
            command=f"{resume} choose another folder with -o, or pass --force to move it aside.",
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
        write_sealed(self.path / STATUS, {"state": state, "rounds": rounds, "message": message})

    def is_finished(self) -> bool:
        """Whether the run came to its end and said so."""
        return self.read_status().get("state") == "finished"

    def read_status(self) -> dict[str, Any]:
        """Read ``status.json``."""
        return read_sealed(self.path / STATUS)

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
        write_config(self.path, self.config)

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
        checkpoint.save(self.path / "checkpoint", run.round, run.state.stored_server, changed, keep)
        run.unsaved.clear()
        self._saved, self._saved_round = time.monotonic(), run.round

    def save_once(self, run: Run) -> None:
        """Write a checkpoint of the run as it stands, unless the last one written is of this round."""
        if self._saved_round != run.round:
            self.save(run)

    def save_best(self, run: Run) -> None:
        """Write the whole state as it stands to ``best``, beside the checkpoints."""
        checkpoint.save(self.path / "best", run.round, run.state.stored_server, run.state.clients)

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
        stored = read_config(self.path)
        changes = changes_of(stored, self.config, run.method)
        if changes:
            raise CheckpointError(
                f"{self.path} cannot be resumed with another configuration: "
                + "; ".join(changes)
                + ". Set these back, or start a new run in another folder."
            )
        run.restore(checkpoint.load(self.path / which, run.new_store()))
        return stored

    def restore(self, run: Run) -> list[RoundRecord]:
        """Put a run where its last checkpoint was, to go on from there.

        The checkpoint is enough to go on. Where other files are damaged, they are written again as far as their
        content is known, and a warning says what is lost.

        Returns:
            The records of the rounds until then that could be read.

        Raises:
            CheckpointError: as :meth:`read`.
            FolderInUseError: if another process writes it.
        """
        if (self.path / CONFIG).exists():
            self._lock.enter_context(exclusive(self.path))
        stored = self.read(run)
        is_damaged = self._repair_tables(run)
        records, missing = self._read_records(run)
        if flops := next((r.flops for r in records if r.flops), 0):
            run.plan_evaluations(flops)
        if run.round in missing:
            last = RoundRecord(round=run.round, restored=True)
            # over a network the clients evaluate, at the end of the next round
            records.append(last if run.evaluates_late else run.evaluate_last(last))
        if self.config != stored or is_damaged:
            self.reconfigure()
        checkpoint.tidy(self.path / "checkpoint")
        if self._ended_early(run, stored):
            run.stopped = str(self.read_status().get("message", ""))
        elif run.round < run.settings.rounds:
            # rounds after the checkpoint will be done again
            self.rewrite(records)
            self.status("running", run.round)
        if missing:
            self.rewrite(records)
        return records

    def _repair_tables(self, run: Run) -> bool:
        """Write ``clients.json`` and ``status.json`` again if they are damaged; whether they were."""
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
            self.status("stopped", run.round, "its former status was lost")
            is_damaged = True
        return is_damaged

    def _read_records(self, run: Run) -> tuple[list[RoundRecord], list[int]]:
        """The records until the checkpoint, and the rounds whose records are lost."""
        damage = ""
        try:
            lines = read_lines(self.path)
            found = [RoundRecord.from_json(line, len(self.clients)) for line in lines]
        except (OSError, zlib.error, ValueError, TypeError, RecursionError) as error:
            damage, found = f": {error}", []
            with as_checkpoint_error(f"cannot read {self.path / METRICS}"):
                lines = salvage_lines(self.path)
            for line in lines:
                with contextlib.suppress(ValueError, TypeError, RecursionError):
                    found.append(RoundRecord.from_json(line, len(self.clients)))
        by_round = {record.round: record for record in found if record.round <= run.round}
        missing = [t for t in range(run.round + 1) if t not in by_round]
        if missing:
            logger.warning(
                "%s is missing or damaged%s: %s, with their results and costs. The run goes on from its checkpoint "
                "after round %d with the same bits. For all records, run it again from the start in another folder.",
                self.path / METRICS,
                damage,
                describe_missing(missing),
                run.round,
            )
        return [by_round[t] for t in sorted(by_round)], missing

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
            write_atomically(self.path / REPRESENTATIONS, encode_representations(found))


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
        if path == "models":
            return _model_differences(stored, now)
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
    if path.startswith("code."):
        return [f"the code of {path.removeprefix('code.')} was changed"]
    if path == "fingerprint" and isinstance(stored, list) and isinstance(now, list):
        changed = [i for i, (a, b) in enumerate(zip(stored, now, strict=False)) if a != b]
        return [
            f"data: the examples of client {changed[0] if changed else min(len(stored), len(now))} are others"
        ]
    return [f"{path} was {stored!r} and is {now!r}"]


def _model_differences(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In which layers the models of two configurations differ, by name of the architecture."""
    found = []
    for name in sorted({*stored, *now}):
        if name not in stored or name not in now:
            found.append(f"model {name} is only in the {'stored' if name in stored else 'new'} configuration")
            continue
        before, after = stored[name], now[name]
        layers = compare_layers(before.get("layers") or {}, after["layers"])
        found += [f"model {name}: {text}" for text in layers]
        if not layers and before.get("frozen") != after.get("frozen"):
            found.append(
                f"model {name}: its frozen parameters or buffers have other values. No checkpoint holds them; load "
                "the weights that the run was made with"
            )
        elif not layers:
            old, new = (
                {k: v for k, v in m.items() if k not in ("layers", "frozen")} for m in (before, after)
            )
            found += differences(old, new, f"models.{name}")
    return found


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
        ``x [n, d]``, ``label [n]`` (real targets ``[n, d]``) and ``client [n]``; empty if the models have no head to
        split from, or the labels are those of pixels or tokens.
    """
    federation = run.federation
    first = federation.clients[0].train
    has_heads = all(a.head_name is not None for a in federation.architectures.values())
    if limit < 1 or not has_heads or first.is_dense or first.y.ndim > 2:
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
        client.append(torch.full((len(some),), info.id))
    if len({t.shape[1] for t in x}) != 1:
        return {}
    return {"x": torch.cat(x).contiguous(), "label": torch.cat(label), "client": torch.cat(client)}
