"""User code that changes what it is given in place: data, parameters, and the results of others are as before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlowrank
from fedlowrank import Federation, simulate
from fedlowrank.core import tree
from fedlowrank.core.errors import ConfigError

torch.set_num_threads(1)


class Scaled(nn.Module):
    """A model that normalizes its inputs."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place, self.body, self.out = in_place, nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sub_(3.0).mul_(0.5) if self.in_place else x.sub(3.0).mul(0.5)
        return self.out(torch.tanh(self.body(x)))


class First(nn.Sequential):
    """PyTorch's own layers alone, the first in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__(nn.LeakyReLU(0.5, inplace=in_place), nn.Linear(6, 3))


def clients() -> list[dict[str, tuple[Tensor, Tensor]]]:
    drawn = torch.Generator().manual_seed(0)
    actual = []
    for _ in range(3):
        parts = {}
        for part, n in (("train", 30), ("val", 12), ("test", 20)):
            x = 3 * torch.randn(n, 6, generator=drawn) + 3
            parts[part] = x, (x[:, :3]).argmax(1)
        actual.append(parts)
    return actual


@pytest.mark.parametrize("model", [Scaled, First])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_model_that_changes_its_inputs_is_one_that_does_not(model: Any, engine: Any) -> None:
    results = []
    for in_place in (False, True):
        given = clients()
        fed = Federation.from_arrays(given, lambda in_place=in_place: model(in_place), classes=3, seed=0)
        actual = simulate("fedavg", fed, rounds=3, engine=engine)
        again = simulate("standalone", fed, rounds=2, engine=engine)
        x = given[0]["test"][0].clone()
        scores = actual.predict(0, x)
        for mine, theirs in zip(given, clients(), strict=True):
            assert all(torch.equal(mine[part][0], theirs[part][0]) for part in mine)
        assert torch.equal(x, given[0]["test"][0])
        results.append((actual.accuracy(), again.accuracy(), scores))
    np.testing.assert_array_equal(results[0][:2], results[1][:2])
    torch.testing.assert_close(results[0][2], results[1][2])


@pytest.mark.parametrize("method", ["moon", "fml", "ensemble", "fedkd", "per_fedavg", "floral"])
def test_several_models_of_a_method_see_the_same_inputs(method: str) -> None:
    actual = []
    for in_place in (False, True):
        fed = Federation.from_arrays(
            clients(), lambda in_place=in_place: Scaled(in_place), classes=3, seed=0, head="out"
        )
        actual.append(simulate(method, fed, rounds=2, engine="sequential").run.state.server)
    a, b = map(tree.tensors, actual)
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_evaluation_changes_no_parameter_of_the_server() -> None:
    drawn = torch.Generator().manual_seed(0)
    # words 20 to 39 are in test examples alone
    parts = [
        {
            "train": (torch.randint(20, (24, 4), generator=drawn), torch.randint(2, (24,), generator=drawn)),
            "test": (
                torch.randint(20, 40, (24, 4), generator=drawn),
                torch.randint(2, (24,), generator=drawn),
            ),
        }
        for _ in range(3)
    ]

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(40, 5, max_norm=0.5), nn.Flatten(), nn.Linear(20, 2))

    ends = []
    for every in (1, 4):
        fed = Federation.from_arrays(parts, make, classes=2, seed=0)
        ends.append(simulate("fedavg", fed, rounds=4, evaluate_every=every).run.state.server)
    assert tree.equal(*ends)
    assert float(ends[0]["0.weight"][20:].norm(dim=1).max()) > 0.5


def in_place_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """A loss that merges two classes, as users write it."""
    targets[targets == 2] = 1
    return nn.functional.cross_entropy(scores.clamp_(-5, 5), targets, reduction="none")


def test_a_loss_that_changes_its_arguments_leaves_accuracy_and_metrics() -> None:
    def copied(scores: Tensor, targets: Tensor) -> Tensor:
        return in_place_loss(scores.clone(), targets.clone())

    actual = []
    for loss in (copied, in_place_loss):
        fed = Federation.from_arrays(clients(), lambda: nn.Linear(6, 3), classes=3, seed=0, loss=loss)
        result = simulate("fedavg", fed, rounds=2, metrics=["macro_f1"])
        actual.append([result.rounds[-1].values(name) for name in ("accuracy", "macro_f1", "loss")])
    assert actual[0] == actual[1]


def test_metrics_get_arrays_of_their_own() -> None:
    def gap(scores: Any, targets: Any) -> float:
        """Distance of the two best scores."""
        scores.sort(axis=1)
        targets[:] = 0
        return float((scores[:, -1] - scores[:, -2]).mean())

    def share(scores: Any, targets: Any) -> float:
        """Share of right answers."""
        return float((scores.argmax(1) == targets).mean())

    fed = Federation.from_arrays(clients(), lambda: nn.Linear(6, 3), classes=3, seed=0)
    result = simulate("fedavg", fed, rounds=1, metrics=[gap, "macro_f1", share])
    record = result.rounds[-1]
    np.testing.assert_allclose(record.values("share"), record.values("accuracy"))


def test_a_column_of_a_record_is_a_copy() -> None:
    fed = Federation.from_arrays(clients(), lambda: nn.Linear(6, 3), classes=3, seed=0)

    def worst(record: Any) -> None:
        record.values("accuracy").sort()

    with pytest.raises(ConfigError, match="on_round"):
        simulate("fedavg", fed, rounds=1, callbacks=[worst])
    plain = simulate("fedavg", fed, rounds=1)
    watched = simulate("fedavg", fed, rounds=1, on_round=worst)
    np.testing.assert_array_equal(watched.accuracy(), plain.accuracy())


@pytest.mark.parametrize("method", ["ensemble", "fedem"])
def test_several_models_are_not_given_as_one(method: str) -> None:
    fed = Federation.from_arrays(clients(), lambda: nn.Linear(6, 3), classes=3, seed=0)
    result = simulate(method, fed, rounds=1)
    with pytest.raises(ConfigError, match="more than one model"):
        result.personal(0)
    weights = simulate(fedlowrank.METHODS["ensemble"](mix="weights"), fed, rounds=1)
    model = nn.Linear(6, 3)
    model.load_state_dict(weights.personal(0))
    x = fed.clients[0].test.x
    torch.testing.assert_close(model(x).detach(), torch.as_tensor(weights.predict(0)), rtol=1e-4, atol=1e-5)


def test_numbers_that_float32_cannot_tell_apart_are_warned_of() -> None:
    seconds = np.arange(1_700_000_000, 1_700_000_080)[:, None]
    y = np.arange(80) % 2
    for x in (seconds, seconds.astype(float), torch.tensor(seconds)):
        with pytest.warns(UserWarning, match="Subtract 1700000000"):
            Federation.from_arrays([(x, y)], lambda: nn.Linear(1, 2), seed=0)
    # far apart, or small: nothing is said
    Federation.from_arrays([(seconds - seconds[0], y)], lambda: nn.Linear(1, 2), seed=0)
    Federation.from_arrays([(seconds * np.arange(1, 81)[:, None], y)], lambda: nn.Linear(1, 2), seed=0)


class Wrapped(nn.Module):
    """A layer that is called head, after which forward goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.head(torch.tanh(self.body(x)))


def test_a_layer_that_is_only_called_head_is_no_head() -> None:
    fed = Federation.from_arrays(clients(), Wrapped, classes=3, seed=0)
    assert len(simulate("fedavg", fed, rounds=1).accuracy()) == 3
    with pytest.raises(fedlowrank.FedlowrankError, match="does not end in 'head'"):
        simulate("fedrep", fed, rounds=1)
    with pytest.raises(fedlowrank.FedlowrankError, match="does not end in"):
        Federation.from_arrays(clients(), Wrapped, classes=3, seed=0, head="head")


def test_a_model_of_another_type_is_told_what_inputs_are() -> None:
    with pytest.raises(fedlowrank.FedlowrankError, match=r"call .float\(\)"):
        Federation.from_arrays(clients(), lambda: nn.Linear(6, 3).double(), classes=3, seed=0)
