"""Paired tests against scipy called directly, and hand-made cases of what may be concluded from them."""

import math

import numpy as np
import pytest
from scipy import stats

from fedlowrank.report import compare_runs
from fedlowrank.report.findings import state_headline
from fedlowrank.report.formats.markdown import comparison_markdown
from fedlowrank.report.statistics.experiments import read_experiments
from fedlowrank.report.statistics.groups import group_runs
from fedlowrank.report.statistics.measures import TEST_ACCURACY
from fedlowrank.report.statistics.paired import paired_differences
from fedlowrank.report.statistics.significance import compare_over_clients, compare_over_seeds, correct_holm
from tests.report.report_runs import cells, findings_of, members, page_of, regression_of, rounds_of, rows_of

GAPS = np.array([0.02, 0.05, -0.01, 0.04, 0.03])


def runs_of(make_run, **accuracies):
    """Runs whose clients have these final accuracies: ``name=[[client, ...] of each seed]``."""
    return [
        make_run(name, s, rounds=rounds_of([[0.1] * len(last), last]))
        for name, seeds in accuracies.items()
        for s, last in enumerate(seeds)
    ]


def test_over_seeds_is_the_paired_t_test():
    first = np.array([0.8, 0.7, 0.9, 0.6, 0.75])
    got, expected = compare_over_seeds(GAPS), stats.ttest_rel(first + GAPS, first)
    assert got.p == pytest.approx(expected.pvalue)
    assert (got.low, got.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert (got.mean, got.n, got.pair_unit) == (pytest.approx(GAPS.mean()), 5, "seeds")


def test_over_clients_is_wilcoxon_with_a_bootstrap():
    gaps = np.random.default_rng(3).normal(0.02, 0.03, 40)
    got = compare_over_clients(gaps)
    assert got.p == pytest.approx(stats.wilcoxon(gaps).pvalue)
    draws = np.random.default_rng(7).choice(gaps, (20000, 40)).mean(axis=1)
    assert (got.low, got.high) == pytest.approx(np.quantile(draws, [0.025, 0.975]), abs=4e-4)
    assert compare_over_clients(gaps) == got  # no draw differs the second time
    assert got.pair_unit == "clients"


def test_the_p_value_over_clients_is_exact():
    # sizes 1 and 2 shared by many: scipy tries all 2¹² signs
    few = np.array([1, 1, -1, 2, 2, 1, -2, 2, 1, 1, 2, 2, 0, 0, 0, 0])
    every_sign = stats.PermutationMethod(n_resamples=math.inf)
    assert compare_over_clients(few).p == pytest.approx(
        stats.wilcoxon(few[few != 0], method=every_sign).pvalue
    )
    # one size: the sign test, for any number of clients without a difference
    for wins, losses in ((5, 0), (19, 7), (60, 40)):
        gaps = [0.1] * wins + [-0.1] * losses + [0.0] * 15
        assert compare_over_clients(gaps).p == pytest.approx(stats.binomtest(wins, wins + losses).pvalue)
    # without shared ranks, as scipy
    assert compare_over_clients(np.arange(-20.0, 31) + 0.25).p == pytest.approx(
        stats.wilcoxon(np.arange(-20.0, 31) + 0.25, method="exact").pvalue
    )


def test_the_highest_mean_over_other_seeds_is_not_called_better(make_run):
    """With its own seeds a has the highest mean; with those that both have, b is better in each."""
    values = {
        "a": {0: 0.80, 1: 0.70, 2: 0.75, 3: 0.78, 5: 0.95, 6: 0.95},
        "b": {0: 0.823, 1: 0.72, 2: 0.772, 3: 0.80},
        "c": {0: 0.50, 1: 0.41, 2: 0.42, 3: 0.47},
    }
    for measure, rows in (("accuracy", rounds_of), ("loss", regression_of)):
        sign = 1 if measure == "accuracy" else -1
        runs = [
            make_run(m, s, rounds=rows([[1 + sign * (value - 1)]]))
            for m, of in values.items()
            for s, value in of.items()
        ]
        table = compare_runs(runs)
        assert [row["not_worse"] for row in rows_of(table)] == [1, 1, 0], measure
        (said,) = findings_of(runs)
        assert "b is significantly better on the 4 shared seeds: " in said
        assert said.count("the means are over different ones.") == 1
        assert "over b" not in said
        assert "below b" not in said
        claim = state_headline(table.families).claim
        assert claim == "Significantly better than c. b is significantly better on the 4 shared seeds."
    assert (
        "+2.1 points [1.9, 2.4], p < 0.001; the means"
        in findings_of(
            [
                make_run(m, s, rounds=rounds_of([[value]]))
                for m, of in values.items()
                for s, value in of.items()
            ]
        )[0]
    )


@pytest.mark.parametrize("losses", [5, 20])
def test_ranks_and_a_mean_that_disagree_make_no_method_better(make_run, losses):
    """Of 100 clients 5 or 20 are much worse with b and the others a little better: the mean favors a, the ranks favor b."""
    gains = [0.01 + 0.0001 * k for k in range(100 - losses)] + [-0.4 - 0.001 * k for k in range(losses)]
    draws = np.random.default_rng(7).choice(gains, (20000, 100)).mean(axis=1)
    # with 20 losses the interval excludes 0, on the other side than the ranks
    assert (np.quantile(draws, 0.975) < 0) == (losses == 20)
    assert np.mean(gains) < 0
    assert stats.wilcoxon(gains, alternative="greater").pvalue < 0.025
    p = stats.wilcoxon(gains, method="exact").pvalue
    p_text = "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
    for rows, sign, lead in ((rounds_of, 1, "points"), (regression_of, -1, "lower")):
        runs = [
            make_run("a", rounds=rows([[0.5] * 100])),
            make_run("b", rounds=rows([[0.5 + sign * gain for gain in gains]])),
        ]
        table = compare_runs(runs)
        assert [row["not_worse"] for row in rows_of(table)] == [1, 1]
        (said,) = findings_of(runs)
        assert f"one seed. Mean and ranks disagree about b: the mean difference is {'+' * (sign > 0)}" in said
        assert f" {lead} [" in said
        assert f"], and the signed ranks of the clients favor b ({p_text})." in said
        assert "significantly" not in said
        assert "No difference" not in said
        assert state_headline(table.families).claim == "Mean and ranks disagree about b."


def test_methods_that_all_diverged_in_part_are_not_ranked_last(make_run):
    lost = {"state": "diverged", "rounds": 0, "message": "loss"}
    runs = [
        make_run(m, s, rounds=rounds_of([[0.5 + s / 10]]), status=lost if s == 0 else None)
        for m in "ab"
        for s in (0, 1, 2)
    ]
    (said,) = findings_of(runs)
    assert "last" not in said
    assert said.endswith(
        "All methods diverged in part, so none was tested: a (1 of 3 seeds) and b (1 of 3 seeds)."
    )


def test_differences_without_spread():
    assert compare_over_seeds([0.0, 0.0])[:4] == (0, 0, 0, 1)
    assert compare_over_clients([0.0, 0.0, 0.0])[:4] == (0, 0, 0, 1)
    for compare in (compare_over_seeds, compare_over_clients):
        for n in (2, 3, 8):
            # a last digit that differs is rounding, however small the difference is
            for gaps in ([0.1] * n, [1e-6] * (n - 1) + [1e-6 + 1e-16], [-0.8 + 0.7] * n):
                got = compare(gaps)
                assert got.p == pytest.approx(stats.binomtest(n, n).pvalue), (compare, gaps)
                assert math.isnan(got.low)
                assert math.isnan(got.high)
    assert math.isnan(compare_over_seeds([0.1]).p)
    assert math.isnan(compare_over_clients([0.1]).high)


def test_two_seeds_with_equal_differences_show_nothing(make_run):
    runs = runs_of(make_run, a=[[0.75], [0.5]], b=[[0.625], [0.375]])
    (said,) = findings_of(runs)
    assert "No difference from b can be seen: +12.5 points, p = 0.5." in said
    assert "Sign test over 2 seeds with equal differences, which give no interval." in said
    row = rows_of(compare_runs(runs))[1]
    assert (row["p_best_holm"], row["not_worse"]) == (0.5, 1)


def test_holm_by_hand():
    # 4 · 0.01, then 3 · 0.02, 2 · 0.03 = 0.06 and 1 · 0.04, which may not be below the one before
    assert correct_holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert correct_holm([0.6, 0.7]) == [1.0, 1.0]
    assert correct_holm([]) == []
    got = correct_holm([0.01, math.nan, 0.02])
    assert (got[0], got[2]) == pytest.approx((0.02, 0.02))
    assert math.isnan(got[1])


@pytest.mark.full
def test_seeds_are_paired_by_number_and_clients_by_identifier(make_run):
    one = [make_run("a", s, rounds=rounds_of([[0.5, 0.6 + s / 10]])) for s in (2, 0, 1)]
    other = [make_run("b", s, rounds=rounds_of([[0.4, None if s == 1 else 0.3]])) for s in (0, 1, 5)]
    gaps = paired_differences(*group_runs([*one, *other]), TEST_ACCURACY)
    assert [gap.tolist() for gap in gaps] == [pytest.approx([0.1, 0.3]), pytest.approx([0.1])]


@pytest.mark.full
def test_different_federations_are_not_paired(make_run):
    larger = [{**row, "train": 999} for row in members(2)]
    runs = [make_run("a", s, rounds=rounds_of([[0.9, 0.8]])) for s in (0, 1)]
    runs += [make_run("b", s, rounds=rounds_of([[0.1, 0.2]]), clients=larger) for s in (0, 1)]
    table = compare_runs(runs)
    assert rows_of(table)[1]["p_best_holm"] is rows_of(table)[1]["difference_best"] is None
    assert "Not tested: b" in findings_of(runs)[0]
    assert "significantly" not in findings_of(runs)[0]
    assert sorted(table.summary.bold) == [(0, 1)]  # b is no candidate for the best


def test_what_seeds_share_cancels(make_run):
    """Intervals of the methods overlap widely, and yet one is better with every seed."""
    runs = runs_of(make_run, a=[[0.50], [0.70], [0.90]], b=[[0.48], [0.67], [0.88]])
    (said,) = findings_of(runs)
    low, high = stats.t.interval(0.95, 2, 0.02 + 0.01 / 3, stats.sem([0.02, 0.03, 0.02]))
    p = stats.ttest_1samp([0.02, 0.03, 0.02], 0).pvalue
    assert (
        f": +2.3 points over b [{100 * low:.1f}, {100 * high:.1f}], p = {p:.2g}. Paired t-test over 3 seeds"
        in said
    )
    assert "corrected" not in said  # one comparison


@pytest.mark.full
def test_no_difference_is_said_in_plain_words(make_run):
    runs = runs_of(make_run, a=[[0.80], [0.70], [0.75]], b=[[0.70], [0.80], [0.72]])
    (said,) = findings_of(runs)
    assert said.startswith(
        "a reaches the highest mean test accuracy, 75.0 % [62.6, 87.4] over 3 seeds. No difference "
    )
    gaps = [0.10, -0.10, 0.03]
    low, high = stats.t.interval(0.95, 2, np.mean(gaps), stats.sem(gaps))
    ends = f"[−{-100 * low:.1f}, {100 * high:.1f}], p = {stats.ttest_1samp(gaps, 0).pvalue:.2g}"
    assert f"from b can be seen: +1.0 points {ends}. Paired t-test" in said


@pytest.mark.full
def test_the_baseline_without_messages_is_named_first(make_run):
    """Not the second best. With one seed the eight clients are the pairs."""
    free = rounds_of([[0.1] * 8, [0.5, 0.52, 0.55, 0.5, 0.51, 0.57, 0.49, 0.53]])
    for row in free:
        row["bytes_up"] = row["bytes_down"] = 0
    runs = runs_of(make_run, a=[[0.9] * 8], b=[[0.85, 0.96, 0.8, 0.87, 0.84, 0.91, 0.86, 0.93]])
    (said,) = findings_of([*runs, make_run("standalone", title="Standalone", rounds=free)])
    assert "90.0 % with one seed: +37.9 points over Standalone [" in said
    assert "], p = 0.023. No difference from b can be seen" in said  # Holm for three pairs: 3 · 2 / 2⁸
    assert "over the 8 clients of one seed" in said
    assert "one seed says nothing about other seeds" in said


@pytest.mark.full
@pytest.mark.usefixtures("words_only")
def test_bold_and_columns_are_the_same_everywhere(make_run, tmp_path):
    runs = runs_of(
        make_run,
        a=[[0.90], [0.80], [0.85]],
        b=[[0.88], [0.81], [0.85]],
        c=[[0.50], [0.41], [0.46]],
    )
    table = compare_runs(runs)
    a, b, c = rows_of(table)
    raw = [stats.ttest_1samp(gaps, 0).pvalue for gaps in ([-0.02, 0.01, 0.0], [-0.40, -0.39, -0.39])]
    assert b["p_best_holm"] == min(1, 2 * raw[0])
    assert c["p_best_holm"] == pytest.approx(3 * raw[1])
    assert [row["not_worse"] for row in (a, b, c)] == [1, 1, 0]
    assert (c["difference_best"], c["pairs"], c["paired_over"]) == (pytest.approx(-1.18 / 3), 3, "seeds")
    assert table.summary.bold == {(0, 1), (1, 1)}
    results = [row[1] for row in table.summary.rows]
    markdown, page = comparison_markdown(table), page_of(runs, tmp_path)
    for text, is_bold in zip(results, (True, True, False), strict=True):
        assert (f"| **{text}** |" in markdown) is is_bold
        assert (f'<td class="right"><b>{text}</b></td>' in page) is is_bold
    assert "those not significantly worse" in markdown
    assert "those not significantly worse" in page


def test_a_family_is_one_setting_of_the_methods(make_run):
    runs = [
        make_run(m, s, vary={"data.k": k}, rounds=rounds_of([[top[m] + gaps[s] * (m == "a") + 0.05 * k]]))
        for k in (1, 2) for m in ("a", "b") for s in (0, 1, 2)
        for top, gaps in (({"a": 0.6, "b": 0.5}, (0.01, 0.0, 0.02)),)
    ]  # fmt: skip
    families = read_experiments(runs)[0].families
    assert [(family.variation, family.best.short_label, len(family.comparisons)) for family in families] == [
        ("k = 1", "a", 1),
        ("k = 2", "a", 1),
    ]
    said = findings_of(runs)
    assert said[0].startswith(
        "a leads at 2 of 2 settings. The lead over every other method is significant at 2"
    )
    assert len(said) == 3


@pytest.mark.full
def test_losses_are_compared_the_other_way_round(make_run):
    runs = [
        make_run(m, s, rounds=regression_of([[value + gap]]))
        for m, value in (("a", 1.0), ("b", 0.5))
        for s, gap in enumerate((0.0, 0.01 * (m == "a"), 0.0))
    ]
    a, b = rows_of(compare_runs(runs))
    assert (a["not_worse"], b["not_worse"]) == (0, 1)
    assert a["difference_best"] > 0
    assert cells(compare_runs(runs), "loss", "last round")
