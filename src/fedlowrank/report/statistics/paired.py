"""Compares groups of runs with the best of them, paired over seeds or over the clients of one seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ...results.records import RunRecord
from .groups import RunGroup
from .measures import Measure
from .run_statistics import Estimate, RunStatistics, result_sort_key
from .significance import ALPHA, Difference, compare_over_clients, compare_over_seeds, correct_holm


@dataclass(frozen=True)
class ComparisonWithBest:
    """Comparison of a group with the best of its family."""

    group: RunGroup
    difference: Difference | None  # the group minus the best; None without common seeds and clients
    p: float  # p-value corrected by Holm for all pairs of the family; NaN without a test
    measure: Measure

    @property
    def is_worse(self) -> bool:
        """Whether the group is significantly worse than the best."""
        return self._winner < 0

    @property
    def is_better(self) -> bool:
        """Whether the group is significantly better on the pairs, although its mean, over other runs or clients, is not."""
        return self._winner > 0

    @property
    def is_inconclusive(self) -> bool:
        """Whether the group was tested and has no significant difference from the best."""
        return self.p >= ALPHA

    @property
    def is_contradictory(self) -> bool:
        """Whether the ranks differ significantly, and the interval of the mean includes 0 or has the other sign."""
        return self.p < ALPHA and not self._winner

    @property
    def is_tested(self) -> bool:
        """Whether the group was tested against the best."""
        return not math.isnan(self.p)

    @property
    def _winner(self) -> int:
        """1 if the group is significantly better than the best, -1 if it is significantly worse, else 0."""
        if self.difference is None or not self.p < ALPHA:
            return 0
        return -self.difference.sign if self.measure.is_loss else self.difference.sign


@dataclass(frozen=True)
class Family:
    """Groups of one experiment that are compared with each other: methods, or the settings of one method."""

    experiment: str  # name of the experiment
    variation: str  # varied setting with its value; empty if nothing is varied
    measure: Measure
    ranked: tuple[tuple[RunGroup, Estimate], ...]  # groups that have a result, the best first
    comparisons: tuple[ComparisonWithBest, ...]  # all ranked groups but the best, in the same order
    pairs: int = 0  # number of pairs of groups, for which p is corrected

    @property
    def best(self) -> RunGroup | None:
        """Group with the best mean; None without a result, and if seeds or clients of every group diverged."""
        return self.ranked[0][0] if self.ranked and not self.ranked[0][1].diverged else None

    @property
    def has_diverged(self) -> bool:
        """Whether every seed of every group diverged, so that no result is that of a trained model."""
        return bool(self.ranked) and all(group.has_diverged for group, _ in self.ranked)

    @property
    def not_worse(self) -> list[RunGroup]:
        """The best group and those that are not significantly worse; groups without a test are left out."""
        return [group for group in (self.best,) if group is not None] + [
            comparison.group
            for comparison in self.comparisons
            if comparison.is_tested and not comparison.is_worse
        ]

    @property
    def test(self) -> str:
        """Name of the test, with its number of pairs and the correction; empty without a test."""
        differences = [pair.difference for pair in self.comparisons if pair.difference and pair.is_tested]
        texts = list(dict.fromkeys(_name_test(pair) for pair in differences))
        correction_text = f", p corrected by Holm for all {self.pairs} pairs" if self.pairs > 1 else ""
        return f"{' or '.join(texts)}{correction_text}" if texts else ""

    @property
    def is_over_clients(self) -> bool:
        """Whether any test is over the clients of one seed."""
        return any(
            comparison.difference.pair_unit == "clients"
            for comparison in self.comparisons
            if comparison.difference
        )


def compare_with_best(experiment: str, text: str, measure: Measure, groups: Sequence[RunGroup]) -> Family:
    """Compare groups of an experiment with the best of them.

    The best group is chosen by the same results, so p-values are corrected for the tests of all pairs. Groups in
    which a seed or a client diverged come last and are not tested, after them those of which every seed did.

    Args:
        experiment: name of the experiment.
        text: varied setting with its value; empty if nothing is varied.
        measure: measure that the groups are compared by.
        groups: groups to compare.
    """
    results = [(group, result) for group in groups if (result := group.final(measure=measure))]
    ranked_results = tuple(
        sorted(results, key=lambda pair: (pair[0].has_diverged, *result_sort_key(measure, pair[1])))
    )
    differences = [
        None if result.diverged else _difference(group, ranked_results[0][0], measure)
        for group, result in ranked_results[1:]
    ]
    test_count = sum(difference is not None and difference.p == difference.p for difference in differences)
    pairs = test_count * (test_count + 1) // 2
    corrected_p = correct_holm(
        [difference.p if difference else math.nan for difference in differences], pairs
    )
    comparisons = tuple(
        ComparisonWithBest(group, difference, p, measure)
        for (group, _), difference, p in zip(ranked_results[1:], differences, corrected_p, strict=True)
    )
    return Family(experiment, text, measure, ranked_results, comparisons, pairs)


def paired_columns(families: Sequence[Family]) -> dict[tuple[str, str], dict[str, Any]]:
    """Make the columns of the CSV about the comparison with the best, by experiment and label of the group."""
    columns: dict[tuple[str, str], dict[str, Any]] = {}
    for family in families:
        labels = [group.label for group in family.not_worse]
        for comparison in family.comparisons:
            gap = comparison.difference
            columns[comparison.group.experiment, comparison.group.label] = {
                "difference_best": gap.mean if gap else None,
                "difference_best_low": gap.low if gap else None,
                "difference_best_high": gap.high if gap else None,
                "p_best_holm": comparison.p,
                "paired_over": gap.pair_unit if gap else None,
                "pairs": gap.n if gap else None,
                "not_worse": int(comparison.group.label in labels) if comparison.is_tested else None,
            }
        if family.best:
            columns[family.best.experiment, family.best.label] = {"not_worse": 1}
    return columns


def paired_differences(
    group: RunGroup, reference: RunGroup, measure: Measure, series: str | None = None
) -> list[pd.Series]:
    """Compute differences ``group - reference`` of each client, for each seed whose clients are the same in both groups.

    Clients that are in no mean, and clients without a finite result in both groups, are left out, and so are seeds
    whose two runs are at different rounds, unless both finished. ``series`` is that of the group, by default its
    headline; the reference has its headline.
    """
    by_seed = {run.record.seed: run for run in reference.runs}
    differences = []
    for run in group.runs:
        reference_run = by_seed.get(run.record.seed)
        if (
            reference_run is not None
            and _clients(run.record) == _clients(reference_run.record)
            and _are_level(run, reference_run)
        ):
            values = run.client_values(series or group.headline, measure)
            gaps = values - reference_run.client_values(reference.headline, measure)
            differences.append(gaps.dropna())
    return [gaps for gaps in differences if len(gaps)]


def _are_level(first: RunStatistics, second: RunStatistics) -> bool:
    """Whether both runs finished, maybe by patience, or were last evaluated after the same round."""
    last_rounds = [run.table.evaluated_rounds[-1:] for run in (first, second)]
    return first.state == second.state == "finished" or last_rounds[0] == last_rounds[1]


def _clients(run: RunRecord) -> tuple[Any, ...]:
    """Describe the identity of a federation: the clients, their numbers of examples, and the digests of these."""
    sizes = [tuple(row.get(key) for key in ("id", "train", "val", "test", "unseen")) for row in run.clients]
    return sizes, run.config.get("fingerprint")


def _difference(group: RunGroup, best: RunGroup, measure: Measure) -> Difference | None:
    gaps = paired_differences(group, best, measure)
    if len(gaps) > 1:
        return compare_over_seeds([gap.mean() for gap in gaps])
    return compare_over_clients(gaps[0]) if gaps else None


def _name_test(gap: Difference) -> str:
    if gap.n > 1 and math.isnan(gap.low):
        return f"sign test over {gap.n} {gap.pair_unit} with equal differences, which give no interval"
    if gap.pair_unit == "seeds":
        return f"paired t-test over {gap.n} seeds, each the mean over its clients"
    return f"Wilcoxon signed-rank test and bootstrap interval over the {gap.n} clients of one seed"
