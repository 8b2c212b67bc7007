"""Each row of the threat model names tests, and these exist."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "threat-model.md", ROOT / "docs" / "results" / "network-attacks.md")
NAME = re.compile(r"`([\w/]+\.py)::([\w:]+)`")


def rows(text: str) -> Iterator[list[str]]:
    """Cells of each row of the tables whose last column is ``test``."""
    expected = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            expected = False
        elif cells[-1] == "test":
            expected = True
        elif expected and not cells[-1].startswith(":-"):
            yield cells


@functools.cache
def defined(path: Path) -> set[str]:
    """Tests of a file, those of a class as ``Class::function``."""
    actual = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            actual |= {f"{node.name}::{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            actual.add(node.name)
    return {name for name in actual if name.split("::")[-1].startswith("test_")}


def missing(text: str) -> list[str]:
    """Rows without a test, rows of another number of cells than the first, and tests that do not exist."""
    actual, cells = [], list(rows(text))
    for row in cells:
        if not NAME.search(row[-1]):
            actual.append(f"no test: {row[0]}")
        if len(row) != len(cells[0]):
            actual.append(f"{len(row)} cells: {row[0]}")
    for place, name in NAME.findall(text):
        paths = [ROOT / place] if "/" in place else [*(ROOT / "tests" / "network").rglob(place)]
        if len(paths) != 1 or not paths[0].is_file() or name not in defined(paths[0]):
            actual.append(f"{place}::{name}")
    return actual


def test_every_row_names_tests_that_exist() -> None:
    text = PAGES[0].read_text()
    assert missing(text) == []
    # each party has a table
    assert len(re.findall(r"^\| attack \| by default", text, re.MULTILINE)) == 5
    assert len(list(rows(text))) > 40
    assert len(text.splitlines()) <= 120


def test_tests_that_are_named_beside_the_figures_exist() -> None:
    assert missing(PAGES[1].read_text()) == []
    assert len(NAME.findall(PAGES[1].read_text())) >= 4


@pytest.mark.parametrize(
    ("last", "found"),
    [
        ("`test_gate.py::test_a_client_gives_no_orders_to_another`", []),
        ("`test_secure_protocol.py::TestLies::test_one_vector_is_masked_once`", []),
        ("", ["no test: a lie"]),
        ("a test that will be written", ["no test: a lie"]),
        ("`test_gate.py::test_nothing`", ["test_gate.py::test_nothing"]),
        ("`test_nothing.py::test_a`", ["test_nothing.py::test_a"]),
        ("`test_gate.py::reply_of`", ["test_gate.py::reply_of"]),
        ("`test_secure_protocol.py::test_one_vector_is_masked_once`",
         ["test_secure_protocol.py::test_one_vector_is_masked_once"]),
        ("| `test_gate.py::test_a_client_gives_no_orders_to_another`", ["3 cells: a lie"]),
    ],
)  # fmt: skip
def test_what_is_missing_is_found(last: str, found: list[str]) -> None:
    good = "`test_gate.py::test_a_client_gives_no_orders_to_another`"
    table = ["| tries | test |", "| :--- | :--- |", f"| a | {good} |", f"| a lie | {last} |"]
    assert missing("\n".join(table)) == found
