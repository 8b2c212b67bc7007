"""The report as one HTML page that needs nothing but itself: no scripts, no fonts, no pictures from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from ..core.errors import ConfigError
from ..simulation.records import RunRecord
from . import words
from .ablation import ablations
from .css import CSS
from .gallery import gallery, method_styles
from .groups import PARTS, Group, aggregate, experiment
from .style import Picture, Style, to_svg
from .summary import part
from .tables import ablation_html, compare, to_html
from .units import plain


def page(runs: Sequence[RunRecord], target: float | None = None, command: str = "") -> str:
    """The whole page.

    Args:
        runs: in the order in which methods shall appear; runs of several experiments get a section each.
        target: see :func:`fedlowrank.report.comparison`.
        command: command line that makes these runs again; empty leaves it out.

    Raises:
        ConfigError: if there is no run or the target is out of range.
    """
    if not runs:
        raise ConfigError("a report needs at least one run")
    groups = aggregate(runs, target)
    names = list(dict.fromkeys(group.name for group in groups))
    looks = method_styles(groups)
    titles = [_title(next(group for group in groups if group.name == name)) for name in names]
    title = _together(titles)
    body = [f"<header><h1>{escape(title)}</h1></header>", "<main>"]
    warning = words.mixed(runs)
    if warning:
        body.append(_note([warning]))
    joined = [one for one in ablations(groups) if one.experiments > 1]
    if joined:
        body += [
            '<section class="experiment"><h2>Ablations over experiments</h2>',
            *map(ablation_html, joined),
            "</section>",
        ]
    for i, (name, own) in enumerate(zip(names, titles, strict=True)):
        some = [group for group in groups if group.name == name]
        body.append(_experiment(some, looks, f"e{i}", own if len(names) > 1 else ""))
    body += [_reproduce(runs, command), "</main>"]
    return (
        '<!DOCTYPE html>\n<html lang="en-GB"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _experiment(groups: Sequence[Group], looks: dict[str, Style], name: str, title: str) -> str:
    table = compare(groups)
    paper = plain(groups[0].first.config.get("paper") or "")
    head = f"<h2>{escape(title)}</h2>" if title else ""
    sub = f"Experiment {groups[0].name}" + (f", after {paper}" if paper else "")
    parts = [
        '<section class="experiment">',
        head,
        f'<p class="sub">{escape(sub)}</p>',
        f"<p>{escape(words.what_was_run(groups))}</p>",
        *_finding(words.finding(groups)),
        _note(words.notes(groups)),
        "<h3>Comparison</h3>",
        to_html(table),
        '<dl class="footnotes">',
        *(f"<dt>{escape(term)}</dt><dd>{escape(said)}.</dd>" for term, said in table.footnotes),
        "</dl>",
        "<h3>Figures</h3>",
        _figures(groups, looks, name),
        "<h3>Settings</h3>",
        '<p class="sub on-paper">Only settings that were open on the page are printed. All are in the run folders.</p>',
        *(_method(group) for group in groups),
        _shared(groups[0].first),
        "</section>",
    ]
    return "\n".join(text for text in parts if text)


def _finding(said: Sequence[str]) -> list[str]:
    rest = "".join(f"<li>{escape(one)}</li>" for one in said[1:])
    return [f'<p class="finding">{escape(said[0])}</p>', f"<ul>{rest}</ul>" if rest else ""]


def _figures(groups: Sequence[Group], looks: dict[str, Style], name: str) -> str:
    parts = []
    for i, (text, drawn) in enumerate(gallery(groups, looks)):
        if text:
            parts.append(f"<h4>{escape(text)}</h4>")
        parts.append(_grid([one for one in drawn if not one.small], f"{name}-{i}"))
        parts.append(_grid([one for one in drawn if one.small], f"{name}-{i}-m"))
    return "\n".join(text for text in parts if text) or "<p>No run was evaluated, so there is nothing to draw.</p>"


def _grid(drawn: Sequence[Picture | None], name: str) -> str:
    kept = [one for one in drawn if one is not None]
    if not kept:
        return ""
    inner = "\n".join(_figure(one, f"{name}-{i}") for i, one in enumerate(kept))
    return f'<div class="figures{" small" if kept[0].small else ""}">\n{inner}\n</div>'


def _figure(picture: Picture, name: str) -> str:
    # The image is the box around the drawing: as an image, the figure would hide its own caption from a screen reader.
    return (
        f'<figure><div role="img" aria-label="{escape(picture.alt)}">{to_svg(picture.figure, name)}</div>'
        f"<figcaption><b>{escape(picture.title)}.</b> {escape(picture.caption)}</figcaption></figure>"
    )


def _method(group: Group) -> str:
    method = part(group.first.config, "method")
    cited = plain(method.get("citation") or "")
    rows = [(key, value) for key, value in part(method, "fields").items()]
    rows += [(key, value) for key, value in group.vary]
    return (
        f"<details><summary>{escape(group.label)}</summary>"
        + (f'<p class="sub">{escape(cited)}</p>' if cited else "")
        + (_pairs(rows) if rows else "<p>No settings of its own.</p>")
        + "</details>"
    )


def _shared(run: RunRecord) -> str:
    rows = [(f"{name}.{key}", value) for name in PARTS
            for key, value in part(run.config, name).items()]  # fmt: skip
    return f"<details><summary>Data, partition, model and run (first run)</summary>{_pairs(rows)}</details>"


def _pairs(rows: Sequence[tuple[str, object]]) -> str:
    inner = "".join(
        f'<tr><th scope="row">{escape(plain(key))}</th><td class="left">{escape(words.flat(value))}</td></tr>'
        for key, value in rows
    )
    box = '<div class="scroll settings" role="region" tabindex="0" aria-label="settings">'
    return f"{box}<table><tbody>{inner}</tbody></table></div>"


def _reproduce(runs: Sequence[RunRecord], command: str) -> str:
    versions = list(dict.fromkeys(json.dumps(part(run.config, "versions"), sort_keys=True) for run in runs))
    texts = [
        ", ".join(f"{plain(k)} {plain(v)}" for k, v in json.loads(one).items()) or "not recorded" for one in versions
    ]
    parts = ['<section class="reproduce"><h2>How to reproduce</h2>']
    if command:
        parts.append(f"<pre>{escape(command)}</pre>")
    if len(texts) > 1:
        parts.append(_note(["The runs were made with different software versions."]))
    parts += [f"<p>Versions: {escape(text)}.</p>" for text in texts]
    several = list(dict.fromkeys(experiment(run) for run in runs))
    parts.append(
        f'<p class="sub">Made from {words.count(len(runs), "run folder")} of {escape(", ".join(several))}. '
        "The exact numbers are in the CSV file next to this page.</p></section>"
    )
    return "\n".join(parts)


def _note(said: Sequence[str]) -> str:
    if not said:
        return ""
    if len(said) == 1:
        return f'<aside class="note" role="note"><p>{escape(said[0])}</p></aside>'
    inner = "".join(f"<li>{escape(one)}</li>" for one in said)
    return f'<aside class="note" role="note"><p>Before reading the numbers:</p><ul>{inner}</ul></aside>'


def _title(group: Group) -> str:
    return plain(group.first.config.get("title") or group.name)


def _together(titles: Sequence[str], most: int = 3) -> str:
    """Titles of the experiments as one: all of a few, else the first and how many more there are."""
    distinct = list(dict.fromkeys(titles))
    more = len(distinct) - most
    return "; ".join(distinct[:most]) + (f"; and {more} more" if more > 0 else "")
