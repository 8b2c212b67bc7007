"""Tables of results by rank of the client."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...core.io.text import on_one_line
from ..statistics.experiments import ComparedExperiment
from ..statistics.low_rank import RankResults
from ..statistics.measures import Measure
from .text_table import TableColumn, TextTable


def rank_tables(experiments: Sequence[ComparedExperiment]) -> list[TextTable]:
    """Make a table for each experiment and varied value: a row for each rank, a column for each model."""
    tables = []
    for experiment in experiments:
        for text, results in experiment.rank_results.items():
            conditions = [f"in {experiment.name}"] * (len(experiments) > 1) + [f"with {text}"] * bool(text)
            if results:
                tables.append(_rank_table(experiment.measure, results, " ".join(["", *conditions])))
    return tables


def _rank_table(measure: Measure, all_results: Sequence[RankResults], conditions: str) -> TextTable:
    rows = []
    for rank in sorted(
        {rank for series_results in all_results for rank in series_results.table.index}, reverse=True
    ):
        results = [
            series_results.table.loc[rank] if rank in series_results.table.index else None
            for series_results in all_results
        ]
        min_count = min(int(result["least"]) for result in results if result is not None)
        max_count = max(int(result["most"]) for result in results if result is not None)
        clients_text = str(min_count) if min_count == max_count else f"{min_count}–{max_count}"
        pairs = [(math.nan, math.nan) if r is None else (r["mean"], r["ci"]) for r in results]
        rows.append((f"{rank:.0f}", clients_text, *(measure.format_pair(*pair) for pair in pairs)))
    has_several_series = any(len(series_results.group.series) > 1 for series_results in all_results)
    headings = [
        f"{series_results.group.short_label}: {on_one_line(series_results.series)}"
        if has_several_series
        else series_results.group.short_label
        for series_results in all_results
    ]
    seed_count = max(int(series_results.table["n"].max()) for series_results in all_results)
    note = f"Mean {measure.sentence_name} over the clients of each rank at the last evaluated round"
    if seed_count > 1:
        note += f", mean over up to {seed_count} seeds ± half-width of the 95 % confidence interval"
    note += "; lower is better" if measure.is_loss else ""
    note += ". Clients of different ranks hold different data, so differences down a column are not due to "
    note += "rank alone."
    title = f"{measure.heading} by rank of the client{conditions}"
    return TextTable(
        title, ("rank", "clients"), tuple(TableColumn(heading) for heading in headings), tuple(rows), note
    )
