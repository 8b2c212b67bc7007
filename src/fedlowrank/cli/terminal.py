"""What all commands share: the console, lines on the way, and what to type after an interrupt."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..simulation.terminal import console

OUT = console()
_resuming: list[str] = []


def say(text: str) -> None:
    """Print a line on the way."""
    OUT.print(text, style="dim", highlight=False)


def hint() -> str:
    """What to do after an interrupt."""
    return f"Go on with: {_resuming[-1]}" if _resuming else "Nothing is lost; start it again to go on."


@contextlib.contextmanager
def resumed_by(command: str) -> Iterator[None]:
    """Name the command that goes on after an interrupt of the block."""
    _resuming.append(command)
    yield
    # not after an interrupt, which the hint follows
    _resuming.pop()
