"""Tables of a comparison as LaTeX, with the rules of the package booktabs."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.io.text import on_one_line
from ..number_formats import MISSING
from ..run_comparison import Comparison
from ..tables.text_table import TextTable

_CHARACTERS = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "±": r"$\pm$", "−": "$-$", "×": r"$\times$", "²": r"\textsuperscript{2}",
    "≥": r"$\geq$", "≤": r"$\leq$", "ε": r"$\varepsilon$", "δ": r"$\delta$", "α": r"$\alpha$", "β": r"$\beta$",
    "λ": r"$\lambda$", "μ": r"$\mu$", "π": r"$\pi$", "ρ": r"$\rho$", "σ": r"$\sigma$", "τ": r"$\tau$",
    "η": r"$\eta$", "θ": r"$\theta$", "γ": r"$\gamma$", MISSING: "--", "…": r"\dots{}",
}  # fmt: skip
"""LaTeX code for characters that are LaTeX commands or that its standard fonts lack."""


def escape_latex(text: str) -> str:
    """Escape text so that LaTeX prints it unchanged."""
    return "".join(_CHARACTERS.get(character, character) for character in on_one_line(text))


def to_latex(comparison: Comparison, all_tables: bool = False) -> str:
    r"""Format the results of a comparison for a paper that has ``\usepackage{booktabs}``.

    Args:
        comparison: comparison to format.
        all_tables: whether to format all other tables, too.
    """
    tables = comparison.tables if all_tables else [comparison.summary]
    notes = {column.title: column.note for table in tables for column in table.columns if column.note}
    lines = [f"% {on_one_line(title)}: {on_one_line(note)}" for title, note in notes.items()]
    package_comment = "% needs \\usepackage{booktabs}; a wide table also \\small or \\resizebox"
    return "\n".join([package_comment, *lines, "", *map(_format_table, tables)])


def _format_table(table: TextTable) -> str:
    headings = [*table.fields, *(column.heading for column in table.columns)]
    alignment = "l" * len(table.fields) + "".join("r" if c.align == "right" else "l" for c in table.columns)
    rows = [
        [_format_cell(cell, (y, x) in table.bold) for x, cell in enumerate(row)]
        for y, row in enumerate(table.rows)
    ]
    caption = ". ".join(text.rstrip(".") for text in (table.title, table.note, table.bold_note) if text)
    return "\n".join(
        [
            r"\begin{table}", r"\centering", rf"\caption{{{escape_latex(caption)}.}}", rf"\begin{{tabular}}{{{alignment}}}",
            r"\toprule", _join_cells(map(escape_latex, headings)), r"\midrule", *map(_join_cells, rows), r"\bottomrule",
            r"\end{tabular}", r"\end{table}", "",
        ]
    )  # fmt: skip


def _format_cell(text: str, is_bold: bool) -> str:
    return rf"\textbf{{{escape_latex(text)}}}" if is_bold else escape_latex(text)


def _join_cells(cells: Iterable[str]) -> str:
    # LaTeX would read a bracket at the beginning of a row as an argument of the line end before it
    first_cell, *other_cells = cells
    return (
        " & ".join([f"{{{first_cell}}}" if first_cell.startswith("[") else first_cell, *other_cells]) + r" \\"
    )
