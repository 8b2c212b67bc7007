"""The model of a run's server, also where it is the one that all clients are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...core.tree import Params

if TYPE_CHECKING:
    from ...rounds.run import Run


def find_server_model(run: Run) -> Params | None:
    """Find the model of a run's server.

    It is the server's own, if the method has one (FedHL), or else the one model that all clients have (FedIT).

    Args:
        run: as it stands.

    Returns:
        Its parameters; None if clients have models of their own alone (FedSA-LoRA), or there is a single client, whose
        model need not be the server's.
    """
    first, *others = run.federation.infos
    found = run.local_model(first)
    if found.server is not None:
        return found.server
    shared = found.personal()
    if others and all(_are_equal(shared, run.personal(info)) for info in others):
        return shared
    return None


def _are_equal(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())
