"""The table of a run holds every number that its records hold, and its statistics over clients are numpy's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedlowrank import SGD, Federation, simulate
from fedlowrank.core.errors import ConfigError
from fedlowrank.methods import METHODS
from fedlowrank.results.client_metrics import METRICS
from fedlowrank.results.measurements import ClientTable, Column, Measurements, mean_over_clients, summarize
from fedlowrank.results.records import RoundRecord
from fedlowrank.rounds.outcome.result import Result
from tests.support.client_tables import make_client_table, read_tables

CLIENTS: list[dict[str, Any]] = [
    {"id": 0, "test": 1, "cluster": 0},
    {"id": 1, "test": 3, "cluster": 1},
    {"id": 2, "test": 6, "cluster": 0, "hostile": True},
    {"id": 3, "test": 2, "cluster": 1, "unseen": True},
]


def table(values: list[float | None], name: str = "accuracy") -> Measurements:
    actual = Measurements(CLIENTS)
    actual.append_clients(1, make_client_table({name: {"own": {"test": values}}}))
    return actual


@pytest.mark.parametrize(("who", "places"), [("counted", [0, 1]), ("unseen", [3]), ("all", [0, 1, 2, 3])])
def test_statistics_are_over_the_clients_that_are_asked_for(who: Any, places: list[int]) -> None:
    values, n = np.array([0.2, 0.9, 0.4, 0.7]), np.array([1, 3, 6, 2])
    row = table(list(values)).over_clients("accuracy", "own", group=who).loc[1]
    x = values[places]
    assert row["mean"] == pytest.approx(x.mean())
    assert row["std"] == pytest.approx(x.std())
    assert row["weighted"] == pytest.approx(np.average(x, weights=n[places]))
    assert row["worst"] == pytest.approx(x.min())


def test_the_worst_of_a_loss_is_the_largest() -> None:
    row = table([1.0, 4.0, 2.0, None], "loss").over_clients("loss", "own").loc[1]
    assert (row["worst"], row["without"]) == (4.0, 0)


def test_what_is_not_finite_is_in_no_mean_and_counted() -> None:
    actual = table([0.5, math.nan, None, 0.7]).over_clients("accuracy", "own", group="all").loc[1]
    assert (actual["mean"], actual["non_finite"], actual["without"]) == (pytest.approx(0.6), 1, 1)
    assert table([math.nan, None, None, None]).over_clients("accuracy", "own").empty


def test_who_was_not_evaluated_is_not_without_examples() -> None:
    """Of ten clients that can train five were evaluated: one has no test examples, one diverged."""
    clients = [{"id": i, "test": 4, "unseen": i == 10} for i in range(12)]
    actual = Measurements(clients)
    values: list[float | None] = [0.5, None, 0.75, math.nan, 1.0, 0.0]
    actual.append_clients(3, ClientTable([0, 2, 3, 5, 8, 10], [Column("accuracy", "own", "test", values)]))
    row = actual.over_clients("accuracy", "own").loc[3]
    assert row[["clients", "without", "non_finite", "not_evaluated"]].tolist() == [3, 1, 1, 6]
    assert row["mean"] == 0.75
    assert actual.over_clients("accuracy", "own", group="unseen").loc[3, "clients"] == 1


def test_every_client_is_counted_once() -> None:
    g = np.random.default_rng(2)
    values = g.choice([0.1, 0.9, math.nan, math.inf], size=(50, 13))
    row = summarize(values, is_evaluated=g.random((50, 13)) < 0.5)
    assert (sum(row[n] for n in ("clients", "without", "non_finite", "not_evaluated")) == 13).all()


def test_the_worst_tenth_of_an_error_holds_the_largest() -> None:
    values = np.random.default_rng(3).random(25)
    for name, lower in (
        ("ece", True), ("rmse", True), ("mae", True), ("loss", True), ("r2", False), ("auroc", False), ("top3", False),
        ("accuracy", False), ("token_accuracy", False),
    ):  # fmt: skip
        actual = Measurements([{"id": i} for i in range(25)])
        actual.append_clients(1, make_client_table({name: {"own": {"test": list(values)}}}))
        worst = np.sort(values)[-3:] if lower else np.sort(values)[:3]
        assert actual.over_clients(name, "own").loc[1, "worst"] == pytest.approx(worst.mean()), name
    lower = {name for name, metric in METRICS.items() if metric.lower_is_better}
    # what is 0 for perfect predictions
    assert lower == {"ece", "rmse", "mae"}


def test_the_worst_of_a_metric_of_the_user_s_own_is_not_known() -> None:
    for name in ("recall_of_cats", "my_metrics:recall", "parameters"):
        row = table([0.2, 0.4, 0.6, None], name).over_clients(name, "own").loc[1]
        assert math.isnan(row["worst"])
        assert row["mean"] == pytest.approx(0.3)


def test_a_mean_does_not_depend_on_how_the_values_lie_in_memory() -> None:
    values = np.random.default_rng(0).random((3, 1000))
    rows, columns = summarize(np.ascontiguousarray(values)), summarize(np.asfortranarray(values))
    assert all((rows[name] == columns[name]).all() for name in ("mean", "std", "worst"))
    # one client after another, as Python adds
    assert rows["mean"][0] == sum(values[0].tolist()) / 1000


def test_a_round_is_not_better_for_a_client_that_diverged() -> None:
    assert mean_over_clients([0.5, None, 0.7]) == pytest.approx(0.6)
    assert mean_over_clients([None, None]) is None
    assert math.isnan(mean_over_clients([1.0, math.inf]) or 0.0)
    first, second = (
        RoundRecord(t, measured=make_client_table({"loss": {"own": {"val": [loss, 1.0]}}}))
        for t, loss in ((0, math.nan), (1, 1.0))
    )
    assert (first.validation(), second.validation()) == (-math.inf, -1.0)


def test_the_best_round_comes_after_one_whose_loss_is_not_finite(small_run: Result) -> None:
    rounds = [
        RoundRecord(t, measured=make_client_table({"loss": {"own": {"val": [loss]}}}))
        for t, loss in enumerate((math.nan, 3.0, 2.0, 2.5))
    ]
    assert Result(small_run.run, rounds).best_round == 2


@pytest.fixture(scope="module")
def small_run() -> Result:
    import torch

    generator = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(30, 4, generator=generator), torch.randint(0, 3, (30,), generator=generator))
        for _ in range(4)
    ]
    federation = Federation.from_arrays(clients, torch.nn.Linear(4, 3), val=0.2)
    method = METHODS["ditto"](optimizer=SGD(lr=0.1))
    return simulate(method, federation, rounds=2, unseen=0.25, metrics=["macro_f1"])


def test_every_number_of_the_records_is_a_row(small_run: Result) -> None:
    frame = small_run.measurements.frame()
    known = {(r, c, s, w, n): v for r, c, s, w, n, v in frame.itertuples(index=False)}
    assert len(known) == len(frame)
    expected: dict[tuple[int, int, str, str, str], float] = {}
    for record in small_run.rounds:
        for name, of in read_tables(record.measured).items():
            for series, splits in of.items():
                for split, values in splits.items():
                    expected |= {
                        (record.round, i, series, split, name): v
                        for i, v in enumerate(values)
                        if v is not None
                    }
        for name in ("bytes_up", "bytes_down", "parameters_up", "parameters_down", "steps", "flops"):
            expected[record.round, -1, "", "", name] = getattr(record, name)
        for name, numbers in (
            ("seconds", record.seconds),
            ("training_loss", record.training_losses),
            ("ranks", record.ranks),
        ):
            expected |= {(record.round, -1, series, "", name): v for series, v in numbers.items()}
        for name, numbers in record.server_metrics.items():
            expected |= {(record.round, -1, series, "", name): v for series, v in numbers.items()}
    assert known == pytest.approx(expected)


def test_numbers_of_examples_are_whole_in_a_table_of_results(small_run: Result) -> None:
    n = small_run.to_frame(last=True)["n"]
    assert n.dtype.kind == "i"
    assert n.tolist() == [
        len(getattr(c, s)) for s in ("val", "test") for c in small_run.run.federation.clients
    ]


def test_an_unknown_series_is_refused_and_a_number_that_was_not_measured_is_empty() -> None:
    table = ClientTable([0, 1], [Column("accuracy", "personal", "test", [0.5, 0.25])])
    assert table.values(series="personal") == [0.5, 0.25]
    assert table.values("loss", series="personal") == []
    assert table.by_client(series="personal", split="val") == {}
    with pytest.raises(ConfigError, match=r"there is no series 'persnal'\. Did you mean 'personal'\?"):
        table.values(series="persnal")
