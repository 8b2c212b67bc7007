"""Columns of the comparison table: which there are for given rows, and what stands in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from .groups import TOKEN_ACCURACY, TOKEN_LOSS
from .measure import ACCURACY, LOSS, Measure
from .rows import Row, key
from .units import NONE, loss_pair, number, percent_pair, plain, seconds, si, si_pair

Block = Literal["Accuracy", "Test loss", "Size of a client's model", "Cost of one run", "To target"]
BLOCKS: tuple[Block, ...] = ("Accuracy", "Test loss", "Size of a client's model", "Cost of one run", "To target")


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: heading.
        unit: unit of the numbers, empty if each carries its own.
        text: the cell of a row, as shown.
        block: the table it stands in.
        align: side that the cells are flush with.
        note: what the heading means, in one line; empty if it speaks for itself.
        wide: left out in a terminal.
    """

    title: str
    unit: str
    text: Callable[[Row], str]
    block: Block = "Accuracy"
    align: Literal["left", "right"] = "right"
    note: str = ""
    wide: bool = False

    @property
    def heading(self) -> str:
        """Title with unit."""
        return f"{self.title} / {self.unit}" if self.unit else self.title


def columns_of(rows: Sequence[Row], sized: bool) -> Iterable[Column]:
    """The columns that these rows have something to say in.

    Args:
        rows: the rows.
        sized: whether model sizes are more than those of the architectures (:func:`fedlowrank.report.sizes.sizes_differ`).
    """
    accuracy, lossy = measures_of(rows)
    judged = {row["judged_by"] for row in rows}
    by_loss = bool(judged & {LOSS.noun, TOKEN_LOSS.noun})
    if not by_loss or judged & {ACCURACY.noun, TOKEN_ACCURACY.noun}:
        yield from _results(rows, accuracy, "Accuracy")
        yield from _papers(rows)
        if not by_loss:
            if _any(rows, "loss_last"):
                over = (
                    "mean loss on their test examples"
                    if lossy is LOSS
                    else "mean loss on the tokens of their test texts"
                )
                yield Column(
                    lossy.noun, "", lambda r: loss_pair(_float(r, "loss_last"), _float(r, "loss_ci95_seeds")),
                    note=f"mean over clients of the {over}, at the last evaluated round; over several seeds ± half-width of "
                    "the 95 % confidence interval",
                )  # fmt: skip
            yield from _perplexities(rows, "Accuracy")
            yield from _remarks(rows, "Accuracy")
    if by_loss:
        yield from _results(rows, lossy, "Test loss")
        yield from _perplexities(rows, "Test loss")
        yield from _remarks(rows, "Test loss")
    yield from _model_sizes(rows, sized)
    yield from _costs(rows)
    if any(row["target"] is not None for row in rows):
        yield Column("rounds", "", _rounds, "To target")
        yield _number("bytes", "target_bytes", _bytes, "To target", "")
        yield _number("parameters", "target_parameters", si, "To target", "")
        yield _number("FLOPs", "target_flops", si, "To target", "")
        yield _number("steps", "target_steps", si, "To target", "")
        yield _number("train + server", "target_seconds", seconds, "To target", "")


def measures_of(rows: Sequence[Row]) -> tuple[Measure, Measure]:
    """Accuracy and loss under the names that they have in a table of these rows."""
    tokens = {row["judged_by"] for row in rows} - {None}
    if tokens and tokens <= {TOKEN_ACCURACY.noun, TOKEN_LOSS.noun}:
        return TOKEN_ACCURACY, TOKEN_LOSS
    return ACCURACY, LOSS


def _perplexities(rows: Sequence[Row], block: Block) -> Iterable[Column]:
    for end in ("", *_ends(rows, "perplexity")):
        if _any(rows, f"perplexity{end}"):
            yield Column(
                f"perplexity {plain(end[1:])}".rstrip(), "", partial(_perplexity, end=end), block,
                note="" if end else "exponential of the mean loss per token over clients and seeds; lower is better",
            )  # fmt: skip


def _results(rows: Sequence[Row], measure: Measure, block: Block) -> Iterable[Column]:
    """What a measure says: the last round, the spread over seeds and clients, other rounds, further series."""
    lossy = measure == LOSS

    def pair(title: str, name: str, spread: str | None, note: str, wide: bool = False) -> Column:
        show = loss_pair if lossy else percent_pair
        at, beside = key(measure, name), None if spread is None else key(measure, spread)
        return Column(
            title, measure.unit, lambda r: show(_float(r, at), None if beside is None else _float(r, beside)), block,
            note=note, wide=wide,
        )  # fmt: skip

    apart = ", those that never train left out" if _any_unseen(rows) else ""
    yield pair(
        "last round", "last", "std_clients",
        f"mean ± standard deviation over clients of {measure.noun}, each client counting once{apart}, at the last evaluated "
        "round; over several seeds, the means of both" + ("; lower is better" if lossy else ""),
    )  # fmt: skip
    if any((_float(row, "seeds") or 0) > 1 for row in rows):
        yield Column("n", "", lambda r: str(r["seeds"]), block, note="seeds that were evaluated")
        yield pair(
            "over seeds", "last", "ci95_seeds",
            "mean ± half-width of its 95 % confidence interval, from Student's t with n − 1 degrees of freedom",
        )  # fmt: skip
    if _any(rows, key(measure, "unseen")):
        yield pair(
            "unseen clients", "unseen", "std_unseen",
            f"mean ± standard deviation of {measure.noun} over the clients that never train, at the last evaluated round; "
            "no other column counts them",
        )  # fmt: skip
    if any(_apart(row, key(measure, "last_weighted"), key(measure, "last")) for row in rows):
        yield pair(
            "by examples", "last_weighted", None, "mean at the last round, clients weighted by test examples", wide=True
        )
    yield pair(
        "worst 10 %", "worst_tenth", None,
        f"mean of the {'highest' if lossy else 'lowest'} tenth of clients, rounded up, at the last round",
    )  # fmt: skip
    if _any(rows, key(measure, "best_by_validation")):
        yield pair(
            "best by validation", "best_by_validation", None,
            f"{measure.noun} at the round of the {'lowest' if lossy else 'highest'} mean validation "
            f"{'loss' if lossy else 'accuracy'}, the earliest on ties",
        )  # fmt: skip
    yield pair("last 10", "last_ten", None, "mean over the last ten evaluations, the one before training left out")
    for end in _ends(rows, key(measure, "series")):
        name = plain(end[1:])
        yield pair(name, f"series{end}", None, f"{measure.noun} of the series {name} at the last evaluated round")


def _papers(rows: Sequence[Row]) -> Iterable[Column]:
    for end in ("", *_ends(rows, "reference_percent")):
        if _any(rows, f"reference_percent{end}") or any(row.get(f"reference_not_converged{end}") for row in rows):
            name = plain(end[1:])
            yield Column(f"paper {name}".rstrip(), "%", partial(_paper, end=end))
            yield Column(
                f"difference {name}".rstrip(), "points", partial(_difference, end=end),
                note=f"{name or 'last round'} minus the paper's number, in percentage points",
            )  # fmt: skip


def _remarks(rows: Sequence[Row], block: Block) -> Iterable[Column]:
    if _any(rows, "recovery"):
        yield Column(
            "cluster recovery (ARI)", "", _recovery, block,
            note="adjusted Rand index of the clients' largest shares against the clusters that their data come from, at the "
            "last evaluated round: 1 for the same clusters, about 0 for a draw; over several seeds ± half-width of the 95 % "
            "confidence interval",
        )  # fmt: skip
    if any(row["status"] for row in rows):
        yield Column(
            "status", "", lambda r: str(r["status"] or ""), block, align="left", note="runs that are not finished"
        )


def _model_sizes(rows: Sequence[Row], sized: bool) -> Iterable[Column]:
    """Sizes and the paper's, each where there is one; none where they are those of the architectures and no more."""
    ends = ["", *dict.fromkeys([*_ends(rows, "parameters_model"), *_ends(rows, "reference_parameters_m")])]
    if not sized and not any(_any(rows, f"reference_parameters_m{end}") for end in ends):
        return
    for end in ends:
        name = plain(end[1:])
        if _any(rows, f"parameters_model{end}"):
            yield Column(
                f"parameters {name}".rstrip(), "", partial(_model_size, end=end), "Size of a client's model",
                note="" if name else "numbers that the model takes at the last evaluated round, mean ± standard deviation "
                "over clients, alone where that is 0: the factors of low-rank weights, of sparse ones the entries other "
                "than zero, of any other all entries; over several seeds, the means of both",
            )  # fmt: skip
        if _any(rows, f"reference_parameters_m{end}"):
            yield Column(f"paper {name}".rstrip(), "", partial(_paper_size, end=end), "Size of a client's model")


def _costs(rows: Sequence[Row]) -> Iterable[Column]:
    block: Block = "Cost of one run"
    compared = _any(rows, "reference_communication_gb")
    yield _number(
        "bytes up", "bytes_up", _bytes, block, "encoded messages from the clients, lost ones included; units of 1000"
    )
    yield _number("bytes down", "bytes_down", _bytes, block, "encoded messages to the clients")
    yield _number("parameters up", "parameters_up", si, block, "floating-point elements in those messages", wide=True)
    yield _number("parameters down", "parameters_down", si, block, "", wide=True)
    yield _number(
        "as float32", "communication_float32", _bytes, block,
        "four bytes for each floating-point element, both ways: how papers count communication", wide=not compared,
    )  # fmt: skip
    if compared:
        yield Column("paper", "", _paper_communication, block)
    yield _number("steps", "steps", si, block, "optimizer steps of all clients")
    yield _number(
        "FLOPs", "flops", si, block, "floating-point operations of training, forward and backward, of all clients"
    )
    yield _number("train", "seconds_train", seconds, block, "wall-clock time on the machine that ran it, by kind")
    yield _number("server", "seconds_server", seconds, block, "")
    yield _number("evaluate", "seconds_evaluate", seconds, block, "")


def _number(
    title: str, key: str, show: Callable[[float | None], str], block: Block, note: str, wide: bool = False
) -> Column:
    return Column(title, "", lambda r: show(_float(r, key)), block, note=note, wide=wide)


def _perplexity(row: Row, end: str) -> str:
    return loss_pair(_float(row, f"perplexity{end}"), None)


def _ends(rows: Sequence[Row], key: str) -> list[str]:
    """What follows ``key`` in the names of the values of further series, such as ``.global``."""
    return list(dict.fromkeys(name.removeprefix(key) for row in rows for name in row if name.startswith(f"{key}.")))


def _bytes(value: float | None) -> str:
    return si(value, "B")


def _paper(row: Row, end: str = "") -> str:
    value = _float(row, f"reference_percent{end}")
    if value is None:
        return "not converged" if row.get(f"reference_not_converged{end}") else NONE
    return f"{value:.2f}"


def _difference(row: Row, end: str = "") -> str:
    value = _float(row, f"difference_points{end}")
    return NONE if value is None else f"{value:+.2f}".replace("-", "−")


def _recovery(row: Row) -> str:
    value, half = _float(row, "recovery"), _float(row, "recovery_ci95_seeds")
    if value is None:
        return NONE
    return (f"{value:.2f}" if half is None else f"{value:.2f} ± {half:.2f}").replace("-", "−")


def _any_unseen(rows: Sequence[Row]) -> bool:
    return any(row["clients_unseen"] not in (0, None) for row in rows)


def _model_size(row: Row, end: str) -> str:
    return si_pair(_float(row, f"parameters_model{end}"), _float(row, f"parameters_model_std{end}"))


def _paper_size(row: Row, end: str) -> str:
    value = _float(row, f"reference_parameters_m{end}")
    return NONE if value is None else si(1e6 * value)


def _paper_communication(row: Row) -> str:
    value = _float(row, "reference_communication_gb")
    return NONE if value is None else _bytes(1e9 * value)


def _rounds(row: Row) -> str:
    reached, n = row["target_reached_seeds"], row["seeds"]
    if row["target"] is None or not n:
        return NONE
    if not reached:
        return "not reached"
    if reached != n:
        return f"{reached} of {n} seeds"
    mean = _float(row, "target_round")
    return number(mean) if n == 1 or mean is None else f"{mean:.1f}"


def _any(rows: Sequence[Row], key: str) -> bool:
    return any(row.get(key) is not None for row in rows)


def _float(row: Row, key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def _apart(row: Row, one: str, other: str) -> bool:
    """Whether two numbers of a row differ by more than the rounding of sums."""
    a, b = row[one], row[other]
    return isinstance(a, float | int) and isinstance(b, float | int) and not math.isclose(a, b, rel_tol=1e-9)
