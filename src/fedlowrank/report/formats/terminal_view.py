"""Renders a comparison for a terminal."""

from __future__ import annotations

from rich import console
from rich.console import RenderableType
from rich.text import Text

from ..run_comparison import Comparison
from ..tables.text_table import TerminalTable


def render_terminal(comparison: Comparison, all_tables: bool = False) -> RenderableType:
    """Render a comparison for a terminal: results, then warnings and findings, without footnotes.

    Args:
        comparison: comparison to show.
        all_tables: whether to show costs and all other tables before the results.
    """
    further_tables = (*comparison.result_tables.values(), *comparison.ranks) if all_tables else ()
    tables = [*further_tables, *comparison.sweeps, comparison.summary]
    renderables: list[RenderableType] = [TerminalTable(table) for table in tables]
    renderables += [Text(warning, style="yellow") for warning in comparison.warnings]
    renderables += [Text(finding, style="bold") for finding in comparison.first_findings]
    return console.Group(*renderables)
