"""Formats a comparison as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from ..run_comparison import Comparison
from ..sample_texts import AnswerRow
from ..tables.text_table import escape_markdown, to_markdown


def comparison_markdown(comparison: Comparison) -> str:
    """Format findings and results as Markdown, then warnings, further tables, footnotes and answers."""
    results = [*comparison.sweeps, comparison.summary]
    blocks = [f"> {comparison.several_experiments}"] if comparison.several_experiments else []
    blocks += [*map(escape_markdown, comparison.first_findings), *map(to_markdown, results)]
    blocks += [f"> {escape_markdown(warning)}" for warning in comparison.warnings]
    blocks += map(to_markdown, comparison.tables[len(results) :])
    footnotes = [
        f"- *{escape_markdown(term)}*: {escape_markdown(meaning)}." for term, meaning in comparison.footnotes
    ]
    return "\n\n".join([*blocks, "\n".join(footnotes)]) + "\n" + _answers_markdown(comparison.answers)


def _answers_markdown(rows: Sequence[AnswerRow]) -> str:
    """Format the answers as a table; empty if there are none."""
    if not rows:
        return ""
    lines = ["", "## Answers", "", "| prompt | model | answer |", "|:---|:---|:---|"]
    cells = [[escape_markdown(text) for text in row] for row in rows]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells), ""])
