"""Targets and models that suit another loss, and clients that leave a mean: each is pointed out once."""

from __future__ import annotations

import logging
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from fedlowrank import SGD, Federation, simulate
from fedlowrank.config.experiment import ExperimentConfig
from fedlowrank.core.errors import DataError, TaskError
from fedlowrank.data.arrays import Arrays
from fedlowrank.data.datasets.csv_table import Csv
from fedlowrank.data.user_data.user_arrays import TABLE_WARNING, TARGET_WARNINGS
from fedlowrank.methods import FedAvg
from fedlowrank.report.formats.page import write_report
from fedlowrank.results.records import RunRecord

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 2
MULTI_HOT = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]] * 6)


def said(y: Any, model: nn.Module, **more: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as actual:
        warnings.simplefilter("always")
        made = Federation.from_arrays([(X, y), (X, y)], model, **more)
    texts = [str(w.message) for w in actual]
    assert all(w.filename == __file__ for w in actual)
    assert [*made.notes, *(made.remarks or ())] == texts
    # the remarks of a changed federation are the same
    assert replace(made, name="other").remarks == made.remarks
    return texts


class Functional(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind = nn.Linear(4, 2), kind

    def forward(self, x: Tensor) -> Tensor:
        scores = self.body(x)
        actual: Tensor = getattr(torch, self.kind)(scores, *([] if self.kind == "sigmoid" else [-1]))
        return actual.unsqueeze(1).squeeze(1)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1)),
            r"client 0: model model ends in a softmax in its layer '1'",
        ),
        (nn.Sequential(nn.Linear(4, 2), nn.Sigmoid()), r"ends in a sigmoid in its layer '1' \(Sigmoid\)"),
        (
            Functional("softmax"),
            r"client 0: model model ends in a softmax, but the loss is the cross-entropy",
        ),
        (
            nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 10)),
            r"makes 10 scores in its layer '1' \(Linear\).*are 2 classes",
        ),
        # the same rule whatever the factor
        (nn.Linear(4, 3), r"makes 3 scores.*are 2 classes"),
        (nn.Linear(4, 6), r"makes 6 scores.*are 2 classes"),
        (nn.Sequential(nn.Linear(4, 10), nn.Softmax(-1)), r"ends in a softmax.*; it makes 10 scores"),
    ],
)
def test_a_model_for_another_loss_or_other_classes(model: nn.Module, says: str) -> None:
    (text,) = said(Y, model)
    assert re.search(says, text), text


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 2),
        # a log-softmax of a log-softmax is the same
        nn.Sequential(nn.Linear(4, 2), nn.LogSoftmax(-1)),
        nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 2)),
        nn.Sequential(nn.Linear(4, 5), nn.Softmax(-1), nn.Linear(5, 2)),
    ],
)
def test_usual_models_get_no_remark(model: nn.Module) -> None:
    assert said(Y, model) == []


def test_a_regression_may_end_in_a_softmax_and_named_classes_may_be_many() -> None:
    assert said(torch.rand(12, 3), nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1))) == []
    assert said(Y, nn.Linear(4, 10), classes=10) == []


@pytest.mark.parametrize(
    ("y", "says"),
    [
        (MULTI_HOT, "several classes an example.*regression"),
        (Y[:, None].double(), r"\[n, 1\] are zeros and ones.*y\[:, 0\]\.long\(\), or .*target='y'\."),
        (Y + 1, "smallest label is 1, .*y - 1"),
    ],
)
def test_targets_that_mean_another_loss(y: Tensor, says: str) -> None:
    (text,) = said(y, nn.Linear(4, 3 if y.ndim == 1 else y.shape[1]))
    assert re.search(says, text), text


def test_usual_targets_get_no_remark() -> None:
    for y in (MULTI_HOT * 2, torch.ones(12, 2), torch.zeros(12, 1), torch.rand(12, 1)):
        assert said(y, nn.Linear(4, y.shape[1])) == []
    assert said(Y + 1, nn.Linear(4, 3), classes=3) == []


def test_files_tell_it_too(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X.numpy(), y=MULTI_HOT.numpy())
    assert any("several classes" in note for note in Arrays(str(tmp_path / "a.npz")).load().notes)
    (tmp_path / "a.csv").write_text("x,y\n1,0.0\n2,1.0\n3,0.0\n")
    actual = Csv(str(tmp_path / "a.csv"), label="y").load()
    assert [note for note in actual.notes if note in TARGET_WARNINGS] == [TABLE_WARNING]
    assert "y[:, 0]" not in TABLE_WARNING
    for task in ("classification", "regression"):
        chosen = Csv(str(tmp_path / "a.csv"), label="y", task=task).load()  # type: ignore[arg-type]
        assert not set(chosen.notes) & {*TARGET_WARNINGS}
    (tmp_path / "a.csv").write_text("x,y\n1,0.0\n2,1.0\n3,0.5\n")
    assert not set(Csv(str(tmp_path / "a.csv"), label="y").load().notes) & {*TARGET_WARNINGS}


def test_whole_numbers_in_a_column_of_real_numbers_are_pointed_out() -> None:
    frame = pd.DataFrame({"site": ["n", "s"] * 6, "a": X[:, 0], "y": [1.0, 2.0, 3.0] * 4})
    columns = {"client": "site", "target": "y"}
    with pytest.warns(UserWarning, match=r"whole numbers .*regression.*astype\(int\).*target=\[") as actual:
        federation = Federation.from_arrays(frame, nn.Linear(1, 1), **columns)
    assert len(actual) == 1
    assert not federation.with_loss("mse").notes
    with pytest.raises(
        TaskError, match=r"\[1, 3\] of one example, but its target is \[1, 1\]: .*astype\(int\)"
    ):
        Federation.from_arrays(frame, nn.Linear(1, 3), **columns)
    # what the warning names: classes, or a declared regression; other numbers are no classes
    classes = Federation.from_arrays(
        frame.astype({"y": int}), nn.Linear(1, 4), **columns, classes=["", "a", "b", "c"]
    )
    assert sorted(classes.clients[0].train.y.unique().tolist()) == [1, 2, 3]
    Federation.from_arrays(frame, nn.Linear(1, 1), client="site", target=["y"])
    for y in (frame.y + 0.5, [7.0] * 12):
        Federation.from_arrays(frame.assign(y=y), nn.Linear(1, 1), **columns)
    many = pd.DataFrame({"site": ["n"] * 200, "a": 0.5, "y": np.arange(200.0)})
    Federation.from_arrays(many, nn.Linear(1, 1), **columns)


@pytest.mark.full
def test_remarks_stand_in_the_run_and_the_report(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="makes 10 scores"):
        federation = Federation.from_arrays([(X, Y), (X, Y)], nn.Linear(4, 10))
    simulate("fedavg", federation, rounds=1, folder=tmp_path / "run")
    record = RunRecord.load(tmp_path / "run")
    assert ["makes 10 scores" in text for text in record.config["remarks"]] == [True]
    write_report([record], tmp_path / "page.html")
    assert "makes 10 scores" in (tmp_path / "page.html").read_text()


class Spread(nn.Module):
    """Divides by the standard deviation of the batch, which a single example does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        scores: Tensor = (
            h / ((h - h.mean(0)).square().sum(0) / (len(h) - 1)).sqrt() if self.training or len(h) < 3 else h
        )
        return scores


def client(train: int, test: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {"train": (X[:train], Y[:train]), "test": (X[:test], Y[:test])}


@pytest.mark.full
def test_scores_that_are_not_finite_are_wrong_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    clients = [client(12, 2), client(12, 4), client(12, 1)]
    federation = Federation.from_arrays(clients, Spread())
    with caplog.at_level(logging.WARNING):
        result = simulate(FedAvg(optimizer=SGD(lr=0.01)), federation, rounds=3)
    # argmax of a NaN is 0, which is the label of the first example
    assert result.accuracy()[2] == 0
    assert not result.predictions(2)["correct"].any()
    actual = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert len(actual) == 1
    assert "client 2 (" in actual[0]
    assert "1 test example)" in actual[0]


@pytest.mark.full
def test_a_reply_that_is_dropped_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation.from_arrays([client(12, 4), client(1, 4), client(12, 4)], Spread())
    with caplog.at_level(logging.WARNING):
        result = simulate(FedAvg(optimizer=SGD(lr=0.01), batch_size=12), federation, rounds=2, on_nan="drop")
    assert list(result.rounds[-1].lost) == ["1"]
    actual = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert len(actual) == 1
    assert actual[0].startswith("client 1 (1 training example) is left out: ")


def test_an_experiment_names_it(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X.numpy(), y=MULTI_HOT.numpy())
    fields = {
        "data": {"source": "arrays", "path": str(tmp_path / "a.npz")},
        "partition": {"clients": 2},
        "model": {"names": ["linear"]},
    }
    assert any("several classes" in note for note in ExperimentConfig.parse(fields).federation().notes)


SECONDS = 1.7e9 + np.linspace(0, 60, 12)[:, None]


@pytest.mark.parametrize("y", [SECONDS, torch.from_numpy(SECONDS), (SECONDS * 1000).astype(int)])
def test_targets_that_float32_cannot_distinguish_are_pointed_out(y: Any) -> None:
    loss = "mse" if np.asarray(y).dtype.kind != "f" else "auto"
    with warnings.catch_warnings(record=True) as actual:
        warnings.simplefilter("always")
        federation = Federation.from_arrays([(X, y), (X, y - y.min())], nn.Linear(4, 1), loss=loss)
    assert len(federation.clients[0].train.y.unique()) < 10
    (text,) = {str(w.message) for w in actual}
    assert text.startswith("client 0: the targets lie between 1")
    assert "Subtract" in text


def test_targets_of_files_that_float32_cannot_distinguish_are_pointed_out(tmp_path: Path) -> None:
    np.savez(tmp_path / "times.npz", x=X.numpy(), y=SECONDS)
    with pytest.warns(
        UserWarning, match=r"the targets in .*: the targets lie between 1700000000 and 1700000060"
    ):
        Arrays(str(tmp_path / "times.npz")).load()
    rows = [f"{float(x[0])},{float(y)}" for x, y in zip(X, SECONDS[:, 0] + 0.5, strict=True)]
    (tmp_path / "times.csv").write_text("\n".join(["a,label", *rows]))
    with pytest.warns(UserWarning, match=r"column 'label'.*: the targets lie between 1700000000\.5"):
        Csv(str(tmp_path / "times.csv"), label="label").load()


class TokenScores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(9, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.embedding(x))
        return scores


@pytest.mark.parametrize("loss", ["cross_entropy", "focal"])
def test_labels_of_tokens_may_have_a_single_positive_in_each_row(loss: str, tmp_path: Path) -> None:
    x = torch.arange(12 * 6).reshape(12, 6) % 9
    y = nn.functional.one_hot(torch.arange(12) % 6, 6)
    federation = Federation.from_arrays([{"train": (x, y), "test": (x, y)}], TokenScores(), loss=loss)
    result = simulate("fedavg", federation, rounds=1)
    accuracy = (result.predict(0, x).argmax(-1) == y).double().mean()
    assert result.mean_accuracy() == pytest.approx(float(accuracy))
    np.savez(tmp_path / "tokens.npz", x=x.numpy(), y=y.numpy())
    assert torch.equal(Arrays(str(tmp_path / "tokens.npz")).load().train.y, y)
    # one-hot rows of one class an example are still recognized
    with pytest.raises(TaskError, match=r"one-hot rows: give the number of each class, y\.argmax\(1\)"):
        Federation.from_arrays([(X, nn.functional.one_hot(Y, 2))], nn.Linear(4, 2), loss=loss)


def test_a_client_whose_numbers_an_embedding_lacks_is_named() -> None:
    generator = torch.Generator().manual_seed(0)
    small = torch.randint(0, 10, (12, 6), generator=generator)
    large, negative = small.clone(), small.clone()
    large[7, 2], negative[4, 0] = 14, -1

    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(24, 2))

    for x, part, index, numbers in ((large, "train", 7, "14"), (negative, "test", 4, "-1")):
        other = {"train": (small, Y), part: (x, Y)}
        with pytest.raises(TaskError, match=rf"client 1 \({part}\): .* at example {index} .*{numbers}"):
            Federation.from_arrays([{"train": (small, Y)}, other], model)


class SumOfColumns(nn.Module):
    """Looks up a number that no column has alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.embedding(x.sum(1))
        return scores


def test_a_model_may_look_up_what_it_computes_of_the_inputs() -> None:
    numbers = torch.arange(12) % 10
    x = torch.stack([numbers, 9 - numbers], 1)
    assert len(Federation.from_arrays([(x, Y), (x, Y)], SumOfColumns()).clients) == 2


@pytest.mark.parametrize("features", ["age", "ab", 3, {"age"}])
def test_features_that_are_no_list_are_refused(features: Any) -> None:
    frame = pd.DataFrame({"client": [0, 1] * 6, "age": X[:, 0], "a": X[:, 1], "b": X[:, 2], "ill": Y})
    example = re.escape(repr([*features] if isinstance(features, set) else [features]))
    with pytest.raises(DataError, match=rf"features= is a list of columns, such as {example}"):
        Federation.from_arrays(frame, nn.Linear(2, 2), client="client", target="ill", features=features)
    arrays = {"age": X[:, :1], "a": X[:, 1:2], "label": Y}
    with pytest.raises(DataError, match="is a list of columns"):
        Federation.from_arrays([arrays], nn.Linear(1, 2), features=features)


@pytest.mark.parametrize(
    ("y", "loss"), [(X[:, :1], None), (torch.arange(12) % 2, None), ((X[:, :1] > 0).float(), "bce")]
)
def test_a_model_that_squeezes_the_scores_of_one_example_is_named(y: Tensor, loss: str | None) -> None:
    class Squeezing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).squeeze()

    options = {} if loss is None else {"loss": loss}
    with pytest.raises(
        TaskError, match=r"model model makes one number of a batch with one example.*squeeze\(\)"
    ):
        Federation.from_arrays([(X, y)] * 2, Squeezing(X.shape[1], 1), **options)
