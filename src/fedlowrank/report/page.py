"""The files of a report: one HTML page that needs nothing but itself, and its tables as Markdown and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from ..core.errors import ConfigError
from ..core.files import as_checkpoint_error, write_atomically
from ..simulation.records import RunRecord
from .formats import one_line
from .frame import section
from .gallery import draw_all, method_styles
from .groups import SECTIONS, Group, by_experiment, experiment_name, group_runs, value_text
from .sentences import count, describe_setting, find_warnings, state_findings, warn_of_mixture
from .style import DARK, LIGHT, Styles, css_variables, to_svg
from .tables import Comparison, compare, to_csv, to_markdown

TITLES = 3  # most experiments that the title of a page names


def write_report(
    runs: Sequence[RunRecord], out: Path, *, target: float | None = None, command: str = ""
) -> Comparison:  # fmt: skip
    """Write a report as an HTML page, with its tables as Markdown and CSV next to it.

    Equal runs give equal files, byte for byte. Returns the comparison that the files show.

    Args:
        runs: in the order in which methods appear; runs of several experiments get a section each.
        out: the page, such as ``report.html``; ``report.md`` and ``report.csv`` are written next to it.
        target: accuracy in (0, 1] for the columns "to target"; None for the runs' own, else the largest whole
            percent that all of them reached.
        command: command line that makes these runs again, for the reader.

    Raises:
        ConfigError: if there is no run or the target is out of range.
        CheckpointError: if a file cannot be written.
    """
    if not runs:
        raise ConfigError("a report needs at least one run")
    groups = group_runs(runs, target)
    table, warning = compare(groups), warn_of_mixture(groups)
    text = render_page(table, runs, command)
    markdown = (f"> {warning}\n\n" if warning else "") + to_markdown(table)
    with as_checkpoint_error(f"cannot make {out.parent}"):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, text.encode())
    write_atomically(out.with_suffix(".md"), markdown.encode())
    write_atomically(out.with_suffix(".csv"), to_csv(table).encode())
    return table


def render_page(table: Comparison, runs: Sequence[RunRecord], command: str) -> str:
    """The page as HTML; ``runs`` are all of them, repeated seeds included."""
    here, styles, groups = files(__package__), method_styles(table.groups), table.groups
    experiments = by_experiment(groups)
    parts = [table] if len(experiments) == 1 else [compare(members) for members in experiments.values()]
    sections = [_describe(part, styles, f"e{i}") for i, part in enumerate(parts)]
    page = {
        "title": _join_titles([one["title"] for one in sections]),
        # Nothing of the style sheet comes from a run.
        "css": Markup(css_variables(LIGHT, DARK) + (here / "page.css").read_text()),
        "warning": warn_of_mixture(groups),
        "joined": [one for one in table.sweeps if one.experiments > 1],
        "sections": sections,
        "command": command,
        "versions": list(dict.fromkeys(_format_versions(run) for run in runs)),
        "folders": count(len(runs), "run folder"),
        "experiments": list(dict.fromkeys(map(experiment_name, runs))),
    }
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((here / "page.html.j2").read_text())
    return template.render(page=page).lstrip()


def _describe(table: Comparison, styles: Styles, prefix: str) -> dict[str, Any]:
    """What the template shows of one experiment; identifiers within its drawings begin with ``prefix``."""
    groups, config = table.groups, table.groups[0].first.config
    name = groups[0].experiment
    shared = {part: section(config, part) for part in SECTIONS}
    figures = []
    for i, (heading, pictures) in enumerate(draw_all(groups, styles)):
        # Markup: the drawings are XML with all text escaped.
        drawn = [(one, Markup(to_svg(one.figure, f"{prefix}-{i}-{k}"))) for k, one in enumerate(pictures)]
        large, small = ([one for one in drawn if one[0].small is is_small] for is_small in (False, True))
        if drawn:
            figures.append((heading, large, small))
    return {
        "name": name,
        "title": one_line(config.get("title") or name),
        "paper": one_line(config.get("paper") or ""),
        "setting": describe_setting(groups),
        "findings": state_findings(groups),
        "warnings": find_warnings(groups),
        "tables": table.tables,
        "footnotes": table.footnotes,
        "figures": figures,
        "methods": [_method_settings(group) for group in groups],
        "shared": [(f"{part}.{key}", value_text(own[key])) for part, own in shared.items() for key in own],
    }


def _method_settings(group: Group) -> tuple[str, str, list[tuple[str, str]]]:
    """Label, citation and settings of a method."""
    method = section(group.first.config, "method")
    rows = [*section(method, "fields").items(), *group.vary]
    texts = [(one_line(name), value_text(value)) for name, value in rows]
    return group.label, one_line(method.get("citation") or ""), texts


def _format_versions(run: RunRecord) -> str:
    versions = sorted(section(run.config, "versions").items())
    return ", ".join(f"{one_line(name)} {one_line(version)}" for name, version in versions) or "not recorded"


def _join_titles(titles: Sequence[str]) -> str:
    """Titles of the experiments as one: all of a few, else the first and how many more there are."""
    distinct = list(dict.fromkeys(titles))
    more = len(distinct) - TITLES
    return "; ".join(distinct[:TITLES]) + (f"; and {more} more" if more > 0 else "")
