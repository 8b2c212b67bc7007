"""The page on paper."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.resources import files

import pytest
from report_runs import page_of

CSS = files("fedlowrank.report").joinpath("page.css").read_text()
BROWSER = (
    "chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --no-pdf-header-footer"
)


def test_closed_settings_stay_closed_on_paper():
    paper = CSS[CSS.index("@media print") :]
    assert "details-content" not in paper
    assert "details:not([open]){display:none}" in paper


def test_only_what_has_no_word_to_break_at_breaks_anywhere():
    """``anywhere`` lets a narrow column break "gamma" into "gamm" and "a"."""
    rules = re.findall(r"([^{}]+)\{[^{}]*overflow-wrap:anywhere", CSS)
    assert [rule.strip() for rule in rules] == [".settings td"]


@pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("pdftotext")),
    reason="needs chromium and pdftotext (poppler-utils)",
)
@pytest.mark.parametrize("opened", [False, True])
def test_a_browser_prints_open_settings_alone_and_whole_words(make_run, tmp_path, opened):
    fields = {"adapter_optimizer": None, "gamma": 1.0, "kind": {"schedule": list(range(60))}}
    text = page_of([make_run(m, fields=fields) for m in ("pfedlora", "fedavg")], tmp_path)
    if opened:
        text = text.replace("<details>", "<details open>")
    (tmp_path / "page.html").write_text(text)
    common = {"check": True, "capture_output": True, "timeout": 60, "cwd": tmp_path}
    subprocess.run(
        [
            *BROWSER.split(),
            f"--user-data-dir={tmp_path / 'u'}",
            "--print-to-pdf=page.pdf",
            str(tmp_path / "page.html"),
        ],
        **common,
    )
    printed = subprocess.run(["pdftotext", "-layout", "page.pdf", "-"], text=True, **common).stdout
    words = set(printed.split())
    assert {"Comparison", "Settings", "pfedlora"} <= words
    assert ({"adapter_optimizer", "gamma"} <= words) is opened
    assert ("The authors of" in printed) is opened
