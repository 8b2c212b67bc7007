"""Exact values of one row of the comparison table, under the names that the CSV gives them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .groups import Group, experiment, seed, spread
from .measure import ACCURACY, LOSS, MEASURES, Measure
from .routing import final_recovery
from .sizes import group_size, last_ranks
from .summary import RunSummary, ToTarget, part, unseen_clients
from .units import plain

FLOAT32 = 4
"""Bytes of a floating-point element as papers count communication, whatever the messages hold."""

Value = str | int | float | None
Row = dict[str, Value]


def row_of(group: Group) -> Row:
    """The row of a group: means over its seeds, as fractions, bytes, counts and seconds.

    What is about a series other than the headline stands under a name that ends in a point and the series. The paper's
    numbers are those of the first seed's configuration; in a sweep, each group has its own.

    Costs "to target" are given only if every evaluated seed reached it: a mean over those that did would favor a
    method that often fails.
    """
    runs = group.runs
    evaluated = len(group.last)
    reached = [one.to_target for one in runs if one.to_target is not None]
    all_reached = reached if evaluated and len(reached) == evaluated else []
    row: Row = {
        "experiment": group.name,
        "method": group.method,
        "label": group.label,
        "vary": json.dumps(dict(group.vary), sort_keys=True) if group.vary else None,
        "seed_list": " ".join(seed(one.run) for one in runs),
        "seeds": evaluated,
        "series": group.headline,
        "clients": _same([len(one.run.clients) for one in runs]),
        "clients_without_test": _same([score.without for score in group.last]),
        "clients_not_finite": _same([score.non_finite for score in group.last]),
        "last_round": _same([score.round for score in group.last]),
        "judged_by": group.measure.noun if evaluated else None,
        "clients_unseen": _same([len(unseen_clients(one.run)) for one in runs]),
    }
    for measure in MEASURES:
        row |= _judged(group, measure)
    recovered = final_recovery(group)
    row["recovery"] = None if recovered is None else recovered.mean
    row["recovery_ci95_seeds"] = None if recovered is None else recovered.ci
    row |= {
        "bytes_up": _mean([one.totals.bytes_up for one in runs]),
        "bytes_down": _mean([one.totals.bytes_down for one in runs]),
        "parameters_up": _mean([one.totals.parameters_up for one in runs]),
        "parameters_down": _mean([one.totals.parameters_down for one in runs]),
        "communication_float32": _mean([FLOAT32 * one.totals.parameters for one in runs]),
        "steps": _mean([one.totals.steps for one in runs]),
        "flops": _mean([one.totals.flops for one in runs]),
    }
    for kind in ("train", "server", "evaluate"):
        row[f"seconds_{kind}"] = _mean([one.totals.seconds.get(kind) for one in runs])
    row |= {
        "target": group.target.value,
        "target_source": group.target.source,
        "target_reached_seeds": len(reached),
        "target_round": _mean([one.round for one in all_reached]),
        "target_bytes": _cost(all_reached, lambda one: one.totals.bytes),
        "target_parameters": _cost(all_reached, lambda one: one.totals.parameters),
        "target_flops": _cost(all_reached, lambda one: one.totals.flops),
        "target_steps": _cost(all_reached, lambda one: one.totals.steps),
        "target_seconds": _cost(all_reached, lambda one: one.totals.working_seconds),
    }
    row |= _size(group, group.headline, "")
    ranks = last_ranks(group)
    row["ranks_last"] = json.dumps(ranks) if ranks else None
    reference = part(group.first.config, "reference")
    known = any(part(reference, name) for name in ("accuracy", "communication", "parameters", "score"))
    row |= {
        "reference": _source(reference) if known else None,
        **_reference(group, group.headline, row["accuracy_last"], ""),
        "reference_communication_gb": _number(part(reference, "communication").get(group.method)),
    }
    row["status"] = _status(runs) or None
    for name in group.series:
        if name != group.headline:
            end = f".{plain(name)}"
            row[f"series{end}"] = _mean([score.mean for score in group.last_of(name, ACCURACY)])
            losses = group.last_of(name, LOSS)
            if losses:
                row[f"loss_series{end}"] = _mean([score.mean for score in losses])
            # only what there is: few methods have such a series, and few papers a number for it
            row |= {key: value for key, value in _size(group, name, end).items() if value is not None}
            if any(f"{group.method}.{name}" in part(reference, kind) for kind in ("accuracy", "parameters")):
                row |= _reference(group, name, row[f"series{end}"], end)
    return row


def key(measure: Measure, name: str) -> str:
    """The name of a value of a measure: those of accuracy are shorter, for they came first."""
    if measure == LOSS:
        return f"loss_{name}"
    return f"accuracy_{name}" if name in ("last", "last_weighted", "unseen", "std_unseen") else name


def _judged(group: Group, measure: Measure) -> Row:
    """What a measure says about the headline of a group."""
    over_seeds, last, unseen = group.final(measure), group.last_of(group.headline, measure), group.unseen(measure)
    series = [mine for one in group.runs if (mine := one.by(measure).get(group.headline or "")) is not None]
    bests = [one.best for one in series if one.best is not None]
    found: Row = {
        "last": None if over_seeds is None else over_seeds.mean,
        "std_seeds": None if over_seeds is None else over_seeds.std,
        "ci95_seeds": None if over_seeds is None else over_seeds.ci,
        "std_clients": _mean([one.std for one in last]),
        "last_weighted": _mean([one.weighted for one in last]),
        "worst_tenth": _mean([one.worst for one in last]),
        "best_by_validation": _mean([one.mean for one in bests]),
        "best_round": _same([one.round for one in bests]),
        "last_ten": _mean([one.last_ten for one in series]),
        "max_test_over_rounds" if measure == ACCURACY else "min_test_over_rounds": _mean(
            [one.max_test for one in series]
        ),
        "unseen": _mean([one.mean for one in unseen]),
        "std_unseen": _mean([one.std for one in unseen]),
    }
    return {key(measure, name): value for name, value in found.items()}


def _size(group: Group, series: str | None, end: str) -> Row:
    found = None if series is None else group_size(group, series)
    mean, std = (None, None) if found is None else (found[0].mean, found[1].mean)
    return {f"parameters_model{end}": mean, f"parameters_model_std{end}": std}


def _source(reference: Mapping[str, Any]) -> str:
    """Where the paper's numbers stand, with those that no column of ours can be compared with."""
    label, scores = plain(reference.get("label") or "the paper"), part(reference, "score")
    if not scores:
        return label
    told = ", ".join(f"{plain(name)} {value:g}" for name, value in scores.items() if isinstance(value, (int, float)))
    return f"{label} ({plain(reference.get('metric') or 'score')}: {told}; score ours by `fedlowrank score`)"


def _reference(group: Group, series: str | None, ours: Value, end: str) -> Row:
    """The paper's numbers for a series, and how far ours is from its accuracy."""
    reference = part(group.first.config, "reference")
    keys = [f"{group.method}.{series}"] if end else [group.method, f"{group.method}.{series}"]
    accuracy, parameters = (
        [known[key] for key in keys if key in (known := part(reference, name))] for name in ("accuracy", "parameters")
    )
    value = _number(accuracy[0]) if accuracy else None
    return {
        f"reference_percent{end}": value,
        f"reference_not_converged{end}": int(accuracy[:1] == [None]),
        f"difference_points{end}": None if value is None or not isinstance(ours, (int, float)) else 100 * ours - value,
        f"reference_parameters_m{end}": _number(parameters[0]) if parameters else None,
    }


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _status(runs: Sequence[RunSummary]) -> str:
    said = [(seed(one.run), one.status) for one in runs if one.status]
    if len(runs) == 1:
        return "; ".join(status for _, status in said)
    return "; ".join(f"seed {name}: {status}" for name, status in said)


def _cost(reached: Sequence[ToTarget], value: Callable[[ToTarget], float]) -> float | None:
    return _mean([value(one) for one in reached])


def _mean(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are there; whole numbers stay whole where their mean is."""
    kept = [value for value in values if value is not None]
    if kept and all(isinstance(value, int) for value in kept):
        total = sum(int(value) for value in kept)
        return total // len(kept) if total % len(kept) == 0 else total / len(kept)
    found = spread(kept)
    return None if found is None else found.mean


def _same(values: Sequence[float | None]) -> Value:
    """The value if all are equal, else all of them as text."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else " ".join(str(value) for value in values) or None


__all__ = ["Row", "Value", "experiment", "key", "row_of"]
