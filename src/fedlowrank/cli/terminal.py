"""What all commands share: the console, lines on the way, and what to type after an interrupt."""

from __future__ import annotations

import re

from ..rounds.logs.console import console

OUT = console()

INTERRUPT_HINTS = ["Nothing is lost; start it again to go on."]
"""What to do after an interrupt; the last one counts."""


def say(text: str) -> None:
    """Print a line on the way."""
    OUT.print(text, style="dim", highlight=False)


def strip_markup(text: str) -> str:
    """Text of a docstring without reStructuredText's double backticks and roles."""
    return re.sub(r":\w+:`~?([^`]*)`", r"\1", text).replace("``", "")
