"""Update rules of the personalized methods in NumPy float64, written from the papers' equations; see ``reference``.

Networks, data and rounds are as there. A mask is a list of Boolean arrays, one for each layer's weight;
biases are dense.
"""

from __future__ import annotations

import math

import numpy as np

from tests.golden.reference import (
    Array,
    Data,
    Layers,
    Rounds,
    descended,
    gradient,
    plain_sgd,
    plus,
    weighted_mean,
)

Mask = list[Array]


def halves(step: Array) -> tuple[Array, Array]:
    """Examples of a batch in turn to B1 and B2; one alone belongs to both."""
    return (step, step) if len(step) == 1 else (step[0::2], step[1::2])


def per_fedavg(
    net: Layers,
    data: Data,
    rounds: Rounds,
    alpha: float,
    beta: float,
    delta: float | None = None,
    weighted: bool = False,
) -> Layers:
    """Fallah et al., Algorithm 1: first order, or with the Hessian-vector product by finite differences of
    that width."""
    for clients in rounds:
        replies = []
        for k, (steps, _) in clients.items():
            x, y = data[k]
            own = net
            for step in steps:
                one, two = halves(step)
                inner = descended(own, gradient(own, x[one], y[one]), alpha)
                g = gradient(inner, x[two], y[two])
                if delta is not None:
                    ahead, behind = (gradient(descended(own, g, s * delta), x[one], y[one]) for s in (-1, 1))
                    product = [(a / (2 * delta), b / (2 * delta)) for a, b in plus(ahead, behind, -1.0)]
                    g = plus(g, product, -alpha)
                own = descended(own, g, beta)
            replies.append(own)
        net = weighted_mean(replies, [len(data[k][1]) if weighted else 1 for k in clients])
    return net


def fedper(
    body: Layers, heads: list[Layers], data: Data, rounds: Rounds, lr: float
) -> tuple[Layers, list[Layers]]:
    """Arivazhagan et al.: base and head at once; the base is averaged, each head is a list of one layer."""
    heads = list(heads)
    for clients in rounds:
        replies = []
        for k, (steps,) in clients.items():
            trained = plain_sgd(body + heads[k], *data[k], steps, lr)
            replies.append(trained[:-1])
            heads[k] = trained[-1:]
        body = weighted_mean(replies, [len(data[k][1]) for k in clients])
    return body, heads


def fedrep(
    body: Layers, heads: list[Layers], data: Data, rounds: Rounds, lr: float
) -> tuple[Layers, list[Layers]]:
    """Collins et al., Algorithm 1: the head on the frozen body, then the body below the frozen head."""
    heads = list(heads)
    for clients in rounds:
        replies = []
        for k, (of_head, of_body) in clients.items():
            x, y = data[k]
            head, own = heads[k], body
            for i in of_head:
                head = descended(head, gradient(body + head, x[i], y[i])[-1:], lr)
            for i in of_body:
                own = descended(own, gradient(own + head, x[i], y[i])[:-1], lr)
            heads[k] = head
            replies.append(own)
        body = weighted_mean(replies, [len(data[k][1]) for k in clients])
    return body, heads


def erk_counts(shapes: list[tuple[int, ...]], density: float) -> list[float]:
    """Active entries of each weight before rounding: ε of min(1, ε sum(shape) / prod(shape)) found by
    bisection.

    Vectors are dense and count towards the density of the whole.
    """
    weights = [s for s in shapes if len(s) > 1]
    expected = density * sum(math.prod(s) for s in shapes) - sum(math.prod(s) for s in shapes if len(s) == 1)

    def active(epsilon: float) -> list[float]:
        return [min(math.prod(s), epsilon * sum(s)) for s in weights]

    low, high = 0.0, float(max(math.prod(s) for s in weights))
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(active(middle)) < expected else (low, middle)
    return active(high)


def exchanged(mask: Array, weight: Array, gradient: Array, rate: float) -> Array:
    """The mask after the smallest weights made room for the largest gradients, entry by entry.

    At equal gradients an entry that just left is taken before one that was not there, the smallest weight
    first.
    """
    entries = list(np.ndindex(mask.shape))
    active = [e for e in entries if mask[e]]
    count = math.ceil(rate * len(active))
    gone = sorted(active, key=lambda e: abs(weight[e]))[:count]
    candidates = gone + [e for e in entries if not mask[e]]
    grown = sorted(candidates, key=lambda e: -abs(gradient[e]))[:count]
    new = mask.copy()
    for e in gone:
        new[e] = False
    for e in grown:
        new[e] = True
    return new


def on(net: Layers, mask: Mask) -> Layers:
    return [(w * m, b) for (w, b), m in zip(net, mask, strict=True)]


def fedspa(
    net: Layers, masks: list[Mask], data: Data, rounds: Rounds, lr: float, alpha: float
) -> tuple[Layers, list[Mask]]:
    """Huang et al., Algorithms 1 and 2: the dense network and all masks; updates are subtracted by their
    plain mean."""
    masks = list(masks)
    for t, clients in enumerate(rounds):
        rate = alpha / 2 * (1 + math.cos(math.pi * t / len(rounds)))
        updates = []
        for k, (steps, growing) in clients.items():
            x, y = data[k]
            own = on(net, masks[k])
            for i in steps:
                own = descended(own, on(gradient(own, x[i], y[i]), masks[k]), lr)
            updates.append(plus(on(net, masks[k]), own, -1.0))
            if alpha > 0:
                (last,) = growing
                dense = gradient(own, x[last], y[last])
                masks[k] = [
                    exchanged(m, w, g, rate) for m, (w, _), (g, _) in zip(masks[k], own, dense, strict=True)
                ]
        net = plus(net, weighted_mean(updates, [1] * len(updates)), -1.0)
    return net, masks
