"""Draws all figures of an experiment in reading order, and writes them as files for a paper."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment

from ...core.io.atomic_files import as_checkpoint_error, write_atomically
from ...methods import METHODS
from ...results.records import RunRecord
from ..statistics.experiments import ComparedExperiment, read_experiments
from ..statistics.groups import RunGroup, measure_of
from . import cluster_figures, data_figures, lora_figures, rank_figures, time_figures, trust_figures
from . import comparison_figures as figures
from .style import Picture, Style, Styles, Width, drawing, drawing_width, final_colors, make_styles

SHEET = "index.html"
"""File name of the contact sheet in a folder of figures."""

IMAGES = ("svg", "png")
"""Kinds of files that a browser shows, the best first."""

DPI = 300
"""Dots per inch of PNG files; publishers ask for at least 300."""


def method_styles(groups: Sequence[RunGroup]) -> dict[str, Style]:
    """Make a style for each label, independent of the order of the runs.

    Labels are sorted by the place of the method in :data:`fedlowrank.methods.METHODS`, other methods last and by
    name, so that ``compare`` and ``report`` draw the same runs alike.
    """
    positions = {name: i for i, name in enumerate(METHODS)}
    order = sorted(
        {(positions.get(group.method, len(positions)), group.method, group.short_label) for group in groups}
    )
    return make_styles([short for *_, short in order])


def draw_all(experiment: ComparedExperiment, styles: Styles) -> Iterator[tuple[str, list[Picture]]]:
    """Draw the figures of one experiment.

    Yields:
        A heading, empty if there is nothing to distinguish, and the figures under it.
    """
    if sweep := figures.plot_sweep(experiment.groups, styles):
        yield "", [replace(sweep, slot="result")]
    variations = experiment.variations
    for i, (text, groups) in enumerate(variations.items()):
        result, curve = figures.plot_results(groups, styles), _plot_curve(groups, styles)
        pictures = [
            replace(result, slot="" if i or sweep else "result") if result else None,
            replace(curve, slot="" if i else "curve") if curve else None,
            None if measure_of(groups).is_loss else figures.plot_loss(groups, styles),
            lora_figures.plot_training_loss(groups, styles),
            figures.plot_communication(groups, styles),
            time_figures.plot_simulated_time(groups, styles),
            trust_figures.plot_privacy(groups, styles),
            trust_figures.plot_private_accuracy(groups, styles),
            trust_figures.plot_clipping_norm(groups, styles),
            figures.plot_clients(groups, styles),
            rank_figures.plot_relative_accuracy(groups, styles),
            lora_figures.plot_score_by_rank(groups, styles),
            figures.plot_trade_off(groups, styles),
            rank_figures.plot_model_size(groups, styles),
            cluster_figures.plot_recovery(groups, styles),
            *cluster_figures.plot_routes(groups),
            rank_figures.plot_downlink(groups, styles),
            rank_figures.plot_ranks(groups, styles),
            lora_figures.plot_server_rank(groups, styles),
            lora_figures.plot_energy(groups, styles),
            *lora_figures.plot_replies(groups),
            data_figures.plot_class_counts(groups[0].first),
            *data_figures.plot_embeddings(groups),
        ]
        heading = (f"With {text}" if text else "Without variation") if len(variations) > 1 else ""
        yield heading, [picture for picture in pictures if picture is not None]


def _plot_curve(groups: Sequence[RunGroup], styles: Styles) -> Picture | None:
    """Plot learning curves of the measure that the methods are judged by."""
    plot = figures.plot_loss if measure_of(groups).is_loss else figures.plot_accuracy
    return plot(groups, styles)


def save_figures(
    runs: Sequence[RunRecord], folder: Path, kinds: Sequence[str] = ("svg", "pdf", "png"), width: Width = "page"
) -> list[Path]:  # fmt: skip
    """Write every figure of a report as separate files, on white, with a contact sheet of all of them.

    All files are in one folder. With several experiments, file names begin with the name of the experiment.

    Args:
        runs: records of the runs, as for a report.
        folder: folder to write to, made if it does not exist. Its :data:`SHEET` shows all figures small, each linked
            to its files.
        kinds: file endings that matplotlib can write.
        width: name of the figures' width: ``page`` for 5.3 inches, ``column`` for 3.3 inches, one column of a paper
            with two.

    Returns:
        The paths of the figures' files.

    Raises:
        CheckpointError: if a file cannot be written.
    """
    experiments = read_experiments(runs)
    paths: list[Path] = []
    sheets: list[tuple[str, list[dict[str, Any]]]] = []
    used_stems: set[str] = set()
    with (
        as_checkpoint_error(f"cannot write figures to {folder}"),
        drawing_width(width),
        drawing(),
        final_colors(),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        matplotlib.rcParams["svg.hashsalt"] = "fedlowrank"
        styles = method_styles([group for experiment in experiments for group in experiment.groups])
        for experiment in experiments:
            name, title = experiment.name, experiment.title
            for heading, pictures in draw_all(experiment, styles):
                entries = []
                for picture in pictures:
                    slug = _slug(f"{name if len(experiments) > 1 else ''} {heading} {picture.title}")
                    # Titles may differ only in characters that a file name cannot contain.
                    names = (slug, *(f"{slug}-{i}" for i in range(2, len(used_stems) + 2)))
                    stem = next(name for name in names if name not in used_stems)
                    used_stems.add(stem)
                    for kind in kinds:
                        path = folder / f"{stem}.{kind}"
                        # No date inside, so that equal runs give equal files.
                        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
                        picture.figure.savefig(path, facecolor="white", metadata=metadata, dpi=DPI)
                        paths.append(path)
                    entries.append(_sheet_entry(picture, stem, kinds))
                sheets.append(
                    (": ".join(filter(None, (title if len(experiments) > 1 else "", heading))), entries)
                )
        page_title = experiments[0].title if len(experiments) == 1 else f"{len(experiments)} experiments"
        write_atomically(folder / SHEET, _render_sheet(page_title, sheets).encode())
    return paths


def _sheet_entry(picture: Picture, stem: str, kinds: Sequence[str]) -> dict[str, Any]:
    """Collect the values that the contact sheet shows of a figure."""
    image = next((f"{stem}.{kind}" for kind in IMAGES if kind in kinds), None)
    files = [(kind.upper(), f"{stem}.{kind}") for kind in kinds]
    return {"title": picture.title, "alt": picture.alt, "image": image, "files": files}


def _render_sheet(title: str, sheets: Sequence[tuple[str, list[dict[str, Any]]]]) -> str:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(
        (resources.files(__package__) / "contact.html.j2").read_text(encoding="utf-8")
    )
    return template.render(title=title, sheets=sheets).lstrip()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
