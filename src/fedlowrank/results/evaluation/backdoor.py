"""Measures the success of a backdoor attack."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ...core.contract import ClientInfo
from ...data.federation import Federation
from ...trust.attacks import with_trigger
from ...trust.trust_settings import Attack
from .local_model import LocalModel
from .pools import make_pool
from .scoring import measure_predictor


def backdoor_success(
    federation: Federation,
    clients: Iterable[ClientInfo],
    attack: Attack,
    value: float | None,
    model_of: Callable[[ClientInfo], LocalModel],
) -> float | None:
    """Compute the share of test examples of other classes that models assign to the target class given the trigger.

    Args:
        federation: federation that holds the examples.
        clients: records of the clients whose models are tested, commonly the honest ones.
        attack: settings of the attack, which name the target class.
        value: pixel value of the trigger, see :func:`~fedlowrank.trust.attacks.trigger_value`.
        model_of: function that maps a client to its model.

    Returns:
        The mean over the clients that have such examples; None if there are none, or if the scores of the models have a
        form that only a loss of the user's own understands.
    """
    rates: list[float] = []
    for info in clients:
        triggered_examples = with_trigger(
            federation.clients[info.id].test, attack, value=value, ignored=federation.loss.ignore_index
        )
        if not len(triggered_examples):
            continue
        model = model_of(info)
        predict = next(iter(model.predictors.values()))
        with torch.inference_mode(), model.fixed_generators(triggered_examples.y.device):
            pool = make_pool(model.model, [triggered_examples], federation.loss, len(federation.classes))
            rate = measure_predictor(predict, pool).accuracy[0]
        if rate is not None:
            rates.append(rate)
    return sum(rates) / len(rates) if rates else None
