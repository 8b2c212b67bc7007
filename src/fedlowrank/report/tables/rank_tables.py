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
    """A table for each experiment and varied value: a row for each rank, a column for each model."""
    tables = []
    for experiment in experiments:
        for text, results in experiment.rank_results.items():
            where = [f"in {experiment.name}"] * (len(experiments) > 1) + [f"with {text}"] * bool(text)
            if results:
                tables.append(_rank_table(experiment.measure, results, " ".join(["", *where])))
    return tables


def _rank_table(measure: Measure, series: Sequence[RankResults], where: str) -> TextTable:
    rows = []
    for rank in sorted({rank for one in series for rank in one.table.index}, reverse=True):
        results = [one.table.loc[rank] if rank in one.table.index else None for one in series]
        least = min(int(result["least"]) for result in results if result is not None)
        most = max(int(result["most"]) for result in results if result is not None)
        clients = str(least) if least == most else f"{least}–{most}"
        pairs = [(math.nan, math.nan) if r is None else (r["mean"], r["ci"]) for r in results]
        rows.append((f"{rank:.0f}", clients, *(measure.format_pair(*pair) for pair in pairs)))
    several = any(len(one.group.series) > 1 for one in series)
    heads = [
        f"{one.group.short}: {on_one_line(one.series)}" if several else one.group.short for one in series
    ]
    seeds = max(int(one.table["n"].max()) for one in series)
    note = f"Mean {measure.noun} over the clients of each rank at the last evaluated round"
    if seeds > 1:
        note += f", mean over up to {seeds} seeds ± half-width of the 95 % confidence interval"
    note += "; lower is better" if measure.is_loss else ""
    note += ". Clients of different ranks hold different data, so differences down a column are not due to "
    note += "rank alone."
    title = f"{measure.heading} by rank of the client{where}"
    return TextTable(
        title, ("rank", "clients"), tuple(TableColumn(head) for head in heads), tuple(rows), note
    )
