"""The task that all simulators of ``benchmarks/peers/round_against_simulators.py`` compute, and the timing of their rounds.

At the top it imports numpy alone, for the interpreter of FedJAX has no torch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, Any, NamedTuple

import numpy as np

WARM = 6
"""Rounds that are not counted."""

LR = 0.01


class Problem(NamedTuple):
    """How many clients there are and what they do in a round.

    Attributes:
        clients: in all.
        examples: of each; whole batches of them, for FedJAX would fill a short one up with examples that the others do not see
            again.
        sample: clients a round.
        batch: examples a step.
    """

    clients: int
    examples: int
    sample: int
    batch: int

    @classmethod
    def parse(cls, text: str) -> Problem:
        """Read ``1000x20/100:10``: clients x examples / clients a round : batch."""
        return cls(*(int(number) for number in re.fullmatch(r"(\d+)x(\d+)/(\d+):(\d+)", text).groups()))  # type: ignore[union-attr]


TOKENS, WIDTH = 1000, 128
"""Of the transformer: its vocabulary, and the length of its vectors."""

Plan = dict[str, np.ndarray[Any, Any]]


def transformer() -> Any:
    """A small frozen transformer with LoRA of rank 4 on queries and values, and a head that is trained."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    from fedlowrank.adapters.lora.lora_layers import add_lora

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.before(x)
            q, k, v = (f(y).unflatten(-1, (4, -1)).transpose(-3, -2) for f in (self.q, self.k, self.v))
            mixed = torch.softmax(q @ k.mT / (WIDTH / 4) ** 0.5, -1) @ v
            x = x + self.o(mixed.transpose(-3, -2).flatten(-2))
            out: Tensor = x + self.down(functional.gelu(self.up(self.between(x))))
            return out

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.blocks = nn.Embedding(TOKENS, WIDTH), nn.Sequential(Block(), Block())
            self.head = nn.Linear(WIDTH, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.blocks(self.embedding(x.long())).mean(-2))
            return out

    return add_lora(Transformer(), 4, 8, target_modules=["q", "v"], trainable=["head"])


def subject(name: str) -> Any:
    """A model to time."""
    from helpers.round_timing import SUBJECTS, Subject

    more = {"lora": Subject("LoRA on a transformer, 2 × 128", (32,), transformer, transformer)}
    return {**SUBJECTS, **more}[name]


def federation_of(name: str, clients: int, examples: int) -> Any:
    """Clients with random examples."""
    import torch
    from helpers.round_timing import bench_federation

    from fedlowrank.data.federation import Federation

    if name != "lora":
        return bench_federation(subject(name), clients, examples)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(TOKENS, (clients, examples, 32), generator=generator)
    y = torch.randint(10, (clients, examples), generator=generator)
    data = [{"train": pair} for pair in zip(x.unbind(), y.unbind(), strict=True)]
    return Federation.from_arrays(data, transformer, classes=10)


def make_plan(name: str, problem: Problem, rounds: int) -> Plan:
    """Examples, initial weights, and who trains in which order."""
    import torch

    from fedlowrank.core.learning.optimizer import SGD
    from fedlowrank.engines import ENGINES
    from fedlowrank.methods import METHODS
    from fedlowrank.rounds.run import Run
    from fedlowrank.rounds.run_settings import RunSettings

    fed = federation_of(name, problem.clients, problem.examples)
    settings = RunSettings(rounds=rounds, participation=problem.sample / problem.clients)
    run = Run(
        METHODS["fedavg"](batch_size=problem.batch, optimizer=SGD(lr=LR)),
        fed,
        settings,
        ENGINES["sequential"](),
    )
    cohorts, orders = [], []
    for t in range(rounds):
        infos = run.participants(t)
        cohorts.append([i.id for i in infos])
        orders.append(
            [torch.cat(run.engine.trainer(run.method, fed, t, i).data.order("local")).numpy() for i in infos]
        )
    plan = {
        "x": np.stack([np.asarray(c.train.x) for c in fed.clients]),
        "y": np.stack([np.asarray(c.train.y) for c in fed.clients]),
        "cohorts": np.array(cohorts),
        "orders": np.array(orders),
        "batch": np.array(problem.batch),
    }
    module = next(iter(fed.architectures.values())).module
    frozen = [p.numpy() for p in module.parameters() if not p.requires_grad]
    plan |= {f"f{i}": w for i, w in enumerate(frozen)}
    return {**plan, **{f"p{i}": t.numpy() for i, t in enumerate(run.state.server.values())}}


def weights(plan: Plan, kind: str = "p") -> list[np.ndarray[Any, Any]]:
    """The initial ones; those that stay as they are if the kind is f."""
    return [plan[f"{kind}{i}"] for i in range(sum(k[0] == kind for k in plan))]


MARK = "##round "
"""Begins the lines by which an arm tells what a round took; libraries print others."""


class Clock:
    """Lets a round begin when it is this arm's turn, and tells CPU and wall time of it.

    Args:
        processes: count the time of child processes, too.
    """

    def __init__(self, processes: bool = False) -> None:
        self._processes = processes
        self._began = 0.0, 0.0

    def spent(self) -> float:
        """CPU seconds so far."""
        if not self._processes:
            return time.process_time()
        import psutil

        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        return sum(t.user + t.system for p in family if (t := p.cpu_times()) is not None)

    def begin(self) -> None:
        """Wait for the turn."""
        sys.stdin.readline()
        self._began = self.spent(), time.perf_counter()

    def end(self) -> None:
        """Tell what it took."""
        took = {"cpu": self.spent() - self._began[0], "wall": time.perf_counter() - self._began[1]}
        print("\n" + MARK + json.dumps(took), flush=True)

    def __call__(self, work: Callable[[], object]) -> None:
        """Time a round."""
        self.begin()
        work()
        self.end()


def next_turn(process: subprocess.Popen[str], errors: IO[str], arm: str) -> dict[str, float]:
    """Let an arm, which waits in a process of its own, run its next round; returns what that took.

    Args:
        process: of the arm.
        errors: what it has written as errors.
        arm: its name, for the message if it ended.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith(MARK):
            found: dict[str, float] = json.loads(line[len(MARK) :])
            return found
    errors.seek(0)
    raise SystemExit(f"{arm} failed:\n{errors.read()[-3000:]}")
