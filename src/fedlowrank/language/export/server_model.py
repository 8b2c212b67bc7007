"""Finds the model of a run's server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core import tree
from ...core.tree import Params
from .client_models import infers_by_one_model

if TYPE_CHECKING:
    from ...rounds.run import Run


def find_server_model(run: Run) -> Params | None:
    """Find the model of a run's server.

    If the method keeps a model at the server (FedHL), it is that model; otherwise it is the model that all clients
    share (FedIT).

    Args:
        run: run in its current state.

    Returns:
        Parameters of the server's model, or None if the models of clients differ (FedSA-LoRA), if clients infer by
        mixtures of models (FedEM), or if there is a single client, whose model may differ from the server's.
    """
    first_client, *other_clients = run.federation.infos
    first_model = run.local_model(first_client)
    if first_model.server is not None:
        return first_model.server
    if not other_clients or not infers_by_one_model(run, first_client, first_model):
        return None
    shared_params = first_model.personal()
    for info in other_clients:
        model = run.local_model(info)
        if not (
            tree.have_equal_tensors(shared_params, model.personal()) and infers_by_one_model(run, info, model)
        ):
            return None
    return shared_params
