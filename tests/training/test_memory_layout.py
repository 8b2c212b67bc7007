"""Code of the user gets images, scores and parameters in the usual memory layout, on which ``Tensor.view`` depends."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import SGD, Federation, simulate
from fedlowrank.core.contract import Batch
from fedlowrank.methods import FedAvg

torch.set_num_threads(1)

CLASSES, STEPS, SIZE = 4, 3, 16
FEATURES = 8 * 14 * 14


class Views(nn.Module):
    """The network of a well-known tutorial of PyTorch: ``x.view`` after convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3)
        self.last = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.first(x)), 2)
        x = functional.max_pool2d(functional.relu(self.second(x)), 2)
        scores: Tensor = self.last(x.view(-1, 32))
        return scores


class Standardized(Views):
    """Standardizes the weights of a convolution: a view of a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        mean = weight.view(len(weight), -1).mean(1).view(-1, 1, 1, 1)
        x = functional.relu(functional.conv2d(x, weight - mean, self.first.bias))
        scores: Tensor = self.last(functional.adaptive_avg_pool2d(self.second(x), 2).flatten(1))
        return scores


class Normalized(Views):
    """A batch normalization, whose statistics need passes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x.view(len(x), -1)
        return super().forward(x)


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, SIZE, SIZE, generator=generator)
    return x, torch.randint(0, CLASSES, (count,), generator=generator)


METHOD = FedAvg(epochs=STEPS, batch_size=100, optimizer=SGD(lr=0.1))


def federation(model: Any, images: Tensor, targets: Tensor, **options: Any) -> Federation:
    """Two clients with the same examples, so that their mean is each one's model."""
    return Federation.from_arrays(
        [{"train": (images, targets), "test": (images, targets)}] * 2, model, **options
    )


def train_by_pytorch(network: nn.Module, x: Tensor, y: Tensor, loss: Any) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(network(x), y).mean().backward()
        optimizer.step()
    return {n: p.detach() for n, p in network.named_parameters()}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["sequential", "processes", "auto"])
@pytest.mark.parametrize("module", [Views, Standardized])
def test_a_module_that_views_is_trained_as_by_pytorch(module: type[nn.Module], engine: str) -> None:
    x, y = images(20, 0)
    network = module()
    expected = train_by_pytorch(copy.deepcopy(network), x, y, functional.cross_entropy)
    result = simulate(METHOD, federation(network, x, y, classes=CLASSES), rounds=1, engine=engine)
    assert_close(result.run.state.server, expected)
    network.load_state_dict(expected)
    torch.testing.assert_close(result.predict(0, x), network(x).detach(), rtol=1e-3, atol=1e-4)


def test_a_module_that_views_is_given_the_statistics_of_its_data() -> None:
    x, y = images(20, 0)
    network = Normalized()
    result = simulate(METHOD, federation(network, x, y, classes=CLASSES), rounds=1)
    assert_close(
        result.run.state.server, train_by_pytorch(copy.deepcopy(network), x, y, functional.cross_entropy)
    )
    assert result.rounds[-1].mean("loss", split="test") is not None


def pixel_loss(scores: Tensor, y: Tensor) -> Tensor:
    """A loss over pixels as users write it."""
    scores = scores.view(len(y), -1).view(len(y), CLASSES, -1)
    losses = functional.cross_entropy(scores, y.view(len(y), -1), reduction="none")
    return losses.mean(1)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_loss_of_the_user_views_the_scores_of_pixels(engine: str) -> None:
    x, _ = images(6, 0)
    y = torch.randint(0, CLASSES, (6, SIZE, SIZE), generator=torch.Generator().manual_seed(1))
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, CLASSES, 1))
    expected = train_by_pytorch(copy.deepcopy(network), x, y, pixel_loss)
    made = federation(network, x, y, loss=pixel_loss)
    assert_close(simulate(METHOD, made, rounds=1, engine=engine).run.state.server, expected)


@dataclasses.dataclass(frozen=True)
class Contrast(FedAvg):
    """A method of the user that reads the inputs of a batch."""

    def local_update(self, state: Any, down: Any, view: Any) -> tuple[Any, Any]:
        def energy(params: Any, batch: Batch) -> Tensor:
            return batch.x.view(len(batch), -1).square().sum()

        total = view.sum_over_data(energy, down)
        assert float(total) > 0
        return super().local_update(state, down, view)


def test_a_method_of_the_user_views_the_inputs() -> None:
    x, y = images(20, 0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(FEATURES, CLASSES))
    result = simulate(Contrast(), federation(network, x, y, classes=CLASSES), rounds=1, engine="sequential")
    assert result.rounds[-1].round == 1


def test_a_hook_that_is_registered_between_two_rounds_views_the_inputs() -> None:
    x, y = images(20, 0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(FEATURES, CLASSES))
    widths = []

    def register(record: Any) -> None:
        network[0].register_forward_hook(
            lambda layer, args, out: widths.append(out.view(len(out), -1).shape[1])
        )

    simulate(
        METHOD, federation(network, x, y, classes=CLASSES), rounds=2, engine="sequential", on_round=register
    )
    assert set(widths) == {FEATURES}
