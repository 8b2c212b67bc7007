"""What a run over a network does not know is shown as unknown, and the round of its results is named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedlowrank.report import compare_runs
from fedlowrank.report.statistics.run_statistics import RunStatistics
from tests.report.report_runs import MakeRun, rounds_of

PRIVATE = {"privacy": {"kind": "local", "epsilon": 3.0}}
SECURE = {"privacy": {"kind": "none"}, "secure": {"on": True}}
OPEN = {"privacy": {"kind": "none"}, "secure": {"on": False}}


@pytest.mark.parametrize(
    ("run", "is_deployed", "is_known"),
    [
        (PRIVATE, True, False),
        (SECURE, True, False),
        (OPEN, True, True),
        (PRIVATE, False, True),
        ({}, True, True),
    ],
)
def test_confidential_clients_do_not_tell_how_much_they_computed(
    run: dict[str, Any], is_deployed: bool, is_known: bool, make_run: MakeRun
) -> None:
    record = make_run(run=run, rounds=rounds_of([[0.2, 0.4], [0.5, 0.7]]))
    if is_deployed:
        (record.folder / "network.json").write_text("{}")
    costs = RunStatistics(record).costs
    assert [costs["steps"], costs["flops"]] == (
        [20, 3_000_000] if is_known else pytest.approx([math.nan] * 2, nan_ok=True)
    )
    assert (costs["bytes_up"], costs["bytes_down"]) == (500, 1000)
    table = compare_runs([record]).result_tables["cost"]
    cells = dict(zip([c.title for c in table.columns], table.rows[0][1:], strict=True))
    assert (cells["steps"], cells["FLOPs"]) == (("20", "3.00 M") if is_known else ("–", "–"))


def test_a_finished_run_says_after_which_round_it_was_evaluated_last(make_run: MakeRun) -> None:
    rows = rounds_of([[0.2], [0.3], [0.4]])
    assert RunStatistics(make_run(rounds=rows)).status == ""
    rows[-1]["accuracy"] = None
    assert RunStatistics(make_run(rounds=rows)).status == "last evaluated at round 1 of 2"


def test_results_that_no_site_sends_are_explained(make_run: MakeRun) -> None:
    record = make_run(rounds=rounds_of([[None, None], [None, None]]))
    assert RunStatistics(record).status == "no evaluation"
    (record.folder / "network.json").write_text("{}")
    assert "no evaluation left the sites: their test sets are small" in RunStatistics(record).status
