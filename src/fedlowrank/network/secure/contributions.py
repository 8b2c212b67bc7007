"""Encodes the contributions of clients as integers modulo 2^64, which a secure sum adds."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from ...core import tree
from ...core.contract import AnyMethod, ClientInfo, ServerView, Sum
from ...core.contract.contribution import contribution_leaves, map_contributions
from ...core.errors import ConfigError, TaskError
from ...trust.protection import Protected
from ...trust.secure_sums import FixedPoint, Vector, align
from ...trust.trust_settings import SecureSums
from .distributed_noise import DistributedNoise

logger = logging.getLogger(__name__)

MAX_WEIGHT = 2.0**20
"""Weight of a client in a mean, known to all before the first round; a client with more examples counts so much."""


def make_grid(settings: SecureSums, client_count: int) -> FixedPoint:
    """The grid of the numbers that so many clients add up."""
    return FixedPoint(settings, client_count, MAX_WEIGHT)


def encode_contribution(contribution: Any, grid: FixedPoint, noise: DistributedNoise | None) -> Vector:
    """A client's contribution as a vector ``[size]``, values clipped to ±bound and rounded to the grid.

    Args:
        contribution: as :func:`compute_contribution` makes it.
        grid: of the numbers.
        noise: the client's part of central noise; None without.

    Raises:
        TaskError: if the server must see a part of it by itself.
        ConfigError: if the grid is too coarse for the noise.
    """
    if noise is not None:
        return noise.vector(contribution["sum"].value)
    vector, clip_count = grid.encode(align(contribution, contribution))
    if clip_count:
        logger.warning(
            "secure sums: %d of the numbers that this client adds are above secure.bound = %g and were clipped, so that the "
            "server's model is not the mean of what clients trained. The experiment of all should raise secure.bound",
            clip_count,
            grid.bound,
        )
    return vector


def compute_contribution(method: AnyMethod, server: Any, down: Any, upload: Any, client: ClientInfo) -> Any:
    """What a client contributes. It does not know the server's state, of which the form alone may matter.

    Args:
        method: of the run.
        server: a state of the server, such as the first one.
        down: what the client was sent.
        upload: of the client.
        client: itself.

    Raises:
        TaskError: if the contribution at another state of the server, whose numbers differ, is another one.
    """

    def contribution_at(state: Any) -> Any:
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
    """Numbers in the vector of a contribution of that form."""
    weights = sum(not isinstance(leaf, Sum) for _, leaf in contribution_leaves(contribution))
    return weights + sum(
        t.numel() for _, leaf in contribution_leaves(contribution) for t in tree.tensors(leaf.value)
    )


def make_zero_contribution(method: AnyMethod, server: Any, upload: Any, client: ClientInfo) -> Any:
    """The form of what clients contribute: a contribution whose tensors are zero.

    Args:
        method: of the run.
        server: state of the server.
        upload: the form of an upload, see :class:`..validation.upload_forms.Template`.
        client: any one.

    Raises:
        ConfigError: if the form of an upload depends on the client's data.
    """
    try:
        contribution = method.contribution(server, upload, client)
    except (TypeError, AttributeError, LookupError, RuntimeError) as error:
        raise ConfigError(
            f"run.secure: {method.title} has no sum over a network, for the form of what its clients send depends on "
            f"their data ({error}); set run.secure.on = false"
        ) from error
    return map_contributions(lambda _, leaf: type(leaf)(tree.zeros_like(leaf.value)), contribution)


def check_reads_no_examples(method: AnyMethod, zero_contribution: Any, server: Any, view: ServerView) -> None:
    """Check that a server's update can be made without the clients' numbers of examples, which stay with them.

    The updates by one total are compared for two lists of numbers.

    Args:
        method: of the run.
        zero_contribution: a contribution of zeros.
        server: state of the server.
        view: with all clients as those that replied.

    Raises:
        TaskError: if they differ.
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
    """A contribution as a tree."""
    return {
        path: {"value": leaf.value, "weight": torch.tensor(getattr(leaf, "weight", 1.0), dtype=torch.float64)}
        for path, leaf in contribution_leaves(contribution)
    }
