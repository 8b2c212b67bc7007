"""Tables of a comparison's results, by subject: accuracy, loss, metrics, trust, size, cost, cost to a target."""

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
    """Make the tables that have any column, by subject.

    Args:
        frame: exact values, one row per group.
        labels: labels of the rows.
        metrics: name and column suffix of each further metric, see :func:`..statistics.run_statistics.list_metrics`.
        shows_sizes: whether to show sizes of models if the paper gives none.

    Returns:
        The tables by ``accuracy``, ``loss``, ``metrics``, ``trust``, ``size``, ``cost`` and ``target``.
    """
    targets = frame["target"].unique()
    has_one_target = len(targets) == 1 and targets[0] is not None
    goal = f"target of {format_number(100 * targets[0])} %" if has_one_target else "target"
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
    """Choose accuracy and loss under their names in a table of these rows."""
    measure_names = set(frame["judged_by"].dropna())
    return TEST_ACCURACY, TOKEN_LOSS if measure_names == {TOKEN_LOSS.sentence_name} else TEST_LOSS


SPREAD = "± std over clients"
"""Part of the headings of columns whose ± is no confidence interval."""


def _column(
    frame: pd.DataFrame, title: str, key: str, formatter: Callable[..., str], spread_key: str = "", *,
    always: bool = False, unit: str = "", note: str = "", is_wide: bool = False,
) -> Iterator[Cells]:  # fmt: skip
    """Yield a column of the table if the frame has any number for it, or always."""
    if always or has_values(frame, key):
        columns = [_floats(frame, name) for name in (key, spread_key) if name]
        cells = [formatter(*values) for values in zip(*columns, strict=True)]
        yield TableColumn(title, unit, note, is_wide=is_wide), cells


def _accuracy_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    is_judged_by_loss = frame["judged_by"].isin([TEST_LOSS.sentence_name, TOKEN_LOSS.sentence_name])
    accuracy, loss = _measures(frame)
    if is_judged_by_loss.any() and not (~is_judged_by_loss & frame["judged_by"].notna()).any():
        return
    yield from _result_columns(frame, accuracy)
    for suffix in ("", *_series_ends(frame, "reference_percent")):
        paper_values = _floats(frame, f"reference_percent{suffix}")
        is_diverged = _floats(frame, f"reference_not_converged{suffix}") == 1
        if paper_values.notna().any() or is_diverged.any():
            pairs = zip(paper_values, is_diverged, strict=True)
            cells = [f"{v:.2f}" if v == v else "not converged" if flag else MISSING for v, flag in pairs]
            yield TableColumn(f"paper {suffix[1:]}".rstrip(), "%"), cells
            note = f"{suffix[1:] or 'last round'} minus the paper's number, in percentage points"
            title, key = f"difference {suffix[1:]}".rstrip(), f"difference_points{suffix}"
            yield from _column(
                frame, title, key, _format_difference, always=True, unit="points", note=note
            )  # fmt: skip
    if not is_judged_by_loss.any():
        examples_text = "the tokens of their test texts" if loss is TOKEN_LOSS else "their test examples"
        note = f"mean over clients of the mean loss on {examples_text}, at the last evaluated round; over several "
        note += "seeds ± half-width of the 95 % confidence interval"
        yield from _column(
            frame, loss.sentence_name, "loss_last", loss.format_pair, "loss_ci95_seeds", note=note
        )  # fmt: skip
        yield from _other_columns(frame)


def _loss_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    if frame["judged_by"].isin([TEST_LOSS.sentence_name, TOKEN_LOSS.sentence_name]).any():
        yield from _result_columns(frame, _measures(frame)[1])
        yield from _other_columns(frame)


def _result_columns(frame: pd.DataFrame, measure: Measure) -> Iterator[Cells]:
    """Yield the results of a measure: the last round, spreads over seeds and clients, other rounds, further series."""
    measure_name, key = measure.sentence_name, measure.column

    def column(title: str, name: str, note: str, spread_name: str = "", **options: Any) -> Iterator[Cells]:
        formatter, spread_key = (
            (measure.format_pair, key(spread_name)) if spread_name else (measure.format_number, "")
        )
        unit = f"{measure.unit} {SPREAD}".strip() if spread_name.startswith("std") else measure.unit
        return _column(frame, title, key(name), formatter, spread_key, unit=unit, note=note, **options)

    exclusions = [
        text for key, text in (("clients_unseen", "that never train"), ("clients_hostile", "that are hostile"))
        if has_values(frame, key) and frame[key].fillna(0).ne(0).any()
    ]  # fmt: skip
    exclusion_note = f", those {' or '.join(exclusions)} left out" if exclusions else ""
    note = f"mean ± standard deviation over clients of {measure_name}, each client counting once{exclusion_note}, at the last "
    note += "evaluated round; over several seeds, the means of both"
    note += "; lower is better" if measure.is_loss else ""
    yield from column("last round", "last", note, "std_clients", always=True)
    if (frame["seeds"] > 1).any():
        yield TableColumn("n", note="seeds that were evaluated"), frame["seeds"].astype(str).tolist()
        note = "mean ± half-width of its 95 % confidence interval, from Student's t with n − 1 degrees of freedom"
        success_counts, bounds = _floats(frame, key("success_seeds")), _floats(frame, key("success_bound"))
        note += f"; {MODES_NOTE}" if success_counts.notna().any() else ""
        for heading, cells in column("over seeds", "last", note, "ci95_seeds", always=True):
            cells_with_modes = zip(cells, frame["seeds"], success_counts, bounds, strict=True)
            yield (
                heading,
                [
                    format_successes(measure, int(k), int(n), bound) if k == k else cell
                    for cell, n, k, bound in cells_with_modes
                ],
            )
    note = f"mean ± standard deviation of {measure_name} over the clients that never train, at the last evaluated "
    yield from column("unseen clients", "unseen", f"{note}round; no other column counts them", "std_unseen")
    means, weighted_means = _floats(frame, key("last")), _floats(frame, key("last_weighted"))
    if (~np.isclose(means, weighted_means, rtol=1e-9, atol=0) & means.notna() & weighted_means.notna()).any():
        note = "mean at the last round, clients weighted by their test examples (of pixels, tokens or where labels are "
        note += "left out: by the labels that count)"
        yield from column("by examples", "last_weighted", note, is_wide=True)
    note = f"mean of the {'highest' if measure.is_loss else 'lowest'} tenth of clients, rounded up, at the "
    yield from column("worst 10 %", "worst_tenth", f"{note}last round", always=True)
    best_text = "lowest mean validation loss" if measure.is_loss else "highest mean validation accuracy"
    note = f"{measure_name} at the round of the {best_text}, the earliest on ties"
    yield from column("best by validation", "best_by_validation", note)
    note = "mean over the last ten evaluations, the one before training left out"
    yield from column("last 10", "last_ten", note, always=True)
    for suffix in _series_ends(frame, key("series")):
        note = f"{measure_name} of the series {suffix[1:]} at the last evaluated round"
        yield from column(suffix[1:], f"series{suffix}", note, always=True)


def _other_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    for suffix in ("", *_series_ends(frame, "perplexity")):
        note = "exponential of the mean loss per token over clients and seeds; lower is better"
        title = f"perplexity {suffix[1:]}".rstrip()
        yield from _column(frame, title, f"perplexity{suffix}", format_loss, note="" if suffix else note)
    note = (
        "adjusted Rand index of the clients' largest shares against the clusters that their data come from, "
        "at the last evaluated round: 1 for the same clusters, about 0 for a draw; over several seeds ± "
        "half-width of the 95 % confidence interval"
    )
    title, spread_key = "cluster recovery (ARI)", "recovery_ci95_seeds"
    yield from _column(frame, title, "recovery", _format_recovery, spread_key, note=note)
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
    """Yield a column for each metric and series that any run measures besides accuracy and loss."""
    note = (
        "mean over the clients that can train and for which the metric is defined, after the last evaluated "
        "round; over several seeds ± half-width of the 95 % confidence interval"
    )
    for name, suffix in metrics:
        title = f"{metric_title(name)} {suffix[1:]}".rstrip()
        key, spread_key = f"metric_{name}{suffix}", f"metric_{name}_ci95_seeds{suffix}"
        yield from _column(frame, title, key, format_loss_pair, spread_key, note=note)
        note = ""


def _trust_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    for title, key, formatter, unit, note in (
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
        yield from _column(frame, title, key, formatter, unit=unit, note=note)


def _size_columns(frame: pd.DataFrame, shows_sizes: bool) -> Iterator[Cells]:
    """Yield sizes, and those of the paper; none if they need not be shown and the paper gives none."""
    model_key, paper_key = "parameters_model", "reference_parameters_m"
    suffixes = ["", *dict.fromkeys([*_series_ends(frame, model_key), *_series_ends(frame, paper_key)])]
    if not shows_sizes and not any(has_values(frame, f"{paper_key}{suffix}") for suffix in suffixes):
        return
    note = (
        "parameter count of the model at the last evaluated round, mean ± standard deviation over clients, "
        "alone where that is 0: the factors of low-rank weights, of sparse ones the entries other than zero, "
        "of any other all entries; over several seeds, the means of both"
    )
    for suffix in suffixes:
        title, spread_key = f"parameters {suffix[1:]}".rstrip(), f"{model_key}_std{suffix}"
        yield from _column(
            frame, title, f"{model_key}{suffix}", format_si_pair, spread_key, note="" if suffix else note,
            unit=SPREAD if _floats(frame, spread_key).gt(0).any() else "",
        )  # fmt: skip
        paper_title = f"paper {suffix[1:]}".rstrip()
        yield from _column(frame, paper_title, f"{paper_key}{suffix}", lambda value: format_si(1e6 * value))


def _cost_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    has_paper = has_values(frame, "reference_communication_gb")
    for title, key, formatter, is_wide, note in (
        ("bytes up", "bytes_up", _format_bytes, False,
         "encoded messages from the clients, lost ones included; units of 1000"),
        ("bytes down", "bytes_down", _format_bytes, False,
         "encoded messages to the clients that train, without those that only evaluate"),
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
        yield from _column(frame, title, key, formatter, always=title != "paper", note=note, is_wide=is_wide)
    note = "by the simulated clock of run.devices"
    yield from _column(frame, "simulated time", "simulated_seconds", format_seconds, note=note)


def _target_columns(frame: pd.DataFrame) -> Iterator[Cells]:
    if not has_values(frame, "target"):
        return
    yield TableColumn("rounds"), [_format_rounds(row) for row in frame.to_dict("records")]
    for title, key, formatter in (
        ("bytes", "target_bytes", _format_bytes), ("parameters", "target_parameters", format_si),
        ("FLOPs", "target_flops", format_si), ("steps", "target_steps", format_si),
        ("train + server", "target_seconds", format_seconds),
    ):  # fmt: skip
        yield from _column(frame, title, key, formatter, always=True)
    yield from _column(frame, "simulated time", "target_simulated_seconds", format_seconds)


def _format_rounds(row: Mapping[str, Any]) -> str:
    reached_count, n, mean = row["target_reached_seeds"], row["target_seeds"], row["target_round"]
    if pd.isna(row["target"]) or not n:
        return MISSING
    if not reached_count:
        return "not reached"
    if reached_count != n or mean is None:
        return f"{reached_count} of {n} seeds"
    return format_number(mean) if n == 1 else f"{mean:.1f}"


def _format_bytes(value: float) -> str:
    return format_si(value, "B")


def _format_difference(value: float) -> str:
    return MISSING if math.isnan(value) else f"{value:+.2f}".replace("-", "−")


def _format_recovery(value: float, half_width: float) -> str:
    if math.isnan(value):
        return MISSING
    return (f"{value:.2f}" if math.isnan(half_width) else f"{value:.2f} ± {half_width:.2f}").replace("-", "−")


def _format_epsilon(value: float) -> str:
    return MISSING if math.isnan(value) else f"{value:.3g}"


def _floats(frame: pd.DataFrame, key: str) -> pd.Series:
    """Convert a column to floats, NaN where it has no value."""
    return frame[key].astype(float) if key in frame else pd.Series(math.nan, index=frame.index)


def _series_ends(frame: pd.DataFrame, key: str) -> list[str]:
    """List the suffixes after ``key`` in the columns of further series, such as ``.global``."""
    return [on_one_line(name.removeprefix(key)) for name in frame if name.startswith(f"{key}.")]
