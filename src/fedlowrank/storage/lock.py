"""Lock of a folder: one process at a time writes it; others get an error that names this process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from ..core.errors import CheckpointError

LOCK = "lock"
"""Name of the locked file of a folder. It describes the process that has the lock, and is empty after its release."""


class FolderInUseError(CheckpointError):
    """Error: another process writes the folder."""


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; the operating system releases it however the process ends.

    Args:
        folder: folder to lock, which must exist.

    Raises:
        FolderInUseError: if another process, or another thread of this one, holds the lock; the message names the
            process.
        CheckpointError: if the folder cannot be written.
    """
    if not folder.is_dir():
        raise CheckpointError(f"cannot lock {folder}: there is no such folder")
    path = folder / LOCK
    lock = FileLock(path, thread_local=False)
    try:
        # longer than another process looks whether the folder is in use
        lock.acquire(timeout=0.2, poll_interval=0.02)
    except Timeout:
        pid = read_holder(folder).get("pid")
        holder = "another process" if pid is None else f"process {pid}"
        advice = "end it" if pid is None else f"end it (`kill {pid}`)"
        raise FolderInUseError(
            f"{folder} is in use by {holder}. Wait until that ends, or {advice}, and start this again."
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot lock {folder}: {error.strerror or error}") from error
    try:
        with _noted(path):
            yield
    finally:
        lock.release()


@contextlib.contextmanager
def _noted(path: Path) -> Iterator[None]:
    """Store in a file the identity of this process. A failure, as on a full disk, is ignored."""
    # by descriptor and not by name, because the folder may be renamed meanwhile
    handle = None
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDWR)
    try:
        if handle is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, 0)
                os.write(handle, (json.dumps(identify_process(os.getpid())) + "\n").encode())
        yield
    finally:
        if handle is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, 0)
            os.close(handle)


def identify_process(pid: int) -> dict[str, Any]:
    """Describe a living process by number, start time and host, which no other process shares."""
    return {
        "pid": pid,
        "started": psutil.Process(pid).create_time(),
        "host": _host(),
    }


def _host() -> str:
    # a digest, because the host name itself would be in a run folder that is given to others
    return hashlib.blake2b(platform.node().encode(), digest_size=8).hexdigest()


def is_alive(identity: dict[str, Any]) -> bool:
    """Whether a process that :func:`identify_process` described is alive; one of another machine counts as alive."""
    if not isinstance(identity.get("pid"), int) or not isinstance(identity.get("started"), float):
        return False
    if identity.get("host") != _host():
        return True
    try:
        process = psutil.Process(identity["pid"])
        # the system may round the time differently after its clock was set
        is_same = abs(process.create_time() - identity["started"]) < 2
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def is_in_use(folder: Path) -> bool:
    """Whether a process holds the lock of a folder.

    The operating system knows it, whatever the clock shows and whatever the file describes. Of a process on another
    machine, and on a file system without locks, only the description is known.
    """
    holder, path = read_holder(folder), folder / LOCK
    if os.name != "posix" or (holder and holder.get("host") != _host()):
        return is_alive(holder)
    import fcntl

    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return is_alive(holder)
    return False


def read_holder(folder: Path) -> dict[str, Any]:
    """The process that holds or last held the lock, as :func:`identify_process` describes it; empty if none."""
    try:
        holder = json.loads((folder / LOCK).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}
