"""The tables of results of a comparison, by subject: accuracy, loss, metrics, trust, size, cost, cost to a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ...core.io.text import on_one_line
from ..number_formats import (
    MISSING,
    format_loss,
    format_loss_pair,
    format_number,
    format_percent,
    format_seconds,
    format_si,
    format_si_pair,
)
from ..statistics.measures import TEST_ACCURACY, TEST_LOSS, TOKEN_LOSS, Measure, metric_title
from ..statistics.run_statistics import format_successes
from .summary import MODES_NOTE, Cells, make_table
from .text_table import TableColumn, TextTable


def make_result_tables(
    frame: pd.DataFrame, labels: Sequence[str], metrics: Sequence[tuple[str, str]], *, shows_sizes: bool
) -> dict[str, TextTable]:
    """The tables that have any column, by subject.

    Args:
        frame: exact values, one row a group.
        labels: how the rows are named.
        metrics: name and end of the columns of further metrics, see :func:`.run_statistics.list_metrics`.
        shows_sizes: whether sizes of models are shown if the paper gives none.

    Returns:
        Tables by ``accuracy``, ``loss``, ``metrics``, ``trust``, ``size``, ``cost`` and ``target``.
    """
    values = frame["target"].unique()
    has_one = len(values) == 1 and values[0] is not None
    goal = f"target of {format_number(100 * values[0])} %" if has_one else "target"
    accuracy, loss = _measures(frame)
    columns = {
        "accuracy": (accuracy.title, _accuracy_columns(frame)),
        "loss": (loss.title, _loss_columns(frame)),
        "metrics": ("Further metrics", _metric_columns(frame, metrics)),
        "trust": ("Privacy and attacks", _trust_columns(frame)),
        "size": ("Size of a client's model", _size_columns(frame, shows_sizes)),
        "cost": ("Cost of one run", _cost_columns(frame)),
        "target": (f"Until the {goal} was reached", _target_columns(frame)),
    }
    tables = {
        subject: make_table(title, labels, [*cells_of_columns])
        for subject, (title, cells_of_columns) in columns.items()
    }
    return {subject: table for subject, table in tables.items() if table.columns}


def has_values(frame: pd.DataFrame, key: str) -> bool:
    """Whether any row has a value in a column."""
    return key in frame and bool(frame[key].notna().any())


def _measures(frame: pd.DataFrame) -> tuple[Measure, Measure]:
    """Accuracy and loss under the names that they have in a table of these rows."""
    nouns = set(frame["judged_by"].dropna())
    return TEST_ACCURACY, TOKEN_LOSS if nouns == {TOKEN_LOSS.noun} else TEST_LOSS


def _column(
    frame: pd.DataFrame, title: str, key: str, form: Callable[..., str], spread: str = "", *,
    always: bool = False, unit: str = "", note: str = "", is_wide: bool = False,
) -> Iterator[Cells]:  # fmt: skip
    """A column of the table if the frame has any number for it, or always."""
    if always or has_values(frame, key):
        columns = [_floats(frame, name) for name in (key, spread) if name]
        cells = [form(*values) for values in zip(*columns, strict=True)]
        yield TableColumn(title, unit, note, is_wide=is_wide), cells


def _accuracy_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    by_loss = frame["judged_by"].isin([TEST_LOSS.noun, TOKEN_LOSS.noun])
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
    if frame["judged_by"].isin([TEST_LOSS.noun, TOKEN_LOSS.noun]).any():
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
        if has_values(frame, key) and frame[key].fillna(0).ne(0).any()
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
                    format_successes(measure, int(k), int(n), bound) if k == k else cell
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
    if has_values(frame, "groups_found_seeds"):
        pairs = zip(_floats(frame, "groups_found_seeds"), _floats(frame, "groups_known_seeds"), strict=True)
        cells = [MISSING if math.isnan(k) else f"{k:.0f} of {n:.0f} seeds" for k, n in pairs]
        note = "seeds after whose last round most clients of each group have their largest share at one cluster, "
        note += "and no two groups at the same"
        yield TableColumn("all groups found", note=note), cells
    if has_values(frame, "status"):
        cells = frame["status"].fillna("").astype(str).tolist()
        yield TableColumn("status", note="runs that are not finished", align="left"), cells


def _metric_columns(frame: pd.DataFrame, metrics: Sequence[tuple[str, str]]) -> Iterator[Cells]:
    """A column for each metric and series that any run measures besides accuracy and loss."""
    note = (
        "mean over the clients that can train and for which the metric is defined, after the last evaluated "
        "round; over several seeds ± half-width of the 95 % confidence interval"
    )
    for name, end in metrics:
        title = f"{metric_title(name)} {end[1:]}".rstrip()
        key, spread = f"metric_{name}{end}", f"metric_{name}_ci95_seeds{end}"
        yield from _column(frame, title, key, format_loss_pair, spread, note=note)
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


def _size_columns(frame: pd.DataFrame, shows_sizes: bool) -> Iterator[Cells]:
    """Sizes, and those of the paper; none if they need not be shown and the paper gives none."""
    own, paper = "parameters_model", "reference_parameters_m"
    ends = ["", *dict.fromkeys([*_series_ends(frame, own), *_series_ends(frame, paper)])]
    if not shows_sizes and not any(has_values(frame, f"{paper}{end}") for end in ends):
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
    has_paper = has_values(frame, "reference_communication_gb")
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
    if not has_values(frame, "target"):
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


def _series_ends(frame: pd.DataFrame, key: str) -> list[str]:
    """What follows ``key`` in the columns of further series, such as ``.global``."""
    return [on_one_line(name.removeprefix(key)) for name in frame if name.startswith(f"{key}.")]
