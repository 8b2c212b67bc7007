"""The command ``predict``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..config.new_rows import NewRows, read_new_rows
from ..config.stored_run import find_typed_client, open_run
from ..core.contract import ClientInfo
from ..core.errors import ConfigError, DataError, did_you_mean
from ..core.io.compressed_files import write_table
from ..report.figures.style import write_figure
from ..rounds.outcome.predictions import confusion, predict_rows, predictions
from ..rounds.run import Run
from ..storage.run_files import CLIENT_FILE
from .terminal import OUT

MAX_NUMBERS = 30
"""Largest number of classes for which the cells of a confusion matrix show their counts."""


def predict(
    folder: Path,
    client: str | None,
    split: str | None,
    series: str | None,
    out: Path,
    confusion_matrix: Path | None,
    best: bool,
    allow_code: bool,
    rows: Path | None = None,
) -> int:
    """Write predictions of clients' models for their own examples or for new rows; optionally draw the confusion matrix."""
    python = "predict by simulate(..., folder=..., resume=True).predictions()"
    if rows is not None and (split or confusion_matrix):
        option = "--split" if split else "--confusion"
        raise ConfigError(
            f"{option} is about the clients' own examples, and --rows about new ones; leave one out"
        )
    if (folder / CLIENT_FILE).is_file():
        # the parts of the network take a second to import
        from ..network.site.site_predictions import predict_at_site

        if rows is None or client or series or best:
            raise ConfigError(
                f"{folder} is the folder of one client of a run over a network: predict new rows by --rows FILE, without other "
                "options"
            )
        table, file = predict_at_site(folder, rows)
        _write(table, out)
        OUT.print(f"{out}: {len(table):,} rows, predicted by {file}")
        return 0
    split = split or "test"
    run = open_run(folder, python, best, allow_code)
    info = None if client is None else find_typed_client(run.federation.infos, client)
    if rows is not None:
        return _predict_rows(run, read_new_rows(folder, rows, allow_code), info, series, out)
    client_id = None if info is None else info.id
    table = predictions(run, client_id, split, series)
    _write(table, out)
    clients_text = f"{table['client'].nunique()} clients" if info is None else info.title
    line = f"{out}: {len(table):,} {split} examples of {clients_text}, after round {run.round}"
    if "correct" in table and len(table):
        line += f"; {100 * table['correct'].mean():.1f} % are predicted correctly"
    OUT.print(line)
    if confusion_matrix is not None:
        write_figure(
            confusion_figure(
                confusion(run, client_id, split, series), f"{run.method.title}, {clients_text}, {split}"
            ),
            confusion_matrix,
        )
        OUT.print(f"confusion matrix: {confusion_matrix}")
    return 0


def _predict_rows(run: Run, rows: NewRows, info: ClientInfo | None, series: str | None, out: Path) -> int:
    """Write predictions for new rows by the model of each row's client, of the named client, or of all clients."""
    federation = run.federation
    count, names = len(rows.inputs(0)), [client.name for client in federation.infos]
    rows_by_client: dict[int, Sequence[int]] = {}
    if info is not None:
        rows_by_client = {info.id: range(count)}
    elif rows.clients is None or not any(names):
        rows_by_client = dict.fromkeys(range(len(names)), range(count))
    else:
        if unknown_names := [name for name in rows.clients if name not in names]:
            raise DataError(
                f"the rows are also of {unknown_names[0]!r}, which is no client of the run. "
                f"{did_you_mean(unknown_names[0], [name for name in names if name])}",
                command="Choose the model of one client by --client.",
            )
        for i, name in enumerate(names):
            if row_indices := [k for k, row_client in enumerate(rows.clients) if row_client == name]:
                rows_by_client[i] = row_indices
    table = predict_rows(run, rows.inputs, rows_by_client, series)
    _write(table, out)
    models = info.title if info is not None else f"{len(rows_by_client)} clients"
    OUT.print(f"{out}: {count:,} rows, predicted by the models of {models}, after round {run.round}")
    return 0


def _write(table: pd.DataFrame, out: Path) -> None:
    write_table(out, [table.to_csv(index=False).encode()])


def confusion_figure(counts: pd.DataFrame, title: str) -> Figure:
    """Draw a confusion matrix.

    Args:
        counts: counts from :func:`fedlowrank.rounds.outcome.predictions.confusion`.
        title: title above the matrix.

    Returns:
        A figure whose colors show the share of each label's examples; with few classes each cell also shows their
        count.
    """
    values = counts.to_numpy()
    label_names, prediction_names = (
        [str(name) for name in counts.index],
        [str(name) for name in counts.columns],
    )
    column_count = len(prediction_names)
    shares = values / np.maximum(values.sum(1, keepdims=True), 1)
    size = float(np.clip(0.45 * column_count, 3.0, 14.0))
    figure = Figure(figsize=(size + 2.2, size + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axes, label="share of the label's examples")
    if column_count <= MAX_NUMBERS:
        for row, column in np.ndindex(values.shape):
            color = "white" if shares[row, column] > 0.5 else "black"
            text = str(values[row, column]) if values[row, column] else ""
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
    spacing = max(1, -(-column_count // 50))
    rotation = 90 if max(map(len, prediction_names)) > 3 else 0
    axes.set_xticks(
        range(0, column_count, spacing), prediction_names[::spacing], rotation=rotation, fontsize=8
    )
    axes.set_yticks(range(0, len(label_names), spacing), label_names[::spacing], fontsize=8)
    axes.set_xlabel("prediction")
    axes.set_ylabel("label")
    axes.set_title(title, fontsize=10)
    return figure
