"""The data of a federation's clients as counts, as a text table and as a figure."""

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

# more columns do not fit a terminal, and more bubbles are too small to compare
_MAX_COLUMNS = 12
_MAX_BUBBLES = 30


def count_classes(clients: Sequence[ClientData], class_count: int) -> IntArray:
    """Number of training examples by client and class, [clients, classes]; a regression has 0 classes.

    For labels of pixels or tokens, the counts are of pixels or tokens. Labels that a loss leaves out are not counted.
    """
    if class_count == 0:
        return np.zeros((len(clients), 0), dtype=np.int64)
    labels = [client.train.y.cpu().flatten().numpy() for client in clients]
    rows = [np.bincount(y[(y >= 0) & (y < class_count)], minlength=class_count) for y in labels]
    return np.array(rows, dtype=np.int64).reshape(len(rows), class_count)


def format_class_counts(
    clients: Sequence[ClientData],
    names: Sequence[str],
    width: int = 100,
    top: int = 5,
    notes: Sequence[str] | None = None,
    max_clients: int | None = None,
) -> str:
    """Format sizes of the parts and training examples per class as aligned text, one line per client.

    With many classes a line shows the number of classes and the largest of them. Below the table are the classes that
    no client trains on, and the notes.

    Args:
        clients: data of the clients.
        names: names of the classes; empty for a regression, whose table shows only the sizes.
        width: number of characters to which notes are wrapped, and up to which every class has a column.
        top: number of classes to show per client if there are too many for columns.
        notes: notes on the data; by default those of the clients.
        max_clients: number of clients that get a line each; one more line counts the others. None for all.
    """
    counts = count_classes(clients, len(names))
    sizes = np.array([(len(client.train), len(client.val), len(client.test)) for client in clients])
    all_counts = np.vstack([counts, counts.sum(axis=0)])
    column_widths = [max(len(name), len(str(all_counts[-1, c]))) + 2 for c, name in enumerate(names)]
    titles = [f"{i} ({client.name})" if client.name else str(i) for i, client in enumerate(clients)]
    max_name_length = max((len(client.name) for client in clients), default=0)
    has_columns = len(names) <= _MAX_COLUMNS and sum(column_widths) + 32 + max_name_length <= width
    table = [["client", "train", "val", "test", *(names if has_columns else ["classes"])]]
    labels = [*titles, "all"]
    for label, part_sizes, row in zip(labels, np.vstack([sizes, sizes.sum(axis=0)]), all_counts, strict=True):
        zero_text = "0" if label == "all" else "."
        cells = [str(n) if n else zero_text for n in row] if has_columns else [str(np.count_nonzero(row))]
        table.append([label, *map(str, part_sizes), *cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in table]
    if not has_columns:
        remaining_width = width - len(lines[0]) - 2
        largest_classes = [
            "largest",
            *(_list_largest_classes(row, names, top, remaining_width) for row in all_counts),
        ]
        lines = [f"{line}  {summary}".rstrip() for line, summary in zip(lines, largest_classes, strict=True)]
    if max_clients is not None and len(clients) > max_clients:
        remaining_sizes = sizes[max_clients:].sum(axis=1)
        lines[max_clients + 1 : -1] = [
            f"... and {len(remaining_sizes)} more clients with {_format_range(remaining_sizes)} examples each"
        ]
    lines.insert(-1, "-" * max(map(len, lines)))
    all_notes = [note for client in clients for note in client.notes] if notes is None else list(notes)
    if unused_classes := [name for name, total in zip(names, all_counts[-1], strict=True) if total == 0]:
        all_notes.insert(0, f"classes that no client trains on: {', '.join(unused_classes)}")
    for note in all_notes:
        lines += textwrap.wrap("* " + note, width, subsequent_indent="  ")
    return "\n".join(lines)


def _format_range(sizes: np.ndarray) -> str:
    low, high = int(sizes.min()), int(sizes.max())
    return str(low) if low == high else f"{low} to {high}"


def draw_class_counts(counts: np.ndarray, class_names: Sequence[str]) -> Figure:
    """Draw counts [clients, classes] as bubbles, or as colors if there are many clients or classes.

    Raises:
        DataError: if there are no classes.
    """
    if not class_names:
        raise DataError("there are no classes to draw: these data are a regression. Leave out the picture.")
    client_count, class_count = counts.shape
    has_bubbles = client_count <= _MAX_BUBBLES and class_count <= _MAX_BUBBLES
    pitch = 0.36 if has_bubbles else 0.13
    figsize = np.clip(pitch * client_count, 4.0, 16.0) + 2.2, np.clip(pitch * class_count, 2.4, 14.0) + 1.2
    figure = Figure(figsize=figsize, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if has_bubbles:
        client_indices, label_indices = np.nonzero(counts)
        # diameters in points: the largest bubble just fills its cell
        max_area = (pitch * 72 * 0.92) ** 2
        areas = counts[client_indices, label_indices] / max(int(counts.max()), 1) * max_area
        axes.scatter(client_indices, label_indices, s=areas, c="#3b6ea5", linewidths=0)
        axes.set_xlim(-0.6, client_count - 0.4)
        axes.set_ylim(class_count - 0.4, -0.6)
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_title(f"Training examples of each class; largest bubble: {int(counts.max())}", fontsize=10)
    else:
        # a class that a client lacks is empty, not merely pale
        masked_counts = np.ma.masked_equal(counts.T, 0)
        image = axes.imshow(masked_counts, aspect="auto", interpolation="nearest", cmap="viridis_r", vmin=0)
        figure.colorbar(image, ax=axes, label="examples")
        axes.set_title("Training examples of each class (white: none)", fontsize=10)
    axes.set_xlabel("client")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    ticks = range(0, class_count, max(1, -(-class_count // 50)))
    axes.set_yticks(list(ticks), [class_names[c] for c in ticks], fontsize=8 if class_count <= 30 else 6)
    axes.set_ylabel("class")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _list_largest_classes(row: np.ndarray, names: Sequence[str], top: int, max_width: int) -> str:
    """List the largest classes: at most ``top``, and as many as fit into ``max_width`` characters, but at least one."""
    order = np.argsort(-row, kind="stable")[:top]
    entries = [f"{names[c]} {row[c]}" for c in order if row[c]]
    while len(entries) > 1 and len(", ".join(entries)) > max_width:
        entries.pop()
    return ", ".join(entries)
