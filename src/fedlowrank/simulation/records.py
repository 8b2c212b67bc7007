"""What a run leaves behind: one folder, readable by a person and by the report.

RUN/run.json          resolved configuration, software versions, the paper's reference numbers if the experiment
                      has any, the digest of clients.json, and its own
RUN/clients.json      one row a client: architecture, examples in train/val/test, class counts, true cluster
                      (null if unknown), whether it never trains
RUN/metrics.jsonl.gz  one :class:`RoundRecord` a line; round 0 is the state before any training;
                      ``pandas.read_json("RUN/metrics.jsonl.gz", lines=True)``
RUN/status.json       {"state": "running" | "finished" | "stopped", "rounds": ..., "message": ...}
RUN/representations.safetensors   optional: test representations at the end of the run, for pictures
RUN/lock              which process writes the folder, or wrote it last; see :mod:`fedlowrank.simulation.lock`
RUN/checkpoint/       see :mod:`fedlowrank.simulation.checkpoint`
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
from pydantic_core import from_json
from torch import Tensor

from ..core.errors import CheckpointError
from ..core.files import as_checkpoint_error, parse_json, read_json
from .digest import KEY, SEAL_AGAIN, digest_of, read_sealed, write_sealed
from .lock import is_alive, read_holder
from .measurements import COSTS, TRAINING_LOSS, Measurements, mean_over_clients

FORMAT = 1

CONFIG, CLIENTS, STATUS = "run.json", "clients.json", "status.json"
"""Names of the small files."""

REPRESENTATIONS = "representations.safetensors"
"""Name of the file of test representations."""

CLIENTS_DIGEST = "clients_digest"
"""Where ``run.json`` has the digest of ``clients.json``."""

CHECKPOINTS = "checkpoint/*.checkpoint"
"""Files of a run folder whose name is the number of completed rounds."""

METRICS = "metrics.jsonl.gz"
"""Name of the file of records. Every line is a gzip member of its own, appended by one write."""

Accuracy = dict[str, dict[str, list[float | None]]]
"""``accuracy[series][split][i]``: of client i, in [0, 1]; None without examples or classes."""


@dataclass(frozen=True)
class RoundRecord:
    """Everything measured in one round.

    Attributes:
        round: rounds completed, so 1 for the first round of training and 0 for the state before it.
        participants: clients that trained.
        lost: participants whose reply did not arrive or was dropped, with the reason.
        bytes_down: bytes of the encoded messages from the server to the participants.
        bytes_up: bytes of the encoded messages back, lost ones included (they were sent).
        evaluated: clients that were evaluated; None for all.
        apart: clients that are in no mean of results, because they never train or are hostile; None for none.
        parameters_down: floating-point elements in the messages to the participants.
        parameters_up: floating-point elements in the messages back.
        steps: optimizer steps of all participants.
        flops: floating-point operations of training, forward and backward, of all participants.
        seconds: wall-clock seconds of ``train``, ``server`` and ``evaluate``.
        cpu_seconds: the same in CPU time of this process.
        loss: mean loss over the steps of each pass, over all participants.
        accuracy: see :data:`Accuracy`; None in rounds without evaluation.
        risk: the mean loss of every client's model on its own examples, in the same form, to six significant
            digits; a loss in float32 has seven.
        simulated_seconds: what the round took by the simulated clock of ``run.devices``; None without one.
        metrics: those of ``run.metrics`` by name, each in the same form, to six significant digits; None for
            a client where a metric is not defined. None as a whole without such metrics or evaluation.
        restored: True if the record was lost and only the evaluation was repeated from a checkpoint: what the
            round cost is not known; else None.
        routes: of every client its share of each cluster; None if the method has no clusters, or without
            evaluation.
        parameters: of each series, how many numbers the model of each client takes
            (:func:`fedlowrank.linalg.matricize.count_parameters`); None in rounds without evaluation.
        ranks: of the server's low-rank weights by name, after the round.
        observed: what the method says of its server after the round, such as the weight of each client's
            reply.
    """

    round: int
    participants: list[int] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0
    parameters_down: int = 0
    parameters_up: int = 0
    steps: int = 0
    flops: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)
    accuracy: Accuracy | None = None
    risk: Accuracy | None = None
    routes: list[list[float]] | None = None
    parameters: dict[str, list[int]] | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    observed: dict[str, dict[str, float]] = field(default_factory=dict)
    evaluated: list[int] | None = None
    metrics: dict[str, Accuracy] | None = None
    simulated_seconds: float | None = None
    apart: list[int] | None = None
    restored: bool | None = None

    def to_json(self) -> str:
        """One line of JSON; of a subset of clients it holds the numbers of those that were evaluated."""
        fields = self._map_tables(lambda row: [row[i] for i in self.evaluated or ()])
        for name in ("metrics", "simulated_seconds", "apart", "restored"):
            if fields[name] is None:
                # as in the lines of earlier versions
                del fields[name]
        return json.dumps(fields, separators=(",", ":"))

    def to_bytes(self) -> bytes:
        """What is appended to :data:`METRICS`."""
        # equal records make equal bytes, so no time stamp
        return gzip.compress((self.to_json() + "\n").encode(), mtime=0)

    @classmethod
    def from_json(cls, line: str | bytes, clients: int) -> RoundRecord:
        """Read a line of :meth:`to_json`; raises TypeError or ValueError if it is none.

        Args:
            line: of JSON.
            clients: of the run, those that were not evaluated included.
        """
        # a third of the time of json.loads
        short = cls(**from_json(line))

        def scatter(values: list[Any]) -> list[Any]:
            row: list[Any] = [None] * clients
            for client, value in zip(short.evaluated or (), values, strict=True):
                row[client] = value
            return row

        return cls(**short._map_tables(scatter))

    def _map_tables(self, change: Callable[[list[Any]], list[Any]]) -> dict[str, Any]:
        """The fields, with the lists over clients changed where only some clients were evaluated."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.evaluated is not None:

            def changed(table: Accuracy) -> Accuracy:
                return {name: {split: change(row) for split, row in of.items()} for name, of in table.items()}

            for kind in ("accuracy", "risk"):
                if (table := fields[kind]) is not None:
                    fields[kind] = changed(table)
            if self.metrics is not None:
                fields["metrics"] = {name: changed(table) for name, table in self.metrics.items()}
        return fields

    def validation(self) -> float | None:
        """Mean validation accuracy of the headline, of a regression minus its loss; None if not evaluated.

        The mean is over the clients that can train and are not hostile. It is minus infinity if the loss of one of
        them is not finite.
        """
        for sign, mean in ((1.0, self.mean("val")), (-1.0, self.mean("val", is_loss=True))):
            if mean is not None:
                return -math.inf if math.isnan(mean) else sign * mean
        return None

    def mean(self, split: str, *, is_loss: bool = False, metric: str | None = None) -> float | None:
        """Mean accuracy, loss or further metric of the headline over the clients that can train and are not hostile.

        Args:
            split: ``"test"`` or ``"val"``.
            is_loss: the loss and not the accuracy.
            metric: one of ``metrics`` instead of both.

        Returns:
            It; None if the models were not evaluated, or no such client has a number; NaN if that of one is not
            finite.
        """
        measured, apart = self.risk if is_loss else self.accuracy, set(self.apart or ())
        if metric is not None:
            measured = (self.metrics or {}).get(metric)
        values = next(iter((measured or {}).values()), {}).get(split, [])
        return mean_over_clients([v for client, v in enumerate(values) if client not in apart])

    def append_to(self, table: Measurements) -> None:
        """Append all numbers to the table of a run."""
        t = self.round
        if self.accuracy is not None:
            table.note_evaluation(t, self.evaluated)
        tables = {"accuracy": self.accuracy, "loss": self.risk, **(self.metrics or {})}
        for name, of in tables.items():
            for series, splits in (of or {}).items():
                for split, values in splits.items():
                    table.append_clients(t, name, values, series=series, split=split)
        for series, sizes in (self.parameters or {}).items():
            table.append_clients(t, "parameters", sizes, series=series)
        rows = self.routes or []
        if rows and len({len(row) for row in rows}) == 1:
            for cluster in range(len(rows[0])):
                table.append_clients(t, "route", [row[cluster] for row in rows], series=str(cluster))
        for name in COSTS:
            table.append(t, name, getattr(self, name))
        if self.simulated_seconds is not None:
            table.append(t, "simulated_seconds", self.simulated_seconds)
        kinds: dict[str, Mapping[str, Any]] = {
            "seconds": self.seconds,
            TRAINING_LOSS: self.loss,
            "ranks": self.ranks,
            **(self.observed or {}),
        }
        for name, numbers in kinds.items():
            for series, value in numbers.items():
                table.append(t, name, value, series=series)

    def untimed(self) -> dict[str, Any]:
        """All fields but the clocks: what must be equal between two runs of one configuration."""
        clocks = ("seconds", "cpu_seconds")
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in clocks}


@dataclass(frozen=True)
class RunRecord:
    """A run folder, read.

    Attributes:
        folder: where it lies.
        config: contents of ``run.json``.
        clients: contents of ``clients.json``.
        rounds: contents of :data:`METRICS`, in ascending order.
        status: contents of ``status.json``.
        missing: rounds that were completed and of which :data:`METRICS` has lost the record, or all of it but the
            evaluation.
    """

    folder: Path
    config: dict[str, Any]
    clients: list[dict[str, Any]]
    rounds: list[RoundRecord]
    status: dict[str, Any]
    missing: tuple[int, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> RunRecord:
        """Read a run folder.

        Raises:
            CheckpointError: if the folder or a file in it is missing, damaged or of another format.
        """
        config = read_config(folder)
        clients = read_clients(folder)
        status = read_sealed(folder / STATUS)
        # before the records, for a run that goes on has its records before its checkpoint
        completed = _completed(folder, status)
        try:
            rounds = [RoundRecord.from_json(line, len(clients)) for line in read_lines(folder)]
        except (OSError, zlib.error, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{folder / METRICS} is missing or damaged: {error}. Restore it from a copy, or resume the run, "
                "which keeps the rounds that can be read."
            ) from error
        numbers = [record.round for record in rounds]
        if numbers != sorted(set(numbers)):
            raise CheckpointError(f"{folder / METRICS} is damaged: its rounds are {numbers}, not ascending")
        if config.get("format") != FORMAT:
            raise CheckpointError(
                f"{folder} has format {config.get('format')}; this version reads format {FORMAT}"
            )
        known = {record.round for record in rounds if not record.restored}
        missing = tuple(t for t in range(max([completed, *numbers[-1:]]) + 1) if t not in known)
        return cls(folder, config, clients, rounds, believed(folder, status), missing)

    @cached_property
    def measurements(self) -> Measurements:
        """All that was measured, as one table."""
        return Measurements.of(self.rounds, self.clients)

    def representations(self) -> dict[str, Tensor] | None:
        """``x [n, d]``, ``label [n]`` and ``client [n]`` of test representations, or None without them.

        Raises:
            CheckpointError: if the file is damaged.
        """
        path = self.folder / REPRESENTATIONS
        if not path.is_file():
            return None
        with as_checkpoint_error(f"cannot read {path}"):
            data = path.read_bytes()
        found: dict[str, Tensor] = {}
        with contextlib.suppress(safetensors.SafetensorError, ValueError):
            found = safetensors.torch.load(data)
        if encode_representations(found) != data:
            raise CheckpointError(
                f"{path} is damaged or was changed by hand: its digest is not that of its tensors. Restore it from a "
                "copy, or remove it: the report has no embedding plot then."
            )
        return found


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of ``run.json`` in a run folder, without digests.

    Raises:
        CheckpointError: if there is none, or it is damaged.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a run folder: it holds no {CONFIG}")
    config = read_sealed(path)
    for name in ("method", "run", "models", "vary", "reference"):
        if not isinstance(config.get(name), dict | None):
            raise CheckpointError(f"{path} is damaged: {name} must be a table, not {config[name]!r:.40}")
    config.pop(CLIENTS_DIGEST, None)
    return config


def read_clients(folder: Path) -> list[dict[str, Any]]:
    """The rows of ``clients.json`` in a run folder, compared with the digest in ``run.json``.

    Raises:
        CheckpointError: if one of these files is missing or damaged.
    """
    path, expected = folder / CLIENTS, read_sealed(folder / CONFIG).get(CLIENTS_DIGEST)
    with as_checkpoint_error(f"cannot read {path}"):
        data = path.read_bytes()
    rows = parse_json(data, path, list)
    if not all(isinstance(row, dict) for row in rows):
        raise CheckpointError(f"{path} is damaged: it must hold a table for each client")
    if expected is None:
        raise CheckpointError(
            f"{folder / CONFIG} has no entry {CLIENTS_DIGEST!r}, by which {path} is known. {SEAL_AGAIN}"
        )
    if digest_of(data) != expected:
        raise CheckpointError(
            f"{path} is damaged or was changed by hand: it has another digest than when it was written. Restore "
            "it from a copy, or resume the run, which writes it again."
        )
    return rows


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write ``run.json`` with its digest and that of ``clients.json``, which must exist."""
    with as_checkpoint_error(f"cannot read {folder / CLIENTS}"):
        clients = digest_of((folder / CLIENTS).read_bytes())
    write_sealed(folder / CONFIG, {**config, CLIENTS_DIGEST: clients})


def seal_run(folder: str | Path) -> None:
    """Enter the digests of the files of a run folder again, after they were changed by hand.

    Raises:
        CheckpointError: if ``run.json``, ``clients.json`` or ``status.json`` is missing or is not JSON.
    """
    folder = Path(folder)
    write_config(folder, read_json(folder / CONFIG, dict))
    write_sealed(folder / STATUS, read_json(folder / STATUS, dict))


def encode_representations(found: Mapping[str, Tensor]) -> bytes:
    """The content of :data:`REPRESENTATIONS`: tensors in the format safetensors, their digest in its metadata."""
    digest = digest_of(safetensors.torch.save(dict(found)))
    return safetensors.torch.save(dict(found), metadata={KEY: digest})


def _completed(folder: Path, status: Mapping[str, Any]) -> int:
    """Rounds that a run has surely completed: those of its last checkpoint, or of its end."""
    saved = [int(path.stem) for path in folder.glob(CHECKPOINTS) if path.stem.isdigit()]
    # a run that an error stopped may have counted a round that has no record
    ended = status.get("rounds") if status.get("state") != "stopped" else 0
    return max(0, *saved, ended if isinstance(ended, int) else 0)


def describe_missing(rounds: Sequence[int]) -> str:
    """Say which rounds have no record, such as ``the records of rounds 3 to 7 and 9 are lost``."""
    spans: list[list[int]] = []
    for t in rounds:
        if spans and spans[-1][-1] == t - 1:
            spans[-1][1:] = [t]
        else:
            spans.append([t])
    texts = [" to ".join(map(str, span)) for span in spans]
    listed = " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
    what = "record of round" if len(rounds) == 1 else "records of rounds"
    return f"the {what} {listed} {'is' if len(rounds) == 1 else 'are'} lost"


def read_lines(folder: Path) -> list[bytes]:
    """The lines of :data:`METRICS` in a run folder, without one that a killed process left incomplete.

    Older runs have ``metrics.jsonl``, which is not compressed.

    Raises:
        OSError: if there is no such file, or it is damaged.
        zlib.error: likewise.
    """
    path, lines = folder / METRICS, []
    if not path.exists():
        return (folder / "metrics.jsonl").read_bytes().splitlines()
    # a member begins with this byte, and ends with it only after a line of 500 MB
    data = io.BytesIO(path.read_bytes().removesuffix(b"\x1f"))
    with gzip.open(data) as file, contextlib.suppress(EOFError):
        for line in file:
            lines.append(line)  # noqa: PERF402 - lines before an incomplete one are kept
    return lines


def salvage_lines(folder: Path) -> list[bytes]:
    """The lines of a damaged :data:`METRICS` whose checksum is right; none if there is no such file.

    Raises:
        OSError: if the file cannot be read.
    """
    path, lines = folder / METRICS, []
    if not path.exists():
        return []
    # every line is a gzip member, which begins with the same bytes
    for part in path.read_bytes().split(_MEMBER)[1:]:
        member = zlib.decompressobj(wbits=31)
        with contextlib.suppress(zlib.error):
            line = member.decompress(_MEMBER + part)
            if member.eof:
                lines.append(line)
    return lines


_MEMBER = b"\x1f\x8b\x08" + bytes(5)
"""How a gzip member without a name and a time begins."""


def run_folders(folders: Sequence[Path]) -> list[Path]:
    """Run folders among folders and directly below them, without those that were moved aside."""
    found: list[Path] = []
    for folder in folders:
        inner = sorted(p.parent for p in folder.glob("*/run.json")) if folder.is_dir() else []
        inner = [p for p in inner if not re.search(r"\.old-\d+$", p.name)]
        found += [folder] if (folder / "run.json").exists() or not inner else inner
    return found


def believed(folder: Path, status: dict[str, Any]) -> dict[str, Any]:
    """The status of a run folder; not running if the process that wrote it is gone."""
    if status.get("state") != "running" or is_alive(read_holder(folder)):
        return status
    why = "its process ended without a word: it was killed, or the disk was full"
    return {**status, "state": "stopped", "message": why}
