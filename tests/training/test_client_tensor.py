"""Parameters of many clients against every client by itself: values, gradients, and steps in the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedlowrank.core import tree
from fedlowrank.core.contract import Batch
from fedlowrank.core.contract.training_request import Request
from fedlowrank.core.learning.optimizer import SGD, Group
from fedlowrank.training.client_tensors.client_tensor import NoRuleError, to_client_tensor
from fedlowrank.training.client_tensors.layer_rules import grouped_convolution
from fedlowrank.training.cohorts.cohort_steps import CohortSteps

K, B = 3, 4


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


OPERATIONS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], tuple[int, ...]]] = {
    "linear": (functional.linear, [(5, 6), (5,)], (6,)),
    "linear without bias": (functional.linear, [(5, 6)], (6,)),
    "shared weight": (lambda x, b: functional.linear(x, SHARED.mT, b), [(5,)], (6,)),
    "shared bias": (lambda x, w: functional.linear(x, w, SHARED[0]), [(5, 6)], (6,)),
    "shared convolution": (
        lambda x, b: functional.conv1d(x, SHARED.reshape(5, 2, 3), b), [(5,)], (2, 8)
    ),
    "shared scale": (lambda x, b: functional.layer_norm(x, (6,), SHARED[:, 0], b), [(6,)], (6,)),
    "linear on sequences": (functional.linear, [(5, 6), (5,)], (7, 6)),
    "convolution": (lambda x, w, b: functional.conv2d(x, w, b, 2, 1), [(5, 2, 3, 3), (5,)], (2, 8, 8)),
    "convolution of one dimension": (functional.conv1d, [(5, 2, 3), (5,)], (2, 8)),
    "convolution of three dimensions": (functional.conv3d, [(5, 2, 2, 2, 2), (5,)], (2, 3, 3, 3)),
    "layer norm": (lambda x, w, b: functional.layer_norm(x, (7, 6), w, b), [(7, 6), (7, 6)], (7, 6)),
    "group norm": (lambda x, w, b: functional.group_norm(x, 2, w, b), [(4,), (4,)], (4, 5, 5)),
    "product": (lambda x, w: x @ w, [(6, 5)], (7, 6)),
    "transpose": (lambda x, w: x @ w.mT + x @ w.T, [(5, 6)], (6,)),
    "LoRA": (lambda x, a, b: functional.linear(x, 0.5 * (b @ a)), [(2, 6), (5, 2)], (6,)),
    "sum": (lambda x, v, w: functional.linear(x, v + 2 * w - v * w), [(5, 6), (5, 6)], (6,)),
    "what a parameter says of itself": (
        lambda x, w: functional.linear(x, w * (1.0 / w.shape[0])) * w.ndim, [(5, 6)], (6,)
    ),
}  # fmt: skip


SHARED = random(6, 5)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_rule_against_each_client_alone(name: str) -> None:
    operation, shapes, example = OPERATIONS[name]
    params = [random(K, *shape).requires_grad_() for shape in shapes]
    x = random(K * B, *example).requires_grad_()
    expected = torch.cat([operation(rows, *[p[k] for p in params]) for k, rows in enumerate(x.chunk(K))])
    actual = operation(x, *map(to_client_tensor, params))
    assert type(actual) is Tensor
    torch.testing.assert_close(actual, expected)
    weights = random(*expected.shape)
    for a, b in zip(
        torch.autograd.grad((actual * weights).sum(), [x, *params]),
        torch.autograd.grad((expected * weights).sum(), [x, *params]),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("groups", "bias"), [(1, True), (2, False)])
def test_one_grouped_convolution_is_that_of_each_client(groups: int, bias: bool) -> None:
    x, w = random(K, B, 4, 9, 9), random(K, 6, 4 // groups, 3, 3)
    b = random(K, 6) if bias else None
    expected = [functional.conv2d(x[k], w[k], None if b is None else b[k], 2, 1, 1, groups) for k in range(K)]
    actual = grouped_convolution(functional.conv2d, x, w, b, 2, 1, 1, groups)
    torch.testing.assert_close(actual, torch.cat(expected))


def test_an_embedding_against_each_client_alone() -> None:
    table = random(K, 9, 4)
    x = torch.randint(9, (K * B, 5), generator=torch.Generator().manual_seed(0))
    expected = torch.cat([functional.embedding(rows, table[k]) for k, rows in enumerate(x.chunk(K))])
    torch.testing.assert_close(functional.embedding(x, to_client_tensor(table)), expected)


REFUSED: dict[str, Callable[[Any, Any], object]] = {
    "no rule": lambda x, w: torch.linalg.qr(w),
    "in place": lambda x, w: w.add_(1.0),
    # a matrix that all clients share looks like rows of a batch
    "a shared matrix": lambda x, w: w * SHARED,
    "inputs that are a parameter": lambda x, w: functional.linear(w, SHARED.mT),
    "an index by truth values": lambda x, w: w[w > 0],
    "a truth value": lambda x, w: bool(w.sum() > 0),
    "a value for each row": lambda x, w: x[:, 0] * w[:, 0],
    "a dimension that is the clients'": lambda x, w: w.sum(-3),
    "a tensor of labels that are not those of a batch": lambda x, w: w[torch.arange(4)],
    "rows of another batch": lambda x, w: functional.linear(x[:-1], w),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_is_refused(name: str) -> None:
    with pytest.raises(NoRuleError):
        REFUSED[name](random(K * B, 6), to_client_tensor(random(K, 5, 6)))


class Net(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x))
        if self.tied:
            x = torch.relu(self.second(x))
        scores: Tensor = self.third(x)
        return scores


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("steps_in_backward", [True, False])
def test_steps_are_those_of_torch(tied: bool, steps_in_backward: bool) -> None:
    net = Net(tied).double()
    starts = [{n: random(*p.shape) + k for n, p in net.named_parameters()} for k in range(K)]
    # a learning rate of its own for the first layer; momentum is not a step of the backward pass
    momentum = 0.0 if steps_in_backward else 0.5
    optimizer = SGD(lr=0.05, momentum=momentum, groups={"first.weight": Group(lr=0.01)})

    def loss(params: Any, batch: Batch) -> Tensor:
        scores = functional_call(net, params, (batch.x,))
        return batch.mean(functional.cross_entropy(scores, batch.y, reduction="none"))

    work = CohortSteps(joined(starts, Request(loss, starts[0], "local", optimizer, (), None, None)), 0)
    x, y = random(5, K, B, 6), torch.arange(5 * K * B).reshape(5, K, B) % 3
    # the last client has one example less, padded by one that would change its steps
    x[:, -1, -1] = 100.0
    mask = torch.ones(K, B, dtype=torch.bool)
    mask[-1, -1] = False
    losses = torch.stack([work.advance(Batch(x[t], y[t], mask, t), t) for t in range(5)], 1)
    assert work.steps_in_backward == (steps_in_backward and not tied)
    for k, start in enumerate(starts):
        alone = Net(tied).double()
        alone.load_state_dict(start)
        groups = [
            {"params": [alone.first.weight], "lr": 0.01},
            {"params": [p for n, p in alone.named_parameters() if n != "first.weight"]},
        ]
        torch_optimizer = torch.optim.SGD(groups, lr=0.05, momentum=momentum)
        for t in range(5):
            n = B - (k == K - 1)
            value = functional.cross_entropy(alone(x[t, k, :n]), y[t, k, :n])
            assert float(losses[k, t]) == pytest.approx(value.item())
            torch_optimizer.zero_grad()
            value.backward()
            torch_optimizer.step()
        for name, p in alone.named_parameters():
            torch.testing.assert_close(work.ends[name][k], p.detach())


def stack_trees(trees: Any) -> Any:
    """Equal trees over a leading client axis."""
    return tree.map_leaves(lambda *ts: torch.stack(ts), trees[0], *trees[1:])


def joined(starts: Any, request: Request) -> Request:
    """The request of clients that begin at different parameters."""
    return dataclasses.replace(request, start=stack_trees(starts))


def stack_of(loss: Any, *starts: Any, **more: Any) -> CohortSteps:
    given = {"constants": (), "precondition": None, "prox": None, **more}
    return CohortSteps(joined(starts, Request(loss, starts[0], "local", SGD(lr=0.1), **given)), 0)


def batch_of(*example: int) -> Batch:
    return Batch(random(K, B, *example), torch.arange(K * B).reshape(K, B) % 3)


STARTS = [{"w": random(5, 6) + k} for k in range(K)]


def test_a_loss_that_mixes_the_examples_of_a_batch_is_refused() -> None:
    def loss(params: Any, batch: Batch) -> Tensor:
        scores = functional.linear(batch.x - batch.x.mean(0), params["w"])
        return batch.mean(scores.square().sum(1))

    with pytest.raises(NoRuleError, match="for a client alone"):
        stack_of(loss, *STARTS).advance(batch_of(6), 0)


@pytest.mark.parametrize("client", [0, K - 1])
def test_a_wrong_gradient_of_the_first_or_the_last_client_is_found(client: int) -> None:
    def loss(params: Any, batch: Batch) -> Tensor:
        value = batch.mean(functional.linear(batch.x, params["w"]).square().sum(1))
        if value.ndim:
            # changes the gradient and not the value
            own = torch.arange(K) == client
            value = value + torch.where(own, value - value.detach(), 0.0)
        return value

    with pytest.raises(NoRuleError, match="for a client alone"):
        stack_of(loss, *STARTS).advance(batch_of(6), 0)


def plain_loss(params: Any, batch: Batch, *_: Any) -> Tensor:
    return batch.mean(functional.linear(batch.x, params["w"]).square().sum(1))


def soft_threshold(params: Any, lr: float, *_: Any) -> Any:
    return {n: p.sign() * (p.abs() - lr).clamp(min=0) for n, p in params.items()}


def singular_values(params: Any, lr: float, *_: Any) -> Any:
    u, s, vt = torch.linalg.svd(params["w"], full_matrices=False)
    return {"w": (u * (s - lr).clamp(min=0)[..., None, :]) @ vt}


def scaled(grads: Any, params: Any, given: Any) -> Any:
    # a constant of one shape with parameters, or with as many rows as clients, is shared all the same
    w = params["w"]
    gram = w.mT @ w + torch.eye(6, dtype=w.dtype)
    return {"w": torch.linalg.solve_ex(gram, grads["w"].mT).result.mT * torch.where(given["mask"], 1.0, 0.0)}


def by_first(grads: Any, params: Any, given: Any) -> Any:
    return {"w": grads["w"] / (1 + torch.linalg.matrix_norm(params["w"], keepdim=True)) + given["mask"]}


@pytest.mark.parametrize("precondition", [None, scaled, by_first])
@pytest.mark.parametrize("prox", [None, soft_threshold, singular_values])
def test_precondition_and_prox_are_those_of_each_client(precondition: Any, prox: Any) -> None:
    given = [{"mask": (random(5, 6) > 0.1 * k).to(torch.float64) > 0} for k in range(K)]
    requests = [
        Request(plain_loss, s, "local", SGD(lr=0.01), (g,), precondition, prox)
        for s, g in zip(STARTS, given, strict=True)
    ]
    constants = (stack_trees(given),)
    whole = dataclasses.replace(joined(STARTS, requests[0]), constants=constants)
    work, batch = CohortSteps(whole, 0), batch_of(6)
    for count in range(3):
        work.advance(batch, count)
    for k, request in enumerate(requests):
        w = request.start["w"].clone()
        for _ in range(3):
            w = w.requires_grad_()
            (g,) = torch.autograd.grad((batch.x[k] @ w.mT).square().sum(1).mean(), w)
            w = w.detach()
            g = g if precondition is None else precondition({"w": g}, {"w": w}, given[k])["w"]
            w = w - 0.01 * g
            w = w if prox is None else prox({"w": w}, 0.01)["w"]
        torch.testing.assert_close(work.ends["w"][k], w)


def wrong_for_many(params: Any, lr: float, *_: Any) -> Any:
    # a loop over the clients' axis, which a rule must not take for the rows of one client
    return {"w": torch.stack([row * (i + 1) for i, row in enumerate(params["w"].as_subclass(Tensor))])}


def same_for_all(params: Any, lr: float, *_: Any) -> Any:
    return {"w": SHARED.mT.clone()}


@pytest.mark.parametrize("prox", [wrong_for_many, same_for_all])
def test_a_prox_that_cannot_be_batched_is_refused(prox: Any) -> None:
    with pytest.raises(NoRuleError):
        stack_of(plain_loss, *STARTS, prox=prox).advance(batch_of(6), 0)
