"""What the clients of a federation hold: counts, a table in text, a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..core.errors import DataError
from .counting import Index
from .dataset import ClientData

# Beyond these, columns no longer fit a terminal, and bubbles no longer show their sizes.
_MOST_COLUMNS = 12
_MOST_BUBBLES = 30


def class_counts(clients: Sequence[ClientData], classes: int) -> Index:
    """Number of training examples of each class.

    Args:
        clients: data of the clients.
        classes: number of classes.

    Returns:
        Counts [clients, classes]; [clients, 0] for a regression, which has no classes.
    """
    if classes == 0:
        return np.zeros((len(clients), 0), dtype=np.int64)
    rows = [np.bincount(client.train.y.cpu().numpy(), minlength=classes) for client in clients]
    return np.array(rows, dtype=np.int64).reshape(len(rows), classes)


def split_sizes(clients: Sequence[ClientData]) -> Index:
    """Number of examples for training, validation and test.

    Args:
        clients: data of the clients.

    Returns:
        Counts [clients, 3].
    """
    rows = [(len(client.train), len(client.val), len(client.test)) for client in clients]
    return np.array(rows, dtype=np.int64).reshape(len(rows), 3)


def class_count_table(clients: Sequence[ClientData], class_names: Sequence[str], width: int = 100, top: int = 5) -> str:
    """The counts as aligned text: sizes of the parts and training examples of each class, a line a client.

    With many classes a line shows the number of classes and the largest of them. Below the table stand the classes
    that no client trains on, and the notes of the clients.

    Args:
        clients: data of the clients.
        class_names: names of the classes; empty for a regression, whose table shows the sizes alone.
        width: characters to which notes are wrapped, and up to which there is a column for each class.
        top: classes to show of each client if there are too many for columns.

    Returns:
        Lines without a line break at the end.
    """
    counts, sizes = class_counts(clients, len(class_names)), split_sizes(clients)
    head = ["client", "train", "val", "test"]
    rows = [[str(i), *map(str, sizes[i])] for i in range(len(clients))]
    total = ["all", *map(str, sizes.sum(axis=0))]
    columns = [max(len(name), len(str(counts[:, c].sum()))) + 2 for c, name in enumerate(class_names)]
    if len(class_names) <= _MOST_COLUMNS and sum(columns) + 32 <= width:
        head += class_names
        rows = [[*row, *(str(n) if n else "." for n in counts[i])] for i, row in enumerate(rows)]
        total += map(str, counts.sum(axis=0))
        show = 0
    else:
        head.append("classes")
        rows = [[*row, str(np.count_nonzero(counts[i]))] for i, row in enumerate(rows)]
        total.append(str(np.count_nonzero(counts.sum(axis=0))))
        show = top
    table = [head, *rows, total]
    widths = [max(len(row[j]) for row in table) for j in range(len(head))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in table]
    if show:
        room = width - len(lines[0]) - 2
        ends = ["largest", *(_largest(row, class_names, show, room) for row in (*counts, counts.sum(axis=0)))]
        lines = [f"{line}  {end}".rstrip() for line, end in zip(lines, ends, strict=True)]
    lines.insert(-1, "-" * max(len(line) for line in lines))
    return "\n".join([*lines, *_notes(clients, counts, class_names, width)])


def class_count_figure(counts: np.ndarray, class_names: Sequence[str]) -> Figure:
    """The counts as a picture: bubbles whose area is the count, or colors where there are too many for bubbles.

    Args:
        counts: training examples [clients, classes], as from `class_counts`.
        class_names: names of the classes.

    Returns:
        A figure of its own, without any state of pyplot; save it with ``figure.savefig(path)``.

    Raises:
        DataError: if the shape of the counts does not fit the names, or if there are no clients.
    """
    if not class_names:
        raise DataError("there are no classes to draw: these data are a regression. Leave out the picture.")
    if counts.ndim != 2 or counts.shape[1] != len(class_names) or counts.size == 0:
        raise DataError(f"counts must be [clients, {len(class_names)} classes], not {list(counts.shape)}.")
    clients, classes = counts.shape
    bubbles = clients <= _MOST_BUBBLES and classes <= _MOST_BUBBLES
    pitch = 0.36 if bubbles else 0.13
    figure = Figure(
        figsize=(max(4.0, min(16.0, pitch * clients)) + 2.2, max(2.4, min(14.0, pitch * classes)) + 1.2),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if bubbles:
        client, label = np.nonzero(counts)
        # Diameters in points: the largest bubble just fills its cell.
        largest = (pitch * 72 * 0.92) ** 2
        sizes = counts[client, label] / max(int(counts.max()), 1) * largest
        axes.scatter(client, label, s=sizes, c="#3b6ea5", linewidths=0)
        axes.set_xlim(-0.6, clients - 0.4)
        axes.set_ylim(classes - 0.4, -0.6)
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_title(f"Training examples of each class; largest bubble: {int(counts.max())}", fontsize=10)
    else:
        # A class that a client lacks should look empty, not merely pale.
        shown = np.ma.masked_equal(counts.T, 0)
        image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap="viridis_r", vmin=0)
        figure.colorbar(image, ax=axes, label="examples")
        axes.set_title("Training examples of each class (white: none)", fontsize=10)
    axes.set_xlabel("client")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    # Every name if there is room, else every so many.
    step = max(1, -(-classes // 50))
    shown_classes = range(0, classes, step)
    axes.set_yticks(list(shown_classes), [class_names[c] for c in shown_classes], fontsize=8 if classes <= 30 else 6)
    axes.set_ylabel("class")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def _largest(row: np.ndarray, names: Sequence[str], top: int, room: int) -> str:
    """The largest classes, at most ``top``, and as many as fit into ``room`` characters, but at least one."""
    order = np.argsort(-row, kind="stable")[:top]
    shown = [f"{names[c]} {row[c]}" for c in order if row[c]]
    while len(shown) > 1 and len(", ".join(shown)) > room:
        shown.pop()
    return ", ".join(shown)


def _notes(clients: Sequence[ClientData], counts: np.ndarray, names: Sequence[str], width: int) -> list[str]:
    notes = [note for client in clients for note in client.notes]
    unused = [name for name, total in zip(names, counts.sum(axis=0), strict=True) if total == 0]
    if unused:
        notes.insert(0, f"classes that no client trains on: {', '.join(unused)}")
    return [line for note in notes for line in textwrap.wrap("* " + note, width, subsequent_indent="  ")]
