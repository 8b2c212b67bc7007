"""Next-character prediction on Shakespeare's plays; every speaking role is a natural client."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import ConfigError, DataError
from ..dataset import Dataset, Examples
from ..download.data_files import expand_path, explain_missing
from ..text.table import name_speaker, read_file
from .leaf import read_leaf

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF, in its order."""

CLASSES = (*map(repr, ALPHABET), "other")
"""One class for each character, and a last one for all others."""

Roles = dict[str, list[str]]
"""Speeches of each role, in order."""


@dataclass(frozen=True)
class Shakespeare(CheckedFields):
    """Next-character prediction: ``length`` characters of a speaking role, and the next as the class.

    Use it with ``data.normalize = "none"``, model ``char_lstm`` and partition ``natural``. Source: Caldas et
    al., "LEAF: A Benchmark for Federated Settings" (2018).

    Attributes:
        path: ``shakespeare.sqlite`` as ``fedlowrank data get shakespeare`` saves it; the JSON files of LEAF (a file,
            a folder of files, or a folder with ``train`` and ``test``); or a ``.jsonl``, ``.json`` or Parquet file,
            also with ``.gz``, with a row for each speech or role.
        length: number of characters of an input, at least 1; always 80 for LEAF's files.
        step: number of characters between the starts of two consecutive examples. LEAF uses 1, which makes as many
            examples as there are characters; always 1 for LEAF's files.
        roles: number of roles to read, the first ones with enough text, or None for all.
        speaker: columns that together name a role, for files with rows.
        text: column of the text, for files with rows.
    """

    path: str
    length: int = 80
    step: int = 1
    roles: int | None = None
    speaker: tuple[str, ...] = ("play", "speaker")
    text: str = "text"

    def __post_init__(self) -> None:
        check_minimum("length", self.length, 1)
        check_minimum("step", self.step, 1)
        if self.roles is not None:
            check_minimum("roles", self.roles, 1)

    def load(self) -> Dataset:
        """Load the examples: indices of characters, float32 [n, length], and the index of the next one, int64 [n].

        Raises:
            DataError: if the file cannot be read, or no role has more than ``length`` characters.
            ConfigError: if a setting was changed that has no effect on this kind of file.
        """
        file = Path(expand_path(self.path))
        if file.suffix in (".sqlite", ".db"):
            self._refuse_settings("speaker", "text", kind="a database")
            parts = [self._cut(_read_sqlite(file, split)) for split in ("train", "test")]
        elif file.is_dir() or _is_leaf(file):
            self._refuse_settings("length", "step", "speaker", "text", kind="LEAF's files")
            parts = [_encode_leaf_pairs(users, self.path) for users in read_leaf(self.path)]
        else:
            parts = [self._cut(self._read_rows())]
        names = list(parts[0])[: self.roles]
        if not names:
            raise DataError(
                f"{self.path!r}: no role has more than {self.length} characters. Lower data.length."
            )
        joined_parts = [_join_roles(part, names, self.path) for part in parts]
        test, test_clients = joined_parts[1] if len(joined_parts) > 1 else (None, None)
        return Dataset("shakespeare", joined_parts[0][0], test, CLASSES, joined_parts[0][1], test_clients)

    def _refuse_settings(self, *names: str, kind: str) -> None:
        """Refuse settings without effect on this kind of file, unless they have their defaults."""
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ConfigError(
                    f"{self.path!r}: data.{name} has no effect on {kind}. Leave it out, or set it to {defaults[name]!r}."
                )

    def _cut(self, roles: Roles) -> dict[str, np.ndarray]:
        """Cut the text of each role with enough text into windows [n, length + 1]."""
        windows = {}
        for name, speeches in roles.items():
            codes = encode_characters("\n".join(speeches))
            if len(codes) > self.length:
                windows[name] = np.lib.stride_tricks.sliding_window_view(codes, self.length + 1)[:: self.step]
        return windows

    def _read_rows(self) -> Roles:
        table = read_file(self.path)
        table.require(*self.speaker, self.text)
        roles: Roles = {}
        for i in range(len(table.rows)):
            roles.setdefault(name_speaker(table, i, self.speaker), []).append(table.text(i, self.text))
        return roles


def encode_characters(text: str) -> np.ndarray:
    """Encode a text as indices of its characters, uint8 [n]."""
    numbers = {character: k for k, character in enumerate(ALPHABET)}
    return np.fromiter((numbers.get(c, len(ALPHABET)) for c in text), dtype=np.uint8, count=len(text))


def _is_leaf(file: Path) -> bool:
    """Whether a file holds a JSON object, as LEAF's files do, instead of a list of rows."""
    if file.suffix != ".json" or not file.is_file():
        return False
    try:
        with file.open(encoding="utf-8-sig", errors="replace") as stream:
            return stream.read(1024).lstrip().startswith("{")
    except OSError as error:
        raise DataError(f"cannot read {str(file)!r}: {error}.") from error


def _join_roles(part: dict[str, np.ndarray], names: list[str], path: str) -> tuple[Examples, torch.Tensor]:
    """Join the examples of the named roles, and return the number of each example's role."""
    windows_of_roles = [(k, part[name]) for k, name in enumerate(names) if name in part]
    if not windows_of_roles:
        raise DataError(f"{path!r}: none of the {len(names)} roles has enough text for test examples.")
    windows = np.concatenate([rows for _, rows in windows_of_roles])
    role_numbers = np.repeat([k for k, _ in windows_of_roles], [len(rows) for _, rows in windows_of_roles])
    x = torch.from_numpy(windows[:, :-1].astype(np.float32))
    return Examples(x, torch.from_numpy(windows[:, -1].astype(np.int64))), torch.from_numpy(role_numbers)


def _encode_leaf_pairs(users: dict[str, dict[str, list[str]]], path: str) -> dict[str, np.ndarray]:
    """Encode LEAF's pairs of a text and the next character as windows [n, 81]."""
    windows = {}
    for name, user in users.items():
        pairs = list(zip(user["x"], user["y"], strict=True))
        if not all(
            isinstance(x, str) and isinstance(y, str) and len(x) == 80 and len(y) == 1 for x, y in pairs
        ):
            raise DataError(
                f"{path!r}: the user {name!r} needs texts of 80 characters, each with the next one."
            )
        if pairs:
            windows[name] = encode_characters("".join(x + y for x, y in pairs)).reshape(len(pairs), 81)
    return windows


def _read_sqlite(file: Path, split: str) -> Roles:
    """Read the speeches of a part from TensorFlow Federated's database, with a ``tf.train.Example`` in each row."""
    columns = "client_id, serialized_example_proto"
    query = f"SELECT {columns} FROM examples WHERE split_name = ? ORDER BY client_id, rowid"
    roles: Roles = {}
    if not file.is_file():
        raise DataError(f"{explain_missing(file)} `fedlowrank data get shakespeare` makes it.")
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as database:
            for client_id, message in database.execute(query, (split,)):
                name = client_id.decode() if isinstance(client_id, bytes) else str(client_id)
                speeches = [text.decode("utf-8", "replace") for text in _parse_example(message)]
                roles.setdefault(name, []).extend(speeches)
    except (sqlite3.Error, IndexError, ValueError) as error:
        raise DataError(f"{str(file)!r} is no database of TensorFlow Federated: {error}") from error
    if not roles:
        raise DataError(f"{str(file)!r} holds no examples of the part {split!r}.")
    return roles


def _parse_example(message: bytes) -> Iterator[bytes]:
    """Yield the byte strings of a ``tf.train.Example``: features > entry > feature > list of bytes > value."""
    for features in _parse_fields(message, 1):
        for entry in _parse_fields(features, 1):
            for feature in _parse_fields(entry, 2):
                for values in _parse_fields(feature, 1):
                    yield from _parse_fields(values, 1)


def _parse_fields(message: bytes, field_number: int) -> Iterator[bytes]:
    """Yield the contents of the length-delimited fields with a number in a Protocol Buffers message."""
    offset = 0
    while offset < len(message):
        tag, offset = _parse_varint(message, offset)
        if tag & 7 != 2:
            raise ValueError(f"a field of wire type {tag & 7} where only texts are expected")
        size, offset = _parse_varint(message, offset)
        if offset + size > len(message):
            raise ValueError("a message is cut short")
        if tag >> 3 == field_number:
            yield message[offset : offset + size]
        offset += size


def _parse_varint(message: bytes, offset: int) -> tuple[int, int]:
    """Parse an integer of 7 bits a byte, lowest first; returns it with the position after it."""
    value = shift = 0
    while True:
        byte = message[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            return value, offset
