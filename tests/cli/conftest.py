from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedlowrank.cli.terminal import OUT

torch.set_num_threads(1)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test runs in a folder of its own, wide enough a terminal, and leaves signals and imports as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    # the console reads the variable when it is made, which another test may have done before
    monkeypatch.setattr(OUT, "_width", 200)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before, modules = {number: signal.getsignal(number) for number in SIGNALS}, set(sys.modules)
    # a shell starts jobs in the background with interrupts ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the figures out of reports, which take most of the time of ``compare``, where a test is not about them."""
    monkeypatch.setattr("fedlowrank.report.formats.page.draw_all", lambda groups, styles: [])
