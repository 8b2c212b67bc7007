"""Runs as TensorBoard event files, for those who watch all their experiments there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import ConfigError
from ..simulation.records import RoundRecord, RunRecord
from .measure import ACCURACY, LOSS
from .routing import recovery_by_round
from .summary import score, unseen_clients


def export_tensorboard(run: RunRecord, folder: Path) -> None:
    """Write one event file with a run's accuracies, bytes, losses and seconds.

    Tags are ``accuracy/<series>/<split>`` (unweighted mean over clients, in [0, 1]) and ``loss/<series>/<split>`` (the mean
    loss on the same examples), with ``/unseen`` behind them for the clients that never train, whom no other tag counts;
    ``bytes/up``, ``bytes/down`` and ``bytes/total`` (cumulative), ``loss/<pass>`` (in training), ``routes/recovery`` (adjusted
    Rand index) and ``seconds/<kind>``; the step is the number of rounds completed.

    Args:
        run: the run.
        folder: log folder; it is made if it is missing.

    Raises:
        ConfigError: if TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "TensorBoard is not installed. Install it with: pip install 'fedlowrank[tensorboard]'"
        ) from error
    writer = SummaryWriter(log_dir=str(folder))
    try:
        sent, apart, recovered = 0, unseen_clients(run), recovery_by_round(run)
        for record in run.rounds:
            sent += record.bytes_up + record.bytes_down
            for tag, value in _scalars(record, sent, apart):
                writer.add_scalar(tag, value, record.round)
            if record.round in recovered:
                writer.add_scalar("routes/recovery", recovered[record.round], record.round)
    finally:
        writer.close()


def _scalars(record: RoundRecord, sent: int, apart: frozenset[int]) -> Iterator[tuple[str, float]]:
    for measure, name in ((ACCURACY, "accuracy"), (LOSS, "loss")):
        for series, splits in measure.of(record).items():
            for split, values in splits.items():
                for end, unseen in (("", False), ("/unseen", True)):
                    one = score([value for i, value in enumerate(values) if (i in apart) == unseen])
                    if one is not None:
                        yield f"{name}/{series}/{split}{end}", one.mean
    yield "bytes/up", record.bytes_up
    yield "bytes/down", record.bytes_down
    yield "bytes/total", sent
    for name, value in record.loss.items():
        if value is not None and math.isfinite(value):
            yield f"loss/{name}", value
    for kind, spent in record.seconds.items():
        yield f"seconds/{kind}", spent
