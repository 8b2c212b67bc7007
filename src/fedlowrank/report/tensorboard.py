"""Runs as TensorBoard event files, for those who watch all their experiments there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from fedlowrank.errors import ConfigError
from fedlowrank.record import RoundRecord, RunRecord

from .summary import score


def export_tensorboard(run: RunRecord, folder: Path) -> None:
    """Write one event file with a run's accuracies, bytes, losses and seconds.

    Tags are ``accuracy/<series>/<split>`` (unweighted mean over clients, in [0, 1]), ``bytes/up``, ``bytes/down`` and
    ``bytes/total`` (cumulative), ``loss/<pass>`` and ``seconds/<kind>``; the step is the number of rounds completed.

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
        sent = 0
        for record in run.rounds:
            sent += record.bytes_up + record.bytes_down
            for tag, value in _scalars(record, sent):
                writer.add_scalar(tag, value, record.round)
    finally:
        writer.close()


def _scalars(record: RoundRecord, sent: int) -> Iterator[tuple[str, float]]:
    for series, splits in (record.accuracy or {}).items():
        for split, values in splits.items():
            one = score(values)
            if one is not None:
                yield f"accuracy/{series}/{split}", one.mean
    yield "bytes/up", record.bytes_up
    yield "bytes/down", record.bytes_down
    yield "bytes/total", sent
    for name, value in record.loss.items():
        if value is not None and math.isfinite(value):
            yield f"loss/{name}", value
    for kind, spent in record.seconds.items():
        yield f"seconds/{kind}", spent
