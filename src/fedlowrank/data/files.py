"""Finding and reading the files of a data set, with errors that say what was expected and what was found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..core.errors import DataError


def folder_of(path: str) -> Path:
    """The folder that a setting names.

    Args:
        path: folder; ``~`` stands for the home of the user.

    Raises:
        DataError: if there is no such folder.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataError(f"the folder {str(folder)!r} {what}.")
    return folder


def find_folder(path: str, holds: Callable[[Path], bool], what: str) -> Path:
    """The folder that holds a data set: the one given, or the only one at most two levels below it.

    Args:
        path: folder that the user names.
        holds: whether a folder holds the data set.
        what: what is looked for, for messages.

    Returns:
        That folder.

    Raises:
        DataError: if none or several hold it.
    """
    root = folder_of(path)
    if holds(root):
        return root
    for pattern in ("*", "*/*"):
        found = sorted(folder for folder in root.glob(pattern) if folder.is_dir() and holds(folder))
        if len(found) > 1:
            names = ", ".join(repr(str(folder.relative_to(root))) for folder in found)
            raise DataError(f"several folders below {str(root)!r} hold {what}: {names}. Name one of them.")
        if found:
            return found[0]
    raise DataError(f"found no {what} in {str(root)!r} or up to two folders below it.")


def read(path: Path) -> bytes:
    """All bytes of a file.

    Raises:
        DataError: if it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror or error}.") from error


def pixels(values: np.ndarray) -> Tensor:
    """Bytes as float32 in [0, 1]: 0 for 0, 1 for 255.

    Args:
        values: uint8, any shape.

    Returns:
        float32 of the same shape; the only copy that is made.
    """
    out = torch.empty(values.shape, dtype=torch.float32)
    return fill(out, values)


def fill(out: Tensor, values: np.ndarray) -> Tensor:
    """Write bytes into a float32 tensor of the same shape as numbers in [0, 1], and return it."""
    # numpy casts while it writes; torch would want a writable uint8 array first.
    out.numpy()[...] = values
    return out.div_(255)


def whole_labels(values: np.ndarray, where: str) -> Tensor:
    """Labels as int64 [n].

    Args:
        values: integers or booleans [n].
        where: what they are, for messages.

    Raises:
        DataError: if they are of another type or shape.
    """
    if values.ndim != 1 or values.dtype.kind not in "iub":
        raise DataError(f"{where} must be whole numbers [n], not {values.dtype} {list(values.shape)}.")
    return torch.from_numpy(values.astype(np.int64))
