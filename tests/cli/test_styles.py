"""What the commands draw: one look a method, and fonts that publishers take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedlowrank.rounds.logs.console import console
from tests.cli.small_experiment import SMALL, done, write

Capsys = pytest.CaptureFixture[str]


def looks_in(page: str) -> dict[str, str]:
    """The drawings of a page, by the first sentence of what they show."""
    figures = re.findall(r'aria-label="([^"]*)">(<svg.*?</svg>)', page, re.DOTALL)
    return {alt.split(".")[0]: drawn for alt, drawn in figures}


@pytest.mark.full
def test_a_method_looks_alike_in_compare_and_report(capsys: Capsys) -> None:
    file = write(Path(), SMALL.replace('["standalone", "fedavg"]', '["standalone", "pfedlora", "fedavg"]'))
    done(capsys, "compare", file)
    by_compare = Path("runs/small/report.html").read_text()
    done(capsys, "report", "runs/small", "-o", "all.html", "--figures", "all")
    by_report = Path("all.html").read_text()
    drawn = [looks_in(page) for page in (by_compare, by_report)]
    assert "Line chart of test accuracy against rounds for 3 methods" in drawn[0]
    assert drawn[0] == drawn[1]
    # the files for a paper have the page's colors, there in the palette's own codes
    lines = drawn[0]["Line chart of test accuracy against rounds for 3 methods"]
    page = set(re.findall(r"stroke:var\(--s\d+,(#\w{6})\)", lines))
    alone = set(re.findall(r"stroke: (#\w{6})", Path("all/accuracy-over-rounds.svg").read_text()))
    assert len(page) == 3
    assert page <= alone


def test_the_picture_of_the_data_embeds_truetype_fonts(capsys: Capsys) -> None:
    done(capsys, "data", write(Path()), "-o", "data.pdf")
    content = Path("data.pdf").read_bytes()
    assert not re.search(rb"/Subtype\s*/Type3", content)
    assert b"/FontFile2" in content


def test_a_path_wider_than_the_terminal_can_be_copied(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path, words = f"/{'folder/' * 20}model.safetensors", "a warning of many words " * 8
    for text in (f"run folder: {path}", words):
        console().print(text)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"run folder: {path}"
    assert len(shown) == 4
    assert max(map(len, shown[1:])) <= 80
