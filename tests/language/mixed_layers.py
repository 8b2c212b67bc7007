"""A module with a layer of every kind that PEFT adapts, and factors for it."""

from __future__ import annotations

import torch
from torch import nn

from fedlowrank.adapters.lora.lora_factors import find_lora
from fedlowrank.linalg.pair import Pair

EVERY_LAYER = {"r": 2, "lora_alpha": 2, "target_modules": ["line", "seen", "image", "turned"]}


class MixedLayers(nn.Module):
    """One layer of every kind; none is square."""

    def __init__(self):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        draw = torch.Generator().manual_seed(0)
        self.seen = nn.Embedding(11, 6)
        self.turned = Conv1D(5, 6)
        self.line = nn.Linear(5, 7)
        self.image = nn.Conv2d(2, 4, (2, 3), stride=2, padding=1)
        self.classifier = nn.Linear(4, 3)
        for p in self.parameters():
            nn.init.normal_(p, generator=draw)

    def forward(self, x):
        y = self.line(self.turned(self.seen(x)))
        return self.classifier(self.image(torch.stack([y, y.cos()], 1)).flatten(2).sum(-1))


def find_layers(model):
    return find_lora(model, None).layers


def convert_to_parameters(where, factors):
    return {n: t for name, pair in factors.items() for n, t in where[name].as_parameters(pair).items()}


def set_scale(model, scale):
    for module in model.modules():
        if hasattr(module, "base_layer"):
            module.scaling["default"] = scale


def draw_factors(where, rank, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {
        n: Pair(torch.randn(w.shape[0], rank, generator=draw), torch.randn(rank, w.shape[1], generator=draw))
        for n, w in where.items()
    }


def build_with_updates(factors, scale):
    """A module whose own weights have the updates added, each in the shape of its weight."""
    made = MixedLayers()
    with torch.no_grad():
        made.line.weight += scale * factors["line"].dense()
        made.seen.weight += scale * factors["seen"].dense().T
        made.turned.weight += scale * factors["turned"].dense().T
        made.image.weight += scale * factors["image"].dense().reshape(made.image.weight.shape)
    return made


INPUTS = torch.arange(10).reshape(2, 5)
