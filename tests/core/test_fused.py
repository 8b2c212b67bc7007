"""Steps inside the backward pass against torch's own optimizer on the whole objective, in double precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fedlowrank.core.method import Batch, Pull, Request
from fedlowrank.core.optimizer import SGD, AdamW, Group
from fedlowrank.methods import METHODS
from fedlowrank.testing.check import CHECKS, check_method
from fedlowrank.training import optimizer_in_backward as fused
from fedlowrank.training import trainer as train
from fedlowrank.training.cohort import Stack, joined
from fedlowrank.training.optimizer_in_backward import Places, find_places, step_in_backward, takes_plain_steps
from fedlowrank.training.steps import Work
from fedlowrank.training.trainer import descend

Params = dict[str, Tensor]
WIDE = {"a": (70, 60), "b": (70,), "c": (64, 70), "d": (5, 64)}
"""A, C are large enough to take their steps in the backward pass; D is not."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "SMALLEST", 4096)


def numbers(seed: int, **shapes: tuple[int, ...]) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64) / 8 for n, s in shapes.items()}


def batches(count: int, seed: int = 0, size: int = 6) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Batch(
            torch.randn(size, 60, generator=generator, dtype=torch.float64),
            torch.randint(0, 5, (size,), generator=generator),
            step=i,
        )
        for i in range(count)
    ]


def forward(p: Params, x: Tensor) -> Tensor:
    hidden = torch.tanh(functional.linear(x, p["a"], p["b"]))
    return functional.linear(torch.tanh(functional.linear(hidden, p["c"], bias=None)), p["d"])


def loss(p: Params, batch: Batch) -> Tensor:
    return functional.cross_entropy(forward(p, batch.x), batch.y)


def request(f: Callable[..., Tensor] = loss, start: Params | None = None, **changes: Any) -> Request:
    made = Request(f, numbers(1, **WIDE) if start is None else start, "local", SGD(lr=0.3), (), None, None)
    return dataclasses.replace(made, **changes)


def by_torch(r: Request, steps: list[Batch]) -> Params:
    """The same with torch's optimizer, the pull written into the loss."""
    p = {n: t.clone().requires_grad_() for n, t in r.start.items()}
    optimizer = torch.optim.SGD(p.values(), lr=r.optimizer.lr, weight_decay=r.optimizer.weight_decay)
    for batch in steps:
        optimizer.zero_grad()
        value = r.loss(p, batch, *r.given)
        if r.pull is not None:
            for n, t in p.items():
                if r.pull.towards is not None:
                    value = value + r.pull.strength / 2 * (t - r.pull.towards[n]).square().sum()
                if r.pull.along is not None:
                    value = value - (r.pull.along[n] * t).sum()
        value.backward()
        optimizer.step()
    return {n: t.detach() for n, t in p.items()}


def places(r: Request, batch: Batch) -> set[str]:
    names = list(r.start)
    return {names[i] for i in find_places(Work(r, 0), batch)}


def fused_end(r: Request, steps: list[Batch]) -> Params:
    end, losses = descend(r, iter(steps), 0, None, find_places(Work(r, 0), steps[0]))
    assert len(losses) == len(steps)
    found: Params = end
    return found


def assert_close(found: Params, wanted: Params) -> None:
    for n, t in wanted.items():
        torch.testing.assert_close(found[n].detach(), t, rtol=1e-10, atol=1e-12)


decays = st.sampled_from([0.0, 0.02])
strengths = st.sampled_from([0.0, 0.4])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), decays, strengths, st.booleans(), st.integers(0, 2**16))
def test_a_pass_is_torch_s(count: int, decay: float, strength: float, along: bool, seed: int) -> None:
    start, steps = numbers(seed, **WIDE), batches(count, seed)
    pull = Pull(strength, numbers(seed + 1, **WIDE), numbers(seed + 2, **WIDE) if along else None)
    r = request(start=start, optimizer=SGD(lr=0.3, weight_decay=decay), pull=pull)
    before = {n: t.clone() for n, t in start.items()}
    assert places(r, steps[0]) == {"a", "c"}
    assert_close(fused_end(r, steps), by_torch(r, steps))
    assert all(torch.equal(before[n], t) for n, t in start.items())


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), decays, strengths, st.booleans(), st.integers(0, 2**16))
def test_many_clients_at_once_are_torch_s(count: int, decay: float, strength: float, along: bool, seed: int) -> None:
    clients = range(3)
    each = [
        request(
            start=numbers(seed + 10 * c, **WIDE),
            optimizer=SGD(lr=0.3, weight_decay=decay),
            pull=Pull(strength, numbers(seed + 10 * c + 1, **WIDE), numbers(seed + c, **WIDE) if along else None),
        )
        for c in clients
    ]
    # the last client has an uneven last batch, which is padded
    feeds = [batches(count, seed + c) for c in clients]
    feeds[2][-1] = batches(1, seed, size=4)[0]
    work = Stack(each, 0)

    def masked(p: Params, batch: Batch) -> Tensor:
        return batch.mean(functional.cross_entropy(forward(p, batch.x), batch.y, reduction="none"))

    work.request = dataclasses.replace(work.request, loss=masked)
    for step in range(count):
        values = work.loss(joined([f[step] for f in feeds]))
        assert values.shape == (3,)
        work.step(work.gradient(values), step)
    for c in clients:
        assert_close({n: t[c] for n, t in work.ends.items()}, by_torch(each[c], feeds[c]))


def test_groups_have_rates_of_their_own() -> None:
    steps = batches(3)
    how = SGD(lr=0.3, groups={"a": Group(lr=0.05, weight_decay=0.1)})
    found = fused_end(request(optimizer=how), steps)
    p = {n: t.clone().requires_grad_() for n, t in numbers(1, **WIDE).items()}
    rest = [t for n, t in p.items() if n != "a"]
    optimizer = torch.optim.SGD([{"params": [p["a"]], "lr": 0.05, "weight_decay": 0.1}, {"params": rest}], lr=0.3)
    for batch in steps:
        optimizer.zero_grad()
        loss(p, batch).backward()
        optimizer.step()
    assert_close(found, p)


# -- what cannot be fused ----------------------------------------------------------------------------------------------


def twice(p: Params, batch: Batch) -> Tensor:
    x = torch.tanh(functional.linear(batch.x, p["a"]))
    return loss(p, batch) + functional.linear(batch.x, p["a"]).square().mean() + x.mean()


def penalized(p: Params, batch: Batch) -> Tensor:
    return loss(p, batch) + p["a"].square().sum() / 100


def as_view(p: Params, batch: Batch) -> Tensor:
    return loss({**p, "a": p["a"].view(70, 60)}, batch)


def transposed(p: Params, batch: Batch) -> Tensor:
    hidden = torch.tanh(batch.x @ p["a"].T + p["b"])
    return functional.cross_entropy(functional.linear(functional.linear(hidden, p["c"]), p["d"]), batch.y)


def recomputed(p: Params, batch: Batch) -> Tensor:
    scores = checkpoint(forward, p, batch.x, use_reentrant=False)
    return functional.cross_entropy(scores, batch.y)


def mapped(p: Params, batch: Batch) -> Tensor:
    scores = torch.vmap(lambda x: forward(p, x[None])[0])(batch.x)
    return functional.cross_entropy(scores, batch.y)


def second_order(p: Params, batch: Batch) -> Tensor:
    value = loss(p, batch)
    (slope,) = torch.autograd.grad(value, [p["c"]], create_graph=True)
    return value + slope.square().sum()


def flat_in_its_input(p: Params, batch: Batch) -> Tensor:
    x = batch.x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(forward(p, x).square().sum(), [x], create_graph=True)
    return loss(p, batch) + slope.square().sum() / 10


@pytest.mark.parametrize(
    ("f", "left"),
    [(twice, {"c"}), (penalized, {"c"}), (as_view, {"c"}), (transposed, {"c"}), (recomputed, set()), (mapped, set()),
     (second_order, set()), (flat_in_its_input, set())],
)  # fmt: skip
def test_a_matrix_with_another_use_takes_steps_by_its_gradient(f: Any, left: set[str]) -> None:
    steps = batches(3)
    r = request(f)
    assert places(r, steps[0]) == left
    assert_close(fused_end(r, steps), by_torch(r, steps))


@pytest.mark.parametrize("other", [penalized, twice, transposed, second_order, flat_in_its_input])
def test_another_use_in_a_later_step_is_noticed_in_time(other: Any) -> None:
    def changing(p: Params, batch: Batch) -> Tensor:
        return other(p, batch) if batch.step == 1 else loss(p, batch)

    steps = batches(4)
    r = request(changing)
    assert places(r, steps[0]) == {"a", "c"}
    assert_close(fused_end(r, steps), by_torch(r, steps))


def test_a_matrix_that_a_step_does_not_use_only_decays() -> None:
    def changing(p: Params, batch: Batch) -> Tensor:
        if batch.step in (1, 2):
            p = {**p, "a": numbers(5, **WIDE)["a"]}
        return loss(p, batch)

    steps = batches(4)
    r = request(changing, optimizer=SGD(lr=0.3, weight_decay=0.1), pull=Pull(0.2, numbers(3, **WIDE)))
    assert_close(fused_end(r, steps), by_torch(r, steps))
    # from the very first step on, when the tensor is still the start's own
    later = [dataclasses.replace(b, step=b.step + 1) for b in steps]
    end, _ = descend(r, iter(later), 0, None, find_places(Work(r, 0), steps[0]))
    assert_close(end, by_torch(r, later))


@pytest.mark.parametrize(
    "changes",
    [{"optimizer": SGD(lr=0.1, momentum=0.9)}, {"optimizer": SGD(lr=0.1, clip=1.0)}, {"optimizer": AdamW()},
     {"precondition": lambda g, _: g}],
)  # fmt: skip
def test_what_needs_the_gradient_gets_it(changes: dict[str, Any]) -> None:
    assert takes_plain_steps(request())
    assert not takes_plain_steps(request(**changes))


def test_a_proximal_step_comes_after_every_fused_one() -> None:
    steps = batches(3)
    r = request(prox=lambda p, lr: {n: t * (1 - lr / 10) for n, t in p.items()})
    p = {n: t.clone().requires_grad_() for n, t in r.start.items()}
    for batch in steps:
        grads = torch.autograd.grad(loss(p, batch), list(p.values()))
        with torch.no_grad():
            for t, g in zip(p.values(), grads, strict=True):
                t.copy_((t - 0.3 * g) * (1 - 0.03))
    assert_close(fused_end(r, steps), p)


# -- what it is good for -----------------------------------------------------------------------------------------------


class Made(TorchDispatchMode):
    """Operators that make a new tensor of a shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.names = shape, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.data_ptr() for t in [*args, *(kwargs or {}).values()] if isinstance(t, Tensor)}
        if isinstance(out, Tensor) and out.shape == self.shape and out.data_ptr() not in given:
            self.names.append(func.name())
        return out


def test_the_gradient_of_a_matrix_is_never_written_down() -> None:
    r, steps = request(), batches(3)
    found = find_places(Work(r, 0), steps[0])
    fused_work, plain = Work(r, 0, found), Work(r, 0)
    with Made((70, 60)) as made:
        step_in_backward(fused_work, found, steps[0])
    # the first step makes the copy that is trained
    assert made.names == ["aten::addmm"]
    with Made((70, 60)) as made:
        step_in_backward(fused_work, found, steps[1])
    assert made.names == []
    with Made((70, 60)) as made:
        plain.step(plain.gradient(plain.loss(steps[0])), 0)
    assert made.names != []


def test_modules_are_fused_where_their_matrices_are_large() -> None:
    module = nn.Sequential(nn.Linear(60, 80), nn.ReLU(), nn.Linear(80, 5)).double()
    start = {n: p.detach() for n, p in module.named_parameters()}

    def own(p: Params, batch: Batch) -> Tensor:
        return functional.cross_entropy(torch.func.functional_call(module, p, (batch.x,)), batch.y)

    steps = batches(3)
    r = request(own, start)
    assert places(r, steps[0]) == {"0.weight"}
    assert_close(fused_end(r, steps), by_torch(r, steps))


@pytest.mark.parametrize("name", ["fedprox", "scaffold", "feddyn", "ditto", "fedslr", "pfedlora"])
def test_methods_pass_every_check_with_all_their_matrices_fused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them: a resumed run and one over a wire end in the same bits, whatever an engine has seen before."""
    monkeypatch.setattr(fused, "SMALLEST", 1)
    taken: list[int] = []

    def counted(work: Work, places: Places, batch: Batch) -> Tensor:
        taken.append(len(places))
        return step_in_backward(work, places, batch)

    monkeypatch.setattr(train, "step_in_backward", counted)
    found = check_method(METHODS[name]())
    assert {f.name: f.detail for f in found if not f.ok} == {}
    assert len(found) == len(CHECKS)
    assert max(taken) >= 2
