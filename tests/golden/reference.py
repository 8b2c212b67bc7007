"""The methods' update rules in NumPy float64 with gradients by hand, written from the papers' equations.

Nothing here knows of the package or of PyTorch. A network is a list of layers ``(weight [out, in], bias [out])`` with ReLU
between them; the last layer is the head and its input the representation. The order of examples is given as
plain data:

    rounds[t] = {client: [pass, ...]}    the participants of round t; a pass is a list of index arrays, one a
    step
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray
Layers = list[tuple[Array, Array]]
Data = list[tuple[Array, Array]]
Rounds = list[dict[int, list[list[Array]]]]


# -- a network -----------------------------------------------------------------------------------------------


def forward(net: Layers, x: Array) -> tuple[list[Array], Array]:
    """Inputs of every layer (the last is the representation), and the scores."""
    inputs = [x]
    for w, b in net[:-1]:
        inputs.append(np.maximum(inputs[-1] @ w.T + b, 0.0))
    w, b = net[-1]
    return inputs, inputs[-1] @ w.T + b


def backward(
    net: Layers, inputs: list[Array], d_scores: Array, d_representation: Array | float = 0.0
) -> Layers:
    """Gradients of all layers, given those of the scores and what reaches the representation besides."""
    grads = [(d_scores.T @ inputs[-1], d_scores.sum(0))]
    d = d_scores @ net[-1][0] + d_representation
    for i in reversed(range(len(net) - 1)):
        d = d * (inputs[i + 1] > 0)
        grads.insert(0, (d.T @ inputs[i], d.sum(0)))
        d = d @ net[i][0]
    return grads


def gradient(net: Layers, x: Array, y: Array) -> Layers:
    """Of the mean cross-entropy."""
    inputs, scores = forward(net, x)
    return backward(net, inputs, (softmax(scores) - one_hot(y, scores.shape[1])) / len(y))


def softmax(scores: Array) -> Array:
    e = np.exp(scores - scores.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def one_hot(y: Array, classes: int) -> Array:
    return np.eye(classes)[y]


def cross_entropy(scores: Array, y: Array) -> float:
    return float(-np.log(softmax(scores)[np.arange(len(y)), y]).mean())


def descended(net: Layers, grads: Layers, lr: float) -> Layers:
    return [(w - lr * dw, b - lr * db) for (w, b), (dw, db) in zip(net, grads, strict=True)]


def weighted_mean(nets: list[Layers], weights: list[int]) -> Layers:
    n = float(sum(weights))
    return [
        tuple(sum(w * net[i][j] for w, net in zip(weights, nets, strict=True)) / n for j in (0, 1))
        for i in range(len(nets[0]))
    ]


def plain_sgd(net: Layers, x: Array, y: Array, steps: list[Array], lr: float, mu: float = 0.0) -> Layers:
    """SGD on the cross-entropy, plus mu / 2 of the squared distance to the start."""
    anchor = net
    for i in steps:
        grads = gradient(net, x[i], y[i])
        pulled = [
            (dw + mu * (w - w0), db + mu * (b - b0))
            for (dw, db), (w, b), (w0, b0) in zip(grads, net, anchor, strict=True)
        ]
        net = descended(net, pulled, lr)
    return net


# -- the methods ---------------------------------------------------------------------------------------------


def standalone(nets: list[Layers], data: Data, rounds: Rounds, lr: float) -> list[Layers]:
    """Every participant goes on with its own network."""
    nets = list(nets)
    for clients in rounds:
        for k, (steps,) in clients.items():
            nets[k] = plain_sgd(nets[k], *data[k], steps, lr)
    return nets


def fedavg(net: Layers, data: Data, rounds: Rounds, lr: float) -> Layers:
    """McMahan et al., Algorithm 1: the mean of the participants' networks, weighted by their examples."""
    return fedprox(net, data, rounds, lr, 0.0)


def fedprox(net: Layers, data: Data, rounds: Rounds, lr: float, mu: float) -> Layers:
    """Li et al., Algorithm 2, with the weights of FedAvg."""
    for clients in rounds:
        replies = [plain_sgd(net, *data[k], steps, lr, mu) for k, (steps,) in clients.items()]
        net = weighted_mean(replies, [len(data[k][1]) for k in clients])
    return net


def fml(
    meme: Layers, nets: list[Layers], data: Data, rounds: Rounds, lr: float, alpha: float, beta: float
) -> tuple[Layers, list[Layers]]:
    """Shen et al.: private network and meme teach each other; each gradient is that of its own loss alone.

    With respect to the student's scores, the gradient of KL(teacher ‖ student) is student - teacher.
    """
    nets = list(nets)
    for clients in rounds:
        replies = []
        for k, (steps,) in clients.items():
            x, y = data[k]
            private, shared = nets[k], meme
            for i in steps:
                in_p, scores_p = forward(private, x[i])
                in_m, scores_m = forward(shared, x[i])
                p, m, true = softmax(scores_p), softmax(scores_m), one_hot(y[i], scores_p.shape[1])
                d_p = (alpha * (p - true) + (1 - alpha) * (p - m)) / len(i)
                d_m = (beta * (m - true) + (1 - beta) * (m - p)) / len(i)
                step_p, step_m = backward(private, in_p, d_p), backward(shared, in_m, d_m)
                private, shared = descended(private, step_p, lr), descended(shared, step_m, lr)
            nets[k] = private
            replies.append(shared)
        meme = weighted_mean(replies, [len(data[k][1]) for k in clients])
    return meme, nets


def energy_rank(s: Array, energy: float) -> int:
    """Smallest rank whose leading singular values hold that share of the sum of squares."""
    for r in range(1, len(s)):
        if (s[:r] ** 2).sum() >= energy * (s**2).sum():
            return r
    return len(s)


def low_rank(w: Array, energy: float) -> tuple[Array, int]:
    """The matrix as it arrives, and the numbers sent for it: factors where those are fewer, else the matrix
    itself."""
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    r = energy_rank(s, energy)
    sent = r * (w.shape[0] + w.shape[1] + 1)
    if energy >= 1 or sent >= w.size:
        return w, w.size
    return u[:, :r] @ np.diag(s[:r]) @ vt[:r], sent


def sent_update(update: Layers, energy: float) -> tuple[Layers, int]:
    """An update as it arrives, and the numbers sent for it."""
    out, numbers = [], 0
    for w, b in update:
        arrived, count = low_rank(w, energy)
        out.append((arrived, b))
        numbers += count + b.size
    return out, numbers


def plus(a: Layers, b: Layers, sign: float = 1.0) -> Layers:
    return [(wa + sign * wb, ba + sign * bb) for (wa, ba), (wb, bb) in zip(a, b, strict=True)]


def fedkd(
    mentee: Layers,
    mentors: list[Layers],
    projections: list[Array],
    data: Data,
    rounds: Rounds,
    lr: float,
    energies: tuple[float, float],
) -> tuple[list[Layers], list[Layers], list[Array], list[int]]:
    """Wu et al., Algorithm 1: the mentee after every round (from the start on), mentors, projections, numbers
    sent up.

    The share of energy rises linearly from the first of ``energies`` in the first round to the second in the
    last.
    """
    mentors, projections, history, sent = list(mentors), list(projections), [mentee], []
    for t, clients in enumerate(rounds):
        energy = energies[0] + (energies[1] - energies[0]) * t / max(len(rounds) - 1, 1)
        replies, numbers = [], 0
        for k, (steps,) in clients.items():
            x, y = data[k]
            big, small, w = mentors[k], mentee, projections[k]
            for i in steps:
                in_t, scores_t = forward(big, x[i])
                in_s, scores_s = forward(small, x[i])
                p_t, p_s, true = softmax(scores_t), softmax(scores_s), one_hot(y[i], scores_t.shape[1])
                doubt = cross_entropy(scores_t, y[i]) + cross_entropy(scores_s, y[i])
                gap = in_t[-1] - in_s[-1] @ w.T
                d_gap = 2 * gap / gap.size / doubt  # of mean square error over examples and features
                step_t = backward(big, in_t, ((p_t - true) + (p_t - p_s) / doubt) / len(i), d_gap)
                step_s = backward(small, in_s, ((p_s - true) + (p_s - p_t) / doubt) / len(i), -d_gap @ w)
                step_w = -d_gap.T @ in_s[-1]
                big, small, w = descended(big, step_t, lr), descended(small, step_s, lr), w - lr * step_w
            mentors[k], projections[k] = big, w
            update, count = sent_update(plus(small, mentee, -1.0), energy)
            replies.append(update)
            numbers += count
        whole = weighted_mean(replies, [len(data[k][1]) for k in clients])
        mentee = plus(mentee, sent_update(whole, energy)[0])
        history.append(mentee)
        sent.append(numbers)
    return history, mentors, projections, sent


def lg_fedavg(
    head: tuple[Array, Array], bodies: list[Layers], data: Data, rounds: Rounds, lr: float
) -> tuple[tuple[Array, Array], list[Layers]]:
    """Liang et al., Algorithm 1: private representation, averaged head."""
    bodies = list(bodies)
    for clients in rounds:
        replies = []
        for k, (steps,) in clients.items():
            trained = plain_sgd([*bodies[k], head], *data[k], steps, lr)
            bodies[k] = trained[:-1]
            replies.append(trained[-1:])
        head = weighted_mean(replies, [len(data[k][1]) for k in clients])[0]
    return head, bodies


def leave_one_out(latest: dict[int, dict[int, Array]], client: int, classes: int) -> dict[int, Array]:
    """For each label that another client owns, the plain mean of the others' mean outputs."""
    out = {}
    for label in range(classes):
        rows = [rows[label] for k, rows in latest.items() if k != client and label in rows]
        if rows:
            out[label] = np.mean(rows, axis=0)
    return out


def fd(
    nets: list[Layers], data: Data, rounds: Rounds, lr: float, gamma: float, classes: int
) -> tuple[dict[int, dict[int, Array]], list[Layers]]:
    """Jeong et al., Algorithm 1: the latest mean softmax output for each client and label, and the
    networks."""
    nets, latest = list(nets), {}
    for clients in rounds:
        replies = {}
        for k, (steps,) in clients.items():
            x, y = data[k]
            targets, net = leave_one_out(latest, k, classes), nets[k]
            for i in steps:
                inputs, scores = forward(net, x[i])
                q = softmax(scores)
                d = q - one_hot(y[i], classes)
                for row, label in enumerate(y[i]):
                    if int(label) in targets:
                        d[row] += gamma * (q[row] - targets[int(label)])
                net = descended(net, backward(net, inputs, d / len(i)), lr)
            nets[k] = net
            outputs = softmax(forward(net, x)[1])
            replies[k] = {int(j): outputs[y == j].mean(0) for j in np.unique(y)}
        latest |= replies
    return latest, nets


def fedproto(
    nets: list[Layers], data: Data, rounds: Rounds, lr: float, lam: float, weighted: bool = True
) -> tuple[dict[int, Array], list[Layers]]:
    """Tan et al., Algorithm 1, with the mean over features of the squared differences as in the authors'
    code."""
    nets, known = list(nets), {}
    for clients in rounds:
        shares: dict[int, list[tuple[float, Array]]] = {}
        for k, (steps,) in clients.items():
            x, y = data[k]
            net = nets[k]
            for i in steps:
                inputs, scores = forward(net, x[i])
                r = inputs[-1]
                away = np.zeros_like(r)
                for row, label in enumerate(y[i]):
                    if int(label) in known:
                        away[row] = r[row] - known[int(label)]
                d_scores = (softmax(scores) - one_hot(y[i], scores.shape[1])) / len(i)
                net = descended(
                    net, backward(net, inputs, d_scores, lam * 2 * away / (len(i) * r.shape[1])), lr
                )
            nets[k] = net
            r = forward(net, x)[0][-1]
            for j in np.unique(y):
                shares.setdefault(int(j), []).append(
                    (float((y == j).sum()) if weighted else 1.0, r[y == j].mean(0))
                )
        known = known | {
            j: sum(w * c for w, c in rows) / sum(w for w, _ in rows) for j, rows in shares.items()
        }
    return known, nets


def adapter_forward(adapter: Layers, r: Array, relu: bool) -> tuple[Array, Array, Array]:
    """Before and after the activation, and the scores."""
    (a, a_bias), (b, b_bias) = adapter
    z = r @ a.T + a_bias
    u = np.maximum(z, 0.0) if relu else z
    return z, u, u @ b.T + b_bias


def pfedlora(
    adapter: Layers,
    nets: list[Layers],
    data: Data,
    rounds: Rounds,
    lr: float,
    lr_adapter: float,
    mu: float,
    relu: bool,
) -> tuple[Layers, list[Layers]]:
    """Yi et al., equations 3 to 10: the model beside the frozen adapter, then the adapter on the frozen
    model."""
    nets = list(nets)
    for clients in rounds:
        replies = []
        for k, (of_model, of_adapter) in clients.items():
            x, y = data[k]
            net, (a, _), (b, _) = nets[k], *adapter
            for i in of_model:
                inputs, second = forward(net, x[i])
                z, _, first = adapter_forward(adapter, inputs[-1], relu)
                true = one_hot(y[i], second.shape[1])
                d_first = (1 - mu) * (softmax(first) - true) / len(i)
                d_z = d_first @ b * ((z > 0) if relu else 1.0)
                net = descended(
                    net, backward(net, inputs, mu * (softmax(second) - true) / len(i), d_z @ a), lr
                )
            nets[k] = net
            own = adapter
            for i in of_adapter:
                r = forward(net, x[i])[0][-1]
                z, u, scores = adapter_forward(own, r, relu)
                d = (softmax(scores) - one_hot(y[i], scores.shape[1])) / len(i)
                d_z = d @ own[1][0] * ((z > 0) if relu else 1.0)
                own = descended(own, [(d_z.T @ r, d_z.sum(0)), (d.T @ u, d.sum(0))], lr_adapter)
            replies.append(own)
        adapter = weighted_mean(replies, [len(data[k][1]) for k in clients])
    return adapter, nets
