"""Test representations of clients' models, for the embedding plot of the report."""

from __future__ import annotations

import torch
from torch import Tensor

from ...models.coupling import mixes_examples
from ..run import Run


def compute_representations(run: Run, limit: int) -> dict[str, Tensor]:
    """Compute representations of about ``limit`` test examples, evenly from all clients, by each client's own model.

    Returns:
        Tensors ``x [n, d]``, ``label [n]`` (real targets ``[n, d]``) and ``client [n]``; empty if the models have no
        head to split from, or if labels belong to pixels or tokens.
    """
    federation = run.federation
    first_examples = federation.clients[0].train
    has_heads = all(a.head_name is not None for a in federation.architectures.values())
    if limit < 1 or not has_heads or first_examples.is_dense or first_examples.y.ndim > 2:
        return {}
    share = max(1, limit // len(federation.clients))
    x, label, client = [], [], []
    for info, data in zip(federation.infos, federation.clients, strict=True):
        if not len(data.test):
            continue
        local_model = run.local_model(info)
        params = local_model.personal()
        model = federation.architectures[info.architecture]
        examples = data.test.take(torch.arange(min(share, len(data.test))))
        batch = data.test if mixes_examples(model) else examples
        with torch.inference_mode(), local_model.fixed_generators(examples.y.device):
            x.append(model.represent(params, batch.x)[: len(examples)].cpu().flatten(1).clone())
        label.append(examples.y.cpu())
        client.append(torch.full((len(examples),), info.id))
    if len({t.shape[1] for t in x}) != 1:
        return {}
    return {"x": torch.cat(x).contiguous(), "label": torch.cat(label), "client": torch.cat(client)}
