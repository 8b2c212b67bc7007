"""Parts that all commands share: the console, progress messages, and the advice after an interrupt."""

from __future__ import annotations

import re

from ..rounds.logs.console import console

OUT = console()

INTERRUPT_HINTS = ["Nothing is lost; start it again to go on."]
"""Advice after an interrupt; the last entry is printed."""


def say(text: str) -> None:
    """Print a progress message."""
    OUT.print(text, style="dim", highlight=False)


def strip_markup(text: str) -> str:
    """Remove reStructuredText's double backticks and roles from the text of a docstring."""
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", text).replace("``", "")
