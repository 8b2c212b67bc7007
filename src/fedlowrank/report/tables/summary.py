"""Summary table that a reader sees first: each result with its interval, and its comparison with the best."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ..number_formats import MISSING, format_p, format_si
from ..statistics.groups import RunGroup
from ..statistics.measures import Measure
from ..statistics.paired import ComparisonWithBest, Family
from ..statistics.run_statistics import format_estimate
from .sweeps import bold_note
from .text_table import TableColumn, TextTable

MODES_NOTE = (
    "where seeds succeed or fail, with a wide gap between, how many succeed and the worst result of these "
    "instead of the mean; the CSV has both"
)
Cells = tuple[TableColumn, list[str]]


def make_table(title: str, labels: Sequence[str], columns: Sequence[Cells]) -> TextTable:
    """Make a table with one row per label."""
    rows = zip(labels, *(cells for _, cells in columns), strict=True)
    return TextTable(title, ("method",), tuple(column for column, _ in columns), tuple(rows))


def make_summary(frame: pd.DataFrame, families: Sequence[Family], labels: Sequence[str]) -> TextTable:
    """Tabulate results at the last and best validated round, difference from the best, its p-value, and bytes of each group.

    Args:
        frame: exact values, one row per group, in the order of ``labels``.
        families: families of all groups.
        labels: labels of the rows.
    """
    measures = list(dict.fromkeys(family.measure for family in families))
    unit = measures[0].unit if len(measures) == 1 else ""
    measure_names = " or ".join(measure.sentence_name for measure in measures)
    results = {_key(g): (family.measure, value) for family in families for g, value in family.ranked}
    comparisons = {
        _key(entry.group): (family.measure, entry) for family in families for entry in family.comparisons
    }
    best_keys = {_key(g) for family in families if family.comparisons for g in family.not_worse}
    leader_keys = {_key(family.best) for family in families if family.best and family.comparisons}
    keys = list(zip(frame["experiment"], frame["label"], strict=True))
    seed_counts = {value.n for _, value in results.values()}
    has_several_seeds = max(seed_counts, default=1) > 1
    note = f"mean {measure_names} over clients, each counting once, at the last evaluated round"
    if has_several_seeds:
        seeds = f"{max(seed_counts)} seeds" if len(seed_counts) == 1 else "several seeds"
        note += (
            f"; mean over {seeds} ± half-width of its 95 % interval (Student's t, n − 1 degrees of freedom)"
        )
    if any(value.modes for _, value in results.values()):
        note += f"; {MODES_NOTE}"
    title = measure_names if len(measures) == 1 else "result"
    columns: list[Cells] = [
        (
            TableColumn(title, unit, note),
            [format_estimate(*results[key]) if key in results else MISSING for key in keys],
        )
    ]
    validation_results = {
        _key(g): (f.measure, entry)
        for f in families
        for g, _ in f.ranked
        if (entry := g.best_by_validation())
    }
    if validation_results:
        best_round = "highest mean validation accuracy"
        if any(measure.is_loss for measure in measures):
            best_round = "best mean validation result"
        note = f"mean {measure_names} at the round of the {best_round}, the earliest on ties, which is no choice by test examples"
        cells = [
            format_estimate(*validation_results[key]) if key in validation_results else MISSING
            for key in keys
        ]
        columns.append((TableColumn("best by validation", unit, note), cells))
    if len(seed_counts) > 1:
        seed_texts = [str(results[key][1].n) if key in results else MISSING for key in keys]
        columns.append((TableColumn("seeds"), seed_texts))
    if comparisons:
        note = (
            "mean difference from the best with its own 95 % interval, not corrected. Runs of the same seed "
            "are paired, for they have the same clients, data and initial weights"
        )
        if len(seed_counts) > 1:
            note += "; over the seeds that both have"
        gap_texts = [
            _format_gap(*comparisons[key])
            if key in comparisons
            else "best"
            if key in leader_keys
            else MISSING
            for key in keys
        ]
        gap_unit = "points" if all(not measure.is_loss for measure in measures) else ""
        columns.append((TableColumn("minus the best", gap_unit, note), gap_texts))
        tests = list(dict.fromkeys(family.test for family in families if family.test))
        note = "; ".join(tests) or "no test was possible"
        texts = [format_p(comparisons[key][1].p) if key in comparisons else MISSING for key in keys]
        columns.append((TableColumn("p", note=note), texts))
    byte_texts = [
        format_si(bytes_up + bytes_down, "B")
        for bytes_up, bytes_down in zip(frame["bytes_up"], frame["bytes_down"], strict=True)
    ]
    columns.append(
        (
            TableColumn(
                "sent", note="bytes of all messages for training, both ways; units of 1000", is_wide=True
            ),
            byte_texts,
        )
    )
    if frame["status"].notna().any():
        statuses = frame["status"].fillna("").astype(str).tolist()
        columns.append((TableColumn("status", note="runs that are not finished", align="left"), statuses))
    table = make_table("Results", labels, columns)
    bold = frozenset((y, 1) for y, key in enumerate(keys) if key in best_keys)
    is_one_method = any(len({g.vary for g, _ in family.ranked}) > 1 for family in families)
    return TextTable(
        table.title, table.fields, table.columns, table.rows, bold=bold,
        bold_note=bold_note(is_one_method) if bold else "",
    )  # fmt: skip


def _key(group: RunGroup) -> tuple[str, str]:
    return group.experiment, group.label


def _format_gap(measure: Measure, comparison: ComparisonWithBest) -> str:
    gap = comparison.difference
    return measure.format_gap(gap.mean, gap.low, gap.high) if gap else MISSING
