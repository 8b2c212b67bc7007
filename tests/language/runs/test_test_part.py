"""The test part that a source of texts names is the one that clients are tested on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.data.partitioning.split import LocalSplit, WholeTest
from tests.language.text_experiments import make_row_tables


def experiment(base: Path, folder: Path, split: dict[str, Any] | None = None, **data: Any) -> Any:
    """Two clients that share 20 rows, and a file of 6 other ones."""
    for name, count in (("train", 20), ("held", 6)):
        rows = [{"prompt": f"{name} {i}?", "completion": " a fox"} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = make_row_tables(base, {"path": str(folder / "train.jsonl"), **data})
    made["partition"] = {"kind": "iid", "clients": 2}
    return ExperimentConfig.parse(made if split is None else {**made, "split": split})


def test_clients_are_tested_on_the_file_that_the_source_names(llama: Path, tmp_path: Path) -> None:
    made = experiment(llama, tmp_path, test=str(tmp_path / "held.jsonl"))
    shares = made.shares()
    dataset = experiment(llama, tmp_path, path=str(tmp_path / "held.jsonl")).shares().data
    held = {
        tuple(row[row > 0].tolist())
        for c in dataset
        for part in (c.train, c.val, c.test)
        for row in part.x["input_ids"]
    }
    for client in shares.data:
        assert {tuple(row[row > 0].tolist()) for row in client.test.x["input_ids"]} == held
        assert len(client.train) + len(client.val) == 10
    assert not any("not used" in note for note in shares.notes)
    # what is stored of the experiment means the same
    assert ExperimentConfig.parse(made.to_dict()).split == WholeTest()


def test_a_share_of_the_rows_is_the_test_part_of_all(llama: Path, tmp_path: Path) -> None:
    made = experiment(llama, tmp_path, test_share=0.2, split={"val": 0.25})
    assert made.split == WholeTest(val=0.25)
    first, second = made.shares().data
    assert len(first.test) == 4
    assert torch.equal(first.test.x["input_ids"], second.test.x["input_ids"])


def test_a_split_that_leaves_the_test_part_out_says_so(llama: Path, tmp_path: Path) -> None:
    made = experiment(llama, tmp_path, test=str(tmp_path / "held.jsonl"), split={"kind": "local"})
    assert any(note.startswith("6 rows of the test part are not used") for note in made.shares().notes)


@pytest.mark.parametrize("split", [None, {"val": 0.1}, {"train": 0.8, "val": 0.1, "test": 0.1}])
def test_without_a_test_part_clients_divide_their_own_rows(
    llama: Path, tmp_path: Path, split: dict[str, Any] | None
) -> None:
    assert experiment(llama, tmp_path, split).split == LocalSplit()


def test_images_are_divided_as_before() -> None:
    assert ExperimentConfig.parse({"data": {"source": "digits"}}).split == LocalSplit()
    assert ExperimentConfig.parse({"data": {"source": "cifar10", "path": "there"}}).split == LocalSplit()
