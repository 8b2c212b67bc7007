"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CheckpointError

J = TypeVar("J", dict[str, Any], list[Any])


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file whole or not at all: temporary file, fsync, rename, fsync of the folder.

    Args:
        path: of the file.
        data: what it is to hold, whole or in parts.

    Raises:
        CheckpointError: if the disk is full or the folder cannot be written; the old file is then untouched.
    """
    temporary_path = path.with_name(path.name + ".part")
    with as_checkpoint_error(f"cannot write {path}"):
        try:
            with temporary_path.open("wb") as file:
                for chunk in [data] if isinstance(data, bytes) else data:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            temporary_path.replace(path)
            sync_folder(path.parent)
        except (OSError, CheckpointError):
            # a disk that cannot write may not remove either; the first error is the one to tell
            with contextlib.suppress(OSError):
                temporary_path.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def as_checkpoint_error(action: str) -> Iterator[None]:
    """Turn errors of the disk within the block into a :class:`CheckpointError` that names the action."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{action}: {error.strerror or error}") from error


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


def append_event(path: Path | None, event: str, **fields: Any) -> None:
    """Append a line of JSON to a log: the time (UTC), the event and its fields; it is on the disk on return.

    Args:
        path: of the log; made if it does not exist. None: nothing is written.
        event: what happened.
        fields: further entries of the line.

    Raises:
        CheckpointError: if the disk is full or the file cannot be written.
    """
    if path is None:
        return
    timestamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": timestamp, "event": event, **fields})
    with as_checkpoint_error(f"cannot write {path}"), path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            # a machine that lost power may have kept a part of the last line
            line = line if file.read(1) == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def encode_json_rows(rows: Iterable[Any]) -> bytes:
    """A JSON array, one row a line: ten times faster than with indentation."""
    return ("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n").encode()


def read_json(path: Path, kind: type[J]) -> J:
    """Read a JSON file of this package.

    Args:
        path: of the file.
        kind: what it must hold: ``dict`` for a table, ``list`` for an array.

    Raises:
        CheckpointError: if it is missing, no JSON, or holds something else; the message names the file.
    """
    with as_checkpoint_error(f"cannot read {path}"):
        data = path.read_bytes()
    return parse_json(data, path, kind)


def parse_json(data: bytes, path: Path, kind: type[J]) -> J:
    """Parse the content of a JSON file; see :func:`read_json`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        # bytes that are no text are an error of value, too
        raise CheckpointError(f"{path} is damaged: {error}. Restore it from a copy.") from error
    if not isinstance(value, kind):
        expected_kind, actual_kind = _JSON_KINDS[kind], _JSON_KINDS.get(type(value), json.dumps(value)[:40])
        raise CheckpointError(f"{path} is damaged: it must hold {expected_kind} and holds {actual_kind}.")
    return value


_JSON_KINDS: dict[type, str] = {dict: "a table {...}", list: "an array [...]"}
