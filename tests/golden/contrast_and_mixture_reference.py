"""MOON, FedRoD, pFedMe and FedALA in NumPy float64, written from the papers' equations.

As in :mod:`golden.reference`, whose network, gradients and form of the data are used: nothing here knows of
the package.
"""

from __future__ import annotations

import numpy as np

from tests.golden.reference import (
    Array,
    Data,
    Layers,
    Rounds,
    backward,
    descended,
    forward,
    gradient,
    one_hot,
    plain_sgd,
    plus,
    softmax,
    weighted_mean,
)


def norms(rows: Array) -> Array:
    return np.sqrt((rows**2).sum(1, keepdims=True))


def cosine(a: Array, b: Array) -> tuple[Array, Array]:
    """Cosine of each row of a with that of b ``[n, 1]``, and its derivative by a ``[n, d]``."""
    cos = (a * b).sum(1, keepdims=True) / (norms(a) * norms(b))
    return cos, (b / norms(b) - cos * a / norms(a)) / norms(a)


def contrast_slope(z: Array, z_glob: Array, z_prev: Array, tau: float) -> Array:
    """Derivative by z of the sum over rows of -log(e^(near/τ) / (e^(near/τ) + e^(far/τ)))."""
    near, d_near = cosine(z, z_glob)
    far, d_far = cosine(z, z_prev)
    share = np.exp(near / tau) / (np.exp(near / tau) + np.exp(far / tau))
    return (1 - share) * (d_far - d_near) / tau


def moon(
    net: Layers, clients: int, data: Data, rounds: Rounds, lr: float, mu: float, tau: float
) -> tuple[Layers, list[Layers]]:
    """Li et al., Algorithm 1: the global network, and the last network of every client."""
    last = [net] * clients
    for sampled in rounds:
        replies = []
        for k, (steps,) in sampled.items():
            x, y = data[k]
            own = net
            for i in steps:
                inputs, scores = forward(own, x[i])
                far, near = forward(last[k], x[i])[0][-1], forward(net, x[i])[0][-1]
                d_z = mu * contrast_slope(inputs[-1], near, far, tau) / len(i)
                d_scores = (softmax(scores) - one_hot(y[i], scores.shape[1])) / len(i)
                own = descended(own, backward(own, inputs, d_scores, d_z), lr)
            replies.append(own)
            # after all steps: the model of the round before is the target in each of them
            last[k] = own
        net = weighted_mean(replies, [len(data[k][1]) for k in sampled])
    return net, last


def fedrod(
    net: Layers, clients: int, data: Data, rounds: Rounds, lr: float, gamma: float
) -> tuple[Layers, list[Layers]]:
    """Chen & Chao, Algorithm 1: the generic network, and every personal head as a list of one layer."""
    weight, bias = net[-1]
    classes = len(bias)
    heads = [[(np.zeros_like(weight), np.zeros_like(bias))]] * clients
    for sampled in rounds:
        replies = []
        for k, (steps,) in sampled.items():
            x, y = data[k]
            prior = np.bincount(y, minlength=classes).astype(float) ** gamma
            own, head = net, heads[k]
            for i in steps:
                inputs, scores = forward(own, x[i])
                true, z = one_hot(y[i], classes), inputs[-1]
                weighted = prior * np.exp(scores)
                d_generic = (weighted / weighted.sum(1, keepdims=True) - true) / len(i)
                d_personal = (softmax(scores + z @ head[0][0].T + head[0][1]) - true) / len(i)
                head = descended(head, [(d_personal.T @ z, d_personal.sum(0))], lr)
                own = descended(own, backward(own, inputs, d_generic), lr)
            heads[k] = head
            replies.append(own)
        net = weighted_mean(replies, [len(data[k][1]) for k in sampled])
    return net, heads


def pfedme(
    w: Layers,
    clients: int,
    data: Data,
    rounds: Rounds,
    lr: float,
    lam: float,
    inner_steps: int,
    inner_lr: float,
    beta: float,
    weighted: bool = False,
) -> tuple[Layers, list[Layers]]:
    """Dinh et al., Algorithm 1: the global network and every personal one, of a last batch at the local w."""

    def minimizer(center: Layers, x: Array, y: Array) -> Layers:
        theta = center
        for _ in range(inner_steps):
            slope = plus(gradient(theta, x, y), plus(theta, center, -1.0), lam)
            theta = descended(theta, slope, inner_lr)
        return theta

    personal = [w] * clients
    for sampled in rounds:
        replies = []
        for k, (steps, (last,)) in sampled.items():
            x, y = data[k]
            own = w
            for i in steps:
                own = plus(own, plus(own, minimizer(own, x[i], y[i]), -1.0), -lr * lam)
            personal[k] = minimizer(own, x[last], y[last])
            replies.append(own)
        mean = weighted_mean(replies, [len(data[k][1]) if weighted else 1 for k in sampled])
        w = plus(w, plus(mean, w, -1.0), beta)
    return w, personal


def between(weights: Layers, received: Layers, own: Layers) -> Layers:
    return [
        tuple(v + w * (u - v) for w, u, v in zip(*layers, strict=True))
        for layers in zip(weights, received, own, strict=True)
    ]


def fedala(
    net: Layers, clients: int, data: Data, rounds: Rounds, lr: float, eta: float, upper: int = 1
) -> tuple[Layers, list[Layers], list[Layers], list[int]]:
    """Zhang et al., Algorithm 1: the global network; upper layers, weights and rounds of every client."""
    own = [net[-upper:]] * clients
    weights = [[(np.ones_like(w), np.ones_like(b)) for w, b in net[-upper:]]] * clients
    seen = [0] * clients
    for sampled in rounds:
        replies = []
        for k, (steps, later, first) in sampled.items():
            x, y = data[k]
            low, high = net[:-upper], net[-upper:]
            for i in {0: [], 1: first}.get(seen[k], later):
                slope = gradient(low + between(weights[k], high, own[k]), x[i], y[i])[-upper:]
                weights[k] = [
                    tuple(np.clip(w - eta * g * (u - v), 0, 1) for w, g, u, v in zip(*layers, strict=True))
                    for layers in zip(weights[k], slope, high, own[k], strict=True)
                ]
            trained = plain_sgd(low + between(weights[k], high, own[k]), x, y, steps, lr)
            own[k] = trained[-upper:]
            seen[k] += 1
            replies.append(trained)
        net = weighted_mean(replies, [len(data[k][1]) for k in sampled])
    return net, own, weights, seen
