"""Model sizes, ranks, the downlink and the paper's numbers: computed from records and written into tables."""

import csv
import io
import json
import math

import pytest

from fedlowrank.report import compare_runs
from fedlowrank.report.figures.chart import choose_lines
from fedlowrank.report.number_formats import MISSING
from fedlowrank.report.run_comparison import to_csv
from fedlowrank.report.statistics.experiments import read_experiments
from fedlowrank.report.statistics.groups import group_runs
from fedlowrank.report.statistics.low_rank import downlink, last_ranks, model_size, rank_curves
from fedlowrank.report.statistics.measures import TEST_ACCURACY
from tests.report.report_runs import cells, rounds_of, rows_of, text_of

FULL = 11_173_952
"""Numbers of the paper's ResNet18."""

SAME = {"rounds": 3}
"""Rounds in the configuration of runs that shall count as seeds of one setting, though one has fewer."""


def sized(sizes, ranks=(), accuracy=0.5, clients=2, further=()):
    """Rows of rounds with ``sizes[series][round]``, either one number for all clients or one for each."""
    count = max(len(one) for one in sizes.values())
    rows = rounds_of([[accuracy] * clients for _ in range(count)])
    for i, row in enumerate(rows):
        splits = row["accuracy"]["personal"]
        row["accuracy"] = dict.fromkeys([*sizes, *further], splits)
        row["parameters"] = {
            name: list(one[i]) if isinstance(one[i], list) else [one[i]] * clients
            for name, one in sizes.items()
        }
        row["ranks"] = dict(ranks[i]) if i < len(ranks) else {}
    return rows


def slr(mixed=(100, 80, 60), gkr=(100, 70, 50), **changes):
    return sized({"mixed": list(mixed), "gkr": list(gkr)}, **changes)


def titles(table, block="size"):
    return [one.title for one in table.result_tables[block].columns] if block in table.result_tables else []


def test_size_is_that_of_the_model_whose_accuracy_counts(make_run):
    rows = sized({"mixed": [100, 80, 60]})
    rows[2]["accuracy"] = {"mixed": {"test": [math.nan, None]}}
    assert model_size(group_runs([make_run(rounds=rows)])[0], "mixed")[0].mean == 80
    for row in rows:
        row["accuracy"] = {"mixed": {"test": [None, None]}}
    assert model_size(group_runs([make_run(rounds=rows)])[0], "mixed")[0].mean == 60


@pytest.mark.full
def test_sizes_differ_where_they_are_more_than_the_architectures(make_run):
    def differ(*runs):
        return any(one.has_sizes for one in read_experiments(runs))

    dense = make_run("a", rounds=sized({"personal": [[7, 9], [7, 9]]}))
    assert not differ(
        dense, make_run("b", rounds=sized({"personal": [[7, 9], [7, 9]], "global": [[7, 9], [7, 9]]}))
    )
    assert not differ(make_run("old"))
    assert not differ(make_run("a", rounds=sized({"personal": [[7, 9]]})), make_run("old"))
    assert differ(dense, make_run("b", rounds=sized({"personal": [[7, 8], [7, 8]]})))
    assert differ(make_run("a", rounds=sized({"personal": [[7, 9], [7, 8]]})))
    assert differ(make_run("a", rounds=sized({"personal": [[7, 9]], "global": [[7, 8]]})))
    wider = [make_run("a", rounds=sized({"personal": [k]}), vary={"model.width": k}) for k in (1, 2)]
    assert not differ(*wider)


@pytest.mark.full
def test_weights_without_a_course_are_left_out(make_run):
    mine = slr(ranks=[{"a": 10, "b": 4, "zero": 0}, {"a": 8, "b": 4, "zero": 0}])
    other = slr(ranks=[{"a": 10}, {"a": 8}])
    (group,) = group_runs([make_run("a", s, rounds=rows) for s, rows in enumerate((mine, other, slr()))])
    assert list(rank_curves(group)) == ["a"]
    assert last_ranks(group) == {"a": 8.0, "b": 4.0, "zero": 0.0}
    assert rank_curves(group_runs([make_run("a")])[0]) == {}
    assert last_ranks(group_runs([make_run("a")])[0]) == {}


@pytest.mark.full
def test_downlink_is_for_each_participant(make_run):
    rows = rounds_of([[0.1] * 4, [0.2] * 4, [0.3] * 4, [0.4] * 4])
    rows[2]["participants"], rows[3]["participants"] = [1], []
    rows[1]["bytes_down"] = 800
    other = rounds_of([[0.1] * 4, [0.2] * 4, [0.3] * 4])
    (group,) = group_runs([make_run("a", s, rounds=some, run=SAME) for s, some in enumerate((rows, other))])
    got = downlink(group)
    assert got.index.tolist() == [1, 2]
    assert got["mean"].tolist() == [(800 / 4 + 1000 / 4) / 2, (1000 / 1 + 1000 / 4) / 2]
    assert downlink(group_runs([make_run("b", rounds=rounds_of([[0.5]]))])[0]).empty


@pytest.mark.full
def test_series_shown_are_headlines_and_then_further_ones_if_there_is_room(make_run):
    groups = group_runs([make_run("a", rounds=slr(further=["x"])), make_run("b")])
    shown = choose_lines(groups, TEST_ACCURACY)
    assert [(one.label, one.series_index) for one in shown] == [
        ("a", 0),
        ("a: gkr", 1),
        ("a: x", 2),
        ("b", 0),
    ]
    assert [one.label for one in choose_lines(groups, TEST_ACCURACY, 3)] == ["a", "b"]
    rows = slr()
    for row in rows:
        row["accuracy"] = {"mixed": {"test": [None]}, "gkr": {"test": [0.5]}}
    # a further series does not pass for the headline that has no number
    assert [
        (one.label, one.series_index)
        for one in choose_lines(group_runs([make_run("a", rounds=rows)]), TEST_ACCURACY)
    ] == [("a: gkr", 1)]


@pytest.mark.full
def test_float32_counts_as_the_paper_does(make_run):
    rows = rounds_of([[0.1], [0.5]])
    rows[1]["parameters_down"] = rows[1]["parameters_up"] = FULL * 10 * 1000
    reference = {"label": "Table 2", "accuracy": {}, "communication": {"fedavg": 893.92}}
    table = compare_runs(
        [make_run("fedavg", rounds=rows, reference=reference), make_run("other", reference=reference)]
    )
    assert rows_of(table)[0]["communication_float32"] == 4 * 2 * FULL * 10_000 == 893_916_160_000
    assert rows_of(table)[0]["reference_communication_gb"] == 893.92
    assert rows_of(table)[1]["reference_communication_gb"] is None
    assert cells(table, "cost", "as float32") == ["894 GB", "30.0 kB"]  # 20 rounds of 375 numbers
    assert cells(table, "cost", "paper") == ["894 GB", MISSING]
    assert "paper" not in titles(table, "accuracy")
    assert ("paper", "Table 2") in table.footnotes
    bare = compare_runs([make_run("a")])
    assert "as float32" in titles(bare, "cost")
    assert "paper" not in titles(bare, "cost")


@pytest.mark.full
def test_sizes_of_every_series_with_the_papers(make_run):
    mixed = [[100, 100], [6_000_000, 7_000_000]]
    reference = {
        "label": "Table 2",
        "accuracy": {"fedslr": 82.19, "fedslr.gkr": 64.22, "ditto": None},
        "parameters": {"fedslr": 6.69, "fedslr.gkr": 5.54, "fedavg": 11.17},
    }
    runs = [
        make_run("fedavg", rounds=sized({"personal": [FULL, FULL]}), reference=reference),
        make_run("fedslr", 0, rounds=sized({"mixed": mixed, "gkr": [100, 5_000_000]}), reference=reference),
        make_run("fedslr", 1, rounds=sized({"mixed": mixed, "gkr": [100, 5_500_000]}), reference=reference),
        make_run("ditto", reference=reference),
    ]
    table = compare_runs(runs)
    assert titles(table) == ["parameters", "paper", "parameters gkr", "paper gkr"]
    assert cells(table, "size", "parameters") == ["11.2 M", "6.50 ± 0.50 M", MISSING]
    assert cells(table, "size", "parameters gkr") == [MISSING, "5.25 M", MISSING]
    assert cells(table, "size", "paper") == ["11.2 M", "6.69 M", MISSING]
    assert cells(table, "size", "paper gkr") == [MISSING, "5.54 M", MISSING]
    fedslr = next(row for row in csv.DictReader(io.StringIO(to_csv(table))) if row["method"] == "fedslr")
    expected = {
        "parameters_model": 6.5e6, "parameters_model_std": 5e5, "parameters_model.gkr": 5.25e6,
        "parameters_model_std.gkr": 0.0, "reference_parameters_m": 6.69, "reference_parameters_m.gkr": 5.54,
        "reference_percent": 82.19, "reference_percent.gkr": 64.22, "series.gkr": 0.5,
        "difference_points.gkr": 50 - 64.22,
    }  # fmt: skip
    assert {key: float(fedslr[key]) for key in expected} == expected
    assert cells(table, "accuracy", "paper gkr") == [MISSING, "64.22", MISSING]
    assert cells(table, "accuracy", "difference gkr") == [MISSING, "−14.22", MISSING]
    assert cells(table, "accuracy", "paper") == [MISSING, "82.19", "not converged"]


def test_a_paper_may_name_the_headline_too(make_run):
    reference = {"label": "T", "accuracy": {"fedslr.mixed": 82.19}, "parameters": {"fedslr.mixed": 6.69}}
    (row,) = rows_of(compare_runs([make_run("fedslr", rounds=slr(), reference=reference)]))
    assert (row["reference_percent"], row["reference_parameters_m"]) == (82.19, 6.69)
    assert "reference_percent.gkr" not in row


@pytest.mark.full
@pytest.mark.parametrize("value", [None, "n/a", True, math.nan, [1.0]])
def test_what_is_no_number_is_no_reference(make_run, value):
    reference = {
        "label": "T",
        "accuracy": {"a": 1.0},
        "communication": {"a": value},
        "parameters": {"a": value},
    }
    table = compare_runs([make_run("a", rounds=slr(), reference=reference)])
    assert rows_of(table)[0]["reference_communication_gb"] is None
    assert rows_of(table)[0]["reference_parameters_m"] is None
    assert "paper" not in titles(table) + titles(table, "cost")


@pytest.mark.full
def test_no_size_columns_without_news(make_run):
    assert titles(compare_runs([make_run("a")])) == []
    same = [make_run(m, rounds=sized({"personal": [[7, 9], [7, 9]]})) for m in "ab"]
    table = compare_runs(same)
    assert titles(table) == []
    assert rows_of(table)[0]["parameters_model"] == 8.0  # the CSV has it nevertheless
    assert titles(compare_runs([*same, make_run("c", rounds=slr())])) == ["parameters", "parameters gkr"]
    printed = {"label": "T", "accuracy": {}, "parameters": {"a": 11.17}}
    assert titles(compare_runs([make_run("a", reference=printed)])) == ["paper"]


@pytest.mark.full
def test_each_value_of_a_sweep_has_its_own_reference(make_run):
    runs = [
        make_run(
            "fedslr", seed, rounds=slr(), vary={"methods.fedslr.lam": lam}, fields={"lam": lam},
            reference={"label": "Table 3", "accuracy": {"fedslr": best, "fedslr.gkr": gkr}, "parameters": {"fedslr": m}},
        )
        for lam, best, gkr, m in ((1e-5, 81.89, 63.63, 8.54), (1e-3, 74.33, 54.26, 2.24))
        for seed in (0, 1)
    ]  # fmt: skip
    table = compare_runs(runs)
    assert cells(table, "accuracy", "paper") == ["81.89", "74.33"]
    assert cells(table, "accuracy", "paper gkr") == ["63.63", "54.26"]
    assert cells(table, "size", "paper") == ["8.54 M", "2.24 M"]
    assert [row["difference_points.gkr"] for row in rows_of(table)] == [50 - 63.63, 50 - 54.26]


@pytest.mark.full
def test_ranks_at_the_end_are_json_in_the_csv(make_run):
    runs = [
        make_run("a", s, rounds=slr(ranks=[{"w": 9, "v": 3}, {"w": 9, "v": 3}, {"w": 4 + s, "v": 3}]))
        for s in (0, 1)
    ]
    row = next(csv.DictReader(io.StringIO(to_csv(compare_runs(runs)))))
    assert json.loads(row["ranks_last"]) == {"w": 4.5, "v": 3.0}
    assert next(csv.DictReader(io.StringIO(to_csv(compare_runs([make_run("a")])))))["ranks_last"] == ""


def test_a_terminal_of_80_characters_shows_all(make_run):
    name = "a method of some length"
    accuracy = {name: 82.19, f"{name}.global": 73.87, f"{name}.gkr": 64.22}
    parameters = {name: 6.69, f"{name}.global": 8.54, f"{name}.gkr": 5.54}
    reference = {"label": "T", "accuracy": accuracy, "parameters": parameters, "communication": {name: 722.6}}
    rows = sized({"personal": [FULL] * 2, "global": [FULL] * 2, "gkr": [FULL] * 2})
    runs = [make_run(name, s, title=name, rounds=rows, reference=reference) for s in (0, 1)]
    said = text_of(compare_runs(runs), 80)
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said
    assert "Accuracy, continued" in said
    for printed in ("82.19", "73.87", "64.22", "6.69 M", "8.54 M", "5.54 M", "723 GB"):
        assert said.count(printed) == 1
    assert "1.50 kB" in said
    tables = sum(line.split()[:1] == ["method"] for line in said.splitlines())
    assert said.count(name) == tables + 1 > 5  # and once in the sentence on the result
