"""Tables of sweeps: a row for each tried setting, a column for each method or experiment."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...results.varied_settings import owner_of, shorten_names
from ..number_formats import MISSING
from ..statistics.experiments import ComparedExperiment
from ..statistics.groups import RunGroup
from ..statistics.measures import Measure
from ..statistics.run_statistics import format_estimate
from ..statistics.setting_names import value_text
from ..statistics.significance import ALPHA
from .text_table import TableColumn, TextTable


def sweep_tables(experiments: Sequence[ComparedExperiment]) -> list[TextTable]:
    """Make one table for each set of settings that was varied together, over all experiments that varied them.

    Results that are not significantly worse than the best of their family are bold.
    """
    families = [family for experiment in experiments for family in experiment.families if family.comparisons]
    best_keys = {(g.experiment, g.label) for family in families for g in family.not_worse}
    groups_by_setting: dict[tuple[tuple[str, ...], Measure], list[RunGroup]] = {}
    for experiment in experiments:
        for group in experiment.groups:
            if group.vary:
                keys = tuple(key for key, _ in group.vary)
                groups_by_setting.setdefault((keys, experiment.measure), []).append(group)
    tables = [
        _sweep_table(keys, measure, setting_groups, best_keys)
        for (keys, measure), setting_groups in groups_by_setting.items()
    ]
    return [table for table in tables if len(table.rows) > 1]


def _sweep_table(
    keys: tuple[str, ...],
    measure: Measure,
    groups: Sequence[RunGroup],
    best_keys: Collection[tuple[str, str]],
) -> TextTable:
    cells: dict[tuple[tuple[str, ...], tuple[str, str]], RunGroup] = {}
    for group in groups:
        cells.setdefault((_setting(group), (group.experiment, group.short_label)), group)
    columns = list(dict.fromkeys(column for _, column in cells))
    names = {group.experiment: group.first.title for group in reversed(groups)}
    if len(set(names.values())) < len(names):
        names = {name: name for name in names}
    methods = {short for _, short in columns}

    def heading(name: str, short: str) -> str:
        if len(names) == 1:
            return short
        return names[name] if len(methods) == 1 else f"{names[name]}: {short}"

    def cell(setting: tuple[str, ...], column: tuple[str, str]) -> str:
        group = cells.get((setting, column))
        result = group.final(measure=measure) if group else None
        return format_estimate(measure, result) if result else MISSING

    settings = _sort_settings(groups)
    rows = [(*setting, *(cell(setting, column) for column in columns)) for setting in settings]
    bold = frozenset(
        (y, len(keys) + x)
        for y, setting in enumerate(settings)
        for x, column in enumerate(columns)
        if (cell_group := cells.get((setting, column)))
        and (cell_group.experiment, cell_group.label) in best_keys
    )
    fields = shorten_names(keys)
    method = f" of {next(iter(methods))}" if len(methods) == 1 and len(names) > 1 else ""
    return TextTable(
        f"{measure.heading}{method} against {', '.join(fields)}",
        fields,
        tuple(TableColumn(heading(*column)) for column in columns),
        tuple(rows),
        _note(keys, measure, list(cells.values())),
        len(names),
        bold,
        bold_note(len(methods) < 2) if bold else "",
    )


def bold_note(is_one_method: bool) -> str:
    """Explain the meaning of bold in a table of results."""
    scope = " of all settings" if is_one_method else ""
    test = f"paired test, corrected p ≥ {ALPHA:.2g}"
    return f"Bold: the best mean{scope} and those not significantly worse ({test})."


def _setting(group: RunGroup) -> tuple[str, ...]:
    return tuple(value_text(value) for _, value in group.vary)


def _sort_settings(groups: Sequence[RunGroup]) -> list[tuple[str, ...]]:
    """Sort settings by the first field, then the second, ...: numbers by size, others in the given order."""
    settings = {_setting(group): [value for _, value in group.vary] for group in groups}
    orders: list[dict[str, float]] = []
    for column in zip(*settings.values(), strict=True):
        is_numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in column)
        texts = dict.fromkeys(map(value_text, column))
        orders.append({text: float(text) if is_numeric else i for i, text in enumerate(texts)})
    return sorted(
        settings, key=lambda setting: [order[text] for order, text in zip(orders, setting, strict=True)]
    )


def _note(keys: Sequence[str], measure: Measure, groups: Sequence[RunGroup]) -> str:
    seed_counts = {n for group in groups if (n := len(group.headline_results))}
    note = f"Mean {measure.sentence_name} over clients at the last evaluated round"
    if max(seed_counts, default=1) > 1:
        count = str(max(seed_counts)) if len(seed_counts) == 1 else f"up to {max(seed_counts)}"
        note += f", mean over {count} seeds ± half-width of the 95 % confidence interval"
    if measure.is_loss:
        note += "; lower is better"
    fields_by_method: dict[str, list[str]] = {}
    for key, short in zip(keys, shorten_names(keys), strict=True):
        if (owner := owner_of(key)) is not None:
            fields_by_method.setdefault(owner, []).append(short)
    for method, fields in fields_by_method.items():
        titles = list(dict.fromkeys(group.short_label for group in groups if group.method == method))
        other_titles = list(dict.fromkeys(group.short_label for group in groups if group.method != method))
        if titles and other_titles:
            predicate = "is a setting" if len(fields) == 1 else "are settings"
            note += f". {' and '.join(fields)} {predicate} of {titles[0]} and no matter to {' and '.join(other_titles)}"
    return f"{note}."
