"""Labels that count: means over examples, tables of predictions and confusion matrices leave ``ignore_index`` out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import SGD, Federation, Loss, average_by_examples, simulate
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.results.client_numbers import COUNTED_LABELS
from fedlowrank.results.evaluation.scoring import count_labels
from fedlowrank.results.measurements import ClientTable
from fedlowrank.results.records import RoundRecord
from fedlowrank.rounds.outcome.result import Result

IGNORED = (0.9, 0.0, 0.5)
"""Shares of the labels of each client that are left out."""


def run(
    x: Any, y: Any, model: Any, loss: Any = "auto", ignored: int | None = None, **settings: Any
) -> Result:
    """A run on three clients with labels of which some are left out."""
    g = torch.Generator().manual_seed(1)
    data = []
    for share in IGNORED:
        inputs = x(g)
        labels = y(inputs)
        if ignored is not None:
            labels[torch.rand(labels.shape, generator=g) < share] = ignored
        data.append((inputs, labels))
    federation = Federation.from_arrays(data, model, test=0.5, loss=loss)
    return simulate(FedAvg(optimizer=SGD(lr=0.2)), federation, rounds=2, evaluate_every=1, **settings)


def vectors(**settings: Any) -> Result:
    return run(
        lambda g: torch.randn(40, 6, generator=g),
        lambda x: x[:, :3].argmax(1),
        lambda: nn.Linear(6, 3),
        Loss("cross_entropy", ignore_index=9),
        9,
        **settings,
    )


def images() -> Result:
    return run(
        lambda g: torch.randn(20, 3, 4, 5, generator=g),
        lambda x: x.argmax(1),
        lambda: nn.Conv2d(3, 3, 1),
        Loss("cross_entropy", ignore_index=255),
        255,
    )


def pooled(result: Result, ignored: int) -> tuple[float, float]:
    """Accuracy and loss on the labels of all clients together, by PyTorch."""
    actual = []
    for i, client in enumerate(result.run.federation.clients):
        scores, y = result.predict(i), client.test.y
        counts = y != ignored
        losses = functional.cross_entropy(scores, y, ignore_index=ignored, reduction="none")
        actual.append(torch.stack([(scores.argmax(1) == y)[counts].float(), losses[counts]]))
    accuracy, loss = torch.cat(actual, 1).mean(1).tolist()
    return accuracy, loss


@pytest.mark.parametrize(("make", "ignored"), [(vectors, 9), (images, 255)])
def test_the_weighted_mean_is_that_of_all_labels_together(make: Any, ignored: int) -> None:
    result = make()
    rows = result.to_frame(last=True).query("split == 'test'").assign(all=1)
    for name, expected in zip(("accuracy", "loss"), pooled(result, ignored), strict=True):
        last = result.measurements.over_clients(name, "personal").iloc[-1]
        assert last["weighted"] == pytest.approx(expected, abs=1e-5)
        assert average_by_examples(rows, "all", name).item() == pytest.approx(expected, abs=1e-5)
        # not the mean by the numbers of examples
        assert np.average(rows[name], weights=rows["n"]) != pytest.approx(expected, abs=1e-3)
    tests = [client.test.y for client in result.run.federation.clients]
    assert rows[COUNTED_LABELS].tolist() == [int((y != ignored).sum()) for y in tests]
    assert rows["n"].tolist() == [len(y) for y in tests]
    assert COUNTED_LABELS not in result.measurements.metrics


def test_predictions_and_confusion_leave_them_out() -> None:
    result = vectors()
    actual = result.predictions()
    truth: list[Tensor] = []
    chosen: list[Tensor] = []
    for i, client in enumerate(result.run.federation.clients):
        y, own = client.test.y, result.predict(i).argmax(1)
        counts = y != 9
        rows = actual[actual["client"] == i]
        assert rows["example"].tolist() == counts.nonzero().flatten().tolist()
        assert rows["correct"].mean() == result.accuracy()[i]
        truth, chosen = [*truth, y[counts]], [*chosen, own[counts]]
    expected = sklearn.metrics.confusion_matrix(torch.cat(truth), torch.cat(chosen), labels=range(3))
    assert result.confusion().to_numpy().tolist() == expected.tolist()


def test_labels_of_minus_100_are_left_out_where_classes_have_names() -> None:
    data = [(torch.randn(20, 3), torch.arange(20) % 3) for _ in range(2)]
    data[0][1][::2] = -100
    federation = Federation.from_arrays(
        data, lambda: nn.Linear(3, 3), classes=["ant", "bee", "cat"], loss="cross_entropy", test=0.5
    )
    actual = simulate("fedavg", federation, rounds=1).predictions()
    assert len(actual) == sum(int((c.test.y >= 0).sum()) for c in federation.clients)
    assert set(actual["label_name"]) == {"ant", "bee", "cat"}


def test_without_any_label_left_out_nothing_is_added() -> None:
    result = run(
        lambda g: torch.randn(20, 6, generator=g),
        lambda x: x[:, :3].argmax(1),
        lambda: nn.Linear(6, 3),
        "cross_entropy",
    )
    measured = result.rounds[-1].measured
    assert measured is not None
    assert COUNTED_LABELS not in {column.name for column in measured.columns}
    assert COUNTED_LABELS not in result.to_frame()


def test_records_of_earlier_versions_are_weighted_by_examples() -> None:
    result = vectors()
    old = []
    for record in result.rounds:
        assert record.measured is not None
        columns = [column for column in record.measured.columns if column.name != COUNTED_LABELS]
        line = replace(record, measured=ClientTable(record.measured.client_ids, columns)).to_line()
        old.append(RoundRecord.from_line(line))
    before = Result(result.run, old)
    rows = before.to_frame(last=True).query("split == 'test'").assign(all=1)
    expected = np.average(rows["accuracy"], weights=rows["n"])
    assert average_by_examples(rows, "all").item() == pytest.approx(expected)
    last = before.measurements.over_clients("accuracy", "personal").iloc[-1]
    assert last["weighted"] == pytest.approx(expected)


def test_who_is_not_evaluated_weighs_nothing() -> None:
    result = vectors(evaluate_clients=2)
    rows = result.to_frame(last=True).query("split == 'test'")
    last = result.measurements.over_clients("accuracy", "personal").iloc[-1]
    assert last["weighted"] == pytest.approx(np.average(rows["accuracy"], weights=rows[COUNTED_LABELS]))
    assert (last["clients"], last["not_evaluated"]) == (2, 1)


class Words(nn.Module):
    """Scores of the next of seven tokens for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, input_ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embedding(input_ids))
        return scores


def test_texts_are_weighted_by_their_tokens() -> None:
    g = torch.Generator().manual_seed(2)
    data = []
    for longest in (3, 8, 12):
        ids = torch.randint(7, (12, 12), generator=g)
        labels = ids.clone()
        labels[:, longest:] = -100
        data.append({"train": ({"input_ids": ids}, labels), "test": ({"input_ids": ids}, labels)})
    federation = Federation.from_arrays(data, Words, loss="next_token")
    result = simulate(FedAvg(optimizer=SGD(lr=0.2)), federation, rounds=1)
    module = Words()
    losses = []
    for i, client in enumerate(federation.clients):
        module.load_state_dict(result.personal(i))
        scores, expected = module(client.test.x["input_ids"])[:, :-1], client.test.y[:, 1:]  # type: ignore[index]
        losses.append(
            functional.cross_entropy(scores[expected >= 0], expected[expected >= 0], reduction="none")
        )
    last = result.measurements.over_clients("loss", "personal").iloc[-1]
    assert last["weighted"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-4)
    frame = result.to_frame(last=True).query("split == 'test'")
    assert frame[COUNTED_LABELS].tolist() == [12 * 2, 12 * 7, 12 * 11]


def test_the_numbers_of_labels_of_every_kind() -> None:
    from fedlowrank.data.dataset import Examples

    x = torch.zeros(4, 2)
    masks = torch.zeros(4, 1, 3, 2)
    assert count_labels(Examples(x, masks), Loss("bce")) == 24
    assert count_labels(Examples(x, masks), Loss("mse")) == 4
    # several labels an example are right or wrong together
    assert count_labels(Examples(x, torch.zeros(4, 5)), Loss("bce")) == 4
    assert count_labels(Examples(x, torch.zeros(4, dtype=torch.int64)), Loss()) == 4
