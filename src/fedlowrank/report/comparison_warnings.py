"""Finds warnings that a reader must know before trusting a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.io.text import format_count, join_words, on_one_line
from ..results.varied_settings import last_part
from .statistics.experiments import ComparedExperiment
from .statistics.groups import RunGroup
from .statistics.measures import TEST_ACCURACY, TEST_LOSS
from .statistics.setting_names import CODE


def find_all_warnings(experiments: Sequence[ComparedExperiment]) -> list[str]:
    """List the warnings of each experiment, with its name if there are several."""
    has_several = len(experiments) > 1
    return [
        f"{experiment.name}: {warning}" if has_several else warning
        for experiment in experiments
        for warning in find_warnings(experiment.groups)
    ]


def find_warnings(groups: Sequence[RunGroup]) -> list[str]:
    """List the warnings about the comparison of one experiment."""
    warnings = []
    for group in groups:
        suffix = "was given more than once; its first run counts."
        warnings += [f"{group.label}: seed {seed} {suffix}" for seed in group.repeated_seeds]
        statuses = [f"seed {run.record.seed} {run.status}" for run in group.runs if run.status]
        if statuses:
            warnings.append(
                f"{group.label}: {'; '.join(statuses)}. Its numbers are those of the rounds it has."
            )
        statuses = [f"seed {run.record.seed} {run.status}" for run in group.unfinished_runs]
        if statuses:
            warnings.append(f"{group.label}: {'; '.join(statuses)}. No result counts it.")
        warnings += _find_unequal_sizes(group)
        warnings += [
            f"{group.label}: seed {run.record.seed} {message}."
            for run in group.runs
            if not run.status and (message := str(run.record.status.get("message", "")))
        ]
        for measure, singular, plural in (
            (TEST_ACCURACY, "accuracy", "accuracies"),
            (TEST_LOSS, "loss", "losses"),
        ):
            nonfinite_count = int(group.results(measure=measure)["non_finite"].sum())
            if measure.is_loss:
                # a curve of losses has no round in which all are not finite
                nonfinite_count = max(nonfinite_count, int(group.headline_results["diverged"].sum()))
            if nonfinite_count:
                clients_text = format_count(nonfinite_count, f"client {singular}", f"client {plural}")
                warnings.append(f"{group.label}: {clients_text} not finite, left out.")
        missing_count = group.headline_results["without"].fillna(0).max()
        if missing_count > 0:
            clients_text = format_count(int(missing_count), "client")
            warnings.append(f"{group.label}: {clients_text} without a test result left out of all means.")
        warnings += _find_unevaluated(group)
        warnings += _find_untrained(group)
    series: dict[str, list[str]] = {}
    for group in groups:
        if group.headline is not None:
            series.setdefault(group.headline, []).append(group.label)
    if len(series) > 1:
        series_text = "; ".join(f"{name}: {', '.join(labels)}" for name, labels in series.items())
        measure_name = groups[0].measure.sentence_name
        warnings.append(
            f"The methods are judged by different series of {measure_name} ({on_one_line(series_text)})."
        )
    if len({len(group.headline_results) for group in groups}) > 1:
        warnings.append("The methods have different numbers of seeds.")
    remarks = (run.record.config.get("remarks") for group in groups for run in group.runs)
    warnings += dict.fromkeys(
        on_one_line(r) for run_remarks in remarks if isinstance(run_remarks, list) for r in run_remarks
    )
    return warnings + collapse_warnings(groups) + _find_differences(groups)


def _find_unevaluated(group: RunGroup) -> list[str]:
    """Warn if only some clients were drawn for the last evaluation."""
    results = group.headline_results
    unevaluated_count = int(results["not_evaluated"].fillna(0).max()) if len(results) else 0
    if not unevaluated_count:
        return []
    row = results.loc[results["not_evaluated"].idxmax()]
    total_count = unevaluated_count + int(row[["clients", "without", "non_finite"]].sum())
    return [
        f"{group.label}: {total_count - unevaluated_count} of {total_count} clients were evaluated; means are over those."
    ]


def _find_untrained(group: RunGroup) -> list[str]:
    """Warn of seeds in which no reply of a client was used, so that the server has learned nothing."""
    seeds = [run.record.seed for run in group.runs if run.record.has_used_no_reply]
    if not seeds:
        return []
    has_drawn = any(record.participants for run in group.runs for record in run.record.rounds)
    problem, consequence = "no client was drawn", "the models were not trained. Raise run.participation"
    if has_drawn:
        problem, consequence = "no reply of a client was used", "the server has learned nothing"
    return [
        f"{group.label}: {problem} in any round of {'seed' if len(seeds) == 1 else 'seeds'} {join_words(seeds)}, so "
        f"{consequence}."
    ]


def _find_unequal_sizes(group: RunGroup) -> list[str]:
    """Warn if the seeds of a group differ so much in their numbers of examples that their data must differ."""
    first_record = group.first
    first_counts = group.runs[0].examples
    warnings = []
    for run in group.runs[1:]:
        # seeds draw other clients, and rounding may move an example of each client to another part
        tolerance = max(len(first_record.clients), len(run.record.clients))
        if any(
            abs(count - other_count) > tolerance
            for count, other_count in zip(first_counts, run.examples, strict=True)
        ):
            texts = [
                f"seed {record.seed} has {train} training, {val} validation and {test} test examples"
                for record, (train, val, test) in ((first_record, first_counts), (run.record, run.examples))
            ]
            warnings.append(f"{group.label}: {' and '.join(texts)}. Are these seeds of the same data?")
    return warnings


def collapse_warnings(groups: Sequence[RunGroup]) -> list[str]:
    """Warn of each group in which one cluster was chosen for all clients, with advice."""
    warnings = []
    for group in groups:
        collapses = [(run.record.seed, run.collapse) for run in group.runs if run.collapse]
        if collapses:
            example = collapses[0][1]
            clusters_text = ", ".join(
                f"seed {seed}: cluster {collapse.cluster}" for seed, collapse in collapses
            )
            # Methods that choose clusters by their losses have no router whose learning could be slowed.
            advice = "another seed, for the clusters then start from other values"
            if group.first.section("method", "fields", "router"):
                advice = "a lower learning rate of the router (router.lr), noise on it while it trains "
                advice += "(router.noise), or another seed"
            warnings.append(
                f"{group.label}: all clients chose one cluster. At round {example.round} one of {example.clusters} clusters "
                f"has the largest share at all {example.clients} clients ({clusters_text}, counted from 0), so the others serve "
                f"no client and nothing tells the clients apart. What may help: {advice}."
            )
    return warnings


def _find_differences(groups: Sequence[RunGroup]) -> list[str]:
    """List settings, other than methods and varied ones, in which the runs of one experiment differ.

    Runs are compared with those that have the same varied values, because a varied field may change others, such as
    the architecture.
    """
    groups_by_variation: dict[str, list[RunGroup]] = {}
    for group in groups:
        groups_by_variation.setdefault(str(group.vary), []).append(group)
    differences = dict.fromkeys(
        text for same_groups in groups_by_variation.values() for text in _find_other_settings(same_groups)
    )
    return [f"The runs differ in more than their methods: {'; '.join(differences)}."] if differences else []


def _find_other_settings(groups: Sequence[RunGroup]) -> list[str]:
    """Describe settings, other than those of methods, in which groups with the same varied values differ."""
    varied_names = {last_part(key) for group in groups for key, _ in group.vary}
    all_settings = [run.settings for group in groups for run in group.runs]
    differences = []
    for key in dict.fromkeys(key for settings in all_settings for key in settings):
        # only a method's own runs hold its code
        settings_with_key = [
            settings for settings in all_settings if key in settings or not key.startswith(CODE)
        ]
        values = dict.fromkeys(settings.get(key, "none") for settings in settings_with_key)
        if len(values) > 1 and not key.startswith("method.") and last_part(key) not in varied_names:
            differences.append(f"{on_one_line(key)} ({on_one_line(', '.join(values), 80)})")
    return differences


def warn_of_several(experiments: Sequence[ComparedExperiment]) -> str:
    """Warn if a page shows runs of several experiments; otherwise return an empty text."""
    names = [experiment.name for experiment in experiments]
    if len(names) < 2:
        return ""
    return (
        f"These runs are of {len(names)} different experiments: {', '.join(names)}. Each has a section of "
        "its own; numbers of different sections do not compare methods."
    )
