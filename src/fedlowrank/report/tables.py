"""The comparison of methods: exact values for the CSV, and tables of text for readers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.text import Text

from ..simulation.records import RunRecord
from .formats import MISSING, format_loss, format_number, format_seconds, format_si, format_si_pair, one_line
from .groups import Group, Target, group_runs
from .lora_tables import rank_tables
from .measures import ACCURACY, LOSS, TOKEN_ACCURACY, TOKEN_LOSS, Measure
from .ranks import sizes_differ
from .rows import comparison_row
from .sentences import collapse_warnings
from .sweeps import sweep_tables
from .text_table import Column, TextTable, escape_markdown, to_rich
from .text_table import to_markdown as table_to_markdown

Cells = tuple[Column, list[str]]


@dataclass(frozen=True)
class Comparison:
    """The comparison of groups."""

    groups: tuple[Group, ...]
    frame: pd.DataFrame  # exact values, one row a group; the CSV contains all of them
    blocks: Mapping[str, TextTable]  # results, by ``accuracy``, ``loss``, ``size``, ``cost`` and ``target``
    targets: Mapping[str, Target]  # of each experiment, by name
    footnotes: tuple[tuple[str, str], ...]  # terms and what they mean
    sweeps: tuple[TextTable, ...]  # results by what was varied
    ranks: tuple[TextTable, ...]  # results by rank of the client
    warnings: tuple[str, ...]  # what a reader must know first

    @property
    def tables(self) -> list[TextTable]:
        """All tables in the order in which a reader sees them."""
        return [*self.sweeps, *self.blocks.values(), *self.ranks]


def comparison(runs: Sequence[RunRecord], target: float | None = None) -> Comparison:
    """Compare runs, one row for each method and setting, over its seeds.

    Args:
        runs: in the order in which methods appear.
        target: accuracy in (0, 1] for the columns "to target"; None for the runs' own, else the largest whole
        percent
            that all of them reached.

    Raises:
        ConfigError: if the target is out of range.
    """
    return compare(group_runs(runs, target))


def compare(groups: Sequence[Group]) -> Comparison:
    """Compare groups."""
    frame = pd.DataFrame([comparison_row(group) for group in groups], dtype=object)
    targets = {group.experiment: group.target for group in groups}
    accuracy, loss = _measures(frame)
    values = {target.value for target in targets.values()}
    common = next(iter(values)) if len(values) == 1 else None
    goal = f"target of {format_number(100 * common)} %" if common is not None else "target"
    columns = {
        "accuracy": (accuracy.title, list(_accuracy_columns(frame))),
        "loss": (loss.title, list(_loss_columns(frame))),
        "size": ("Size of a client's model", list(_size_columns(frame, sizes_differ(groups)))),
        "cost": ("Cost of one run", list(_cost_columns(frame))),
        "target": (f"Until the {goal} was reached", list(_target_columns(frame))),
    }
    labels = [f"{g.experiment}: {g.label}" if len(targets) > 1 else g.label for g in groups]
    blocks = {}
    for name, (title, found) in columns.items():
        if found:
            rows = zip(labels, *(cells for _, cells in found), strict=True)
            blocks[name] = TextTable(title, ("method",), tuple(column for column, _ in found), tuple(rows))
    footnotes = [(c.title, c.note) for table in blocks.values() for c in table.columns if c.note]
    for name, target in targets.items():
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
    return Comparison(
        tuple(groups), frame, blocks, targets, tuple(footnotes), tuple(sweep_tables(groups)),
        tuple(rank_tables(groups)), tuple(collapse_warnings(groups)),
    )  # fmt: skip


def to_csv(table: Comparison) -> str:
    """All exact values: fractions, bytes and counts unrounded, one row a group, empty where there is none."""
    return str(table.frame.to_csv(index=False, lineterminator="\n"))


def to_markdown(table: Comparison) -> str:
    """All tables as Markdown, with warnings first and footnotes last."""
    parts = [f"> {escape_markdown(warning)}" for warning in table.warnings]
    parts += map(table_to_markdown, table.tables)
    notes = [f"- *{escape_markdown(term)}*: {escape_markdown(meaning)}." for term, meaning in table.footnotes]
    return "\n\n".join([*parts, "\n".join(notes)]) + "\n"


def render_terminal(table: Comparison) -> RenderableType:
    """All tables for a terminal, with footnotes and warnings below."""
    parts: list[RenderableType] = [part for one in table.tables for part in to_rich(one)]
    parts += [Text(f"{term}: {meaning}.", style="dim") for term, meaning in table.footnotes]
    parts += [Text(warning, style="yellow") for warning in table.warnings]
    return Stack(*parts)


def _measures(frame: pd.DataFrame) -> tuple[Measure, Measure]:
    """Accuracy and loss under the names that they have in a table of these rows."""
    nouns = set(frame["judged_by"].dropna())
    is_language = bool(nouns) and nouns <= {TOKEN_ACCURACY.noun, TOKEN_LOSS.noun}
    return (TOKEN_ACCURACY, TOKEN_LOSS) if is_language else (ACCURACY, LOSS)


def _judged_by_loss(frame: pd.DataFrame) -> pd.Series:
    return frame["judged_by"].isin([LOSS.noun, TOKEN_LOSS.noun])


def _accuracy_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    by_loss = _judged_by_loss(frame)
    accuracy, loss = _measures(frame)
    if by_loss.any() and not (~by_loss & frame["judged_by"].notna()).any():
        return
    yield from _result_columns(frame, accuracy)
    for end in ("", *_series_ends(frame, "reference_percent")):
        papers, diverged = (
            _floats(frame, f"reference_percent{end}"),
            _floats(frame, f"reference_not_converged{end}"),
        )
        if papers.notna().any() or (diverged == 1).any():
            missing = ["not converged" if flag == 1 else MISSING for flag in diverged]
            gaps = _floats(frame, f"difference_points{end}")
            texts = [MISSING if math.isnan(v) else f"{v:+.2f}".replace("-", "−") for v in gaps]
            name = end[1:]
            cells = [m if math.isnan(v) else f"{v:.2f}" for v, m in zip(papers, missing, strict=True)]
            yield Column(f"paper {name}".rstrip(), "%"), cells
            note = f"{name or 'last round'} minus the paper's number, in percentage points"
            yield Column(f"difference {name}".rstrip(), "points", note), texts
    if not by_loss.any():
        if _has(frame, "loss_last"):
            what = "tokens of their test texts" if loss is TOKEN_LOSS else "test examples"
            of = f"mean loss on {'the ' if loss is TOKEN_LOSS else 'their '}{what}"
            note = f"mean over clients of the {of}, at the last evaluated round; over several seeds ± "
            yield (
                Column(loss.noun, note=note + "half-width of the 95 % confidence interval"),
                _pairs(frame, "loss_last", "loss_ci95_seeds", loss.format_pair),
            )
        yield from _other_columns(frame)


def _loss_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    if _judged_by_loss(frame).any():
        yield from _result_columns(frame, _measures(frame)[1])
        yield from _other_columns(frame)


def _result_columns(frame: pd.DataFrame, measure: Measure) -> Iterator[Cells]:
    """Results of a measure: the last round, spreads over seeds and clients, other rounds, further series."""
    noun, key = measure.noun, measure.column

    def pair(title: str, name: str, spread: str, note: str, is_wide: bool = False) -> Cells:
        column = Column(title, measure.unit, note, is_wide=is_wide)
        return column, _pairs(frame, key(name), key(spread), measure.format_pair)

    unseen = ", those that never train left out" if frame["clients_unseen"].fillna(0).ne(0).any() else ""
    yield pair(
        "last round", "last", "std_clients",
        f"mean ± standard deviation over clients of {noun}, each client counting once{unseen}, at the last "
        "evaluated round; over several seeds, the means of "
        f"both{'; lower is better' if measure.is_loss else ''}",
    )  # fmt: skip
    if (frame["seeds"] > 1).any():
        yield Column("n", note="seeds that were evaluated"), frame["seeds"].astype(str).tolist()
        note = "mean ± half-width of its 95 % confidence interval, from Student's t with n − 1 degrees of "
        note += "freedom"
        yield pair("over seeds", "last", "ci95_seeds", note)
    if _has(frame, key("unseen")):
        note = f"mean ± standard deviation of {noun} over the clients that never train, at the last "
        note += "evaluated round; no other column counts them"
        yield pair("unseen clients", "unseen", "std_unseen", note)
    means, weighted = _floats(frame, key("last")), _floats(frame, key("last_weighted"))
    if (~np.isclose(means, weighted, rtol=1e-9, atol=0) & means.notna() & weighted.notna()).any():
        note = "mean at the last round, clients weighted by test examples"
        yield pair("by examples", "last_weighted", "", note, is_wide=True)
    worst = "highest" if measure.is_loss else "lowest"
    note = f"mean of the {worst} tenth of clients, rounded up, at the last round"
    yield pair("worst 10 %", "worst_tenth", "", note)
    if _has(frame, key("best_by_validation")):
        best = "lowest mean validation loss" if measure.is_loss else "highest mean validation accuracy"
        note = f"{noun} at the round of the {best}, the earliest on ties"
        yield pair("best by validation", "best_by_validation", "", note)
    note = "mean over the last ten evaluations, the one before training left out"
    yield pair("last 10", "last_ten", "", note)
    for end in _series_ends(frame, key("series")):
        yield pair(end[1:], f"series{end}", "", f"{noun} of the series {end[1:]} at the last evaluated round")


def _other_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    for end in ("", *_series_ends(frame, "perplexity")):
        if _has(frame, f"perplexity{end}"):
            note = "exponential of the mean loss per token over clients and seeds; lower is better"
            column = Column(f"perplexity {end[1:]}".rstrip(), note="" if end else note)
            yield column, [format_loss(value) for value in _floats(frame, f"perplexity{end}")]
    if _has(frame, "recovery"):
        note = (
            "adjusted Rand index of the clients' largest shares against the clusters that their data come "
            "from, at the last evaluated round: 1 for the same clusters, about 0 for a draw; over several "
            "seeds ± half-width of the 95 % confidence interval"
        )
        cells = _pairs(frame, "recovery", "recovery_ci95_seeds", _format_recovery)
        yield Column("cluster recovery (ARI)", note=note), cells
    if _has(frame, "status"):
        cells = frame["status"].fillna("").astype(str).tolist()
        yield Column("status", note="runs that are not finished", align="left"), cells


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
        if _has(frame, f"{own}{end}"):
            column = Column(f"parameters {end[1:]}".rstrip(), note="" if end else note)
            yield column, _pairs(frame, f"{own}{end}", f"{own}_std{end}", format_si_pair)
        if _has(frame, f"{paper}{end}"):
            yield (
                Column(f"paper {end[1:]}".rstrip()),
                [format_si(1e6 * v) for v in _floats(frame, f"{paper}{end}")],
            )


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
        if title != "paper" or has_paper:
            yield Column(title, note=note, is_wide=is_wide), [form(value) for value in _floats(frame, key)]


def _target_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    if not _has(frame, "target"):
        return
    yield Column("rounds"), [_format_rounds(row) for row in frame.to_dict("records")]
    for title, key, form in (
        ("bytes", "target_bytes", _format_bytes), ("parameters", "target_parameters", format_si),
        ("FLOPs", "target_flops", format_si), ("steps", "target_steps", format_si),
        ("train + server", "target_seconds", format_seconds),
    ):  # fmt: skip
        yield Column(title), [form(value) for value in _floats(frame, key)]


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


def _format_recovery(value: float, half: float) -> str:
    if math.isnan(value):
        return MISSING
    return (f"{value:.2f}" if math.isnan(half) else f"{value:.2f} ± {half:.2f}").replace("-", "−")


def _floats(frame: pd.DataFrame, key: str) -> pd.Series:
    """A column as floats, NaN where it has no value."""
    return frame[key].astype(float) if key in frame else pd.Series(math.nan, index=frame.index)


def _pairs(frame: pd.DataFrame, key: str, spread: str, form: Callable[[float, float], str]) -> list[str]:
    return [form(*pair) for pair in zip(_floats(frame, key), _floats(frame, spread), strict=True)]


def _has(frame: pd.DataFrame, key: str) -> bool:
    return key in frame and bool(frame[key].notna().any())


def _series_ends(frame: pd.DataFrame, key: str) -> list[str]:
    """What follows ``key`` in the columns of further series, such as ``.global``."""
    return [one_line(name.removeprefix(key)) for name in frame if name.startswith(f"{key}.")]
