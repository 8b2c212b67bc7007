"""Further metrics over messages: those of the sequential run, and impossible ones refused with their reply."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fedlowrank.network.messages import Answer
from tests.support.client_tables import replace_values
from tests.support.local_network import (
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
