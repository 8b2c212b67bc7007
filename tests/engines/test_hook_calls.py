"""Hooks draw by their client and round in every engine; simulate refuses hooks that change arguments or keep values."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlowrank import SGD, ClientModel, Each, Federation, Mean, Method, simulate, supervised_loss
from fedlowrank.core.contract import ClientInfo, ClientView, ServerView, Task
from fedlowrank.core.errors import TaskError
from fedlowrank.core.tree import Params, tensors

CLIENTS, ROUNDS = 6, 3


def federation() -> Federation:
    generator = torch.Generator().manual_seed(0)
    data = [
        (
            torch.randn(12 + 4 * i, 4, generator=generator),
            torch.randint(3, (12 + 4 * i,), generator=generator),
        )
        for i in range(CLIENTS)
    ]
    torch.manual_seed(0)
    return Federation.from_arrays(data, nn.Linear(4, 3), classes=3, seed=0)


class Plain(Method[Any, Any, Any, Any]):
    title = "Plain"

    def server_init(self, task: Task) -> Params:
        return task.common_model(self.title).initial

    def trained(self, down: Params, view: ClientView) -> Params:
        return view.train(supervised_loss(view.model), down, "local", self.optimizer)

    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        return state, self.trained(down, view)

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        return total


class DrawsFromGlobalGenerators(Plain):
    """Collects numbers from the generators of torch, Python and numpy, from ``first_round`` on, after training."""

    first_round: ClassVar[int] = 0

    def client_init(self, client: ClientInfo, task: Task) -> list[Tensor]:
        return []

    def local_update(
        self, state: list[Tensor], down: Params, view: ClientView
    ) -> tuple[list[Tensor], Params]:
        end = self.trained(down, view)
        if view.round < self.first_round:
            return state, end
        draws = [torch.rand(()), torch.tensor(random.random()), torch.tensor(float(np.random.rand()))]  # noqa: NPY002 - what a user writes
        return [*state, torch.stack(draws).double()], end


class DrawsLater(DrawsFromGlobalGenerators):
    """A cohort is compared with a single client in the first round, in which nothing is drawn."""

    first_round: ClassVar[int] = 1


def drawn_numbers(method: Method[Any, Any, Any, Any], engine: Any) -> list[float]:
    result = simulate(method, federation(), rounds=ROUNDS, engine=engine, evaluate_every=1)
    return torch.cat([torch.cat(tensors(result.client_state(i))) for i in range(CLIENTS)]).tolist()


@pytest.mark.parametrize("kind", [DrawsFromGlobalGenerators, DrawsLater])
def test_global_draws_of_client_hooks_differ_and_are_the_same_in_every_engine(kind: type[Plain]) -> None:
    numbers = drawn_numbers(kind(batch_size=8), "sequential")
    assert len(set(numbers)) == len(numbers)
    for engine in ("wire", "vectorized", "processes"):
        random.seed(7)
        torch.manual_seed(7)
        np.random.seed(7)  # noqa: NPY002 - user code draws from it
        assert drawn_numbers(kind(batch_size=8), engine) == numbers


class BuildsModules(Plain):
    """Makes layers in its hooks, whose initial weights come from torch's global generator, and chooses clients by Python's."""

    def server_init(self, task: Task) -> Params:
        return {name: p.detach().clone() for name, p in nn.Linear(4, 3).named_parameters()}

    def client_init(self, client: ClientInfo, task: Task) -> Params:
        return {"head": nn.Linear(4, 3).weight.detach().clone()}

    def participants(self, sampled: list[int], available: list[int]) -> list[int]:
        return sorted(random.sample(available, 3))

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        return {name: p + 0.1 * torch.rand(p.shape) for name, p in total.items()}

    def client_model(self, state: Params, down: Params, view: ClientView) -> ClientModel:
        return ClientModel(
            {**down, "weight": down["weight"] + state["head"] + torch.rand(down["weight"].shape)}
        )


def outcome(engine: Any, seed: int) -> tuple[list[Any], list[list[int]]]:
    """All states at the end, the results of each client, and who took part, with the process's generators at ``seed``."""
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - user code draws from it
    result = simulate(BuildsModules(batch_size=8), federation(), rounds=ROUNDS, engine=engine)
    states = [result.server_state, *(result.client_state(i) for i in range(CLIENTS))]
    heads = [state["head"].flatten().tolist() for state in states[1:]]
    assert len({tuple(head) for head in heads}) == CLIENTS
    numbers = [t.tolist() for t in tensors(states)]
    table = result.rounds[-1].measured
    assert table is not None
    return [numbers, [column.values for column in table.columns]], [
        sorted(r.participants) for r in result.rounds[1:]
    ]


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "processes"])
def test_modules_that_hooks_make_and_clients_that_they_choose_are_those_of_the_seed(engine: Any) -> None:
    assert outcome(engine, 7) == outcome(engine, 8)


def test_a_client_begins_with_the_layer_that_its_own_key_gives() -> None:
    data, method = federation(), BuildsModules(batch_size=8)
    result = simulate(method, data, rounds=1, engine="sequential")
    for i in range(CLIENTS):
        torch.manual_seed((data.task(1).key / i / "hook" / "client_init").seed())
        assert torch.equal(result.client_state(i)["head"], nn.Linear(4, 3).weight)


class DrawsInDownload(Plain):
    def download(self, server: Params, client: ClientInfo) -> Params:
        return {name: p + torch.rand(()) for name, p in server.items()}


class DrawsInContribution(Plain):
    def contribution(self, server: Params, upload: Params, client: ClientInfo) -> Mean:
        return Mean(upload, client.example_count * random.random())


class DrawsInServerMetrics(Plain):
    def server_metrics(self, server: Params) -> dict[str, dict[str, float]]:
        return {"noise": {"size": float(np.random.rand())}}  # noqa: NPY002 - what a user writes


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "processes"])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (DrawsInDownload, r"DrawsInDownload.download \(client \d, round 1\) draws from a global generator"),
        (DrawsInContribution, r"DrawsInContribution.contribution \(round 1\) draws from a global generator"),
        (DrawsInServerMetrics, r"DrawsInServerMetrics.server_metrics \(round 0\) draws from a global generator"),
    ],
)  # fmt: skip
def test_a_hook_without_a_key_draws_nothing(kind: type[Plain], says: str, engine: Any) -> None:
    with pytest.raises(TaskError, match=says):
        simulate(kind(batch_size=8), federation(), rounds=2, engine=engine)


def test_client_hooks_leave_the_global_generators_as_they_were() -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = torch.rand(1).item(), random.random()
    data = federation()
    torch.manual_seed(3)
    random.seed(3)
    simulate(DrawsFromGlobalGenerators(batch_size=8), data, rounds=1, engine="sequential")
    assert (torch.rand(1).item(), random.random()) == expected


def scale(value: Params) -> None:
    for t in value.values():
        t.mul_(0.9)


class ChangesDownload(Plain):
    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        end = self.trained(down, view)
        scale(down)
        return state, end


class ChangesState(Plain):
    def client_init(self, client: ClientInfo, task: Task) -> Params:
        return {"momentum": torch.ones(2)}

    def local_update(self, state: Params, down: Params, view: ClientView) -> tuple[Any, Any]:
        scale(state)
        return state, self.trained(down, view)


class ChangesUpload(Plain):
    def contribution(self, server: Params, upload: Params, client: ClientInfo) -> Mean:
        scale(upload)
        return Mean(upload, client.example_count)


class ChangesServerInContribution(Plain):
    def contribution(self, server: Params, upload: Params, client: ClientInfo) -> Mean:
        scale(server)
        return Mean(upload, client.example_count)


class ChangesServer(Plain):
    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        scale(server)
        return total


class ChangesInitial(Plain):
    def server_init(self, task: Task) -> Params:
        scale(task.common_model(self.title).initial)
        return task.common_model(self.title).initial


class ShrinksInEvaluation(Plain):
    def client_model(self, state: Any, down: Params, view: ClientView) -> ClientModel:
        scale(down)
        return ClientModel(down)


class ProxChangesConstant(Plain):
    def trained(self, down: Params, view: ClientView) -> Params:
        def prox(params: Params, lr: float, center: Params) -> Params:
            scale(center)
            return params

        loss = supervised_loss(view.model)
        return view.train(
            lambda p, batch, _: loss(p, batch), down, "local", self.optimizer, constants=(down,), prox=prox
        )


class StoresOnItself(Plain):
    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        start = getattr(self, "previous", down)
        self.previous = self.trained(start, view)
        return state, self.previous


class StoresOnModel(Plain):
    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        model: Any = view.model
        model.previous = self.trained(getattr(model, "previous", down), view)
        return state, model.previous


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "processes"])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (ChangesDownload, r"ChangesDownload.local_update \(client \d, round 1\) changes its argument 'down'.*/weight"),
        (ChangesState, r"local_update \(client \d, round 1\) changes its argument 'state' in place, at /momentum"),
        (ChangesUpload, r"contribution \(client \d, round 1\) changes its argument 'upload' in place, at /weight"),
        (ChangesServerInContribution, r"download or contribution \(round 1\) changes its argument 'server'"),
        (ChangesServer, r"server_update \(round 1\) changes its argument 'server' in place, at /weight"),
        (ChangesInitial, r"server_init changes its argument 'task' in place, at /model/weight"),
        (ShrinksInEvaluation, r"client_model \(client \d.*\) changes its argument 'down' in place, at /weight"),
        (ProxChangesConstant, r"\(client \d, round 1, pass 'local'\) changes its argument 'constants'.*/0/weight"),
        (StoresOnItself, r"StoresOnItself.local_update \(client \d, round 1\) stores previous on self"),
        (StoresOnModel, r"StoresOnModel.local_update \(client \d, round 1\) stores previous on view.model"),
    ],
)  # fmt: skip
def test_simulate_refuses_a_hook_that_changes_its_arguments_or_stores_values(
    kind: type[Plain], says: str, engine: Any
) -> None:
    with pytest.raises(TaskError, match=says):
        simulate(kind(batch_size=8, optimizer=SGD(lr=0.1)), federation(), rounds=2, engine=engine)


KEPT: list[Params] = []


class KeepsInModule(Plain):
    """Trains from what the call before has trained."""

    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        KEPT.append(self.trained(KEPT[-1] if KEPT else down, view))
        return state, KEPT[-1]


class SendsWhatItKept(Plain):
    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        end = self.trained(down, view)
        KEPT.append(end)
        return state, {name: 0.5 * (p + KEPT[0][name]) for name, p in end.items()}


@pytest.mark.parametrize("kind", [KeepsInModule, SendsWhatItKept])
def test_a_kept_value_of_a_cohort_is_a_task_error(kind: Callable[..., Plain]) -> None:
    KEPT.clear()
    with pytest.raises(
        TaskError, match=r"local_update \(client \d, round 1\) uses a value that another call has kept"
    ):
        simulate(kind(batch_size=8), federation(), rounds=2, engine="vectorized")


@dataclass(frozen=True)
class SetsUpItself(Plain):
    """Sets attributes when it is made, and returns new containers with old tensors: nothing of it is refused."""

    factor: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "twice", 2 * self.factor)

    def client_init(self, client: ClientInfo, task: Task) -> dict[str, Any]:
        return {"rounds": 0, "last": torch.zeros(1)}

    def local_update(self, state: dict[str, Any], down: Params, view: ClientView) -> tuple[Any, Any]:
        end = self.trained(down, view)
        state["rounds"] += 1
        return state, end


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_value_of_one_client_alone_may_be_no_tree(engine: Any) -> None:
    class SendsAnything(Plain):
        def contribution(self, server: Params, upload: Params, client: ClientInfo) -> Any:
            return {"mean": Mean(upload, 1.0), "own": Each((np.ones(2), {client.id}))}

        def server_update(self, server: Params, total: Any, view: ServerView) -> Params:
            assert [own[1] for own in total["own"].values()] == [{i} for i in range(CLIENTS)]
            return dict(total["mean"])

    simulate(SendsAnything(optimizer=SGD(0.1)), federation(), rounds=1, engine=engine)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_attributes_of_a_new_method_and_changed_containers_are_accepted(engine: Any) -> None:
    result = simulate(SetsUpItself(batch_size=8), federation(), rounds=2, engine=engine)
    assert [result.client_state(i)["rounds"] for i in range(CLIENTS)] == [2] * CLIENTS


@dataclass(frozen=True)
class FailsAtOneClient(Plain):
    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        trained_params = self.trained(down, view)
        if view.info.id == 3 and view.round == 1:
            trained_params["weight"] @ torch.ones(2)
        return state, trained_params


@dataclass(frozen=True)
class ProxReturnsNothing(Plain):
    def trained(self, down: Params, view: ClientView) -> Params:
        return view.train(supervised_loss(view.model), down, "local", self.optimizer, prox=lambda p, *_: None)


@dataclass(frozen=True)
class LosesItsState(Plain):
    def client_init(self, client: ClientInfo, task: Task) -> list[Tensor]:
        return [torch.zeros(1)]

    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        return None, self.trained(down, view)


def test_an_error_of_pytorch_in_a_hook_has_a_note_with_hook_client_and_round() -> None:
    with pytest.raises(RuntimeError) as caught:
        simulate(FailsAtOneClient(optimizer=SGD(0.1)), federation(), rounds=ROUNDS, engine="sequential")
    assert "FailsAtOneClient.local_update (client 3, round 2)" in caught.value.__notes__


def test_a_prox_that_returns_nothing_and_a_lost_state_are_named() -> None:
    with pytest.raises(TaskError, match=r"prox, in pass 'local'.*must return a tree like its first argument"):
        simulate(ProxReturnsNothing(optimizer=SGD(0.1)), federation(), rounds=1, engine="sequential")
    with pytest.raises(
        TaskError, match=r"LosesItsState\.local_update returned None for the client's next state"
    ):
        simulate(LosesItsState(optimizer=SGD(0.1)), federation(), rounds=1, engine="sequential")
