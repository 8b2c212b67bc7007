"""Figures of relative accuracy by client and of accuracy against model size: what is drawn."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex

from fedlowrank.report.figures import rank_figures
from fedlowrank.report.figures.style import palette_color
from tests.report.report_runs import both, draw, draw_figures, legend_of, rounds_of, two_series

PLOT, SIZE = rank_figures.plot_relative_accuracy, rank_figures.plot_model_size


def clients_of(*values, series="personal", ids=20):
    """One evaluated round with the given accuracies, the last one repeated to 20 clients."""
    every = [*values, *[values[-1]] * (ids - len(values))]
    rows = rounds_of([every])
    rows[0]["accuracy"] = {series: {"test": every}}
    return rows


def with_gkr(rows, value):
    """The rows with a further series."""
    rows[0]["accuracy"]["gkr"] = {"test": [value] * 20}
    return rows


def medians(picture):
    """Where the thick lines are, by row."""
    actual = {}
    for one in picture.figure.axes[0].collections:
        widths = one.get_linewidth()
        if len(one.get_paths()) == 1 and float(np.atleast_1d(widths)[0]) > 2:
            (x, y), (_, z) = one.get_paths()[0].vertices
            actual[round((y + z) / 2)] = float(x)
    return actual


class TestRelative:
    @pytest.mark.full
    def test_each_client_against_itself_in_the_same_seed(self, make_run):
        base = [0.5, 0.7, *[0.6] * 18]
        runs = []
        for s in (0, 1):
            runs.append(make_run("standalone", s, rounds=clients_of(*base)))
            runs.append(make_run("fedavg", s, rounds=clients_of(*[v + s / 10 for v in base])))
            runs.append(
                make_run("slr", s, rounds=clients_of(*[v + 0.2 + 0.01 * i for i, v in enumerate(base)]))
            )
        groups, looks = both(runs)
        picture = PLOT(groups, looks)
        assert [tick.get_text() for tick in picture.figure.axes[0].get_yticklabels()] == ["standalone", "slr"]
        expected = np.array([20 + i - 10 * s for s in (0, 1) for i in range(20)])
        assert medians(picture) == {0: pytest.approx(-5), 1: pytest.approx(np.median(expected))}
        shape = picture.figure.axes[0].collections
        ends = [one.get_paths()[0].vertices[:, 0] for one in shape if len(one.get_paths()[0].vertices) > 50]
        assert (ends[1].min(), ends[1].max()) == (
            pytest.approx(expected.min()),
            pytest.approx(expected.max()),
        )
        assert picture.title == "Accuracy relative to fedavg"
        assert "standalone −5.0, slr +24.5" in picture.alt
        assert (
            "minus that of the same client under fedavg with the same seed, in percentage points"
            in picture.caption
        )
        assert "of all 2 seeds are pooled" in picture.caption

    def test_quartiles(self, make_run):
        runs = [
            make_run("fedavg", rounds=clients_of(0.5)),
            make_run("b", rounds=clients_of(*np.linspace(0, 1, 21).tolist()[:20])),
        ]
        picture = draw(PLOT, *runs)
        thin = [one for one in picture.figure.axes[0].collections if len(one.get_paths()) == 2]
        assert [path.vertices[0, 0] for path in thin[0].get_paths()] == pytest.approx(
            np.quantile(100 * np.linspace(0, 1, 21)[:20] - 50, [0.25, 0.75]).tolist()
        )

    @pytest.mark.few(1)
    @pytest.mark.parametrize(
        ("names", "reference"),
        [(("b", "fedavg", "standalone"), "fedavg"), (("b", "standalone"), "standalone"), (("b", "c"), "b")],
    )
    def test_reference(self, make_run, names, reference):
        runs = [
            make_run(name, title=f"T {name}", rounds=clients_of(0.1 * (i + 1)))
            for i, name in enumerate(names)
        ]
        assert draw(PLOT, *runs).title == f"Accuracy relative to T {reference}"

    def test_reference_of_each_experiment_setting_is_its_own(self, make_run):
        runs = [
            make_run(m, rounds=clients_of(value + k / 10), vary={"data.k": k})
            for m, value in (("fedavg", 0.1), ("b", 0.4))
            for k in (1, 2)
        ]
        drawn = [picture for _, some in draw_figures(runs) for picture in some if "relative" in picture.title]
        assert [medians(picture) for picture in drawn] == [{0: pytest.approx(30)}] * 2

    @pytest.mark.full
    @pytest.mark.parametrize(
        ("base", "rows", "gains"),
        [
            (clients_of(0.5), with_gkr(clients_of(0.8, series="mixed"), 0.6), {"b": 30, "b: gkr": 10}),
            # clients without a number on either side are left out
            (clients_of(None, 0.5, math.nan, 0.5), clients_of(0.9, None, 0.9, 0.7), {"b": 20}),
            # the last round with a number counts
            (clients_of(0.1), rounds_of([[0.1] * 20, [0.4] * 20, [math.nan] * 20]), {"b": 30}),
        ],
    )
    def test_a_violin_a_series_of_clients_with_numbers(self, make_run, base, rows, gains):
        picture = draw(PLOT, make_run("fedavg", rounds=base), make_run("b", rounds=rows))
        assert [tick.get_text() for tick in picture.figure.axes[0].get_yticklabels()] == list(gains)
        assert list(medians(picture).values()) == pytest.approx(list(gains.values()))
        assert f"b +{gains['b']}.0" in picture.alt

    def test_none_without_anything_to_compare(self, make_run):
        def drawn(*runs):
            return draw(PLOT, *runs) is not None

        a, b = make_run("a", rounds=clients_of(0.5)), make_run("b", rounds=clients_of(0.6))
        assert drawn(a, b)
        assert not drawn(a)
        assert not drawn(a, make_run("b", 1, rounds=clients_of(0.6)))  # another seed, other clients
        assert not drawn(*(make_run(m, rounds=clients_of(0.5, ids=19)) for m in "ab"))
        assert not drawn(a, make_run("b", rounds=clients_of(None)))
        half = [[0.5] * 10 + [None] * 10, [None] * 10 + [0.5] * 10]
        assert not drawn(
            *(make_run(m, rounds=clients_of(*values)) for m, values in zip("ab", half, strict=True))
        )
        assert not drawn(make_run("a"), make_run("b"))  # ten clients
        # other data, and a run that has not come as far
        assert not drawn(a, make_run("b", rounds=clients_of(0.6), fingerprint="other"))
        early = {"state": "running", "rounds": 1, "message": ""}
        longer = make_run("a", rounds=rounds_of([[0.5] * 20, [0.9] * 20]))
        assert not drawn(longer, make_run("b", rounds=clients_of(0.1), status=early))


class TestSize:
    def test_marker_for_every_series(self, make_run):
        runs = [
            make_run(
                "fedavg",
                title="FedAvg",
                rounds=[{**row, "parameters": {"personal": [90, 110]}} for row in rounds_of([[0.4, 0.6]])],
            ),
            *(
                make_run(
                    "fedslr",
                    s,
                    title="FedSLR",
                    rounds=two_series([0.1, 0.8], [0.1, 0.6], sizes=(60 + 10 * s, 50)),
                )
                for s in (0, 1)
            ),
        ]
        groups, looks = both(runs)
        picture = SIZE(groups, looks)
        points = [(line.get_xdata()[0], line.get_ydata()[0]) for line in picture.figure.axes[0].lines]
        assert points == [(100, pytest.approx(50)), (65, pytest.approx(80)), (50, pytest.approx(60))]
        assert legend_of(picture) == ["FedAvg (100)", "FedSLR mixed (65)", "FedSLR gkr (50)"]
        faces = [line.get_markerfacecolor() for line in picture.figure.axes[0].lines]
        assert faces[2] == "none" != faces[1]
        keys = picture.figure.legends[0].get_lines()
        assert [(key.get_linestyle(), key.get_markerfacecolor()) for key in keys] == [
            ("None", face) for face in faces
        ]
        edges = [to_hex(line.get_markeredgecolor()) for line in picture.figure.axes[0].lines]
        assert edges == [palette_color(0), palette_color(1), palette_color(1)]
        assert "FedSLR mixed 65, 80.00 %; FedSLR gkr 50, 60.00 %" in picture.alt
        assert "clients and seeds" in picture.caption

    def test_logarithmic_where_sizes_are_far_apart(self, make_run):
        near = draw(SIZE, make_run("a", rounds=two_series([0.5], [0.4], (600, 50))))
        far = draw(SIZE, make_run("a", rounds=two_series([0.5], [0.4], (6000, 50))))
        assert near.figure.axes[0].get_xscale() == "linear"
        assert near.figure.axes[0].get_xlim()[0] >= 0
        assert far.figure.axes[0].get_xscale() == "log"

    @pytest.mark.full
    def test_none_where_sizes_do_not_differ(self, make_run):
        assert draw(SIZE, make_run("a", rounds=two_series([0.5], [0.4], (50, 50)))) is None
        mixed = [make_run("a", rounds=two_series([0.5], [math.nan], (60, 50))), make_run("old")]
        assert draw(SIZE, *mixed) is None
