"""Sentences on results: which method is best, by how much, and how sure that is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ..core.io.text import join_words
from .number_formats import MISSING, format_p, format_signed
from .statistics.groups import RunGroup
from .statistics.measures import Measure
from .statistics.modes import Modes
from .statistics.paired import Family, Versus
from .statistics.run_statistics import Estimate
from .statistics.significance import ALPHA

ONE_SEED = "A test over the clients of one seed says nothing about other seeds."
MAX_NAMED_METHODS = 3  # most methods that a sentence names one by one


class Finding(NamedTuple):
    """What a comparison shows."""

    result: str  # the best result, and its difference from a baseline or the second best
    others: str  # the other groups; may be empty
    test: str  # how it was tested and what the test cannot tell; may be empty

    def __str__(self) -> str:
        return " ".join(part for part in self if part)


class Headline(NamedTuple):
    """The main result as a card shows it: one number, and one interval or condition of it."""

    who: str  # the best methods
    value: str  # the number, with unit
    interval: str  # of the number; ``in 4 of 5 seeds`` if results are bimodal; may be empty
    what: str  # what the number is
    claim: str  # how the other methods compare, without numbers; may be empty


def state_findings(families: Sequence[Family]) -> list[Finding]:
    """What the runs of one experiment show, and how sure it is.

    Returns:
        One finding; of a sweep over several methods, how often each leads and then one finding a setting.
    """
    if len(families) == 1:
        return [_describe(families[0])]
    texts = [(family.text or "Without variation", _describe(family)) for family in families]
    each = [found._replace(result=f"{text}: {found.result}") for text, found in texts]
    leads = [family for family in families if family.best]
    if not leads:
        return each
    wins = Counter(family.ranked[0][0].short for family in leads)
    text = "; ".join(f"{name} leads at {n} of {len(leads)} settings" for name, n in wins.most_common())
    clear = sum(bool(f.others) and all(one.is_worse for one in f.others) for f in leads)
    sure = f"The lead over every other method is significant at {clear} of them."
    limit = ONE_SEED if any(family.is_over_clients for family in leads) else ""
    return [Finding(f"{text}.", sure, limit), *each]


def state_headline(families: Sequence[Family]) -> Headline:
    """The main result of one experiment, as short as it can be."""
    if len(families) > 1 and (leads := [family for family in families if family.best]):
        name, wins = Counter(family.ranked[0][0].short for family in leads).most_common(1)[0]
        noun = families[0].measure.noun
        return Headline(name, f"{wins} of {len(leads)}", "settings", f"where it has the best mean {noun}", "")
    family = families[0]
    if not family.ranked:
        return Headline("", MISSING, "", "No run was evaluated, so there is nothing to compare.", "")
    measure, best = family.measure, family.ranked[0][1]
    level = [group for group, result in family.ranked if _is_level(best, result, measure)]
    value, interval = _format_value(best.mean, measure), _format_interval(best, measure)
    what = f"mean {measure.noun}{' over seeds, with its 95 % interval' if best.n > 1 else ''}"
    if family.others:
        what = f"{'lowest' if measure.is_loss else 'highest'} {what}"
    if best.diverged:
        interval = f"without the {best.diverged} that diverged"
    elif best.n == 1:
        interval = "one seed"
    elif best.modes:
        value = f"{'≤' if measure.is_loss else '≥'} {_format_value(best.modes.bound, measure)}"
        interval, what = (
            f"in {best.modes.reached} of {best.modes.n} seeds",
            f"{measure.noun}; other seeds fail",
        )
    worse = [one for one in family.others if one.is_worse]
    same = [one for one in family.others if one.is_open and one.group not in level]
    claims = []
    if worse:
        is_all = len(worse) == len(family.others) > 1
        claims.append(f"Significantly better than {'all others' if is_all else _list(worse, family)}.")
    if same:
        claims.append(f"No significant difference from {_list(same, family)}.")
    names = join_words([_name(group, family) for group in level])
    return Headline(names, value, interval, what, " ".join(claims))


def _describe(family: Family) -> Finding:
    if not family.ranked:
        return Finding("No run was evaluated, so there is nothing to compare.", "", "")
    measure, best = family.measure, family.ranked[0][1]
    level = [group for group, result in family.ranked if _is_level(best, result, measure)]
    names = join_words([_name(group, family) for group in level])
    value = _format_result(best, measure)
    if not family.others:
        return Finding(f"{names} reaches a mean {measure.noun} of {value}.", _describe_groups(family), "")
    order = "lowest" if measure.is_loss else "highest"
    head = f"{names} {'reaches' if len(level) == 1 else 'reach'} the {order} mean {measure.noun}, {value}"
    tested = [one for one in family.others if one.is_worse or one.is_open]
    if not tested:
        return Finding(f"{head}.", _describe_groups(family), _describe_test(family))
    # A baseline if there is one, else the second best.
    first = next((one for one in tested if sends_nothing(one.group)), tested[0])
    rest = [one for one in tested if one is not first]
    link = ("." if best.modes else ":") if first.is_worse else "."
    result = (
        f"{head}{link} {'That is ' if best.modes and first.is_worse else ''}{_describe_one(first, family)}"
    )
    others = " ".join(filter(None, (_describe_others(rest, first, family), _describe_groups(family))))
    return Finding(result, others, _describe_test(family))


def _describe_groups(family: Family) -> str:
    """In how many seeds the methods that choose clusters find all groups of clients."""
    known = [
        (_name(group, family), found) for group, result in family.ranked if (found := result.groups_found)
    ]
    texts = [f"by {name} in {k} of {n} seed{'s' * (n > 1)}" for name, (k, n) in known]
    return f"All groups of clients are found {join_words(texts)}." if texts else ""


def _describe_others(others: Sequence[Versus], first: Versus, family: Family) -> str:
    worse, level = [one for one in others if one.is_worse], [one for one in others if one.is_open]
    sentences = []
    if worse:
        also = "also " if first.is_worse else ""
        is_all = first.is_worse and len(worse) == len(family.others) - 1 > 1
        names = f"all {len(worse)} others" if is_all else _list(worse, family)
        sentences.append(f"It is {also}significantly better than {names} (p < {ALPHA:.2g}).")
    if level:
        least = f"{'p' if len(level) == 1 else 'smallest p'} = {format_p(min(one.p for one in level))}"
        sentences.append(f"No difference from {_list(level, family)} can be seen ({least}).")
    return " ".join(sentences)


def _describe_one(one: Versus, family: Family) -> str:
    """The best against one group, in numbers."""
    gap, measure, name = one.difference, family.measure, _name(one.group, family)
    assert gap is not None  # it was tested
    # How much better the best is.
    sign = 1 if measure.is_loss else -1
    mean, low, high = sign * gap.mean, *sorted((sign * gap.low, sign * gap.high))
    p = format_p(one.p)
    interval = "" if math.isnan(low) else f" {measure.format_interval(low, high)}"
    sure = f"{interval}, p {p if p.startswith('<') else f'= {p}'}"
    size = measure.format_short(abs(mean))
    if one.is_worse:
        text = f"{size} below {name}" if measure.is_loss else f"+{size} points over {name}"
        return f"{text}{sure}."
    size = format_signed(f"{size if mean >= 0 else f'-{size}'}")
    text = f"{size} lower" if measure.is_loss else f"{'+' if mean > 0 else ''}{size} points"
    return f"No difference from {name} can be seen: {text}{sure}."


def _describe_test(family: Family) -> str:
    """Names the test, and says what was not tested and what the test cannot tell."""
    sentences = [f"{family.test[:1].upper()}{family.test[1:]}."] if family.test else []
    if family.is_over_clients:
        sentences.append(ONE_SEED)
    bimodal = [_name(group, family) for group, result in family.ranked if result.modes]
    if bimodal and family.test:
        sentences.append(
            f"Seeds of {join_words(bimodal)} succeed or fail, so a test of means is a rough guide."
        )
    diverged = [(_name(group, family), result.diverged) for group, result in family.ranked if result.diverged]
    if diverged:
        names = join_words([f"{name} ({what})" for name, what in diverged])
        sentences.append(f"Diverged, so last and not tested: {names}.")
    whole = [group for group, result in family.ranked if not result.diverged]
    untested = [one for one in family.others if one.group in whole and not (one.is_worse or one.is_open)]
    if untested:
        verb = "has" if len(untested) == 1 else "have"
        few = f"{verb} no seed with the same clients as the best, or only one client"
        sentences.append(f"Not tested: {_list(untested, family)}, which {few}.")
    return " ".join(sentences)


def sends_nothing(group: RunGroup) -> bool:
    """Whether the clients of a group train without any message, as Standalone does."""
    return all(run.sends_nothing for run in group.runs)


def _format_result(result: Estimate, measure: Measure) -> str:
    """A mean with its 95 % interval over seeds, such as ``93.1 % [92.0, 94.2] over 5 seeds``."""
    value = _format_value(result.mean, measure)
    if result.diverged:
        value = f"{value} without the {result.diverged} that diverged"
    if result.n == 1:
        return f"{value} with one seed"
    if result.modes:
        return f"{value}: {_format_modes(result.modes, measure)}"
    return f"{value} {_format_interval(result, measure)} over {result.n} seeds"


def _format_value(value: float, measure: Measure) -> str:
    return f"{measure.format_short(value)} {measure.unit}".rstrip()


def _format_interval(result: Estimate, measure: Measure) -> str:
    """The 95 % interval over seeds, cut to possible values."""
    least, most = measure.bounds
    return measure.format_interval(max(least, result.mean - result.ci), min(most, result.mean + result.ci))


def _format_modes(modes: Modes, measure: Measure) -> str:
    """Both groups of seeds, such as ``at least 92.9 % in 2 of 3 seeds and at most 67.5 % in the other``."""
    good, bad = ("at most", "at least") if measure.is_loss else ("at least", "at most")
    others = "the other" if modes.n - modes.reached == 1 else f"the other {modes.n - modes.reached}"
    first = f"{good} {_format_value(modes.bound, measure)} in {modes.reached} of {modes.n} seeds"
    return f"{first} and {bad} {_format_value(modes.rest, measure)} in {others}"


def _is_level(one: Estimate, other: Estimate, measure: Measure) -> bool:
    """Whether two results are printed as equal in the tables."""
    return measure.format(one.mean) == measure.format(other.mean) and one.diverged == other.diverged


def _name(group: RunGroup, family: Family) -> str:
    is_one_method = len({other.short for other, _ in family.ranked}) < 2 < 1 + len(family.ranked)
    return group.label if is_one_method else group.short


def _list(others: Sequence[Versus], family: Family) -> str:
    names = [_name(one.group, family) for one in others]
    if len(names) > MAX_NAMED_METHODS + 1:
        names = [*names[:MAX_NAMED_METHODS], f"{len(names) - MAX_NAMED_METHODS} others"]
    return join_words(names)
