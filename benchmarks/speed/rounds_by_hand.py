"""Rounds of FedAvg and FLoRAL by hand: batched matrix products of all clients, and nothing else that a simulator does.

The model is a perceptron with one hidden layer. The steps, the examples and the draws are those of the package: a generator for
each client and round gives the order of its examples. No records, bytes, client losses or checks are computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedlowrank.core.key import Key

EPS = 1e-5


@dataclass(frozen=True)
class ClientArrays:
    """Examples of all clients, equally many for each, and how they train.

    Attributes:
        x: inputs ``[N, n, d]``.
        y: classes ``[N, n]``.
        key: key of the federation.
        active: number of clients in a round; the first ones of a random permutation if not all take part.
        epochs: number of epochs, each with one batch.
        lr: learning rate.
        router_lr: learning rate of FLoRAL's routers.
    """

    x: Tensor
    y: Tensor
    key: Key
    active: int
    epochs: int = 5
    lr: float = 0.01
    router_lr: float = 0.1

    def draw_round(self, t: int) -> tuple[Tensor, Iterator[tuple[Tensor, Tensor]]]:
        """Clients of round t, and the batch ``[K, n, d]``, ``[K, n]`` of each step."""
        clients, n = self.x.shape[:2]
        chosen = torch.arange(clients) if self.active == clients else torch.randperm(clients)[: self.active]
        return chosen, self._batches(self.x[chosen], self.y[chosen], chosen.tolist(), t, n)

    def _batches(
        self, x: Tensor, y: Tensor, chosen: Sequence[int], t: int, n: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        generators = [(self.key / "client" / k / t / "order" / 0).generator() for k in chosen]
        rows = torch.arange(len(chosen))[:, None]
        for _ in range(self.epochs):
            order = torch.stack([torch.randperm(n, generator=g) for g in generators])
            yield x[rows, order], y[rows, order]


def score(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Scores ``[K, n, classes]`` of the perceptrons of K clients."""
    hidden = torch.relu(torch.baddbmm(b1[:, None], x, w1.mT))
    return torch.baddbmm(b2[:, None], hidden, w2.mT)


def sum_losses(scores: Tensor, y: Tensor) -> Tensor:
    """The sum over clients of the mean cross-entropy of their batches."""
    return functional.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]


def expand_to_clients(tensors: Sequence[Tensor], count: int) -> list[Tensor]:
    """A copy of each tensor for each client, ``[K, ...]``, that is trained."""
    return [t.expand(count, *t.shape).clone().requires_grad_() for t in tensors]


def make_fedavg_round(clients: ClientArrays, model: list[Tensor]) -> Callable[[], list[Tensor]]:
    """Make a function that executes the next round of FedAvg and returns the server's parameters.

    Args:
        clients: examples of the clients.
        model: weight ``[h, d]`` and bias of the first layer, weight ``[classes, h]`` and bias of the second.
    """
    rounds = itertools.count()

    def execute_round() -> list[Tensor]:
        nonlocal model
        chosen, batches = clients.draw_round(next(rounds))
        params = expand_to_clients(model, len(chosen))
        for x, y in batches:
            grads = torch.autograd.grad(sum_losses(score(x, *params), y), params)
            with torch.no_grad():
                for p, g in zip(params, grads, strict=True):
                    p.sub_(g, alpha=clients.lr)
        model = [p.detach().mean(0) for p in params]
        return model

    return execute_round


def mix(weight: Tensor, u: Tensor, v: Tensor, pi: Tensor) -> Tensor:
    """The weights ``[K, rows, columns]`` of clients plus Σ_c π_c U_c V_cᵀ, for factors ``[K, C, ., r]``."""
    weighted_u = (u * pi[:, :, None, None]).movedim(1, 2).flatten(2)
    return torch.baddbmm(weight, weighted_u, v.movedim(1, 2).flatten(2).mT)


def precondition(g: Tensor, factor: Tensor) -> Tensor:
    """The gradient of one factor times the inverse of the other's Gram matrix."""
    gram = factor.mT @ factor + EPS * torch.eye(factor.shape[-1])
    return torch.linalg.solve(gram, g.mT).mT


def make_floral_round(
    clients: ClientArrays, model: list[Tensor], adaptors: list[Tensor]
) -> Callable[[], list[Tensor]]:
    """Make a function that executes the next round of FLoRAL, in which all clients take part, with learned routers.

    It returns the server's parameters: the model, then the adaptors.

    Args:
        clients: examples of the clients.
        model: weight ``[h, d]`` and bias of the first layer, weight ``[classes, h]`` and bias of the second.
        adaptors: U ``[C, ., r]``, V ``[C, ., r]`` and offsets of the bias ``[C, .]`` of the first layer, then of the second.
    """
    rounds, count = itertools.count(), len(clients.x)
    theta = torch.zeros(count, len(adaptors[0]))

    def execute_round() -> list[Tensor]:
        nonlocal model, adaptors, theta
        _, batches = clients.draw_round(next(rounds))
        params = [*expand_to_clients([*model, *adaptors], count), theta.clone().requires_grad_()]
        w1, b1, w2, b2, u1, v1, o1, u2, v2, o2, z = params
        for x, y in batches:
            pi = z.softmax(1)
            offsets = [torch.bmm(pi[:, None], o).squeeze(1) for o in (o1, o2)]
            scores = score(x, mix(w1, u1, v1, pi), b1 + offsets[0], mix(w2, u2, v2, pi), b2 + offsets[1])
            grads = list(torch.autograd.grad(sum_losses(scores, y), params))
            with torch.no_grad():
                for i, u, v in ((4, u1, v1), (7, u2, v2)):
                    grads[i : i + 2] = precondition(grads[i], v), precondition(grads[i + 1], u)
                for p, g in zip(params[:-1], grads[:-1], strict=True):
                    p.sub_(g, alpha=clients.lr)
                z.sub_(grads[-1], alpha=clients.router_lr)
        theta = z.detach()
        pi = theta.softmax(1)
        model = [p.detach().mean(0) for p in params[:4]]
        adaptors = [torch.einsum("kc,kc...->c...", pi / pi.sum(0), p.detach()) for p in params[4:-1]]
        return [*model, *adaptors]

    return execute_round
