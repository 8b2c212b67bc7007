"""Awkward modules, losses and federations get the same answer from every method."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import SGD, Federation, simulate
from fedlowrank.adapters.state_dict import full_state_dict
from fedlowrank.core import tree
from fedlowrank.core.contract import AnyMethod, Batch, ClientView, Method, ServerView, Task
from fedlowrank.core.errors import LossError, TaskError
from fedlowrank.methods import METHODS
from fedlowrank.rounds.outcome.result import Result
from fedlowrank.training.trainer import LocalTrainer

from .setting import KINDS

LR = 0.2


class Net(nn.Module):
    """A body of one layer and a head."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.body(x)))
        return scores


def clients(sizes: tuple[int, ...] = (9, 7)) -> list[dict[str, tuple[Tensor, Tensor]]]:
    g = torch.Generator().manual_seed(5)
    actual = []
    for n in sizes:
        x, y = torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g)
        actual.append({"train": (x, y), "test": (x[:4] + 1, y[:4])})
    return actual


def federation(model: Any = Net, sizes: tuple[int, ...] = (9, 7), **kwargs: Any) -> Federation:
    return Federation.from_arrays(clients(sizes), model, classes=3, rank=[2] * len(sizes), **kwargs)


def method(name: str, **fields: Any) -> AnyMethod:
    return METHODS[name](**{"batch_size": 4, "optimizer": SGD(lr=LR), **fields})


def personal(result: Result) -> list[dict[str, Tensor]]:
    # of an ensemble the model with the largest share
    run = result.run
    models = run.federation.architectures
    return [full_state_dict(models[i.architecture], run.personal_params(i)) for i in run.federation.infos]


# -- modules whose scores have no gradient -------------------------------------------------------------------
class Detached(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class WithoutGradient(Net):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Inference(Net):
    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Hard(nn.Module):
    """Scores that are 0 or 1, of a type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.dtype = Net(), dtype

    def forward(self, x: Tensor) -> Tensor:
        return functional.one_hot(self.net(x).argmax(-1), 3).to(self.dtype)


class DetachedInTraining(Net):
    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        return scores.detach() if self.training else scores


class WithoutGraphInTraining(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.training):
            return super().forward(x)


class DetachedInBatches(Net):
    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        return scores.detach() if self.training and len(x) > 1 else scores


class GraphInTrainingAlone(Net):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        with torch.no_grad():
            return super().forward(x)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Detached, r"client 0: no gradient of the scores of model model reaches .*detach\(\)"),
        (WithoutGradient, "client 0: no gradient of the scores of model model"),
        (Inference, "client 0: no gradient of the scores of model model"),
        (DetachedInTraining, "client 0: no gradient of the scores of model model .*training mode"),
        (WithoutGraphInTraining, "client 0: no gradient of the scores of model model .*training mode"),
        (lambda: Hard(torch.float32), "client 0: no gradient of the scores of model model .*argmax"),
        (lambda: Hard(torch.int64), "client 0: model model makes scores of type torch.int64"),
    ],
)
def test_scores_without_a_gradient_are_refused_before_any_method(model: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        federation(model)


def type_with(cls: type[Net], start: Net) -> Net:
    made = cls()
    made.load_state_dict(start.state_dict())
    return made


def test_a_graph_in_training_alone_is_enough() -> None:
    torch.manual_seed(0)
    start = Net()
    actual, expected = (
        simulate(method("fedavg"), federation(type_with(cls, start)), rounds=2)
        for cls in (GraphInTrainingAlone, Net)
    )
    assert tree.equal(personal(actual), personal(expected))
    assert not torch.equal(personal(actual)[0]["head.weight"], start.head.weight)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("name", "sweep"), [("fedavg", "local"), ("per_fedavg", "adapt"), ("fedrep", "head")]
)
def test_a_loss_without_a_gradient_names_client_round_and_pass(name: str, sweep: str, engine: str) -> None:
    with pytest.raises(LossError, match=rf"client 0, round 1, pass '{sweep}': no gradient reaches what"):
        simulate(method(name), federation(DetachedInBatches), rounds=1, engine=engine)


# -- frozen parts --------------------------------------------------------------------------------------------
def frozen(part: str) -> Net:
    torch.manual_seed(1)
    made = Net()
    made.get_submodule(part).requires_grad_(False)
    return made


def test_a_pass_over_a_frozen_part_changes_nothing() -> None:
    start = frozen("body")
    result = simulate(method("fedrep"), federation(start), rounds=1)
    run = result.run
    for k, data in enumerate(run.federation.clients):
        # by hand: the head alone, by the batches of the pass of that name
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.head.parameters(), lr=LR)
        trainer = run.engine.trainer(run.method, run.federation, 0, run.federation.infos[k])
        for index in trainer.data.order("head"):
            optimizer.zero_grad()
            functional.cross_entropy(model(data.train.inputs[index]), data.train.y[index]).backward()
            optimizer.step()
        actual = result.personal(k)
        assert torch.equal(actual["body.weight"], start.body.weight)
        torch.testing.assert_close(actual["head.weight"], model.head.weight.detach())
    # FedRoD's personal head is an addition to what is trained of the generic one
    assert torch.equal(
        personal(simulate(method("fedrod"), federation(frozen("head")), rounds=1))[0]["head.bias"],
        frozen("head").head.bias,
    )
    for name, part in (("fedbabu", "body"), ("fedrep", "head"), ("fedper", "body"), ("lg_fedavg", "head")):
        for engine in ("sequential", "vectorized"):
            simulate(method(name), federation(frozen(part)), rounds=1, engine=engine)


# -- losses --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Own(Method[Any, None, Any, Any]):
    """FedAvg with a loss of the user's."""

    kind: str = "dropout"
    title = "Own"

    def server_init(self, task: Task) -> Any:
        return task.common_model(self.title).initial

    def local_update(self, state: None, down: Any, view: ClientView) -> tuple[None, Any]:
        model, kind = view.model, self.kind

        def loss(params: Any, batch: Batch) -> Any:
            r = functional.dropout(model.represent(params, batch.x), 0.5, training=model.training)
            each = functional.cross_entropy(model.head(params, r), batch.y, reduction="none")
            return {"dropout": batch.mean(each), "number": 0.5, "vector": each}[kind]

        def mode(params: Any, batch: Batch) -> Tensor:
            return torch.tensor(float(model.training))

        assert float(view.sum_over_data(mode, down)) == 0.0
        assert model.training is False
        return None, view.train(loss, down, "local", self.optimizer)

    def server_update(self, server: Any, total: Any, view: ServerView) -> Any:
        return total


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ["sequential", "vectorized", "processes"])
def test_a_loss_that_asks_for_the_training_mode(engine: str) -> None:
    torch.manual_seed(2)
    start = Net()
    run = simulate(Own(batch_size=4, optimizer=SGD(lr=LR)), federation(start), rounds=1, engine=engine).run
    ends = []
    for k, data in enumerate(run.federation.clients):
        model = copy.deepcopy(start)
        trainer = run.engine.trainer(run.method, run.federation, 0, run.federation.infos[k])
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        torch.manual_seed((trainer.data.key / "local").seed())
        for index in trainer.data.order("local"):
            optimizer.zero_grad()
            r = functional.dropout(torch.tanh(model.body(data.train.inputs[index])), 0.5)
            functional.cross_entropy(model.head(r), data.train.y[index]).backward()
            optimizer.step()
        ends.append(model.head.weight.detach())
    torch.testing.assert_close(run.state.server["head.weight"], (9 * ends[0] + 7 * ends[1]) / 16)


@pytest.mark.parametrize(("kind", "said"), [("number", "is a float"), ("vector", r"is a tensor \[4\]")])
def test_a_loss_that_is_no_number_is_named(kind: str, said: str) -> None:
    for engine in ("sequential", "vectorized"):
        with pytest.raises(LossError, match=f"client 0, round 1, pass 'local': the loss {said}"):
            simulate(Own(kind=kind, batch_size=4), federation(), rounds=1, engine=engine)


def test_every_pass_of_every_method_is_in_training_mode_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where, seen = [""], set()

    class Recording(Net):
        def forward(self, x: Tensor) -> Tensor:
            seen.add((where[-1], self.training, self.body.training))
            return super().forward(x)

    def record(kind: str, inner: Any) -> None:
        def inside(*args: Any) -> Any:
            where.append(kind)
            try:
                return inner(*args)
            finally:
                where.pop()

        monkeypatch.setattr(LocalTrainer, kind, inside)

    record("train", LocalTrainer.train)
    record("sum_over_data", LocalTrainer.sum_over_data)
    for name in KINDS:
        data = federation(Recording)
        seen.clear()
        simulate(method(name), data, rounds=1)
        # a received model that a loss reads, and nothing trains, is without dropout
        read = {("train", False, False)} if name in ("fedem", "moon") else set()
        assert seen <= {("train", True, True), ("sum_over_data", False, False), ("", False, False), *read}, (
            name
        )
        assert {w for w, *_ in seen} >= {"train", ""}, name


# -- small and uneven federations ----------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "names", "sizes"), [("sequential", METHODS, (5,)), ("vectorized", KINDS[::2], (5, 3))]
)
def test_a_batch_above_the_data_is_all_of_them(engine: str, names: Any, sizes: tuple[int, ...]) -> None:
    for name in names:
        actual, expected = (
            personal(simulate(method(name, batch_size=b), federation(sizes=sizes), rounds=1, engine=engine))
            for b in (10_000, 5)
        )
        assert tree.equal(actual, expected), name


class Convolution(nn.Module):
    """Takes images of any size."""

    head_name = "head"

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.body(x)).mean((2, 3)))
        return scores


def test_clients_whose_inputs_differ_in_shape() -> None:
    g = torch.Generator().manual_seed(6)
    data = []
    for width in (8, 6):
        x, y = torch.randn(12, 1, width, width, generator=g), torch.arange(12) % 3
        data.append({"train": (x[:6], y[:6]), "test": (x[6:], y[6:])})
    for name in KINDS:
        result = simulate(
            method(name), Federation.from_arrays(data, Convolution, classes=3, rank=[2, 2]), rounds=1
        )
        if name != "fedavg":
            continue
        plain = Convolution()
        plain.load_state_dict(result.run.state.server)
        right = [float((plain(c["test"][0]).argmax(-1) == c["test"][1]).double().mean()) for c in data]
        assert result.rounds[-1].values() == pytest.approx(right)
