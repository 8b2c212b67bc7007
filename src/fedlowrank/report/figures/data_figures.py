"""Figures of the data: an embedding plot of representations, and the classes at each client."""

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

POINTS = 2000  # most points in one embedding plot
# Most points in all embedding plots of a page together, unless that left fewer than :data:`MIN_POINTS` a plot.
BUDGET = 4000
MIN_POINTS = 300
MAX_DOTS = 3000  # most dots in the figure of classes
MAX_LISTED_CLASSES = 20  # most classes named in a legend or along an axis
Points = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]


def plot_embeddings(groups: Sequence[RunGroup]) -> list[Picture]:
    """t-SNE of the test representations of each method's first seed, after the legend that they share.

    Methods whose first seed saved no representations have no plot.
    """
    stored_groups = [(group, stored) for group in groups if (stored := _load_representations(group.first))]
    if not stored_groups:
        return []
    limit = max(MIN_POINTS, min(POINTS, BUDGET // len(stored_groups)))
    count = 1 + max(int(label.max()) for _, (_, label, _) in stored_groups)
    colors = [palette_color(i) if count <= len(LIGHT) else hue_color(i, count) for i in range(count)]
    clients = sorted({int(c) for _, (_, _, client) in stored_groups for c in client})
    plots = []
    for group, (x, label, client) in stored_groups:
        kept = space_evenly(len(x), limit)
        flat = embed(x[kept])
        if flat is not None:
            plots.append(_plot_embedding(group, (flat, label[kept], client[kept]), colors, clients, len(x)))
    return [_plot_legend(stored_groups[0][0].first, colors, clients), *plots] if plots else []


def _load_representations(run: RunRecord) -> Points | None:
    tensors = read_representations(run.folder)
    if tensors is None or not {"x", "label", "client"} <= tensors.keys():
        return None
    if tensors["label"].ndim > 1:
        # real targets are no classes that could have colors
        return None
    x = tensors["x"].double().flatten(1).numpy()
    usable = np.isfinite(x).all(axis=1)
    label, client = tensors["label"].long().numpy(), tensors["client"].long().numpy()
    return (x[usable], label[usable], client[usable]) if usable.any() else None


def embed(x: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Two-dimensional t-SNE from a PCA start, the same at every call.

    Args:
        x: ``[n, d]`` points.

    Returns:
        ``[n, 2]``, or None where there is nothing to embed: fewer than five points, or all in one place.
    """
    from sklearn.manifold import TSNE  # slow to import

    if len(x) < 5 or float(x.std(axis=0).max()) == 0.0:
        return None
    if x.shape[1] < 2:
        x = np.concatenate([x, np.zeros_like(x)], axis=1)
    perplexity = min(30.0, (len(x) - 1) / 3)
    # Sums over several threads differ in the last bit from call to call, which t-SNE amplifies.
    with threadpoolctl.threadpool_limits(limits=1):
        flat = TSNE(perplexity=perplexity, init="pca", learning_rate="auto", random_state=0).fit_transform(x)
    return np.asarray(flat, dtype=np.float64)


@drawing()
def _plot_embedding(
    group: RunGroup, points: Points, colors: Sequence[str], clients: Sequence[int], total: int
) -> Picture:  # fmt: skip
    flat, label, client = points
    figure, axes = new_figure(3.2, 3.2)
    # One artist a marker: drawn class by class, the last classes would be on top everywhere.
    for place, one in enumerate(clients):
        mine = client == one
        if mine.any():
            axes.scatter(
                flat[mine, 0], flat[mine, 1], s=13, marker=MARKERS[place % len(MARKERS)], linewidths=0,
                c=[colors[k] for k in label[mine]], alpha=0.8,
            )  # fmt: skip
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set(visible=True, alpha=0.3)
    some = f"{len(flat)} of {total}" if len(flat) < total else f"{total}"
    return Picture(
        figure,
        f"Representations: {group.short}",
        f"t-SNE map of {some} test representations of {group.short}, {len(np.unique(label))} classes, "
        f"{len(np.unique(client))} clients.",
        f"t-SNE of {some} test representations at the end of training, seed {group.first.seed}.",
        small=True,
    )


@drawing()
def _plot_legend(run: RunRecord, colors: Sequence[str], clients: Sequence[int]) -> Picture:
    names, marked = run.config.get("classes") or [], clients[: len(MARKERS)]
    look: Any = {"linestyle": "", "markersize": 6}
    entries = [Line2D([], [], marker="o", color=color, **look) for color in colors[:MAX_LISTED_CLASSES]]
    labels = [f"class {on_one_line(names[k] if k < len(names) else k, 14)}" for k in range(len(entries))]
    entries += [Line2D([], [], marker=marker, color=INK, **look) for marker in MARKERS[: len(marked)]]
    labels += [f"client {client}" for client in marked]
    figure, axes = new_figure(0.2)
    axes.set_axis_off()
    add_legend(figure, entries, labels)
    more = (
        f" {len(colors)} classes, the first {MAX_LISTED_CLASSES} named."
        if len(colors) > MAX_LISTED_CLASSES
        else ""
    )
    more += f" Markers repeat after {len(MARKERS)} clients." if len(clients) > len(MARKERS) else ""
    return Picture(
        figure,
        "Legend of the representations",
        "Legend: a color for each class and a marker for each client.",
        f"Color: class; marker: client.{more} Distances between far groups mean little in t-SNE.",
    )


@drawing()
def plot_class_counts(run: RunRecord) -> Picture | None:
    """Training examples of each class at each client, as dots whose area grows with the number."""
    rows = [(row.get("id", i), (row.get("classes") or {}).get("train")) for i, row in enumerate(run.clients)]
    counts = {str(name): np.array(found, dtype=int) for name, found in rows if found}
    # As many clients as there is room for, at least one.
    dots = np.cumsum([(found > 0).sum() for found in counts.values()])
    shown = max(1, int((dots <= MAX_DOTS).sum()))
    drawn = enumerate(list(counts.values())[:shown])
    points = [(i, k, found[k]) for i, found in drawn for k in np.flatnonzero(found)]
    if not points:
        return None
    shown = min(shown, len(counts))
    classes = max(map(len, counts.values()))
    x, y, n = np.array(points).T
    cell = min(figure_width() * 60 / max(shown, 2), 190 / max(classes, 2), 20)
    figure, axes = new_figure(max(2.2, min(4.6, 1.0 + 0.24 * classes)))
    areas = np.maximum(1.5, cell**2 * n / n.max())
    axes.scatter(x, y, s=areas, color=palette_color(0), alpha=0.85, linewidths=0)
    names = [on_one_line(name, 14) for name in run.config.get("classes") or []]
    if len(names) == classes <= MAX_LISTED_CLASSES:
        axes.set_yticks(range(classes), names)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if shown <= MAX_LISTED_CLASSES:
        axes.set_xticks(range(shown), [on_one_line(name, 6) for name in list(counts)[:shown]])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="client", ylabel="class", xlim=(-0.7, shown - 0.3), ylim=(classes - 0.3, -0.7))
    present = _format_range([int((found > 0).sum()) for found in counts.values()])
    sizes = _format_range([int(found.sum()) for found in counts.values()])
    cut = f" The first {shown} of {len(counts)} clients are drawn." if shown < len(counts) else ""
    return Picture(
        figure,
        "Classes at each client",
        f"Dot chart of training examples by class and client: {len(counts)} clients with {present} classes "
        f"and {sizes} training examples each.",
        f"Training examples of each class at each client, seed {run.seed}; the area of a dot grows with "
        f"their number, the largest is {n.max()}.{cut}",
    )


def _format_range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
