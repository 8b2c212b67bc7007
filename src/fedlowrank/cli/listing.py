"""The commands ``list`` and ``fields``. Without a method ``list`` reads a catalog and imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from ..core.errors import ConfigError, did_you_mean
from .terminal import OUT, strip_markup

CATALOG = Path(__file__).with_name("catalog.json")
"""Output of :func:`fedlowrank.cli.catalog.build_catalog`; ``make catalog`` writes the file, a test compares it."""


def show_list(name: str | None, trust: bool) -> int:
    """Print every method, model and source of data, or those of one kind, or one of them.

    Args:
        name: name of a method, whose paper and fields are shown; of a table, such as ``models``; of an entry in a
            table; or None.
        trust: whether to print instead which methods go with secure sums, robust means, privacy and compression.

    Raises:
        ConfigError: if there is no such name.
    """
    all_sections = json.loads(CATALOG.read_text(encoding="utf-8"))
    if trust and name is None:
        _print_tables([section for section in all_sections if section["trust"]])
        OUT.print(
            "The bounds of norms and the selection of replies (norm_bound, krum, multi_krum) go with every "
            "method."
        )
        return 0
    sections = [section for section in all_sections if not section["trust"]]
    if name is None:
        _print_tables(sections)
        OUT.print("`fedlowrank list METHOD` shows a method's paper, algorithm and fields.")
        return 0
    names = [row[0] for section in sections for row in section["rows"]]
    methods = [row[0] for row in sections[0]["rows"]]
    if name in methods or ":" in name:
        from .catalog import show_method

        return show_method(name)
    sections_by_kind = {section["title"].split()[0].lower(): section for section in sections}
    valid_names = [*names, *sections_by_kind]
    if name not in valid_names:
        # a list of all names would be a table of its own
        suggestion = did_you_mean(name, valid_names).partition("Known: ")[0] or "`fedlowrank list` shows all."
        raise ConfigError(f"there is no method, model or data source {name!r}. {suggestion}")
    selected_sections = (
        [sections_by_kind[name]]
        if name in sections_by_kind
        else [_keep_rows(section, name) for section in sections]
    )
    _print_tables([section for section in selected_sections if section["rows"]])
    OUT.print("`fedlowrank fields` lists the fields of every section of an experiment file.")
    return 0


def show_fields(section: str | None) -> int:
    """Print the fields of an experiment file, their defaults and their meanings.

    Args:
        section: name of a section, table or field, such as ``run.privacy``; None for all.

    Raises:
        ConfigError: if nothing has this name.
    """
    from ..config.reading.field_help import format_field_help

    print(strip_markup(format_field_help((section or "").strip("[] "))))
    return 0


def _keep_rows(section: dict[str, Any], name: str) -> dict[str, Any]:
    return {**section, "rows": [row for row in section["rows"] if row[0] == name]}


def _print_tables(sections: list[dict[str, Any]]) -> None:
    for section in sections:
        table = Table(*section["columns"], title=section["title"])
        for row in section["rows"]:
            table.add_row(*map(strip_markup, row))
        OUT.print(table)
