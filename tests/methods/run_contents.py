"""What tests read from a run: data, the order of examples, states, downloads, personal models, predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedlowrank.core.contract import ClientInfo
from fedlowrank.core.contract.training_request import Request
from fedlowrank.data.federation import Federation
from fedlowrank.engines.engine import client_key, client_view
from fedlowrank.results.evaluation.local_model import make_local_model
from fedlowrank.rounds.run import Run
from fedlowrank.training.local_data import LocalData
from tests.support.method_calls import personal, predictor, predictors

from .comparisons import to_layers
from .setting import LR, SIZES


def list_batches(run: Run, round: int, info: ClientInfo) -> list[list[np.ndarray]]:
    """List the indices of the examples of every step of every pass."""
    method, federation = run.method, run.federation
    local = LocalData(
        info, federation.clients[info.id].train, method.passes(), client_key(federation, info.id, round)
    )
    return [[i.numpy() for i in local.order(name)] for name in method.passes()]


def plan_rounds(run: Run) -> list[dict[int, list[list[np.ndarray]]]]:
    """List what a reference needs to know of a run: who takes part in a round and in which order it sees its
    examples."""
    return [{i.id: list_batches(run, t, i) for i in run.participants(t)} for t in range(run.settings.rounds)]


def get_train_data(federation: Federation) -> list[tuple[np.ndarray, np.ndarray]]:
    """Get the inputs and labels that each client trains on."""
    return [(c.train.x.double().numpy(), c.train.y.numpy()) for c in federation.clients]


def get_initial_networks(federation: Federation) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Get the initial network of each client."""
    return [to_layers(federation.architectures[i.architecture].initial) for i in federation.infos]


def get_reference_inputs(run: Run) -> tuple[Any, ...]:
    """Get the initial network, the number of clients, their data, the order of examples and the rate."""
    federation = run.federation
    return get_initial_networks(federation)[0], len(SIZES), get_train_data(federation), plan_rounds(run), LR


def make_view(run: Run, client: int, round: int | None = None, trainer: Any = None) -> Any:
    """Make what the method of a client sees in a round, the next one by default."""
    info, t = run.federation.infos[client], run.round if round is None else round
    trainer = trainer or run.engine.trainer(run.method, run.federation, t, info)
    return client_view(run.federation, run.task, info, t, trainer)


def get_state(run: Run, client: int) -> Any:
    """Get the state of a client after the rounds that were."""
    return run.state_of(run.federation.infos[client])


def get_download(run: Run, client: int) -> Any:
    """Get what a client would receive in the next round."""
    return run.method.download(run.state.server, run.federation.infos[client])


def get_client_inputs(run: Run, client: int) -> tuple[Any, Any, Any]:
    """Get the state, the download and the view of a client after the rounds that were."""
    return get_state(run, client), get_download(run, client), make_view(run, client)


def get_upload(run: Run, client: int) -> Any:
    """Train a client once more, and get what it would send."""
    return run.method.local_update(*get_client_inputs(run, client))[1]


def get_client_states(run: Run) -> list[Any]:
    """Get the state of every client, in order; all have taken part at least once, or the test would not see
    them."""
    assert sorted(run.state.clients) == list(range(len(SIZES)))
    assert all(len(r) == 3 for r in plan_rounds(run))
    return [run.state.clients[k] for k in range(len(SIZES))]


def get_personal_parameters(run: Run, client: int, round: int | None = None) -> Any:
    """Get the parameters of a client's whole model."""
    return personal(
        run.method, get_state(run, client), get_download(run, client), make_view(run, client, round)
    )


def get_predictor(run: Run, client: int) -> Any:
    """Get how a client predicts, by its headline series."""
    return predictor(run.method, *get_client_inputs(run, client))


def get_personal_model_and_predictors(run: Run, client: int) -> tuple[Any, Any]:
    """Get the personal model of a client, and how it predicts: by series if there are several."""
    of = get_client_inputs(run, client)
    made = predictors(run.method, *of)
    return personal(run.method, *of), made if len(made) > 1 else made["personal"]


def load_predictors(run: Run, client: int) -> Any:
    """Load how a client predicts, by series, as an evaluation does."""
    with torch.inference_mode():
        return make_local_model(
            run.method,
            run.federation,
            run.task,
            run.engine,
            get_state(run, client),
            run.federation.infos[client],
            run.round,
            server=run.state.server,
        ).predictors


class SpyTrainer:
    """A trainer that records each request and its result."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.seen: list[tuple[Request, Any]] = []

    def train(self, request: Request) -> Any:
        """Train, and record the request with the result."""
        end = self.trainer.train(request)
        self.seen.append((request, end))
        return end
