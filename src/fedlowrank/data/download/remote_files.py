"""Downloads one file: resumable, checked, and either complete under its name or absent."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from ...core.errors import DataError

_CHUNK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class RemoteFile:
    """A file to download.

    Attributes:
        url: address of the file.
        checksum: ``md5:...`` or ``sha256:...`` as published by a trustworthy source; empty if none is known.
        size: size in bytes, or None if it is not published.
    """

    url: str
    checksum: str = ""
    size: int | None = None

    @property
    def name(self) -> str:
        """Name of the file: the last part of the address."""
        return unquote(urlsplit(self.url).path.rsplit("/", 1)[-1])


class ProgressReport(Protocol):
    """Shows the progress of downloads."""

    def progress(self, name: str, byte_count: int, total: int | None) -> None:
        """Show how many bytes of a file have arrived; the total is None if the server states none."""
        ...

    def message(self, text: str) -> None:
        """Show a line."""
        ...


def download_file(file: RemoteFile, folder: Path, report: ProgressReport) -> Path:
    """Download a file to a folder, continuing an interrupted download.

    The bytes go to ``NAME.part``, which is renamed to ``NAME`` once its size and checksum are right.

    Args:
        file: file to download.
        folder: folder for the file, which is created if it does not exist.
        report: receiver of progress reports.

    Returns:
        The path of the complete file.

    Raises:
        DataError: if the host cannot be reached, the connection ends early, or the content is not as published.
    """
    target = folder / file.name
    partial_file = folder / (file.name + ".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if target.exists():
            _verify(file, target, target.stat().st_size)
            report.message(f"{file.name}: already there")
            return target
        byte_count = partial_file.stat().st_size if partial_file.exists() else 0
        total = (
            file.size
            if file.size is not None and byte_count == file.size
            else _receive(file, partial_file, target, report)
        )
        _verify(file, partial_file, total)
        if not file.checksum:
            digest = _hash_file(partial_file, "sha256")
            report.message(f"{file.name}: no checksum is published for this file; its SHA-256 is {digest}")
        partial_file.replace(target)
    except OSError as error:
        raise DataError(f"cannot write {str(target)!r}: {error}") from error
    return target


def _receive(file: RemoteFile, partial_file: Path, target: Path, report: ProgressReport) -> int | None:
    """Append missing bytes to the partial file; returns the size of the whole file if the server states it."""
    byte_count = partial_file.stat().st_size if partial_file.exists() else 0
    request = urllib.request.Request(file.url, headers={"User-Agent": "fedlowrank"})
    if byte_count:
        request.add_header("Range", f"bytes={byte_count}-")
    host = urlsplit(file.url).netloc
    advice = f"Download {file.url} elsewhere and put it at {str(target)!r}."
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            # a server that ignores the range sends the whole file with status 200
            if response.status != http.HTTPStatus.PARTIAL_CONTENT:
                byte_count = 0
            length = response.headers.get("Content-Length")
            total = file.size if length is None else byte_count + int(length)
            with partial_file.open("ab" if byte_count else "wb") as sink:
                while chunk := response.read(_CHUNK_BYTES):
                    sink.write(chunk)
                    byte_count += len(chunk)
                    report.progress(file.name, byte_count, total)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise DataError(
                f"{str(partial_file)!r} does not belong to the file at {host}, which is not longer than it. Delete "
                "it and run the same command again."
            ) from error
        raise DataError(f"{host} answers {error.code} {error.reason} for {file.url}. {advice}") from error
    except urllib.error.URLError as error:
        raise DataError(f"cannot reach {host} ({error.reason}). {advice}") from error
    except (ConnectionError, TimeoutError, http.client.HTTPException) as error:
        raise DataError(
            _describe_early_end(host, partial_file, str(error) or type(error).__name__)
        ) from error
    if total is not None and byte_count < total:
        raise DataError(_describe_early_end(host, partial_file, f"{byte_count:,} of {total:,} bytes arrived"))
    return total


def _describe_early_end(host: str, partial_file: Path, reason: str) -> str:
    advice = f"Run the same command again: it goes on with {str(partial_file)!r}."
    return f"the connection to {host} ended early ({reason}). {advice}"


def _verify(file: RemoteFile, path: Path, total: int | None) -> None:
    """Reject content whose size or checksum differs from the published one; nothing is deleted."""
    retry_hint = f"Delete {str(path)!r} and run the command again."
    advice = f"The file is damaged, or another one is at {file.url} now. {retry_hint}"
    size, expected_size = path.stat().st_size, file.size if file.size is not None else total
    if expected_size is not None and size != expected_size:
        raise DataError(f"{str(path)!r} has {size:,} bytes instead of {expected_size:,}. {advice}")
    algorithm, _, expected_digest = file.checksum.partition(":")
    if expected_digest and (digest := _hash_file(path, algorithm)) != expected_digest:
        raise DataError(
            f"{str(path)!r} has the {algorithm.upper()} {digest} instead of {expected_digest}. {advice}"
        )


def _hash_file(path: Path, algorithm: str) -> str:
    hasher = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()
