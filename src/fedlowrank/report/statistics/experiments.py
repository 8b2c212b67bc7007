"""Experiments: their groups of runs, with the values that a report derives from all groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from ...results.records import RunRecord
from .accuracy_target import Target
from .groups import RunGroup, group_runs, measure_of
from .low_rank import RankResults, list_rank_results
from .measures import Measure
from .paired import Family, compare_with_best


@dataclass(frozen=True, eq=False)
class ComparedExperiment:
    """The groups of one experiment, which are compared with each other.

    Attributes:
        groups: groups of runs, at least one, in the order in which methods and settings first appear.
    """

    groups: tuple[RunGroup, ...]

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self.groups[0].experiment

    @property
    def title(self) -> str:
        """Title of the experiment, for people."""
        return self.groups[0].first.title

    @property
    def target(self) -> Target:
        """Accuracy up to which costs are counted."""
        return self.groups[0].target

    @cached_property
    def measure(self) -> Measure:
        """Measure that the groups are compared by."""
        return measure_of(self.groups)

    @cached_property
    def variations(self) -> dict[str, list[RunGroup]]:
        """Groups by varied settings, in words."""
        texts = [group.variation for group in self.groups]
        return {text: [group for group in self.groups if group.variation == text] for text in texts}

    @cached_property
    def families(self) -> list[Family]:
        """Groups that are compared with the best of them: those of each variation, or all if there is one method."""
        is_one_method = len({group.short_label for group in self.groups}) < 2
        groups_by_text = {"": list(self.groups)} if is_one_method else self.variations
        return [
            compare_with_best(self.name, text, self.measure, groups)
            for text, groups in groups_by_text.items()
        ]

    @cached_property
    def rank_results(self) -> dict[str, list[RankResults]]:
        """Results by rank of the client, for each series of the groups, by varied settings."""
        return {text: list_rank_results(groups, self.measure) for text, groups in self.variations.items()}

    @cached_property
    def has_sizes(self) -> bool:
        """Whether some client's model changes its size over methods, series or rounds of one setting.

        Otherwise the size is that of the architecture, and a report need not show it. Settings with other varied
        values are compared separately, because a larger architecture obviously has more parameters.
        """
        for groups in self.variations.values():
            tables = [
                run.table.of_clients("parameters", series)
                for group in groups
                for run in group.runs
                for series in run.table.series("parameters", "")
            ]
            if tables and (pd.concat(tables).nunique() > 1).any():
                return True
        return False


def read_experiments(runs: Sequence[RunRecord], target: float | None = None) -> list[ComparedExperiment]:
    """Group runs by experiment, in order of first appearance.

    Args:
        runs: records of the runs, in the order in which their methods appear.
        target: accuracy in (0, 1], or None for a default; see :func:`.accuracy_target.choose_target`.

    Raises:
        ConfigError: if the given target is not in (0, 1].
    """
    groups = group_runs(runs, target)
    names = dict.fromkeys(group.experiment for group in groups)
    return [ComparedExperiment(tuple(g for g in groups if g.experiment == name)) for name in names]


def sort_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Sort runs in the order in which their experiment compares the methods, each method's by seed.

    Runs of different experiments, and equal ones, keep the given order.
    """
    experiments = list(dict.fromkeys(run.experiment for run in runs))

    def sort_key(run: RunRecord) -> tuple[int, int, float]:
        value = run.section("experiment").get("compare")
        methods = value if isinstance(value, list) else []
        name, seed = run.method, run.section("run").get("seed")
        return (
            experiments.index(run.experiment),
            methods.index(name) if name in methods else len(methods),
            seed if isinstance(seed, (int, float)) else math.inf,
        )

    return sorted(runs, key=sort_key)
