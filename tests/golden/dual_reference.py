"""Methods with dual variables or two models a client, in NumPy float64, written from the papers' equations.

As in :mod:`golden.reference`, whose network, gradients and form of the data are used: nothing here knows of
the package.
``lrs`` holds one learning rate a round.
"""

from __future__ import annotations

from tests.golden.reference import Data, Layers, Rounds, descended, gradient, plain_sgd, plus, weighted_mean


def times(net: Layers, factor: float) -> Layers:
    return [(factor * w, factor * b) for w, b in net]


def plain_mean(nets: list[Layers]) -> Layers:
    return weighted_mean(nets, [1] * len(nets))


def total(nets: list[Layers], like: Layers) -> Layers:
    """Sum of networks."""
    out = times(like, 0.0)
    for net in nets:
        out = plus(out, net)
    return out


def inner(a: Layers, b: Layers) -> float:
    return float(
        sum((p * q).sum() for one, other in zip(a, b, strict=True) for p, q in zip(one, other, strict=True))
    )


def scaffold(
    x: Layers,
    clients: int,
    data: Data,
    rounds: Rounds,
    lrs: list[float],
    eta_g: float = 1.0,
    decay: float = 0.0,
) -> tuple[Layers, Layers, list[Layers]]:
    """Karimireddy et al., Algorithm 1 with option II: x, c, and every c_k."""
    c = times(x, 0.0)
    own = [c] * clients
    for sampled, lr in zip(rounds, lrs, strict=True):
        ends, changes = [], []
        for k, (steps,) in sampled.items():
            features, labels = data[k]
            y = x
            for i in steps:
                g = plus(gradient(y, features[i], labels[i]), times(y, decay))
                y = descended(y, plus(plus(g, own[k], -1.0), c), lr)
            new = plus(plus(own[k], c, -1.0), times(plus(x, y, -1.0), 1 / (len(steps) * lr)))
            changes.append(plus(new, own[k], -1.0))
            ends.append(plus(y, x, -1.0))
            own[k] = new
        x = plus(x, times(total(ends, x), eta_g / len(sampled)))
        c = plus(c, times(total(changes, x), 1 / clients))
    return x, c, own


def feddyn(
    theta: Layers, clients: int, data: Data, rounds: Rounds, lrs: list[float], alpha: float
) -> tuple[Layers, Layers, Layers, list[Layers]]:
    """Acar et al., Algorithm 1: θ, the mean of the last replies, h, and every g_k."""
    h = times(theta, 0.0)
    own, average = [h] * clients, theta
    for sampled, lr in zip(rounds, lrs, strict=True):
        replies = []
        for k, (steps,) in sampled.items():
            x, y = data[k]
            net = theta
            for i in steps:
                pull = times(plus(net, theta, -1.0), alpha)
                net = descended(net, plus(plus(gradient(net, x[i], y[i]), own[k], -1.0), pull), lr)
            own[k] = plus(own[k], plus(net, theta, -1.0), -alpha)
            replies.append(net)
        moved = total([plus(net, theta, -1.0) for net in replies], theta)
        h = plus(h, moved, -alpha / clients)
        average = plain_mean(replies)
        theta = plus(average, h, -1 / alpha)
    return theta, average, h, own


def ditto(
    w: Layers, personal: list[Layers], data: Data, rounds: Rounds, lrs: list[float], lam: float
) -> tuple[Layers, list[Layers]]:
    """Li et al., Algorithm 1: the global network, and every personal one."""
    personal = list(personal)
    for sampled, lr in zip(rounds, lrs, strict=True):
        replies = []
        for k, (for_global, for_personal) in sampled.items():
            x, y = data[k]
            replies.append(plain_sgd(w, x, y, for_global, lr))
            v = personal[k]
            for i in for_personal:
                v = descended(v, plus(gradient(v, x[i], y[i]), plus(v, w, -1.0), lam), lr)
            personal[k] = v
        w = weighted_mean(replies, [len(data[k][1]) for k in sampled])
    return w, personal


def apfl(
    w: Layers, local: list[Layers], data: Data, rounds: Rounds, lrs: list[float], alpha: float, pace: float
) -> tuple[Layers, list[Layers], list[float], set[float]]:
    """Deng et al., Algorithm 1 with adaptive α: w, every v, every a, and the bounds at which an a was
    clipped.

    The learning rate of a is ``pace`` times that of the networks; the paper's pace is 1, and at 0 all a are
    fixed.
    """
    local, shares, clipped = list(local), [alpha] * len(local), set()
    for sampled, lr in zip(rounds, lrs, strict=True):
        replies = []
        for k, (steps,) in sampled.items():
            x, y = data[k]
            mine, v, a = w, local[k], shares[k]
            for i in steps:
                of_mixture = gradient(plus(times(v, a), mine, 1 - a), x[i], y[i])
                slope = inner(plus(v, mine, -1.0), of_mixture)
                mine, v = (
                    descended(mine, gradient(mine, x[i], y[i]), lr),
                    descended(v, times(of_mixture, a), lr),
                )
                free = a - pace * lr * slope
                a = min(max(free, 0.0), 1.0)
                clipped |= {a} - {free}
            local[k], shares[k] = v, a
            replies.append(mine)
        w = weighted_mean(replies, [len(data[k][1]) for k in sampled])
    return w, local, shares, clipped
