"""The console on which commands print; it never reads markup in the text of users, and printing never ends a run."""

from __future__ import annotations

from typing import IO, Any, cast

from rich.console import Console

from ...core.io.streams import TolerantStream


class _Console(Console):
    """A console that breaks no word, cuts no line, and drops what cannot be written."""

    @property
    def file(self) -> IO[str]:
        """The stream to write to."""
        return cast("IO[str]", TolerantStream(cast("Any", super().file)))

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        """Print as Rich does, but leave a text unwrapped if a word, such as a path, is wider than the console."""
        if soft_wrap is None:
            words = [word for text in objects if isinstance(text, str) for word in text.split()]
            soft_wrap = any(len(word) > self.width for word in words)
        super().print(*objects, soft_wrap=soft_wrap, **{"crop": False, **options})


def console(*, stderr: bool = False) -> Console:
    """Make a console that prints text unchanged.

    Rich would otherwise drop ``[language]`` as a style and print ``:key:`` as a picture, also in tables and titles.

    Args:
        stderr: whether to print on the error stream.
    """
    return _Console(stderr=stderr, markup=False, emoji=False)
