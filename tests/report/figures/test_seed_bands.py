"""Intervals over seeds: whole within their axes, and never at values that are impossible."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedlowrank.report.figures import cluster_figures, lora_figures, rank_figures
from fedlowrank.report.figures import comparison_figures as figures
from tests.report.report_runs import (
    both,
    draw,
    draw_figures,
    in_clusters,
    one_hot,
    regression_of,
    rounds_of,
    with_routes,
)

SPREADS = ((0.80, 0.97, 0.99), (0.10, 0.35, 0.12), (0.5, 0.52, 0.51))
"""Last accuracies of three seeds each: of the first the interval reaches above 100 %, of the second below 0."""


def drawn_bands(axes):
    """Lowest and highest point of every band."""
    ys = [path.vertices[:, 1] for band in axes.collections for path in band.get_paths()]
    return [(float(y.min()), float(y.max())) for y in ys]


def half_width(values):
    """Half-width of the 95 % interval of the mean, by the textbook."""
    return stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))


@pytest.fixture
def runs(make_run):
    return [
        make_run(f"m{i}", s, rounds=rounds_of([[0.1] * 2, [last] * 2]))
        for i, lasts in enumerate(SPREADS)
        for s, last in enumerate(lasts)
    ]


@pytest.mark.full
@pytest.mark.parametrize("figure", [figures.plot_accuracy, figures.plot_communication])
def test_bands_of_accuracies_are_whole(runs, figure):
    assert np.mean(SPREADS[0]) + half_width(SPREADS[0]) > 1
    assert np.mean(SPREADS[1]) - half_width(SPREADS[1]) < 0
    (axes,) = draw(figure, *runs).figure.axes
    low, high = axes.get_ylim()
    bands = drawn_bands(axes)
    assert len(bands) == 3
    for (least, most), lasts in zip(bands, SPREADS, strict=True):
        assert low < least
        assert most < high
        assert most == pytest.approx(min(100, 100 * (np.mean(lasts) + half_width(lasts))))
    assert min(least for least, _ in bands) == 0


@pytest.mark.few(1)
@pytest.mark.parametrize(("lasts", "scale"), [((0.5, 0.6, 1.9), "linear"), ((1e-4, 1e-4, 9e-4), "log")])
def test_bands_of_losses_are_whole_or_the_caption_says_where_they_end(make_run, lasts, scale):
    runs = [make_run("a", s, rounds=regression_of([[2.0] * 2, [last] * 2])) for s, last in enumerate(lasts)]
    picture = draw(figures.plot_loss, *runs)
    (axes,) = picture.figure.axes
    assert axes.get_yscale() == scale
    ((least, most),) = drawn_bands(axes)
    low, high = axes.get_ylim()
    if scale == "linear":
        assert (least, most) == pytest.approx((1 - half_width(lasts), 1 + half_width(lasts)))
        assert low < least < most < high
    else:
        assert least == pytest.approx(low)  # the interval reaches below 0
        assert "below 0, end at the lower edge" in picture.caption


def test_bars_of_a_sweep_are_whole(make_run):
    runs = [
        make_run("a", s, vary={"mu": mu}, rounds=rounds_of([[last] * 2]))
        for mu, lasts in zip((1, 2, 3), SPREADS, strict=True)
        for s, last in enumerate(lasts)
    ]
    (axes,) = draw(figures.plot_sweep, *runs).figure.axes
    (bars,) = axes.containers[0].lines[2]
    low, high = axes.get_ylim()
    for path, lasts in zip(bars.get_paths(), SPREADS, strict=True):
        mean, half = 100 * np.mean(lasts), 100 * half_width(lasts)
        assert path.vertices[:, 1].tolist() == pytest.approx([max(0, mean - half), min(100, mean + half)])
        assert low < path.vertices[0, 1]
        assert path.vertices[1, 1] < high


def test_bands_of_the_cluster_recovery_are_whole(make_run):
    chosen = ([0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 0, 1])  # adjusted Rand indices 1, 1 and -0.5
    runs = [
        make_run("a", s, clients=in_clusters([0, 0, 1, 1]), rounds=with_routes(rounds_of([[0.5] * 4]), [one]))
        for s, one in enumerate(one_hot(each, 2) for each in chosen)
    ]
    (axes,) = draw(cluster_figures.plot_recovery, *runs).figure.axes
    ((least, most),) = drawn_bands(axes)
    assert half_width((1, 1, -0.5)) > 1
    assert (least, most) == (-0.5, 1)
    assert axes.get_ylim()[0] < -0.5


@pytest.mark.full
def test_bands_of_other_figures_are_whole(make_run):
    rows = []
    for s in (0, 1, 2):
        one = rounds_of([[0.5] * 2, [0.6] * 2, [0.7] * 2])
        for at, row in enumerate(one):
            row["ranks"] = {"a.weight": 10 + 10 * at * s}
            row["training_losses"] = {"local": 1 + s * at}
        rows.append(one)
    runs = [make_run("a", s, rounds=one) for s, one in enumerate(rows)]
    groups, looks = both(runs)
    for picture in (
        rank_figures.plot_ranks(groups, looks),
        lora_figures.plot_training_loss(groups, looks),
        *next(iter(draw_figures(runs)))[1],
    ):
        for axes in picture.figure.axes if picture is not None else ():
            for least, most in drawn_bands(axes) if "over rounds" in picture.title else ():
                assert axes.get_ylim()[0] <= least, picture.title
                assert most <= axes.get_ylim()[1], picture.title
