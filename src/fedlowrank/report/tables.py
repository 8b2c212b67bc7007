"""The comparison table: built once as data, then written for a terminal, a page, Markdown or a spreadsheet."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from fedlowrank.record import RunRecord

from .groups import Group, Target, aggregate
from .rows import Row, row_of
from .units import NONE, number, percent, percent_pair, plain, seconds, si

Block = Literal["Accuracy", "Cost of one run", "To target"]
BLOCKS: tuple[Block, ...] = ("Accuracy", "Cost of one run", "To target")


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: heading.
        unit: unit of the numbers, empty if each carries its own.
        text: the cell of a row, as shown.
        block: the table it stands in.
        align: side that the cells are flush with.
        note: what the heading means, in one line; empty if it speaks for itself.
    """

    title: str
    unit: str
    text: Callable[[Row], str]
    block: Block = "Accuracy"
    align: Literal["left", "right"] = "right"
    note: str = ""

    @property
    def heading(self) -> str:
        """Title with unit."""
        return f"{self.title} / {self.unit}" if self.unit else self.title


@dataclass(frozen=True)
class Comparison:
    """The comparison of groups.

    Attributes:
        groups: one a row.
        rows: exact values of each row; the CSV holds all of them.
        columns: the columns shown; the method itself is not among them.
        targets: target of each experiment, by name.
        footnotes: ``(term, meaning)``, one line each.
    """

    groups: tuple[Group, ...]
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    targets: Mapping[str, Target]
    footnotes: tuple[tuple[str, str], ...]

    def block(self, name: Block) -> list[Column]:
        """Columns of one block."""
        return [column for column in self.columns if column.block == name]

    def caption(self, name: Block) -> str:
        """Heading of a block, with the target where there is one for all rows."""
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
    rows = tuple(row_of(group) for group in groups)
    targets = {group.name: group.target for group in groups}
    columns = tuple(_columns(rows))
    notes = [(column.title, column.note) for column in columns if column.note]
    for name, target in targets.items():
        where = f" in {name}" if len(targets) > 1 else ""
        if target.value is not None:
            said = f"mean test accuracy of {number(100 * target.value)} %{where}, {target.source}"
            notes.append(("target", said + "; costs are summed up to the first evaluated round that reached it"))
    notes.append(
        ("max test", "max test over rounds (as some libraries report) chooses on test examples; it is in the CSV only")
    )
    notes += [("paper", label) for label in dict.fromkeys(str(row["reference"]) for row in rows if row["reference"])]
    return Comparison(tuple(groups), rows, columns, targets, tuple(notes))


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
    """One Markdown table a block, with footnotes."""
    parts = []
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
    parts.append("\n".join(f"- *{_markdown(term)}*: {_markdown(said)}." for term, said in table.footnotes))
    return "\n\n".join(parts) + "\n"


def to_html(table: Comparison) -> str:
    """One HTML table a block, each in a box of its own that scrolls sideways; without footnotes."""
    parts = []
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
    return "\n".join(parts)


WIDE_ONLY = ("by examples", "parameters up", "parameters down")
"""Columns that the page, the Markdown and the CSV show, but a terminal of 80 characters has no room for."""


def render_terminal(table: Comparison) -> RenderableType:
    """Rich tables for a terminal, one a block, with footnotes below."""
    parts: list[RenderableType] = []
    for block in BLOCKS:
        columns = table.block(block)
        if not columns:
            continue
        # no lines between columns, and short headings on several lines: all must fit into 80 characters
        one = RichTable(title=Text(table.caption(block)), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        one.add_column("method", overflow="fold", min_width=10)
        columns = [c for c in columns if c.title not in WIDE_ONLY]
        for column in columns:
            one.add_column(
                Text(column.heading.replace(" / ", "\n/ ").replace(" ", "\n", 1)),
                justify=column.align,
                no_wrap=column.title != "status",
            )
        for row in table.rows:
            # Text, not markup: a name in brackets must stay a name.
            one.add_row(Text(table.label(row)), *(Text(column.text(row)) for column in columns))
        parts.append(one)
    parts += [Text(f"{term}: {said}.", style="dim") for term, said in table.footnotes]
    return Stack(*parts)


def _columns(rows: Sequence[Row]) -> Iterable[Column]:
    """The columns that these rows have something to say in."""
    yield Column(
        "last round", "%", lambda r: percent_pair(_float(r, "accuracy_last"), _float(r, "std_clients")),
        note="mean ± standard deviation over clients of test accuracy, each client counting once, at the last "
        "evaluated round; over several seeds, the means of both",
    )  # fmt: skip
    if any((_float(row, "seeds") or 0) > 1 for row in rows):
        yield Column("n", "", lambda r: str(r["seeds"]), note="seeds that were evaluated")
        yield Column(
            "over seeds", "%", lambda r: percent_pair(_float(r, "accuracy_last"), _float(r, "ci95_seeds")),
            note="mean ± half-width of its 95 % confidence interval, from Student's t with n − 1 degrees of freedom",
        )  # fmt: skip
    if any(row["accuracy_last_weighted"] != row["accuracy_last"] for row in rows):
        yield _percent(
            "by examples", "accuracy_last_weighted", "mean at the last round, clients weighted by test examples"
        )
    yield _percent("worst 10 %", "worst_tenth", "mean of the lowest tenth of clients, rounded up, at the last round")
    if _any(rows, "best_by_validation"):
        yield _percent(
            "best by validation", "best_by_validation",
            "test accuracy at the round of the highest mean validation accuracy, the earliest on ties",
        )  # fmt: skip
    yield _percent("last 10", "last_ten", "mean over the last ten evaluations, the one before training left out")
    others = dict.fromkeys(key for row in rows for key in row if key.startswith("series."))
    for key in others:
        name = key.removeprefix("series.")
        yield _percent(plain(name), key, f"test accuracy of the series {plain(name)} at the last evaluated round")
    if any(row["reference"] for row in rows):
        yield Column("paper", "%", _paper)
        yield Column(
            "difference", "points", _difference,
            note="last round minus the paper's number, in percentage points",
        )  # fmt: skip
    if any(row["status"] for row in rows):
        yield Column("status", "", lambda r: str(r["status"] or ""), align="left", note="runs that are not finished")
    costs: tuple[tuple[str, str, Callable[[float | None], str], str], ...] = (
        ("bytes up", "bytes_up", _bytes, "encoded messages from the clients, lost ones included; units of 1000"),
        ("bytes down", "bytes_down", _bytes, "encoded messages to the clients"),
        ("parameters up", "parameters_up", si, "floating-point elements in those messages"),
        ("parameters down", "parameters_down", si, ""),
        ("steps", "steps", si, "optimiser steps of all clients"),
        ("FLOPs", "flops", si, "floating-point operations of training, forward and backward, of all clients"),
        ("train", "seconds_train", seconds, "wall-clock time on the machine that ran it, by kind"),
        ("server", "seconds_server", seconds, ""),
        ("evaluate", "seconds_evaluate", seconds, ""),
    )
    for title, key, show, note in costs:
        yield _number(title, key, show, "Cost of one run", note)
    if any(row["target"] is not None for row in rows):
        yield Column("rounds", "", _rounds, "To target")
        yield _number("bytes", "target_bytes", _bytes, "To target", "")
        yield _number("parameters", "target_parameters", si, "To target", "")
        yield _number("FLOPs", "target_flops", si, "To target", "")
        yield _number("steps", "target_steps", si, "To target", "")
        yield _number("train + server", "target_seconds", seconds, "To target", "")


def _percent(title: str, key: str, note: str) -> Column:
    return Column(title, "%", lambda r: percent(_float(r, key)), note=note)


def _number(title: str, key: str, show: Callable[[float | None], str], block: Block, note: str) -> Column:
    return Column(title, "", lambda r: show(_float(r, key)), block, note=note)


def _bytes(value: float | None) -> str:
    return si(value, "B")


def _paper(row: Row) -> str:
    if row["reference"] is None or row["reference_percent"] is None:
        return "not converged" if row["reference_not_converged"] else NONE
    return f"{_float(row, 'reference_percent'):.2f}"


def _difference(row: Row) -> str:
    value = _float(row, "difference_points")
    return NONE if value is None else f"{value:+.2f}".replace("-", "−")


def _rounds(row: Row) -> str:
    reached, n = row["target_reached_seeds"], row["seeds"]
    if row["target"] is None or not n:
        return NONE
    if not reached:
        return "not reached"
    return number(_float(row, "target_round")) if reached == n else f"{reached} of {n} seeds"


def _any(rows: Sequence[Row], key: str) -> bool:
    return any(row.get(key) is not None for row in rows)


def _float(row: Row, key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def _exact(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _heading(column: Column) -> str:
    unit = f' <span class="unit">/ {escape(column.unit)}</span>' if column.unit else ""
    return escape(column.title).replace(" 10", "\u00a010") + unit


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", plain(text)).replace("<", "&lt;").replace(">", "&gt;")
