"""The steps of a pass need no host synchronization: no ``.item()``, and no copy from the host.

A CPU shows ``.item()`` as a GPU does. Copies are found on the device "meta", whose tensors have no content: reading a
value raises, and operations that mix a tensor of the host with one of the device are recorded here.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedlowrank import Federation
from fedlowrank.core import tree
from fedlowrank.core.contract import Batch, ProximalTerm
from fedlowrank.core.contract.training_request import Request
from fedlowrank.core.learning.batch_losses import task_loss
from fedlowrank.core.learning.optimizer import SGD, AdamW
from fedlowrank.data.augment import NO_AUGMENT, Augment
from fedlowrank.data.dataset import ClientData, Examples
from fedlowrank.engines import ENGINES
from fedlowrank.engines.engine import ClientJob, Engine
from fedlowrank.methods import METHODS
from fedlowrank.models.architecture import Architecture
from fedlowrank.models.architectures.cnn import CNN
from fedlowrank.models.architectures.mlp import MLP
from fedlowrank.testing.check import small_federation as check_federation
from fedlowrank.training.cohorts.cohort_batches import BufferPool
from fedlowrank.training.cohorts.cohort_steps import train_cohort
from fedlowrank.training.local_data import LocalData, gather
from fedlowrank.training.trainer import LocalTrainer, descend
from tests.support.standard_layers import standard_layers

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses compute as where looking at numbers waits for the device."""
    monkeypatch.setattr("fedlowrank.core.learning.losses.finds_tokens", lambda _: False)


LOOKS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "unique",
    "_unique2",
}
"""Operators that must know numbers."""


class Ear(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes looks at numbers, copies between devices, and operators that are given tensors of two devices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in LOOKS:
            self.heard[name] += 1
        given = self._tensors((args, kwargs or {}))
        # a choice by truth values looks for them on its own
        if name.startswith("index") and any(t.dtype == torch.bool for t in self._tensors(args[1:])):
            self.heard["nonzero"] += 1
        out = func(*args, **(kwargs or {}))
        devices = {t.device.type for t in given}
        if len({t.device.type for t in given if t.ndim}) > 1:
            self.heard[f"{name} of two devices"] += 1
        elif devices and {t.device.type for t in self._tensors(out)} - devices:
            self.heard[f"{name} to a device"] += 1
        return out

    def _tensors(self, value: Any) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value]
        inner = (
            value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        )
        return [t for v in inner for t in self._tensors(v)]


def test_the_recorder_finds_every_synchronizing_operation() -> None:
    t = torch.arange(4.0)
    acts: dict[str, Callable[[], Any]] = {
        "_local_scalar_dense": lambda: float(t.sum()),
        "is_nonzero": lambda: bool(t[0] > 1),
        "nonzero": lambda: t[t > 1],
        "equal": lambda: torch.equal(t, t),
        "_to_copy to a device": lambda: t.to("meta"),
        "index_select of two devices": lambda: t.to("meta").index_select(0, torch.arange(2)),
        "copy_ of two devices": lambda: torch.empty(4, device="meta").copy_(t),
    }
    for expected, act in acts.items():
        with Ear() as ear:
            act()
        # a truth value is a number by another name
        assert ear.heard[expected] or (expected == "is_nonzero" and ear.heard["_local_scalar_dense"]), (
            expected,
            ear.heard,
        )


# Federations


def images(augment: Augment = NO_AUGMENT) -> Federation:
    random, clients = np.random.default_rng(0), []
    for n in (21, 9, 16):
        x = random.integers(0, 256, (n, 2, 8, 8)).astype(np.float32) / np.float32(255)
        clients.append({"train": (x, np.arange(n) % 3), "test": (x[:3], np.arange(3))})
    return Federation.from_arrays(
        clients, lambda: CNN((2, 8, 8), 3, (4, 5), (7, 6)), classes=3, augment=augment
    )


def tables() -> Federation:
    random = np.random.default_rng(1)
    clients = [(random.normal(size=(n, 5)).astype(np.float32), np.arange(n) % 3) for n in (31, 18, 31)]
    return Federation.from_arrays(clients, lambda: MLP(5, (4,), 3), classes=3)


class Speaker(nn.Module):
    """A language model of one token of context."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(input_ids))
        return out


@pytest.fixture(scope="module", autouse=True)
def _standard_modules() -> Iterator[None]:
    with standard_layers(Speaker):
        yield


def texts(by_length: bool = False) -> Federation:
    random, clients = np.random.default_rng(2), []
    for n in (19, 12, 25):
        mask = torch.from_numpy(np.arange(40) < random.integers(2, 41, n)[:, None]).long()
        ids = torch.from_numpy(random.integers(1, 11, (n, 40))) * mask
        labels = torch.where(mask.bool(), ids, -100)
        clients.append(ClientData(*[Examples({"input_ids": ids, "attention_mask": mask}, labels)] * 3))
    example = {k: t[:1] for k, t in clients[0].train.x.items()}  # type: ignore[union-attr]
    model = Architecture("m", Speaker(), example)
    on = tables()
    infos = [
        dataclasses.replace(i, architecture="m", example_count=len(c.train))
        for i, c in zip(on.infos, clients, strict=True)
    ]
    return Federation(clients, infos, {"m": model}, (), by_length=by_length)


ON: dict[str, Callable[[], Federation]] = {
    "tables": tables,
    "images": images,
    "bytes": lambda: images().pack_images(),
    "augmented": lambda: images(Augment(flip=True, crop=1)),
    "texts": texts,
    "texts by length": lambda: texts(True),
}
ENGINE = pytest.mark.parametrize("engine", ["sequential", "vectorized"])
DATA = pytest.mark.parametrize("kind", ON)


HOW = [(kind, SGD(lr=0.01)) for kind in ON]
HOW += [("tables", SGD(lr=0.01, momentum=0.9, clip=1.0)), ("texts", AdamW()), ("images", AdamW())]
"""Kinds of data, and steps; what an optimizer does has nothing to do with where batches come from."""


# Looks, on the CPU


def looks(
    engine: Engine, name: str, on: Federation, epochs: int, **settings: Any
) -> tuple[int, Counter[str]]:
    """Steps of a round, and what was heard in it when all that is found once is known."""
    method = METHODS[name](batch_size=4, epochs=epochs, **settings)
    task = on.task(5)
    server = engine.boundary(method.server_init(task))
    jobs = [ClientJob(method.client_init(i, task), method.download(server, i), i) for i in on.infos]
    list(engine.run(method, on, task, 1, jobs))
    with Ear() as ear:
        outcomes = list(engine.run(method, on, task, 1, jobs))
    assert all(o.error is None for o in outcomes)
    return sum(o.meter.steps for o in outcomes), ear.heard


@pytest.mark.full
@ENGINE
@pytest.mark.parametrize(
    ("kind", "optimizer"), HOW, ids=[f"{kind}-{how.kind}-{how.clip}" for kind, how in HOW]
)
def test_nobody_looks_at_a_number_in_a_step(
    engine: str, kind: str, optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = ON[kind]()
    few, many = (looks(ENGINES[engine](), "fedavg", on, epochs, optimizer=optimizer) for epochs in (1, 3))
    assert many[0] == 3 * few[0]
    assert many[1] == few[1]


@pytest.mark.full
@pytest.mark.parametrize("name", METHODS)
def test_no_method_looks_at_a_number_in_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on = check_federation(False, client_count=2)
    few, many = (looks(ENGINES["sequential"](), name, on, epochs) for epochs in (1, 2))
    assert many[0] > few[0]
    assert many[1] == few[1]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["tables", "texts"])
def test_nobody_looks_at_a_number_in_a_part_of_a_step(kind: str) -> None:
    actual = [
        looks(ENGINES["sequential"](micro_batch=3), "fedavg", ON[kind](), epochs, optimizer=AdamW())
        for epochs in (1, 3)
    ]
    assert actual[0][1] == actual[1][1]


# Copies, on a device without content


def request(on: Federation, optimizer: Any) -> Request:
    (model,) = on.architectures.values()

    def loss(p: Any, batch: Batch, given: Any) -> Tensor:
        return task_loss(model.apply(p, batch.x), batch) + 0 * sum(t.sum() for t in given.values())

    start = model.initial
    half = {n: 0.5 * t for n, t in start.items()}
    prox = (
        None if optimizer == AdamW() else (lambda p, lr, given: {n: t - lr * given[n] for n, t in p.items()})
    )
    return Request(loss, start, "local", optimizer, (half,), None, prox, ProximalTerm(0.1, half, half))


def trainers(on: Federation, epochs: int, elsewhere: Federation) -> Iterator[LocalTrainer]:
    """Of the clients in an order of falling steps; they know lengths of texts, which cannot be found where
    nothing is."""
    method = METHODS["fedavg"](batch_size=4, epochs=epochs)
    order = sorted(on.infos, key=lambda i: -i.example_count)
    for info in order:
        here, there = (ENGINES["sequential"]().trainer(method, of, 0, info) for of in (on, elsewhere))
        there.data.__dict__.update(lengths=here.data.lengths, _ends=here.data._ends)
        yield there


def stacked(asked: Request, clients: int) -> Request:
    """The request of clients that begin alike."""

    def rows(value: Any) -> Any:
        return tree.map_leaves(lambda t: t.expand(clients, *t.shape).clone(), value)

    term = asked.proximal_term
    if term is not None:
        term = ProximalTerm(term.strength, rows(term.center), rows(term.linear))
    return dataclasses.replace(
        asked, start=rows(asked.start), constants=rows(asked.constants), proximal_term=term
    )


def copies(engine: str, on: Federation, epochs: int, optimizer: Any, micro_batch: int | None) -> Counter[str]:
    """What was heard in a pass of all clients."""
    elsewhere = on.to("meta")
    actual = list(trainers(on, epochs, elsewhere))
    asked = request(elsewhere, optimizer)
    with Ear() as ear:
        if engine == "vectorized":
            # a comparison with single clients looks at numbers, once for all rounds
            _, together = train_cohort(actual, stacked(asked, len(actual)), 0, BufferPool(), compare=False)
            losses = [row[: t.steps("local")] for row, t in zip(together, actual, strict=True)]
        else:
            losses = [descend(asked, t.data.batches("local"), 0, micro_batch)[1] for t in actual]
    assert {t.device.type for t in losses} == {"meta"}
    assert [len(t) for t in losses] == [t.steps("local") for t in actual]
    return ear.heard


@pytest.mark.few(1)
@ENGINE
@pytest.mark.parametrize(
    ("kind", "optimizer"), HOW, ids=[f"{kind}-{how.kind}-{how.clip}" for kind, how in HOW]
)
def test_nothing_is_copied_to_the_device_in_a_step(engine: str, kind: str, optimizer: Any) -> None:
    on = ON[kind]()
    few, many = (copies(engine, on, epochs, optimizer, None) for epochs in (1, 2))
    assert few == many
    # the order of the examples of each client, and what befalls their images
    assert set(few) == {"_to_copy to a device"}
    assert few.total() <= 2 * len(on.clients) + 1


@pytest.mark.full
@pytest.mark.parametrize("kind", ["tables", "texts"])
def test_nothing_is_copied_to_the_device_in_a_part_of_a_step(kind: str) -> None:
    few, many = (copies("sequential", ON[kind](), epochs, SGD(lr=0.1), 3) for epochs in (1, 4))
    assert few == many
    assert few.total() == 3


def test_statistics_copy_nothing() -> None:
    on = images()
    (local, *_) = trainers(on, 1, on.to("meta"))
    with Ear() as ear:
        assert sum(len(b) for b in local.data.chunks()) == 21
    assert not ear.heard


# The same batches as when every step fetched its own


@DATA
def test_batches_are_what_each_step_would_fetch(kind: str) -> None:
    on = ON[kind]()
    data: LocalData = next(trainers(on, 3, on)).data
    order, random = data.order("local"), data._generator("augment", "local")
    batches = list(data.batches("local"))
    assert len(batches) == len(order) > 3
    for step, (index, batch) in enumerate(zip(order, batches, strict=True)):
        alone = gather(data.examples, index, step)
        x = alone.x if isinstance(alone.x, dict) else {"": data.augment.apply(alone.x, random)}
        actual = batch.x if isinstance(batch.x, dict) else {"": batch.x}
        assert {n: (t.shape, t.stride()) for n, t in x.items()} == {
            n: (t.shape, t.stride()) for n, t in actual.items()
        }
        assert all(torch.equal(x[n], actual[n]) for n in x)
        assert torch.equal(alone.y, batch.y)
        assert batch.step == step
