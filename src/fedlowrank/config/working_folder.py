"""The working folder of a run, to which relative paths and the user's own code refer.

In an experiment file and on the command line all paths, and the modules of ``module:attribute``, are relative to the
folder in which the command is typed. The one exception is ``extends``, which names a file relative to the file that
has it. ``run.json`` stores the working folder of a run that depends on it, so that a stored run finds the same files
from any other folder. The stored path is relative to the run folder, so that a project may be moved as a whole.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

WORKING_FOLDER = "working_folder"
"""Key of the working folder in ``run.json``."""

_PATHS = (
    ("data", "path"), ("data", "test"), ("language", "path"), ("lora", "start"), ("local", "path"), ("local", "start"),
    ("run", "devices", "file"),
)  # fmt: skip
"""Fields of an experiment that may be paths."""

_CODE = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")
"""Pattern for the name of the user's own code."""


def describe_working_folder(folder: Path, tables: Mapping[str, Any], method: str) -> dict[str, str]:
    """Entry of ``run.json`` for a run that begins in this folder; empty if the experiment depends on no working folder.

    Args:
        folder: folder of the run.
        tables: tables of the experiment.
        method: name of the method that runs.
    """
    if not _list_relative_names(tables, method):
        return {}
    try:
        return {WORKING_FOLDER: Path(os.path.relpath(Path.cwd().resolve(), folder.resolve())).as_posix()}
    except ValueError:
        # Windows has no relative path to another drive
        return {WORKING_FOLDER: str(Path.cwd().resolve())}


@contextlib.contextmanager
def enter_working_folder(folder: Path, stored_config: Mapping[str, Any]) -> Iterator[Path]:
    """Change to the working folder of a stored run while its data and code are read.

    The process stays in its folder if the working folder does not exist, or if more of the run's files are found in
    the present folder, for example after the run was copied to another machine.

    Args:
        folder: folder of the run.
        stored_config: content of its ``run.json``.

    Yields:
        The path of the run folder from the working folder.
    """
    working_folder = _find_working_folder(folder, stored_config)
    if working_folder is None:
        yield folder
        return
    absolute = folder.absolute()
    with contextlib.chdir(working_folder):
        yield absolute


def _find_working_folder(folder: Path, stored_config: Mapping[str, Any]) -> Path | None:
    """Find the working folder of a stored run; None if it is the present one, or does not have the run's files."""
    text, tables = stored_config.get(WORKING_FOLDER), stored_config.get("experiment")
    if not isinstance(text, str) or not isinstance(tables, Mapping):
        return None
    current_folder, working_folder = Path.cwd().resolve(), (folder.resolve() / text).resolve()
    if working_folder == current_folder or not working_folder.is_dir():
        return None
    names = _list_relative_names(tables, str(stored_config["method"]["name"]))
    current_count, working_count = (
        sum(_exists(root, name) for name in names) for root in (current_folder, working_folder)
    )
    return working_folder if 0 < working_count >= current_count else None


def _exists(root: Path, name: str) -> bool:
    return (root / name).exists() or next(root.glob(name), None) is not None


def _list_relative_names(tables: Mapping[str, Any], method: str) -> list[str]:
    """List relative paths that an experiment may mean, including names on the hub, and patterns for the modules of its code."""
    names: list[str] = []
    for path in _PATHS:
        value: Any = tables
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        names += [value] if isinstance(value, str) else value if isinstance(value, list) else []
    expanded = [os.path.expandvars(os.path.expanduser(name)) for name in names]  # noqa: PTH111 - may be a hub name
    code = {text.partition(":")[0] for text in (method, *_list_texts(tables)) if _CODE.fullmatch(text)}
    modules = [f"{module.replace('.', '/')}*" for module in sorted(code)]
    return [name for name in expanded if name and not Path(name).is_absolute()] + modules


def _list_texts(value: Any) -> Iterator[str]:
    """Yield all keys and texts in nested tables and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _list_texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _list_texts(inner)
