"""Adapters of unequal rank, and language models: tables, figures and words."""

import csv
import io
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from scipy import stats

from fedlowrank.report import compare_runs, write_report
from fedlowrank.report.figures import chart
from fedlowrank.report.figures import lora_figures as drawn
from fedlowrank.report.figures.style import drawing, to_svg
from fedlowrank.report.formats.markdown import comparison_markdown
from fedlowrank.report.run_comparison import to_csv
from fedlowrank.report.setting_paragraph import describe_setting
from fedlowrank.report.statistics import low_rank
from fedlowrank.report.statistics.experiments import read_experiments
from fedlowrank.report.statistics.groups import group_runs, measure_of
from fedlowrank.report.statistics.run_statistics import RunStatistics
from fedlowrank.report.tables.rank_tables import rank_tables
from tests.report.report_runs import (
    cells,
    draw,
    draw_figures,
    findings_of,
    legend_of,
    members,
    page_of,
    regression_of,
    rounds_of,
    rows_of,
    text_of,
    with_losses,
)

T = stats.t.ppf(0.975, 1)
LANGUAGE = {"language": {"path": "models/tiny", "task": "causal", "context": 64}, "classes": []}


def people(*ranks, unseen=()):
    """Rows of ``clients.json`` with a rank each, None for a client without one."""
    rows = members(len(ranks))
    for i, (row, rank) in enumerate(zip(rows, ranks, strict=True)):
        row |= {"unseen": i in unseen} | ({} if rank is None else {"rank": rank})
    return rows


def with_server(rows, server):
    """The rows with the server's model as a further series, of given accuracies."""
    for row, values in zip(rows, server, strict=True):
        row["accuracy"]["server"] = {"test": list(values)}
    return rows


def texts_of(losses, server=(), classes=False):
    """Rows of a language model: losses a token, and no accuracy; or of a classifier of texts, which has one."""
    rows = with_losses(rounds_of([[0.5 if classes else None] * len(each) for each in losses]), losses)
    for row, values in zip(rows, server, strict=False):
        row["accuracy"]["server"] = {"test": [None] * len(values)}
        row["client_losses"]["server"] = {"test": list(values)}
    return rows


def observing(*each, ranks=()):
    """Rows of rounds from 0 on with their server metrics."""
    rows = rounds_of([[0.1 + 0.1 * t] * 4 for t in range(len(each))])
    for i, (row, server_metrics) in enumerate(zip(rows, each, strict=True)):
        row["server_metrics"] = server_metrics
        row["ranks"] = dict(ranks[i]) if i < len(ranks) else {}
    return rows


def replying(weights, errors):
    return {
        "weights": {str(i): p for i, p in weights.items()},
        "truncation": {str(i): e for i, e in errors.items()},
    }


class TestByRank:
    def test_ranks_are_positive_whole_numbers(self, make_run):
        run = make_run("a", rounds=rounds_of([[0.5] * 5]), clients=people(4, None, 0, True, 4))
        assert run.ranks == {0: 4, 4: 4}
        mixed = make_run("a", rounds=rounds_of([[0.5] * 4]), clients=people(2, 16, 2, 4))
        assert "Ranks of the clients: 16, 4, 2 × 2." in describe_setting(group_runs([mixed]))

    def test_a_method_that_gives_all_clients_one_rank_says_so(self, make_run):
        own, common = (
            make_run(
                name,
                title=name.upper(),
                rounds=rounds_of([[0.5] * 4]),
                clients=people(2, 16, 2, 4),
                fields={"training": {"common_rank": rank}},
            )
            for name, rank in (("a", None), ("b", 2))
        )
        setting = describe_setting(group_runs([own, common]))
        assert "Ranks of the clients: 16, 4, 2 × 2. B gives all clients rank 2." in setting

    def test_table(self, make_run):
        # The client that never trains is apart, and so is the one without a rank.
        clients = people(8, 2, 2, None, 2, unseen=[4])
        rows = [with_server(rounds_of([[0.9, v, 0.3, 1.0, 0.0]]), [[0.4] * 5]) for v in (0.5, 0.6)]
        a = [make_run("a", s, rounds=one, clients=clients) for s, one in enumerate(rows)]
        b = make_run("b", rounds=rounds_of([[0.6, None, 0.25, 1.0, 0.0]]), clients=clients)
        (table,) = rank_tables(read_experiments([*a, b]))
        assert table.title == "Accuracy / % by rank of the client"
        assert table.fields == ("rank", "clients")
        assert [column.title for column in table.columns] == ["a: personal", "a: server", "b: personal"]
        assert table.rows == (
            ("8", "1", "90.00 ± 0.00", "40.00 ± 0.00", "60.00"),
            ("2", "1–2", f"42.50 ± {T * 5 / 2:.2f}", "40.00 ± 0.00", "25.00"),
        )
        assert "mean over up to 2 seeds" in table.note

    @pytest.mark.full
    def test_a_table_for_each_setting_and_experiment(self, make_run):
        runs = [
            make_run("a", rounds=rounds_of([[v, 0.2]]), clients=people(big, 1), vary={"lora.r": big}, name=name)
            for name in ("x", "y") for big, v in ((4, 0.5), (8, 0.6))
        ]  # fmt: skip
        tables = rank_tables(read_experiments(runs))
        assert [t.title.partition("client ")[2] for t in tables] == [
            "in x with r = 4", "in x with r = 8", "in y with r = 4", "in y with r = 8",
        ]  # fmt: skip
        assert tables[1].rows == (("8", "1", "60.00"), ("1", "1", "20.00"))

    @pytest.mark.full
    def test_where_a_method_has_no_client_of_a_rank(self, make_run):
        a = make_run("a", rounds=rounds_of([[0.5, 0.2]]), clients=people(4, 1))
        b = make_run("b", rounds=rounds_of([[0.5, 0.3]]), clients=people(1, 1))
        (table,) = rank_tables(read_experiments([a, b]))
        assert table.rows == (("4", "1", "50.00", "–"), ("1", "1–2", "20.00", "40.00"))
        assert rank_tables(read_experiments([b])) == []  # one rank is nothing to compare

    def test_regressions_are_compared_by_loss(self, make_run):
        run = make_run("a", rounds=regression_of([[0.5, 0.25]]), clients=people(4, 1))
        (table,) = rank_tables(read_experiments([run]))
        assert table.title == "Test loss by rank of the client"
        assert "lower is better" in table.note
        assert low_rank.adapter_row(group_runs([run])[0]) == {"loss_rank_4": 0.5, "loss_rank_1": 0.25}

    @pytest.mark.full
    @pytest.mark.usefixtures("words_only")
    def test_is_shown_wherever_results_are_read(self, make_run, tmp_path):
        run = make_run("a", rounds=rounds_of([[0.5, 0.2]]), clients=people(4, 1))
        table = compare_runs([run])
        for text in (text_of(table, 80), comparison_markdown(table), page_of([run], tmp_path)):
            assert "Accuracy / % by rank of the client" in " ".join(text.split())
        (row,) = csv.DictReader(io.StringIO(to_csv(table)))
        assert (row["accuracy_rank_4"], row["accuracy_rank_1"]) == ("0.5", "0.2")


class TestRankFigure:
    def test_a_panel_a_series_and_a_line_a_method(self, make_run):
        clients = people(8, 2, 2)
        rows = [with_server(rounds_of([[0.9, v, 0.3]]), [[0.5, 0.4, 0.4]]) for v in (0.5, 0.7)]
        runs = [make_run("a", s, rounds=one, clients=clients) for s, one in enumerate(rows)]
        runs.append(make_run("b", rounds=rounds_of([[0.6, 0.1, 0.2]]), clients=clients))
        picture = draw(drawn.plot_score_by_rank, *runs)
        personal, server = picture.figure.axes
        assert [axes.get_title("left") for axes in (personal, server)] == ["personal", "server"]
        lines = [bars.lines[0] for bars in personal.containers]
        assert [line.get_xdata().tolist() for line in lines] == [[2, 8], [2, 8]]
        np.testing.assert_allclose([line.get_ydata() for line in lines], [[45, 90], [15, 60]])
        (bars,) = personal.containers[0].lines[2]
        assert 45 - T * 10 / 2 < 0  # no accuracy is below 0
        assert bars.get_paths()[0].vertices[:, 1].tolist() == pytest.approx([0, 100])
        assert not personal.containers[1].has_yerr
        assert len(server.containers) == 1
        assert personal.get_ylabel() == "test accuracy / %"
        assert legend_of(picture) == ["a", "b"]
        assert "a, personal: rank 8 90.00 %, rank 2 45.00 %; a, server: rank 8 50.00 %" in picture.alt
        assert "bars of the 95 % interval" in picture.caption

    @pytest.mark.full
    @settings(deadline=None)
    @given(st.lists(st.integers(1, 4096), min_size=2, max_size=60, unique=True))
    def test_labels_of_ranks_do_not_collide(self, ranks):
        with drawing():
            axes = Figure().add_subplot()
            chart.set_value_axis(axes, sorted(ranks), is_log=True)
        kept = np.sort(axes.xaxis.get_major_locator().locs)
        assert set(kept) <= set(ranks)
        assert {min(ranks), max(ranks)} <= set(kept)
        assert axes.get_xlim()[0] < min(ranks) < max(ranks) < axes.get_xlim()[1]
        gaps = np.diff(np.log(kept)) / np.log(max(ranks) / min(ranks))
        assert gaps.min() >= chart.TICK * (1 - 1e-9)


class TestReplies:
    EACH = ({}, replying({0: 0.5, 1: 0.5}, {0: 0.0, 1: 0.0}),
            replying({0: 0.5, 1: 0.3, 2: 0.2}, {0: 0.0, 1: 0.25, 2: 0.4}),
            replying({0: 0.6, 2: 0.4}, {0: 0.125, 2: 0.5}))  # fmt: skip

    def test_by_client_and_round(self, make_run):
        run = make_run("a", rounds=observing(*self.EACH))
        expected = {0: {1: 0.5, 2: 0.5, 3: 0.6}, 1: {1: 0.5, 2: 0.3}, 2: {2: 0.2, 3: 0.4}}
        assert {
            c: v.dropna().to_dict() for c, v in low_rank.reply_values(RunStatistics(run), "weights").items()
        } == expected
        odd = make_run("a", rounds=observing({"weights": {"0": math.nan, "1": None, "x": 1.0, "2": 0.5}}))
        assert low_rank.reply_values(RunStatistics(odd), "weights").to_dict() == {2: {0: 0.5}}
        assert low_rank.reply_values(RunStatistics(odd), "truncation").empty

    @pytest.mark.full
    def test_lines_by_client_colored_by_rank(self, make_run):
        run = make_run("a", rounds=observing(*self.EACH), clients=people(8, 2, 2, 1))
        (picture,) = drawn.plot_replies(group_runs([run]))
        above, below = picture.figure.axes
        even, *lines = above.lines
        np.testing.assert_allclose(even.get_ydata(), [1 / 2, 1 / 3, 1 / 2])
        nan = math.nan
        expected = (
            [[0.5, 0.5, 0.6], [0.5, 0.3, nan], [nan, 0.2, 0.4]],
            [[0, 0, 12.5], [0, 25, nan], [nan, 40, 50]],
        )
        np.testing.assert_allclose(
            [[one.get_ydata() for one in some] for some in (lines, below.lines)], expected
        )
        first, second, third = colors = [line.get_color() for line in lines]
        assert second == third != first
        assert [line.get_color() for line in below.lines] == colors
        # a client that was away has markers, one that always took part has none
        assert [line.get_marker() in ("", "None") for line in lines] == [True, False, False]
        assert legend_of(picture) == ["rank 8", "rank 2 (2 clients)", "equal weights"]
        assert "rank 8 weight 0.6, error 12.5 %; rank 2 weight 0.35, error 37.5 %" in picture.alt
        assert "seed 0" in picture.caption
        assert below.get_yscale() == "linear"

    def test_errors_of_many_decades_are_logarithmic(self, make_run):
        each = replying({0: 0.5, 1: 0.5}, {0: 0.0, 1: 0.0}), replying({0: 0.5, 1: 0.5}, {0: 0.001, 1: 0.3})
        run = make_run("a", rounds=observing(*each), clients=people(8, 2, 1, 1))
        (picture,) = drawn.plot_replies(group_runs([run]))
        below = picture.figure.axes[1]
        assert below.get_yscale() == "log"
        np.testing.assert_allclose(
            [line.get_ydata() for line in below.lines], [[math.nan, 0.1], [math.nan, 30]]
        )
        assert all(
            line.get_marker() in ("", "None") for line in below.lines
        )  # both clients took part in both rounds
        assert "logarithmic" in picture.caption

    def test_many_ranks(self, make_run):
        n = 40
        rows = observing(replying(dict.fromkeys(range(n), 1 / n), dict.fromkeys(range(n), 0.1)))
        run = make_run("a", rounds=rows, clients=people(*range(1, n + 1)))
        (picture,) = drawn.plot_replies(group_runs([run]))
        first, *_, last, even = legend_of(picture)
        assert (first, last, even) == ("rank 40", "rank 1", "equal weights")
        assert len(legend_of(picture)) == drawn.MAX_LISTED_RANKS + 1
        assert f"{drawn.MAX_LISTED_RANKS} of 40 ranks are named." in picture.caption
        assert len({line.get_color() for line in picture.figure.axes[0].lines[1:]}) == n

    @pytest.mark.parametrize(
        ("each", "clients"), [(EACH, None), (EACH, people(2, 2, 2)), (({},), people(8, 2, 2))]
    )
    def test_none_without_weights_or_ranks(self, make_run, each, clients):
        run = make_run("a", rounds=observing(*each), clients=clients)
        assert drawn.plot_replies(group_runs([run])) == []


class TestServer:
    def test_rank_grows_from_nothing(self, make_run):
        ranks = [{"a": 0, "b": 0, "old": 9}, {"a": 4, "b": 8, "old": 9}, {"a": 10, "b": 12, "old": 9}]
        more = [{"a": 0, "b": 0, "old": 9}, {"a": 6, "b": 6, "old": 9}, {"a": 12, "b": 14, "old": 9}]
        runs = [
            make_run("a", s, rounds=observing({}, {}, {}, ranks=one)) for s, one in enumerate((ranks, more))
        ]
        picture = draw(drawn.plot_server_rank, *runs)
        # a weight that began with a rank is in the other figure
        assert picture.figure.axes[0].lines[0].get_ydata().tolist() == [0, 6, 12]
        assert "a 12" in picture.alt
        assert "a 11 to 13" in picture.caption

    @pytest.mark.few(2)
    @pytest.mark.parametrize("ranks", [(), ({"a": 4}, {"a": 2}), ({"a": 0}, {"a": 0})])
    def test_no_rank_to_show(self, make_run, ranks):
        run = make_run("a", rounds=observing({}, {}, ranks=ranks))
        assert low_rank.server_rank(group_runs([run])[0]) is None
        assert draw(drawn.plot_server_rank, run) is None

    def test_energy_and_what_a_cap_cut_off(self, make_run):
        pairs = (0.0, 0.0), (2.0, 0.5), (7.0, 0.0)
        each = [{"energy": {"a": e, "b": 1.0}, "discarded": {"a": d, "b": d}} for e, d in pairs]
        capped = make_run("a", rounds=observing(*each))
        free = make_run("b", rounds=observing(*({**one, "discarded": {"a": 0.0, "b": 0.0}} for one in each)))
        a, b = group_runs([capped, free])
        assert low_rank.energy(a)["mean"].tolist() == [1, 3, 8]
        assert low_rank.discarded_share(a)["mean"].tolist() == [0, 0.25, 0]  # 1 of 3 + 1
        assert low_rank.discarded_share(b).empty
        picture = draw(drawn.plot_energy, capped, free)
        drawings = [[line.get_ydata().tolist() for line in axes.lines] for axes in picture.figure.axes]
        assert drawings == [[[1, 3, 8]] * 2, [[0, 25, 0]]]
        assert "a 25 % at round 1" in picture.alt
        assert draw(drawn.plot_energy, free) is None
        assert draw(drawn.plot_energy, make_run("c")) is None

    def test_training_loss(self, make_run):
        def rows(*each):
            made = rounds_of([[0.5] * 2] * (len(each) + 1))
            for row, loss in zip(made[1:], each, strict=True):
                row["training_losses"] = loss
            return made

        seeds = [
            rows({"head": 4.0, "body": 1.0}, {"head": 2.0}),
            rows({"head": 2.0, "body": 1.0}, {"head": math.nan}),
        ]
        runs = [make_run("a", s, rounds=one, lora={"r": 4}) for s, one in enumerate(seeds)]
        # round 2 is not finite in the second seed
        picture = draw(drawn.plot_training_loss, *runs, make_run("b", rounds=seeds[0], lora={"r": 4}))
        assert legend_of(picture) == ["a", "a: body", "b", "b: body"]
        assert [line.get_ydata().tolist() for line in picture.figure.axes[0].lines] == [[3], [1], [4, 2], [1]]
        assert picture.figure.axes[0].get_ylabel() == "training loss"
        assert "b 2.000" in picture.alt
        silent = make_run("c", rounds=rounds_of([[0.5]]), lora={"r": 4})
        assert draw(drawn.plot_training_loss, silent) is None


class TestLanguage:
    @pytest.mark.full
    @settings(deadline=None)
    @given(st.lists(st.floats(0, 20), min_size=1, max_size=20))
    def test_perplexity_is_the_geometric_mean_of_the_clients(self, losses):
        assert low_rank.perplexity(math.fsum(losses) / len(losses)) == pytest.approx(
            stats.gmean(np.exp(losses))
        )

    @pytest.mark.full
    def test_columns(self, make_run):
        last, server = [math.log(8), math.log(2)], [math.log(2), math.log(2)]
        runs = [make_run("a", rounds=texts_of([[3.0, 3.0], last], [[3.0, 3.0], server]), **LANGUAGE)]
        runs.append(make_run("b", rounds=texts_of([[3.0, 3.0], [1e4, 1e4]]), **LANGUAGE))
        table = compare_runs(runs)
        a, b = rows_of(table)
        assert a["judged_by"] == "loss per token"
        assert (a["perplexity"], a["perplexity.server"]) == (
            pytest.approx(4),
            pytest.approx(2),
        )  # 4 = √(8 · 2)
        shown = {c.title: cells(table, "loss", c.title) for c in table.result_tables["loss"].columns}
        assert (shown["perplexity"], shown["perplexity server"]) == (["4.000", "–"], ["2.000", "–"])
        # (log 8 + log 2) / 2 and its spread over the two clients
        assert shown["last round"] == [f"{math.log(4):.2f} ± {math.log(2):.2f}", "1.000e+04 ± 0.0"]
        assert (table.result_tables["loss"].title, b["perplexity"]) == ("Loss per token", math.inf)

    @pytest.mark.full
    def test_words_everywhere(self, make_run, tmp_path):
        shared = {"clients": people(8, 8, 2, 1), **LANGUAGE}
        rows = [texts_of([[3.0, 2.9, 2.8, 2.7], [v, v, 2.5, 2.6]]) for v in (2.0, 1.9)]
        runs = [make_run(m, s, rounds=one, **shared) for m in "ab" for s, one in enumerate(rows)]
        write_report(runs, tmp_path / "r.html")
        for path in (tmp_path / "r.html", tmp_path / "r.md"):
            text = path.read_text().lower()
            assert "next-token accuracy" not in text
            assert "loss per token" in text
            assert "test accuracy" not in text
            assert "mean test loss" not in text
        ((_, pictures),) = draw_figures(runs)
        named = {picture.title: picture for picture in pictures}
        assert list(named)[1] == "Loss per token over rounds"
        assert pictures[1].figure.axes[0].get_ylabel() == "loss per token"
        ranked = named["Loss per token by rank of the client"]
        np.testing.assert_allclose(ranked.figure.axes[0].containers[0].lines[0].get_ydata(), [2.6, 2.5, 1.95])
        assert "Low is better" in ranked.caption
        assert "mean loss per token" in findings_of(runs)[0]
        assert "Language model: models/tiny (task causal, context 64)." in describe_setting(group_runs(runs))

    def test_a_classifier_of_texts_keeps_the_usual_words(self, make_run):
        tables = {"language": LANGUAGE["language"], "lora": {"r": 4, "ranks": [4, 2]}}
        run = make_run("a", rounds=texts_of([[3.0, 2.0]], classes=True), **tables)
        groups = group_runs([run])
        assert measure_of(groups).sentence_name == "test accuracy"
        table = compare_runs([run])
        assert table.result_tables["accuracy"].title == "Accuracy"
        assert "perplexity" not in table.frame
        assert "test loss" in [column.title for column in table.result_tables["accuracy"].columns]
        assert "LoRA: r 4." in describe_setting(groups)
        # beside a language model in one table, too
        runs = [make_run("b", rounds=texts_of([[3.0, 2.0]]), name="x", **LANGUAGE), run]
        assert compare_runs(runs).result_tables["accuracy"].title == "Accuracy"
        assert measure_of(group_runs(runs)).sentence_name == "test accuracy"


OURS = [
    "Training loss over rounds", "Accuracy by rank of the client", "Rank of the server's update over rounds",
    "Energy of the server's update over rounds", "Weights and truncation errors: fedhl",
]  # fmt: skip


@pytest.mark.full
def test_order_among_all_figures(make_run):
    each = [{"energy": {"w": 1.0 + t}, "discarded": {"w": t / 10}} for t in range(3)]
    for t in (1, 2):
        each[t] |= replying(dict.fromkeys(range(4), 0.25), {0: 0.0, 1: 0.1 * t, 2: 0.2, 3: 0.3})
    rows = with_server(observing(*each, ranks=[{"w": 0}, {"w": 8}, {"w": 9}]), [[0.5] * 4] * 3)
    runs = [make_run("fedhl", s, rounds=rows, clients=people(8, 4, 2, 1)) for s in (0, 1)]
    ((_, pictures),) = draw_figures(runs)
    assert [picture.title for picture in pictures if picture.title in OURS] == OURS
    for picture in pictures:
        assert "#0a00" not in to_svg(picture.figure, "x")  # placeholders all became the page's colors
        assert picture.alt
        assert picture.caption.endswith(".")


def test_runs_without_adapters_show_nothing_of_them(make_run):
    run = make_run("a")
    ((_, pictures),) = draw_figures([run])
    assert not {picture.title for picture in pictures} & set(OURS)
    table = compare_runs([run])
    assert table.ranks == ()
    assert low_rank.adapter_row(group_runs([run])[0]) == {}
    assert not any("rank_" in name or "perplexity" in name for name in table.frame)
