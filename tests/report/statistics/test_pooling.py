"""Runs are pooled as seeds of one setting only where they are; what diverged, stopped or was repeated is said."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedlowrank.report import compare_runs
from fedlowrank.report.figures.comparison_figures import plot_results
from fedlowrank.report.findings import state_headline
from fedlowrank.report.formats.markdown import comparison_markdown
from fedlowrank.report.statistics.experiments import read_experiments
from fedlowrank.report.statistics.groups import group_runs
from fedlowrank.report.statistics.significance import compare_over_clients, correct_holm
from tests.report.report_runs import (
    cells,
    draw,
    findings_of,
    members,
    page_of,
    regression_of,
    rounds_of,
    rows_of,
    text_of,
    with_losses,
)


@pytest.mark.parametrize(
    "other",
    [
        {"loss": {"kind": "cross_entropy", "label_smoothing": 0.9}},
        {"models": {"model": {"parameters": 900, "layers": {"": "MLP"}}}},
        {"models": {"model": {"parameters": 650, "layers": {"": "Linear(bias=False)"}}}},
        {"data": {"name": "digits", "seed": 1}},
        {"run": {"attack": {"kind": "backdoor", "target": 7}}},
        {"fields": {"mu": 0.9, "seed": 3}},
    ],
)
def test_runs_that_differ_in_more_than_the_seed_are_no_seeds_of_one_setting(make_run, other):
    first = {
        "loss": {"kind": "cross_entropy"},
        "models": {"model": {"parameters": 650, "layers": {"": "Linear"}, "frozen": "a"}},
        "data": {"name": "digits", "seed": 0},
        "run": {"attack": {"kind": "backdoor", "target": 1}},
        "fields": {"mu": 0.9, "seed": 2},
    }
    one, two = make_run("a", 0, **first), make_run("a", 1, **{**first, **other})
    assert [len(group.runs) for group in group_runs([one, two])] == [1, 1]
    same = make_run("a", 1, **{**first, "run": {**first["run"], "target": 0.9}})
    assert [len(group.runs) for group in group_runs([one, same])] == [2]


@pytest.mark.parametrize(
    ("method", "named", "labels"),
    [
        ("mine:Own", "mine:Own", ["FedAvg (mine:Own, code 2ac89f8f)", "FedAvg (mine:Own, code 77777777)"]),
        ("fedavg", "met:half", ["FedAvg (code of met:half 2ac89f8f)", "FedAvg (code of met:half 77777777)"]),
    ],
)
def test_runs_of_other_code_are_no_seeds_of_one_setting(make_run, method, named, labels):
    codes = "2ac89f8f0000", "777777770000"
    runs = [make_run(method, s, title="FedAvg", code={named: f"Own {c}"}) for c in codes for s in (0, 1)]
    assert [group.label for group in group_runs(runs)] == labels
    assert [len(group.runs) for group in group_runs(runs)] == [2, 2]
    assert [group.label for group in group_runs(runs[:2])] == ["FedAvg"]
    other = make_run("other", 0)
    assert "differ in more" not in " ".join(compare_runs([*runs[:2], other]).warnings)
    assert f"code.{named}" in " ".join(compare_runs([*runs, other]).warnings)


def test_what_a_run_keeps_is_no_setting_of_its_method(make_run):
    kept = {
        "keep_checkpoints": 9,
        "checkpoint_every": 2,
        "keep_best": True,
        "client_memory": 100,
        "adapters": [1],
        "log": ["tensorboard"],
    }
    runs = [make_run("a", s, run={key: value}) for s, (key, value) in enumerate(kept.items())]
    assert [len(group.runs) for group in group_runs([*runs, make_run("a", 9)])] == [7]
    assert len(group_runs([make_run("a", 0, run={"evaluate_every": k}) for k in (1, 2)])) == 2


@pytest.mark.parametrize("key", ["data.seed", "run.attack.target"])
def test_a_varied_setting_called_seed_or_target_makes_groups(make_run, key):
    runs = [make_run("a", s, vary={key: k}) for k in (1, 7) for s in (0, 1)]
    table = compare_runs(runs)
    assert [row["seeds"] for row in rows_of(table)] == [2, 2]
    last = ".".join(key.split(".")[-2:])
    assert [row["label"] for row in rows_of(table)] == [f"a ({last} = 1)", f"a ({last} = 7)"]


def test_a_seed_given_twice_is_said_in_the_terminal_and_in_markdown(make_run):
    table = compare_runs([make_run("a", 0), make_run("a", 0), make_run("b", 0)])
    said = "a: seed 0 was given more than once"
    assert said in " ".join(text_of(table, all_tables=False).split())
    assert said in comparison_markdown(table)


def test_seeds_of_other_data_are_named(make_run):
    more = [{**row, "train": row["train"] + 50} for row in members(2)]
    rounds = rounds_of([[0.5, 0.6]])
    table = compare_runs([make_run("a", 0, rounds=rounds), make_run("a", 1, rounds=rounds, clients=more)])
    (said,) = [one for one in table.warnings if "same data" in one]
    assert "seed 0 has 201 training, 30 validation and 25 test examples" in said
    assert "seed 1 has 301 training" in said
    # a partition by seed moves an example of each client at most
    near = [{**row, "train": row["train"] + 1, "val": row["val"] - 1} for row in members(2)]
    table = compare_runs([make_run("a", 0, rounds=rounds), make_run("a", 1, rounds=rounds, clients=near)])
    assert not [one for one in table.warnings if "same data" in one]


def test_clients_that_were_not_drawn_for_evaluation_are_not_without_examples(make_run):
    rows = rounds_of([[0.1] * 6, [0.5, 0.6, 0.7]])
    table = compare_runs([make_run("a", rounds=rows)])
    (row,) = rows_of(table)
    assert (row["clients_in_mean"], row["clients_not_evaluated"], row["clients_without_test"]) == (3, 3, 0)
    assert "a: 3 of 6 clients were evaluated; means are over those." in table.warnings
    assert not [one for one in table.warnings if "without test examples" in one]


class TestDivergence:
    def test_a_method_with_a_diverged_client_is_last_and_not_tested(self, make_run):
        """The other is better on every client, and yet its mean is larger, for it counts all of them."""
        runs = [
            make_run("a", rounds=regression_of([[1.0] * 6, [0.145, 0.179, 0.191, 0.237, 0.160, math.inf]])),
            make_run("b", rounds=regression_of([[1.0] * 6, [0.106, 0.150, 0.184, 0.193, 0.108, 34.7]])),
        ]
        (said,) = findings_of(runs)
        assert said.startswith("b reaches the lowest mean test loss")
        assert "Diverged, so last and not tested: a (1 client)." in said
        a, b = rows_of(table := compare_runs(runs))
        assert (b["not_worse"], a["not_worse"], a["p_best_holm"]) == (1, None, None)
        results = {row[0]: row[1] for row in table.summary.rows}
        assert results["a"].endswith("(1 client diverged)")
        picture = draw(plot_results, *runs)
        assert [text.get_text() for text in picture.figure.axes[0].get_yticklabels()] == ["b", "a"]
        assert "Last: a, 1 client diverged." in picture.caption
        assert "diverged" not in results["b"]

    def test_a_client_whose_loss_is_not_finite_diverged_though_it_has_an_accuracy(self, make_run):
        losses = [[2.0, 2.0], [0.5, math.inf], [0.6, 0.7]]
        accuracies = [[0.1, 0.1], [0.9, 0.8], [0.7, 0.8]]
        diverged = with_losses(rounds_of(accuracies[:2]), losses[:2])
        runs = [
            make_run("a", rounds=diverged),
            make_run("b", rounds=with_losses(rounds_of([[0.1, 0.1], [0.5, 0.6]]), [[2.0, 2.0], [1.0, 1.0]])),
        ]
        (said,) = findings_of(runs)
        assert "Diverged, so last and not tested: a (1 client)." in said
        results = {row[0]: row[1] for row in compare_runs(runs).summary.rows}
        assert results["a"].endswith("(1 client diverged)")
        (row,) = rows_of(compare_runs([make_run("a", rounds=with_losses(rounds_of(accuracies), losses))]))
        assert (row["best_round"], row["best_by_validation"]) == (2, 0.75)

    def test_a_round_at_which_a_client_diverged_is_not_the_best(self, make_run):
        losses = [[2.0, 2.0], [1.0, 1.0], [0.5, math.inf]]
        (row,) = rows_of(compare_runs([make_run("a", rounds=regression_of(losses))]))
        assert (row["loss_best_round"], row["loss_best_by_validation"]) == (1, 1.0)

    def test_a_seed_whose_training_diverged_is_a_failure_and_no_result(self, make_run):
        rows = {"a": [0.9, 0.91, 0.3], "b": [0.5, 0.52, 0.51]}
        runs = [
            make_run(
                name, s, rounds=rounds_of([[0.1], [top]]),
                status={"state": "diverged" if (name, s) == ("a", 2) else "finished", "rounds": 1},
            )
            for name, tops in rows.items() for s, top in enumerate(tops)
        ]  # fmt: skip
        table = compare_runs(runs)
        a, b = rows_of(table)
        assert a["accuracy_last"] == pytest.approx(0.905)
        assert {row[0]: row[1] for row in table.summary.rows}["a"].endswith("(1 of 3 seeds diverged)")
        assert "seed 2: diverged at round 1" in a["status"]
        assert findings_of(runs)[0].startswith("b reaches the highest")
        assert b["not_worse"] == 1

    def test_costs_to_a_target_count_diverged_seeds_as_failures(self, make_run):
        """Three of six seeds reached 0.4 at once and the others diverged; without them the method would be the cheapest."""
        runs = [
            make_run(
                name, s, rounds=rounds_of([[0.1], [0.5], [0.6]]),
                status={"state": "diverged" if name == "a" and s > 2 else "finished", "rounds": 2},
            )
            for name in "ab" for s in range(6)
        ]  # fmt: skip
        a, b = rows_of(compare_runs(runs, 0.4))
        assert (a["target_reached_seeds"], a["target_seeds"], a["target_bytes"]) == (3, 6, None)
        assert (b["target_reached_seeds"], b["target_seeds"], b["target_round"]) == (6, 6, 1)
        assert cells(compare_runs(runs, 0.4), "target", "rounds") == ["3 of 6 seeds", "1.0"]
        # nor is the accuracy that the others reached one that all seeds of a method did
        assert group_runs(runs[:6])[0].target.value is None

    def test_where_every_method_diverged_none_leads(self, make_run):
        values = {"0.1": [0.7, 0.6], "9": [0.9, 0.2]}
        runs = [
            make_run(
                name, s, rounds=rounds_of([[0.1], [top]]), vary={"optimizer.lr": lr},
                status={"state": "diverged" if lr == "9" and s else "finished", "rounds": 1},
            )
            for lr, tops in values.items() for name, top in zip("ab", tops, strict=True) for s in range(3)
        ]  # fmt: skip
        assert findings_of(runs)[0].startswith("a leads at 1 of 1 settings.")
        table = compare_runs(runs)
        assert [row["not_worse"] for row in rows_of(table) if "9" in row["label"]] == [None, None]
        assert not any("best" in row for row in table.summary.rows if "9" in row[0])

    @pytest.mark.parametrize("methods", ["a", "ab"])
    def test_where_every_run_diverged_none_has_a_result(self, make_run, tmp_path, methods):
        status = {"state": "diverged", "rounds": 0}
        runs = [
            make_run(name, s, rounds=rounds_of([[0.1]]), status=status) for name in methods for s in range(2)
        ]
        assert findings_of(runs) == ["Every run diverged, so no method has a result."]
        card = state_headline(read_experiments(runs)[0].families)
        assert (card.best_methods, card.value, card.measure) == (
            "",
            "–",
            "Every run diverged, so no method has a result.",
        )
        table = compare_runs(runs)
        assert not table.summary.bold
        assert not any("best" in row for row in table.summary.rows)
        assert "the best on top" not in draw(plot_results, *runs).caption
        page = page_of(runs, tmp_path)
        assert "Every run diverged" in page
        assert "highest mean test" not in page

    def test_a_method_of_which_every_seed_diverged_is_behind_one_of_which_some_did(self, make_run):
        """The seeds that did not diverge are a result, and models before training are none."""
        states = {("a", 0): "diverged", ("b", 0): "diverged", ("b", 1): "finished", ("a", 1): "diverged"}
        runs = [
            make_run(
                m, s, rounds=rounds_of([[0.9 if m == "a" else 0.2]]), status={"state": state, "rounds": 0}
            )
            for (m, s), state in states.items()
        ]
        (family,) = read_experiments(runs)[0].families
        assert [group.method for group, _ in family.ranked] == ["b", "a"]

    def test_a_seed_in_progress_counts_without_those_that_diverged(self, make_run):
        states = ("diverged", "running")
        runs = [
            make_run("a", s, rounds=rounds_of([[0.1], [top]]), status={"state": state, "rounds": 1})
            for s, (state, top) in enumerate(zip(states, (0.3, 0.7), strict=True))
        ]
        (row,) = rows_of(compare_runs(runs))
        assert row["accuracy_last"] == pytest.approx(0.7)


class TestUntrained:
    def test_a_seed_without_a_used_reply_is_reported(self, make_run):
        rows = rounds_of([[0.3, 0.4], [0.3, 0.4], [0.3, 0.4]])
        undrawn = [{**row, "participants": [], "steps": 0, "bytes_up": 0, "bytes_down": 0} for row in rows]
        warnings = compare_runs([make_run("a", 0, rounds=rows), make_run("a", 1, rounds=undrawn)]).warnings
        assert not any("seed 0" in warning for warning in warnings)
        (warning,) = compare_runs([make_run("a", 1, rounds=undrawn)]).warnings
        assert warning.startswith(
            "a: no client was drawn in any round of seed 1, so the models were not trained."
        )
        lost = [{**row, "lost": {str(i): "NaN" for i in row["participants"]}} for row in rows]
        (warning,) = compare_runs([make_run("a", 1, rounds=lost)]).warnings
        assert (
            warning
            == "a: no reply of a client was used in any round of seed 1, so the server has learned nothing."
        )


class TestStopped:
    def runs(self, make_run):
        whole = {"a": (0.80, 0.82, 0.81), "b": (0.70, 0.73, 0.72)}
        runs = [make_run(m, s, rounds=rounds_of([[0.1], [0.2], [top]])) for m, tops in whole.items()
                for s, top in enumerate(tops) if (m, s) != ("a", 2)]  # fmt: skip
        part = make_run(
            "a",
            2,
            rounds=rounds_of([[0.1], [0.2]]),
            run={"rounds": 2},
            status={"state": "stopped", "rounds": 1},
        )
        return [*runs, part]

    def test_a_run_that_did_not_finish_is_in_no_mean_and_no_pair(self, make_run):
        table = compare_runs(self.runs(make_run))
        a, b = sorted(rows_of(table), key=lambda row: row["label"])
        assert (a["accuracy_last"], a["seeds"]) == (pytest.approx(0.81), 2)
        assert (b["pairs"], b["seeds"]) == (2, 3)
        gaps = [0.70 - 0.80, 0.73 - 0.82]
        assert b["p_best_holm"] == pytest.approx(stats.ttest_1samp(gaps, 0).pvalue)
        assert "seed 2: stopped at round 1" in a["status"]
        assert any("No result counts it" in one for one in table.warnings)
        assert cells(table, "accuracy", "status")[0].startswith("seed 2")

    def test_runs_that_all_go_on_are_shown_and_paired_after_equal_rounds(self, make_run):
        on = {"state": "running", "rounds": 1}
        runs = [
            make_run(m, 0, rounds=rounds_of([[0.1] * 3, [0.5 + d] * 3]), status=on)
            for m, d in (("a", 0.1), ("b", 0))
        ]
        late = make_run("c", 0, rounds=rounds_of([[0.1] * 3, [0.4] * 3, [0.5] * 3]))
        a, b, c = rows_of(compare_runs([*runs, late]))
        assert (a["accuracy_last"], b["pairs"], c["pairs"]) == (pytest.approx(0.6), 3, None)


class TestPairs:
    def test_runs_of_other_data_of_the_same_sizes_are_not_paired(self, make_run):
        tops = {"a": 0.9, "b": 0.8, "c": 0.7}
        runs = [
            make_run(m, s, rounds=rounds_of([[top + 0.01 * s]]), fingerprint=["new" if m == "c" else "old", "x"])
            for m, top in tops.items() for s in (0, 1)
        ]  # fmt: skip
        _, b, c = rows_of(compare_runs(runs))
        assert (b["pairs"], c["pairs"]) == (2, None)
        assert "Not tested: c, which has no seed with the same clients as the best" in findings_of(runs)[0]

    def test_equal_differences_share_a_rank_whatever_rounding_makes_of_them(self):
        """Accuracies are k / 10: the ranks are those of whole numbers."""
        random = np.random.default_rng(0)
        for _ in range(50):
            # of 12 pairs with ties scipy tries all signs, too
            one, other = random.integers(0, 11, (2, 12))
            if np.ptp(one - other):
                expected = stats.wilcoxon(one - other).pvalue
                assert compare_over_clients(one / 10 - other / 10).p == pytest.approx(expected, rel=1e-9)

    def test_the_best_of_equal_methods_is_better_than_another_in_one_of_twenty_cases_at_most(self):
        """Of ten methods without any difference, corrected for the nine comparisons alone it were every eighth."""
        random, actual, trials, methods = np.random.default_rng(1), 0, 600, 10
        for _ in range(trials):
            x = random.normal(size=(methods, 5))
            best = x[x.mean(axis=1).argmax()]
            p = [stats.ttest_1samp(one - best, 0).pvalue for one in x if one is not best]
            corrected = correct_holm(p, methods * (methods - 1) // 2)
            actual += min(corrected) < 0.05
        assert actual / trials < 0.07

    def test_holm_for_all_pairs_by_hand(self, make_run):
        tops = {"a": (0.9, 0.92, 0.91), "b": (0.8, 0.83, 0.81), "c": (0.7, 0.71, 0.75)}
        runs = [make_run(m, s, rounds=rounds_of([[top]])) for m, t in tops.items() for s, top in enumerate(t)]
        _, b, c = rows_of(compare_runs(runs))
        raw = {m: stats.ttest_rel(tops[m], tops["a"]).pvalue for m in "bc"}
        first, second = sorted(raw, key=raw.get)
        expected = {first: 3 * raw[first]}
        expected[second] = max(expected[first], 2 * raw[second])
        assert (b["p_best_holm"], c["p_best_holm"]) == pytest.approx((expected["b"], expected["c"]))
        assert "p corrected by Holm for all 3 pairs" in findings_of(runs)[0]
