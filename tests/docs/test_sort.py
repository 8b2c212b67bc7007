"""The script that sorts tables of the site, run by Node with a table of rows and cells alone."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "images" / "sort.js"
HEADINGS = ["rank", "method", "accuracy, %", "MB"]
ROWS = [["1", "Ditto", "90.0 ± 1", "9"], ["2", "APFL", "–", "10"], ["3", "FedAvg", "−5.0", "2.5"]]
PAGE = """
const cell = (textContent) => ({ textContent, addEventListener(kind, then) { this[kind] = then; } });
const rows = ROWS.map((texts) => ({ cells: texts.map(cell) }));
const body = { rows, append(...sorted) { this.rows = sorted; } };
const headings = HEADINGS.map(cell);
globalThis.document = {
  querySelectorAll: () => [{ tBodies: [body], tHead: { rows: [{ cells: headings }] } }],
  addEventListener: (_, then) => then(),
};
SCRIPT
const shown = [headings.map((heading) => heading.ariaSort ?? null)];
for (const column of CLICKS) {
  headings[column].click();
  shown.push([headings[column].ariaSort, ...body.rows.map((row) => row.cells[1].textContent)]);
}
console.log(JSON.stringify(shown));
"""


def click(*columns: int) -> list[list[str | None]]:
    """Orders that headings state at first, then the order and the methods after each click."""
    page = PAGE.replace("ROWS", json.dumps(ROWS)).replace("HEADINGS", json.dumps(HEADINGS))
    page = page.replace("CLICKS", json.dumps(columns)).replace("SCRIPT", SCRIPT.read_text())
    done = subprocess.run(["node", "-e", page], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
class TestSort:
    def test_the_order_of_the_page_is_marked(self) -> None:
        assert click()[0] == ["ascending", None, None, None]

    def test_text_is_ascending_from_a_to_z(self) -> None:
        assert click(1, 1)[1:] == [
            ["ascending", "APFL", "Ditto", "FedAvg"],
            ["descending", "FedAvg", "Ditto", "APFL"],
        ]

    def test_best_first_and_cells_without_a_number_last_in_both_orders(self) -> None:
        assert click(2, 2)[1:] == [
            ["descending", "Ditto", "FedAvg", "APFL"],
            ["ascending", "FedAvg", "Ditto", "APFL"],
        ]

    def test_least_rank_and_cost_first(self) -> None:
        actual = click(3, 0)[1:]
        assert actual == [["ascending", "FedAvg", "Ditto", "APFL"], ["ascending", "Ditto", "APFL", "FedAvg"]]
