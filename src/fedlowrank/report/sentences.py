"""Sentences of the report on the setting of an experiment, and warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.io.text import on_one_line
from ..results.measurements import Floats
from ..results.records import RunRecord
from .low_rank import format_ranks
from .statistics.experiments import ComparedExperiment
from .statistics.groups import RunGroup
from .statistics.measures import ACCURACY, LOSS
from .statistics.setting_names import CODE, SECTIONS, last_part, value_text
from .tables.number_formats import format_percent
from .trust import describe_trust

_SAMPLING = {
    "poisson": ", each drawn by itself (Poisson sampling)",
    "size": ", drawn in proportion to their numbers of training examples",
    "loss": ", those with the highest training loss of some drawn by size (Power-of-Choice)",
}
"""How clients are drawn, by ``run.sampling``."""


def describe_setting(groups: Sequence[RunGroup]) -> str:
    """One paragraph on data, clients, partition, model, rounds and seeds of one experiment."""
    run = groups[0].first
    parts = {name: run.section(name) for name in SECTIONS}
    sizes = _count_examples(run)
    found = [
        f"Data: {_describe(parts['data'], ('name', 'kind')) or 'not named'}.",
        f"{count(len(run.clients), 'client')} with {sizes[0]} training, {sizes[1]} validation and {sizes[2]} "
        "test examples in all.",
    ]
    if unseen := len(run.measurements.flagged("unseen")):
        found.append(
            f"{unseen} of the clients never train and stand apart in all results: means are over the other "
            f"{len(run.clients) - unseen}."
        )
    found += [
        f"{name.capitalize()}: {_describe(parts[name], ('kind', 'name'))}."
        for name in ("partition", "split", "concept")
        if parts[name]
    ]
    if parts["augment"]:
        found.append(f"Training images are changed at random: {_describe(parts['augment'])}.")
    models = Counter(on_one_line(row.get("architecture", "unnamed")) for row in run.clients)
    names = ", ".join(f"{name}\u00a0×\u00a0{n}" if n > 1 else name for name, n in models.items())
    found.append(f"Models: {names or 'not named'}.")
    if language := run.section("language"):
        found.append(f"Language model: {_describe(language, ('path',))}.")
    # The ranks of the clients follow in words.
    if lora := {key: value for key, value in run.section("lora").items() if key != "ranks"}:
        found.append(f"LoRA: {_describe(lora)}.")
    if ranks := format_ranks(run):
        found.append(f"Ranks of the clients: {ranks}.")
    share = parts["run"].get("participation")
    part = f", {format_percent(share, 0)} % of clients in each" if isinstance(share, (int, float)) else ""
    coin = _SAMPLING.get(str(parts["run"].get("sampling")), "")
    found.append(f"{parts['run'].get('rounds', len(run.rounds))} rounds{part}{coin}.")
    found += describe_trust(run)
    seeds = list(dict.fromkeys(one.record.seed for group in groups for one in group.runs))
    number = count(len(seeds), "seed") if len(seeds) > 1 else "One seed"
    found.append(f"{number}: {', '.join(seeds)}.")
    varied = []
    for key in dict.fromkeys(key for group in groups for key, _ in group.vary):
        values = dict.fromkeys(value_text(dict(group.vary).get(key)) for group in groups)
        varied.append(f"{key} over {', '.join(values)}")
    if varied:
        found.append(f"Varied: {'; '.join(varied)}; settings above are those of the first.")
    return " ".join(found)


def _describe(values: Mapping[str, Any], names: Sequence[str] = ()) -> str:
    """A section of the configuration in words: its name, then its settings in brackets."""
    name = next((key for key in names if values.get(key)), None)
    rest = [f"{on_one_line(k)} {value_text(v)}" for k, v in values.items() if k != name and v is not None]
    inner = on_one_line(", ".join(rest), 200)
    if name is None:
        return inner
    return f"{value_text(values[name])} ({inner})" if inner else value_text(values[name])


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
        for measure, one, many in ((ACCURACY, "accuracy", "accuracies"), (LOSS, "loss", "losses")):
            if bad := int(group.results(measure=measure)["non_finite"].sum()):
                clients = count(bad, f"client {one}", f"client {many}")
                warnings.append(f"{group.label}: {clients} not finite, left out.")
        if without := int(group.results()["without"].fillna(0).max() or 0) if len(group.results()) else 0:
            clients = count(without, "client")
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
    if len({len(group.results()) for group in groups}) > 1:
        warnings.append("The methods have different numbers of seeds.")
    remarks = (run.record.config.get("remarks") for group in groups for run in group.runs)
    warnings += dict.fromkeys(
        on_one_line(r) for listed in remarks if isinstance(listed, list) for r in listed
    )
    return warnings + collapse_warnings(groups) + _find_differences(groups)


def _find_unevaluated(group: RunGroup) -> list[str]:
    """A warning if only some clients were drawn for the last evaluation."""
    results = group.results()
    missing = int(results["not_evaluated"].fillna(0).max()) if len(results) else 0
    if not missing:
        return []
    row = results.loc[results["not_evaluated"].idxmax()]
    every = missing + int(row[["clients", "without", "non_finite"]].sum())
    return [f"{group.label}: {every - missing} of {every} clients were evaluated; means are over those."]


def _find_unequal_sizes(group: RunGroup) -> list[str]:
    """A warning if the seeds of a group have so different numbers of examples that their data must differ."""
    first = group.first
    sizes = {run: _count_examples(run.record) for run in group.runs}
    here = _count_examples(first)
    warnings = []
    for run in group.runs[1:]:
        # seeds draw other clients: rounding may move an example of each of them to another part
        least = max(len(first.clients), len(run.record.clients))
        if any(abs(one - other) > least for one, other in zip(here, sizes[run], strict=True)):
            texts = [
                f"seed {record.seed} has {train} training, {val} validation and {test} test examples"
                for record, (train, val, test) in ((first, here), (run.record, sizes[run]))
            ]
            warnings.append(f"{group.label}: {' and '.join(texts)}. Are these seeds of the same data?")
    return warnings


def _count_examples(run: RunRecord) -> tuple[int, ...]:
    """Training, validation and test examples of all clients."""
    return tuple(sum(int(row.get(split) or 0) for row in run.clients) for split in ("train", "val", "test"))


def collapse_warnings(groups: Sequence[RunGroup]) -> list[str]:
    """A warning for each group with a router that chose one cluster for all clients, with what may help."""
    warnings = []
    for group in groups:
        found = [(run.record.seed, *last) for run in group.runs if (last := _collapse(run.record))]
        if found:
            _, at, clusters, clients, _ = found[0]
            where = ", ".join(f"seed {seed}: cluster {cluster}" for seed, *_, cluster in found)
            # Methods that choose clusters by their losses have no router that could learn more slowly.
            advice = "another seed, for the clusters then start from other values"
            if group.first.section("method", "fields", "router"):
                advice = "a lower learning rate of the router (router.lr), noise on it while it trains "
                advice += "(router.noise), or another seed"
            warnings.append(
                f"{group.label}: the router collapsed. At round {at} one of {clusters} clusters has the "
                f"largest share at all {clients} clients ({where}, counted from 0), so the others serve "
                f"no client and nothing tells the clients apart. What may help: {advice}."
            )
    return warnings


def find_collapse(routes: Floats) -> int | None:
    """The one cluster that has the largest share at every client with finite shares ``[clients, clusters]``.

    None if clients differ or have no single largest share, and where there is no choice: one cluster, or
    fewer than two clients.
    """
    finite = routes[np.isfinite(routes).all(axis=1)]
    if len(finite) < 2 or finite.shape[1] < 2:
        return None
    # Before training all shares are equal and choose no cluster, though argmax would name the first.
    is_single = (finite == finite.max(axis=1, keepdims=True)).sum(axis=1) == 1
    chosen = set(finite.argmax(axis=1).tolist())
    return chosen.pop() if is_single.all() and len(chosen) == 1 else None


def _collapse(run: RunRecord) -> tuple[int, int, int, int] | None:
    """Round, clusters, clients and the cluster that all of them chose in the end, unless that is right."""
    rounds = run.measurements.routes()
    if not rounds:
        return None
    at, routes = max(rounds.items())
    cluster, truth = find_collapse(routes), run.measurements.true_clusters(len(routes))
    is_right = truth[0] is not None and len(set(truth)) == 1
    # A router that is given the true cluster does not choose.
    router = run.section("method", "fields", "router")
    if cluster is None or is_right or router.get("routing") == "optimal":
        return None
    return at, routes.shape[1], len(routes), cluster


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


def warn_of_mixture(experiments: Sequence[ComparedExperiment]) -> str:
    """A warning if runs of several experiments stand on one page, else nothing."""
    names = [experiment.name for experiment in experiments]
    if len(names) < 2:
        return ""
    return (
        f"These runs are of {len(names)} different experiments: {', '.join(names)}. Each has a section of "
        "its own; numbers of different sections do not compare methods."
    )


def count(n: int, noun: str, plural: str = "") -> str:
    """A number with its noun."""
    return f"{n} {noun if n == 1 else plural or noun + 's'}"
