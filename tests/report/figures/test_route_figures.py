"""Routes: recovery of clusters, collapse, and the figures of both."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedlowrank.report import compare_runs, write_report
from fedlowrank.report.comparison_warnings import collapse_warnings, find_warnings
from fedlowrank.report.figures import cluster_figures
from fedlowrank.report.figures.gallery import save_figures
from fedlowrank.report.figures.style import to_svg
from fedlowrank.report.formats.markdown import comparison_markdown
from fedlowrank.report.statistics.chosen_clusters import find_common_cluster
from fedlowrank.report.statistics.groups import group_runs
from fedlowrank.results.measurements import measure_recovery
from tests.report.report_runs import (
    both,
    cells,
    draw,
    draw_figures,
    in_clusters,
    legend_of,
    one_hot,
    page_of,
    rounds_of,
    text_of,
    with_routes,
)

TRUTH = [0, 1, 0, 1]


def choosing(*chosen, clusters=2, sure=0.9):
    """Rows of rounds in which each client chooses the given cluster."""
    rows = rounds_of([[0.1 + 0.1 * t] * len(chosen[0]) for t in range(len(chosen))])
    return with_routes(rows, [None if one is None else one_hot(one, clusters, sure) for one in chosen])


def rand_by_pairs(known, chosen):
    """The adjusted Rand index from the pairs of clients, one by one."""
    table = np.zeros((2, 2), dtype=int)
    for i, j in combinations(range(len(known)), 2):
        table[int(known[i] == known[j]), int(chosen[i] == chosen[j])] += 1
    (apart, split), (joined, together) = table.tolist()
    # with pairs a = together, b = joined in truth alone, c = joined in the routes alone, d = apart (Hubert and Arabie 1985)
    a, b, c, d = together, joined, split, apart
    below = (a + b) * (b + d) + (a + c) * (c + d)
    return 1.0 if below == 0 else 2 * (a * d - b * c) / below


def array(routes):
    return np.array(routes, dtype=float).reshape(len(routes), len(routes[0]) if routes else 2)


def recover(routes, truth):
    return measure_recovery(array(routes), truth)


class TestRecovery:
    @pytest.mark.full
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=30))
    def test_against_pairs(self, pairs):
        known, chosen = (list(column) for column in zip(*pairs, strict=True))
        assert recover(one_hot(chosen, 5, 0.4), known) == pytest.approx(rand_by_pairs(known, chosen))

    def test_clients_without_cluster_or_shares_are_left_out(self):
        routes = [*one_hot([0, 1, 0, 1], 2), [1.0, 0.0], [math.nan, math.nan]]
        assert recover(routes, [*TRUTH, None, 1]) == 1.0
        assert recover(routes[:5], [*TRUTH, 1]) < 1.0
        assert math.isnan(recover(routes[:2], [None, None]))
        assert math.isnan(recover([], []))


class TestCollapse:
    @pytest.mark.parametrize(
        ("routes", "cluster"),
        [
            ([[0.4, 0.6], [0.1, 0.9]], 1),
            ([[0.4, 0.3, 0.3], [0.9, 0.1, 0.0], [0.5, 0.2, 0.3]], 0),
            ([[0.4, 0.6], [0.6, 0.4]], None),
            ([[0.5, 0.5], [0.5, 0.5]], None),  # nothing has moved yet
            ([[0.5, 0.5], [0.9, 0.1]], None),
            ([[1.0], [1.0]], None),  # one cluster is no choice
            ([[0.0, 1.0]], None),  # one client neither
            ([[0.0, 1.0], [math.nan, math.nan]], None),
            ([[0.0, 1.0], [math.nan, math.nan], [0.2, 0.8]], 1),
            ([], None),
        ],
    )
    def test_by_hand(self, routes, cluster):
        assert find_common_cluster(array(routes)) == cluster

    @pytest.mark.usefixtures("words_only")
    def test_is_said_wherever_results_are_read(self, make_run, tmp_path):
        people = in_clusters(TRUTH)
        learnt = {
            "title": "FLoRAL",
            "clients": people,
            "fields": {"router": {"routing": "learned", "lr": 0.1}},
        }
        good = make_run("floral", 0, rounds=choosing([0, 0, 0, 0], TRUTH), **learnt)
        bad = make_run("floral", 1, rounds=choosing(TRUTH, [1, 1, 1, 1]), **learnt)
        other = make_run("ifca", 0, title="IFCA", rounds=choosing(TRUTH, TRUTH), clients=people)
        (said,) = collapse_warnings(group_runs([good, bad, other]))
        assert said.startswith("FLoRAL: all clients chose one cluster. At round 1 one of 2 clusters")
        for part in ("all 4 clients", "seed 1: cluster 1", "lower learning rate", "noise", "another seed"):
            assert part in said
        assert "seed 0" not in said
        assert said in find_warnings(group_runs([good, bad]))
        table = compare_runs([good, bad])
        assert said in text_of(table, 1000)
        assert "all clients chose one cluster" in comparison_markdown(table)
        assert "all clients chose one cluster" in page_of([good, bad], tmp_path)
        assert collapse_warnings(group_runs([good, other])) == []
        (said,) = collapse_warnings(
            group_runs([make_run("ifca", 1, rounds=choosing([1, 1, 1, 1]), clients=people)])
        )
        assert "another seed" in said
        assert "router.lr" not in said

    def test_is_not_said_where_one_cluster_is_right(self, make_run):
        rows = choosing([1, 1, 1])
        same, unknown = in_clusters([0, 0, 0]), in_clusters([None, None, None])
        assert collapse_warnings(group_runs([make_run("a", rounds=rows, clients=same)])) == []
        assert len(collapse_warnings(group_runs([make_run("a", rounds=rows, clients=unknown)]))) == 1
        assert (
            len(collapse_warnings(group_runs([make_run("a", rounds=rows)]))) == 1
        )  # an old folder knows no clusters
        given_routes = {"router": {"routing": "optimal"}}
        assert (
            collapse_warnings(group_runs([make_run("a", rounds=rows, clients=unknown, fields=given_routes)]))
            == []
        )


class TestOverRounds:
    @pytest.mark.full
    def test_mean_and_interval_over_seeds(self, make_run):
        people = in_clusters(TRUTH)
        runs = [
            make_run("a", 0, rounds=choosing([0, 0, 0, 0], TRUTH), clients=people),
            make_run("a", 1, rounds=choosing([0, 0, 0, 0], [0, 0, 1, 1]), clients=people),
        ]
        (group,) = group_runs(runs)
        got = group.recovery_curve()
        assert got.index.tolist() == [0, 1]
        assert got["mean"].tolist() == pytest.approx([0, 0.25])  # of 1 and -0.5
        half = stats.t.ppf(0.975, 1) * np.std([1, -0.5], ddof=1) / math.sqrt(2)
        assert got["ci"].tolist() == pytest.approx([0, half])
        assert (group.final_recovery().mean, group.final_recovery().ci) == (
            pytest.approx(0.25),
            pytest.approx(half),
        )
        picture = draw(cluster_figures.plot_recovery, *runs, make_run("old"))
        (axes,) = picture.figure.axes
        assert [line.get_ydata().tolist() for line in axes.lines] == [pytest.approx([0, 0.25])]
        assert len(axes.collections) == 1
        assert legend_of(picture) == ["a"]
        assert "a 0.25" in picture.alt

    def test_only_of_clients_that_can_train(self, make_run):
        people = in_clusters([*TRUTH, 0, 1], unseen=[4, 5])
        (group,) = group_runs([make_run("a", rounds=choosing([*TRUTH, 1, 0]), clients=people)])
        assert group.final_recovery().mean == 1.0

    def test_none_where_there_is_nothing_to_recover(self, make_run):
        rows = choosing(TRUTH, TRUTH)
        for people in (None, in_clusters([None] * 4), in_clusters([0] * 4)):
            groups, looks = both([make_run("a", rounds=rows, clients=people)])
            assert groups[0].recovery_curve().empty
            assert groups[0].final_recovery() is None
            assert cluster_figures.plot_recovery(groups, looks) is None
        single = choosing([0, 0, 0, 0], clusters=1, sure=1.0)
        assert (
            group_runs([make_run("a", rounds=single, clients=in_clusters(TRUTH))])[0].recovery_curve().empty
        )

    @pytest.mark.full
    def test_column(self, make_run):
        people = in_clusters(TRUTH)
        table = compare_runs(
            [make_run("a", rounds=choosing(TRUTH), clients=people), make_run("b", clients=people)]
        )
        assert cells(table, "accuracy", "cluster recovery (ARI)") == ["1.00", "–"]
        assert "cluster recovery (ARI)" in comparison_markdown(table)
        assert "cluster recovery (ARI)" not in comparison_markdown(compare_runs([make_run("b")]))


def shades(axes):
    """Shades of the cells of a heat map by (row, column), of 16."""
    actual = {}
    for patch in axes.patches:
        shade = int(patch.get_gid())
        corners = patch.get_path().vertices.reshape(-1, 5, 2)
        for box in corners:
            (left, top), (_, bottom) = box[0], box[2]
            for row in range(round(top + 0.5), round(bottom + 0.5)):
                assert (row, round(left + 0.5)) not in actual
                actual[row, round(left + 0.5)] = shade
    return actual


class TestHeatMap:
    @pytest.mark.full
    def test_every_cell_by_true_cluster_then_number(self, make_run):
        truth = [1, 0, None, 1, 0]
        shares = [[0.25, 0.75], [1.0, 0.0], [0.5, 0.5], [0.0, 1.0], [0.875, 0.125]]
        rows = with_routes(rounds_of([[0.5] * 5]), [shares])
        (picture,) = cluster_figures.plot_routes(
            group_runs([make_run("a", rounds=rows, clients=in_clusters(truth))])
        )
        order = [1, 4, 0, 3, 2]
        expected = {
            (y, x): round(16 * shares[client][x])
            for y, client in enumerate(order)
            for x in (0, 1)
            if shares[client][x]
        }
        panel, key = picture.figure.axes
        assert shades(panel) == expected
        assert [tick.get_text() for tick in panel.get_yticklabels()] == ["0", "1", "?"]
        assert panel.get_yticks().tolist() == [0.5, 2.5, 4]
        lines = panel.collections[0].get_segments()
        assert [segment[0][1] for segment in lines] == [1.5, 3.5]
        assert shades(key) == {(y, 0): 16 - y for y in range(16)}
        assert picture.title == "Routes: a"
        assert "largest share at cluster 0, 1, ...: 3, 2" in picture.alt

    @pytest.mark.full
    def test_rounds_are_evenly_spaced_and_hold_both_ends(self, make_run):
        rows = choosing(*([TRUTH] * 24))
        for t, row in enumerate(rows):
            row["round"] = t if t < 4 else 10 * (t - 3)
        rows[7]["routes"] = None
        (picture,) = cluster_figures.plot_routes(group_runs([make_run("a", rounds=rows)]))
        *panels, _ = picture.figure.axes
        assert [axes.get_title() for axes in panels] == [f"round {at}" for at in (0, 50, 100, 150, 200)]
        (picture,) = cluster_figures.plot_routes(group_runs([make_run("b", rounds=choosing(TRUTH, TRUTH))]))
        assert [axes.get_title() for axes in picture.figure.axes[:-1]] == ["round 0", "round 1"]
        assert picture.figure.axes[0].get_ylabel() == "client"

    def test_one_a_method_with_routes_of_its_first_seed(self, make_run):
        runs = [make_run("a", s, rounds=choosing([s] * 4)) for s in (0, 1)]
        runs += [make_run("old"), make_run("b", rounds=choosing([1] * 4))]
        first, second = cluster_figures.plot_routes(group_runs(runs))
        assert (first.title, second.title) == ("Routes: a", "Routes: b")
        assert shades(first.figure.axes[0])[0, 0] == 14

    def test_clients_that_never_trained_are_marked(self, make_run):
        people = in_clusters([0, 1, 0, 1], unseen=[2])
        (picture,) = cluster_figures.plot_routes(
            group_runs([make_run("a", rounds=choosing(TRUTH), clients=people)])
        )
        (marks,) = picture.figure.axes[0].lines
        assert marks.get_ydata() == [1]  # the second of cluster 0
        assert "never trained" in picture.caption

    @pytest.mark.full
    def test_many_clients_are_thinned_out(self, make_run):
        chosen = [k % 3 for k in range(700)]
        people = in_clusters(chosen)
        run = make_run("a", rounds=choosing(chosen, clusters=3), clients=people)
        (picture,) = cluster_figures.plot_routes(group_runs([run]))
        assert len({row for row, _ in shades(picture.figure.axes[0])}) == cluster_figures.CLIENTS
        assert "300 of 700 clients are drawn" in picture.caption
        assert len(to_svg(picture.figure, "x")) < 20_000
        wide = make_run(
            "b",
            rounds=choosing(*[[k % 10 for k in range(300)]] * 5, clusters=10),
            clients=in_clusters([0] * 300),
        )
        (picture,) = cluster_figures.plot_routes(group_runs([wide]))
        assert len({row for row, _ in shades(picture.figure.axes[0])}) == 6000 // 50

    @pytest.mark.full
    @pytest.mark.parametrize(
        "routes",
        [
            None,
            [],
            [[1.0], [1.0]],
            [[0.5, 0.5], [1.0]],
            [[math.nan, math.nan], [0.5, 0.5]],
            [[math.nan, math.nan], [math.nan, math.nan]],
            [[0.3, 0.7]],
        ],
    )
    def test_odd_routes_make_a_page(self, make_run, tmp_path, routes):
        rows = with_routes(rounds_of([[0.1, 0.2], [0.5, 0.6]]), [None, routes])
        run = make_run("a", rounds=rows, clients=in_clusters([0, 1]))
        write_report([run], tmp_path / "r.html")
        finite = routes is not None and len(routes) == 2 and all(len(row) == 2 for row in routes)
        assert (">Routes: a.<" in (tmp_path / "r.html").read_text()) == finite

    @pytest.mark.full
    def test_page_and_files(self, make_run, tmp_path):
        people = in_clusters(TRUTH, unseen=[3])
        runs = [
            make_run(m, s, title=t, rounds=choosing([0] * 4, TRUTH), clients=people)
            for m, t in (("a", "Mix"), ("b", "Mix π*"))
            for s in (0, 1)
        ]
        ((_, drawn),) = draw_figures(runs)
        assert [one.title for one in drawn if "outes" in one.title or "recovery" in one.title] == [
            "Cluster recovery over rounds", "Routes: Mix", "Routes: Mix π*",
        ]  # fmt: skip
        made = save_figures(runs, tmp_path / "f", ["svg"])
        # titles that a file's name cannot tell apart
        assert {"routes-mix", "routes-mix-2"} <= {path.stem for path in made}
        assert len({path.name for path in made}) == len(made)
