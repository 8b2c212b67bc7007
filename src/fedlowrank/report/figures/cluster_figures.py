"""Figures of routes: the share of each cluster at each client, and the recovery of true clusters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FixedLocator, MaxNLocator

from ...core.io.text import on_one_line
from ...results.measurements import Floats
from ..statistics.groups import RunGroup
from . import chart
from .style import INK, Picture, Styles, drawing, figure_height, figure_width, make_styles

INDEX: chart.Bounds = (-0.5, 1.0)  # least and largest value of an adjusted Rand index
PANELS = 5  # maximum number of rounds whose routes a figure shows
CLIENTS = 300  # maximum number of rows in a heat map; more clients are thinned out evenly
# Maximum number of cells in all panels together; beyond it there are fewer rows, down to :data:`FEWEST`. Each
# cell is a path in the page.
CELLS = 6000
FEWEST = 100
# Number of shades: neighbors look alike, and cells of one shade make one path of the drawing.
LEVELS = 16
ALL_TICKS = 5  # maximum number of clusters that are all named along an axis


def plot_recovery(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot cluster recovery against rounds, one line per method, with the 95 % interval over seeds as a band."""

    def set_axis(axes: Axes, ends: Sequence[float]) -> None:
        axes.set(ylabel="adjusted Rand index", ylim=(min(-0.04, min(ends) - 0.04), 1.04))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))

    return chart.plot_lines(
        [
            chart.Line(g, g.short_label, curve, seeds=[run.recovery for run in g.runs] if g.seed_curves() else ())
            for g in groups
            if len(curve := g.recovery_curve())
        ],
        styles,
        set_axis,
        title="Cluster recovery over rounds",
        description="the adjusted Rand index of routes and true clusters",
        formatter="{:.2f}".format,
        opening="Adjusted Rand index of the clients' largest shares against the clusters that their data come "
        "from: 1 where both divide the clients alike, about 0 where routes say nothing",
        bounds=INDEX,
    )  # fmt: skip


def plot_routes(groups: Sequence[RunGroup]) -> list[Picture]:
    """Draw heat maps clients x clusters of the first seed of every method that has routes, at a few rounds."""
    return [picture for group in groups if (picture := _plot_routes(group))]


@drawing()
def _plot_routes(group: RunGroup) -> Picture | None:
    run = group.first
    routes_by_round = run.measurements.routes()
    if not routes_by_round:
        return None
    evaluated_rounds = sorted(routes_by_round)
    last_routes = routes_by_round[evaluated_rounds[-1]]
    # Evenly spaced in rounds, because the first evaluations are often closer to each other than the later ones.
    target_rounds = (
        np.linspace(evaluated_rounds[0], evaluated_rounds[-1], PANELS)
        if len(evaluated_rounds) > PANELS
        else np.array(evaluated_rounds)
    )
    panel_rounds = sorted(
        {min(evaluated_rounds, key=lambda at: (abs(at - target), at)) for target in target_rounds.tolist()}
    )
    client_count, cluster_count = last_routes.shape
    truth = run.measurements.true_clusters(client_count)
    order = sorted(range(client_count), key=lambda i: (truth[i] is None, truth[i] or 0, i))
    max_rows = min(client_count, CLIENTS, max(FEWEST, CELLS // (cluster_count * len(panel_rounds))))
    rows = [order[i] for i in chart.space_evenly(client_count, max_rows)]
    height = 0.9 + min(3.3, max(1.5, 0.07 * len(rows)))
    figure = Figure(
        figsize=(figure_width(), figure_height(height)), layout=ConstrainedLayoutEngine(wspace=0.06)
    )
    ratios = [1.0] * len(panel_rounds) + [0.12 * max(1.0, len(panel_rounds) / 3)]
    *panels, key_axes = figure.subplots(1, len(panel_rounds) + 1, width_ratios=ratios, squeeze=False)[0]
    for axes, round_number in zip(panels, panel_rounds, strict=True):
        draw_shades(axes, routes_by_round[round_number][rows])
        axes.set_title(f"round {round_number}", pad=4)
        has_few_clusters = cluster_count <= ALL_TICKS
        axes.xaxis.set_major_locator(
            FixedLocator(range(cluster_count)) if has_few_clusters else MaxNLocator(4, integer=True)
        )
        axes.set_yticks([])
    _label_rows(panels[0], [truth[i] for i in rows], rows)
    for axes in panels:
        borders = [y - 0.5 for y in range(1, len(rows)) if truth[rows[y]] != truth[rows[y - 1]]]
        axes.hlines(borders, *axes.get_xlim(), color=INK, linewidth=0.7, alpha=0.7)
    unseen_ids = run.measurements.flagged_ids("unseen")
    unseen_rows = [y for y, i in enumerate(rows) if i in unseen_ids]
    if unseen_rows:
        # An empty line outside the axes would have no place and would upset the layout.
        transform = panels[-1].get_yaxis_transform()
        marker_style = {"marker": "<", "markersize": 3, "color": INK, "clip_on": False}
        panels[-1].plot(
            [1.07] * len(unseen_rows), unseen_rows, linestyle="", transform=transform, **marker_style
        )
    panels[len(panels) // 2].set_xlabel("cluster of the method")
    _draw_key(key_axes)
    has_truth = any(cluster is not None for cluster in truth)
    order_text = "their true cluster, with lines between clusters, then by number" if has_truth else "number"
    is_finite = np.isfinite(last_routes).all(axis=1)
    choice_counts = np.bincount(last_routes[is_finite].argmax(axis=1), minlength=cluster_count)
    notes = (
        f" {len(rows)} of {client_count} clients are drawn, evenly spaced."
        if len(rows) < client_count
        else ""
    )
    notes += " A triangle marks a client that never trained." if unseen_rows else ""
    nonfinite_count = int((~is_finite).sum())
    notes += (
        f" Rows of {nonfinite_count} clients whose shares are not finite are empty."
        if nonfinite_count
        else ""
    )
    return Picture(
        figure,
        f"Routes: {group.short_label}",
        f"Heat maps of the shares of {cluster_count} clusters at {client_count} clients under {group.short_label}, at "
        f"{len(panel_rounds)} of the evaluated rounds. At round {evaluated_rounds[-1]}, clients with their largest share at "
        f"cluster 0, 1, ...: {', '.join(map(str, choice_counts))}.",
        f"Share of each cluster (columns) at each client (rows), seed {run.seed}, from round {panel_rounds[0]} "
        f"to round {panel_rounds[-1]}. Clients are sorted by {order_text}. The method's clusters have no order: a "
        f"good router gives the clients of one true cluster one column, whichever it is.{notes}",
    )


def draw_shades(axes: Axes, shares: Floats) -> None:
    """Draw shares ``[rows, columns]`` as cells, darker for larger shares; the first row is on top.

    Cells are paths with an opacity and not pixels, so that they take the page's colors and print sharply.
    """
    rows, columns = shares.shape
    level = np.round(np.where(np.isfinite(shares), shares, 0.0).clip(0, 1) * LEVELS).astype(int)
    (style,) = make_styles(["share"]).values()
    for shade in range(1, LEVELS + 1):
        vertices: list[tuple[float, float]] = []
        for x in range(columns):
            # Starts and exclusive ends of the runs of this shade.
            edges = np.flatnonzero(np.diff(np.concatenate([[0], level[:, x] == shade, [0]])))
            for top, bottom in edges.reshape(-1, 2) - 0.5:
                left, right = x - 0.5, x + 0.5
                vertices += [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
        if vertices:
            codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
            path = Path(vertices, codes * (len(vertices) // 5))
            face = (*style.rgb, shade / LEVELS)
            axes.add_patch(PathPatch(path, facecolor=face, linewidth=0, gid=f"{shade}"))
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set(visible=True, alpha=0.4, linewidth=0.8)


def _label_rows(axes: Axes, truth: Sequence[int | None], rows: Sequence[int]) -> None:
    """Label the rows by true cluster, or by the clients' numbers if no cluster is known."""
    if all(cluster is None for cluster in truth):
        tick_rows = chart.space_evenly(len(rows), 5)
        axes.set_yticks(tick_rows, [str(rows[y]) for y in tick_rows])
        axes.set_ylabel("client")
        return
    names = list(dict.fromkeys(truth))
    middles = [float(np.mean([y for y, cluster in enumerate(truth) if cluster == name])) for name in names]
    step = -(-len(names) // 12)
    axes.set_yticks(middles[::step], ["?" if name is None else on_one_line(name) for name in names][::step])
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel("clients, by true cluster")


def _draw_key(axes: Axes) -> None:
    """Draw the key that maps shades to shares."""
    draw_shades(axes, np.linspace(1, 0, LEVELS + 1)[:, None])
    axes.set_xticks([])
    axes.yaxis.tick_right()
    axes.set_yticks([0, LEVELS / 2, LEVELS], ["1", "½", "0"])
    axes.tick_params(axis="y", length=2)
    axes.yaxis.set_label_position("right")
    axes.set_ylabel("share")
