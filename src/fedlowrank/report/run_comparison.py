"""Compares methods: exact values for the CSV, and tables and sentences for readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from ..results.records import RunRecord
from .comparison_warnings import find_all_warnings, warn_of_several
from .findings import Finding, state_findings
from .number_formats import format_number
from .sample_texts import AnswerRow, list_answers
from .statistics.accuracy_target import Target
from .statistics.experiments import ComparedExperiment, read_experiments
from .statistics.groups import RunGroup
from .statistics.measures import TEST_ACCURACY
from .statistics.paired import Family, paired_columns
from .statistics.run_statistics import list_metrics, metric_row
from .tables.rank_tables import rank_tables
from .tables.result_tables import has_values, make_result_tables
from .tables.rows import comparison_row
from .tables.summary import make_summary
from .tables.sweeps import sweep_tables
from .tables.text_table import TextTable


@dataclass(frozen=True)
class Comparison:
    """Comparison of groups of runs."""

    experiments: tuple[ComparedExperiment, ...]
    frame: pd.DataFrame  # exact values, one row per group; the CSV contains all of them
    result_tables: Mapping[
        str, TextTable
    ]  # tables by ``accuracy``, ``loss``, ``metrics``, ``trust``, ``size``, ``cost``, ``target``
    targets: Mapping[str, Target]  # targets of the experiments, by name
    footnotes: tuple[tuple[str, str], ...]  # terms with their meanings
    findings: Mapping[str, Sequence[Finding]]  # sentences on the results of each experiment, by name
    summary: TextTable  # the result of each group and its difference from the best
    sweeps: tuple[TextTable, ...]  # results by varied setting
    ranks: tuple[TextTable, ...]  # results by rank of the client
    several_experiments: str  # a warning if there are several experiments, else empty
    warnings: tuple[str, ...]  # warnings that a reader must know first
    answers: tuple[AnswerRow, ...]  # answers of language models, before and after training

    @property
    def groups(self) -> list[RunGroup]:
        """Groups of all experiments."""
        return [group for experiment in self.experiments for group in experiment.groups]

    @property
    def families(self) -> list[Family]:
        """Families of all experiments: groups that are compared with the best of them."""
        return [family for experiment in self.experiments for family in experiment.families]

    @property
    def first_findings(self) -> list[str]:
        """First sentences on each experiment, with its name if there are several."""
        has_several = len(self.findings) > 1
        return [
            f"{name}: {findings[0]}" if has_several else str(findings[0])
            for name, findings in self.findings.items()
        ]

    @property
    def tables(self) -> list[TextTable]:
        """All tables in reading order."""
        return [*self.sweeps, self.summary, *self.result_tables.values(), *self.ranks]


def compare_runs(runs: Sequence[RunRecord], target: float | None = None) -> Comparison:
    """Compare runs, one row for each method and setting, over its seeds.

    Args:
        runs: records of the runs, in the order in which methods appear.
        target: accuracy in (0, 1] for the columns "to target"; None for a default, see
            :func:`fedlowrank.report.statistics.accuracy_target.choose_target`.

    Raises:
        ConfigError: if the target is out of range.
    """
    experiments = read_experiments(runs, target)
    return compare_experiments(experiments)


def compare_experiments(experiments: Sequence[ComparedExperiment]) -> Comparison:
    """Compare the groups of each experiment."""
    groups = [group for experiment in experiments for group in experiment.groups]
    families = [family for experiment in experiments for family in experiment.families]
    targets = {experiment.name: experiment.target for experiment in experiments}
    target_notes = _describe_targets(targets)
    shows_sizes = any(experiment.has_sizes for experiment in experiments)
    paired_values = paired_columns(families)
    rows = [
        comparison_row(g) | metric_row(g.runs, g.headline) | paired_values.get((g.experiment, g.label), {})
        for g in groups
    ]
    frame = pd.DataFrame(rows, dtype=object)
    labels = [f"{g.experiment}: {g.label}" if len(targets) > 1 else g.label for g in groups]
    suffixes_of_groups = [list_metrics(group.runs, group.headline) for group in groups]
    metrics = [
        *dict.fromkeys(
            (name, suffix) for suffixes in suffixes_of_groups for (name, _), suffix in suffixes.items()
        )
    ]
    result_tables = make_result_tables(frame, labels, metrics, shows_sizes=shows_sizes)
    summary = make_summary(frame, families, labels)
    noted_columns = [
        column for table in (summary, *result_tables.values()) for column in table.columns if column.note
    ]
    column_notes = [(column.title, column.note) for column in noted_columns]
    return Comparison(
        experiments=tuple(experiments),
        frame=frame,
        result_tables=result_tables,
        targets=targets,
        footnotes=(*column_notes, *target_notes, *_other_notes(frame)),
        findings={experiment.name: state_findings(experiment.families) for experiment in experiments},
        summary=summary,
        sweeps=tuple(sweep_tables(experiments)),
        ranks=tuple(rank_tables(experiments)),
        several_experiments=warn_of_several(experiments),
        warnings=tuple(find_all_warnings(experiments)),
        answers=tuple(list_answers(groups)),
    )


def _describe_targets(targets: Mapping[str, Target]) -> list[tuple[str, str]]:
    """Describe the target of each experiment, or the reason why it has none."""
    notes = []
    for name, target in targets.items():
        if target.value is None and not target.source.startswith("no target"):
            experiment_text = f"{name}: " if len(targets) > 1 else ""
            notes.append(("target", f"{experiment_text}{target.source}, so no cost to a target is given"))
        if target.value is not None:
            experiment_text = f" in {name}" if len(targets) > 1 else ""
            accuracy = f"{format_number(100 * target.value)} %{experiment_text}"
            meaning = f"mean {TEST_ACCURACY.sentence_name} of {accuracy}, {target.source}"
            meaning += "; costs are summed up to the first evaluated round that reached it"
            notes.append(("target", meaning))
    return notes


def _other_notes(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """List further terms that a reader may look up."""
    notes = []
    if has_values(frame, "accuracy_last") or not has_values(frame, "judged_by"):
        meaning = "max test over rounds (as some libraries report) chooses on test examples; it is in the CSV"
        meaning += " only"
        notes.append(("max test", meaning))
    return notes + [("paper", source) for source in frame["reference"].dropna().unique()]


def to_csv(comparison: Comparison) -> str:
    """Write all exact values: fractions, bytes and counts unrounded, one row per group, empty where there is none."""
    return str(comparison.frame.to_csv(index=False, lineterminator="\n"))
