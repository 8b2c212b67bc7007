"""Further metrics and numbers of labels over messages: those of the sequential run, and impossible ones refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlowrank.data.dataset import ClientData, Examples
from fedlowrank.network.client import prepare
from fedlowrank.network.messages import Answer
from fedlowrank.network.site.evaluations import coarsen
from fedlowrank.network.site.site_settings import SiteSettings
from fedlowrank.results.client_numbers import COUNTED_LABELS
from fedlowrank.results.measurements import ClientTable, Column
from tests.support.client_tables import replace_values
from tests.support.local_network import (
    LocalTransport,
    assert_equals_sequential_run,
    fault_in_round,
    local,
    lost,
    replace_fields,
    run_sequentially,
    run_whole,
    serve_run,
    small,
)

METRICS = ["macro_f1", "ece"]


@pytest.mark.full
def test_they_are_those_of_the_sequential_run(tmp_path: Path) -> None:
    made = small("scaffold", run={"metrics": METRICS})
    carrier, result = run_whole(made, tmp_path)
    assert assert_equals_sequential_run(result, carrier, made) == set()
    _, expected = run_sequentially(made, result.rounds)
    for name in METRICS:
        assert [r.values(name) for r in result.rounds] == [r.values(name) for r in expected]
    assert result.rounds[-1].measured.metrics == METRICS


def table(value: Any, names: list[str] = METRICS, **splits: Any) -> dict[str, Any]:
    return {name: {"personal": {"val": value, "test": value, **splits}} for name in names}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("found", "is_refused"),
    [
        (table(0.5), False),
        (table(None), False),
        (table(math.nan), False),
        (table(1.01), True),
        (table(-0.01), True),
        (table(0.5, ["macro_f1"]), True),
        (table(0.5, [*METRICS, "auroc"]), True),
        (table(0.5, more=0.5), True),
        ({name: {"other": {"val": 0.5, "test": 0.5}} for name in METRICS}, True),
        ({}, True),
    ],
)
def test_impossible_metrics_are_refused(found: Any, is_refused: bool, tmp_path: Path) -> None:
    made = small("scaffold", rounds=2, run={"metrics": METRICS})

    def lie(there: Any, message: Any) -> Any:
        answer = there.answered(message)
        evaluation = Answer.from_json(answer.header).evaluation
        assert evaluation is not None
        return [
            replace_fields(
                answer, evaluation=replace_values(evaluation, **{name: {} for name in METRICS} | found)
            )
        ]

    carrier = local(made, tmp_path, fault_in_round(2, 1, lie))
    result = serve_run(carrier, made, tmp_path / "run")
    assert lost(result) == [set(), {1} if is_refused else set()]
    assert result.rounds[1].measured is not None
    assert result.rounds[1].measured.client_ids == ([0, 2] if is_refused else [0, 1, 2])


def test_sites_send_how_many_of_their_labels_count(tmp_path: Path) -> None:
    # versicolor is left out, so that clients have other numbers of labels than of examples
    made = small("fedavg", rounds=2, loss={"kind": "cross_entropy", "ignore_index": 1})
    carrier, result = run_whole(made, tmp_path)
    assert assert_equals_sequential_run(result, carrier, made) == set()
    labels = [client.test.y for client in made.federation().clients]
    counts = [float((y != 1).sum()) for y in labels]
    assert counts != [float(len(y)) for y in labels]
    last = result.rounds[-1]
    assert last.values(COUNTED_LABELS, series="", split="test") == counts
    weighted = result.measurements.over_clients("accuracy", "personal").iloc[-1]["weighted"]
    assert weighted == pytest.approx(np.average(np.array(last.values(), float), weights=counts))


def test_a_client_whose_labels_all_count_is_weighted_by_its_examples(tmp_path: Path) -> None:
    made = small("fedavg", rounds=1, loss={"kind": "cross_entropy", "ignore_index": 1})
    shares = made.shares()
    data = list(shares.data)
    # no versicolor at the last client, which therefore sends no number
    keep = {s: getattr(data[2], s) for s in ("train", "val", "test")}
    data[2] = dataclasses.replace(
        data[2], **{s: e.take((e.y != 1).nonzero().flatten()) for s, e in keep.items()}
    )
    carrier = LocalTransport({100 + i: tmp_path / f"client-{i}" for i in range(3)})
    for i in range(3):
        prepare(
            carrier.folders[100 + i],
            made,
            i,
            dataclasses.replace(shares, data=tuple(data)),
            SiteSettings.simulated(),
        )
    result = serve_run(carrier, made, tmp_path / "run")
    counts = [int((client.test.y != 1).sum()) for client in data]
    assert result.rounds[-1].values(COUNTED_LABELS, series="", split="test") == [*counts[:2], None]
    weighted = result.measurements.over_clients("accuracy", "personal").iloc[-1]["weighted"]
    assert weighted == pytest.approx(np.average(np.array(result.rounds[-1].values(), float), weights=counts))


@pytest.mark.parametrize(
    ("labels", "accuracy", "rounded"),
    [
        # of one label an example, of which some do not count; of an example; of several labels an example
        (1999, 7 / 1999, 7 / 1999),
        (None, 7 / 2999, 7 / 2999),
        (59980, 12345 / 59980, 0.206),
    ],
)
def test_numbers_of_labels_and_accuracies_are_rounded(labels: Any, accuracy: float, rounded: float) -> None:
    y = torch.arange(3000) % 3
    sets = [Examples(torch.zeros(n, 2), y[:n]) for n in (3000, 12, 2999)]
    columns = [Column("accuracy", "personal", s, [accuracy]) for s in ("val", "test")]
    if labels is not None:
        columns += [Column(COUNTED_LABELS, "", s, [n]) for s, n in (("val", 8), ("test", labels))]
    actual = [c.values[0] for c in coarsen(ClientTable([0], columns), ClientData(*sets)).columns]
    # nothing of a set of 12 examples leaves
    assert actual[:2] == [None, pytest.approx(rounded, abs=1e-12)]
    assert actual[2:] == ([] if labels is None else [None, float(f"{labels:.3g}")])


@pytest.mark.parametrize("values", [{"val": 5.0}, {"val": 5.0, "test": math.inf}, {"val": -1.0, "test": 5.0}])
def test_impossible_numbers_of_labels_are_refused(values: dict[str, float], tmp_path: Path) -> None:
    made = small("fedavg", rounds=2)

    def lie(there: Any, message: Any) -> Any:
        answer = there.answered(message)
        evaluation = Answer.from_json(answer.header).evaluation
        assert evaluation is not None
        columns = [Column(COUNTED_LABELS, "", split, [value]) for split, value in values.items()]
        return [replace_fields(answer, evaluation=ClientTable([1], [*evaluation.columns, *columns]))]

    result = serve_run(local(made, tmp_path, fault_in_round(2, 1, lie)), made, tmp_path / "run")
    assert lost(result) == [set(), {1}]
