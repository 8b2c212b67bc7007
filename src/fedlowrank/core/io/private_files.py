"""Files that other users of the machine must not read."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError
from .atomic_files import as_checkpoint_error

_OTHERS = 0o077


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Let only the owner read files that this process and its child processes write within the block."""
    previous_mask = os.umask(_OTHERS)
    os.umask(previous_mask | _OTHERS)
    try:
        yield
    finally:
        os.umask(previous_mask)


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner can read, or check that an existing folder is private.

    Raises:
        ConfigError: if the folder exists, and group or others can read it.
        CheckpointError: if the folder cannot be made.
    """
    with as_checkpoint_error(f"cannot make {folder}"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    refuse_readable(folder)


def is_readable_by_others(path: Path) -> bool:
    """Whether group or others may read a file or folder; parent folders that protect it are not examined."""
    return os.name == "posix" and path.exists() and bool(path.stat().st_mode & 0o044)


def refuse_readable(*paths: Path) -> None:
    """Refuse files and folders that group or others can read, write or enter; missing paths are skipped.

    A folder that only its owner can enter protects all its content, whatever the modes of its files.

    Raises:
        ConfigError: if one of the paths is not private; the message names it and what to type.
    """
    for path in paths:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            continue
        if os.name == "posix" and mode & _OTHERS:
            is_folder = stat.S_ISDIR(mode)
            command = f"{'chmod -R' if is_folder else 'chmod'} go-rwx {shlex.quote(str(path))}"
            raise ConfigError(
                f"other users of this machine can read or change {path} (mode {stat.S_IMODE(mode):03o}). Type "
                f"`{command}`, and start this again"
            )
