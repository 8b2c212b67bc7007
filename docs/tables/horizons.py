"""FedHL on teachers by horizon, rate and the model that chose the rate: short tables of many experiments.

A part of ``docs/evidence.py``, which is the command; this file is only imported.
"""

from __future__ import annotations

from fedlowrank.report.statistics.significance import Difference
from tables.experiments import difference, format_difference, read_figures, table_row
from tables.settings import ENDS, TEACHERS, list_horizons, name_horizon


def horizons_table() -> str:
    """FedHL minus FlexLoRA, the server's model, by teacher, horizon and rate."""
    lines = [table_row(["rank of the teacher", *ENDS.values()]), "| :--- |" + " ---: |" * len(ENDS)]
    for teacher, title in TEACHERS.items():
        names = [name_horizon(teacher, end) for end in ENDS]
        lines.append(table_row([title, *(_format_lead(name, "flexlora", "server") for name in names)]))
    return (
        "\n".join(lines)
        + "\n\nFedHL minus FlexLoRA, accuracy of the server's model in points, 95 % interval."
    )


def choices_table() -> str:
    """FedHL minus zero padding and FlexLoRA, own models, with rates chosen by the server's and by the own models."""
    others = {"hetlora": "zero padding", "flexlora": "FlexLoRA"}
    heads = [f"minus {other}, {chosen}" for other in others.values() for chosen in ("server", "own models")]
    lines = [table_row(["teacher", *heads]), "| :--- |" + " ---: |" * len(heads)]
    for name, (own, label) in zip(list_horizons("server"), list_horizons("own").items(), strict=True):
        found = [_format_lead(n, other, None) for other in others for n in (name, own)]
        lines.append(table_row([label, *found]))
    return "\n".join(lines) + (
        "\n\nFedHL minus the other method, accuracy of the clients' own models in points, 95 % interval, with learning rates "
        "chosen by the server's model or by the own models."
    )


def find_lead(name: str, against: str, series: str | None) -> Difference:
    """FedHL minus another method, see :func:`difference`."""
    return difference(read_figures(name), "fedhl", against, series)


def _format_lead(name: str, against: str, series: str | None) -> str:
    return format_difference(find_lead(name, against, series), 100.0, 1)
