"""Warnings: what a reader must know before trusting a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.io.text import format_count, on_one_line
from .statistics.experiments import ComparedExperiment
from .statistics.groups import RunGroup
from .statistics.measures import TEST_ACCURACY, TEST_LOSS
from .statistics.setting_names import CODE, last_part


def find_all_warnings(experiments: Sequence[ComparedExperiment]) -> list[str]:
    """The warnings of each experiment, with its name if there are several."""
    named = len(experiments) > 1
    return [
        f"{experiment.name}: {warning}" if named else warning
        for experiment in experiments
        for warning in find_warnings(experiment.groups)
    ]


def find_warnings(groups: Sequence[RunGroup]) -> list[str]:
    """What a reader must know before trusting the comparison of one experiment."""
    warnings = []
    for group in groups:
        repeated = "was given more than once; its first run counts."
        warnings += [f"{group.label}: seed {seed} {repeated}" for seed in group.repeated]
        status = [f"seed {run.record.seed} {run.status}" for run in group.runs if run.status]
        if status:
            warnings.append(
                f"{group.label}: {'; '.join(status)}. Its numbers are those of the rounds it has."
            )
        status = [f"seed {run.record.seed} {run.status}" for run in group.left_out]
        if status:
            warnings.append(f"{group.label}: {'; '.join(status)}. No result counts it.")
        warnings += _find_unequal_sizes(group)
        warnings += [
            f"{group.label}: seed {run.record.seed} {message}."
            for run in group.runs
            if not run.status and (message := str(run.record.status.get("message", "")))
        ]
        for measure, one, many in ((TEST_ACCURACY, "accuracy", "accuracies"), (TEST_LOSS, "loss", "losses")):
            if bad := int(group.results(measure=measure)["non_finite"].sum()):
                clients = format_count(bad, f"client {one}", f"client {many}")
                warnings.append(f"{group.label}: {clients} not finite, left out.")
        without = group.headline_results["without"].fillna(0).max()
        if without > 0:
            clients = format_count(int(without), "client")
            warnings.append(f"{group.label}: {clients} without a test result left out of all means.")
        warnings += _find_unevaluated(group)
    series: dict[str, list[str]] = {}
    for group in groups:
        if group.headline is not None:
            series.setdefault(group.headline, []).append(group.label)
    if len(series) > 1:
        named = "; ".join(f"{name}: {', '.join(labels)}" for name, labels in series.items())
        noun = groups[0].measure.noun
        warnings.append(f"The methods are judged by different series of {noun} ({on_one_line(named)}).")
    if len({len(group.headline_results) for group in groups}) > 1:
        warnings.append("The methods have different numbers of seeds.")
    remarks = (run.record.config.get("remarks") for group in groups for run in group.runs)
    warnings += dict.fromkeys(
        on_one_line(r) for listed in remarks if isinstance(listed, list) for r in listed
    )
    return warnings + collapse_warnings(groups) + _find_differences(groups)


def _find_unevaluated(group: RunGroup) -> list[str]:
    """A warning if only some clients were drawn for the last evaluation."""
    results = group.headline_results
    missing = int(results["not_evaluated"].fillna(0).max()) if len(results) else 0
    if not missing:
        return []
    row = results.loc[results["not_evaluated"].idxmax()]
    every = missing + int(row[["clients", "without", "non_finite"]].sum())
    return [f"{group.label}: {every - missing} of {every} clients were evaluated; means are over those."]


def _find_unequal_sizes(group: RunGroup) -> list[str]:
    """A warning if the seeds of a group have so different numbers of examples that their data must differ."""
    first = group.first
    here = group.runs[0].examples
    warnings = []
    for run in group.runs[1:]:
        # seeds draw other clients: rounding may move an example of each of them to another part
        least = max(len(first.clients), len(run.record.clients))
        if any(abs(one - other) > least for one, other in zip(here, run.examples, strict=True)):
            texts = [
                f"seed {record.seed} has {train} training, {val} validation and {test} test examples"
                for record, (train, val, test) in ((first, here), (run.record, run.examples))
            ]
            warnings.append(f"{group.label}: {' and '.join(texts)}. Are these seeds of the same data?")
    return warnings


def collapse_warnings(groups: Sequence[RunGroup]) -> list[str]:
    """A warning for each group with a router that chose one cluster for all clients, with what may help."""
    warnings = []
    for group in groups:
        collapses = [(run.record.seed, run.collapse) for run in group.runs if run.collapse]
        if collapses:
            first = collapses[0][1]
            where = ", ".join(f"seed {seed}: cluster {collapse.cluster}" for seed, collapse in collapses)
            # Methods that choose clusters by their losses have no router that could learn more slowly.
            advice = "another seed, for the clusters then start from other values"
            if group.first.section("method", "fields", "router"):
                advice = "a lower learning rate of the router (router.lr), noise on it while it trains "
                advice += "(router.noise), or another seed"
            warnings.append(
                f"{group.label}: the router collapsed. At round {first.round} one of {first.clusters} clusters has the "
                f"largest share at all {first.clients} clients ({where}, counted from 0), so the others serve "
                f"no client and nothing tells the clients apart. What may help: {advice}."
            )
    return warnings


def _find_differences(groups: Sequence[RunGroup]) -> list[str]:
    """Settings, other than methods and what is varied, in which the runs of one experiment differ."""
    varied = {last_part(key) for group in groups for key, _ in group.vary}
    every = [run.settings for group in groups for run in group.runs]
    differences = []
    for key in dict.fromkeys(key for one in every for key in one):
        # the code of a method is in its own runs alone
        having = [one for one in every if key in one or not key.startswith(CODE)]
        values = dict.fromkeys(one.get(key, "none") for one in having)
        if len(values) > 1 and not key.startswith("method.") and last_part(key) not in varied:
            differences.append(f"{on_one_line(key)} ({on_one_line(', '.join(values), 80)})")
    return [f"The runs differ in more than their methods: {'; '.join(differences)}."] if differences else []


def warn_of_several(experiments: Sequence[ComparedExperiment]) -> str:
    """A warning if runs of several experiments stand on one page, else nothing."""
    names = [experiment.name for experiment in experiments]
    if len(names) < 2:
        return ""
    return (
        f"These runs are of {len(names)} different experiments: {', '.join(names)}. Each has a section of "
        "its own; numbers of different sections do not compare methods."
    )
