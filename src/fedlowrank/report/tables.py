"""The comparison table: built once as data, then written for a terminal, a page, Markdown or a spreadsheet."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from rich.box import SIMPLE_HEAD
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from ..simulation.records import RunRecord
from .ablation import Ablation, ablations
from .adapters import adapter_row, rank_tables
from .columns import BLOCKS, Block, Column, columns_of, measures_of
from .groups import Group, Target, aggregate
from .routing import collapse_notes
from .rows import Row, row_of
from .sizes import sizes_differ
from .units import number, plain


@dataclass(frozen=True)
class Comparison:
    """The comparison of groups.

    Attributes:
        groups: one a row.
        rows: exact values of each row; the CSV holds all of them.
        columns: the columns shown; the method itself is not among them.
        targets: target of each experiment, by name.
        footnotes: ``(term, meaning)``, one line each.
        ablations: results against what was varied.
        ranks: results by rank of the client.
        warnings: what a reader must not miss.
    """

    groups: tuple[Group, ...]
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    targets: Mapping[str, Target]
    footnotes: tuple[tuple[str, str], ...]
    ablations: tuple[Ablation, ...] = ()
    warnings: tuple[str, ...] = ()
    ranks: tuple[Ablation, ...] = ()

    def block(self, name: Block) -> list[Column]:
        """Columns of one block."""
        return [column for column in self.columns if column.block == name]

    def caption(self, name: Block) -> str:
        """Heading of a block, with the target where there is one for all rows."""
        if name in ("Accuracy", "Test loss"):
            accuracy, loss = measures_of(self.rows)
            return accuracy.title if name == "Accuracy" else loss.title
        if name != "To target":
            return name
        values = {target.value for target in self.targets.values()}
        value = next(iter(values)) if len(values) == 1 else None
        return (
            f"Until the target of {number(100 * value)} % was reached"
            if value is not None
            else "Until the target was reached"
        )

    def label(self, row: Row) -> str:
        """What a row is called: the method, after the experiment if there are several."""
        return f"{row['experiment']}: {row['label']}" if len(self.targets) > 1 else str(row["label"])


def comparison(runs: Sequence[RunRecord], target: float | None = None) -> Comparison:
    """Compare runs, one row for each method and setting, over its seeds.

    Args:
        runs: in the order in which methods shall appear.
        target: accuracy in (0, 1] for the columns "to target"; None for the runs' own, else the largest whole percent
            that all of them reached.

    Raises:
        ConfigError: if the target is out of range.
    """
    return compare(aggregate(runs, target))


def compare(groups: Sequence[Group]) -> Comparison:
    """Compare groups that were made before."""
    rows = tuple({**row_of(group), **adapter_row(group)} for group in groups)
    targets = {group.name: group.target for group in groups}
    columns = tuple(columns_of(rows, sizes_differ(groups)))
    notes = [(column.title, column.note) for column in columns if column.note]
    for name, target in targets.items():
        where = f" in {name}" if len(targets) > 1 else ""
        if target.value is not None:
            said = f"mean {measures_of(rows)[0].noun} of {number(100 * target.value)} %{where}, {target.source}"
            notes.append(("target", said + "; costs are summed up to the first evaluated round that reached it"))
    if any(row["accuracy_last"] is not None for row in rows) or not any(row["judged_by"] for row in rows):
        notes.append(
            (
                "max test",
                "max test over rounds (as some libraries report) chooses on test examples; it is in the CSV only",
            )
        )
    notes += [("paper", label) for label in dict.fromkeys(str(row["reference"]) for row in rows if row["reference"])]
    return Comparison(
        tuple(groups), rows, columns, targets, tuple(notes), tuple(ablations(groups)), tuple(collapse_notes(groups)),
        tuple(rank_tables(groups)),
    )  # fmt: skip


def to_csv(table: Comparison) -> str:
    """All exact values: fractions, bytes and counts unrounded, one row a group, empty where there is no value.

    Floats are written with as many digits as reading them back exactly takes.
    """
    keys = list(dict.fromkeys(key for row in table.rows for key in row))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(keys)
    for row in table.rows:
        writer.writerow(["" if row.get(key) is None else _exact(row[key]) for key in keys])
    return out.getvalue()


def to_markdown(table: Comparison) -> str:
    """One Markdown table an ablation and a block, with footnotes; warnings come first."""
    parts = [f"> {_markdown(said)}" for said in table.warnings]
    parts += map(_ablation_markdown, table.ablations)
    for block in BLOCKS:
        columns = table.block(block)
        if not columns:
            continue
        heads = ["method", *(_markdown(column.heading) for column in columns)]
        rules = [":---", *("---:" if column.align == "right" else ":---" for column in columns)]
        lines = [f"**{_markdown(table.caption(block))}**", "", _pipes(heads), _pipes(rules)]
        lines += [
            _pipes([_markdown(table.label(row)), *(_markdown(column.text(row)) for column in columns)])
            for row in table.rows
        ]
        parts.append("\n".join(lines))
    parts += map(_ablation_markdown, table.ranks)
    parts.append("\n".join(f"- *{_markdown(term)}*: {_markdown(said)}." for term, said in table.footnotes))
    return "\n\n".join(parts) + "\n"


def _ablation_markdown(one: Ablation) -> str:
    heads = [_markdown(name) for name in (*one.fields, *one.columns)]
    lines = [f"**{_markdown(one.title)}**", "", _pipes(heads)]
    lines.append(_pipes([":---"] * len(one.fields) + ["---:"] * len(one.columns)))
    lines += [_pipes([_markdown(text) for text in (*values, *cells)]) for values, cells in one.rows]
    return "\n".join([*lines, "", _markdown(one.note)])


def to_html(table: Comparison) -> str:
    """One HTML table an ablation and a block, each in a box of its own that scrolls sideways; without footnotes."""
    parts = [ablation_html(one) for one in table.ablations]
    for block in BLOCKS:
        columns = table.block(block)
        if not columns:
            continue
        caption = escape(table.caption(block))
        head = "".join(f'<th scope="col" class="{column.align}">{_heading(column)}</th>' for column in columns)
        body = []
        for row in table.rows:
            cells = "".join(f'<td class="{column.align}">{escape(column.text(row))}</td>' for column in columns)
            label = escape(table.label(row)).replace(" = ", "\u00a0=\u00a0")
            body.append(f'<tr><th scope="row">{label}</th>{cells}</tr>')
        parts.append(
            f'<div class="scroll" role="region" tabindex="0" aria-label="{caption}"><table><caption>{caption}</caption>'
            f'<thead><tr><th scope="col">method</th>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
        )
    parts += map(ablation_html, table.ranks)
    return "\n".join(parts)


def ablation_html(table: Ablation) -> str:
    """An ablation as an HTML table, in a box of its own that scrolls sideways, with its note."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.fields)
    head += "".join(f'<th scope="col" class="right">{escape(name)}</th>' for name in table.columns)
    body = [
        "<tr>"
        + "".join(f'<th scope="row">{escape(text)}</th>' for text in values)
        + "".join(f'<td class="right">{escape(text)}</td>' for text in cells)
        + "</tr>"
        for values, cells in table.rows
    ]
    caption = escape(table.title)
    return (
        f'<div class="scroll ablation" role="region" tabindex="0" aria-label="{caption}"><table><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
        f'<p class="sub">{escape(table.note)}</p>'
    )


TERMINAL = 80
"""Characters of a line in a terminal; a block that needs more goes on in a further table."""

LABEL = 24
"""Characters of a label in a terminal; a longer one takes several lines."""


def render_terminal(table: Comparison) -> RenderableType:
    """Rich tables for a terminal, one an ablation and a block or as many as its width takes, with footnotes below."""
    parts: list[RenderableType] = [made for one in table.ablations for made in _ablation(one)]
    labels = [table.label(row) for row in table.rows]
    for block in BLOCKS:
        columns = [column for column in table.block(block) if not column.wide]
        for i, some in enumerate(_fitting(table, columns, min(LABEL, max(map(len, labels), default=0)))):
            # no lines between columns, and short headings on several lines: all must fit into 80 characters
            caption = table.caption(block) + (", continued" if i else "")
            one = RichTable(title=Text(caption), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
            one.add_column("method", overflow="fold", min_width=10)
            for column in some:
                one.add_column(Text(_stacked(column)), justify=column.align, no_wrap=column.title != "status")
            for row, label in zip(table.rows, labels, strict=True):
                # Text, not markup: a name in brackets must stay a name.
                one.add_row(Text(label), *(Text(column.text(row)) for column in some))
            parts.append(one)
    parts += [made for one in table.ranks for made in _ablation(one)]
    parts += [Text(f"{term}: {said}.", style="dim") for term, said in table.footnotes]
    parts += [Text(said, style="yellow") for said in table.warnings]
    return Stack(*parts)


def _ablation(table: Ablation) -> list[RenderableType]:
    """As many tables as the width of a terminal takes, the fields in front of each."""
    wide = sum(3 + max(len(name), *(len(values[i]) for values, _ in table.rows)) for i, name in enumerate(table.fields))
    shares: list[list[int]] = []
    left = 0
    for i, name in enumerate(table.columns):
        # a long head takes several lines
        need = 3 + max(min(len(name), LABEL), *(len(cells[i]) for _, cells in table.rows))
        if not shares or need > left:
            shares.append([])
            left = TERMINAL - 2 - wide
        shares[-1].append(i)
        left -= need
    made: list[RenderableType] = []
    for place, share in enumerate(shares):
        title = table.title + (", continued" if place else "")
        one = RichTable(title=Text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for name in table.fields:
            one.add_column(Text(name), no_wrap=True)
        for i in share:
            one.add_column(Text(table.columns[i]), justify="right", overflow="fold", max_width=LABEL)
        for values, cells in table.rows:
            one.add_row(*map(Text, values), *(Text(cells[i]) for i in share))
        made.append(one)
    return [*made, Text(table.note, style="dim")]


def _fitting(table: Comparison, columns: Sequence[Column], label: int) -> list[list[Column]]:
    """Columns of a block shared out over tables that fit into the terminal, in order."""
    found: list[list[Column]] = []
    left = 0
    for column in columns:
        lines = [*_stacked(column).splitlines(), *(column.text(row) for row in table.rows)]
        # a status may take several lines
        width = 3 + (12 if column.title == "status" else max(map(len, lines)))
        if not found or width > left:
            found.append([])
            left = TERMINAL - 2 - max(label, 10)
        found[-1].append(column)
        left -= width
    return found


def _stacked(column: Column) -> str:
    return column.heading.replace(" / ", "\n/ ").replace(" ", "\n", 1)


def _exact(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _heading(column: Column) -> str:
    unit = f' <span class="unit">/ {escape(column.unit)}</span>' if column.unit else ""
    return escape(column.title).replace(" 10", "\u00a010") + unit


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", plain(text)).replace("<", "&lt;").replace(">", "&gt;")
