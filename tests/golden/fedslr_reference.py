"""FedSLR, LPGD and GPGD in NumPy float64 with gradients by hand; networks, data and rounds as in
:mod:`golden.reference`.

FedSLR is Algorithm 2: the server keeps every γ_i. Learning rates are given as a function of the round.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.golden.reference import Array, Data, Layers, Rounds, descended, gradient, plus, weighted_mean


def times(net: Layers, factor: float) -> Layers:
    return [(factor * w, factor * b) for w, b in net]


def soft(a: Array, c: float) -> Array:
    return np.sign(a) * np.maximum(np.abs(a) - c, 0.0)


def nuclear(a: Array, c: float) -> Array:
    u, s, vt = np.linalg.svd(a, full_matrices=False)
    return u @ np.diag(np.maximum(s - c, 0.0)) @ vt


def on_weights(net: Layers, prox: Callable[[Array, float], Array], c: float) -> Layers:
    return [(prox(w, c), b) for w, b in net]


def on_all(net: Layers, c: float) -> Layers:
    return [(soft(w, c), soft(b, c)) for w, b in net]


def fedslr(
    net: Layers,
    data: Data,
    rounds: Rounds,
    lr: Callable[[int], float],
    decay: float,
    lam: float,
    mu: float,
    prox_step: float,
    sparse_w: bool = False,
    nuclear_p: bool = False,
    start_at_w: bool = False,
) -> tuple[list[Layers], list[Layers], list[Layers]]:
    """w after every round (from the start on), γ_i and p_i of every client."""
    w, zero = net, times(net, 0.0)
    gammas, ps = [zero for _ in data], [net if start_at_w else zero for _ in data]
    history = [w]
    for t, clients in enumerate(rounds):
        rate, replies = lr(t), []
        for k, (first, second) in clients.items():
            x, y = data[k]
            own = w
            for i in first:
                g = plus(
                    plus(gradient(own, x[i], y[i]), gammas[k], -1.0), times(plus(own, w, -1.0), 1 / prox_step)
                )
                own = descended(own, plus(g, times(own, decay)), rate)
            gammas[k] = plus(gammas[k], times(plus(w, own, -1.0), 1 / prox_step))
            replies.append(own)
            p = ps[k]
            for i in second:
                p = descended(p, plus(gradient(plus(w, p), x[i], y[i]), times(p, decay)), rate)
                p = on_weights(p, nuclear, rate * mu) if nuclear_p else on_all(p, rate * mu)
            ps[k] = p
        mean_gamma = weighted_mean(gammas, [1] * len(gammas))
        w = plus(weighted_mean(replies, [1] * len(replies)), times(mean_gamma, prox_step), -1.0)
        w = on_weights(w, soft if sparse_w else nuclear, lam * prox_step)
        history.append(w)
    return history, gammas, ps


def lpgd(
    net: Layers, data: Data, rounds: Rounds, lr: Callable[[int], float], decay: float, lam: float
) -> Layers:
    for t, clients in enumerate(rounds):
        replies = []
        for k, (steps,) in clients.items():
            x, y = data[k]
            own = net
            for i in steps:
                own = descended(own, plus(gradient(own, x[i], y[i]), times(own, decay)), lr(t))
                own = on_weights(own, nuclear, lr(t) * lam)
            replies.append(own)
        net = weighted_mean(replies, [1] * len(replies))
    return net


def gpgd(
    net: Layers, data: Data, rounds: Rounds, lr: Callable[[int], float], decay: float, c: float
) -> Layers:
    for t, clients in enumerate(rounds):
        replies = []
        for k, (steps,) in clients.items():
            x, y = data[k]
            own = net
            for i in steps:
                own = descended(own, plus(gradient(own, x[i], y[i]), times(own, decay)), lr(t))
            replies.append(own)
        net = on_weights(weighted_mean(replies, [1] * len(replies)), nuclear, c)
    return net


def feddyn(
    net: Layers, data: Data, rounds: Rounds, lr: Callable[[int], float], decay: float, alpha: float
) -> list[Layers]:
    """Acar et al., Algorithm 1: the cloud model after every round, from the start on."""
    theta, h, own = net, times(net, 0.0), [times(net, 0.0) for _ in data]
    history = [theta]
    for t, clients in enumerate(rounds):
        replies = []
        for k, (steps, *_) in clients.items():
            x, y = data[k]
            now = theta
            for i in steps:
                g = plus(gradient(now, x[i], y[i]), own[k], -1.0)
                g = plus(g, times(plus(now, theta, -1.0), alpha))
                now = descended(now, plus(g, times(now, decay)), lr(t))
            own[k] = plus(own[k], times(plus(now, theta, -1.0), alpha), -1.0)
            replies.append(now)
        for reply in replies:
            h = plus(h, times(plus(reply, theta, -1.0), alpha / len(data)), -1.0)
        theta = plus(weighted_mean(replies, [1] * len(replies)), times(h, 1 / alpha), -1.0)
        history.append(theta)
    return history
