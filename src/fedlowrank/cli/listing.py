"""The command ``list``. Without a method it reads a catalog and imports no torch, so it answers at once."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from .terminal import OUT

CATALOG = Path(__file__).with_name("catalog.json")
"""What :func:`fedlowrank.cli.catalog.build_catalog` finds; ``make catalog`` writes it, a test compares it."""


TRUST = "What can be done with the updates of a method"
"""Title of the table of ``list --trust``."""


def show_list(method: str | None, trust: bool) -> int:
    """Print every method, model and source of data, or the paper and the fields of one method.

    Args:
        method: whose fields are shown, or None.
        trust: print instead which methods go with secure sums, robust means, privacy and compression.
    """
    if method is not None:
        from .catalog import show_method

        return show_method(method)
    for section in json.loads(CATALOG.read_text()):
        if (section["title"] == TRUST) != trust:
            continue
        table = Table(*section["columns"], title=section["title"])
        for row in section["rows"]:
            table.add_row(*row)
        OUT.print(table)
    if trust:
        OUT.print(
            "The bounds of norms and the selection of replies (norm_bound, krum, multi_krum) go with every "
            "method."
        )
        return 0
    OUT.print("`fedlowrank list METHOD` shows a method's paper, algorithm and fields.")
    return 0
