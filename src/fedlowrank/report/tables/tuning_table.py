"""The table of a grid search: every setting, its validation result and which one was chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ...config.tuning import Setting
from ..number_formats import MISSING
from ..statistics.measures import Measure
from ..statistics.run_statistics import estimate
from ..statistics.setting_names import value_text
from .sweeps import shorten_names
from .text_table import TableColumn, TextTable, escape_markdown, to_markdown

VALIDATION_ACCURACY = Measure("accuracy", "validation accuracy", "Validation accuracy", "%", 100.0)
VALIDATION_LOSS = Measure("loss", "validation loss", "Validation loss")


def tuning_tables(
    settings: Mapping[str, Sequence[Setting]], chosen: Mapping[str, Setting | None]
) -> list[TextTable]:
    """A table for each method that was tuned.

    Args:
        settings: all settings of a method, with scores, by the method's title.
        chosen: the chosen one of them.
    """
    return [_table(title, some, chosen[title]) for title, some in settings.items() if len(some) > 1]


def _table(title: str, settings: Sequence[Setting], chosen: Setting | None) -> TextTable:
    measure, seeds = tuning_measure(settings), len(settings[0].runs)
    rows = []
    for one in settings:
        result = None if one.mean is None else estimate(score.value for score in one.scores if score)
        cell = MISSING if result is None else measure.format_pair(result.mean, result.ci)
        remark = "chosen" if one is chosen else "; ".join(dict.fromkeys(one.messages))
        rows.append((*map(value_text, one.values.values()), cell, remark))
    note = f"Mean {measure.noun} over clients"
    if seeds > 1:
        note += f", mean over {seeds} tuning seeds ± half-width of the 95 % confidence interval"
    lower = "; lower is better" if measure.is_loss else ""
    return TextTable(
        f"{title}: {measure.noun} of every setting",
        shorten_names(list(settings[0].values)),
        (TableColumn(measure.heading), TableColumn("Result", align="left")),
        tuple(rows),
        f"{note}{lower}. A setting of which a run diverged counts as worst.",
    )


def tuning_measure(settings: Sequence[Setting]) -> Measure:
    """What the settings of a method are judged by."""
    return (
        VALIDATION_LOSS
        if any(score and score.is_loss for one in settings for score in one.scores)
        else VALIDATION_ACCURACY
    )


def tuning_csv(settings: Mapping[str, Sequence[Setting]], chosen: Mapping[str, Setting | None]) -> str:
    """All exact values, a row for each setting, as CSV; see :func:`tuning_tables` for the arguments."""
    rows: list[dict[str, Any]] = []
    for title, some in settings.items():
        for one in some:
            result = estimate(score.value for score in one.scores if score)
            rows.append(
                {
                    "method": one.method,
                    "chosen": one is chosen[title],
                    "judged_by": tuning_measure(some).noun if one.runs else None,
                    "validation_mean": one.mean,
                    "validation_ci95_seeds": None if one.mean is None or result is None else result.ci,
                    "seeds": len(one.runs),
                    "without_score": sum(score is None for score in one.scores),
                    "validation_by_seed": " ".join(
                        "-" if score is None else repr(score.value) for score in one.scores
                    ),
                    "evaluated_at": " ".join(
                        "-" if score is None else str(score.round) for score in one.scores
                    ),
                    "messages": "; ".join(dict.fromkeys(one.messages)),
                    **one.values,
                }
            )
    return str(pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))


def tuning_markdown(tables: Sequence[TextTable], warnings: Sequence[str]) -> str:
    """The tables as Markdown, with warnings first."""
    parts = [f"> {escape_markdown(warning)}" for warning in warnings]
    return "\n\n".join([*parts, *map(to_markdown, tables)]) + "\n"
