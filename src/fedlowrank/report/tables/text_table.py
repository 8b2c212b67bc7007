"""Tables of formatted text, with their forms in Markdown and in a terminal; the page has a template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from ...core.io.text import on_one_line

# maximum characters of a line in a terminal; a table that needs more continues in a further table
TERMINAL = 80
LABEL = 24  # maximum characters of a label in a terminal; a longer one takes several lines


class TableColumn(NamedTuple):
    """A column of a table."""

    title: str
    unit: str = ""  # unit of the numbers; empty if each carries its own
    note: str = ""  # explanation of the title for a footnote; empty if none is needed
    align: Literal["left", "right"] = "right"
    is_wide: bool = False  # whether a terminal leaves the column out if not all columns fit into one table

    @property
    def heading(self) -> str:
        """Title with unit."""
        return f"{self.title} / {self.unit}" if self.unit else self.title


@dataclass(frozen=True)
class TextTable:
    """A table of text."""

    title: str
    fields: tuple[str, ...]  # headings of the first columns, which name a row
    columns: tuple[TableColumn, ...]  # the other columns
    rows: tuple[tuple[str, ...], ...]  # cells of the rows, those of the fields first
    note: str = ""  # remark that a reader has to know
    experiments: int = 1  # number of experiments that the table joins
    bold: frozenset[tuple[int, int]] = frozenset()  # row and column of the cells in bold, counting the fields
    bold_note: str = ""  # meaning of bold


def escape_markdown(text: str) -> str:
    """Escape text so that Markdown shows it unchanged."""
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", on_one_line(text)).replace("<", "&lt;").replace(">", "&gt;")


def to_markdown(table: TextTable) -> str:
    """Format the table as Markdown, with its title above and its note below."""
    headings = [*table.fields, *(column.heading for column in table.columns)]
    rules = [":---"] * len(table.fields) + ["---:" if c.align == "right" else ":---" for c in table.columns]
    rows = [[_markdown_cell(table, y, x) for x in range(len(row))] for y, row in enumerate(table.rows)]
    lines = [f"| {' | '.join(row)} |" for row in (list(map(escape_markdown, headings)), rules, *rows)]
    note_lines = [
        line for text in (table.note, table.bold_note) if text for line in ("", escape_markdown(text))
    ]
    return "\n".join([f"**{escape_markdown(table.title)}**", "", *lines, *note_lines])


def _markdown_cell(table: TextTable, row: int, column: int) -> str:
    text = escape_markdown(table.rows[row][column])
    return f"**{text}**" if (row, column) in table.bold else text


@dataclass(frozen=True)
class TerminalTable:
    """Form of a table for a terminal: as many tables as the width of the console requires, then the note.

    Each of them has the fields in front. A console that is narrower than a number breaks its lines: no digit is left out.
    """

    table: TextTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        """Yield the tables for the width of a console."""
        yield from _fit_tables(self.table, min(TERMINAL, options.max_width))


def _fit_tables(table: TextTable, width: int) -> Iterator[Table | Text]:
    """Yield the tables of at most ``width`` characters a line, if their numbers fit, and the note."""
    for i, columns in enumerate(_split_columns(table, width)):
        title = Text(table.title + (", continued" if i else ""))
        rich_table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for field in table.fields:
            rich_table.add_column(
                Text(field), overflow="fold", no_wrap=bool(table.note), min_width=None if table.note else 10
            )
        for index in columns:
            column, is_wrapped = table.columns[index], _wraps(table, table.columns[index])
            rich_table.add_column(
                Text(column.title if table.note else _stack(column)), justify=column.align, overflow="fold",
                no_wrap=not is_wrapped, max_width=LABEL if table.note else None,
                # rich would cut what does not fit
                min_width=None if is_wrapped else max(map(len, _column_lines(table, index))),
            )  # fmt: skip
        cell_indices = [*range(len(table.fields)), *(len(table.fields) + index for index in columns)]
        for y, row in enumerate(table.rows):
            # Text and not markup, because a name in brackets must stay a name.
            rich_table.add_row(
                *(Text(row[x], style="bold" if (y, x) in table.bold else "") for x in cell_indices)
            )
        yield rich_table
    for text in (table.note, table.bold_note):
        if text:
            yield Text(text, style="dim")


def _wraps(table: TextTable, column: TableColumn) -> bool:
    return bool(table.note) or column.align == "left"


def _stack(column: TableColumn) -> str:
    # Short headings on several lines, so that all columns fit into 80 characters.
    return column.heading.replace(" / ", "\n/ ").replace(" ", "\n", 1)


def _column_lines(table: TextTable, index: int) -> list[str]:
    """Lines of the heading and the cells of a column."""
    column = table.columns[index]
    heading = [column.title] if table.note else _stack(column).splitlines()
    return [*heading, *(row[len(table.fields) + index] for row in table.rows)]


def _split_columns(table: TextTable, width: int) -> Sequence[Sequence[int]]:
    """Indices of the columns in each table of a terminal."""
    field_widths = [max(len(row[i]) for row in (table.fields, *table.rows)) for i in range(len(table.fields))]
    label_width = (
        sum(3 + width for width in field_widths) if table.note else max(10, min(LABEL, field_widths[0]))
    )
    available_width = width - 2 - label_width
    full_shares = _pack_columns(table, range(len(table.columns)), available_width)
    if len(full_shares) == 1:
        return full_shares
    return _pack_columns(
        table, [index for index, column in enumerate(table.columns) if not column.is_wide], available_width
    )


def _pack_columns(table: TextTable, indices: Iterable[int], available_width: int) -> list[list[int]]:
    """Divide columns of these indices among tables of at most ``available_width`` characters."""
    shares: list[list[int]] = []
    remaining_width = 0
    for index in indices:
        max_length = max(map(len, _column_lines(table, index)))
        width = 3 + (min(max_length, LABEL) if _wraps(table, table.columns[index]) else max_length)
        if not shares or width > remaining_width:
            shares.append([])
            remaining_width = available_width
        shares[-1].append(index)
        remaining_width -= width
    return shares
