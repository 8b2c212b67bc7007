"""What the command ``predict`` does."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..config.stored_run import open_run
from ..core.errors import ConfigError
from ..core.io.atomic_files import as_checkpoint_error
from ..report.figures.style import EMBEDDED_FONTS
from ..rounds.outcome.predictions import confusion, predictions
from ..rounds.setup.method_title import method_title
from .terminal import OUT

MAX_NUMBERS = 30
"""Classes up to which the cells of a confusion matrix show their numbers."""


def predict(
    folder: Path,
    client: int | None,
    split: str,
    series: str | None,
    out: Path,
    confusion_matrix: Path | None,
    best: bool,
    allow_code: bool,
) -> int:
    """Write what clients' models predict for their own examples, and maybe draw the confusion matrix."""
    python = "predict by simulate(..., folder=..., resume=True).predictions()"
    run = open_run(folder, python, best, allow_code)
    table = predictions(run, client, split, series)
    with as_checkpoint_error(f"cannot write {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(out, index=False)
    who = f"{table['client'].nunique()} clients" if client is None else f"client {client}"
    line = f"{out}: {len(table):,} {split} examples of {who}, after round {run.round}"
    if "correct" in table and len(table):
        line += f"; {100 * table['correct'].mean():.1f} % are predicted correctly"
    OUT.print(line)
    if confusion_matrix is not None:
        _draw(
            confusion(run, client, split, series),
            f"{method_title(run.method)}, {who}, {split}",
            confusion_matrix,
        )
        OUT.print(f"confusion matrix: {confusion_matrix}")
    return 0


def _draw(counts: pd.DataFrame, title: str, path: Path) -> None:
    try:
        with matplotlib.rc_context(EMBEDDED_FONTS):
            confusion_figure(counts, title).savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw {path}: {error}") from error


def confusion_figure(counts: pd.DataFrame, title: str) -> Figure:
    """Draw a confusion matrix.

    Args:
        counts: of :func:`fedlowrank.rounds.outcome.predictions.confusion`.
        title: above the matrix.

    Returns:
        A figure with a color for the share of each label's examples and, of few classes, their number in each
        cell.
    """
    values, names = counts.to_numpy(), [str(name) for name in counts.index]
    shares = values / np.maximum(values.sum(1, keepdims=True), 1)
    side = float(np.clip(0.45 * len(names), 3.0, 14.0))
    figure = Figure(figsize=(side + 2.2, side + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axes, label="share of the label's examples")
    if len(names) <= MAX_NUMBERS:
        for row, column in np.ndindex(values.shape):
            color = "white" if shares[row, column] > 0.5 else "black"
            text = str(values[row, column]) if values[row, column] else ""
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
    ticks = list(range(0, len(names), max(1, -(-len(names) // 50))))
    shown = [names[k] for k in ticks]
    axes.set_xticks(ticks, shown, rotation=90 if max(map(len, names)) > 3 else 0, fontsize=8)
    axes.set_yticks(ticks, shown, fontsize=8)
    axes.set_xlabel("prediction")
    axes.set_ylabel("label")
    axes.set_title(title, fontsize=10)
    return figure
