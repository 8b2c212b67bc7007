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
from collections.abc import Mapping, Sequence
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
from .measurements import ACCURACY, COSTS, LOSS, TRAINING_LOSS, Block, Measurements, mean_over_clients

FORMAT = 2

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


@dataclass(frozen=True)
class RoundRecord:
    """Everything measured in one round.

    Attributes:
        round: rounds completed, so 1 for the first round of training and 0 for the state before it.
        participants: clients that trained.
        lost: participants whose reply did not arrive or was dropped, with the reason.
        bytes_down: bytes of the encoded messages from the server to the participants.
        bytes_up: bytes of the encoded messages back, lost ones included (they were sent).
        apart: clients that are in no mean of results, because they never train or are hostile; None for none.
        parameters_down: floating-point elements in the messages to the participants.
        parameters_up: floating-point elements in the messages back.
        steps: optimizer steps of all participants.
        flops: floating-point operations of training, forward and backward, of all participants.
        seconds: wall-clock seconds of ``train``, ``server`` and ``evaluate``.
        cpu_seconds: the same in CPU time of this process.
        loss: mean loss over the steps of each pass, over all participants.
        measured: what the evaluation found of each client: accuracy, loss, further metrics, size of its model and
            shares of clusters; None in rounds without evaluation.
        simulated_seconds: what the round took by the simulated clock of ``run.devices``; None without one.
        restored: True if the record was lost and only the evaluation was repeated from a checkpoint: what the
            round cost is not known; else None.
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
    measured: Block | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    observed: dict[str, dict[str, float]] = field(default_factory=dict)
    simulated_seconds: float | None = None
    apart: list[int] | None = None
    restored: bool | None = None

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    def to_bytes(self) -> bytes:
        """What is appended to :data:`METRICS`."""
        # equal records make equal bytes, so no time stamp
        return gzip.compress((self.to_json() + "\n").encode(), mtime=0)

    @classmethod
    def from_json(cls, line: str | bytes) -> RoundRecord:
        """Read a line of :meth:`to_json`; raises LookupError, TypeError or ValueError if it is none."""
        # a third of the time of json.loads
        fields = from_json(line)
        measured = fields.pop("measured", None)
        return cls(**fields, measured=None if measured is None else Block.from_json(measured))

    @property
    def is_evaluated(self) -> bool:
        """Whether the models were evaluated after the round."""
        return self.measured is not None

    def series(self, name: str = ACCURACY) -> list[str]:
        """The series of a number of clients, the headline first; none without evaluation."""
        return [] if self.measured is None else self.measured.series(name)

    def values(
        self, name: str = ACCURACY, split: str = "test", series: str | None = None
    ) -> list[float | None]:
        """A number of each client that was evaluated, by default of the headline series.

        Args:
            name: ``"accuracy"``, ``"loss"``, ``"parameters"``, ``"route"`` or one of ``run.metrics``.
            split: ``"test"`` or ``"val"``; empty for a number that is not about examples.
            series: which of the method's models; of a route, the cluster.

        Returns:
            None for a client without such a number; an empty list if nobody has one, or without evaluation.
        """
        return [] if self.measured is None else self.measured.values(name, split, series)

    def validation(self) -> float | None:
        """Mean validation accuracy of the headline, of a regression minus its loss; None if not evaluated.

        The mean is over the clients that can train and are not hostile. It is minus infinity if the loss of one of
        them is not finite.
        """
        for sign, mean in ((1.0, self.mean("val")), (-1.0, self.mean("val", LOSS))):
            if mean is not None:
                return -math.inf if math.isnan(mean) else sign * mean
        return None

    def mean(self, split: str, name: str = ACCURACY) -> float | None:
        """Mean of a number of the headline over the clients that can train and are not hostile.

        Args:
            split: ``"test"`` or ``"val"``.
            name: of the number, as of :meth:`values`.

        Returns:
            It; None if the models were not evaluated, or no such client has a number; NaN if that of one is not
            finite.
        """
        if self.measured is None:
            return None
        apart, values = set(self.apart or ()), self.values(name, split)
        return mean_over_clients(
            v for i, v in zip(self.measured.clients, values, strict=False) if i not in apart
        )

    def append_to(self, table: Measurements) -> None:
        """Append all numbers to the table of a run."""
        t = self.round
        if self.measured is not None:
            table.append_clients(t, self.measured)
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
            rounds = [RoundRecord.from_json(line) for line in read_lines(folder)]
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
        return cls(folder, config, clients, rounds, actual_status(folder, status), missing)

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


def actual_status(folder: Path, status: dict[str, Any]) -> dict[str, Any]:
    """The status of a run folder; not running if the process that wrote it is gone."""
    if status.get("state") != "running" or is_alive(read_holder(folder)):
        return status
    why = "its process ended without a word: it was killed, or the disk was full"
    return {**status, "state": "stopped", "message": why}
