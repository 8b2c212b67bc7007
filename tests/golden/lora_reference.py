"""Federated LoRA in NumPy float64, dense where the package works on factors, written from the papers; see ``reference``.

Networks, data and rounds are as there. The last layer is the head, trained whole; every other layer has the
weight W_0 + s·B A with its bias fixed. Factors are a list ``(B [d, r], A [r, k])`` beside the layers without the
head; ``drawn`` are the initial A ``[r_max, k]`` of these layers. A scale is a function of the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.golden.reference import Array, Data, Layers, Rounds, gradient, weighted_mean

Factors = list[tuple[Array, Array]]
Dense = list[Array]
Scale = Callable[[int], float]


@dataclass(frozen=True)
class Setting:
    """What all methods begin with.

    Attributes:
        net: base and head.
        data: of every client.
        rounds: participants and the order of their examples.
        lr: of plain SGD.
        ranks: of every client.
        scale: s of a rank.
        drawn: random A of every layer.
    """

    net: Layers
    data: Data
    rounds: Rounds
    lr: float
    ranks: Sequence[int]
    scale: Scale
    drawn: list[Array]

    def sizes(self, clients: Sequence[int]) -> list[int]:
        return [len(self.data[k][1]) for k in clients]


# -- a client ------------------------------------------------------------------------------------------------


def fresh(net: Layers, drawn: list[Array], rank: int) -> Factors:
    """A random, B = 0."""
    return [(np.zeros((w.shape[0], rank)), a[:rank]) for (w, _), a in zip(net[:-1], drawn, strict=True)]


def added(net: Layers, updates: Dense) -> Layers:
    return [(w + u, b) for (w, b), u in zip(net[:-1], updates, strict=True)] + [net[-1]]


def products(factors: Factors, scale: float = 1.0) -> Dense:
    return [scale * b @ a for b, a in factors]


def smooth_norm(x: Array) -> float:
    """‖x‖, with a gradient at 0."""
    return float(np.sqrt((x**2).sum() + 1e-12))


def tail(factors: Factors, kept: int) -> float:
    """Σ ‖B[:, kept:]‖ ‖A[kept:]‖ over layers."""
    return sum(smooth_norm(b[:, kept:]) * smooth_norm(a[kept:]) for b, a in factors)


def trained(
    net: Layers,
    factors: Factors,
    scale: float,
    x: Array,
    y: Array,
    steps: list[Array],
    lr: float,
    *,
    move_a: bool = True,
    kept: int | None = None,
    penalty: float = 0.0,
) -> tuple[Factors, tuple[Array, Array]]:
    """Factors and head after SGD on the cross-entropy, plus ``penalty`` times the tail."""
    head = net[-1]
    for i in steps:
        *grads, (dw, db) = gradient(added([*net[:-1], head], products(factors, scale)), x[i], y[i])
        moved = []
        for (b, a), (d, _) in zip(factors, grads, strict=True):
            to_b, to_a = scale * d @ a.T, scale * b.T @ d
            if kept is not None:
                nb, na = smooth_norm(b[:, kept:]), smooth_norm(a[kept:])
                to_b[:, kept:] += penalty * na * b[:, kept:] / nb
                to_a[kept:] += penalty * nb * a[kept:] / na
            moved.append((b - lr * to_b, a - lr * to_a if move_a else a))
        factors, head = moved, (head[0] - lr * dw, head[1] - lr * db)
    return factors, head


def mean_of(values: list[Array], weights: Sequence[float]) -> Array:
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def mean_heads(heads: list[tuple[Array, Array]], sizes: list[int]) -> tuple[Array, Array]:
    return weighted_mean([[h] for h in heads], sizes)[0]


# -- means of factors ----------------------------------------------------------------------------------------


def mean_factors(replies: list[Factors], weights: Sequence[float]) -> Factors:
    layers = range(len(replies[0]))
    return [tuple(mean_of([r[i][j] for r in replies], weights) for j in (0, 1)) for i in layers]


def fedit(s: Setting, move_a: bool = True) -> tuple[Factors, Layers]:
    """Zhang et al.: means of B and of A; with A fixed it is FFA-LoRA (Sun et al.). Factors, and the net with
    the mean head."""
    rank, net = s.ranks[0], s.net
    factors = fresh(net, s.drawn, rank)
    for clients in s.rounds:
        got = [
            trained(net, factors, s.scale(rank), *s.data[k], p, s.lr, move_a=move_a)
            for k, (p,) in clients.items()
        ]
        sizes = s.sizes(list(clients))
        factors = mean_factors([f for f, _ in got], sizes)
        net = [*net[:-1], mean_heads([h for _, h in got], sizes)]
    return factors, net


def fedsa(s: Setting) -> tuple[list[Factors], Layers]:
    """Guo et al.: mean of A, B of one's own. The factors of every client now, and the net with the mean
    head."""
    rank, net = s.ranks[0], s.net
    shared, own = (
        [a[:rank] for a in s.drawn],
        {k: [b for b, _ in fresh(net, s.drawn, rank)] for k in range(len(s.data))},
    )
    for clients in s.rounds:
        replies, heads = [], []
        for k, (p,) in clients.items():
            start = list(zip(own[k], shared, strict=True))
            end, head = trained(net, start, s.scale(rank), *s.data[k], p, s.lr)
            own[k] = [b for b, _ in end]
            replies.append([a for _, a in end])
            heads.append(head)
        sizes = s.sizes(list(clients))
        shared = [mean_of([r[i] for r in replies], sizes) for i in range(len(shared))]
        net = [*net[:-1], mean_heads(heads, sizes)]
    return [list(zip(own[k], shared, strict=True)) for k in range(len(s.data))], net


def hetlora(
    s: Setting, *, by_norm: bool = False, per_index: bool = False, prune: float = 1.0, penalty: float = 1e-3
) -> tuple[Factors, Layers, list[int]]:
    """Cho et al., Algorithm 1: the server's factors of scale 1, the net with the mean head, and the ranks
    that are left.

    Ranks are rounded down, fall by one at least and to one at most. A component that nobody sent stays what
    it was.
    """
    ranks, top, net = list(s.ranks), max(s.ranks), s.net
    server = fresh(net, s.drawn, top)
    for clients in s.rounds:
        replies, heads, norms, held = [], [], [], []
        for k, (p,) in clients.items():
            r, unit = ranks[k], s.scale(ranks[k])
            start = [(b[:, :r] / unit, a[:r]) for b, a in server]
            kept = max(1, min(int(prune * r), r - 1)) if prune < 1 else r
            args = {"kept": kept, "penalty": penalty} if kept < r else {}
            end, head = trained(net, start, s.scale(r), *s.data[k], p, s.lr, **args)
            if kept < r and tail(end, kept) < tail(start, kept):
                end, ranks[k] = [(b[:, :kept], a[:kept]) for b, a in end], kept
            # in units of the weights; what is cut off is cut at the scale it was trained with
            end = [(b * unit, a) for b, a in end]
            norms.append(np.sqrt(sum((u**2).sum() for u in products(end))))
            m = ranks[k]
            replies.append(
                [(np.pad(b, ((0, 0), (0, top - m))), np.pad(a, ((0, top - m), (0, 0)))) for b, a in end]
            )
            heads.append(head)
            held.append(m)
        sizes = s.sizes(list(clients))
        weights = norms if by_norm else sizes
        new = mean_factors(replies, weights)
        new = [(b.copy(), a.copy()) for b, a in new]
        for j in range(top):
            have = [i for i, m in enumerate(held) if m > j]
            for layer, (b, a) in enumerate(new):
                if not have:
                    b[:, j], a[j] = server[layer][0][:, j], server[layer][1][j]
                elif per_index:
                    some = [weights[i] for i in have]
                    b[:, j] = mean_of([replies[i][layer][0][:, j] for i in have], some)
                    a[j] = mean_of([replies[i][layer][1][j] for i in have], some)
        server, net = new, [*net[:-1], mean_heads(heads, sizes)]
    return server, net, ranks


# -- means of updates ----------------------------------------------------------------------------------------


def triplets(w: Array) -> tuple[Array, Array, Array]:
    """U, σ, Vᵀ of what is not rounding, with the largest entry of each column of U positive."""
    u, sigma, vt = np.linalg.svd(w, full_matrices=False)
    rank = int((sigma > 1e-12 * max(sigma[0], 1e-300)).sum()) if w.any() else 0
    sign = np.sign(u[np.abs(u).argmax(0), np.arange(len(sigma))])
    return (u * sign)[:, :rank], sigma[:rank], (vt * sign[:, None])[:rank]


def best(w: Array, rank: int) -> Array:
    u, sigma, vt = triplets(w)
    return (u[:, :rank] * sigma[:rank]) @ vt[:rank]


def split_of(ws: Dense, rank: int, scale: float, how: str, drawn: list[Array]) -> Factors:
    """Factors of W^{r} / s; rows of A that W does not fill are random, their columns of B zero."""
    power = {"sqrt": 0.5, "B": 1.0, "A": 0.0}[how]
    out = []
    for w, random in zip(ws, drawn, strict=True):
        u, sigma, vt = triplets(w)
        sigma = sigma / scale
        b, a, r = np.zeros((w.shape[0], rank)), random[:rank].copy(), min(rank, len(sigma))
        b[:, :r], a[:r] = u[:, :r] * sigma[:r] ** power, sigma[:r, None] ** (1 - power) * vt[:r]
        out.append((b, a))
    return out


def eq15(
    ws: Dense,
    ranks: Sequence[int],
    sizes: Sequence[int],
    *,
    by: str = "truncation",
    error: str = "relative",
    eps: float = 1e-2,
    temperature: float = 1.0,
    per_layer: bool = False,
    by_examples: bool = False,
) -> list[list[float]]:
    """Weights p_i of every layer: FedHL, eq. 8 and 15, and the softmax after it; or by n_i or r_i alone."""
    if by != "truncation":
        plain = np.array(sizes if by == "examples" else ranks, dtype=float)
        return [list(plain / plain.sum())] * len(ws)
    layers = [[i] for i in range(len(ws))] if per_layer else [list(range(len(ws)))] * len(ws)
    out = []
    for group in layers:
        whole = sum((ws[i] ** 2).sum() for i in group)
        r = np.array([sum(((ws[i] - best(ws[i], m)) ** 2).sum() for i in group) for m in ranks])
        if error == "relative":
            r = r / whole if whole > 0 else r
        if error == "squared":
            r = r**2
        p = 1 / (r + eps)
        p /= p.sum()
        if temperature > 0:
            p = np.exp(p / temperature) / np.exp(p / temperature).sum()
        if by_examples:
            p = p * np.array(sizes)
        out.append(list(p / p.sum()))
    return out


def fedhl(
    s: Setting, how: str = "sqrt", residual: bool = False, **weighing: object
) -> tuple[Dense, Layers, list]:
    """Peng et al., Algorithm 1, line 17 as it stands: W, the net with the mean head, and the weights of every
    round."""
    net, ws = s.net, [np.zeros_like(w) for w, _ in s.net[:-1]]
    history = []
    for clients in s.rounds:
        ids, sums, heads = list(clients), [np.zeros_like(w) for w in ws], []
        p = eq15(ws, [s.ranks[k] for k in ids], s.sizes(ids), **weighing)
        history.append(p)
        for i, (k, (order,)) in enumerate(clients.items()):
            r = s.ranks[k]
            kept = [best(w, r) for w in ws]
            base = added(net, [w - t for w, t in zip(ws, kept, strict=True)]) if residual else net
            start = split_of(ws, r, s.scale(r), how, s.drawn)
            end, head = trained(base, start, s.scale(r), *s.data[k], order, s.lr)
            for j, update in enumerate(products(end, s.scale(r))):
                sums[j] += p[j][i] * (ws[j] + update - kept[j])
            heads.append(head)
        ws, net = sums, [*net[:-1], mean_heads(heads, s.sizes(ids))]
    return ws, net, history


def flexlora(s: Setting, how: str = "B") -> tuple[Dense, Layers]:
    """Bai et al., Algorithm 1: the mean of updates, and the net with the mean head."""
    net, ws = s.net, [np.zeros_like(w) for w, _ in s.net[:-1]]
    for clients in s.rounds:
        replies, heads = [], []
        for k, (order,) in clients.items():
            r = s.ranks[k]
            end, head = trained(
                net, split_of(ws, r, s.scale(r), how, s.drawn), s.scale(r), *s.data[k], order, s.lr
            )
            replies.append(products(end, s.scale(r)))
            heads.append(head)
        sizes = s.sizes(list(clients))
        ws = [mean_of([u[i] for u in replies], sizes) for i in range(len(ws))]
        net = [*net[:-1], mean_heads(heads, sizes)]
    return ws, net


# -- updates of the base -------------------------------------------------------------------------------------


def flora(s: Setting, draws: list[dict[int, list[Array]]]) -> Layers:
    """Wang et al.: the stack of B with p_i on this side alone, times the stack of A, goes into the base; A is
    drawn anew."""
    net = s.net
    for clients, own in zip(s.rounds, draws, strict=True):
        sizes = np.array(s.sizes(list(clients)))
        left: list[list[Array]] = [[] for _ in net[:-1]]
        right: list[list[Array]] = [[] for _ in net[:-1]]
        heads = []
        for p, (k, (order,)) in zip(sizes / sizes.sum(), clients.items(), strict=True):
            r = s.ranks[k]
            end, head = trained(net, fresh(net, own[k], r), s.scale(r), *s.data[k], order, s.lr)
            for i, (b, a) in enumerate(end):
                left[i].append(p * s.scale(r) * b)
                right[i].append(a)
            heads.append(head)
        more = [np.hstack(b) @ np.vstack(a) for b, a in zip(left, right, strict=True)]
        net = [*added(net, more)[:-1], mean_heads(heads, list(sizes))]
    return net


def fedex(s: Setting) -> tuple[Factors, Layers]:
    """Singhal et al., eq. 11 and 12: the mean factors, and the base with residuals and mean head."""
    rank, net = s.ranks[0], s.net
    factors, scale = fresh(net, s.drawn, rank), s.scale(s.ranks[0])
    for clients in s.rounds:
        got = [trained(net, factors, scale, *s.data[k], p, s.lr) for k, (p,) in clients.items()]
        sizes = s.sizes(list(clients))
        factors = mean_factors([f for f, _ in got], sizes)
        of_all = [
            mean_of([u[i] for u in (products(f, scale) for f, _ in got)], sizes) for i in range(len(factors))
        ]
        more = [whole - mean for whole, mean in zip(of_all, products(factors, scale), strict=True)]
        net = [*added(net, more)[:-1], mean_heads([h for _, h in got], sizes)]
    return factors, net
