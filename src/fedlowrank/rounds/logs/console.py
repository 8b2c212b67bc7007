"""The console on which commands print; it never reads markup in the text of users."""

from __future__ import annotations

from rich.console import Console


class _Console(Console):
    """A console that raises an error for a closed pipe, which the command line handles."""

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
