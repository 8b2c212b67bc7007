"""Files that are compressed as the ending of their name says."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .atomic_files import as_checkpoint_error, write_atomically

_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_REFUSED = (".zst", ".tar", ".tgz", ".7z")


def write_table(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a table completely or not at all, and make its folder; ``.gz``, ``.bz2``, ``.xz`` and ``.zip`` compress it.

    Args:
        path: path of the file.
        chunks: its text, in parts; only the compressed text is in memory as a whole.

    Raises:
        ConfigError: if the name ends in another compression.
        CheckpointError: if the file cannot be written.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if refused := [suffix for suffix in suffixes[-2:] if suffix in _REFUSED]:
        raise ConfigError(
            f"cannot write {path}: {refused[0]} is not supported. End its name in .csv, or in .csv.gz, .csv.bz2, .csv.xz or "
            ".csv.zip to compress it"
        )
    with as_checkpoint_error(f"cannot make {path.parent}"):
        path.parent.mkdir(parents=True, exist_ok=True)
    ending, buffer = suffixes[-1] if suffixes else "", io.BytesIO()
    if ending == ".zip":
        with (
            zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open(path.stem, "w", force_zip64=True) as file,
        ):
            file.writelines(chunks)
        chunks = [buffer.getvalue()]
    elif ending in _OPEN:
        with _OPEN[ending](buffer, "wb") as file:
            file.writelines(chunks)
        chunks = [buffer.getvalue()]
    write_atomically(path, chunks)
