"""One look a method, whatever the order of the runs, fonts that publishers take, and the page on paper."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.resources import files

import pytest
from report_runs import page_of, rounds_of

from fedlowrank.report import in_order, save_figures
from fedlowrank.report.gallery import method_styles
from fedlowrank.report.groups import group_runs

CSS = files("fedlowrank.report").joinpath("page.css").read_text()
BROWSER = (
    "chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --no-pdf-header-footer"
)


def test_looks_do_not_depend_on_the_order_of_the_runs(make_run):
    runs = [
        make_run(name, s)
        for name in ("fedproto", "of_my_own", "pfedlora", "another", "fedavg")
        for s in (1, 0)
    ]
    one, other = (method_styles(group_runs(some)) for some in (runs, runs[::-1]))
    assert one == other
    assert len(set(one.values())) == 5


def test_runs_come_in_the_order_of_their_experiment(make_run):
    made = {"compare": ["fedproto", "pfedlora", "fedavg"]}
    runs = [
        make_run(name, s, experiment=made) for name in ("fedavg", "fedproto", "pfedlora") for s in (10, 9)
    ]
    runs.insert(0, make_run("of_my_own", experiment=made))
    ordered = [(run.config["method"]["name"], run.config["run"]["seed"]) for run in in_order(runs)]
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


def test_figures_for_a_paper_embed_truetype_fonts(make_run, tmp_path):
    made = save_figures([make_run("pfedlora"), make_run("fedavg")], tmp_path, ("pdf",))
    assert made
    for path in made:
        assert_embedded(path.read_bytes())


def test_only_what_has_no_word_to_break_at_breaks_anywhere():
    """``anywhere`` lets a narrow column break "gamma" into "gamm" and "a"."""
    rules = re.findall(r"([^{}]+)\{[^{}]*overflow-wrap:anywhere", CSS)
    assert [rule.strip() for rule in rules] == [".settings td"]


@pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("pdftotext")),
    reason="needs chromium and pdftotext (poppler-utils)",
)
def test_a_browser_prints_folded_parts_and_whole_words(make_run, tmp_path):
    fields = {"adapter_optimizer": None, "gamma": 1.0, "kind": {"schedule": list(range(60))}}
    page_of([make_run(m, fields=fields) for m in ("pfedlora", "fedavg")], tmp_path)
    common = {"check": True, "capture_output": True, "timeout": 60, "cwd": tmp_path}
    command = [
        *BROWSER.split(),
        f"--user-data-dir={tmp_path}/u",
        "--print-to-pdf=page.pdf",
        f"{tmp_path}/r.html",
    ]
    subprocess.run(command, **common)
    printed = subprocess.run(["pdftotext", "-layout", "page.pdf", "-"], text=True, **common).stdout
    assert {"Results", "Settings", "pfedlora", "adapter_optimizer", "gamma"} <= set(printed.split())
    assert "The authors of" in printed
    assert "Contents" not in printed


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_the_script_of_the_page_sorts_tables_and_saves_figures(make_run, tmp_path):
    """One click on a heading sorts from the largest down, numbers by their size with prefix; a PNG has 300 dpi."""
    sent = {"a": 900, "b": 20_000, "c": 3_000_000}
    runs = []
    for name, size in sent.items():
        rows = rounds_of([[0.1], [0.5]])
        rows[1]["bytes_up"], rows[1]["bytes_down"] = size, 0
        runs.append(make_run(name, rounds=rows))
    text = page_of(runs, tmp_path)
    click = (
        "<script>for (const head of document.querySelectorAll('.summary th'))"
        " if (head.textContent == 'sent') head.onclick();"
        "document.title = [...document.querySelectorAll('.summary tbody th')].map((x) => x.textContent).join('');"
        # the width stands at byte 16 of a PNG
        "download = (figure, blob, ending) => blob.slice(0, 24).arrayBuffer().then((head) => {"
        "document.body.dataset.saved = ending + ' ' + new DataView(head).getUint32(16); });"
        "[...document.querySelector('.main figure').querySelectorAll('button')].at(-1).click();"
        "</script></body>"
    )
    (tmp_path / "page.html").write_text(text.replace("</body>", click))
    user = f"--user-data-dir={tmp_path}/u"
    command = [*BROWSER.split(), user, "--virtual-time-budget=5000", "--dump-dom", f"{tmp_path}/page.html"]
    shown = subprocess.run(command, check=True, capture_output=True, timeout=60, text=True).stdout
    assert "<title>cba</title>" in shown
    assert f'data-saved=".png {round(5.3 * 300)}"' in shown
