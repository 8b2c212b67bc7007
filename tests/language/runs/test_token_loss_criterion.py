"""Language models are judged by their loss per token: best round, patience, and what a report compares."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.language.text_experiments import make_causal_tables, run_rounds

torch.set_num_threads(1)


def test_a_record_has_a_loss_and_the_share_of_tokens_but_no_accuracy(llama: Path, tmp_path: Path) -> None:
    run = run_rounds(make_causal_tables(llama, tmp_path))
    record = run.step()
    info = run.federation.infos[0]
    test = run.federation.clients[0].test
    actual = record.by_client("token_accuracy", split="test")[0]
    assert set(record.by_client("accuracy", split="test").values()) <= {None}
    made = run.local_model(info)
    predict = next(iter(made.predictors.values()))
    with torch.no_grad():
        scores = predict(test.x)[:, :-1]
    targets = test.y[:, 1:]
    counted = targets >= 0
    right = (scores.argmax(-1) == targets)[counted].float().mean()
    assert actual == pytest.approx(float(right))
    loss = functional.cross_entropy(scores[counted], targets[counted])
    assert record.by_client("loss", split="test")[0] == pytest.approx(float(loss), rel=1e-4)


def test_validation_is_minus_the_loss(llama: Path, tmp_path: Path) -> None:
    tables = make_causal_tables(llama, tmp_path)
    tables["split"] = {"kind": "local", "train": 0.6, "val": 0.2, "test": 0.2}
    run = run_rounds(tables)
    record = run.step()
    mean = record.mean("loss", split="val")
    assert mean is not None
    assert record.validation() == pytest.approx(-mean)
