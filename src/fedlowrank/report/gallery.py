"""All figures of an experiment, in the order in which a reader wants them, and as files for a paper."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib

from ..core.files import as_checkpoint_error
from ..methods import METHODS
from ..simulation.records import RunRecord
from . import cluster_figures, data_figures, figures, lora_figures, rank_figures, time_figures, trust_figures
from .groups import RunGroup, by_experiment, by_variation, group_runs, measure_of
from .style import Picture, Style, Styles, Width, drawing, drawing_width, final_colors, make_styles

DPI = 300
"""Dots an inch of PNG files; publishers ask for at least 300."""


def method_styles(groups: Sequence[RunGroup]) -> dict[str, Style]:
    """A style for each label, in whatever order the runs are given.

    Labels are sorted by the place of the method in :data:`fedlowrank.methods.METHODS`, other methods last and
    by name, so that ``compare`` and ``report`` draw the same runs alike.
    """
    place = {name: i for i, name in enumerate(METHODS)}
    order = sorted({(place.get(group.method, len(place)), group.method, group.short) for group in groups})
    return make_styles([short for *_, short in order])


def draw_all(groups: Sequence[RunGroup], styles: Styles) -> Iterator[tuple[str, list[Picture]]]:
    """The figures of one experiment.

    Yields:
        A heading, empty where there is nothing to tell apart, and the figures under it.
    """
    if sweep := figures.plot_sweep(groups, styles):
        yield "", [replace(sweep, place="result")]
    variations = by_variation(groups)
    for i, (text, some) in enumerate(variations.items()):
        result, curve = figures.plot_results(some, styles), _plot_curve(some, styles)
        pictures = [
            replace(result, place="" if i or sweep else "result") if result else None,
            replace(curve, place="" if i else "curve") if curve else None,
            None if measure_of(some).is_loss else figures.plot_loss(some, styles),
            lora_figures.plot_training_loss(some, styles),
            figures.plot_communication(some, styles),
            time_figures.plot_simulated_time(some, styles),
            trust_figures.plot_privacy(some, styles),
            trust_figures.plot_private_accuracy(some, styles),
            trust_figures.plot_clipping_norm(some, styles),
            figures.plot_clients(some, styles),
            rank_figures.plot_relative_accuracy(some, styles),
            lora_figures.plot_score_by_rank(some, styles),
            figures.plot_trade_off(some, styles),
            rank_figures.plot_model_size(some, styles),
            cluster_figures.plot_recovery(some, styles),
            *cluster_figures.plot_routes(some),
            rank_figures.plot_downlink(some, styles),
            rank_figures.plot_ranks(some, styles),
            lora_figures.plot_server_rank(some, styles),
            lora_figures.plot_energy(some, styles),
            *lora_figures.plot_replies(some),
            data_figures.plot_class_counts(some[0].first),
            *data_figures.plot_embeddings(some),
        ]
        heading = (f"With {text}" if text else "Without variation") if len(variations) > 1 else ""
        yield heading, [picture for picture in pictures if picture is not None]


def _plot_curve(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Learning curves in what the methods are judged by."""
    plot = figures.plot_loss if measure_of(groups).is_loss else figures.plot_accuracy
    return plot(groups, styles)


def save_figures(
    runs: Sequence[RunRecord], folder: Path, kinds: Sequence[str] = ("svg", "pdf", "png"), width: Width = "page"
) -> list[Path]:  # fmt: skip
    """Write every figure of a report as files of its own, on white.

    Args:
        runs: as for a report; several experiments get a folder each.
        folder: made if it does not exist.
        kinds: endings that matplotlib can write.
        width: ``page`` for figures 5.3 inches wide, ``column`` for 3.3 inches, one column of a paper with
            two.

    Returns:
        The files.

    Raises:
        CheckpointError: if a file cannot be written.
    """
    groups = group_runs(runs)
    experiments = by_experiment(groups)
    made: list[Path] = []
    for name, members in experiments.items():
        into = folder / _slug(name) if len(experiments) > 1 else folder
        with (
            as_checkpoint_error(f"cannot write figures to {into}"),
            drawing_width(width),
            drawing(),
            final_colors(),
        ):
            into.mkdir(parents=True, exist_ok=True)
            matplotlib.rcParams["svg.hashsalt"] = "fedlowrank"
            used: set[str] = set()
            for heading, pictures in draw_all(members, method_styles(groups)):
                for picture in pictures:
                    slug = _slug(f"{heading} {picture.title}")
                    # Titles may differ in nothing that a file's name can contain.
                    names = (slug, *(f"{slug}-{i}" for i in range(2, len(used) + 2)))
                    stem = next(name for name in names if name not in used)
                    used.add(stem)
                    for kind in kinds:
                        path = into / f"{stem}.{kind}"
                        # No date inside, so that equal runs give equal files.
                        stamp = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
                        picture.figure.savefig(path, facecolor="white", metadata=stamp, dpi=DPI)
                        made.append(path)
    return made


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
