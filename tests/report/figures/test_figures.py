"""Figures: what is drawn, not how it looks."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.lines import Line2D

from fedlowrank.cli.main import main
from fedlowrank.report import write_report
from fedlowrank.report.figures import comparison_figures as figures
from fedlowrank.report.figures import data_figures, gallery, time_figures
from fedlowrank.report.figures.gallery import save_figures
from fedlowrank.report.figures.style import (
    DASHES,
    LIGHT,
    add_legend,
    drawing,
    make_styles,
    new_figure,
    to_svg,
)
from fedlowrank.report.statistics.groups import group_runs
from tests.report.report_runs import both, cloud, draw, rounds_of


def lines(picture):
    return [line for line in picture.figure.axes[0].lines if len(line.get_xdata()) > 1]


@pytest.fixture
def eight(make_run):
    return both([make_run(f"method {i}", s) for i in range(8) for s in (0, 1)])


@pytest.mark.full
def test_one_curve_and_one_band_a_method(eight):
    picture = figures.plot_accuracy(*eight)
    axes = picture.figure.axes[0]
    assert len(lines(picture)) == len(axes.collections) == 8
    assert len(picture.figure.legends[0].get_texts()) == 8
    np.testing.assert_allclose(lines(picture)[0].get_ydata(), 100 * eight[0][0].curve()["mean"])
    for group in eight[0]:
        assert group.label in picture.alt


@pytest.mark.full
def test_curve_is_over_shared_rounds(make_run):
    short = make_run("a", 0, rounds=rounds_of([[0.1], [0.3]]), run={"rounds": 2})
    long = make_run("a", 1, rounds=rounds_of([[0.2], [0.5], [0.9]]))
    (group,) = group_runs([short, long])
    assert group.curve().index.tolist() == [0, 1]
    assert group.curve()["mean"].tolist() == pytest.approx([0.15, 0.4])
    assert group.curve()["bytes"].tolist() == [0, 1500]


def timed(seconds):
    """A run of as many rounds, each with its simulated seconds."""
    rows = rounds_of([[0.1], *([0.5 + i / 10] for i in range(len(seconds)))])
    for row, one in zip(rows[1:], seconds, strict=True):
        row["simulated_seconds"] = one
    return rows


def test_simulated_time_by_hand(make_run):
    runs = [make_run("a", seed, rounds=timed(s)) for seed, s in enumerate([(60, 600, 60), (120, 1200, 120)])]
    picture = draw(time_figures.plot_simulated_time, *runs, make_run("b"))
    (axes,) = picture.figure.axes
    # minutes, mean over seeds; b has no simulated clock
    (line,) = axes.lines
    assert line.get_xdata() == pytest.approx([0, 1.5, 16.5, 18])
    assert line.get_ydata() == pytest.approx([10, 50, 60, 70])
    assert axes.get_xlabel() == "simulated time / min"
    assert "a, 16.5 min: 60.0" in " ".join(tip.text for tip in picture.tips)
    far = draw(time_figures.plot_simulated_time, runs[0], make_run("c", rounds=timed((1, 2, 3))))
    assert far.figure.axes[0].get_xscale() == "log"
    assert draw(time_figures.plot_simulated_time, make_run("b")) is None


def test_bytes_axis_is_logarithmic_only_where_methods_differ(make_run):
    a = make_run("a", rounds=rounds_of([[0.1], [0.5], [0.6]]))
    rows = rounds_of([[0.1], [0.5], [0.6]])
    for row in rows:
        row["bytes_up"] *= 100
    silent = rounds_of([[0.1], [0.4], [0.45]])
    for row in silent:
        row["bytes_up"] = row["bytes_down"] = 0
    near = draw(figures.plot_communication, a, make_run("b"))
    far = draw(figures.plot_communication, a, make_run("c", rounds=rows), make_run("d", rounds=silent))
    assert near.figure.axes[0].get_xscale() == "linear"
    assert far.figure.axes[0].get_xscale() == "log"
    level = far.figure.axes[0].lines[-1]
    assert list(level.get_ydata()) == pytest.approx([45, 45])
    assert draw(figures.plot_communication, make_run("d", rounds=silent)) is None


@pytest.mark.full
def test_boxes_mark_the_mean_with_a_plus(eight):
    picture = figures.plot_clients(*eight)
    axes = picture.figure.axes[0]
    marks = [line for line in axes.lines if line.get_marker() == "+"]
    assert len(marks) == len(axes.patches) == 8
    pooled = [
        run.record.rounds[-1].values("accuracy", series="personal", split="test") for run in eight[0][0].runs
    ]
    assert marks[0].get_xdata()[0] == pytest.approx(100 * np.mean(pooled))


@pytest.mark.full
def test_trade_off_has_a_marker_a_method(eight):
    lines = figures.plot_trade_off(*eight).figure.axes[0].lines
    assert [line.get_xdata()[0] for line in lines] == [20 * 3_000_000] * 8
    finals = {round(100 * group.final().mean, 6) for group in eight[0]}
    assert {round(float(line.get_ydata()[0]), 6) for line in lines} == finals


@pytest.mark.full
def test_sweep_has_a_line_a_method(make_run):
    runs = [make_run(m, s, vary={"method.k": k}) for m in "abc" for k in (2, 4, 8) for s in (0, 1)]
    groups, looks = both(runs)
    picture = figures.plot_sweep(groups, looks)
    axes = picture.figure.axes[0]
    assert len(axes.containers) == 3
    assert list(axes.containers[0].lines[0].get_xdata()) == [2, 4, 8]
    assert axes.get_xlim()[0] < 2
    assert axes.get_xlim()[1] > 8
    far = draw(
        figures.plot_sweep, *(make_run("a", 0, vary={"method.k": k}) for k in (0.01, 0.1, 1))
    ).figure.axes[0]
    assert far.get_xscale() == "log"
    assert far.get_xlim()[0] < 0.01
    words = [make_run("a", 0, vary={"model.norm": v}) for v in ("batch", "group")]
    ticks = draw(figures.plot_sweep, *words).figure.axes[0].get_xticklabels()
    assert [tick.get_text() for tick in ticks] == ["norm=batch", "norm=group"]
    assert draw(figures.plot_sweep, make_run("a")) is None


def test_nothing_to_draw(make_run):
    run = make_run("a", rounds=[{"round": 0, "accuracy": None}])
    for name in ("accuracy", "communication", "clients", "trade_off"):
        assert draw(getattr(figures, f"plot_{name}"), run) is None
    assert data_figures.plot_embeddings(group_runs([run])) == []


def test_styles_are_distinct():
    looks = make_styles([str(i) for i in range(32)])
    assert len({(look.color, look.dash) for look in looks.values()}) == len(LIGHT) * len(DASHES) == 32


@pytest.mark.full
def test_representations(make_run):
    groups, _ = both([make_run("a", points=cloud(60)), make_run("b"), make_run("c", points=cloud(80))])
    key, *panels = data_figures.plot_embeddings(groups)
    assert [panel.title for panel in panels] == ["Representations: a", "Representations: c"]
    drawn = panels[0].figure.axes[0].collections
    assert len(drawn) == 4  # one a client
    assert sum(len(one.get_offsets()) for one in drawn) == 60
    assert len(key.figure.legends[0].get_texts()) == 5 + 4


@pytest.mark.parametrize("ignored", [-100, -1])
def test_examples_without_a_class_are_not_embedded(make_run, ignored):
    x, labels, owners = cloud(60)
    labels[::3] = ignored
    key, panel = data_figures.plot_embeddings(group_runs([make_run("a", points=(x, labels, owners))]))
    drawn = panel.figure.axes[0].collections
    assert sum(len(one.get_offsets()) for one in drawn) == 40
    assert f"{len(set(labels) - {ignored})} classes" in panel.alt
    assert str(ignored) not in [text.get_text() for text in key.figure.legends[0].get_texts()]


def test_embedding_is_the_same_each_time_and_copes():
    x, _, _ = cloud(50)
    np.testing.assert_array_equal(data_figures.embed(x), data_figures.embed(x))
    assert data_figures.embed(x[:, :1]).shape == (50, 2)
    assert data_figures.embed(x[:3]) is None
    assert data_figures.embed(np.ones((20, 4))) is None


def test_points_are_limited_and_evenly_taken(make_run, monkeypatch):
    seen = []
    monkeypatch.setattr(data_figures, "embed", lambda x: seen.append(x) or x[:, :2])
    data_figures.plot_embeddings(group_runs([make_run("a", points=cloud(5000))]))
    assert len(seen[0]) == data_figures.POINTS


def test_class_counts(make_run):
    run = make_run("a")
    offsets = data_figures.plot_class_counts(run).figure.axes[0].collections[0].get_offsets()
    assert len(offsets) == 20  # two classes at each of ten clients
    assert data_figures.plot_class_counts(make_run("a", clients=[{"id": 0, "test": 3}])) is None
    many = [{"id": i, "classes": {"train": [1] * 40}} for i in range(200)]
    assert (
        "The first 75 of 200 clients" in data_figures.plot_class_counts(make_run("a", clients=many)).caption
    )


@pytest.mark.full
def test_svg_ids_are_its_own_and_references_hold(eight):
    picture = figures.plot_clients(*eight)
    first, second = to_svg(picture.figure, "one"), to_svg(picture.figure, "two")
    known = [
        [e.attrib["id"] for e in ET.fromstring(one).iter() if "id" in e.attrib] for one in (first, second)
    ]
    assert not set(known[0]) & set(known[1])
    for ids, text in zip(known, (first, second), strict=True):
        assert len(ids) == len(set(ids)) > 0
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) == set(ids)
    assert to_svg(picture.figure, "one") == first


@pytest.mark.full
def test_svg_follows_the_page(eight):
    text = to_svg(figures.plot_accuracy(*eight).figure, "x")
    assert "currentColor" in text
    assert "var(--s0,#0071a2)" in text
    assert not re.search(r"#0a00|#0b|#010203|<style|<metadata|<\?xml", text)


@pytest.mark.full
@given(st.text(min_size=1, max_size=30))
def test_any_name_makes_sound_svg(name):
    with drawing():
        figure, _ = new_figure(1.0)
        add_legend(figure, [Line2D([], [])], [name])
    ET.fromstring(to_svg(figure, "n"))


@pytest.mark.full
def test_figures_as_files_are_whole_and_repeatable(make_run, tmp_path):
    runs = [make_run(method, seed=seed) for method in ("a", "b") for seed in (0, 1)]
    first = save_figures(runs, tmp_path / "one", ["svg", "png"])
    again = save_figures(runs, tmp_path / "two", ["svg", "png"])
    assert {p.stem for p in first} >= {
        "accuracy-over-rounds",
        "spread-over-clients",
        "classes-at-each-client",
    }
    assert LIGHT[1] in (tmp_path / "one" / "accuracy-over-rounds.svg").read_text()
    assert [(p.name, p.read_bytes()) for p in first] == [(p.name, p.read_bytes()) for p in again]
    for path in first:
        if path.suffix == ".svg":
            ET.parse(path)
            # the page's placeholders must not get out
            assert not re.search(r"#0[ab][0-9a-f]{4}\b", path.read_text()), path
        else:
            assert path.read_bytes()[:4] == b"\x89PNG"


def test_one_folder_has_all_figures_and_a_contact_sheet(make_run, tmp_path, monkeypatch):
    """The sheet shows each figure once, linked to each of its files, with experiments apart."""
    runs = [make_run(m, name=name) for name in ("one", "two & <b>") for m in "ab"]
    for run in runs:
        run.config["title"] = f"Title of {run.config['name']}"
    few = (figures.plot_accuracy, figures.plot_clients)
    monkeypatch.setattr(
        gallery, "draw_all", lambda one, looks: [("", [plot(one.groups, looks) for plot in few])]
    )
    made = save_figures(runs, tmp_path / "f", ["pdf", "svg"])
    assert {path.parent for path in made} == {tmp_path / "f"}
    assert sorted([*(path.name for path in made), "index.html"]) == sorted(
        p.name for p in (tmp_path / "f").iterdir()
    )
    assert {"one-accuracy-over-rounds.svg", "two-b-accuracy-over-rounds.pdf"} <= {path.name for path in made}
    sheet = (tmp_path / "f" / "index.html").read_text()
    assert sorted(re.findall(r'<a href="([^"]*)">(?:PDF|SVG)</a>', sheet)) == sorted(
        path.name for path in made
    )
    images = re.findall(r'<a href="([^"]*)"><img src="([^"]*)" loading="lazy" alt="[^"]+">', sheet)
    assert [first for first, _ in images] == [second for _, second in images]
    assert sorted(first for first, _ in images) == sorted(path.name for path in made if path.suffix == ".svg")
    assert re.findall("<h2>(.*)</h2>", sheet) == ["Title of one", "Title of two &amp; &lt;b&gt;"]
    assert "<h1>2 experiments</h1>" in sheet
    # of one experiment, names are short
    alone = save_figures(runs[:2], tmp_path / "g", ["pdf"])
    assert "accuracy-over-rounds.pdf" in {path.name for path in alone}
    assert "<img" not in (tmp_path / "g" / "index.html").read_text()


def test_the_page_links_to_the_contact_sheet(make_run, tmp_path):
    run = make_run("a", rounds=[])
    write_report([run], tmp_path / "pages" / "r.html", figures=tmp_path / "my figures" / "index.html")
    text = (tmp_path / "pages" / "r.html").read_text()
    assert '<a href="../my%20figures/index.html">contact sheet</a>' in text
    write_report([run], tmp_path / "r.html")
    assert "contact sheet</a>" not in (tmp_path / "r.html").read_text()


@pytest.mark.full
@pytest.mark.parametrize(("option", "folder"), [([], "pages/my-figures"), (["here"], "here"), (["."], ".")])
def test_the_command_writes_figures_beside_the_page_or_where_it_is_told(
    make_run, tmp_path, monkeypatch, option, folder
):
    run = make_run("a", rounds=rounds_of([[0.1], [0.5]]))
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run.folder), "-o", "pages/my.html", "--figures", *option]) == 0
    assert (tmp_path / folder / "accuracy-over-rounds.pdf").exists()
    assert "accuracy-over-rounds.svg" in (tmp_path / folder / "index.html").read_text()
    (address,) = re.findall('<a href="([^"]*)">contact sheet', (tmp_path / "pages" / "my.html").read_text())
    assert (tmp_path / "pages" / address).resolve() == (tmp_path / folder / "index.html").resolve()


@pytest.mark.full
def test_figures_for_a_column_are_as_wide_as_one(make_run, tmp_path):
    made = save_figures([make_run("a"), make_run("b")], tmp_path, width="column")
    assert {path.suffix for path in made} == {".svg", ".pdf", ".png"}
    drawings = [path for path in made if path.suffix == ".svg"]
    widths = {float(ET.parse(path).getroot().attrib["width"].removesuffix("pt")) for path in drawings}
    assert max(widths) == pytest.approx(3.3 * 72)
    # legible without scaling, and as many dots an inch as publishers ask for
    sizes = [
        float(n) for path in drawings for n in re.findall(r"font(?:-size)?: ([\d.]+)px", path.read_text())
    ]
    assert min(sizes) >= 7
    content = next(path for path in made if path.name == "accuracy-over-rounds.png").read_bytes()
    assert int.from_bytes(content[16:20], "big") == 990


def test_values_show_where_their_points_are_drawn(make_run):
    """The circle of the last round lies on the last point of the line, in the units of the SVG."""
    runs = [make_run("a", rounds=rounds_of([[0.1], [0.4], [0.9]]))]
    picture = draw(figures.plot_accuracy, *runs)
    root = ET.fromstring(to_svg(picture.figure, "n", picture.tips))
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    titles = ["a, round 0: 10.00 %", "a, round 1: 40.00 %", "a, round 2: 90.00 %"]
    assert [circle[0].text for circle in circles] == titles
    paths = [element.attrib["d"] for element in root.iter() if element.tag.endswith("path")]
    points = [
        [(float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)] for path in paths
    ]
    (line,) = [actual for actual in points if len(actual) == 3 and actual[2][0] - actual[0][0] > 100]
    drawn = [(float(circle.attrib["cx"]), float(circle.attrib["cy"])) for circle in circles]
    np.testing.assert_allclose(drawn, line, atol=0.6)
