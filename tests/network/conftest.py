"""Fixtures of the tests of the network."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    """Capture what the command line prints while a run goes on."""
    caplog.set_level("INFO", "fedlowrank")
