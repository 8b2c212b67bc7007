"""FLoRAL, its baselines, FedEM and IFCA in NumPy float64, written from the papers' equations; see ``reference``.

Networks, data and rounds are as there. Adaptors are a list beside the layers of a network, of each layer
``(U [C, out, r], V [C, in, r], B [C, out])``. A client's first pass is local training, its second that of a
newcomer's router.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.golden.reference import (
    Array,
    Data,
    Layers,
    Rounds,
    backward,
    cross_entropy,
    descended,
    forward,
    gradient,
    one_hot,
    plain_sgd,
    softmax,
    weighted_mean,
)

Adaptors = list[tuple[Array, Array, Array]]
EPS = 1e-5


# -- mixtures of adaptors ------------------------------------------------------------------------------------


def mixed(net: Layers, adaptors: Adaptors, pi: Array, alpha: float) -> Layers:
    """The network with w + α Σ_c π_c U_c V_cᵀ and b + α Σ_c π_c B_c."""
    out = []
    for (w, b), (u, v, extra) in zip(net, adaptors, strict=True):
        for c, p in enumerate(pi):
            w, b = w + alpha * p * u[c] @ v[c].T, b + alpha * p * extra[c]
        out.append((w, b))
    return out


def gradients(grads: Layers, adaptors: Adaptors, pi: Array, alpha: float) -> tuple[Adaptors, Array]:
    """Of the adaptors and of π, given that of the mixed network."""
    out, d_pi = [], np.zeros(len(pi))
    for (dw, db), (u, v, extra) in zip(grads, adaptors, strict=True):
        of = [np.zeros_like(u), np.zeros_like(v), np.zeros_like(extra)]
        for c, p in enumerate(pi):
            of[0][c], of[1][c], of[2][c] = alpha * p * dw @ v[c], alpha * p * dw.T @ u[c], alpha * p * db
            d_pi[c] += alpha * ((dw * (u[c] @ v[c].T)).sum() + (db * extra[c]).sum())
        out.append(tuple(of))
    return out, d_pi


def preconditioned(grads: Adaptors, adaptors: Adaptors) -> Adaptors:
    """Appendix D: G_U (VᵀV + εI)⁻¹, G_V (UᵀU + εI)⁻¹; offsets as they are."""
    out = []
    for (du, dv, db), (u, v, _) in zip(grads, adaptors, strict=True):
        eye = EPS * np.eye(u.shape[-1])
        of_u = [du[c] @ np.linalg.inv(v[c].T @ v[c] + eye) for c in range(len(u))]
        of_v = [dv[c] @ np.linalg.inv(u[c].T @ u[c] + eye) for c in range(len(u))]
        out.append((np.stack(of_u), np.stack(of_v), db))
    return out


def shares(theta: Array, temperature: float = 1.0, top: int | None = None) -> Array:
    """Softmax of θ / T, over the ``top`` largest alone, of equal ones the first."""
    z = theta / temperature
    kept = np.arange(len(z)) if top is None else np.argsort(-z, kind="stable")[:top]
    e = np.zeros(len(z))
    e[kept] = np.exp(z[kept] - z.max())
    return e / e.sum()


def d_theta(pi: Array, d_pi: Array, temperature: float) -> Array:
    """Through the softmax."""
    return pi * (d_pi - pi @ d_pi) / temperature


def moved(adaptors: Adaptors, grads: Adaptors, lr: float, decay: float) -> Adaptors:
    return [
        tuple(a - lr * (g + decay * a) for a, g in zip(one, of, strict=True))
        for one, of in zip(adaptors, grads, strict=True)
    ]


def floral_client(
    net: Layers,
    adaptors: Adaptors,
    theta: Array,
    x: Array,
    y: Array,
    steps: list[Array],
    lr: float,
    *,
    router_lr: float,
    alpha: float,
    precondition: bool,
    temperature: float = 1.0,
    top: int | None = None,
    noise: Array | None = None,
    fixed: Array | None = None,
    decay: float = 0.0,
    freeze: bool = False,
) -> tuple[Layers, Adaptors, Array]:
    """Lines 2 to 5 of Algorithm 1; ``fixed`` is a π that does not move, ``freeze`` moves θ alone."""
    for s, i in enumerate(steps):
        pi = (
            fixed
            if fixed is not None
            else shares(theta + (0 if noise is None else noise[s]), temperature, top)
        )
        grads = gradient(mixed(net, adaptors, pi, alpha), x[i], y[i])
        of_adaptors, d_pi = gradients(grads, adaptors, pi, alpha)
        if fixed is None:
            theta = theta - router_lr * d_theta(pi, d_pi, temperature)
        if freeze:
            continue
        if precondition:
            of_adaptors = preconditioned(of_adaptors, adaptors)
        adaptors = moved(adaptors, of_adaptors, lr, decay)
        net = descended(
            net, [(dw + decay * w, db + decay * b) for (dw, db), (w, b) in zip(grads, net, strict=True)], lr
        )
    return net, adaptors, theta


def by_cluster(old: Adaptors, replies: list[Adaptors], pis: list[Array], sizes: list[int]) -> Adaptors:
    """Line 7: a_c ← Σ π_c N a_c / Σ π_c N; without weight a_c stays."""
    out = []
    for layer, one in enumerate(old):
        parts = []
        for j, before in enumerate(one):
            new = before.copy()
            for c in range(len(before)):
                weight = sum(pi[c] * n for pi, n in zip(pis, sizes, strict=True))
                if weight > 0:
                    new[c] = (
                        sum(pi[c] * n * r[layer][j][c] for r, pi, n in zip(replies, pis, sizes, strict=True))
                        / weight
                    )
            parts.append(new)
        out.append(tuple(parts))
    return out


def centered(net: Layers, adaptors: Adaptors, p: Array, alpha: float) -> tuple[Layers, Adaptors]:
    """Appendix E: the mean into the base, and the best factors of the rank there was of what is left."""
    base, out = [], []
    for (w, b), (u, v, extra) in zip(net, adaptors, strict=True):
        dense = np.stack([u[c] @ v[c].T for c in range(len(u))])
        mean, offset, r = np.tensordot(p, dense, 1), p @ extra, u.shape[-1]
        left, right = np.zeros_like(u), np.zeros_like(v)
        for c in range(len(u)):
            a, s, bt = np.linalg.svd(dense[c] - mean)
            left[c], right[c] = a[:, :r] * np.sqrt(s[:r]), bt[:r].T * np.sqrt(s[:r])
        base.append((w + alpha * mean, b + alpha * offset))
        out.append((left, right, extra - offset))
    return base, out


Server = Callable[[list[Array], list[Array]], list[Array]]
"""A step from the old values to what the mean makes of them; it keeps its own memory."""


def flat(net: Layers, adaptors: Adaptors) -> list[Array]:
    return [t for layer in net for t in layer] + [t for one in adaptors for t in one]


def unflat(values: list[Array], net: Layers) -> tuple[Layers, Adaptors]:
    n = 2 * len(net)
    rest = values[n:]
    return list(zip(values[:n:2], values[1:n:2], strict=True)), list(
        zip(rest[::3], rest[1::3], rest[2::3], strict=True)
    )


def server_sgd(lr: float, momentum: float) -> Server:
    velocity: list[Array] = []

    def step(old: list[Array], new: list[Array]) -> list[Array]:
        grads = [a - b for a, b in zip(old, new, strict=True)]
        velocity[:] = (
            grads if not velocity else [momentum * v + g for v, g in zip(velocity, grads, strict=True)]
        )
        return [a - lr * v for a, v in zip(old, velocity, strict=True)]

    return step


def server_adam(lr: float, beta1: float, beta2: float, eps: float) -> Server:
    first: list[Array] = []
    second: list[Array] = []
    count = [0]

    def step(old: list[Array], new: list[Array]) -> list[Array]:
        grads = [a - b for a, b in zip(old, new, strict=True)]
        if not first:
            first.extend(np.zeros_like(g) for g in grads)
            second.extend(np.zeros_like(g) for g in grads)
        count[0] += 1
        first[:] = [beta1 * m + (1 - beta1) * g for m, g in zip(first, grads, strict=True)]
        second[:] = [beta2 * m + (1 - beta2) * g * g for m, g in zip(second, grads, strict=True)]
        one, two = 1 - beta1 ** count[0], 1 - beta2 ** count[0]
        return [
            a - lr * (m / one) / (np.sqrt(v / two) + eps) for a, m, v in zip(old, first, second, strict=True)
        ]

    return step


def mfl_router(
    net: Layers, adaptors: Adaptors, x: Array, y: Array, lr: float, temperature: float, alpha: float
) -> Array:
    """θ of eq. 5, which has no temperature, at the models that eq. 4 has averaged."""
    count = len(adaptors[0][0])
    lost = [cross_entropy(forward(mixed(net, adaptors, e, alpha), x)[1], y) for e in np.eye(count)]
    return -lr * temperature * np.array(lost)


def floral(
    net: Layers,
    adaptors: Adaptors,
    data: Data,
    rounds: Rounds,
    lr: float,
    *,
    router_lr: float = 0.1,
    alpha: float = 1.0,
    precondition: bool = True,
    temperature: float = 1.0,
    top: int | None = None,
    decay: float = 0.0,
    noise: list[dict[int, Array]] | None = None,
    known: list[int] | None = None,
    mfl: bool = False,
    keep: bool = True,
    center: bool = False,
    server: Server | None = None,
) -> tuple[Layers, Adaptors, dict[int, Array]]:
    """Algorithm 1: u, a, and θ (of the MFL router log π) of every client that took part. ``known`` is optimal
    routing."""
    count = len(adaptors[0][0])
    thetas: dict[int, Array] = {}
    for t, clients in enumerate(rounds):
        bases, others, pis, sizes = [], [], [], []
        for k, (steps, *_) in clients.items():
            x, y = data[k]
            theta = thetas[k] if keep and k in thetas else np.zeros(count)
            if mfl and t > 0:
                theta = mfl_router(net, adaptors, x, y, router_lr, temperature, alpha)
            fixed = (
                np.eye(count)[known[k]]
                if known is not None
                else shares(theta, temperature, top)
                if mfl
                else None
            )
            base, own, theta = floral_client(
                net, adaptors, theta, x, y, steps, lr, router_lr=router_lr, alpha=alpha, precondition=precondition,
                temperature=temperature, top=top, noise=None if noise is None else noise[t][k], fixed=fixed, decay=decay,
            )  # fmt: skip
            thetas[k] = theta
            bases.append(base)
            others.append(own)
            pis.append(fixed if known is not None else shares(theta, temperature, top))
            sizes.append(len(y))
        old = flat(net, adaptors)
        net, adaptors = weighted_mean(bases, sizes), by_cluster(adaptors, others, pis, sizes)
        if server is not None:
            net, adaptors = unflat(server(old, flat(net, adaptors)), net)
        if center:
            p = sum(n * pi for n, pi in zip(sizes, pis, strict=True))
            net, adaptors = centered(net, adaptors, p / p.sum(), alpha)
    return net, adaptors, thetas


def local_adaptor(
    net: Layers,
    own: list[Adaptors],
    data: Data,
    rounds: Rounds,
    lr: float,
    *,
    alpha: float,
    precondition: bool,
) -> tuple[Layers, list[Adaptors]]:
    """Each client's adaptor stays where it is; the base is averaged."""
    own = list(own)
    for clients in rounds:
        bases = []
        for k, (steps, *_) in clients.items():
            x, y = data[k]
            base, own[k], _ = floral_client(
                net, own[k], np.zeros(1), x, y, steps, lr, router_lr=0.0, alpha=alpha, precondition=precondition,
                fixed=np.ones(1),
            )  # fmt: skip
            bases.append(base)
        net = weighted_mean(bases, [len(data[k][1]) for k in clients])
    return net, own


# -- mixtures of whole models --------------------------------------------------------------------------------


def scaled(net: Layers, factor: float) -> Layers:
    return [(factor * w, factor * b) for w, b in net]


def summed(nets: list[Layers]) -> Layers:
    return [tuple(sum(net[i][j] for net in nets) for j in (0, 1)) for i in range(len(nets[0]))]


def ensemble_gradients(
    nets: list[Layers], pi: Array, x: Array, y: Array, outputs: bool
) -> tuple[list[Layers], Array]:
    """Of the mean cross-entropy with respect to every network and π."""
    if outputs:
        passed = [forward(net, x) for net in nets]
        scores = sum(p * s for p, (_, s) in zip(pi, passed, strict=True))
        d = (softmax(scores) - one_hot(y, scores.shape[1])) / len(y)
        grads = [backward(net, inputs, p * d) for net, p, (inputs, _) in zip(nets, pi, passed, strict=True)]
        return grads, np.array([(d * s).sum() for _, s in passed])
    whole = gradient(summed([scaled(net, p) for net, p in zip(nets, pi, strict=True)]), x, y)
    d_pi = [
        sum((g * p).sum() for of, at in zip(whole, net, strict=True) for g, p in zip(of, at, strict=True))
        for net in nets
    ]
    return [scaled(whole, p) for p in pi], np.array(d_pi)


def cluster_means(
    old: list[Layers], replies: list[list[Layers]], pis: list[Array], sizes: list[int]
) -> list[Layers]:
    out = []
    for c, before in enumerate(old):
        weights = [pi[c] * n for pi, n in zip(pis, sizes, strict=True)]
        out.append(weighted_mean([r[c] for r in replies], weights) if sum(weights) > 0 else before)
    return out


def ensemble(
    nets: list[Layers], data: Data, rounds: Rounds, lr: float, *, router_lr: float, outputs: bool,
    known: list[int] | None = None,
) -> tuple[list[Layers], dict[int, Array]]:  # fmt: skip
    """C networks and every θ."""
    thetas: dict[int, Array] = {}
    for clients in rounds:
        replies, pis = [], []
        for k, (steps, *_) in clients.items():
            x, y = data[k]
            own, theta = nets, thetas.get(k, np.zeros(len(nets)))
            for i in steps:
                pi = shares(theta) if known is None else np.eye(len(nets))[known[k]]
                grads, d_pi = ensemble_gradients(own, pi, x[i], y[i], outputs)
                own = [descended(net, g, lr) for net, g in zip(own, grads, strict=True)]
                theta = theta - router_lr * d_theta(pi, d_pi, 1.0)
            thetas[k] = theta
            replies.append(own)
            pis.append(shares(theta) if known is None else np.eye(len(nets))[known[k]])
        nets = cluster_means(nets, replies, pis, [len(data[k][1]) for k in clients])
    return nets, thetas


def likelihoods(nets: list[Layers], pi: Array, x: Array, y: Array) -> Array:
    """q ``[n, C]`` of FedEM's E-step: π_c p_c(y | x), normalized."""
    q = np.stack(
        [p * softmax(forward(net, x)[1])[np.arange(len(y)), y] for p, net in zip(pi, nets, strict=True)], 1
    )
    return q / q.sum(1, keepdims=True)


def fedem(nets: list[Layers], data: Data, rounds: Rounds, lr: float) -> tuple[list[Layers], dict[int, Array]]:
    """Marfoq et al., Algorithm 1: C networks and every π."""
    pis: dict[int, Array] = {}
    for clients in rounds:
        replies = []
        for k, (steps, *_) in clients.items():
            x, y = data[k]
            q = likelihoods(nets, pis.get(k, np.full(len(nets), 1 / len(nets))), x, y)
            pis[k] = q.mean(0)
            own = []
            for c, net in enumerate(nets):
                for i in steps:
                    inputs, scores = forward(net, x[i])
                    d = q[i, c, None] * (softmax(scores) - one_hot(y[i], scores.shape[1])) / len(i)
                    net = descended(net, backward(net, inputs, d), lr)
                own.append(net)
            replies.append(own)
        sizes = [len(data[k][1]) for k in clients]
        nets = [weighted_mean([r[c] for r in replies], sizes) for c in range(len(nets))]
    return nets, pis


def ifca(
    nets: list[Layers], data: Data, rounds: Rounds, lr: float, weighted: bool = True
) -> tuple[list[Layers], list[list[int]]]:
    """Ghosh et al., Algorithm 1 with model averaging: C networks, and the choices of each round."""
    history = []
    for clients in rounds:
        chosen, ends = [], []
        for k, (steps, *_) in clients.items():
            x, y = data[k]
            chosen.append(int(np.argmin([cross_entropy(forward(net, x)[1], y) for net in nets])))
            ends.append(plain_sgd(nets[chosen[-1]], x, y, steps, lr))
        sizes = [len(data[k][1]) if weighted else 1 for k in clients]
        nets = list(nets)
        for c in set(chosen):
            of = [j for j, own in enumerate(chosen) if own == c]
            nets[c] = weighted_mean([ends[j] for j in of], [sizes[j] for j in of])
        history.append(chosen)
    return nets, history
