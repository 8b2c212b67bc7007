"""What ``benchmarks/speed/rounds_against_pytorch.py`` times: rounds of an engine, and the same SGD steps in plain PyTorch.

100 clients of 50 examples, 10 clients a round, batches of 32, one epoch, one thread. The *floor loop* takes
as many steps and does nothing else: batches are made beforehand, one ``torch.optim.SGD`` serves all clients,
weights are neither copied nor averaged. The *user's loop* is federated averaging as a user writes it: a deep
copy of the model and a new optimizer for each client, batches by random indices, the mean of the weights. All
arms run in one process, in an order that turns from round to round; a figure is the median over rounds of the
ratio of an arm's time to the floor loop's in the same round.

:func:`time_defaults` measures what the default settings add to the rounds: a run folder, evaluation and
checkpoints.
"""

from __future__ import annotations

import contextlib
import copy
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank.core.contract import ClientInfo
from fedlowrank.core.learning.optimizer import SGD
from fedlowrank.core.tree import numel
from fedlowrank.data.dataset import Examples
from fedlowrank.data.federation import Federation
from fedlowrank.engines import ENGINES
from fedlowrank.engines.processes import cores
from fedlowrank.methods import METHODS
from fedlowrank.models.architecture import build_module
from fedlowrank.models.architectures.cnn import CNN, FAMILY
from fedlowrank.models.architectures.mlp import MLP
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings
from fedlowrank.rounds.simulate import simulate

WARM = 3
"""Rounds that are not timed: they fill caches and find what is found once."""

USER = "user's loop"
"""Name of the arm that is plain PyTorch."""

_BATCH, _LR = 32, 0.01


def plain_cnn() -> nn.Module:
    """The CNN as plain PyTorch has it: layers in the order in which papers write them."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)),
    )


@dataclass(frozen=True)
class Subject:
    """A model to time.

    Attributes:
        title: for people.
        shape: of one input.
        make: the model.
        plain: the same for the loops in plain PyTorch, its parameters in the same order.
    """

    title: str
    shape: tuple[int, ...]
    make: Callable[[], nn.Module]
    plain: Callable[[], nn.Module]


def _mlp(title: str, inputs: int, *hidden: int) -> Subject:
    return Subject(title, (inputs,), lambda: MLP(inputs, hidden, 10), lambda: MLP(inputs, hidden, 10))


SUBJECTS: dict[str, Subject] = {
    "mlp25k": _mlp("MLP 784-32-10", 784, 32),
    "mlp99k": _mlp("MLP 3072-32-10", 3072, 32),
    "mlp200k": _mlp("MLP 784-200-200-10", 784, 200, 200),
    "cnn": Subject(
        "CNN conv16-conv32-FC500", (3, 32, 32), lambda: CNN((3, 32, 32), 10, *FAMILY["cnn"]), plain_cnn
    ),
}
"""By name."""


def bench_federation(
    subject: Subject, clients: int = 100, examples: int = 50, held_out: int = 0
) -> Federation:
    """Random examples, as many at each client; how long a step takes does not depend on what is in them.

    Args:
        subject: the model.
        clients: number of clients.
        examples: of each client, to train on.
        held_out: of each client in each of validation and test.
    """
    generator = torch.Generator().manual_seed(0)
    count = examples + 2 * held_out
    x = torch.randn(clients, count, *subject.shape, generator=generator)
    y = torch.randint(10, (clients, count), generator=generator)
    sizes = {"train": examples, "val": held_out, "test": held_out}
    data = [
        dict(
            zip(sizes, zip(a.split([*sizes.values()]), b.split([*sizes.values()]), strict=True), strict=True)
        )
        for a, b in zip(x, y, strict=True)
    ]
    return Federation.from_arrays(data, subject.make, classes=10)


@dataclass
class Arm:
    """What an arm took, as ratios to the floor loop, one a round.

    Attributes:
        cpu: seconds of this process; of an engine with several processes that of the parent alone.
        wall: seconds by the clock, which on a shared machine count what others do too.
    """

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


@dataclass
class Timing:
    """Of one model.

    Attributes:
        subject: the model.
        parameters: how many it has.
        steps: of all clients in a round.
        floor: CPU seconds of the floor loop, one a round.
        arms: the user's loop and the engines, by name.
    """

    subject: Subject
    parameters: int
    steps: int = 0
    floor: list[float] = field(default_factory=list)
    arms: dict[str, Arm] = field(default_factory=dict)


def _round_of(run: Run) -> Callable[[int], object]:
    """A function that goes through the next round, whichever it is."""
    return lambda _: run.step()


def time_rounds(
    name: str,
    engines: Sequence[str],
    rounds: int,
    method: str = "fedavg",
    clients: int = 100,
    sample: int = 10,
) -> Timing:
    """Time rounds of one model.

    Args:
        name: of the model.
        engines: which to time.
        rounds: that are timed.
        method: which, with its default settings but for the batch size and plain SGD.
        clients: of the federation.
        sample: of them in a round.
    """
    subject = SUBJECTS[name]
    fed = bench_federation(subject, clients)
    settings = RunSettings(rounds=rounds + WARM, participation=sample / clients, evaluate_every=10**6)
    chosen = METHODS[method](batch_size=_BATCH, optimizer=SGD(lr=_LR))
    floor, user = FloorLoop(subject, fed), UserLoop(subject, fed)
    with contextlib.ExitStack() as stack:
        runs = {e: Run(chosen, fed, settings, ENGINES[e]()) for e in engines}
        for run in runs.values():
            stack.callback(run.engine.close)
        first = next(iter(runs.values()))
        timing = Timing(subject, numel(next(iter(fed.architectures.values())).initial))
        work: dict[str, Callable[[int], object]] = {
            "": lambda t: floor.round(first.participants(t)),
            USER: lambda t: user.round(first.participants(t)),
            **{engine: _round_of(run) for engine, run in runs.items()},
        }
        timing.arms = {name: Arm() for name in work if name}
        names = list(work)
        for t in range(rounds + WARM):
            found: dict[str, tuple[float, float]] = {}
            for arm in [*names[t % len(names) :], *names[: t % len(names)]]:
                cpu, wall = time.process_time(), time.perf_counter()
                work[arm](t)
                found[arm] = time.process_time() - cpu, time.perf_counter() - wall
            if t >= WARM:
                timing.floor.append(found[""][0])
                for e, arm_of in timing.arms.items():
                    arm_of.cpu.append(found[e][0] / found[""][0])
                    arm_of.wall.append(found[e][1] / found[""][1])
    timing.steps = sum(len(floor.batches[i.id]) for i in first.participants(0))
    return timing


class FloorLoop:
    """As many steps as a round has and nothing else: one optimizer, ready batches, nothing federated.

    Attributes:
        batches: of each client.
    """

    def __init__(self, subject: Subject, fed: Federation) -> None:
        self.model = build_module(subject.plain, fed.key)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=_LR)
        self.batches = [
            [*zip(torch.split(_inputs(data.train), _BATCH), torch.split(data.train.y, _BATCH), strict=True)]
            for data in fed.clients
        ]

    def round(self, cohort: Sequence[ClientInfo]) -> None:
        """Take the steps of these clients, one after another, from wherever the weights are."""
        for info in cohort:
            for x, y in self.batches[info.id]:
                _step(self.model, self._optimizer, x, y)


class UserLoop:
    """Federated averaging in plain PyTorch, as a user writes it.

    Attributes:
        model: with the weights of the server.
    """

    def __init__(self, subject: Subject, fed: Federation) -> None:
        self.model = build_module(subject.plain, fed.key)
        self._fed = fed

    def round(
        self, cohort: Sequence[ClientInfo], orders: Mapping[int, Sequence[Tensor]] | None = None
    ) -> None:
        """Train a copy of the model at each client, and average the weights.

        Args:
            cohort: the clients.
            orders: positions of the examples of each batch by client; drawn at random by default.
        """
        total: dict[str, Tensor] = {}
        for info in cohort:
            data = self._fed.clients[info.id].train
            x, y = _inputs(data), data.y
            model = copy.deepcopy(self.model)
            optimizer = torch.optim.SGD(model.parameters(), lr=_LR)
            for index in torch.split(torch.randperm(len(y)), _BATCH) if orders is None else orders[info.id]:
                _step(model, optimizer, x[index], y[index])
            for name, value in model.state_dict().items():
                total[name] = total.get(name, 0) + value / len(cohort)
        self.model.load_state_dict(total)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(functional.cross_entropy(model(x), y))
    optimizer.step()


def _inputs(examples: Examples) -> Tensor:
    x = examples.inputs
    assert isinstance(x, Tensor)
    return x


@dataclass(frozen=True)
class Defaults:
    """What the default settings add to the rounds of one model and engine.

    Attributes:
        subject: the model.
        engine: that ran it.
        ratios: of CPU time with them to that without, one a repeat.
    """

    subject: Subject
    engine: str
    ratios: list[float]


def time_defaults(
    name: str,
    engine: str,
    rounds: int,
    method: str = "fedavg",
    clients: int = 100,
    sample: int = 10,
    repeats: int = 3,
) -> Defaults:
    """Time whole runs with a run folder, default evaluation and checkpoints, against the same rounds without.

    Without, there is no folder, and only the first and the last round are evaluated.

    Args:
        name: of the model.
        engine: which.
        rounds: of a run.
        method: as of :func:`time_rounds`.
        clients: of the federation, with 50 training, 6 validation and 6 test examples each.
        sample: of them in a round.
        repeats: pairs of runs.
    """
    subject = SUBJECTS[name]
    made = bench_federation(subject, clients, held_out=6)
    chosen = METHODS[method](batch_size=_BATCH, optimizer=SGD(lr=_LR))

    def seconds(folder: Path | None, **more: Any) -> float:
        start = time.process_time()
        share = sample / clients
        simulate(chosen, made, folder=folder, rounds=rounds, participation=share, engine=engine, **more)
        return time.process_time() - start

    ratios = []
    with tempfile.TemporaryDirectory() as place:
        for i in range(repeats):
            without = seconds(None, evaluate_every=10**6)
            ratios.append(seconds(Path(place) / str(i)) / without)
    return Defaults(subject, engine, ratios)


def gemm_peak() -> float:
    """Billions of floating-point operations a CPU second in a large product, by one thread."""
    a = torch.randn(1024, 1024)
    best = 0.0
    for _ in range(8):
        start = time.process_time()
        a @ a
        best = max(best, 2 * 1024**3 / max(time.process_time() - start, 1e-9))
    return best / 1e9


def machine() -> str:
    """The machine in a line."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    peak = f"one thread makes {gemm_peak():.0f} GFLOP/s in a product"
    return f"{model}, {cores()} cores{load}; torch {torch.__version__}; {peak}"
