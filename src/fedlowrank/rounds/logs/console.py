"""The console on which commands print; it never reads markup in the text of users."""

from __future__ import annotations

from typing import Any

from rich.console import Console


class _Console(Console):
    """A console that breaks no word, and raises an error for a closed pipe, which the command line handles."""

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        """Print as Rich does, but leave a text unwrapped if a word, such as a path, is wider than the console."""
        if soft_wrap is None:
            words = [word for text in objects if isinstance(text, str) for word in text.split()]
            soft_wrap = any(len(word) > self.width for word in words)
        super().print(*objects, soft_wrap=soft_wrap, **options)

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError instead of ending the process."""
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """Make a console that prints text unchanged.

    Rich would otherwise drop ``[language]`` as a style and print ``:key:`` as a picture, also in tables and titles.

    Args:
        stderr: whether to print on the error stream.
    """
    return _Console(stderr=stderr, markup=False, emoji=False)
