"""The console on which commands print; the text of users is never taken for markup."""

from __future__ import annotations

from rich.console import Console


class _Console(Console):
    """A console that leaves a closed pipe to the command line."""

    def on_broken_pipe(self) -> None:
        """Instead of ending the process with an error."""
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is.

    Rich would else drop ``[language]`` as a style and print ``:key:`` as a picture, in tables and titles,
    too.

    Args:
        stderr: print on the error stream.
    """
    return _Console(stderr=stderr, markup=False, emoji=False)
