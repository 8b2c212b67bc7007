"""Files of a run: one folder, readable by a person and by the report.

RUN/run.json          resolved configuration, software versions, the paper's reference numbers if the experiment
                      has any, the random identifier of the run, the digest of clients.json, and its own
RUN/clients.json      one row for each client: architecture, examples in train/val/test, class counts, true cluster
                      (null if unknown), whether it never trains
RUN/metrics.jsonl.gz  one line of JSON for each round (``RoundRecord``); round 0 is the state before any training;
                      ``pandas.read_json("RUN/metrics.jsonl.gz", lines=True)``
RUN/status.json       {"state": "running" | "finished" | "stopped" | "diverged", "rounds": ..., "message": ...}
RUN/representations.safetensors   optional: test representations at the end of the run, for pictures
RUN/lock              the process that writes the folder, or wrote it last; see :mod:`fedlowrank.storage.lock`
RUN/checkpoint/       see :mod:`fedlowrank.storage.checkpoint`
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from ..core.errors import CheckpointError
from ..core.io.atomic_files import as_checkpoint_error, parse_json, read_json
from .digest import KEY, SEAL_AGAIN, digest_of, read_sealed, write_sealed
from .lock import is_in_use

FORMAT = 4
"""Version of the format of a run folder."""

CONFIG, CLIENTS, STATUS = "run.json", "clients.json", "status.json"
"""Names of the small files."""

REPRESENTATIONS = "representations.safetensors"
"""Name of the file of test representations."""

CLIENTS_DIGEST = "clients_digest"
"""Key at which ``run.json`` has the digest of ``clients.json``."""

RUN_ID = "run_id"
"""Key at which ``run.json`` and the first record have the random identifier of the run; checkpoints have it, too."""

CHECKPOINTS = "checkpoint/*.checkpoint"
"""Pattern of the checkpoint files of a run folder; their names are numbers of completed rounds."""

ACCOUNT = "network.json"
"""Name of what a server needs of its clients to resume; only runs over a network have this file."""

CLIENT_FILE = "client.json"
"""Name of the file that makes a folder that of one client of a run over a network."""

LEDGER = "privacy.jsonl"
"""Name of the privacy ledger in a run folder, and in a client's folder."""

RECORDS_FILE = "metrics.jsonl.gz"
"""Name of the file of records. Every line is a separate gzip member, appended by one write."""

ANSWERS = "answers.jsonl"
"""Name of the file of language models' answers to fixed prompts."""


def read_run(folder: Path) -> tuple[dict[str, Any], str | None]:
    """Read ``run.json`` in a run folder.

    Returns:
        The configuration, and the random identifier of the run: None for a run that was made before there were any.

    Raises:
        CheckpointError: if the file is missing or damaged, or may not be read.
    """
    path = folder / CONFIG
    with as_checkpoint_error(f"cannot read {folder}"):
        has_config = _exists(path) and path.is_file()
    if not has_config:
        raise CheckpointError(f"{folder} is not a run folder: it holds no {CONFIG}")
    config = read_sealed(path)
    for name in ("method", "run", "models", "vary", "reference"):
        if not isinstance(config.get(name), dict | None):
            raise CheckpointError(f"{path} is damaged: {name} must be a table, not {config[name]!r:.40}")
    config.pop(CLIENTS_DIGEST, None)
    return config, config.pop(RUN_ID, None)


def read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration in ``run.json``; see :func:`read_run`."""
    return read_run(folder)[0]


def read_clients(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of ``clients.json`` in a run folder, and compare them with the digest in ``run.json``.

    Raises:
        CheckpointError: if one of these files is missing or damaged.
    """
    path, expected_digest = folder / CLIENTS, read_sealed(folder / CONFIG).get(CLIENTS_DIGEST)
    with as_checkpoint_error(f"cannot read {path}"):
        data = path.read_bytes()
    rows = parse_json(data, path, list)
    if not all(isinstance(row, dict) for row in rows):
        raise CheckpointError(f"{path} is damaged: it must hold a table for each client")
    if expected_digest is None:
        raise CheckpointError(
            f"{folder / CONFIG} has no entry {CLIENTS_DIGEST!r}, by which {path} is known. {SEAL_AGAIN}"
        )
    if digest_of(data) != expected_digest:
        raise CheckpointError(
            f"{path} is damaged or was changed by hand: it has another digest than when it was written. Restore "
            "it from a copy, or resume the run, which writes it again."
        )
    return rows


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write ``run.json`` with its digest and that of ``clients.json``, which must exist."""
    with as_checkpoint_error(f"cannot read {folder / CLIENTS}"):
        clients_digest = digest_of((folder / CLIENTS).read_bytes())
    write_sealed(folder / CONFIG, {**config, CLIENTS_DIGEST: clients_digest})


def seal_run(folder: str | Path) -> None:
    """Enter the digests of the files of a run folder again after a change by hand.

    Raises:
        CheckpointError: if ``run.json``, ``clients.json`` or ``status.json`` is missing or is not JSON.
    """
    folder = Path(folder)
    write_config(folder, read_json(folder / CONFIG, dict))
    write_sealed(folder / STATUS, read_json(folder / STATUS, dict))


def encode_representations(representations: Mapping[str, Tensor]) -> bytes:
    """Encode :data:`REPRESENTATIONS`: tensors in the safetensors format, with their digest in its metadata."""
    digest = digest_of(safetensors.torch.save(dict(representations)))
    return safetensors.torch.save(dict(representations), metadata={KEY: digest})


def read_representations(folder: Path) -> dict[str, Tensor] | None:
    """Read ``x [n, d]``, ``label [n]`` and ``client [n]`` of test representations; None if there are none.

    Raises:
        CheckpointError: if the file is damaged.
    """
    path = folder / REPRESENTATIONS
    if not path.is_file():
        return None
    with as_checkpoint_error(f"cannot read {path}"):
        data = path.read_bytes()
    representations: dict[str, Tensor] = {}
    with contextlib.suppress(safetensors.SafetensorError, ValueError):
        representations = safetensors.torch.load(data)
    if encode_representations(representations) != data:
        raise CheckpointError(
            f"{path} is damaged or was changed by hand: its digest is not that of its tensors. Restore it from a "
            "copy, or remove it: the report has no embedding plot then."
        )
    return representations


def completed_rounds(folder: Path, status: Mapping[str, Any]) -> int:
    """Rounds that a run has surely completed: those at its last checkpoint, or at its end."""
    saved_rounds = [int(path.stem) for path in folder.glob(CHECKPOINTS) if path.stem.isdigit()]
    # the status of a run that an error stopped may include a round that has no record
    final_round = status.get("rounds") if status.get("state") not in ("stopped", "diverged") else 0
    return max(0, *saved_rounds, final_round if isinstance(final_round, int) else 0)


def encode_line(line: str) -> bytes:
    """Encode a line for :data:`RECORDS_FILE` as a separate gzip member."""
    # without a time stamp, so that equal records give equal bytes
    return gzip.compress((line + "\n").encode(), mtime=0)


def read_lines(folder: Path) -> list[bytes]:
    """Read the lines of :data:`RECORDS_FILE` in a run folder, without one that a killed process left incomplete.

    Raises:
        OSError: if there is no such file, or it is damaged.
        zlib.error: if the content of the file is damaged.
    """
    path, lines = folder / RECORDS_FILE, []
    # a member begins with this byte, and ends with it only after a line of 500 MB
    data = io.BytesIO(path.read_bytes().removesuffix(b"\x1f"))
    with gzip.open(data) as file, contextlib.suppress(EOFError):
        for line in file:
            lines.append(line)  # noqa: PERF402 - lines before an incomplete one are kept
    return lines


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of :data:`ANSWERS` in a run folder; an empty list if there is no such file.

    Raises:
        CheckpointError: if the file is damaged.
    """
    path = folder / ANSWERS
    if not path.exists():
        return []
    column_types = {"round": int, "model": str, "prompt": str, "answer": str}
    try:
        # not splitlines(), which also splits at U+2028, U+2029 and U+0085; JSON may hold these in strings
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        if all(type(row[name]) is column_type for row in rows for name, column_type in column_types.items()):
            return rows
    except (ValueError, TypeError, KeyError):
        pass
    raise CheckpointError(f"{path} is damaged. Remove it: a report then leaves the answers out")


def salvage_lines(folder: Path) -> list[bytes]:
    """Read the lines of a damaged :data:`RECORDS_FILE` whose checksum is right; none if there is no such file.

    Raises:
        OSError: if the file cannot be read.
    """
    path, lines = folder / RECORDS_FILE, []
    if not path.exists():
        return []
    # every line is a gzip member, which begins with the same bytes
    for chunk in path.read_bytes().split(_MEMBER)[1:]:
        member = zlib.decompressobj(wbits=31)
        with contextlib.suppress(zlib.error):
            line = member.decompress(_MEMBER + chunk)
            if member.eof:
                lines.append(line)
    return lines


_MEMBER = b"\x1f\x8b\x08" + bytes(5)
"""First bytes of a gzip member without a name and a time."""


def run_folders(folders: Sequence[Path]) -> list[Path]:
    """Find the run folders among some folders and directly below them, without those that were moved aside.

    A subfolder that may not be read counts as a run, because nothing shows whether it holds one. Reading it raises an
    error that names it.

    Raises:
        CheckpointError: if one of the given folders may not be read.
    """
    folders_of_runs: list[Path] = []
    for folder in folders:
        inner_folders = [] if _holds_run(folder) else [p for p in _list_folders(folder) if _may_hold_run(p)]
        folders_of_runs += inner_folders or [folder]
    return folders_of_runs


def _list_folders(folder: Path) -> list[Path]:
    """Folders directly below a folder, sorted, without runs that were moved aside; empty if it is no folder."""
    with as_checkpoint_error(f"cannot read {folder}"):
        subfolders = (
            [Path(entry) for entry in os.scandir(folder) if entry.is_dir()] if folder.is_dir() else []
        )
    return sorted(p for p in subfolders if not re.search(r"\.old-\d+$", p.name))


def _holds_run(folder: Path) -> bool:
    with as_checkpoint_error(f"cannot read {folder}"):
        return _exists(folder / CONFIG)


def _may_hold_run(folder: Path) -> bool:
    try:
        return _holds_run(folder)
    except CheckpointError:
        return True


def _exists(path: Path) -> bool:
    """Whether there is such a file or folder; raises OSError if the system does not allow to find out."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def actual_status(folder: Path, status: dict[str, Any]) -> dict[str, Any]:
    """The status of a run folder; ``stopped`` instead of ``running`` if the process that wrote it is gone."""
    if status.get("state") != "running" or is_in_use(folder):
        return status
    message = "its process ended without a word: it was killed, or the disk was full"
    return {**status, "state": "stopped", "message": message}
