"""Files that are written completely or not at all."""

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
    """Write a file completely or not at all: temporary file, fsync, rename, fsync of the folder.

    A symbolic link stays, and the file that it names is written. A device, a pipe or an open file of a process, such as
    ``/dev/stdout``, is written directly.

    Args:
        path: path of the file.
        data: content of the file, in one piece or in parts.

    Raises:
        CheckpointError: if the disk is full or the folder cannot be written; the old file is then unchanged.
    """
    with as_checkpoint_error(f"cannot write {path}"):
        chunks = [data] if isinstance(data, bytes) else data
        path = _follow_links(path)
        if path.parent in _open_file_folders() and path.name.isdecimal():
            # a copy of the descriptor has its position, so that output before and after this stays
            with os.fdopen(os.dup(int(path.name)), "wb") as file:
                file.writelines(chunks)
            return
        if path.is_relative_to("/proc") or (path.exists() and not path.is_file()):
            # a device or a pipe cannot be replaced; a folder raises an error here
            with path.open("wb") as file:
                file.writelines(chunks)
            return
        temporary_path = path.parent / f"{path.name}.part"
        try:
            with temporary_path.open("wb") as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
            temporary_path.replace(path)
            sync_folder(path.parent)
        except (OSError, CheckpointError):
            # a disk that cannot write may also fail to remove; report the first error
            with contextlib.suppress(OSError):
                temporary_path.unlink(missing_ok=True)
            raise


def _follow_links(path: Path) -> Path:
    """Follow symbolic links up to a file, or up to the entry of an open file in ``/proc``, which is no link to follow."""
    while True:
        path = Path(os.path.realpath(path.parent)) / path.name
        if not path.is_symlink() or path.is_relative_to("/proc"):
            return path
        with contextlib.suppress(FileNotFoundError):
            # raises for links in a circle
            path.stat()
        path = path.parent / path.readlink()


def _open_file_folders() -> set[Path]:
    """Folders that have an entry for each open file of this process, by its descriptor."""
    return {Path(os.path.realpath(folder)) for folder in ("/dev/fd", "/proc/self/fd")}


@contextlib.contextmanager
def as_checkpoint_error(action: str) -> Iterator[None]:
    """Turn disk errors within the block into a :class:`CheckpointError` that names the action."""
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
    """Write JSON atomically, indented by one level for a person to read."""
    write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())


def append_event(path: Path | None, event: str, **fields: Any) -> None:
    """Append a line of JSON to a log: the time (UTC), the event and its fields; it is on the disk on return.

    Args:
        path: path of the log, which is created if it does not exist; None to write nothing.
        event: name of the event.
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
            # after a loss of power only a part of the last line may exist
            line = line if file.read(1) == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def encode_json_rows(rows: Iterable[Any]) -> bytes:
    """Encode rows as a JSON array with one row a line, ten times faster than with indentation."""
    return ("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n").encode()


def read_json(path: Path, kind: type[J]) -> J:
    """Read a JSON file of this package.

    Args:
        path: path of the file.
        kind: type that the file must hold: ``dict`` for a table, ``list`` for an array.

    Raises:
        CheckpointError: if the file is missing, is no JSON, or holds another type; the message names the file.
    """
    with as_checkpoint_error(f"cannot read {path}"):
        data = path.read_bytes()
    return parse_json(data, path, kind)


def parse_json(data: bytes, path: Path, kind: type[J]) -> J:
    """Parse the content of a JSON file; see :func:`read_json`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        # bytes that are no text raise a ValueError, too
        raise CheckpointError(f"{path} is damaged: {error}. Restore it from a copy.") from error
    if not isinstance(value, kind):
        expected_kind, actual_kind = _JSON_KINDS[kind], _JSON_KINDS.get(type(value), json.dumps(value)[:40])
        raise CheckpointError(f"{path} is damaged: it must hold {expected_kind} and holds {actual_kind}.")
    return value


_JSON_KINDS: dict[type, str] = {dict: "a table {...}", list: "an array [...]"}
