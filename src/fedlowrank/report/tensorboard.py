"""Runs as TensorBoard event files."""

from __future__ import annotations

import math
from pathlib import Path

from ..core.errors import ConfigError
from ..simulation.records import RunRecord
from .metrics import Run


def export_tensorboard(run: RunRecord, folder: Path) -> None:
    """Write one event file with a run's accuracies, bytes, losses and seconds.

    Tags are ``accuracy/<series>/<split>`` (unweighted mean over clients, in [0, 1]) and
    ``loss/<series>/<split>`` (mean loss on the same examples), with ``/unseen`` behind them for the clients
    that never train, who are in no other tag; ``bytes/up``, ``bytes/down`` and ``bytes/total`` (cumulative),
    ``loss/<pass>`` (in training), ``routes/recovery`` (adjusted Rand index) and ``seconds/<kind>``; the step
    is the number of rounds completed.

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
    statistics = Run(run)
    try:
        for (field, series, split, unseen), scores in statistics.scores.items():
            tag = f"{'loss' if field == 'risk' else field}/{series}/{split}{'/unseen' if unseen else ''}"
            for at, mean in scores["mean"].items():
                writer.add_scalar(tag, mean, at)
        for at, value in statistics.recovery.items():
            writer.add_scalar("routes/recovery", value, at)
        total = 0
        for record in run.rounds:
            total += record.bytes_up + record.bytes_down
            values: dict[str, float] = {
                "bytes/up": record.bytes_up,
                "bytes/down": record.bytes_down,
                "bytes/total": total,
            }
            values |= {f"loss/{name}": value for name, value in record.loss.items()}
            values |= {f"seconds/{kind}": value for kind, value in record.seconds.items()}
            for tag, value in values.items():
                if value is not None and math.isfinite(value):
                    writer.add_scalar(tag, value, record.round)
    finally:
        writer.close()
