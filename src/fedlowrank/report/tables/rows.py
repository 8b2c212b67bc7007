"""Computes the exact values of one row of the comparison, under their names in the CSV."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ...core.io.text import on_one_line
from ...results.measurements import COSTS
from ...results.records import RunRecord
from ..statistics.groups import RunGroup
from ..statistics.low_rank import adapter_row, last_ranks, model_size
from ..statistics.measures import MEASURES, TEST_ACCURACY, TEST_LOSS, Measure
from ..trust import trust_row

FLOAT32 = 4
"""Bytes of a floating-point element as papers count communication, whatever the messages contain."""

WORK = ("seconds_train", "seconds_server")
Row = dict[str, Any]


def comparison_row(group: RunGroup) -> Row:
    """Make the row of a group: means over its seeds, as fractions, bytes, counts and seconds.

    Columns about a series other than the headline end in a point and its name. The paper's numbers are those of the
    first seed's configuration. Costs "to target" are given only if every evaluated seed reached it, because a mean
    over those that did would favor a method that often fails.
    """
    row: Row = _identity(group)
    for measure in MEASURES:
        row |= _results(group, measure)
    row |= _clusters(group) | _costs(group) | _costs_to_target(group)
    row |= _model_size(group, group.headline, "") | _paper(group, row["accuracy_last"])
    for name in group.series:
        if name != group.headline:
            row |= _further_series(group, name, f".{on_one_line(name)}")
    return row | adapter_row(group) | trust_row(group)


def _identity(group: RunGroup) -> Row:
    """Columns that identify the group, with numbers of seeds and clients."""
    runs, results = group.runs, group.headline_results
    return {
        "experiment": group.experiment,
        "method": group.method,
        "label": group.label,
        "vary": json.dumps(dict(group.vary), sort_keys=True) if group.vary else None,
        "seed_list": " ".join(run.record.seed for run in runs),
        "seeds": len(results),
        "series": group.headline,
        "clients": _common(len(run.record.clients) for run in runs),
        "clients_in_mean": _common(results["clients"].astype(int)),
        "clients_not_evaluated": _common(results["not_evaluated"].astype(int)),
        "clients_without_test": _common(results["without"].astype(int)),
        "clients_not_finite": _common(results["non_finite"].astype(int)),
        "last_round": _common(results["round"].astype(int)),
        "judged_by": group.measure.sentence_name if len(results) else None,
        "clients_unseen": _common(len(run.record.measurements.flagged_ids("unseen")) for run in runs),
    }


def _clusters(group: RunGroup) -> Row:
    """Columns about the recovery of clusters, and hostile clients."""
    recovery = group.final_recovery()
    row: Row = {
        "recovery": recovery.mean if recovery else None,
        "recovery_ci95_seeds": recovery.ci if recovery else None,
    }
    if any(hostile_counts := [len(run.record.measurements.flagged_ids("hostile")) for run in group.runs]):
        row["clients_hostile"] = _common(hostile_counts)
    if (final := group.final()) and final.groups_found:
        row["groups_found_seeds"], row["groups_known_seeds"] = final.groups_found
    return row


def _costs(group: RunGroup) -> Row:
    """Columns of the mean costs of a run."""
    costs = [run.costs for run in group.runs]
    totals: Row = {name: _mean(cost[name] for cost in costs) for name in COSTS}
    steps, flops = totals.pop("steps"), totals.pop("flops")
    float32 = _mean(FLOAT32 * _both_ways(cost, "parameters") for cost in costs)
    kinds = ("seconds_train", "seconds_server", "seconds_evaluate", "simulated_seconds")
    seconds = {kind: _mean(cost.get(kind) for cost in costs) for kind in kinds}
    return {**totals, "communication_float32": float32, "steps": steps, "flops": flops, **seconds}


def _costs_to_target(group: RunGroup) -> Row:
    """Columns of the mean costs until the target was reached; none unless every evaluated seed reached it."""
    target_costs = [cost for run in group.runs if (cost := run.costs_to(group.target.value)) is not None]
    # a run that diverged did not reach it
    seed_count = len(group.headline_results) + [r.state for r in group.unfinished_runs].count("diverged")
    complete_costs = target_costs if target_costs and len(target_costs) == seed_count else []
    return {
        "target": group.target.value,
        "target_source": group.target.source,
        "target_reached_seeds": len(target_costs),
        "target_seeds": seed_count,
        "target_round": _mean(cost["round"] for cost in complete_costs),
        "target_bytes": _mean(_both_ways(cost, "bytes") for cost in complete_costs),
        "target_parameters": _mean(_both_ways(cost, "parameters") for cost in complete_costs),
        "target_flops": _mean(cost["flops"] for cost in complete_costs),
        "target_steps": _mean(cost["steps"] for cost in complete_costs),
        # Evaluation is part of measuring and not of the method.
        "target_seconds": _mean(sum(cost.get(kind, 0.0) for kind in WORK) for cost in complete_costs),
        "target_simulated_seconds": _mean(cost.get("simulated_seconds") for cost in complete_costs),
    }


def _paper(group: RunGroup, accuracy: float | None) -> Row:
    """Columns of the ranks at the end, the paper's numbers beside an accuracy, and unfinished runs."""
    first_run, ranks = group.first, last_ranks(group)
    sections = ("accuracy", "communication", "parameters", "score")
    has_paper = any(first_run.section("reference", name) for name in sections)
    runs = (*group.runs, *group.unfinished_runs)
    statuses = [f"seed {run.record.seed}: " * (len(runs) > 1) + run.status for run in runs if run.status]
    return {
        "ranks_last": json.dumps(ranks) if ranks else None,
        "reference": _reference_source(first_run) if has_paper else None,
        **_reference(group, group.headline, accuracy, ""),
        "reference_communication_gb": _number(
            first_run.section("reference", "communication").get(group.method)
        ),
        "status": "; ".join(statuses) or None,
    }


def _results(group: RunGroup, measure: Measure) -> Row:
    """Columns of a measure of the headline of a group."""
    results = group.results(measure=measure)
    final, best = group.final(measure=measure), group.best_by_validation(measure=measure)
    means: Row = {
        name: _mean(results[name])
        for name in (
            "std_clients", "last_weighted", "worst_tenth", "best_by_validation", "last_ten", "best_test", "unseen",
            "std_unseen",
        )
    }  # fmt: skip
    means["best_round"] = _common(results["best_round"].dropna().astype(int))
    best_test = "min_test_over_rounds" if measure.is_loss else "max_test_over_rounds"
    row = {
        "last": final.mean if final else None,
        "std_seeds": final.std if final else None,
        "ci95_seeds": final.ci if final else None,
        "best_by_validation_ci95_seeds": best.ci if best else None,
        **(
            {"success_seeds": final.modes.success_count, "success_bound": final.modes.bound}
            if final and final.modes
            else {}
        ),
        **{best_test if name == "best_test" else name: value for name, value in means.items()},
    }
    return {measure.column(name): value for name, value in row.items()}


def _further_series(group: RunGroup, name: str, suffix: str) -> Row:
    """Columns of a series other than the headline, only those that it has."""
    accuracy, loss = group.final(name, TEST_ACCURACY), group.final(name, TEST_LOSS)
    row: Row = {f"series{suffix}": accuracy.mean if accuracy else None}
    if loss:
        row[f"loss_series{suffix}"] = loss.mean
    row |= {key: value for key, value in _model_size(group, name, suffix).items() if value is not None}
    if any(
        f"{group.method}.{name}" in group.first.section("reference", kind)
        for kind in ("accuracy", "parameters")
    ):
        row |= _reference(group, name, row[f"series{suffix}"], suffix)
    return row


def _model_size(group: RunGroup, series: str | None, suffix: str) -> Row:
    size = model_size(group, series) if series is not None else None
    mean, std = (size[0].mean, size[1].mean) if size else (None, None)
    return {f"parameters_model{suffix}": mean, f"parameters_model_std{suffix}": std}


def _reference_source(run: RunRecord) -> str:
    """Name the source of the paper's numbers, with the numbers that no column can be compared with."""
    reference, scores = run.section("reference"), run.section("reference", "score")
    label = on_one_line(reference.get("label") or "the paper")
    numbers = {name: value for name, value in scores.items() if isinstance(value, (int, float))}
    score_texts = [f"{on_one_line(name)} {value:g}" for name, value in numbers.items()]
    metric = on_one_line(reference.get("metric") or "score")
    return (
        f"{label} ({metric}: {', '.join(score_texts)}; score ours by `fedlowrank score`)" if scores else label
    )


def _reference(group: RunGroup, series: str | None, measured_accuracy: float | None, suffix: str) -> Row:
    """Columns of the paper's numbers for a series, and the distance of the measured accuracy from the paper's."""
    keys = [f"{group.method}.{series}"] if suffix else [group.method, f"{group.method}.{series}"]
    accuracy, parameters = (
        [
            reference_values[key]
            for key in keys
            if key in (reference_values := group.first.section("reference", name))
        ]
        for name in ("accuracy", "parameters")
    )
    value = _number(accuracy[0]) if accuracy else None
    return {
        f"reference_percent{suffix}": value,
        f"reference_not_converged{suffix}": int(accuracy[:1] == [None]),
        f"difference_points{suffix}": 100 * measured_accuracy - value
        if measured_accuracy is not None and value is not None
        else None,
        f"reference_parameters_m{suffix}": _number(parameters[0]) if parameters else None,
    }


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _both_ways(costs: Mapping[str, float], name: str) -> float:
    return costs[f"{name}_up"] + costs[f"{name}_down"]


def _mean(values: Iterable[float | None]) -> float | None:
    """Mean of the finite values; integers stay integers if their mean is one."""
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if numbers and all(isinstance(value, int) for value in numbers):
        total = sum(numbers)
        return total // len(numbers) if total % len(numbers) == 0 else total / len(numbers)
    return math.fsum(numbers) / len(numbers) if numbers else None


def _common(values: Iterable[int]) -> int | str | None:
    """Common value if all are equal, otherwise all of them as text."""
    numbers = [int(value) for value in values]
    return numbers[0] if len(set(numbers)) == 1 else " ".join(map(str, numbers)) or None
