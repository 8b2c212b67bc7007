"""The data of the clients of a federation as counts, as a text table and as a figure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..core.errors import DataError
from .dataset import ClientData
from .partitioning.apportion import IntArray

# More columns do not fit a terminal, and more bubbles are too small to compare.
_MAX_COLUMNS = 12
_MAX_BUBBLES = 30


def count_classes(clients: Sequence[ClientData], classes: int) -> IntArray:
    """Number of training examples by client and class, [clients, classes]; a regression has 0 classes.

    Of a label for each pixel or token, of these. Labels of no class, which a loss leaves out, are not in it.
    """
    if classes == 0:
        return np.zeros((len(clients), 0), dtype=np.int64)
    labels = [client.train.y.cpu().flatten().numpy() for client in clients]
    rows = [np.bincount(y[(y >= 0) & (y < classes)], minlength=classes) for y in labels]
    return np.array(rows, dtype=np.int64).reshape(len(rows), classes)


def format_class_counts(
    clients: Sequence[ClientData],
    names: Sequence[str],
    width: int = 100,
    top: int = 5,
    notes: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> str:
    """Sizes of the parts and training examples per class as aligned text, one line per client.

    With many classes a line shows the number of classes and the largest of them. Below the table are the
    classes that no client trains on, and the notes.

    Args:
        clients: data of the clients.
        names: names of the classes; empty for a regression, whose table shows only the sizes.
        width: characters to which notes are wrapped, and up to which every class has a column.
        top: number of classes to show per client if there are too many for columns.
        notes: on the data; by default those of the clients.
        max_clients: clients that get a line each; one more line counts the others. None for all.
    """
    counts = count_classes(clients, len(names))
    sizes = np.array([(len(client.train), len(client.val), len(client.test)) for client in clients])
    all_counts = np.vstack([counts, counts.sum(axis=0)])
    columns = [max(len(name), len(str(all_counts[-1, c]))) + 2 for c, name in enumerate(names)]
    titles = [f"{i} ({client.name})" if client.name else str(i) for i, client in enumerate(clients)]
    longest = max((len(client.name) for client in clients), default=0)
    has_columns = len(names) <= _MAX_COLUMNS and sum(columns) + 32 + longest <= width
    table = [["client", "train", "val", "test", *(names if has_columns else ["classes"])]]
    labels = [*titles, "all"]
    for label, size, row in zip(labels, np.vstack([sizes, sizes.sum(axis=0)]), all_counts, strict=True):
        empty = "0" if label == "all" else "."
        cells = [str(n) if n else empty for n in row] if has_columns else [str(np.count_nonzero(row))]
        table.append([label, *map(str, size), *cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in table]
    if not has_columns:
        room = width - len(lines[0]) - 2
        largest = ["largest", *(_list_largest_classes(row, names, top, room) for row in all_counts)]
        lines = [f"{line}  {end}".rstrip() for line, end in zip(lines, largest, strict=True)]
    if max_clients is not None and len(clients) > max_clients:
        rest = sizes[max_clients:].sum(axis=1)
        lines[max_clients + 1 : -1] = [
            f"... and {len(rest)} more clients with {_format_range(rest)} examples each"
        ]
    lines.insert(-1, "-" * max(map(len, lines)))
    listed_notes = [note for client in clients for note in client.notes] if notes is None else list(notes)
    if unused := [name for name, total in zip(names, all_counts[-1], strict=True) if total == 0]:
        listed_notes.insert(0, f"classes that no client trains on: {', '.join(unused)}")
    for note in listed_notes:
        lines += textwrap.wrap("* " + note, width, subsequent_indent="  ")
    return "\n".join(lines)


def _format_range(sizes: np.ndarray) -> str:
    low, high = int(sizes.min()), int(sizes.max())
    return str(low) if low == high else f"{low} to {high}"


def draw_class_counts(counts: np.ndarray, class_names: Sequence[str]) -> Figure:
    """A figure of counts [clients, classes]: bubbles, or colors if there are many clients or classes.

    Raises:
        DataError: if there are no classes.
    """
    if not class_names:
        raise DataError("there are no classes to draw: these data are a regression. Leave out the picture.")
    clients, classes = counts.shape
    bubbles = clients <= _MAX_BUBBLES and classes <= _MAX_BUBBLES
    pitch = 0.36 if bubbles else 0.13
    size = np.clip(pitch * clients, 4.0, 16.0) + 2.2, np.clip(pitch * classes, 2.4, 14.0) + 1.2
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if bubbles:
        client, label = np.nonzero(counts)
        # Diameters in points: the largest bubble just fills its cell.
        largest = (pitch * 72 * 0.92) ** 2
        areas = counts[client, label] / max(int(counts.max()), 1) * largest
        axes.scatter(client, label, s=areas, c="#3b6ea5", linewidths=0)
        axes.set_xlim(-0.6, clients - 0.4)
        axes.set_ylim(classes - 0.4, -0.6)
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_title(f"Training examples of each class; largest bubble: {int(counts.max())}", fontsize=10)
    else:
        # A class that a client lacks is empty, not merely pale.
        shown = np.ma.masked_equal(counts.T, 0)
        image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap="viridis_r", vmin=0)
        figure.colorbar(image, ax=axes, label="examples")
        axes.set_title("Training examples of each class (white: none)", fontsize=10)
    axes.set_xlabel("client")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    ticks = range(0, classes, max(1, -(-classes // 50)))
    axes.set_yticks(list(ticks), [class_names[c] for c in ticks], fontsize=8 if classes <= 30 else 6)
    axes.set_ylabel("class")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _list_largest_classes(row: np.ndarray, names: Sequence[str], top: int, room: int) -> str:
    """The largest classes: at most ``top``, and at least one of those that fit into ``room`` characters."""
    order = np.argsort(-row, kind="stable")[:top]
    shown = [f"{names[c]} {row[c]}" for c in order if row[c]]
    while len(shown) > 1 and len(", ".join(shown)) > room:
        shown.pop()
    return ", ".join(shown)
