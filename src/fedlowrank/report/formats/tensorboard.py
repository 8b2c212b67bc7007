"""Exports runs as TensorBoard event files."""

from __future__ import annotations

from pathlib import Path

from ...results.records import RunRecord
from ...results.scalars import list_scalars
from ...rounds.logs.loggers import summary_writer


def export_tensorboard(run: RunRecord, folder: Path) -> None:
    """Write one event file with a run's accuracies, bytes, losses and seconds.

    Tags are those of :func:`fedlowrank.results.scalars.list_scalars`, which a run with ``run.log = ["tensorboard"]``
    writes while it runs; the step is the number of rounds completed.

    Args:
        run: record of the run.
        folder: log folder, made if it does not exist.

    Raises:
        ConfigError: if TensorBoard is not installed.
    """
    writer, total_bytes = summary_writer(folder), 0
    try:
        for record in run.rounds:
            for tag, value in list_scalars(record, run.clients, total_bytes).items():
                writer.add_scalar(tag, value, record.round)
            total_bytes += record.bytes_up + record.bytes_down
    finally:
        writer.close()
