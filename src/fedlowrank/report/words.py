"""Sentences of the report, computed from the numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..simulation.records import RunRecord
from .adapters import ranks_in_words
from .groups import Group, Spread, experiment, measure_of, seed, settings, value_text, vary_text
from .measure import ACCURACY, LOSS, Measure
from .routing import collapse_notes
from .summary import part, unseen_clients
from .units import percent, plain

SAME = 5e-5
"""Accuracies closer than this print as equal and are called so."""


def what_was_run(groups: Sequence[Group]) -> str:
    """One paragraph on data, clients, partition, model, rounds and seeds of one experiment."""
    run = groups[0].first
    data, partition, split = (part(run.config, name) for name in ("data", "partition", "split"))
    sizes = [sum(int(row.get(kind) or 0) for row in run.clients) for kind in ("train", "val", "test")]
    architectures = Counter(plain(row.get("architecture", "unnamed")) for row in run.clients)
    rounds = part(run.config, "run")
    said = [f"Data: {_described(data, ('name', 'kind')) or 'not named'}."]
    said.append(
        f"{count(len(run.clients), 'client')} with {sizes[0]} training, {sizes[1]} validation and {sizes[2]} test "
        f"examples in all."
    )
    never = len(unseen_clients(run))
    if never:
        said.append(
            f"{never} of the clients never train and stand apart in all results: means are over the other "
            f"{len(run.clients) - never}."
        )
    if partition:
        said.append(f"Partition: {_described(partition, ('kind', 'name'))}.")
    if split:
        said.append(f"Split: {_described(split, ('kind', 'name'))}.")
    concept = part(run.config, "concept")
    if concept:
        said.append(f"Concept: {_described(concept, ('kind', 'name'))}.")
    changed = part(run.config, "augment")
    if changed:
        said.append(f"Training images are changed at random: {_described(changed, ())}.")
    models = ", ".join(f"{name}\u00a0×\u00a0{n}" if n > 1 else name for name, n in architectures.items())
    said.append(f"Models: {models or 'not named'}.")
    language = part(run.config, "language")
    if language:
        said.append(f"Language model: {_described(language, ('path',))}.")
    # the ranks of the clients follow in words
    adapted = {key: value for key, value in part(run.config, "lora").items() if key != "ranks"}
    if adapted:
        said.append(f"LoRA: {_described(adapted, ())}.")
    ranks = ranks_in_words(run)
    if ranks:
        said.append(f"Ranks of the clients: {ranks}.")
    share = rounds.get("participation")
    taking = f", {percent(float(share), 0)} % of clients in each" if isinstance(share, (int, float)) else ""
    said.append(f"{rounds.get('rounds', len(run.rounds))} rounds{taking}.")
    seeds = list(dict.fromkeys(seed(one.run) for group in groups for one in group.runs))
    said.append(f"{count(len(seeds), 'seed')}: {', '.join(seeds)}." if len(seeds) > 1 else f"One seed: {seeds[0]}.")
    swept = dict.fromkeys(key for group in groups for key, _ in group.vary)
    over = []
    for key in swept:
        values = dict.fromkeys(value_text(dict(group.vary).get(key)) for group in groups)
        over.append(f"{key} over {', '.join(values)}")
    if over:
        said.append(f"Varied: {'; '.join(over)}; settings above are those of the first.")
    return " ".join(said)


def finding(groups: Sequence[Group]) -> list[str]:
    """Who leads, by how much, and whether the intervals over seeds overlap.

    A difference without intervals is stated as such: one seed cannot say whether it would come again.

    Returns:
        The finding; of a sweep, who leads how often and then one sentence for each value.
    """
    variants = list(dict.fromkeys(vary_text(group.vary) for group in groups))
    parts = [[group for group in groups if vary_text(group.vary) == text] for text in variants]
    if len(variants) == 1:
        return [_one_finding(groups)]
    each = [f"{text or 'Without variation'}: {_one_finding(some)}" for text, some in zip(variants, parts, strict=True)]
    measure = measure_of(groups)
    leads = [(ranked[0][0].short, _clear(ranked)) for some in parts if (ranked := _ranked(some, measure))]
    if not leads:
        return each
    if len(dict.fromkeys(group.short for group in groups)) < 2:
        return [_best_setting(groups, measure), *each]
    wins = Counter(name for name, _ in leads)
    said = "; ".join(f"{name} leads at {n} of {len(leads)} settings" for name, n in wins.most_common())
    clear = sum(clear for _, clear in leads)
    if all(result.n == 1 for _, result in _ranked(groups, measure)):
        return [f"{said}. Every run has one seed: no lead is established.", *each]
    return [f"{said}. The lead is outside the 95 % intervals over seeds at {clear} of {len(leads)}.", *each]


def _best_setting(groups: Sequence[Group], measure: Measure) -> str:
    """Which setting of the one method is best, and whether the intervals over seeds say so."""
    ranked = _ranked(groups, measure)
    best, result = ranked[0]
    said = f"{best.short} is best with {vary_text(best.vary) or 'no variation'}, {measure.text(result.mean)}, "
    if _clear(ranked):
        return f"{said}and its 95 % interval over seeds overlaps that of no other setting."
    unknown = _one_seed([result for _, result in ranked], "Every setting")
    if unknown:
        return f"{said.removesuffix(', ')}. {unknown}, so whether it would be best again is not known."
    return f"{said}but its 95 % interval over seeds overlaps others: these runs alone do not establish it."


Ranked = Sequence[tuple[Group, Spread]]


def _ranked(groups: Sequence[Group], measure: Measure) -> Ranked:
    """The groups that have a result, the best first."""
    found = [(group, result) for group in groups if (result := group.final(measure)) is not None]
    return sorted(found, key=lambda pair: measure.rank(pair[1].mean))


def _apart(one: Spread, other: Spread) -> bool:
    return one.ci is not None and other.ci is not None and abs(one.mean - other.mean) > one.ci + other.ci


def _one_seed(results: Sequence[Spread], every: str) -> str:
    """The start of a sentence if some results are of one seed and so have no interval, else nothing."""
    single = sum(result.ci is None for result in results)
    if not single:
        return ""
    return f"{every} ran with one seed" if single == len(results) else f"{single} of {len(results)} ran with one seed"


def _clear(ranked: Ranked) -> bool:
    return len(ranked) > 1 and all(_apart(ranked[0][1], other) for _, other in ranked[1:])


def _level(one: Spread, other: Spread, measure: Measure) -> bool:
    """Whether two results print as equal."""
    if measure == ACCURACY:
        return abs(one.mean - other.mean) < SAME
    return measure.text(one.mean) == measure.text(other.mean)


def _one_finding(groups: Sequence[Group]) -> str:
    measure = measure_of(groups)
    ranked = _ranked(groups, measure)
    if not ranked:
        return "No run was evaluated, so there is nothing to compare."
    (lead, best), rest = ranked[0], ranked[1:]
    value = f"{measure.text(best.mean)} mean {measure.noun} at the last evaluated round"
    if measure == LOSS:
        value = f"a mean {measure.noun} of {measure.text(best.mean)} at the last evaluated round"
    if not rest:
        return f"{lead.short} reached {value}{_interval(best, measure)}."
    second, other = rest[0]
    if _level(best, other, measure):
        level = [group.short for group, result in ranked if _level(best, result, measure)]
        return f"{' and '.join(level)} are level with {value}."
    gap = abs(best.mean - other.mean)
    behind = f"{percent(gap)} percentage points ahead of" if measure == ACCURACY else f"{measure.text(gap)} below"
    way = "" if measure.higher else " (lower is better)"
    said = f"{lead.short} leads{way} with {value}, {behind} {second.short}. "
    if best.ci is None or other.ci is None:
        alone = [group.short for group, result in ranked[:2] if result.ci is None]
        if all(result.ci is None for _, result in ranked):
            who = "Both" if len(ranked) == 2 else "Every method"
        else:
            who = " and ".join(alone)
        return said + f"{who} ran with one seed, so whether the order would hold again is not known."
    n = f"{best.n} seeds" if best.n == other.n else f"{best.n} and {other.n} seeds"
    if not _apart(best, other):
        return said + f"Their 95 % intervals over {n} overlap: these runs alone do not establish the order."
    level = [group.short for group, result in rest if result.ci is not None and not _apart(best, result)]
    alone = [group.short for group, result in rest if result.ci is None]
    if level or alone:
        more = [f"that of {', '.join(level)} overlaps the first"] if level else []
        more += [f"{', '.join(alone)} ran with one seed and has none"] if alone else []
        return said + f"Their 95 % intervals over {n} do not overlap; {'; '.join(more)}."
    others = "that of any other method" if len(rest) > 1 else f"that of {second.short}"
    return said + f"Its 95 % interval over {n} does not overlap {others}."


def notes(groups: Sequence[Group]) -> list[str]:
    """What a reader must know before trusting the comparison of one experiment."""
    said = []
    for group in groups:
        said += [
            f"{group.label}: seed {name} was given more than once; its first run counts." for name in group.repeated
        ]
        status = [f"seed {seed(one.run)} {one.status}" for one in group.runs if one.status]
        if status:
            said.append(f"{group.label}: {'; '.join(status)}. Its numbers are those of the rounds it has.")
        for measure, one, many in ((ACCURACY, "accuracy", "accuracies"), (LOSS, "loss", "losses")):
            bad = sum(score.non_finite for score in group.last_of(group.headline, measure))
            if bad:
                said.append(f"{group.label}: {count(bad, f'client {one}', f'client {many}')} not finite, left out.")
        without = max((score.without for score in group.last), default=0)
        if without:
            said.append(f"{group.label}: {count(without, 'client')} without test examples left out of all means.")
    series = dict.fromkeys(group.headline for group in groups if group.headline is not None)
    if len(series) > 1:
        named = "; ".join(
            f"{name}: {', '.join(g.label for g in groups if g.headline == name)}" for name in series if name is not None
        )
        said.append(f"The methods are judged by different series of {groups[0].measure.noun} ({plain(named)}).")
    counts = {len(group.last) for group in groups}
    if len(counts) > 1:
        said.append("The methods have different numbers of seeds.")
    said += collapse_notes(groups)
    said += _differences(groups)
    return said


def mixed(runs: Sequence[RunRecord]) -> str:
    """A warning if runs of several experiments stand on one page, else nothing."""
    names = list(dict.fromkeys(experiment(run) for run in runs))
    if len(names) < 2:
        return ""
    return (
        f"These runs are of {len(names)} different experiments: {', '.join(names)}. Each has a section of its own; "
        "numbers of different sections do not compare methods."
    )


def flat(value: Any) -> str:
    """A setting for a person: text as it is, anything else as JSON."""
    return plain(value if isinstance(value, str) else json.dumps(value, sort_keys=True))


def _differences(groups: Sequence[Group]) -> list[str]:
    """Settings, other than methods and what is varied, in which the runs of one experiment differ."""
    varied = {key.rpartition(".")[2] for group in groups for key, _ in group.vary}
    seen: dict[str, dict[str, None]] = {}
    every = [settings(one.run) for group in groups for one in group.runs]
    for key in dict.fromkeys(key for one in every for key in one):
        if not key.startswith("method.") and key.rpartition(".")[2] not in varied:
            seen[key] = dict.fromkeys(one.get(key, "none") for one in every)
    said = [f"{plain(key)} ({plain(', '.join(values), 80)})" for key, values in seen.items() if len(values) > 1]
    return [f"The runs differ in more than their methods: {'; '.join(said)}."] if said else []


def _described(values: Mapping[str, Any], first: Sequence[str]) -> str:
    """A part of the configuration in words: its name, then its settings in brackets."""
    name = next((key for key in first if values.get(key)), None)
    rest = [f"{plain(key)} {flat(value)}" for key, value in values.items() if key != name and value is not None]
    inner = plain(", ".join(rest), 200)
    if name is None:
        return inner
    return f"{flat(values[name])} ({inner})" if inner else flat(values[name])


def _interval(value: Spread, measure: Measure) -> str:
    points = " points" if measure == ACCURACY else ""
    return "" if value.ci is None else f" (± {measure.number(value.ci)}{points}, 95 % interval over {value.n} seeds)"


def count(n: int, noun: str, plural: str = "") -> str:
    """A number with its noun."""
    return f"{n} {noun if n == 1 else plural or noun + 's'}"
