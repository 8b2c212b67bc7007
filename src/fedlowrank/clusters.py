"""Clusters of clients: how a client mixes them, and how the server averages for each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from . import tree
from .choices import check_choices
from .errors import ConfigError, TaskError
from .key import Key
from .loss import pointwise_loss, task_loss
from .means import Mean
from .method import Batch, ClientInfo, ClientView, Pass, Reply, Task
from .models.architecture import Architecture
from .optimiser import SGD, Group, Optimiser
from .tree import Params

T = TypeVar("T")

EMPTY = 1e-6
"""A cluster with a smaller share of the examples of a round has learnt nothing in it."""


@dataclass(frozen=True)
class Router:
    """How a client learns its mixture π = softmax(θ / temperature).

    Attributes:
        routing: learned; or optimal, the one-hot of the client's known cluster.
        lr: learning rate of θ, without weight decay; η of the MFL update.
        update: gradient, with the model's (Algorithm 1); or mfl, π_c ∝ exp(-η f_k(w_c)) of the models that the server has
            averaged (eq. 4 and 5): found when they arrive, fixed while the client trains, even shares in the first round.
        temperature: above 0; a higher one evens the shares out.
        noise: standard deviation of uniform noise on θ at every training step.
        top: mix only so many clusters, those with the largest θ, the first of equal ones; None mixes all. A gradient needs
            two at least.
        keep: whether a client keeps θ from round to round; else it learns it anew from 0. The MFL update needs no θ kept.
        adapt: steps in which a client that holds no θ learns it before it infers, all else frozen; 0 mixes evenly. The MFL
            update takes no steps; a client finds its π before it infers as before it trains.
    """

    routing: Literal["learned", "optimal"] = "learned"
    lr: float = 0.1
    update: Literal["gradient", "mfl"] = "gradient"
    temperature: float = 1.0
    noise: float = 0.0
    top: int | None = None
    keep: bool = True
    adapt: int = 10

    def __post_init__(self) -> None:
        check_choices(self)
        if not (0 <= self.lr < math.inf and 0 < self.temperature < math.inf and 0 <= self.noise < math.inf):
            raise ConfigError(
                f"router: lr and noise must be >= 0 and temperature > 0; they are {self.lr}, {self.noise}, {self.temperature}"
            )
        if self.adapt < 0 or (self.top is not None and self.top < 1):
            raise ConfigError(f"router: adapt must be >= 0 and top >= 1; they are {self.adapt} and {self.top}")

        if self.top == 1 and self.descends:
            raise ConfigError(
                "router: top = 1 mixes one cluster with the share 1 whatever θ is, so θ has no gradient and is never "
                "learned; use top >= 2, or update = 'mfl'"
            )

    @property
    def descends(self) -> bool:
        """Whether θ is trained together with the model."""
        return self.routing == "learned" and self.update == "gradient"

    @property
    def weighs(self) -> bool:
        """Whether θ is found by the loss of each cluster."""
        return self.routing == "learned" and self.update == "mfl"

    def passes(self, epochs: int, batch_size: int) -> dict[str, Pass]:
        """Local training, and the steps in which a newcomer learns its router."""
        adapt = max(1, self.adapt)
        return {"local": Pass(epochs, batch_size), "router": Pass(adapt, batch_size, adapt)}

    def shares(self, theta: Tensor) -> Tensor:
        """π ``[C]`` of θ ``[C]``."""
        z = theta / self.temperature
        if self.top is not None and self.top < len(theta):
            # sorted stably, so that equal ones are ordered alike on every engine
            left_out = z.detach().sort(descending=True, stable=True).indices[self.top :]
            z = z.scatter(0, left_out, -math.inf)
        return z.softmax(0)

    def noises(self, key: Key, steps: int, theta: Tensor) -> Tensor:
        """Noise on θ for each step ``[steps, C]``; one row of zeros without noise."""
        if self.noise == 0:
            return theta.new_zeros(1, len(theta))
        # a uniform variable on ±b has the standard deviation b / √3
        uniform = torch.rand(steps, len(theta), generator=key.generator(), dtype=theta.dtype)
        return ((2 * uniform - 1) * (self.noise * math.sqrt(3))).to(theta.device)


Apply = Callable[[Any, Tensor, Any], Tensor]
"""Scores of inputs by a mixture: ``apply(parts, pi, x)``."""


def even(parts: Any) -> Tensor:
    """θ = 0 ``[C]`` of parts whose tensors begin with the axis of clusters."""
    first = next(t for _, t in tree.leaves(parts))
    return first.new_zeros(len(first))


def train_mixture(
    router: Router,
    parts: dict[str, Any],
    theta: Tensor,
    apply: Apply,
    optimiser: Optimiser,
    view: ClientView,
    precondition: Callable[..., Any] | None = None,
) -> tuple[dict[str, Any], Tensor]:
    """The pass ``"local"``: one SGD on θ and on all parts, of the loss of the mixed model; lines 6 to 8 of Algorithm 1.

    Args:
        router: how θ moves. With optimal routing it stays; the MFL update sets it before the pass.
        parts: what is mixed.
        theta: where θ begins.
        apply: of the method; may capture nothing that differs between clients.
        optimiser: of the parts; its group ``theta`` is set from the router.
        view: of the client.
        precondition: of the gradient of ``{**parts, "theta": theta}``.

    Returns:
        The parts and θ.
    """
    if router.weighs and view.round > 0:
        theta = weigh_clusters(router, parts, theta, apply, view)
    start = {**parts, "theta": theta} if router.descends else parts
    if router.descends:
        optimiser = replace(optimiser, groups={**optimiser.groups, "theta": Group(router.lr, 0.0)})
    noises = router.noises(view.key / "noise", view.steps("local"), theta)

    def loss(p: dict[str, Any], batch: Batch, fixed: Tensor, noises: Tensor) -> Tensor:
        z = p["theta"] + noises[batch.step if router.noise else 0] if router.descends else fixed
        return task_loss(apply(p, router.shares(z), batch.x), batch)

    end = view.train(loss, start, "local", optimiser, given=(theta, noises), precondition=precondition)
    trained = {name: end[name] for name in parts}
    return trained, end["theta"] if router.descends else theta


def weigh_clusters(router: Router, parts: dict[str, Any], theta: Tensor, apply: Apply, view: ClientView) -> Tensor:
    """θ = -η f_k(w_c) of every cluster alone, so that π_c ∝ exp(-η f_k(w_c)) (eq. 5); ``theta`` gives the form."""

    def lost(parts: dict[str, Any], batch: Batch, pi: Tensor) -> Tensor:
        return batch.total(pointwise_loss(apply(parts, pi, batch.x), batch.y))

    losses = [view.total(lost, parts, given=(pi,)) for pi in torch.eye(len(theta)).to(theta)]
    return -router.lr * router.temperature * torch.stack(losses) / view.info.examples


def learn_router(router: Router, parts: dict[str, Any], theta: Tensor, apply: Apply, view: ClientView) -> Tensor:
    """θ of a client that holds none: by eq. 5, or the pass ``"router"`` over its training data, everything else frozen."""
    if router.weighs:
        return weigh_clusters(router, parts, theta, apply, view)
    if router.adapt == 0 or len(theta) == 1 or router.routing == "optimal":
        return theta

    def loss(p: dict[str, Tensor], batch: Batch, frozen: dict[str, Any]) -> Tensor:
        return task_loss(apply(frozen, router.shares(p["theta"]), batch.x), batch)

    return view.train(loss, {"theta": theta}, "router", SGD(lr=router.lr), given=(parts,))["theta"]


def known_cluster(title: str, client: ClientInfo, count: int) -> int:
    """The client's ground-truth cluster.

    Raises:
        TaskError: if it is unknown, or there are fewer clusters.
    """
    if client.cluster is None:
        raise TaskError(
            f"{title}: optimal routing needs to know the cluster of every client, but that of client {client.id} is unknown. "
            "Set [concept] in the experiment, cluster=... in Federation.from_arrays, or routing = 'learned'."
        )
    if client.cluster >= count:
        raise TaskError(f"{title}: client {client.id} is of cluster {client.cluster}, but clusters is {count}")
    return client.cluster


def known_route(title: str, client: ClientInfo, count: int) -> Tensor:
    """π* ``[C]``, the one-hot of :func:`known_cluster`."""
    return torch.eye(count)[known_cluster(title, client, count)]


def reply_weights(
    title: str, replies: Sequence[Reply[Any]], pis: Sequence[Tensor | None], count: int
) -> list[list[float]]:
    """π^k_c N^k of every reply; where a client sent no π^k, it is the one-hot of its known cluster."""
    found = []
    for reply, pi in zip(replies, pis, strict=True):
        route = known_route(title, reply.client, count) if pi is None else pi
        found.append([p * reply.client.examples for p in route.tolist()])
    return found


def cluster_mean(old: T, uploads: Sequence[T], weights: Sequence[Sequence[float]]) -> T:
    """The mean for each cluster, a_c = Σ_k w_kc a_kc / Σ_k w_kc; a cluster without weight keeps what it had.

    Args:
        old: a tree whose tensors begin with the axis of clusters, ``[C, ...]``.
        uploads: trees like it; or with ``[1, ...]``, of clients that were sent the one cluster they have a weight for.
        weights: w_kc = π^k_c N^k, ``[clients, C]``.
    """
    count = len(weights[0])
    means: list[Mean[T]] = [Mean() for _ in range(count)]
    for upload, shares in zip(uploads, weights, strict=True):
        for c, share in enumerate(shares):
            if share > 0:
                means[c].add(tree.map(lambda t, c=c: t[c : c + 1] if len(t) == count else t, upload), share)
    everything = sum(m.total for m in means)
    parts = [m.value if m.total > EMPTY * everything else select(old, c) for c, m in enumerate(means)]
    return tree.map(lambda *ts: torch.cat(ts), parts[0], *parts[1:])


def select(value: T, cluster: int) -> T:
    """One cluster of a tree whose tensors begin with the axis of clusters, the axis kept: ``[1, ...]``."""
    return tree.map(lambda t: t[cluster : cluster + 1], value)


def initial_models(title: str, task: Task, count: int) -> Params:
    """C draws of the initial weights ``[C, ...]``: the first that of every other method, the rest equal in all with clusters.

    Raises:
        ConfigError: if C < 1.
        TaskError: if the clients hold different architectures.
    """
    if count < 1:
        raise ConfigError(f"{title}: there must be at least one model; clusters is {count}")
    model = task.common_model(title)
    draws = [model.initial, *(model.redrawn(task.key / "ensemble" / c) for c in range(1, count))]
    return {n: torch.stack([d[n] for d in draws]) for n in model.initial}


def losses_of(model: Architecture, models: Params, batch: Batch) -> Tensor:
    """The loss of each example under each of C models: ``[C, b]`` of weights ``[C, ...]``."""
    count = len(next(iter(models.values())))
    scores = [model.apply({n: t[c] for n, t in models.items()}, batch.x) for c in range(count)]
    return torch.stack([pointwise_loss(s, batch.y) for s in scores])
