"""Servers of half-precision models against their update rules in float64.

The stored model is of the parameters' type and is rounded once a round. What a server remembers from round to
round is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlowrank import SGD, AdamW
from fedlowrank.adapters.lora.lora_factors import lora_of
from fedlowrank.adapters.mixtures.router import Router
from fedlowrank.core import tree
from fedlowrank.core.contract import ServerView, Task
from fedlowrank.core.contract.contribution import Aggregator
from fedlowrank.core.key import Key
from fedlowrank.data.federation import Federation
from fedlowrank.engines import Sequential, Vectorized
from fedlowrank.engines.engine import ClientJob
from fedlowrank.linalg.pair import Pair
from fedlowrank.methods import (
    FD,
    GPGD,
    LPGD,
    SCAFFOLD,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDyn,
    FederatedFloral,
    FedExLoRA,
    FedNova,
    FedProto,
    FedSLR,
    FedSpa,
    FedYogi,
    FLoRA,
    HetLoRA,
    PFedMe,
)
from fedlowrank.methods.ensemble import Ensemble
from fedlowrank.methods.fd import Outputs
from fedlowrank.methods.feddyn import Download
from fedlowrank.methods.fedproto import Upload as FedProtoUpload
from fedlowrank.methods.fedspa import Upload
from fedlowrank.methods.floral import Upload as FloralUpload
from fedlowrank.methods.scaffold import ControlledModel
from fedlowrank.methods.shared.base_updates import Base
from fedlowrank.methods.shared.lora_family import LoRATraining, Message
from fedlowrank.rounds.run import Run
from fedlowrank.rounds.run_settings import RunSettings

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
        aggregator.add(info.id, method.contribution(server, upload, info))
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


def model_of(method: Any, server: Any, task: Task) -> dict[str, Tensor]:
    """The model that clients begin at."""
    down = method.download(server, task.clients[0])
    actual: dict[str, Tensor] = down.model if isinstance(down, (ControlledModel, Download)) else down
    return actual


@pytest.mark.few(6)
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
            actual = model_of(method, server, run.task)[n]
            assert actual.dtype == dtype
            torch.testing.assert_close(actual.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)
            for theirs, ours in kept.items():
                remembered = getattr(server, ours)[n]
                torch.testing.assert_close(
                    remembered.double(), states[n][theirs].double(), rtol=1e-3, atol=1e-6
                )


def initial(dtype: torch.dtype) -> dict[str, Tensor]:
    return next(iter(run_of(FedAvg(), dtype).task.architectures.values())).initial


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
    sent = [ControlledModel(r, tree.widen(r)) for r in replies]
    after = served(scaffold.method, scaffold.state.server, scaffold.task, sent, 0)
    check(after.model, 1.0)
    torch.testing.assert_close(after.control["weight"].double(), exact["weight"], rtol=1e-5, atol=1e-9)


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
        nn.functional.cross_entropy(layer(data.x).float(), data.y).backward()
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


# -- low-rank methods and prototypes of many clients ---------------------------------------------------------
class Body(nn.Module):
    """A layer that LoRA adapts, and a head."""

    head_name = "head"

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 4)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.body(x.to(self.body.bias.dtype))))
        return scores


def lora_run(method: Any, dtype: torch.dtype, clients: int = 100, ranks: Any = None) -> Run:
    g = torch.Generator().manual_seed(0)
    sizes = [4 + k % 3 for k in range(clients)]
    data = [{"train": (torch.randn(n, 6, generator=g), torch.arange(n) % 4)} for n in sizes]
    torch.manual_seed(0)
    made = Federation.from_arrays(data, Body(dtype), classes=4, rank=ranks)
    return Run(method, made, RunSettings(rounds=2, evaluate_every=2), Sequential())


def far(k: int, shape: Any, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    """Numbers of one client in ten are far from those of the others."""
    return (torch.randn(shape, generator=g) * 0.1 + (1.1 if k % 10 == 0 else 0.4)).to(dtype)


def factors(run: Run, dtype: torch.dtype, ranks: Any) -> list[Message]:
    g = torch.Generator().manual_seed(1)
    rest = {n: p for n, p in run.task.architectures["model"].initial.items() if n.startswith("head")}
    return [
        Message(
            {"body": Pair(far(k, (5, r), dtype, g), far(k, (r, 6), dtype, g))},
            {n: far(k, p.shape, dtype, g) for n, p in rest.items()},
        )
        for k, r in enumerate(ranks)
    ]


def near(found: Tensor, exact: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.double(), exact, rtol=0, atol=times * torch.finfo(dtype).eps * float(exact.abs().max())
    )


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("weighting", ["examples", "norm"])
@pytest.mark.parametrize("per_index", [False, True])
def test_padded_factors_of_many_clients(dtype: torch.dtype, weighting: Any, per_index: bool) -> None:
    ranks = [1 + k % 3 for k in range(100)]
    run = lora_run(HetLoRA(weighting=weighting, per_index=per_index), dtype, ranks=ranks)
    sent = factors(run, dtype, ranks)
    actual = served(run.method, run.state.server, run.task, sent, 0)
    pairs = [(m.factors["body"].b.double(), m.factors["body"].a.double()) for m in sent]
    w = [
        c.example_count if weighting == "examples" else float((b @ a).norm())
        for c, (b, a) in zip(run.task.clients, pairs, strict=True)
    ]
    for j in range(3):
        have = [k for k, r in enumerate(ranks) if r > j]
        total = sum(w[k] for k in have) if per_index else sum(w)
        near(actual.factors["body"].b[:, j], sum(w[k] * pairs[k][0][:, j] for k in have) / total, dtype)
        near(actual.factors["body"].a[j], sum(w[k] * pairs[k][1][j] for k in have) / total, dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", [FLoRA, FedExLoRA])
def test_updates_of_the_base_by_many_clients(kind: Any, dtype: torch.dtype) -> None:
    run = lora_run(kind(training=LoRATraining(rank=2)), dtype)
    model, sent = run.task.architectures["model"], factors(run, dtype, [2] * 100)
    server, n = run.state.server, torch.tensor([float(c.example_count) for c in run.task.clients]).double()
    p = n / n.sum()
    update = sum(
        x * (m.factors["body"].b.double() @ m.factors["body"].a.double())
        for x, m in zip(p, sent, strict=True)
    )
    for _ in range(2):
        server = served(run.method, server, run.task, sent, 0)
    total = 2 * update
    if kind is FedExLoRA:
        # what the means of the factors miss of the update
        b, a = (
            sum(x * getattr(m.factors["body"], f).double() for x, m in zip(p, sent, strict=True))
            for f in "ba"
        )
        total = 2 * (update - b @ a)
        near(server.factors["body"].b, b, dtype)
    base = Base({}, []).with_updates(server.history.updates, "merged", lora_of(model))
    weight = base.split_updates("merged", lora_of(model))[1]["body.weight"]
    near(weight, model.module.body.weight.detach().double() + total, dtype)
    for name in server.rest:
        near(server.rest[name], sum(x * m.rest[name].double() for x, m in zip(p, sent, strict=True)), dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_adaptors_of_many_clients(dtype: torch.dtype) -> None:
    run = lora_run(FederatedFloral(clusters=3, rank=2), dtype)
    server, g = run.state.server, torch.Generator().manual_seed(1)
    shares = [(torch.randn(3, generator=g) * 2).softmax(0) for _ in run.task.clients]
    sent = [
        FloralUpload(tree.map_leaves(lambda t, k=k: far(k, t.shape, dtype, g), server.model), pi)
        for k, pi in enumerate(shares)
    ]
    actual = dict(tree.leaves(served(run.method, server, run.task, sent, 0).model))
    n = torch.tensor([float(c.example_count) for c in run.task.clients]).double()
    q = n[:, None] * torch.stack(shares).double()
    for path, t in actual.items():
        x = torch.stack([dict(tree.leaves(u.model))[path] for u in sent]).double()
        if path.startswith("/base"):
            near(t, torch.tensordot(n / n.sum(), x, 1), dtype)
        else:
            near(
                t,
                torch.stack([torch.tensordot(q[:, c] / q[:, c].sum(), x[:, c], 1) for c in range(3)]),
                dtype,
            )


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", [FederatedFloral, Ensemble])
def test_a_router_takes_small_steps(kind: Any, dtype: torch.dtype) -> None:
    # at θ = 1 the next number of bfloat16 is 0.008 away
    run = lora_run(kind(clusters=2, router=Router(lr=1e-3), optimizer=SGD(lr=0.1), batch_size=2), dtype, 2)
    for _ in range(2):
        run.step()
    start = torch.tensor([1.0, -1.0])
    down = run.method.download(run.state.server, run.task.clients[0])
    jobs = [ClientJob(start, down, run.federation.infos[0])]
    (result,) = run.engine.run(run.method, run.federation, run.task, 0, jobs)
    assert result.state.dtype == torch.float32
    assert 0 < float((result.state - start).abs().max()) < 2e-3
    assert run.state.clients[0].dtype == torch.float32
    (pi,) = [t for path, t in tree.leaves(result.upload) if path == "/pi"]
    torch.testing.assert_close(pi, result.state.softmax(0))


def some_labels(g: torch.Generator) -> Tensor:
    return torch.arange(4)[torch.rand(4, generator=g) < 0.7]


@pytest.mark.parametrize("dtype", HALF)
def test_outputs_of_many_clients(dtype: torch.dtype) -> None:
    run, g = lora_run(FD(), dtype), torch.Generator().manual_seed(1)
    sent = [
        Outputs(o, torch.rand(len(o), 4, generator=g)) for o in (some_labels(g) for _ in run.task.clients)
    ]
    server = served(run.method, run.state.server, run.task, sent, 0)
    target = run.method.download(server, run.task.clients[3])
    for j in range(4):
        rows = [u.mean[u.labels == j].double() for k, u in enumerate(sent) if k != 3]
        torch.testing.assert_close(target.mean[j].double(), torch.cat(rows).mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", HALF)
def test_prototypes_of_many_clients(dtype: torch.dtype) -> None:
    run, g = lora_run(FedProto(), dtype), torch.Generator().manual_seed(1)
    sent = []
    for c in run.task.clients:
        own = some_labels(g)
        count = torch.randint(1, c.example_count + 1, own.shape, generator=g)
        sent.append(FedProtoUpload(own, torch.rand(len(own), 5, generator=g) + 1, count))
    actual = served(run.method, run.state.server, run.task, sent, 0)
    for j in range(4):
        mean = torch.cat([u.mean[u.labels == j] for u in sent]).double()
        n = torch.cat([u.count[u.labels == j] for u in sent]).double()
        torch.testing.assert_close(actual.mean[j].double(), n @ mean / n.sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", [FD, FedProto])
def test_statistics_of_many_examples(kind: Any, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(3000, 6, generator=g), torch.arange(3000) % 4
    net = Body(dtype)
    made = Federation.from_arrays([{"train": (x, y)}, {"train": (x[:8], y[:8])}], net, classes=4)
    method = kind(optimizer=SGD(lr=0.0), batch_size=3000)
    run = Run(method, made, RunSettings(rounds=1, evaluate_every=1), Sequential())
    jobs = [
        ClientJob(run.method.client_init(c, run.task), run.method.download(run.state.server, c), c)
        for c in made.infos[:1]
    ]
    (result,) = run.engine.run(method, made, run.task, 0, jobs)
    with torch.no_grad():
        h = torch.tanh(net.body(x.to(dtype)))
        out = (net.head(h).softmax(-1) if kind is FD else h).double()
    expected = torch.stack([out[y == j].mean(0) for j in range(4)])
    # the forward pass of a chunk may round otherwise
    torch.testing.assert_close(result.upload.mean.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("engine", [Sequential, Vectorized])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("norm", ["low_rank", "sparse"])
def test_a_step_with_its_prox_is_rounded_once(norm: Any, dtype: torch.dtype, engine: Any) -> None:
    optimizer = SGD(lr=0.05, momentum=0.9)
    # the threshold lr lam / (1 - momentum) is 1e-3
    method = LPGD(epochs=3, batch_size=8, lam=0.002, norm=norm, optimizer=optimizer)
    run = run_of(method, dtype, 2)
    run.engine = engine()
    jobs = [ClientJob(None, run.state.server, c) for c in run.federation.infos]
    for k, result in enumerate(run.engine.run(method, run.federation, run.task, 0, jobs)):
        data, layer = run.federation.clients[k].train, Cast(6, 4).to(dtype)
        layer.load_state_dict(run.state.server)
        exact = [p.detach().double().requires_grad_() for p in layer.parameters()]
        theirs = torch.optim.SGD(exact, lr=0.05, momentum=0.9)
        for _ in range(3):
            layer.zero_grad()
            nn.functional.cross_entropy(layer(data.x).float(), data.y).backward()
            for p, q in zip(exact, layer.parameters(), strict=True):
                p.grad = q.grad.double()
            theirs.step()
            with torch.no_grad():
                w = exact[0]
                if norm == "sparse":
                    w.copy_(w.sign() * (w.abs() - 1e-3).clamp(min=0))
                else:
                    u, s, vt = torch.linalg.svd(w, full_matrices=False)
                    w.copy_((u * (s - 1e-3).clamp(min=0)) @ vt)
                for p, q in zip(exact, layer.parameters(), strict=True):
                    q.copy_(p)
                    p.copy_(q)
        for n, p in layer.named_parameters():
            torch.testing.assert_close(result.upload[n], p.detach(), rtol=torch.finfo(dtype).eps, atol=1e-6)
