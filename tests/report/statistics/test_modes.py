"""Results that fall into two groups of seeds: when they are called so, and what stands instead of a mean."""

import numpy as np
import pytest

from fedlowrank.report import compare_runs, to_latex
from fedlowrank.report.figures import comparison_figures as figures
from fedlowrank.report.findings import state_headline
from fedlowrank.report.statistics.experiments import read_experiments
from fedlowrank.report.statistics.modes import find_modes
from fedlowrank.report.statistics.run_statistics import RunStatistics
from tests.report.report_runs import (
    cells,
    draw,
    findings_of,
    in_clusters,
    one_hot,
    page_of,
    rounds_of,
    rows_of,
    text_of,
    with_losses,
    with_routes,
)

TRUTH = [0, 0, 0, 1, 1, 1]
FOUND, MISSED = [2, 2, 2, 0, 0, 0], [1, 1, 1, 1, 1, 1]


def of_seeds(make_run, method, finals, found=None):
    """A run a seed with that final result at all six clients and, where given, whether it finds both groups."""
    runs = []
    for seed, final in enumerate(finals):
        rows, clients = rounds_of([[0.1] * 6, [0.3] * 6, [final] * 6]), None
        if found is not None:
            routes = one_hot(FOUND if found[seed] else MISSED, 3, 0.9)
            rows, clients = with_routes(rows, [None, routes, routes]), in_clusters(TRUTH)
        runs.append(make_run(method, seed, rounds=rows, clients=clients))
    return runs


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([0.95, 0.67, 0.93, 0.94, 0.955], {}, (5, 4, 0.93, 0.67)),
        ([0.2, 0.19, 0.9, 0.91, 0.21, 0.89], {}, (6, 3, 0.89, 0.21)),
        ([0.94, 0.87, 0.94, 0.941, 0.939], {}, None),  # a gap of 7 points
        ([0.95, 0.67, 0.93, 0.88, 0.90], {}, None),  # 21 points, and 7 within the better group
        ([0.95, 0.80, 0.65, 0.50, 0.35], {}, None),  # evenly spread
        ([0.9] * 5, {}, None),
        ([0.95, 0.60], {"successes": [True, False]}, None),
        # three seeds are too few without another criterion that says the same of each
        ([0.95, 0.67, 0.94], {}, None),
        ([0.95, 0.67, 0.94], {"successes": [True, False, True]}, (3, 2, 0.94, 0.67)),
        ([0.95, 0.67, 0.94], {"successes": [True, True, False]}, None),
        ([0.95, 0.67, 0.94], {"successes": [None, False, True]}, None),
        ([1.0, 9.0, 1.1, 1.05, 1.02], {"is_loss": True}, (5, 4, 1.1, 9.0)),
        ([1.0, 2.0, 1.01, 1.02, 1.03], {"is_loss": True}, None),  # less than double
    ],
)  # fmt: skip
def test_when_results_are_called_bimodal(values, options, expected):
    assert find_modes(values, **options) == expected
    order = np.random.default_rng(0).permutation(len(values))
    shuffled = {**options}
    if "successes" in options:
        shuffled["successes"] = [options["successes"][i] for i in order]
    assert find_modes([values[i] for i in order], **shuffled) == expected


@pytest.mark.full
def test_normal_results_are_rarely_called_bimodal():
    """The rate that the docs name: fewer than 2 % of samples of five, whatever their spread."""
    random = np.random.default_rng(0)
    for spread in (0.05, 0.2):
        actual = [find_modes(random.normal(0.5, spread, 5).tolist()) is not None for _ in range(2000)]
        assert np.mean(actual) < 0.025


@pytest.mark.parametrize(
    ("chosen", "truth", "unseen", "expected"),
    [
        (FOUND, TRUTH, (), True),
        (MISSED, TRUTH, (), False),
        ([2, 2, 1, 0, 0, 1], TRUTH, (), True),  # most of each
        ([0, 1, 2, 2, 2, 2], TRUTH, (), False),  # no cluster has most of the first group
        ([2, 2, 2, 0, 0, 0], [0, 0, 0, 1, 1, None], (), True),
        ([2, 2, 2, 2, 2, 0], [0, 0, 0, 1, 1, 1], (3, 4), True),
        ([2, 2, 2, 2, 2, 0], [0, 0, 0, 1, 1, 1], (), False),
        (FOUND, [0] * 6, (), None),
    ],
)
def test_all_groups_found(make_run, chosen, truth, unseen, expected):
    rows = with_routes(rounds_of([[0.1] * 6, [0.5] * 6]), [None, one_hot(chosen, 3, 0.9)])
    run = make_run("ifca", rounds=rows, clients=in_clusters(truth, unseen))
    assert RunStatistics(run).has_found_groups is expected
    given = make_run(
        "ifca", rounds=rows, clients=in_clusters(truth, unseen), fields={"router": {"routing": "optimal"}}
    )
    assert RunStatistics(given).has_found_groups is None


def test_equal_shares_choose_no_cluster(make_run):
    rows = with_routes(rounds_of([[0.1] * 6, [0.5] * 6]), [None, [[0.5, 0.5]] * 6])
    assert RunStatistics(make_run("ifca", rounds=rows, clients=in_clusters(TRUTH))).has_found_groups is False


@pytest.mark.usefixtures("words_only")
def test_success_rate_stands_instead_of_the_interval(make_run, tmp_path):
    """A mean of 88.9 ± 15.2 describes none of these seeds."""
    runs = of_seeds(make_run, "a", [0.95, 0.67, 0.94, 0.93, 0.955])
    runs += of_seeds(make_run, "b", [0.5, 0.52, 0.48, 0.51, 0.5])
    table = compare_runs(runs)
    assert cells(table, "accuracy", "over seeds")[0] == table.summary.rows[0][1] == "4 of 5 ≥ 93.00"
    assert table.summary.rows[1][1].startswith("50.20 ± ")
    row, other = rows_of(table)
    assert (row["success_seeds"], row["success_bound"], other["success_seeds"]) == (4, 0.93, None)
    # the mean and its interval are in the CSV
    assert row["accuracy_last"] == pytest.approx(np.mean([0.95, 0.67, 0.94, 0.93, 0.955]))
    assert row["ci95_seeds"] > 0.1
    (text,) = findings_of(runs)
    assert "88.9 %: at least 93.0 % in 4 of 5 seeds and at most 67.0 % in the other." in text
    assert "Seeds of a succeed or fail" in text
    card = state_headline(read_experiments(runs)[0].families)
    assert card[:4] == ("a", "≥ 93.0 %", "in 4 of 5 seeds", "test accuracy; other seeds fail")
    for written in (text_of(table, all_tables=False), page_of(runs, tmp_path)):
        assert "4 of 5 ≥ 93.00" in written
    assert r"4 of 5 $\geq$ 93.00" in to_latex(table)


def test_all_seeds_are_drawn_and_no_interval(make_run):
    runs = of_seeds(make_run, "a", [0.95, 0.67, 0.94, 0.93, 0.955])
    runs += of_seeds(make_run, "b", [0.5, 0.52, 0.48, 0.51, 0.5])
    picture = draw(figures.plot_accuracy, *runs)
    (axes,) = picture.figure.axes
    assert len(axes.collections) == 1  # the band of b
    ends = sorted(line.get_ydata()[-1] for line in axes.lines if len(line.get_ydata()) == 3)
    means = [100 * np.mean([0.95, 0.67, 0.94, 0.93, 0.955]), 50.2]
    assert ends == pytest.approx(sorted([95, 67, 94, 93, 95.5, *means]))
    assert "Of a every seed is drawn and no interval, for its seeds succeed or fail." in picture.caption
    result = draw(figures.plot_results, *runs)
    assert len(result.figure.axes[0].collections) == 1
    assert "a 4 of 5 ≥ 93.00" in result.alt
    assert "no interval" not in draw(figures.plot_accuracy, *runs[5:]).caption


@pytest.mark.full
def test_further_measures_of_bimodal_results_have_no_band(make_run):
    runs = []
    for seed, final in enumerate([0.95, 0.67, 0.94, 0.93, 0.955]):
        rows = with_losses(rounds_of([[0.1], [final]]), [[2.0], [1.5 - final]])
        runs.append(make_run("a", seed, rounds=rows))
    (axes,) = draw(figures.plot_loss, *runs).figure.axes
    assert not axes.collections
    assert draw(figures.plot_loss, *runs[2:]).figure.axes[0].collections


def test_seeds_that_find_all_groups_are_counted(make_run):
    """Three seeds are enough where the groups that are found say the same."""
    finals, actual = [0.95, 0.67, 0.94], [True, False, True]
    runs = of_seeds(make_run, "ifca", finals, actual) + of_seeds(make_run, "b", [0.5, 0.52, 0.48])
    table = compare_runs(runs)
    assert table.summary.rows[0][1] == "2 of 3 ≥ 94.00"
    assert cells(table, "accuracy", "all groups found") == ["2 of 3 seeds", "–"]
    assert rows_of(table)[0]["groups_found_seeds"] == 2
    assert "All groups of clients are found by ifca in 2 of 3 seeds." in findings_of(runs)[0]
    # the same results without groups
    plain = compare_runs(of_seeds(make_run, "ifca", finals) + runs[3:])
    assert plain.summary.rows[0][1].startswith("85.33 ± ")
