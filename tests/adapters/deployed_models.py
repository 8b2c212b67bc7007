"""Models, weights and the dense truth for the tests of deployment."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedlowrank.adapters.thin_layers import CompressedLayer
from fedlowrank.core.key import Key
from fedlowrank.core.tree import Params
from fedlowrank.linalg.matricize import LowRank, Weights
from fedlowrank.models.architecture import build_module
from fedlowrank.models.zoo import ModelSettings

LAYOUTS = ("small", "fast")

IMAGE = (3, 32, 32)


def zoo(name: str) -> nn.Module:
    return build_module(ModelSettings((name,)).factories(IMAGE, 10)[name], Key((0,)))


def dense_of(w: Tensor | LowRank, shape: torch.Size) -> Tensor:
    """Scheme 2 by indices: entry (o, i, k1, k2) is row o·K1 + k1 of ``left`` times column i·K2 + k2 of ``right``."""
    if not isinstance(w, LowRank):
        return w
    o, i, k1, k2 = (*shape, 1, 1)[:4]
    left, right = w.left.reshape(o, k1, w.rank), w.right.reshape(w.rank, i, k2)
    return torch.einsum("oar,rib->oiab", left, right).reshape(shape)


def truth(module: nn.Module, weights: Weights, sparse: Params | None, x: Tensor) -> Tensor:
    params = {}
    for n, p in module.named_parameters():
        params[n] = dense_of(weights[n], p.shape) + (sparse or {}).get(n, 0)
    with torch.no_grad():
        out: Tensor = functional_call(module.eval(), params, (x,))
    return out


def draw(
    shape: tuple[int, ...], rank: int, g: torch.Generator, dtype: torch.dtype = torch.float64
) -> LowRank:
    rows = shape[0] * (*shape, 1, 1)[2]
    columns = math.prod(shape) // rows
    left = torch.randn(rows, rank, generator=g, dtype=dtype)
    return LowRank(left, torch.randn(rank, columns, generator=g, dtype=dtype) / max(1, rank * columns) ** 0.5)


def spread(
    shape: tuple[int, ...], density: float, g: torch.Generator, dtype: torch.dtype = torch.float64
) -> Tensor:
    p = torch.randn(shape, generator=g, dtype=dtype) * 0.1
    return torch.where(torch.rand(shape, generator=g) < density, p, 0.0)


def mixture(module: nn.Module, share: float, density: float, seed: int = 0) -> tuple[Weights, Params]:
    """Factors of every matrix at that share of the largest rank that pays, other parameters anew; and a
    sparse part."""
    g = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for n, p in module.named_parameters():
        weights[n] = torch.randn(p.shape, generator=g, dtype=p.dtype) * 0.1 + 0.5
        if p.ndim >= 2:
            rows = p.shape[0] * (*p.shape, 1, 1)[2]
            weights[n] = draw((*p.shape,), int(share * p.numel() / (rows + p.numel() / rows)), g, p.dtype)
    return weights, {n: spread((*p.shape,), density, g, p.dtype) for n, p in module.named_parameters()}


def compressed(module: nn.Module) -> dict[str, CompressedLayer]:
    return {n: m for n, m in module.named_modules() if isinstance(m, CompressedLayer)}


class Odd(nn.Module):
    """Whatever is no plain layer, or is used in more than one way."""

    def __init__(self) -> None:
        super().__init__()

        class Scaled(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return 3 * super().forward(x)

        self.embedding = nn.Embedding(30, 12)
        self.table = nn.Parameter(torch.randn(12, 12))
        self.scaled = Scaled(12, 12)
        self.transposed = nn.ConvTranspose1d(12, 12, 3, padding=1)
        self.twice = nn.Linear(12, 12)
        self.again = self.twice
        self.weight = nn.Linear(12, 12)
        self.parts = nn.ModuleDict(
            {"left": nn.Linear(12, 12), "a/b~c é": nn.Linear(12, 12), "weight": nn.Linear(12, 12)}
        )
        self.hooked = nn.Linear(12, 12)
        self.hooked.register_forward_hook(_double)
        self.head = nn.Linear(12, 30)
        self.head.weight = self.embedding.weight
        self.unregistered = [self.parts["left"]]
        self.register_buffer("shift", torch.ones(12))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.scaled(self.embedding(x) @ self.table) + self.shift
        y = self.transposed(y.mT).mT
        y = self.weight(self.again(torch.tanh(self.twice(y))))
        for layer in (self.parts["a/b~c é"], self.parts["weight"], *self.unregistered, self.hooked):
            y = torch.tanh(layer(y))
        scores: Tensor = self.head(y)
        return scores


def _double(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return 2 * out


def odd(seed: int = 0) -> nn.Module:
    return build_module(Odd, Key((seed,))).double()
