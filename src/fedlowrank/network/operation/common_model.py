"""Finds the model that the server of a run over a network can write: its own, or the one that all clients use."""

from __future__ import annotations

from typing import Any

import torch

from ...core import tree
from ...core.contract.hook_results import check_client_model
from ...core.tree import Params
from ...engines.engine import client_view
from ...results.evaluation.local_model import LocalModel
from ...training.hook_calls import init_client_state
from ..network_run import NetworkRun


class _ExamplesNeededError(Exception):
    """A method asks for a client's examples, which are not at the server."""


class _NoExamples:
    """The trainer of a client whose examples are elsewhere.

    Implements :class:`fedlowrank.core.contract.training_request.Trainer`.
    """

    def _refuse(self, *_: Any) -> Any:
        raise _ExamplesNeededError

    train = sum_over_data = steps = _refuse


def find_common_model(run: NetworkRun) -> Params | None:
    """Find the model of the server if the method keeps one (FedHL), otherwise the model that all clients use (FedIT).

    The server has neither the states nor the examples of clients. A model is that of all clients if it needs no examples and
    is the same for all clients, for initial states as for other values in them.

    Args:
        run: run over a network in its current state.

    Returns:
        Parameters of the model, or None if clients have models of their own (FedSA-LoRA, FLoRAL) or infer by mixtures (FedEM).
    """
    try:
        return _find_model(run)
    except _ExamplesNeededError:
        return None


def _find_model(run: NetworkRun) -> Params | None:
    method, task, server, t = run.method, run.task, run.state.server, max(run.round - 1, 0)
    common_params: Params | None = None
    for info in run.federation.infos:
        view = client_view(run.federation, task, info, t, _NoExamples())
        initial_state = init_client_state(method, task, info)
        params = method.server_model(server, initial_state, view)
        if params is not None:
            return dict(params)
        down = method.download(server, info)
        for state in (initial_state, tree.map_leaves(_shift, initial_state)):
            client_model = check_client_model(method, method.client_model(state, down, view))
            model = LocalModel(client_model, task.model(info), view.key)
            if not model.is_one_model(model.model.example):
                return None
            params = client_model.whole()
            if common_params is None:
                common_params = params
            elif not tree.have_equal_tensors(common_params, params):
                return None
    return common_params


def _shift(t: torch.Tensor) -> torch.Tensor:
    return t + 1 if t.is_floating_point() else t
