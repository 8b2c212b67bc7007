"""Figures 8 and 9 of pFedLoRA: accuracy over the classes of a client, and over the share of clients in a round.

A part of ``docs/evidence.py``, which is the command; this file is only imported.
"""

from __future__ import annotations

from tables.experiments import (
    difference,
    format_difference,
    last_results,
    list_methods,
    mean_with_half_width,
    read_figures,
    read_titles,
    table_row,
)
from tables.settings import SWEEPS


def sweeps_table(swept: str) -> str:
    """Test accuracy of every method, and the difference of pFedLoRA from FedProto, as Markdown.

    Args:
        swept: what changes, a key of :data:`.settings.SWEEPS`.
    """
    names = SWEEPS[swept]
    methods = list_common_methods(swept)
    titles = read_titles(next(iter(names.values())))
    heads = [swept, *(titles[method] for method in methods), "pFedLoRA minus FedProto"]
    lines = [table_row(heads), "| ---: |" + " ---: |" * (len(heads) - 1)]
    for value, name in names.items():
        figures = read_figures(name)
        results = last_results(figures, None)["test"]
        means = [mean_with_half_width(100 * results.loc[method], 1) for method in methods]
        lead = format_difference(difference(figures, "pfedlora", "fedproto"), 100.0, 1)
        lines.append(table_row([str(value), *means, lead]))
    return "\n".join(lines)


def list_common_methods(swept: str) -> list[str]:
    """Methods that all experiments of a sweep have."""
    first, *others = (list_methods(name) for name in SWEEPS[swept].values())
    return [method for method in first if all(method in other for other in others)]
