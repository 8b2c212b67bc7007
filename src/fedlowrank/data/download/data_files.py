"""Finds and reads the files of a data set, with errors that say what was expected and what was found."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from ...core.errors import DataError


def expand_path(path: str) -> str:
    """Replace ``~`` and environment variables in a path; raise DataError if a variable is not set."""
    text = os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111 - a name on the hub is no path
    if (match := re.search(r"\$(\w+|\{\w+\})", text)) and not Path(text).exists():
        raise DataError(f"the path {path!r} needs the environment variable {match[0]}, which is not set.")
    return text


def explain_missing(path: Path) -> str:
    """Explain that nothing is at a path, with its absolute form and the folder to which a relative path refers."""
    return f"{str(path.absolute())!r} does not exist.{_explain_beginning(path)}"


def _explain_beginning(path: Path) -> str:
    return "" if path.is_absolute() else f" The relative path {str(path)!r} begins at the working folder."


def check_file(file: Path) -> None:
    """Refuse a path that is no file; the message has its absolute form."""
    if not file.exists():
        raise DataError(f"there is no file {str(file.absolute())!r}.{_explain_beginning(file)}")
    if file.is_dir():
        raise DataError(f"{str(file.absolute())!r} is a folder, not a file.")


def check_folder(path: str) -> Path:
    """Return the folder at a path, or raise DataError if there is none."""
    folder = Path(expand_path(path))
    if not folder.is_dir():
        if not folder.exists():
            raise DataError(f"the folder {explain_missing(folder)}")
        raise DataError(f"{str(folder.absolute())!r} is a file, not a folder.")
    return folder


def find_folder(path: str, contains: Callable[[Path], bool], description: str) -> Path:
    """Find the folder of a data set: the one at the path, or the only one at most two levels below it.

    Args:
        path: path of the folder that the user names.
        contains: function that says whether a folder contains the data set.
        description: description of the data set, for messages.

    Raises:
        DataError: if no folder or several folders contain the data set.
    """
    root = check_folder(path)
    if contains(root):
        return root
    for pattern in ("*", "*/*"):
        folders = sorted(folder for folder in root.glob(pattern) if folder.is_dir() and contains(folder))
        if len(folders) > 1:
            names = ", ".join(repr(str(folder.relative_to(root))) for folder in folders)
            raise DataError(
                f"several folders below {str(root)!r} hold {description}: {names}. Name one of them."
            )
        if folders:
            return folders[0]
    raise DataError(f"found no {description} in {str(root)!r} or up to two folders below it.")
