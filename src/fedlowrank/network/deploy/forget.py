"""Removes the data, states and models in a client's folder. Logs, counts and the account of privacy stay."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from ...core.errors import ConfigError
from ...core.io.atomic_files import as_checkpoint_error, read_json
from ...storage.lock import FolderInUseError, exclusive
from ...storage.run_files import CLIENT_FILE
from ..client import REJECTION_FILE

_RUN, _STATE = re.compile(r"[0-9a-f]{16}"), re.compile(r"\d{6}\.tree(\.part)?|model")
"""Patterns of the names of a run, as a server draws it, and of the files in a client's folder of a run."""


def forget(folder: Path, client_id: int) -> tuple[list[Path], list[Path]]:
    """Remove the data, states and models of a client from its folder.

    Files are removed as by ``rm``: their blocks are not overwritten, and copies elsewhere are not removed.

    Args:
        folder: folder of the client.
        client_id: identifier of the client.

    Returns:
        The removed paths, and the remaining ones: the account of privacy, logs, and files that are not the client's.

    Raises:
        ConfigError: if the folder is not that of this client. Nothing is removed then.
        FolderInUseError: if ``join`` is running on the folder.
        CheckpointError: if something cannot be removed.
    """
    if not (folder / CLIENT_FILE).exists():
        raise ConfigError(f"{folder} is not a client's folder: it holds no {CLIENT_FILE}; pass --folder")
    if (owner := read_json(folder / CLIENT_FILE, dict).get("client")) != client_id:
        raise ConfigError(f"{folder} is the folder of client {owner}, not of client {client_id}")
    process_folder, lock = folder / "flower", FileLock(folder / "lock")
    with contextlib.ExitStack() as stack:
        if process_folder.is_dir():
            stack.enter_context(exclusive(process_folder))
        try:
            stack.enter_context(lock.acquire(timeout=0))
        except Timeout:
            raise FolderInUseError(f"{folder} is in use: the client trains. End `fedlowrank join`") from None
        runs = [path for path in folder.iterdir() if path.is_dir() and _is_run(path)]
        # the file that identifies the folder's client is removed last, so that this can be repeated after a kill
        names = (
            "data.tree",
            "data.tree.part",
            "client.json.part",
            "flower",
            "lock",
            REJECTION_FILE,
            CLIENT_FILE,
        )
        removed_paths = [
            path for path in (*sorted(runs), *(folder / name for name in names)) if path.exists()
        ]
        for path in removed_paths:
            with as_checkpoint_error(f"cannot remove {path}"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    remaining_paths = sorted(folder.iterdir())
    if not remaining_paths:
        with as_checkpoint_error(f"cannot remove {folder}"):
            folder.rmdir()
    return removed_paths, remaining_paths


def _is_run(folder: Path) -> bool:
    if _RUN.fullmatch(folder.name):
        return True
    return all(_STATE.fullmatch(path.name) for path in folder.iterdir())
