"""Networks that FLoRAL adapts in these tests, and values for their parameters."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedlowrank import Floral
from fedlowrank.adapters.mixtures.mixture import (
    Construction,
)
from fedlowrank.core.key import Key

REAL = torch.float64


TOLERANCES = {"rtol": 1e-10, "atol": 1e-10}


def draw_normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=REAL)


def draw_parameters(model: Floral, scale: float = 0.3) -> Floral:
    with torch.no_grad():
        for i, p in enumerate([*model.adaptors.parameters(), model.theta]):
            p.copy_(scale * draw_normal(*p.shape, seed=i))
    return model


def build_network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(24, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 3)]
        return nn.Sequential(*layers).double()


class AttributeOutput(OrderedDict[str, Any]):
    """Like the outputs of Hugging Face: a dict whose entries are attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class TiedLanguageModel(nn.Module):
    """Embedding and output layer share their weight, one block is used twice, arguments go by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.block = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 9, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, *, labels: Tensor | None = None) -> AttributeOutput:
        h = torch.tanh(self.block(torch.tanh(self.block(self.embed(input_ids)))))
        logits = self.lm_head(h)
        loss = None if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return AttributeOutput(loss=loss, logits=logits, hidden=(h,))


KEY = Key((0,))


CONSTRUCTIONS: tuple[Construction, ...] = ("balanced", "filter", "channel", "reshaped", "input")
