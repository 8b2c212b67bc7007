"""States results in sentences: which method is best, by how much, and how sure that is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ..core.io.text import format_count, join_words
from .number_formats import MISSING, format_signed, state_p
from .statistics.groups import RunGroup
from .statistics.measures import Measure
from .statistics.modes import Modes
from .statistics.paired import ComparisonWithBest, Family
from .statistics.run_statistics import Estimate
from .statistics.significance import ALPHA

NOT_EVALUATED = "No run was evaluated, so there is nothing to compare."
ALL_DIVERGED = "Every run diverged, so no method has a result."
ONE_SEED = "A test over the clients of one seed says nothing about other seeds."
MAX_NAMED_METHODS = 3  # maximum number of methods that a sentence names one by one


class Finding(NamedTuple):
    """Result of a comparison in sentences."""

    result: str  # sentence on the best result and its difference from a baseline or the second best
    others: str  # sentence on the other groups; may be empty
    test: str  # sentence on the test and what it cannot show; may be empty

    def __str__(self) -> str:
        return " ".join(text for text in self if text)


class ResultCard(NamedTuple):
    """The main result as a card shows it: one number, with one interval or condition."""

    best_methods: str  # names of the best methods
    value: str  # number with unit
    interval: str  # interval of the number; ``in 4 of 5 seeds`` if results are bimodal; may be empty
    measure: str  # name of the number
    claim: str  # comparison with the other methods, without numbers; may be empty


def state_findings(families: Sequence[Family]) -> list[Finding]:
    """State the results of one experiment, and how sure they are.

    Returns:
        One finding; for a sweep over several methods, a finding on how often each leads, then one for each setting.
    """
    if len(families) == 1:
        return [_describe(families[0])]
    texts = [(family.variation or "Without variation", _describe(family)) for family in families]
    findings = [finding._replace(result=f"{text}: {finding.result}") for text, finding in texts]
    leading_families = [family for family in families if family.best]
    if not leading_families:
        return findings
    wins = Counter(family.ranked[0][0].short_label for family in leading_families)
    text = "; ".join(
        f"{name} leads at {n} of {len(leading_families)} settings" for name, n in wins.most_common()
    )
    clear_count = sum(
        bool(f.comparisons) and all(comparison.is_worse for comparison in f.comparisons)
        for f in leading_families
    )
    significance = f"The lead over every other method is significant at {clear_count} of them."
    limit = ONE_SEED if any(family.is_over_clients for family in leading_families) else ""
    return [Finding(f"{text}.", significance, limit), *findings]


def state_headline(families: Sequence[Family]) -> ResultCard:
    """State the main result of one experiment, as briefly as possible."""
    if len(families) > 1 and (leading_families := [family for family in families if family.best]):
        name, wins = Counter(family.ranked[0][0].short_label for family in leading_families).most_common(1)[0]
        measure_name = families[0].measure.sentence_name
        return ResultCard(
            name,
            f"{wins} of {len(leading_families)}",
            "settings",
            f"where it has the best mean {measure_name}",
            "",
        )
    family = next((family for family in families if not family.has_diverged), families[0])
    if not family.ranked or family.has_diverged:
        return ResultCard("", MISSING, "", ALL_DIVERGED if family.has_diverged else NOT_EVALUATED, "")
    measure, best = family.measure, family.ranked[0][1]
    level_groups = [group for group, result in family.ranked if _is_level(best, result, measure)]
    value, interval = _format_value(best.mean, measure), _format_interval(best, measure)
    description = f"mean {measure.sentence_name}{' over seeds, with its 95 % interval' if best.n > 1 else ''}"
    if family.comparisons:
        description = f"{'lowest' if measure.is_loss else 'highest'} {description}"
    if best.diverged:
        interval = f"without the {best.diverged} that diverged"
    elif best.n == 1:
        interval = "one seed"
    elif best.modes:
        value = f"{'≤' if measure.is_loss else '≥'} {_format_value(best.modes.bound, measure)}"
        interval, description = (
            f"in {best.modes.success_count} of {best.modes.n} seeds",
            f"{measure.sentence_name}; other seeds fail",
        )
    worse_comparisons = [comparison for comparison in family.comparisons if comparison.is_worse]
    ties = [
        comparison
        for comparison in family.comparisons
        if comparison.is_inconclusive and comparison.group not in level_groups
    ]
    claims = []
    if worse_comparisons:
        is_all = len(worse_comparisons) == len(family.comparisons) > 1
        claims.append(
            f"Significantly better than {'all others' if is_all else _list(worse_comparisons, family)}."
        )
    if ties:
        claims.append(f"No significant difference from {_list(ties, family)}.")
    if contradictory := [comparison for comparison in family.comparisons if comparison.is_contradictory]:
        claims.append(f"Mean and ranks disagree about {_list(contradictory, family)}.")
    claims += [
        f"{_state_better(comparison, family)}." for comparison in family.comparisons if comparison.is_better
    ]
    names = join_words([_name(group, family) for group in level_groups])
    return ResultCard(names, value, interval, description, " ".join(claims))


def _describe(family: Family) -> Finding:
    if not family.ranked or family.has_diverged:
        return Finding(ALL_DIVERGED if family.has_diverged else NOT_EVALUATED, "", "")
    measure, best = family.measure, family.ranked[0][1]
    level_groups = [group for group, result in family.ranked if _is_level(best, result, measure)]
    names = join_words([_name(group, family) for group in level_groups])
    value = _format_result(best, measure)
    if not family.comparisons:
        return Finding(
            f"{names} reaches a mean {measure.sentence_name} of {value}.", _describe_groups(family), ""
        )
    order = "lowest" if measure.is_loss else "highest"
    head = f"{names} {'reaches' if len(level_groups) == 1 else 'reach'} the {order} mean {measure.sentence_name}, {value}"
    comparisons = [comparison for comparison in family.comparisons if comparison.is_tested]
    if not comparisons:
        return Finding(f"{head}.", _describe_groups(family), _describe_test(family))
    # A baseline if there is one, otherwise the second best; a group that is better on the pairs comes last.
    baseline = min(
        comparisons, key=lambda comparison: (comparison.is_better, not sends_nothing(comparison.group))
    )
    other_comparisons = [comparison for comparison in comparisons if comparison is not baseline]
    separator = ("." if best.modes else ":") if baseline.is_worse else "."
    result = f"{head}{separator} {'That is ' if best.modes and baseline.is_worse else ''}{_describe_one(baseline, family)}"
    others_text = " ".join(
        filter(None, (_describe_others(other_comparisons, baseline, family), _describe_groups(family)))
    )
    return Finding(result, others_text, _describe_test(family))


def _describe_groups(family: Family) -> str:
    """State in how many seeds the methods that choose clusters find all groups of clients."""
    counts_by_name = [
        (_name(group, family), counts) for group, result in family.ranked if (counts := result.groups_found)
    ]
    texts = [f"by {name} in {k} of {format_count(n, 'seed')}" for name, (k, n) in counts_by_name]
    return f"All groups of clients are found {join_words(texts)}." if texts else ""


def _describe_others(
    comparisons: Sequence[ComparisonWithBest], baseline: ComparisonWithBest, family: Family
) -> str:
    worse_comparisons, ties = (
        [comparison for comparison in comparisons if comparison.is_worse],
        [comparison for comparison in comparisons if comparison.is_inconclusive],
    )
    sentences = []
    if worse_comparisons:
        subject = "It is also" if baseline.is_worse else f"{_name(family.ranked[0][0], family)} is"
        is_all = baseline.is_worse and len(worse_comparisons) == len(family.comparisons) - 1 > 1
        names = f"all {len(worse_comparisons)} others" if is_all else _list(worse_comparisons, family)
        sentences.append(f"{subject} significantly better than {names} (p < {ALPHA:.2g}).")
    if ties:
        p_text = f"{'' if len(ties) == 1 else 'smallest '}{state_p(min(comparison.p for comparison in ties))}"
        sentences.append(f"No difference from {_list(ties, family)} can be seen ({p_text}).")
    sentences += [
        _describe_one(comparison, family)
        for comparison in comparisons
        if comparison.is_better or comparison.is_contradictory
    ]
    return " ".join(sentences)


def _describe_one(comparison: ComparisonWithBest, family: Family) -> str:
    """Compare the best with one group, in numbers."""
    gap, measure, name = comparison.difference, family.measure, _name(comparison.group, family)
    assert gap is not None  # the group was tested
    # Sign that makes the lead of the best positive, or that of the group if it is better on the pairs.
    sign = 1 if measure.is_loss is not comparison.is_better else -1
    mean, low, high = sign * gap.mean, *sorted((sign * gap.low, sign * gap.high))
    interval = "" if math.isnan(low) else f" {measure.format_interval(low, high)}"
    significance = f"{interval}, {state_p(comparison.p)}"
    size = format_signed(measure.format_short(mean))
    if comparison.is_worse:
        text = f"{size} below {name}" if measure.is_loss else f"+{size} points over {name}"
        return f"{text}{significance}."
    if comparison.is_better:
        text = f"{size} lower" if measure.is_loss else f"+{size} points"
        statement = _state_better(comparison, family)
        return f"{statement}: {text}{significance}; the means are over different ones."
    text = f"{size} lower" if measure.is_loss else f"{'+' if mean > 0 else ''}{size} points"
    if comparison.is_contradictory:
        favored_name = name if sign * gap.test_sign < 0 else _name(family.ranked[0][0], family)
        ranks = f"the signed ranks of the clients favor {favored_name} ({state_p(comparison.p)})"
        return f"Mean and ranks disagree about {name}: the mean difference is {text}{interval}, and {ranks}."
    return f"No difference from {name} can be seen: {text}{significance}."


def _state_better(comparison: ComparisonWithBest, family: Family) -> str:
    """State that a group is better than the one with the best mean on the pairs that both have."""
    gap = comparison.difference
    assert gap is not None  # the group was tested
    pairs = f"{gap.n} shared seeds" if gap.pair_unit == "seeds" else f"{gap.n} clients of the shared seed"
    return f"{_name(comparison.group, family)} is significantly better on the {pairs}"


def _describe_test(family: Family) -> str:
    """Name the test, and state what was not tested and what the test cannot show."""
    sentences = [f"{family.test[:1].upper()}{family.test[1:]}."] if family.test else []
    if family.is_over_clients:
        sentences.append(ONE_SEED)
    bimodal_names = [_name(group, family) for group, result in family.ranked if result.modes]
    if bimodal_names and family.test:
        sentences.append(
            f"Seeds of {join_words(bimodal_names)} succeed or fail, so a test of means is a rough guide."
        )
    diverged_results = [
        (_name(group, family), result.diverged) for group, result in family.ranked if result.diverged
    ]
    if diverged_results:
        names = join_words([f"{name} ({description})" for name, description in diverged_results])
        consequence = (
            "Diverged, so last and not tested"
            if family.best
            else "All methods diverged in part, so none was tested"
        )
        sentences.append(f"{consequence}: {names}.")
    converged_groups = [group for group, result in family.ranked if not result.diverged]
    untested_comparisons = [
        comparison
        for comparison in family.comparisons
        if comparison.group in converged_groups and not comparison.is_tested
    ]
    if untested_comparisons:
        verb = "has" if len(untested_comparisons) == 1 else "have"
        reason = f"{verb} no seed with the same clients as the best, or only one client"
        sentences.append(f"Not tested: {_list(untested_comparisons, family)}, which {reason}.")
    return " ".join(sentences)


def sends_nothing(group: RunGroup) -> bool:
    """Whether the clients of a group train without any message, as Standalone does."""
    return all(run.sends_nothing for run in group.runs)


def _format_result(result: Estimate, measure: Measure) -> str:
    """Format a mean with its 95 % interval over seeds, such as ``93.1 % [92.0, 94.2] over 5 seeds``."""
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
    """Format the 95 % interval over seeds, cut to possible values."""
    lower_bound, upper_bound = measure.bounds
    return measure.format_interval(
        max(lower_bound, result.mean - result.ci), min(upper_bound, result.mean + result.ci)
    )


def _format_modes(modes: Modes, measure: Measure) -> str:
    """Format both groups of seeds, such as ``at least 92.9 % in 2 of 3 seeds and at most 67.5 % in the other``."""
    success_relation, failure_relation = (
        ("at most", "at least") if measure.is_loss else ("at least", "at most")
    )
    others_text = (
        "the other" if modes.n - modes.success_count == 1 else f"the other {modes.n - modes.success_count}"
    )
    success_text = f"{success_relation} {_format_value(modes.bound, measure)} in {modes.success_count} of {modes.n} seeds"
    return f"{success_text} and {failure_relation} {_format_value(modes.failure_bound, measure)} in {others_text}"


def _is_level(result: Estimate, other: Estimate, measure: Measure) -> bool:
    """Whether the tables print two results as equal."""
    return measure.format(result.mean) == measure.format(other.mean) and result.diverged == other.diverged


def _name(group: RunGroup, family: Family) -> str:
    is_one_method = (
        len({ranked_group.short_label for ranked_group, _ in family.ranked}) < 2 < 1 + len(family.ranked)
    )
    return group.label if is_one_method else group.short_label


def _list(comparisons: Sequence[ComparisonWithBest], family: Family) -> str:
    names = [_name(comparison.group, family) for comparison in comparisons]
    if len(names) > MAX_NAMED_METHODS + 1:
        names = [*names[:MAX_NAMED_METHODS], f"{len(names) - MAX_NAMED_METHODS} others"]
    return join_words(names)
