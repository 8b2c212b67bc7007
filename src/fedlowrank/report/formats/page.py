"""Writes a report: one self-contained HTML page, and its tables as Markdown and CSV."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment
from markupsafe import Markup

from ...core.errors import ConfigError
from ...core.io.atomic_files import as_checkpoint_error, write_atomically
from ...core.io.text import format_count, on_one_line
from ...results.records import SECTIONS, RunRecord
from ..figures.gallery import draw_all, method_styles
from ..figures.style import DARK, LIGHT, Styles, css_variables, to_svg
from ..findings import state_headline
from ..run_comparison import Comparison, compare_experiments, to_csv
from ..setting_paragraph import describe_setting
from ..statistics.experiments import read_experiments
from ..statistics.groups import RunGroup
from ..statistics.setting_names import value_text
from .markdown import comparison_markdown

MAX_TITLES = 3  # maximum number of experiments that the title of a page names


def write_report(
    runs: Sequence[RunRecord], out: Path, *, target: float | None = None, command: str = "",
    figures: Path | None = None,
) -> Comparison:  # fmt: skip
    """Write a report as an HTML page, with its tables as Markdown and CSV next to it.

    Equal runs give equal files, byte for byte. The function returns the comparison that the files show.

    Args:
        runs: records of the runs, in the order in which methods appear; each experiment gets a section.
        out: path of the page, such as ``report.html``; ``report.md`` and ``report.csv`` are written next to it.
        target: accuracy in (0, 1] for the columns "to target"; None for a default, see
            :func:`fedlowrank.report.statistics.accuracy_target.choose_target`.
        command: command line that repeats these runs, for the reader.
        figures: path of the contact sheet that :func:`fedlowrank.report.save_figures` writes, to which the page links.

    Raises:
        ConfigError: if there is no run, or if the target is out of range.
        CheckpointError: if a file cannot be written.
    """
    if not runs:
        raise ConfigError("a report needs at least one run")
    experiments = read_experiments(runs, target)
    comparison = compare_experiments(experiments)
    downloads = {"csv": to_csv(comparison), "md": comparison_markdown(comparison)}
    sheet = "" if figures is None else quote(Path(os.path.relpath(figures, out.parent)).as_posix())
    text = render_page(comparison, runs, command, downloads, sheet)
    with as_checkpoint_error(f"cannot make {out.parent}"):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, text.encode())
    for kind, content in downloads.items():
        write_atomically(out.with_suffix(f".{kind}"), content.encode())
    return comparison


def render_page(
    comparison: Comparison, runs: Sequence[RunRecord], command: str, downloads: Mapping[str, str], sheet: str = ""
) -> str:  # fmt: skip
    """Render the page as HTML.

    Args:
        comparison: comparison to show.
        runs: records of all runs, including repeated seeds.
        command: command line that repeats these runs, see :func:`write_report`.
        downloads: texts of the files that the page offers, by file ending.
        sheet: address of a contact sheet of all figures; empty if there is none.
    """
    template_folder, styles, experiments = (
        files(__package__),
        method_styles(comparison.groups),
        comparison.experiments,
    )
    comparisons = (
        [comparison] if len(experiments) == 1 else [compare_experiments([entry]) for entry in experiments]
    )
    sections = [
        _describe(section_comparison, styles, f"e{i}") for i, section_comparison in enumerate(comparisons)
    ]
    page = {
        "title": _join_titles([entry["title"] for entry in sections]),
        # not escaped, because nothing of the style sheet comes from a run
        "css": Markup(
            css_variables(LIGHT, DARK) + (template_folder / "page.css").read_text(encoding="utf-8")
        ),
        # not escaped, because nothing of the script comes from a run
        "script": Markup((template_folder / "page.js").read_text(encoding="utf-8").rstrip("\n")),
        "downloads": [
            (f"report.{kind}", f"data:text/plain;charset=utf-8,{quote(text)}")
            for kind, text in downloads.items()
        ],
        "sheet": sheet,
        "warning": comparison.several_experiments,
        "joined": [entry for entry in comparison.sweeps if entry.experiments > 1],
        "sections": [
            entry | {"width": width}
            for entry, width in zip(sections, card_widths(len(sections)), strict=True)
        ],
        "command": command,
        "versions": list(dict.fromkeys(_format_versions(run) for run in runs)),
        "folders": format_count(len(runs), "run folder"),
        "experiments": [experiment.name for experiment in experiments],
    }
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((template_folder / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(page=page).lstrip()


def _describe(comparison: Comparison, styles: Styles, prefix: str) -> dict[str, Any]:
    """Collect the values that the template shows of one experiment; identifiers in its drawings begin with ``prefix``."""
    (experiment,) = comparison.experiments
    groups, first_run = experiment.groups, experiment.groups[0].first
    settings_by_section = {section: first_run.section(section) for section in SECTIONS}
    # not escaped again, because the drawings are XML whose text is escaped
    figures_by_heading = [
        (
            heading,
            [
                (picture, Markup(to_svg(picture.figure, f"{prefix}-{i}-{k}", picture.tips)))
                for k, picture in enumerate(pictures)
            ],
        )
        for i, (heading, pictures) in enumerate(draw_all(experiment, styles))
    ]
    placed_pictures = {
        picture.slot: (picture, svg)
        for _, pictures in figures_by_heading
        for picture, svg in pictures
        if picture.slot
    }
    other_figures = [
        (heading, [pair for pair in pictures if not pair[0].slot]) for heading, pictures in figures_by_heading
    ]
    findings = comparison.findings[experiment.name]
    return {
        "anchor": prefix,
        "name": experiment.name,
        "title": experiment.title,
        "paper": on_one_line(first_run.config.get("paper") or ""),
        "setting": describe_setting(groups),
        "card": state_headline(experiment.families),
        "finding": findings[0],
        "findings": findings[1:],
        "warnings": comparison.warnings,
        "summary": comparison.summary,
        "sweeps": comparison.sweeps,
        "answers": comparison.answers,
        "tables": [*comparison.result_tables.values(), *comparison.ranks],
        "footnotes": comparison.footnotes,
        "result": placed_pictures.get("result"),
        "curve": placed_pictures.get("curve"),
        "figures": [
            (
                heading,
                *([pair for pair in pictures if pair[0].small is is_small] for is_small in (False, True)),
            )
            for heading, pictures in other_figures
            if pictures
        ],
        "figure_count": sum(len(pictures) for _, pictures in other_figures),
        "methods": [_method_settings(group) for group in groups],
        "shared": [
            (f"{section}.{key}", value_text(settings[key]))
            for section, settings in settings_by_section.items()
            for key in settings
        ],
    }


def card_widths(count: int) -> list[str]:
    """Choose widths of cards, a third, a half or all of a row, so that all rows are full and as even as possible."""
    rows = -(-count // 3)
    row_counts = [count // rows + (row < count % rows) for row in range(rows)] if rows else []
    return [("whole", "half", "third")[n - 1] for n in row_counts for _ in range(n)]


def _method_settings(group: RunGroup) -> tuple[str, str, list[tuple[str, str]]]:
    """List label, citation and settings of a method."""
    rows = [*group.first.section("method", "fields").items(), *group.vary]
    texts = [(on_one_line(name), value_text(value)) for name, value in rows]
    return group.label, on_one_line(group.first.section("method").get("citation") or ""), texts


def _format_versions(run: RunRecord) -> str:
    versions = sorted(run.section("versions").items())
    return (
        ", ".join(f"{on_one_line(name)} {on_one_line(version)}" for name, version in versions)
        or "not recorded"
    )


def _join_titles(titles: Sequence[str]) -> str:
    """Join the titles of the experiments: all of a few, otherwise the first and the number of the others."""
    distinct_titles = list(dict.fromkeys(titles))
    further_titles = len(distinct_titles) - MAX_TITLES
    return "; ".join(distinct_titles[:MAX_TITLES]) + (
        f"; and {further_titles} more" if further_titles > 0 else ""
    )
