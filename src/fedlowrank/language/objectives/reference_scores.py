"""Log-probabilities of responses under the model at the start, the reference of DPO; found once, before any training."""

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
    """Examples of pairs with an input ``reference`` ``[n, 2]``: log π_ref(y|x) of both responses.

    π_ref is the model that training starts from: the base, with the adapter of ``lora.start`` if there is one (a fresh
    adapter changes nothing). So no second model is held. Log-probabilities are summed over the tokens of the response that
    count.

    Args:
        clients: with examples of :func:`.preference_pairs.make_pairs`.
        model: of the start, which scores pairs by :func:`.preference_pairs.score_pairs`.
        device: on which they are found, by a copy of the model where it is not on the CPU.
    """
    # a run moves its models likewise, and leaves those of the experiment where they are
    model = model if device == "cpu" else model.to(device)
    with torch.inference_mode():
        return [
            replace(
                data,
                train=_with_reference(data.train, model, device),
                val=_with_reference(data.val, model, device),
                test=_with_reference(data.test, model, device),
            )
            for data in clients
        ]


def _with_reference(examples: Examples, model: Architecture, device: str) -> Examples:
    assert isinstance(examples.x, dict)
    nothing = torch.zeros(len(examples), 2)
    pairs = Examples({**examples.x, REFERENCE: nothing}, examples.y)
    size = chunk_size(examples, model.vocabulary)
    parts: list[Tensor] = [nothing[:0]]
    for places in torch.arange(len(examples)).split(size) if len(examples) else ():
        x = gather(pairs, places).x
        parts.append(model.apply({}, {name: t.to(device) for name, t in x.items()}).float().cpu())
    # a plain tensor, for one of inference mode cannot be trained on
    with torch.inference_mode(False):
        return Examples({**examples.x, REFERENCE: torch.cat(parts).clone()}, examples.y)
