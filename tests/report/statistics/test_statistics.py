"""Statistics against independent computations and hand-made curves."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedlowrank.core.errors import ConfigError
from fedlowrank.report import compare_runs
from fedlowrank.report.formats.markdown import comparison_markdown
from fedlowrank.report.statistics.groups import group_runs
from fedlowrank.report.statistics.run_statistics import RunStatistics, estimate
from fedlowrank.results.records import RoundRecord, RunRecord
from tests.report.report_runs import main_of, page_of, rounds_of, rows_of, target_of, text_of, titles_of
from tests.support.client_tables import make_client_table


def simple(test, val=None):
    """Rows of rounds, not evaluated where the values are None."""
    rows = rounds_of([values or [0.0] for values in test], val)
    for row, values in zip(rows, test, strict=True):
        row["accuracy"] = None if values is None else row["accuracy"]
    return rows


def scored(values, weights=None, measure="accuracy"):
    """Statistics of one evaluation, as a row; None if there are none."""
    record = RoundRecord(0, measured=make_client_table({measure: {"personal": {"test": values}}}))
    sizes = [1] * len(values) if weights is None else weights
    clients = [{"id": i, "test": size} for i, size in enumerate(sizes)]
    scores = RunRecord(Path("x"), {}, clients, [record], {}).measurements.over_clients(measure, "personal")
    return scores.iloc[0] if len(scores) else None


@pytest.mark.full
@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=40), st.data())
def test_score_agrees_with_numpy(values, data):
    weights = data.draw(st.lists(st.integers(1, 99), min_size=len(values), max_size=len(values)))
    measure, sign = data.draw(st.sampled_from([("accuracy", 1), ("loss", -1)]))
    got = scored(values, weights, measure)
    kept = [(v, w) for v, w in zip(values, weights, strict=True) if v is not None]
    if not kept:
        assert got is None
        return
    x, w = (np.array(column, dtype=float) for column in zip(*kept, strict=True))
    assert got["mean"] == pytest.approx(np.mean(x))
    assert got["std"] == pytest.approx(np.std(x))
    assert got["weighted"] == pytest.approx(np.average(x, weights=w))
    # of 11 clients the worst two
    assert got["worst"] == pytest.approx(sign * np.mean(sorted(sign * x)[: math.ceil(0.1 * len(x) - 1e-12)]))
    assert got["without"] == values.count(None)


def test_not_finite_is_left_out_and_counted():
    got = scored([0.5, math.nan, None, 0.7])
    assert (got["mean"], got["non_finite"], got["without"]) == (pytest.approx(0.6), 1, 1)
    assert scored([math.nan]) is None


def test_examples_that_are_not_known_weigh_nothing():
    measured = make_client_table({"accuracy": {"personal": {"test": [0.2, 0.6]}}})
    run = RunRecord(Path("x"), {}, [{"id": 0, "test": 3}], [RoundRecord(0, measured=measured)], {})
    scores = run.measurements.over_clients("accuracy", "personal")
    assert math.isnan(scores["weighted"].iloc[0])


def test_choices_of_round(make_run):
    test = [[0.1], [0.5], [0.9], [0.6], [0.7]]
    val = [[0.1], [0.8], [0.3], [0.8], [0.5]]
    got = main_of(make_run(rounds=simple(test, val)))
    assert got.last == 0.7
    assert (got.best_round, got.best_by_validation) == (1, 0.5)  # the earlier of the two with 0.8
    assert got.last_ten == pytest.approx(np.mean([0.5, 0.9, 0.6, 0.7]))  # without the round before training
    assert got.best_test == 0.9


def test_last_ten_of_many(make_run):
    test = [[i / 100] for i in range(31)]
    assert main_of(make_run(rounds=simple(test))).last_ten == pytest.approx(np.mean(np.arange(21, 31) / 100))


def test_weights_follow_client_ids(make_run):
    clients = [{"id": 1, "test": 30}, {"id": 0, "test": 10}]
    got = main_of(make_run(rounds=simple([[0.2, 0.6]]), clients=clients))
    assert got.last_weighted == pytest.approx((0.2 * 10 + 0.6 * 30) / 40)


@pytest.mark.full
def test_to_target_by_hand(make_run):
    # Round 3 is not evaluated, but its costs are spent before round 4 reaches the target.
    run = RunStatistics(
        make_run(rounds=simple([[0.1], [0.4], [0.6], None, [0.9], [0.8], [0.95]], [[0.5]] * 7))
    )
    assert run.costs_to(0.9) == {
        "round": 4, "bytes_up": 4 * 500, "bytes_down": 4 * 1000, "parameters_up": 4 * 125, "parameters_down": 4 * 250,
        "flops": 12_000_000, "steps": 80, "seconds_train": 2.0, "seconds_server": 1.0, "seconds_evaluate": 0.625,
    }  # fmt: skip
    assert run.costs_to(0.96) is run.costs_to(None) is None
    assert run.costs_to(0.05)["bytes_up"] == 0
    (row,) = rows_of(compare_runs([run.record], 0.9))
    assert (row["target_bytes"], row["target_parameters"], row["target_seconds"]) == (4 * 1500, 4 * 375, 3.0)


@pytest.mark.full
def test_simulated_seconds_to_target_by_hand(make_run):
    rounds = simple([[0.1], [0.4], None, [0.9], [0.95]])
    for i, row in enumerate(rounds[1:], 1):
        row["simulated_seconds"] = 10.0**i
    one, other = make_run("a", rounds=rounds), make_run("b", rounds=simple([[0.1], [0.9]]))
    table = compare_runs([one, other], 0.9)
    actual = {row["method"]: row["target_simulated_seconds"] for row in rows_of(table)}
    assert actual["a"] == 1110.0
    assert {row["method"]: row["simulated_seconds"] for row in rows_of(table)}["a"] == 11110.0
    assert actual["b"] is None or math.isnan(actual["b"])
    # of the whole run, and until the target
    assert titles_of(table).count("simulated time") == 2
    assert "simulated time" not in titles_of(compare_runs([other], 0.9))


def test_target_given_then_own_then_common(make_run):
    a = make_run("a", rounds=simple([[0.1], [0.857], [0.5]]))
    b = make_run("b", rounds=simple([[0.1], [0.3], [0.9]]))
    silent = make_run("c", rounds=simple([None]))
    assert target_of([a, b], 0.42).value == 0.42
    common = target_of([a, b, silent])
    assert common.value == 0.85
    assert "highest whole percent that all runs reached" in common.source
    own = [make_run(m, rounds=simple([[0.1], [0.4], [0.5]]), run={"target": 0.9}) for m in "ab"]
    assert target_of(own).value == 0.9
    assert target_of([*own, a]).value == 0.5  # only some have their own
    for wrong in (0.0, 90, math.nan):
        with pytest.raises(ConfigError):
            target_of([a], wrong)


@pytest.mark.full
def test_target_lies_above_what_costs_no_messages(make_run):
    """Standalone's best round counts, and every seed of a method must reach the target."""
    rows = simple([[0.1], [0.62], [0.55]])
    for row in rows:
        row["bytes_up"] = row["bytes_down"] = 0
    alone = make_run("standalone", title="Standalone", rounds=rows)

    def target(*seeds):
        runs = [make_run("a", s, rounds=simple([[0.1], [best]])) for s, best in enumerate(seeds)]
        return group_runs([alone, make_run("b", rounds=simple([[0.1], [0.3]])), *runs])[0].target

    assert target(0.80, 0.715).value == 0.71
    assert "above the 62.0 % that Standalone reaches without communication" in target(0.80, 0.715).source
    for low in (0.625, 0.50):  # the whole percent of 0.625 is 62 %, which lies not above
        assert target(0.80, low) == (None, "no method exceeds what Standalone reaches without communication")
    table = compare_runs([alone, make_run("a", rounds=simple([[0.1], [0.5]]))])
    assert "target" not in table.result_tables
    assert any(text.startswith("no method exceeds") for term, text in table.footnotes if term == "target")
    assert target_of([alone], 0.42).value == 0.42


def test_common_target_is_not_lost_to_rounding(make_run):
    assert target_of([make_run(rounds=simple([[0.1], [0.29], [0.57]]))]).value == 0.57
    assert target_of([make_run(rounds=simple([[0.004]]))]).value is None


def counted(*tests):
    """Rows of ``clients.json`` with these numbers of test examples in each class."""
    return [{"id": i, "test": sum(one), "classes": {"test": one}} for i, one in enumerate(tests)]


CURVE = [[0.1, 0.1], [0.3, 0.3], [0.52, 0.52]]


@pytest.mark.parametrize(
    ("clients", "classes", "expected"),
    [
        (counted([5, 5], [5, 5]), "ab", None),  # 50.5 %, but its whole percent is not more than 50 %
        (counted([9, 1], [5, 5]), "ab", None),  # the first class is right in 90 % and 50 %
        (counted([1, 9], [9, 1]), "ab", 0.52),  # no single class is right more often than 50 %
        (counted([6, 4, 0], [4, 5, 1]), "abc", 0.52),  # 50 %
        (counted([7, 3, 0], [4, 5, 1]), "abc", None),  # 55 %
        ([], "ab", 0.52),
        ([], "a", None),
        ([], "", 0.52),
    ],
)
def test_no_target_at_the_level_of_a_constant_answer(make_run, clients, classes, expected):
    top = 0.505 if clients and clients[0]["classes"]["test"] == [5, 5] else 0.52
    rows = simple([*CURVE[:-1], [top] * 2])
    runs = [make_run("a", rounds=rows, clients=clients or None, classes=list(classes))]
    if not clients:
        for row in runs[0].clients:
            row["classes"] = {}
    target = target_of(runs)
    assert target.value == expected
    assert ("of a constant answer" in target.source) is (expected is None)
    # a target that is asked for stands
    assert target_of(runs, 0.3).value == 0.3


@pytest.mark.parametrize("flag", ["unseen", "hostile"])
def test_clients_in_no_mean_do_not_make_the_chance_level(make_run, flag):
    people = counted([5, 5], [0, 10])
    people[1][flag] = True
    assert target_of([make_run("a", rounds=simple(CURVE), clients=people, classes=["a", "b"])]).value == 0.52


@pytest.mark.full
def test_no_target_that_all_runs_reach_by_their_first_evaluation(make_run):
    early, late = [[0.1], None, [0.62], [0.61]], [[0.1], None, [0.3], [0.621]]
    runs = [make_run("a", rounds=simple(early)), make_run("b", rounds=simple(early))]
    assert target_of(runs).value is None
    assert ("target", "all runs reach what they have in common by their first evaluation, so no cost to a target is given") in (
        compare_runs(runs).footnotes
    )  # fmt: skip
    assert target_of([runs[0], make_run("b", rounds=simple(late))]).value == 0.62
    # all have 62 % at once, one method has more: that tells them apart
    better = make_run("b", rounds=simple([[0.1], None, [0.65], [0.8]]))
    assert target_of([*runs, better]) == (
        0.8,
        "the highest whole percent that all seeds of one method reached",
    )
    # before training
    assert target_of([make_run("a", rounds=simple([[0.62], [0.3], [0.5]]))]).value is None


def test_a_method_that_fails_does_not_pull_the_target_below_chance(make_run):
    runs = [make_run("a", rounds=simple([[0.1], [0.1], [0.09]])), make_run("b", rounds=simple(CURVE))]
    assert target_of(runs).value == 0.52


@pytest.mark.full
@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_interval_is_student_t(values):
    got = estimate(values)
    low, high = stats.t.interval(
        0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values) or 1e-300
    )
    assert got.n == len(values)
    assert got.std == pytest.approx(np.std(values, ddof=1))
    assert got.ci == pytest.approx((high - low) / 2, abs=1e-12)


def test_one_seed_has_no_interval():
    assert math.isnan(estimate([0.5, math.nan]).ci)
    assert estimate([math.nan]) is None


@pytest.mark.full
def test_groups_are_seeds_of_one_setting(make_run):
    runs = [make_run(m, s, rounds=simple([[0.1 * s + 0.1]])) for m in "ab" for s in (0, 1)]
    runs.append(make_run("a", 0, rounds=simple([[0.9]]), fields={"mu": 0.5}))
    groups = group_runs(runs)
    assert [group.label for group in groups] == ["a, mu = 0.9", "b", "a, mu = 0.5"]
    assert [len(group.runs) for group in groups] == [2, 2, 1]
    assert groups[0].final().mean == pytest.approx(0.15)


def test_seed_given_twice_counts_once(make_run):
    (group,) = group_runs(
        [make_run("a", 3, rounds=simple([[0.5]])), make_run("a", 3, rounds=simple([[0.7]]))]
    )
    assert len(group.runs) == 1
    assert group.repeated_seeds == ("3",)
    assert group.final().mean == 0.5


@pytest.mark.full
def test_sweep_keeps_the_method_label(make_run):
    runs = [
        make_run("a", s, vary={"partition.classes_per_client": k, "run.seed": s},
                 partition={"kind": "pathological", "classes_per_client": k})
        for k in (2, 4) for s in (0, 1)
    ]  # fmt: skip
    groups = group_runs(runs)
    assert [group.short_label for group in groups] == ["a", "a"]
    assert [group.label for group in groups] == ["a (classes_per_client = 2)", "a (classes_per_client = 4)"]
    assert [len(group.runs) for group in groups] == [2, 2]


def test_last_usable_round_is_named(make_run):
    run = make_run(rounds=simple([[0.1], [0.5], [math.nan]]))
    assert main_of(run).round == 1
    assert RunStatistics(run).status == "no finite accuracy after round 1"


@pytest.mark.full
@pytest.mark.usefixtures("words_only")
def test_the_best_round_by_validation_stands_beside_the_last(make_run, tmp_path):
    tests = ([[0.1], [0.5], [0.6]], [[0.1], [0.7], [0.8]])
    vals = ([[0.1], [0.9], [0.3]], [[0.1], [0.3], [0.9]])
    runs = [make_run("a", s, rounds=simple(t, v)) for s, (t, v) in enumerate(zip(tests, vals, strict=True))]
    table = compare_runs(runs)
    # the second round of one seed, the last of the other; Student's t with one degree of freedom, 0.975 quantile
    mean, half = (0.5 + 0.8) / 2, 12.7062 * (0.3 / math.sqrt(2)) / math.sqrt(2)
    assert [c.title for c in table.summary.columns][:2] == ["test accuracy", "best by validation"]
    assert table.summary.rows[0][2] == f"{100 * mean:.2f} ± {100 * half:.2f}"
    (row,) = rows_of(table)
    assert row["best_by_validation"] == pytest.approx(mean)
    assert row["best_by_validation_ci95_seeds"] == pytest.approx(half, rel=1e-4)
    for written in (text_of(table, all_tables=False), comparison_markdown(table), page_of(runs, tmp_path)):
        assert "by validation" in written
        assert f"{100 * mean:.2f} ± {100 * half:.2f}" in written


def test_no_column_without_validation(make_run):
    table = compare_runs([make_run("a", rounds=simple([[0.1], [0.5]], [[None], [None]]))])
    assert "best by validation" not in [c.title for c in table.summary.columns]


def test_a_report_computes_what_a_run_has_reached_once(make_run, tmp_path, monkeypatch):
    """Tables, figures and sentences all ask for it; with 20 seeds that was two thirds of a report's time."""
    computed = []
    compute = RunStatistics._compute_results

    def count(run, series, measure):
        computed.append((run.record.folder, series, measure.name))
        return compute(run, series, measure)

    monkeypatch.setattr(RunStatistics, "_compute_results", count)
    runs = [make_run("a", seed, rounds=simple([[0.1], [0.5 + 0.1 * seed]])) for seed in range(3)]
    page_of(runs, tmp_path)
    assert len({folder for folder, *_ in computed}) == 3
    # the tables have one set of statistics and the figures another
    assert max(computed.count(key) for key in set(computed)) <= 2
