"""Finds the one model by which a client infers, for programs that take a single model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...core.contract import ClientInfo
from ...core.errors import ConfigError
from ...core.tree import Params
from ...results.evaluation.local_model import LocalModel

if TYPE_CHECKING:
    from ...rounds.run import Run

logger = logging.getLogger(__name__)


def find_client_model(run: Run, info: ClientInfo) -> Params:
    """Find the parameters of the one model by which a client infers.

    Args:
        run: run in its current state.
        info: record of the client.

    Raises:
        ConfigError: if the client infers by a mixture of several models (FedEM; Ensemble with ``mix = "outputs"``).
    """
    model = run.local_model(info)
    if not infers_by_one_model(run, info, model):
        raise ConfigError(
            f"{_describe_mixture(run, info, model)}, and no single model gives the same scores. Use a method that infers by "
            "one model, such as IFCA or Ensemble with mix = 'weights', or FedProto with inference = 'classifier'; or "
            "Result.predict(client) in Python, which gives these scores"
        )
    return model.personal()


def find_single_models(
    run: Run, infos: Sequence[ClientInfo], output: str
) -> Iterator[tuple[ClientInfo, Params]]:
    """Find the models of clients one after another; clients that infer by a mixture are left out with a warning.

    Args:
        run: run in its current state.
        infos: records of the clients.
        output: what the models are for, such as ``"adapter"``, for the warning.
    """
    for info in infos:
        model = run.local_model(info)
        if infers_by_one_model(run, info, model):
            yield info, model.personal()
        else:
            logger.warning("%s, so this client has no %s", _describe_mixture(run, info, model), output)


def infers_by_one_model(run: Run, info: ClientInfo, model: LocalModel) -> bool:
    """Whether the parameters of a client's whole model give the scores of its inference.

    Args:
        run: run that the model belongs to.
        info: record of the client.
        model: model of the client in its current state.
    """
    x = run.federation.clients[info.id].train.x
    # one text, because scores are as many as its tokens times the vocabulary
    return model.is_one_model(
        {name: values[:1] for name, values in x.items()} if isinstance(x, dict) else x[:1]
    )


def _describe_mixture(run: Run, info: ClientInfo, model: LocalModel) -> str:
    kind = (
        "more than its model's scores" if model.routes is None else f"a mixture of {len(model.routes)} models"
    )
    return f"{run.method.title} infers by {kind} at {info.title}"
