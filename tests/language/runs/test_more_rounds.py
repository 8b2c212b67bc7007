"""A finished run of LoRA gets more rounds and is then the run that had as many from the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.cli.main import main
from fedlowrank.core import tree
from fedlowrank.results.records import RunRecord
from fedlowrank.storage import checkpoint
from tests.language.text_experiments import make_causal_tables, write_toml

torch.set_num_threads(1)

METHODS = ["fedhl", "fedit", "flexlora", "hetlora", "flora"]


def write_experiment(base: Path, folder: Path, method: str, optimizer: dict[str, Any]) -> Path:
    ranks = [4] if method == "fedit" else [4, 2, 1]
    defaults = {"steps": 2, "optimizer": {"kind": "adamw", "lr": 0.01, **optimizer}}
    return write_toml(
        make_causal_tables(base, folder, method=method, lora={"ranks": ranks}, defaults=defaults),
        folder / "e.toml",
    )


def extend_and_compare(file: Path, folder: Path) -> None:
    """Two rounds, then up to four, are four at once; the further ones change the model."""
    grown, whole = folder / "grown", folder / "whole"
    assert main(["run", str(file), "-o", str(grown), "run.rounds=2"]) == 0
    middle = checkpoint.load(grown / "checkpoint")
    assert main(["resume", str(grown), "run.rounds=4"]) == 0
    assert main(["run", str(file), "-o", str(whole), "run.rounds=4"]) == 0
    ends = [checkpoint.load(path / "checkpoint") for path in (grown, whole)]
    assert [end.round for end in ends] == [4, 4]
    assert tree.equal(ends[0].server, ends[1].server)
    assert not tree.equal(middle.server, ends[0].server)
    records = [[r.untimed() for r in RunRecord.load(path).rounds] for path in (grown, whole)]
    assert records[0] == records[1]


@pytest.mark.few(1)
@pytest.mark.parametrize("method", METHODS)
def test_more_rounds_equal_as_many_from_the_start(method: str, llama: Path, tmp_path: Path) -> None:
    extend_and_compare(write_experiment(llama, tmp_path, method, {}), tmp_path)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("schedule", {"kind": "cosine", "rounds": 4}),
        # the warm-up comes first, so that the last round has half the learning rate
        ("schedule", {"kind": "cosine", "rounds": 2, "warmup": 2}),
        ("local_schedule", {"kind": "cosine", "rounds": 4}),
    ],
)
def test_a_schedule_of_all_rounds_goes_on(
    name: str, schedule: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    extend_and_compare(write_experiment(llama, tmp_path, "fedit", {name: schedule}), tmp_path)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("schedule", {"kind": "cosine", "rounds": 2}),
        ("schedule", {"kind": "cosine", "rounds": 2, "warmup": 1}),
        ("local_schedule", {"kind": "cosine", "rounds": 2}),
        ("local_schedule", {"kind": "linear", "rounds": 3, "warmup": 1}),
    ],
)
def test_rounds_at_a_learning_rate_of_zero_are_refused(
    name: str, schedule: dict[str, Any], llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_experiment(llama, tmp_path, "fedit", {name: schedule})
    grown = tmp_path / "grown"
    assert main(["run", str(file), "-o", str(grown), "run.rounds=2"]) == 0
    before = checkpoint.load(grown / "checkpoint")
    capsys.readouterr()
    assert main(["resume", str(grown), "run.rounds=4"]) == 1
    message = f"optimizer.{name} with rounds = {schedule['rounds']} has fallen to a learning rate of 0 before round 4"
    assert message in " ".join(capsys.readouterr().err.split())
    assert checkpoint.load(grown / "checkpoint").round == before.round == 2


def test_a_schedule_with_a_floor_goes_on_at_its_floor(llama: Path, tmp_path: Path) -> None:
    optimizer = {"schedule": {"kind": "cosine", "rounds": 2, "floor": 0.1}}
    extend_and_compare(write_experiment(llama, tmp_path, "fedit", optimizer), tmp_path)
