"""What a reader can click, print and see, in a real Chromium without a window."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.report.report_runs import page_of, rounds_of

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), ""
)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not BROWSER, reason="needs Chromium or Chrome on the PATH"),
]

TOOLS = """
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const table = document.querySelector(".summary table");
const head = (title) => all("thead th", table).find((one) => one.textContent.startsWith(title));
const rows = () => all("tbody th", table).map((one) => one.textContent).join("");
const wait = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));
"""
"""What the scripts of the tests share."""


def run_in_page(page: Path, script: str, *, dark: bool = False, width: int = 1280) -> Any:
    """What an asynchronous script returns that runs after the page's own, in a frame of that width."""
    after = (
        f"<script>(async () => {{ {TOOLS} {script} }})().then((value) => top.postMessage({{value}}, '*'),"
        " (error) => top.postMessage({value: String(error)}, '*'))</script></body>"
    )
    inner = page.with_name("inner.html")
    inner.write_text(page.read_text().replace("</body>", after))
    outer = page.with_name("outer.html")
    outer.write_text(
        f"<body style='margin:0'><iframe src='inner.html' style='border:0;width:{width}px;height:900px'></iframe>"
        "<pre></pre><script>addEventListener('message', (event) =>"
        " { document.querySelector('pre').textContent = JSON.stringify(event.data.value); })</script>"
    )
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    profile = f"--user-data-dir={page.parent / 'profile'}"
    size = ["--window-size=1400,1000", "--virtual-time-budget=60000", "--dump-dom"]
    command = [BROWSER, *OPTIONS, scheme, profile, *size, outer.as_uri()]
    shown = subprocess.run(command, check=True, capture_output=True, timeout=120, text=True).stdout
    (actual,) = re.findall(r"(?s)<pre>(.*)</pre>", shown)
    assert actual, "the script has not ended"
    value = json.loads(html.unescape(actual))
    assert not (isinstance(value, str) and "Error" in value), value
    return value


@pytest.fixture
def page(make_run, tmp_path):
    """A report of four methods: a ≥ 93 % in four of five seeds and 0.9 kB, b 60 % and 20 kB, c 91 % and 3 MB, and
    d without evaluation."""
    finals = {"a": (0.95, 0.67, 0.94, 0.93, 0.955), "b": (0.6,) * 5, "c": (0.91,) * 5, "d": (None,) * 5}
    runs = []
    for (name, values), sent in zip(finals.items(), (900, 20_000, 3_000_000, 5), strict=True):
        for seed, final in enumerate(values):
            rows = rounds_of([[0.1] * 2, [0.3] * 2, [final] * 2])
            for row in rows:
                row["bytes_up"], row["bytes_down"] = sent * (row["round"] == 1), 0
                if final is None:
                    row["accuracy"] = None
            runs.append(make_run(name, seed, rounds=rows))
    page_of(runs, tmp_path)
    return tmp_path / "r.html"


def test_a_click_on_a_heading_sorts_the_table(page):
    """From the largest down, then up; numbers by their size with prefix, success rates by their result; – last."""
    actual = run_in_page(
        page,
        """
        const seen = {before: rows()};
        for (const [name, title] of [["sent", "sent"], ["result", "test accuracy"], ["gap", "minus the best"]]) {
          head(title).click(); seen[name] = rows();
          seen[name + "Sort"] = head(title).getAttribute("aria-sort");
          head(title).click(); seen[name + "Up"] = rows();
        }
        head("method").dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"})); seen.key = rows();
        seen.marked = all("[aria-sort]", table).length;
        seen.cells = all("tbody tr", table).map((row) => row.textContent.startsWith(row.cells[0].textContent));
        return seen;
        """,
    )
    assert actual == {
        "before": "abcd",
        "sent": "cbad",
        "sentSort": "descending",
        "sentUp": "dabc",
        "result": "acbd",
        "resultSort": "descending",
        "resultUp": "bcad",
        "gap": "cabd",
        "gapSort": "descending",
        "gapUp": "bacd",
        "key": "dcba",
        "marked": 1,
        "cells": [True] * 4,
    }


def test_folded_parts_open_by_a_click_a_link_and_the_printer(page):
    actual = run_in_page(
        page,
        """
        const isOpen = (id) => document.getElementById(id).open, seen = {};
        seen.start = all("main details[open]").length;
        document.querySelector("#e0-tables > summary").click();
        seen.click = isOpen("e0-tables");
        document.querySelector("#e0-tables > summary").click();
        seen.again = isOpen("e0-tables");
        document.querySelector(".side a[href='#e0-figures']").click(); await wait(0.3);
        seen.link = isOpen("e0-figures");
        seen.place = document.getElementById("e0-figures").getBoundingClientRect().top;
        document.querySelector(".card a[href='#e0-warnings']").click(); await wait(0.3);
        seen.warnings = isOpen("e0-warnings") && document.querySelector("#e0-warnings li").offsetHeight > 0;
        dispatchEvent(new Event("beforeprint"));
        seen.closedInPrint = all("main details:not([open])").length;
        dispatchEvent(new Event("afterprint"));
        seen.afterPrint = [isOpen("e0-figures"), isOpen("e0-tables"), isOpen("e0-settings")];
        return seen;
        """,
    )
    place = actual.pop("place")
    assert actual == {
        "start": 0, "click": True, "again": False, "link": True, "warnings": True, "closedInPrint": 0,
        "afterPrint": [True, False, False],
    }  # fmt: skip
    assert 0 <= place < 100


def test_the_pointer_shows_values(page):
    """Where a marker is, the topmost element under the pointer carries the value as its title."""
    actual = run_in_page(
        page,
        """
        const figure = document.querySelector(".card figure"), seen = [];
        figure.scrollIntoView();
        for (const tip of all("circle[pointer-events]", figure)) {
          const box = tip.getBoundingClientRect();
          const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
          seen.push([tip.querySelector("title").textContent, top === tip, box.width]);
        }
        return seen;
        """,
    )
    assert {text for text, *_ in actual} == {"a: 4 of 5 ≥ 93.00", "b: 60.00 ± 0.00", "c: 91.00 ± 0.00"}
    assert all(is_on_top and width > 4 for _, is_on_top, width in actual)


def test_figures_and_tables_are_downloaded(page):
    """A figure as SVG without references to the page and as PNG with 300 dots an inch; tables as they were written."""
    actual = run_in_page(
        page,
        """
        // Reading of blobs and toBlob take real time, for which the virtual time of this page does not wait.
        const seen = {}, blobs = {};
        window.Blob = class extends Blob { constructor(parts, kind) { super(parts, kind); this.content = parts[0]; } };
        HTMLCanvasElement.prototype.toBlob = function (done) {
          done(new Blob([atob(this.toDataURL().split(",")[1])], {type: "image/png"}));
        };
        URL.createObjectURL = (blob) => { blobs[blob.type] = blob; return "#"; };
        HTMLAnchorElement.prototype.click = function () { blobs[this.download] = Object.values(blobs).at(-1); };
        const buttons = all("button.save", document.querySelector(".main figure"));
        seen.buttons = buttons.map((one) => one.textContent);
        for (const button of buttons) {
          const before = Object.keys(blobs).length;
          button.onclick();
          for (let i = 0; i < 100 && Object.keys(blobs).length === before; i++) await wait(0.1);
        }
        seen.names = Object.keys(blobs).filter((name) => name.includes("."));
        seen.svg = blobs["accuracy-over-rounds.svg"].content;
        seen.png = [...blobs["accuracy-over-rounds.png"].content.slice(0, 20)].map((one) => one.charCodeAt(0));
        seen.tables = all("#reproduce a[download]").map((one) => [one.download, one.href.split(",", 2)[1]]);
        return seen;
        """,
    )
    assert actual["buttons"] == ["SVG", "PNG"]
    assert actual["names"] == ["accuracy-over-rounds.svg", "accuracy-over-rounds.png"]
    assert bytes(actual["png"][1:4]) == b"PNG"
    assert int.from_bytes(actual["png"][16:20], "big") == round(5.3 * 300)
    svg = actual["svg"]
    assert svg.startswith("<svg ")
    assert float(re.findall(r' width="([0-9.]+)pt"', svg)[0]) == pytest.approx(72 * 5.3)
    assert not re.search(r"var\(|currentColor|pointer-events", svg)
    assert "#1b1f24" in svg
    tables = {name: unquote(text) for name, text in actual["tables"]}
    for kind in ("csv", "md"):
        assert tables[f"report.{kind}"] == page.with_suffix(f".{kind}").read_text()


LOOK = """
const rgb = (text) => text.match(/[0-9.]+/g).map(Number);
const linear = (x) => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
const light = (text) => rgb(text).slice(0, 3).map((x) => linear(x / 255))
  .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
const paper = getComputedStyle(document.body).backgroundColor, seen = {paper: light(paper)};
for (const part of all("details")) part.open = true;
const texts = ["h1", ".value b", ".value span", ".what", ".claim", ".card a", "td", ".finding", "figcaption", ".side a", ".sub"];
seen.least = Math.min(...texts.map((one) => contrast(getComputedStyle(document.querySelector(one)).color, paper)));
const note = document.querySelector(".note");
seen.note = contrast(getComputedStyle(note).color, getComputedStyle(note).backgroundColor);
const label = document.querySelector(".card svg text");
seen.label = contrast(getComputedStyle(label).fill, paper);
const marks = all(".card svg [style*='fill:var']").map((one) => getComputedStyle(one).fill);
seen.marks = Math.min(...marks.map((one) => contrast(one, paper)));
return seen;
"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_figures_are_legible_in_both_modes(page, dark):
    """Contrasts that the Web Content Accessibility Guidelines ask for: 4.5 of text, 3 of marks in figures."""
    actual = run_in_page(page, LOOK, dark=dark)
    assert (actual["paper"] < 0.05) is dark
    assert min(actual["least"], actual["note"], actual["label"]) >= 4.5
    assert actual["marks"] >= 3


def test_cards_are_an_even_grid_and_nothing_is_cut(make_run, tmp_path):
    """Rows of cards end at the right edge, all have one height, and the page does not scroll sideways."""
    runs = [
        make_run(m, name=f"e{i}", rounds=rounds_of([[0.1], [0.5 + 0.01 * i]]))
        for i in range(5)
        for m in "abc"[: 1 + i % 3]
    ]
    for run in runs:
        run.config["title"] = f"Experiment {run.config['name']}" + " with a long title" * (
            run.config["name"] == "e1"
        )
    page_of(runs, tmp_path)
    for width, expected in ((1280, [3, 2]), (800, [2, 2, 1]), (390, [1] * 5)):
        actual = run_in_page(tmp_path / "r.html", BOXES, width=width)
        assert actual["seen"] == width
        assert actual["wide"] <= width
        assert actual["inside"]
        rows: dict[float, list[tuple[float, float]]] = {}
        for left, top, right, _ in actual["cards"]:
            rows.setdefault(top, []).append((left, right))
        assert [len(row) for row in rows.values()] == expected
        for row in rows.values():
            assert abs(row[0][0] - actual["grid"][0]) < 1
            assert abs(row[-1][1] - actual["grid"][2]) < 1
        heights = [height for *_, height in actual["cards"]]
        assert width == 390 or max(heights) - min(heights) < 1


BOXES = """
const box = (one) => { const b = one.getBoundingClientRect(); return [b.left, b.top, b.right, b.height]; };
return {cards: all(".card").map(box), grid: box(document.querySelector(".cards")),
        wide: document.documentElement.scrollWidth, seen: innerWidth,
        inside: all(".card").every((one) => one.scrollWidth <= one.clientWidth)};
"""


@pytest.mark.skipif(not shutil.which("pdftotext"), reason="needs pdftotext (poppler-utils)")
def test_folded_parts_and_whole_words_are_printed(make_run, tmp_path):
    fields = {"adapter_optimizer": None, "gamma": 1.0, "kind": {"schedule": list(range(60))}}
    page_of([make_run(m, fields=fields) for m in ("pfedlora", "fedavg")], tmp_path)
    common: dict[str, Any] = {"check": True, "capture_output": True, "timeout": 120, "cwd": tmp_path}
    out = ["--no-pdf-header-footer", f"--user-data-dir={tmp_path}/profile", "--print-to-pdf=page.pdf"]
    subprocess.run([BROWSER, *OPTIONS, *out, f"{tmp_path}/r.html"], **common)
    printed = subprocess.run(["pdftotext", "-layout", "page.pdf", "-"], text=True, **common).stdout
    assert {"Details", "Settings", "pfedlora", "adapter_optimizer", "gamma"} <= set(printed.split())
    assert "The authors of" in printed
    assert "Contents" not in printed
