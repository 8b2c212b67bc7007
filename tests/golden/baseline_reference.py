"""FedAvgM, FedAdagrad, FedAdam, FedYogi, FedNova and FedBABU in NumPy float64, and FedBN in plain PyTorch.

Written from the papers' equations; networks, data and rounds are those of ``reference``.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.golden.reference import Array, Data, Layers, Rounds, descended, gradient, plain_sgd, weighted_mean


def flat(net: Layers) -> Array:
    """All parameters of a network as one vector."""
    return np.concatenate([a.ravel() for layer in net for a in layer])


def shaped(vector: Array, like: Layers) -> Layers:
    """A vector as the parameters of a network."""
    arrays, start = [], 0
    for a in (a for layer in like for a in layer):
        arrays.append(vector[start : start + a.size].reshape(a.shape))
        start += a.size
    return list(zip(arrays[::2], arrays[1::2], strict=True))


def mean_update(net: Layers, data: Data, clients: dict[int, list[list[Array]]], lr: float) -> Array:
    """Mean of (client's model - global model), weighted by the clients' numbers of examples."""
    updates = [flat(plain_sgd(net, *data[k], steps, lr)) - flat(net) for k, (steps, *_) in clients.items()]
    return np.average(updates, axis=0, weights=[len(data[k][1]) for k in clients])


def fedavgm(
    net: Layers, data: Data, rounds: Rounds, lr: float, momentum: float, server_lr: float
) -> tuple[Layers, Layers]:
    """Hsu et al.: the model and the velocity, which points against the updates."""
    x, velocity = flat(net), np.zeros_like(flat(net))
    for clients in rounds:
        velocity = momentum * velocity - mean_update(shaped(x, net), data, clients, lr)
        x = x - server_lr * velocity
    return shaped(x, net), shaped(velocity, net)


def fedopt(
    kind: str,
    net: Layers,
    data: Data,
    rounds: Rounds,
    lr: float,
    server_lr: float,
    beta1: float,
    beta2: float,
    tau: float,
) -> tuple[Layers, Layers, Layers]:
    """Reddi et al., Algorithm 2, entry by entry where the three optimizers differ: model, m and v."""
    x = flat(net)
    m, v = np.zeros_like(x), np.full_like(x, tau * tau)
    for clients in rounds:
        delta = mean_update(shaped(x, net), data, clients, lr)
        m = beta1 * m + (1 - beta1) * delta
        for i, d in enumerate(delta):
            if kind == "adagrad":
                v[i] = v[i] + d * d
            elif kind == "adam":
                v[i] = beta2 * v[i] + (1 - beta2) * d * d
            elif v[i] > d * d:
                v[i] = v[i] - (1 - beta2) * d * d
            else:
                v[i] = v[i] + (1 - beta2) * d * d
        x = x + server_lr * m / (np.sqrt(v) + tau)
    return shaped(x, net), shaped(m, net), shaped(v, net)


def gradient_weights(steps: int, lr: float, momentum: float, mu: float) -> Array:
    """Wang et al., a_i: the weight of the gradient of each local step in the whole update."""
    if momentum:
        return np.array([sum(momentum**j for j in range(steps - i)) for i in range(steps)])
    return np.array([(1 - lr * mu) ** (steps - 1 - i) for i in range(steps)])


def fednova(
    net: Layers, data: Data, rounds: Rounds, lr: float, momentum: float = 0.0, mu: float = 0.0
) -> Layers:
    """Wang et al.: directions are means of the gradients that a client met on its way, weighted by a_i."""
    for clients in rounds:
        sizes = np.array([len(data[k][1]) for k in clients])
        p, directions, lengths = sizes / sizes.sum(), [], []
        for k, (steps,) in clients.items():
            x, y = data[k]
            own, buffer, met = flat(net), 0.0, []
            for i in steps:
                met.append(flat(gradient(shaped(own, net), x[i], y[i])))
                buffer = momentum * buffer + met[-1] + mu * (own - flat(net))
                own = own - lr * buffer
            a = gradient_weights(len(steps), lr, momentum, mu)
            directions.append(a @ np.stack(met) / a.sum())
            lengths.append(len(steps) if mu else a.sum())
        net = shaped(flat(net) - (p @ lengths) * lr * (p @ np.stack(directions)), net)
    return net


def fedbabu(body: Layers, head: Layers, data: Data, rounds: Rounds, lr: float) -> Layers:
    """Oh et al., Algorithm 1: gradients of the body alone, the head as it was drawn."""
    for clients in rounds:
        replies = []
        for k, (of_body, _) in clients.items():
            x, y = data[k]
            own = body
            for i in of_body:
                own = descended(own, gradient(own + head, x[i], y[i])[:-1], lr)
            replies.append(own)
        body = weighted_mean(replies, [len(data[k][1]) for k in clients])
    return body


def fine_tuned(net: Layers, x: Array, y: Array, steps: list[Array], lr: float, part: str) -> Layers:
    """A network after SGD on the whole, on the last layer or on all but the last."""
    for i in steps:
        trained = descended(net, gradient(net, x[i], y[i]), lr)
        body, head = trained[:-1], trained[-1:]
        net = {"whole": trained, "head": net[:-1] + head, "body": body + net[-1:]}[part]
    return net


def fedbn(
    net: nn.Module, local: set[str], data: Data, rounds: Rounds, lr: float
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Li et al., Algorithm 1, in a loop over modules: the averaged parameters, and each client's own."""
    own = [copy.deepcopy(net) for _ in data]
    shared = {n: p.detach().clone() for n, p in net.named_parameters() if n not in local}
    for clients in rounds:
        for k, (steps,) in clients.items():
            own[k].load_state_dict(shared, strict=False)
            optimizer = torch.optim.SGD(own[k].parameters(), lr=lr)
            x, y = (torch.as_tensor(a) for a in data[k])
            own[k].train()
            for i in steps:
                optimizer.zero_grad()
                functional.cross_entropy(own[k](x[i]), y[i]).backward()
                optimizer.step()
        total = sum(len(data[k][1]) for k in clients)
        shared = {
            n: sum(len(data[k][1]) / total * own[k].get_parameter(n).detach() for k in clients)
            for n in shared
        }
    kept = [{n: p.detach() for n, p in m.named_parameters() if n in local} for m in own]
    return shared, kept
