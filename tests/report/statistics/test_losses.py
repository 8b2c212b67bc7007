"""Test losses beside accuracies, and instead of them; clients that never train."""

import csv
import io
import math
import re

import numpy as np
import pytest
from scipy import stats

from fedlowrank.report import compare_runs, write_report
from fedlowrank.report.comparison_warnings import find_warnings
from fedlowrank.report.figures import comparison_figures as figures
from fedlowrank.report.figures import rank_figures
from fedlowrank.report.formats.markdown import comparison_markdown
from fedlowrank.report.run_comparison import to_csv
from fedlowrank.report.setting_paragraph import describe_setting
from fedlowrank.report.statistics.groups import group_runs
from fedlowrank.report.statistics.measures import TEST_ACCURACY, TEST_LOSS
from fedlowrank.report.statistics.run_statistics import RunStatistics
from tests.report.report_runs import (
    cells,
    draw,
    draw_figures,
    findings_of,
    in_clusters,
    legend_of,
    main_of,
    page_of,
    regression_of,
    rounds_of,
    rows_of,
    target_of,
    text_of,
    titles_of,
    with_losses,
)


def lines(picture):
    return picture.figure.axes[0].lines


def regressions(make_run, *last, seeds=2, name="linear"):
    """Runs m0, m1, ... that end at these mean losses, seeds 10 % apart."""
    return [
        make_run(
            f"m{i}", s, name=name, rounds=regression_of([[4.0, 2.0], [0.5 * end * (1 + s / 10), 1.5 * end]])
        )
        for i, end in enumerate(last)
        for s in range(seeds)
    ]


class TestBesideAccuracy:
    @pytest.mark.full
    def test_column_is_the_mean_over_clients_and_seeds(self, make_run):
        rows = [
            with_losses(rounds_of([[0.1] * 3, [0.9] * 3]), [[3, 3, 3], [1 + s, 2 + s, None]]) for s in (0, 1)
        ]
        table = compare_runs([*(make_run("a", s, rounds=r) for s, r in enumerate(rows)), make_run("old")])
        half = stats.t.ppf(0.975, 1) * 0.5  # 1.5 and 2.5: standard error 0.5
        assert rows_of(table)[0]["loss_last"] == pytest.approx(2.0)
        assert rows_of(table)[0]["loss_ci95_seeds"] == pytest.approx(half)
        assert rows_of(table)[0]["loss_std_clients"] == pytest.approx(0.5)
        assert cells(table, "accuracy", "test loss") == [f"2.0 ± {half:.1f}", "–"]
        assert "loss" not in table.result_tables
        assert "test loss" not in titles_of(compare_runs([make_run("old")]))

    @pytest.mark.full
    def test_figure_has_the_headlines_alone(self, make_run):
        rows = rounds_of([[0.1, 0.2], [0.5, 0.7]])
        for row in rows:
            row["accuracy"]["global"] = {"test": [0.3, 0.4]}
        runs = [make_run("a", s, rounds=with_losses(rows, [[2, 1], [1 + s, 1 + s]])) for s in (0, 1)]
        picture = draw(figures.plot_loss, *runs, make_run("old"))
        assert picture.title == "Test loss over rounds"
        assert legend_of(picture) == ["a"]
        assert lines(picture)[0].get_ydata().tolist() == pytest.approx([1.5, 1.5])
        band = picture.figure.axes[0].collections[0].get_paths()[0].vertices
        assert band[:, 1].max() == pytest.approx(1.5 + stats.t.ppf(0.975, 1) * 0.5)
        assert "a 1.500" in picture.alt
        assert draw(figures.plot_loss, make_run("old")) is None

    @pytest.mark.few(1)
    @pytest.mark.parametrize(
        ("ends", "scale"),
        [((1.0, 0.011), "linear"), ((1.0, 0.009), "log"), ((1.0, 0.0), "linear"), ((1.0, -0.001), "linear")],
    )
    def test_logarithmic_beyond_two_decades_of_positive_losses(self, make_run, ends, scale):
        picture = draw(figures.plot_loss, make_run("a", rounds=regression_of([[end] for end in ends])))
        axes = picture.figure.axes[0]
        assert axes.get_yscale() == scale
        low, high = axes.get_ylim()
        assert low < min(ends)
        assert high > max(ends)
        assert ("logarithmic" in axes.get_ylabel()) == (scale == "log")

    def test_a_loss_that_is_not_finite_is_left_out_and_said(self, make_run):
        rows = with_losses(rounds_of([[0.5, 0.6]]), [[1.0, math.inf]])
        groups = group_runs([make_run("a", rounds=rows)])
        assert groups[0].final(measure=TEST_LOSS).mean == 1.0
        assert "a: 1 client loss not finite, left out." in find_warnings(groups)

    @pytest.mark.parametrize("clients", [1, 2, 3])
    def test_a_round_in_which_all_diverge_counts_as_diverged(self, make_run, clients):
        accuracies = rounds_of([[0.1] * clients, [0.5] * clients, [0.9] * clients])
        rows = with_losses(accuracies, [[2.0] * clients, [1.0] * clients, [math.nan] * clients])
        steady = with_losses(
            rounds_of([[0.1] * clients, [0.6] * clients]), [[2.0] * clients, [1.0] * clients]
        )
        runs = [make_run("a", s, rounds=rows) for s in (0, 1)]
        runs += [make_run("b", s, rounds=steady) for s in (0, 1)]
        groups = group_runs(runs)
        assert f"a: {2 * clients} client losses not finite, left out." in find_warnings(groups)
        assert groups[0].final().diverged == f"{2 * clients} clients"
        # the round in which they diverged is not the best one
        assert groups[0].headline_results["best_round"].tolist() == [1, 1]
        assert not any(text.startswith("a reaches") for text in findings_of(runs))

    def test_a_method_without_a_finite_loss_at_the_end_is_last_in_a_regression(self, make_run):
        ends = {
            "a": [[2.0, 2.0], [0.5, 0.5], [math.nan, math.nan]],
            "b": [[2.0, 2.0], [1.0, 1.0], [0.8, 0.8]],
        }
        runs = [
            make_run(name, s, rounds=regression_of([[v + 0.01 * s for v in row] for row in losses]))
            for name, losses in ends.items()
            for s in (0, 1, 2)
        ]
        assert [group.final().diverged for group in group_runs(runs)] == ["6 clients", ""]
        (text,) = findings_of(runs)
        assert text.startswith("b reaches the lowest mean test loss")
        assert text.endswith("Diverged, so last and not tested: a (6 clients).")


class TestInsteadOfAccuracy:
    @pytest.mark.full
    def test_statistics_by_hand(self, make_run):
        test = [[9.0, 9.0], [3.0, 1.0], [0.5, 1.5], [1.0, 5.0]]
        rows = regression_of(test)
        for row, value in zip(rows, (9, 2, 4, 2), strict=True):
            row["client_losses"]["personal"]["val"] = [value, value]
        run = RunStatistics(make_run(rounds=rows))
        got = main_of(run.record)
        assert (run.measure, run.headline, run.status) == (TEST_LOSS, "personal", "")
        assert (got.last, got.last_ten, got.best_test) == (3.0, 2.0, 1.0)
        assert got.worst_tenth == 5.0  # the highest tenth
        assert got.best_round == 1  # the earlier of the two with the lowest validation loss
        assert got.last_weighted == pytest.approx((1.0 * 10 + 5.0 * 15) / 25)
        assert run.costs_to(0.5) is None
        assert RunStatistics(make_run("a")).measure == TEST_ACCURACY

    @pytest.mark.full
    @pytest.mark.usefixtures("words_only")
    def test_table(self, make_run, tmp_path):
        runs = regressions(make_run, 1.0, 0.0001)
        table = compare_runs(runs)
        assert list(table.result_tables) == ["loss", "cost"]
        assert [row["judged_by"] for row in rows_of(table)] == ["test loss"] * 2
        assert [row["loss_last"] for row in rows_of(table)] == pytest.approx([1.0125, 0.00010125])
        assert [row["accuracy_last"] for row in rows_of(table)] == [None, None]
        assert cells(table, "loss", "over seeds")[1].startswith("0.0001013 ± ")
        cut = re.sub(r"(?s)<style>.*?</style>|<svg.*?</svg>", "", page_of(runs, tmp_path))
        cut = cut[cut.index('<section class="experiment"') : cut.index('<details id="e0-settings">')]
        for written in (text_of(table), comparison_markdown(table), cut):
            assert "Test loss" in written
            assert "lower is better" in str(table.footnotes)
            assert "accuracy" not in written.lower()
            assert "%" not in re.sub(r"95 %|worst[ \xa0]10 %|10 %|/ %", "", written)
        read = list(csv.DictReader(io.StringIO(to_csv(table))))
        assert float(read[0]["loss_last"]) == rows_of(table)[0]["loss_last"]

    @pytest.mark.full
    def test_further_series(self, make_run):
        rows = regression_of([[3.0, 2.0], [0.5, 0.7]])
        for row in rows:
            row["client_losses"]["global"] = {"test": [2.0, 4.0]}
        run = make_run("a", rounds=rows)
        assert cells(compare_runs([run]), "loss", "global") == ["3.000"]
        picture = draw(figures.plot_loss, run)
        assert legend_of(picture) == ["a", "a: global"]
        assert lines(picture)[1].get_ydata().tolist() == [3.0, 3.0]

    @pytest.mark.full
    def test_a_target_accuracy_is_no_matter(self, make_run):
        runs = regressions(make_run, 1.0)
        assert target_of(runs, 0.9).value is target_of(runs).value is None
        assert "target" not in compare_runs(runs, 0.9).result_tables
        assert target_of([*runs, make_run("a")], 0.9).value == 0.9

    def test_status(self, make_run):
        rows = regression_of([[1.0], [math.nan]])
        assert RunStatistics(make_run(rounds=rows)).status == "no finite test loss after round 0"
        assert RunStatistics(make_run(rounds=regression_of([[None], [None]]))).status == "no evaluation"

    @pytest.mark.full
    def test_lower_leads(self, make_run):
        runs = [
            make_run(name, s, rounds=regression_of([[2.0], [value + s * step]]))
            for name, value, step in (("m0", 1.0, 0.01), ("m1", 0.5, 0.02))
            for s in (0, 1, 2)
        ]
        (said,) = findings_of(runs)
        assert said.startswith("m1 reaches the lowest mean test loss, 0.520 [")
        assert ": 0.490 below m0 [0.465, 0.515], p < 0.001." in said  # differences 0.50, 0.49 and 0.48
        assert findings_of(runs[:1]) == ["m0 reaches a mean test loss of 1.00 with one seed."]
        level = regressions(make_run, 0.5, 0.5, seeds=1)
        assert findings_of(level)[0].startswith("m0 and m1 reach the lowest mean test loss, ")

    @pytest.mark.full
    def test_sweep_counts_who_is_lower(self, make_run):
        runs = [
            make_run(m, s, vary={"methods.a.k": k}, rounds=regression_of([[1.0], [value * k + s / 100]]))
            for m, value in (("a", 0.1), ("b", 0.3))
            for k in (1, 2)
            for s in (0, 1, 2)
        ]
        assert findings_of(runs)[0].startswith("a leads at 2 of 2 settings.")
        picture = draw(figures.plot_sweep, *runs)
        assert picture.title == "Test loss against k"
        first = picture.figure.axes[0].containers[0].lines[0]
        assert first.get_ydata().tolist() == pytest.approx([0.11, 0.21])

    @pytest.mark.full
    def test_figures(self, make_run):
        runs = [
            make_run(m, s, rounds=regression_of([[3.0] * 20, [(1 + s) * low * (1 + i) for i in range(20)]]))
            for m, low in (("fedavg", 0.1), ("slr", 0.2))
            for s in (0, 1)
        ]
        ((_, drawn),) = draw_figures(runs)
        by = {picture.title: picture for picture in drawn}
        assert list(by) == [
            "Test loss of each method", "Test loss over rounds", "Test loss over communication", "Spread over clients",
            "Test loss relative to fedavg", "Test loss, computation and communication", "Classes at each client",
        ]  # fmt: skip
        ends = [line.get_ydata().tolist()[-1] for line in lines(by["Test loss over rounds"])]
        assert ends == pytest.approx([0.1 * 10.5 * 1.5, 0.2 * 10.5 * 1.5])
        marks = [line for line in lines(by["Spread over clients"]) if line.get_marker() == "+"]
        assert [mark.get_xdata()[0] for mark in marks] == pytest.approx(ends)
        assert by["Spread over clients"].figure.axes[0].get_xlabel() == "test loss"
        gaps = [(1 + s) * 0.1 * (1 + i) for s in (0, 1) for i in range(20)]
        assert f"slr {np.median(gaps):+.3g}" in by["Test loss relative to fedavg"].alt
        assert "left of the line is better" in by["Test loss relative to fedavg"].caption
        assert "Low, to the left" in by["Test loss, computation and communication"].caption
        assert not any("accuracy" in f"{picture.alt}{picture.caption}".lower() for picture in drawn)

    @pytest.mark.usefixtures("words_only")
    def test_classification_and_regression_on_one_page(self, make_run, tmp_path):
        runs = [make_run("a", name="digits"), *regressions(make_run, 1.0)]
        table = compare_runs(runs)
        assert cells(table, "accuracy", "last 10")[1] == "–"
        assert cells(table, "loss", "last 10")[0] == "–"
        write_report(runs, tmp_path / "r.html")


class TestUnseen:
    def runs(self, make_run, regression=False):
        people = in_clusters([None] * 4, unseen=[1, 3])
        rows = rounds_of([[0.1, 0.5, 0.2, 0.7], [0.6, 0.2, 0.8, 0.4]])
        rows = with_losses(rows, [[4, 4, 4, 4], [1, 3, 2, 5]], regression=regression)
        return [make_run("a", rounds=rows, clients=people), make_run("b", rounds=rows)]

    @pytest.mark.full
    def test_headline_is_of_the_others(self, make_run):
        run, everyone = self.runs(make_run)
        got = main_of(run)
        assert [got.last, got.unseen, got.best_by_validation, got.last_ten] == pytest.approx(
            [0.7, 0.3, 0.7, 0.7]
        )
        assert got.last_weighted == pytest.approx((0.6 * 10 + 0.8 * 20) / 30)
        assert main_of(everyone).last == pytest.approx(0.5)
        assert math.isnan(main_of(everyone).unseen)
        loss = RunStatistics(run).results("personal", TEST_LOSS)
        assert (loss.last, loss.unseen) == (1.5, 4.0)
        later = make_run("b", rounds=rounds_of([[0.1], [0.5], [0.9]]))
        assert target_of([run, later]).value == 0.7

    @pytest.mark.full
    @pytest.mark.parametrize(
        ("regression", "block", "cell"), [(False, "accuracy", "30.00 ± 10.00"), (True, "loss", "4.0 ± 1.0")]
    )
    def test_column(self, make_run, regression, block, cell):
        table = compare_runs(self.runs(make_run, regression))
        assert cells(table, block, "unseen clients") == [cell, "–"]
        assert [row["clients_unseen"] for row in rows_of(table)] == [2, 0]
        assert "those that never train left out" in str(table.footnotes)
        assert "unseen clients" not in titles_of(compare_runs([make_run("old")]))

    def test_thin_line(self, make_run):
        for regression, plot, at in (
            (False, figures.plot_accuracy, [60, 30]),
            (True, figures.plot_loss, [4, 4]),
        ):
            picture = draw(plot, *self.runs(make_run, regression))
            assert legend_of(picture) == ["a", "a: unseen clients", "b"]
            head, unseen, _ = lines(picture)
            assert unseen.get_ydata().tolist() == pytest.approx(at)
            assert unseen.get_color() == head.get_color()
            assert unseen.get_linewidth() < head.get_linewidth()
            assert "clients that never train" in picture.caption

    @pytest.mark.full
    def test_no_figure_of_clients_counts_them(self, make_run):
        people = in_clusters([None] * 24, unseen=[20, 21, 22, 23])
        runs = [
            make_run(m, rounds=rounds_of([[0.5 + step] * 20 + [0.0, 9 * step, 0.0, 0.9]]), clients=people)
            for m, step in (("fedavg", 0.0), ("b", 0.1))
        ]
        boxes = draw(figures.plot_clients, *runs).figure.axes[0]
        assert all(0.49 < x / 100 < 0.61 for line in boxes.lines for x in line.get_xdata())
        relative = draw(rank_figures.plot_relative_accuracy, *runs)
        assert "b +10.0" in relative.alt
        assert (
            len(relative.figure.axes[0].collections) == 1
        )  # all clients gain alike: a median without a shape around it
        assert "4 of the clients never train" in describe_setting(group_runs(runs))

    @pytest.mark.full
    def test_old_and_new_runs_are_of_one_setting(self, make_run):
        groups = group_runs(
            [make_run("a", 0), make_run("a", 1, run={"unseen": 0.0}), make_run("a", 2, run={"unseen": 0.5})]
        )
        assert [len(group.runs) for group in groups] == [2, 1]
