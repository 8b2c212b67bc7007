"""Computes the reference of DPO once before training: log-probabilities of responses under the initial model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...core.learning.preference_losses import REFERENCE
from ...data.dataset import ClientData, Examples
from ...models.architecture import Architecture
from ...training.local_data import chunk_size, gather


def add_reference(
    clients: Sequence[ClientData], model: Architecture, device: str = "cpu"
) -> list[ClientData]:
    """Add the input ``reference`` ``[n, 2]`` to examples of pairs: log π_ref(y|x) of both responses.

    π_ref is the model from which training starts: the base, with the adapter of ``lora.start`` if there is one (initial
    factors do not change the outputs). So memory for a second model is not needed. Log-probabilities are summed over
    the tokens of the response that count.

    Args:
        clients: data with examples of :func:`.preference_pairs.make_pairs`.
        model: initial model, which scores pairs by :func:`.preference_pairs.score_pairs`.
        device: device of the computation; a device other than the CPU gets a copy of the model.
    """
    # the copy leaves the experiment's model on the CPU
    model = model if device == "cpu" else model.to(device)
    with torch.inference_mode():
        return [
            replace(
                data,
                train=_score_reference(data.train, model, device),
                val=_score_reference(data.val, model, device),
                test=_score_reference(data.test, model, device),
            )
            for data in clients
        ]


def _score_reference(examples: Examples, model: Architecture, device: str) -> Examples:
    assert isinstance(examples.x, dict)
    zeros = torch.zeros(len(examples), 2)
    pairs = Examples({**examples.x, REFERENCE: zeros}, examples.y)
    size = chunk_size(examples, model.vocabulary)
    log_probabilities: list[Tensor] = [zeros[:0]]
    for rows in torch.arange(len(examples)).split(size) if len(examples) else ():
        x = gather(pairs, rows).x
        log_probabilities.append(model.apply({}, {name: t.to(device) for name, t in x.items()}).float().cpu())
    # clone outside of inference mode, because an inference tensor cannot be used in training
    with torch.inference_mode(False):
        return Examples({**examples.x, REFERENCE: torch.cat(log_probabilities).clone()}, examples.y)
