"""Models that are more or less than the trained parameters are evaluated as plain PyTorch would, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import ClientModel, Federation, Method, simulate, supervised_loss
from fedlowrank.adapters.lora.lora_factors import lora_of
from fedlowrank.adapters.lora.lora_layers import add_lora
from fedlowrank.core.errors import TaskError

G = torch.Generator().manual_seed(0)
X = torch.randn(12, 6, generator=G)


class Plain(Method[Any, Any, Any, Any]):
    title = "Plain"

    def server_init(self, task):
        return task.common_model(self.title).initial

    def local_update(self, state, down, view):
        return None, view.train(supervised_loss(view.model), down, "local", self.optimizer)

    def server_update(self, server, total, view):
        return total


def train_one(model: nn.Module, y: Tensor, **hooks: Any) -> Any:
    federation = Federation.from_arrays([(X, y)] * 2, model, val=0, seed=0)
    return simulate(type("My", (Plain,), hooks)(), federation, rounds=1)


def train_model(model: nn.Module, client_model: Callable[..., ClientModel]) -> Any:
    return train_one(model, torch.arange(12) % 3, client_model=client_model)


def test_lora_factors_may_have_another_rank() -> None:
    plain = nn.Linear(6, 3)
    w, bias = plain.weight.detach().clone(), plain.bias.detach().clone()
    a, b = torch.randn(1, 6, generator=G), torch.randn(3, 1, generator=G)

    def insert(self: Any, state: Any, down: Any, view: Any) -> ClientModel:
        (layer,) = lora_of(view.model).layers.values()
        return ClientModel({**view.model.initial, layer.a: a, layer.b: b})

    result = train_model(add_lora(plain, rank=2, alpha=6), insert)
    torch.testing.assert_close(
        torch.as_tensor(result.predict(0, X)), functional.linear(X, w + 3 * b @ a, bias)
    )


@pytest.mark.parametrize("shape", [(2, 1), (1, 6)])
def test_lora_factors_differ_in_rank_alone(shape: tuple[int, int]) -> None:
    def insert(self: Any, state: Any, down: Any, view: Any) -> ClientModel:
        (layer,) = lora_of(view.model).layers.values()
        return ClientModel({**down, layer.b: torch.zeros(shape)})

    with pytest.raises(
        TaskError, match=rf"with shape \[{shape[0]}, {shape[1]}\], and in model 'model' it has shape \[3, 2\]"
    ):
        train_model(add_lora(nn.Linear(6, 3), rank=2), insert)


def test_frozen_weights_and_statistics_may_be_moved() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    moved = {
        "0.weight": torch.randn(4, 6, generator=G),
        "1.running_mean": torch.randn(4, generator=G),
        "1.running_var": torch.rand(4, generator=G) + 0.5,
    }
    result = train_model(model, lambda self, state, down, view: ClientModel({**down, **moved}))
    hidden = functional.linear(X, moved["0.weight"], model[0].bias)
    params = result.run.state.server
    normal = functional.batch_norm(
        hidden, moved["1.running_mean"], moved["1.running_var"], params["1.weight"], params["1.bias"]
    )
    expected = functional.linear(normal, params["2.weight"], params["2.bias"])
    torch.testing.assert_close(torch.as_tensor(result.predict(0, X)), expected)


@pytest.mark.parametrize("name", ["0.bias", "0.weight"])
def test_frozen_weights_have_the_shape_of_the_model(name: str) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    with pytest.raises(TaskError, match=rf"has '{name}' with shape \[1\b"):
        train_model(model, lambda s, c, down, v: ClientModel({**down, name: model.get_parameter(name)[:1]}))


def test_a_bias_that_a_layer_does_not_have_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 3))
    with pytest.raises(TaskError, match=r"has '0.bias', which model 'model' has not"):
        train_model(model, lambda s, c, down, v: ClientModel({**down, "0.bias": torch.zeros(4)}))


def test_the_model_of_the_server_may_leave_out_what_no_client_trains() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))

    def keep_body(self: Any, state: Any, down: Any, view: Any) -> ClientModel:
        return ClientModel({n: down[n] if n[0] == "1" else t for n, t in view.model.initial.items()})

    result = train_one(
        model,
        torch.arange(12) % 3,
        client_model=keep_body,
        server_model=lambda s, server, c, v: {n: 2 * t for n, t in server.items() if n[0] == "1"},
    )
    params = result.run.state.server
    expected = functional.linear(model[0](X), 2 * params["1.weight"], 2 * params["1.bias"])
    torch.testing.assert_close(torch.as_tensor(result.predict(0, X, series="server")), expected)


@pytest.mark.parametrize("columns", [slice(0, 1), 0])
def test_scores_are_not_broadcast_over_targets(columns: Any) -> None:
    def narrow(self: Any, state: Any, down: Any, view: Any) -> ClientModel:
        return ClientModel(down, {"own": lambda x: view.model.apply(down, x)[:, columns]})

    with pytest.raises(
        TaskError,
        match=r"series 'own': its function makes \[1.*\] of one example, but its target is \[1, 2\]",
    ):
        train_one(nn.Linear(6, 2), torch.randn(12, 2, generator=G), client_model=narrow)


def test_checks_leave_cohorts_together(caplog: pytest.LogCaptureFixture) -> None:
    class Own(Plain):
        title = "Own"

        def client_init(self, client: Any, task: Any) -> Any:
            return {"bias": torch.full((3,), float(client.id))}

        def client_model(self, state: Any, down: Any, view: Any) -> ClientModel:
            params = {**down, **state}
            scores = lambda x: view.model.apply(params, x).softmax(1)  # noqa: E731
            return ClientModel(params, {"own": params, "scores": scores})

        def server_model(self, server: Any, state: Any, view: Any) -> Any:
            return server

        def local_update(self, state: Any, down: Any, view: Any) -> Any:
            return state, super().local_update(state, down, view)[1]

    data = [(torch.randn(12, 6, generator=G), torch.arange(12) % 3) for _ in range(6)]
    federation = Federation.from_arrays(data, nn.Linear(6, 3), val=0, seed=0)
    with caplog.at_level("INFO", "fedlowrank"):
        expected, actual = (
            simulate(Own(), federation, rounds=1, engine=e) for e in ("sequential", "vectorized")
        )
    assert "one client after another" not in caplog.text
    for series in ("own", "scores", "server"):
        assert actual.mean_accuracy(series=series) == expected.mean_accuracy(series=series)


def test_functions_score_test_images_of_another_size() -> None:
    class Functions(Plain):
        title = "Functions"

        def client_model(self, state: Any, down: Any, view: Any) -> ClientModel:
            return ClientModel(down, {"own": lambda x: 2 * view.model.apply(down, x)})

    def draw(height: int, width: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(12, 1, height, width, generator=G)
        return x, torch.randint(3, (12, height, width), generator=G)

    test = draw(7, 5)
    federation = Federation.from_arrays(
        [{"train": draw(4, 4), "test": test}] * 2, nn.Conv2d(1, 3, 1), seed=0, loss="cross_entropy"
    )
    result = simulate(Functions(), federation, rounds=1)
    params = result.run.state.server
    scores = 2 * functional.conv2d(test[0], params["weight"], params["bias"])
    assert result.mean_accuracy() == pytest.approx(float((scores.argmax(1) == test[1]).float().mean()))
