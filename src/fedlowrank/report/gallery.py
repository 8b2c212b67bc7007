"""All figures of an experiment, in the order in which a reader wants them, and as files for a paper."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib

from ..core.files import as_checkpoint_error
from ..methods import METHODS
from ..simulation.records import RunRecord
from . import adapter_figures, figures, low_rank_figures, pictures, route_figures
from .groups import Group, aggregate, vary_text
from .style import Picture, Style, drawing, real_colors, styles


def method_styles(groups: Sequence[Group]) -> dict[str, Style]:
    """A style for each label, in whatever order the runs are given.

    Labels are sorted by the place of the method in :data:`fedlowrank.methods.METHODS`, methods that are not there last
    and by name, so that ``compare`` and ``report`` draw the same runs alike.
    """
    place = {name: i for i, name in enumerate(METHODS)}
    order = sorted({(place.get(group.method, len(place)), group.method, group.short) for group in groups})
    return styles([short for *_, short in order])


def gallery(groups: Sequence[Group], looks: dict[str, Style]) -> Iterator[tuple[str, list[Picture]]]:
    """The figures of one experiment.

    Args:
        groups: its runs, by method and settings.
        looks: style of each method.

    Yields:
        A heading, empty where there is nothing to tell apart, and the figures under it.
    """
    over = figures.sweep(groups, looks)
    if over is not None:
        yield "", [over]
    variants = list(dict.fromkeys(vary_text(group.vary) for group in groups))
    for text in variants:
        some = [group for group in groups if vary_text(group.vary) == text]
        drawn = [
            figures.accuracy_over_rounds(some, looks),
            figures.loss_over_rounds(some, looks),
            adapter_figures.training_loss_over_rounds(some, looks),
            figures.accuracy_over_bytes(some, looks),
            figures.client_boxes(some, looks),
            low_rank_figures.relative_accuracy(some, looks),
            adapter_figures.score_by_rank(some, looks),
            figures.trade_off(some, looks),
            low_rank_figures.accuracy_over_size(some, looks),
            route_figures.recovery_over_rounds(some, looks),
            *route_figures.routes(some),
            low_rank_figures.downlink_over_rounds(some, looks),
            low_rank_figures.rank_over_rounds(some, looks),
            adapter_figures.server_rank_over_rounds(some, looks),
            adapter_figures.energy_over_rounds(some, looks),
            *adapter_figures.replies_over_rounds(some),
            pictures.class_counts(some[0].first),
        ]
        heading = (f"With {text}" if text else "Without variation") if len(variants) > 1 else ""
        maps = pictures.representations(some)
        # the last map is the legend of the others and stands with the larger figures
        yield heading, [one for one in [*drawn, *maps[-1:], *maps[:-1]] if one is not None]


def save_figures(runs: Sequence[RunRecord], folder: Path, kinds: Sequence[str] = ("svg", "pdf")) -> list[Path]:
    """Write every figure of a report as files of its own, on white.

    Args:
        runs: as for a report; several experiments get a folder each.
        folder: made if it does not exist.
        kinds: endings that matplotlib can write.

    Returns:
        The files.

    Raises:
        CheckpointError: if a file cannot be written.
    """
    groups = aggregate(runs)
    names = list(dict.fromkeys(group.name for group in groups))
    made: list[Path] = []
    for name in names:
        into = folder / _slug(name) if len(names) > 1 else folder
        with as_checkpoint_error(f"cannot write figures to {into}"), drawing(), real_colors():
            looks = method_styles(groups)
            into.mkdir(parents=True, exist_ok=True)
            matplotlib.rcParams["svg.hashsalt"] = "fedlowrank"
            used: set[str] = set()
            for heading, drawn in gallery([g for g in groups if g.name == name], looks):
                for picture in drawn:
                    stem = _unused(_slug(f"{heading} {picture.title}"), used)
                    for kind in kinds:
                        path = into / f"{stem}.{kind}"
                        # no date inside, so that equal runs give equal files
                        stamp = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
                        picture.figure.savefig(path, facecolor="white", metadata=stamp)
                        made.append(path)
    return made


def _unused(stem: str, used: set[str]) -> str:
    """The stem, with a number if it is taken: titles may differ in nothing that a file's name can hold."""
    names = (stem, *(f"{stem}-{i}" for i in range(2, len(used) + 2)))
    free = next(name for name in names if name not in used)
    used.add(free)
    return free


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
