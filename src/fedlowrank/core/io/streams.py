"""Standard streams that end no run if they cannot be written."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast


class TolerantStream:
    """A stream that drops its text once it cannot be written: its reader is gone, or the disk is full.

    A character that the encoding of the stream lacks is written as a question mark.

    Args:
        stream: stream to write to; None if the process has none.

    Attributes:
        error: first error of the stream; None if everything was written.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream, self.error = stream, cast("OSError | None", None)

    def write(self, text: str) -> int:
        """Write a text, or drop it; returns its length."""
        if self._stream is not None:
            self._attempt(self._write_encodable, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts, or drop them."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        if self._stream is not None:
            self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        if name == "_stream":  # of a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self._stream, name)

    def _attempt(self, action: Callable[..., Any], *arguments: Any) -> None:
        try:
            action(*arguments)
        except OSError as error:
            self.error = self.error or error
            # the buffer is written again at the end of the process, and must not fail there
            with contextlib.suppress(OSError), Path(os.devnull).open("wb") as null_file:
                os.dup2(null_file.fileno(), self.fileno())
                self.flush()

    def _write_encodable(self, text: str) -> None:
        assert self._stream is not None
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:
            self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))


@contextlib.contextmanager
def tolerant_streams() -> Iterator[tuple[TolerantStream, TolerantStream]]:
    """Replace the standard output and error streams by tolerant ones within the block.

    A stream that the process lacks stays None in ``sys``, because libraries ask for it.
    """
    streams = sys.stdout, sys.stderr
    tolerant = TolerantStream(sys.stdout), TolerantStream(sys.stderr)
    sys.stdout, sys.stderr = (
        cast("TextIO", None if stream is None else wrapper)
        for stream, wrapper in zip(streams, tolerant, strict=True)
    )
    try:
        yield tolerant
    finally:
        for stream in tolerant:
            stream.flush()
        sys.stdout, sys.stderr = streams
