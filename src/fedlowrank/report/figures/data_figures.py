"""Figures of the data: embedding plots of representations, and the classes at each client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import threadpoolctl  # type: ignore[import-untyped]  # it has no types
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ...core.io.text import on_one_line
from ...results.records import RunRecord
from ...storage.run_files import read_representations
from ..statistics.groups import RunGroup
from .chart import space_evenly
from .style import (
    INK,
    LIGHT,
    MARKERS,
    Picture,
    add_legend,
    drawing,
    figure_width,
    hue_color,
    new_figure,
    palette_color,
)

POINTS = 2000  # maximum number of points in one embedding plot
# Maximum number of points in all embedding plots of a page, but at least :data:`MIN_POINTS` per plot.
BUDGET = 4000
MIN_POINTS = 300
MAX_DOTS = 3000  # maximum number of dots in the figure of classes
MAX_LISTED_CLASSES = 20  # maximum number of classes named in a legend or along an axis
Points = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]


def plot_embeddings(groups: Sequence[RunGroup]) -> list[Picture]:
    """Plot t-SNE of the test representations of each method's first seed, after their common legend.

    Methods whose first seed has saved no representations have no plot.
    """
    stored_groups = [
        (group, representations)
        for group in groups
        if (representations := _load_representations(group.first))
    ]
    if not stored_groups:
        return []
    limit = max(MIN_POINTS, min(POINTS, BUDGET // len(stored_groups)))
    class_count = 1 + max(int(labels.max()) for _, (_, labels, _) in stored_groups)
    colors = [
        palette_color(i) if class_count <= len(LIGHT) else hue_color(i, class_count)
        for i in range(class_count)
    ]
    client_ids = sorted({int(c) for _, (_, _, owner_ids) in stored_groups for c in owner_ids})
    plots = []
    for group, (x, labels, owner_ids) in stored_groups:
        rows = space_evenly(len(x), limit)
        embedding = embed(x[rows])
        if embedding is not None:
            plots.append(
                _plot_embedding(group, (embedding, labels[rows], owner_ids[rows]), colors, client_ids, len(x))
            )
    return [_plot_legend(stored_groups[0][0].first, colors, client_ids), *plots] if plots else []


def _load_representations(run: RunRecord) -> Points | None:
    tensors = read_representations(run.folder)
    if tensors is None or not {"x", "label", "client"} <= tensors.keys():
        return None
    if tensors["label"].ndim > 1:
        # real targets are no classes and have no colors
        return None
    x = tensors["x"].double().flatten(1).numpy()
    labels, client_ids = tensors["label"].long().numpy(), tensors["client"].long().numpy()
    # a negative label is one that the loss ignores, and no class
    mask = np.isfinite(x).all(axis=1) & (labels >= 0)
    return (x[mask], labels[mask], client_ids[mask]) if mask.any() else None


def embed(x: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Compute a two-dimensional t-SNE from a PCA start, the same at every call.

    Args:
        x: points ``[n, d]``.

    Returns:
        The embedding ``[n, 2]``, or None if there is nothing to embed: fewer than five points, or all in one place.
    """
    from sklearn.manifold import TSNE  # slow to import

    if len(x) < 5 or float(x.std(axis=0).max()) == 0.0:
        return None
    if x.shape[1] < 2:
        x = np.concatenate([x, np.zeros_like(x)], axis=1)
    perplexity = min(30.0, (len(x) - 1) / 3)
    # Multithreaded sums differ in the last bit from call to call, which t-SNE amplifies.
    with threadpoolctl.threadpool_limits(limits=1):
        embedding = TSNE(
            perplexity=perplexity, init="pca", learning_rate="auto", random_state=0
        ).fit_transform(x)
    return np.asarray(embedding, dtype=np.float64)


@drawing()
def _plot_embedding(
    group: RunGroup, points: Points, colors: Sequence[str], client_ids: Sequence[int], point_count: int
) -> Picture:  # fmt: skip
    embedding, labels, owner_ids = points
    figure, axes = new_figure(3.2, 3.2)
    # One artist per marker, because the last classes would be on top everywhere if drawn class by class.
    for index, client_id in enumerate(client_ids):
        mask = owner_ids == client_id
        if mask.any():
            axes.scatter(
                embedding[mask, 0], embedding[mask, 1], s=13, marker=MARKERS[index % len(MARKERS)], linewidths=0,
                c=[colors[k] for k in labels[mask]], alpha=0.8,
            )  # fmt: skip
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set(visible=True, alpha=0.3)
    count_text = f"{len(embedding)} of {point_count}" if len(embedding) < point_count else f"{point_count}"
    return Picture(
        figure,
        f"Representations: {group.short_label}",
        f"t-SNE map of {count_text} test representations of {group.short_label}, {len(np.unique(labels))} classes, "
        f"{len(np.unique(owner_ids))} clients.",
        f"t-SNE of {count_text} test representations at the end of training, seed {group.first.seed}.",
        small=True,
    )


@drawing()
def _plot_legend(run: RunRecord, colors: Sequence[str], client_ids: Sequence[int]) -> Picture:
    names, marked_ids = run.config.get("classes") or [], client_ids[: len(MARKERS)]
    marker_style: Any = {"linestyle": "", "markersize": 6}
    entries = [
        Line2D([], [], marker="o", color=color, **marker_style) for color in colors[:MAX_LISTED_CLASSES]
    ]
    labels = [f"class {on_one_line(names[k] if k < len(names) else k, 14)}" for k in range(len(entries))]
    entries += [
        Line2D([], [], marker=marker, color=INK, **marker_style) for marker in MARKERS[: len(marked_ids)]
    ]
    labels += [f"client {client_id}" for client_id in marked_ids]
    figure, axes = new_figure(0.2)
    axes.set_axis_off()
    add_legend(figure, entries, labels)
    note = (
        f" {len(colors)} classes, the first {MAX_LISTED_CLASSES} named."
        if len(colors) > MAX_LISTED_CLASSES
        else ""
    )
    note += f" Markers repeat after {len(MARKERS)} clients." if len(client_ids) > len(MARKERS) else ""
    return Picture(
        figure,
        "Legend of the representations",
        "Legend: a color for each class and a marker for each client.",
        f"Color: class; marker: client.{note} Distances between far groups mean little in t-SNE.",
    )


@drawing()
def plot_class_counts(run: RunRecord) -> Picture | None:
    """Plot the training examples of each class at each client, as dots whose area grows with their number."""
    rows = [(row.get("id", i), (row.get("classes") or {}).get("train")) for i, row in enumerate(run.clients)]
    counts_by_client = {
        str(name): np.array(train_counts, dtype=int) for name, train_counts in rows if train_counts
    }
    # As many clients as fit, at least one.
    dot_totals = np.cumsum([(train_counts > 0).sum() for train_counts in counts_by_client.values()])
    client_count = max(1, int((dot_totals <= MAX_DOTS).sum()))
    drawn_counts = enumerate(list(counts_by_client.values())[:client_count])
    points = [
        (i, k, train_counts[k]) for i, train_counts in drawn_counts for k in np.flatnonzero(train_counts)
    ]
    if not points:
        return None
    client_count = min(client_count, len(counts_by_client))
    class_count = max(map(len, counts_by_client.values()))
    x, y, n = np.array(points).T
    cell_size = min(figure_width() * 60 / max(client_count, 2), 190 / max(class_count, 2), 20)
    figure, axes = new_figure(max(2.2, min(4.6, 1.0 + 0.24 * class_count)))
    areas = np.maximum(1.5, cell_size**2 * n / n.max())
    axes.scatter(x, y, s=areas, color=palette_color(0), alpha=0.85, linewidths=0)
    names = [on_one_line(name, 14) for name in run.config.get("classes") or []]
    if len(names) == class_count <= MAX_LISTED_CLASSES:
        axes.set_yticks(range(class_count), names)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if client_count <= MAX_LISTED_CLASSES:
        axes.set_xticks(
            range(client_count), [on_one_line(name, 6) for name in list(counts_by_client)[:client_count]]
        )
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="client", ylabel="class", xlim=(-0.7, client_count - 0.3), ylim=(class_count - 0.3, -0.7))
    classes_text = _format_range(
        [int((train_counts > 0).sum()) for train_counts in counts_by_client.values()]
    )
    sizes_text = _format_range([int(train_counts.sum()) for train_counts in counts_by_client.values()])
    cut_note = (
        f" The first {client_count} of {len(counts_by_client)} clients are drawn."
        if client_count < len(counts_by_client)
        else ""
    )
    return Picture(
        figure,
        "Classes at each client",
        f"Dot chart of training examples by class and client: {len(counts_by_client)} clients with {classes_text} classes "
        f"and {sizes_text} training examples each.",
        f"Training examples of each class at each client, seed {run.seed}; the area of a dot grows with "
        f"their number, the largest is {n.max()}.{cut_note}",
    )


def _format_range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
