"""Tables and texts of users in other encodings than UTF-8: read with a byte order mark, or an error with its line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlowrank.core.errors import FedlowrankError
from fedlowrank.data.datasets.csv_table import Csv
from fedlowrank.data.datasets.leaf import _read_file
from fedlowrank.data.text.table import read_file
from fedlowrank.rounds.participation.device_table import read_device_table

USER = {"users": ["\u00e9"], "num_samples": [1], "user_data": {"\u00e9": {"x": [[0.0]], "y": [1]}}}
READERS: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "csv": ("a.csv", lambda path: Csv(str(path), "y").load().train.x.tolist(), "x,y\n1.5,a\n2.5,\u00e9\n"),
    "gzip": (
        "a.csv.gz",
        lambda path: Csv(str(path), "y").load().train.x.tolist(),
        "x,y\n1.5,a\n2.5,\u00e9\n",
    ),
    "devices": ("a.csv", lambda path: read_device_table(str(path)), "client,speed\n0,1\n1,2\n# \u00e9,1\n"),
    "jsonl": ("a.jsonl", lambda path: read_file(path).rows, '{"a": 1}\n{"a": "\u00e9"}\n'),
    "leaf": ("a.json", _read_file, json.dumps(USER, ensure_ascii=False, indent=1)),
}


def write(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("name", [n for n in READERS if n != "devices"])
def test_a_byte_order_mark_changes_nothing(name: str, tmp_path: Path) -> None:
    file, read, text = READERS[name]
    plain = read(write(tmp_path, file, text.encode()))
    assert read(write(tmp_path, file, text.encode("utf-8-sig"))) == plain


@pytest.mark.parametrize("name", READERS)
def test_another_encoding_is_named(name: str, tmp_path: Path) -> None:
    file, read, text = READERS[name]
    line = text[: text.index("\u00e9")].count("\n") + 1
    for encoding, says in (("utf-16", "UTF-16"), ("latin-1", rf"line {line} holds the byte 0xe9")):
        with pytest.raises(FedlowrankError, match=says):
            read(write(tmp_path, file, text.encode(encoding)))
