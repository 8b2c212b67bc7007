"""The table that a reader sees first: each result with its interval, and how it compares with the best."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ..number_formats import MISSING, format_p, format_si
from ..statistics.groups import RunGroup
from ..statistics.measures import Measure
from ..statistics.paired import Family, Versus
from ..statistics.run_statistics import format_estimate
from .sweeps import bold_note
from .text_table import TableColumn, TextTable

MODES_NOTE = (
    "where seeds succeed or fail, with a wide gap between, how many succeed and the worst result of these "
    "instead of the mean; the CSV has both"
)
Cells = tuple[TableColumn, list[str]]


def make_table(title: str, labels: Sequence[str], columns: Sequence[Cells]) -> TextTable:
    """A table with one row a label."""
    rows = zip(labels, *(cells for _, cells in columns), strict=True)
    return TextTable(title, ("method",), tuple(column for column, _ in columns), tuple(rows))


def make_summary(frame: pd.DataFrame, families: Sequence[Family], labels: Sequence[str]) -> TextTable:
    """Result, that of the best round by validation, difference from the best, its p-value, and bytes of each group.

    Args:
        frame: exact values, one row a group, in the order of ``labels``.
        families: of all groups.
        labels: how the rows are named.
    """
    measures = list(dict.fromkeys(family.measure for family in families))
    unit = measures[0].unit if len(measures) == 1 else ""
    noun = " or ".join(measure.noun for measure in measures)
    results = {_key(g): (family.measure, value) for family in families for g, value in family.ranked}
    others = {_key(one.group): (family.measure, one) for family in families for one in family.others}
    best = {_key(g) for family in families if family.others for g in family.not_worse}
    first = {_key(family.best) for family in families if family.best and family.others}
    keys = list(zip(frame["experiment"], frame["label"], strict=True))
    counts = {value.n for _, value in results.values()}
    several = max(counts, default=1) > 1
    note = f"mean {noun} over clients, each counting once, at the last evaluated round"
    if several:
        seeds = f"{max(counts)} seeds" if len(counts) == 1 else "several seeds"
        note += (
            f"; mean over {seeds} ± half-width of its 95 % interval (Student's t, n − 1 degrees of freedom)"
        )
    if any(value.modes for _, value in results.values()):
        note += f"; {MODES_NOTE}"
    title = noun if len(measures) == 1 else "result"
    columns: list[Cells] = [
        (
            TableColumn(title, unit, note),
            [format_estimate(*results[key]) if key in results else MISSING for key in keys],
        )
    ]
    chosen = {
        _key(g): (f.measure, one) for f in families for g, _ in f.ranked if (one := g.best_by_validation())
    }
    if chosen:
        best_round = "highest mean validation accuracy"
        if any(measure.is_loss for measure in measures):
            best_round = "best mean validation result"
        note = f"mean {noun} at the round of the {best_round}, the earliest on ties, which is no choice by test examples"
        cells = [format_estimate(*chosen[key]) if key in chosen else MISSING for key in keys]
        columns.append((TableColumn("best by validation", unit, note), cells))
    if len(counts) > 1:
        numbers = [str(results[key][1].n) if key in results else MISSING for key in keys]
        columns.append((TableColumn("seeds"), numbers))
    if others:
        note = (
            "mean difference from the best with its own 95 % interval, not corrected. Runs of the same seed "
            "are paired, for they have the same clients, data and initial weights"
        )
        if len(counts) > 1:
            note += "; over the seeds that both have"
        gaps = [
            _format_gap(*others[key]) if key in others else "best" if key in first else MISSING
            for key in keys
        ]
        of_points = "points" if all(not measure.is_loss for measure in measures) else ""
        columns.append((TableColumn("minus the best", of_points, note), gaps))
        tests = list(dict.fromkeys(family.test for family in families if family.test))
        note = "; ".join(tests) or "no test was possible"
        texts = [format_p(others[key][1].p) if key in others else MISSING for key in keys]
        columns.append((TableColumn("p", note=note), texts))
    sent = [
        format_si(up + down, "B") for up, down in zip(frame["bytes_up"], frame["bytes_down"], strict=True)
    ]
    columns.append(
        (TableColumn("sent", note="bytes of all messages, both ways; units of 1000", is_wide=True), sent)
    )
    if frame["status"].notna().any():
        status = frame["status"].fillna("").astype(str).tolist()
        columns.append((TableColumn("status", note="runs that are not finished", align="left"), status))
    table = make_table("Results", labels, columns)
    bold = frozenset((y, 1) for y, key in enumerate(keys) if key in best)
    is_one_method = any(len({g.vary for g, _ in family.ranked}) > 1 for family in families)
    return TextTable(
        table.title, table.fields, table.columns, table.rows, bold=bold,
        bold_note=bold_note(is_one_method) if bold else "",
    )  # fmt: skip


def _key(group: RunGroup) -> tuple[str, str]:
    return group.experiment, group.label


def _format_gap(measure: Measure, one: Versus) -> str:
    gap = one.difference
    return measure.format_gap(gap.mean, gap.low, gap.high) if gap else MISSING
