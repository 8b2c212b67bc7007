"""The command ``list``. Without a method it reads a catalog and imports no torch, so that it answers at once."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from .terminal import OUT

CATALOG = Path(__file__).with_name("catalog.json")
"""What :func:`fedlowrank.cli.catalog.build_catalog` finds; ``make catalog`` writes it, a test compares it."""


def show_list(method: str | None) -> int:
    """Print every method, model and source of data, or the paper and the fields of one method."""
    if method is not None:
        from .catalog import show_method

        return show_method(method)
    for section in json.loads(CATALOG.read_text()):
        table = Table(*section["columns"], title=section["title"])
        for row in section["rows"]:
            table.add_row(*row)
        OUT.print(table)
    OUT.print("`fedlowrank list METHOD` shows a method's paper, algorithm and fields.")
    return 0
