"""Table of the numbers that an evaluation has for each client, with the properties of their values.

A further number is an entry of :data:`CLIENT_NUMBERS` and a column that ``results/evaluation/evaluation_table.py``
makes. Tables, loggers and the report show every entry about scores. Numbers about a model, clusters or data are
recorded, and shown where code asks for them. The check of a client's answer over the network reads the entry. Metrics
of ``run.metrics`` are in :mod:`.client_metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

ACCURACY, LOSS, PARAMETERS, ROUTE = "accuracy", "loss", "parameters", "route"
"""Names of the numbers that every evaluation has for a client; the last one only for methods with clusters."""

SPLITS = ("val", "test")
"""Sets of examples on which the model of a client is evaluated."""

TOKEN_ACCURACY, PAIR_ACCURACY, RETRIEVAL = "token_accuracy", "pair_accuracy", "retrieval_accuracy"
"""Shares of tokens that a language model predicts correctly, of pairs of responses that it orders correctly, and of
anchors that are
nearest to their own positive in a batch. They are not accuracies, because such models are judged by their loss."""

COUNTED_LABELS = "counted_labels"
"""Number of a client's labels over which its accuracy and its loss are means, for labels of pixels or tokens, and if
some labels are left out (``loss.ignore_index``). Without it they are means over examples."""

FRAME_KEYS = ("round", "client", "unseen", "hostile", "series", "split", "n")
"""First columns of a data frame of results, which identify a row."""


@dataclass(frozen=True)
class ClientNumber:
    """A number that an evaluation has for each client.

    Attributes:
        title: heading of the number.
        about: subject of the number, which determines its columns: ``scores`` of a model has one for each series and
            split, a ``model`` one for each series, ``clusters`` one for each cluster (as series), and ``data`` one
            for each split.
        bounds: least and largest value of the number.
        may_be_nan: whether a value may be NaN, as for a model whose training diverged.
        lower_is_better: whether a smaller value is better; None for sizes.
        is_required: whether every evaluation has the number.
    """

    title: str
    about: Literal["scores", "model", "clusters", "data"] = "scores"
    bounds: tuple[float, float] = (0.0, 1.0)
    may_be_nan: bool = False
    lower_is_better: bool | None = False
    is_required: bool = False


CLIENT_NUMBERS: dict[str, ClientNumber] = {
    ACCURACY: ClientNumber("accuracy", is_required=True),
    LOSS: ClientNumber(
        "loss", bounds=(-math.inf, math.inf), may_be_nan=True, lower_is_better=True, is_required=True
    ),
    TOKEN_ACCURACY: ClientNumber("next-token accuracy"),
    PAIR_ACCURACY: ClientNumber("pairs in order"),
    RETRIEVAL: ClientNumber("positives found"),
    PARAMETERS: ClientNumber("parameters", "model", (0.0, math.inf), lower_is_better=None, is_required=True),
    ROUTE: ClientNumber("share of a cluster", "clusters", may_be_nan=True, lower_is_better=None),
    COUNTED_LABELS: ClientNumber("labels that count", "data", (0.0, 2.0**50), lower_is_better=None),
}
"""Client numbers by name."""


def reserved_names() -> set[str]:
    """List the columns of result tables, which a metric of the user's own must not be named after."""
    return {*FRAME_KEYS, *CLIENT_NUMBERS}


def list_further_metrics(names: Iterable[str]) -> list[str]:
    """List the names that tables show beside accuracy and loss, each once: metrics and further numbers of scores."""
    return [name for name in dict.fromkeys(names) if _is_further_metric(name)]


def _is_further_metric(name: str) -> bool:
    number = CLIENT_NUMBERS.get(name)
    return number is None or (number.about == "scores" and not number.is_required)
