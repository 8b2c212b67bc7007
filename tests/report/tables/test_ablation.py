"""Ablations: which numbers stand in which cell."""

import pytest
from scipy import stats

from fedlowrank.report import compare_runs
from fedlowrank.report.figures import comparison_figures as figures
from fedlowrank.report.formats.markdown import comparison_markdown
from fedlowrank.report.statistics.experiments import read_experiments
from fedlowrank.report.tables.sweeps import sweep_tables
from fedlowrank.results.varied_settings import shorten_names
from tests.report.report_runs import both, findings_of, page_of, regression_of, rounds_of, text_of

METHODS = (("fedavg", "FedAvg"), ("floral", "FLoRAL"))


def heads(table):
    return [column.title for column in table.columns]


def value(method, clusters, rank, seed=0):
    return 0.3 + 0.01 * clusters + rank + 0.2 * (method == "floral") + 0.02 * seed


def varied(make_run, name="r", clusters=(16, 4, 8), ranks=(0.01, 0.1), seeds=1, methods=METHODS, **changes):
    return [
        make_run(
            method, s, title=title, name=name,
            rounds=rounds_of([[0.1], [value(method, c, r, s)]]),
            vary={"methods.floral.clusters": c, "methods.floral.rank": r}, **changes,
        )
        for method, title in methods
        for c in clusters
        for r in ranks
        for s in range(seeds)
    ]  # fmt: skip


@pytest.mark.full
def test_two_fields_by_methods(make_run):
    (table,) = sweep_tables(read_experiments(varied(make_run)))
    assert table.title == "Accuracy / % against clusters, rank"
    assert table.fields == ("clusters", "rank")
    assert heads(table) == ["FedAvg", "FLoRAL"]
    assert [row[:2] for row in table.rows] == [(c, r) for c in ("4", "8", "16") for r in ("0.01", "0.1")]
    for clusters, rank, *cells in table.rows:
        expected = [100 * value(method, int(clusters), float(rank)) for method, _ in METHODS]
        assert [float(cell) for cell in cells] == pytest.approx(expected)
    assert "clusters and rank are settings of FLoRAL and no matter to FedAvg" in table.note


def test_interval_over_seeds(make_run):
    (table,) = sweep_tables(read_experiments(varied(make_run, clusters=(2, 4), ranks=(0.1,), seeds=3)))
    half = stats.t.ppf(0.975, 2) * 2 / 3**0.5  # 0, 2 and 4 points: standard deviation 2
    assert table.rows[0] == ("2", "0.1", f"44.00 ± {half:.2f}", f"64.00 ± {half:.2f}")
    assert "mean over 3 seeds ± half-width" in table.note


def test_experiments_become_columns(make_run):
    one = (METHODS[1],)
    runs = varied(make_run, "r", methods=one) + varied(make_run, "ls", methods=one)
    for run in runs:
        run.config["title"] = {"r": "CIFAR-10-R", "ls": "CIFAR-10-LS"}[run.config["name"]]
    (table,) = sweep_tables(read_experiments(runs))
    assert heads(table) == ["CIFAR-10-R", "CIFAR-10-LS"]
    assert table.title == "Accuracy / % of FLoRAL against clusters, rank"
    assert table.experiments == 2
    (table,) = sweep_tables(read_experiments(varied(make_run, "r") + varied(make_run, "ls")))
    assert heads(table) == [f"{name}: {title}" for name in ("r", "ls") for _, title in METHODS]


def test_holes_words_and_losses(make_run):
    runs = [
        make_run(m, vary={"model.norm": norm, "methods.x.on": on}, rounds=regression_of([[1.0], [size]]))
        for m, norm, on, size in (
            ("a", "none", True, 0.5),
            ("a", "batch", False, 0.25),
            ("b", "batch", False, 0.125),
        )
    ]
    (table,) = sweep_tables(read_experiments(runs))
    assert table.title == "Test loss against norm, on"
    assert table.rows == (("none", "true", "0.5000", "–"), ("batch", "false", "0.2500", "0.1250"))
    assert "lower is better" in table.note


@pytest.mark.full
def test_none_where_nothing_is_varied(make_run):
    assert sweep_tables(read_experiments([make_run("a"), make_run("b")])) == []
    assert (
        sweep_tables(read_experiments([make_run("a", vary={"x.k": 1}), make_run("b", vary={"x.k": 1})])) == []
    )


@pytest.mark.full
def test_different_sweeps_have_tables_of_their_own(make_run):
    runs = [make_run("a", vary={"x.k": k}) for k in (1, 2)] + [make_run("a", vary={"x.l": k}) for k in (1, 2)]
    assert [table.fields for table in sweep_tables(read_experiments(runs))] == [("k",), ("l",)]


def test_fields_are_told_apart():
    assert shorten_names(["methods.floral.rank", "run.rounds"]) == ("rank", "rounds")
    assert shorten_names(["methods.floral.router.lr", "defaults.optimizer.lr"]) == (
        "router.lr",
        "optimizer.lr",
    )
    assert shorten_names(["methods.a.rank", "methods.b.rank"]) == ("a.rank", "b.rank")
    assert shorten_names(["k"]) == ("k",)
    # many sections have a field of this name
    assert shorten_names(["partition.kind"]) == ("partition.kind",)


@pytest.mark.parametrize(
    ("vary", "labels"),
    [
        ({"methods.b.epochs": 2}, ["a (b.epochs = 2)", "b (epochs = 2)"]),
        (
            {"methods.a.epochs": 3, "methods.b.epochs": 2},
            ["a (epochs = 3, b.epochs = 2)", "b (a.epochs = 3, epochs = 2)"],
        ),
        ({"defaults.optimizer.lr": 0.1}, ["a (lr = 0.1)", "b (lr = 0.1)"]),
        (
            {"defaults.epochs": 1, "methods.a.epochs": 2},
            ["a (defaults.epochs = 1, a.epochs = 2)", "b (epochs = 1, a.epochs = 2)"],
        ),
        ({'methods."c.d:E".mu': 1}, ['a ("c.d:E".mu = 1)', 'b ("c.d:E".mu = 1)']),
    ],
)
def test_a_label_names_the_method_of_another_methods_setting(make_run, vary, labels):
    """``a (epochs = 2)`` would say that a trained two epochs."""
    (experiment,) = read_experiments([make_run(name, vary=vary) for name in "ab"])
    assert [group.label for group in experiment.groups] == labels
    # one text for both, by which they are compared with each other
    assert len({group.variation for group in experiment.groups}) == 1


@pytest.mark.full
@pytest.mark.usefixtures("words_only")
def test_is_in_everything_that_is_written(make_run, tmp_path):
    runs = varied(make_run)
    table = compare_runs(runs)
    terminal = text_of(table, 80)
    assert terminal.index("against clusters, rank") > terminal.index("last")
    assert any(line.split() == ["4", "0.01", "35.00", "55.00"] for line in terminal.splitlines())
    assert "| 4 | 0.01 | 35.00 | **55.00** |" in comparison_markdown(table)
    row = '<th scope="row">4</th><th scope="row">0.01</th><td class="right">35.00</td><td class="right"><b>55.00</b></td>'
    page = page_of(runs + varied(make_run, "ls"), tmp_path)
    assert row in page
    assert page.index("Ablations over experiments") < page.index('<section class="experiment"')
    assert page.count('class="scroll ablation"') == 3  # the one of both experiments, and each one's own


@pytest.mark.full
def test_best_setting_of_one_method(make_run):
    """The settings of one method are compared with the best of them, paired by seed."""

    def said(step):
        noise = {1: (0, 1, 3), 2: (1, 0, 2), 3: (2, 1, 2)}
        runs = [
            make_run(
                "a", s, vary={"x.k": k}, rounds=rounds_of([[0.1], [0.5 + step * k + noise[k][s] / 1000]])
            )
            for k in (2, 3, 1)
            for s in (0, 1, 2)
        ]
        return findings_of(runs)[0]

    far, near = said(0.1), said(0.0001)
    assert "a (k = 3) reaches the highest mean test accuracy, 80.2 %" in far
    assert "points over a (k = 2)" in far
    assert "significantly better than a (k = 1) (p < 0.05)" in far
    assert "No difference from a (k = 1) can be seen" in near
    assert "over a" not in near


@pytest.mark.full
def test_wide_ablations_go_on_in_further_tables(make_run):
    many = [(f"m{i}", f"Method number {i}") for i in range(9)]
    text = text_of(compare_runs(varied(make_run, methods=many, seeds=2)), 80)
    assert "against clusters, rank, continued" in text
    assert "…" not in text
    for _, title in many:
        assert title in text


def test_figure_names_whole_values_of_several_fields(make_run):
    picture = figures.plot_sweep(*both(varied(make_run, clusters=(2, 4))))
    ticks = [tick.get_text() for tick in picture.figure.axes[0].get_xticklabels()]
    assert ticks == [f"clusters={c}, rank={r}" for c in (2, 4) for r in (0.01, 0.1)]
