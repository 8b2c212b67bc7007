"""Predictions of clients' models against their recorded accuracy and plain calls of their modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from torch import nn

from fedlowrank import METHODS, SGD, Federation, simulate
from fedlowrank.cli.predict_command import confusion_figure
from fedlowrank.core.errors import ConfigError, DataError
from tests.support.client_tables import read_tables

torch.set_num_threads(1)


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(torch.relu(self.body(x)))
        return scores


def federation() -> Federation:
    """Client 2 has no test examples."""
    g = torch.Generator().manual_seed(5)

    def some(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(n, 6, generator=g), torch.randint(4, (n,), generator=g)

    data = [{"train": some(30), "val": some(9), "test": some(0 if c == 2 else 20 + c)} for c in range(4)]
    return Federation.from_arrays(data, Headed, classes=["ant", "bee", "cat", "dog"])


def draw_parts(*counts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(5)
    return [(torch.randn(n, 6, generator=g), torch.randint(4, (n,), generator=g)) for n in counts]


@pytest.mark.full
@pytest.mark.parametrize("method", ["fedavg", "fedper", "per_fedavg", "ditto", "fedslr"])
def test_their_accuracy_is_the_recorded_one_exactly(method: str) -> None:
    result = simulate(METHODS[method](optimizer=SGD(lr=0.5)), federation(), rounds=2)
    by_series = read_tables(result.rounds[-1].measured)["accuracy"]
    tables = [*by_series.values()]
    assert len(tables) == (1 if method in ("fedavg", "fedper") else 2)
    assert method not in ("ditto", "fedslr") or tables[0] != tables[1]
    for series, splits in by_series.items():
        for split, recorded in splits.items():
            actual = result.predictions(split=split, series=series).groupby("client")["correct"].mean()
            assert actual.to_dict() == {i: a for i, a in enumerate(recorded) if a is not None}


@pytest.mark.full
def test_scores_and_columns_by_a_plain_call() -> None:
    result = simulate("standalone", federation(), rounds=2)
    for client in (0, 3):
        test, params = result.run.federation.clients[client].test, result.personal(client)
        with torch.no_grad():
            scores = torch.func.functional_call(Headed(), params, (test.x,))
            few = torch.func.functional_call(Headed(), params, (test.x[:3] + 1,))
        torch.testing.assert_close(result.predict(client), scores)
        torch.testing.assert_close(result.predict(client, (test.x[:3] + 1).numpy()), few)
        actual = result.predictions(client)
        assert actual["example"].tolist() == list(range(len(test)))
        assert actual["label"].tolist() == test.y.tolist()
        assert actual["prediction"].tolist() == scores.argmax(1).tolist()
        assert actual["correct"].tolist() == (scores.argmax(1) == test.y).tolist()
        np.testing.assert_allclose(actual["probability"], torch.softmax(scores, 1).amax(1), rtol=1e-5)
    assert result.predict(2).shape == (0, 4)
    assert len(result.predictions(2)) == 0
    # all examples of all clients, each by its own model
    assert result.predictions()["client"].value_counts().to_dict() == {0: 20, 1: 21, 3: 23}


def test_confusion_matrices_are_scikit_learn_s() -> None:
    result = simulate("fedavg", federation(), rounds=2)
    names = ["ant", "bee", "cat", "dog"]
    parts = {}
    for client in (0, 1, 3):
        y, chosen = result.run.federation.clients[client].test.y, result.predict(client).argmax(1)
        parts[client] = sklearn.metrics.confusion_matrix(y, chosen, labels=range(4))
        actual = result.confusion(client)
        assert actual.index.tolist() == actual.columns.tolist() == names
        assert actual.to_numpy().tolist() == parts[client].tolist()
    assert result.confusion().to_numpy().tolist() == sum(parts.values()).tolist()


def test_scores_beyond_the_classes_are_further_columns() -> None:
    data = [(part, labels % 2) for part, labels in draw_parts(40, 40)]
    # labels 0 and 1, and a model of four scores whose third is the largest for every example
    model = nn.Linear(6, 4)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.0, 0.0, 50.0, 0.0]))
    with pytest.warns(UserWarning, match="makes 4 scores, but there are 2 classes"):
        federation = Federation.from_arrays(data, model, classes=["no", "yes"])
    result = simulate("fedavg", federation, rounds=1)
    table, counts = result.predictions(), result.confusion()
    assert set(table["prediction_name"]) == {"2"}
    assert counts.index.tolist() == ["no", "yes"]
    assert counts.columns.tolist() == ["no", "yes", "2"]
    labels = np.concatenate([c.test.y.numpy() for c in federation.clients])
    assert counts.to_numpy().tolist() == [[0, 0, int((labels == label).sum())] for label in (0, 1)]
    figure = confusion_figure(counts, "two classes and three scores")
    (axes, _) = figure.axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["no", "yes", "2"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["no", "yes"]


@pytest.mark.parametrize("has_gradient", ["inputs", "targets"])
def test_a_federation_keeps_no_gradient_graph(has_gradient: str) -> None:
    data = []
    for x, labels in draw_parts(40, 40):
        y = torch.stack([x.sum(1), labels.float()], 1)
        # a leaf and a tensor with a history
        data.append(
            (x * torch.ones(6, requires_grad=True), y)
            if has_gradient == "inputs"
            else (x, y.requires_grad_())
        )
    federation = Federation.from_arrays(data, nn.Linear(6, 2))
    for client in federation.clients:
        for part in (client.train, client.val, client.test):
            assert not part.x.requires_grad
            assert not part.y.requires_grad
    result = simulate("fedavg", federation, rounds=1)
    table = result.predictions(0)
    np.testing.assert_allclose(table["target_1"], federation.clients[0].test.y[:, 1].numpy())
    x = torch.ones(2, 6, requires_grad=True)
    torch.testing.assert_close(result.predict(0, x), result.predict(0, x.detach()))
    # the tensors of the caller stay as they are
    assert data[0][has_gradient == "targets"].requires_grad


def test_a_mean_over_hostile_clients_only_names_the_cause() -> None:
    from fedlowrank import Attack

    result = simulate("fedavg", federation(), rounds=1, attack=Attack("sign_flip", share=1.0))
    with pytest.raises(
        DataError, match=r"all clients with an accuracy in the split 'val' are hostile \(run\.attack\)"
    ):
        result.mean_accuracy("val")
    assert None not in result.accuracy("val")
    with pytest.raises(DataError, match=r"no best round .* all clients with validation examples are hostile"):
        _ = result.best_round


def test_the_sum_leaves_hostile_clients_out() -> None:
    from fedlowrank import Attack

    result = simulate("fedavg", federation(), rounds=1, attack=Attack("sign_flip", share=0.25))
    (hostile,) = result.run.hostile
    total = result.confusion(split="val").to_numpy().sum()
    assert total == 9 * 3
    assert result.confusion(hostile, "val").to_numpy().sum() == 9


def test_the_sum_leaves_clients_out_that_never_train() -> None:
    result = simulate("fedavg", federation(), rounds=1, unseen=0.25)
    (unseen,) = result.run.client_sampler.unseen
    total = result.confusion(split="val").to_numpy()
    others = [result.confusion(i, "val").to_numpy() for i in range(4) if i != unseen]
    assert total.tolist() == sum(others).tolist()
    # every client has 9 examples, so the diagonal is the mean accuracy
    assert np.trace(total) / total.sum() == pytest.approx(result.mean_accuracy("val"))
    assert result.confusion(unseen, "val").to_numpy().sum() == 9


def test_regression() -> None:
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(30, 3, generator=g), torch.randn(30, 2, generator=g)) for _ in range(2)]
    result = simulate("fedavg", Federation.from_arrays(data, lambda: nn.Linear(3, 2)), rounds=1)
    test, actual = result.run.federation.clients[1].test, result.predictions(1)
    for k in range(2):
        np.testing.assert_array_equal(actual[f"target_{k}"], test.y[:, k])
        np.testing.assert_allclose(actual[f"prediction_{k}"], result.predict(1)[:, k])
        np.testing.assert_allclose(actual[f"error_{k}"], result.predict(1)[:, k] - test.y[:, k], atol=1e-6)
    with pytest.raises(ConfigError, match="no classes"):
        result.confusion()


@pytest.mark.parametrize(
    ("ask", "error", "says"),
    [
        (lambda r: r.predict(4), ConfigError, "no client 4; they are numbered from 0 to 3"),
        (lambda r: r.predict(-1), ConfigError, "no client -1"),
        (lambda r: r.predict(0, torch.zeros(2, 5)), DataError, r"shape \[n, 6\], not \[2, 5\]"),
        (lambda r: r.predict(0, {"x": torch.zeros(2, 6)}), DataError, "must be one tensor"),
        (lambda r: r.predict(0, series="globl"), ConfigError, "no series 'globl'"),
        (lambda r: r.predictions(0, "tst"), ConfigError, "Did you mean 'test'"),
    ],
)
def test_what_cannot_be_predicted(ask: Any, error: type[Exception], says: str) -> None:
    result = simulate("fedavg", federation(), rounds=1)
    with pytest.raises(error, match=says):
        ask(result)


def test_inputs_of_another_scale_than_the_bytes_trained_on() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 4, 4)).astype("uint8")
    data = [(pixels[i::2], np.arange(30) % 2) for i in range(2)]
    made = Federation.from_arrays(data, lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 2)))
    result = simulate("fedavg", made, rounds=1)
    torch.testing.assert_close(result.predict(0, pixels), result.predict(0, pixels / 255))
    for given in (pixels.astype("float32"), pixels.astype(int), -(pixels / 255)):
        with pytest.raises(DataError, match=r"values from .* unsigned bytes, which are divided by 255"):
            result.predict(0, given)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite(value: float) -> None:
    result = simulate("fedavg", federation(), rounds=1)
    x = torch.zeros(3, 6)
    x[1, 2] = value
    with pytest.raises(DataError, match=r"a NaN or an infinity in the inputs, in 1 of 3.*example 1"):
        result.predict(0, x)


def test_a_client_is_a_whole_number_of_any_kind_or_a_name() -> None:
    result = simulate("fedavg", federation(), rounds=1)
    for number in (np.int64(1), torch.tensor(1), np.array(1)):
        assert torch.equal(result.predict(number), result.predict(1))
    for given in (1.0, np.float64(1), None, [1]):
        with pytest.raises(ConfigError, match="whole number such as 0"):
            result.predict(given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="there is no client 9"):
        result.predict(9)


def test_numbers_beyond_an_embedding_are_refused_and_the_module_keeps_its_mode() -> None:
    module = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    g = torch.Generator().manual_seed(5)
    data = [(torch.randint(5, (8, 2), generator=g), torch.arange(8) % 2) for _ in range(2)]
    result = simulate("fedavg", Federation.from_arrays(data, module), rounds=1)
    module.train()
    assert result.predict(0, torch.tensor([[4, 0]])).shape == (1, 2)
    assert module.training
    with pytest.raises(
        DataError, match=r"client 0.*cannot score these inputs: index out of range.*from 0 to n - 1"
    ):
        result.predict(0, torch.tensor([[5, 0]]))
    assert module.training
