"""Digests with which a damaged file is recognized before any of it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError
from ..core.io.atomic_files import read_json, write_json

KEY = "digest"
"""Key at which a sealed table holds the digest of its other entries."""

SEAL_AGAIN = (
    "If you changed a run folder and mean it, enter its digests again: "
    "python -c \"from fedlowrank.storage.run_files import seal_run; seal_run('RUN')\""
)
"""Command to type after a change by hand, for messages."""


def digest_of(*parts: bytes | memoryview) -> str:
    """Compute the BLAKE2b digest of bytes, 128 bits as hexadecimal digits.

    Args:
        parts: the bytes, one part after another.
    """
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.hexdigest()


def seal(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of JSON with the digest of its content, for :func:`check_seal`."""
    return {**table, KEY: _content(table)}


def is_sealed(table: object) -> bool:
    """Whether it is a table with the digest of its content, as :func:`seal` makes it."""
    return isinstance(table, Mapping) and table.get(KEY) == _content(table)


def check_seal(table: object, name: object) -> None:
    """Compare the content of a table with the digest that :func:`seal` entered into it.

    Args:
        table: table as it was read.
        name: name of the file, for the message.

    Raises:
        CheckpointError: if it is no table, has no digest or does not match its digest.
    """
    if not isinstance(table, Mapping):
        raise CheckpointError(
            f"{name} is damaged: it holds {table!r:.40}, not a table. Restore it from a copy."
        )
    if KEY not in table:
        raise CheckpointError(
            f"{name} is damaged or was changed by hand: it has no entry {KEY!r}, so that nothing shows whether the "
            f"rest is whole. Restore it from a copy. {SEAL_AGAIN}"
        )
    if table[KEY] != _content(table):
        raise CheckpointError(
            f"{name} is damaged or was changed by hand: its digest is {str(table[KEY])[:40]}, but its content "
            f"has {_content(table)}. Restore it from a copy."
        )


def write_sealed(path: Path, table: Mapping[str, Any]) -> None:
    """Write a table of JSON with its digest, atomically."""
    write_json(path, seal(table))


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a table that :func:`write_sealed` wrote, and return it without its digest.

    Raises:
        CheckpointError: if the file is missing or damaged, or has no digest.
    """
    table = read_json(path, dict)
    check_seal(table, path)
    del table[KEY]
    return table


def _content(table: Mapping[str, Any]) -> str:
    # the content as JSON reads it back: keys are strings, tuples are lists
    content = json.loads(json.dumps({key: value for key, value in table.items() if key != KEY}))
    return digest_of(json.dumps(content, sort_keys=True).encode())
