"""Tables of a grid search: every setting, its validation result and the chosen one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ...config.tuning import Setting
from ...results.varied_settings import shorten_names
from ..number_formats import MISSING
from ..statistics.measures import Measure
from ..statistics.run_statistics import estimate
from ..statistics.setting_names import value_text
from .text_table import TableColumn, TextTable, escape_markdown, to_markdown

VALIDATION_ACCURACY = Measure("accuracy", "validation accuracy", "Validation accuracy", "%", 100.0)
VALIDATION_LOSS = Measure("loss", "validation loss", "Validation loss")


def tuning_tables(
    settings: Mapping[str, Sequence[Setting]], best_settings: Mapping[str, Setting | None]
) -> list[TextTable]:
    """Make a table for each method that was tuned.

    Args:
        settings: all settings of each method, with scores, by the method's title.
        best_settings: chosen setting of each method, by the method's title.
    """
    return [
        _table(title, method_settings, best_settings[title])
        for title, method_settings in settings.items()
        if len(method_settings) > 1
    ]


def _table(title: str, settings: Sequence[Setting], best_setting: Setting | None) -> TextTable:
    measure, seed_count = tuning_measure(settings), len(settings[0].runs)
    rows = []
    for setting in settings:
        result = None if setting.mean is None else estimate(score.value for score in setting.scores if score)
        cell = MISSING if result is None else measure.format_pair(result.mean, result.ci)
        remark = "chosen" if setting is best_setting else "; ".join(dict.fromkeys(setting.messages))
        rows.append((*map(value_text, setting.values.values()), cell, remark))
    note = f"Mean {measure.sentence_name} over clients"
    if seed_count > 1:
        note += f", mean over {seed_count} tuning seeds ± half-width of the 95 % confidence interval"
    direction_note = "; lower is better" if measure.is_loss else ""
    return TextTable(
        f"{title}: {measure.sentence_name} of every setting",
        shorten_names(list(settings[0].values)),
        (TableColumn(measure.heading), TableColumn("Result", align="left")),
        tuple(rows),
        f"{note}{direction_note}. A setting of which a run diverged counts as worst.",
    )


def tuning_measure(settings: Sequence[Setting]) -> Measure:
    """Choose the measure that the settings of a method are judged by."""
    return (
        VALIDATION_LOSS
        if any(score and score.is_loss for setting in settings for score in setting.scores)
        else VALIDATION_ACCURACY
    )


def tuning_csv(settings: Mapping[str, Sequence[Setting]], best_settings: Mapping[str, Setting | None]) -> str:
    """Write all exact values as CSV, a row for each setting; see :func:`tuning_tables` for the arguments."""
    rows: list[dict[str, Any]] = []
    for title, method_settings in settings.items():
        for setting in method_settings:
            result = estimate(score.value for score in setting.scores if score)
            rows.append(
                {
                    "method": setting.method,
                    "chosen": setting is best_settings[title],
                    "judged_by": tuning_measure(method_settings).sentence_name if setting.runs else None,
                    "validation_mean": setting.mean,
                    "validation_ci95_seeds": None if setting.mean is None or result is None else result.ci,
                    "seeds": len(setting.runs),
                    "without_score": sum(score is None for score in setting.scores),
                    "validation_by_seed": " ".join(
                        "-" if score is None else repr(score.value) for score in setting.scores
                    ),
                    "evaluated_at": " ".join(
                        "-" if score is None else str(score.round) for score in setting.scores
                    ),
                    "messages": "; ".join(dict.fromkeys(setting.messages)),
                    **setting.values,
                }
            )
    return str(pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))


def tuning_markdown(tables: Sequence[TextTable], warnings: Sequence[str]) -> str:
    """Format the tables as Markdown, with warnings first."""
    blocks = [f"> {escape_markdown(warning)}" for warning in warnings]
    return "\n\n".join([*blocks, *map(to_markdown, tables)]) + "\n"
