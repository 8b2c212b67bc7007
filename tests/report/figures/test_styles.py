"""One look a method, whatever the order of the runs, and fonts that publishers take."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from fedlowrank.report import save_figures, sort_runs
from fedlowrank.report.figures.gallery import method_styles
from fedlowrank.report.statistics.groups import group_runs

CSS = files("fedlowrank.report.formats").joinpath("page.css").read_text()


@pytest.mark.full
def test_looks_do_not_depend_on_the_order_of_the_runs(make_run):
    runs = [
        make_run(name, s)
        for name in ("fedproto", "of_my_own", "pfedlora", "another", "fedavg")
        for s in (1, 0)
    ]
    one, other = (method_styles(group_runs(some)) for some in (runs, runs[::-1]))
    assert one == other
    assert len(set(one.values())) == 5


@pytest.mark.full
def test_runs_come_in_the_order_of_their_experiment(make_run):
    made = {"compare": ["fedproto", "pfedlora", "fedavg"]}
    runs = [
        make_run(name, s, experiment=made) for name in ("fedavg", "fedproto", "pfedlora") for s in (10, 9)
    ]
    runs.insert(0, make_run("of_my_own", experiment=made))
    ordered = [(run.config["method"]["name"], run.config["run"]["seed"]) for run in sort_runs(runs)]
    assert ordered == [
        ("fedproto", 9), ("fedproto", 10), ("pfedlora", 9), ("pfedlora", 10), ("fedavg", 9), ("fedavg", 10),
        ("of_my_own", 0),
    ]  # fmt: skip


def assert_embedded(content: bytes) -> None:
    """The fonts of a PDF are TrueType programs within it, and none is of Type 3."""
    kinds = set(re.findall(rb"/Subtype\s*/(Type0|Type1|Type3|TrueType|CIDFontType\d)", content))
    assert b"Type3" not in kinds
    assert kinds & {b"CIDFontType2", b"TrueType"}
    assert b"/FontFile2" in content


@pytest.mark.full
def test_figures_for_a_paper_embed_truetype_fonts(make_run, tmp_path):
    made = save_figures([make_run("pfedlora"), make_run("fedavg")], tmp_path, ("pdf",))
    assert made
    for path in made:
        assert_embedded(path.read_bytes())


def test_only_what_has_no_word_to_break_at_breaks_anywhere():
    """``anywhere`` lets a narrow column break "gamma" into "gamm" and "a"."""
    rules = re.findall(r"([^{}]+)\{[^{}]*overflow-wrap:anywhere", CSS)
    assert [rule.strip() for rule in rules] == [".settings td"]
