"""Further metrics in the tables of the report, against means and intervals by hand."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from fedlowrank.report import compare_runs
from tests.report.report_runs import cells, in_clusters, rounds_of, rows_of, titles_of


def with_metrics(values, series="personal"):
    """Two rounds of which the last has a metric of three clients, the third of which never trains."""
    rows = rounds_of([[0.1] * 3, [0.5] * 3])
    for row, actual in zip(rows, ([0.0, 0.0, 0.0], values), strict=True):
        table = {name: {"val": [9.0] * 3, "test": actual} for name in ("personal", series)}
        row["accuracy"] = dict.fromkeys(table, row["accuracy"]["personal"])
        row["metrics"] = {"macro_f1": table, "my.own:deep_share": table}
    return rows


@pytest.mark.full
def test_mean_over_clients_and_interval_over_seeds(make_run):
    people = in_clusters([None] * 3, unseen=[2])
    seeds = [with_metrics([0.4, 0.6, 99.0]), with_metrics([0.8, None, 99.0], "global")]
    table = compare_runs([make_run("fedavg", s, rounds=r, clients=people) for s, r in enumerate(seeds)])
    (row,) = rows_of(table)
    half = stats.t.ppf(0.975, 1) * math.sqrt(((0.5 - 0.65) ** 2 + (0.8 - 0.65) ** 2) / 1) / math.sqrt(2)
    for name in ("macro_f1", "my.own:deep_share"):
        assert row[f"metric_{name}"] == pytest.approx(0.65)
        assert row[f"metric_{name}_ci95_seeds"] == pytest.approx(half)
        assert row[f"metric_{name}.global"] == pytest.approx(0.8)
    titles = ["macro F1", "deep share", "macro F1 global", "deep share global"]
    assert sorted(titles_of(table, "metrics")) == sorted(titles)
    assert cells(table, "metrics", "macro F1") == [f"0.65 ± {half:.2f}"]
    assert cells(table, "metrics", "macro F1 global") == ["0.8000"]


def test_a_seed_that_diverged_is_not_left_out(make_run):
    seeds = [with_metrics([0.4, 0.6, 0.5]), with_metrics([math.nan, 0.6, 0.5])]
    table = compare_runs([make_run("fedavg", s, rounds=rows) for s, rows in enumerate(seeds)])
    assert rows_of(table)[0]["metric_macro_f1"] is None


def test_a_series_with_a_colon_has_its_name_and_interval(make_run):
    seeds = [with_metrics([v, v, v], "a:b") for v in (0.25, 0.75)]
    table = compare_runs([make_run("fedavg", s, rounds=rows) for s, rows in enumerate(seeds)])
    half = stats.t.ppf(0.975, 1) * math.sqrt(2 * 0.25**2) / math.sqrt(2)
    assert set(titles_of(table, "metrics")) == {"macro F1", "deep share", "macro F1 a:b", "deep share a:b"}
    assert cells(table, "metrics", "macro F1 a:b") == [f"0.50 ± {half:.2f}"]


@pytest.mark.full
def test_no_table_without_metrics(make_run):
    assert "metrics" not in compare_runs([make_run()]).result_tables
