"""The comparison of methods: exact values for the CSV, and tables of text for readers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from rich import console
from rich.console import RenderableType
from rich.text import Text

from ...core.io.text import on_one_line
from ...results.records import RunRecord
from ..findings import Finding, state_findings
from ..low_rank import rank_tables
from ..sample_texts import AnswerRow, list_answers
from ..sentences import find_warnings, warn_of_mixture
from ..statistics.accuracy_target import Target
from ..statistics.experiments import ComparedExperiment, read_experiments
from ..statistics.groups import RunGroup
from ..statistics.measures import ACCURACY, LOSS, TOKEN_LOSS, Measure, metric_title
from ..statistics.modes import Modes
from ..statistics.paired import Family, paired_columns
from ..statistics.run_statistics import format_modes, metric_row
from .number_formats import (
    MISSING,
    format_loss,
    format_loss_pair,
    format_number,
    format_percent,
    format_seconds,
    format_si,
    format_si_pair,
)
from .rows import comparison_row
from .summary import MODES_NOTE, Cells, make_summary, make_table
from .sweeps import sweep_tables
from .text_table import TableColumn, TextTable, escape_markdown, to_rich
from .text_table import to_markdown as table_to_markdown


@dataclass(frozen=True)
class Comparison:
    """The comparison of groups."""

    experiments: tuple[ComparedExperiment, ...]
    frame: pd.DataFrame  # exact values, one row a group; the CSV contains all of them
    result_tables: Mapping[
        str, TextTable
    ]  # results, by ``accuracy``, ``loss``, ``metrics``, ``trust``, ``size``, ``cost``, ``target``
    targets: Mapping[str, Target]  # of each experiment, by name
    footnotes: tuple[tuple[str, str], ...]  # terms and what they mean
    findings: Mapping[str, Sequence[Finding]]  # sentences on the results of each experiment, by name
    summary: TextTable  # the result of each group and its difference from the best
    sweeps: tuple[TextTable, ...]  # results by what was varied
    ranks: tuple[TextTable, ...]  # results by rank of the client
    mixture: str  # a warning if there are several experiments, else empty
    warnings: tuple[str, ...]  # what a reader must know first
    answers: tuple[AnswerRow, ...]  # of language models, before and after training

    @property
    def groups(self) -> list[RunGroup]:
        """The groups of all experiments."""
        return [group for experiment in self.experiments for group in experiment.groups]

    @property
    def families(self) -> list[Family]:
        """Groups of all experiments that are compared with the best of them."""
        return [family for experiment in self.experiments for family in experiment.families]

    @property
    def tables(self) -> list[TextTable]:
        """All tables in the order in which a reader sees them."""
        return [*self.sweeps, self.summary, *self.result_tables.values(), *self.ranks]


def comparison(runs: Sequence[RunRecord], target: float | None = None) -> Comparison:
    """Compare runs, one row for each method and setting, over its seeds.

    Args:
        runs: in the order in which methods appear.
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
    paired = paired_columns(families)
    rows = [
        comparison_row(g) | metric_row(g.runs, g.headline) | paired.get((g.experiment, g.label), {})
        for g in groups
    ]
    frame = pd.DataFrame(rows, dtype=object)
    targets = {experiment.name: experiment.target for experiment in experiments}
    accuracy, loss = _measures(frame)
    goals = {target.value for target in targets.values()}
    common = next(iter(goals)) if len(goals) == 1 else None
    goal = f"target of {format_number(100 * common)} %" if common is not None else "target"
    columns = {
        "accuracy": (accuracy.title, list(_accuracy_columns(frame))),
        "loss": (loss.title, list(_loss_columns(frame))),
        "metrics": ("Further metrics", list(_metric_columns(frame))),
        "trust": ("Privacy and attacks", list(_trust_columns(frame))),
        "size": (
            "Size of a client's model",
            list(_size_columns(frame, any(one.has_sizes for one in experiments))),
        ),
        "cost": ("Cost of one run", list(_cost_columns(frame))),
        "target": (f"Until the {goal} was reached", list(_target_columns(frame))),
    }
    labels = [f"{g.experiment}: {g.label}" if len(targets) > 1 else g.label for g in groups]
    summary = make_summary(frame, families, labels)
    result_tables = {
        name: make_table(title, labels, found) for name, (title, found) in columns.items() if found
    }
    footnotes = [
        (c.title, c.note) for table in (summary, *result_tables.values()) for c in table.columns if c.note
    ]
    for name, target in targets.items():
        if target.value is None and not target.source.startswith("no target"):
            where = f"{name}: " if len(targets) > 1 else ""
            footnotes.append(("target", f"{where}{target.source}, so no cost to a target is given"))
        if target.value is not None:
            where = f" in {name}" if len(targets) > 1 else ""
            meaning = f"mean {accuracy.noun} of {format_number(100 * target.value)} %{where}, {target.source}"
            meaning += "; costs are summed up to the first evaluated round that reached it"
            footnotes.append(("target", meaning))
    if _has(frame, "accuracy_last") or not _has(frame, "judged_by"):
        meaning = "max test over rounds (as some libraries report) chooses on test examples; it is in the CSV"
        meaning += " only"
        footnotes.append(("max test", meaning))
    footnotes += [("paper", source) for source in frame["reference"].dropna().unique()]
    findings = {experiment.name: state_findings(experiment.families) for experiment in experiments}
    return Comparison(
        tuple(experiments), frame, result_tables, targets, tuple(footnotes), findings, summary,
        tuple(sweep_tables(experiments)), tuple(rank_tables(experiments)), warn_of_mixture(experiments),
        tuple(_all_warnings(experiments)), tuple(list_answers(groups)),
    )  # fmt: skip


def to_csv(table: Comparison) -> str:
    """All exact values: fractions, bytes and counts unrounded, one row a group, empty where there is none."""
    return str(table.frame.to_csv(index=False, lineterminator="\n"))


def _all_warnings(experiments: Sequence[ComparedExperiment]) -> list[str]:
    """The warnings of each experiment, with its name if there are several."""
    named = len(experiments) > 1
    return [
        f"{experiment.name}: {warning}" if named else warning
        for experiment in experiments
        for warning in find_warnings(experiment.groups)
    ]


def comparison_markdown(table: Comparison) -> str:
    """Findings and results as Markdown, then warnings, further tables, footnotes and answers."""
    results = [*table.sweeps, table.summary]
    parts = [f"> {table.mixture}"] if table.mixture else []
    parts += [*map(escape_markdown, _findings(table)), *map(table_to_markdown, results)]
    parts += [f"> {escape_markdown(warning)}" for warning in table.warnings]
    parts += map(table_to_markdown, table.tables[len(results) :])
    notes = [f"- *{escape_markdown(term)}*: {escape_markdown(meaning)}." for term, meaning in table.footnotes]
    return "\n\n".join([*parts, "\n".join(notes)]) + "\n" + _answers_markdown(table.answers)


def _answers_markdown(rows: Sequence[AnswerRow]) -> str:
    """The answers as a table; empty without any."""
    if not rows:
        return ""
    lines = ["", "## Answers", "", "| prompt | model | answer |", "|:---|:---|:---|"]
    cells = [[text.replace("\\", "\\\\").replace("|", "\\|") for text in row] for row in rows]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells), ""])


def render_terminal(table: Comparison, all_tables: bool = False) -> RenderableType:
    """What a terminal shows of a comparison: results, then warnings and findings; without footnotes.

    Args:
        table: the comparison.
        all_tables: show costs and all other tables, too, before the results.
    """
    further_tables = (*table.result_tables.values(), *table.ranks) if all_tables else ()
    tables = [*further_tables, *table.sweeps, table.summary]
    parts: list[RenderableType] = [part for one in tables for part in to_rich(one)]
    parts += [Text(warning, style="yellow") for warning in table.warnings]
    parts += [Text(finding, style="bold") for finding in _findings(table)]
    return console.Group(*parts)


def _findings(table: Comparison) -> list[str]:
    """The first sentences on each experiment, with its name if there are several."""
    named = len(table.findings) > 1
    return [
        f"{name}: {findings[0]}" if named else str(findings[0]) for name, findings in table.findings.items()
    ]


def _measures(frame: pd.DataFrame) -> tuple[Measure, Measure]:
    """Accuracy and loss under the names that they have in a table of these rows."""
    nouns = set(frame["judged_by"].dropna())
    return ACCURACY, TOKEN_LOSS if nouns == {TOKEN_LOSS.noun} else LOSS


def _column(
    frame: pd.DataFrame, title: str, key: str, form: Callable[..., str], spread: str = "", *,
    always: bool = False, unit: str = "", note: str = "", is_wide: bool = False,
) -> Iterator[Cells]:  # fmt: skip
    """A column of the table if the frame has any number for it, or always."""
    if always or _has(frame, key):
        columns = [_floats(frame, name) for name in (key, spread) if name]
        cells = [form(*values) for values in zip(*columns, strict=True)]
        yield TableColumn(title, unit, note, is_wide=is_wide), cells


def _accuracy_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    by_loss = frame["judged_by"].isin([LOSS.noun, TOKEN_LOSS.noun])
    accuracy, loss = _measures(frame)
    if by_loss.any() and not (~by_loss & frame["judged_by"].notna()).any():
        return
    yield from _result_columns(frame, accuracy)
    for end in ("", *_series_ends(frame, "reference_percent")):
        papers = _floats(frame, f"reference_percent{end}")
        diverged = _floats(frame, f"reference_not_converged{end}") == 1
        if papers.notna().any() or diverged.any():
            pairs = zip(papers, diverged, strict=True)
            cells = [f"{v:.2f}" if v == v else "not converged" if flag else MISSING for v, flag in pairs]
            yield TableColumn(f"paper {end[1:]}".rstrip(), "%"), cells
            note = f"{end[1:] or 'last round'} minus the paper's number, in percentage points"
            title, key = f"difference {end[1:]}".rstrip(), f"difference_points{end}"
            yield from _column(
                frame, title, key, _format_difference, always=True, unit="points", note=note
            )  # fmt: skip
    if not by_loss.any():
        what = "the tokens of their test texts" if loss is TOKEN_LOSS else "their test examples"
        note = f"mean over clients of the mean loss on {what}, at the last evaluated round; over several "
        note += "seeds ± half-width of the 95 % confidence interval"
        yield from _column(
            frame, loss.noun, "loss_last", loss.format_pair, "loss_ci95_seeds", note=note
        )  # fmt: skip
        yield from _other_columns(frame)


def _loss_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    if frame["judged_by"].isin([LOSS.noun, TOKEN_LOSS.noun]).any():
        yield from _result_columns(frame, _measures(frame)[1])
        yield from _other_columns(frame)


def _result_columns(frame: pd.DataFrame, measure: Measure) -> Iterator[Cells]:
    """Results of a measure: the last round, spreads over seeds and clients, other rounds, further series."""
    noun, key = measure.noun, measure.column

    def column(title: str, name: str, note: str, spread: str = "", **look: Any) -> Iterator[Cells]:
        form, other = (measure.format_pair, key(spread)) if spread else (measure.format_number, "")
        return _column(frame, title, key(name), form, other, unit=measure.unit, note=note, **look)

    left_out = [
        text for key, text in (("clients_unseen", "that never train"), ("clients_hostile", "that are hostile"))
        if _has(frame, key) and frame[key].fillna(0).ne(0).any()
    ]  # fmt: skip
    unseen = f", those {' or '.join(left_out)} left out" if left_out else ""
    note = (
        f"mean ± standard deviation over clients of {noun}, each client counting once{unseen}, at the last "
    )
    note += "evaluated round; over several seeds, the means of both"
    note += "; lower is better" if measure.is_loss else ""
    yield from column("last round", "last", note, "std_clients", always=True)
    if (frame["seeds"] > 1).any():
        yield TableColumn("n", note="seeds that were evaluated"), frame["seeds"].astype(str).tolist()
        note = "mean ± half-width of its 95 % confidence interval, from Student's t with n − 1 degrees of freedom"
        succeeded, bounds = _floats(frame, key("success_seeds")), _floats(frame, key("success_bound"))
        note += f"; {MODES_NOTE}" if succeeded.notna().any() else ""
        for head, cells in column("over seeds", "last", note, "ci95_seeds", always=True):
            cells_with_modes = zip(cells, frame["seeds"], succeeded, bounds, strict=True)
            yield (
                head,
                [
                    format_modes(measure, Modes(int(n), int(k), bound, math.nan)) if k == k else cell
                    for cell, n, k, bound in cells_with_modes
                ],
            )
    note = f"mean ± standard deviation of {noun} over the clients that never train, at the last evaluated "
    yield from column("unseen clients", "unseen", f"{note}round; no other column counts them", "std_unseen")
    means, weighted = _floats(frame, key("last")), _floats(frame, key("last_weighted"))
    if (~np.isclose(means, weighted, rtol=1e-9, atol=0) & means.notna() & weighted.notna()).any():
        note = "mean at the last round, clients weighted by their test examples (of pixels, tokens or where labels are "
        note += "left out: by the labels that count)"
        yield from column("by examples", "last_weighted", note, is_wide=True)
    note = f"mean of the {'highest' if measure.is_loss else 'lowest'} tenth of clients, rounded up, at the "
    yield from column("worst 10 %", "worst_tenth", f"{note}last round", always=True)
    best = "lowest mean validation loss" if measure.is_loss else "highest mean validation accuracy"
    note = f"{noun} at the round of the {best}, the earliest on ties"
    yield from column("best by validation", "best_by_validation", note)
    note = "mean over the last ten evaluations, the one before training left out"
    yield from column("last 10", "last_ten", note, always=True)
    for end in _series_ends(frame, key("series")):
        note = f"{noun} of the series {end[1:]} at the last evaluated round"
        yield from column(end[1:], f"series{end}", note, always=True)


def _other_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    for end in ("", *_series_ends(frame, "perplexity")):
        note = "exponential of the mean loss per token over clients and seeds; lower is better"
        title = f"perplexity {end[1:]}".rstrip()
        yield from _column(frame, title, f"perplexity{end}", format_loss, note="" if end else note)
    note = (
        "adjusted Rand index of the clients' largest shares against the clusters that their data come from, "
        "at the last evaluated round: 1 for the same clusters, about 0 for a draw; over several seeds ± "
        "half-width of the 95 % confidence interval"
    )
    title, spread = "cluster recovery (ARI)", "recovery_ci95_seeds"
    yield from _column(frame, title, "recovery", _format_recovery, spread, note=note)
    if _has(frame, "groups_found_seeds"):
        pairs = zip(_floats(frame, "groups_found_seeds"), _floats(frame, "groups_known_seeds"), strict=True)
        cells = [MISSING if math.isnan(k) else f"{k:.0f} of {n:.0f} seeds" for k, n in pairs]
        note = "seeds after whose last round most clients of each group have their largest share at one cluster, "
        note += "and no two groups at the same"
        yield TableColumn("all groups found", note=note), cells
    if _has(frame, "status"):
        cells = frame["status"].fillna("").astype(str).tolist()
        yield TableColumn("status", note="runs that are not finished", align="left"), cells


def _metric_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    """A column for each metric and series that any run measures besides accuracy and loss."""
    note = (
        "mean over the clients that can train and for which the metric is defined, after the last evaluated "
        "round; over several seeds ± half-width of the 95 % confidence interval"
    )
    for key in [name for name in frame if name.startswith("metric_") and "_ci95_seeds" not in name]:
        # a module may have points; the title is the function alone
        module, colon, function = key.rpartition(":")
        name, point, series = function.partition(".")
        spread = f"{module}{colon}{name}_ci95_seeds{point}{series}"
        title = metric_title(name.removeprefix("metric_"))
        yield from _column(frame, f"{title} {series}".rstrip(), key, format_loss_pair, spread, note=note)
        note = ""


def _trust_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    for title, key, form, unit, note in (
        ("backdoor success", "backdoor_success", format_percent, "%",
         "share of test examples of other classes that models of honest clients take for the target of the "
         "attack once they have its trigger, at the last evaluated round, mean over seeds; lower is better"),
        ("hostile weight", "hostile_weight", format_percent, "%",
         "share that hostile clients have of the weights (of norm_bound: factors) that the rule gave to "
         "replies, mean over rounds; lower is better"),
        ("ε", "epsilon", _format_epsilon, "",
         "privacy that was spent: of the models that the server released or, under local privacy, of the "
         "client that sent most; lower is better"),
    ):  # fmt: skip
        yield from _column(frame, title, key, form, unit=unit, note=note)


def _size_columns(frame: pd.DataFrame, is_varied: bool) -> Iterator[Cells]:
    """Sizes, and those of the paper; none if they are those of the architectures and the paper gives none."""
    own, paper = "parameters_model", "reference_parameters_m"
    ends = ["", *dict.fromkeys([*_series_ends(frame, own), *_series_ends(frame, paper)])]
    if not is_varied and not any(_has(frame, f"{paper}{end}") for end in ends):
        return
    note = (
        "parameter count of the model at the last evaluated round, mean ± standard deviation over clients, "
        "alone where that is 0: the factors of low-rank weights, of sparse ones the entries other than zero, "
        "of any other all entries; over several seeds, the means of both"
    )
    for end in ends:
        title, spread = f"parameters {end[1:]}".rstrip(), f"{own}_std{end}"
        yield from _column(
            frame, title, f"{own}{end}", format_si_pair, spread, note="" if end else note
        )  # fmt: skip
        paper_title = f"paper {end[1:]}".rstrip()
        yield from _column(frame, paper_title, f"{paper}{end}", lambda value: format_si(1e6 * value))


def _cost_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    has_paper = _has(frame, "reference_communication_gb")
    for title, key, form, is_wide, note in (
        ("bytes up", "bytes_up", _format_bytes, False,
         "encoded messages from the clients, lost ones included; units of 1000"),
        ("bytes down", "bytes_down", _format_bytes, False, "encoded messages to the clients"),
        ("parameters up", "parameters_up", format_si, True, "floating-point elements in those messages"),
        ("parameters down", "parameters_down", format_si, True, ""),
        ("as float32", "communication_float32", _format_bytes, not has_paper,
         "four bytes for each floating-point element, both ways: how papers count communication"),
        ("paper", "reference_communication_gb", lambda value: _format_bytes(1e9 * value), False, ""),
        ("steps", "steps", format_si, False, "optimizer steps of all clients"),
        ("FLOPs", "flops", format_si, False,
         "floating-point operations of training, forward and backward, of all clients"),
        ("train", "seconds_train", format_seconds, False,
         "wall-clock time on the machine that ran it, by kind"),
        ("server", "seconds_server", format_seconds, False, ""),
        ("evaluate", "seconds_evaluate", format_seconds, False, ""),
    ):  # fmt: skip
        yield from _column(frame, title, key, form, always=title != "paper", note=note, is_wide=is_wide)
    note = "by the simulated clock of run.devices"
    yield from _column(frame, "simulated time", "simulated_seconds", format_seconds, note=note)


def _target_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    if not _has(frame, "target"):
        return
    yield TableColumn("rounds"), [_format_rounds(row) for row in frame.to_dict("records")]
    for title, key, form in (
        ("bytes", "target_bytes", _format_bytes), ("parameters", "target_parameters", format_si),
        ("FLOPs", "target_flops", format_si), ("steps", "target_steps", format_si),
        ("train + server", "target_seconds", format_seconds),
    ):  # fmt: skip
        yield from _column(frame, title, key, form, always=True)
    yield from _column(frame, "simulated time", "target_simulated_seconds", format_seconds)


def _format_rounds(row: Mapping[str, Any]) -> str:
    reached, n, mean = row["target_reached_seeds"], row["seeds"], row["target_round"]
    if pd.isna(row["target"]) or not n:
        return MISSING
    if not reached:
        return "not reached"
    if reached != n or mean is None:
        return f"{reached} of {n} seeds"
    return format_number(mean) if n == 1 else f"{mean:.1f}"


def _format_bytes(value: float) -> str:
    return format_si(value, "B")


def _format_difference(value: float) -> str:
    return MISSING if math.isnan(value) else f"{value:+.2f}".replace("-", "−")


def _format_recovery(value: float, half: float) -> str:
    if math.isnan(value):
        return MISSING
    return (f"{value:.2f}" if math.isnan(half) else f"{value:.2f} ± {half:.2f}").replace("-", "−")


def _format_epsilon(value: float) -> str:
    return MISSING if math.isnan(value) else f"{value:.3g}"


def _floats(frame: pd.DataFrame, key: str) -> pd.Series:
    """A column as floats, NaN where it has no value."""
    return frame[key].astype(float) if key in frame else pd.Series(math.nan, index=frame.index)


def _has(frame: pd.DataFrame, key: str) -> bool:
    return key in frame and bool(frame[key].notna().any())


def _series_ends(frame: pd.DataFrame, key: str) -> list[str]:
    """What follows ``key`` in the columns of further series, such as ``.global``."""
    return [on_one_line(name.removeprefix(key)) for name in frame if name.startswith(f"{key}.")]
