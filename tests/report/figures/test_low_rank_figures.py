"""Figures of ranks and downlink, and of further series: what is drawn; all figures in their order."""

import math
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from scipy import stats

from fedlowrank.report.figures import comparison_figures as figures
from fedlowrank.report.figures import rank_figures
from fedlowrank.report.figures.style import DASHES, make_styles, to_svg
from tests.report.report_runs import both, draw, draw_figures, legend_of, rounds_of, two_series


def ranked(*ranks):
    return two_series([0.5] * len(ranks), [0.4] * len(ranks), ranks=ranks)


class TestFurtherSeries:
    @pytest.mark.full
    def test_thin_line_in_the_methods_color_with_another_dash(self, make_run):
        runs = [
            make_run("b", rounds=rounds_of([[0.1], [0.7], [0.9]])),
            *(
                make_run("a", s, title="FedSLR", rounds=two_series([0.1, 0.5 + s / 10, 0.8], [0.1, 0.3, 0.2]))
                for s in (0, 1)
            ),
        ]
        picture = draw(figures.plot_accuracy, *runs)
        other, main, further = picture.figure.axes[0].lines
        assert legend_of(picture) == ["b", "FedSLR", "FedSLR: gkr"]
        assert main.get_ydata().tolist() == pytest.approx([10, 55, 80])
        assert further.get_ydata().tolist() == pytest.approx([10, 30, 20])
        assert further.get_color() == main.get_color() != other.get_color()
        assert further.get_linewidth() < main.get_linewidth()
        assert further.get_linestyle() != main.get_linestyle() or further._dash_pattern != main._dash_pattern
        assert len(picture.figure.axes[0].collections) == 1  # a band for the headline of two seeds alone
        assert "for 2 methods" in picture.alt
        assert "FedSLR: gkr 20.00 %" in picture.alt
        assert "Thin lines" in picture.caption
        low, high = picture.figure.axes[0].get_ylim()
        assert low < 10 < 90 < high

    @pytest.mark.full
    def test_legend_shows_the_lines_as_they_are(self, make_run):
        picture = draw(
            figures.plot_accuracy, make_run("a", rounds=two_series([0.8, 0.9], [0.3, 0.2])), make_run("b")
        )
        for key, line in zip(
            picture.figure.legends[0].get_lines(), picture.figure.axes[0].lines, strict=True
        ):
            for look in ("color", "linestyle", "linewidth", "marker"):
                assert getattr(key, f"get_{look}")() == getattr(line, f"get_{look}")()

    @pytest.mark.full
    def test_left_out_where_they_made_too_many_lines(self, make_run):
        runs = [make_run(f"m{i}", rounds=two_series([0.1, 0.5], [0.1, 0.3])) for i in range(8)]
        assert len(legend_of(draw(figures.plot_accuracy, *runs[:7]))) == 14
        picture = draw(figures.plot_accuracy, *runs)
        assert legend_of(picture) == [f"m{i}" for i in range(8)]
        assert "Thin lines" not in picture.caption

    @pytest.mark.full
    def test_one_evaluation_is_a_point(self, make_run):
        picture = draw(figures.plot_accuracy, make_run("a", rounds=two_series([0.5], [0.3])))
        assert all(line.get_marker() == "o" for line in picture.figure.axes[0].lines)

    def test_dashes_of_one_color_differ(self):
        looks = list(make_styles([str(i) for i in range(16)]).values())
        for look in looks[:8]:
            dashes = [look.dash, looks[looks.index(look) + 8].dash, look.series_style(1).dash]
            assert look.series_style(0) == look
            assert len(set(dashes)) == 3
            assert {look.series_style(i).dash for i in range(1, 4)} <= set(DASHES)


class TestRanks:
    @pytest.mark.full
    def test_panel_by_hand(self, make_run):
        ranks = [
            (
                {"a.weight": 10, "b.weight": 8},
                {"a.weight": 8 - s, "b.weight": 8},
                {"a.weight": 4, "b.weight": 2},
            )
            for s in (0, 2)
        ]
        picture = draw(
            rank_figures.plot_ranks, *(make_run("m", s, rounds=ranked(*r)) for s, r in enumerate(ranks))
        )
        a, b = picture.figure.axes
        assert a.lines[0].get_xdata().tolist() == [0, 1, 2]
        assert a.lines[0].get_ydata().tolist() == pytest.approx([100, 70, 40])
        assert b.lines[0].get_ydata().tolist() == pytest.approx([100, 100, 25])
        assert a.get_title("left") == "a\n10 → 4"
        assert b.get_title("left") == "b\n8 → 2"
        band = a.collections[0].get_paths()[0].vertices
        half = stats.t.ppf(0.975, 1) * 10  # 80 and 60 %: standard error 10
        assert band[:, 1].max() == pytest.approx(70 + half)
        assert 70 - half < 0  # no rank is below 0
        assert band[:, 1].min() == 0
        assert legend_of(picture) == ["m"]
        assert "m: a 10 to 4, b 8 to 2" in picture.alt
        assert "mean over 2 seeds" in picture.caption

    @pytest.mark.full
    def test_a_line_a_method_in_its_style(self, make_run):
        runs = [
            make_run("old"),
            make_run("x", rounds=ranked({"a": 10, "b": 4}, {"a": 5, "b": 3})),
            make_run("y", rounds=ranked({"a": 10}, {"a": 9})),
        ]
        groups, looks = both(runs)
        a, b = rank_figures.plot_ranks(groups, looks).figure.axes
        assert [line.get_color() for line in a.lines] == [looks["x"].color, looks["y"].color]
        assert [line.get_ydata()[-1] for line in a.lines] == [50, 90]
        assert a.get_title("left") == "a\n10 → 5, 9"
        assert len(b.lines) == 1
        picture = rank_figures.plot_ranks(groups, looks)
        assert legend_of(picture) == ["x", "y"]
        assert "in the order of the legend" in picture.caption

    def test_resnet18_has_a_panel_a_layer_and_a_deeper_model_some(self, make_run):
        def drawn(count):
            ranks = [{f"layer{i}.weight": 100 - t for i in range(count)} for t in (0, 1)]
            picture = draw(rank_figures.plot_ranks, make_run(f"m{count}", rounds=ranked(*ranks)))
            return [
                axes.get_title("left").split("\n")[0] for axes in picture.figure.axes if axes.get_visible()
            ], picture

        names, picture = drawn(21)
        assert names == [f"layer{i}" for i in range(21)]
        assert "are drawn" not in picture.caption
        names, picture = drawn(60)
        assert len(names) == rank_figures.PANELS
        assert (names[0], names[-1]) == ("layer0", "layer59")
        assert "24 of 60 weights are drawn" in picture.caption
        names, picture = drawn(4)
        lowest = [axes for axes in picture.figure.axes if axes.get_visible() and axes.get_xlabel()]
        # the panels below layers 1 and 2 are empty
        assert [axes.get_title("left")[:6] for axes in lowest] == ["layer1", "layer2", "layer3"]

    def test_rounds_are_named_below_each_column(self, make_run):
        ranks = [{"a.weight": 100 - t, "b.weight": 9 - t} for t in (0, 1)]
        picture = draw(rank_figures.plot_ranks, make_run("m", rounds=ranked(*ranks)))
        assert [axes.get_xlabel() for axes in picture.figure.axes] == ["round", "round"]

    @pytest.mark.full
    def test_long_runs_are_thinned_out_but_keep_their_ends(self, make_run):
        run = make_run("m", rounds=ranked(*({"a": 1000 - t} for t in range(301))))
        line = draw(rank_figures.plot_ranks, run).figure.axes[0].lines[0]
        assert len(line.get_xdata()) == rank_figures.POINTS
        assert (line.get_xdata()[0], line.get_xdata()[-1]) == (0, 300)
        assert line.get_ydata()[-1] == pytest.approx(70)

    def test_a_rank_may_rise(self, make_run):
        (axes,) = draw(
            rank_figures.plot_ranks, make_run("m", rounds=ranked({"a": 4}, {"a": 6}, {"a": 10}))
        ).figure.axes
        assert axes.lines[0].get_ydata().tolist() == [100, 150, 250]
        assert axes.get_ylim()[1] > 250

    def test_one_round_is_nothing_to_draw(self, make_run):
        assert draw(rank_figures.plot_ranks, make_run("m", rounds=ranked({"a": 3}))) is None

    @pytest.mark.full
    def test_last_ranks_of_many_methods_become_a_range(self, make_run):
        runs = [make_run(f"m{i}", rounds=ranked({"a": 1536}, {"a": 1000 + i})) for i in range(5)]
        (axes,) = draw(rank_figures.plot_ranks, *runs).figure.axes
        assert axes.get_title("left") == "a\n1536 → 1000–1004"


def sending(*each, participants=2):
    rows = rounds_of([[0.5] * 4 for _ in range(len(each) + 1)])
    for row, size in zip(rows[1:], each, strict=True):
        row["participants"] = list(range(participants))
        row["bytes_down"] = participants * size
    return rows


class TestDownlink:
    def test_bytes_a_participant_by_round(self, make_run):
        runs = [make_run("a", s, rounds=sending(1000, 900 - 100 * s, 500)) for s in (0, 1)]
        picture = draw(rank_figures.plot_downlink, *runs, make_run("b", rounds=sending(1000, 1000, 1000)))
        a, b = picture.figure.axes[0].lines
        assert a.get_xdata().tolist() == [1, 2, 3]
        assert a.get_ydata().tolist() == [1000, 850, 500]
        assert b.get_ydata().tolist() == [1000, 1000, 1000]
        assert legend_of(picture) == ["a: 1.00 kB → 500 B", "b: 1.00 kB"]
        assert "a 1.00 kB → 500 B, b 1.00 kB" in picture.alt
        assert "mean over up to 2 seeds" in picture.caption

    @pytest.mark.full
    def test_none_without_news(self, make_run):
        def drawn(*runs):
            return draw(rank_figures.plot_downlink, *runs) is not None

        level = make_run("a", rounds=sending(1000, 1000))
        assert not drawn(level, make_run("b", rounds=sending(400, 400)))
        assert not drawn(make_run("a", rounds=sending(1000, 1004)))  # a digit more in a message
        assert not drawn(make_run("a", rounds=sending(0, 0)))
        assert drawn(level, make_run("b", rounds=sending(1000, 900)))
        low = sending(1000, 1000)
        for row in low:
            row["ranks"] = {"a": 5}
        assert drawn(level, make_run("b", rounds=low))
        assert not drawn(make_run("b", rounds=low))
        silent = [{**row, "bytes_down": 0} for row in low]
        assert not drawn(make_run("a", rounds=sending(0, 0)), make_run("b", rounds=silent))

    @pytest.mark.full
    @pytest.mark.parametrize(("rounds", "each"), [(100, 3), (20, 2), (10, 1)])
    def test_coinciding_lines_have_markers_of_their_own(self, make_run, rounds, each):
        falling = make_run("z", rounds=sending(*range(1000 + rounds, 1000, -1)))
        runs = [make_run(f"m{i}", rounds=sending(*[1000] * rounds)) for i in range(8)]
        lines = draw(rank_figures.plot_downlink, falling, *runs).figure.axes[0].lines
        places = [at for line in lines for at in line.get_markevery()]
        assert len(places) == len(set(places)) == 9 * each
        assert max(places) < rounds
        assert len({line.get_marker() for line in lines}) == 9

    @pytest.mark.full
    def test_logarithmic_only_where_no_change_could_be_seen(self, make_run):
        def drawn(largest, *more):
            runs = [
                make_run("a", rounds=sending(0, 100, 40)),
                make_run("b", rounds=sending(*[largest] * 3)),
                *more,
            ]
            return draw(rank_figures.plot_downlink, *runs)

        silent = make_run("c", rounds=sending(0, 0, 0))
        near, far = drawn(1999, silent), drawn(2000, silent)
        assert (near.figure.axes[0].get_yscale(), far.figure.axes[0].get_yscale()) == ("linear", "log")
        assert near.figure.axes[0].get_ylim()[0] < 0
        assert [line.get_ydata().tolist() for line in near.figure.axes[0].lines][::2] == [
            [0, 100, 40],
            [0, 0, 0],
        ]
        a, b = far.figure.axes[0].lines
        np.testing.assert_equal(a.get_ydata(), [math.nan, 100, 40])
        assert b.get_ydata().tolist() == [2000] * 3
        assert "Sends nothing: c." in far.caption
        assert "c 0 B" in far.alt
        assert "Sends nothing" not in near.caption


def rich(make_run):
    """Runs that have something for every figure."""
    runs = []
    for seed in (0, 1):
        for method, top in (("fedavg", 0.5), ("slr", 0.8)):
            rows = rounds_of([[t / 10 + top / 2 + i / 100 for i in range(20)] for t in range(3)])
            for t, row in enumerate(rows):
                values = row["accuracy"]["personal"]
                row["parameters"] = {"personal": [1000] * 20}
                if method == "slr":
                    row["accuracy"] = {"mixed": values, "gkr": values}
                    row["parameters"] = {"mixed": [900 - 50 * t] * 20, "gkr": [800 - 60 * t] * 20}
                    row["ranks"] = {"stem.weight": 9 - t, "head.weight": 10 - t}
                    row["bytes_down"] -= 100 * t
            runs.append(make_run(method, seed, rounds=rows))
    return runs


@pytest.mark.full
def test_order_in_the_gallery_and_sound_svg(make_run):
    ((_, drawn),) = draw_figures(rich(make_run))
    assert [picture.title for picture in drawn] == [
        "Accuracy of each method", "Accuracy over rounds", "Accuracy over communication", "Spread over clients",
            "Accuracy relative to fedavg",
        "Accuracy, computation and communication", "Accuracy and model size", "Downlink over rounds",
        "Rank of each layer over rounds", "Classes at each client",
    ]  # fmt: skip
    for picture in drawn:
        ET.fromstring(to_svg(picture.figure, "x"))
        assert picture.alt
        assert picture.caption.endswith(".")
