"""Servers of half-precision models against their update rules in float64.

The stored model is of the parameters' type and is rounded once a round. What a server remembers from round to
round is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlowrank import SGD, AdamW
from fedlowrank.core import tree
from fedlowrank.core.contribution import Aggregator
from fedlowrank.core.key import Key
from fedlowrank.core.method import ServerView
from fedlowrank.core.task import Task
from fedlowrank.data.federation import Federation
from fedlowrank.engines import Sequential
from fedlowrank.engines.base import ClientJob
from fedlowrank.methods import (
    GPGD,
    SCAFFOLD,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedNova,
    FedSLR,
    FedSpa,
    FedYogi,
    PFedMe,
)
from fedlowrank.methods.feddyn import Down
from fedlowrank.methods.fedspa import Upload
from fedlowrank.methods.scaffold import Controlled
from fedlowrank.simulation.run import Run
from fedlowrank.simulation.settings import RunSettings

CLIENTS, ROUNDS = 40, 12
HALF = [torch.bfloat16, torch.float16]


class Cast(nn.Linear):
    """A layer of any type for inputs in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def run_of(method: Any, dtype: torch.dtype, clients: int = CLIENTS) -> Run:
    layer = Cast(6, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1.5, 1.5, 24).reshape(4, 6))
        layer.bias.fill_(0.3)
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(4, 6, generator=generator), torch.randint(0, 4, (4,), generator=generator))
        for _ in range(clients)
    ]
    federation = Federation.from_arrays([{"train": p} for p in pairs], layer.to(dtype), classes=4)
    return Run(method, federation, RunSettings(rounds=ROUNDS, evaluate_every=ROUNDS), Sequential())


def uploads(model: dict[str, Tensor], round: int, size: float) -> list[dict[str, Tensor]]:
    """Models near the one received, most of them by less than its next number on the mean."""
    generator = torch.Generator().manual_seed(round)
    return [
        {
            n: (t.double() + size * (0.3 + torch.randn(t.shape, generator=generator))).to(t.dtype)
            for n, t in model.items()
        }
        for _ in range(CLIENTS)
    ]


def served(method: Any, server: Any, task: Task, replies: list[Any], round: int) -> Any:
    aggregator, infos = Aggregator([c.id for c in task.clients]), task.clients
    for info, upload in zip(infos, replies, strict=True):
        aggregator.add(info.id, method.contribution(upload, info, server))
    return method.server_update(server, aggregator.finish(), ServerView(task, round, Key((0,)), infos))


State = dict[str, Tensor]
Rule = Callable[[State, Tensor, Tensor], Tensor]
"""The next model in float64 of what is remembered, the model and the mean of the replies."""


def momentum(s: State, x: Tensor, mean: Tensor) -> Tensor:
    s["v"] = 0.9 * s.get("v", 0) + (x - mean)
    return x - 0.5 * s["v"]


def adaptive(kind: str) -> Rule:
    def rule(s: State, x: Tensor, mean: Tensor) -> Tensor:
        d = mean - x
        v = s.get("v", torch.full_like(x, 1e-6))
        if kind == "adagrad":
            v, beta1 = v + d**2, 0.0
        elif kind == "adam":
            v, beta1 = 0.99 * v + 0.01 * d**2, 0.9
        else:
            v, beta1 = v - 0.01 * d**2 * torch.sign(v - d**2), 0.9
        s["v"], s["m"] = v, beta1 * s.get("m", 0) + (1 - beta1) * d
        return x + 0.02 * s["m"] / (v.sqrt() + 1e-3)

    return rule


def dynamic(s: State, x: Tensor, mean: Tensor) -> Tensor:
    s["h"] = s.get("h", 0) - 0.1 * (mean - x)
    return mean - s["h"] / 0.1


def slr(s: State, x: Tensor, mean: Tensor) -> Tensor:
    s["g"] = s.get("g", 0) + (x - mean) / 10
    return mean - 10 * s["g"]


RULES: list[tuple[Any, Rule, dict[str, str]]] = [
    (FedAvgM(server_lr=0.5), momentum, {"v": "velocity"}),
    (FedAdagrad(server_lr=0.02), adaptive("adagrad"), {"m": "m", "v": "v"}),
    (FedAdam(server_lr=0.02), adaptive("adam"), {"m": "m", "v": "v"}),
    (FedYogi(server_lr=0.02), adaptive("yogi"), {"m": "m", "v": "v"}),
    (FedDyn(alpha=0.1), dynamic, {"h": "h"}),
    (PFedMe(beta=0.3), lambda s, x, mean: 0.7 * x + 0.3 * mean, {}),
    (FedSLR(lam=0.0), slr, {"g": "gamma"}),
    (GPGD(lam=0.0), lambda s, x, mean: mean, {}),
    (FedAvg(), lambda s, x, mean: mean, {}),
]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("method", "rule", "kept"), RULES, ids=[type(m).__name__ for m, *_ in RULES])
def test_a_server_rounds_its_model_once(
    method: Any, rule: Rule, kept: dict[str, str], dtype: torch.dtype
) -> None:
    run = run_of(method, dtype)
    server, states = run.state.server, dict[str, State]()
    for t in range(ROUNDS):
        model = model_of(method, server, run.task)
        replies = uploads(model, t, 2e-3)
        server = served(method, server, run.task, replies, t)
        for n, x in model.items():
            mean = torch.stack([r[n].double() for r in replies]).mean(0)
            expected = rule(states.setdefault(n, {}), x.double(), mean)
            found = model_of(method, server, run.task)[n]
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)
            for theirs, ours in kept.items():
                remembered = getattr(server, ours)[n]
                torch.testing.assert_close(
                    remembered.double(), states[n][theirs].double(), rtol=1e-3, atol=1e-6
                )


def model_of(method: Any, server: Any, task: Task) -> dict[str, Tensor]:
    """The model that clients begin at."""
    down = method.download(server, task.clients[0])
    found: dict[str, Tensor] = down.model if isinstance(down, (Controlled, Down)) else down
    return found


@pytest.mark.parametrize("dtype", HALF)
def test_updates_that_clients_send_are_added_once(dtype: torch.dtype) -> None:
    replies = uploads({n: torch.zeros_like(p) for n, p in initial(dtype).items()}, 0, 1e-3)
    exact = {n: torch.stack([r[n].double() for r in replies]).mean(0) for n in replies[0]}
    start = {n: p.double() for n, p in initial(dtype).items()}

    def check(found: dict[str, Tensor], factor: float) -> None:
        for n, x in start.items():
            assert found[n].dtype == dtype
            torch.testing.assert_close(
                found[n].double(), x + factor * exact[n], rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=1e-8
            )

    nova = run_of(FedNova(batch_size=2), dtype)
    check(served(nova.method, nova.state.server, nova.task, replies, 0), 2.0)
    spa = run_of(FedSpa(density=1.0, prune=0.0), dtype)
    flat = [Upload({n: t.flatten() if t.ndim > 1 else t for n, t in r.items()}, {}) for r in replies]
    check(served(spa.method, spa.state.server, spa.task, flat, 0).model, -1.0)
    scaffold = run_of(SCAFFOLD(), dtype)
    sent = [Controlled(r, tree.widen(r)) for r in replies]
    after = served(scaffold.method, scaffold.state.server, scaffold.task, sent, 0)
    check(after.model, 1.0)
    torch.testing.assert_close(after.control["weight"].double(), exact["weight"], rtol=1e-5, atol=1e-9)


def initial(dtype: torch.dtype) -> dict[str, Tensor]:
    return next(iter(run_of(FedAvg(), dtype).task.architectures.values())).initial


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("method", [SCAFFOLD(optimizer=SGD(lr=0.05)), FedDyn(optimizer=SGD(lr=0.05))])
def test_both_sides_hold_the_same_control_variate(method: Any, dtype: torch.dtype) -> None:
    # c is the mean of the c_k, h that of the g_k, in any round: all begin at zero and take part
    run = run_of(method, dtype, 5)
    for _ in range(5):
        run.step()
    server = run.state.server.control if isinstance(method, SCAFFOLD) else run.state.server.h
    for n, held in server.items():
        own = torch.stack([state[n] for _, state in sorted(run.state.clients.items())])
        torch.testing.assert_close(held.double(), own.double().mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (AdamW(lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
        (
            SGD(lr=0.05, momentum=0.9, weight_decay=0.1),
            lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=0.1),
        ),
    ],
)
def test_a_clients_steps_are_rounded_once(dtype: torch.dtype, ours: Any, theirs: Any) -> None:
    method = FedAvg(epochs=4, batch_size=8, optimizer=ours)
    run = run_of(method, dtype, 1)
    data, layer = run.federation.clients[0].train, Cast(6, 4).to(dtype)
    layer.load_state_dict(run.state.server)
    exact = [p.detach().double().requires_grad_() for p in layer.parameters()]
    optimizer = theirs(exact)
    for _ in range(4):
        layer.zero_grad()
        nn.functional.cross_entropy(layer(data.x), data.y).backward()
        for p, q in zip(exact, layer.parameters(), strict=True):
            p.grad = q.grad.double()
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(exact, layer.parameters(), strict=True):
                q.copy_(p)
                p.copy_(q)
    jobs = [ClientJob(None, run.state.server, run.federation.infos[0])]
    (result,) = run.engine.run(method, run.federation, run.task, 0, jobs)
    for n, p in layer.named_parameters():
        # one number of the type, where the two roundings fall on different sides
        torch.testing.assert_close(result.upload[n], p.detach(), rtol=torch.finfo(dtype).eps, atol=1e-6)
