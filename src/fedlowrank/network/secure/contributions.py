"""Encodes the contributions of clients as integers modulo 2^64, which a secure sum adds."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from ...core import tree
from ...core.contract import AnyMethod, ClientInfo, Contribution, ServerView, Sum
from ...core.contract.contribution import contribution_leaves, map_contributions
from ...core.errors import ConfigError, TaskError
from ...trust.protection import Protected
from ...trust.secure_sums import FixedPoint, Vector, align
from ...trust.trust_settings import SecureSums
from .distributed_noise import DistributedNoise
from .member import SecureSumError

logger = logging.getLogger(__name__)

MAX_WEIGHT = 2.0**20
"""Largest weight of a client in a mean, known before the first round; a client with a larger one is refused."""


def make_grid(settings: SecureSums, client_count: int) -> FixedPoint:
    """Make the grid of the numbers that ``client_count`` clients add up."""
    return FixedPoint(settings, client_count, MAX_WEIGHT)


def encode_contribution(contribution: Any, grid: FixedPoint, noise: DistributedNoise | None) -> Vector:
    """Encode a client's contribution as a vector ``[size]``, with values clipped to ±bound and rounded to the grid.

    Args:
        contribution: contribution from :func:`compute_contribution`.
        grid: fixed-point grid of the numbers.
        noise: the client's part of central noise; None without it.

    Raises:
        TaskError: if the server must see a part of the contribution by itself.
        SecureSumError: if a weight does not fit the grid; its text goes to the server and does not name the weight.
        ConfigError: if the grid is too coarse for the noise.
    """
    if noise is not None:
        return noise.vector(contribution["sum"].value)
    aligned_leaves = align(contribution, contribution)
    try:
        encoded = grid.encode(aligned_leaves)
    except TaskError as error:
        logger.warning("secure sums: this client takes no part in the round: %s", error)
        raise SecureSumError(
            f"a weight of this client in a mean does not fit secure sums, which take weights up to {grid.largest_weight:g} "
            f"in steps of {grid.unit:.2g}. Weigh clients by their numbers of examples or equally; the log of the client "
            "has the weight"
        ) from error
    if encoded.coarse_weights and not grid.has_warned:
        grid.has_warned = True
        logger.warning("%s", grid.describe_coarse_weights(encoded.coarse_weights))
    if encoded.clip_count:
        logger.warning(
            "secure sums: %d of the numbers that this client adds are above secure.bound = %g and were clipped, so that the "
            "server's model is not the mean of what clients trained. The experiment of all should raise secure.bound",
            encoded.clip_count,
            grid.bound,
        )
    return encoded.vector


def compute_contribution(
    method: AnyMethod, server: Any, down: Any, upload: Any, client: ClientInfo
) -> Contribution:
    """Compute a client's contribution without the server's state, of which only the form may matter.

    Args:
        method: method of the run.
        server: any state of the server, such as the first one.
        down: download that the client received.
        upload: upload of the client.
        client: client that computes the contribution.

    Raises:
        TaskError: if the contribution changes with the numbers of the server's state.
    """

    def contribution_at(state: Any) -> Contribution:
        if isinstance(method, Protected) and method.distributed:
            return {"sum": Sum(method.change(state, down, upload, client))}
        return method.contribution(state, upload, client)

    contribution = contribution_at(server)
    shifted_server = tree.map_leaves(lambda t: t + 1 if t.is_floating_point() else t, server)
    if not tree.equal(_to_tree(contribution), _to_tree(contribution_at(shifted_server))):
        raise TaskError(
            f"run.secure: what a client of {method.title} contributes depends on the server's state, which clients do "
            "not know; set run.secure.on = false"
        )
    return contribution


def count_numbers(contribution: Any) -> int:
    """Count the numbers in the vector of a contribution of this form."""
    weights = sum(not isinstance(leaf, Sum) for _, leaf in contribution_leaves(contribution))
    return weights + sum(
        t.numel() for _, leaf in contribution_leaves(contribution) for t in tree.tensors(leaf.value)
    )


def make_zero_contribution(method: AnyMethod, server: Any, upload: Any, client: ClientInfo) -> Contribution:
    """Make a contribution whose tensors are zero, as the form of what clients contribute.

    Args:
        method: method of the run.
        server: state of the server.
        upload: form of an upload, see :class:`..validation.upload_forms.Template`.
        client: any client.

    Raises:
        ConfigError: if the form of an upload depends on the client's data.
    """
    try:
        contribution = method.contribution(server, upload, client)
    except (TypeError, AttributeError, LookupError, RuntimeError) as error:
        raise ConfigError(
            f"run.secure: {method.title} has no secure sum over a network, because the form of what its clients send "
            "depends on their data; set run.secure.on = false"
        ) from error
    zero: Contribution = map_contributions(
        lambda _, leaf: type(leaf)(tree.zeros_like(leaf.value)), contribution
    )
    return zero


def check_reads_no_examples(method: AnyMethod, zero_contribution: Any, server: Any, view: ServerView) -> None:
    """Check that a server's update does not need the clients' numbers of examples, which stay with them.

    The updates from one total are compared for two lists of numbers.

    Args:
        method: method of the run.
        zero_contribution: contribution of zeros.
        server: state of the server.
        view: view in which all clients replied.

    Raises:
        TaskError: if the updates differ.
    """
    total = map_contributions(lambda _, leaf: tree.map_leaves(torch.ones_like, leaf.value), zero_contribution)
    views = [
        replace(view, replied=[replace(c, example_count=n * (i + 1)) for i, c in enumerate(view.replied)])
        for n in (1, 7)
    ]
    views.append(replace(view, replied=[replace(c, example_count=1) for c in view.replied]))
    first_update, *updates = (method.server_update(server, total, variant) for variant in views)
    if not all(tree.equal(first_update, update) for update in updates):
        raise TaskError(
            f"run.secure: the server of {method.title} computes with each client's number of examples, which clients do "
            "not tell it under secure sums; set run.secure.on = false"
        )


def _to_tree(contribution: Any) -> dict[str, Any]:
    """Convert a contribution to a tree."""
    return {
        path: {"value": leaf.value, "weight": torch.tensor(getattr(leaf, "weight", 1.0), dtype=torch.float64)}
        for path, leaf in contribution_leaves(contribution)
    }
