"""Pages of results: people write the text above the tables, and scripts write the tables."""

from __future__ import annotations

from pathlib import Path


def replace_tables(page: Path, title: str, first_line: str, tables: str) -> None:
    """Write tables on a page, in place of everything from the line on with which they begin.

    The text above stays as it is. If the page has no such line, the tables are written below its text.

    Args:
        page: the file; a new one gets the title alone as its text.
        title: heading of a new page.
        first_line: what the first line of the tables begins with.
        tables: Markdown that begins with ``first_line``.
    """
    old = page.read_text() if page.exists() else f"# {title}\n"
    above = ("\n" + old).partition("\n" + first_line)[0].strip("\n")
    page.write_text(f"{above}\n\n{tables}")
