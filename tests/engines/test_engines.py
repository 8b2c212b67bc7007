"""What engines promise: the same result however clients are executed, honest accounts, and errors that
surface."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedlowrank.core import tree
from fedlowrank.core.contract import (
    NO_UPDATE,
    AnyMethod,
    Batch,
    ClientInfo,
    ClientModel,
    ClientView,
    Each,
    Method,
    Pass,
    ServerView,
    Sum,
    Task,
    Update,
)
from fedlowrank.core.contract.contribution import mean
from fedlowrank.core.errors import ConfigError, NonFiniteError
from fedlowrank.core.learning.batch_losses import cross_entropy, supervised_loss
from fedlowrank.core.learning.optimizer import SGD, AdamW, Group, Schedule
from fedlowrank.core.tree import Params, add, dot, sub, zeros_like
from fedlowrank.data.dataset import ClientData, Examples
from fedlowrank.data.federation import Federation
from fedlowrank.engines import ENGINES, Sequential
from fedlowrank.methods import METHODS
from fedlowrank.methods.ditto import Ditto
from fedlowrank.methods.fedavg import FedAvg
from fedlowrank.methods.pfedlora import PFedLoRA
from fedlowrank.methods.shared.lora_family import LoRATraining
from fedlowrank.methods.standalone import Standalone
from fedlowrank.models.architecture import Architecture
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.testing.check import CHECKS, check_method, small_federation
from fedlowrank.training.trainer import LocalTrainer
from fedlowrank.trust.trust_settings import Clipping
from tests.methods.setting import KINDS
from tests.support.client_tables import read_tables
from tests.support.counting_engine import CountingEngine
from tests.support.standard_layers import standard_layers

torch.set_num_threads(1)

HERE = ["sequential", "vectorized", "wire"]
"""Engines that execute a method in this process, where a test can listen."""

LOCAL = [name for name in ENGINES if name != "ray"]
"""All engines but that of test_ray.py, whose start takes seconds."""

NAMES = {test.__name__.removeprefix("_check_"): name for name, test in CHECKS.items()}
"""Full names of the checks by a short one."""


@dataclass(frozen=True)
class Plain(Method[Params, Any, Params, Any]):
    """FedAvg in few lines, sound; each test below breaks one thing of it."""

    batch_size: int = 8
    optimizer: SGD | AdamW = SGD(lr=0.05)

    title: ClassVar[str] = "Plain"
    citation: ClassVar[str] = "none"

    def server_init(self, task: Task) -> Params:
        return task.common_model(self.title).initial

    def client_init(self, client: ClientInfo, task: Task) -> Any:
        return {"count": torch.zeros(1)}

    def download(self, server: Params, client: ClientInfo) -> Params:
        return server

    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        return {"count": state["count"] + 1}, self.trained(down, view)

    def trained(self, down: Params, view: ClientView) -> Params:
        model = view.model

        def loss(theta: Params, batch: Batch) -> Tensor:
            return cross_entropy(model.apply(theta, batch.x), batch)

        return view.train(loss, down, "local", self.optimizer)

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        return total


def failed(method: AnyMethod) -> dict[str, str]:
    """Short names of the checks that a method fails, with what they found."""
    short = {name: s for s, name in NAMES.items()}
    return {short[f.name]: f.detail for f in check_method(method) if not f.ok}


def run_of(method: AnyMethod, engine: str, on: Federation, rounds: int = 2, **settings: Any) -> Run:
    run = Run(method, on, RunSettings(rounds=6, **settings), ENGINES[engine]())
    for _ in range(rounds):
        run.step()
    return run


def gap(one: Run, other: Run) -> float:
    """Largest difference between the states of two runs."""
    pairs = []
    for a, b in ((one.state.server, other.state.server), (str_keys(one), str_keys(other))):
        left, right = dict(tree.leaves(a)), dict(tree.leaves(b))
        assert left.keys() == right.keys()
        pairs += [(left[p].double() - right[p].double()).abs().max() for p in left if left[p].numel()]
    return float(torch.stack(pairs).max())


def str_keys(run: Run) -> dict[str, Any]:
    return {str(i): s for i, s in run.state.clients.items()}


# Every method


@pytest.mark.few(1)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_passes_every_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # a method is seen to learn from three times the examples as well as from eight times, in half the time
    monkeypatch.setattr(
        "fedlowrank.testing.check.small_federation",
        lambda *given, scale=1, **more: small_federation(*given, scale=min(scale, 3), **more),
    )
    # five epochs before each evaluation, as is its default, would take six seconds
    settings = {"fine_tuning_epochs": 1} if name == "fedbabu" else {}
    findings = check_method(METHODS[name](**settings))
    # a check of a claim that the method does not make is left out
    unclaimed = {
        NAMES["one_model"]: not METHODS[name].one_model,
        NAMES["extended"]: METHODS[name].uses_rounds,
        NAMES["follows"]: not hasattr(METHODS[name], "follow_upload"),
    }
    assert [f.name for f in findings] == [check for check in CHECKS if not unclaimed.get(check, False)]
    assert {f.name: f.detail for f in findings if not f.ok} == {}


def flat(value: Any, path: str = "") -> dict[str, float]:
    """The numbers of nested dicts and lists by their paths."""
    if isinstance(value, float):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value or ())
    return {p: v for key, child in items for p, v in flat(child, f"{path}/{key}").items()}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "engines"),
    [
        ("fedkd", LOCAL),
        *((name, ["sequential", "vectorized"]) for name in KINDS if name != "fedkd"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_every_engine_keeps_the_same_accounts(name: str, engines: list[str]) -> None:
    method = METHODS[name]()
    # of numbers that clients at once round otherwise
    rounded = ("training_losses", "measured", "server_metrics")
    accounts, measured = [], []
    for engine in engines:
        run = Run(
            method,
            small_federation(method.heterogeneous),
            RunSettings(rounds=2, participation=0.6),
            ENGINES[engine](),
        )
        record = run.step()
        accounts.append({k: v for k, v in record.untimed().items() if k not in rounded})
        measured.append((read_tables(record.measured)["loss"], record.server_metrics))
        assert all(torch.isfinite(torch.tensor(v)) for v in record.training_losses.values())
    assert all(a == accounts[0] for a in accounts[1:])
    for other in measured[1:]:
        assert flat(other) == pytest.approx(flat(measured[0]), rel=1e-4, abs=1e-6)
    assert accounts[0]["steps"] > 0
    assert accounts[0]["flops"] > 0


@pytest.mark.full
def test_the_plain_method_is_sound() -> None:
    assert failed(Plain()) == {}


# The checks find what they are for


@dataclass(frozen=True)
class ChangesDownload(Plain):
    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        end = self.trained(down, view)
        for p in down.values():
            p.mul_(0.5)
        return state, end


@dataclass(frozen=True)
class ChangesServer(Plain):
    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        for name, p in server.items():
            p.copy_(total[name])
        return server


@dataclass(frozen=True)
class CommitsByMutation(Plain):
    """Changes its state through ``data``, of which torch keeps no version, so that the run itself does not see it."""

    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        state["count"].data.add_(1)
        return state, self.trained(down, view)


@dataclass(frozen=True)
class RemembersInItself(Plain):
    memory: dict[int, int] = field(default_factory=dict)

    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        self.memory[view.info.id] = self.memory.get(view.info.id, 0) + 1
        return {"count": torch.tensor([float(self.memory[view.info.id])])}, self.trained(down, view)


@dataclass(frozen=True)
class GlobalNoise(Plain):
    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        return state, {n: p + 0.001 * torch.randn_like(p) for n, p in self.trained(down, view).items()}


@dataclass(frozen=True)
class SeedsTheGenerator(Plain):
    """Every client and round gets the same noise."""

    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        torch.manual_seed(0)
        return state, {n: p + 0.001 * torch.randn_like(p) for n, p in self.trained(down, view).items()}


class StoresOnItself(Plain):
    """Not decorated, so that it is not frozen; another process has no such attribute."""

    def download(self, server: Params, client: ClientInfo) -> Params:
        self.seen = len(server)
        return server


@dataclass(frozen=True)
class SendsASet(Plain):
    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        return state, {"labels": {1, 2}, **self.trained(down, view)}


@dataclass(frozen=True)
class ReadsAnAbsentName(Plain):
    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        return state, {"w": down["absent"]}


@dataclass(frozen=True)
class OwnRate(Plain):
    def trained(self, down: Params, view: ClientView) -> Params:
        return Plain(optimizer=SGD(lr=0.05)).trained(down, view)


@dataclass(frozen=True)
class ClimbsTheLoss(Plain):
    def trained(self, down: Params, view: ClientView) -> Params:
        model = view.model

        def loss(theta: Params, batch: Batch) -> Tensor:
            return -cross_entropy(model.apply(theta, batch.x), batch)

        return view.train(loss, down, "local", self.optimizer)


@dataclass(frozen=True)
class NeedsAState(Plain):
    def client_init(self, client: ClientInfo, task: Task) -> Any:
        return None

    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        return {"count": torch.ones(1)}, self.trained(down, view)

    def client_model(self, state: Any, down: Params, view: ClientView) -> ClientModel:
        return ClientModel(down if float(state["count"]) else {})


@dataclass(frozen=True)
class TakesAnyModel(Plain):
    def server_init(self, task: Task) -> Params:
        return task.model(task.clients[0]).initial


@dataclass(frozen=True)
class ClaimsOneModel(Plain):
    one_model = True

    def client_model(self, state: Any, down: Params, view: ClientView) -> ClientModel:
        return ClientModel({n: p + view.info.id for n, p in down.items()})


RANDOM = random.Random(0)


@dataclass(frozen=True)
class ChoosesAtRandom(Plain):
    def participants(self, sampled: list[int], available: list[int]) -> list[int]:
        return RANDOM.sample(available, len(sampled))


@dataclass(frozen=True)
class SortsTheSample(Plain):
    def participants(self, sampled: list[int], available: list[int]) -> list[int]:
        sampled.sort(reverse=True)
        return sampled


@dataclass(frozen=True)
class ShufflesItsPasses(Plain):
    def passes(self) -> dict[str, Pass]:
        return {"local": Pass(1, RANDOM.randrange(1, 1000))}


@dataclass(frozen=True)
class DrawsItsState(Plain):
    def client_init(self, client: ClientInfo, task: Task) -> Any:
        return {"count": torch.rand(1)}

    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        return state, {n: p + 0.01 * state["count"] for n, p in self.trained(down, view).items()}


@dataclass(frozen=True)
class DrawsItsDownload(Plain):
    def download(self, server: Params, client: ClientInfo) -> Params:
        return {n: p + 0.01 * torch.rand(p.shape) for n, p in server.items()}


@dataclass(frozen=True)
class MixesLater(Plain):
    """Mixes the losses of the clients of a cohort, from the second step on: the engine compares the first alone."""

    def trained(self, down: Params, view: ClientView) -> Params:
        model = view.model

        def loss(theta: Params, batch: Batch) -> Tensor:
            value = cross_entropy(model.apply(theta, batch.x), batch)
            return value * value.detach().mean() if batch.step else value

        return view.train(loss, down, "local", self.optimizer)


@dataclass(frozen=True)
class FollowsTwice(Plain):
    """Adds what it sends to its state in ``local_update``, and once more when it follows the upload."""

    def client_init(self, client: ClientInfo, task: Task) -> Params:
        return zeros_like(task.common_model(self.title).initial)

    def local_update(self, state: Params, down: Params, view: ClientView) -> tuple[Params, Params]:
        upload = self.trained(down, view)
        return add(state, upload), upload

    def follow_upload(self, before: Any, after: Any, down: Any, upload: Params, view: Any) -> Params:
        return add(after, upload)


@dataclass(frozen=True)
class CannotFollow(FollowsTwice):
    def follow_upload(self, before: Any, after: Any, down: Any, upload: Params, view: Any) -> Params:
        return add(before, {"absent": upload["absent"]})


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("method", "check", "says"),
    [
        (ChangesDownload(), "pure", "local_update changes its input in place: its argument 'down'"),
        (ChangesServer(), "pure", "server_update changes its input in place: its argument 'server'"),
        (CommitsByMutation(), "pure", "local_update changes its input in place: its argument 'state'"),
        (CommitsByMutation(), "lost", "in place"),
        (RemembersInItself(), "pure", "local_update gives another result when it is called again"),
        (RemembersInItself(), "resume", "differs"),
        (GlobalNoise(), "pure", "local_update gives another result when it is called again"),
        (GlobalNoise(), "still", "learning rate of 0"),
        (SeedsTheGenerator(), "pure", "draws from a global generator of torch, Python or NumPy, or seeds it"),
        (StoresOnItself(), "pure", "stores seen on self"),
        (SendsASet(), "wire", "set"),
        (OwnRate(), "still", "learning rate of 0"),
        (ClimbsTheLoss(), "learns", ""),
        (NeedsAState(), "unseen", ""),
        (ClaimsOneModel(), "one_model", "client 1 uses another model"),
        (TakesAnyModel(), "refuses", ""),
        (ChoosesAtRandom(), "pure", "participants gives another result when it is called again"),
        (SortsTheSample(), "pure", "participants changes its input in place: its argument 'sampled'"),
        (ShufflesItsPasses(), "pure", "passes gives another result when it is called again"),
        (MixesLater(), "vectorized", "differs"),
        (FollowsTwice(), "follows", "follow_upload of an unchanged upload is another state"),
        (CannotFollow(), "follows", "KeyError: 'absent'"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Method) else v if v in NAMES else "",
)
@pytest.mark.usefixtures("batched")
def test_a_broken_method_fails_its_check(method: Plain, check: str, says: str) -> None:
    detail = CHECKS[NAMES[check]]
    try:
        actual = detail(method)
    except Exception as error:  # noqa: BLE001 - check_method reports whatever a method raises
        actual = f"{type(error).__name__}: {error}"
    assert actual is not None
    assert says in actual


@dataclass(frozen=True)
class SendsTheChange(Plain):
    """Sends the change of the model, which by default is taken for the model."""

    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        return state, sub(self.trained(down, view), down)

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        return add(server, total)


@dataclass(frozen=True)
class DescribesTheChange(SendsTheChange):
    def describe_update(self, down: Params, client: ClientInfo, task: Task) -> Update:
        return Update(zeros_like(down))


@dataclass(frozen=True)
class SendsMore(Plain):
    """Sends a number beside the model, so that the upload has not the form of the download."""

    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        return state, {"model": self.trained(down, view), "share": torch.tensor(0.5)}

    def server_update(self, server: Params, total: Any, view: ServerView) -> Params:
        return total["model"]


@dataclass(frozen=True)
class DescribesMore(SendsMore):
    def describe_update(self, down: Params, client: ClientInfo, task: Task) -> Update:
        return Update({"model": down, "share": NO_UPDATE})


@dataclass(frozen=True)
class DescribesAnotherShape(DescribesMore):
    def describe_update(self, down: Params, client: ClientInfo, task: Task) -> Update:
        return Update({"model": {n: p[None] for n, p in down.items()}, "share": NO_UPDATE})


@dataclass(frozen=True)
class DividesByAll(Plain):
    """Divides the sum by the number of all examples, also those of clients that did not reply."""

    def contribution(self, server: Params, upload: Params, client: ClientInfo) -> Any:
        return Sum({n: p * client.example_count for n, p in upload.items()})

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        count = sum(client.example_count for client in self.counted(view))
        return {n: p / count for n, p in total.items()}

    def counted(self, view: ServerView) -> Sequence[ClientInfo]:
        return view.task.clients


@dataclass(frozen=True)
class DividesByReplied(DividesByAll):
    def counted(self, view: ServerView) -> Sequence[ClientInfo]:
        return view.replied


@dataclass(frozen=True)
class DividesChangesByAll(DescribesTheChange):
    """Sends changes: at a learning rate of 0 they are 0, whatever they are divided by."""

    def contribution(self, server: Params, upload: Params, client: ClientInfo) -> Any:
        return Sum({n: p * client.example_count for n, p in upload.items()})

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        return add(server, total, 1 / sum(client.example_count for client in self.counted(view)))

    def counted(self, view: ServerView) -> Sequence[ClientInfo]:
        return view.task.clients


@dataclass(frozen=True)
class DividesChangesByReplied(DividesChangesByAll):
    def counted(self, view: ServerView) -> Sequence[ClientInfo]:
        return view.replied


@dataclass(frozen=True)
class WeighsByPosition(Plain):
    """Gives the k-th reply the weight of client k, who may not be the one that sent it."""

    def contribution(self, server: Params, upload: Params, client: ClientInfo) -> Any:
        return Each(upload)

    def server_update(self, server: Params, total: Any, view: ServerView) -> Params:
        pairs = list(zip(total.values(), self.counted(view), strict=False))
        return mean([upload for upload, _ in pairs], [client.example_count for _, client in pairs])

    def counted(self, view: ServerView) -> Sequence[ClientInfo]:
        return view.task.clients


@dataclass(frozen=True)
class WeighsByReplied(WeighsByPosition):
    def counted(self, view: ServerView) -> Sequence[ClientInfo]:
        return view.replied


@dataclass(frozen=True)
class CountsReplies(DescribesTheChange):
    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        return add(server, total, len(view.replied) / len(view.task.clients))


@dataclass(frozen=True)
class StepsByShare(DescribesTheChange):
    """Takes a smaller step if fewer of the clients that can train reply, as the control variate of SCAFFOLD."""

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        return add(server, total, view.share)


@dataclass(frozen=True)
class ChoosesByTheWholeTask(Plain):
    """Sends one of two models by the number of clients: without training, too, so the check cannot compare steps."""

    def download(self, server: Any, client: ClientInfo) -> Params:
        return server["model"]

    def server_init(self, task: Task) -> Any:
        model = task.common_model(self.title).initial
        return {"model": {n: p * (0.5 + len(task.clients) % 2) for n, p in model.items()}}

    def server_update(self, server: Any, total: Params, view: ServerView) -> Any:
        return {"model": total}


@dataclass(frozen=True)
class SendsInTurn(Plain):
    """Keeps two models, sends them in turn, and a counter."""

    def server_init(self, task: Task) -> Any:
        model = task.common_model(self.title).initial
        return {"models": [model, {n: p + 0.1 for n, p in model.items()}], "turn": 0}

    def download(self, server: Any, client: ClientInfo) -> Params:
        return server["models"][server["turn"] % 2]

    def server_update(self, server: Any, total: Params, view: ServerView) -> Any:
        models, turn = list(server["models"]), server["turn"]
        models[turn % 2] = total
        return {"models": models, "turn": turn + 1}


@dataclass(frozen=True)
class DecaysInTurn(SendsInTurn):
    def server_update(self, server: Any, total: Params, view: ServerView) -> Any:
        return super().server_update(server, {n: 0.9 * p for n, p in total.items()}, view)


MEMORY: dict[Any, Params] = {}


@dataclass(frozen=True)
class RemembersTheRoundBefore(Plain):
    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        end = MEMORY[view.info.id, view.round] = self.trained(down, view)
        return state, add(end, sub(MEMORY.get((view.info.id, view.round - 1), end), end), 0.1)


@dataclass(frozen=True)
class InfersFromMemory(Plain):
    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        MEMORY[view.info.id] = self.trained(down, view)
        return state, MEMORY[view.info.id]

    def client_model(self, state: Any, down: Params, view: ClientView) -> ClientModel:
        return ClientModel(MEMORY.get(view.info.id, down))


@dataclass(frozen=True)
class DecaysAtTheServer(Plain):
    decay: float = 0.05

    def server_update(self, server: Params, total: Params, view: ServerView) -> Params:
        return add(total, server, -self.decay)


@dataclass(frozen=True)
class NamesItsDecay(DecaysAtTheServer):
    zero_step_settings: ClassVar[dict[str, float]] = {"decay": 0.0}


@dataclass(frozen=True)
class NormalizesTheChange(DescribesTheChange):
    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        change = sub(self.trained(down, view), down)
        norm = dot(change, change).sqrt()
        return state, {n: 0.1 * t / norm for n, t in change.items()}


@dataclass(frozen=True)
class DividesByTheNorm(NormalizesTheChange):
    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        change = sub(self.trained(down, view), down)
        factor = 0.1 / float(dot(change, change).sqrt())
        return state, {n: factor * t for n, t in change.items()}


@dataclass(frozen=True)
class SendsMeanGradient(DescribesTheChange):
    """Divides by the learning rate, as option II of SCAFFOLD."""

    def total_rate(self, view: ClientView) -> float:
        return self.optimizer.total_rate(view.round, view.steps("local"))

    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        rate = self.total_rate(view)
        change = sub(self.trained(down, view), down)
        return {"count": state["count"], "gradient": {n: -t / rate for n, t in change.items()}}, {
            "change": change, "gradient": {n: -t / rate for n, t in change.items()},
        }  # fmt: skip

    def server_update(self, server: Params, total: Any, view: ServerView) -> Params:
        return add(server, total["change"])

    def describe_update(self, down: Params, client: ClientInfo, task: Task) -> Update:
        return Update({"change": zeros_like(down), "gradient": zeros_like(down)})


@dataclass(frozen=True)
class ForgetsTheSchedule(SendsMeanGradient):
    def total_rate(self, view: ClientView) -> float:
        return view.steps("local") * self.optimizer.lr


@dataclass(frozen=True)
class OwnGroup(Plain):
    """Trains one parameter at a rate that is no field of an optimizer and follows the schedule all the same."""

    def trained(self, down: Params, view: ClientView) -> Params:
        groups = {"head.bias": Group(lr=0.2)}
        optimizer = dataclasses.replace(self.optimizer, groups=groups)
        return view.train(supervised_loss(view.model), down, "local", optimizer)


@dataclass(frozen=True)
class RefusesSchedules(ForgetsTheSchedule):
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer.schedule != Schedule():
            raise ConfigError("RefusesSchedules: set no schedule")


def message_of(method: AnyMethod, check: str) -> str:
    """What a check says of a method; empty if the method passes."""
    MEMORY.clear()
    return CHECKS[NAMES[check]](method) or ""


@pytest.mark.parametrize(
    ("method", "check", "says"),
    [
        (
            SendsTheChange(),
            "described",
            "is a change of the model and not the model. Return Update(zeros_like(down))",
        ),
        (SendsMore(), "described", "/model/body.0.weight of its update is not 0"),
        (
            DescribesAnotherShape(),
            "described",
            "does not have the shape of the upload's. Return from describe_update",
        ),
        (
            DividesByAll(),
            "still",
            "only if the reply of a client is lost. A mean is over the clients that replied",
        ),
        (DividesByAll(), "absent", "client 0/body.0.weight differs"),
        (DividesChangesByAll(), "absent", "use Mean in contribution, or view.replied in server_update"),
        (WeighsByPosition(), "absent", "and not view.task.clients, which are all clients"),
        (CountsReplies(), "absent", "view.share is the share of them that replied"),
        (DecaysInTurn(), "still", "or its server sends other models in other rounds"),
        (ForgetsTheSchedule(), "schedule", "self.optimizer.total_rate(view.round, view.steps(name))"),
        (RemembersTheRoundBefore(), "resume", "Keep what a later round or client_model reads in the state"),
        (InfersFromMemory(), "resume", "a client infers by another model"),
        (DecaysAtTheServer(), "still", "such as zero_step_settings"),
        (NormalizesTheChange(), "still", "its upload holds a NaN or an infinity at /body.0.weight"),
        (DividesByTheNorm(), "still", "If the method divides by the change of the parameters or by its norm"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Method) else "",
)
def test_a_message_of_the_check_names_the_cause(method: Plain, check: str, says: str) -> None:
    assert says in message_of(method, check)


@pytest.mark.parametrize(
    "method",
    [
        DescribesTheChange(), DescribesMore(), DividesByReplied(), NamesItsDecay(), SendsMeanGradient(),
        SendsInTurn(),
        METHODS["fedit"](training=LoRATraining(wire="int8")),
    ],
    ids=lambda method: type(method).__name__,
)  # fmt: skip
def test_a_sound_method_passes_at_a_learning_rate_of_0(method: AnyMethod) -> None:
    assert [message_of(method, check) for check in ("still", "described", "resume")] == ["", "", ""]


@pytest.mark.parametrize(
    "method",
    [Plain(), DividesByReplied(), DividesChangesByReplied(), WeighsByReplied(), StepsByShare(), ChoosesByTheWholeTask()],
    ids=lambda method: type(method).__name__,
)  # fmt: skip
def test_a_sound_server_does_not_depend_on_clients_that_never_train(method: AnyMethod) -> None:
    assert message_of(method, "absent") == ""


@pytest.mark.parametrize("participation", [0.4, 0.6])
def test_the_methods_that_fail_for_absent_clients_are_no_averages(participation: float) -> None:
    on = small_federation(False)
    average, *others = (
        run_of(method, "sequential", on, participation=participation).state.server
        for method in (Plain(), DividesChangesByReplied(), WeighsByReplied(), DividesChangesByAll(), WeighsByPosition())
    )  # fmt: skip
    gaps = [max(float((server[n] - p).abs().max()) for n, p in average.items()) for server in others]
    assert all(gap < 1e-6 for gap in gaps[:2])
    assert all(gap > 1e-4 for gap in gaps[2:])


def test_all_clients_that_train_are_no_absent_ones() -> None:
    # the rule that fails is right if all clients reply, so that only absent ones can show it
    on = small_federation(False)
    average, changes = (run_of(m, "sequential", on).state.server for m in (Plain(), DividesChangesByAll()))
    assert all(torch.allclose(average[n], p, atol=1e-6) for n, p in changes.items())


@pytest.mark.parametrize(
    "method",
    [SendsMeanGradient(), OwnGroup(), RefusesSchedules(), Plain(optimizer=SGD(lr=0.05, schedule=Schedule(warmup=2)))],
    ids=lambda method: type(method).__name__,
)  # fmt: skip
def test_a_sound_method_passes_the_check_of_schedules(method: AnyMethod) -> None:
    assert message_of(method, "schedule") == ""


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (ChoosesAtRandom(), "it has no key to draw random numbers from: sampled is already drawn at random"),
        (DrawsItsState(), "draw random numbers from task.key / client.id alone"),
        (DrawsItsDownload(), "Draw them in server_init or server_update and keep them in the server's state"),
        (GlobalNoise(), "draw random numbers from view.key alone"),
        (StoresOnItself(), "seen"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Method) else "",
)
def test_an_impure_method_gets_one_finding(method: AnyMethod, says: str) -> None:
    (finding,) = check_method(method)
    assert finding.name == NAMES["pure"]
    assert not finding.ok
    assert says in finding.detail
    assert finding.detail.endswith("Mend this first: the other checks were not run")
    # advice of checks that would fail for the same reason, and would be silenced by it
    assert "uses_rounds" not in finding.detail
    assert "zero_step_settings" not in finding.detail


def test_a_described_change_is_clipped_as_the_model_that_it_leads_to() -> None:
    on = small_federation(False)
    clipped = {"clipping": Clipping(norm=0.01)}
    servers = [
        run_of(method, "sequential", on, **clipped).state.server.inner
        for method in (Plain(), DescribesTheChange(), SendsTheChange())
    ]
    models, described, undescribed = (torch.cat([t.flatten() for t in s.values()]) for s in servers)
    initial = torch.cat([t.flatten() for t in on.architectures["small"].initial.values()])
    assert 0 < float((models - initial).norm()) <= 0.0201
    assert torch.allclose(described, models, atol=1e-6)
    assert not torch.allclose(undescribed, models, atol=1e-2)


def test_a_check_that_raises_is_reported_not_raised() -> None:
    actual = failed(SendsASet())
    assert list(actual) == ["pure"]
    assert "TreeError" in actual["pure"]
    actual = failed(ReadsAnAbsentName())
    assert actual["pure"].startswith("KeyError: 'absent'")
    line = inspect.getsourcelines(ReadsAnAbsentName.local_update)[1] + 1
    assert f"({Path(__file__).name}:{line})" in actual["pure"]


# The vectorized engine


def constant_prox(params: Params, lr: float, *given: Any) -> Params:
    return {n: p - lr * 0.3 * p.sign() * (p.abs() > 0.01) for n, p in params.items()}


def pull(grads: Params, params: Params, *given: Any) -> Params:
    return {n: g + 0.2 * params[n] for n, g in grads.items()}


@dataclass(frozen=True)
class Shaped(Plain):
    """Plain, with what a pass may be given."""

    prox: bool = False
    precondition: bool = False

    def trained(self, down: Params, view: ClientView) -> Params:
        model = view.model

        def loss(theta: Params, batch: Batch, _: Params) -> Tensor:
            return cross_entropy(model.apply(theta, batch.x), batch)

        return view.train(
            loss, down, "local", self.optimizer, constants=(down,),
            precondition=pull if self.precondition else None, prox=constant_prox if self.prox else None,
        )  # fmt: skip


def changed_fields(method: Shaped) -> str:
    """The settings that differ from the default ones, for the name of a test."""
    usual = dataclasses.asdict(Shaped())
    return ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(method).items() if v != usual[k])[:60]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "method",
    [
        Shaped(),
        Shaped(batch_size=1000),
        Shaped(epochs=3, batch_size=7),
        Shaped(optimizer=SGD(lr=0.05, momentum=0.9)),
        Shaped(optimizer=SGD(lr=0.05, momentum=0.9, nesterov=True), epochs=2),
        Shaped(optimizer=SGD(lr=0.05, weight_decay=0.1)),
        Shaped(optimizer=SGD(lr=0.5, clip=0.1)),
        Shaped(optimizer=SGD(lr=0.05, groups={"head.weight": Group(lr=0.5, weight_decay=0.1), "head.bias": Group(lr=0.0)})),
        Shaped(optimizer=AdamW(lr=0.01)),
        Shaped(optimizer=AdamW(lr=0.01, weight_decay=0.5, clip=0.5), epochs=2),
        Shaped(prox=True),
        Shaped(precondition=True),
        Shaped(prox=True, precondition=True, optimizer=SGD(lr=0.05, momentum=0.5, weight_decay=0.01, clip=0.3), epochs=2),
    ],
    ids=lambda m: changed_fields(m) or "plain",
)  # fmt: skip
@pytest.mark.usefixtures("batched")
def test_clients_at_once_equal_one_by_one(method: Shaped) -> None:
    on = small_federation(False)
    assert groups(method, on) == [5]
    assert len({len(c.train) for c in on.clients}) > 1
    one, other = (run_of(method, e, on) for e in ("sequential", "vectorized"))
    assert gap(one, other) < 1e-4
    initial = next(iter(on.architectures.values())).initial
    moved = max(float((one.state.server[n] - p).abs().max()) for n, p in initial.items())
    assert moved > 1e-3


def groups(method: AnyMethod, on: Federation) -> list[int]:
    engine = CountingEngine()
    Run(method, on, RunSettings(rounds=1), engine).step()
    return engine.sizes


Make = Callable[[float, Any], Callable[..., Tensor]]


def by_closure(weight: float, model: Any) -> Callable[..., Tensor]:
    return lambda theta, batch: weight * cross_entropy(model.apply(theta, batch.x), batch)


def by_tensor(weight: float, model: Any) -> Callable[..., Tensor]:
    kept = torch.tensor(weight)
    return lambda theta, batch: kept * cross_entropy(model.apply(theta, batch.x), batch)


def by_list(weight: float, model: Any) -> Callable[..., Tensor]:
    kept = [weight]
    return lambda theta, batch: kept[0] * cross_entropy(model.apply(theta, batch.x), batch)


def by_default(weight: float, model: Any) -> Callable[..., Tensor]:
    def loss(theta: Params, batch: Batch, *given: Any, w: float = weight) -> Tensor:
        return w * cross_entropy(model.apply(theta, batch.x), batch)

    return loss


def by_partial(weight: float, model: Any) -> Callable[..., Tensor]:
    def loss(w: float, theta: Params, batch: Batch) -> Tensor:
        return w * cross_entropy(model.apply(theta, batch.x), batch)

    return functools.partial(loss, weight)


def by_object(weight: float, model: Any) -> Callable[..., Tensor]:
    class Weighted:
        def loss(self, theta: Params, batch: Batch) -> Tensor:
            return weight * cross_entropy(model.apply(theta, batch.x), batch)

    return Weighted().loss


def by_helper(weight: float, model: Any) -> Callable[..., Tensor]:
    def weigh(value: Tensor) -> Tensor:
        return weight * value

    return lambda theta, batch: weigh(cross_entropy(model.apply(theta, batch.x), batch))


@pytest.fixture
def batched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of this file are trained for many clients at once, as those of the package are."""
    for question in ("is_standard", "may_batch_over_clients"):
        monkeypatch.setattr(LocalTrainer, question, lambda self, request: True)


def by_recursion(weight: float, model: Any) -> Callable[..., Tensor]:
    def weigh(value: Tensor, times: int) -> Tensor:
        return value if times == 0 else weigh(weight * value, times - 1)

    return lambda theta, batch: weigh(cross_entropy(model.apply(theta, batch.x), batch), 1)


@dataclass(frozen=True)
class Captures(Plain):
    """The loss of client k is weighted by k + 1, and the weight is captured in some way."""

    make: Any = by_closure

    def trained(self, down: Params, view: ClientView) -> Params:
        return view.train(self.make(float(view.info.id + 1), view.model), down, "local", self.optimizer)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "make", [by_closure, by_tensor, by_list, by_default, by_partial, by_object, by_helper, by_recursion]
)
@pytest.mark.usefixtures("batched")
def test_what_a_loss_captures_is_not_mixed_up(make: Make) -> None:
    on = small_federation(False)
    one, other = (run_of(Captures(make=make), e, on, rounds=1) for e in ("sequential", "vectorized"))
    assert gap(one, other) < 1e-5
    # a test that could not fail would show nothing: with the weight of client 0 for all, the result is
    # another
    same = run_of(Plain(), "sequential", on, rounds=1)
    assert gap(one, same) > 1e-3


@pytest.mark.full
@pytest.mark.usefixtures("batched")
def test_requests_with_other_captured_values_are_not_merged() -> None:
    on = small_federation(False)
    assert groups(Plain(), on) == [5]
    assert groups(Captures(), on) == []


@pytest.mark.full
@pytest.mark.usefixtures("batched")
def test_values_in_the_start_that_are_no_tensors_are_not_mixed_up() -> None:
    @dataclass(frozen=True)
    class Scaled(Plain):
        def trained(self, down: Params, view: ClientView) -> Params:
            model = view.model

            def loss(both: Any, batch: Batch) -> Tensor:
                return both["scale"] * cross_entropy(model.apply(both["model"], batch.x), batch)

            start = {"model": down, "scale": view.info.id + 1}
            return view.train(loss, start, "local", self.optimizer)["model"]  # type: ignore[return-value]

    on = small_federation(False)
    one, other = (run_of(Scaled(), e, on, rounds=1) for e in ("sequential", "vectorized"))
    assert gap(one, other) < 1e-5


@pytest.mark.full
@pytest.mark.usefixtures("batched")
def test_given_values_that_are_no_tensors_are_not_mixed_up() -> None:
    @dataclass(frozen=True)
    class Scaled(Plain):
        def trained(self, down: Params, view: ClientView) -> Params:
            model = view.model

            def loss(theta: Params, batch: Batch, scale: float) -> Tensor:
                return scale * cross_entropy(model.apply(theta, batch.x), batch)

            return view.train(loss, down, "local", self.optimizer, constants=(float(view.info.id + 1),))

    on = small_federation(False)
    one, other = (run_of(Scaled(), e, on, rounds=1) for e in ("sequential", "vectorized"))
    assert gap(one, other) < 1e-5


def test_models_with_dropout_equal_one_by_one_bit_for_bit() -> None:
    class Dropping(nn.Module):
        head_name = "head"

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.body(x))
            return out

    source = small_federation(False)
    data = [(torch.cat([c.train.x, c.test.x]), torch.cat([c.train.y, c.test.y])) for c in source.clients]  # type: ignore[list-item]
    on = Federation.from_arrays(data, Dropping, classes=3)
    for method in (Plain(), PFedLoRA(width=2)):
        before = torch.get_rng_state()
        one, other = (run_of(method, e, on) for e in ("sequential", "vectorized"))
        assert tree.equal(one.state.server, other.state.server)
        assert tree.equal(str_keys(one), str_keys(other))
        assert torch.equal(before, torch.get_rng_state())
        assert not next(iter(on.architectures.values())).module.training


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.left(a) + self.right(b)))
        return out


def two_inputs(i: int) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(i)
    n = 12 + 5 * i
    a, b = torch.randn(n, 3, generator=generator), torch.randn(n, 2, generator=generator)
    return {"a": a, "b": b}, (a.sum(1) > b.sum(1)).long()


@pytest.mark.full
def test_named_inputs() -> None:
    clients = []
    for i in range(3):
        whole = Examples(*two_inputs(i))
        parts = torch.split(torch.arange(len(whole)), [len(whole) - 4, 2, 2])
        clients.append(ClientData(*(whole.take(p) for p in parts)))
    example = clients[0].train.take(torch.arange(1)).x
    infos = [ClientInfo(i, len(c.train), "two") for i, c in enumerate(clients)]
    on = Federation(clients, infos, {"two": Architecture("two", TwoInputs(), example)}, ("no", "yes"))
    runs = [run_of(PFedLoRA(width=2, batch_size=5), e, on) for e in ("sequential", "wire", "vectorized")]
    assert gap(runs[0], runs[1]) == 0
    assert gap(runs[0], runs[2]) < 1e-4
    assert on.fingerprint() == on.fingerprint()


@pytest.mark.full
def test_named_inputs_from_arrays() -> None:
    on = Federation.from_arrays([two_inputs(i) for i in range(3)], TwoInputs, classes=2)  # type: ignore[arg-type, misc]
    run = run_of(PFedLoRA(width=2, batch_size=5), "sequential", on)
    assert run.round == 2


# Errors


@dataclass(frozen=True)
class FailsAt(Plain):
    client: int = 2
    after: bool = False

    def local_update(self, state: Any, down: Params, view: ClientView) -> tuple[Any, Any]:
        if view.info.id == self.client and not self.after:
            raise ZeroDivisionError(f"client {self.client} divides")
        end = self.trained(down, view)
        if view.info.id == self.client:
            raise ZeroDivisionError(f"client {self.client} divides")
        return state, end


def settles(count: int, seconds: float = 5.0) -> bool:
    limit = time.monotonic() + seconds
    while threading.active_count() > count and time.monotonic() < limit:
        time.sleep(0.01)
    return threading.active_count() <= count


@pytest.mark.few(5)
@pytest.mark.parametrize("after", [False, True], ids=["before training", "after training"])
@pytest.mark.parametrize("engine", HERE)
def test_an_error_at_one_client_surfaces(engine: str, after: bool) -> None:
    count = threading.active_count()
    run = Run(FailsAt(after=after), small_federation(False), RunSettings(rounds=2), ENGINES[engine]())
    before = run.state
    with pytest.raises(ZeroDivisionError, match="client 2 divides"):
        run.step()
    assert run.state is before
    assert settles(count)


@dataclass(frozen=True)
class Varied(Plain):
    """Plain, with a change to the value of the loss."""

    change: Any = None

    def trained(self, down: Params, view: ClientView) -> Params:
        model, change = view.model, self.change

        def loss(theta: Params, batch: Batch) -> Tensor:
            value = cross_entropy(model.apply(theta, batch.x), batch)
            changed: Tensor = change(value, theta)
            return changed

        return view.train(loss, down, "local", self.optimizer)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda value, theta: value if float(value.detach()) > 0 else 2 * value, "scalar"),
        (lambda value, theta: value + torch.linalg.qr(theta["head.weight"])[1].sum(), "torch.linalg.qr has no rule"),
        (lambda value, theta: value * value.mean(), "for a client alone"),
        (lambda value, theta: value.mean(), "no mean over the examples of each client"),
    ],
    ids=["control flow", "no rule", "mixes clients", "no mean of each client"],
)  # fmt: skip
@pytest.mark.usefixtures("batched")
def test_a_pass_that_cannot_be_batched_is_trained_client_by_client(
    change: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    count, on = threading.active_count(), small_federation(False)
    with caplog.at_level("INFO", "fedlowrank.engines"):
        one, other = (run_of(Varied(change=change), e, on) for e in ("sequential", "vectorized"))
    # the mean is summed in another order
    torch.testing.assert_close(one.state.server, other.state.server, rtol=1e-4, atol=1e-5)
    # once for all rounds
    (message,) = [m for m in caplog.messages if m.startswith("engine vectorized")]
    assert f"{Varied.title} trains one client after another in 'local'" in message
    assert reason in message
    assert settles(count)


@pytest.mark.usefixtures("batched")
def test_an_error_of_a_loss_comes_out_with_its_own_message() -> None:
    def change(value: Tensor, _: Params) -> Tensor:
        raise ZeroDivisionError("the loss divides")

    with pytest.raises(
        ZeroDivisionError, match=r"^the loss divides\n.*local_update \(client \d, round 1\)$"
    ) as caught:
        run_of(Varied(change=change), "vectorized", small_federation(False))
    assert caught.value.__context__ is None


@pytest.mark.full
def test_a_method_may_train_under_some_condition_only() -> None:
    @dataclass(frozen=True)
    class OddTwice(Plain):
        def trained(self, down: Params, view: ClientView) -> Params:
            for _ in range(1 + view.info.id % 2):
                down = Plain.trained(self, down, view)
            return down if view.info.id else {n: p.clone() for n, p in down.items()}

    on = small_federation(False)
    assert gap(*(run_of(OddTwice(), e, on) for e in ("sequential", "vectorized"))) < 1e-4


def poisoned() -> Federation:
    """A federation whose client 1 has inputs so large that its loss overflows."""
    on = small_federation(False)
    bad = on.clients[1]
    clients = [*on.clients]
    clients[1] = dataclasses.replace(bad, train=Examples(bad.train.x * 1e30, bad.train.y))  # type: ignore[operator]
    return dataclasses.replace(on, clients=clients)


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", LOCAL)
def test_a_nan_stops_the_run(engine: str) -> None:
    count = threading.active_count()
    run = Run(Plain(), poisoned(), RunSettings(rounds=2), ENGINES[engine]())
    before = run.state
    with pytest.raises(NonFiniteError) as caught:
        run.step()
    assert (caught.value.client_id, caught.value.round, caught.value.name) == (1, 0, "local")
    assert "client 1, round 1, pass 'local'" in str(caught.value)
    assert run.state is before
    run.engine.close()
    assert settles(count)


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", LOCAL)
def test_a_nan_can_be_dropped(engine: str) -> None:
    on = poisoned()
    run = Run(Plain(), on, RunSettings(rounds=2, on_nan="drop"), ENGINES[engine]())
    record = run.step()
    assert list(record.lost) == ["1"]
    assert "client 1" in record.lost["1"]
    assert record.participants == [0, 1, 2, 3, 4]
    assert sorted(run.state.clients) == [0, 2, 3, 4]
    assert all(torch.isfinite(p).all() for p in run.state.server.values())
    one = len(tree.encode(run.state.server))
    assert (record.bytes_down, record.bytes_up) == (5 * one, 4 * one)


@pytest.mark.parametrize("engine", LOCAL)
def test_the_work_of_a_client_until_its_nan_is_counted(engine: str) -> None:
    """Of its first pass, which meets the NaN, and of no later one."""
    method = Ditto(batch_size=8)
    record, healthy_record = (
        Run(method, on, RunSettings(rounds=1, on_nan="drop"), ENGINES[engine]()).step()
        for on in (poisoned(), small_federation(False))
    )
    assert list(record.lost) == ["1"]
    pass_steps = math.ceil(len(poisoned().clients[1].train) / 8)
    assert record.steps == healthy_record.steps - pass_steps
    share = 1 - len(poisoned().clients[1].train) / (
        2 * sum(len(client.train) for client in poisoned().clients)
    )
    # both passes of all clients cost the same for each example
    assert record.flops == pytest.approx(share * healthy_record.flops, rel=1e-9)


# Messages and their loss


@pytest.mark.full
def test_a_lost_reply_commits_nothing_but_is_counted() -> None:
    on = small_federation(True)
    run = Run(PFedLoRA(width=2), on, RunSettings(rounds=6, lost_replies=0.5), Sequential())
    sound = Run(PFedLoRA(width=2), on, RunSettings(rounds=6), Sequential())
    whole = sound.step()
    seen = 0
    for _ in range(4):
        before = dict(run.state.clients)
        record = run.step()
        assert (record.bytes_up, record.parameters_up, record.steps) == (
            whole.bytes_up,
            whole.parameters_up,
            whole.steps,
        )
        for client in record.participants:
            lost = str(client) in record.lost
            seen += lost
            assert (run.state.clients.get(client) is before.get(client)) == lost
    assert 0 < seen < 20


@pytest.mark.full
@pytest.mark.parametrize("engine", LOCAL)
def test_a_round_of_lost_replies_leaves_the_run_as_it_was(engine: str) -> None:
    on = small_federation(True)
    run = Run(PFedLoRA(), on, RunSettings(rounds=2), ENGINES[engine]())
    run.step()
    before = tree.encode((run.state.server, str_keys(run)))
    record = run.step({str(i.id): "gone" for i in on.infos})
    assert record.lost == {str(i.id): "gone" for i in on.infos}
    assert tree.encode((run.state.server, str_keys(run))) == before
    assert run.round == 2
    run.engine.close()


# without messages, with Factored ones, of unequal ranks, with masks as bits
@pytest.mark.full
@pytest.mark.parametrize("engine", HERE)
@pytest.mark.parametrize("name", ["standalone", "fedkd", "fedhl", "fedspa"])
def test_bytes_are_those_of_the_messages(name: str, engine: str) -> None:
    heard: dict[int, tuple[Any, Any]] = {}

    class Listening(METHODS[name]):  # type: ignore[misc]
        def local_update(self, state: Any, down: Any, view: ClientView) -> tuple[Any, Any]:
            end, up = super().local_update(state, down, view)
            heard[view.info.id] = down, up
            return end, up

    method = Listening()
    run = Run(
        method,
        small_federation(method.heterogeneous),
        RunSettings(rounds=2, participation=0.6),
        ENGINES[engine](),
    )

    def weight(message: Any) -> tuple[int, int]:
        if message is None:
            return 0, 0
        numbers = sum(t.numel() for _, t in tree.leaves(message) if t.is_floating_point())
        return len(tree.encode(message)), numbers

    for _ in range(2):
        heard.clear()
        record = run.step()
        assert sorted(heard) == record.participants
        down = [weight(d) for d, _ in heard.values()]
        up = [weight(u) for _, u in heard.values()]
        assert (record.bytes_down, record.parameters_down) == tuple(map(sum, zip(*down, strict=True)))
        assert (record.bytes_up, record.parameters_up) == tuple(map(sum, zip(*up, strict=True)))


# The protocol


def many(clients: int) -> Federation:
    return Federation.from_arrays(
        [(torch.zeros(3, 2), torch.tensor([0, 1, 0]))] * clients,
        lambda: nn.Linear(2, 2),
        classes=2,
        val=0,
        test=0,
    )


@pytest.mark.parametrize(
    ("clients", "participation", "count"),
    [
        (10, 1.0, 10),
        (10, 0.25, 3),
        (10, 0.24, 2),
        (25, 0.1, 3),
        (100, 0.29, 29),
        (3, 0.01, 1),
        (7, 0.5, 4),
        (1, 0.2, 1),
    ],
)
def test_the_share_of_participants_is_rounded_half_up_to_at_least_one(
    clients: int, participation: float, count: int
) -> None:
    run = Run(Standalone(), many(clients), RunSettings(participation=participation), Sequential())
    for t in range(3):
        chosen = [i.id for i in run.participants(t)]
        assert len(chosen) == count
        assert chosen == sorted(set(chosen))


@pytest.mark.full
def test_participants_are_equal_for_all_methods_and_change_from_round_to_round() -> None:
    chosen = []
    for cls in METHODS.values():
        run = Run(cls(), small_federation(False), RunSettings(participation=0.4), Sequential())
        chosen.append([[i.id for i in run.participants(t)] for t in range(8)])
    assert all(c == chosen[0] for c in chosen)
    assert len({tuple(c) for c in chosen[0]}) > 2
    assert {i for c in chosen[0] for i in c} == set(range(5))
    other = Run(
        FedAvg(), small_federation(False, seed=1), RunSettings(participation=0.4, seed=1), Sequential()
    )
    assert [[i.id for i in other.participants(t)] for t in range(8)] != chosen[0]


class Perceptron(nn.Module):
    WIDTHS = (6, 9, 5, 3)

    def __init__(self) -> None:
        super().__init__()
        w = self.WIDTHS
        self.body = nn.Sequential(nn.Linear(w[0], w[1]), nn.ReLU(), nn.Linear(w[1], w[2]), nn.ReLU())
        self.head = nn.Linear(w[2], w[3])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


@pytest.fixture(scope="module", autouse=True)
def _standard_modules() -> Iterator[None]:
    with standard_layers(TwoInputs, Perceptron):
        yield


@pytest.mark.full
@pytest.mark.parametrize("engine", LOCAL)
def test_floating_point_operations_of_a_perceptron(engine: str) -> None:
    sizes = (20, 33, 8)
    data = [{"train": (torch.randn(n, 6), torch.arange(n) % 3)} for n in sizes]
    on = Federation.from_arrays(data, Perceptron, classes=3)  # type: ignore[arg-type]
    run = Run(FedAvg(batch_size=8, epochs=2), on, RunSettings(rounds=2), ENGINES[engine]())
    record = run.step()
    w = Perceptron.WIDTHS
    layers = [i * o for i, o in itertools.pairwise(w)]
    # forward, gradients of the weights, and gradients of the inputs of all layers but the first; an example
    # costs the same in any batch
    example = 2 * (sum(layers) + sum(layers) + sum(layers[1:]))
    assert record.flops == 2 * sum(sizes) * example
    assert record.steps == 2 * (3 + 5 + 1)
    # every round counts anew
    assert run.step().flops == record.flops
