"""Clusters of clients: how a client mixes them, and how the server averages each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypedDict, TypeVar

import torch
from torch import Tensor

from ...adapters.mixtures.router import Router
from ...core import tree
from ...core.contract import Batch, ClientInfo, ClientView, Contribution, Mean, Model, Sum, Task
from ...core.errors import ConfigError, TaskError
from ...core.learning.batch_losses import example_losses, sum_losses, task_loss
from ...core.learning.optimizer import SGD, Group, Optimizer, refuse_keep
from ...core.tree import Params

T = TypeVar("T")
Parts = TypeVar("Parts", bound=Mapping[str, Any])

MIN_CLUSTER_SHARE = 1e-6
"""Minimum share of a round's weights with which a cluster is updated; a cluster with less keeps its value."""


class ClusterTotal(TypedDict, Generic[T]):
    """The total of :func:`contribute_by_cluster`.

    Attributes:
        means: mean of each cluster, a tree of tensors ``[1, ...]``; None if the cluster has no weight.
        weights: sum of the clients' weights for each cluster, ``[C]``, float64.
    """

    means: list[T | None]
    weights: Tensor


Apply = Callable[[Any, Tensor, Any], Tensor]
"""Scores of inputs by a mixture: ``apply(parts, pi, x)``."""


def zero_router_logits(parts: Any) -> Tensor:
    """Build θ = 0 ``[C]`` for parts whose tensors begin with the axis of clusters; in float32 for half precision.

    Steps of θ are far smaller than the rounding of half precision.
    """
    first_tensor = next(t for _, t in tree.leaves(parts))
    return first_tensor.new_zeros(len(first_tensor), dtype=tree.wide_type(first_tensor.dtype))


def refuse_router_group(optimizer: Optimizer, title: str) -> None:
    """Raise ConfigError if ``optimizer.groups`` sets the router's θ, which the router's own settings control."""
    if "theta" in optimizer.groups:
        raise ConfigError(
            f"{title}: optimizer.groups.theta does nothing, for θ is the router's: it moves at router.lr, without weight "
            "decay. Set router.lr, and leave optimizer.groups.theta out"
        )


def train_mixture(
    router: Router,
    parts: Parts,
    theta: Tensor,
    apply: Apply,
    optimizer: Optimizer,
    view: ClientView,
    precondition: Callable[..., Any] | None = None,
) -> tuple[Parts, Tensor]:
    """Run the pass ``"local"``: joint SGD on θ and all parts of the mixed model; Algorithm 1 of FLoRAL, lines 3 to 5.

    Args:
        router: settings of the update of θ. With optimal routing θ stays; the MFL update sets it before the pass.
        parts: parts that are mixed, such as adaptors.
        theta: initial θ.
        apply: function that computes the method's mixed model; it may capture nothing that differs between clients.
        optimizer: optimizer of the parts; its group ``theta`` is set from the router.
        view: view of the client.
        precondition: function that preconditions the gradient of ``{**parts, "theta": theta}``; None for none.

    Returns:
        The trained parts and θ.
    """
    if router.uses_mfl and view.round > 0:
        theta = compute_mfl_logits(router, parts, theta, apply, view)
    start: Any = {**parts, "theta": theta} if router.trains_theta else parts
    if router.trains_theta:
        optimizer = replace(optimizer, groups={**optimizer.groups, "theta": Group(router.lr, 0.0)})
    noises = router.noises(view.key / "noise", view.steps("local"), theta)

    def loss(p: dict[str, Any], batch: Batch, fixed_theta: Tensor, noises: Tensor) -> Tensor:
        z = p["theta"] + noises[batch.step if router.noise else 0] if router.trains_theta else fixed_theta
        return task_loss(apply(p, router.shares(z), batch.x), batch)

    end = view.train(loss, start, "local", optimizer, constants=(theta, noises), precondition=precondition)
    trained_parts: Any = {name: end[name] for name in parts}
    return trained_parts, end["theta"] if router.trains_theta else theta


def compute_mfl_logits(
    router: Router, parts: Mapping[str, Any], theta: Tensor, apply: Apply, view: ClientView
) -> Tensor:
    """Compute θ = -η f_k(w_c) of every cluster, so that π_c ∝ exp(-η f_k(w_c)) (eq. 5); ``theta`` gives shape and type."""

    def summed_loss(parts: Mapping[str, Any], batch: Batch, pi: Tensor) -> tuple[Tensor, Tensor]:
        return sum_losses(example_losses(apply(parts, pi, batch.x), batch), batch)

    sums = [view.sum_over_data(summed_loss, parts, constants=(pi,)) for pi in torch.eye(len(theta)).to(theta)]
    losses, weight = torch.stack([loss for loss, _ in sums]), sums[0][1]
    return (-router.lr * losses / torch.where(weight > 0, weight, 1.0)).to(theta)


def learn_router(
    router: Router, parts: Mapping[str, Any], theta: Tensor, apply: Apply, view: ClientView
) -> Tensor:
    """Learn θ of a client that has none: by eq. 5, or by the pass ``"router"``, which trains only θ."""
    if router.uses_mfl:
        return compute_mfl_logits(router, parts, theta, apply, view)
    if router.unseen_steps == 0 or len(theta) == 1 or router.routing == "optimal":
        return theta

    def loss(p: dict[str, Tensor], batch: Batch, frozen_parts: Mapping[str, Any]) -> Tensor:
        return task_loss(apply(frozen_parts, router.shares(p["theta"]), batch.x), batch)

    return view.train(loss, {"theta": theta}, "router", SGD(lr=router.lr), constants=(parts,))["theta"]


def require_known_cluster(title: str, client: ClientInfo, cluster_count: int) -> int:
    """Read the client's ground-truth cluster.

    Raises:
        TaskError: if the cluster is unknown or not below ``cluster_count``.
    """
    if client.cluster is None:
        raise TaskError(
            f"{title}: optimal routing needs to know the cluster of every client, but that of "
            f"{client.title} is unknown. Set [concept] in the experiment, cluster=... in "
            "Federation.from_arrays, or routing = 'learned'."
        )
    if client.cluster >= cluster_count:
        raise TaskError(
            f"{title}: {client.title} is of cluster {client.cluster}, but clusters is {cluster_count}"
        )
    return client.cluster


def build_known_route(title: str, client: ClientInfo, cluster_count: int) -> Tensor:
    """Build π* ``[C]``, the one-hot of :func:`require_known_cluster`."""
    return torch.eye(cluster_count)[require_known_cluster(title, client, cluster_count)]


def refuse_kept_router_momentum(router: Router, optimizer: Optimizer, title: str) -> None:
    """Raise ConfigError if θ begins at 0 in every round and the optimizer would move it by gradients of earlier rounds."""
    if router.trains_theta and not router.keep:
        reason = (
            "with router.keep = false a client learns θ anew in every round, and old gradients would move it"
        )
        refuse_keep("optimizer", optimizer, title, reason)


def find_routes(title: str, router: Router, client: ClientInfo, pi: Tensor, cluster_count: int) -> Tensor:
    """Find a client's share of every cluster; with optimal routing, ``pi`` is the share of its own cluster alone."""
    return pi if router.routing == "learned" else build_known_route(title, client, cluster_count)


def compute_cluster_weights(title: str, client: ClientInfo, pi: Tensor | None, cluster_count: int) -> Tensor:
    """Compute the weights π^k_c N^k of a client's reply ``[C]``, float64; without π^k, its known cluster has share 1."""
    route = build_known_route(title, client, cluster_count) if pi is None else clamp_shares(pi)
    return route.double() * client.example_count


def clamp_shares(pi: Tensor) -> Tensor:
    """Clamp shares of clusters that a client sent: each is at least 0, and their sum at most 1."""
    shares = pi.clamp(0, 1)
    return shares / shares.sum() if shares.sum() > 1 + 1e-3 else shares


def contribute_by_cluster(value: Any, weights: Tensor) -> dict[str, Contribution]:
    """Contribute a value to one mean for each cluster.

    Args:
        value: tree of tensors ``[C, ...]``, or ``[1, ...]`` if the client was sent only the one cluster it has a
            weight for.
        weights: weight of the value for each cluster, ``[C]``, float64.
    """
    cluster_count = len(weights)

    def select_part(c: int) -> Any:
        return tree.map_leaves(lambda t: t[c : c + 1] if len(t) == cluster_count else t, value)

    return {
        "means": [Mean(select_part(c), weights[c]) for c in range(cluster_count)],
        "weights": Sum(weights, counts=True),
    }


def average_clusters(old_value: T, total: ClusterTotal[T]) -> T:
    """Average each cluster: a_c = Σ_k w_kc a_kc / Σ_k w_kc; a cluster without weight keeps its old value.

    Args:
        old_value: tree whose tensors begin with the axis of clusters, ``[C, ...]``.
        total: total of the contributions by :func:`contribute_by_cluster`.
    """
    values = [
        a if a is not None and has_weight else select_cluster(old_value, c)
        for c, (a, has_weight) in enumerate(
            zip(total["means"], find_weighted_clusters(total).tolist(), strict=True)
        )
    ]
    return tree.map_leaves(lambda *ts: torch.cat(ts), values[0], *values[1:])


def find_weighted_clusters(total: ClusterTotal[Any]) -> Tensor:
    """Find the clusters that a round updates: those with a weight ``[C]``, bool."""
    weights = total["weights"]
    return weights > MIN_CLUSTER_SHARE * weights.sum()


def keep_unweighted_clusters(new_value: T, old_value: T, has_weight: Tensor) -> T:
    """Give the clusters without weight their old value.

    Args:
        new_value: tree whose tensors begin with the axis of clusters, ``[C, ...]``.
        old_value: tree like it.
        has_weight: whether a cluster has weight, ``[C]``, bool.
    """

    def select(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(has_weight.to(new.device).reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return tree.map_leaves(select, new_value, old_value)


def select_cluster(value: T, cluster: int) -> T:
    """Select one cluster of a tree whose tensors begin with the axis of clusters; the result has this axis: ``[1, ...]``."""
    return tree.map_leaves(lambda t: t[cluster : cluster + 1], value)


def draw_models(title: str, task: Task, model_count: int) -> Params:
    """Draw the initial weights of C models ``[C, ...]``; the first are those of all other methods.

    The others are drawn by the user's factory, or by the layers' own rules where the user gave a module.

    Raises:
        TaskError: if the clients hold different architectures, or the models begin with equal weights.
    """
    model = task.common_model(title)
    draws = [model.initial, *(model.reinitialize(task.key / "ensemble" / c) for c in range(1, model_count))]
    models = {n: torch.stack([d[n] for d in draws]) for n in model.initial}
    if model_count > 1 and all(torch.equal(t, t[:1].expand_as(t)) for t in models.values()):
        raise TaskError(
            f"{title}: all {model_count} models would begin with the same weights, so that they could not learn different "
            "clusters. Initial values must be random: give the federation a function that makes the module, such as "
            "lambda: Net(), and draw its parameters there, by nn.init or torch.randn; give add_lora another key in each call"
        )
    return models


def describe_draws(title: str, task: Task, model_count: int) -> list[str]:
    """Say that a module that the user gave, such as a pretrained one, is the start of one model only."""
    if model_count < 2 or task.common_model(title).factory is not None:
        return []
    return [
        f"the parameters of the module are the start of the first model alone; the other {model_count - 1} begin at random "
        "values of its layers, because the federation was given a module and not a function that makes it."
    ]


def unbind_models(models: Params) -> list[Params]:
    """Unbind C models ``[C, ...]``; backward builds one gradient for all of them, not C padded ones."""
    slices_by_name = {n: t.unbind() for n, t in models.items()}
    return [
        {n: slices[c] for n, slices in slices_by_name.items()}
        for c in range(len(next(iter(slices_by_name.values()))))
    ]


def compute_model_losses(model: Model, models: Params, batch: Batch) -> Tensor:
    """Compute the loss of each example under each of C models with weights ``[C, ...]``, as ``[b, C]``."""
    scores = [model.apply(params, batch.x) for params in unbind_models(models)]
    return torch.stack([example_losses(s, batch) for s in scores], -1)
