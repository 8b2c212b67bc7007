"""Pictures of the data: how representations lie, and how classes are spread over clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import threadpoolctl  # type: ignore[import-untyped]
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from sklearn.manifold import TSNE

from ..simulation.records import RunRecord
from .groups import Group, seed
from .style import INK, LIGHT, MARKERS, WIDTH, Picture, color, drawing, hue, legend, new_figure
from .units import plain

POINTS = 2000
"""Most points in one panel of representations."""

BUDGET = 4000
"""Most points in all panels of a page together, unless that left fewer than :data:`FEWEST` a panel."""

FEWEST = 300
DOTS = 3000
"""Most dots in the picture of classes."""

LISTED = 20
"""Most classes named in a legend or along an axis."""


def representations(groups: Sequence[Group]) -> list[Picture]:
    """t-SNE of the test representations of the first seed, one panel a method, and a legend as the last picture.

    Args:
        groups: the methods; those whose first seed saved no representations have no panel.
    """
    found = [(group, stored) for group in groups if (stored := _stored(group.first)) is not None]
    if not found:
        return []
    limit = max(FEWEST, min(POINTS, BUDGET // len(found)))
    count = 1 + max(int(label.max()) for _, (_, label, _) in found)
    clients = sorted({int(c) for _, (_, _, client) in found for c in client})
    pictures = []
    for group, (x, label, client) in found:
        kept = np.linspace(0, len(x) - 1, min(limit, len(x))).round().astype(int)
        flat = embed(x[kept])
        if flat is not None:
            pictures.append(_panel(group, flat, label[kept], client[kept], count, clients, len(x)))
    if pictures:
        pictures.append(_key(found[0][0].first, count, clients))
    return pictures


def embed(x: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Two-dimensional t-SNE from a PCA start, the same at every call.

    Args:
        x: ``[n, d]`` points.

    Returns:
        ``[n, 2]``, or None where there is nothing to lay out: fewer than five points, or all in one place.
    """
    if len(x) < 5 or float(x.std(axis=0).max()) == 0.0:
        return None
    if x.shape[1] < 2:
        x = np.concatenate([x, np.zeros_like(x)], axis=1)
    perplexity = min(30.0, (len(x) - 1) / 3)
    # Sums shared out over threads differ in the last bit from call to call, and t-SNE makes much of a last bit.
    with threadpoolctl.threadpool_limits(limits=1):
        flat = TSNE(perplexity=perplexity, init="pca", learning_rate="auto", random_state=0).fit_transform(x)
    return np.asarray(flat, dtype=np.float64)


def class_counts(run: RunRecord) -> Picture | None:
    """Training examples of each class at each client, as dots whose area grows with the number."""
    rows = [(row.get("id", i), (row.get("classes") or {}).get("train")) for i, row in enumerate(run.clients)]
    kept = [(str(name), [int(n) for n in counts]) for name, counts in rows if counts]
    if not kept:
        return None
    classes = max(len(counts) for _, counts in kept)
    shown, dots = 0, 0
    for _, counts in kept:
        dots += sum(n > 0 for n in counts)
        if dots > DOTS and shown:
            break
        shown += 1
    points = [(i, k, n) for i, (_, counts) in enumerate(kept[:shown]) for k, n in enumerate(counts) if n > 0]
    if not points:
        return None
    largest = max(n for *_, n in points)
    cell = min(WIDTH * 60 / max(shown, 2), 190 / max(classes, 2), 20)
    with drawing():
        figure, axes = new_figure(max(2.2, min(4.6, 1.0 + 0.24 * classes)))
        x, y, n = (np.array(column) for column in zip(*points, strict=True))
        axes.scatter(x, y, s=np.maximum(1.5, cell**2 * n / largest), color=color(0), alpha=0.85, linewidths=0)
        names = [plain(name, 14) for name in run.config.get("classes") or []]
        if len(names) == classes <= LISTED:
            axes.set_yticks(range(classes), names)
        else:
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        if shown <= LISTED:
            axes.set_xticks(range(shown), [plain(name, 6) for name, _ in kept[:shown]])
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="client", ylabel="class", xlim=(-0.7, shown - 0.3), ylim=(classes - 0.3, -0.7))
    present = [sum(n > 0 for n in counts) for _, counts in kept]
    sizes = [sum(counts) for _, counts in kept]
    cut = f" The first {shown} of {len(kept)} clients are drawn." if shown < len(kept) else ""
    return Picture(
        figure,
        "Classes at each client",
        f"Dot chart of training examples by class and client: {len(kept)} clients with {_range(present)} classes and "
        f"{_range(sizes)} training examples each.",
        f"Training examples of each class at each client, seed {seed(run)}; the area of a dot grows with their number, "
        f"the largest is {largest}.{cut}",
    )


def class_colors(count: int) -> list[str]:
    """A color for each class: the palette while it lasts, else evenly spaced hues."""
    return [color(i) if count <= len(LIGHT) else hue(i, count) for i in range(count)]


Stored = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]


def _stored(run: RunRecord) -> Stored | None:
    tensors = run.representations()
    if tensors is None or not {"x", "label", "client"} <= tensors.keys():
        return None
    x = tensors["x"].double().flatten(1).numpy()
    usable = np.isfinite(x).all(axis=1)
    label, client = tensors["label"].long().numpy(), tensors["client"].long().numpy()
    return (x[usable], label[usable], client[usable]) if usable.any() else None


def _panel(
    group: Group,
    flat: NDArray[np.float64],
    label: NDArray[np.int64],
    client: NDArray[np.int64],
    count: int,
    clients: Sequence[int],
    total: int,
) -> Picture:
    colors = class_colors(count)
    with drawing():
        figure, axes = new_figure(3.2, 3.2)
        # One artist a marker: drawn class by class, the last classes would lie on top everywhere.
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
        f"t-SNE map of {some} test representations of {group.short}, {len(set(label.tolist()))} classes, "
        f"{len(set(client.tolist()))} clients.",
        f"t-SNE of {some} test representations at the end of training, seed {seed(group.first)}.",
        small=True,
    )


def _key(run: RunRecord, count: int, clients: Sequence[int]) -> Picture:
    names = run.config.get("classes") or []
    colors = class_colors(count)
    listed = range(min(count, LISTED))
    handles = [Line2D([], [], linestyle="", marker="o", markersize=6, color=colors[k]) for k in listed]
    labels = [f"class {plain(names[k] if k < len(names) else k, 14)}" for k in listed]
    marked = clients[: len(MARKERS)]
    handles += [Line2D([], [], linestyle="", marker=MARKERS[i], markersize=6, color=INK) for i in range(len(marked))]
    labels += [f"client {one}" for one in marked]
    with drawing():
        figure, axes = new_figure(0.2)
        axes.set_axis_off()
        legend(figure, handles, labels)
    more = [f"{count} classes, the first {LISTED} named" if count > LISTED else ""]
    more.append(f"markers repeat after {len(MARKERS)} clients" if len(clients) > len(MARKERS) else "")
    return Picture(
        figure,
        "Legend of the representations",
        "Legend: a color for each class and a marker for each client.",
        "Color: class; marker: client."
        + "".join(f" {text[0].upper()}{text[1:]}." for text in more if text)
        + " Distances between far groups mean little in t-SNE.",
    )


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
