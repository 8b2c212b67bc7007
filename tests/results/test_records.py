"""A run folder of another format is named as such, and a line that is no record is damage, whatever it lacks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank import Federation, simulate
from fedlowrank.core.errors import CheckpointError
from fedlowrank.results.records import RunRecord
from fedlowrank.storage.run_files import RECORDS_FILE, seal_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run of one round."""
    clients = [(torch.randn(8, 3), torch.arange(8) % 2) for _ in range(2)]
    federation = Federation.from_arrays(clients, torch.nn.Linear(3, 2))
    simulate("standalone", federation, rounds=1, folder=tmp_path / "run")
    return tmp_path / "run"


def test_another_format_is_named_before_its_records_are_read(folder: Path) -> None:
    config = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**config, "format": 2}))
    seal_run(folder)
    (folder / RECORDS_FILE).write_bytes(gzip.compress(b'{"round": 0, "accuracy": null}\n'))
    with pytest.raises(CheckpointError, match="has format 2; this version reads format 4"):
        RunRecord.load(folder)


@pytest.mark.parametrize("measured", [{}, {"clients": [0]}, {"columns": []}, 3, [1]])
def test_a_line_that_is_no_record_is_damage(folder: Path, measured: Any) -> None:
    line = json.dumps({"round": 0, "measured": measured})
    (folder / RECORDS_FILE).write_bytes(gzip.compress(f"{line}\n".encode()))
    with pytest.raises(CheckpointError, match="is missing or damaged"):
        RunRecord.load(folder)
