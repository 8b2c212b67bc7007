"""The section ``[data]``: files that change are read again, and a test part that is not used is said."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import DataError


def frame(rows: int) -> pandas.DataFrame:
    random = np.random.default_rng(rows)
    return pandas.DataFrame({"x": random.normal(size=rows), "y": np.arange(rows) % 2})


def experiment(data: dict[str, Any], **more: Any) -> ExperimentConfig:
    tables = {"data": data, "partition": {"clients": 2}, "model": {"names": ["linear"]}, **more}
    return ExperimentConfig.parse(tables)


def test_a_file_that_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a.csv"
    data = {"source": "csv", "path": "a.csv", "label": "y"}

    def count_rows() -> int:
        return sum(len(c.train) + len(c.val) + len(c.test) for c in experiment(data).federation().clients)

    frame(40).to_csv(file, index=False)
    assert count_rows() == 40
    frame(20).to_csv(file, index=False)
    assert count_rows() == 20
    # of the same size, a little later
    status = file.stat()
    file.write_text(file.read_text().replace(",1\n", ",0\n"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1000))
    assert experiment(data).federation().classes == ("0",)
    file.unlink()
    with pytest.raises(DataError, match="there is no file"):
        count_rows()


def test_a_test_part_that_is_not_used_is_said(tmp_path: Path) -> None:
    frame(40).to_csv(tmp_path / "a.csv", index=False)
    frame(12).to_csv(tmp_path / "b.csv", index=False)
    x, y = np.random.default_rng(0).normal(size=(30, 2)), np.arange(30) % 2
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    table = {"source": "csv", "path": str(tmp_path / "a.csv"), "label": "y", "test": str(tmp_path / "b.csv")}
    for data, rows in ((table, 12), ({"source": "arrays", "path": str(tmp_path / "a.npz")}, 30)):
        actual = experiment(data).federation().notes
        assert [note for note in actual if f"{rows} rows of the test part are not used" in note]
        for split in ({"kind": "whole_test"}, {"kind": "local", "pool": "all"}):
            assert not any("not used" in note for note in experiment(data, split=split).federation().notes)
    assert not any(
        "not used" in note
        for note in experiment({"source": "csv", "path": str(tmp_path / "a.csv"), "label": "y"})
        .federation()
        .notes
    )
