"""Ablations as papers print them: a row for every setting that was tried, a column for every method or experiment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .groups import Group, measure_of, value_text
from .measure import ACCURACY, Measure
from .units import NONE, loss_pair, percent_pair, plain


@dataclass(frozen=True)
class Ablation:
    """Results at the last evaluated round for each value of what was varied.

    Attributes:
        title: heading.
        fields: what was varied, the heads of the first columns.
        columns: methods or experiments, the heads of the others.
        rows: of each setting the values of the fields and the results, as text.
        experiments: how many it joins.
        note: what a reader has to know.
    """

    title: str
    fields: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    experiments: int
    note: str


def ablations(groups: Sequence[Group]) -> list[Ablation]:
    """One table for every set of settings that was varied together, over all experiments that varied them."""
    found: dict[tuple[tuple[str, ...], Measure], list[Group]] = {}
    measures = {name: measure_of([g for g in groups if g.name == name]) for name in {group.name for group in groups}}
    for group in groups:
        if group.vary:
            found.setdefault((tuple(key for key, _ in group.vary), measures[group.name]), []).append(group)
    tables = [_table(keys, measure, some) for (keys, measure), some in found.items()]
    return [table for table in tables if len(table.rows) > 1]


def _table(keys: tuple[str, ...], measure: Measure, groups: Sequence[Group]) -> Ablation:
    cells: dict[tuple[tuple[str, ...], tuple[str, str]], Group] = {}
    for group in groups:
        cells.setdefault((_values(group), (group.name, group.short)), group)
    settings = {_values(group): tuple(value for _, value in group.vary) for group in groups}
    columns = list(dict.fromkeys(column for _, column in cells))
    names = {name: plain(next(g for g in groups if g.name == name).first.config.get("title") or name)
             for name, _ in columns}  # fmt: skip
    if len(set(names.values())) < len(names):
        names = {name: name for name in names}
    shorts = {short for _, short in columns}
    heads = [
        short if len(names) == 1 else names[name] if len(shorts) == 1 else f"{names[name]}: {short}"
        for name, short in columns
    ]
    rows = tuple(
        (setting, tuple(_cell(cells.get((setting, column)), measure) for column in columns))
        for setting in _sorted(settings)
    )
    fields = short_names(keys)
    method = f" of {next(iter(shorts))}" if len(shorts) == 1 and len(names) > 1 else ""
    unit = f" / {measure.unit}" if measure.unit else ""
    return Ablation(
        f"{measure.title}{unit}{method} against {', '.join(fields)}", fields, tuple(heads), rows, len(names),
        _note(keys, measure, list(cells.values())),
    )  # fmt: skip


def short_names(keys: Sequence[str]) -> tuple[str, ...]:
    """The last parts of the fields' names, with as many before them as it takes to tell the fields apart."""
    parts = [key.split(".") for key in keys]
    most = max(map(len, parts), default=1)
    for length in range(1, most + 1):
        found = [".".join(one[-length:]) for one in parts]
        if max(Counter(found).values(), default=1) == 1:
            return tuple(found)
    return tuple(keys)


def _values(group: Group) -> tuple[str, ...]:
    return tuple(value_text(value) for _, value in group.vary)


def _sorted(settings: dict[tuple[str, ...], tuple[Any, ...]]) -> list[tuple[str, ...]]:
    """By the first field, then the second, ...: numbers by size, anything else in the order given."""
    places: list[dict[str, float]] = []
    for column in zip(*settings.values(), strict=True):
        texts = list(dict.fromkeys(map(value_text, column)))
        numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in column)
        places.append({text: float(text) if numeric else i for i, text in enumerate(texts)})
    return sorted(settings, key=lambda one: tuple(place[text] for place, text in zip(places, one, strict=True)))


def _cell(group: Group | None, measure: Measure) -> str:
    result = None if group is None else group.final(measure)
    if result is None:
        return NONE
    return (percent_pair if measure == ACCURACY else loss_pair)(result.mean, result.ci)


def _note(keys: Sequence[str], measure: Measure, groups: Sequence[Group]) -> str:
    seeds = {len(group.last) for group in groups if group.last}
    said = [f"Mean {measure.noun} over clients at the last evaluated round"]
    if max(seeds, default=1) > 1:
        many = str(max(seeds)) if len(seeds) == 1 else f"up to {max(seeds)}"
        said[0] += f", mean over {many} seeds ± half-width of the 95 % confidence interval"
    if not measure.higher:
        said[0] += "; lower is better"
    own: dict[str, list[str]] = {}
    for key, short in zip(keys, short_names(keys), strict=True):
        head, _, rest = key.partition(".")
        if head == "methods":
            own.setdefault(rest.partition(".")[0], []).append(short)
    for method, fields in own.items():
        titles = list(dict.fromkeys(group.short for group in groups if group.method == method))
        others = list(dict.fromkeys(group.short for group in groups if group.method != method))
        if titles and others:
            are = "is a setting" if len(fields) == 1 else "are settings"
            said.append(f"{' and '.join(fields)} {are} of {titles[0]} and no matter to {' and '.join(others)}")
    return ". ".join(said) + "."
