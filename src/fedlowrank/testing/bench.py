"""How long a federated round takes here, against the same SGD steps in a bare PyTorch loop.

100 clients of 50 examples, 10 clients a round, batches of 32, one epoch, one thread. The bare loop does
nothing federated: it loads the weights, makes a ``torch.optim.SGD`` and steps through the very same batches.
A round contains sampling, copies, training, the counting of bytes and operations, and the server's mean. All
arms run in one process, in an order that turns from round to round; a figure is the median over rounds of the
ratio of an arm's time to the bare loop's in the same round.
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.optimizer import SGD
from ..core.tree import Params, numel
from ..data.federation import Federation
from ..engines import ENGINES
from ..engines.processes import cores
from ..methods import METHODS
from ..models.architecture import build_module
from ..models.cnn import CNN, FAMILY
from ..models.mlp import MLP
from ..simulation.run import Run
from ..simulation.settings import RunSettings

WARM = 3
"""Rounds that are not timed: they fill caches and find what is found once."""


def plain_cnn() -> nn.Module:
    """The CNN as the bare loop has it: layers in the order in which papers write them."""
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
        plain: the same for the bare loop, its parameters in the same order.
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


def federation(subject: Subject, clients: int = 100, examples: int = 50) -> Federation:
    """Random examples, as many at each client; how long a step takes does not depend on what is in them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients, examples, *subject.shape, generator=generator)
    y = torch.randint(10, (clients, examples), generator=generator)
    data = [{"train": pair} for pair in zip(x.unbind(), y.unbind(), strict=True)]
    return Federation.from_arrays(data, subject.make, classes=10)


@dataclass
class Arm:
    """What an engine took, as ratios to the bare loop, one a round.

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
        bare: CPU seconds of the bare loop, one a round.
        arms: by engine.
    """

    subject: Subject
    parameters: int
    steps: int = 0
    bare: list[float] = field(default_factory=list)
    arms: dict[str, Arm] = field(default_factory=dict)


def time_rounds(
    name: str,
    engines: Sequence[str],
    rounds: int,
    method: str = "fedavg",
    clients: int = 100,
    sample: int = 10,
    on_round: Callable[[], object] = lambda: None,
) -> Timing:
    """Time rounds of one model.

    Args:
        name: of the model.
        engines: which to time.
        rounds: that are timed.
        method: which, with its default settings but for the batch size and plain SGD.
        clients: of the federation.
        sample: of them in a round.
        on_round: called after every round that is timed.
    """
    subject = SUBJECTS[name]
    fed = federation(subject, clients)
    settings = RunSettings(rounds=rounds + WARM, participation=sample / clients, evaluate_every=10**6)
    chosen = METHODS[method](batch_size=32, optimizer=SGD(lr=0.01))
    with contextlib.ExitStack() as stack:
        runs = {e: Run(chosen, fed, settings, ENGINES[e]()) for e in engines}
        for run in runs.values():
            stack.callback(run.engine.close)
        loop = _Bare(subject, fed)
        timing = Timing(subject, numel(next(iter(fed.architectures.values())).initial))
        timing.arms = {e: Arm() for e in engines}
        for t in range(rounds + WARM):
            found: dict[str, tuple[float, float]] = {}
            names = [*engines, ""]
            for arm in [*names[t % len(names) :], *names[: t % len(names)]]:
                cpu, wall = time.process_time(), time.perf_counter()
                if arm:
                    timing.steps = runs[arm].step().steps
                else:
                    loop.round(next(iter(runs.values())), t)
                found[arm] = time.process_time() - cpu, time.perf_counter() - wall
            if t >= WARM:
                timing.bare.append(found[""][0])
                for e, arm_of in timing.arms.items():
                    arm_of.cpu.append(found[e][0] / found[""][0])
                    arm_of.wall.append(found[e][1] / found[""][1])
                on_round()
    return timing


class _Bare:
    """Plain PyTorch: the same steps with nothing around them."""

    def __init__(self, subject: Subject, fed: Federation) -> None:
        self._model = build_module(subject.plain, fed.key)
        self._fed = fed

    def round(self, run: Run, t: int) -> None:
        """Train the clients of a round, each from the weights that the server has."""
        self._model.train()
        server = run.state.server if isinstance(run.state.server, dict) else run.state.server.model
        start: Params = dict(zip(self._model.state_dict(), server.values(), strict=True))
        for info in run.participants(t):
            order: list[Tensor] = run.engine.trainer(run.method, self._fed, t, info).data.order("local")
            self._model.load_state_dict(start)
            optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
            data = self._fed.clients[info.id].train
            x = data.inputs
            assert isinstance(x, Tensor)
            for index in order:
                optimizer.zero_grad()
                torch.autograd.backward(functional.cross_entropy(self._model(x[index]), data.y[index]))
                optimizer.step()


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
    return f"{model}, {cores()} cores{load}; torch {torch.__version__}; one thread makes {gemm_peak():.0f} GFLOP/s in a product"


HEAD = (
    "model",
    "parameters",
    "bare loop, ms a step",
    "engine",
    "CPU time / bare loop",
    "wall time / bare loop",
)


def rows(timings: Sequence[Timing]) -> list[tuple[str, ...]]:
    """One row a model and engine: medians, and quartiles where there are enough rounds."""
    found: list[tuple[str, ...]] = []
    for t in timings:
        step = f"{1e3 * statistics.median(t.bare) / t.steps:.3f}"
        for name, arm in t.arms.items():
            # what a child spends is not this process's
            cpu = "" if name == "processes" else _spread(arm.cpu)
            found.append((t.subject.title, f"{t.parameters:,}", step, name, cpu, _spread(arm.wall)))
    return found


def markdown(timings: Sequence[Timing]) -> str:
    """The rows as a table."""
    lines = [HEAD, (":---", "---:", "---:", ":---", "---:", "---:"), *rows(timings)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _spread(values: Sequence[float]) -> str:
    if len(values) < 4:
        return f"{statistics.median(values):.2f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"
