"""Reads the files of a run: the record of every round, and the table of all numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from ..core.errors import CheckpointError
from ..core.io.atomic_files import as_checkpoint_error
from ..core.io.text import join_words, on_one_line
from ..core.learning.losses import Loss
from ..storage.digest import read_sealed
from ..storage.run_files import (
    ACCOUNT,
    FORMAT,
    RECORDS_FILE,
    RUN_ID,
    STATUS,
    actual_status,
    completed_rounds,
    read_answers,
    read_clients,
    read_lines,
    read_run,
    salvage_lines,
)
from .client_numbers import ACCURACY, LOSS
from .measurements import COSTS, TRAINING_LOSS, ClientTable, Measurements, mean_over_clients

RECORD_ERRORS = (LookupError, ValueError, TypeError, AttributeError, RecursionError)
"""Errors of :meth:`RoundRecord.from_line` for a line that is no record."""

NOT_SETTINGS = ("run.seed", "run.target")
"""Names of the settings that may differ between runs of one setting."""

SECTIONS = ("data", "partition", "split", "concept", "augment", "language", "lora", "model", "loss", "run")
"""Sections of ``run.json`` that the methods of an experiment share."""

STORAGE_SETTINGS = (
    "run.checkpoint_every", "run.keep_checkpoints", "run.keep_best", "run.client_memory", "run.adapters", "run.log",
)  # fmt: skip
"""Settings of the storage of a run, which change no result."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundRecord:
    """Everything that is measured in one round.

    Attributes:
        round: number of completed rounds, so 1 for the first round of training and 0 for the state before it.
        participants: identifiers of the clients that trained.
        lost: reasons of the participants whose reply did not arrive or was dropped, by client.
        bytes_down: bytes of the encoded messages from the server to the participants, for training. Over a network those
            that were sent: to clients that were connected, and again with every repetition.
        bytes_up: bytes of the encoded replies, including lost ones (they were sent).
        excluded_from_means: identifiers of clients that are in no mean of results, because they never train or are
            hostile; None for none.
        parameters_down: number of floating-point elements in the messages to the participants.
        parameters_up: number of floating-point elements in the replies.
        steps: number of optimizer steps of all participants.
        flops: number of floating-point operations of training, forward and backward, of all participants.
        seconds: wall-clock seconds of ``train``, ``server`` and ``evaluate``.
        cpu_seconds: CPU seconds of this process for ``train``, ``server`` and ``evaluate``.
        training_losses: mean loss over the steps of each pass, over all participants.
        measured: results of the evaluation for each client: accuracy, loss, further metrics, size of its model and
            shares of clusters; None in rounds without evaluation.
        simulated_seconds: seconds of the round by the simulated clock of ``run.devices``; None without one.
        restored: True if the record was lost and only the evaluation was repeated from a checkpoint, so that the
            costs of the round are not known; else None.
        ranks: ranks of the server's low-rank weights after the round, by name.
        server_metrics: the method's own metrics of its server after the round, such as the weight of each client's reply.
        run_id: random identifier of the run, only in the record of round 0 of a run with a folder.
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
    training_losses: dict[str, float] = field(default_factory=dict)
    measured: ClientTable | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    server_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    simulated_seconds: float | None = None
    excluded_from_means: list[int] | None = None
    restored: bool | None = None
    run_id: str | None = None

    def to_line(self) -> str:
        """Encode the record as one line of JSON."""
        table = None if self.measured is None else self.measured.to_dict()
        return json.dumps({**vars(self), "measured": table}, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str | bytes) -> RoundRecord:
        """Decode a line of :meth:`to_line`; raises one of :data:`RECORD_ERRORS` if the line is no record."""
        # takes a third of the time of json.loads
        fields = from_json(line)
        table = fields.pop("measured", None)
        return cls(**fields, measured=None if table is None else ClientTable.from_dict(table))

    @property
    def is_evaluated(self) -> bool:
        """Whether the models were evaluated after the round."""
        return self.measured is not None

    def series(self, name: str = ACCURACY) -> list[str]:
        """List the series of a client number, the headline first; empty without evaluation."""
        return [] if self.measured is None else self.measured.series(name)

    def values(
        self, name: str = ACCURACY, *, series: str | None = None, split: str = "test"
    ) -> list[float | None]:
        """Values of a number for each client that was evaluated, by default of the headline series.

        Args:
            name: name of the number: ``"accuracy"``, ``"loss"``, ``"parameters"``, ``"route"`` or one of ``run.metrics``.
            series: name of one of the method's models; for a route, the cluster.
            split: name of the split: ``"test"`` or ``"val"``; empty for a number that does not depend on examples.

        Returns:
            One value for each evaluated client, None where it is not defined; an empty list without evaluation or
            without such a column.
        """
        return [] if self.measured is None else self.measured.values(name, series=series, split=split)

    def by_client(
        self, name: str = ACCURACY, *, series: str | None = None, split: str = "test"
    ) -> dict[int, float | None]:
        """The numbers of :meth:`values` by the client's identifier."""
        return {} if self.measured is None else self.measured.by_client(name, series=series, split=split)

    def validation(self) -> float | None:
        """Mean validation accuracy of the headline, or minus its loss without an accuracy; None if it was not evaluated.

        There is no accuracy in a regression, and of language models that predict tokens, of preference pairs, of
        embeddings, and of scores that only a loss of the user's own understands. The mean is over the clients that can
        train and are not hostile. It is minus infinity if the loss of one of these clients is not finite.
        """
        accuracy, loss = self.mean(split="val"), self.mean(LOSS, split="val")
        # a model that diverged still has an accuracy, that of wrong answers
        if any(mean is not None and math.isnan(mean) for mean in (accuracy, loss)):
            return -math.inf
        return accuracy if accuracy is not None else None if loss is None else -loss

    def mean(self, name: str = ACCURACY, *, split: str) -> float | None:
        """Mean of a number of the headline over the clients that can train and are not hostile.

        Args:
            name: name of the number, as in :meth:`values`.
            split: name of the split: ``"test"`` or ``"val"``.

        Returns:
            The mean; None if the models were not evaluated, or if no such client has a value; NaN if a value is not
            finite.
        """
        excluded_ids = set(self.excluded_from_means or ())
        values = self.by_client(name, split=split)
        return mean_over_clients(
            value for client_id, value in values.items() if client_id not in excluded_ids
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
        numbers_by_name: dict[str, Mapping[str, Any]] = {
            "seconds": self.seconds,
            TRAINING_LOSS: self.training_losses,
            "ranks": self.ranks,
            **(self.server_metrics or {}),
        }
        for name, numbers in numbers_by_name.items():
            for series, value in numbers.items():
                table.append(t, name, value, series=series)

    def untimed(self) -> dict[str, Any]:
        """All fields but clocks and the identifier of the run; they must be equal between two runs of one configuration."""
        differing = ("seconds", "cpu_seconds", RUN_ID)
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in differing}


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run folder.

    Attributes:
        folder: path of the run folder.
        config: contents of ``run.json``.
        clients: contents of ``clients.json``; over a network with the numbers of examples that clients registered, also
            after the start of the run.
        rounds: contents of :data:`RECORDS_FILE`, in ascending order.
        status: contents of ``status.json``.
        missing: rounds that were completed and whose record :data:`RECORDS_FILE` has lost, at least all of it but the
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
            CheckpointError: if the folder or a file in it is missing, damaged, of another format or of another run.
        """
        config, run_id = read_run(folder)
        if config.get("format") != FORMAT:
            raise CheckpointError(
                f"{folder} has format {config.get('format')}; this version reads format {FORMAT}"
            )
        clients = _add_registered_sizes(folder, read_clients(folder))
        status = read_sealed(folder / STATUS)
        # read before the records, because a running process writes its records before its checkpoint
        completed_count = completed_rounds(folder, status)
        try:
            rounds = [RoundRecord.from_line(line) for line in read_lines(folder)]
        except (OSError, zlib.error, *RECORD_ERRORS) as error:
            raise CheckpointError(
                f"{folder / RECORDS_FILE} is missing or damaged: {error}. Restore it from a copy, or resume the run, "
                "which keeps the rounds that can be read."
            ) from error
        _check_run(folder, rounds, run_id)
        round_numbers = [record.round for record in rounds]
        if round_numbers != sorted(set(round_numbers)):
            raise CheckpointError(
                f"{folder / RECORDS_FILE} is damaged: its rounds are {round_numbers}, not ascending"
            )
        recorded_rounds = {record.round for record in rounds if not record.restored}
        missing_rounds = tuple(
            t for t in range(max([completed_count, *round_numbers[-1:]]) + 1) if t not in recorded_rounds
        )
        return cls(folder, config, clients, rounds, actual_status(folder, status), missing_rounds)

    @property
    def is_deployed(self) -> bool:
        """Whether the run was one over a network."""
        return (self.folder / ACCOUNT).exists()

    def section(self, *names: str) -> dict[str, Any]:
        """Get a section of ``run.json``, or a nested one; empty if it is missing or null."""
        value: Any = self.config
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return value if isinstance(value, dict) else {}

    @cached_property
    def experiment(self) -> str:
        """Name of the run's experiment."""
        return on_one_line(self.config.get("name") or self.folder.name)

    @cached_property
    def title(self) -> str:
        """Title of the run's experiment, for people."""
        return on_one_line(self.config.get("title") or self.experiment)

    @cached_property
    def method(self) -> str:
        """Name of the run's method, as the reference numbers call it."""
        return on_one_line(self.section("method").get("name") or "unnamed")

    @cached_property
    def method_title(self) -> str:
        """Title of the run's method, for people."""
        return on_one_line(self.section("method").get("title") or self.method)

    @cached_property
    def seed(self) -> str:
        """Seed of the run, as text."""
        return on_one_line(self.section("run").get("seed", "?"))

    @cached_property
    def vary(self) -> tuple[tuple[str, Any], ...]:
        """The varied settings with their values; they do not include the seed of the run."""
        settings = ((on_one_line(key), value) for key, value in self.section("vary").items())
        return tuple((key, value) for key, value in settings if key not in NOT_SETTINGS)

    @property
    def has_used_no_reply(self) -> bool:
        """Whether there were rounds of training and none used a client's reply, so that the models are those before training.

        No client was drawn, or every reply was dropped or lost.
        """
        rounds = [record for record in self.rounds if record.round > 0]
        # the participants of a restored round are not known
        is_known = bool(rounds) and not any(record.restored for record in rounds)
        return is_known and all(len(record.lost) >= len(record.participants) for record in rounds)

    @cached_property
    def ranks(self) -> dict[int, int]:
        """The LoRA rank of each client that has one."""
        rank_items = self.measurements.column("rank").items()
        return {client_id: rank for client_id, rank in rank_items if type(rank) is int and rank > 0}

    @cached_property
    def predicts_tokens(self) -> bool:
        """Whether the run's models are language models that predict tokens, and not classes."""
        compares_texts = Loss((self.config.get("loss") or {}).get("kind", "auto")).compares_texts
        return bool(self.section("language")) and not self.config.get("classes") and not compares_texts

    @cached_property
    def answers(self) -> list[dict[str, Any]]:
        """Answers of language models to fixed prompts, before and after training, each on one line; empty in most runs."""
        texts = ("prompt", "answer")
        return [row | {key: on_one_line(row[key]) for key in texts} for row in read_answers(self.folder)]

    @cached_property
    def measurements(self) -> Measurements:
        """All measurements as one table."""
        return Measurements.of(self.rounds, self.clients)


def _add_registered_sizes(folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to the rows of clients the numbers of examples in the account of a run over a network, if it is one."""
    if not (folder / ACCOUNT).exists():
        return rows
    try:
        sizes_by_client = read_sealed(folder / ACCOUNT).get("clients", {})
    except CheckpointError as error:
        logger.warning("%s Clients that joined after the start of the run count as without examples.", error)
        return rows
    return [{**row, **sizes_by_client.get(str(row.get("id")), {})} for row in rows]


def describe_missing(rounds: Sequence[int]) -> str:
    """Describe which rounds have no record, such as ``the records of rounds 3 to 7 and 9 are lost``."""
    spans: list[list[int]] = []
    for t in rounds:
        if spans and spans[-1][-1] == t - 1:
            spans[-1][1:] = [t]
        else:
            spans.append([t])
    spans_text = join_words([" to ".join(map(str, span)) for span in spans])
    label = "record of round" if len(rounds) == 1 else "records of rounds"
    return f"the {label} {spans_text} {'is' if len(rounds) == 1 else 'are'} lost"


def _check_run(folder: Path, records: Sequence[RoundRecord], run_id: str | None) -> None:
    """Refuse the records of another run: the first one has the identifier of its run."""
    first_record = next((r for r in records if r.round == 0 and not r.restored), None)
    if run_id is not None and first_record is not None and first_record.run_id != run_id:
        raise CheckpointError(
            f"{folder / RECORDS_FILE} holds the records of another run. Restore it from a copy, or remove it and resume the "
            "run, which goes on without these records."
        )


def read_records(folder: Path, round: int, run_id: str | None) -> tuple[list[RoundRecord], list[int]]:
    """Read the records of a run up to a checkpoint, as far as possible, and list the rounds whose records are lost.

    Args:
        folder: folder of the run.
        round: number of rounds completed at the checkpoint.
        run_id: identifier of the run, as in its ``run.json``.

    Raises:
        CheckpointError: if the file may not be read, or holds the records of another run.
    """
    damage = ""
    try:
        records = [RoundRecord.from_line(line) for line in read_lines(folder)]
    except (OSError, zlib.error, *RECORD_ERRORS) as error:
        damage, records = f": {error}", []
        with as_checkpoint_error(f"cannot read {folder / RECORDS_FILE}"):
            lines = salvage_lines(folder)
        for line in lines:
            with contextlib.suppress(*RECORD_ERRORS):
                records.append(RoundRecord.from_line(line))
    _check_run(folder, records, run_id)
    records_by_round = {record.round: record for record in records if record.round <= round}
    missing_rounds = [t for t in range(round + 1) if t not in records_by_round]
    if missing_rounds:
        logger.warning(
            "%s is missing or damaged%s: %s, with their results and costs. The run goes on from its checkpoint "
            "after round %d with the same bits. For all records, run it again from the start in another folder.",
            folder / RECORDS_FILE,
            damage,
            describe_missing(missing_rounds),
            round,
        )
    return [records_by_round[t] for t in sorted(records_by_round)], missing_rounds
