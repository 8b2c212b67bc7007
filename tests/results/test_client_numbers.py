"""A further number of each client is one entry of the table and one column of the evaluation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fedlowrank import simulate
from fedlowrank.core.errors import ConfigError
from fedlowrank.network.answers import check_evaluation
from fedlowrank.network.validation.uploads import RefusedReplyError
from fedlowrank.report import compare_runs
from fedlowrank.report.formats.markdown import comparison_markdown
from fedlowrank.report.run_comparison import to_csv
from fedlowrank.results.client_metrics import check_metric_names, split_metrics
from fedlowrank.results.client_numbers import CLIENT_NUMBERS, ClientNumber
from fedlowrank.results.evaluation import evaluation_table
from fedlowrank.results.evaluation.model_evaluation import evaluate_client
from fedlowrank.results.frames import load_runs
from fedlowrank.results.measurements import ClientTable, Column, is_lower_better
from fedlowrank.results.records import RunRecord
from tests.results.labeled_clients import make_labeled_federation

NAME = "wrong_share"


@pytest.fixture
def _with_wrong_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """One minus the accuracy, added as design.md says."""
    monkeypatch.setitem(CLIENT_NUMBERS, NAME, ClientNumber("wrong labels", lower_is_better=True))
    tabulate_results = evaluation_table.tabulate_results

    def with_wrong_share(*arguments: Any) -> ClientTable:
        table = tabulate_results(*arguments)
        shares = [
            Column(NAME, column.series, column.split, [None if v is None else 1 - v for v in column.values])
            for column in table.columns
            if column.name == "accuracy"
        ]
        return ClientTable(table.client_ids, [*table.columns, *shares])

    monkeypatch.setattr(evaluation_table, "tabulate_results", with_wrong_share)


@pytest.mark.usefixtures("_with_wrong_share")
def test_a_further_number_reaches_the_tables_and_the_report(tmp_path: Path) -> None:
    result = simulate("fedavg", make_labeled_federation(), rounds=2, folder=tmp_path / "runs" / "fedavg")
    record = result.rounds[-1]
    assert record.values(NAME) == [None if v is None else 1 - v for v in record.values("accuracy")]
    assert is_lower_better(NAME) is True
    rows = load_runs(tmp_path / "runs", last=True)
    with_examples = rows[rows["accuracy"].notna()]
    assert (with_examples[NAME] == 1 - with_examples["accuracy"]).all()
    table = compare_runs([RunRecord.load(tmp_path / "runs" / "fedavg")])
    assert "| wrong labels" in comparison_markdown(table)
    assert f"metric_{NAME}" in to_csv(table)


@pytest.mark.usefixtures("_with_wrong_share")
@pytest.mark.parametrize(
    ("value", "is_refused"), [(0.25, False), (None, False), (1.01, True), (-0.1, True), (math.nan, True)]
)
def test_an_answer_with_a_further_number_is_taken_if_its_values_are_possible(
    value: float | None, is_refused: bool
) -> None:
    result = simulate("fedavg", make_labeled_federation(), rounds=1)
    run, info = result.run, result.run.federation.infos[0]
    table = evaluate_client(run.local_model(info), info, run.federation.clients[0])
    columns = [Column(c.name, c.series, c.split, [value]) if c.name == NAME else c for c in table.columns]
    changed = ClientTable(table.client_ids, columns)
    model = run.task.model(info)
    check_evaluation(table, info, model, {})
    if is_refused:
        with pytest.raises(RefusedReplyError, match="its evaluation is impossible"):
            check_evaluation(changed, info, model, {})
    else:
        check_evaluation(changed, info, model, {})


@pytest.mark.usefixtures("_with_wrong_share")
def test_an_answer_with_a_further_number_of_one_split_alone_is_refused() -> None:
    result = simulate("fedavg", make_labeled_federation(), rounds=1)
    run, info = result.run, result.run.federation.infos[0]
    table = evaluate_client(run.local_model(info), info, run.federation.clients[0])
    columns = [column for column in table.columns if (column.name, column.split) != (NAME, "val")]
    with pytest.raises(RefusedReplyError, match="its evaluation is impossible"):
        check_evaluation(ClientTable(table.client_ids, columns), info, run.task.model(info), {})


@pytest.mark.parametrize("name", CLIENT_NUMBERS)
def test_no_metric_has_the_name_of_a_number(name: str) -> None:
    def metric(scores: Any, labels: Any) -> float:
        return 0.0

    metric.__name__ = name
    with pytest.raises(ConfigError, match=f"a function is called '{name}' as something else"):
        split_metrics([metric])
    with pytest.raises(ConfigError, match=name):
        check_metric_names([name])
