"""The page "Which method?" begins with a table, and each number in it is in the section that its row links to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedlowrank.methods import METHODS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "which-method.md").read_text()
TITLE, TABLE = PAGE.split("\n\n")[:2]
ROWS = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in TABLE.splitlines()]
LINK = re.compile(r"\[([^\]]+)\]\(([^)#]*)#?([^)]*)\)")


def slug(title: str) -> str:
    """The anchor of a heading, as Python-Markdown's `toc` makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def section(path: str, anchor: str) -> str:
    """The text of a page below the heading of an anchor, up to the next heading."""
    parts = re.split(r"^#+ (.*)\n", (DOCS / path).read_text(), flags=re.MULTILINE)
    actual = {slug(title): text for title, text in zip(parts[1::2], parts[2::2], strict=True)}
    assert anchor in actual, f"{path} has no heading #{anchor}"
    return actual[anchor]


def test_the_page_begins_with_a_table_of_situations() -> None:
    assert TITLE == "# Which method?"
    assert ROWS[0] == ["your situation", "first choice", "simple baseline", "evidence"]
    assert {len(row) for row in ROWS} == {4}
    assert len(ROWS) > 10
    # each situation leads to its section of this page
    for situation, *_ in ROWS[2:]:
        ((_, path, anchor),) = LINK.findall(situation)
        assert path == ""
        assert section("which-method.md", anchor)
    # each section that advises is led to
    sections = {slug(title) for title in re.findall(r"^## (.*)", PAGE, re.MULTILINE)}
    assert sections - {LINK.findall(row[0])[0][2] for row in ROWS[2:]} == {"before-anything-else"}


def test_a_column_of_personal_models_has_one_experiment() -> None:
    """A cell is that of the method in the section of the column's experiment."""
    table = section("which-method.md", "personal-models").split("| method | MNIST, 15 seeds | CIFAR-10")[1]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]*) \| ([^|]*)\|$", table, flags=re.MULTILINE)
    assert len(rows) > 5
    for method, *own in rows:
        for anchor, cell in zip(("skewed-clients-with-15-seeds", "cifar-10"), own, strict=True):
            if cell.strip():
                row = rf"^\| {re.escape(method)}(?: \(1 seed diverged\))? \| [^|]+ \| {re.escape(cell.strip())} \|"
                assert re.search(row, section("results/fedslr.md", anchor), re.MULTILINE), (method, cell)


def test_the_losses_of_a_language_model_are_those_of_its_section() -> None:
    known = section("results/fedhl.md", "dolly-with-a-llama-of-260-thousand-parameters")
    cells = re.findall(
        r"^\| (\w+) \| .* \| (−0\.\d+ \[.*\]) \|$", section("which-method.md", "lora"), flags=re.MULTILINE
    )
    assert [method for method, _ in cells] == ["FLoRA", "FlexLoRA", "FedHL"]
    for method, cell in cells:
        (row,) = re.findall(rf"^\| {method} \| .*", known, flags=re.MULTILINE)
        assert row.split(" | ")[5] == cell  # the server's model minus zero padding's


@pytest.mark.parametrize("row", ROWS[2:], ids=[LINK.findall(row[0])[0][0] for row in ROWS[2:]])
def test_each_number_is_in_the_section_beside_it(row: list[str]) -> None:
    _, choice, baseline, evidence = row
    methods = {Path(path).stem for _, path, _ in LINK.findall(choice + baseline)}
    assert methods
    assert methods <= METHODS.keys()
    assert evidence.startswith("[")
    # the numbers after a link, up to the next
    parts = LINK.split(evidence)[1:]
    for path, anchor, text in zip(parts[1::4], parts[2::4], parts[3::4], strict=True):
        known = section(path, anchor)
        numbers = re.findall(r"\d+\.\d ± \d+\.\d|\d+(?:[.,]\d+)+", text)
        assert numbers
        for number in numbers:
            actual = rf"(?<![\d.,]){re.escape(number)}(?!\d)"
            assert re.search(actual, known), f"{number} is not in {path}#{anchor}"
