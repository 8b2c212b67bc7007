"""The page as a browser, a reader and a second run of the command get it."""

import os
import re
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from importlib.resources import files
from urllib.parse import unquote

import pytest

from fedlowrank.core.errors import CheckpointError, ConfigError
from fedlowrank.report import write_report
from fedlowrank.report.findings import state_headline
from fedlowrank.report.formats.page import card_widths
from fedlowrank.report.statistics.experiments import read_experiments
from fedlowrank.report.statistics.groups import group_runs
from tests.report.report_runs import cloud, members, page_of, regression_of, rounds_of, two_series

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Balance(HTMLParser):
    """Collects tags and fails where one is not closed in turn."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.loads, self.tags, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for key, value in attrs:
            if key == "id":
                self.ids.append(value)
            if key in ("src", "href", "xlink:href", "data", "srcset", "action"):
                self.loads.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> without a start"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parse(text):
    parser = Balance()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture
def written(tmp_path):
    return partial(page_of, tmp_path=tmp_path)


def test_page_is_whole_and_needs_nothing_else(make_run, written, tmp_path):
    runs = [make_run(m, s, points=cloud(40) if s == 0 else None) for m in "abc" for s in (0, 1)]
    text = written(runs, command="fedlowrank run digits-demo")
    page = parse(text)
    assert len(page.ids) == len(set(page.ids))
    assert all(one.startswith(("#", "data:text/plain;")) for one in page.loads)
    assert {one[1:] for one in page.loads if one.startswith("#")} <= set(page.ids)
    assert not re.search(r"url\((?!#)|@import|<link|<iframe|<object", text)
    assert page.tags.count("svg") == page.tags.count("figure") == page.tags.count("figcaption") == 10
    assert text.count('role="img" aria-label="') == 10
    assert "fedlowrank run digits-demo" in text
    assert "prefers-color-scheme" in text
    assert "@media print" in text
    assert (tmp_path / "r.md").read_text().startswith(("a reaches", "b reaches", "c reaches"))
    tables = [unquote(one.partition(",")[2]) for one in page.loads if one.startswith("data:")]
    assert tables == [(tmp_path / "r.csv").read_text(), (tmp_path / "r.md").read_text()]
    assert (tmp_path / "r.csv").read_text().startswith("experiment,method,")
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.full
def test_same_runs_same_bytes(make_run, tmp_path):
    runs = [make_run(m, points=cloud(40)) for m in "ab"]
    for name in ("x", "y"):
        write_report(runs, tmp_path / f"{name}.html", target=0.5, command="c")
    for suffix in (".html", ".md", ".csv"):
        assert (tmp_path / f"x{suffix}").read_bytes() == (tmp_path / f"y{suffix}").read_bytes()


SCRIPT = files("fedlowrank.report.formats").joinpath("page.js").read_text().rstrip("\n")
HOSTILE = "</title><script>alert('x')</script><img src=http://e.example/ onerror=\"a\">$x_2$"


def test_hostile_names_are_only_text(make_run, written):
    rows = rounds_of([[0.1, 0.2], [0.5, 0.6]])
    for row in rows:
        row["accuracy"] = {HOSTILE: row["accuracy"]["personal"], HOSTILE + "2": row["accuracy"]["personal"]}
        row["parameters"] = {HOSTILE: [7, 8], HOSTILE + "2": [5, 6]}
        row["ranks"] = {HOSTILE: 9 - row["round"]}
    clients = [
        {"id": i, "architecture": HOSTILE, "test": 5, "classes": {"train": [3, 4]}} for i in range(2)
    ]  # fmt: skip
    runs = [
        make_run(
            HOSTILE + m, title=HOSTILE + m, rounds=rows, clients=clients, points=cloud(20, clients=2, classes=2),
            fields={HOSTILE: HOSTILE}, name=HOSTILE, paper=HOSTILE, data={"name": HOSTILE, HOSTILE: [HOSTILE]},
            vary={HOSTILE: HOSTILE + m}, classes=[HOSTILE, HOSTILE], versions={HOSTILE: HOSTILE},
            reference={"label": HOSTILE, "accuracy": {HOSTILE + m: 3.0, f"{HOSTILE}{m}.{HOSTILE}2": 2.0}},
            status={"state": HOSTILE, "rounds": HOSTILE},
        )
        for m in "ab"
    ]  # fmt: skip
    text = written(runs, command=HOSTILE)
    page = parse(text)
    assert page.tags.count("script") == 1
    assert re.findall(r"(?s)<script>\n(.*)\n</script>", text) == [SCRIPT]
    assert "img" not in page.tags
    assert all(one.startswith(("#", "data:text/plain;")) for one in page.loads)
    assert "<" not in "".join(one for one in page.loads)
    assert any("alert('x')" in text for text in page.text)


@pytest.mark.full
@pytest.mark.usefixtures("words_only")
def test_mixed_experiments_have_sections_and_a_note(make_run, written):
    text = written([make_run("a", name="one"), make_run("a", name="two"), make_run("b", name="one")])
    assert "2 different experiments: one, two" in text
    assert text.count('<section class="experiment"') == text.count('<div class="card half">') == 2
    parse(text)


def test_rows_of_cards_are_full():
    """Thirds, halves or wholes that add up to whole rows, of two widths at most and never one alone among others."""
    parts = {"third": 2, "half": 3, "whole": 6}
    for count in range(1, 20):
        widths = card_widths(count)
        assert len(widths) == count
        assert sum(parts[width] for width in widths) == 6 * -(-count // 3)
        assert ("whole" in widths) is (count == 1)
    assert card_widths(5) == ["third"] * 3 + ["half"] * 2


def numbers_of(runs):
    """The texts of the card of runs, and all numbers in them."""
    card = state_headline(read_experiments(runs)[0].families)
    return card, re.findall(r"\d[\d.]*", " ".join(card).replace("95 % interval", ""))


@pytest.mark.usefixtures("words_only")
def test_a_card_has_one_number_and_its_interval(make_run, written):
    runs = [
        make_run(m, s, rounds=rounds_of([[0.1], [0.2 + 0.1 * s], [top + step * s]]))
        for m, top, step in (("x", 0.8, 0.01), ("y", 0.5, 0.012))
        for s in (0, 1, 2)
    ]
    card, numbers = numbers_of(runs)
    # Student's t with two degrees of freedom: 4.303 · 0.01 / √3 = 0.0248
    assert (card.best_methods, card.value, card.interval) == ("x", "81.0 %", "[78.5, 83.5]")
    assert card.measure == "highest mean test accuracy over seeds, with its 95 % interval"
    assert card.claim == "Significantly better than y."
    assert numbers == ["81.0", "78.5", "83.5"]
    card, numbers = numbers_of(runs[::3])
    assert (numbers, card.interval) == (["80.0"], "one seed")
    assert numbers_of([make_run("x", rounds=regression_of([[2.0, 2.0], [0.5, 0.7]]))])[1] == ["0.600"]
    assert "nothing to compare" in numbers_of([make_run("x", rounds=[])])[0].measure
    ends = {("a", 1): 0.5, ("a", 2): 0.8, ("a", 3): 0.6, ("b", 1): 0.7, ("b", 2): 0.2, ("b", 3): 0.3}
    sweep = [
        make_run(m, vary={"method.k": k}, rounds=rounds_of([[0.1], [end]])) for (m, k), end in ends.items()
    ]
    assert numbers_of(sweep)[0][:3] == ("a", "2 of 3", "settings")
    (shown,) = re.findall(r'(?s)<div class="card whole">\s*<div>(.*?)</div>', written(runs))
    parts = [one.strip() for one in re.sub(r"<[^>]*>", "|", shown).replace("\xa0", " ").split("|")]
    assert [one for one in parts if one] == list(state_headline(read_experiments(runs)[0].families))


@pytest.mark.usefixtures("words_only")
def test_warnings_are_folded_below_the_results(make_run, written):
    text = written([make_run("a", status={"state": "running", "rounds": 3}), make_run("b")])
    assert (
        text.index('class="value"') < text.index('<div class="main">') < text.index('<details class="note"')
    )
    (folded,) = re.findall(
        r'(?s)<details class="note" id="e0-warnings"><summary>(.*?)</summary>\s*(.*?)</details>', text
    )
    assert folded[0] == "1 warning"
    assert "stopped at round 3" in folded[1]
    assert '<a href="#e0-warnings">1 warning</a>' in text


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("titles", "expected"),
    [
        (["One"], "One"),
        (["One", "Two, too"], "One; Two, too"),
        (["One", "Two", "Three"], "One; Two; Three"),
        (["One", "Two", "Three", "Four", "Five"], "One; Two; Three; and 2 more"),
        (["One", "One"], "One"),
        (["One", None], "One; e1"),
    ],
)
@pytest.mark.usefixtures("words_only")
def test_title_names_the_experiments(make_run, written, titles, expected):
    text = written(_titled(make_run, titles))
    number = len(titles)
    assert f"<h1>{expected if number == 1 else f'{number} experiments'}</h1>" in text
    assert f"<title>{expected}</title>" in text


def _titled(make_run, titles):
    runs = [make_run("a", name=f"e{i}") for i in range(len(titles))]
    for run, title in zip(runs, titles, strict=True):
        run.config["title"] = title
    return runs


@pytest.mark.usefixtures("words_only")
def test_augmentation_and_adapters_are_settings(make_run, written):
    runs = [
        make_run("a", 0),
        make_run("a", 1, augment={"flip": True, "crop": 4}),
        make_run("a", 2, lora={"r": 4}),
    ]
    assert len(group_runs(runs)) == 3
    text = written(runs[1:2])
    assert "Training images are changed at random: flip true, crop 4." in text
    assert "augment.crop" in text


@pytest.mark.usefixtures("words_only")
def test_different_federations_under_one_name_are_noted(make_run, written):
    text = written([make_run("a"), make_run("b", partition={"kind": "dirichlet", "alpha": 0.1})])
    assert "The runs differ in more than their methods" in text
    assert "partition.kind" in text


@pytest.mark.usefixtures("words_only")
def test_what_a_varied_field_changes_is_no_other_difference(make_run, written):
    runs = [
        make_run(name, vary={"model.hidden": hidden}, models={"mlp": {"parameters": size}})
        for hidden, size in (("[8]", 67), ("[4, 4]", 55))
        for name in "ab"
    ]
    assert "The runs differ in more" not in written(runs)
    runs.append(make_run("c", vary={"model.hidden": "[8]"}, models={"mlp": {"parameters": 99}}))
    assert "The runs differ in more than their methods: models.mlp" in written(runs)


ODD = [
    [],
    [{"round": 0, "accuracy": None}],
    [{"round": 0, "accuracy": None, "parameters": None, "ranks": {"a": 3}, "server_metrics": {"energy": {}}}],
    [{"round": 1, "accuracy": {}, "client_losses": {}, "parameters": {}, "ranks": {}}],
    [{"round": 1, "training_losses": {"local": float("nan")}, "accuracy": {"global": {"test": [1.0]}}}],
    [{"round": 1, "accuracy": {"global": {"val": [1.0]}}}],
    [{"round": 1, "accuracy": None, "client_losses": {"g": {"val": [1.0]}}}],
    [
        {
            "round": 1,
            "participants": [0],
            "accuracy": {"g": {"test": [float("nan")]}},
            "parameters": {"g": [5]},
        }
    ],
    two_series([0.5], [0.4], ranks=[{"a": 3}]),
    rounds_of([[0.5]]),
    rounds_of([[0.5], [float("nan")]]),
    rounds_of([[None, 0.4], [None, None], [None, 0.6]]),
    regression_of([[None, None]]),
    regression_of([[float("nan"), 1.0]]),
    regression_of([[0.0, 0.0], [0.0, 0.0]]),
    regression_of([[3e38, 1.0], [1e-38, 1e-38]]),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("rows", ODD)
def test_odd_runs_make_a_page(make_run, written, rows):
    """Alone, beside a usual run, and as a language model with adapters."""
    parse(written([make_run("a", rounds=rows)]))
    parse(written([make_run("a", rounds=rows), make_run("b", rounds=rounds_of([[0.1, 0.2], [0.3, 0.4]]))]))
    ranked = [{**row, "rank": 4 - i} for i, row in enumerate(members(2))]
    language = {"path": "models/tiny", "task": "causal"}
    runs = [make_run("a", rounds=rows, clients=ranked, lora={"ranks": [4, 3]}, language=language, classes=[])]
    parse(written(runs))


@pytest.mark.full
def test_bare_configuration(make_run, written):
    bare = dict.fromkeys(("title", "method", "data", "partition", "split", "model", "versions", "classes"))
    run = make_run("a", rounds=rounds_of([[0.5], [0.6]]), clients=[], name="bare")
    run.config.update(bare)
    parse(written([run]))


@pytest.mark.full
def test_sweep_page(make_run, written):
    runs = [make_run(m, s, vary={"method.k": k}) for m in "ab" for k in (1, 2) for s in (0, 1)]
    text = written(runs)
    assert "Accuracy against k" in text
    assert "With k = 2" in text
    assert re.search(r"leads at \d of 2 settings", text)
    parse(text)


@pytest.mark.usefixtures("words_only")
def test_refusals(make_run, tmp_path):
    with pytest.raises(ConfigError, match="at least one run"):
        write_report([], tmp_path / "r.html")
    with pytest.raises(ConfigError, match="target"):
        write_report([make_run("a")], tmp_path / "r.html", target=90)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot make"):
        write_report([make_run("a")], tmp_path / "file" / "r.html")
    write_report([make_run("a")], tmp_path / "new" / "r.html")
    assert (tmp_path / "new" / "r.html").exists()
    assert not (tmp_path / "r.html").exists()


@pytest.mark.full
def test_a_report_is_written_where_the_encoding_of_the_system_is_ascii(make_run, tmp_path):
    folder = make_run("a", 0).folder
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "fedlowrank", "report", str(folder), "-o", str(tmp_path / "r.html")]
    actual = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert actual.returncode == 0, actual.stderr.decode()
    assert "±" in (tmp_path / "r.html").read_text(encoding="utf-8")
